"""Settings that only some choices read: set beside another choice they would do nothing, so a run refuses them there.

Sections by themselves take them: code that tries many losses may give all of them the same settings.
"""

import logging
import os
from collections.abc import Iterable
from typing import Any

from ..errors import ConfigError
from . import registry
from .constraints import not_usual
from .shared import EMBEDDED

logger = logging.getLogger(__name__)
CLIPPED = ("flow_grpo", "dance_grpo", "mix_grpo", "temp_flow_grpo", "ddpo", "awm")  # by clip_range
OF_ENGINES = ("engine_quantization", "engine_kv_cache_dtype", "engine_kwargs")  # vLLM's names and SGLang's
OVERLONG_SIZES = ("overlong_buffer_len", "overlong_buffer_penalty_factor")
REWARD_FL = (
    "mid_timestep", "final_timestep", "min_timestep_boundary", "max_timestep_boundary", "reward_fl_weight",
    "score_mean", "score_std", "score_target",
)  # fmt: skip


def _refuse_idle(section: Any, names: Iterable[str], owner: str, read: bool) -> None:
    """Raise ConfigError where nothing reads the settings `names` of a section, and one is not at its default.

    owner: what would read them, in words.
    """
    for name in () if read else not_usual(section, names):
        raise ConfigError(f"{name} belongs to {owner}; here {getattr(section, name)} would do nothing: leave it out")


def check_run(algorithm: Any, rollout: Any) -> None:
    """Of a vision-language run: an `AlgorithmConfig` and a `RolloutConfig`. A policy loss of one's own may read the
    settings of any other."""
    loss = registry.policy_losses[algorithm.policy_loss]
    for names, readers in (
        (("sapo_tau_pos", "sapo_tau_neg"), ("sapo",)),
        (("cpgd_alpha",), ("cpgd",)),
        (("dual_clip",), ("ppo", "gspo", "luspo", "clip_cov")),
        (("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), ("vespo",)),
        (("cov_share",), ("clip_cov", "kl_cov")),
        (("clip_cov_low", "clip_cov_high"), ("clip_cov",)),
        (("kl_cov_coef",), ("kl_cov",)),
    ):
        _refuse_idle(algorithm, names, f"policy_loss {' or '.join(readers)}", loss.name in readers or not loss.shipped)
    for names, owner, read in (
        (("entropy_coef_step", "entropy_coef_max"), "an entropy_target", algorithm.entropy_target is not None),
        (("papo_mask_ratio",), "a papo_coef above 0", algorithm.papo_coef > 0),
        (("tis_cap",), "--tis_mode token or sequence", algorithm.corrects_rollouts),
        (OVERLONG_SIZES, "--overlong_buffer", algorithm.overlong_buffer),
    ):
        _refuse_idle(algorithm, names, owner, read)
    if algorithm.estimator.shipped and not algorithm.estimator.critic:  # beside any estimator in commands of others
        _say_idle(algorithm, not_usual(algorithm, ("lambd", "value_clip")), "advantage_estimator gae")
    if loss.name in ("sapo", "vespo", "kl_cov"):
        _say_idle(algorithm, not_usual(algorithm, ("eps_clip", "eps_clip_high")), "policy losses that clip ratios")
    _refuse_idle(rollout, OF_ENGINES, "engines with weights of their own", rollout.engine_type != "hf")
    _refuse_idle(rollout, ("noisy_rollout_strength",), "a noisy_rollout_share above 0", rollout.noisy_rollout_share > 0)


def check_any(config: Any) -> None:
    """Of every run: adapters of no rank; evaluations, but for the embedded model, whose preset asks for them."""
    model, data, output = config.model, config.data, config.output
    adapters = [name for name in ("lora_alpha", "lora_dropout", "target_modules") if hasattr(model, name)]
    _say_idle(model, not_usual(model, adapters) if model.lora_rank == 0 else [], "a lora_rank above 0")
    if model.pretrain != EMBEDDED and not data.evaluated and data.max_eval_samples > 0:
        reader = "evaluations, whose prompts --eval_data names"
        _say_idle(data, not_usual(data, ("eval_split", "max_eval_samples")), reader)
        saves = output.save_steps is None  # by the interval of evaluations
        _say_idle(output, ["eval_steps"] if (output.eval_steps or 0) > 0 and not saves else [], reader)


def _say_idle(section: Any, names: list[str], reader: str) -> None:
    """Say which settings do nothing here, that commands of other systems give wherever they are read or not."""
    if names and os.environ.get("RANK", "0") == "0":
        values = {name: getattr(section, name) for name in names}
        told = " and ".join(f"{name} {each if isinstance(each, str) else f'{each:g}'}" for name, each in values.items())
        logger.warning("%s: read by %s, and does nothing here", told, reader)


def check_diffusion(run: Any) -> None:
    """Of a `DiffusionRunConfig`. An algorithm of one's own may read the settings of any other.

    Settings whose default depends on the algorithm may also stand at it, as they do in a run's resolved file.
    """
    config, data, entry = run.algorithm, run.data, run.algorithm.entry
    _refuse_idle(data, ("chosen_key", "rejected_key"), "pair_data", data.pair_data is not None)
    if not entry.shipped:
        return
    name, flow = entry.name, entry.trains_on == "steps" and entry.prediction == "flow"
    scaled = entry.trains_on != "reward" and not entry.teacher and entry.coupled != "pairs"
    of_steps = "other algorithms (reward_fl has mid_timestep and final_timestep)"
    old = entry.old_policy or (bool(entry.coupled) and config.dpo_reference == "old")
    for names, owner, read in (
        (("nft_beta", "nft_kl_beta", "adv_mode"), "diffusion_nft", name == "diffusion_nft"),
        (("awm_weighting", "awm_power", "old_beta"), "awm", name == "awm"),
        (("rwr_temperature",), "rwr", name == "rwr"),
        (("dppo_threshold",), "flow_dppo", name == "flow_dppo"),
        (("kl_form",), "algorithms of SDE steps of flow models", flow),
        (("crd_beta",), "crd", name == "crd"),
        (("dpo_reference",), "dgpo and diffusion_dpo", bool(entry.coupled) and not entry.old_policy),
        (("decay_counts",), "algorithms with an old policy", old),
        (REWARD_FL, "reward_fl", entry.trains_on == "reward"),
        (("timestep_fraction",), of_steps, entry.trains_on != "reward"),
        (("adv_clip_max",), "algorithms with advantages", scaled),
    ):
        _refuse_idle(config, names, owner, read)
    if not scaled:  # of a recipe whose algorithm the command exchanges
        _say_idle(config, not_usual(config, ("global_std",)), "algorithms with advantages")
    if run.trajectory not in ("sde", "dance"):  # a recipe has it, whose trajectory the command exchanges
        _say_idle(config, not_usual(config, ("kl_form",)), "trajectories sde and dance")
    for setting, owner, read in (
        ("beta", "other algorithms (the KL of diffusion_nft is nft_kl_beta)", name != "diffusion_nft"),
        ("dpo_beta", "dgpo and diffusion_dpo", bool(entry.coupled) and not entry.old_policy),
        ("timestep_choice", of_steps, entry.trains_on != "reward"),
        ("min_sigma", "algorithms that train on finished samples", entry.trains_on == "data"),
        ("decay_type", "algorithms with an old policy", old),
    ):
        _refuse_idle(config, (setting,), owner, read or getattr(config, setting) == getattr(entry, setting))
    if name not in CLIPPED and config.clip_range != entry.clip_range:
        _say_idle(config, ["clip_range"], f"algorithm {', '.join(CLIPPED)}")
