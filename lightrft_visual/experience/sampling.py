"""How responses are drawn and scored, and what a rollout engine answers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class ScoringRule:
    """What turns logits into the distribution that was sampled from, beside the banned tokens.

    first_token_temperature: FIRE's, None without it; eos_banned_tokens: leading tokens that could not be an end token.
    guidance_scale: of the distribution of drawn tokens that is scored; 1 is the one with the prompt.
    """

    temperature: float = 1.0
    first_token_temperature: float | None = None
    eos_banned_tokens: int = 0
    guidance_scale: float = 1.0


# Settings of the rollout section that have other names than the fields of SamplingSettings.
CONFIG_NAMES = {"n": "n_samples_per_prompt", "max_new_tokens": "generate_max_len"}


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are drawn. Lengths in tokens, of text; `first_token_temperature` turns FIRE sampling on.

    guidance_scale: of drawn images, 1 for none. guidance_log_probs: whether their tokens' log-probs are those of the
    'guided' distribution that they are drawn from, or of the 'conditional' one, with the prompt alone.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 1024
    min_new_tokens: int = 1
    skip_special_tokens: bool = True
    first_token_temperature: float | None = None
    guidance_scale: float = 1.0
    guidance_log_probs: str = "guided"

    @classmethod
    def from_config(cls, rollout: Any) -> SamplingSettings:
        """Those of a run's rollout section: every field from the setting of its name, or of `CONFIG_NAMES`."""
        own = {item.name: CONFIG_NAMES.get(item.name, item.name) for item in fields(cls)}
        values = {name: vars(rollout)[setting] for name, setting in own.items() if setting in vars(rollout)}
        if not rollout.use_fire:
            values["first_token_temperature"] = None
        return cls(**values)

    @property
    def full_distribution(self) -> bool:
        """Whether every token but the banned ones can be drawn: only then are sampled log-probs a softmax."""
        return self.top_p == 1.0 and self.top_k == -1

    @property
    def eos_banned_tokens(self) -> int:
        """Leading tokens that may not be the end token; every response has one token, so a minimum of 1 bans none."""
        return self.min_new_tokens if self.min_new_tokens > 1 else 0

    @property
    def scoring(self) -> ScoringRule:
        """What the trainer must score these samples with."""
        guidance = self.guidance_scale if self.guidance_log_probs == "guided" else 1.0
        return ScoringRule(self.temperature, self.first_token_temperature, self.eos_banned_tokens, guidance)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time."""
        return self.temperature == 0.0


@dataclass
class Completion:
    """One response. `log_probs` has one number per token; None when truncated sampling leaves no softmax.

    image: what was drawn, as PIL, where the prompt asked for one. versions: of the policy that drew each token, where
    they may differ from the present one's.
    """

    token_ids: list[int]
    log_probs: list[float] | None
    text: str
    truncated: bool
    prompt_token_ids: list[int]
    image: Any = None
    versions: list[int] | None = None
