"""From command line and YAML layers to one checked configuration, before anything heavy is imported.

Precedence, lowest first: defaults of the schema, those of the script, the preset of the embedded model (only where
``model.pretrain`` ends up as 'embedded'), recipes with their layers in order, the command line in order.
docs/recipes.md shows it.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, get_args

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, MissingMandatoryValue, OmegaConfBaseException

from ..errors import ConfigError, LightRFTVisualError, nearest, refused_as, told_of
from ..runtime.files import Escaped, compose_yaml, write_atomic
from ..runtime.masking import MASK, MASKED_VALUE, holds_secret, mask_text, mask_urls, masked_names, names_secret
from ..runtime.presence import check_launch
from ..runtime.start_up import open_closed_streams
from . import registry
from .command_line import NULL_WORDS, parse_command_line
from .constraints import parts_of, together
from .given_files import missing_files, refused_resume
from .leaves import COMMAND_LINE, KEYWORD, Leaf, Names, Setting, names_of
from .recipes import REFERENCE, LayerReader, load_plugins, yaml_value
from .shared import EMBEDDED, REWARDS
from .spellings import COMMA_LISTS, FOLLOWING, ONE_OF_THESE, PATHS, SWITCHES, UNSET_WORDS, Preset, preset_of
from .vl import RunConfig

RECIPES = ("reward_recipe", "gold_recipe")  # settings that may be inline YAML
# OmegaConf's, whose name may also be made of others; a tab in a mapping's text is an escape.
OF_ENVIRONMENT = re.compile(r"\$\{(?:(?:\s|\\t)*oc\.env|(?:[^{}:$]*\$\{(?:[^{}$]|\$\{[^{}$]*\})*\})+[^{}:$]*:)")
TEXT = "tag:yaml.org,2002:str"
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED, SOURCE = PACKAGE / "configs", PACKAGE.parent / "examples" / "configs"  # setup.py puts one at the other
CONFIG_DIRS = (INSTALLED if INSTALLED.is_dir() else SOURCE,)
OF_SEVERAL = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what each of several ranks is told
TILDES = re.compile(r"(?:^|(?<=[,=])|(?<=, ))~[^/,]*(?=/|,|$)")
LONGEST_NAME = 255  # bytes that a file's name can have
SCRIPT = "the script's default"
Files = Callable[[Any], Sequence[str]] | None


@dataclass(frozen=True)
class ParsedRun:
    """A checked configuration, whether only to show it, and where each leaf that was set got its value from."""

    config: Any
    dry_run: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)  # leaf path -> 'command line' | 'file.yaml:line' | SCRIPT
    notes: tuple[str, ...] = ()  # settings of other systems that ask for what is so anyway


def parse_run(
    schema: type = RunConfig,
    argv: Sequence[str] | None = None,
    *,
    config_dirs: Sequence[Path] = CONFIG_DIRS,
    preset: Preset | None = preset_of,
    defaults: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    files: Files = None,
    wrong: Sequence[LightRFTVisualError] = (),
) -> ParsedRun:
    """Read a run's configuration. Plugins are imported before anything is checked.

    Args:
        schema: the configuration's class.
        argv: words of the command line; None: the process's own.
        config_dirs: are searched for recipes and layers, after the working directory.
        preset: the recipe that lies below all but schema and `defaults` when the embedded model is trained, or a
            function of the chosen settings that names it; default: that of the schema's kind; None: no such recipe.
        defaults: settings of the script itself, such as the algorithm it is named after, below all but the schema.
        settings: those of a program, above all.
        files: says what the sections that are right name and is not there, which is told beside what is wrong, but for
            a dry run; None: nothing is looked for.
        wrong: what was found before.

    Raises:
        ConfigError: one that names every setting that is wrong, and where it was written.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    check_launch()
    names = names_of(schema)
    line = parse_command_line(arguments, names)
    files = None if line.dry_run else files
    reader = LayerReader(names, tuple(Path(folder).resolve() for folder in config_dirs), line.swaps)
    chosen, wrong = list(line.settings), [*wrong, *line.wrong]
    chosen += [Setting(name, value, KEYWORD) for name, value in (settings or {}).items()]
    try:
        chosen[:0] = [setting for name in line.configs for setting in reader.read(name)]
    except ConfigError as error:
        wrong.append(error)
    own = [Setting(name, value, SCRIPT) for name, value in (defaults or {}).items()]
    tree, sources = merge(names, own + chosen, wrong, files)
    load_plugins(_value(tree, "plugins"))
    if preset is not None and _value(tree, "model.pretrain") == EMBEDDED:
        chosen[:0] = _instead_of_presets(tree, sources)
        for _ in range(2):  # sizes that a preset gives may ask for another one
            tree, sources = merge(names, own + _preset(reader, preset, tree, sources) + chosen, files=files)
    reader.check_swaps(line.swaps)
    notes = [f"{each.name} ({each.origin}): {names.needless(each)}" for each in chosen if names.needless(each)]
    try:
        return ParsedRun(_build(names, tree, sources), line.dry_run, sources, tuple(notes))
    except ConfigError as error:  # of the first wrong section, or of what several say
        found, missing = _wrong_sections(names, tree, sources, files)
        raise together([*(found or [error]), *missing]) from None


def _preset(reader: LayerReader, preset: Preset, tree: DictConfig, sources: Mapping[str, str]) -> list[Setting]:
    """Settings of the preset's recipe; for a value without a recipe, or without a value, the schema's own complaint
    comes first."""
    try:
        with told_of("the recipe of the embedded model"):
            return reader.read(preset if isinstance(preset, str) else preset(tree))
    except (ConfigError, OmegaConfBaseException):
        _build(reader.names, tree, sources)
        raise


def _instead_of_presets(tree: DictConfig, sources: Mapping[str, str]) -> list[Setting]:
    """What a preset says of the embedded task's reward, and the score that is enough of it, is unset by another reward,
    its gold by other prompts, its steps by passes that are asked for."""
    named = any(_value(tree, f"reward.{name}") for name in REWARDS)
    other = _value(tree, "data.prompt_data") not in (EMBEDDED, None)
    unset = {"reward.reward_recipe": named, "guard.gold_recipe": other and _value(tree, "guard") is not None}
    embedded = [task.training_reward for task in registry.drawing_tasks]
    unset["algorithm.score_target"] = _value(tree, "algorithm.differentiable_reward") not in (None, *embedded)
    passes = "train.num_episodes" in sources and "train.max_steps" not in sources
    steps = [Setting("train.max_steps", -1, SCRIPT)] if passes else []
    return [Setting(path, None, SCRIPT) for path, when in unset.items() if when] + steps


def load_config(schema: type = RunConfig, argv: Sequence[str] | None = None, **options: Any) -> Any:
    """The configuration alone; with ``--dry_run`` it is printed as YAML and the process exits with 0.

    Options and errors as for parse_run.
    """
    run = parse_run(schema, argv, **options)
    if run.dry_run:
        _print_once(resolved_yaml(run.config).removesuffix("\n"))
        raise SystemExit(0)
    return run.config


def _show_plan(config: Any) -> int:
    """Print the plan of a run; the exit code of a dry run. Raises ConfigError without the plug-in that plans."""
    if os.environ.get("RANK", "0") != "0" or config.plan is None:
        return 0
    with redirect_stdout(sys.stderr):  # DeepSpeed logs to the output, which here is one YAML document
        text, code = registry.services.load("memory_plan").dry_run(config)
    print("\n".join(f"# {line}".rstrip() for line in text.splitlines()))
    return code


def config_or_exit(schema: type = RunConfig, argv: Sequence[str] | None = None, **options: Any) -> Any:
    """load_config for a script: a ConfigError is one line on stderr and exit code 2.

    ``--dry_run`` prints the run's plan behind the configuration, as comments of the YAML; the exit code is 1 where the
    run does not fit on a device that was named (plan_device).
    """
    open_closed_streams()
    try:
        run = parse_run(schema, argv, files=missing_files, **options)
        for note in run.notes:
            _print_once(f"note: {note}", sys.stderr)
        if run.dry_run:
            _print_once(resolved_yaml(run.config).removesuffix("\n"))
            raise SystemExit(_show_plan(run.config))
        if missing := missing_files(run.config) + refused_resume(run.config):
            raise together([ConfigError(line) for line in missing])
        check_ranks(run.config)
        return run.config
    except ConfigError as error:
        _print_once(f"error: {error}", sys.stderr)
        raise SystemExit(2) from error


def check_ranks(config: Any) -> None:
    """Raise ConfigError before a run whose launcher numbers it and leaves out what else several ranks need."""
    if not os.environ.get("RANK") or os.environ.get("WORLD_SIZE") == "1":
        return
    told = {"LOCAL_RANK"} if config.distributed.local_rank >= 0 else set()  # some launchers give it as a setting
    if missing := [name for name in OF_SEVERAL if not os.environ.get(name) and name not in told]:
        raise ConfigError(
            f"the environment variable RANK is set without {', '.join(missing)}: set what a launcher does, start the "
            "run by deepspeed or torchrun, or unset RANK for a run of one rank"
        )


def _print_once(text: str, file: TextIO | None = None) -> None:
    """Print in the first rank alone, as the launcher numbers them, or in one that is none of them; a script that runs
    alone is that rank."""
    rank, ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and ranks.isdecimal() and 0 < int(rank) < int(ranks)):
        Escaped(file or sys.stdout).write(f"{text}\n")


def merge(
    names: Names, settings: Sequence[Setting], wrong: Sequence[LightRFTVisualError] = (), files: Files = None
) -> tuple[DictConfig, dict[str, str]]:
    """Lay settings over the schema's defaults. Returns the tree and the origin of each leaf.

    Args:
        names: every spelling of the schema's leaves.
        settings: in order; the last one of a leaf wins.
        wrong: what was found before.
        files: as of parse_run.

    Raises:
        ConfigError: of all that is wrong together; sections that a wrong setting may belong to are not checked then.
    """
    tree, wrong = names.defaults(), [*wrong, *names.said_twice(settings)]
    sources: dict[str, str] = {}
    for written in settings:
        try:
            for index, setting in enumerate(names.translated(written)):
                _lay(names, tree, sources, setting, beside=index > 0)
        except ConfigError as error:
            wrong.append(error)
    wrong += _masked(tree)
    if wrong:
        try:
            load_plugins(_value(tree, "plugins"))  # which may add names
        except ConfigError as error:
            raise together([*wrong, error]) from error
        raise together(sum(_wrong_sections(names, tree, sources, files), wrong))
    return tree, sources


def _value(tree: DictConfig, path: str) -> Any:
    """None too where it refers to what is not there: sections say so of values that they are made of."""
    return OmegaConf.select(tree, path, throw_on_resolution_failure=False)


def _masked(tree: DictConfig) -> Iterator[ConfigError]:
    """Secrets that a run's file has left out; those of rewards are asked for where the rewards are made."""
    for section, values in OmegaConf.to_container(tree).items():
        for name in masked_names(values) if isinstance(values, dict) and section != "reward" else ():
            yield ConfigError(f"{section!s}: {name} is {MASK}, as the file of a run has it; give the value")


def _lay(names: Names, tree: DictConfig, sources: dict[str, str], setting: Setting, beside: bool) -> None:
    """One setting into the tree; what a word says `beside` its first only where its origin does not. Or ConfigError."""
    if not (found := names.find(setting.name)):
        if names.passed_over(setting):
            return
        raise names.unknown(setting.name, setting.origin)
    for (leaf, inside), value in zip(found, _shared(setting, len(found)), strict=True):
        path = f"{leaf.path}.{inside}" if inside else leaf.path
        if beside and sources.get(path) == setting.origin:
            continue
        before = None if sources.get(path) in (None, COMMAND_LINE, KEYWORD) else _value(tree, path)
        with refused_as(ConfigError, f"{path} ({setting.origin})"):
            read = _read(leaf, inside, value, setting.origin)
            _assign(tree, path, leaf, read, setting.origin)
        sources[path] = setting.origin
        if read is not None:
            _unset_others(names, tree, path, sources, before)


def _wrong_sections(
    names: Names, tree: DictConfig, sources: dict[str, str], files: Files
) -> tuple[list[ConfigError], list[ConfigError]]:
    """What sections say by themselves of the values that were set, and what those that are right name and is not
    there."""
    found, right = [], SimpleNamespace()
    sections = (each for each in map(str, tree) if not OmegaConf.is_interpolation(tree, each))
    for section in (each for each in sections if isinstance(tree[each], DictConfig)):
        own = {path: origin for path, origin in sources.items() if path.startswith(f"{section}.")}
        try:
            setattr(right, section, _build(names, tree[section], own))
        except ConfigError as error:
            found += [error] if own else []
    return found, [ConfigError(line) for line in (files(right) if files else ())]


def _unset_others(names: Names, tree: DictConfig, path: str, sources: dict[str, str], before: Any) -> None:
    """Of settings that say the same thing the last one counts. What a file, such as a run's own, says of a setting that
    follows another is no more than its default where the command gives that one another value than a file `before`."""
    others = [other for same in ONE_OF_THESE if path in same for other in same if other != path]
    follower, origin = FOLLOWING.get(path, ""), sources[path]
    if follower and origin in (COMMAND_LINE, KEYWORD) and sources.get(follower) != origin:
        others += [follower] if before not in (None, _value(tree, path)) else []
    for other in others:
        if other in names.leaves and names.leaves[other].optional:
            OmegaConf.update(tree, other, None)
            sources.pop(other, None)


def _shared(setting: Setting, count: int) -> list:
    """The values of a setting that reaches ``count`` leaves."""
    if count == 1:
        return [setting.value]
    values = setting.value.strip("[]").split(",") if isinstance(setting.value, str) else setting.value
    if not isinstance(values, list) or len(values) != count:
        raise ConfigError(f"{setting.name} ({setting.origin}) takes {count} values, found {setting.value!r}")
    return values


def _assign(tree: DictConfig, path: str, leaf: Leaf, value: Any, origin: str) -> None:
    if mask_urls(str(value)) != str(value):
        raise ConfigError(
            f"{path} ({origin}) holds a URL with a password, a token or a parameter that may be one in it, which would "
            "end up in files: put the token in an environment variable and name that variable (reward_token_env for "
            "remote rewards)"
        )
    if OF_ENVIRONMENT.search(str(value)):
        raise ConfigError(f"{path} ({origin}) reads the environment, whose values do not belong in files; write it out")
    try:
        OmegaConf.update(tree, path, value, merge=False)
    except OmegaConfBaseException as error:
        if leaf.name in SWITCHES:
            raise ConfigError(f"{path} ({origin}) takes true or false, or nothing: {SWITCHES[leaf.name]}") from None
        shown = "null" if value is None else repr(value)
        raise ConfigError(f"{path} is {shown} ({origin}){_instead(leaf, path != leaf.path, error)}") from error


def _instead(leaf: Leaf, inside: bool, error: Exception) -> str:
    """What to write instead of a leaf's value that cannot be read, or of that of one key inside it."""
    if isinstance(error, GrammarParseError):
        return f"; {REFERENCE}"
    takes = get_args(leaf.hint)[-1].__name__ if inside else leaf.type_name
    return f"{', not YAML' if isinstance(error, yaml.YAMLError) else ''}; it takes: {takes}"


def _read(leaf: Leaf, inside: str, value: Any, origin: str) -> Any:
    """A value as the leaf's type wants it, from command line text or from YAML; type checks are left to OmegaConf."""
    if isinstance(value, str) and value in (*NULL_WORDS, *UNSET_WORDS.get(leaf.name, ())) and leaf.optional:
        return None
    if leaf.kind == "text":
        value = _as_text(_json_list(value, leaf.name in (*PATHS, "tools")) if leaf.name in COMMA_LISTS else value)
        if leaf.name not in PATHS or not isinstance(value, str):
            return value
        _check_path_names(value, leaf.path, origin)
        return _at_home(value, leaf.name in COMMA_LISTS)
    if inside or leaf.kind in ("mapping", "any"):
        as_text = isinstance(value, str) and (not inside or origin == COMMAND_LINE)
        return _parse(value, leaf, inside, origin) if as_text else value
    if leaf.kind == "list":
        return _as_list(value, leaf, origin)
    return value


def _check_path_names(value: str, path: str, origin: str) -> None:
    """Refuse a name that no file can have; asked for, the system answers with an error of its own."""
    parts = re.split(r"[/,=:|{}\[\]\s]", value) if "://" not in value else ()
    longest = max(map(os.fsencode, parts), key=len, default=b"")
    if len(longest) > LONGEST_NAME:
        shown = longest[:40].decode(errors="replace")
        told = f"the name {shown}... is of {len(longest)} bytes, more than a file's can be"
        raise ConfigError(f"{path} ({origin}): {told}")


def _at_home(value: str, several: bool) -> str:
    """A path with its ~ or ~user spelled out, also behind the commas and name= of a list of several."""
    return re.sub(TILDES if several else r"^~[^/]*(?=/|$)", lambda found: os.path.expanduser(found[0]), value)


def _json_list(value: Any, of_files: bool) -> Any:
    """Text that is a JSON list, or a mapping of names (LightRFT's reward models), as a list; anything else as it is.
    of_files: so is text in brackets without quotes, a pattern; of other settings it is the list that it looks like."""
    try:
        found = json.loads(value) if isinstance(value, str) and value.startswith(("[", '{"')) else value
    except ValueError:
        return value if of_files or not value.endswith("]") else re.sub(r"[\[\]\s'\"]", "", value)
    return [f"{name}={item}" for name, item in found.items()] if isinstance(found, dict) else found


def _as_text(value: Any) -> Any:
    """Text fields that hold a comma-separated list or inline YAML may be written as YAML lists and mappings."""
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, bool | list | dict) else value


def _as_list(value: Any, leaf: Leaf, origin: str) -> Any:
    if not isinstance(value, str):
        return value if value is None or isinstance(value, list) else [value]
    if value.startswith("["):
        return _parse(value, leaf, "", origin)
    return [item.strip() for item in value.split(",") if item.strip()]


def _parse(text: str, leaf: Leaf, inside: str, origin: str) -> Any:
    try:
        return yaml_value(text)
    except (yaml.YAMLError, GrammarParseError) as error:
        path = ".".join(filter(None, (leaf.path, inside)))
        raise ConfigError(f"{path} is {text!r} ({origin}){_instead(leaf, bool(inside), error)}") from error


def _build(names: Names, tree: DictConfig, sources: Mapping[str, str]) -> Any:
    """Turn a tree into the schema's dataclasses, which runs their checks. Raises ConfigError with the origins."""
    try:
        return OmegaConf.to_object(tree)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value ({MISSING}); it must be given") from error
    except OmegaConfBaseException as error:
        raise ConfigError(_unresolved(names, sources, error)) from error
    except ConfigError as error:
        raise together([ConfigError(_with_origins(text, sources)) for text in parts_of(error)]) from error


def _unresolved(names: Names, sources: Mapping[str, str], error: OmegaConfBaseException) -> str:
    """What ${...} of a value fails at, where the value was written, and what may be meant."""
    key, told = str(error.full_key), str(error).splitlines()[0]
    if missing := re.match("Interpolation key '(.+?)' not found", told):
        found = [".".join(filter(None, (leaf.path, inside))) for leaf, inside in names.find(missing[1])]
        near = found[0] if found else nearest(missing[1], names.leaves)
        told += f"; did you mean '${{{near}}}'?" if near not in (None, missing[1]) else ""
    around = [path for path in sources if key.startswith(path) and key[len(path) :][:1] in ("", ".", "[")]
    return f"{key} ({sources[max(around, key=len)]}): {told}" if around else f"{key}: {told}"


def _with_origins(text: str, sources: Mapping[str, str]) -> str:
    words = set(re.findall(r"\w+", text))
    origins = [f"{path}: {origin}" for path, origin in sources.items() if path.rpartition(".")[2] in words]
    return f"{text} ({'; '.join(origins)})" if origins else text


def resolved_yaml(config: Any) -> str:
    """The whole configuration as YAML that loads to the same one, but for secrets: passwords and tokens inside URLs and
    texts of settings whose names say that they are secret are ***, which is refused where it is read again. So are
    well-known keys and values of secret variables in settings of rewards."""
    return OmegaConf.to_yaml(OmegaConf.create(_written(asdict(config))))


def _written(value: Any, name: str = "", of_reward: bool = False) -> Any:
    if isinstance(value, dict):
        inside = of_reward or name == "kwargs"
        return {key: _written(item, str(key), inside) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_written(item, name, of_reward) for item in value]
    if mask := _mask_of(name, value, of_reward):
        return mask
    if isinstance(value, str):  # values are final here: what looks like an interpolation is text
        return mask_urls(_without_secrets(value) if name in RECIPES else value).replace("${", "\\${")
    return value


def _mask_of(name: str, value: Any, of_reward: bool) -> str | None:
    """What is written in place of a secret; None for other values."""
    if names_secret(name, value):
        return MASK
    return MASKED_VALUE if of_reward and isinstance(value, str) and holds_secret(value) else None


def _without_secrets(recipe: str) -> str:
    """Inline YAML as it is, but for the secrets in it."""
    try:
        root = compose_yaml(recipe)
    except yaml.YAMLError:
        return mask_text(recipe)
    found = list(_secrets(root))
    for node, mask in found:
        node.tag, node.value, node.style = TEXT, mask, '"'
    return yaml.serialize(root, Dumper=yaml.SafeDumper, width=math.inf, allow_unicode=True) if found else recipe


def _secrets(node: yaml.Node | None, name: str = "", depth: int = 0) -> Iterator[tuple[yaml.ScalarNode, str]]:
    """The texts and numbers that are secret, with what takes their place. Labels, lists, entries and their parts come
    first, and settings of a reward below them; a label is no name of a setting."""
    if isinstance(node, yaml.ScalarNode) and node.tag in (TEXT, *NUMBERS):
        mask = _mask_of(name, 0 if node.tag in NUMBERS else node.value, depth > 3)
        if mask:
            yield node, mask
    for part in node.value if isinstance(node, yaml.CollectionNode) else ():
        key, item = part if isinstance(part, tuple) else (None, part)
        yield from _secrets(item, str(key.value) if key and depth else name, depth + 1)


def write_resolved(config: Any, path: str | os.PathLike[str]) -> Path:
    """Write resolved_yaml to a file, as a whole, making its folder. Returns the path."""
    write_atomic(Path(path), resolved_yaml(config))
    return Path(path)
