"""The Dockerfile names files that exist, copies what the set-up reads, and passes its linter."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
STEPS = [
    (line.split()[0], line.partition(" ")[2])
    for line in re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.M)).splitlines()
    if line.strip()
]


def copied() -> list[str]:
    return [name for step, rest in STEPS if step == "COPY" for name in rest.split()[:-1]]


def test_what_is_copied_exists():
    assert copied() and all((ROOT / name).exists() for name in copied())


def test_scripts_that_it_runs_are_copied():
    scripts = [word for step, rest in STEPS if step == "RUN" for word in shlex.split(rest) if word.endswith(".sh")]
    assert scripts == ["scripts/setup.sh"]
    assert all((ROOT / script).is_file() and script.split("/")[0] in copied() for script in scripts)


def test_every_file_that_the_set_up_reads_is_copied():
    setup = (ROOT / "scripts" / "setup.sh").read_text()
    (listed,) = re.findall(r"^files=\((.*)\)$", setup, re.M)
    read = [name.strip('"').replace("$device", "cuda") for name in listed.split()]
    assert all((ROOT / name).is_file() for name in read)
    assert all(name.split("/")[0] in copied() for name in read)


def test_its_python_is_supported_and_its_command_exists():
    (requires,) = re.findall(r'requires-python = "(.*)"', (ROOT / "pyproject.toml").read_text())
    assert requires == ">=3.11,<3.14" and "ubuntu24.04" in TEXT  # whose python3 is 3.12
    assert ("ENTRYPOINT", '["lightrft-visual"]') in STEPS and "lightrft-visual = " in (ROOT / "setup.py").read_text()


def test_hadolint_has_nothing_to_say():
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert linter, "bash scripts/setup.sh installs it"
    done = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
