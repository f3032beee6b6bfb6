"""Rollout workers in processes of their own, without Ray: what a pool or a sender of weights calls."""

import multiprocessing
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import torch

from lightrft_visual.plugins.ray.rollout import device_weights
from lightrft_visual.plugins.ray.rollout.pool import WorkerDied
from lightrft_visual.plugins.ray.rollout.worker import Worker
from lightrft_visual.rollout.weight_sync import MappedFiles

SECONDS = 60  # for an answer


def named(scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "big": scale * torch.randn(40, 7, generator=generator),
        "half": (scale * torch.randn(5, generator=generator)).bfloat16(),
        "transposed": (scale * torch.randn(3, 4, generator=generator)).t(),
        "scalar": torch.tensor(scale),
        "whole": torch.arange(9, dtype=torch.int64) * int(scale),
        "empty": torch.zeros(0, 3),
        "last": scale * torch.ones(300),
    }


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(wanted) and all(
        value.dtype == wanted[name].dtype and torch.equal(value, wanted[name]) for name, value in found.items()
    )


class HoldsTensors:
    """An engine that keeps what it is given. at: what it does when the tensor of that name comes."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.at: dict[str, int] = {}

    def update_weights(self, tensors) -> None:
        for name, tensor in tensors:
            if name in self.at:
                os.kill(os.getpid(), self.at[name])
            self.held[name] = tensor.clone()

    def generate(self, *arguments):
        return os.getpid()


class TestedWorker(Worker):
    """Its engine is a dict, its environment that of the test."""

    __test__ = False

    def __init__(self) -> None:
        self.fetch, self.files, self.version, self.caches = None, MappedFiles(), 0, 0
        self.engine = HoldsTensors()

    def held(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.engine.held.items()}

    def signal_at(self, name: str, number: int) -> None:
        self.engine.at = {name: number}

    def damage(self) -> None:
        """From here on the first byte of each bucket comes otherwise than it was sent."""
        own, done = device_weights.WeightReceiver._arrived, SimpleNamespace(is_completed=lambda: True, wait=int)

        def arrived(receiver, told, buffer, work):
            receiver._group.finish(work, receiver._stopped)
            buffer[0] += 1
            return own(receiver, told, buffer, done)

        device_weights.WeightReceiver._arrived = arrived


def _serve(pipe) -> None:
    torch.set_num_threads(1)
    worker = TestedWorker()
    while True:
        method, arguments = pipe.recv()
        try:
            answer = getattr(worker, method)(*arguments), None
        except Exception as error:
            answer = None, error
        pipe.send(answer)


class Member:
    """See `pool.WorkerHandle`; `wait_until_back` starts it again."""

    def __init__(self, name: str) -> None:
        self.name, self.ended, self._lock = name, 0, threading.Lock()
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")  # imports once for all of them
        context.set_forkserver_preload([device_weights.__name__, Worker.__module__])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            with self._lock:
                self.pipe.send((method, arguments))
                if not self.pipe.poll(SECONDS):
                    raise WorkerDied(f"no answer within {SECONDS} s")
                made, error = self.pipe.recv()
        except (EOFError, OSError) as gone:
            raise WorkerDied("its process is gone") from gone
        if error is not None:
            raise error
        return made

    def end(self) -> None:
        self.ended += 1
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(SECONDS)

    def make_ready(self) -> None:
        """Alive, and doing what a worker does."""
        try:
            self.call("signal_at", "none", 0)
        except WorkerDied:
            self.wait_until_back()

    def wait_until_back(self) -> None:
        self.kill()
        self._start()


STOP, KILL = signal.SIGSTOP, signal.SIGKILL
