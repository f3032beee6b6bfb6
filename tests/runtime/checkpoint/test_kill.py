"""kill -9 at random moments of saves: the newest complete checkpoint can always be resumed from."""

import os
import random
import signal
import time
from pathlib import Path

import forked
import pytest

from lightrft_visual.runtime.checkpoint.manager import CheckpointManager, resolve_resume, verify


def write(folder: Path, step: int) -> None:
    for index in range(6):
        (folder / f"part_{index}.bin").write_bytes(bytes([step % 256]) * 60_000)


def save_for_ever(root: str, first: int) -> None:
    manager = CheckpointManager(root, max_num=2)
    for step in range(first, first + 10_000):
        # Every third save replaces the one before it, which takes two renames.
        manager.save(step // 3 * 3 if step % 3 == 1 else step, lambda folder, step=step: write(folder, step))


@pytest.mark.slow
def test_after_each_kill_the_newest_complete_checkpoint_is_resumed(tmp_path):
    context = forked.server()
    rng = random.Random(0)
    CheckpointManager(tmp_path, max_num=2).save(0, lambda folder: write(folder, 0))
    newest = 0
    for _ in range(8):
        process = context.Process(target=save_for_ever, args=(str(tmp_path), newest + 1))
        process.start()
        latest = tmp_path / "latest"
        before, limit = latest.stat().st_mtime_ns, time.monotonic() + 60
        while latest.stat().st_mtime_ns == before and time.monotonic() < limit:
            time.sleep(0.002)  # the process is up when it has saved once
        time.sleep(rng.uniform(0, 0.06))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        path = resolve_resume("auto", tmp_path)
        step = verify(path)["step"]
        assert step >= newest
        newest = step
