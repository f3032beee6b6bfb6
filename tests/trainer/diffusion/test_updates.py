"""An update is the same without samples of advantage 0, with several steps a forward, on the rollout's own graphs."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.algorithms.diffusion.context import LossContext, weighted_mean
from lightrft_visual.algorithms.diffusion.ddpo import DPOK
from lightrft_visual.algorithms.diffusion.diffusion_dpo import PAIR
from lightrft_visual.algorithms.diffusion.flow_dppo import FlowDPPO
from lightrft_visual.algorithms.diffusion.flow_grpo import FlowGRPO
from lightrft_visual.algorithms.diffusion.preference import GroupPreference
from lightrft_visual.algorithms.diffusion.reward_fl import DifferentiableScore
from lightrft_visual.algorithms.loss_terms import LossOutputs
from lightrft_visual.config import registry
from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.spellings import DIFFUSION_PRESET
from lightrft_visual.data.prompts import PromptRow
from lightrft_visual.errors import ConfigError, RewardError
from lightrft_visual.experience.buffer import NaiveReplayBuffer
from lightrft_visual.experience.diffusion_sampling import DiffusionBatch, NoiseConfig, SamplingConfig
from lightrft_visual.models.diffusion.opening import family_of
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, LoraSettings
from lightrft_visual.models.tiny.diffusion import TEXT_LENGTH, TinyDiffusionSettings, build_pipeline
from lightrft_visual.observe.metrics import MetricsAccumulator
from lightrft_visual.rewards.batch import RewardOutput
from lightrft_visual.rollout.diffusion_sampler import DiffusionSampler, sample_generators
from lightrft_visual.runtime.phase_timer import PhaseTimer
from lightrft_visual.trainer.diffusion.build import loss_of
from lightrft_visual.trainer.diffusion.maker import DiffusionExperienceMaker, Drawn, _scored_experience
from lightrft_visual.trainer.diffusion.parts import DrawingSource
from lightrft_visual.trainer.diffusion.stages import (
    GIB,
    Graphed,
    RolloutGraphs,
    Sampled,
    drawing_batch,
    kept_bytes,
    worth_using,
)
from lightrft_visual.trainer.diffusion.trainer import RewardFLTrainer
from lightrft_visual.trainer.diffusion.updates import ReplayUpdate, RewardUpdate, plan_updates
from lightrft_visual.trainer.hooks import Hooks

COUNT = 6
CLIPPED = FlowGRPO(clip_range=0.1)


class Gradients:
    """In the place of the train engine: adds up gradients and counts forwards."""

    def __init__(self, policy):
        self.policy, self.samples, self.lasts = policy, 0, []

    def __call__(self, latents, *rest):
        self.samples += len(latents)
        return self.policy(latents, *rest)

    def accumulate(self, loss, last):
        loss.backward()
        self.lasts.append(last)

    def step(self):
        found = [parameter.grad.clone() for parameter in self.policy.trainable_parameters()]
        self.policy.zero_grad()
        return found


def trained(policy, advantages, skip, steps_per_forward=1, loss=CLIPPED, metrics=None, broken=False):
    experience, _ = sampled(policy, noise=NoiseConfig(), advantages=advantages, steps=3, broken=broken)
    buffer, engine = NaiveReplayBuffer(2), Gradients(policy)
    buffer.append(experience)
    algorithm = registry.diffusion_algorithms["flow_grpo" if isinstance(loss, FlowGRPO) else "diffusion_dpo"]
    update = ReplayUpdate(engine, algorithm, loss, 1.0, "first", steps_per_forward)
    ((planned, samples),) = plan_updates(buffer, buffer.plan(0), skip)
    batches = [buffer.gather(each) for each in planned]
    return update.step(batches, LossContext(engine, policy), 0, metrics or MetricsAccumulator(), True, samples), engine


class OfScores:
    """A loss of the scores alone."""

    def loss(self, context, start, conditions, schedule, reward, denominator):
        scored = reward(start)
        return LossOutputs(-scored.scores.sum() / denominator, means={"reward": weighted_mean(*scored)})


def reward_update(batch, *scores: tuple[list[float], list[bool]]) -> RewardUpdate:
    """Of micro-batches of two; batch: makes noise. scores: and which are valid, of each micro-batch."""
    given = [(torch.tensor(each, requires_grad=True), torch.tensor(valid)) for each, valid in scores]
    found = iter([DifferentiableScore(*each) for each in given])
    sampler = SimpleNamespace(schedule=lambda *model: (torch.ones(1), torch.ones(1)))
    sampling = SimpleNamespace(
        encoded=lambda requests: [], on_device=lambda encoded: {}, sampler=sampler, latent_shape=(1,),
        model=SimpleNamespace(family=SimpleNamespace(starting_scale=lambda sigma: 1.0)),
        batch=batch,
    )  # fmt: skip
    engine = SimpleNamespace(accumulate=lambda loss, last: None, step=lambda: None)
    return RewardUpdate(engine, sampling, OfScores(), lambda media, requests: next(found), 2, "mine")


@pytest.mark.parametrize("epoch, purpose", [(0, "noise"), (1, "noise/1")])
def test_means_of_a_reward_update_are_over_its_valid_samples_and_each_pass_has_its_own_noise(epoch, purpose):
    """One of two in the first micro-batch, two in the second."""
    purposes, metrics = [], MetricsAccumulator()

    def drawn(part, conditions, step, purpose):
        purposes.append(purpose)
        return SimpleNamespace(latents=torch.zeros(len(part), 3, 2, 2))

    update = reward_update(drawn, ([0.8, 0.0], [True, False]), ([0.2, 0.5], [True, True]))
    update.step(drawing_batch([PromptRow("red", [])] * 4, [0, 1, 2, 3], 0), None, 0, epoch, metrics)
    assert metrics.reduce()["reward"] == pytest.approx((0.8 + 0.2 + 0.5) / 3) and purposes == [purpose] * 2


def test_a_valid_score_that_is_not_finite_ends_a_reward_update_before_its_step():
    def drawn(part, *rest):
        return SimpleNamespace(latents=torch.zeros(len(part), 3, 2, 2))

    samples = drawing_batch([PromptRow("red", [])] * 2, [0, 1], 0)
    update = reward_update(drawn, ([0.8, float("nan")], [True, False]))
    drew = update.step(samples, None, 0, 0, MetricsAccumulator())[1]
    assert drew.valid.tolist() == [True, False] and not drew.scored.score.requires_grad
    update = reward_update(drawn, ([0.8, float("nan")], [True, True]))
    update.engine.step = None
    with pytest.raises(RewardError, match="mine: a score that is marked valid is not finite"):
        update.step(samples, None, 0, 0, MetricsAccumulator())


def test_a_sample_with_latents_that_are_not_finite_leaves_an_update_as_it_is():
    drawing, advantages = policy(), [1.0, 0.3, -0.5, 2.0, 0.0, -1.0]
    whole, broken = (trained(drawing, advantages, False, broken=each)[0] for each in (False, True))
    assert all(map(torch.equal, whole, broken)) and any(each.any() for each in whole)


class Gives(FlowGRPO):
    """Its loss is of the model, and what `gives` makes of it is returned."""

    def loss(self, context, batch, denominator):
        return self.gives(super().loss(context, batch, denominator).loss)


def giving(gives) -> Gives:
    return type("Mine", (Gives,), {"gives": staticmethod(gives)})()


def test_metrics_of_a_loss_add_up_over_the_micro_batches_of_an_update():
    metrics, shares = MetricsAccumulator(), []

    def gives(loss):
        shares.append(loss.item())
        return LossOutputs(loss, {"own": loss.detach() * 2})

    trained(policy(), [1.0, 0.3, -0.5, 2.0, 0.0, -1.0], False, loss=giving(gives), metrics=metrics)
    found = metrics.reduce()
    assert len(shares) > 1 and found["own"] == pytest.approx(2 * sum(shares)) == pytest.approx(2 * found["loss"])


@pytest.mark.parametrize(
    "gives, told",
    [
        (lambda loss: loss, r"a tensor of shape \(\); it must give LossOutputs"),
        (lambda loss: LossOutputs(loss.expand(2)), r"a tensor of shape \(2,\); it must give LossOutputs"),
        (lambda loss: LossOutputs(0.0), "a float; it must give LossOutputs"),
        (lambda loss: LossOutputs(loss.detach()), "no gradient"),
        (lambda loss: LossOutputs(loss, means={"loss": 7.0}), "loss, a metric that there is"),
        (lambda loss: LossOutputs(loss, means={"image_blank": 7.0}), "image_blank, a metric that there is"),
        (lambda loss: LossOutputs(loss, means={"own": loss.expand(2)}), r"own is no number: a tensor of shape \(2,\)"),
    ],
)
def test_a_loss_that_gives_something_else_is_refused(gives, told):
    with pytest.raises(ConfigError, match=f"the diffusion algorithm's loss.* {told}"):
        trained(policy(), [1.0, 0.3, -0.5, 2.0, 0.0, -1.0], False, loss=giving(gives))


class NoLoss:
    def losses(self, context, batch, denominator):
        return 0


class OfTwo:
    def loss(self, context, batch):
        return 0


@pytest.mark.parametrize(
    "made, facts, told",
    [
        (None, {}, "'own' gave a NoneType, which has no method 'loss'"),
        (torch.zeros(()), {}, "'own' gave a Tensor, which has no method 'loss'"),
        (NoLoss(), {}, "'own' gave a NoLoss, which has no method 'loss'"),
        (OfTwo(), {}, r"'own' gave a OfTwo, whose loss is called with \(context, batch, denominator\): too many"),
        (OfScores, {"trains_on": "reward"}, "'own' gave a type, whose loss is called with .*: missing a required"),
        (CLIPPED, {"coupled": "groups"}, "'own' gave a FlowGRPO, which has no method 'terms'"),
    ],
)
def test_an_algorithm_whose_function_gives_no_loss_is_refused_before_models_load(monkeypatch, made, facts, told):
    kept = registry.diffusion_algorithms
    monkeypatch.setattr(kept, "_entries", dict(kept._entries))
    kept.register("own", about="", **facts)(lambda config: made)
    config = SimpleNamespace(algorithm=SimpleNamespace(entry=kept["own"]))
    with pytest.raises(ConfigError, match=told):
        loss_of(config)


@pytest.mark.parametrize("entry", list(registry.diffusion_algorithms), ids=lambda entry: entry.name)
def test_an_algorithm_of_the_package_gives_a_loss(entry):
    argv = ["--diffusion_algorithm", entry.name]
    argv += ["--teacher_pretrain", "folder"] if entry.teacher else []
    assert loss_of(parse_run(DiffusionRunConfig, argv, preset=DIFFUSION_PRESET).config)


def policy():
    torch.manual_seed(0)
    made = DiffusionPolicy(family_of(build_pipeline(TinyDiffusionSettings(layers=1)), TEXT_LENGTH), LoraSettings(2, 4))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return made


def test_without_samples_of_no_advantage_the_gradient_stays_and_the_forwards_go():
    drawing = policy()
    whole, every = trained(drawing, [1.0, 0.0, -0.5, 0.0, 0.0, 0.0], False)
    part, some = trained(drawing, [1.0, 0.0, -0.5, 0.0, 0.0, 0.0], True)
    assert every.samples == COUNT * 2 and some.samples == 2 * 2 and some.lasts == [False, True]
    assert any(gradient.any() for gradient in whole)
    for one, other in zip(whole, part):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-8)
    none, engine = trained(drawing, [0.0] * COUNT, True)  # an update without any advantage still steps
    assert engine.lasts[-1] and engine.samples == 2 and not any(gradient.any() for gradient in none)


def test_samples_of_no_advantage_are_in_no_metric_of_preferences_with_or_without_them():
    drawing, found = policy(), []
    algorithm = SimpleNamespace(dpo_beta=50.0, dpo_reference="base", beta=0.0, cfg_in_training=False)
    preference = GroupPreference(SimpleNamespace(algorithm=algorithm), PAIR)
    for skip in (False, True):
        metrics = MetricsAccumulator()
        _, engine = trained(drawing, [1.0, 0.0, -1.0, 0.0, 0.0, 0.0], skip, 1, preference, metrics)
        found.append((engine.samples, metrics.reduce()))
    (every, whole), (some, part) = found
    assert some < every
    for name in ("loss", "preference_loss", "preference_accuracy"):
        assert whole[name] == pytest.approx(part[name], rel=1e-4), name
    assert 2 * whole["preference_loss"] == pytest.approx(5 * whole["loss"], rel=1e-4)  # two of five valid samples


@pytest.mark.parametrize("together", [2, 5])
def test_steps_that_share_a_forward_give_the_same_gradient(together):
    drawing, advantages = policy(), [1.0, 0.3, -0.5, 2.0, 0.0, -1.0]
    (alone, one), (joined, several) = (trained(drawing, advantages, False, steps) for steps in (1, together))
    assert len(one.lasts) == 2 * len(several.lasts) and several.samples == one.samples
    assert several.lasts == [False] * (len(several.lasts) - 1) + [True]
    for each, other in zip(alone, joined):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-8)


def sampled(policy, keep=(), noise=None, window=0, advantages=(1.0, 0.0, -0.5, 2.0), steps=4, broken=False):
    """Samples of a stochastic step less than `steps`; the last one is invalid, and its latents are NaN where `broken`.
    (experience, kept steps)"""
    count = len(advantages)
    conditions = policy.encode_prompts(["a red circle", "a blue cross"] * (count // 2))
    batch = DiffusionBatch(conditions, policy.latent_shape(32, 32), count)
    sampler = DiffusionSampler(SamplingConfig(steps, trajectory="sde"), noise or NoiseConfig(keep_means=True))
    generators = sample_generators(1, 0, range(count))
    result = sampler.sample(policy, batch, generator=generators, window=window, keep=keep)
    ids = torch.arange(count)
    if broken:
        for each in (result.latents, result.trajectory, result.log_probs):
            each[-1] = float("nan")
    requests = replace(drawing_batch([PromptRow("", [])] * count, ids.tolist(), 0), group_ids=ids % 2)
    scored = RewardOutput(torch.zeros(count), {}, ids < count - 1)
    experience = _scored_experience(Sampled(result, conditions, None, 0), requests, scored)
    experience.advantages = torch.tensor(advantages)
    return experience, result.kept


LOSSES = {
    "flow_grpo": (FlowGRPO(), 1.0),
    "first steps, KL, GRPO-Guard": (FlowGRPO(beta=0.1, guard=True), 0.6),
    "flow_dppo": (FlowDPPO(), 1.0),
    "dpok": (DPOK(rule="flow_grpo", noise_level=0.7, beta=0.1), 1.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_graphs_of_the_rollout_give_the_gradient_of_its_replay(name):
    (loss, fraction), drawing, algorithm = LOSSES[name], policy(), registry.diffusion_algorithms["flow_grpo"]
    engine = Gradients(drawing)
    update = ReplayUpdate(engine, algorithm, loss, fraction, "first", 3)
    steps = {1.0: [0, 1, 2], 0.6: [0, 1]}[fraction]
    (kept, graph), (plain, none) = sampled(drawing, steps), sampled(drawing)
    assert none is None and graph.steps == steps and torch.equal(kept.log_probs, plain.log_probs)
    assert not kept.log_probs.requires_grad and not kept.latents.requires_grad
    replayed, own = MetricsAccumulator(), MetricsAccumulator()
    context = LossContext(engine, drawing, on_policy=True)
    expected = update.step([plain], context, 0, replayed, True, 3)
    assert engine.samples == 4 * len(steps) * (1 + (loss.beta > 0))
    engine.samples, batches = 0, [Graphed(kept, graph)]
    found = update.step_on_graphs(batches, context, own, worth_using(batches, False))
    assert engine.samples == (4 * len(steps) if loss.beta > 0 else 0) and batches == []  # the reference's alone
    assert any(gradient.any() for gradient in found)
    for one, other in zip(expected, found):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-8)
    before, after = replayed.reduce(), own.reduce()
    assert after["ratio_max_dev_first"] == 0 and before.keys() == after.keys()
    for key in before.keys() - {"ratio_max_dev_first", "logp_diff_max"}:
        assert after[key] == pytest.approx(before[key], rel=1e-4, abs=1e-7)


def test_an_update_without_a_valid_sample_has_a_zero_gradient():
    drawing = policy()
    update = ReplayUpdate(Gradients(drawing), registry.diffusion_algorithms["flow_grpo"], CLIPPED, 1.0, "first", 3)
    experience, graph = sampled(drawing, [0, 1, 2])
    experience.valid[:] = False
    context = LossContext(drawing, drawing, on_policy=True)
    graphed = [Graphed(experience, graph)]
    found = update.step_on_graphs(graphed, context, MetricsAccumulator(), worth_using(graphed, False))
    assert found and not any(gradient.any() for gradient in found)  # nor is one NaN
    buffer = NaiveReplayBuffer(2)
    buffer.append(experience)
    assert [samples for _, samples in plan_updates(buffer, buffer.plan(0), False)] == [1]


def test_only_the_trained_steps_of_a_window_keep_their_graph_where_that_is_less_work_than_a_replay():
    drawing, noise = policy(), NoiseConfig(window_size=2)
    sampler, graphs = DiffusionSampler(SamplingConfig(4, trajectory="sde"), noise), RolloutGraphs([], GIB, 1.0)
    assert graphs.steps(sampler, 1) == [1, 2] and RolloutGraphs([], GIB, 0.5).steps(sampler, 1) == [1]
    experience, kept = sampled(drawing, [1, 2], noise, window=1)
    assert kept.steps == [1, 2] and kept.log_probs.shape == (8,) and kept.log_probs.requires_grad
    assert worth_using([Graphed(experience, kept)], True) == 6  # two of three valid samples count
    experience.advantages[0] = 0
    assert worth_using([Graphed(experience, kept)], True) is None
    assert worth_using([Graphed(experience, kept)], False) == 6  # a KL counts all
    experience.advantages = experience.advantages[:, None].expand(-1, 3)  # of each step
    assert (
        worth_using([Graphed(experience, kept)], False) == 6 and worth_using([Graphed(experience, kept)], True) is None
    )
    broken = kept.log_probs.detach().masked_fill(~experience.valid.repeat(2), torch.nan)
    assert worth_using([Graphed(experience, replace(kept, log_probs=broken))], False) is None  # 0 times NaN


@pytest.mark.parametrize("gib,fits", [(1.0, True), (1e-6, False)])
def test_graphs_are_kept_up_to_a_size_counted_once_and_without_the_weights(gib, fits):
    weight, given = torch.randn(3, 3, requires_grad=True), torch.randn(5, 3)
    assert kept_bytes(lambda: (given @ weight).sin() + (given @ weight.t()), [weight]) == (5 * 3 + 5 * 3) * 4
    drawing, sampler, asked = policy(), DiffusionSampler(SamplingConfig(4, trajectory="sde")), []
    graphs = RolloutGraphs(list(drawing.parameters()), gib * GIB, 1.0)

    def forward():
        asked.append(True)
        return drawing.velocity(torch.zeros(1, 8, 8, 8), torch.tensor([500.0]), drawing.encode_prompts(["a"]))

    assert graphs.fit(forward, 4, sampler) is graphs.fit(forward, 4, sampler) is fits and len(asked) == 1
    assert graphs.bytes == 4 * 3 * kept_bytes(forward, drawing.parameters()) > 1e5


def test_a_graph_that_was_measured_is_freed_where_an_operation_saves_its_own_result():
    def measured():
        weight, given = torch.randn(3, 3, requires_grad=True), torch.randn(5, 3)
        assert kept_bytes(lambda: (given @ weight).exp(), [weight]) == (5 * 3 + 5 * 3) * 4
        return weakref.ref(weight)

    weight = measured()
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize(
    "argv,serve",
    [
        ("", True),
        ("--diffusion_algorithm mix_grpo --num_steps 8", True),
        ("--beta 0.1 --guidance_scale 4.5 --timestep_fraction 0.5", True),
        ("--rollout_graph_gib 0", False),
        ("--max_epochs 2", False),
        ("--train_batch_size 8", False),  # two updates a rollout
        ("--guidance_scale 4.5 --cfg_in_training false", False),
        ("--timestep_fraction 0.5 --timestep_choice random", False),
        ("--gradient_checkpointing true", False),
        ("--zero_stage 3", False),
        ("--diffusion_algorithm diffusion_nft", False),
    ],
)
def test_the_rollouts_forwards_serve_one_update_of_the_same_weights(argv, serve):
    base = "--pretrain embedded --rollout_batch_size 4 --n_samples_per_prompt 4 --train_batch_size 16"
    config = parse_run(DiffusionRunConfig, [*base.split(), *argv.split()], preset=DIFFUSION_PRESET).config
    assert config.rollout_graphs_serve is serve
    drawing = SimpleNamespace(denoisers=[None], parameters=list)
    assert (RolloutGraphs.from_config(config, drawing) is not None) is serve


@pytest.mark.parametrize("moment, kept", [("on_experience", True), ("on_buffer", False), ("on_train_batch", False)])
def test_a_rollout_keeps_no_graphs_where_a_hook_follows_the_replay_that_they_would_stand_for(moment, kept):
    asked = []

    def generate(requests, step, graphs):
        asked.append(graphs)
        return [Sampled(None, {}, torch.zeros(1, 3, 8, 8), 0)]

    hooks = Hooks([SimpleNamespace(**{moment: lambda given: given})])
    maker = DiffusionExperienceMaker(SimpleNamespace(generate=generate), None, None, hooks=hooks, graphs="graphs")
    maker.generate(SimpleNamespace(), 0)
    assert asked == ["graphs" if kept else None]


def test_reward_fl_draws_what_a_hook_makes_of_the_prompts_of_each_train_batch():
    drawn = []

    def louder(requests):
        return replace(requests, prompts=[prompt.upper() for prompt in requests.prompts])

    def step(requests, *_):
        drawn.append(requests.prompts)
        media, valid = torch.zeros(len(requests), 3, 8, 8), torch.ones(len(requests), dtype=torch.bool)
        return None, Drawn(requests, [], media, RewardOutput(torch.ones(len(requests)), {}, valid))

    config = DiffusionRunConfig()
    config.sampling.rollout_batch_size, config.sampling.n_samples_per_prompt = 4, 1
    config.train.train_batch_size, config.train.max_epochs = 2, 2
    dataset = [PromptRow(prompt=letter, images=[]) for letter in "abcd"]
    trainer = SimpleNamespace(
        config=config, step=0, prompts=DrawingSource(config, dataset), timer=PhaseTimer(), _context=lambda: None,
        hooks=Hooks([SimpleNamespace(on_prompts=louder)]), _finish_update=lambda *_: None,
        reward_update=SimpleNamespace(step=step),
    )  # fmt: skip
    data = RewardFLTrainer.train_step(trainer)
    assert drawn[:2] == drawn[2:] and sorted(sum(drawn[:2], [])) == ["A", "B", "C", "D"]
    assert data.rollouts.requests.prompts == sum(drawn[:2], [])
