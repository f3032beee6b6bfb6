"""What an evaluation was made with: whoever has this and the prompts can make its numbers again."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import xxhash

from ..config.constraints import not_usual
from ..config.diffusion import DiffusionRunConfig
from ..config.vl import RunConfig
from ..runtime.masking import mask_config
from .environment import versions

# By section; a setting that a kind of run does not have is left out.
SETTINGS = {
    "model": ("pretrain", "family", "bf16", "attn_implementation", "max_sequence_length"),
    "sampling": (
        "scheduler", "eval_num_steps", "flow_shift", "guidance_scale", "guidance_scale_2", "negative_prompt",
        "height", "width", "num_frames", "frame_rate", "source_pixels",
    ),
    "rollout": (
        "engine_type", "engine_quantization", "engine_kv_cache_dtype", "engine_kwargs", "temperature", "top_p", "top_k",
        "min_new_tokens", "generate_max_len", "prompt_max_len", "guidance_scale",
    ),
    "data": (
        "eval_data", "eval_split", "max_eval_samples", "data_format", "system_prompt", "apply_chat_template",
        "chat_template_kwargs", "min_pixels", "max_pixels",
    ),
    "episodes": ("environment", "tools", "max_turns", "max_episode_tokens", "observation_max_tokens",
                 "on_environment_error", "on_turn_limit", "on_token_limit"),
    "output": ("eval_samples_per_prompt", "eval_ema"),
    "guard": ("gold_recipe", "gold_fn"),
}  # fmt: skip

DRAWN = ("sampling", "rollout", "episodes", "output")


def conditions(config: RunConfig | DiffusionRunConfig, prompts: Iterable[str]) -> dict[str, Any]:
    """Settings by section, the rewards that were set, seed, prompts and versions; secrets are masked.

    Args:
        config: of the run, or of the evaluation of a checkpoint.
        prompts: that were held out, in their order.
    """
    found: dict[str, Any] = {}
    for section, names in SETTINGS.items():
        own = getattr(config, section, None)
        if getattr(own, "used", True):
            found[section] = {name: getattr(own, name) for name in names if hasattr(own, name)}
    reward = config.reward
    found["reward"] = {name: asdict(reward)[name] for name in not_usual(reward)}
    found["seed"] = config.train.seed if config.output.eval_seed is None else config.output.eval_seed
    if isinstance(config, DiffusionRunConfig):
        found["sampling"]["sampler"] = "ode"
        del found["output"]["eval_samples_per_prompt"]  # each prompt is drawn once
    listed = list(prompts)
    digest = xxhash.xxh3_128("\0".join(listed).encode(errors="surrogatepass")).hexdigest()
    found["prompts"] = {"count": len(listed), "xxh3_128": digest}
    return {**mask_config({name: part for name, part in found.items() if part != {}}), "versions": versions()}


def in_words(found: Mapping[str, Any]) -> str:
    """What decides how samples are drawn, in one line; what is not set is left out."""
    own = {name: value for section in DRAWN for name, value in found.get(section, {}).items()}
    own |= {"seed": found["seed"], "prompts": found["prompts"]["count"]}
    unset = (None, "", -1, "auto", {})
    return "evaluated with " + ", ".join(f"{name} {value}" for name, value in own.items() if value not in unset)
