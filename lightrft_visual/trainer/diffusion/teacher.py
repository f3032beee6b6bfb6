"""The frozen model of on-policy distillation, for `model.teacher_pretrain`."""

from __future__ import annotations

from pathlib import Path

from diffusers import DiffusionPipeline
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from torch import nn

from ...config import registry
from ...config.diffusion import DiffusionRunConfig
from ...errors import ConfigError
from ...models.diffusion.families.base import join_lora
from ...models.diffusion.policy import DiffusionPolicy
from ...runtime.deepspeed import DeepspeedStrategy


def load_teacher(
    config: DiffusionRunConfig, strategy: DeepspeedStrategy, policy: DiffusionPolicy
) -> DiffusionPolicy | None:
    """The teacher's denoisers on the device, whole on every rank; its prompts are encoded by the policy's encoders.

    A folder of LoRA weights alone, as runs leave it, is joined with the model of the run.

    Args:
        config: of the run; None is returned where it names no teacher.
        strategy: for the device and the precision.
        policy: that learns from it.

    Raises:
        ConfigError: for a pipeline of another family, whose latents or conditions would be others, and for LoRA weights
            of another model.
    """
    model = config.model
    if model.teacher_pretrain is None:
        return None
    folder = Path(model.teacher_pretrain)
    adapters = (folder / LORA_WEIGHT_NAME_SAFE).is_file() and not (folder / DiffusionPipeline.config_name).is_file()
    path = registry.pipeline_folder(model.pretrain if adapters else model.teacher_pretrain, model.family)
    teacher = DiffusionPolicy.from_pretrained(
        path, dtype=strategy.dtype, text_length=model.max_sequence_length, family=model.family
    )
    if type(teacher.family) is not type(policy.family):
        raise ConfigError(
            f"teacher_pretrain {model.teacher_pretrain} is of family {type(teacher.family).__name__}, the model of "
            f"{type(policy.family).__name__}: on-policy distillation compares steps of one family"
        )
    teacher.family.follow(config)
    pipeline = teacher.family.pipeline
    if adapters:
        join_lora(pipeline, folder)
    idle = [name for name, part in pipeline.components.items() if isinstance(part, nn.Module)]
    pipeline.register_modules(**{name: None for name in idle if name not in teacher.denoisers})
    teacher.requires_grad_(False).eval()
    teacher.move_to(strategy.device)
    return teacher
