"""Whether an adapter that nobody has proven runs its model right, found out at the start of a run.

The actor's log-probs of three made-up samples (one image, two images of different size, text alone) are held against
those of the model's own class, which is given all that the processor makes, each sample by itself, and works out its
positions itself. Where they differ a run would train on wrong numbers, and engine hf, which runs the same forward,
would agree with the trainer in the error. What agreed once is kept, with the model and the libraries that it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image

from ... import __version__
from ...config.registry import vlm_families
from ...errors import ConfigError
from ...experience.rollouts import ScoringRule
from ...experience.types import ModelInputs, pad_rollouts
from ...experience.vision import VisionTensors
from ...runtime import collectives
from ...runtime.files import cache_root, parse_record, to_json, write_atomic
from ...runtime.packages import is_shipped
from ...runtime.usercode.calls import describe_error
from ...runtime.usercode.surroundings import is_users
from ...runtime.zero3_loading import reading_across
from ..loading import Checkpoint
from .actor import Actor
from .families import family_of_processor

T = torch.Tensor

logger = logging.getLogger(__name__)

# Of log-probs. In half precision 1e-4 is nothing: there right adapters were off by up to 5 roundings of logits of a
# usual size, wrong ones by 7.5 and more. Where a model is deep, what its own class differs by from itself says it, up
# to a few times as much: padding that changes more is no rounding.
_TOLERANCE, _ROUNDINGS, _NOISE, _MOST = 1e-4, 6, 2, 4
_SIZES = ((96, 64), (64, 128))  # width and height of the images
_ANSWER = " the first is a small red square, the second 12 blue rings."
_ACTIONS = (14, 10, 6)  # of each sample, so that padded ones have padding on both sides
_LOOKS_AHEAD = (
    "its tokens see those that come after them, as in an encoder or a model that writes by diffusion: no run can train "
    "it; take a causal language model"
)
_NO_NUMBERS = "the log-probs of its own class are NaN: look at its weights"


@dataclass
class _Sample:
    """name: for messages. vision: what the adapter makes of the media. own: all that the processor makes."""

    name: str
    actions: int
    vision: VisionTensors
    own: dict[str, T]

    @property
    def ids(self) -> T:
        return self.own["input_ids"][0]


@dataclass
class Finding:
    """The largest difference of log-probs, of which sample in which form it is, how large it may be, what was tried.

    error: what a forward raised, where it did not run. lacks: inputs of the model that the adapter leaves out.
    """

    difference: float
    where: str
    bound: float
    tried: str
    error: str = ""
    lacks: Sequence[str] = ()

    @property
    def right(self) -> bool:
        """Whether the adapter agrees with the model's own class."""
        return not self.error and self.difference <= self.bound


def prove_family(actor: Actor, checkpoint: Checkpoint, longest: int, model: Mapping[str, Any]) -> str | None:
    """One line about what was found; None for a model type that this package's tests have proven.

    All ranks call it, with the same model: they run the same forwards, and agree on what was found. Weights may be
    divided over them (ZeRO-3).

    Args:
        actor: with loaded weights, on its device.
        checkpoint: of the same model.
        longest: tokens that a sample of the run may have; windows of attention that are longer are of no effect.
        model: plain data that tells it from other models.

    Raises:
        ConfigError: where the adapter and the model's own class differ, with what to write.
    """
    family = actor.backbone.family
    named = [entry for entry in vlm_families if family.config.model_type in entry.model_types]
    others = [f"{each.name} ({', '.join(each.model_types)})" for each in vlm_families if not each.shipped]
    if others and (not named or named[-1].shipped) and collectives.is_rank_0():
        told = "families of plug-ins are of other model types than this model's %r: %s"
        logger.log(logging.INFO if named else logging.WARNING, told, family.config.model_type, "; ".join(others))
    if named and named[-1].shipped:
        return None
    name = f"model type {family.config.model_type!r}, run by {type(family).__name__}"
    kept = cache_root() / "families" / f"{_key(actor, longest, model)}.json"
    known = collectives.broadcast_object(_read(kept) if collectives.is_rank_0() else None)
    if known is None:
        own, raised = _tried(actor, checkpoint, longest)
        found = collectives.all_gather_object(own)
        finding = max(found, key=lambda each: each.difference / each.bound)  # the worst of the ranks
        if not finding.right:
            raise ConfigError(_refusal(actor, finding, raised)) from raised
        known = {"difference": finding.difference, "bound": finding.bound, "tried": finding.tried}
        if collectives.is_rank_0():
            _keep(kept, known)
        when = ""
    else:
        when = " (found at an earlier start)"
    return (
        f"{name}: its log-probs are those of {type(actor.transformer).__name__}'s own forward to "
        f"{known['difference']:.1e} ({known['bound']:.1e} allowed; {known['tried']}){when}"
    )


def _key(actor: Actor, longest: int, model: Mapping[str, Any]) -> str:
    """What the finding depends on, in one hash."""
    config, weight = actor.backbone.config, next(actor.transformer.parameters())
    own = (sys.modules[type(each).__module__] for each in (actor.backbone.family, actor.transformer))
    files = {*Path(__file__).parent.rglob("*.py"), *(Path(each.__file__) for each in own if hasattr(each, "__file__"))}
    parts = {
        "model": dict(model),
        "commit": getattr(config, "_commit_hash", None),
        "weights": f"{weight.dtype} {weight.device.type} {config._attn_implementation}",
        "length": _length(config, longest),
        "versions": [__version__, torch.__version__, transformers.__version__],
        "code": [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    """What was found for this key; None where there is nothing, or no record."""
    found = parse_record(path.read_text(errors="replace")) if path.is_file() else None
    return found if found and {"difference", "bound", "tried"} <= found.keys() else None


def _keep(path: Path, found: Mapping[str, Any]) -> None:
    try:
        write_atomic(path, to_json(found))
    except OSError as error:
        logger.warning("%s cannot be written (%s): the next start compares again", path, error)


def _tried(actor: Actor, checkpoint: Checkpoint, longest: int) -> tuple[Finding, Exception | None]:
    """What comes of a comparison, and what it raised: that is a finding too, as it is on every rank."""
    training, failed, raised = actor.training, "making its samples", None
    base, samples, passed = actor.backbone.base, [], {"input_ids", "attention_mask"}
    actor.eval()
    try:
        samples += made_up_samples(checkpoint, _length(actor.backbone.config, longest))
        failed = "the model's own class, given all that its processor makes,"
        with reading_across(actor):
            own = _Own.of(actor, samples)
            failed = "its forward"
            with base.register_forward_pre_hook(lambda *call: passed.update(call[-1]), with_kwargs=True):
                finding = compare(actor, samples, own)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # what a forward raises that lacks an input, or is given a wrong one, is of any kind
        finding, raised = Finding(math.inf, "", _TOLERANCE, "", f"{failed} {describe_error(error)}"), error
    finally:
        actor.train(training)
    passed.update(name for sample in samples for name in sample.vision.names)
    taken = {*signature(actor.transformer.forward).parameters, *signature(base.forward).parameters}
    given = {name for sample in samples for name in sample.own}
    return replace(finding, lacks=sorted(given & taken - passed)), raised


@torch.no_grad()
def compare(actor: Actor, samples: Sequence[_Sample], own: _Own) -> Finding:
    """The actor's log-probs of the samples, padded and, where its family packs, packed, against the own class's.

    Args:
        actor: in evaluation mode, inside `reading_across`.
        samples: of `made_up_samples`, of which the first is text alone.
        own: what the model's own class says of them.
    """
    if any(each.isnan().any() for each in own.log_probs):
        return Finding(math.inf, "", own.bound, "", _NO_NUMBERS)
    if own.looks_ahead:
        return Finding(math.inf, "", own.bound, "", _LOOKS_AHEAD)
    device, rule = actor.banned_ids.device, ScoringRule()
    forms = {"padded": _padded(samples)}
    if actor.backbone.family.unproven is None:
        forms["packed"] = _packed(samples)
    with suppress(ConfigError):  # of an adapter without a blank image, which a batch of text alone needs
        if actor.backbone.family.vision and actor.backbone.family.blank("image"):
            forms["without images"] = _padded(samples[:1])
    tried, found = "; ".join([", ".join(each.name for each in samples), *forms]), []
    for form, inputs in forms.items():
        log_probs = actor(inputs.to(device), rule, with_entropy=False).log_probs
        for sample, ours, theirs in zip(samples, log_probs, own.log_probs):
            found.append((_distance(ours[: sample.actions], theirs), f"{sample.name}, {form}"))
        if max(found)[0] > own.bound:
            break
    return Finding(*max(found), own.bound, tried)


@dataclass
class _Own:
    """log_probs (actions) of each sample by the model's own class; bound: how much others may differ. looks_ahead:
    whether tokens change what comes before them."""

    log_probs: list[T]
    bound: float
    looks_ahead: bool

    @classmethod
    @torch.no_grad()
    def of(cls, actor: Actor, samples: Sequence[_Sample]) -> _Own:
        logits = [_own_logits(actor, sample) for sample in samples]
        found = [_log_probs(actor, sample, each) for sample, each in zip(samples, logits)]
        again = [_log_probs(actor, sample, _own_logits(actor, sample, more=5)) for sample in samples]
        noise = max(_distance(one, other) for one, other in zip(found, again))
        dtype = next(actor.transformer.parameters()).dtype
        rounding = max(_TOLERANCE, _ROUNDINGS * float(torch.cat(logits).std()) * torch.finfo(dtype).eps)
        most = rounding if dtype == torch.float32 else _MOST * rounding
        ahead = max(
            _distance(one, _own_logits(actor, other)[: len(one)]) for one, other in _other_ends(samples, logits)
        )
        return cls(found, min(max(rounding, _NOISE * noise), most), ahead > rounding)


def _other_ends(samples: Sequence[_Sample], logits: Sequence[T]) -> Iterator[tuple[T, _Sample]]:
    """Of each sample the logits before the last half of its actions, and the sample with that half turned around."""
    for sample, own in zip(samples, logits):
        half = sample.actions // 2
        ids = torch.cat([sample.ids[:-half], sample.ids[-half:].flip(0)])
        yield own[: sample.actions - half + 1], replace(sample, own=sample.own | {"input_ids": ids[None]})


def _distance(ours: T, own: T) -> float:
    """The largest difference; of tokens that both never sample, none."""
    away = torch.where(ours == own, torch.zeros_like(own), (ours - own).abs())
    return float(away.nan_to_num(nan=math.inf).max())


def _own_logits(actor: Actor, sample: _Sample, more: int = 0) -> T:
    """(actions, V) by the model's own forward of this sample alone, `more` tokens of padding behind it."""
    transformer, device = actor.transformer, actor.banned_ids.device
    length, dtype = len(sample.ids), next(transformer.parameters()).dtype
    inputs = {}
    for name, value in sample.own.items():
        if more and value.shape[:2] == (1, length):
            value = F.pad(value, (0, more))
        inputs[name] = value.to(device, dtype if value.is_floating_point() else value.dtype)
    last = sample.actions + 1 + more
    few = {"logits_to_keep": last} if "logits_to_keep" in signature(transformer.forward).parameters else {}
    logits = transformer(**inputs, **few, use_cache=False).logits[0, -last:]
    return logits[: sample.actions].float()


def _log_probs(actor: Actor, sample: _Sample, logits: T) -> T:
    """(actions) of the sample's tokens, without those that are never sampled."""
    targets = sample.ids[-sample.actions :, None].to(logits.device)
    return logits.index_fill(1, actor.banned_ids, float("-inf")).log_softmax(1).gather(1, targets)[:, 0]


def made_up_samples(checkpoint: Checkpoint, length: int) -> list[_Sample]:
    """One image, two images of different size, text alone of at least `length` tokens; a text-only model gets the
    last, and another one."""
    noise = np.random.default_rng(0)
    images = [Image.fromarray(noise.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in _SIZES]
    image = None
    if checkpoint.processor is not None:
        image = family_of_processor(checkpoint.processor).placeholders(checkpoint.processor).get("image")
    words = "what is there? "
    words *= 1 + length // len(checkpoint.tokenizer(words)["input_ids"])
    prompts: list[tuple[str, str, list]] = [("text alone", words + _ANSWER, [])]
    if image is None:
        prompts.append(("longer text", words + words + _ANSWER, []))
    else:
        prompts.append(("one image", f"{image}\nwhich shape is it?{_ANSWER}", images[:1]))
        prompts.append(("two images", f"first {image}\nsecond {image}\nhow many?{_ANSWER}", images))
    return [_made_up(checkpoint, *prompt, actions) for prompt, actions in zip(prompts, _ACTIONS)]


def _made_up(checkpoint: Checkpoint, name: str, text: str, images: list, actions: int) -> _Sample:
    processor = checkpoint.processor
    if processor is None:
        return _Sample(name, actions, VisionTensors(), dict(checkpoint.tokenizer([text], return_tensors="pt")))
    family = family_of_processor(processor)
    media = family.media_arguments(images, [])
    (vision,) = family.read(processor(text=[text], **media), [len(images)], [0])
    whole = processor(text=[text], **media | {"images_kwargs": {}}, return_tensors="pt")
    return _Sample(name, actions, vision, {key: value for key, value in whole.items() if isinstance(value, T)})


def _padded(samples: Sequence[_Sample]) -> ModelInputs:
    """As experience is collated: prompts padded on their left, answers on their right. Padding is token 0, unread."""
    prompts = [each.ids[: -each.actions].tolist() for each in samples]
    answers = [each.ids[-each.actions :].tolist() for each in samples]
    vision = VisionTensors.gather(each.vision for each in samples)
    return ModelInputs(*pad_rollouts(prompts, answers, 0), vision=vision)


def _packed(samples: Sequence[_Sample]) -> ModelInputs:
    width, ids = max(each.actions for each in samples), torch.cat([each.ids for each in samples])[None]
    return ModelInputs(
        ids,
        torch.ones_like(ids),
        torch.stack([torch.arange(width) < each.actions for each in samples]),
        [len(each.ids) for each in samples],
        [each.actions for each in samples],
        VisionTensors.gather(each.vision for each in samples),
    )


def _length(config: Any, longest: int) -> int:
    """Tokens of the text alone: more than a window of the attention, where the run's samples may outgrow one."""
    text = config.get_text_config()
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    reached = [window for window in windows if window and window < longest]
    return max(reached, default=0)


def _refusal(actor: Actor, finding: Finding, raised: Exception | None) -> str:
    family, own = actor.backbone.family, type(actor.transformer).__name__
    if finding.error in (_LOOKS_AHEAD, _NO_NUMBERS):
        return f"model type {family.config.model_type!r}: {finding.error}"
    if finding.error:
        told = finding.error
    else:
        told = (
            f"its log-probs differ from those of {own}'s own forward by {finding.difference:.2g} ({finding.where}; "
            f"{finding.bound:.1e} allowed), so a run would train on wrong numbers"
        )
    ours = is_shipped(type(family))
    write = "Write one of its own: a subclass of VLMFamily, registered in vlm_families by a file that --plugins names"
    theirs = raised is not None and any(is_users(each.filename) for each in extract_tb(raised.__traceback__))
    hints = "; ".join(() if theirs else _hints(actor, finding))  # an error in lines of theirs says it itself
    return (
        f"model type {family.config.model_type!r}, run by the adapter {type(family).__name__}: {told}"
        f"{f'. {write}' if ours else ''}{hints and f' ({hints})'}; see docs/architecture.md"
    )


def _hints(actor: Actor, finding: Finding) -> Iterator[str]:
    """What the adapter may lack, as far as the model's class and the processor show it."""
    if finding.where.endswith("packed"):
        yield "this one is right for padded samples: leave the model type out of its `packed`"
        return
    if finding.lacks:
        lacking = ", ".join(finding.lacks)
        yield f"`tensors` or `arguments` must bring what its forward takes of the processor: {lacking}"
    if hasattr(actor.backbone.base, "get_rope_index"):
        yield "`positions` must be M-RoPE's, as models/vlm/families/qwen.py has them"
