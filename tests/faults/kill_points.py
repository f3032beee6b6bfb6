"""Runs that are killed at one place after the other, each time resumed, and a run that was left alone beside them.

The ranks of a run are children of a server that has imported everything: most of a short run's time would be imports.
"""

import multiprocessing
import signal
from dataclasses import dataclass
from pathlib import Path

import forked
import killed_run
from killed_run import Place
from waiting import polls
from whole_runs import SMALL, environment, rows

LIMIT = 300.0
READING_FLAGS = [
    *SMALL,
    *"--train_batch_size 16 --micro_rollout_batch_size 16 --engine_type hf --max_samples 256".split(),
]
DRAWING_FLAGS = (
    "--height 32 --width 32 --num_steps 3 --guidance_scale 1 "
    "--max_sequence_length 5 --rollout_batch_size 2 --n_samples_per_prompt 4 --micro_rollout_batch_size 4 "
    "--train_batch_size 4 --micro_train_batch_size 2 --lora_rank 4 --learning_rate 1e-2 --max_eval_samples 0 "
    "--enable_ema true --ema_interval 1 --num_trajectories_to_save 8 --report false"
).split()
NFT = [*DRAWING_FLAGS, "--diffusion_algorithm", "diffusion_nft", "--decay_type", "1"]
# With two ranks every step is evaluated too; each rank has two micro-batches to collect, and two updates are made.
READING_TWO_FLAGS = [
    *READING_FLAGS,
    *"--micro_rollout_batch_size 8 --max_eval_samples 4 --eval_steps 1 --report true".split(),
]
EPISODES_TWO_FLAGS = [*READING_TWO_FLAGS, *"--prompt_data embedded_zoom".split()]
FLOW_GRPO_TWO_FLAGS = [*DRAWING_FLAGS, *"--diffusion_algorithm flow_grpo --micro_rollout_batch_size 2".split()]
FLOW_GRPO_TWO_FLAGS += "--max_eval_samples 2 --eval_steps 1 --report true".split()


@dataclass
class KilledRuns:
    """Starts runs without the launcher: of the kind that `draws` says, with these flags, on `ranks` ranks.

    number: of the signal; those but SIGKILL ask a run to save and to end.
    """

    processes: multiprocessing.context.BaseContext
    draws: bool
    flags: list[str]
    steps: int
    cache: Path
    ranks: int = 1
    number: int = signal.SIGKILL

    def run(self, folder: Path, place: Place | None = None, dying: tuple[int, ...] = (0,)) -> None:
        """One run, which goes on where the folder's run ended; it dies on these ranks, and then ends on all.

        Raises AssertionError when it ends otherwise, or not within LIMIT seconds.
        """
        timeout = 30 if place else 600  # the first run may have to build the embedded model
        own = (
            f"--output_dir {folder} --max_steps {self.steps} --save_steps 1 --max_ckpt_num 2 "
            f"--collective_timeout {timeout} "
            f"--load_checkpoint {str(any(folder.glob('checkpoint-0*'))).lower()}"
        )
        logs = [folder.with_name(f"{folder.name}_{rank}.log") for rank in range(self.ranks)]
        started = []
        for rank, known in enumerate(forked.ranks_environment(environment(self.cache), self.ranks)):
            here = place if rank in dying else None
            arguments = (self.draws, here, [*self.flags, *own.split()], known, str(logs[rank]), self.number)
            started.append(self.processes.Process(target=killed_run.main, args=arguments))
            started[-1].start()
        for _ in polls(LIMIT):
            if all(process.exitcode is not None for process in started):
                break
        codes = [process.exitcode for process in started]
        for process in started:
            process.kill()
            process.join()
        told = "\n".join(log.read_text()[-3000:] for log in logs)
        for rank, code in enumerate(codes):
            if place is None:
                assert code == 0, f"rank {rank} ended with {code}: {told}"
            elif self.number != signal.SIGKILL:
                expected = 130 if self.number == signal.SIGINT else 143
                assert code == expected, f"rank {rank} ended with {code}: {told}"
            elif rank in dying:
                # Of several, one may see that another has died before it comes there itself.
                assert code == -9 or (code and -9 in codes), f"rank {rank} ended with {code} instead of dying: {told}"
            else:
                assert code, f"rank {rank} ended with {code} though another one died: {told}"
        buffers = (f"*_{known['MASTER_PORT']}_{rank}" for rank in range(self.ranks))
        assert not [path for name in buffers for path in Path("/dev/shm").glob(name)], "shared memory is left"


def last_checkpoint(folder: Path) -> int:
    """The step of the newest one; 0 where there is none."""
    return max((int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-0*")), default=0)


def gain(place: Place) -> int:
    """Steps that a run which is killed there has saved."""
    return 2 if place.saved else 1


def differences(whole: Path, cut: Path, steps: int) -> list[str]:
    """Which records of two runs are not the same: their metrics of every step, times aside."""
    found = []
    for name in ("metrics.csv", "eval_metrics.csv"):
        if (whole / name).exists() or (cut / name).exists():
            found += [name] * (rows(whole, name) != rows(cut, name))
    return found + ["number of steps"] * (len(rows(whole)) != steps)
