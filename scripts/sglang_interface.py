#!/usr/bin/env python
"""Signatures of what this package uses of SGLang, read from the source of an unpacked wheel, as JSON.

    pip download --no-deps sglang==0.5.23 && unzip -q sglang-*.whl -d FOLDER
    python scripts/sglang_interface.py FOLDER > tests/plugins/sglang/interface.json

Nothing of SGLang is imported, so that its wheel, which is for CUDA, can be looked at on a CPU. The tests call the
adapter against these signatures. A parameter reads `name`, `name=` where it has a default, and follows `*` where it is
given by name alone.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from vllm_interface import definition, tree

FUNCTIONS = {
    "srt/entrypoints/engine.py": (
        "Engine.__init__", "Engine.async_generate", "Engine.begin_weight_update", "Engine.update_weights_from_tensor",
        "Engine.end_weight_update", "Engine.flush_cache", "Engine.release_memory_occupation",
        "Engine.resume_memory_occupation", "Engine.shutdown",
    ),
    "srt/utils/common.py": ("MultiprocessingSerializer.serialize",),
    "srt/utils/patch_torch.py": ("monkey_patch_torch_reductions",),
    "srt/weight_sync/tensor_bucket.py": (
        "FlattenedTensorBucket.__init__", "FlattenedTensorBucket.get_flattened_tensor",
        "FlattenedTensorBucket.get_metadata",
    ),
}  # fmt: skip
SERVER_ARGUMENTS = "srt/arg_groups/field_order.py", "POSITIONAL_FIELD_ORDER"  # of which ServerArgs is put together
SAMPLING = "srt/sampling/sampling_params.py", "SamplingParams"


def parameters(function: ast.FunctionDef) -> list[str]:
    """Of a function, without `self`."""
    asked = function.args
    positional = [*asked.posonlyargs, *asked.args]
    bare = len(positional) - len(asked.defaults)
    found = [each.arg + ("=" if index >= bare else "") for index, each in enumerate(positional)]
    if asked.kwonlyargs:
        found.append("*")
        found += [each.arg + ("" if value is None else "=") for each, value in zip(asked.kwonlyargs, asked.kw_defaults)]
    if asked.kwarg is not None:
        found.append(f"**{asked.kwarg.arg}")
    return [each for each in found if each != "self"]


def function_of(root: Path, file: str, name: str) -> ast.FunctionDef:
    """A function of a file, or `Class.method`."""
    nodes = tree(root / file).body
    for part in name.split("."):
        found = definition(nodes, part)
        if found is None:
            raise SystemExit(f"{file} has no {name}")
        nodes = found.body
    return found


def server_arguments(root: Path) -> list[str]:
    """Names of ServerArgs' fields, all of which are given by name here."""
    file, name = SERVER_ARGUMENTS
    for node in tree(root / file).body:
        target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
        if isinstance(target, ast.Name) and target.id == name:
            return [f"{each}=" for each in ast.literal_eval(node.value)]
    raise SystemExit(f"{file} has no {name}")


def sampling_parameters(root: Path) -> list[str]:
    """Names of SamplingParams' fields."""
    file, name = SAMPLING
    fields = definition(tree(root / file).body, name).body
    return ["*", *(f"{node.target.id}=" for node in fields if isinstance(node, ast.AnnAssign))]


def interface(root: Path) -> dict[str, list[str]]:
    """{name: its parameters}."""
    found = {name: parameters(function_of(root, file, name)) for file, names in FUNCTIONS.items() for name in names}
    return found | {"ServerArgs": server_arguments(root), "SamplingParams": sampling_parameters(root)}


def main(folder: str) -> None:
    """Print the JSON of the wheel in this folder."""
    version = next(Path(folder).glob("sglang-*.dist-info")).name.removesuffix(".dist-info").removeprefix("sglang-")
    found = {name: " ".join(names) for name, names in interface(Path(folder) / "sglang").items()}
    print(json.dumps({"version": version} | found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
