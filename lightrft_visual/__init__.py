"""RL post-training for models that see (vision-language) and models that draw (diffusion)."""

__version__ = "0.1.0"
