"""After which steps the engine's weights are probed."""

from __future__ import annotations

from types import SimpleNamespace

from lightrft_visual.config.vl import RolloutConfig
from lightrft_visual.trainer.vl.maker import Agreement


def probed_steps(steps: int, ahead: bool = False, full: bool = True, evaluated: bool = False) -> list[int]:
    """After which of the first steps of a run the engine's new weights are probed."""
    found: list[int] = []
    gate = SimpleNamespace(check=lambda probe, temperature: found.append(step) or 0.25)
    agreement = Agreement(gate, RolloutConfig(), ahead)
    agreement.probe = object()
    for step in range(1, steps + 1):
        agreement.after_sync(step, evaluated, full)
    assert agreement.difference == (0.25 if found else 0.0)
    return found


def test_the_first_weights_are_probed_where_no_rollout_would_show_them():
    """Rollouts ahead are of a policy that is gone when they are trained on: nothing can be compared with them."""
    assert probed_steps(51) == [50]
    assert probed_steps(51, ahead=True) == [1, 50]


def test_every_sync_is_probed_before_an_evaluation_and_where_log_probs_are_cut():
    assert probed_steps(2, evaluated=True) == [1, 2]
    assert probed_steps(2, full=False) == [1, 2]
