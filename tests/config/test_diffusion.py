"""Diffusion configurations that cannot work are refused before any model loads."""

from pathlib import Path

import pytest

from lightrft_visual.config import registry
from lightrft_visual.config.diffusion import DiffusionRunConfig, evaluation_sampling, rollout_noise, rollout_sampling
from lightrft_visual.config.load import load_config, write_resolved
from lightrft_visual.config.spellings import DIFFUSION_PRESET
from lightrft_visual.errors import ConfigError
from lightrft_visual.trainer.start import with_reward


def load(*arguments: str) -> DiffusionRunConfig:
    return load_config(DiffusionRunConfig, list(arguments), preset=DIFFUSION_PRESET)


REWARD_FL = ("--diffusion_algorithm", "reward_fl")
AWM = ("--diffusion_algorithm", "awm")
NFT = ("--diffusion_algorithm", "diffusion_nft")
DPO = ("--diffusion_algorithm", "diffusion_dpo")
OPD = ("--diffusion_algorithm", "diffusion_opd", "--teacher_pretrain", "m")
BEST = ("--best_metric", "eval_reward")
PAIRS = (*DPO, "--pair_data", "embedded")


@pytest.mark.parametrize(
    "arguments,message",
    (
        (["--sigmas", "0.9", "0.0", "--trajectory", "sde"], "at least 2"),
        (["--diffusion_algorithm", "ddpo", "--sigmas", "0.9,0.5"], "schedule"),
        (["--num_steps", "2", "--sigmas", "[0.9, 0.5]", "--timesteps", "[900]"], "equal length"),
        (["--train_batch_size", "50"], "divide"),
        (["--n_samples_per_prompt", "1", "--train_batch_size", "8"], "at least 2"),
        (["--diffusion_algorithm", "dance_grpo", "--trajectory", "sde"], "by trajectory dance, not sde"),
        (["--trajectory", "sde_reflow", "--noise_level", "0.7"], "has none"),
        (["--trajectory", "cps", "--grpo_guard", "true"], "Gaussian"),
        (["--sde_window_range", "0", "3"], "sde_window_size"),
        (["--sde_window_range", "0", "--sde_window_size", "2"], "first step and the end"),
        (["--sde_window_range", "0", "1", "--sde_window_size", "2"], "does not fit"),
        (["--diffusion_algorithm", "reward_fl", "--final_timestep", "9"], "final_timestep"),
        ([*REWARD_FL, "--mid_timestep", "-1"], "mid_timestep"),
        ([*REWARD_FL, "--min_timestep_boundary", "0.9", "--max_timestep_boundary", "0.5"], "min_timestep_boundary"),
        ([*REWARD_FL, "--sigmas", "1,0.5,0", "--mid_timestep", "2", "--final_timestep", "2"], "no step from mid"),
        (["--sde_window_size", "8"], "sde_window_size 8 must be below num_steps"),
        (["--trajectory", "cps", "--noise_level", "2"], "noise_level is 2.0; .* below 2"),
        (["--guidance_scale", "1", "--guidance_scale_2", "3"], "leave guidance_scale_2 3.0 out"),
        (["--eval_samples_per_prompt", "8"], "belongs to vision-language runs"),
        (["--grpo_guard", "true", "--diffusion_algorithm", "diffusion_nft"], "grpo_guard"),
        (["--diffusion_algorithm", "ddpo", "--family", "sd3"], "use one of family sd15, or"),
        (["--family", "sd15"], "or diffusion_algorithm ddpo or dpok"),
        (["--diffusion_algorithm", "awm", "--family", "sd15"], "leave scheduler"),  # the embedded SD3's
        ([*AWM, "--family", "sd15", "--pretrain", "m", "--trajectory", "dance"], "by trajectory ode or sde, not dance"),
        (["--pair_data", "embedded"], "pair_data belongs to diffusion_algorithm diffusion_dpo"),
        ([*PAIRS, "--prompt_data", "rows.csv"], "takes the place of prompt_data"),
        ([*PAIRS, "--n_samples_per_prompt", "4"], "a pair is two samples"),
        ([*DPO, "--n_samples_per_prompt", "15", "--train_batch_size", "8"], "15 must be even"),
        ([*DPO, "--gdpo", "true"], "ranks samples by their reward"),
        ([*DPO, "--train_batch_size", "1"], "compares 2 samples in one update"),
        (["--diffusion_algorithm", "awm", "--adv_clip_max", "0"], "must be positive"),
        ([*NFT, "--beta", "0.01"], "the KL of diffusion_nft is nft_kl_beta"),
        (["--nft_beta", "0.1"], "belongs to diffusion_nft; here 0.1 would do nothing"),
        ([*REWARD_FL, "--timestep_fraction", "0.5"], "timestep_fraction belongs to other algorithms"),
        ([*REWARD_FL, "--timestep_choice", "random"], "timestep_choice belongs to other algorithms"),
        ([*REWARD_FL, "--adv_clip_max", "3"], "adv_clip_max belongs to algorithms with advantages"),
        ([*OPD, "--adv_clip_max", "3"], "adv_clip_max belongs to algorithms with advantages"),
        ([*DPO, "--adv_clip_max", "3"], "adv_clip_max belongs to algorithms with advantages"),
        ([*PAIRS, "--adv_clip_max", "3"], "adv_clip_max belongs to algorithms with advantages"),
        ([*DPO, "--chosen_key", "win"], "chosen_key belongs to pair_data"),
        (["--rejected_key", "lose"], "rejected_key belongs to pair_data"),
        ([*NFT, "--kl_form", "published"], "algorithms of SDE steps of flow models"),
        (["--diffusion_algorithm", "ddpo", "--kl_form", "published"], "kl_form belongs to algorithms of SDE steps"),
        ([*NFT, "--same_latent", "true"], "same_latent with trajectory ode draws one image many times"),
        (["--diffusion_algorithm", "diffusion_opd", "--pretrain", "m"], "learns from: give both, or none"),
        (["--min_sigma", "0.3"], "finished samples"),
        (["--decay_type", "2"], "old policy"),
        (["--compile", "true", "--zero_stage", "3"], "zero_stage 0 to 2"),
        (["--eval_ema", "true"], "enable_ema"),
        (["--prompt_data", "rows.csv", "--guard.policy", "rollback"], "name a judge by --gold_recipe or --gold_fn"),
        ([*DPO, "--pair_data", "a.jsonl", "--gold_fn", "a.py:f"], "no rollouts .pairs of a file., and no held-out"),
        (["--prompt_data", "rows.csv", "--gold_fn", "a.py:f", "--gold_every", "0"], "gold has nothing to score"),
        (["--max_eval_samples", "0", "--gold_fn", "a.py:f", "--gold_every", "0"], "gold has nothing to score"),
        (["--prompt_data", "rows.csv", *BEST], "best_metric compares evaluations, and there are no held-out prompts"),
        (["--max_eval_samples", "0", *BEST], "best_metric compares evaluations"),
        (["--sp_size", "2", "--diffusion_algorithm", "dgpo", "--guidance_scale", "1"], "dgpo"),
        (["--sp_size", "2", *REWARD_FL], "reward_fl"),
        (["--sp_size", "2", "--gradient_accumulation_steps", "4"], "set train_batch_size"),
    ),
)
def test_refusals(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*arguments)


@pytest.mark.parametrize("arguments,beta", (([], 0.01), (["--beta", "0"], 0.0), (["--beta", "0.1"], 0.1)))
def test_dpok_has_a_kl_by_default(arguments: list[str], beta: float) -> None:
    config = load("--pretrain", "model", "--prompt_data", "rows.csv", "--diffusion_algorithm", "dpok", *arguments)
    assert config.algorithm.beta == registry.diffusion_algorithms.load("dpok")(config).beta == beta
    assert config.only_advantages_count == (beta == 0)


def test_a_prediction_of_a_family_of_ones_own_is_named_where_an_algorithm_wants_another() -> None:
    with pytest.raises(ConfigError, match="flow_grpo trains models that predict a velocity, and this one predicts v:"):
        load_config(DiffusionRunConfig, []).check_prediction("v")


def test_a_loss_of_ones_own_sees_samples_of_advantage_0_too(monkeypatch) -> None:
    config = load("--pretrain", "model", "--prompt_data", "rows.csv", "--beta", "0")
    assert config.only_advantages_count
    own = type(config.algorithm.entry)("flow_grpo", lambda config: None, "")
    monkeypatch.setattr(registry.diffusion_algorithms, "_entries", {"flow_grpo": own})
    assert not config.only_advantages_count


def test_beta_of_other_algorithms_is_0_by_default() -> None:
    assert {load("--diffusion_algorithm", name).algorithm.beta for name in ("flow_grpo", "ddpo", "diffusion_nft")} == {
        0
    }


@pytest.mark.parametrize("name", ("flow_grpo", "dance_grpo", "diffusion_opd"))
def test_kl_form_published_is_taken_where_the_standard_deviation_holds_the_length_of_the_step(name: str) -> None:
    teacher = ["--teacher_pretrain", "model"] if name == "diffusion_opd" else []
    config = load("--diffusion_algorithm", name, "--kl_form", "published", *teacher)
    assert registry.diffusion_algorithms.load(name)(config).kl_form == "published"


@pytest.mark.parametrize("trajectory", ("cps", "sde_reflow"))
def test_kl_form_of_a_recipe_is_full_by_trajectories_whose_standard_deviation_does_not(trajectory: str) -> None:
    config = load("--config", "base/algorithm/diffusion/flow_grpo", "--trajectory", trajectory, "--noise_level", "1")
    assert config.algorithm.kl_form == "published"
    assert registry.diffusion_algorithms.load("flow_grpo")(config).kl_form == "full"


def test_every_algorithm_is_built_from_its_name() -> None:
    for entry in registry.diffusion_algorithms:
        teacher = ["--teacher_pretrain", "model"] if entry.teacher else []
        assert entry.load()(load("--diffusion_algorithm", entry.name, *teacher)) is not None


def test_num_steps_follows_a_given_schedule() -> None:
    config = load("--timesteps", "900", "300", "10", "--num_steps", "25")
    assert config.sampling.num_steps == rollout_sampling(config).num_steps == 3
    assert load("--sigmas", "1,0.5,0.2,0").sampling.num_steps == 4
    late = load("--timesteps", "900,300,10", *REWARD_FL, "--mid_timestep", "1", "--final_timestep", "2")
    assert registry.diffusion_algorithms.load("reward_fl")(late).num_steps == 3


OWN = ("--pretrain", "model", "--prompt_data", "rows.csv")


def figures(*arguments: str) -> tuple:
    c = load(*arguments)
    return c.sampling.num_steps, c.train.learning_rate, c.train.warmup_steps, c.train.lr_scheduler_type


@pytest.mark.parametrize("updates", [25, 41, 100, 151])
def test_warmup_steps_are_the_steps_of_warmup_however_many_updates_there_are(updates: int) -> None:
    config = load(*OWN, "--warmup_steps", "7")
    assert config.train.schedule(updates) == ("constant_with_warmup", 7)


def test_reward_fl_has_defaults_of_its_own(tmp_path: Path) -> None:
    reward_fl = (*OWN, "--diffusion_algorithm", "reward_fl")
    assert figures(*OWN) == (10, 3e-4, 0, "constant")
    assert figures(*reward_fl) == (8, 2.5e-6, 10, "constant")
    assert figures(*reward_fl, "--lr", "1e-5", "--warmup_steps", "0", "--num_steps", "9") == (9, 1e-5, 0, "constant")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("diffusion_algorithm: reward_fl\nlearning_rate: 1e-4\n")
    assert figures(*OWN, "--config", str(recipe)) == (8, 1e-4, 10, "constant")
    assert figures("--diffusion_algorithm", "reward_fl") == (8, 5e-4, 0, "constant")  # the embedded preset's


@pytest.mark.parametrize(
    "given, target",
    [
        ((), 0.75),
        (("--differentiable_reward", "shape_match"), 0.75),
        (("--differentiable_reward", "mine.py:bright"), None),
        (("--differentiable_reward", "mine.py:bright", "--score_target", "0.9"), 0.9),
    ],
)
def test_the_score_that_is_enough_of_the_embedded_reward_is_no_target_of_another_one(given, target) -> None:
    assert load("--diffusion_algorithm", "reward_fl", *given).algorithm.score_target == target


@pytest.mark.parametrize("name", registry.diffusion_algorithms.names())
def test_the_resolved_configuration_loads_to_the_same_one(name: str, tmp_path: Path) -> None:
    teacher = ["--teacher_pretrain", "model"] if registry.diffusion_algorithms[name].teacher else []
    config = load(*OWN, "--diffusion_algorithm", name, *teacher)
    assert load("--config", str(write_resolved(config, tmp_path / "resolved.yaml"))) == config


def test_settings_of_the_sampler() -> None:
    config = load("--trajectory", "cps", "--flow_shift", "3")
    assert rollout_sampling(config).trajectory == "cps" and rollout_sampling(config).num_steps == 8
    assert evaluation_sampling(config).trajectory == "ode" and evaluation_sampling(config).num_steps == 16
    assert registry.diffusion_algorithms.load("flow_grpo")(config).rule == "cps"
    assert registry.diffusion_algorithms.load("flow_grpo")(load("--trajectory", "sde_reflow")).rule == "reflow"
    guided = load("--guidance_scale", "4", "--cfg_in_training", "false", "--train_batch_size", "0")
    assert registry.diffusion_algorithms.load("flow_grpo")(guided).guidance_scale == 1.0


@pytest.mark.parametrize(
    "flags,told",
    [
        ("--train_batch_size 64", "or train_batch_size 128, max_epochs 1 and max_staleness 0: one update"),
        ("--train_batch_size 128 --max_epochs 2", "or train_batch_size 128"),
        ("--train_batch_size 128 --placement split --max_staleness 1", "max_staleness 0"),
        ("--train_batch_size 128 --diffusion_algorithm flow_dppo", r"set cfg_in_training true \("),
        ("--train_batch_size 128 --grpo_guard", r"set cfg_in_training true \("),
        ("--train_batch_size 64 --guidance_scale 1", None),
        ("--train_batch_size 64 --diffusion_algorithm dgpo", None),
        ("--train_batch_size 128", None),
    ],
)
def test_steps_without_guidance_that_are_compared_with_a_guided_rollouts_are_refused(flags: str, told: str) -> None:
    base = ["--guidance_scale", "4.5", "--cfg_in_training", "false"]
    if told is None:
        load(*base, *flags.split())
        return
    with pytest.raises(ConfigError, match=told):
        load(*base, *flags.split())


def test_what_each_algorithms_authors_do_is_the_default() -> None:
    ddpo = load(*OWN, "--family", "sd15", "--diffusion_algorithm", "ddpo")
    assert (ddpo.sampling.num_steps, ddpo.sampling.noise_level) == (50, 1.0)
    names = ("flow_grpo", "dance_grpo", "diffusion_nft")
    flow, dance, nft = (load(*OWN, "--diffusion_algorithm", name) for name in names)
    assert (flow.sampling.noise_level, flow.algorithm.timestep_choice) == (0.7, "first")
    assert (dance.sampling.noise_level, dance.algorithm.timestep_choice, dance.trajectory) == (0.3, "random", "dance")
    assert (nft.algorithm.timestep_choice, nft.algorithm.decay_counts, nft.trajectory) == ("random", "updates", "ode")
    reflow = load(*OWN, "--diffusion_algorithm", "diffusion_nft", "--trajectory", "sde_reflow")
    assert reflow.trajectory == "sde_reflow" and not rollout_noise(reflow).keep_path  # finished samples train it
    published = load("--config", "experiment/diffusion/sd3_5/online_grpo_ocr")
    assert published.algorithm.global_std and published.algorithm.detach_guidance


def test_the_usual_update_gives_way_to_the_whole_rollout_where_it_is_no_part_of_it() -> None:
    def update(flags: str) -> int:
        return load(*OWN, *flags.split()).train.train_batch_size

    assert update("") == update("--rollout_batch_size 4") == 96
    assert update("--rollout_batch_size 3") == 72 and update("--rollout_batch_size 2 --n_samples_per_prompt 4") == 8
    assert update("--train_batch_size 0") == 192 and update("--rollout_batch_size 2 --train_batch_size 96") == 48
    with pytest.raises(ConfigError, match=r"rollout_batch_size 8 \(the default\) .*groups_per_update 3; use 2 or 4"):
        update("--groups_per_update 3")


def test_pairs_of_a_file_need_no_reward_and_make_one_update_a_step() -> None:
    pairs = load("--pretrain", "model", *DPO, "--pair_data", "pairs.jsonl", "--rollout_batch_size", "6")
    assert pairs.offline and with_reward(pairs, registry.drawing_tasks) is pairs
    assert pairs.data.prompt_data == "pairs.jsonl"
    assert (pairs.sampling.n_samples_per_prompt, pairs.train.train_batch_size, pairs.updates(5)) == (2, 12, 5)
    evaluated = load("--pretrain", "model", *DPO, "--pair_data", "pairs.jsonl", "--eval_data", "rows.csv")
    with pytest.raises(ConfigError, match="no reward is given"):
        with_reward(evaluated, registry.drawing_tasks)
    assert not load(*DPO).offline and load(*PAIRS).data.prompt_data == "embedded"


def test_variants_of_flow_grpo_bring_their_windows() -> None:
    mixed, branching = (rollout_noise(load("--diffusion_algorithm", name)) for name in ("mix_grpo", "temp_flow_grpo"))
    assert (mixed.window_size, mixed.window_move) == (4, "slide")
    assert (branching.window_size, branching.window_move) == (1, "anywhere")
    assert load("--diffusion_algorithm", "temp_flow_grpo").sampling.same_latent and not load().sampling.same_latent
    assert rollout_noise(load("--diffusion_algorithm", "flow_dppo")).keep_means


@pytest.mark.parametrize("algorithm", [REWARD_FL, OPD, DPO, PAIRS])
def test_a_global_std_that_a_recipe_has_for_another_algorithm_is_said_to_do_nothing(algorithm, caplog):
    load(*algorithm, "--global_std", "true")
    assert "global_std 1: read by algorithms with advantages, and does nothing here" in caplog.text


def test_a_form_of_the_kl_that_a_recipe_has_for_another_trajectory_is_said_to_do_nothing(caplog):
    load("--config", "base/algorithm/diffusion/flow_grpo", "--trajectory", "cps")
    assert "kl_form published: read by trajectories sde and dance, and does nothing here" in caplog.text


def test_a_clip_range_that_nothing_reads_is_said_to_do_nothing(caplog):
    load("--diffusion_algorithm", "rwr", "--clip_range", "0.2")
    assert "clip_range 0.2: read by algorithm flow_grpo, dance_grpo" in caplog.text
    caplog.clear()
    load("--diffusion_algorithm", "awm", "--clip_range", "0.2")
    assert not caplog.text
