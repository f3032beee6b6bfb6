"""What the frozen text encoders made of prompts, remembered: a run meets the same prompts again and again.

In memory within a run, and on disk for the runs after it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import xxhash
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import ProcessorMixin

from ...experience.vision import Conditions

logger = logging.getLogger(__name__)
T = torch.Tensor


SUFFIX = ".safetensors"
NEW = ".new"  # behind the name of a file until it is whole
CHECKSUM = "xxh3_64"  # of the tensors, among a file's own words
_LEFT = 0.9  # of the limit, after files were deleted


class PromptFiles:
    """Conditions by text as safetensors files of a folder; the ones unused for longest go above `limit` bytes.

    encoders: what the conditions depend on besides the text, from `encoder_digest`. Processes may share the folder:
    files appear whole, by a rename, and one that another process has deleted is only encoded again. A file that cannot
    be read or written (another user's, a full disk) is said once, and the run goes on without it.
    """

    def __init__(self, folder: str | Path, encoders: str, limit: int) -> None:
        self.root, self.limit = Path(folder), limit
        self.folder = self.root / encoders
        self.folder.mkdir(parents=True, exist_ok=True)
        self._said: set[str] = set()

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob(f"*{SUFFIX}"))

    def find(self, text: str) -> Conditions | None:
        """The conditions of a text, None where they are not there. A damaged file is said, deleted, and not used."""
        path = self._path(text)
        try:
            conditions = _decoded(path.read_bytes())  # at once: another process may delete it at any time
        except FileNotFoundError:
            return None
        except SafetensorError as error:
            logger.warning("%s is damaged (%s): its prompt is encoded again", path, error)
            path.unlink(missing_ok=True)
            return None
        except OSError as error:
            self._say_once("read", error)
            return None
        try:
            os.utime(path)  # used now
        except FileNotFoundError:
            return conditions  # deleted since
        except OSError as error:  # such as another user's
            self._say_once("marked as used", error)
        return conditions

    def keep(self, text: str, conditions: Conditions) -> None:
        """Write the conditions of a text, and delete old files where the folder has grown too large."""
        try:
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=f"{SUFFIX}{NEW}")
            os.close(handle)
            try:
                Path(name).write_bytes(_encoded(conditions))
                os.replace(name, self._path(text))
            finally:
                Path(name).unlink(missing_ok=True)
            self._bound()
        except OSError as error:
            self._say_once("kept", error)

    def _say_once(self, what: str, error: Exception) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("encoded prompts of %s cannot all be %s: %s", self.folder, what, error)

    def _bound(self) -> None:
        """Over all encoders' files, unfinished ones too. `limit` holds for the folder, whoever fills it."""
        found = []
        for path in self.root.glob(f"*/*{SUFFIX}*"):
            with suppress(FileNotFoundError):  # another process has deleted it
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, path))
        size = sum(each[1] for each in found)
        if size <= self.limit:
            return
        for _, freed, path in sorted(found):
            path.unlink(missing_ok=True)
            size -= freed
            if size <= self.limit * _LEFT:
                return

    def _path(self, text: str) -> Path:
        return self.folder / (hashlib.sha256(text.encode()).hexdigest() + SUFFIX)


class PromptCache:
    """Conditions by key, in host memory; the ones unused for longest go when all take more than `limit` bytes.

    files: where the conditions of texts are also kept; None keeps them in memory only.
    """

    def __init__(self, limit: int = 2**30, files: PromptFiles | None = None) -> None:
        self.limit, self.size, self.files = limit, 0, files
        self._kept: OrderedDict[Hashable, Conditions] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def find(self, key: Hashable) -> Conditions | None:
        """The conditions under `key`, from memory or from a file; None where they have to be encoded."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        found = self.files.find(key) if self.files is not None and isinstance(key, str) else None
        return None if found is None else self._remember(key, found)

    def get(self, key: Hashable, encode: Callable[[], Conditions]) -> Conditions:
        """The conditions under `key`, encoded at the first call."""
        found = self.find(key)
        if found is not None:
            return found
        conditions = {name: value.detach().cpu() for name, value in encode().items()}
        if self.files is not None and isinstance(key, str):
            self.files.keep(key, conditions)
        return self._remember(key, conditions)

    def _remember(self, key: Hashable, conditions: Conditions) -> Conditions:
        self._kept[key] = conditions
        self.size += _bytes(conditions)
        while self.size > self.limit and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self.size -= _bytes(oldest)
        return conditions


def encoder_digest(encoders: Iterable[nn.Module], tokenizers: Iterable[Any], *settings: object) -> str:
    """A name for what decides the conditions of a text: weights, adapters and configurations of the encoders,
    vocabularies and chat templates, and `settings`, such as the pipeline's class, the length of texts, the kind of
    device and the library's version. tokenizers: some pipelines have a processor in the place of one.

    All numbers of a weight count.
    """
    found = hashlib.sha256(repr((CHECKSUM, *settings)).encode())
    for encoder in encoders:
        config = encoder.config if isinstance(encoder.config, dict) else encoder.config.to_dict()
        found.update(str({name: value for name, value in config.items() if name != "_name_or_path"}).encode())
        for name, module in encoder.named_modules():
            if isinstance(module, BaseTunerLayer):
                at_work = module.active_adapters, module.disable_adapters, module.scaling
                found.update(repr((name, at_work)).encode())
        for name, weight in encoder.state_dict().items():
            found.update(f"{name} {tuple(weight.shape)} {weight.dtype} {_sum_of({name: weight})}".encode())
    for tokenizer in tokenizers:
        words = tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer
        found.update(repr((sorted(words.get_vocab().items()), tokenizer.chat_template)).encode())
    return found.hexdigest()[:24]


def _encoded(conditions: Conditions) -> bytes:
    return save({name: value.contiguous() for name, value in conditions.items()}, {CHECKSUM: _sum_of(conditions)})


def _decoded(content: bytes) -> Conditions:
    """Raises SafetensorError where this is not what was encoded."""
    conditions = load(content)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    if header.get("__metadata__", {}).get(CHECKSUM) != _sum_of(conditions):
        raise SafetensorError("its checksum is another")
    return conditions


def _sum_of(conditions: Mapping[str, T]) -> str:
    found = xxhash.xxh3_64()
    for name in sorted(conditions):
        found.update(name.encode())
        found.update(conditions[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def _bytes(conditions: Conditions) -> int:
    return sum(value.numel() * value.element_size() for value in conditions.values())


LATENTS_AT_ONCE = 2**19  # numbers in a part of a batch: eight images of 512 x 512, one video


def checkpoint_decoder(vae: nn.Module) -> None:
    """Let decoding with a gradient keep only the inputs of its parts, which backward runs once more.

    Parts are blocks where diffusers has checkpointing for the VAE. The causal video VAEs (Wan, Qwen-Image) have none:
    their decoder takes one latent frame at a time and hands the last frames of every convolution on to the next, so a
    part is a latent frame, and what is kept is the frame and those hand-overs. A part that runs again keeps in
    its turn only what goes into its blocks, each of which runs a third time: the activations of a frame are
    several times as large as all that is kept.
    """
    if vae._supports_gradient_checkpointing:
        vae.enable_gradient_checkpointing()
        return
    for block in _innermost(vae.decoder):
        block.forward = checkpointed_part(block.forward)
    vae.decoder.forward = checkpointed_part(vae.decoder.forward)


def _innermost(decoder: nn.Module) -> list[nn.Module]:
    """The blocks that hand frames on and have no such blocks in them."""
    handing = [each for each in decoder.modules() if "feat_cache" in inspect.signature(each.forward).parameters]
    return [each for each in handing if not any(part in handing for part in each.modules() if part is not each)]


def checkpointed_part(forward: Callable[..., T]) -> Callable[..., T]:
    """The forward of such a decoder or of a block of it, (x, feat_cache, feat_idx, …), as one checkpointed part."""

    def run(x: T, first: int, options: dict[str, Any], *handed_over: Any) -> tuple[T, int, list[Any]]:
        # The part writes into the cache, and must find it as it was when it runs again.
        cache, index = list(handed_over), [first]
        return forward(x, feat_cache=cache, feat_idx=index, **options), index[0], cache

    def checkpointed(x: T, feat_cache: list[Any] | None = None, feat_idx: list[int] | None = None, **options: Any) -> T:
        if feat_cache is None or not torch.is_grad_enabled():
            return forward(x, feat_cache=feat_cache, feat_idx=feat_idx, **options)
        frames, feat_idx[0], feat_cache[:] = checkpoint(
            run, x, feat_idx[0], options, *feat_cache, use_reentrant=False, preserve_rng_state=False
        )
        return frames

    return checkpointed


def in_parts(decode: Callable[[T], T], latents: T) -> T:
    """decode(latents (B, …)) for a few samples at a time: the widest activations of a decoder are a sample's own."""
    size = max(1, LATENTS_AT_ONCE // latents[0].numel())
    return torch.cat([decode(part) for part in latents.split(size)])
