"""Models that judge are in the plans of both kinds of run: on the host at rest, on the device while they score."""

from collections.abc import Callable

import pytest
from transformers import AutoModelForSequenceClassification, Qwen2Config

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.config.spellings import DIFFUSION_PRESET
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.models.diffusion.opening import save_text_length
from lightrft_visual.models.tiny.diffusion import TEXT_LENGTH, TinyDiffusionSettings, build_pipeline
from lightrft_visual.plugins.memory_plan import check
from lightrft_visual.plugins.memory_plan import reward_models as module
from lightrft_visual.plugins.memory_plan.reward_models import reward_models
from lightrft_visual.plugins.memory_plan.table import DEVICE, HOST

# Weights of the published checkpoints, all float32.
CLIP, PICK = 4 * 427_616_513, 4 * 986_109_441
NAMED = "reward model {}: weights"
DRAWING = (
    "--bf16 true --diffusion_algorithm flow_grpo --height 32 --width 32 "
    "--plan_device h100-80gb --plan_world_size 8 --micro_rollout_batch_size 1 --prompt_data prompts.jsonl"
).split()
PICKED = ["--components.pick_score", "1.0", "--components.clip_score", "0.5"]


@pytest.fixture(scope="module")
def held(tmp_path_factory) -> Callable[[list[str]], list[dict[str, tuple[str, float]]]]:
    """{item: (where, bytes)} of the phases load, generate, score, train, sync of a drawing run, by its flags."""
    model = tmp_path_factory.mktemp("drawing")
    build_pipeline(TinyDiffusionSettings(layers=1)).save_pretrained(model)
    save_text_length(model, TEXT_LENGTH)

    def planned(argv: list[str]) -> list[dict[str, tuple[str, float]]]:
        given = ["--pretrain", str(model), *DRAWING, *argv]
        config = parse_run(DiffusionRunConfig, given, preset=DIFFUSION_PRESET).config
        plan = check.Planner(*check.named_device(config)).plan(config)
        return [{item.name: (item.where, item.bytes) for item in phase.items} for phase in plan.phases]

    return planned


@pytest.mark.slow
def test_scorers_wait_on_the_host_and_one_of_them_is_on_the_device_while_it_scores(held) -> None:
    phases = held([*PICKED, "--gold_recipe", "{'*': [[rule, clip_score, 1.0]]}"])
    pick, clip = NAMED.format("pick_score"), NAMED.format("clip_score")
    for phase in phases:
        assert phase[clip] == (HOST, CLIP)
    assert [phase[pick] for phase in phases] == [(HOST, PICK)] * 2 + [(DEVICE, PICK)] + [(HOST, PICK)] * 4
    assert phases[2]["gold clip_score: weights"] == (HOST, CLIP)  # gold has models of its own


def test_a_scorer_that_stays_on_the_device_is_there_in_every_phase(held) -> None:
    phases = held([*PICKED, "--kwargs.pick_score.offload", "false", "--zero_stage", "3"])
    assert all(phase[NAMED.format("pick_score")] == (DEVICE, PICK) for phase in phases)  # not divided by ZeRO-3


@pytest.mark.slow
def test_a_scorer_takes_the_memory_of_each_of_its_models_in_its_precision(held) -> None:
    argv = [word for name in ("hpsv3", "full", "videoalign", "geneval", "judge")
            for word in (f"--components.{name}", "1.0")]  # fmt: skip
    argv += ["--kwargs.full.scorer", "hpsv3", "--kwargs.full.bf16", "false"]
    argv += ["--kwargs.judge.model", "Qwen/Qwen2.5-VL-3B-Instruct"]
    found = held(argv)[1]
    wanted = {
        "hpsv3": 2 * 8.29e9,
        "full": 4 * 8.29e9,
        "videoalign": 2 * 2.21e9,
        "judge": 2 * 3.75e9,
        "geneval (clip)": CLIP,
        "geneval": 4 * 68.7e6,  # 69 M in its paper
    }
    for scorer, size in wanted.items():
        assert found[NAMED.format(scorer)][1] == pytest.approx(size, rel=0.01), scorer


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> tuple[str, int]:
    """(folder, bytes) of a text reward model."""
    folder = tmp_path_factory.mktemp("classifier")
    model = AutoModelForSequenceClassification.from_config(
        Qwen2Config(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_labels=1, pad_token_id=0,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    return str(folder), 4 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("extra", "share"), [([], 1), (["--zero_stage", "3"], 8)])
def test_a_drawing_runs_own_reward_model_is_divided_where_weights_are(held, classifier, extra, share) -> None:
    folder, size = classifier
    name = NAMED.format("judge")
    phases = held(["--reward_pretrain", f"judge={folder}", *extra])
    assert phases[1][name] == (HOST, size / share) and phases[2][name] == (DEVICE, size / share)
    if share > 1:
        assert phases[2]["weights gathered by ZeRO-3"][1] >= size  # while it scores it comes together
        phases = held(["--reward_pretrain", f"judge={folder}", "--no_reward_cpu_offload", *extra])
        assert phases[1][name] == (DEVICE, size / share)


@pytest.mark.slow
def test_a_vision_language_run_counts_scorers_too() -> None:
    flags = "--pretrain Qwen/Qwen2.5-VL-3B-Instruct --bf16 --plan_device h100-80gb --components.clip_score 1.0"
    config = parse_run(RunConfig, flags.split()).config
    plan = check.Planner(*check.named_device(config)).plan(config)
    assert {item.name: item.bytes for item in plan.phases[1].items}[NAMED.format("clip_score")] == CLIP


TWO, OWN, BOTH = {"a": 1.0, "b": 1.0}, {"scorer": "clip_score"}, ["pick_score", "clip_score"]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"components": {"clip_score": 1.0, "exact": 1.0}}, ["clip_score"]),  # exact has no model
        # One scorer under two names is built once, with other settings twice.
        ({"components": TWO, "kwargs": {"a": OWN, "b": OWN}}, ["a"]),
        ({"components": TWO, "kwargs": {"a": OWN, "b": OWN | {"weight": 2.0}}}, ["a", "b"]),
        ({"components": {"multi": 1.0}, "kwargs": {"multi": {"components": {"clip_score": 1.0}}}}, ["clip_score"]),
        ({"reward_recipe": "{x: [[rule, pick_score, 1.0]], '*': [[func, clip_score, 1.0]]}"}, BOTH),
        ({"components": {"clip_score": 1.0}, "reward_transport": "ray"}, []),  # in a process of Ray
        ({"components": {"vlm_judge": 1.0}, "kwargs": {"vlm_judge": {"url": "http://x", "model": "m"}}}, []),
    ],
)  # fmt: skip
def test_each_model_that_a_recipe_builds_counts_once(settings, names) -> None:
    assert list(reward_models({"model": RewardConfig(**settings)})) == [f"model {name}" for name in names]


def test_a_reward_model_by_name_has_the_shape_that_is_shipped_of_it() -> None:
    found = reward_models({"model": RewardConfig(reward_pretrain="judge=Qwen/Qwen2.5-VL-3B-Instruct")})
    assert found["model judge"].model.bytes == 2 * 3_754_622_976


@pytest.mark.parametrize("online", [False, True])
def test_a_reward_model_that_is_nowhere_is_named_and_asked_for_where_the_hub_may_be(monkeypatch, online) -> None:
    asked = []
    monkeypatch.setattr(module, "fetch_model", lambda name, files: asked.append((name, files)))
    picked = {"components": {"pick_score": 1.0}, "kwargs": {"pick_score": {"model_name": "no/such"}}}
    found = reward_models({"model": RewardConfig(reward_pretrain="a=no/other", **picked)}, online)
    assert {name: each.model.numbers for name, each in found.items()} == {"model a": 0, "model pick_score": 0}
    assert asked == [(name, ["config.json"]) for name in ("no/other", "no/such")] * online
