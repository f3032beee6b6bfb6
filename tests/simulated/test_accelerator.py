"""The simulated accelerator itself: right results, refusal of host tensors, collectives over its own tensors only."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CHECKS = """
import sys; sys.path.insert(0, sys.argv[1])
from simulated.device import load
native = load()
import torch
x, w = torch.randn(5, 4, device="sim"), torch.nn.Linear(4, 3).to("sim")
loss = w(x).square().mean()
loss.backward()
twin = torch.nn.Linear(4, 3)
twin.load_state_dict({name: value.cpu() for name, value in w.state_dict().items()})
other = twin(x.cpu()).square().mean()
other.backward()
assert torch.allclose(loss.cpu(), other) and torch.allclose(w.weight.grad.cpu(), twin.weight.grad, atol=1e-6)
try:
    x + torch.randn(5, 4)
except RuntimeError as error:
    assert "same device" in str(error)
else:
    raise AssertionError("tensors of two devices were added")
view = x[1:3]
view.zero_()
assert x.cpu()[1:3].abs().sum() == 0 and x.cpu()[0].abs().sum() > 0
weight = w.weight
weight.data = weight.data.cpu()
assert weight.device.type == "cpu" and weight is w.weight
before = native.allocated()
big = torch.empty(1 << 20, device="sim")
assert native.allocated() - before == 4 << 20
del big
assert native.allocated() == before
print("OK", flush=True)
import os
os._exit(0)  # PyTorch's thread of the device may still give up the graph, and aborts if the interpreter ends meanwhile
"""


def test_arithmetic_views_and_memory_are_the_host_s():
    run = subprocess.run([sys.executable, "-c", CHECKS, str(HERE.parent)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and run.stdout.endswith("OK\n"), run.stderr[-3000:]


def test_collectives_take_its_tensors_only(tmp_path):
    command = [sys.executable, str(HERE / "collectives_ranks.py")]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         text=True)
        for rank in (0, 1)
    ]  # fmt: skip
    for process in ranks:
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0 and output.endswith("OK\n"), errors[-3000:]
