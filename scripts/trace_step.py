"""Counts what one training step runs of this package.

    python scripts/trace_step.py                         GRPO with hf, GRPO with vllm, Flow-GRPO
    python scripts/trace_step.py --case grpo_hf --list   also the files, with the number of functions of each

Files and functions are those of the package that run, in any thread, between the first and the second call of the loss.
With one micro-batch that is one whole step. Frames are those of the script and the package on the stack of the first
call, both ends included. Comprehensions and class bodies are no functions here. The models are tiny and untrained; the
runs go through the scripts of examples/, as a user's do.
"""

import argparse
import inspect
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightrft_visual"
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}  # of which newer Pythons make no frames
VL_SCORE = """
def score(completions):
    return [float(len(text) % 3) for text in completions]
"""
DRAWING_SCORE = """
def score(images):
    return [image.resize((1, 1)).convert("L").getpixel((0, 0)) for image in images]
"""
# Two prompts, four samples each, one micro-batch, and a second step to end at.
SIZES = "--rollout_batch_size 2 --n_samples_per_prompt 4 --micro_rollout_batch_size 8 --train_batch_size 8 "
SIZES += "--micro_train_batch_size 8 --max_steps 2 --save_steps -1 --eval_steps -1"


class StepTracer:
    """A profile hook for all threads that looks on from the first call of the loss to the second.

    loss: the qualified name of a function of the package. files: {path in the package: number of functions} of what ran
    between the two calls. frames: see above; None before the first call.
    """

    def __init__(self, loss: str, script: Path, package: Path = PACKAGE):
        self.loss, self.script, self.package = loss, str(script), f"{package}{os.sep}"
        self.calls = 0
        self.frames = None
        self._codes: dict[int, CodeType] = {}  # by id: to hash a code object takes longer than to call it

    def install(self) -> None:
        """Begin to look on, in this thread and in those to come."""
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or self.calls > 1 or not code.co_filename.startswith(self.package):
            return
        if code.co_qualname == self.loss:
            self.calls += 1
            if self.calls == 1:
                self._measure(frame)
        if self.calls == 1 and _is_function(code):
            self._codes.setdefault(id(code), code)

    def _measure(self, frame: FrameType) -> None:
        stack = []
        while frame is not None and (not stack or stack[-1].co_filename != self.script):
            stack.append(frame.f_code)
            frame = frame.f_back
        self.frames = sum(
            code.co_filename == self.script or (code.co_filename.startswith(self.package) and _is_function(code))
            for code in stack
        )

    @property
    def files(self) -> dict[str, int]:
        """Functions of each file that ran, in the order of the paths."""
        functions = {(code.co_filename, code.co_qualname, code.co_firstlineno) for code in self._codes.values()}
        counts = Counter(file.removeprefix(self.package) for file, _, _ in functions)
        return dict(sorted(counts.items()))


def _is_function(code: CodeType) -> bool:
    """Whether it is the body of a function, and not of a module, a class or a comprehension."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_name not in COMPREHENSIONS


@dataclass(frozen=True)
class Case:
    """A run to trace. loss: whose calls mark the steps; flags: from an empty folder to what the script is given."""

    script: str
    loss: str
    flags: Callable[[Path], list[str]]


def vl_flags(folder: Path, engine: str) -> list[str]:
    """An untrained Qwen2.5-VL, two questions and a reward in `folder`, and the flags of two steps with them."""
    from PIL import Image

    from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

    build_tiny_checkpoint(folder / "model", "qwen2_5_vl", texts=["which colour is it? red blue"])
    rows = []
    for colour in ("red", "blue"):
        Image.new("RGB", (56, 56), colour).save(folder / f"{colour}.png")
        rows.append({"prompt": "which colour is it?", "images": [f"{colour}.png"], "reference": colour})
    lengths = "--prompt_max_len 128 --generate_max_len 4"
    return [*_flags(folder, rows, VL_SCORE, "model"), "--engine_type", engine, *lengths.split()]


def drawing_flags(folder: Path) -> list[str]:
    """An untrained SD3, two captions and a reward in `folder`, and the flags of two steps with them."""
    from lightrft_visual.models.tiny.diffusion import TinyDiffusionSettings, build_pipeline

    build_pipeline(TinyDiffusionSettings(layers=1)).save_pretrained(folder / "pipeline")
    rows = [{"prompt": "a red circle"}, {"prompt": "a blue cross"}]
    drawing = "--num_steps 4 --height 32 --width 32 --guidance_scale 1 --steps_per_forward 4"
    return [*_flags(folder, rows, DRAWING_SCORE, "pipeline"), *drawing.split()]


def _flags(folder: Path, rows: list[dict], score: str, model: str) -> list[str]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(score)
    return [
        *("--pretrain", str(folder / model), "--prompt_data", str(folder / "rows.jsonl")),
        *("--reward_fn", f"{folder / 'reward.py'}:score", "--output_dir", str(folder / "run"), *SIZES.split()),
    ]


CASES = {
    "grpo_hf": Case("train_grpo_vl.py", "policy_loss", lambda folder: vl_flags(folder, "hf")),
    "grpo_vllm": Case("train_grpo_vl.py", "policy_loss", lambda folder: vl_flags(folder, "vllm")),
    "flow_grpo": Case("train_flow_grpo.py", "FlowGRPO.loss", drawing_flags),
}


def run_traced(case: Case, folder: Path, result: Path) -> None:
    """Run the case in this process, and write what was counted to `result`."""
    script = ROOT / "examples" / case.script
    sys.argv = [str(script), *case.flags(folder)]
    tracer = StepTracer(case.loss, script)
    tracer.install()
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if tracer.calls < 2:
        sys.exit(f"{case.loss} was called {tracer.calls} time(s), two are needed: has it another name by now?")
    result.write_text(json.dumps({"files": tracer.files, "frames": tracer.frames}))


def trace(name: str) -> dict[str, Any]:
    """What was counted of a case, which runs in a process of its own. SystemExit with its last lines if it fails."""
    with tempfile.TemporaryDirectory() as work:
        result = Path(work) / "result.json"
        command = [sys.executable, __file__, "--case", name, "--inside", work]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        if done.returncode or not result.exists():
            lines = (done.stdout + done.stderr).splitlines()
            sys.exit("\n".join([f"{name} failed with code {done.returncode}:", *lines[-15:]]))
        return json.loads(result.read_text())


def main() -> None:
    """Trace the cases that are asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="may be given several times; default: all")
    parser.add_argument("--list", action="store_true", help="also the files, with the number of functions of each")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # the folder of the one case to run right here
    args = parser.parse_args()
    if args.inside:
        run_traced(CASES[args.case[0]], args.inside, args.inside / "result.json")
        return
    print(f"{'case':12}{'files':>8}{'functions':>12}{'frames':>8}", flush=True)
    for name in args.case or CASES:
        found = trace(name)
        files = found["files"]
        print(f"{name:12}{len(files):8}{sum(files.values()):12}{found['frames']:8}", flush=True)
        if args.list:
            print("".join(f"    {count:4} {file}\n" for file, count in files.items()), end="", flush=True)


if __name__ == "__main__":
    main()
