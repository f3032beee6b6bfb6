"""What this package uses of vLLM and SGLang, looked up in their source.

    python scripts/engine_interface.py vllm                       the installed version: one markdown table
    python scripts/engine_interface.py vllm FOLDER FOLDER ...     wheels unpacked into folders
    python scripts/engine_interface.py sglang FOLDER > tests/plugins/sglang/interface.json

Source files are read and parsed; nothing of an engine is imported, so a wheel for CUDA can be looked at on a CPU:
`pip download --no-deps vllm==0.26.0` and unzip. vllm: exit code 1 when something is missing. sglang: signatures as
JSON, against which the tests call the adapter; a parameter reads `name`, `name=` where it has a default, and follows
`*` where it is given by name alone.
"""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

SECOND = "v1/worker/gpu/sample/logits_processor/interface.py"  # absent: custom processors run on the first runner


@dataclass(frozen=True)
class Used:
    """A class or function of a file with what we name of it: arguments, fields or methods."""

    file: str
    owner: str
    names: tuple[str, ...]
    optional: bool = False


USED = (
    Used(
        "engine/arg_utils.py", "EngineArgs",
        ("model", "dtype", "max_model_len", "tensor_parallel_size", "distributed_executor_backend",
         "gpu_memory_utilization", "enable_sleep_mode", "enforce_eager", "max_num_seqs", "max_num_batched_tokens",
         "kv_cache_dtype", "quantization", "logprobs_mode", "seed", "trust_remote_code", "disable_log_stats",
         "enable_chunked_prefill", "limit_mm_per_prompt", "mm_processor_kwargs", "logits_processors",
         "create_engine_config"),
    ),
    Used("engine/arg_utils.py", "EngineArgs", ("mm_device_do_normalize",), optional=True),
    Used(
        "sampling_params.py", "SamplingParams",
        ("n", "temperature", "top_p", "top_k", "max_tokens", "min_tokens", "seed", "logprobs", "flat_logprobs",
         "extra_args", "detokenize"),
    ),
    Used(
        "entrypoints/llm.py", "LLM",
        ("generate", "collective_rpc", "apply_model", "reset_prefix_cache", "reset_mm_cache", "sleep", "wake_up",
         "get_tokenizer"),
    ),
    Used("v1/engine/llm_engine.py", "LLMEngine", ("reset_encoder_cache",)),
    Used("entrypoints/llm.py", "LLM.sleep", ("level",)),
    Used("entrypoints/llm.py", "LLM.wake_up", ("tags",)),
    Used("v1/worker/gpu_model_runner.py", "GPUModelRunner.reload_weights", ("weights_iterator",)),
    Used("v1/worker/gpu/model_runner.py", "GPUModelRunner", ("reload_weights", "reset_encoder_cache")),
    Used("config/vllm.py", "VllmConfig", ("use_v2_model_runner",)),
    Used(
        "v1/sample/logits_processor/interface.py", "LogitsProcessor",
        ("validate_params", "apply", "is_argmax_invariant", "update_state"),
    ),
    Used("v1/sample/logits_processor/interface.py", "BatchUpdate", ("removed", "added", "moved")),
    Used("v1/sample/logits_processor/interface.py", "MoveDirectionality", ("SWAP",)),
    Used(SECOND, "LogitsProcessor", ("validate_params", "add_request", "apply_staged_writes", "apply"), optional=True),
    Used(
        SECOND, "LogitsContext", ("idx_mapping_np", "expanded_idx_mapping", "pos"), optional=True
    ),
    Used(SECOND, "LogitsProcRequestState", ("max_num_reqs", "device", "prompt_len"), optional=True),
)  # fmt: skip


@cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def definition(nodes: list[ast.stmt], name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """The class or function of this name among statements."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return next((node for node in nodes if isinstance(node, kinds) and node.name == name), None)


def known(root: Path, file: Path, owner: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """Arguments of a function; fields, methods and attributes of a class and of its bases in vLLM's own files."""
    if not isinstance(owner, ast.ClassDef):
        return {each.arg for each in (*owner.args.args, *owner.args.kwonlyargs)}
    found = set()
    for node in owner.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found |= {node.name} | (known(root, file, node) if node.name == "__init__" else set())
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    for base in owner.bases:
        place = locate(root, file, ast.unparse(base).split("[")[0].split(".")[-1])
        found |= known(root, *place) if place is not None else set()
    return found


def locate(root: Path, file: Path, name: str) -> tuple[Path, ast.ClassDef | ast.FunctionDef] | None:
    """Where a name of a file is defined: there, or in the module of vLLM that it is imported from."""
    here = definition(tree(file).body, name)
    if here is not None:
        return file, here
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            module = (node.module or "").removeprefix("vllm").strip(".").replace(".", "/")
            for path in (root / f"{module}.py", root / module / "__init__.py"):
                if path.is_file() and path != file:
                    return locate(root, path, name)
    return None


def missing(root: Path, used: Used) -> list[str]:
    """What a version lacks of it; the file itself where that is not there."""
    file = root / used.file
    if not file.is_file():
        return [used.file]
    first, *rest = used.owner.split(".")
    place = locate(root, file, first)
    if place is None:
        return [first]
    file, owner = place
    for name in rest:
        owner = definition(owner.body, name)
        if owner is None:
            return [used.owner]
    return sorted(set(used.names) - known(root, file, owner))


def version(root: Path) -> str:
    """Of the package in this folder, by the metadata beside it."""
    found = sorted(path.name for path in root.parent.glob("vllm*.dist-info"))
    return found[0].removesuffix(".dist-info") if found else str(root)


def vllm_table(folders: list[str]) -> int:
    """Print the table; 1 when a version lacks what is not optional."""
    installed = find_spec("vllm")
    roots = [Path(folder) / "vllm" for folder in folders] or [Path(installed.submodule_search_locations[0])]
    print(f"| what is used | {' | '.join(map(version, roots))} |\n|---|{'---|' * len(roots)}")
    failed = False
    for used in USED:
        lacks = [missing(root, used) for root in roots]
        failed |= any(lacks) and not used.optional
        cells = ["all" if not each else f"lacks {', '.join(each)}" for each in lacks]
        print(f"| `{used.owner}` of {used.file}: {len(used.names)} name(s) | {' | '.join(cells)} |")
    return int(failed)


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
    engine, *given = sys.argv[1:]
    sys.exit(vllm_table(given) if engine == "vllm" else sglang_signatures(*given))
