"""The report's curves: which figures stand in which panel, for one run and for several."""

from __future__ import annotations

from collections.abc import Sequence

from .charts import PALETTE, Series, area_chart, legend, line_chart, number
from .data import RunData
from .markup import Markup, join, tag

EVAL_FIRST = ("eval_reward", "eval_reward_greedy")
SECTIONS: dict[str, tuple[str, ...]] = {
    "Optimization": (
        "loss", "policy_loss", "critic_loss", "value_loss", "kl", "approx_kl", "kl_loss", "entropy", "grad_norm",
        "clip_frac", "value_clip_frac", "learning_rate", "critic_learning_rate", "skipped_steps",
    ),
    "Rollout and trainer agree?": (
        "rollout_logp_diff_max", "rollout_logp_diff", "parity", "ratio_max_dev_first", "ratio_max_dev", "tis_weight",
    ),
    "Responses and groups": (
        "response_length", "truncated_share", "tokens", "group_size", "zero_std_ratio", "reward_std_mean",
        "trained_prompt_num", "reward_invalid_share", "time_step",
    ),
}  # fmt: skip
# Bookkeeping of the reward engine: shown with the other figures, not beside the rewards themselves.
REWARD_COUNTS = ("/failures", "/not_applicable", "/invalid_share", "/time")
ALWAYS = ("loss", "kl", "time_step")  # shown even when they never change
MAX_OTHER = 80


def is_reward(name: str) -> bool:
    """Whether a column is a mean reward: reward_mean, a component reward/<name>, or mean_reward_<percent>."""
    return name == "reward_mean" or (name.startswith(("reward/", "mean_reward_")) and not name.endswith(REWARD_COUNTS))


def panel(title: str, chart: Markup | None, note: str = "", series: Sequence[Series] = ()) -> Markup | None:
    """One card: title, last value, legend where there is more than one line, chart."""
    if chart is None:
        return None
    header = tag("header", tag("b", title), tag("span", note))
    return tag("div", header, legend(series) if len(series) > 1 else None, chart, class_="card panel")


def last_value(points: Sequence[tuple[float, float]]) -> str:
    return number(points[-1][1]) if points else ""


def metric_panel(name: str, runs: Sequence[RunData], limit: int, kind: str = "metrics") -> Markup | None:
    """One figure of every run that has it."""
    sources = [(run, (run.metrics if kind == "metrics" else run.evaluation).get(name)) for run in runs]
    dots = kind == "evaluation"
    series = [
        Series(run.name if len(runs) > 1 else name, points, PALETTE[index % len(PALETTE)], not dots, dots)
        for index, (run, points) in enumerate(sources)
        if points
    ]
    note = last_value(series[0].points) if len(series) == 1 else ""
    return panel(name, line_chart(series, name, limit), note, series)


def reward_panel(run: RunData, limit: int) -> Markup | None:
    """Training reward and evaluation reward on the same axes."""
    series = []
    if "reward_mean" in run.metrics:
        series.append(Series("training", run.metrics["reward_mean"], PALETTE[0], smooth=True))
    for color, name in enumerate(EVAL_FIRST, start=1):
        if name in run.evaluation:
            label = "evaluation, greedy" if name.endswith("greedy") else "evaluation"
            series.append(Series(label, run.evaluation[name], PALETTE[color], dots=True))
    return panel("reward", line_chart(series, "reward", limit), "", series)


def kinds_panels(run: RunData, limit: int) -> list[Markup | None]:
    """Evaluation figures apart from the two totals, greedy ones in panels of their own, eight lines a panel."""
    names = [name for name in run.evaluation if name not in EVAL_FIRST]
    greedy = [name for name in names if name.startswith("eval_reward_greedy_")]
    sampled = [name for name in names if name not in greedy]
    panels = []
    for title, group in (("evaluation, by kind", sampled), ("evaluation, greedy, by kind", greedy)):
        for start in range(0, len(group), 8):
            series = [
                Series(kind_name(name), run.evaluation[name], PALETTE[index % len(PALETTE)], dots=True)
                for index, name in enumerate(group[start : start + 8])
            ]
            panels.append(panel(title, line_chart(series, title, limit), "", series))
    return panels


def kind_name(name: str) -> str:
    for prefix in ("eval_reward_greedy_", "eval_reward_", "eval_"):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def time_panel(run: RunData) -> Markup | None:
    """Seconds of each phase stacked."""
    names = [name for name in run.metrics if name.startswith("time_") and name != "time_step"]
    names = [name for name in names if any(value > 0 for _, value in run.metrics[name])]
    series = [Series(name[5:], run.metrics[name], PALETTE[index % len(PALETTE)]) for index, name in enumerate(names)]
    return panel("seconds a step, by phase", area_chart(series, "seconds a step by phase"), "", series)


def columns_of(runs: Sequence[RunData], kind: str = "metrics") -> list[str]:
    """Names that any run has, in order of appearance."""
    tables = [run.metrics if kind == "metrics" else run.evaluation for run in runs]
    return list(dict.fromkeys(name for table in tables for name in table))


def grid(panels: Sequence[Markup | None]) -> Markup | None:
    shown = [item for item in panels if item is not None]
    return tag("div", shown, class_="grid") if shown else None


def section(title: str, panels: Sequence[Markup | None]) -> Markup | None:
    content = grid(panels)
    return join([tag("h3", title), content]) if content else None


def reward_names(runs: Sequence[RunData]) -> list[str]:
    """Reward columns shown in the reward section."""
    return [name for name in columns_of(runs) if is_reward(name)][:12]


def reward_section(runs: Sequence[RunData], limit: int) -> Markup | None:
    """Did it learn: training and evaluation reward, and their parts."""
    names = reward_names(runs)
    if len(runs) == 1:
        panels = [reward_panel(runs[0], limit), *kinds_panels(runs[0], limit)]
        names = [name for name in names if name != "reward_mean"]
    else:
        panels = [metric_panel(name, runs, limit, "evaluation") for name in columns_of(runs, "evaluation")]
    content = grid([*panels, *(metric_panel(name, runs, limit) for name in names)])
    return tag("section", tag("h2", "Reward"), content, id="reward") if content else None


def curves(runs: Sequence[RunData], limit: int) -> Markup | None:
    """All other panels, grouped; rare columns are folded away."""
    names = columns_of(runs)
    steady = {name: value for name in names if (value := constant(name, runs)) is not None and name not in ALWAYS}
    used, parts = {*reward_names(runs), *steady}, []
    for title, wanted in SECTIONS.items():
        present = [name for name in wanted if name in names and name not in steady]
        used.update(present)
        parts.append(section(title, [metric_panel(name, runs, limit) for name in present]))
    others = [name for name in names if name not in used and not (len(runs) == 1 and name.startswith("time_"))]
    parts.append(folded(others, runs, limit))
    if steady:
        values = ", ".join(f"{name} {number(value)}" for name, value in steady.items())
        parts.append(tag("p", f"The same at every step: {values}.", class_="small soft"))
    return tag("section", tag("h2", "Training"), parts, id="curves") if any(parts) else None


def constant(name: str, runs: Sequence[RunData]) -> float | None:
    """The value of a figure that never changes over at least three steps; None for every other."""
    values = [value for run in runs for _, value in run.metrics.get(name, [])]
    return values[0] if len(values) >= 3 and len(set(values)) == 1 else None


def folded(names: list[str], runs: Sequence[RunData], limit: int) -> Markup | None:
    content = grid([metric_panel(name, runs, limit) for name in names[:MAX_OTHER]])
    if content is None:
        return None
    left_out = names[MAX_OTHER:]
    note = tag("p", f"In metrics.csv only: {', '.join(left_out)}", class_="small soft") if left_out else None
    return tag("details", tag("summary", "More figures ", tag("span", f"({len(names)})")), content, note)
