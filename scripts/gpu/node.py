"""The parts of the check of several cards: of one node, or of several hosts. Functions as in `parts.py`; how many ranks
there are says GPU_CHECK_RANKS, and where, for several hosts, GPU_CHECK_HOSTFILE.

python scripts/gpu/node.py PART FOLDER real|tiny          runs one part; check.py does so for all
python scripts/gpu/node.py --rank MIB OUTPUT.json         what each rank of the part `bandwidth` runs
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import parts  # noqa: E402
import shapes  # noqa: E402
from parts import EAGER, Rows, seeing  # noqa: E402

RANKS = int(os.environ.get("GPU_CHECK_RANKS", "1"))
PATIENCE = 120.0  # seconds in which the others of a rank that is gone must have ended
PROMPTS = parts.shared(4, RANKS)
ENGINE = f"--engine_mem_util 0.25 {EAGER} --generate_max_len 64 --min_new_tokens 64"
SAME = "--max_norm 1e9 --lr_scheduler constant_with_warmup --lr_warmup_ratio 0"  # runs of any length begin alike


def bandwidth(folder: Path, size: str) -> Rows:
    """All-reduce inside a host and between hosts: the bus bandwidth, as NCCL's tests count it."""
    for mib in (64, 512) if size == "real" else (1, 4):
        result = folder / f"bandwidth_{mib}.json"
        result.parent.mkdir(parents=True, exist_ok=True)
        run = subprocess.run(parts.started([str(HERE / "node.py"), "--rank", str(mib), str(result)], RANKS), cwd=ROOT)
        if run.returncode:
            raise RuntimeError(f"the ranks of the bandwidth test ended with {run.returncode}")
        for reach, speed in json.loads(result.read_text()).items():
            yield f"all-reduce of {mib} MiB {reach}, bus bandwidth", f"{speed:.2f} GB/s"


def reaches(local_ranks: Sequence[int]) -> dict[str, list[list[int]]]:
    """Groups of ranks by what they reach: those of each host, the first one of each host, all. A rank alone is none.

    local_ranks: each rank's number on its host; ranks of a host are neighbours.
    """
    firsts = [rank for rank, local in enumerate(local_ranks) if local == 0]
    hosts = [list(range(*ends)) for ends in pairwise([*firsts, len(local_ranks)])]
    found = {"inside a host": hosts}
    if len(hosts) > 1:
        found |= {"between the first ranks of hosts": [firsts], "of all ranks": [list(range(len(local_ranks)))]}
    return {reach: several for reach, groups in found.items() if (several := [each for each in groups if each[1:]])}


def measure_bandwidth(mib: int, result: Path, times: int = 10) -> None:
    """On each rank; rank 0 writes it."""
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    device = accelerator.device_name()
    if device != "cpu":
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device == "cpu" else accelerator.communication_backend_name())
    tensor = torch.ones(mib * 2**18, device=accelerator.current_device_name())
    local_ranks = [0] * dist.get_world_size()
    dist.all_gather_object(local_ranks, int(os.environ["LOCAL_RANK"]))
    found = {}
    for reach, groups in reaches(local_ranks).items():
        made = [(ranks, dist.new_group(ranks)) for ranks in groups]  # by all ranks, also those that are not in it
        for ranks, group in made:
            if dist.get_rank() in ranks:
                dist.all_reduce(tensor, group=group)
                accelerator.synchronize()
                began = time.perf_counter()
                for _ in range(times):
                    dist.all_reduce(tensor, group=group)
                accelerator.synchronize()
                seconds, count = (time.perf_counter() - began) / times, len(ranks)
                found[reach] = mib * 2**20 * 2 * (count - 1) / count / seconds / 1e9
        dist.barrier()
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found))
    dist.destroy_process_group()


def _against_one(
    folder: Path, size: str, flags: str, divided: Mapping[str, str], shape: Callable = shapes.qwen_3b
) -> Rows:
    """The first step of all ranks against that of one: loss, gradient norm and time. divided: by the name of a run on
    all ranks, the flags that it alone has."""
    flags, first = f"{ENGINE} {SAME} {flags}", "of the first step, one rank and"
    one = seeing(folder, size, f"{next(iter(divided))}_one", flags, 1, PROMPTS, RANKS, shape, alone=True)
    for name, own in divided.items():
        run = seeing(folder, size, name, f"{flags} {own}", parts.PROFILED, PROMPTS, RANKS, shape)
        for metric in ("loss", "grad_norm", "reward_mean", "time_step"):
            yield f"{name}: {metric} {first} {RANKS}", f"{one.steps[0][metric]:.6g}, {run.steps[0][metric]:.6g}"
        yield f"{name}: phases on {RANKS} ranks", run.phases()
        yield from parts.work(run, f"{name}: ")


def zero(folder: Path, size: str) -> Rows:
    """ZeRO-2 and ZeRO-3 of a 7B shape, whose optimizer is on the host, against one rank."""
    flags = f"--init_kl_coef 0 --adam_offload {'true' if size == 'real' else 'false'}"
    divided = {f"zero_{stage}": f"--zero_stage {stage}" for stage in (2, 3)}
    yield from _against_one(folder, size, flags, divided, shapes.qwen_7b)


def tensor_parallel(folder: Path, size: str) -> Rows:
    """The engine over two ranks each, the trainer over all: log-probs of both."""
    if RANKS % 2:
        yield "skipped", f"{RANKS} ranks are no pairs"
        return
    run = seeing(folder, size, "tensor_parallel", f"{ENGINE} --engine_tp_size 2", 2, PROMPTS, RANKS)
    mean, largest = run.median("rollout_logp_diff", 0), run.median("rollout_logp_diff_max", 0)
    yield "difference of log-probs, mean and largest", f"{mean:.1e}, {largest:.1e}"
    yield "phases, medians", run.phases()


def sequence(folder: Path, size: str) -> Rows:
    """Each micro-batch's tokens divided over two ranks."""
    if RANKS % 2:
        yield "skipped", f"{RANKS} ranks are no pairs"
        return
    yield from _against_one(folder, size, parts.optimizer(size), {"sequence": "--sp_size 2"})


def save_and_resume(folder: Path, size: str) -> Rows:
    """A checkpoint of all ranks, its speed against the time limit of collectives, and a run that goes on from it."""
    run = yield from parts.resumed(folder, size, f"{ENGINE} {SAME}", PROMPTS, RANKS)
    saved = next(run.folder.glob("checkpoint-[0-9]*"))
    size_bytes = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    seconds = max(step["time_save"] for step in run.steps if step.get("time_save"))
    yield "a checkpoint", f"{size_bytes / 2**30:.2f} GiB in {seconds:.1f} s (collectives wait 600 s)"


def flow_grpo(folder: Path, size: str) -> Rows:
    """Flow-GRPO of the SD3.5 medium shape."""
    run = parts.drawing(folder, size, f"flow_grpo_{RANKS}", RANKS)
    yield "phases, medians", run.phases()
    yield "images per second of a step", f"{4 * PROMPTS / run.median('time_step'):.3f}"
    yield from parts.work(run)


def killed_rank(folder: Path, size: str) -> Rows:
    """One rank is killed while it trains: how long the others stay, and whether they say which it was."""
    if os.environ.get("GPU_CHECK_HOSTFILE"):
        yield "skipped", "ranks are killed on one host only"
        return
    script, run = ROOT / "examples" / "train_grpo_vl.py", folder / "killed"
    words = parts.seeing_flags(folder, "tiny", f"{ENGINE} --save_steps -1", 500, 0, RANKS).split()
    log = folder / "killed.log"
    with open(log, "w") as output:
        command = parts.started([str(script), *words, "--output_dir", str(run)], RANKS)
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        _wait(lambda: (run / "metrics.csv").is_file() or process.poll() is not None, PATIENCE * 3)
        gone = RANKS - 1
        os.kill(_rank_of(process.pid, gone), signal.SIGKILL)
        began = time.monotonic()
        _wait(lambda: process.poll() is not None, PATIENCE)
        seconds = time.monotonic() - began
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    told = f"rank {gone}" in log.read_text()
    if not told:
        raise RuntimeError(f"the others did not name rank {gone}; see {log.name}")
    yield f"after a kill of rank {gone} the others ended in", f"{seconds:.0f} s, and named it"


def weights_by_nccl(folder: Path, size: str) -> Rows:
    """One rank and one worker on a card of its own: its weights by NCCL (without cards by gloo), and by host memory."""
    if os.environ.get("GPU_CHECK_HOSTFILE"):
        yield "skipped", "one host only"
        return
    split, losses = f"{ENGINE} {SAME} {parts.optimizer(size)} --placement split --rollout_num_workers 1", []
    for way in ("device", "host"):
        run = seeing(folder, size, f"weights_{way}", f"{split} --weight_transfer {way}", 2, 4, alone=True)
        losses.append([step["loss"] for step in run.steps])
        yield f"weights by {way}: sync phase", f"{run.median('time_sync'):.2f} s"
        mean, largest = run.median("rollout_logp_diff", 0), run.median("rollout_logp_diff_max", 0)
        yield f"weights by {way}: difference of log-probs, mean and largest", f"{mean:.1e}, {largest:.1e}"
    apart = max(abs(one - other) for one, other in zip(*losses))
    yield "largest difference of the loss, by device against by host", f"{apart:.1e}"


def _wait(ready: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            raise RuntimeError(f"nothing happened for {seconds:.0f} s")
        time.sleep(0.2)


def _rank_of(launcher: int, rank: int) -> int:
    """Process id of a rank that this launcher has started."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise RuntimeError(f"rank {rank} is not there")


PARTS: parts.Parts = {  # with its time limit in seconds; 20 minutes in sum
    "bandwidth": (bandwidth, 45),
    "zero": (zero, 290),
    "tensor_parallel": (tensor_parallel, 95),
    "sequence": (sequence, 145),
    "save_and_resume": (save_and_resume, 260),
    "flow_grpo": (flow_grpo, 80),
    "killed_rank": (killed_rank, 110),
    "weights_by_nccl": (weights_by_nccl, 175),
}


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        measure_bandwidth(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        parts.main(PARTS, *sys.argv[1:])
