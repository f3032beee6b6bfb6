"""What a file of another system means here: a command, and what of it has no counterpart."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...config.leaves import KEYWORD, Names, Setting, names_of
from ...config.load import merge, parse_run
from ...config.spellings import ALGORITHMS, COMMA_LISTS
from ...errors import ConfigError
from .shell import Outside, ShellText, settings_of

SYSTEMS = {
    "trl": "TRL: the keywords of its configuration and trainer in a Python file, a shell script, or YAML",
    "verl": "verl: YAML, or a shell script with its overrides",
    "openrlhf": "OpenRLHF: a shell script",
    "easyr1": "EasyR1: YAML, or a shell script with its overrides",
}
OTHER_NAMES = {  # too short to be understood anywhere else, or of another meaning there
    ("trl", "model"): "pretrain", ("trl", "r"): "lora_rank", ("trl", "delta"): "dual_clip",
    ("trl", "train_dataset"): "prompt_data", ("trl", "dataset_name"): "prompt_data",
    ("trl", "eval_dataset"): "eval_data", ("openrlhf", "label_key"): "reference_key",
    ("openrlhf", "output_key"): "response_key",
}  # fmt: skip
# What a file trains by: a class of TRL, `trl grpo`, or a module of OpenRLHF or verl.
KINDS = re.compile(r"(\w+)Trainer\(|\btrl (\w+)\b|openrlhf\.cli\.train_([a-z]+)|verl\.trainer\.\w*(sft)\w*")
VERBS = {"grpo": "grpo", "rloo": "rloo", "ppo": "ppo", "sft": "sft"}
ESTIMATORS = ("advantage_estimator", "algorithm.adv_estimator", "algo.advantage.estimator")
OTHER_KINDS = ("dpo", "kto", "orpo", "cpo", "bco", "reward", "prm", "rm", "gkd", "kd", "xpo", "nashmd")
NO_COUNTERPART = "nothing here has this name or is like it"
UNSET = "it is not set there: the default stands"
OF_FILES = ("config", "config_name", "config_path")  # which hold settings of their own


@dataclass
class Converted:
    """command: for a shell. left_out: what has no counterpart, and why."""

    command: str
    left_out: dict[str, str] = field(default_factory=dict)


def convert(system: str, file: Path) -> Converted:
    """Raises ConfigError for another system, and for a file that cannot be read or holds no settings."""
    if system not in SYSTEMS:
        raise ConfigError(f"there is no converter for {system!r}; there are: {', '.join(SYSTEMS)}")
    taken: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    found = [
        (name if isinstance(value, Outside) else OTHER_NAMES.get((system, name), name), value)
        for name, value in _settings(file)
    ]
    if not found:
        raise ConfigError(f"{file} holds no settings; what is read of {SYSTEMS[system]}")
    verb = _verb(system, file, dict(found))
    names = names_of(ALGORITHMS[verb][0].schema)
    for name, value in _used(system, dict(found), left_out):
        try:
            taken |= _ours(names, Setting(name, value, file.name))
            if why := names.needless(Setting(name, value, file.name)):
                left_out[name] = why
        except ConfigError as error:
            left_out[name] = _why(names, name, value, error)
    _leave_out_refused(verb, taken, left_out)
    words = [f"--{name} {_shell(value)}" for name, value in taken.items()]
    return Converted(" \\\n    ".join([f"lightrft-visual train {verb}", *words]), left_out)


def _verb(system: str, file: Path, found: Mapping[str, Any]) -> str:
    """The algorithm of the command. Raises ConfigError for a kind of training that has no counterpart."""
    kinds = [next(filter(None, each.groups())).lower() for each in KINDS.finditer(file.read_text())]
    known = [verb for kind in kinds for end, verb in VERBS.items() if kind.endswith(end)]
    if not known and (other := [kind for kind in kinds if kind.endswith(OTHER_KINDS)]):
        raise ConfigError(
            f"{file} trains by {other[0]}, which no command here does for models that answer in text; there are "
            f"{', '.join(VERBS)}"
        )
    verb = known[-1] if known else "grpo"
    usual = system in ("verl", "openrlhf") and verb != "sft"  # gae unless they say otherwise
    return ("grpo" if found.keys() & {*ESTIMATORS} else "ppo") if usual else verb


def _used(system: str, found: dict[str, Any], left_out: dict[str, str]) -> Iterable[tuple[str, Any]]:
    """The settings that count there. verl and EasyR1 hold weights and forms of a KL that other settings turn off;
    EasyR1 names a split behind the data's name, verl a reward's file and function apart; OpenRLHF's length of an
    overlong buffer turns it on. verl and EasyR1 compute in bf16 unless they say otherwise."""
    if system in ("verl", "easyr1"):
        found.setdefault("bf16", True)
    path, function = (found.get(f"custom_reward_function.{end}") for end in ("path", "name"))
    if isinstance(path, str) and isinstance(function, str):
        found["reward_fn"] = type(path)(f"{path}:{function}")
        del found["custom_reward_function.path"], found["custom_reward_function.name"]
    if system == "openrlhf" and found.get("overlong_buffer_len") is not None:
        found["overlong_buffer"] = True
    if str(found.get("algorithm.kl_ctrl.type")) == "adaptive":
        for end, own in (("target_kl", "kl_target"), ("horizon", "kl_horizon")):
            found[own] = found.pop(f"algorithm.kl_ctrl.{end}", None)
        del found["algorithm.kl_ctrl.type"]
    actor = "actor_rollout_ref.actor."
    off, in_loss, in_reward = (
        str(found.get(name)).lower()
        for name in ("algorithm.disable_kl", f"{actor}use_kl_loss", "algorithm.use_kl_in_reward")
    )
    idle = {"algorithm.kl_coef": "disable_kl", "algorithm.kl_penalty": "disable_kl"} if off == "true" else {}
    if "none" not in (in_loss, in_reward) or in_loss == "true":  # verl, and it says where its KL is
        if in_reward != "true":
            idle |= dict.fromkeys(("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"), "use_kl_in_reward")
    if in_loss != "true":
        idle |= dict.fromkeys((f"{actor}kl_loss_coef", f"{actor}kl_loss_type"), "use_kl_loss")
    for name in found.keys() & idle.keys():
        left_out[name] = f"{idle[name]} says that it does not count there"
        del found[name]
    if off == "true" or (in_loss in ("false", "none") and in_reward == "false"):
        found["init_kl_coef"] = 0
    for name, split in (("data.train_files", "prompt_split"), ("data.val_files", "eval_split")):
        if re.fullmatch(r"[\w.-]+/[\w.-]+@\w+", str(found.get(name))):
            found[name], _, found[split] = str(found[name]).partition("@")
    return found.items()


def _ours(names: Names, setting: Setting) -> dict[str, Any]:
    """{our name: value}. Raises ConfigError for a name or a value that means nothing here."""
    found: dict[str, Any] = {}
    if setting.value is None or isinstance(setting.value, Outside):
        raise ConfigError(UNSET)
    for each in names.translated(setting):
        reached = names.find(each.name)
        if not reached:
            raise ConfigError(NO_COUNTERPART)
        merge(names, [each])  # whether the value suits
        values = each.value if len(reached) > 1 else [each.value]
        for (leaf, inside), value in zip(reached, values):
            found[".".join(filter(None, (leaf.path if inside else leaf.name, inside)))] = (
                _listed(value) if leaf.name in COMMA_LISTS else value
            )
    return found


def _listed(value: Any) -> Any:
    """A list in its own words, where a setting takes several with commas."""
    if isinstance(value, str) and re.fullmatch(r"\[.*\]", value, re.DOTALL):
        value = type(value)(",".join(re.sub(r"[\"'\s]", "", value[1:-1]).split(",")))
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _why(names: Names, name: str, value: Any, error: ConfigError) -> str:
    if value is None:
        return UNSET
    if name.replace("-", "_") in OF_FILES:
        return "the file that it names holds settings of its own: convert it as well"
    told = names.hint(name.replace("-", "_"))
    if isinstance(value, Outside):
        return f"{value}{f': {told}' if told else ''}"
    return told or str(error).partition("\n")[0]


def _leave_out_refused(verb: str, taken: dict[str, Any], left_out: dict[str, str]) -> None:
    """Leave out what the whole configuration does not allow, so that the command is one that runs."""
    root, defaults = ALGORITHMS[verb]
    while taken:
        plain = {name: value for name, value in taken.items() if "$" not in str(value)}
        try:
            parse_run(root.schema, [], preset=root.preset, defaults=defaults, settings=plain)
            return
        except ConfigError as error:
            blamed = re.findall(rf"([\w.]+)(?: \(|: ){KEYWORD}", str(error))
            name = next(
                (each for path in blamed[::-1] for each in (path, path.rpartition(".")[2]) if each in plain), ""
            )
            left_out[name or "the whole"] = str(error).partition("\n")[0].replace(f": {KEYWORD}", "")
            if not name:
                return
            del taken[name]


def _shell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value).replace(" ", "") if isinstance(value, list) else str(value)
    if isinstance(value, ShellText) and "$" in text:  # a variable of the shell stays one
        return '"' + re.sub(r'(["\\`])', r"\\\1", text) + '"'
    return shlex.quote(text)


# -- reading ---------------------------------------------------------------------------------------------------------


def _settings(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = file.read_text()
        if file.suffix in (".yaml", ".yml", ".json"):
            tree = yaml.safe_load(text)
            yield from _flat(_resolved(tree) if isinstance(tree, Mapping) else {})
        elif file.suffix == ".py":
            yield from _keywords(ast.parse(text))
        else:
            yield from settings_of(text)
    except (OSError, UnicodeDecodeError, ValueError, SyntaxError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {str(error).partition(chr(10))[0][:200]}") from error


def _resolved(tree: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """With `${section.name}` put in, as far as the file has them all."""
    try:
        return OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException:
        return tree


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", Outside(f"{value} is computed there") if "${" in str(value) else value


def _keywords(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """The keywords of calls such as GRPOConfig(...), as far as they are written out, in the call or in a variable."""
    nodes = list(ast.walk(tree))
    assigned = {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in nodes:
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if not name.endswith(("Config", "Trainer", "Arguments")):
            continue
        if name.endswith("Trainer") and node.args:  # type: ignore[attr-defined]
            yield "model", _literal(node.args[0], assigned)  # type: ignore[attr-defined]
        for keyword in node.keywords:  # type: ignore[attr-defined]
            value = _literal(keyword.value, assigned)
            if keyword.arg is None and isinstance(value, dict):
                yield from value.items()
            elif keyword.arg not in ("args", "peft_config"):
                yield keyword.arg or f"**{ast.unparse(keyword.value)}", value


def _literal(node: ast.expr, assigned: Mapping[str, ast.expr]) -> Any:
    """The value of an expression that is written out, or a name for one; of a loaded model the name that it has."""
    if isinstance(node, ast.Name):
        node = assigned.get(node.id, node)
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained") and node.args:
        return _literal(node.args[0], assigned)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "load_dataset" and len(node.args) == 1:
        if all(each.arg == "split" and ast.unparse(each.value) == "'train'" for each in node.keywords):
            return _literal(node.args[0], assigned)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return Outside(f"{ast.unparse(node)} is computed there")
