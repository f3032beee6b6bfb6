"""Diffusion runs one after the other in one process, and what they leave: FOLDER/facts.json and a folder of each."""

import csv
import json
from pathlib import Path

import torch

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import load_config
from lightrft_visual.errors import LightRFTVisualError
from lightrft_visual.trainer.diffusion.build import build_diffusion_trainer


def rows(folder: Path, name: str, file: str = "metrics.csv") -> list[dict[str, str]]:
    """Of a run; none where there is no such file."""
    path = folder / name / file
    return list(csv.DictReader(path.open(newline="", encoding="utf-8"))) if path.is_file() else []


def run(folder: Path, name: str, flags: str) -> dict[str, object]:
    """What a run with these flags leaves, {folder} filled in: its error and text, or its metrics and updates, and by
    part of the model what weights were trained (of LoRA, where there is some) and moved; the steps that were made."""
    argv = [*flags.format(folder=folder).split(), "--output_dir", str(folder / name)]
    try:
        trainer = build_diffusion_trainer(load_config(DiffusionRunConfig, argv, preset=None))
        policy = trainer.parts.policy
        named = {key: value for key, value in policy.named_parameters() if "lora" in key or policy.lora.rank == 0}
        before = {key: value.detach().clone() for key, value in named.items()}
        metrics = trainer.fit()
        trainer.close()
    except LightRFTVisualError as error:
        return {"error": type(error).__name__, "text": str(error), "steps": len(rows(folder, name))}
    moved = {key.split(".")[1] for key in named if not torch.equal(before[key], named[key])}
    return {
        "metrics": metrics, "updates": trainer.updates, "moved": sorted(moved),
        "adapted": sorted({key.split(".")[1] for key in named}), "steps": len(rows(folder, name)),
    }  # fmt: skip


def run_all(folder: Path, base: str, runs: dict[str, str]) -> None:
    facts = {name: run(folder, name, f"{base} {flags}") for name, flags in runs.items()}
    (folder / "facts.json").write_text(json.dumps(facts))


def facts(folder: Path, name: str) -> dict:
    return json.loads((folder / "facts.json").read_text())[name]
