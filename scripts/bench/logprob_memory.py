"""Peak memory of log-probs, entropy and their backward: chunked (`linear_log_probs`) against the plain form.

    python scripts/bench/logprob_memory.py [--tokens 8192] [--vocabulary 152064] [--hidden 64] [--plain measured]

The chunked form runs whole in a process of its own, and its peak is what the process grew by. The plain form wants
about 38 GB at the default size, so by default its peak is counted instead: the same code runs on fake tensors (shapes
without data), and the bytes of all live storages are added up. That leaves out temporaries inside operators, so it
counts in favour of the plain form; `--plain measured` runs it for real. As a check on the counting, both forms are also
measured and counted at an eighth of the tokens. Values and gradients are compared at full size, the plain form in
slices of rows. Exit code 1 when the chunked peak is above 1/8 of the plain one or a difference above 1e-5.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import weakref
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightrft_visual.models.logprobs import linear_log_probs, plain_log_probs

FORMS = {"chunked": linear_log_probs, "plain": plain_log_probs}
SLICE = 512
MEBIBYTE = 2**20


class PeakBytes(TorchDispatchMode):
    """Largest sum of the storages alive at once among those that operations return, the inputs left out."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = {id(tensor.untyped_storage()): 0 for tensor in inputs}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self.live:
            self.live[id(storage)] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, id(storage))
        self.peak = max(self.peak, sum(self.live.values()))


def make_inputs(tokens: int, vocabulary: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=make).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, generator=make) / hidden**0.5).requires_grad_()
    return states, weight, torch.randint(0, vocabulary, (tokens,), generator=make)


def run(form: str, states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, total: int) -> tuple:
    """(log_probs, entropy) of one form, after the backward pass of their mean over `total` tokens."""
    log_probs, entropy = FORMS[form](states, weight, targets, temperature=0.9)
    ((log_probs.sum() + 0.1 * entropy.sum()) / total).backward()
    return log_probs.detach(), entropy.detach()


def counted(form: str, shape: tuple[int, int, int]) -> float:
    """Peak MiB of live storages, without allocating them."""
    with FakeTensorMode():
        states, weight = (torch.empty(rows, shape[2], requires_grad=True) for rows in shape[:2])
        targets = torch.empty(shape[0], dtype=torch.long)
        with PeakBytes([states, weight, targets]) as tracker:
            run(form, states, weight, targets, shape[0])
    return tracker.peak / MEBIBYTE


def measured(form: str, shape: tuple[int, int, int]) -> dict[str, float]:
    """Growth of a fresh process's peak resident memory in MiB, and seconds."""
    command = [sys.executable, __file__, "--child", form]
    command += ["--tokens", str(shape[0]), "--vocabulary", str(shape[1]), "--hidden", str(shape[2])]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def child(form: str, shape: tuple[int, int, int]) -> None:
    inputs = make_inputs(*shape)
    run(form, *make_inputs(2, 100, shape[2]), 2)  # threads and caches of the first call
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    start = time.perf_counter()
    run(form, *inputs, shape[0])
    seconds = time.perf_counter() - start
    print(json.dumps({"mib": resident("VmHWM") - before, "seconds": seconds}))


def resident(name: str) -> float:
    """MiB of this process: VmRSS, resident now, or VmHWM, its peak (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def differences(shape: tuple[int, int, int]) -> dict[str, float]:
    """Largest absolute difference of values and gradients between the forms, over all tokens."""
    states, weight, targets = make_inputs(*shape)
    outputs = run("chunked", states, weight, targets, shape[0])
    gradients = states.grad, weight.grad
    states.grad = weight.grad = None
    pieces = []
    for start in range(0, shape[0], SLICE):
        part = slice(start, start + SLICE)
        pieces.append(run("plain", states[part], weight, targets[part], shape[0]))
    expected = [torch.cat(parts) for parts in zip(*pieces)] + [states.grad, weight.grad]
    names = ("log_probs", "entropy", "hidden gradient", "weight gradient")
    return {name: (a - b).abs().max().item() for name, a, b in zip(names, (*outputs, *gradients), expected)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--plain", choices=("counted", "measured"), default="counted")
    parser.add_argument("--child", choices=tuple(FORMS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = (arguments.tokens, arguments.vocabulary, arguments.hidden)
    if arguments.child:
        child(arguments.child, shape)
        return 0
    return report(shape, arguments.plain)


def report(shape: tuple[int, int, int], plain: str) -> int:
    small = (max(1, shape[0] // 8), *shape[1:])
    print("tokens  vocabulary  form     counted MiB  measured MiB  seconds")
    rows = [(small, "plain", True), (small, "chunked", True)]
    for size, form, real in (*rows, (shape, "plain", plain == "measured"), (shape, "chunked", True)):
        count = counted(form, size)
        result = measured(form, size) if real else None
        shown = f"{result['mib']:12.0f}  {result['seconds']:7.1f}" if result else f"{'-':>12}  {'-':>7}"
        print(f"{size[0]:6}  {size[1]:10}  {form:7}  {count:11.0f}  {shown}", flush=True)
        if size == shape and form == "plain":
            plain_mib = result["mib"] if result else count
        if size == shape and form == "chunked":
            chunked_mib = result["mib"]
    largest = differences(shape)
    for name, value in largest.items():
        print(f"largest difference of {name}: {value:.2e}")
    ratio = chunked_mib / plain_mib
    print(f"chunked / plain peak: {ratio:.4f} (1 / {1 / ratio:.1f}); wanted: at most 1 / 8 and differences up to 1e-5")
    return 0 if ratio <= 1 / 8 and max(largest.values()) <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
