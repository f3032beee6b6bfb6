"""Plans of runs: what fits, what is refused, and the shipped recipes on the hardware that they name."""

import logging
from contextlib import nullcontext

import pytest
import tiny_families
import torch
from shipped import EXPERIMENTS, parsed
from stock_families import PLAIN, STOCK
from transformers import DeepseekV3Config, Gemma3TextConfig, Qwen2Config, Qwen3_5TextConfig

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import config_or_exit, parse_run
from lightrft_visual.config.placement import DEVICES, GIB
from lightrft_visual.config.spellings import DIFFUSION_PRESET
from lightrft_visual.config.vl import ModelConfig, RunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.diffusion.opening import family_of, save_text_length
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, LoraSettings
from lightrft_visual.models.tiny.diffusion import TEXT_LENGTH, TinyDiffusionSettings, build_pipeline
from lightrft_visual.plugins.memory_plan import check
from lightrft_visual.plugins.memory_plan.diffusion import Computed, DiffusionPlanner, computed_models
from lightrft_visual.plugins.memory_plan.pipelines import pipeline_policy
from lightrft_visual.plugins.memory_plan.shapes import language_model, near_shipped
from lightrft_visual.plugins.memory_plan.table import HOST, Item, Phase, Plan
from lightrft_visual.plugins.memory_plan.times import HOST_MEMORY
from lightrft_visual.plugins.memory_plan.vl_shape import VLShape
from lightrft_visual.trainer.diffusion.stages import kept_bytes

SEVEN = (
    "--pretrain Qwen/Qwen2.5-VL-7B-Instruct --bf16 --gradient_checkpointing --zero_stage 2 --rollout_batch_size 128 "
    "--n_samples_per_prompt 16 --generate_max_len 2048 --plan_device h100-80gb --plan_world_size 8"
).split()
CARD = DEVICES["h100-80gb"]


def plan_of(*settings: str, schema: type = RunConfig) -> Plan | None:
    config = parse_run(schema, [*settings]).config
    return check.Planner(*check.named_device(config)).plan(config)


def held(plan: Plan, phase: int) -> dict[str, float]:
    """Bytes by item."""
    return {item.name: item.bytes for item in plan.phases[phase].items}


# The plan of the video recipe takes half a minute; --dry_run shows it.
PLANNED = [name for name in EXPERIMENTS if "wan" not in name]


@pytest.mark.parametrize("name", PLANNED)
def test_a_recipe_fits_on_the_hardware_that_it_names(name: str) -> None:
    config = parsed(name).config
    assert config.plan.plan_device in DEVICES and config.plan.plan_world_size
    plan = check.Planner(*check.named_device(config)).plan(config)
    assert plan.fits, plan.text()
    named = ["load", "generate", "score", "train", "sync", "resume", "export"]
    assert [phase.name for phase in plan.phases] == named


def test_seven_billion_weights_fit_while_the_optimizer_waits_on_the_host() -> None:
    plan = plan_of(*SEVEN, "--offload_trainer")
    assert plan.fits, plan.text()
    assert "the largest item is vLLM: KV cache and work space" in plan.verdict()
    items = {item.name: item for item in plan.phases[1].items}
    assert items["reference: weights"].bytes == 2 * 8_292_166_656
    waiting = items["policy: fp32 weights and Adam's moments"]
    assert waiting.where == HOST and waiting.bytes == 12 * 8_292_166_656 / 8
    places = items["places of weights and optimizer that wait"]  # vLLM keeps a copy, so the weights wait too
    assert places.where == HOST and places.bytes == 2 * 8_292_166_656


def test_weights_that_wait_are_not_on_the_device_beside_the_engine() -> None:
    """Those of a critic come back for its forwards and a checkpoint, the policy's also for a probe of what the engine
    has taken over, and for the export."""
    plan = plan_of(*SEVEN, "--advantage_estimator", "gae", "--offload_trainer")
    on_device = [{item.name for item in phase.items if item.where != HOST} for phase in plan.phases]
    here = [[name for name in ("policy", "critic") if f"{name}: weights" in found] for found in on_device]
    both = ["policy", "critic"]
    assert here == [[], [], both, both, ["policy"], both, ["policy"]]
    assert all("reference: weights" in found for found in on_device)
    stays = plan_of(*SEVEN, "--advantage_estimator", "gae").phases[1]
    assert {"policy: weights", "critic: weights"} <= {item.name for item in stays.items}
    drawing = plan_of(*SEVEN, "--engine_type", "hf", "--offload_trainer").phases[1]  # which generates with them
    assert "policy: weights" in {item.name for item in drawing.items}


def test_what_zero_3_keeps_for_gradients_is_there_while_the_engine_generates() -> None:
    kept = {"policy: gradients": 4 * 8_292_166_656 / 8, "policy: buckets of gradients": 1e9}
    names = [{item.name: item for item in plan_of(*SEVEN, "--zero_stage", "3", *also).phases[1].items}
             for also in ([], ["--offload_trainer"])]  # fmt: skip
    assert {name: names[0][name].bytes for name in kept} == kept
    assert names[1]["policy: gradients"].where == HOST and "policy: buckets of gradients" not in names[1]


def test_a_teacher_is_counted_by_its_own_shape() -> None:
    teaching = ["--teacher_pretrain", "Qwen/Qwen2.5-VL-3B-Instruct", "--teacher_coef", "1", "--offload_trainer"]
    items = held(plan_of(*SEVEN, *teaching), 3)
    assert 3e9 < items["teacher: weights"] / 2 < 5e9 < items["policy: weights"] / 2


@pytest.mark.parametrize("adapters", [[], ["--lora_rank", "16"]])
def test_a_critic_is_counted_by_its_own_shape_and_trains_all_of_it(adapters) -> None:
    given = [*SEVEN, *adapters, "--advantage_estimator", "gae"]
    own, other = (
        held(plan_of(*given, *also), 3) for also in ([], ["--critic_pretrain", "Qwen/Qwen2.5-VL-3B-Instruct"])
    )
    head = 3584 * 152064  # a value head takes its place; that of 3B is its embedding
    for items, numbers in ((own, 8_292_166_656 - head), (other, 3_754_622_976)):
        assert items["critic: weights"] == 2 * numbers
        assert items["critic: fp32 weights and Adam's moments"] == 12 * numbers / 8


def test_models_whose_shapes_are_nowhere_are_named() -> None:
    given = "--advantage_estimator gae --critic_pretrain no/critic --teacher_pretrain no/such --teacher_coef 1"
    plan = plan_of(*SEVEN, *given.split(), "--reward_pretrain", "judge=no/judge")
    assert plan.unknown == ("critic", "teacher", "reward model judge")
    assert "not known: critic, teacher, reward model judge" in plan.text().splitlines()


def test_an_engine_whose_share_is_too_small_for_its_weights_is_refused_with_what_it_needs() -> None:
    small = plan_of(*SEVEN, "--offload_trainer", "--engine_mem_util", "0.15")
    assert not small.fits and not small.lacking()
    assert "set engine_mem_util at least 0.2, or a larger engine_tp_size" in small.verdict()
    for enough in (["0.2"], ["0.15", "--engine_tp_size", "2"]):
        assert plan_of(*SEVEN, "--offload_trainer", "--engine_mem_util", *enough).fits


def test_without_that_they_are_refused_with_what_would_help() -> None:
    plan = plan_of(*SEVEN)
    assert not plan.fits
    text = plan.text()
    assert "it does not fit: phase generate" in text and "offload_trainer" in text.splitlines()[-1]
    assert "gradient_checkpointing" not in plan.verdict()  # is on already


def test_settings_do_what_the_advice_says() -> None:
    plain = plan_of(*SEVEN)
    generate, train = plain.phases[1].total("device"), plain.phases[3].total("device")
    for settings, phase, before in [
        (["--engine_mem_util", "0.3"], 1, generate),
        (["--zero_stage", "3"], 1, generate),
        (["--offload_reference"], 1, generate),
        (["--lora_rank", "16"], 3, train),
        (["--init_kl_coef", "0"], 3, train),
        (["--micro_train_batch_size", "2"], 3, train),
        (["--plan_world_size", "16"], 3, train),
        (["--adam_offload"], 3, train),
    ]:
        assert plan_of(*SEVEN, *settings).phases[phase].total("device") < before - 2 * GIB, settings
    assert plan_of(*SEVEN, "--no_gradient_checkpointing").phases[3].total("device") > train + 50 * GIB


def test_a_reference_that_is_moved_by_parts_is_counted_in_fp32_on_the_host() -> None:
    for also, share in (([], 1), (["--offload_reference"], 1), (["--zero_stage", "3"], 8)):
        moved, parts = (
            plan_of(*SEVEN, *also, "--ref_update_steps", "4", "--ref_update_mixup", mixup).phases[3]
            for mixup in ("1.0", "0.5")
        )
        added = parts.total("host") - moved.total("host")
        assert added == pytest.approx(4 * 8_292_166_656 / share, rel=0.01), also
        assert parts.total("device") == moved.total("device")


def test_the_copy_of_a_checkpoint_that_is_written_behind_the_run_is_counted_on_the_host() -> None:
    """14 bytes of each trained number over 8 ranks, and page-locked: three of 4.1 GB take 4 GiB each."""
    plain, behind = (plan_of(*SEVEN, *also).phases[3].total("host") for also in ([], ["--async_save", "true"]))
    assert 8_292_166_656 * 14 / 8 < behind - plain == pytest.approx(8_292_166_656 * 2 / 8 + 3 * 4 * GIB, rel=0.01)


def test_a_reward_model_is_counted_where_it_is(tmp_path) -> None:
    """One of 7 billion weights: on the host at rest, whole or a part of it on the device while it scores."""
    shape = language_model(ModelConfig(pretrain="Qwen/Qwen2.5-VL-7B-Instruct"))
    shape.dtype = "bfloat16"
    shape.save_pretrained(tmp_path)
    whole, judged = 2 * 8_292_166_656, ["--reward_pretrain", f"judge={tmp_path}"]
    name = "reward model judge: weights"

    def judge(*settings: str, name: str = name) -> list[tuple[str, float]]:
        own = "--init_kl_coef 0 --micro_rollout_batch_size 1 --offload_trainer".split()  # less than the judge needs
        phases = plan_of(*SEVEN, *own, *judged, *settings).phases
        found = [item for phase in phases[1:3] for item in phase.items if item.name == name]
        return [(item.where, item.bytes) for item in found]

    engine = ("--engine_tp_size", "2", "--dynamic_sampling", "true")  # whose next round goes on with the weights
    kept = judge(*engine, name="vLLM: weights while models judge")
    assert kept == [(HOST, whole / 2)] * 2  # page-locked memory, which PyTorch keeps
    locked = judge(*engine, name="vLLM: weights while models judge, page-locked to powers of two")
    assert len(locked) == 2 and 0 < locked[0][1] < whole / 2

    assert judge() == [(HOST, whole), (HOST, whole), ("device", whole)]  # what came from the host stays there
    assert judge("--zero_stage", "3")[0] == (HOST, whole / 8)
    assert judge("--zero_stage", "3", "--no_reward_cpu_offload")[0] == ("device", whole / 8)


@pytest.mark.parametrize("engine,phase", [("vllm", 4), ("hf", 1)])
def test_an_average_takes_the_weights_precision_while_it_is_evaluated(engine, phase) -> None:
    ema = [*SEVEN, "--engine_type", engine, "--enable_ema"]
    own, averaged = (plan_of(*ema, *also).phases[phase] for also in (["--eval_ema", "false"], []))
    added = averaged.total("device") - own.total("device")
    assert added >= 2 * 8_292_166_656 / 8 and "copy that stands in for the weights" in {i.name for i in averaged.items}


def test_a_prompt_counts_once_where_a_run_computes_it_once() -> None:
    """Eight answers of 64 tokens to a prompt of 1,024: 1,536 tokens in place of 8,704, in activations and in time."""
    settings = [*SEVEN, "--generate_max_len", "64", "--n_samples_per_prompt", "8", "--train_batch_size", "64"]
    shared, alone = plan_of(*settings), plan_of(*settings, "--share_prefix", "false")
    used = [held(plan, 3)["activations of a micro-batch"] for plan in (shared, alone)]
    assert used[0] < 0.6 * used[1]  # the gradient of the head's weights is the same
    assert shared.phases[3].seconds < 0.6 * alone.phases[3].seconds  # each of 32 updates also has its optimizer step
    padded = plan_of(*settings, "--attn_implementation", "eager")  # takes no segments, and keeps scores
    assert held(padded, 3)["activations of a micro-batch"] >= used[1]


@pytest.mark.parametrize("row", [["--share_prefix", "false"], ["--packing_samples", "--share_prefix", "false"], []])
def test_half_hidden_images_are_computed_beside_the_whole_ones(row) -> None:
    """By a PAPO run, in one forward: twice the tokens of a micro-batch."""
    settings = [*SEVEN, "--train_batch_size", "128", "--n_samples_per_prompt", "4", "--no_gradient_checkpointing", *row]
    plain, papo, larger = (
        plan_of(*settings, "--micro_train_batch_size", size, *also)
        for size, also in (("4", []), ("4", ["--papo_coef", "0.01"]), ("8", []))
    )
    kept = [held(plan, 3)["activations of a micro-batch"] for plan in (plain, papo, larger)]
    assert kept[1] == pytest.approx(kept[2], rel=0.1) and kept[1] > 1.6 * kept[0]
    assert papo.phases[3].seconds > 1.5 * plain.phases[3].seconds
    assert papo.phases[2].total("device") == plain.phases[2].total("device")


def test_answers_may_be_images_of_more_tokens_and_guided_by_a_half_without_prompt() -> None:
    settings = "--embedded_family janus --engine_type hf --plan_device h100-80gb --prompt_max_len 8".split()
    size = VLShape(RunConfig(), language_model(ModelConfig(embedded_family="janus"))).drawn_tokens
    short, drawn, long, guided, conditional = (
        plan_of(*settings, "--generate_max_len", str(answer), *also)
        for answer, also in (
            (2, []), (size, []), (size + 8, []), (size, ["--guidance_scale", "5"]),
            (size, ["--guidance_scale", "5", "--guidance_log_probs", "conditional"]),
        )
    )  # fmt: skip
    tokens, kept, cached = (
        [held(plan, phase)[name] for plan in (short, drawn, long, guided, conditional)]
        for phase, name in ((3, "tokens of the batch"), (3, "activations of a micro-batch"), (1, "keys and values"))
    )
    assert tokens[0] == tokens[1] == tokens[2] * (8 + size) / (16 + size)
    assert kept[0] == kept[1] == kept[4] and 1.5 * kept[1] < kept[3] < 2.1 * kept[1]
    assert cached[3] == cached[4] == 2 * cached[1]


def test_ranks_that_share_a_sequence_keep_a_part_of_its_activations() -> None:
    settings = [*SEVEN, "--micro_train_batch_size", "16", "--no_gradient_checkpointing"]
    plans = [plan_of(*settings, "--sp_size", size) for size in ("1", "4")]
    one, four = (held(plan, 3)["activations of a micro-batch"] for plan in plans)
    assert one / 4 < four < one / 2  # each has the whole row's embeddings, a chunk of logits, one prompt's images
    hosts = [held(plan, 3)["tokens of the batch"] for plan in plans]
    assert hosts[1] == 4 * hosts[0]  # the samples of all four
    seconds = [plan.phases[3].seconds for plan in plans]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.25)  # smaller forwards, four times as many of them


def test_gradients_of_one_micro_batch_come_as_its_activations_go() -> None:
    settings = [*SEVEN, "--train_batch_size", "64", "--share_prefix", "false"]

    def names(size: int, *more: str) -> set[str]:
        return {*held(plan_of(*settings, "--micro_train_batch_size", str(size), *more), 3)}

    one, two = (names(size, "--grad_accum_dtype", "bf16") for size in (8, 4))
    assert "activations of a micro-batch" in one & two
    assert "policy: gradients" in two - one  # those of the first lie there while the second runs
    assert {"activations of a micro-batch", "policy: gradients"} <= names(8)  # in fp32 they are one tensor


@pytest.mark.parametrize("extra,code", [([], 1), (["--plan", "force"], 0)])
def test_a_dry_run_shows_the_plan_and_answers_by_its_exit_code(capsys, extra: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as stop:
        config_or_exit(RunConfig, [*SEVEN, *extra, "--dry_run"])
    shown = capsys.readouterr().out
    assert stop.value.code == code
    assert "# plan of one rank of 8 ranks (8 on a host) of h100-80gb" in shown and "# train" in shown


SPLIT, STATES = "--placement split distributed.resources.trainer", "denoisers: fp32 weights and Adam's moments"


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        (f"{SPLIT}.devices=[0,1] --plan_device h100-80gb", 2),
        (f"{SPLIT}.num_gpus=3 --plan_device h100-80gb", 3),
        (f"{SPLIT}.num_gpus=3 --plan_device cpu", 3),
        (f"{SPLIT}.num_gpus=3 --plan_device h100-80gb --plan_world_size 4", 4),
        ("--placement split --plan_device h100-80gb", 8),
    ],
)
def test_a_plan_is_of_as_many_ranks_as_the_trainer_has_devices(monkeypatch, settings: str, ranks: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    config = parse_run(RunConfig, settings.split()).config
    assert check.named_device(config)[1:] == (ranks, ranks)


def test_a_trainer_that_draws_on_other_devices_is_planned_alone() -> None:
    """Its evaluations are drawn on its own, and as many samples at once; no graph of a rollout is there to be kept."""
    argv = "--num_steps 6 --rollout_batch_size 8 --n_samples_per_prompt 4 --train_batch_size 32".split()
    plans = []
    for also in ([], f"{SPLIT}.num_gpus=2".split()):
        argv = [*argv, "--plan_device", "h100-80gb", "--plan_world_size", "2", *also]
        config = parse_run(DiffusionRunConfig, argv, preset=DIFFUSION_PRESET).config
        planner = check.Planner(*check.named_device(config))
        assert planner.sizes(config)
        plans.append(planner.plan(config))
    here, alone = ({phase.name: {item.name for item in phase.items} for phase in plan.phases} for plan in plans)
    assert "a trainer's device alone" in plans[1].about and "VAE: weights" in alone["generate"]
    assert alone["sync"] - here["sync"] == {"versions of the weights for the workers"}
    synced = held(plans[1], 4)  # two versions in fp32, and states of three such numbers, both by two ranks
    assert synced["versions of the weights for the workers"] * 3 == synced[STATES] * 2
    assert "graphs of the rollout" in here["generate"] - alone["generate"]


def test_a_dry_run_of_an_unknown_model_says_so(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        config_or_exit(RunConfig, ["--pretrain", "someone/unheard-of", "--plan_device", "cpu", "--dry_run"])
    assert stop.value.code == 0 and "no plan: the shape of someone/unheard-of" in capsys.readouterr().out


def test_devices_and_models_are_named_in_full() -> None:
    for slip, device in (("h100", "h100-80gb"), ("a100_80gb", "a100-80gb")):
        with pytest.raises(ConfigError, match=f"did you mean '{device}'"):
            parse_run(RunConfig, ["--plan_device", slip])
    assert near_shipped("Qwen/Qwen2.5-VL-3B-Instrct") == "; did you mean Qwen/Qwen2.5-VL-3B-Instruct?"
    assert near_shipped("someone/unheard-of") == near_shipped("./qwen2.5-vl-3b") == ""


GIVEN = [*SEVEN, "--auto_micro_batches", "false"]  # nothing is left to the plan


def test_a_plan_warns_by_default_and_refuses_where_it_is_asked_to(monkeypatch, caplog) -> None:
    monkeypatch.setattr(check, "present", lambda local: CARD)
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"does not fit(.|\n)*largest item"):
        check.check_fits(parse_run(RunConfig, [*GIVEN, "--plan", "refuse"]).config)
    check.check_fits(parse_run(RunConfig, [*GIVEN, "--offload_trainer", "--plan", "refuse"]).config)
    with caplog.at_level(logging.WARNING):
        check.check_fits(parse_run(RunConfig, GIVEN).config)
    assert "this run may not fit" in caplog.text and "the largest item is" in caplog.text


def test_a_run_that_leaves_something_to_the_plan_is_judged_by_what_is_chosen(monkeypatch, caplog) -> None:
    monkeypatch.setattr(check, "present", lambda local: CARD)
    monkeypatch.setenv("WORLD_SIZE", "1")
    words = [*GIVEN, "--lora_rank", "16", "--micro_train_batch_size", "32", "--gradient_checkpointing"]
    with caplog.at_level(logging.WARNING):
        check.check_fits(parse_run(RunConfig, [*words, "false"]).config)
        assert "this run may not fit" in caplog.text  # as it was before anything was chosen
        caplog.clear()
        left = parse_run(RunConfig, [*words, "auto"]).config
        check.check_fits(left)
        check.use_choices(left)
    assert left.model.gradient_checkpointing == "full" and not caplog.text
    with pytest.raises(ConfigError, match="does not fit .--plan force"):
        check.use_choices(parse_run(RunConfig, [*SEVEN, "--gradient_checkpointing", "auto"]).config)


def test_weights_gradients_and_states_that_do_not_fit_are_refused_unless_forced(monkeypatch) -> None:
    monkeypatch.setattr(check, "present", lambda local: CARD)  # one card: 7B in full, ZeRO has nothing to divide over
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="does not fit .--plan force"):
        check.check_fits(parse_run(RunConfig, GIVEN).config)
    check.check_fits(parse_run(RunConfig, [*GIVEN, "--plan", "force"]).config)


def test_a_model_that_cannot_be_planned_does_not_stop_its_run(monkeypatch, caplog) -> None:
    monkeypatch.setattr(check.Planner, "_of_model", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING):
        check.check_fits(RunConfig())
    assert "no plan of this run could be made: ZeroDivisionError" in caplog.text


def test_graphs_of_the_rollout_are_counted_until_they_have_served() -> None:
    argv = "--num_steps 6 --rollout_batch_size 2 --n_samples_per_prompt 4 --train_batch_size 8".split()

    def held(*more: str, item: str = "graphs of the rollout") -> dict[str, float]:
        config = parse_run(DiffusionRunConfig, [*argv, *more], preset=DIFFUSION_PRESET).config
        plan = check.Planner(DEVICES["h100-80gb"], 1, 1).plan(config)
        return {phase.name: sum(each.bytes for each in phase.items if each.name == item) for phase in plan.phases}

    torch.manual_seed(0)
    drawing = DiffusionPolicy(family_of(build_pipeline(TinyDiffusionSettings()), TEXT_LENGTH), LoraSettings(32))
    conditions = drawing.encode_prompts(["a red circle"])
    one = kept_bytes(
        lambda: drawing.velocity(torch.zeros(1, 8, 8, 8), torch.tensor([500.0]), conditions), drawing.parameters()
    )
    found = held()
    assert found["generate"] == found["score"] == found["train"] == pytest.approx(8 * 5 * one, rel=0.15)
    assert found["load"] == found["sync"] == found["resume"] == found["export"] == 0
    assert held("--timestep_fraction", "0.4")["generate"] == pytest.approx(found["generate"] * 2 / 5)
    assert not any(held("--rollout_graph_gib", "0.001").values()) and not any(held("--max_epochs", "2").values())
    kept = held("--cuda_graphs", "true", item="graph of a denoising step")
    assert kept["train"] == kept["generate"] > 0 == kept["load"]
    # The reference then runs over all kept steps of a micro-batch at once.
    assert held("--beta", "0.01", item="reference on the kept steps")["train"] > 0


@pytest.mark.parametrize(
    ("family", "embedded"),
    [
        ("internvl", True),
        ("qwen2", True),
        ("gemma4", False),
        ("smolvlm", False),
        ("kimi_k25", False),
        ("lfm2_vl", False),
        ("video_llama_3", False),
    ],
)
def test_a_family_is_planned_and_fits(family: str, embedded: bool, tmp_path) -> None:
    """With tiles and no grid, with text alone; without an adapter, with patches of a size and with tiles; with experts
    in a class that does not know of them; with towers that name no size."""
    named = ["--embedded_family", family]
    if not embedded:
        (STOCK | PLAIN)[family]()[0].save_pretrained(tmp_path)
        named = ["--pretrain", str(tmp_path)]
    assert plan_of(*named, "--plan_device", "cpu").fits


def test_host_and_device_have_their_fullest_moments_each_and_the_cpu_one() -> None:
    moments = [Item("images", 3 * GIB, where=HOST)], [Item("weights", 2 * GIB), Item("images", GIB, where=HOST)], []
    apart, together = (Phase.fullest("score", 0.0, one, *moments) for one in (False, True))
    assert (apart.total("device"), apart.total(HOST)) == (2 * GIB, 3 * GIB)
    assert together.total("device") + together.total(HOST) == 3 * GIB


def test_host_memory_counts_too() -> None:
    items = (Item("weights", GIB), Item("images", 2 * CARD.host, "max_pixels", HOST))
    plan = Plan("a model", CARD, 8, 8, (Phase("generate", items),))
    assert not plan.fits
    assert plan.verdict().splitlines() == [
        "it does not fit: phase generate wants 240.0 GiB more host memory than there is",
        "the largest item is images, 480.0 GiB",
        "  images (480.0 GiB) is lowered by: max_pixels",
    ]


@pytest.mark.parametrize("name", ["qwen_image_edit_plus", "flux_kontext", "ltx2"])
def test_a_drawing_pipeline_in_a_folder_is_planned(tmp_path, name: str) -> None:
    tiny_families.FAMILIES[name]().save_pretrained(tmp_path)
    side = "64" if name == "ltx2" else "32"
    size = ["--height", side, "--width", side, "--lora_rank", "2"]
    named = ["--pretrain", str(tmp_path), *size, "--plan_device", "h100-80gb"]
    plan, config = plan_of(*named, schema=DiffusionRunConfig), parse_run(DiffusionRunConfig, named).config
    items = {item.name: item for item in plan.phases[1].items}
    assert plan.fits and items["denoisers: weights"].bytes > 0
    told = items["texts and images to edit"]
    assert told.where == HOST and told.bytes > 0
    if name != "ltx2":  # images of the most, each token 4 C numbers in fp32
        images, tokens = 3 if "plus" in name else 1, (1024 // 16) ** 2
        assert told.bytes > config.sampling.rollout_batch_size * images * tokens * 4


@pytest.mark.parametrize("name", ["hunyuan_video15", "qwen_image21"])
def test_a_model_that_branches_on_values_is_not_planned(tmp_path, name: str) -> None:
    tiny_families.FAMILIES[name]().save_pretrained(tmp_path)
    size = f"--pretrain {tmp_path} --height 32 --width 32 --plan_device h100-80gb".split()
    assert plan_of(*size, schema=DiffusionRunConfig) is None


def test_ranks_that_share_a_denoiser_keep_a_part_of_its_activations(tmp_path) -> None:
    tiny_families.FAMILIES["flux"]().save_pretrained(tmp_path)
    size = f"--pretrain {tmp_path} --height 32 --width 32 --plan_device h100-80gb --plan_world_size 4".split()
    size += "--train_batch_size 32 --micro_train_batch_size 8 --beta 0 --sp_size".split()
    one, four = (held(plan_of(*size, shared, schema=DiffusionRunConfig), 3) for shared in ("1", "4"))
    assert four["activations of a micro-batch"] == pytest.approx(one["activations of a micro-batch"] / 4, rel=0.1)
    name = "latents of the samples"
    assert four[name] == 4 * one[name]  # on the host


def test_means_of_steps_that_a_loss_compares_with_are_held_beside_the_latents(tmp_path) -> None:
    tiny_families.FAMILIES["flux"]().save_pretrained(tmp_path)
    argv = f"--pretrain {tmp_path} --height 32 --width 32 --plan_device h100-80gb --beta 0 --num_steps 5".split()
    kept = {
        name: held(plan_of(*argv, "--diffusion_algorithm", name, schema=DiffusionRunConfig), 3)[
            "latents of the samples"
        ]
        for name in ("flow_grpo", "flow_dppo")
    }
    own = kept["flow_dppo"] - kept["flow_grpo"]
    assert own / kept["flow_grpo"] == pytest.approx(5 / 6, rel=0.1)  # of five steps, beside six points


def test_a_teacher_of_denoising_steps_is_asked_beside_the_trained_network(tmp_path) -> None:
    tiny_families.FAMILIES["flux"]().save_pretrained(tmp_path)
    argv = f"--pretrain {tmp_path} --height 32 --width 32 --plan_device h100-80gb --beta 0 --num_steps 5".split()
    argv += "--gradient_checkpointing full --diffusion_algorithm".split()
    config = parse_run(DiffusionRunConfig, [*argv, "diffusion_opd", "--teacher_pretrain", str(tmp_path)]).config
    planner = DiffusionPlanner(config, computed_models(config), {}, CARD, 1, 1)
    seconds, planner.beside = planner._train_seconds(), []
    assert seconds > 1.1 * planner._train_seconds()  # its forwards, which have no backward


def test_a_teacher_of_denoising_steps_is_counted_by_its_own_shape_but_for_lora_weights(tmp_path) -> None:
    """A deeper one, and one of more heads beside the graph of a checkpointed policy."""
    sizes = {"small": {"layers": 1}, "large": {"layers": 8, "heads": 24}}
    for name, size in sizes.items():
        build_pipeline(TinyDiffusionSettings(**size)).save_pretrained(tmp_path / name)
        save_text_length(tmp_path / name, TEXT_LENGTH)
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "pytorch_lora_weights.safetensors").touch()
    argv = f"--pretrain {tmp_path}/small --height 32 --width 32 --plan_device h100-80gb --beta 0 --num_steps 5".split()
    argv += "--gradient_checkpointing full --lora_rank 2 --diffusion_algorithm diffusion_opd --teacher_pretrain".split()
    large, alike, none = (
        plan_of(*argv, str(path), schema=DiffusionRunConfig)
        for path in (tmp_path / "large", tmp_path / "lora", "no/such")
    )
    counted = [held(plan, 3) for plan in (large, alike)]
    assert counted[0]["teacher: weights"] > 4 * counted[0]["denoisers: weights"]
    assert counted[1]["teacher: weights"] == counted[1]["denoisers: weights"]
    assert counted[0]["activations of a micro-batch"] > 2 * counted[1]["activations of a micro-batch"]
    assert none.unknown == ("teacher",) and "teacher: weights" not in held(none, 3)


def test_an_update_of_two_experts_has_a_graph_of_the_other_one_beside(tmp_path) -> None:
    tiny_families.FAMILIES["wan_two_experts"]().save_pretrained(tmp_path)
    argv = f"--pretrain {tmp_path} --height 32 --width 32 --num_frames 5 --beta 0 --lora_rank 2".split()
    both, one = (
        parse_run(DiffusionRunConfig, [*argv, *also]).config for also in ([], ["--trainable_models", "transformer"])
    )
    planners = [DiffusionPlanner(each, computed_models(each), {}, CARD, 1, 1) for each in (both, one)]
    more = planners[0].computed.denoised(1, 1.0, backward=True).kept
    assert planners[0]._replayed()[0] == planners[1]._replayed()[0] + more > more > 0


def test_activations_that_are_kept_on_the_host_take_their_way_there_and_back(tmp_path) -> None:
    tiny_families.FAMILIES["flux"]().save_pretrained(tmp_path)
    argv = f"--pretrain {tmp_path} --height 32 --width 32 --plan_device h100-80gb --plan_world_size 1 --beta 0".split()
    argv += "--rollout_batch_size 2 --n_samples_per_prompt 4 --train_batch_size 8 --micro_train_batch_size 2".split()
    argv += "--num_steps 5 --gradient_checkpointing full --diffusion_algorithm flow_grpo".split()
    here, away = (plan_of(*argv, *own, schema=DiffusionRunConfig).phases[3]
                  for own in ([], ["--use_gradient_checkpointing_offload"]))  # fmt: skip
    kept = {item.name: item.bytes for item in away.items}["activations kept on the host"]
    ways = 2 * 4 * 4  # of four micro-batches at four steps, the fifth of which has no noise
    assert away.seconds - here.seconds == pytest.approx(ways * kept / HOST_MEMORY, rel=0.01)


@pytest.mark.parametrize("family", ["sd3", "z_image", "qwen_image"])
def test_a_denoising_step_of_many_samples_is_told_from_few(family, tmp_path, monkeypatch) -> None:
    """A network that takes its samples one by one among them, and one that keeps tables of its first forward."""
    monkeypatch.setenv("LIGHTRFT_CACHE", str(tmp_path / "cache"))
    tiny_families.FAMILIES[family]().save_pretrained(tmp_path / "model")
    for how in ("none", "full"):
        argv = f"--pretrain {tmp_path / 'model'} --height 32 --width 32 --gradient_checkpointing {how}".split()
        argv += ["--diffusion_algorithm", "flow_grpo"]
        config = parse_run(DiffusionRunConfig, argv).config
        computed = Computed(config, pipeline_policy(config))
        for guidance, backward in ((4.5, False), (1.0, True)):
            assert computed.denoised(9, guidance, backward) == computed._denoised(9, guidance, backward)


def test_texts_in_the_encoders_are_counted(tmp_path) -> None:
    tiny_families.FAMILIES["z_image"]().save_pretrained(tmp_path)
    config = parse_run(DiffusionRunConfig, ["--pretrain", str(tmp_path), "--height", "32", "--width", "32"]).config
    policy = pipeline_policy(config)
    planner = DiffusionPlanner(config, {"policy": Computed(config, policy)}, {}, CARD, 1, 1)
    encoder = policy.family.pipeline.text_encoder
    ids = torch.zeros(8, policy.family.text_length, dtype=torch.long, device="meta")
    states = encoder(input_ids=ids, output_hidden_states=True).hidden_states
    assert planner._encoding().bytes == sum(state.nbytes for state in states)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("--diffusion_algorithm ddpo", "ddpo trains models that predict noise .DDIM., and this one"),
        ("--num_frames 5", "num_frames 5 is of videos"),
        ("--source_pixels 4096", "this model edits none"),
        ("--trainable_models transformer_2", "this model has no 'transformer_2'"),
        ("--negative_prompt blurred --guidance_scale 3", "it reads no negative prompt"),
        (
            "--diffusion_algorithm reward_fl --differentiable_reward rewards.py:soft --n_samples_per_prompt 1 "
            "--max_timestep_boundary 0.5",
            "choose between two experts, and this model has one",
        ),
    ],
)
def test_what_no_model_of_a_family_follows_is_refused_by_its_plan(settings, told) -> None:
    named = ["--pretrain", "black-forest-labs/FLUX.1-dev", "--height", "64", "--width", "64"]
    with pytest.raises(ConfigError, match=told):
        pipeline_policy(parse_run(DiffusionRunConfig, [*named, *settings.split()]).config)


@pytest.mark.parametrize(
    ("size", "told"), [((32, 32, 6), r"takes 4 n \+ 1 frames"), ((40, 33, 5), "must be multiples"), ((32, 32, 5), None)]
)
def test_sizes_of_a_model_that_is_not_planned_are_checked_before_it_is_loaded(size, told, tmp_path) -> None:
    tiny_families.FAMILIES["hunyuan_video15"]().save_pretrained(tmp_path)
    named = [word for name, value in zip(("height", "width", "num_frames"), size) for word in (f"--{name}", str(value))]
    config = parse_run(DiffusionRunConfig, ["--pretrain", str(tmp_path), *named]).config
    with pytest.raises(ConfigError, match=told) if told else nullcontext():
        assert pipeline_policy(config) is None


def test_the_cache_of_an_engine_is_of_what_each_kind_of_layer_keeps() -> None:
    for text, wanted in (
        (Qwen2Config(), 2 * 32 * 32 * 128 * 2),
        (Gemma3TextConfig(), 2 * (4 + 22 / 2) * 4 * 256 * 2),  # of 26 layers 22 keep a window of 4,096
        (Qwen3_5TextConfig(), 2 * 8 * 4 * 256 * 2),  # of 32 layers 24 keep a state
        (DeepseekV3Config(), 61 * (512 + 64) * 2),
    ):
        shape = VLShape.__new__(VLShape)
        shape.text = text
        assert shape.cache_bytes(2, 8192) == wanted, text.model_type
