"""All that is wrong with a command is said in one answer."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightrft_visual.config import registry
from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.given_files import missing_files, refused_resume
from lightrft_visual.config.load import config_or_exit, parse_run
from lightrft_visual.config.spellings import DIFFUSION_PRESET
from lightrft_visual.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def error_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as found:
        parse_run(argv=list(argv))
    return str(found.value)


def missing(*argv: str) -> list[str]:
    return missing_files(parse_run(argv=[*argv, "--prompt_data", "embedded"]).config)


@pytest.mark.plugin("compat")
def test_names_values_and_sections_are_wrong_all_are_said_in_one_error():
    found = error_of(
        "--leraning_rate", "1e-6", "--n_samples_per_prompt", "many", "--top_p", "3", "--zero_stage", "4",
        "--seed", "7", "stray",
    )  # fmt: skip
    assert found.startswith("5 things are wrong:\n")
    for text in ("did you mean 'learning_rate'", "it takes: int", "top_p is 3.0", "zero_stage is 4", "'stray'"):
        assert text in found


def test_a_recipe_and_the_command_line_are_wrong_both_are_said(tmp_path):
    (tmp_path / "mine.yaml").write_text("train:\n  sede: 1\n  bf16: maybe\n")
    found = error_of("--config", str(tmp_path / "mine.yaml"), "--top_q", "0.5")
    assert all(text in found for text in ("3 things are wrong", "mine.yaml:2", "mine.yaml:3", "'top_q'"))
    found = error_of("--config", "no_such_recipe", "--top_q", "0.5")
    assert "no_such_recipe" in found and "'top_q'" in found


@pytest.mark.plugin("compat")
def test_settings_of_trl_that_ask_for_what_is_so_anyway_are_taken_with_a_line():
    run = parse_run(argv=["--use_vllm", "--report_to", "none", "--num_generations", "8"])
    assert run.config.rollout.n_samples_per_prompt == 8
    assert [note.split(" ")[0] for note in run.notes] == ["use_vllm", "report_to"]
    told = error_of("--use_vllm", "false", "--report_to", "wandb")
    assert "use_vllm is 'false'; write --engine_type hf" in told and "report_to is 'wandb'; write --use_wandb" in told


def test_files_that_are_not_there_are_all_named_at_once_without_torch(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    argv = ["--pretrain", "/no/model", "--prompt_data", "rows.jsonl,other.jsonl", "--reward_fn", "mine.py:score"]
    argv += ["--environment", "look.py:Look"]
    code = f"from lightrft_visual.config.load import config_or_exit\nconfig_or_exit(argv={argv})\n"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    told = [line for line in done.stderr.splitlines() if not line.startswith("import time")]
    assert done.returncode == 2 and told[0] == "error: 4 things are wrong:"
    assert [line.split(" does not exist")[0].strip() for line in told[1:]] == [
        "--pretrain: /no/model", "--prompt_data: other.jsonl", "--reward_fn: mine.py", "--environment: look.py",
    ]  # fmt: skip
    assert not any(line.rsplit("|", 1)[-1].strip() == "torch" for line in done.stderr.splitlines())


@pytest.mark.parametrize("wrong", ["--top_q", "--top_p", "--zero_stage", "--train_batch_size"])
def test_wrong_settings_and_missing_files_are_said_in_one_error(wrong, capsys):
    """Of an unknown name, of one section, of two, and of what several sections must agree on."""
    argv = ["--pretrain", "/no/model", "--reward_recipe", "none.yaml", wrong, "7"]
    argv += ["--temperature", "0"] if wrong == "--zero_stage" else []
    with pytest.raises(SystemExit):
        config_or_exit(argv=argv)
    told = capsys.readouterr().err
    assert wrong.strip("-") in told and ("temperature" in told) == (wrong == "--zero_stage")
    assert "--pretrain: /no/model does not exist" in told and "reward recipe none.yaml does not exist" in told
    with pytest.raises(SystemExit):
        config_or_exit(argv=[*argv, "--dry_run"])
    assert "does not exist" not in capsys.readouterr().err


def test_wrong_settings_beside_a_plug_in_the_names_that_it_adds_are_not_said_to_be_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(registry.scorers, "_entries", dict(registry.scorers._entries))
    text = "from lightrft_visual.config import registry\nregistry.scorers.register('mine')(lambda completions: 1)\n"
    (tmp_path / "mine.py").write_text(text)
    argv = ["--plugins", str(tmp_path / "mine.py"), "--components.mine", "1", "--top_q", "7"]
    with pytest.raises(ConfigError) as found:
        parse_run(argv=argv, files=missing_files)
    assert "top_q" in str(found.value) and "scorer" not in str(found.value)


@pytest.mark.parametrize(
    "setting, given, near",
    [("prompt_data", "embedded_zom", "embedded_zoom"), ("eval_data", "Embedded", "embedded")],
)  # fmt: skip
def test_a_built_in_name_with_a_slip_is_answered_with_the_nearest_before_a_hub_is_asked(setting, given, near):
    argv = {"pretrain": "embedded", "prompt_data": "embedded"} | {setting: given}
    config = parse_run(argv=[word for name, value in argv.items() for word in (f"--{name}", value)]).config
    assert missing_files(config) == [f"--{setting}: there is no {given}; did you mean {near!r}?"]


def test_missing_files_of_a_folder_above_the_working_directory_only_what_is_given_is_refused(tmp_path, monkeypatch):
    own = tmp_path / "home"
    own.mkdir()
    monkeypatch.chdir(own)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    assert missing_files(parse_run(argv=["--output_dir", "mine"]).config) == []
    (found,) = missing_files(parse_run(argv=["--output_dir", "mine", "--ckpt_path", f"{tmp_path}/kept"]).config)
    assert found.startswith(f"--ckpt_path: {tmp_path}/kept cannot be written")
    (own / "taken").touch()
    assert missing("--output_dir", "taken") == ["--output_dir: taken is a file, no folder"]
    (own / "lost").symlink_to("gone")
    told = f"--output_dir: {own}/lost is a link to gone, which does not exist"
    assert missing("--output_dir", "lost") == missing("--output_dir", "lost/run") == [told]


@pytest.mark.parametrize("setting", ["eval_data", "pretrain", "output_dir", "ckpt_path"])
def test_missing_files_the_url_of_a_cloud_s_storage_is_told_to_be_none_of_a_file(setting):
    (told,) = missing(f"--{setting}", "s3://bucket/run")
    assert told.startswith(f"--{setting}: s3://bucket/run is a URL; mount or copy that storage")


def test_missing_files_reward_that_names_no_function_of_a_file_is_told_how_to_be_written():
    for given in ("my_reward:score", "my_reward.py", "rewards.py:a,score"):
        wrong = given.rpartition(",")[2]
        assert f"--reward_fn: {wrong!r} names no function of a file: write path.py:function" in missing(
            "--reward_fn", given
        )
    assert missing("--reward_fn", "python:score") == []  # which a program gives
    told = "--reward_fn: 'ocr=0.5' names no function of a file: write reward.components.ocr=0.5"
    assert told in missing("--reward_fn", "ocr=0.5")


def test_missing_files_of_a_drawing_run_on_prompts_of_ones_own_names_the_reward(tmp_path):
    (tmp_path / "captions.txt").write_text("a red circle\n")
    argv = ["--prompt_data", str(tmp_path / "captions.txt")]
    (found,) = missing_files(parse_run(DiffusionRunConfig, argv, preset=DIFFUSION_PRESET).config)
    assert found.startswith("no reward is given; name one by --reward_fn path.py:name")
    scored = [*argv, "--components.shape_match", "1"]
    assert missing_files(parse_run(DiffusionRunConfig, scored, preset=DIFFUSION_PRESET).config) == []


@pytest.mark.parametrize(
    "text, told",
    [("def score(completions): ...\n", "no function or class 'scor'; did you mean 'score'"),
     ("def score(:\n", "is not Python: invalid syntax (line 1)"),
     ("from other import *\n", ""), ("if True:\n    scor = lambda a: a\n", "")],
)  # fmt: skip
def test_a_function_that_its_file_does_not_define_is_named_without_running_it(tmp_path, text, told):
    (tmp_path / "mine.py").write_text(text)
    found = missing("--reward_fn", f"{tmp_path}/mine.py:scor")
    assert [told in line for line in found] == ([True] if told else [])


def test_missing_files_of_a_remote_reward_by_path_names_the_file_or_the_function_that_is_not_there(tmp_path):
    (tmp_path / "mine.py").write_text("def reward_fun(data): ...\n")
    assert missing("--remote_rm_url", "judge=none.py") == [f"--remote_rm_url: none.py does not exist in {Path.cwd()}"]
    (found,) = missing("--remote_rm_url", f"http://localhost/score,{tmp_path}/mine.py")
    assert found.startswith(f"--remote_rm_url: {tmp_path}/mine.py has no function or class 'reward_func'; did you mean")


def test_missing_files_of_a_recipe_names_functions_that_are_not_there_and_models_that_nothing_gives(tmp_path):
    (tmp_path / "mine.py").write_text("def score(completions): ...\n")
    recipe = f"{{'*': [[func, none.py:f, 1], [func, '{tmp_path}/mine.py:scor', 1], [model, ./judge, 1]]}}"
    for name, argv in (("reward_recipe", []), ("gold_recipe", ["--components.exact", "1"])):
        found = missing(f"--{name}", recipe, *argv)
        assert [told in line for told, line in zip(("none.py does not", "'score'", "./judge"), found, strict=True)]
    assert missing("--reward_recipe", "{'*': [[model, judge, 1]]}", "--reward_pretrain", "judge=org/model") == []


def test_missing_files_of_reward_fl_names_the_function_that_is_not_there_and_a_wrong_name_is_refused(tmp_path):
    def missing_in(reward: str) -> list[str]:
        argv = ["--diffusion_algorithm", "reward_fl", "--differentiable_reward", reward]
        return missing_files(parse_run(DiffusionRunConfig, argv, preset=DIFFUSION_PRESET).config)

    (tmp_path / "mine.py").write_text("def smooth(media, prompts, metadata): ...\n")
    assert missing_in("shape_match") == missing_in(f"{tmp_path}/mine.py:smooth") == []
    assert missing_in("none.py:smooth") == [f"--differentiable_reward: none.py does not exist in {Path.cwd()}"]
    assert "has no function or class 'smoth'; did you mean 'smooth'" in missing_in(f"{tmp_path}/mine.py:smoth")[0]
    with pytest.raises(ConfigError, match="no differentiable reward named 'shape_mach'; did you mean 'shape_match'"):
        missing_in("shape_mach")


def test_mixing_probabilities_of_another_number_than_the_data_sets_are_refused():
    found = error_of("--prompt_data", "rows.jsonl", "--prompt_data_probs", "0.5,0.5")
    assert "2 mixing probabilities for 1 data sets" in found


def test_missing_files_of_functions_with_a_space_behind_the_comma_finds_their_files(tmp_path):
    (tmp_path / "mine.py").write_text("def score(completions): ...\ndef other(completions): ...\n")
    assert missing("--reward_fn", f"{tmp_path}/mine.py:score, {tmp_path}/mine.py:other") == []


def test_a_recipe_a_scorer_a_checkpoint_and_a_url_that_are_none_are_named():
    assert missing("--reward_recipe", "none.yaml") == ["reward recipe none.yaml does not exist"]
    assert "did you mean 'numeric'" in missing("--reward_recipe", "{'*': [[rule, numerc, 1.0]]}")[0]
    assert "did you mean 'exact'" in missing("--components.exct", "1")[0]
    assert missing("--components.exact", "1") == []
    assert "no folder gone" in missing("--resume_from", "gone")[0]
    assert "write it as http://" in missing("--remote_rm_url", "localhost:5000/score")[0]
    assert missing("--remote_rm_url", "http://localhost:5000/score|http://other/x,judge=http://a") == []


def test_a_model_folder_that_is_none_is_named_and_a_hub_name_or_a_folder_near_a_built_in_name_taken(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("adapter", "embeded"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    (tmp_path / "embeded/config.json").write_text("{}")
    (tmp_path / "rows.jsonl").touch()
    for name, told in (
        ("outputs/run/checkpoint-final", "--pretrain: outputs/run/checkpoint-final does not exist"),
        ("/models/base", "--pretrain: /models/base does not exist"), (str(tmp_path), "has no config.json"),
        (str(tmp_path / "adapter"), "adapter of peft"),
        (str(tmp_path / "rows.jsonl"), "is a file; a model is a folder"),
    ):  # fmt: skip
        assert told in missing("--pretrain", name)[0]
    assert missing("--pretrain", "Qwen/Qwen2.5-VL-3B-Instruct") == missing("--pretrain", "embeded") == []


def test_a_folder_that_is_no_pipeline_is_named(tmp_path):
    def missing_of(pretrain):
        argv = ["--pretrain", str(pretrain), "--reward.components.ocr", "1"]
        return missing_files(parse_run(DiffusionRunConfig, argv, preset=DIFFUSION_PRESET).config, {"pretrain"})

    (tmp_path / "config.json").write_text("{}")
    assert missing_of(tmp_path) == [f"--pretrain: {tmp_path} has no model_index.json: name the model's own folder"]
    (tmp_path / "pytorch_lora_weights.safetensors").touch()
    assert "holds LoRA of a pipeline: give the pipeline that it is merged into" in missing_of(tmp_path)[0]
    (tmp_path / "model_index.json").write_text("{}")
    assert missing_of(tmp_path) == []  # a pipeline, whatever lies beside it


def test_packages_that_settings_need_and_that_are_not_installed_are_named(monkeypatch):
    monkeypatch.setattr("lightrft_visual.config.given_files.find_spec", lambda name: None)
    for name in ("sglang", "wandb", "liger_kernel"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = missing("--engine_type", "sglang", "--use_wandb", "--use_liger_kernel")
    assert [next(word for word in ("sglang", "wandb", "liger") if f"[{word}]" in line) for line in found] == [
        "sglang", "liger", "wandb",
    ]  # fmt: skip


def test_what_cannot_resume_is_refused_by_the_manifests(tmp_path):
    def refused(*argv: str) -> str:
        told = refused_resume(parse_run(argv=["--output_dir", str(tmp_path), *argv]).config)
        return told[0] if told else ""

    assert refused() == "" and f"no complete checkpoint in {tmp_path}" in refused("--resume")
    assert re.match(r"--resume \(--load_checkpoint\): no .*; leave it out at the first start$", refused("--resume"))
    assert refused("--resume_from=auto").startswith("--resume_from: no complete")
    for step, stage in ((1, 3), (2, 1)):
        folder = tmp_path / f"checkpoint-00000{step}"
        folder.mkdir()
        model = {"zero_stage": stage, "lora_rank": 0, "bf16": False}
        content = {"sequence": step, "resumable": True, "model": model}
        (folder / "manifest.json").write_text(json.dumps(content))
    (tmp_path / "checkpoint-000003").mkdir()
    (tmp_path / "checkpoint-000003" / "manifest.json").write_text("[")
    assert refused("--resume") == refused("--resume", "--zero_stage", "1") == ""  # ZeRO 1 and 2 have one form
    assert "was trained with lora_rank 0 (1 here)" in refused("--resume", "--lora_rank", "1")
    assert "zero_stage 1 (3 here), bf16 False (True here)" in refused("--resume", "--zero_stage", "3", "--bf16")
    first = str(tmp_path / "checkpoint-000001")
    assert "zero_stage 3 (2 here)" in refused("--resume_from", first)
    assert refused("--resume_from", first, "--zero_stage", "3") == refused("--resume_from", f"{first}9") == ""

    content["model"] |= {"kind_of_run": "diffusion"}
    (folder / "manifest.json").write_text(json.dumps(content))
    told = refused("--resume", "--lora_rank", "1")
    assert "is of a diffusion run, and this is a vision-language run" in told and "lora" not in told


@pytest.mark.parametrize("schema, options", [(None, {}), (DiffusionRunConfig, {"preset": DIFFUSION_PRESET})])
def test_held_out_prompts_of_a_built_in_task_are_the_default_and_of_another_or_beside_rows_are_refused(schema, options):
    read = [schema] if schema else []
    run = parse_run(*read, argv=["--prompt_data", "embedded", "--eval_data", "embedded"], **options)
    assert run.config.data.eval_data is None
    with pytest.raises(ConfigError, match="eval_data embedded is a built-in task"):
        parse_run(*read, argv=["--prompt_data", "mine.jsonl", "--eval_data", "embedded"], **options)
    for name in ("prompt_data", "eval_data"):
        with pytest.raises(ConfigError, match=f"{name}: the built-in task embedded stands alone"):
            parse_run(*read, argv=["--prompt_data", "a.jsonl", f"--{name}", "b.jsonl, embedded"], **options)
