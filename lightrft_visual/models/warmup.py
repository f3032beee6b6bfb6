"""The embedded default: a tiny checkpoint, warmed up by supervised steps on the embedded task, cached on disk.

After some steps on clean answers a large share of them is random: that leaves the base with entropy that RL can
sharpen, while one trained on clean answers alone collapses (no groups with different rewards, nothing to learn from).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from ..data.embedded import EmbeddedTask, SupervisedPair, build_embedded_task, supervised_pairs, vocabulary_texts
from ..data.media import load_image
from ..rollout.engine import ScoringRule
from ..rollout.samples import pad_rollouts
from .actor import Actor
from .inputs import ModelInputs
from .tiny import VISION_FAMILIES, build_tiny_checkpoint

CACHE_VERSION = 1


@dataclass(frozen=True)
class WarmUp:
    """Settings of the warm-up; all of them name the cache folder."""

    family: str = "qwen2_5_vl"
    tie_embeddings: bool = False
    steps: int = 400
    clean_steps: int = 200
    batch_size: int = 32
    learning_rate: float = 1e-3
    random_share: float = 0.7
    seed: int = 0


def cache_root() -> Path:
    """LIGHTRFT_CACHE, else the user's cache folder."""
    base = os.environ.get("LIGHTRFT_CACHE")
    return Path(base) if base else Path.home() / ".cache" / "lightrft_visual"


def embedded_task(root: Path | None = None) -> EmbeddedTask:
    """The embedded data set on disk, drawn at the first call."""
    return build_embedded_task((root or cache_root()) / "data")


def embedded_checkpoint(settings: WarmUp, root: Path | None = None, report=print) -> Path:
    """The warmed-up checkpoint folder; built within a minute on two cores when the cache does not hold it.

    It appears in one rename, so it is complete or absent, and several processes may build it at once.
    """
    text = json.dumps(asdict(settings) | {"version": CACHE_VERSION}, sort_keys=True)
    root = root or cache_root()
    target = root / "models" / f"{settings.family}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if target.is_dir():
        return target
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    report(f"building the embedded {settings.family} model ({settings.steps} supervised steps), once")
    build_tiny_checkpoint(
        scratch,
        settings.family,
        texts=vocabulary_texts(),
        tie_embeddings=settings.tie_embeddings,
        seed=settings.seed,
    )
    if settings.steps:
        warm_up(scratch, embedded_task(root), settings)
    try:
        os.rename(scratch, target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(scratch)  # another process was first
    return target


def warm_up(folder: Path, task: EmbeddedTask, settings: WarmUp) -> list[float]:
    """Supervised steps on the checkpoint in `folder`, saved back there. Returns the losses (nats a token)."""
    vision = settings.family in VISION_FAMILIES
    auto = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encode = PairEncoder(tokenizer, AutoProcessor.from_pretrained(folder) if vision else None)
    actor = Actor(model, [], [])
    optimizer = torch.optim.AdamW(actor.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=settings.steps, pct_start=0.1
    )
    losses = []
    for pairs in _batches(task, settings, vision):
        inputs = encode.batch(pairs)
        output = actor(inputs, ScoringRule(), with_entropy=False)
        loss = -output.log_probs.sum() / inputs.action_mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(folder)
    return losses


def _batches(task: EmbeddedTask, settings: WarmUp, vision: bool) -> Iterator[list[SupervisedPair]]:
    def stream(random_share: float) -> Iterator[SupervisedPair]:
        pairs = supervised_pairs(task.train, seed=settings.seed, random_share=random_share)
        return pairs if vision else (pair for pair in pairs if not pair.images)

    clean, noisy = stream(0.0), stream(settings.random_share)
    for step in range(settings.steps):
        yield list(islice(clean if step < settings.clean_steps else noisy, settings.batch_size))


class PairEncoder:
    """Turns supervised pairs into model inputs; each image goes through the image processor once."""

    def __init__(self, tokenizer, processor):
        self.tokenizer, self.processor = tokenizer, processor
        self.known: dict[tuple, tuple[list[int], torch.Tensor | None, torch.Tensor | None]] = {}

    def batch(self, pairs: list[SupervisedPair]) -> ModelInputs:
        encoded = [self._prompt(pair) for pair in pairs]
        end = self.tokenizer.eos_token
        answers = [self.tokenizer.encode(pair.answer + end, add_special_tokens=False) for pair in pairs]
        sequences, attention, actions = pad_rollouts(
            [ids for ids, _, _ in encoded], answers, self.tokenizer.pad_token_id
        )
        pixels = [values for _, values, _ in encoded if values is not None]
        grids = [grid for _, _, grid in encoded if grid is not None]
        return ModelInputs(
            sequences,
            attention,
            actions,
            pixel_values=torch.cat(pixels) if pixels else None,
            image_grid_thws=torch.cat(grids) if grids else None,
        )

    def _prompt(self, pair: SupervisedPair):
        key = (pair.prompt, pair.images)
        if key not in self.known:
            messages = [{"role": "user", "content": content_parts(pair.prompt, len(pair.images))}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            self.known[key] = self._process(text, pair.images)
        return self.known[key]

    def _process(self, text: str, images: tuple[str, ...]):
        if self.processor is None or not images:
            return self.tokenizer.encode(text, add_special_tokens=False), None, None
        loaded = [load_image(path) for path in images]
        out = self.processor(text=[text], images=loaded, return_tensors="pt")
        return out["input_ids"][0].tolist(), out["pixel_values"], out["image_grid_thw"]


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
