#!/usr/bin/env python
"""What a run says and keeps when its reward function does something wrong, for each of many kinds of faults.

    python scripts/reward_faults.py                        all kinds, each a run of its own, and a table
    python scripts/reward_faults.py --only sys_exit_0,hangs --keep /tmp/faults

Every kind is a file of a user's, named by --reward_fn, in a run of two steps on the embedded task (engine hf). The
function scores well in the first step, where the fault is not in loading it. A kind is right when the exit code is the
one that is due, the user's own line is named with what happened, and all that was finished is on disk: metrics and
rollouts of each finished step, and a checkpoint that is complete. The exit code is 1 when a kind is not right.
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lightrft_visual.runtime.host_memory import free_port

LIMIT = 600.0  # seconds of one run; the first one may have to build the embedded model
MARK = "# <-"  # at the end of the line that must be named
BUILT = ["lightrft_visual.trainer.vl.trainer", "deepspeed.runtime.zero.muon.muon_optimizer"]
FLAGS = (
    "--engine_type hf --rollout_batch_size 2 --n_samples_per_prompt 4 --micro_rollout_batch_size 8 "
    "--train_batch_size 8 --micro_train_batch_size 8 --max_eval_samples 0 --num_trajectories_to_save 8 "
    "--report false --max_steps 2 --save_steps 1 --parity_every 0 --zero_stage 0"
).split()
HEAD = """
import asyncio, contextlib, io, os, random, shutil, signal, stat, subprocess, sys, threading, time, warnings
import numpy as np
import torch

calls = 0

def well(completions):
    return [float(sum(map(ord, text)) % 997) for text in completions]

class Mine(Exception):
    pass

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class Panic(BaseException):
    pass

class Scores(list):
    def __len__(self):
        raise Panic("no length")

def sockets():
    numbers = map(int, os.listdir("/proc/self/fd"))
    return [n for n in numbers if os.path.exists(f"/proc/self/fd/{n}") and stat.S_ISSOCK(os.fstat(n).st_mode)]

"""
SECOND = """
def score(completions, references=None, metadata=None, ids=None):
    global calls
    calls += 1
    if calls < 2:
        return well(completions)
"""


@dataclass(frozen=True)
class Fault:
    """A kind of fault. body: of `score`, from its second call on, or with `whole` the file's own text.

    code: of the process. tells: what the output must hold. steps: that must be finished. flags: beside FLAGS.
    gone: steps whose outputs the function itself has deleted.
    """

    body: str
    tells: str = ""
    code: int = 1
    steps: int = 1
    flags: str = ""
    whole: bool = False
    gone: int = 0
    ranks: int = 1

    @property
    def source(self) -> str:
        """The text of the user's file."""
        if self.whole:
            return self.body
        return HEAD + SECOND + "".join(f"    {line}\n" for line in self.body.splitlines())

    @property
    def line(self) -> int | None:
        """The number of the line that must be named, None where there is none."""
        lines = self.source.splitlines()
        return next((number for number, line in enumerate(lines, 1) if line.endswith(MARK)), None)


def limited(body: str, tells: str) -> Fault:
    """Something that only a process of its own survives: there it costs its call."""
    return Fault(body, tells, flags="--reward_fn_timeout 20")


def returns(value: str, tells: str) -> Fault:
    """A function that returns what it may not. The line named is that of its head, where a reader looks first."""
    marked = SECOND.replace("ids=None):", f"ids=None):  {MARK}")
    return Fault(f"{HEAD}{marked}    return {value}\n", tells, whole=True)


def harmless(body: str, tells: str = "", flags: str = "") -> Fault:
    """Something that a function may do: both steps are made."""
    return Fault(f"{body}\nreturn well(completions)", tells, code=0, steps=2, flags=flags)


def at_start(text: str, tells: str) -> Fault:
    """A file that cannot be used; nothing is made."""
    return Fault(text, tells, code=2, steps=0, whole=True)


SKIP = "--on_reward_error skip --reward_max_invalid 0.9"
FAULTS = {
    # -- it raises
    "key_error": Fault(f"return [row['answer'] for row in metadata]  {MARK}", "raised KeyError: 'answer'"),
    "nested": Fault(
        f"def inner(text):\n    return text[10 ** 6]  {MARK}\nreturn [inner(text) for text in completions]",
        "IndexError",
    ),
    "chained": Fault(
        f"try:\n    int('x')  {MARK}\nexcept ValueError as error:\n    raise TypeError('no score') from error",
        "raised TypeError: no score",
    ),
    "group": Fault(
        f"def one():\n    raise Mine('in a group')  {MARK}\ntry:\n    one()\nexcept Mine as error:\n"
        "    raise ExceptionGroup('several', [error])",
        "raised Mine: in a group",
    ),
    "without_text": Fault(f"raise Mute  {MARK}", "its message cannot be had"),
    "text_not_unicode": Fault(f"raise ValueError('\\ud800 \\x00')  {MARK}", "raised ValueError: \\ud800"),
    "recursion": Fault(f"def down(n):\n    return down(n + 1) + 1  {MARK}\nreturn [down(0)]", "RecursionError"),
    "warning_as_error": Fault(
        f"warnings.simplefilter('error')\nwarnings.warn('old')  {MARK}\nreturn well(completions)",
        "raised UserWarning: old",
    ),
    "async": Fault(
        f"{HEAD}\nasync def score(completions):\n    global calls\n    calls += 1\n    await asyncio.sleep(0)\n"
        f"    if calls == 2:\n        raise KeyError('later')  {MARK}\n    return well(completions)\n",
        "raised KeyError: 'later'",
        whole=True,
    ),
    "on_rank_1": Fault(
        f"if os.environ['RANK'] == '1':\n    raise KeyError('here')  {MARK}\nreturn well(completions)",
        "rank 1",
        ranks=2,
    ),
    "cancelled": Fault(f"raise asyncio.CancelledError('no')  {MARK}", "raised CancelledError: no"),
    "generator_exit": Fault(f"raise GeneratorExit  {MARK}", "raised GeneratorExit"),
    "panic": Fault(f"raise Panic('of an extension')  {MARK}", "raised Panic: of an extension"),
    "group_of_panics": Fault(
        f"raise BaseExceptionGroup('several', [Panic('one'), GeneratorExit()])  {MARK}", "raised BaseExceptionGroup"
    ),
    "one_sample_skipped": Fault(
        "if ids[0] % 8 == 0:\n    raise KeyError('one')\nreturn well(completions)", "KeyError: 'one'", 0, 2, SKIP
    ),
    "one_score_skipped": Fault("return ['x', *well(completions)[1:]]", "is a str, not a number", 0, 2, SKIP),
    # -- it leaves
    **{f"sys_exit_{code}": Fault(f"sys.exit({code})  {MARK}", f"called sys.exit({code})") for code in (0, None)},
    "keyboard_interrupt": Fault(f"raise KeyboardInterrupt  {MARK}", "interrupted before the run was done", code=130),
    "thread_dies": harmless(
        "thread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()", "ZeroDivisionError"
    ),
    "hangs": Fault(f"while True: time.sleep(0.01)  {MARK}", "no result within 2 s", flags="--reward_fn_timeout 2"),
    "dies": limited("os.kill(os.getpid(), signal.SIGKILL)", "its process died"),
    "fork_comes_back": harmless(
        "child = os.fork()\nif child == 0:\n    return []\nos.waitpid(child, 0)", "forked a process that came back"
    ),
    "fork_comes_back_late": harmless("if os.fork() == 0:\n    time.sleep(0.2)\n    return []"),
    "fork_raises": harmless("if os.fork() == 0:\n    raise Panic('of the child')\ntime.sleep(0.2)"),
    "forks_often": harmless("for _ in range(8):\n    if os.fork() == 0:\n        return [9.0] * len(completions)"),
    "starts_programs": harmless("subprocess.run(['echo', '{\"result\": [9.0]}'], check=True)"),
    "leaves_a_program": harmless("subprocess.Popen(['sleep', '5'])"),
    "stray_bytes": limited("for n in sockets(): os.write(n, b'hello\\n')\nreturn well(completions)", "no answer"),
    "closes_its_sockets": limited("for n in sockets(): os.close(n)\nreturn well(completions)", "its process died"),
    "closes_low_files": limited("os.closerange(3, 64)\nreturn well(completions)", ""),
    # -- it returns what it may not
    "none": returns("None", "returned NoneType"),
    "nan": returns("[float('nan')] * len(completions)", "is not finite (nan)"),
    "huge_integer": returns("[10 ** 400] * len(completions)", "beyond"),
    "wrong_length": returns("[1.0]", "returned 1 scores for 8 samples"),
    "nested_lists": returns("[[1.0, 2.0]] * len(completions)", "is a list, not a number"),
    "generator": returns("(1.0 for _ in completions)", "returned generator"),
    "complex_tensor": returns("torch.ones(len(completions), dtype=torch.complex64)", "complex"),
    "matrix": returns("torch.ones(len(completions), 2)", "returned shape (8, 2)"),
    "other_dict": returns("{'value': well(completions)}", "returned a dict without scores"),
    "bad_metric": returns("(well(completions), {'note': ['a'] * len(completions)})", "not a number"),
    "sparse": returns("torch.ones(len(completions)).to_sparse()", "returned a Tensor that cannot be read"),
    "meta_scores": returns("[torch.ones((), device='meta')] * len(completions)", "returned a list that cannot be read"),
    "ragged": returns("torch.nested.nested_tensor([torch.ones(1)] * 8)", "returned"),
    "no_length": returns("Scores([1.0] * len(completions))", "raised Panic: no length"),
    "with_gradient": Fault("return torch.ones(len(completions), requires_grad=True) * 2", "", 0, 2),
    # -- it changes what is not its own
    "changes_inputs": harmless("completions_before = list(completions)\nids.clear()\nmetadata.clear()"),
    "changes_folder": harmless("os.chdir('/')", "changes the working directory"),
    "closes_stdout": harmless("sys.stdout.close()", "closes or replaces stdout"),
    "no_gradients": harmless("torch.set_grad_enabled(False)", "gradient mode"),
    "default_device": harmless("torch.set_default_device('meta')", "default device"),
    "threads": harmless("torch.set_num_threads(torch.get_num_threads() + 1)", "number of threads"),
    "seeds": harmless("random.seed(0), np.random.seed(0), torch.manual_seed(0)"),
    "takes_sigterm": harmless("signal.signal(signal.SIGTERM, signal.SIG_DFL)"),
    "takes_sigpipe": harmless("signal.signal(signal.SIGPIPE, signal.SIG_DFL)", "handler of SIGPIPE"),
    "prints_megabytes": harmless("print('x' * 8_000_000)"),
    "deletes_outputs": Fault(
        "shutil.rmtree(os.environ['RUN_FOLDER'], ignore_errors=True)\nreturn well(completions)", "", 0, 2, gone=1
    ),
    # -- it is wrong from its first call on, or cannot be loaded
    "always_raises": at_start(
        f"def score(completions, references):\n    raise KeyError('answer')  {MARK}\n",
        "asked once with a sample of the data, before any model is loaded",
    ),
    "syntax_error": at_start(f"x = 1\ndef score(completions:  {MARK}\n    return []\n", "SyntaxError"),
    "import_error": at_start(f"import not_there  {MARK}\n", "ModuleNotFoundError: No module named 'not_there'"),
    "exits_on_import": at_start(f"import sys\nsys.exit(0)  {MARK}\n", "sys.exit(0)"),
    "missing_function": at_start(
        "def scores(completions):\n    return []\n", "has no function or class 'score'; did you mean 'scores'?"
    ),
    "wrong_signature": at_start("def score(answers_of_mine):\n    return []\n", "asks for 'answers_of_mine'"),
    "positional_only": at_start(
        "def score(completions, /):\n    return []\n", "positional-only parameter 'completions'"
    ),
}


@dataclass
class Outcome:
    """What became of a run. problems: what is not as it must be; empty where all is well."""

    code: int | None
    seconds: float
    output: str
    kept: str
    problems: list[str]


def start(script: str, arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """One rank of a run in this process, its output into the file `log`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    from lightrft_visual.config.load import config_or_exit
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.launch import run_script

    run_script(config_or_exit(RunConfig))
    sys.stdout.flush()
    os._exit(0)


def ended(process, seconds: float) -> int | None:
    """The exit code of a process; None where it had to be killed after so many seconds."""
    process.join(max(1.0, seconds))
    code = process.exitcode
    process.kill()
    process.join()
    return code


def run(name: str, fault: Fault, folder: Path, context) -> Outcome:
    """One kind of fault in a run of its own, below `folder`."""
    folder.mkdir(parents=True)
    file, log, out = folder / "mine.py", folder / "log.txt", folder / "run"
    file.write_text(fault.source, encoding="utf-8")
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    known |= {"RUN_FOLDER": str(out), "OMP_NUM_THREADS": "1"}
    known |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(fault.ranks))
    arguments = [*FLAGS, *fault.flags.split(), "--reward_fn", f"{file}:score", "--output_dir", str(out)]
    started = time.monotonic()
    ranks = [known | {"RANK": rank, "LOCAL_RANK": rank} for rank in map(str, range(fault.ranks))]
    processes = [context.Process(target=start, args=(name, arguments, own, log)) for own in ranks]
    for process in processes:
        process.start()
    codes = {ended(process, LIMIT - (time.monotonic() - started)) for process in processes}
    return judged(fault, folder, codes, time.monotonic() - started)


def judged(fault: Fault, folder: Path, codes: set[int | None], seconds: float) -> Outcome:
    """Compare what is there with what must be."""
    output, out, line = (folder / "log.txt").read_text(errors="replace"), folder / "run", fault.line
    named = line is None or any(text in output for text in (f'mine.py", line {line}', f"mine.py, line {line}"))
    last = output.strip().splitlines()[-1] if fault.ranks == 1 else output  # the other ranks end after it
    kept, due = finished_steps(out), [fault.steps - fault.gone, fault.steps - fault.gone, fault.steps]
    wrong = {
        f"exit code {codes}, due {fault.code}": codes != {fault.code},
        f"line {line} is not named": not named,
        f"not told: {fault.tells!r}": fault.tells not in output,
        "the last line does not name crash.log": fault.code and str(out / "crash.log") not in last,
        f"metrics, rollouts, checkpoints of {kept} steps, due {due}": kept != due,
    }
    problems = [told for told, holds in wrong.items() if holds]
    return Outcome(codes.pop(), seconds, output, "/".join(map(str, kept)), problems)


def finished_steps(out: Path) -> list[int]:
    """How many steps the metrics, the rollouts and the newest complete checkpoint tell of."""
    from lightrft_visual.runtime.checkpoint.manager import CheckpointManager
    from lightrft_visual.runtime.files import read_jsonl

    step = next((content["step"] for _, content in CheckpointManager(out).candidates()), 0)
    return [len(read_jsonl(out / "metrics.jsonl")), len(list((out / "rollouts").glob("step_*.jsonl"))), step]


def main() -> int:
    """Run the kinds that were asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="kinds, comma-separated")
    parser.add_argument("--keep", type=Path, help="a new folder for what the runs write; default: a temporary one")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(FAULTS)
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="reward_faults_"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(BUILT)
    bad = 0
    print(f"{'kind':22} {'code':>4} {'metrics/rollouts/checkpoint':>28} {'s':>5}")
    for name in names:
        outcome = run(name, FAULTS[name], folder / name, context)
        told = "; ".join(outcome.problems)
        print(f"{name:22} {outcome.code!s:>4} {outcome.kept:>28} {outcome.seconds:5.1f}  {told}", flush=True)
        bad += bool(outcome.problems)
    print(f"{len(names) - bad} of {len(names)} kinds are right")
    if arguments.keep is None:
        shutil.rmtree(folder)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
