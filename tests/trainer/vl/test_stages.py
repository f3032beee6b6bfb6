"""In which order the stages of a step work, and what each of them holds in memory."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from tiny_models import actor_of, checkpoint_of, turn

from lightrft_visual.algorithms.advantages import get_advantage_calculator
from lightrft_visual.algorithms.kl import FixedKLController
from lightrft_visual.config.vl import AlgorithmConfig, RolloutConfig
from lightrft_visual.data.validation import MAX_LABELS, Fetched, measured_labels
from lightrft_visual.errors import ConfigError, TooManyInvalid
from lightrft_visual.experience.rollouts import (
    Episode,
    PromptBatch,
    PromptFeatures,
    Rollout,
    Rollouts,
    SamplingSettings,
    ScoringRule,
    Turn,
    collate,
)
from lightrft_visual.experience.types import ModelInputs
from lightrft_visual.observe.metrics import MetricsAccumulator
from lightrft_visual.rewards.batch import InvalidTally, Scores, StreamingSource
from lightrft_visual.rewards.engine import RewardComputationEngine
from lightrft_visual.rollout.hf import TransformersEngine
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor
from lightrft_visual.trainer.features.dynamic_sampling import ResamplingMaker
from lightrft_visual.trainer.hooks import Hooks, StepData
from lightrft_visual.trainer.vl import maker as maker_module
from lightrft_visual.trainer.vl.evaluation import Evaluation
from lightrft_visual.trainer.vl.maker import Agreement, ExperienceMaker, ForwardStage, MakerSettings
from lightrft_visual.trainer.vl.updates import add_rollout_metrics

TEXTS = [turn("how many?"), turn("where?"), turn("why?")]
PROMPTS = PromptBatch.of(TEXTS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoint_of(tmp_path_factory.mktemp("tiny"), "qwen2")


class ToldEngine(TransformersEngine):
    """Notes what it is told."""

    def __init__(self, actor, tokenizer, told: list[str]):
        super().__init__(actor, tokenizer)
        self.told = told

    def generate(self, prompts, settings, finished=None):
        self.told.append("generate")
        return super().generate(prompts, settings, finished)

    def wake(self) -> None:
        self.told.append("wake")

    def sleep(self, keep_weights: bool = True) -> None:
        self.told.append("sleep" if keep_weights else "sleep without weights")


def maker_of(checkpoint, told: list[str], **settings) -> ExperienceMaker:
    actor = actor_of(checkpoint)

    def forward(*args, **kwargs):
        told.append("forward")
        return actor(*args, **kwargs)

    def reward_fn(completions):
        told.append("reward")
        return [1.0] * len(completions)

    made = MakerSettings(
        engine=ToldEngine(actor, checkpoint.tokenizer, told), sampling=SamplingSettings(n=2, max_new_tokens=4),
        micro_batch_size=3, data_processor=MultimodalDataProcessor(checkpoint.tokenizer, None, 64),
        rewards=RewardComputationEngine(custom_reward_func=reward_fn), **settings,
    )  # fmt: skip
    return ExperienceMaker(
        forward, None, None, checkpoint.tokenizer, FixedKLController(0.0), torch.device("cpu"), made, vision=False
    )


def resampling(maker: ExperienceMaker) -> ResamplingMaker:
    return ResamplingMaker(maker, 2, lambda: PromptBatch.of(TEXTS))


def made_by(maker: ExperienceMaker | ResamplingMaker) -> StepData:
    """As a trainer's step asks."""
    return maker.make_experience(maker.score(maker.generate(PromptBatch.of(TEXTS))))


def test_without_a_reader_the_training_forward_scores_the_policy(checkpoint):
    told: list[str] = []
    made = made_by(maker_of(checkpoint, told, score_policy=False))
    assert "forward" not in told
    assert all(each.action_log_probs is None and not each.kl.any() for each in made.batches)
    metrics = MetricsAccumulator()
    add_rollout_metrics(metrics, made.batches)
    assert "entropy" not in metrics.reduce()


def test_shaped_rewards_are_of_the_samples_that_have_one(checkpoint):
    maker, some = maker_of(checkpoint, []), [None, 3.0, None, 2.0, 3.0, 2.0]
    maker.rewards = RewardComputationEngine(custom_reward_func=lambda completions: some)
    maker.calculator = get_advantage_calculator("reinforce", AlgorithmConfig(reward_clip=2.5))
    metrics = MetricsAccumulator()
    add_rollout_metrics(metrics, made_by(maker).batches)
    found = metrics.reduce()
    assert (found["reward_mean"], found["shaped_reward"], found["reward_clipped"]) == (2.5, 2.25, 0.5)


class Noting(StreamingSource):
    """A remote scorer that is at work once its samples are there, and done when it is told."""

    name = "noting"

    def __init__(self, told):
        self.told, self.pool = told, ThreadPoolExecutor(1)

    def submit_parts(self, parts, call):
        for number, part in enumerate(parts):
            part.add_done_callback(lambda _, number=number: self.told.append(f"request {number}"))
        ones = lambda part: Scores(torch.ones(len(part)).double(), torch.zeros(len(part)).bool())  # noqa: E731
        return [self.pool.submit(lambda part=part: ones(part.result(timeout=60))) for part in parts]


@pytest.mark.parametrize("tries", [1, 2])
def test_remote_scorers_work_while_others_are_generated_and_beside_the_forward_passes(checkpoint, monkeypatch, tries):
    told: list[str] = []
    maker = maker_of(checkpoint, told)
    maker.rewards, maker.engine.micro_batch_size = RewardComputationEngine(reward_model=Noting(told)), 2
    decode = maker.engine._decode
    monkeypatch.setattr(maker.engine, "_decode", lambda *given: told.append("decode") or decode(*given))
    made = made_by(resampling(maker) if tries > 1 else maker)
    one_round = ["wake", "generate", "decode", "decode", "request 0", "decode", "request 1"]
    assert told[: len(one_round)] == one_round and told.count("request 0") == tries  # asked once a round
    assert told.count("forward") == 2 and told.index("forward") > 6
    assert all(each.info["reward"].tolist() == [1.0] * 3 and each.valid.all() for each in made.batches)


def test_with_dynamic_sampling_it_sleeps_once_no_round_can_follow(checkpoint):
    told: list[str] = []
    made_by(resampling(maker_of(checkpoint, told)))
    rounds = ["wake", "generate", "reward", "wake", "generate", "sleep", "reward"]
    assert told == [*rounds, "sleep", "forward", "forward"]


def on_device(told: list[str], name: str) -> RewardComputationEngine:
    """Whose function asks for its device, as scorers with a model do."""

    def scored(completions, device):
        told.append(name)
        return [1.0] * len(completions)

    return RewardComputationEngine(custom_reward_func=scored)


ROUND = ["wake", "generate", "sleep", "reward"]


def test_with_dynamic_sampling_it_sleeps_before_each_round_is_scored_by_a_model_and_keeps_its_weights(checkpoint):
    told: list[str] = []
    maker = maker_of(checkpoint, told, weights_follow=True)
    maker.rewards = on_device(told, "reward")
    made_by(resampling(maker))
    last = ["wake", "generate", "sleep without weights", "sleep", "reward"]
    assert told == [*ROUND, *last, "sleep without weights", "forward", "forward"]


@pytest.mark.parametrize("reward,gold", [(True, False), (False, True), (False, False)])
def test_the_engine_sleeps_in_an_evaluation_while_models_score_and_stays_awake_without_them(checkpoint, reward, gold):
    told: list[str] = []
    judge = (
        on_device(told, "gold") if gold else RewardComputationEngine(custom_reward_func=lambda ids: [1.0] * len(ids))
    )
    maker = maker_of(checkpoint, told, weights_follow=True)
    maker.rewards = on_device(told, "reward") if reward else maker.rewards
    found = Evaluation(maker, PROMPTS, SAMPLED, replace(SAMPLED, n=1), 0, 1, gold=judge).run(step=1)
    assert found["eval_reward"] == found["eval_gold"] == 1.0
    one = ROUND if reward else ["wake", "generate", "reward"]
    assert told == [*one, *(["sleep", "gold"] if gold else []), *one]


def test_hooks_are_given_scored_rollouts_before_the_forward_passes_but_beside_remote_scorers(checkpoint):
    told: list[str] = []

    def noting(rollouts):
        told.append(f"scored {[rollout.reward for rollout in rollouts]}")
        return rollouts

    maker = maker_of(checkpoint, told, hooks=Hooks([SimpleNamespace(on_scores=noting)]))
    made_by(maker)
    assert told == ["wake", "generate", "sleep", "reward", f"scored {[1.0] * 6}", "forward", "forward"]
    maker.rewards = RewardComputationEngine(reward_model=Noting(told))
    told.clear()
    made_by(maker)
    assert told.index("forward") < told.index(f"scored {[1.0] * 6}") == len(told) - 1


@pytest.mark.parametrize("remote", [False, True])
def test_what_a_hook_puts_in_the_place_of_scored_rollouts_is_trained_on(checkpoint, remote):
    def of_other_rewards(rollouts):
        calls.append(len(rollouts))
        return Rollouts(replace(each, reward=2.0) for each in rollouts)

    calls: list[int] = []
    maker = maker_of(checkpoint, [], hooks=Hooks([SimpleNamespace(on_scores=of_other_rewards)]))
    if remote:
        maker.rewards = RewardComputationEngine(reward_model=Noting([]))
    for each in (made_by(maker), made_by(resampling(maker))):
        assert [batch.info["reward"].tolist() for batch in each.batches] == [[2.0] * 3] * 2
        assert [rollout.reward for rollout in each.rollouts] == [2.0] * 6
    assert calls == [6, 6]  # once a step


@pytest.mark.parametrize("remote", [False, True])
def test_rollouts_that_a_hook_leaves_out_before_they_are_scored_stay_out(checkpoint, remote):
    def all_but_the_first(rollouts):
        rollouts.leave_out(torch.arange(len(rollouts)) > 0)
        return rollouts

    maker = maker_of(checkpoint, [], hooks=Hooks([SimpleNamespace(on_rollouts=all_but_the_first)]))
    if remote:
        maker.rewards = RewardComputationEngine(reward_model=Noting([]))
    made = made_by(maker)
    assert [each.reward for each in made.rollouts] == [1.0] * 6
    assert torch.cat([each.valid for each in made.batches]).tolist() == [True] + [False] * 5


@pytest.mark.parametrize("in_step", [True, False])
def test_ranks_compare_how_many_rollouts_they_have_where_they_compute_together(checkpoint, monkeypatch, in_step):
    """Others would wait in the next forward. A user may have given a hook that drops some to one rank alone."""
    told = []
    monkeypatch.setattr(maker_module, "check_alike", told.append)
    made_by(maker_of(checkpoint, [], in_step=in_step))
    assert told == [2] * in_step


@pytest.mark.parametrize("numbers", [[1, 2], [2, 1]])
def test_other_numbers_of_micro_batches_of_ranks_are_refused_on_each_of_them(monkeypatch, numbers):
    monkeypatch.setattr(maker_module.collectives, "all_gather_object", lambda own: numbers)
    with pytest.raises(ConfigError, match="from 1 to 2 micro-batches, .*: use leave_out"):
        maker_module.check_alike(1)


def test_rollouts_whose_forwards_are_made_cannot_be_taken_out(checkpoint):
    """Rewards of remote scorers come behind the forwards: those of others would be given to them."""
    hook = SimpleNamespace(on_scores=lambda rollouts: Rollouts(rollouts[1:]))
    maker = maker_of(checkpoint, [], hooks=Hooks([hook]))
    maker.rewards = RewardComputationEngine(reward_model=Noting([]))
    with pytest.raises(ConfigError, match="on_scores of a hook kept other rollouts, .* leave_out"):
        made_by(maker)


class Lengths(Noting):
    """Scores by the length of the response."""

    def submit_parts(self, parts, call):
        lengths = lambda part: torch.tensor([float(len(text)) for text in part.responses]).double()  # noqa: E731
        scores = lambda part: Scores(lengths(part), torch.zeros(len(part)).bool())  # noqa: E731
        return [self.pool.submit(lambda part=part: scores(part.result(timeout=60))) for part in parts]


def rewritten(rollouts):
    for number, each in enumerate(rollouts):
        each.text = "x" * number
    return rollouts


@pytest.mark.parametrize(
    "hook",
    [
        SimpleNamespace(on_rollouts=rewritten),
        SimpleNamespace(on_rollouts=lambda rollouts: rollouts.reverse() or rollouts),
        SimpleNamespace(on_rollouts=lambda rollouts: Rollouts(rewritten(rollouts)[2:])),
        SimpleNamespace(on_prompts=lambda requests: requests[1:]),
        SimpleNamespace(on_prompts=lambda requests: requests[::-1]),
    ],
)
def test_rewards_of_remote_scorers_are_those_of_what_a_hook_has_made_of_prompts_and_rollouts(checkpoint, hook):
    maker = maker_of(checkpoint, [], hooks=Hooks([hook]))
    maker.rewards = RewardComputationEngine(reward_model=Lengths([]))
    made = made_by(maker)
    assert made.rollouts and [each.reward for each in made.rollouts] == [len(each.text) for each in made.rollouts]
    rewards = [reward for each in made.batches for reward in each.info["reward"].tolist()]
    assert rewards == [each.reward for each in made.rollouts]


def test_new_weights_stand_on_the_next_rollouts_by_their_version_and_an_engine_does_not_keep_the_old_ones(checkpoint):
    told: list[str] = []
    maker = maker_of(checkpoint, told, weights_follow=True)
    for each in (maker, resampling(maker)):
        each.policy_is_new(3)
        assert {rollout.policy_version for rollout in made_by(each).rollouts} == {3} and each.policy_version == 3
    assert "sleep without weights" in told and "sleep" not in told


SAMPLED = SamplingSettings(n=2, max_new_tokens=4)


def evaluated(maker: ExperienceMaker, greedy: SamplingSettings = SAMPLED, rows=None, gold=None):
    return Evaluation(maker, PROMPTS, SAMPLED, greedy, 100, 1, rows, gold=gold).run(step=3)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return checkpoint_of(tmp_path_factory.mktemp("tiny"), "qwen2_5_vl")


def seen(seeing, folder, rewards: RewardComputationEngine, told: list[str], drawn=lambda made: made, **settings):
    """An evaluation of five prompts with an image each, how many of their patches each call of the engine found in
    memory, and the sizes of the parts that were made ready."""
    sources = [folder / f"{shade}.png" for shade in range(0, 250, 50)]
    for shade, path in zip(range(0, 250, 50), sources):
        Image.new("RGB", (56, 56), (shade, 0, 0)).save(path)
    texts = [turn(f"<|vision_start|><|image_pad|><|vision_end|>{n}?") for n in range(5)]
    maker, patches = maker_of(seeing, told), []
    maker.rewards, data = rewards, MultimodalDataProcessor(seeing.tokenizer, seeing.processor, 64)
    maker.rollout_stage.data_processor, features, generate = data, data.features, maker.engine.generate
    held, parts = [], []

    def generating(prompts, *given):
        patches.extend(weakref.ref(prompt.vision.get("pixel_values")) for prompt in prompts)
        gc.collect()
        held.append(len({id(each()) for each in patches if each() is not None}))
        return generate(prompts, *given)

    data.features = lambda batch: parts.append(len(batch)) or features(batch)
    maker.engine.generate, sample = generating, maker.sample
    maker.sample = lambda *given: drawn(sample(*given))
    batch = PromptBatch.of(texts, images=[[str(path)] for path in sources])
    greedy = replace(SAMPLED, n=1, temperature=0.0)
    return Evaluation(maker, batch, SAMPLED, greedy, 4, 1, **settings).run(step=3), held, parts


def test_an_evaluation_in_parts_holds_the_patches_of_one_part_and_says_what_one_of_the_whole_says(seeing, tmp_path):
    def lengths(completions, ids):
        return [len(each) / 7 + own for each, own in zip(completions, ids, strict=True)]

    rewards, gold = (RewardComputationEngine(custom_reward_func=lengths) for _ in range(2))
    sizes, score = [], gold.score_rollouts
    gold.score_rollouts = lambda rollouts, chunk, tally: sizes.append(chunk) or score(rollouts, chunk)
    whole, held, parts = seen(seeing, tmp_path, rewards, [], gold=gold)
    assert {*sizes} == {3}  # samples a remote request, as of the reward
    assert (held, parts) == ([5, 5], [5])  # both passes read what is preprocessed once
    sampled, tokens = [], []

    def noted(made):
        sampled.extend(made if made.sampling.n > 1 else [])
        tokens.extend(list(each.token_ids) for each in made if made.sampling.n > 1)
        return made

    cut, held, parts = seen(seeing, tmp_path, rewards, [], noted, gold=gold, prompts_at_once=2)
    assert parts == [2, 2, 1] and max(held) == 2
    assert len(sampled) == 10 and not any(sum(each.token_ids) or each.log_probs for each in sampled)
    assert [record["response_length"] for record in cut.records] == [len(tokens[r["sample_id"]]) for r in cut.records]
    assert cut == whole and cut.paired_scores == whole.paired_scores and cut.keys() >= {"eval_reward", "eval_gold"}
    assert len(cut.records) == 4 and cut.records == whole.records
    shades = [record["images"][0].getpixel((0, 0))[0] for record in cut.records]
    assert shades == [50 * record["group_id"] for record in cut.records]


@pytest.mark.parametrize("without", [(3, 4), (1, 4)])
def test_prompts_without_a_reward_end_no_evaluation_in_parts_wherever_they_are_as_they_end_none_of_the_whole(
    seeing, tmp_path, without
):
    rewards = RewardComputationEngine(custom_reward_func=lambda ids: [None if i // 2 in without else 1.0 for i in ids])
    found, _, parts = seen(seeing, tmp_path, rewards, [], prompts_at_once=2)
    assert parts == [2, 2, 1] and found["eval_invalid_share"] == 0.4


def test_an_evaluation_in_parts_ends_as_soon_as_more_of_it_have_no_reward_than_may(seeing, tmp_path):
    calls: list[int] = []
    rewards = RewardComputationEngine(custom_reward_func=lambda ids: calls.append(len(ids)) or [None] * len(ids))
    with pytest.raises(TooManyInvalid, match="80% of 10 rewards are invalid"):
        seen(seeing, tmp_path, rewards, [], prompts_at_once=2)
    assert calls == [4, 2, 4]  # of the first part both passes


def test_records_of_an_evaluation_in_parts_show_what_an_environment_has_put_behind_a_prompt(seeing, tmp_path):
    """Which the data do not have."""

    def begun(rollouts):
        for each in rollouts:
            images = [*each.prompt.images, Image.new("RGB", (8, 8), "blue")]
            each.prompt = replace(each.prompt, images=images)
            each.episode = Episode([Turn("a")], [0] * len(each.token_ids))
        return rollouts

    rewards = RewardComputationEngine(custom_reward_func=lambda completions: [1.0] * len(completions))
    found, held, parts = seen(seeing, tmp_path, rewards, [], prompts_at_once=2, drawn=begun)
    assert parts == [2, 2, 1] and max(held) == 2
    assert [[each.size for each in record["images"]] for record in found.records] == [[(56, 56), (8, 8)]] * 4


def test_an_evaluation_whose_reward_needs_the_device_has_larger_parts_so_that_the_engine_sleeps_seldom(
    seeing, tmp_path, monkeypatch
):
    told: list[str] = []
    found, _, parts = seen(seeing, tmp_path, on_device(told, "reward"), told, prompts_at_once=2)
    assert parts == [5] and told == [*ROUND, *ROUND] and found["eval_reward"] == 1.0
    told.clear()
    monkeypatch.setattr("lightrft_visual.trainer.vl.evaluation.LARGER", 2)
    again, held, parts = seen(seeing, tmp_path, on_device(told, "reward"), told, prompts_at_once=2)
    assert (parts, max(held), told) == ([4, 1], 4, 4 * ROUND)
    assert again == found and again.records == found.records


def test_a_masked_row_of_an_evaluation_counts_for_nothing(checkpoint):
    """Its place holds another row, so that ranks stay in step; that one's rewards count once."""
    rows = SimpleNamespace(remote={1}, fetch=lambda indices, step: Fetched([0, 0, 2], [False, True, False], {}, 1))
    greedy = SamplingSettings(n=1, temperature=0.0, max_new_tokens=4)
    found = evaluated(maker_of(checkpoint, []), greedy, rows)
    records = found.records
    assert found.pop("eval_bad_rows") == 1.0
    assert found == {"eval_reward": 1.0, "eval_reward_greedy": 1.0, "validation/reward/reward_fn": 1.0}
    assert len(records) == 4 and not any("where?" in record["prompt"] for record in records)


@pytest.mark.parametrize(("masked", "golds"), [([True, True, True], []), ([False, True, False], [0.0, 1.0, 4.0, 5.0])])
def test_gold_of_an_evaluation_is_asked_of_a_rank_without_a_real_prompt_too_and_counts_real_ones(
    checkpoint, masked, golds
):
    """As with more ranks than prompts: the judge works on all ranks or none."""
    gold = RewardComputationEngine(custom_reward_func=lambda completions: [float(n) for n in range(len(completions))])
    rows = SimpleNamespace(remote={1}, fetch=lambda indices, step: Fetched(indices, masked, {}, sum(masked)))
    found = evaluated(maker_of(checkpoint, []), rows=rows, gold=gold)
    assert found.get("eval_gold") == (sum(golds) / len(golds) if golds else None)
    assert [record["components"]["gold"] for record in found.records] == golds


def test_evaluation_reports_components_over_the_samples_they_apply_to_and_why_others_have_no_reward(checkpoint, caplog):
    def some(completions, ids):
        return [None if i % 3 == 0 else 2.0 for i in ids], {"length": [float(i) for i in range(len(ids))]}

    maker = maker_of(checkpoint, [])
    maker.rewards, sample = RewardComputationEngine(custom_reward_func=some), maker.sample

    def failing(*arguments):
        made = sample(*arguments)
        nothing = [0] * len(made[0].token_ids)
        made[0].episode = Episode([Turn("a")], nothing, failure="no server\n at line 3", failed=True)
        return made

    maker.sample = failing
    found = evaluated(maker)
    assert found["eval_invalid_share"] == 2 / 6 and found["eval_reward"] == 2.0
    assert (found["validation/reward/some"], found["validation/reward/length"]) == (2.0, (1 + 2 + 4 + 5) / 4)
    assert "33% of the evaluated responses have no usable reward and are left out; 1 x no server" in caplog.text


def test_an_evaluation_with_a_seed_of_its_own_draws_alike_in_every_run(checkpoint):
    def drawn(run_seed: int, eval_seed: int | None) -> list[list[int]]:
        maker = maker_of(checkpoint, [], run_seed=run_seed)
        evaluation = Evaluation(maker, PROMPTS, SAMPLED, SAMPLED, 4, run_seed, seed=eval_seed)
        rollouts, _ = evaluation._rollouts(PROMPTS, [True] * len(PROMPTS), SAMPLED, InvalidTally(6), None)
        return [list(rollout.token_ids) for rollout in rollouts]

    assert drawn(1, 7) == drawn(2, 7) != drawn(1, 8)
    assert drawn(1, None) == drawn(1, 1) != drawn(2, None)


def test_labels_that_are_many_get_no_metrics_each(caplog):
    few = ["count", "colour", None, "count"]
    assert measured_labels(few) == {"count", "colour"} and not caplog.records
    answers = [str(number) for number in range(500)] + ["7"] * 9 + ["8"] * 3
    assert measured_labels(answers) == {"7", "8"}
    assert "500 labels" in caplog.text and "the 2 most frequent" in caplog.text
    many = [str(number % 100) for number in range(500)]
    assert measured_labels(many) == {str(number) for number in range(MAX_LABELS)}


def test_labels_by_which_other_metrics_of_an_evaluation_go_get_none_and_are_told(caplog):
    assert measured_labels(["greedy", "count", "greedy_count", "label_mean", "greedyish"]) == {"count", "greedyish"}
    assert "no eval_reward_<label> for greedy, greedy_count, label_mean" in caplog.text


def test_one_micro_batch_at_a_time_lies_on_the_device(monkeypatch):
    prompt = PromptFeatures("p", [1, 2], group_id=0)
    batches = [
        collate([Rollout(prompt, [3, 4], None, "", False, sample_id=2 * n + k) for k in range(2)], 0, vision=False)
        for n in range(3)
    ]
    there: list[weakref.ref[ModelInputs]] = []
    move = ModelInputs.to

    def moved(inputs, device):
        copy = move(inputs, device)
        there.append(weakref.ref(copy))
        return copy

    def model(inputs, rule=None):
        assert sum(each() is not None for each in there) == 1 and there[-1]() is inputs
        return torch.full((2, 2), float(inputs.sample_ids[0]))

    monkeypatch.setattr(ModelInputs, "to", moved)
    actor = lambda inputs, rule: SimpleNamespace(log_probs=model(inputs), entropy=model(inputs))  # noqa: E731
    ForwardStage(actor, model, model, torch.device("cpu")).run(batches, ScoringRule())
    for name in ("action_log_probs", "action_entropy", "base_action_log_probs", "values"):
        assert [getattr(batch, name)[0, 0].item() for batch in batches] == [0, 2, 4]


@pytest.mark.parametrize("ahead", [False, True])
def test_no_difference_is_told_where_no_token_was_compared(ahead):
    agreement, mask = Agreement(None, RolloutConfig(), ahead), torch.ones(1, 2, dtype=torch.bool)
    for theirs, told in ((None, False), (torch.zeros(1, 2), True)):
        metrics, check = MetricsAccumulator(), agreement.of_rollouts()
        check.add(torch.full((1, 2), 0.5), theirs, mask)
        check.settle()
        agreement.report(check, metrics)
        assert metrics.reduce().get("rollout_logp_diff_max") == (0.5 if told else None)


@pytest.mark.parametrize(
    ("steps", "ahead", "evaluated", "full", "probed"),
    [
        pytest.param(51, False, False, True, [50], id="the rollouts show the others"),
        pytest.param(51, True, False, True, [1, 50], id="rollouts ahead are of a policy that is gone"),
        pytest.param(51, True, False, False, [1, 50], id="ahead and cut: a probe waits for the work under way"),
        pytest.param(2, False, True, True, [1, 2], id="before an evaluation"),
        pytest.param(2, False, False, False, [1, 2], id="where log-probs are cut"),
    ],
)
def test_new_weights_are_probed_where_no_rollout_would_show_them(steps, ahead, evaluated, full, probed):
    found: list[int] = []
    gate = SimpleNamespace(check=lambda probe: found.append(step) or 0.25)
    agreement = Agreement(gate, RolloutConfig(), ahead)
    agreement.probe = object()
    for step in range(1, steps + 1):
        agreement.after_sync(step, evaluated, full)
    assert found == probed and agreement.difference == 0.25
