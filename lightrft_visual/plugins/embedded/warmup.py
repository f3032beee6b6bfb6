"""The embedded default: a tiny checkpoint, warmed up by supervised steps on demonstrations, cached on disk.

The warm-up is a cold start and no more: right answers to questions of the demonstrations split, until the loss is down
to a bound. The base then knows the form of the answers and a part of the task; it is unsure of the rest, and has not
seen every combination of colour and shape. RL has the rest to teach, from rewards on questions of another split. The
bound is on the loss and not on the steps, because how soon it is reached depends on the last bits of a machine's
arithmetic.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from ...config.shared import EMBEDDED, EMBEDDED_REASONING
from ...data.media import load_image
from ...experience.rollouts import ScoringRule
from ...experience.types import ModelInputs, pad_rollouts
from ...experience.vision import VisionTensors
from ...models.tiny.vlm import TINY_FAMILIES, build_tiny_checkpoint
from ...models.vlm.actor import Actor
from ...models.vlm.families import family_of_processor
from ...observe.console import RunConsole
from ...runtime.files import cache_folder
from . import click, questions, reasoning, zoom
from .cached import built_once, key_of
from .task import EmbeddedTask, SupervisedPair, TaskSource, build_task, supervised_pairs

SOURCES = {
    EMBEDDED: questions.SOURCE,
    EMBEDDED_REASONING: reasoning.SOURCE,
    "embedded_zoom": zoom.SOURCE,
    "embedded_click": click.SOURCE,
}
CACHE_VERSION = 4
LOSS_WINDOW = 10  # steps whose mean loss is compared with the bound
RISING_STEPS = 40  # over which the learning rate comes up
REPORT_EVERY = 20  # steps between two lines of progress


@dataclass(frozen=True)
class WarmUp:
    """Settings of the warm-up; all of them name the cache folder.

    task: whose demonstrations. max_steps: the most steps; 0 leaves the model untrained. until_loss: nats a token; the
    steps end where the mean of the last `LOSS_WINDOW` losses is below it. per_response: short responses
    weigh as much as long ones.
    """

    task: str = EMBEDDED
    family: str = "qwen2_5_vl"
    tie_embeddings: bool = False
    max_steps: int = 300
    until_loss: float = 0.55
    per_response: bool = False
    batch_size: int = 32
    learning_rate: float = 1e-3
    seed: int = 0


def warm_up_of(task: str, **settings) -> WarmUp:
    """The warm-up of the base that belongs to a task, for data of one's own that of the questions; settings: other
    fields."""
    return WarmUp(task if task in SOURCES else EMBEDDED, **(source_of(task).warm_up | settings))


def embedded_task(root: Path | None = None, name: str = EMBEDDED) -> EmbeddedTask:
    """An embedded data set on disk, drawn at the first call."""
    return build_task(source_of(name), (root or cache_folder()) / "data")


def source_of(task: str) -> TaskSource:
    """How a task by prompt_data is drawn; the questions for data of one's own."""
    return SOURCES.get(task, questions.SOURCE)


def embedded_checkpoint(settings: WarmUp, root: Path | None = None) -> Path:
    """The warmed-up checkpoint folder; built within half a minute on two cores when the cache does not hold it.

    Args:
        settings: of the warm-up, by which the folder is named.
        root: of the cache; None: `cache_folder()`.
    """
    source = source_of(settings.task)
    key = key_of(asdict(settings) | {"version": CACHE_VERSION, "questions": source.version})[:12]
    root = root or cache_folder()

    def build(folder: Path) -> None:
        build_tiny_checkpoint(
            folder,
            settings.family,
            texts=source.vocabulary_texts(),
            tie_embeddings=settings.tie_embeddings,
            seed=settings.seed,
            tools=source.environment is not None,
        )
        if settings.max_steps:
            warm_up(folder, embedded_task(root, settings.task), settings)

    told = f"building the embedded {settings.family} model by supervised steps, once; takes less than a minute"
    return built_once(root / "models" / f"{settings.family}-{key}", build, told)


def warm_up(folder: Path, task: EmbeddedTask, settings: WarmUp) -> list[float]:
    """Supervised steps on a checkpoint. Returns the losses (nats a token) of all.

    Args:
        folder: of the checkpoint, which is saved back there.
        task: whose demonstrations are learnt.
        settings: of the steps, and what the checkpoint was built by.
    """
    vision = TINY_FAMILIES[settings.family].processor is not None
    auto = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder) if vision else None
    encode = PairEncoder(tokenizer, processor, source_of(settings.task).schemas())
    actor = Actor(model, [], [])
    optimizer = torch.optim.AdamW(actor.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)

    def step(pairs: list[SupervisedPair], rate: float) -> float:
        optimizer.param_groups[0]["lr"] = settings.learning_rate * rate
        inputs = encode.batch(pairs)
        output = actor(inputs, ScoringRule(), with_entropy=False)
        mask = inputs.action_mask
        each = -(output.log_probs * mask).sum(-1)
        loss = (each / mask.sum(-1)).mean() if settings.per_response else each.sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses: list[float] = []
    batches = _batches(task, settings, vision)
    console = RunConsole(settings.max_steps, line_every=REPORT_EVERY, table_every=0, title="warm-up")
    while len(losses) < settings.max_steps and not _below(losses, settings.until_loss):
        losses.append(step(next(batches), min(1.0, (len(losses) + 1) / RISING_STEPS)))
        console.step(len(losses), {"loss": losses[-1]})
    console.close()
    model.save_pretrained(folder)
    return losses


def _below(losses: list[float], bound: float) -> bool:
    return len(losses) >= LOSS_WINDOW and sum(losses[-LOSS_WINDOW:]) < bound * LOSS_WINDOW


def _batches(task: EmbeddedTask, settings: WarmUp, vision: bool) -> Iterator[list[SupervisedPair]]:
    pairs = supervised_pairs(task.demonstrations, seed=settings.seed)
    chosen = pairs if vision else (pair for pair in pairs if not pair.images)
    while True:
        yield list(islice(chosen, settings.batch_size))


class PairEncoder:
    """Turns supervised pairs into model inputs; each image goes through the image processor once.

    tools: schemas that the chat template shows.
    """

    def __init__(self, tokenizer, processor, tools: Sequence[dict] = ()):
        self.tokenizer, self.processor, self.tools = tokenizer, processor, list(tools)
        self.family = family_of_processor(processor)
        self.known: dict[tuple, tuple[list[int], VisionTensors]] = {}

    def batch(self, pairs: list[SupervisedPair]) -> ModelInputs:
        """The pairs as padded model inputs, each answer closed by the end token."""
        self._learn([pair for pair in pairs if _key(pair) not in self.known])
        encoded = [self.known[_key(pair)] for pair in pairs]
        end = self.tokenizer.eos_token
        answers = [self.tokenizer.encode(pair.answer + end, add_special_tokens=False) for pair in pairs]
        sequences, attention, actions = pad_rollouts([ids for ids, _ in encoded], answers, self.tokenizer.pad_token_id)
        vision = VisionTensors.gather(shown for _, shown in encoded)
        return ModelInputs(sequences, attention, actions, vision=vision)

    def _learn(self, pairs: list[SupervisedPair]) -> None:
        """Encode prompts not met before: those with images in one call, which costs little more than one image."""
        new = {_key(pair): self._text(pair) for pair in pairs}
        shown = {key: text for key, text in new.items() if key[1] and self.processor is not None}
        for key in new.keys() - shown.keys():
            self.known[key] = self.tokenizer.encode(new[key], add_special_tokens=False), VisionTensors()
        if not shown:
            return
        for part in [list(shown)] if self.family.together else [[key] for key in shown]:
            images = [[load_image(path) for path in paths] for _, paths, _ in part]
            out = self.processor(text=[shown[key] for key in part], images=[image for row in images for image in row])
            vision = self.family.read(out, [len(row) for row in images], [0] * len(part))
            self.known |= {key: (list(ids), own) for key, ids, own in zip(part, out["input_ids"], vision)}

    def _text(self, pair: SupervisedPair) -> str:
        messages: list[dict] = [{"role": "user", "content": content_parts(pair.prompt, len(pair.images))}]
        for role, text in pair.before:
            messages.append({"role": role, "content": text if role == "assistant" else [{"type": "image"}]})
        template, tools = self.tokenizer.apply_chat_template, self.tools or None
        return template(messages, tools=tools, tokenize=False, add_generation_prompt=True)


def _key(pair: SupervisedPair) -> tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]:
    """What is before the response, with all of its images in the second place."""
    shown = tuple(text for role, text in pair.before if role != "assistant")
    return pair.prompt, (*pair.images, *shown), pair.before


def content_parts(text: str, images: int) -> list[dict]:
    """Chat content of a question: images stand where `<image>` says, or before the text."""
    pieces = text.split("<image>")
    if len(pieces) == 1:
        return [{"type": "image"}] * images + [{"type": "text", "text": text}]
    parts: list[dict] = []
    for place, piece in enumerate(pieces):
        parts += [{"type": "image"}] if place else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts
