"""Saving, resuming and stopping a run, between the loop and the checkpoint manager."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..checkpoint.manager import CheckpointManager, resolve_resume
from ..checkpoint.state import load_state, rng_state, save_state, set_rng_state
from ..config.schema import OutputConfig
from ..errors import CheckpointError
from ..strategy import distributed

if TYPE_CHECKING:
    from .policy_trainer import PolicyTrainer


class RunState:
    """Checkpoints of one trainer. SIGTERM asks for a checkpoint and an orderly end after the current step."""

    def __init__(self, trainer: PolicyTrainer, output: OutputConfig):
        self.trainer, self.output = trainer, output
        best = output.best_metric
        keep_best = (best, "max") if best else None
        self.manager = CheckpointManager(output.ckpt_path or output.output_dir, output.max_ckpt_num, keep_best)
        self._stop = False
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._stop = True

    def stop_requested(self) -> bool:
        """Whether any rank was asked to stop; all ranks get the same answer."""
        return distributed.all_reduce_max(torch.tensor([float(self._stop)])).item() > 0

    def save(self) -> Path:
        return self.manager.save(self.trainer.step, self._write, metrics=self.trainer.latest_eval)

    def save_final(self, folder: Path) -> None:
        """The exported model, in a folder of its own (written aside and renamed like every checkpoint)."""
        final = CheckpointManager(folder.parent, 1)
        final.save(self.trainer.step, self.trainer.export, name=folder.name, metrics=self.trainer.latest_eval)

    def resume(self) -> None:
        """Load what `resume_from` names. Raises CheckpointError when there is nothing complete to load."""
        source = self.output.resume_from or ("auto" if self.output.load_checkpoint else None)
        if source is None:
            return
        folder = resolve_resume(source, self.manager.root)
        self._read(folder)
        self.trainer.recorder.cut_back(self.trainer.step)
        self.trainer.console.message(f"resumed from {folder} at step {self.trainer.step}")

    def _write(self, folder: Path) -> None:
        self.trainer.save_engines(folder)
        state = {
            "step": self.trainer.step,
            "world_size": distributed.world_size(),
            "nonfinite_in_a_row": self.trainer.nonfinite_in_a_row,
            "latest_eval": self.trainer.latest_eval,
            "trainer": self.trainer.state_dict(),
            "random": rng_state(),
        }
        save_state(folder / f"run_state_rank{distributed.rank()}.safetensors", state)

    def _read(self, folder: Path) -> None:
        path = folder / f"run_state_rank{distributed.rank()}.safetensors"
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist: the checkpoint was saved by fewer ranks than this run has")
        state = load_state(path)
        if state["world_size"] != distributed.world_size():
            raise CheckpointError(
                f"{folder} was saved by {state['world_size']} rank(s), this run has {distributed.world_size()}"
            )
        self.trainer.load_engines(folder)
        self.trainer.step = int(state["step"])
        self.trainer.nonfinite_in_a_row = int(state["nonfinite_in_a_row"])
        self.trainer.latest_eval = dict(state["latest_eval"])
        self.trainer.load_state_dict(state["trainer"])
        set_rng_state(state["random"])
