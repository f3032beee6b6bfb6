"""A stand-in for the package sglang: it accepts exactly what the real one's signatures accept, and records all calls.

The signatures are those of the real package's source, as `interface.json` notes them: `name=` has a default.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

INTERFACE = json.loads((Path(__file__).parents[1] / "plugins" / "sglang" / "interface.json").read_text())
DONE = True, "Success"
ANSWERS = {  # of methods that do nothing else
    "begin_weight_update": DONE, "end_weight_update": DONE, "flush_cache": SimpleNamespace(success=True, message=""),
    "release_memory_occupation": None, "resume_memory_occupation": None, "shutdown": None,
}  # fmt: skip


def signature(name: str) -> inspect.Signature:
    """Of a function or class in the interface, without `self`."""
    kind, found = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    for each in INTERFACE[name].split():
        if each == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif each.startswith("**"):
            found.append(inspect.Parameter(each[2:], inspect.Parameter.VAR_KEYWORD))
        else:
            default = None if each.endswith("=") else inspect.Parameter.empty
            found.append(inspect.Parameter(each.rstrip("="), kind, default=default))
    return inspect.Signature(found)


class Fake:
    """The engine and what is imported beside it. calls: (name, arguments by name) in order.

    answer(arguments of one request) gives the tokens, log-probs and reason of a response.
    """

    def __init__(self, answer) -> None:
        self.calls: list[tuple[str, dict]] = []
        self.answer = answer
        self.loaded: dict[str, torch.Tensor] = {}
        self.refuse: str | None = None  # a message, for the next bucket of weights
        self.loop = asyncio.new_event_loop()

    def bound(self, name: str, *args, **kwargs) -> dict:
        """The arguments by name. TypeError where the real function would raise it."""
        arguments = dict(signature(name).bind(*args, **kwargs).arguments)
        self.calls.append((name, arguments))
        return arguments

    def named(self, name: str) -> list[dict]:
        """Arguments of all calls of this name."""
        return [arguments for each, arguments in self.calls if each == name]

    def order(self) -> list[str]:
        """Names of the engine's methods in the order in which they were called."""
        return [name.removeprefix("Engine.") for name, _ in self.calls if name.startswith("Engine.")]

    # -- sglang.Engine ---------------------------------------------------------------------------------------------

    def start(self, **kwargs) -> Fake:
        signature("ServerArgs").bind(**kwargs)
        self.bound("Engine.__init__", **kwargs)
        return self

    async def async_generate(self, *args, **kwargs):
        asked = self.bound("Engine.async_generate", *args, **kwargs)
        outputs = []
        for ids, sampling in zip(asked["input_ids"], asked["sampling_params"], strict=True):
            signature("SamplingParams").bind(**sampling)
            tokens, log_probs, reason = self.answer(ids, sampling)
            entries = [(value, token, None) for value, token in zip(log_probs, tokens)]
            meta = {"prompt_tokens": len(ids), "finish_reason": reason, "output_token_logprobs": entries}
            outputs.append({"text": "", "output_ids": tokens, "meta_info": meta})
        await asyncio.sleep(0)
        return outputs

    def update_weights_from_tensor(self, *args, **kwargs):
        asked = self.bound("Engine.update_weights_from_tensor", *args, **kwargs)
        assert asked["load_format"] == "flattened_bucket"
        if self.refuse is not None:
            return False, self.refuse
        (payload,) = asked["named_tensors"]
        for name, dtype, shape, start, end in payload["metadata"]:
            self.loaded[name] = payload["flattened_tensor"][start:end].view(dtype).reshape(shape)
        return True, "Success"

    def __getattr__(self, name: str):
        if name not in ANSWERS:
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.bound(f"Engine.{name}", *args, **kwargs)
            return ANSWERS[name]

        return call

    # -- what is imported ------------------------------------------------------------------------------------------

    def bucket(self, *args, **kwargs):
        """FlattenedTensorBucket: one row of bytes, and where each tensor lies in it."""
        named = self.bound("FlattenedTensorBucket.__init__", *args, **kwargs)["named_tensors"]
        rows = [tensor.flatten().view(torch.uint8) for _, tensor in named]
        metadata, start = [], 0
        for (name, tensor), row in zip(named, rows):
            metadata.append((name, tensor.dtype, tensor.shape, start, start + len(row)))
            start += len(row)
        flat = torch.cat(rows)
        return SimpleNamespace(get_flattened_tensor=lambda: flat, get_metadata=lambda: metadata)

    def serialize(self, *args, **kwargs):
        return self.bound("MultiprocessingSerializer.serialize", *args, **kwargs)["obj"]

    def patch(self, *args, **kwargs) -> None:
        self.bound("monkey_patch_torch_reductions", *args, **kwargs)

    def install(self, monkeypatch) -> None:
        """Make it what `import sglang` finds."""

        class ServerArgs:
            __signature__ = signature("ServerArgs")

        serializer = SimpleNamespace(serialize=self.serialize)
        contents = {
            "sglang": {"Engine": self.start},
            "sglang.srt": {},
            "sglang.srt.server_args": {"ServerArgs": ServerArgs},
            "sglang.srt.utils": {},
            "sglang.srt.utils.common": {"MultiprocessingSerializer": serializer},
            "sglang.srt.utils.patch_torch": {"monkey_patch_torch_reductions": self.patch},
            "sglang.srt.weight_sync": {},
            "sglang.srt.weight_sync.tensor_bucket": {"FlattenedTensorBucket": self.bucket},
        }
        for name, values in contents.items():
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None, origin="fake")
            module.__path__ = []
            vars(module).update(values)
            monkeypatch.setitem(sys.modules, name, module)
