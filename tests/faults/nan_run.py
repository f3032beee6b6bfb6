"""Run by each of two ranks: rank 1 meets a NaN loss in some steps, under every ZeRO stage: nan_run.py FOLDER FLAG...

Writes FOLDER/<stage>_rank<r>.json: {"weights": a hash of all weights after each step, "error": how the run ended}.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from run_many import as_program

BAD_STEPS = (1, 3, 4, 5)  # one alone, then three in a row


def hash_of(actor) -> str:
    from lightrft_visual.rollout.weight_sync import named_weights

    digest = hashlib.sha256()
    for name, tensor in named_weights(actor):
        digest.update(name.encode())
        digest.update(tensor.float().numpy().tobytes())
    return digest.hexdigest()


def run(stage: int, folder: Path, flags: list[str]) -> None:
    from lightrft_visual.config.load import load_config
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.errors import NonFiniteError
    from lightrft_visual.runtime import collectives
    from lightrft_visual.trainer.vl import updates
    from lightrft_visual.trainer.vl.trainer import build_trainer

    argv = [*flags, "--zero_stage", str(stage), "--max_steps", "8", "--output_dir", str(folder / f"run_{stage}")]
    trainer = build_trainer(load_config(RunConfig, argv))
    hashes, sync, plain_loss = [hash_of(trainer.actor)], trainer.sync, updates.policy_loss

    def noted_sync() -> None:
        hashes.append(hash_of(trainer.actor))
        sync()

    def poisoned(*arguments):
        losses = plain_loss(*arguments)
        if collectives.rank() == 1 and trainer.step in BAD_STEPS:
            losses.loss = losses.loss * float("nan")
        return losses

    trainer.sync, updates.policy_loss = noted_sync, poisoned
    error = None
    try:
        trainer.fit()
    except NonFiniteError as failure:
        error = str(failure)
        hashes.append(hash_of(trainer.actor))
    updates.policy_loss = plain_loss
    result = {"weights": hashes, "error": error}
    (folder / f"{stage}_rank{collectives.rank()}.json").write_text(json.dumps(result))


def main(folder: str, *flags: str) -> None:
    from lightrft_visual.launch import quiet_libraries

    quiet_libraries()
    for stage in (0, 1, 2, 3):
        run(stage, Path(folder), list(flags))


if __name__ == "__main__":
    as_program(main)
