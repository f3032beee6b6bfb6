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


def test_what_it_copies_runs_and_sets_up_from_exists_and_is_copied():
    copied = [name for step, rest in STEPS if step == "COPY" for name in rest.split()[:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    scripts = [word for step, rest in STEPS if step == "RUN" for word in shlex.split(rest) if word.endswith(".sh")]
    assert scripts == ["scripts/setup.sh"]
    (listed,) = re.findall(r"^files=\((.*)\)$", (ROOT / "scripts" / "setup.sh").read_text(), re.M)
    read = [name.strip('"').replace("$device", "cuda") for name in listed.split()]
    assert all((ROOT / name).is_file() and name.split("/")[0] in copied for name in [*scripts, *read])


def test_its_python_is_supported_and_its_command_exists():
    (requires,) = re.findall(r'requires-python = "(.*)"', (ROOT / "pyproject.toml").read_text())
    assert requires == ">=3.11,<3.14" and "ubuntu24.04" in TEXT  # whose python3 is 3.12
    assert ("ENTRYPOINT", '["lightrft-visual"]') in STEPS and "lightrft-visual = " in (ROOT / "setup.py").read_text()


def test_hadolint_has_nothing_to_say():
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert linter, "bash scripts/setup.sh installs it"
    done = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
