"""The parity gate: what the engine sampled must be what the trainer scores.

Every rollout is compared token by token with the trainer's own log-probs before anything is trained on it, by
`RolloutCheck`, which costs no generation and no forward pass of its own. `ParityGate.check` samples a few prompts again
and scores them: at the start, before an evaluation, every `parity_every` steps, and to find the cause of a difference.
On CPU in float32 both agree to about 1e-6, so anything larger is a bug: a cache of the old weights, a weight that was
not loaded, wrong positions, another precision. Prompts just used are the ones whose caches could be stale.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..config.vl import RunConfig
from ..errors import NonFiniteError, RolloutError
from ..experience.rollouts import PromptBatch, Rollout, SamplingSettings, ScoringRule, collate
from ..experience.types import Experience, ModelInputs
from ..models.loading import Checkpoint
from ..models.routing import count_experts
from ..runtime import collectives
from .engine import RolloutEngine, RolloutStage, diverged

logger = logging.getLogger(__name__)
T = torch.Tensor
Score = Callable[[ModelInputs, ScoringRule], T]

PROBE_TOKENS = 8
# Of the largest difference of a token's log-prob in float32, of the mean difference in bfloat16.
FP32_TOLERANCE, BF16_TOLERANCE = 1e-4, 0.05
# Of the mean of a mixture of experts: rounding sends single tokens to other experts, which differ by a lot.
MOE_BF16_TOLERANCE = 0.1
COARSE_TOLERANCE = 0.3  # of the mean of an engine in fewer bits, whose rounding tis_mode corrects
NUMERIC = "numeric, not the engine's weights or caches (a probe of the same prompts agrees)"
STALE = "stale weight or cache (it vanishes when all weights are loaded again)"
REFERENCE_TOLERANCE = 1e-3  # mean over tokens; the same weights in the same precision give 0


@dataclass
class ParityGate:
    """Compares engine and trainer on a few prompts.

    score(inputs, rule) gives the trainer's (B, A) log-probs; reload() loads all weights into the engine again, for the
    diagnosis. What must not exceed `tolerance` is the largest difference of a token, as in float32, or, where the gate
    `averages`, the mean over tokens, as in bfloat16, where single rare tokens differ widely.
    """

    stage: RolloutStage
    engine: RolloutEngine
    score: Score
    reload: Callable[[], None]
    pad_id: int
    vision: bool
    device: torch.device
    tolerance: float
    averages: bool = False
    sampling: SamplingSettings = field(default_factory=SamplingSettings)  # of the run: its temperature and guidance

    @classmethod
    def from_config(cls, config: RunConfig, checkpoint: Checkpoint, **parts: Any) -> ParityGate:
        """The gate of a run: tolerance and `averages` follow from its precision. parts: the other fields."""
        rollout, bf16, moe = config.rollout, config.model.bf16, count_experts(checkpoint.config) > 0
        full = FP32_TOLERANCE if not bf16 else MOE_BF16_TOLERANCE if moe else BF16_TOLERANCE
        usual = COARSE_TOLERANCE if rollout.coarse else full
        tolerance = usual if rollout.parity_tolerance is None else rollout.parity_tolerance
        parts |= {"sampling": SamplingSettings.from_config(rollout), "pad_id": checkpoint.tokenizer.pad_token_id}
        return cls(vision=checkpoint.vision, tolerance=tolerance, averages=bf16 or moe or rollout.coarse, **parts)

    def check(self, batch: PromptBatch) -> float:
        """The difference, largest over all ranks; raises RolloutError with the likely cause above the tolerance."""
        largest = self._largest(batch)
        if largest <= self.tolerance:
            return largest
        raise RolloutError(
            f"parity gate: engine and trainer differ by {largest:.3g} in a token's log-prob "
            f"(tolerance {self.tolerance:.3g}). Likely cause: {self._diagnose(batch)}"
        )

    def check_rollouts(self, difference: float, probe: PromptBatch | None = None, where: str = "") -> None:
        """The same check on a whole rollout.

        Args:
            difference: what is held against the tolerance, of all ranks.
            probe: prompts of it, to find the cause with; None: no cause is named.
            where: the token that differs most, if one is known, in words.
        """
        if difference <= self.tolerance:
            return
        by = f"{difference:.3g} in the mean" if self.averages else f"up to {difference:.3g}"
        text = (
            f"the trainer's log-probs of this rollout differ from the engine's by {by} "
            f"(tolerance {self.tolerance:.3g}){where}: what was sampled is not what would be trained"
        )
        raise RolloutError(text if probe is None else f"{text}. Likely cause: {self._cause(probe)}")

    def _cause(self, probe: PromptBatch) -> str:
        """What a probe says of a rollout's difference. The engine may sleep, and the trainer hold gradients."""
        try:
            self.engine.wake()
            anew = self.engine.lacks_weights
            if anew:
                self.reload()
            if self._largest(probe) > self.tolerance:
                return self._diagnose(probe)
            return STALE if anew else NUMERIC
        except NonFiniteError:
            raise
        except Exception as error:  # such as no memory for the engine beside gradients; the finding must be said
            logger.warning("the cause of the difference could not be looked for", exc_info=error)
            return f"unknown, the search failed with {type(error).__name__}: {error}"

    def check_reference(self, reference: Score, batch: PromptBatch) -> None:
        """Before the first step the reference is the policy; raises RolloutError where they score tokens differently.

        A collective.

        Args:
            reference: a function of (inputs, rule) to its (B, A) log-probs.
            batch: prompts to sample from.
        """
        rollouts, settings = self._probe(batch)
        self.engine.sleep(keep_weights=False)  # so that there is room for both models
        own = 0.0
        if rollouts:
            ours, samples = self._scores(self.score, rollouts, settings)
            theirs, _ = self._scores(reference, rollouts, settings)
            own = log_prob_difference(ours, theirs, samples.action_mask, mean=True)
        if self.engine.lacks_weights:
            self.engine.wake()
            self.reload()
        difference = collectives.all_reduce_max(torch.tensor([own])).item()
        if difference > REFERENCE_TOLERANCE:
            raise RolloutError(
                f"the reference model is not the starting policy: their log-probs differ by {difference:.3g} in the "
                f"mean (tolerance {REFERENCE_TOLERANCE:g}) before the first step. Likely cause: another checkpoint, "
                "or weights or buffers of another precision"
            )

    def _largest(self, batch: PromptBatch) -> float:
        rollouts, settings = self._probe(batch)
        own, broken = 0.0, False
        if rollouts:
            ours, samples = self._scores(self.score, rollouts, settings)
            own = log_prob_difference(ours, samples.rollout_log_probs, samples.action_mask, mean=self.averages)
            broken = not ours[samples.action_mask].isfinite().all()
        found = torch.nan_to_num(torch.tensor([own, float(broken)]), nan=math.inf, posinf=math.inf)
        difference, any_broken = collectives.all_reduce_max(found).tolist()
        if any_broken:
            raise diverged("the trainer's own log-probs")
        return difference

    def _probe(self, batch: PromptBatch) -> tuple[list[Rollout], SamplingSettings]:
        own = {name: getattr(self.sampling, name) for name in ("temperature", "guidance_scale", "guidance_log_probs")}
        settings = SamplingSettings(n=1, max_new_tokens=PROBE_TOKENS, **own)
        requests = self.stage.requests(batch, "parity")
        return RolloutStage.draw(self.stage, requests, settings), settings  # single responses, not a stage's episodes

    @torch.no_grad()
    def _scores(self, score: Score, rollouts: list[Rollout], settings: SamplingSettings) -> tuple[T, Experience]:
        samples = collate(rollouts, self.pad_id, self.vision)
        return score(ModelInputs.of(samples).to(self.device), settings.scoring).cpu(), samples

    def _diagnose(self, batch: PromptBatch) -> str:
        """Undo one possible cause after the other, until the difference is gone."""
        self.engine.reset_caches()
        if self._largest(batch) <= self.tolerance:
            return "stale cache (it vanishes when the engine's caches are reset)"
        self.reload()
        if self._largest(batch) <= self.tolerance:
            return "stale weight (it vanishes when all weights are loaded again)"
        plain = [i for i in range(len(batch)) if not batch.images[i] and not batch.videos[i]]
        # Generation and scoring are collectives: either every rank has text-only prompts to try, or none does.
        lacking = torch.tensor([float(not plain or len(plain) == len(batch))])
        if collectives.all_reduce_max(lacking).item():
            return "dtype (engine and trainer at different precision), or positions"
        if self._largest(batch.select(plain)) <= self.tolerance:
            return "positions or image features (text-only prompts agree, prompts with images do not)"
        return "dtype (engine and trainer at different precision)"


@dataclass
class RolloutCheck:
    """What the engine sampled against the trainer's own scores, over one step's rollouts of all ranks.

    gate: None measures, and refuses nothing. probe: prompts of the rollouts, for the diagnosis. Differences add up on
    the device of the scores; the host waits for them in `settle` alone. A mean is that of all tokens: in a micro-batch
    of short answers one rare token is a large part of it.
    """

    gate: ParityGate | None
    probe: PromptBatch | None
    # (4): largest difference of a token, total of all, tokens, those whose own score is not finite
    sums: T = field(default_factory=partial(torch.zeros, 4, dtype=torch.float64))
    # of each micro-batch that can tell of its tokens
    _largest: list[tuple[T, T, Callable[[int], str]]] = field(default_factory=list)

    @property
    def largest(self) -> float:
        """Difference of a token."""
        return self.sums[0].item()

    @property
    def compared(self) -> bool:
        """Whether there was anything to compare."""
        return self.sums[2].item() > 0

    @property
    def difference(self) -> float:
        """The gate's: what it holds against its tolerance."""
        if self.gate is None or not self.gate.averages:
            return self.largest
        _, total, tokens, _ = self.sums.tolist()
        return total / max(tokens, 1.0)

    @torch.no_grad()
    def add(self, ours: T, theirs: T | None, mask: T, told: Callable[[int], str] | None = None) -> None:
        """One micro-batch, all (B, A). Without log-probs of the engine there is nothing to compare.

        Args:
            ours, theirs: the trainer's and the engine's.
            mask: what is compared.
            told: how errors call a token, by its number in the flattened batch.
        """
        if theirs is None or not mask.numel():
            return
        difference = (ours.float() - theirs.float()).abs().nan_to_num(math.inf, math.inf, math.inf)
        difference = torch.where(mask, difference, 0.0).double()
        if told is not None:
            self._largest.append((difference.max(), difference.argmax(), told))
        broken = (mask & ~ours.isfinite()).sum().double()
        found = torch.stack([difference.sum(), mask.sum().double(), broken])
        before = self.sums.to(found.device)
        self.sums = torch.cat([torch.maximum(before[:1], difference.max()), before[1:] + found])

    def settle(self, heard: T | None = None) -> None:
        """The differences over all ranks; raises RolloutError where the gate refuses them, and
        NonFiniteError where the trainer's own scores are not finite.

        To be called once all micro-batches are added and before anything is trained on them. heard (ranks, 4): what
        every rank's `sums` were; without it the ranks tell each other now, which is a collective.
        """
        ranks = (collectives.all_gather_numbers(self.sums) if heard is None else heard).cpu()
        self.sums = torch.cat([ranks[:, :1].amax(dim=0), ranks[:, 1:].sum(dim=0)])
        if self.gate is not None:
            if self.sums[3]:
                raise diverged("the trainer's own log-probs of this rollout")
            where = ""
            if self._largest:
                _, position, told = max(self._largest, key=lambda each: each[0].item())
                where = f", most in {told(int(position))} of this rank"
            self.gate.check_rollouts(self.difference, self.probe, where)


def log_prob_difference(ours: T, theirs: T, mask: T, mean: bool = False) -> float:
    """Largest or mean |difference|; inf where one of them is not finite, 0 of nothing.

    Args:
        ours: (B, A) log-probs.
        theirs: (B, A).
        mask: (B, A) bool, what is compared.
        mean: the mean, not the largest.
    """
    difference = (ours.float() - theirs.float()).abs()[mask]
    if not difference.numel():
        return 0.0
    difference = torch.nan_to_num(difference, nan=math.inf, posinf=math.inf)
    return (difference.mean() if mean else difference.max()).item()
