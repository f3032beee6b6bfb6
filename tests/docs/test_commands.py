"""Every command that a page shows is one: its flags pass the real loader, the files of the repository exist."""

import importlib.util
import re
import shlex
from pathlib import Path

import click
import pytest

from lightrft_visual import cli
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.spellings import ALGORITHMS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:bash|console|sh)\n(.*?)^```$", re.M | re.S)
START = re.compile(
    r"(?:^|[\s'\"(])(lightrft-visual|python -m (?:lightrft_visual\S*)|(?:examples|scripts)/[\w./]+)(?=\s|$)"
)
END = re.compile(r"\s(?:&&|\|\||[|;&<>]|2>|#)(?:\s|$)|'$")
OWN_FILES = ("my_recipe.yaml",)  # that a page speaks of and does not show


def commands() -> list[tuple[str, str, str]]:
    """(page, what is started, its arguments) of all blocks."""
    found = []
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            lines = re.sub(r"\\\n", " ", block).splitlines()
            for line, answer in zip(lines, [*lines[1:], ""]):
                line = line.removeprefix("$ ")
                if (
                    answer.startswith("error:")
                    or line.startswith(("error:", "#"))
                    or (start := START.search(line)) is None
                ):
                    continue
                rest = line[start.end() :]
                end = END.search(rest)
                found.append((page.name, start[1], rest[: end.start()] if end else rest))
    return found


COMMANDS = commands()


def words(arguments: str) -> list[str]:
    """Arguments, what stands for more of them left out."""
    try:
        split = shlex.split(arguments)
    except ValueError:  # it stands between the quotes of another command
        split = shlex.split(arguments.replace("'", ""))
    given = [word for word in split if word not in ("…", "...", "$@")]
    return [word for word in given if not re.fullmatch(r"(--\S+\s)?\$\{?\w+\}?", word)]


def algorithm_of(script: str) -> str | None:
    """What an example trains; None for one that is no run of the command's."""
    named = re.search(r'train_command\("([\w-]+)"\)', (ROOT / script).read_text())
    return named[1] if named else None


def accepted(algorithm: str, arguments: list[str]) -> None:
    """The loader takes the settings. Raises ConfigError where it does not."""
    root, defaults = ALGORITHMS[algorithm]
    flags = [word for word in arguments if word not in ("--help", "--help-all", "--dry_run")]
    parse_run(root.schema, flags, preset=root.preset, defaults=defaults)


def check_verb(verb: str, arguments: list[str]) -> None:
    """A verb of the command knows its options."""
    if verb in ("train", "plan"):
        if arguments:
            accepted(arguments[0], arguments[1:])
        return
    if verb == "launch":
        launched = arguments[2:] if arguments[0] == "--ranks" else arguments
        return check_verb(launched[0], launched[1:])
    found = cli.cli.commands[verb]
    if isinstance(found, click.Group):
        found, arguments = found.commands[arguments[0]], arguments[1:]
    if verb != "serve-reward":  # which reads its arguments itself
        found.make_parser(click.Context(found)).parse_args(list(arguments))


@pytest.fixture(autouse=True)
def shown_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes that pages show, under their names."""
    monkeypatch.chdir(tmp_path)
    for page in PAGES:
        for block in re.findall(r"^```yaml\n(# \S+\.yaml\n.*?)^```$", page.read_text(), re.M | re.S):
            file = tmp_path / block.splitlines()[0].removeprefix("# ")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block)
    for name in OWN_FILES:
        (tmp_path / name).write_text("defaults:\n  - /base/distributed: zero2\n")


@pytest.mark.plugin("compat")
@pytest.mark.parametrize(("page", "started", "arguments"), COMMANDS)
def test_command_of_a_page_is_accepted(page: str, started: str, arguments: str) -> None:
    given = words(arguments)
    if started in ("lightrft-visual", "python -m lightrft_visual"):
        check_verb(given[0], given[1:])
    elif started.startswith("python -m "):
        module = started.removeprefix("python -m ")
        if "plugins" in module:
            pytest.importorskip(module.rpartition(".")[0], exc_type=ImportError)
        assert importlib.util.find_spec(module) is not None
    else:
        assert (ROOT / started).exists(), started
        algorithm = algorithm_of(started) if started.startswith("examples/train_") else None
        if algorithm is not None:
            accepted(algorithm, given)


def test_start_and_how_to_show_commands() -> None:
    assert len(COMMANDS) > 60
    assert {"README.md", "command.md", "sft.md", "diffusion.md", "rewards.md"} <= {page for page, *_ in COMMANDS}
