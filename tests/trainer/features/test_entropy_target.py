"""The steered entropy bonus: its coefficient, what a train batch gets, and where a resumed run goes on."""

from types import SimpleNamespace

import pytest

from lightrft_visual.algorithms.loss_terms import LossDenominators, terms_of
from lightrft_visual.config.vl import AlgorithmConfig
from lightrft_visual.trainer.features.entropy_target import EntropyTargetHook, build
from lightrft_visual.trainer.vl.updates import LossPart, TrainBatch, parts_of_loss

CONFIG = AlgorithmConfig(entropy_target=0.5, entropy_coef=0.001, entropy_coef_step=0.002, entropy_coef_max=0.004)


def test_the_coefficient_follows_the_entropy_by_hand_also_where_it_is_resumed():
    hook, resumed, seen = EntropyTargetHook(CONFIG), EntropyTargetHook(CONFIG), []
    for entropy in (0.4, 0.3, 0.2, 0.6, 0.7, 0.8, 0.4):
        seen.append(hook.coefficient)
        hook.on_metrics({"entropy": entropy})
    # Up twice and held at 0.004; the first entropy above the target turns it off, while the value goes down to 0.
    assert seen == pytest.approx([0.001, 0.003, 0.004, 0.004, 0.0, 0.0, 0.0])
    assert hook.coefficient == pytest.approx(0.002)
    hook.on_metrics({"entropy": 0.9})
    hook.on_metrics({})
    resumed.load_state_dict(hook.state_dict())
    assert (resumed.value, resumed.coefficient) == (hook.value, 0.0)
    (term,) = terms_of(AlgorithmConfig(entropy_target=0.5))  # the forward brings entropies also at 0
    assert term.needs_entropy and terms_of(AlgorithmConfig()) == []


def test_a_train_batch_gets_the_coefficient_of_its_step():
    (settings,) = parts_of_loss(CONFIG, 6)
    part = LossPart(settings, [], LossDenominators(1, 1, 1))
    hook = EntropyTargetHook(CONFIG)
    hook.on_metrics({"entropy": 0.1})
    (changed,) = hook.on_train_batch(TrainBatch([], [], None, part.denominators, [part])).parts
    assert changed.settings.entropy_coef == pytest.approx(0.003) and part.settings.entropy_coef == 0.001


def test_the_hook_is_built_where_a_target_is_given():
    parts = SimpleNamespace(config=SimpleNamespace(algorithm=CONFIG))
    assert build(parts) is not None
    parts.config.algorithm = AlgorithmConfig()
    assert build(parts) is None
