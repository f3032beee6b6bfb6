"""A run in at most three lines, before anything heavy is imported."""

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import load_config
from lightrft_visual.config.summary import MOST_LINES, WIDTH, in_lines
from lightrft_visual.config.vl import RunConfig


def test_a_run_is_said_with_what_differs_from_the_defaults():
    argv = ["--pretrain", "some/model", "--prompt_data", "rows.jsonl", "--max_steps", "7", "--lora_rank", "4"]
    first, second = in_lines(load_config(RunConfig, [*argv, "--remote_rm_url", "http://host/score"]))
    assert first.startswith("group_norm of some/model on rows.jsonl: LoRA rank 4 in fp32 on 1 rank, ZeRO-2; rewards: ")
    assert "max_steps 7" in second and "pretrain" not in second and "http://host/score" in first


def test_many_settings_take_no_more_lines_than_there_is_room():
    lines = in_lines(load_config(RunConfig, ["--seed", "7", "--kl_estimator", "k3", "--run_name", "x" * 30]))
    assert len(lines) == 1 + MOST_LINES and lines[-1].endswith("more in config.resolved.yaml")
    assert max(map(len, lines)) < WIDTH + 60


def test_the_rewards_of_a_run_that_names_none_are_the_task_s_or_the_environment_s():
    for given, told in (([], "those of the task"), (["--environment", "mine.py:Env"], "those of the environment")):
        (first, *_) = in_lines(load_config(RunConfig, given))
        assert f"; rewards: {told}; output " in first


def test_a_run_that_draws_is_said_by_its_algorithm():
    lines = in_lines(DiffusionRunConfig())
    assert lines[0].startswith("flow_grpo of embedded on embedded: ") and len(lines) == 1
