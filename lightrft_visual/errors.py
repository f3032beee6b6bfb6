"""Typed errors. Each names what failed and, where it is known, the file, row, sample or flag to look at."""


class LightRFTVisualError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(LightRFTVisualError, ValueError):
    """A configuration that cannot work; raised before any model loads."""


class DataError(LightRFTVisualError, ValueError):
    """A data set, row, image or video that cannot be used."""


class RolloutError(LightRFTVisualError, RuntimeError):
    """Generation failed, or the engine and the trainer disagree about what was sampled."""


class RewardError(LightRFTVisualError, RuntimeError):
    """A reward function, model or server gave no usable score."""


class CheckpointError(LightRFTVisualError, RuntimeError):
    """A checkpoint is missing, incomplete or damaged."""


class NonFiniteError(LightRFTVisualError, FloatingPointError):
    """Loss or gradients were not finite too many steps in a row."""
