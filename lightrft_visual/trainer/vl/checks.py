"""Settings that a model must be able to follow, refused by name before anything is built."""

from __future__ import annotations

from ...config.vl import RunConfig
from ...errors import ConfigError
from ...models.loading import Checkpoint


def check_abilities(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError for settings that this model cannot follow, or that would do nothing with it."""
    if config.train.packing_samples:
        checkpoint.family.require_packing()
    if config.algorithm.papo_coef > 0 and checkpoint.processor is None:
        raise ConfigError("papo_coef hides parts of images: this model reads text only")
    if config.rollout.noisy_rollout_share > 0 and checkpoint.processor is None:
        raise ConfigError("noisy_rollout_share adds noise to images: this model reads text only")
    _check_kinds(config, checkpoint)
    _check_heads(config, checkpoint)


def _check_kinds(config: RunConfig, checkpoint: Checkpoint) -> None:
    if checkpoint.family.draws:
        return
    if config.train.homogeneous_batches:
        raise ConfigError("homogeneous_batches parts answers from drawings: this model writes text only; leave it out")
    if config.algorithm.drawing_entropy_coef is not None:
        raise ConfigError("drawing_entropy_coef is of the tokens of images: this model writes text only; leave it out")


def _check_heads(config: RunConfig, checkpoint: Checkpoint) -> None:
    heads, sequence = checkpoint.config.get_text_config().num_attention_heads, config.distributed.sp_size
    for name, size in (("engine_tp_size", config.rollout.engine_tp_size), ("sp_size", sequence)):
        if heads % size:
            raise ConfigError(f"{name} {size} does not divide the model's {heads} attention heads")
    refused = checkpoint.family.sharing_refused(config.model.attn_implementation)
    if sequence > 1 and refused:
        raise ConfigError(f"sp_size {sequence} divides packed rows over ranks: {refused}; leave it at 1")
