"""Spellings, types, precedence, secrets and the resolved file."""

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrft_visual import launch
from lightrft_visual.config.command_line import parse_command_line
from lightrft_visual.config.leaves import Leaf, Setting, names_of
from lightrft_visual.config.load import OF_ENVIRONMENT, config_or_exit, merge, parse_run, resolved_yaml, write_resolved
from lightrft_visual.config.recipes import LayerReader
from lightrft_visual.config.spellings import PATHS, REMOVED, ROOTS
from lightrft_visual.config.summary import in_lines, what_runs
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError, nearest
from lightrft_visual.rewards.recipe import load_recipe, wrong_names

NAMES = names_of(RunConfig)
LEAVES = list(NAMES.leaves.values())


def refused(*argv: str, schema: type = RunConfig, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_run(schema, list(argv), **options)
    return str(caught.value)


def plain(*argv: str) -> RunConfig:
    """Without the embedded model's preset."""
    return parse_run(RunConfig, list(argv), preset=None).config


def tree_of(*argv: str) -> dict:
    return merge(NAMES, parse_command_line(list(argv), NAMES).settings)[0]


def spellings(leaf: Leaf, value: str) -> list[list[str]]:
    names = (leaf.path, leaf.name, leaf.name.replace("_", "-"))
    return [argv for name in names for argv in ([f"--{name}", value], [f"--{name}={value}"], [f"{name}={value}"])]


def given_by(*argv: str) -> tuple[list, Any]:
    """The leaves that a command line sets once, and the value."""
    (setting,) = parse_command_line(list(argv), NAMES).settings
    return NAMES.find(setting.name), setting.value


def test_every_spelling_reaches_its_leaf_with_the_value_given() -> None:
    for leaf in LEAVES:
        assert all(given_by(*argv) == ([(leaf, "")], "1") for argv in spellings(leaf, "1")), leaf.path


@pytest.mark.parametrize("text", ["true", "1e3", "null,", "[]'", "a = b: c", r"write \${x}", "{a", "~/x, -y"])
def test_every_spelling_of_an_odd_text_gives_the_same_config_and_so_does_the_resolved_file(
    tmp_path: Path, text: str
) -> None:
    config, *others = (plain(*argv) for argv in spellings(NAMES.leaves["data.system_prompt"], text))
    assert config.data.system_prompt == text.replace(r"\$", "$") and all(other == config for other in others)
    file = write_resolved(config, tmp_path / "deep" / "config.resolved.yaml")
    assert plain("--config", str(file)) == config


def test_bare_bools_are_on_and_no_turns_them_off() -> None:
    bools = [leaf for leaf in LEAVES if leaf.kind == "bool"]
    paths, names = [leaf.path for leaf in bools], [leaf.name for leaf in bools]
    on, off = (merge(NAMES, [Setting(path, value, "here") for path in paths])[0] for value in (True, False))
    for spelled in (names, paths):
        assert tree_of(*(f"--{name}" for name in spelled), "--seed=42") == on
    for spelled in ([f"--no_{name}" for name in names], [f"--no-{name}" for name in names]):
        assert tree_of(*spelled) == off
    assert tree_of(*(word for name in names for word in (f"--{name}", "false"))) == off


def test_values_take_the_type_of_their_field() -> None:
    config = plain(
        "--lr", "1e-4", "--adam_betas", "0.8", "0.99", "--top_k", "-1", "--bf16", "--freeze_prefix", "--local_rank=0"
    )
    assert config.train.actor_learning_rate == 1e-4
    assert config.train.adam_betas == [0.8, 0.99]
    assert config.rollout.top_k == -1
    assert config.model.bf16 is True
    assert config.model.freeze_prefix == "true"
    assert config.distributed.local_rank == 0
    for betas in ("adam_betas=[0.5, 0.6]", "--adam-betas=0.5,0.6"):
        assert plain(betas).train.adam_betas == [0.5, 0.6]
    assert plain("--kl_target", "0.1", "--kl_target", "None").algorithm.kl_target is None
    assert plain("--freeze_prefix", "visual,model.embed").model.freeze_prefix == "visual,model.embed"
    for names in ("target_modules=[q_proj,v_proj]", "target_modules=['q_proj', 'v_proj']"):
        assert plain(names).model.target_modules == "q_proj,v_proj"
    assert plain("prompt_data=[ab].json,part-[ab].jsonl").data.prompt_data == "[ab].json,part-[ab].jsonl"
    several = plain("--reward_fn", "a.py:f", "b.py:g", "--gold_fn", '["c.py:f", "d.py:g"]')
    assert (several.reward.reward_fn, several.guard.gold_fn) == ("a.py:f,b.py:g", "c.py:f,d.py:g")
    assert plain("--tools", "a.py:f", "b.py:g").episodes.tools == "a.py:f,b.py:g"
    assert plain("--system_prompt", "a = b").data.system_prompt == "a = b"
    both = plain("--eps_clip_low_high", "0.2", "0.28").algorithm
    assert (both.eps_clip, both.eps_clip_high) == (0.2, 0.28)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--n_sample_per_prompt", "8"], ("'n_sample_per_prompt'", "did you mean 'n_samples_per_prompt'")),
        (["--no_bf17"], ("no_bf17", "bf16")),
        (["--no_bf16=true"], ("did you mean 'bf16=false'",)),
        (["--resume", "auto"], ("output.load_checkpoint", "a folder, or auto, is --resume_from")),
        (["--qqqqq"], ("'qqqqq'", "--help")),
        (["--help"], ("`lightrft-visual train NAME --help`",)),
        (["-h"], ("`lightrft-visual train NAME -h`",)),
        pytest.param(["--lora_target", "q_proj"], ("--lora_target_modules",), marks=pytest.mark.plugin("compat")),
        (["--steps", "9"], ("similar settings: --eval_steps", "--max_steps")),
        (["--num_inference_steps", "9"], ("belongs to diffusion runs",)),
        pytest.param(["--beta", "0.1"], ("--init_kl_coef",), marks=pytest.mark.plugin("compat")),
        (["trainer.sede=1"], ("did you mean 'seed'",)),
        (["train=3"], ("section", "train.")),
        (["--seed", "x"], ("train.seed", "'x'", "int", "command line")),
        (["--bf16=maybe"], ("model.bf16", "bool")),
        (["--adam_betas", "[0.9"], ("train.adam_betas", "not YAML")),
        (["--seed"], ("--seed takes a value (int)",)),
        (["--run_name", "--seed", "1"], ("--run_name takes a value", "--run_name=--seed")),
        (["--system_prompt", "Be", "brief"], ("'brief'", "--system_prompt", "in quotes")),
        (["--eps_clip_low_high", "0.2"], ("2 values",)),
        (["--top_p", "2"], ("top_p is 2.0", "rollout.top_p: command line")),
        (["--run_name", "${nothing.here}"], ("output.run_name", "nothing.here")),
        (["--plugins", "${sed}"], ("plugins (command line)", "'sed' not found")),
    ],
)  # fmt: skip
def test_mistakes_name_the_setting_and_the_way_out(argv: list[str], parts: tuple[str, ...]) -> None:
    message = refused(*argv)
    assert all(part in message for part in parts), message


def test_aliases_set_the_field_they_name() -> None:
    aliases = [(name, NAMES.leaves[paths[0]]) for name, paths in NAMES.aliases.items() if len(paths) == 1]
    assert aliases
    for alias, leaf in aliases:
        value = {"bool": "false", "number": "3", "text": "x", "list": "1", "mapping": "{a: 1}"}[leaf.kind]
        assert given_by(f"--{alias}", value) == given_by(f"{alias}={value}") == ([(leaf, "")], value)


def test_settings_of_the_engine_are_read_with_a_dot() -> None:
    for name in (name for name in NAMES.leaves if name.startswith("rollout.engine_") and not name.endswith("kwargs")):
        assert NAMES.find(name.removeprefix("rollout.").replace("_", ".", 1)) == [(NAMES.leaves[name], "")]
    assert NAMES.find("engine.enable_sleep") == [(NAMES.leaves["rollout.enable_engine_sleep"], "")]
    assert NAMES.find("vllm_kv_cache_dtype") == [(NAMES.leaves["rollout.engine_kv_cache_dtype"], "")]
    leaf = NAMES.leaves["rollout.engine_kwargs"]
    assert NAMES.find("engine.kwargs.max_logprobs") == [(leaf, "max_logprobs")]


def test_precedence_is_defaults_preset_recipe_command_line(tmp_path: Any) -> None:
    preset, recipe = tmp_path / "preset.yaml", tmp_path / "recipe.yaml"
    preset.write_text("train: {seed: 1, max_steps: 1, max_epochs: 2}\n")
    recipe.write_text("train:\n  seed: 2\n  max_steps: 2\n")
    run = parse_run(RunConfig, ["--seed", "3", "--config", str(recipe)], preset=str(preset))
    train = run.config.train
    assert (train.num_episodes, train.max_epochs, train.max_steps, train.seed) == (1, 2, 2, 3)
    assert run.sources == {
        "train.max_epochs": f"{preset}:1",
        "train.max_steps": f"{recipe}:3",
        "train.seed": "command line",
    }


@pytest.mark.plugin("embedded")
@pytest.mark.parametrize("root", ROOTS, ids=[root.kind for root in ROOTS])
def test_the_preset_is_that_of_the_schemas_kind_unless_another_is_given(root: Any) -> None:
    assert parse_run(root.schema, []).config == parse_run(root.schema, [], preset=root.preset).config


def test_a_preset_that_is_not_there_is_told_as_the_embedded_models_recipe() -> None:
    with pytest.raises(ConfigError, match="^the recipe of the embedded model: no config 'embedded/mine'"):
        parse_run(RunConfig, [], preset="embedded/mine")


def test_the_preset_belongs_to_the_embedded_model_only() -> None:
    assert parse_run(RunConfig, []).config.rollout.rollout_batch_size == 32
    assert parse_run(RunConfig, ["--pretrain", "Qwen/Qwen2.5-VL-3B-Instruct"]).config == plain(
        "--pretrain", "Qwen/Qwen2.5-VL-3B-Instruct"
    )


@pytest.mark.parametrize(
    "words, steps",
    [
        ("", 240), ("--num_episodes 1", -1), ("--num_train_epochs 1", -1), ("--num_episodes 1 --max_steps 7", 7),
        ("--config {recipe}", -1), ("--config {recipe} --max_steps 7", 7),
    ],
)  # fmt: skip
def test_passes_that_are_asked_for_count_before_the_steps_of_the_preset(words: str, steps: int, tmp_path: Any) -> None:
    (tmp_path / "recipe.yaml").write_text("train: {num_episodes: 2}\n")
    argv = words.format(recipe=tmp_path / "recipe.yaml").split()
    assert parse_run(RunConfig, argv).config.train.max_steps == steps


@pytest.mark.parametrize(  # each form of a secret: tests/rewards/remote/test_client.py
    "url",
    [
        "http://a/x,http://h/s?a=1&api_key=secret1",
        "https://h/hf_secret1AAAABBBBCCCCDDDDEEEEFFFFGGGG/score",
    ],
)
def test_secrets_in_urls_are_refused_and_never_written(url: str) -> None:
    message = refused("--remote_rm_url", url)
    assert "reward.remote_rm_url" in message and "reward_token_env" in message and "secret1" not in message
    config = RunConfig()
    config.reward.remote_rm_url = url
    assert "secret1" not in resolved_yaml(config) and "***" in resolved_yaml(config)


FLOW = '{"*": [[func, f.py:f, 1.0, {api_key: secret1, token: \'secret1\', "n": 2, max_tokens: a}]]}'
BLOCK = """
yes:
  - type: func
    key: f.py:f
    weight: 1.0
    kwargs: {question: "is {api_key: x} there?"}
"*":
  - type: func
    key: f.py:f
    weight: 1.0
    kwargs:
      api_key: secret1
      n: 2
"""


ANCHORS = """
"*":
  - type: func
    key: f.py:f
    weight: 1.0
    kwargs:
      api_key: |
        secret1
      n: &own 2
      m: *own
"""


HEADERS = '{"*": [[func, f.py:f, 1.0, {headers: {api_key: [secret1], X-API-Key: secret1}, eos_token: 7}]]}'


@pytest.mark.parametrize("recipe", [FLOW, BLOCK, ANCHORS, HEADERS])
def test_secrets_of_a_recipe_are_not_written_and_the_rest_loads_to_the_same(tmp_path: Path, recipe: str) -> None:
    config = plain("--reward_recipe", recipe)
    file = write_resolved(config, tmp_path / "config.resolved.yaml")
    assert "secret1" not in file.read_text() and not any("secret1" in line for line in in_lines(config))
    written = yaml.safe_load(plain("--config", str(file)).reward.reward_recipe)
    assert json.dumps(written).replace("***", "secret1") == json.dumps(yaml.safe_load(recipe.strip())).replace(
        "1\\n", "1"
    )
    (told,) = wrong_names(plain("--config", str(file)).reward)
    assert "api_key is ***, as the file of a run has it; give the value" in told


def test_what_followed_from_other_settings_follows_them_again_where_a_runs_file_is_started_with_others(tmp_path):
    averaged = ("--config", str(write_resolved(plain("--enable_ema"), tmp_path / "averaged.yaml")))
    ahead = "--placement", "split", "--max_staleness", "1"
    ahead = ("--config", str(write_resolved(plain(*ahead), tmp_path / "ahead.yaml")))
    assert plain(*averaged).output.eval_ema and not plain(*averaged, "--no_enable_ema").output.eval_ema
    assert plain("--config", str(write_resolved(plain(), tmp_path / "a.yaml")), "--enable_ema").output.eval_ema
    assert not plain("--eval_ema", "false", "--enable_ema").output.eval_ema
    (tmp_path / "recipe.yaml").write_text("output: {eval_ema: false}")  # and of enable_ema nothing
    assert not plain("--config", str(tmp_path / "recipe.yaml"), "--enable_ema").output.eval_ema
    assert plain(*ahead).asynchronous.behaviour(False)
    assert not plain(*ahead, "--tis_mode", "token").asynchronous.behaviour(True)
    assert plain(*ahead, "--max_staleness", "0").asynchronous.ahead == 0


def test_secrets_of_reward_settings_are_not_written_and_are_asked_for_again(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def f(completions): ...\n")
    given = ["--reward.components.mine=1", f"--reward.kwargs.mine.scorer={tmp_path}/f.py:f"]
    config = plain(*given, "--reward.kwargs.mine.api_key=secret1", "--reward.kwargs.mine.n=2")
    assert config.reward.kwargs["mine"]["api_key"] == "secret1" and not wrong_names(config.reward)
    file = write_resolved(config, tmp_path / "config.resolved.yaml")
    again = plain("--config", str(file))
    assert "secret1" not in file.read_text() and again.reward.kwargs["mine"]["n"] == 2
    assert "component 'mine': api_key is ***" in wrong_names(again.reward)[0]
    assert plain("--config", str(file), "--reward.kwargs.mine.api_key=secret1") == config


def test_numbers_and_headers_that_are_secrets_are_not_written_and_ids_of_tokens_are(tmp_path: Path) -> None:
    recipe = '{"*": [[func, f.py:f, 1.0, {password: 12345678, eos_token: 151645}]]}'
    written = resolved_yaml(plain("--reward_recipe", recipe))
    assert "12345678" not in written and "151645" in written
    with pytest.raises(ConfigError, match=r"entry 1: password is \*\*\*"):
        load_recipe(yaml.safe_load(written)["reward"]["reward_recipe"])
    given = {"password": 12345678, "eos_token": 151645, "use_secret": True, "headers": {"secret-key": "secret1"}}
    config = plain("--reward.components.mine=1", f"--reward.kwargs.mine={json.dumps(given)}")
    written = resolved_yaml(config) + "".join(in_lines(config))
    assert "12345678" not in written and "secret1" not in written
    found = yaml.safe_load(resolved_yaml(config))["reward"]["kwargs"]["mine"]
    assert (found["eos_token"], found["use_secret"], found["password"]) == (151645, True, "***")


@pytest.mark.parametrize(
    "value", ["sk-proj-abcdefghijklmnopqrstuv", "Bearer secret1secret1", "Basic dXNlcjpzZWNyZXQ=", "the-judges-own"]
)
def test_values_that_are_secrets_by_themselves_are_not_written_for_rewards_and_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "the-judges-own")
    (tmp_path / "f.py").write_text("def f(completions): ...\n")
    settings = {"key": value, "headers": [{"X-Auth": value}], "grid": [["X-Auth", value]]}
    settings |= {"note": "the ring bearer is seen", "n": "hf_my_model_v2"}
    given = [
        "--reward.components.mine=1",
        f"--reward.kwargs.mine={json.dumps({'scorer': f'{tmp_path}/f.py:f'} | settings)}",
    ]
    recipe = json.dumps({"*": [["func", f"{tmp_path}/f.py:f", 1.0, settings]]})
    for config in (plain(*given), plain("--reward_recipe", recipe)):
        file = write_resolved(config, tmp_path / "config.resolved.yaml")
        written = file.read_text()
        assert value not in written and "ring bearer is seen" in written and "hf_my_model_v2" in written
        assert "key is ***" in wrong_names(plain("--config", str(file)).reward)[0]
    assert plain("--config", str(write_resolved(plain(), tmp_path / "none.yaml"))) == plain()


def test_what_only_looks_like_a_secret_is_written_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DB_PASSWORD", "postgres")
    monkeypatch.setenv("JUDGE_API_KEY", "the-judges-own")
    settings = {
        "style": "Basic composition/lighting",
        "model": "hf_internaltestingmodelname16",
        "judge": "/data/postgres/judge",
    }
    entry = {"type": "func", "key": "/data/the-judges-own/f.py:f", "weight": 1.0, "kwargs": settings}
    recipe = json.dumps({"secret": [entry, ["rule", "exact", 1]]})
    given = ["--reward.components.mine=1", f"--reward.kwargs.mine={json.dumps({'scorer': 'exact'} | settings)}"]
    for config in (plain(*given), plain("--reward_recipe", recipe)):
        assert plain("--config", str(write_resolved(config, tmp_path / "config.resolved.yaml"))) == config


def test_tokens_of_a_model_are_no_secrets_and_secrets_at_any_depth_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def f(completions): ...\n")
    given = ["--reward.components.mine=1", f"--reward.kwargs.mine.scorer={tmp_path}/f.py:f"]
    tokens = ["--reward.kwargs.mine.yes_token=Yes", "--reward.kwargs.mine.stop_token=<|im_end|>"]
    config = plain(*given, *tokens)
    assert plain("--config", str(write_resolved(config, tmp_path / "plain.yaml"))) == config
    headers = "--reward.kwargs.mine.headers={Authorization: [secret1, secret12]}"
    deep = plain(*given, headers, "--engine_kwargs.hf_token=secret111")
    file = write_resolved(deep, tmp_path / "deep.yaml")
    assert "secret1" not in file.read_text()
    assert "rollout: hf_token is ***" in refused("--config", str(file))
    again = plain("--config", str(file), "--engine_kwargs.hf_token=secret111")
    assert "Authorization is ***" in wrong_names(again.reward)[0]


def test_ordinary_urls_and_paths_are_no_secrets() -> None:
    for url in (
        "http://host:8000/score?version=2&max_tokens=5&monkey=1",
        "https://host/hf_my_reward_model_v2",
        "http://h/s?scorer=aesthetic",
    ):
        assert resolved_yaml(plain("--remote_rm_url", url)).count(url) == 1


def test_a_key_given_to_use_wandb_is_never_repeated(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        config_or_exit(RunConfig, ["--use_wandb", "abc123key"], preset=None)
    told = capsys.readouterr().err
    assert "abc123key" not in told and "WANDB_API_KEY" in told and "output.use_wandb" in told


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["--target_modules", "q_proj", "v_proj"], "model.target_modules", "q_proj,v_proj"),
        pytest.param(
            ["--lora_target_modules", "q_proj", "v_proj", "--bf16"], "model.target_modules", "q_proj,v_proj",
            marks=pytest.mark.plugin("compat"),
        ),
        (["--prompt_data", "a", "b", "c.jsonl,d"], "data.prompt_data", "a,b,c.jsonl,d"),
        (["--remote_rm_url", "http://a/b?c=1", "http://c/d", "seed=3"], "reward.remote_rm_url", "http://a/b?c=1,http://c/d"),
        (['--remote_rm_url=["http://a/b","http://c/d"]'], "reward.remote_rm_url", "http://a/b,http://c/d"),
    ],
)  # fmt: skip
def test_settings_that_hold_lists_take_several_words(argv: list[str], path: str, value: str) -> None:
    assert merge(NAMES, parse_command_line(argv, NAMES).settings)[0][path.split(".")[0]][path.split(".")[1]] == value


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("output_dir=~/runs/x", "{home}/runs/x"),
        ("image_root=~/a,~/b", "{home}/a,~/b"),
        ("prompt_data=~/a.jsonl,/b~/c, ~/d", "{home}/a.jsonl,/b~/c, {home}/d"),
        ("reward_pretrain=good=~/rm,other=/x/~y", "good={home}/rm,other=/x/~y"),
        ("run_name=~/x", "~/x"),
    ],
)
def test_a_tilde_is_the_home_folder_in_every_path(
    setting: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    name, _, text = setting.partition("=")
    (tmp_path / "recipe.yaml").write_text(f"{name}: {json.dumps(text)}\nckpt_path: '${{output.output_dir}}/c'\n")
    section, _, leaf = NAMES.find(name)[0][0].path.partition(".")
    read = LayerReader(NAMES, ()).read(str(tmp_path / "recipe.yaml"))
    tree = merge(NAMES, read)[0]
    assert tree[section][leaf] == tree_of(setting)[section][leaf] == value.format(home=tmp_path)
    assert tree.output.ckpt_path == f"{tree.output.output_dir}/c"


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.kind)
def test_every_setting_that_names_a_path_is_known_as_one(root: Any) -> None:
    ending = re.compile(r"(_dir|_path|_root|_data|pretrain|_fn|_recipe|resume_from)$")
    leaves = [leaf for leaf in names_of(root.schema).leaves.values() if leaf.kind == "text"]
    assert {leaf.name for leaf in leaves if ending.search(leaf.name)} <= set(PATHS)


def test_a_mistake_repeats_no_secret_of_a_stray_word_or_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "secret1" not in refused("--remote_rm_url", "http://a", "http://user:secret1@host")
    monkeypatch.setenv("TOKEN", "secret1")
    for text in ("${oc.env:TOKEN}", "${ oc.env:TOKEN}", "${\toc.env:TOKEN}", "${oc.decode:${ oc.env:TOKEN}}"):
        assert "reads the environment" in refused("--run_name", text) and "secret1" not in refused("--run_name", text)
        inside = refused("--reward.kwargs.mine", json.dumps({"key": text}))
        assert "reads the environment" in inside


@pytest.mark.parametrize(
    "text",
    ("${oc.${a}:TOKEN}", "${${a}:TOKEN}", "${${a}.${b}:TOKEN}", "${oc.${${a}}:TOKEN}", "${oc.${oc.decode:env}:TOKEN}"),
)
def test_a_resolver_whose_name_is_made_of_others_is_refused_as_reading_the_environment(text: str) -> None:
    assert "reads the environment" in refused("--run_name", text)


@pytest.mark.parametrize("text", ("${a.${b}}:c", "${a}: ${b}", "{a: ${b}}, ${c}:"))
def test_a_key_that_is_made_of_others_reads_no_environment(text: str) -> None:
    assert not OF_ENVIRONMENT.search(text)


@pytest.mark.parametrize("repeated", ("${", "${a${b}", "${${a}", "${ ", " ", "\\t", "$"))
def test_a_long_text_is_searched_for_the_environment_in_time_by_its_length(repeated: str) -> None:
    begin = time.perf_counter()
    OF_ENVIRONMENT.search("${" + repeated * (100_000 // len(repeated)))
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("argv", "dry"),
    [
        (["--dry_run", "true"], True),
        (["--dry-run"], True),
        (["--dry_run", "false"], False),
        (["--dry_run", "seed=7"], True),
    ],
)
def test_the_dry_run_is_a_bool_like_others(argv: list[str], dry: bool) -> None:
    assert parse_run(RunConfig, argv).dry_run == dry


LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        pytest.param(["--dry_run"], 0, marks=[pytest.mark.plugin(name) for name in ("embedded", "memory_plan")]),
        (["--sede", "1"], 2),
    ],
)
def test_only_the_first_rank_prints(argv: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    printed = []
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop:
            config_or_exit(RunConfig, argv)
        assert stop.value.code == code
        printed.append(bool("".join(capsys.readouterr())))
    assert printed == [True, False]


def test_a_setting_that_is_gone_is_refused_on_the_command_line_with_what_to_use_instead() -> None:
    for name, removed in REMOVED.items():
        assert any(not names_of(root.schema).find(name) for root in ROOTS)
        for flag in (f"--no_{name}", f"--train.{name.replace('_', '-')}=1"):
            assert f"is gone: {removed.instead}" in refused(flag)


def test_the_file_of_an_earlier_run_loads_where_what_is_gone_asked_for_nothing(tmp_path: Path) -> None:
    earlier = tmp_path / "config.resolved.yaml"
    earlier.write_text("data: {ask_key: '', redraw_key: ''}\ntrain:\n  train_while_scoring: true\n  seed: 7\n")
    assert plain("--config", str(earlier)).train.seed == 7
    earlier.write_text("train:\n  seed: 7\ndata:\n  redraw_key: again\n")
    told = refused("--config", str(earlier))
    assert "'data.redraw_key'" in told and f"{earlier.name}:4) is gone: leave it out; score answers" in told


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.kind)
def test_a_slip_of_the_keyboard_names_the_setting_that_was_meant(root: Any) -> None:
    names = names_of(root.schema)
    for leaf in names.leaves.values():
        if len(leaf.name) < 5:
            continue
        middle = len(leaf.name) // 2
        for typed in (leaf.name[:middle] + leaf.name[middle + 1 :], leaf.name[:middle] + "q" + leaf.name[middle:]):
            if typed in (leaf.name, *names.aliases) or names.find(typed):
                continue
            assert f"did you mean {leaf.name!r}" in str(names.unknown(typed, "here")), typed


def test_a_guess_never_turns_a_setting_around() -> None:
    assert nearest("dppo", ["ppo", "dppo_tv", "dppo_kl"]) == "dppo_kl" and nearest("top", ["top_k"]) is None
    assert nearest("max_tokens", ["min_tokens"]) is nearest("clip_low", ["clip_high"]) is None


def test_texts_in_a_mapping_stay_texts_in_the_resolved_file(tmp_path: Path) -> None:
    config = plain("--reward.components.mine=1", "--reward.kwargs.mine.n='5'", "--reward.kwargs.mine.q='a: b'")
    assert config.reward.kwargs["mine"] == {"n": "5", "q": "a: b"}
    assert plain("--config", str(write_resolved(config, tmp_path / "config.resolved.yaml"))) == config


def test_mappings_take_keys_of_their_own(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("reward:\n  components: {ocr: 1, clip: 2}\n  kwargs: {ocr: {lang: en, min-size: 3}}\n")
    argv = ["--config", str(recipe), "--reward.components.ocr", "0.5", "components.hps-v2=2"]
    reward = plain(*argv, "reward.kwargs.ocr.gpu=true").reward
    assert reward.components == {"ocr": 0.5, "clip": 2.0, "hps-v2": 2.0}
    assert reward.kwargs == {"ocr": {"lang": "en", "min-size": 3, "gpu": True}}
    assert plain("--reward.components.ocr", "0.5", "components={}").reward.components == {}
    assert "float" in refused("reward.components.ocr=high", preset=None)


@dataclass
class Part:
    weight: float = 1.0


@dataclass
class Both:
    reward: Part = field(default_factory=Part)
    other: Part = field(default_factory=Part)


def test_short_names_of_several_fields_are_refused() -> None:
    message = refused("--weight", "1", schema=Both, preset=None)
    assert "reward.weight" in message and "other.weight" in message


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config", "a" * 300], "no config 'aaa"),
        (["--pretrain", "a" * 300], "model.pretrain (command line): the name aaa"),
        (["--output_dir", "out/" + "é" * 200], "is of 400 bytes, more than a file's can be"),
        (["--prompt_data", "\udcff\udcfe"], r"the argument '\\udcff\\udcfe' is not text in UTF-8"),
        (["--\udcff", "1"], "is not text in UTF-8"),
        (["--output_dir", "${x}"], "Interpolation key 'x' not found"),
        (["--prompt_data", "${x}"], "data.prompt_data (command line): Interpolation key 'x' not found"),
    ],
)
def test_words_that_no_setting_or_file_can_have_are_refused_by_name(argv: list[str], words: str) -> None:
    for preset in ({"preset": None}, {}):
        told = refused(*argv, **preset)
        told.encode()
        assert words in told


TEXT = r"a setting's value is written ${section.name}, and text with ${ as \${"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--run_name", "${seed}"],
            "output.run_name (command line): Interpolation key 'seed' not found; did you mean '${train.seed}'?",
        ),
        (["--run_name", "${train.sede}"], "not found; did you mean '${train.seed}'?"),
        (
            ["--reward.kwargs.mine", '{"key": ["${lr}"]}'],
            "reward.kwargs.mine.key[0] (command line): Interpolation key 'lr' not found; did you mean "
            "'${train.actor_learning_rate}'?",
        ),
        (["--run_name", "${weight}"], "output.run_name (command line): Interpolation key 'weight' not found"),
        (["--run_name", "${train.seed"], f"output.run_name is '${{train.seed' (command line); {TEXT}"),
        (
            ["--reward.components.ocr", "${train.seed"],
            f"reward.components.ocr is '${{train.seed' (command line); {TEXT}",
        ),
        (["--reward.components.ocr", "true x"], "reward.components.ocr is 'true x' (command line); it takes: float"),
        (["--reward.components.ocr", "[1"], "reward.components.ocr is '[1' (command line), not YAML; it takes: float"),
    ],
)
def test_a_reference_or_a_value_of_a_key_that_is_wrong_is_told_with_its_place_and_what_would_do(
    argv: list[str], words: str
) -> None:
    assert words in refused(*argv)


def test_a_reference_of_a_recipe_that_is_wrong_is_told_with_its_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("output:\n  run_name: ${seed}\n")
    told = refused("--config", str(recipe))
    assert "recipe.yaml:2): Interpolation key 'seed' not found; did you mean '${train.seed}'?" in told
    recipe.write_text("output:\n  run_name: ${train.seed\n")
    assert f"recipe.yaml:2: output.run_name: {TEXT}" in refused("--config", str(recipe))


def test_a_reference_without_its_end_is_refused_where_a_program_gives_it() -> None:
    told = refused(settings={"reward.kwargs": {"mine": ["${train.seed"]}})
    assert f"reward.kwargs is {{'mine': ['${{train.seed']}} (keyword argument); {TEXT}" in told


BOMB = "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij")
)  # 9 to the power of 9 values


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [x, x, x, x, x, x, x, x, x]\n" + BOMB, "its aliases make more than 50000 values"),
        ("train: &a\n  seed: *a\n", "an alias stands inside what it names"),
        ("[" * 100 + "]" * 100, "it is nested deeper than 64 levels"),
        ("train: {seed: " + "9" * 5000 + "}", "cannot be read as YAML"),
    ],
)
def test_a_recipe_of_unbounded_size_or_odd_values_is_refused_at_once(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    told = refused("--config", str(tmp_path / "x.yaml"))
    assert told.startswith(f"{tmp_path / 'x.yaml'}") and words in told


@pytest.mark.parametrize("name,value", [("RANK", "abc"), ("WORLD_SIZE", "-1"), ("MASTER_PORT", "²")])
def test_a_launchers_variable_that_is_no_number_is_one_line(
    name: str, value: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        config_or_exit(RunConfig, ["--dry_run"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: the environment variable {name} is {value!r}; a launcher sets")


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({"RANK": "2"}, "RANK is 2 of WORLD_SIZE 2; ranks count from 0"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK is 0 of WORLD_SIZE 0; ranks count from 0"),
        ({"RANK": "0", "MASTER_PORT": "99999"}, "MASTER_PORT is 99999; ports are 1 to 65535"),
        ({"RANK": "0", "MASTER_PORT": "0"}, "MASTER_PORT is 0; ports are 1 to 65535"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, None),
        ({"RANK": "", "WORLD_SIZE": "0", "MASTER_PORT": "0"}, None),
    ],
)
def test_a_rank_or_port_that_cannot_be_is_told_before_the_ranks_wait_for_each_other(
    there: dict[str, str], told: str | None, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_launchers_variables(monkeypatch, LAUNCHED | there)
    with pytest.raises(SystemExit) as ended:
        config_or_exit(RunConfig, ["--dry_run"])
    assert (ended.value.code, capsys.readouterr().err) == ((2, f"error: {told}\n") if told else (0, ""))


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ({"RANK": "1"}, "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({**LAUNCHED, "WORLD_SIZE": ""}, "WORLD_SIZE"),
        ({**LAUNCHED, "LOCAL_RANK": "", "MASTER_PORT": ""}, "LOCAL_RANK, MASTER_PORT"),
    ],
)
def test_a_rank_whose_launcher_left_variables_out_is_told_which_also_in_python(
    there: dict[str, str], missing: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_launchers_variables(monkeypatch, there)
    told = f"the environment variable RANK is set without {missing}: "
    with pytest.raises(ConfigError, match=told):
        launch.run(parse_run(RunConfig, []).config)
    with pytest.raises(SystemExit) as ended:
        config_or_exit(RunConfig, ["--dry_run"])
    assert ended.value.code == 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        config_or_exit(RunConfig, [])
    assert (told in capsys.readouterr().err) == ("WORLD_SIZE" in missing)  # else rank 0 says it
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        config_or_exit(RunConfig, [])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("there", "ranks"),
    [
        (dict.fromkeys(LAUNCHED, ""), 1),
        ({"WORLD_SIZE": "2"}, 1),
        ({"RANK": "", "WORLD_SIZE": "2"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": ""}, 1),
        (LAUNCHED, 2),
        ({name: value for name, value in LAUNCHED.items() if name != "LOCAL_RANK"}, 2),
    ],
)
def test_ranks_are_those_of_a_launcher_that_numbers_them_and_empty_variables_are_none(
    there: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_launchers_variables(monkeypatch, there)
    config = parse_run(RunConfig, ["--local_rank=1"] if ranks == 2 else []).config
    assert f" on {ranks} rank" in what_runs(config)
    assert not [name for name in LAUNCHED if os.environ.get(name) == ""]


def set_launchers_variables(monkeypatch: pytest.MonkeyPatch, there: Mapping[str, str]) -> None:
    for name in LAUNCHED:
        monkeypatch.setenv(name, there.get(name, ""))
        if name not in there:
            monkeypatch.delenv(name)
