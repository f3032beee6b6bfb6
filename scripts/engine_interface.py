"""What this package uses of SGLang, looked up in its source.

    python scripts/engine_interface.py FOLDER > tests/plugins/sglang/interface.json

FOLDER is an unpacked wheel (`pip download --no-deps sglang==...` and unzip); its files are parsed and nothing is
imported. The tests call the adapter against these signatures: a parameter reads `name`, `name=` where it has a default,
and follows `*` where it is given by name alone.
"""

import ast
import json
import sys
from functools import cache
from pathlib import Path


@cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def definition(nodes: list[ast.stmt], name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """The class or function of this name among statements."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return next((node for node in nodes if isinstance(node, kinds) and node.name == name), None)


SGLANG = {
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
    file, name = "srt/arg_groups/field_order.py", "POSITIONAL_FIELD_ORDER"  # of which ServerArgs is put together
    for node in tree(root / file).body:
        target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
        if isinstance(target, ast.Name) and target.id == name:
            return [f"{each}=" for each in ast.literal_eval(node.value)]
    raise SystemExit(f"{file} has no {name}")


def sampling_parameters(root: Path) -> list[str]:
    """Names of SamplingParams' fields."""
    fields = definition(tree(root / "srt/sampling/sampling_params.py").body, "SamplingParams").body
    return ["*", *(f"{node.target.id}=" for node in fields if isinstance(node, ast.AnnAssign))]


def interface(root: Path) -> dict[str, list[str]]:
    """{name: its parameters}."""
    found = {name: parameters(function_of(root, file, name)) for file, names in SGLANG.items() for name in names}
    return found | {"ServerArgs": server_arguments(root), "SamplingParams": sampling_parameters(root)}


def sglang_signatures(folder: str) -> None:
    """Print the JSON of the wheel in this folder."""
    version = next(Path(folder).glob("sglang-*.dist-info")).name.removesuffix(".dist-info").removeprefix("sglang-")
    found = {name: " ".join(names) for name, names in interface(Path(folder) / "sglang").items()}
    print(json.dumps({"version": version} | found, indent=1))


if __name__ == "__main__":
    sglang_signatures(sys.argv[1])
