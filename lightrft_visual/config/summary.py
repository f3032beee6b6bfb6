"""A run in a few lines, before anything heavy is imported: what is trained, on what, for what, and what was set."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from ..runtime.masking import mask_text
from ..runtime.presence import ranks_started
from .shared import RewardConfig

WIDTH, MOST_LINES = 160, 2
SAID = ("local_rank", "output_dir", "pretrain", "prompt_data")  # in the first line, or by the launcher


def in_lines(config: Any) -> list[str]:
    """`what_runs`, and the settings that differ from the schema's defaults, in at most three lines."""
    return [mask_text(what_runs(config)), *_wrapped([mask_text(each) for each in changed(config)])]


def what_runs(config: Any) -> str:
    """Model, data, rewards and plan of a run, in a line."""
    names = ("diffusion_algorithm", "advantage_estimator")
    kind = next((getattr(config.algorithm, name) for name in names if hasattr(config.algorithm, name)), "sft")
    world = ranks_started()
    form = f"LoRA rank {config.model.lora_rank}" if config.model.lora_rank else "all weights"
    ranks = f"{world} rank{'s' if world > 1 else ''}, ZeRO-{config.distributed.zero_stage}"
    precision = "bf16" if config.model.bf16 else "fp32"
    plan = f"{form} in {precision} on {ranks}"
    episodes = getattr(config, "episodes", None)
    own = "those of the environment" if episodes is not None and episodes.used else "those of the task"
    plan += f"; rewards: {rewards(config.reward) or own}" if config.reward is not None else ""
    return f"{kind} of {config.model.pretrain} on {config.data.prompt_data}: {plan}; output {config.output.output_dir}"


def rewards(reward: RewardConfig) -> str:
    """What scores the samples, as it is named; empty where nothing is."""
    named = reward.reward_fn, reward.reward_pretrain, reward.remote_rm_url, reward.reward_recipe
    found = [str(each) for each in named if each] + list(reward.components)
    return ", ".join(" ".join(mask_text(each).split())[:60] for each in found)


def changed(config: Any) -> Iterator[str]:
    """`name value` of each setting that is not at the schema's default."""
    usual = type(config)()
    for item in fields(config):
        value, before = getattr(config, item.name), getattr(usual, item.name)
        inner = fields(value) if is_dataclass(value) else ()
        for setting in inner:
            now = getattr(value, setting.name)
            if now != getattr(before, setting.name) and not is_dataclass(now) and setting.name not in SAID:
                yield f"{setting.name} {' '.join(mask_text(str(now)).split())[:40]}"
        if not inner and value != before:
            yield f"{item.name} {' '.join(mask_text(str(value)).split())[:40]}"


def _wrapped(settings: list[str]) -> list[str]:
    """Lines of settings; those that have no room stand in config.resolved.yaml."""
    lines: list[str] = []
    current = "set:"
    for number, each in enumerate(settings):
        if len(current) + len(each) + 2 > WIDTH:
            if len(lines) == MOST_LINES - 1:
                current += f"  … and {len(settings) - number} more in config.resolved.yaml"
                break
            lines.append(current)
            current = "    "
        current += f"  {each}"
    return [*lines, current] if settings else []
