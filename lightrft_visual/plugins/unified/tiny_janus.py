"""The embedded model that sees and draws: a tiny Janus, warmed up on the embedded questions and captions, cached.

First its VQ model learns to code drawn shapes. Then the language model learns descriptions of scenes, which teach it to
see (`descriptions.py`), answers to questions about scenes, as the other embedded models do (`warmup.py`), and the codes
of drawn shapes at one of four places. As in captions that come from the web, a share of the colours, shapes and places
is wrong, from the first step to the last: a base that draws clean shapes but often not the ones asked for, and answers
some of the questions. A share of the answers is wrong too, without which some bases never say a word of a kind: RL then
has nothing to reward there. Both are for RL to improve. A share of the drawings has no caption, for classifier-free
guidance.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, PreTrainedModel

from ...experience.rollouts import ScoringRule
from ...experience.types import ModelInputs, pad_rollouts
from ...experience.vision import VisionTensors
from ...models.tiny.vlm import JANUS_DRAWN, build_tiny_checkpoint
from ...models.vlm.actor import Actor
from ...observe.console import RunConsole
from ...runtime.files import cache_folder
from ..embedded import questions
from ..embedded.cached import built_once, key_of
from ..embedded.drawn_shapes import COLOURS, PLACES, SHAPES, ShapeCaption, placed_captions, random_images
from ..embedded.questions import vocabulary_texts
from ..embedded.task import EmbeddedTask, SupervisedPair, supervised_pairs
from ..embedded.warmup import PairEncoder, embedded_task
from . import descriptions

T = torch.Tensor
REPORT_EVERY = 50  # steps between two lines of progress


@dataclass(frozen=True)
class UnifiedWarmUp:
    """What the warm-up of the embedded Janus does; all of it names the cache folder.

    variety: of the images, see `random_images`. vq_plain_share: of the VQ model's steps without codes. images: drawn
    and coded once. wrong_colour, wrong_shape, wrong_place: shares of their captions in which this word is drawn anew;
    no_caption: share of those without any. descriptions: scenes on disk that are described; their loss counts in the
    first described_steps. wrong_answer: share of the questions whose answer is that of another one of their label, so
    that every word is tried. question_share: weight of the questions' loss beside the drawings'; it counts while it is
    above until_question_loss (nats a token).
    """

    variety: float = 0.25
    vq_steps: int = 900
    vq_plain_share: float = 0.35
    vq_batch_size: int = 24
    vq_rate: float = 2e-3
    images: int = 4096
    steps: int = 600
    batch_size: int = 32
    learning_rate: float = 2e-3
    wrong_colour: float = 0.3
    wrong_shape: float = 0.3
    wrong_place: float = 0.3
    no_caption: float = 0.1
    descriptions: int = 2048
    described_steps: int = 150
    described_batch_size: int = 16
    wrong_answer: float = 0.3
    question_share: float = 1.0
    until_question_loss: float = 0.9
    tie_embeddings: bool = False
    seed: int = 0
    version: int = 6


def embedded_janus(settings: UnifiedWarmUp | None = None) -> Path:
    """The warmed-up checkpoint folder; built within four minutes on two cores when the cache does not hold it.

    settings: of the warm-up; default: those of `UnifiedWarmUp`.
    """
    settings, root = settings or UnifiedWarmUp(), cache_folder()
    versions = {"questions": questions.VERSION, "descriptions": descriptions.VERSION}
    key = key_of(asdict(settings) | versions)[:12]

    def build(folder: Path) -> None:
        build_tiny_checkpoint(
            folder, "janus", texts=vocabulary(), tie_embeddings=settings.tie_embeddings, seed=settings.seed
        )
        warm_up(folder, embedded_task(root), settings)

    told = "building the embedded model that sees and draws by supervised steps, once; takes up to four minutes"
    return built_once(root / "models" / f"janus-{key}", build, told)


def vocabulary() -> list[str]:
    """Texts that hold every word of questions, descriptions and captions."""
    return [*vocabulary_texts(), *descriptions.vocabulary_texts(), *(caption.text for caption in placed_captions())]


def warm_up(folder: Path, task: EmbeddedTask, settings: UnifiedWarmUp) -> tuple[list[float], list[dict[str, float]]]:
    """Train the checkpoint in a folder. Returns the errors of `_train_vq`, and each step's losses of drawings,
    descriptions and questions, in nats a token.

    Args:
        folder: of the checkpoint, which is saved back there.
        task: whose demonstrations are the questions; the described scenes are built beside it.
        settings: of the warm-up.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    errors = _train_vq(model.model.vqmodel, settings, generator)
    processor, tokenizer = AutoProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    actor = Actor(model, [], [])
    actor.backbone.stands_in = False
    drawings = Drawings(actor, tokenizer, settings, generator)
    encode, answered = PairEncoder(tokenizer, processor), supervised_pairs(task.demonstrations, seed=settings.seed)
    pairs = partly_wrong(answered, settings.wrong_answer, generator)
    scenes = descriptions.build_descriptions(task.folder.parent, settings.descriptions)
    described = supervised_pairs(scenes.demonstrations, seed=settings.seed)
    trained = [parameter for parameter in actor.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=settings.steps, pct_start=0.1
    )
    console = RunConsole(settings.steps, line_every=REPORT_EVERY, table_every=0, title="warm-up")
    recent, history = [math.inf], []
    for step in range(1, settings.steps + 1):
        loss = drawn = _loss(actor, drawings.batch(settings.batch_size))
        losses = {"drawing": drawn.item()}
        if step <= settings.described_steps:
            told = _loss(actor, encode.batch([next(described) for _ in range(settings.described_batch_size)]))
            losses["descriptions"] = told.item()
            loss = loss + told
        known = sum(recent) / len(recent) < settings.until_question_loss
        if not known or step % 3 == 0:
            with torch.set_grad_enabled(not known):  # where they are known well enough it is only looked at
                seen = _loss(actor, encode.batch([next(pairs) for _ in range(settings.batch_size)]))
            recent = [*recent[-9:], seen.item()]
            losses["questions"] = seen.item()
            loss = loss if known else loss + settings.question_share * seen
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        history.append(losses)
        console.step(step, losses)
    console.close()
    model.save_pretrained(folder)
    return errors, history


def partly_wrong(pairs: Iterator[SupervisedPair], share: float, generator: torch.Generator) -> Iterator[SupervisedPair]:
    """The pairs, some of them with the answer of an earlier one of their label in place of their own.

    Args:
        pairs: with or without end.
        share: of those with an earlier one, 0 to 1.
        generator: by which they and the answers are chosen.
    """
    earlier: dict[str, list[str]] = defaultdict(list)
    for pair in pairs:
        answers = earlier[pair.kind]
        if answers and torch.rand((), generator=generator) < share:
            yield replace(pair, answer=answers[int(torch.randint(len(answers), (), generator=generator))])
        else:
            yield pair
        answers.append(pair.answer)


def _loss(actor: Actor, inputs: ModelInputs) -> T:
    """Nats a token."""
    output = actor(inputs, ScoringRule(), with_entropy=False)
    return -output.log_probs.sum() / inputs.action_mask.sum()


class Drawings:
    """Captions with the codes of images drawn for them, without end."""

    def __init__(self, actor: Actor, tokenizer, settings: UnifiedWarmUp, generator: torch.Generator):
        self.actor, self.tokenizer, self.settings = actor, tokenizer, settings
        self.rng = random.Random(settings.seed)
        pixels, self.shown = drawn(settings.images, settings, generator)
        self.codes = codes_of(actor.model.model.vqmodel, pixels) + actor.drawing.first
        self.prompts = {caption: self._prompt(caption.text) for caption in placed_captions()}

    def _prompt(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        turn = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer.encode(turn + self.tokenizer.boi_token, add_special_tokens=False)

    def _caption(self, shown: ShapeCaption) -> list[int]:
        settings, rng, asked = self.settings, self.rng, shown
        if rng.random() < settings.wrong_colour:
            asked = replace(asked, colour=rng.randrange(len(COLOURS)))
        if rng.random() < settings.wrong_shape:
            asked = replace(asked, shape=rng.randrange(len(SHAPES)))
        if rng.random() < settings.wrong_place:
            asked = replace(asked, place=rng.randrange(len(PLACES)))
        ids = self.prompts[asked]
        if rng.random() < settings.no_caption:
            return self.actor.drawing.without_prompt(torch.tensor(ids)).tolist()
        return ids

    def batch(self, size: int) -> ModelInputs:
        """Padded model inputs whose actions are drawn tokens."""
        chosen = [self.rng.randrange(len(self.codes)) for _ in range(size)]
        prompts = [self._caption(self.shown[index]) for index in chosen]
        codes = [self.codes[index].tolist() for index in chosen]
        padded = pad_rollouts(prompts, codes, self.tokenizer.pad_token_id)
        return ModelInputs(*padded, vision=VisionTensors([{}] * size))


def drawn(count: int, settings: UnifiedWarmUp, generator: torch.Generator) -> tuple[T, list[ShapeCaption]]:
    """Images (count, 3, side, side) in -1..1 of random captions, and these.

    Args:
        count: images.
        settings: for their variety.
        generator: by which captions and images are drawn.
    """
    kinds = [torch.randint(len(each), (count,), generator=generator) for each in (COLOURS, SHAPES, PLACES)]
    images = random_images(*kinds[:2], JANUS_DRAWN, generator, settings.variety, places=kinds[2])
    return images * 2 - 1, [ShapeCaption(*each) for each in zip(*(kind.tolist() for kind in kinds))]


@torch.no_grad()
def codes_of(vqmodel: PreTrainedModel, pixels: T) -> T:
    """(N, tokens) of images (N, 3, H, W) in -1..1."""
    parts = [vqmodel.encode(part).image_tokens.view(len(part), -1) for part in pixels.split(256)]
    return torch.cat(parts)


def _train_vq(vqmodel: PreTrainedModel, settings: UnifiedWarmUp, generator: torch.Generator) -> list[float]:
    """Supervised steps of the VQ model on drawn shapes; mean squared errors of its reconstructions, in -1..1.

    Codes lie on the unit sphere, as the stock decoder reads them, and follow the mean of what they stand for
    (exponential moving averages as in VQ-VAE, arXiv 1711.00937). Unused ones start again at an encoded patch. They come
    in when encoder and decoder know the images.
    """
    vqmodel.requires_grad_(True)
    book = vqmodel.quantize.embedding.weight
    book.requires_grad_(False)
    trained = [parameter for parameter in vqmodel.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.vq_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.vq_rate, total_steps=settings.vq_steps, pct_start=0.1
    )
    codes = _Codebook(book, generator)
    console = RunConsole(settings.vq_steps, line_every=REPORT_EVERY, table_every=0, title="VQ warm-up")
    losses: list[float] = []
    for step in range(settings.vq_steps):
        pixels, _ = drawn(settings.vq_batch_size, settings, generator)
        encoded = F.normalize(vqmodel.quant_conv(vqmodel.encoder(pixels)), dim=1)
        plain = step < settings.vq_plain_share * settings.vq_steps
        quantised = encoded if plain else codes.nearest(encoded)
        straight = encoded + (quantised - encoded).detach()
        made = vqmodel.decoder(vqmodel.post_quant_conv(straight))
        error = F.mse_loss(made, pixels)
        (error + 0.1 * F.mse_loss(encoded, quantised)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(error.item())
        console.step(step + 1, {"error": losses[-1]})
    console.close()
    vqmodel.requires_grad_(False)
    return losses


class _Codebook:
    """Unit vectors (K, D) in place, that follow what they are the nearest of."""

    DECAY, FEWEST = 0.9, 0.05  # of the averages; uses a step below which a code starts again

    def __init__(self, book: T, generator: torch.Generator):
        self.book, self.generator = book, generator
        book.copy_(F.normalize(book, dim=1))
        self.sums, self.uses = book.clone(), torch.zeros(len(book))

    @torch.no_grad()
    def nearest(self, encoded: T) -> T:
        """(B, D, h, w) quantised; the codes then take a step."""
        flat = encoded.detach().permute(0, 2, 3, 1).flatten(0, 2)
        index = (flat @ self.book.T).argmax(dim=1)
        quantised = self.book[index].view(encoded.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
        hits = F.one_hot(index, len(self.book)).float()
        self.uses.mul_(self.DECAY).add_(hits.sum(dim=0), alpha=1 - self.DECAY)
        self.sums.mul_(self.DECAY).add_(hits.T @ flat, alpha=1 - self.DECAY)
        unused = self.uses < self.FEWEST
        fresh = flat[torch.randint(len(flat), (len(self.book),), generator=self.generator)]
        self.sums[unused], self.uses[unused] = fresh[unused], 1.0
        self.book.copy_(F.normalize(self.sums, dim=1))
        return quantised.contiguous()
