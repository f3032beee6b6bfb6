"""The parity gate: what the engine sampled must be what the trainer scores.

After every weight sync a few prompts of the last rollout are sampled again and scored by the trainer. On CPU in float32
both agree to about 1e-6, so anything larger is a bug: a cache of the old weights, a weight that was not loaded, wrong
positions, another precision. Prompts just used are the ones whose caches could be stale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..batches.model_inputs import ModelInputs
from ..batches.prompts import PromptBatch
from ..batches.rollouts import Rollout, collate
from ..batches.sampling import SamplingSettings
from ..errors import RolloutError
from ..strategy import collectives
from .engine import RolloutEngine
from .stage import RolloutStage

T = torch.Tensor

PROBE_TOKENS = 8


@dataclass
class ParityGate:
    """Compares engine and trainer on a few prompts.

    score(inputs, rule) gives the trainer's (B, A) log-probs; reload() loads all weights into the engine again, for the
    diagnosis. compare(ours, theirs, mask) gives the figure that must not exceed `tolerance`: in float32 the largest
    difference of a token; in bfloat16, where single rare tokens differ widely, the mean over tokens.
    """

    stage: RolloutStage
    engine: RolloutEngine
    score: Callable[[ModelInputs, object], T]
    reload: Callable[[], None]
    pad_id: int
    vision: bool
    device: torch.device
    tolerance: float
    compare: Callable[[T, T, T], float] | None = None  # default: log_prob_difference

    def check(self, batch: PromptBatch, temperature: float = 1.0) -> float:
        """The figure, largest over all ranks; raises RolloutError with the likely cause above the tolerance."""
        largest = self._largest(batch, temperature)
        if largest <= self.tolerance:
            return largest
        raise RolloutError(
            f"parity gate: engine and trainer differ by {largest:.3g} in a token's log-prob "
            f"(tolerance {self.tolerance:.3g}). Likely cause: {self._diagnose(batch, temperature)}"
        )

    def figure(self, ours: T, theirs: T, mask: T) -> float:
        """What is held against the tolerance, for (B, A) log-probs under a mask."""
        return (self.compare or log_prob_difference)(ours, theirs, mask)

    def check_rollouts(self, difference: float) -> None:
        """The same check on the figure of a whole rollout."""
        if not difference <= self.tolerance:
            raise RolloutError(
                f"the trainer's log-probs of this rollout differ from the engine's by up to {difference:.3g} "
                f"(tolerance {self.tolerance:.3g}): what was sampled is not what would be trained"
            )

    def _largest(self, batch: PromptBatch, temperature: float) -> float:
        settings = SamplingSettings(n=1, temperature=temperature, max_new_tokens=PROBE_TOKENS)
        rollouts = self.stage.generate(batch, settings, purpose="parity")
        difference = torch.tensor([self._difference(rollouts, settings) if rollouts else 0.0])
        return collectives.all_reduce_max(torch.nan_to_num(difference, nan=math.inf, posinf=math.inf)).item()

    @torch.no_grad()
    def _difference(self, rollouts: list[Rollout], settings: SamplingSettings) -> float:
        samples = collate(rollouts, self.pad_id, self.vision)
        scored = self.score(ModelInputs.of(samples).to(self.device), settings.scoring).cpu()
        return self.figure(scored, samples.rollout_log_probs, samples.action_mask)

    def _diagnose(self, batch: PromptBatch, temperature: float) -> str:
        """Undo one possible cause after the other, until the difference is gone."""
        self.engine.reset_caches()
        if self._largest(batch, temperature) <= self.tolerance:
            return "stale cache (it vanishes when the engine's caches are reset)"
        self.reload()
        if self._largest(batch, temperature) <= self.tolerance:
            return "stale weight (it vanishes when all weights are loaded again)"
        plain = [i for i in range(len(batch)) if not batch.images[i] and not batch.videos[i]]
        # Generation and scoring are collectives: either every rank has text-only prompts to try, or none does.
        lacking = torch.tensor([float(not plain or len(plain) == len(batch))])
        if collectives.all_reduce_max(lacking).item():
            return "dtype (engine and trainer at different precision), or positions"
        if self._largest(batch.select(plain), temperature) <= self.tolerance:
            return "positions or image features (text-only prompts agree, prompts with images do not)"
        return "dtype (engine and trainer at different precision)"


def log_prob_difference(ours: T, theirs: T, mask: T) -> float:
    """Largest |difference| under the mask (B, A); inf where one of them is not finite, 0 of nothing."""
    difference = (ours.float() - theirs.float()).abs()[mask]
    if not difference.numel():
        return 0.0
    return torch.nan_to_num(difference, nan=math.inf, posinf=math.inf).max().item()


def mean_log_prob_difference(ours: T, theirs: T, mask: T) -> float:
    """Mean |difference| under the mask (B, A); inf where one of them is not finite, 0 of nothing."""
    difference = (ours.float() - theirs.float()).abs()[mask]
    if not difference.numel():
        return 0.0
    return torch.nan_to_num(difference, nan=math.inf, posinf=math.inf).mean().item()
