"""Files and folders that settings name: where a relative path may lie, and which of them are not there."""

import ast
import json
import os
import re
import sys
from collections.abc import Container, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import did_you_mean, nearest, other_kind
from ..runtime.files import absent
from ..runtime.masking import shown_url
from ..runtime.packages import OPTIONAL, missing
from . import registry

ROOT_VARIABLES = ("LIGHTRFT_DATA", "VRL_DATA_ROOT")  # folders for data outside the repository; ours, and VRL's
PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = (PACKAGE, PACKAGE.parent / "examples")  # which hold datasets/: as installed, and in the repository
DATA = re.compile(r"\.(jsonl|json|csv|txt|parquet)$")
CODE = re.compile(r"[^,=:]+\.py(?=[:,]|$)")
FUNCTION = re.compile(r"\s*(python:.*|.+\.py:\w+)\s*")  # one that a program gives, or one of a file
FOLDER = re.compile(r"^(/|\./|\.\./|~|[^=:/]+/[^=:/]+/)")  # by path; other words may be names, of a hub or the registry
MODELS = ("pretrain", "critic_pretrain", "teacher_pretrain", "reward_pretrain")
ROWS = ("prompt_data", "eval_data", "pair_data")
OUTPUTS = ("output_dir", "save_path", "ckpt_path")
HERE = "mount or copy that storage, and give a path of this host"
NO_REWARD = (
    "no reward is given; name one by --reward_fn path.py:name, --remote_rm_url URL, reward.components.NAME=WEIGHT or "
    "--reward_recipe (beside --differentiable_reward or --pair_data only --eval_data needs it, which may be left out)"
)
FUNCTIONS = ("reward_fn", "gold_fn", "environment", "tools", "differentiable_reward")
NAMED = re.compile(r"([^,=:]+\.py):(\w*)")


def located(path: str | Path) -> Path:
    """The file or folder that a path means: in the working directory, else below a folder of ROOT_VARIABLES, else,
    where it begins with datasets/, a set that is shipped; the path itself where there is none."""
    given = Path(path).expanduser()
    if given.is_absolute() or os.path.exists(given):
        return given
    roots = [Path(os.environ[name]).expanduser() for name in ROOT_VARIABLES if os.environ.get(name)]
    roots += SHIPPED if given.parts[0] == "datasets" else ()
    return next((root / given for root in roots if os.path.exists(root / given)), given)


def whole(path: str) -> str:
    """A file or folder that is there by its whole path, for processes with another working directory. Anything else,
    such as a hub's name, stays."""
    found = located(path.strip())
    return os.path.abspath(found) if found.exists() else path


def with_whole_paths(text: str | None) -> str | None:
    """A setting with the Python files that it names by whole paths."""
    return text and CODE.sub(lambda found: whole(found.group()), text)


def missing_files(config: Any, names: Container[str] | None = None) -> list[str]:
    """A line for each model folder, file of rows and file of functions that a run's settings name and that is not
    there, for a built-in name with a slip, for a file in place of an output folder, and for a reward that is lacking.
    Names that may be anything else, such as a hub's, are not looked for. config: with all its sections, or with some.
    names: of the settings that are looked at, default all."""
    output, found = getattr(config, "output", None), list[str]()
    for name in OUTPUTS:
        given = getattr(output, name, None)  # else it is in output_dir
        if given and (names is None or name in names):
            found += _output_wrong(name, given)
    found += [NO_REWARD] if getattr(config, "lacks_reward", False) else []
    sections = [getattr(config, name, None) for name in ("model", "data", "reward", "guard", "algorithm", "episodes")]
    for section in filter(None, sections):
        for name in (*MODELS, *ROWS, *FUNCTIONS):
            value = getattr(section, name, None)
            if isinstance(value, str) and (names is None or name in names):
                found += _functions_wrong(name, value) if name in FUNCTIONS else _paths_wrong(name, value, section)
    return list(dict.fromkeys([*found, *_missing_besides(config, names)]))


def _output_wrong(name: str, output: str) -> Iterator[str]:
    """Of a setting that names a folder to write to."""
    if os.path.isfile(output):
        yield f"--{name}: {output} is a file, no folder"
    if "://" in output:
        yield f"--{name}: {shown_url(output)} is a URL; {HERE}"
    folders = Path(output, "_").absolute().parents
    there = next(folder for folder in folders if folder.exists())
    for folder in folders:
        if folder.is_symlink() and not folder.exists():
            yield f"--{name}: {folder} is a link to {folder.readlink()}, which does not exist"
    if there.is_dir() and not os.access(there, os.W_OK):
        yield f"--{name}: {output} cannot be written, since {there} may not be: name another folder"


def _functions_wrong(name: str, value: str) -> Iterator[str]:
    """Of a setting that names functions of files."""
    if name in FUNCTIONS[:2]:
        for part in (part for part in value.split(",") if not FUNCTION.fullmatch(part)):
            scorer, _, weight = map(str.strip, part.partition("="))  # as in flow_grpo's `reward_fn`
            known = name == "reward_fn" and scorer in registry.scorers
            way = f"reward.components.{scorer}={weight or 1}" if known else "path.py:function"
            yield f"--{name}: {part!r} names no function of a file: write {way}"
    for file, function in NAMED.findall(value):
        yield from (f"--{name}: {told}" for told in missing_function(file.strip(), function))


def _paths_wrong(name: str, value: str, section: Any) -> Iterator[str]:
    """Of a setting that names models or data."""
    wanted, known = FOLDER, registry.checkpoint_resolvers.names() if name in MODELS[:3] else []
    if name in ROWS:
        wanted, known = DATA, registry.tasks.names() + registry.drawing_tasks.names()
    for part in map(str.strip, value.split(",")):
        near, there = None if part in known else nearest(part, known), os.path.exists(located(part))
        if "://" in part:
            yield f"--{name}: {shown_url(part)} is a URL; {HERE}, or a name of the hub"
        elif near and not there:
            yield f"--{name}: there is no {part}; did you mean {near!r}?"
        elif (wanted.search(part) or FOLDER.search(part)) and not there:
            yield f"--{name}: {absent(part)}"
        elif wanted is FOLDER and os.path.isfile(part) and not part.endswith(".json"):
            yield f"--{name}: {part} is a file; a model is a folder, or a name of the hub"
        elif name in MODELS[:3] and os.path.isdir(part):
            draws = not hasattr(section, "embedded_family")
            told = _no_model(os.listdir(part), draws) if name == "pretrain" or not draws else None
            if told:
                yield f"--{name}: {part} {told}"


def _no_model(names: Container[str], draws: bool) -> str | None:
    """Why a folder with files of these names is no model that a run trains; draws: it is to be a pipeline."""
    if "adapter_config.json" in names and not draws:
        return "holds an adapter of peft: give the model that it is merged into (merge_and_unload)"
    needed = "model_index.json" if draws else "config.json"
    if needed in names:
        return None
    if "pytorch_lora_weights.safetensors" in names and draws:
        return "holds LoRA of a pipeline: give the pipeline that it is merged into (load_lora_weights, fuse_lora)"
    return f"has no {needed}: name the model's own folder"


def missing_function(path: str, name: str) -> Iterator[str]:
    """What is not there of a function: its file, or what this, which is read and not run, does not define. A file that
    may define names as it runs is left to the run."""
    file = Path(path).expanduser()
    if not file.is_file():
        yield absent(path)
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        yield f"{path} is not Python: {error.args[0]}{where}"
        return
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.AST)]
    bound = {getattr(node, "name", None) or getattr(node, "id", None) for node in nodes}
    bound |= {node.asname or node.name.partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    if not bound & {name, "*", "exec", "globals", "vars", "setattr", "__getattr__"}:
        own = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        yield f"{path} has no function or class {name!r}{did_you_mean(name, [n for n in own if n[0] != '_'])}"


def _missing_besides(config: Any, names: Container[str] | None) -> Iterator[str]:
    """A checkpoint, a URL that is none, what recipes name, and packages that are not installed."""

    def given(section: str, name: str) -> Any:
        return getattr(getattr(config, section, None), name, None) if names is None or name in names else None

    folder = given("output", "resume_from") or "auto"
    if folder != "auto" and not re.search(r"checkpoint-\d+$", folder) and not os.path.exists(folder):
        yield f"--resume_from: there is no folder {folder}; auto takes the newest checkpoint of --output_dir"
    for url in map(str.strip, re.split(r"[,|]", given("reward", "remote_rm_url") or "")):
        if url.endswith(".py"):
            path = re.sub(r"^[A-Za-z_][\w-]*=", "", url)  # it may have a name
            yield from (f"--remote_rm_url: {told}" for told in missing_function(path, "reward_func"))
        elif url and "://" not in url and "=" not in url:
            yield f"--remote_rm_url: {shown_url(url)!r}: write it as http://host:port/path"
    if given("reward", "reward_recipe") or given("reward", "components"):
        yield from registry.services.load("recipes").wrong_names(config.reward)
    if given("guard", "gold_recipe") and hasattr(config, "reward"):
        yield from registry.services.load("recipes").wrong_names(config.guard.gold(config.reward))
    packages = {
        given("rollout", "engine_type"): True,
        "liger_kernel": given("model", "use_liger_kernel"),
        "wandb": given("output", "use_wandb"),
        "tensorboard": given("output", "use_tensorboard"),
        "ray": hasattr(config, "distributed") and config.distributed.split,
    }
    for package, used in packages.items():
        if used and package in OPTIONAL and package not in sys.modules and find_spec(package) is None:
            yield str(missing(package))


def refused_resume(config: Any) -> list[str]:
    """A line where there is no checkpoint to resume from, or where the newest one, by its manifest, has an optimizer
    that this run cannot read. Its files are looked at later."""
    output = config.output
    named = output.resumes_from
    flag = "--resume (--load_checkpoint)" if output.resume_from is None else "--resume_from"
    root = Path((output.ckpt_path or output.output_dir) if named == "auto" else named or os.devnull)
    if named == "auto" and not any(root.glob("*checkpoint-*")):
        told = f"no complete checkpoint in {root} (a run saves some with save_steps); leave it out at the first start"
        return [f"{flag}: {told}"]
    manifests = map(_content, [root / "manifest.json", *root.glob("*checkpoint-*/manifest.json")])
    known = [(content["sequence"], content["model"] or {}) for content in manifests if content.get("resumable")]
    saved = max(known, key=lambda each: each[0], default=(0, {}))[1]
    kind, own = saved.get("kind_of_run", config.kind_of_run), config.kind_of_run
    if kind != own:
        return [f"{flag}: the newest checkpoint of {root} {other_kind(kind, own)}"]
    here = {"zero_stage": config.distributed.zero_stage, "lora_rank": config.model.lora_rank, "bf16": config.model.bf16}
    apart = [n for n in here if saved.get(n, here[n]) != here[n] and (n, {saved[n], here[n]}) != ("zero_stage", {1, 2})]
    told = ", ".join(f"{name} {saved[name]!r} ({here[name]!r} here)" for name in apart)
    way = "resume with that, or name its exported model by --pretrain"
    return [f"{flag}: the newest checkpoint of {root} was trained with {told}: {way}"] if apart else []


def _content(manifest: Path) -> dict[str, Any]:
    """Empty for one that cannot be read, which is said where the files are looked at."""
    try:
        content = json.loads(manifest.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and {"sequence", "model"} <= content.keys() else {}
