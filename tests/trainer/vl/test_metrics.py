"""What a step's experience says in numbers."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from lightrft_visual.config import registry
from lightrft_visual.observe.metrics import MetricsAccumulator
from lightrft_visual.trainer.hooks import StepData
from lightrft_visual.trainer.vl.evaluation import by_kind
from lightrft_visual.trainer.vl.maker import add_kl
from lightrft_visual.trainer.vl.parts import VLParts
from lightrft_visual.trainer.vl.updates import add_rollout_metrics, kl_per_token


def test_the_kl_of_a_step_is_a_mean_over_tokens():
    batches = []
    for lengths, kl in (([10, 30], 0.1), ([60], 0.3)):  # every token is `kl` likelier than under the reference
        mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
        ours, theirs = torch.full(mask.shape, kl), torch.zeros(mask.shape)
        made = SimpleNamespace(action_mask=mask, action_log_probs=ours, base_action_log_probs=theirs, info={})
        add_kl(made, "k1")
        batches.append(made)
    mean, samples = kl_per_token(batches)
    assert samples == 3 and mean == pytest.approx((40 * 0.1 + 60 * 0.3) / 100)
    assert batches[0].info["kl"].tolist() == pytest.approx([0.1, 0.1])


def test_groups_whose_valid_rewards_are_equal_or_alone_or_none_have_no_std(monkeypatch):
    """Also with a metric of a plug-in that was deleted."""
    kept = registry.rollout_metrics
    monkeypatch.setattr(kept, "_entries", dict(kept._entries))
    kept.below("lightrft_visual.plugins")("gone", "deleted:gone", "")
    rewards, groups = torch.tensor([1.0, 2, 1, 1, 9, 5, 7, 3]), torch.tensor([0, 0, 1, 1, 1, 2, 2, 3])
    valid = torch.tensor([1, 1, 1, 1, 0, 1, 0, 0]).bool()
    info = {"reward": rewards, "total_length": torch.ones(8), "reward_metrics": {}}
    tokens = {"action_mask": torch.ones(8, 1).bool(), "advantages": torch.zeros(8, 1)}
    unknown = dict.fromkeys(("kl", "action_entropy", "action_log_probs", "teacher_log_probs"))
    each = SimpleNamespace(info=info, group_id=groups, valid=valid, **tokens, **unknown)
    metrics = MetricsAccumulator()
    add_rollout_metrics(metrics, [each])
    assert metrics.reduce()["zero_std_ratio"] == 0.75


def test_the_share_of_clipped_advantages_is_over_tokens():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    each = SimpleNamespace(info={"advantage_clip_frac": torch.tensor([1 / 3, 1.0])}, action_mask=mask)
    metrics = MetricsAccumulator()
    metrics.add_mean("share", *registry.rollout_metrics["advantage_clip_frac"].load()(each))
    assert metrics.reduce()["share"] == pytest.approx(2 / 4)
    assert registry.rollout_metrics["advantage_clip_frac"].load()(SimpleNamespace(info={}, action_mask=mask)) is None


def test_answers_are_watched_as_texts_and_drawings_as_images():
    def made(group, ids, colour=None):
        image = None if colour is None else Image.new("RGB", (16, 16), colour)
        prompt = SimpleNamespace(group_id=group, draws=colour is not None)
        return SimpleNamespace(prompt=prompt, token_ids=ids, sampled_ids=ids, image=image)

    answers = [made(0, [5, 6, 5, 6, 5]), made(0, [5, 6, 7, 8, 9])]
    drawn = [made(1, [7] * 16, "red"), made(1, [7] * 16, "blue"), made(2, [7] * 16, "red"), made(2, [7] * 16, "red")]
    found = {}
    for name, rollouts in (("both", answers + drawn), ("answers", answers), ("drawings", drawn)):
        metrics = MetricsAccumulator()
        VLParts.add_statistics(SimpleNamespace(loss_parts=["answer", "drawing"]), StepData([], rollouts, metrics))
        found[name] = metrics.reduce()
    assert found["both"] == found["answers"] | found["drawings"] and not set(found["answers"]) & set(found["drawings"])
    assert found["both"]["repetition"] == pytest.approx(0.25) and found["both"]["image_blank"] == 1.0
    assert found["both"]["drawing_diversity"] == pytest.approx((2 / 3) ** 0.5 / 2, abs=0.01)


@pytest.mark.parametrize(
    ("label", "draws", "both", "names"),
    [
        ("portrait", True, True, ["eval_drawing", "eval_portrait"]),
        ("drawing", True, True, ["eval_drawing"]),
        ("colour", False, True, ["eval_answer", "eval_colour"]),
        (None, False, True, ["eval_answer"]),
        ("drawing", False, False, ["eval_drawing"]),
    ],
)
def test_evaluations_are_told_by_kind_and_by_label(label, draws, both, names):
    rollout = SimpleNamespace(prompt=SimpleNamespace(label=label, draws=draws))
    assert [*by_kind("eval", rollout, 1.0, both, {"drawing", "portrait", "colour"})] == ["eval", *names]
