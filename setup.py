"""Packaging of lightrft_visual. Heavy, host-dependent packages (torch, vLLM) are chosen by scripts/setup.sh."""

import base64
import hashlib
import re
import zipfile
from pathlib import Path

from setuptools import find_packages, setup

try:
    from setuptools.command.bdist_wheel import bdist_wheel
    from setuptools.command.editable_wheel import editable_wheel

    makers = {"bdist_wheel": bdist_wheel, "editable_wheel": editable_wheel}
except ImportError:  # older: the package is installed without the hook
    makers = {}

here = Path(__file__).parent
requirements = [
    line.split("#")[0].strip()
    for line in (here / "requirements.txt").read_text().splitlines()
    if line.split("#")[0].strip()
]
development = {"pytest", "ray", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy", "setuptools", "wheel"}
# Recipes and small prompt sets, which a wheel has no examples/ for.
SHIPPED = {f"lightrft_visual.{name}": f"examples/{name}" for name in ("configs", "datasets")}


def package_name(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ;]", requirement, maxsplit=1)[0].lower()


version = re.search(r'__version__ = "([^"]+)"', (here / "lightrft_visual" / "__init__.py").read_text()).group(1)

HOOK = "lightrft_visual_launchers"


def add_hook(wheel: Path) -> None:
    """Put a copy of strategy/launchers.py into a wheel, with the entry point by which PyTorch calls it in a launcher.

    A copy also where the package stays in its clone (`pip install -e`): PyTorch cannot be imported where an entry names
    what is not there, so entry and code are installed and removed as one, wherever the clone may have gone.
    """
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    if f"{HOOK}.py" in files:
        return
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    points = record.replace("RECORD", "entry_points.txt")
    added = {
        f"{HOOK}.py": (here / "lightrft_visual" / "strategy" / "launchers.py").read_bytes(),
        points: files.get(points, b"") + f"[torch.backends]\nlightrft_visual = {HOOK}:attend\n".encode(),
    }
    lines = [line for line in files[record].decode().splitlines() if line.split(",")[0] not in added]
    for name, content in added.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.insert(0, f"{name},sha256={digest},{len(content)}")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**files, **added, record: "\n".join([*lines, ""]).encode()}.items():
            archive.writestr(name, content)


def with_hook(maker: type) -> type:
    """The command of setuptools that makes a wheel, which then has the hook."""

    class Command(maker):
        def run(self) -> None:
            super().run()
            for wheel in Path(self.dist_dir).glob(f"lightrft_visual-{version}-*.whl"):
                add_hook(wheel)

    return Command


setup(
    name="lightrft_visual",
    version=version,
    packages=[*find_packages(include=["lightrft_visual", "lightrft_visual.*"]), *SHIPPED],
    package_dir=SHIPPED,
    package_data={
        "lightrft_visual": ["py.typed"],
        "lightrft_visual.report": ["templates/*"],
        "lightrft_visual.plan": ["shapes/*.json"],
        "lightrft_visual.configs": ["**/*.yaml"],
        "lightrft_visual.datasets": ["**/*.txt", "**/*.jsonl"],
    },
    install_requires=[r for r in requirements if package_name(r) not in development],
    cmdclass={name: with_hook(maker) for name, maker in makers.items()},
    extras_require={
        "dev": [r for r in requirements if package_name(r) in development],
        "ray": ["ray>=2.40"],
        "wandb": ["wandb>=0.18"],
    },
)
