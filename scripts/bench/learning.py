"""What is learned: trains embedded tasks in several ways over seeds, and writes a table and curves of the evaluations.

    python scripts/bench/learning.py answers|drawings|turns|unified [--out DIR] [--seeds 1 2 3] [--runs NAME ...]
        [--steps N] [--every N] [flag of every run ...]

answers: the vision-language task by every algorithm, with equal samples and two updates a rollout (quickstart: one, at
twice the learning rate). drawings: by every diffusion algorithm, with 128 samples and two updates a step (offline DPO
draws none: 32 pairs are one update, and it makes twice as many steps); diffusion_opd learns from --teacher, by default
flow_grpo's weights of the first seed. turns: the tasks of several turns, and what the trained zoom policy is worth
without what its tool shows: with the image as it was, and with another mark's colour. unified: one model that answers
and draws: on either kind, both at once, or in turns, with equal samples of each kind.

Runs are DIR/NAME-SEED (DIR: outputs/learning/KIND); one that is there is not repeated. DIR gets learning.md and
learning.png: means and standard deviations over seeds. `--eval_split dev` is for choosing settings.
"""

import argparse
import csv
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]
THRESHOLD = 0.8  # a greedy reward to count samples to
HALF = 0.5  # a share of the gap between the start's gold and 1, to count samples to
Curve = tuple[Sequence[float], Sequence[float]]  # samples until each evaluation, ascending, and the values there


@dataclass(frozen=True)
class Way:
    """A run that is made. flags: its own; longer: how many times as many steps as the others."""

    flags: str = ""
    longer: int = 1


TWO = "--train_batch_size 128 --actor_learning_rate 2.5e-4 --lr_warmup_ratio 0.05"
ANSWERS = {"quickstart": "", "grpo": TWO} | {
    name: f"{TWO} {flags}"
    for name, flags in {
        "rloo": "--advantage_estimator rloo",
        "gae": "--advantage_estimator gae",
        "reinforce_baseline": "--advantage_estimator reinforce_baseline --advantages_norm true",
        "dr_grpo": "--advantage_estimator dr_grpo",
        "gspo": "--policy_loss gspo",
        "gmpo": "--policy_loss gmpo",
        "cispo": "--policy_loss cispo",
        "cpgd": "--advantage_estimator cpgd --policy_loss cpgd",
        "sapo": "--policy_loss sapo",
        "luspo": "--policy_loss luspo --loss_agg_mode seq-mean-token-sum",
        "dppo_tv": "--policy_loss dppo_tv --eps_clip 0.15",
        "dppo_kl": "--policy_loss dppo_kl --eps_clip 0.05",
        "vespo": "--policy_loss vespo",
        "clip_cov": "--policy_loss clip_cov --cov_share 0.01 --clip_cov_low 0.2",
        "kl_cov": "--policy_loss kl_cov --cov_share 0.01",
        "off_policy_mask": "--off_policy_delta 0.05",
        "entropy_target": "--entropy_target 0.8 --entropy_coef_step 1e-3 --entropy_coef_max 0.02",
        "kl_loss": "--init_kl_coef 0.01 --use_kl_loss true --kl_estimator k3",
        "kl_loss_unbiased": "--init_kl_coef 0.01 --use_kl_loss true --kl_estimator k3_unbiased",
    }.items()
}
DRAWINGS = (
    "flow_grpo diffusion_opd dance_grpo mix_grpo flow_dppo temp_flow_grpo diffusion_nft awm dgpo crd diffusion_dpo rwr "
    "reward_fl ddpo dpok"
).split()
OFFLINE = Way("--diffusion_algorithm diffusion_dpo --pair_data embedded", longer=2)
BOTH = "--rollout_batch_size 64 --train_batch_size"
UNIFIED = {  # 32 prompts of each kind, 8 samples of each
    "drawings": Way("--rollout_batch_size 32 --train_batch_size 256"),
    "questions": Way("--rollout_batch_size 32 --train_batch_size 256"),
    "both": Way(f"{BOTH} 512"),
    "in_turns": Way("--rollout_batch_size 32 --train_batch_size 256 --prompt_mixing turns", longer=2),
}


class Run:
    """A finished run: its evaluations, the samples trained on until each, and the seconds of all its steps."""

    def __init__(self, folder: Path, section: str = "rollout"):
        with open(folder / "eval_metrics.csv", newline="") as file:
            self.evaluations = list(csv.DictReader(file))
        with open(folder / "metrics.csv", newline="") as file:
            self.seconds = sum(float(row["time_step"]) for row in csv.DictReader(file))
        sizes = OmegaConf.load(folder / "config.resolved.yaml")[section]
        each = sizes.rollout_batch_size * sizes.n_samples_per_prompt
        self.samples = [float(row["step"]) * each for row in self.evaluations]

    def column(self, name: str) -> list[float]:
        return [float(row[name]) for row in self.evaluations]

    def reaching(self, name: str, value: float) -> int | None:
        """Index of the first evaluation at which a column is at least so much; None where none is."""
        return next((index for index, found in enumerate(self.column(name)) if found >= value), None)

    @property
    def diversity(self) -> list[float]:
        """Over that of the start."""
        values = self.column("eval_diversity")
        return [value / values[0] for value in values]


def deviation(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def ends(name: str) -> Callable[[list[Run]], str]:
    """A cell: a column at the first and the last evaluation."""
    return lambda group: ", ".join(deviation([run.column(name)[index] for run in group]) for index in (0, -1))


def to_threshold(run: Run) -> str:
    index = run.reaching("eval_reward_greedy", THRESHOLD)
    return "not reached" if index is None else f"{run.samples[index]:.0f}"


def to_half(run: Run) -> str:
    """Samples, and the diversity there."""
    start = run.column("eval_gold")[0]
    index = run.reaching("eval_gold", start + HALF * (1 - start))
    return "not reached" if index is None else f"{run.samples[index]:.0f} ({run.diversity[index]:.0%})"


def closed(run: Run) -> float:
    """Share of the gap to 1 that gold has closed at the end."""
    gold = run.column("eval_gold")
    return (gold[-1] - gold[0]) / (1 - gold[0])


def of_each(cell: Callable[[Run], str]) -> Callable[[list[Run]], str]:
    return lambda group: ", ".join(map(cell, group))


SECONDS = {"seconds": of_each(lambda run: f"{run.seconds:.0f}")}
REWARDS = {"sampled before, after": ends("eval_reward"), "greedy before, after": ends("eval_reward_greedy")}


@dataclass(frozen=True)
class Kind:
    """script: of examples/; ways: to train; columns: of the table; drawn: columns of evaluations whose curves are;
    section: of the configuration, which says how many samples a step has."""

    script: str
    ways: dict[str, Way]
    columns: dict[str, Callable[[list[Run]], str]]
    drawn: tuple[str, str]
    section: str = "rollout"


KINDS = {
    "answers": Kind(
        "train_grpo_vl.py", {name: Way(flags) for name, flags in ANSWERS.items()},
        REWARDS | {f"samples to greedy {THRESHOLD}": of_each(to_threshold)} | SECONDS,
        ("eval_reward_greedy", "eval_reward"),
    ),
    "drawings": Kind(
        "train_flow_grpo.py",
        {name: Way(f"--diffusion_algorithm {name}") for name in DRAWINGS} | {"diffusion_dpo_offline": OFFLINE},
        {
            "samples of each": of_each(lambda run: f"{run.samples[-1]:.0f}"),  # means of other ends are of no one run
            "gold before, after": ends("eval_gold"),
            "share of its gap": lambda group: deviation([closed(run) for run in group]),
            "diversity, of the start's": lambda group: deviation([run.diversity[-1] for run in group]),
            "reward before, after": ends("eval_reward"),
            f"samples to {HALF:.0%} of the gap (diversity there)": of_each(to_half),
        } | SECONDS,
        ("eval_gold", "eval_diversity"), "sampling",
    ),
    "turns": Kind(
        "train_grpo_vl.py", {task: Way(f"--prompt_data {task}") for task in ("embedded_zoom", "embedded_click")},
        REWARDS | SECONDS, ("eval_reward_greedy", "eval_reward"),
    ),
    "unified": Kind(
        "train_unified.py", UNIFIED,
        {
            "greedy answers": ends("eval_reward_greedy_answer"),
            "reward of drawings": ends("eval_reward_drawing"),
            "gold of drawings": ends("eval_gold_drawing"),
        } | SECONDS,
        ("eval_reward_greedy_answer", "eval_gold_drawing"),
    ),
}  # fmt: skip


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of curves at every number of samples at which any of them was evaluated, up to the end of the shortest.

    Runs that were evaluated elsewhere are interpolated there: the same evaluation of two runs of other lengths or other
    intervals is not after the same number of samples.
    """
    end = min(samples[-1] for samples, _ in curves)
    everywhere = sorted({each for samples, _ in curves for each in samples if each <= end})
    values = [np.interp(everywhere, samples, numbers) for samples, numbers in curves]
    return everywhere, np.mean(values, axis=0).tolist()


def finished(kind: Kind, folder: Path) -> dict[str, list[Run]]:
    """Finished runs by name, in the order in which they were made."""
    found = sorted(folder.glob("*-*/checkpoint-final"), key=lambda path: path.stat().st_mtime)
    runs: dict[str, list[Run]] = defaultdict(list)
    for path in found:
        runs[path.parent.name.rsplit("-", 1)[0]].append(Run(path.parent, kind.section))
    return runs


def table(kind: Kind, runs: dict[str, list[Run]]) -> str:
    """Markdown: a line for each way."""
    lines = [f"| run | seeds | {' | '.join(kind.columns)} |", "|---" * (2 + len(kind.columns)) + "|"]
    for name, group in runs.items():
        lines.append(f"| `{name}` | {len(group)} | {' | '.join(cell(group) for cell in kind.columns.values())} |")
    return "\n".join(lines) + "\n"


def draw(kind: Kind, runs: dict[str, list[Run]], output: Path) -> None:
    """Two columns over samples, the mean over seeds of each way."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), dpi=110)
    for panel, column in zip(panels, kind.drawn):
        for name, group in runs.items():
            curve = mean_curve([(run.samples, run.column(column)) for run in group])
            panel.plot(*curve, "o-", markersize=3, linewidth=1, label=name)
        panel.set(xlabel="samples", title=f"held out: {column.removeprefix('eval_')}")
        panel.grid(alpha=0.3)
    panels[0].set_ylim(0, 1.02)
    panels[1].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(output)


def train(kind: Kind, way: Way, run: Path, asked: argparse.Namespace, flags: list[str]) -> None:
    """One run, by DeepSpeed's launcher; ends the process where it fails."""
    run.mkdir(parents=True, exist_ok=True)
    words = way.flags.split()
    for flag, steps in (("--max_steps", asked.steps), ("--eval_steps", asked.every)):
        words += [flag, str(steps * way.longer)] if steps else []
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    command = [launcher, f"examples/{kind.script}", "--output_dir", str(run), *words, *flags]
    with open(run / "log.txt", "w") as log:
        code = subprocess.run(command, stdout=log, stderr=log, cwd=ROOT).returncode
    if code:
        sys.exit(f"{run.name} ended with {code}:\n" + "\n".join((run / "log.txt").read_text().splitlines()[-20:]))


def without_the_tool(run: Path) -> None:
    """The greedy reward of a zoom policy whose tool shows nothing, or another mark; written to checks.txt."""
    for check in ("EmbeddedZoomOfNothing", "EmbeddedZoomOfAnother"):
        command = [sys.executable, "-m", "lightrft_visual", "eval", str(run / "checkpoint-final"), "--environment",
                   f"scripts/bench/zoom_checks.py:{check}", "--output_dir", str(run / check),
                   "--out", str(run / f"{check}.json")]  # fmt: skip
        told = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
        with open(run / "checks.txt", "a") as file:
            file.writelines(f"{check} {line}\n" for line in told.splitlines() if "greedy" in line)


def prompts_of(way: str, split: str) -> list[str]:
    """Flags of what a unified run trains on and is evaluated on."""
    from lightrft_visual.plugins.unified.task import unified_task

    task = unified_task()
    files = {"drawings": task.drawings(split), "questions": task.questions()}
    chosen = [files[way]] if way in files else list(files.values())
    return ["--prompt_data", ",".join(map(str, chosen)), "--eval_data", str(task.held_out(split))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", nargs="+", default=["1", "2", "3"])
    parser.add_argument("--runs", nargs="+", help="default: all")
    parser.add_argument("--steps", type=int, help="default: what the recipe says; unified 240")
    parser.add_argument("--every", type=int, help="steps between evaluations; default: drawings 5, unified 60")
    parser.add_argument("--teacher", help="of diffusion_opd: a folder of LoRA weights")
    parser.add_argument("--eval_split", choices=("dev", "test"), default="test")
    asked, flags = parser.parse_known_args()
    kind, folder = KINDS[asked.kind], (asked.out or Path("outputs/learning") / asked.kind).resolve()
    unknown = sorted(set(asked.runs or ()) - set(kind.ways))
    if unknown:
        parser.error(f"no run {', '.join(unknown)}; there are: {', '.join(kind.ways)}")
    asked.steps = asked.steps or (240 if asked.kind == "unified" else None)
    asked.every = asked.every or {"drawings": 5, "unified": 60}.get(asked.kind)
    teacher = asked.teacher or str(folder / f"flow_grpo-{asked.seeds[0]}" / "checkpoint-final")
    for name in asked.runs or kind.ways:
        more = prompts_of(name, asked.eval_split) if asked.kind == "unified" else ["--eval_split", asked.eval_split]
        more += ["--teacher_pretrain", teacher] if name == "diffusion_opd" else []
        for seed in asked.seeds:
            run = folder / f"{name}-{seed}"
            if not (run / "checkpoint-final").is_dir():
                train(kind, kind.ways[name], run, asked, [*more, "--seed", seed, *flags])
            if name == "embedded_zoom" and not (run / "checks.txt").is_file():
                without_the_tool(run)
    runs = finished(kind, folder)
    text = table(kind, runs)
    (folder / "learning.md").write_text(text)
    draw(kind, runs, folder / "learning.png")
    print(text)


if __name__ == "__main__":
    main()
