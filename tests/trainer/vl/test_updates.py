"""The optimizer step's gradients do not depend on how the train batch is cut or laid out."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import PlainEngine, actor_of, checkpoint_of, mixed_prompts, rollouts_of, text_prompts

from lightrft_visual.config.vl import AlgorithmConfig
from lightrft_visual.errors import RolloutError
from lightrft_visual.experience.batch_plan import MicroBatch
from lightrft_visual.experience.buffer import NaiveReplayBuffer
from lightrft_visual.experience.rollouts import PromptBatch, ScoringRule, collate
from lightrft_visual.models.vlm.actor import Critic
from lightrft_visual.observe.metrics import MetricsAccumulator
from lightrft_visual.rollout.parity import RolloutCheck
from lightrft_visual.trainer.vl.updates import PolicyUpdate, ValueUpdate, has_dropout, parts_of_loss, plan_batch

ONE_PART = parts_of_loss(AlgorithmConfig(), 6)


def eight_prompts() -> PromptBatch:
    four = mixed_prompts(videos=False)
    return PromptBatch.of(four.prompts * 2, four.images * 2)


def gradients(checkpoint, micro_batch: int, packed: bool, prompts: PromptBatch) -> tuple[float, dict]:
    """(loss, {name: gradient}) of one step on eight samples with made-up advantages."""
    actor = actor_of(checkpoint)
    buffer = NaiveReplayBuffer(micro_batch, packing_samples=packed)
    experience = collate(rollouts_of(checkpoint, prompts), checkpoint.tokenizer.pad_token_id, checkpoint.vision)
    make = torch.Generator().manual_seed(3)
    shape = experience.action_mask.shape
    experience.action_log_probs = -2 + torch.randn(shape, generator=make)
    experience.advantages = torch.randn(shape, generator=make)
    experience.valid = torch.ones(len(prompts), dtype=torch.bool)
    experience.info = {}
    buffer.append(experience)
    metrics = MetricsAccumulator()
    config = AlgorithmConfig(eps_clip=3.0, entropy_coef=0.1)
    (micro_batches,) = buffer.plan(0)
    batch = plan_batch(buffer, micro_batches, config, parts_of_loss(config, 6))
    assert len(micro_batches) == -(-len(prompts) // micro_batch)
    PolicyUpdate(PlainEngine(actor), config, ScoringRule(temperature=0.7)).step(buffer, batch, 0.0, metrics, True)
    found = {name: p.grad for name, p in actor.named_parameters() if p.grad is not None}
    return metrics.reduce()["loss"], found


class Refusal(RolloutCheck):
    def settle(self, heard=None):
        raise RolloutError("refused")


@pytest.mark.parametrize("packed", [False, True])
def test_a_first_update_scores_the_rollouts_by_its_own_forward(tmp_path, packed):
    checkpoint = checkpoint_of(tmp_path, "qwen2")
    actor, rule = PlainEngine(actor_of(checkpoint)), ScoringRule()
    experience = collate(rollouts_of(checkpoint, text_prompts()), checkpoint.tokenizer.pad_token_id, False)
    experience.advantages, experience.info = torch.ones(experience.action_mask.shape), {}
    experience.rollout_log_probs = torch.full(experience.action_mask.shape, -1.0)
    filled, config = [], AlgorithmConfig()
    for ahead in (False, True):
        buffer = NaiveReplayBuffer(2, packing_samples=packed)
        buffer.append(experience)
        batch = plan_batch(buffer, buffer.plan(0)[0], config, parts_of_loss(config, 6))
        update, check = PolicyUpdate(actor, config, rule), RolloutCheck(None, None, 1.0)
        if ahead:
            update.score(buffer, [batch], check)
        metrics = MetricsAccumulator()
        update.step(buffer, batch, 0.0, metrics, True, check)
        assert check.compared and check.largest > 0
        found = metrics.reduce()
        assert found["ratio_max_dev_first"] == 0 and found["entropy"] > 0 and actor.stepped
        filled.append([item.action_log_probs for item in buffer])
    assert all(len(item.action_log_probs) == len(item.action_mask) for item in buffer)
    assert all(torch.equal(left, right) for left, right in zip(*filled)) and filled[0][0].any()


def test_the_first_deviation_is_of_the_samples_of_this_step(tmp_path):
    checkpoint = checkpoint_of(tmp_path, "qwen2")
    actor = PlainEngine(actor_of(checkpoint))
    experience = collate(rollouts_of(checkpoint, text_prompts()), checkpoint.tokenizer.pad_token_id, False)
    experience.advantages, experience.info = torch.ones(experience.action_mask.shape), {}
    buffer = NaiveReplayBuffer(2)
    buffer.append(experience)
    config, rule = AlgorithmConfig(), ScoringRule()
    batch = plan_batch(buffer, buffer.plan(0)[0], config, parts_of_loss(config, 6))
    PolicyUpdate(actor, config, rule).score(buffer, [batch], RolloutCheck(None, None, 1.0))
    buffer.items[1].action_log_probs -= 0.5
    for marked in (1, 0):
        for place, item in enumerate(buffer.items):
            item.info = {"replayed": place == marked}
        metrics = MetricsAccumulator()
        PolicyUpdate(actor, config, rule).step(buffer, batch, 0.0, metrics, True)
        found = metrics.reduce()
        assert found["ratio_max_dev"] == pytest.approx(math.exp(0.5) - 1, rel=1e-4)
        assert found["ratio_max_dev_first"] == pytest.approx(0.0 if marked else math.exp(0.5) - 1, rel=1e-4)


def test_what_the_check_refuses_is_not_stepped_on(tmp_path):
    checkpoint = checkpoint_of(tmp_path, "qwen2")
    actor, buffer, config = PlainEngine(actor_of(checkpoint)), NaiveReplayBuffer(4), AlgorithmConfig()
    experience = collate(rollouts_of(checkpoint, text_prompts()), checkpoint.tokenizer.pad_token_id, False)
    experience.advantages, experience.info = torch.ones(experience.action_mask.shape), {}
    buffer.append(experience)
    batch = plan_batch(buffer, buffer.plan(0)[0], config, parts_of_loss(config, 6))
    with pytest.raises(RolloutError, match="refused"):
        PolicyUpdate(actor, config, ScoringRule()).step(
            buffer, batch, 0.0, MetricsAccumulator(), True, Refusal(None, None, 1.0)
        )
    assert not actor.stepped


def test_dropout_is_found_wherever_it_is_set(tmp_path):
    actor = actor_of(checkpoint_of(tmp_path, "qwen2_5_vl"))
    assert not has_dropout(actor)
    assert has_dropout(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1)))
    actor.transformer.model.language_model.layers[0].self_attn.attention_dropout = 0.1
    assert has_dropout(actor)


def assert_same(left: tuple[float, dict], right: tuple[float, dict], tolerance: float) -> None:
    assert left[0] == pytest.approx(right[0], abs=tolerance)
    assert left[1].keys() == right[1].keys() and left[1]
    largest = max(gradient.abs().max().item() for gradient in left[1].values())
    assert largest > 1e-3
    for name, gradient in left[1].items():
        assert (gradient - right[1][name]).abs().max().item() <= tolerance * max(1.0, largest), name


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_micro_batches_of_any_size_give_the_same_gradients(cache_root, tmp_path, micro_batch):
    checkpoint = checkpoint_of(tmp_path, "qwen2_5_vl")
    whole = gradients(checkpoint, 8, False, eight_prompts())
    assert_same(whole, gradients(checkpoint, micro_batch, False, eight_prompts()), 1e-6)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("micro_batch", [8, 2])
def test_packed_gradients_are_the_padded_ones(tmp_path, family, micro_batch):
    checkpoint = checkpoint_of(tmp_path, family)
    padded = gradients(checkpoint, 8, False, eight_prompts())
    assert_same(padded, gradients(checkpoint, micro_batch, True, eight_prompts()), 1e-5)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("packed", [False, True])
def test_text_alone_gives_every_weight_of_the_vision_tower_a_zero_gradient(tmp_path, family, packed):
    """All ranks must reduce the same gradients, whether their micro-batch has an image or not."""
    checkpoint = checkpoint_of(tmp_path, family)
    text = PromptBatch.of([eight_prompts().prompts[0]] * 2)
    _, of_text = gradients(checkpoint, 2, packed, text)
    _, of_images = gradients(checkpoint, 8, packed, eight_prompts())
    assert of_text.keys() == of_images.keys()
    assert all(not gradient.any() for name, gradient in of_text.items() if ".visual." in name)


@pytest.mark.parametrize("packed", [False, True])
def test_cut_answers_leave_the_loss_and_its_denominators(cache_root, tmp_path, packed):
    checkpoint = checkpoint_of(tmp_path, "qwen2_5_vl")
    buffer = NaiveReplayBuffer(4, packing_samples=packed)
    experience = collate(rollouts_of(checkpoint, eight_prompts()), checkpoint.tokenizer.pad_token_id, checkpoint.vision)
    experience.action_log_probs = torch.zeros(experience.action_mask.shape)
    experience.info = {"truncated": torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])}
    lengths = experience.action_mask.sum(dim=1)
    buffer.append(experience)
    (micro_batches,) = buffer.plan(0)
    kept = plan_batch(buffer, micro_batches, AlgorithmConfig(mask_truncated=True), ONE_PART)
    every = plan_batch(buffer, micro_batches, AlgorithmConfig(), ONE_PART)
    assert every.denominators.tokens == lengths.sum() and every.denominators.sequences == 8
    assert kept.denominators.tokens == lengths.sum() - lengths[0] - lengths[3] and kept.denominators.sequences == 6
    assert sum(int(mask.sum()) for mask in kept.token_masks) == kept.denominators.tokens


def test_updates_of_one_kind_say_nothing_of_the_other(tmp_path):
    checkpoint = checkpoint_of(tmp_path, "qwen2")
    experience = collate(rollouts_of(checkpoint, text_prompts()), checkpoint.tokenizer.pad_token_id, False)
    experience.advantages = torch.ones(experience.action_mask.shape)
    drawn = torch.arange(len(experience.action_mask)) % 2
    experience.info, config, image_tokens = {"loss_part": drawn.float()}, AlgorithmConfig(), 6
    buffer, found = NaiveReplayBuffer(1), {}
    buffer.append(experience)
    kinds = [[MicroBatch([index]) for index in range(len(drawn)) if drawn[index] == kind] for kind in (0, 1)]
    for name, steps in (("apart", kinds), ("together", [kinds[0] + kinds[1]])):
        update, metrics = PolicyUpdate(PlainEngine(actor_of(checkpoint)), config, ScoringRule()), MetricsAccumulator()
        for step in (plan_batch(buffer, step, config, parts_of_loss(config, 6, image_tokens)) for step in steps):
            update.step(buffer, step, 0.0, metrics, False)
        found[name] = metrics.reduce()
    for name in ("entropy_answer", "entropy_drawing", "loss_answer", "loss_drawing"):
        assert found["apart"][name] == pytest.approx(found["together"][name], rel=1e-5)


@pytest.mark.parametrize(
    ("coefs", "own"), [((0.3, None), (0.3, 0.3)), ((0.3, 0.0), (0.3, 0.0)), ((0.0, 0.2), (0.0, 0.2))]
)
def test_each_kind_has_its_own_entropy_bonus(tmp_path, coefs, own):
    checkpoint = checkpoint_of(tmp_path, "qwen2")
    experience = collate(rollouts_of(checkpoint, text_prompts()), checkpoint.tokenizer.pad_token_id, False)
    experience.advantages, drawn = torch.ones(experience.action_mask.shape), torch.tensor([0.0, 1.0, 0.0])
    experience.info, metrics = {"loss_part": drawn}, MetricsAccumulator()
    buffer = NaiveReplayBuffer(2)
    buffer.append(experience)
    config = AlgorithmConfig(entropy_coef=coefs[0], drawing_entropy_coef=coefs[1])
    batch = plan_batch(buffer, buffer.plan(0)[0], config, parts_of_loss(config, 6, 6))
    PolicyUpdate(PlainEngine(actor_of(checkpoint)), config, ScoringRule()).step(buffer, batch, 0.0, metrics, True)
    found = metrics.reduce()
    for kind, coef in zip(("answer", "drawing"), own):
        bonus = found[f"policy_loss_{kind}"] - found[f"loss_{kind}"]
        assert found[f"entropy_{kind}"] > 1 and bonus == pytest.approx(coef * found[f"entropy_{kind}"], abs=1e-5)


def test_the_critics_loss_is_a_mean_over_each_kinds_own_tokens(tmp_path):
    checkpoint = checkpoint_of(tmp_path, "qwen2")
    experience = collate(rollouts_of(checkpoint, text_prompts()), checkpoint.tokenizer.pad_token_id, False)
    mask, drawn = experience.action_mask, torch.tensor([0.0, 1.0, 0.0])
    experience.values, experience.returns = torch.zeros(mask.shape), (2.0 + drawn).unsqueeze(1).expand(mask.shape)
    experience.info, config = {"loss_part": drawn}, AlgorithmConfig(answer_loss_weight=3.0, value_clip=0.0)
    buffer, metrics = NaiveReplayBuffer(2), MetricsAccumulator()
    buffer.append(experience)
    (micro_batches,) = buffer.plan(0)
    critic = PlainEngine(Critic(actor_of(checkpoint).transformer))
    ValueUpdate(critic, config).step(
        buffer, plan_batch(buffer, micro_batches, config, parts_of_loss(config, 6, 6)), metrics
    )
    found = metrics.reduce()  # a fresh critic says 0, so an answer's token costs 4 / 2, a drawing's 9 / 2
    assert found["critic_loss_answer"] == pytest.approx(2.0) and found["critic_loss_drawing"] == pytest.approx(4.5)
    assert found["critic_loss"] == pytest.approx(3 * 2.0 + 4.5) and "loss" not in found


def test_the_tokens_of_large_entropy_are_those_of_each_kind(tmp_path):
    checkpoint = checkpoint_of(tmp_path, "qwen2_5_vl")
    buffer = NaiveReplayBuffer(4)
    experience = collate(rollouts_of(checkpoint, eight_prompts()), checkpoint.tokenizer.pad_token_id, checkpoint.vision)
    mask, drawn = experience.action_mask, torch.tensor([0.0, 1, 0, 1, 0, 1, 0, 1])
    experience.action_log_probs = torch.zeros(mask.shape)
    tokens = torch.arange(mask.numel()).view(mask.shape)
    experience.action_entropy = 0.01 * tokens + 5 * drawn.unsqueeze(1)  # no answer's comes near to an image's
    experience.info = {"truncated": torch.zeros(8), "loss_part": drawn}
    buffer.append(experience)
    (micro_batches,) = buffer.plan(0)
    config = AlgorithmConfig(high_entropy_token_ratio=0.5)
    batch = plan_batch(buffer, micro_batches, config, parts_of_loss(config, 6, 6))
    for kind in batch.parts:
        chosen = sum(int((own & kept).sum()) for own, kept in zip(kind.token_masks, batch.policy_masks))
        assert chosen == -(-kind.denominators.tokens // 2)
