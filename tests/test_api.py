"""Trainers from Python: what they take and refuse, before torch is loaded."""

import errno
import fcntl
import inspect
import json
import os
import sys
import time
import weakref
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy
import peft
import pytest
import torch
import transformers
from waiting import finished

import lightrft_visual
from lightrft_visual import (
    FlowGRPOTrainer,
    GRPOTrainer,
    PPOTrainer,
    RLOOTrainer,
    StepHook,
    UnifiedTrainer,
    api,
    arguments,
    given,
    inference,
)
from lightrft_visual.arguments import saved
from lightrft_visual.config.leaves import names_of
from lightrft_visual.config.load import write_resolved
from lightrft_visual.config.shared import REWARDS
from lightrft_visual.config.vl import ModelConfig
from lightrft_visual.data.sources import open_source
from lightrft_visual.errors import ConfigError, DataError
from lightrft_visual.inference import Checkpoint
from lightrft_visual.models.loading import add_lora
from lightrft_visual.rewards import RewardComputationEngine

ROOT = Path(__file__).resolve().parents[1]
ROWS = [{"prompt": "how many?", "reference": "3"}, {"prompt": "which colour?", "reference": "red"}]


def score(completions, references):
    return [float(answer == reference) for answer, reference in zip(completions, references)]


def constant(value, completions):
    return [value] * len(completions)


def test_package_import_loads_neither_torch_nor_omegaconf_and_a_trainer_no_torch():
    code = (
        "import sys, lightrft_visual\n"
        "assert not {'torch', 'omegaconf'} & set(sys.modules)\n"
        "lightrft_visual.GRPOTrainer(reward_funcs=lambda completions: [0.0], train_dataset=[{'prompt': 'a'}])\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = finished([sys.executable, "-c", code], 120, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", api.TRAINERS, ids=lambda kind: kind.__name__)
def test_trainer_signature_holds_every_setting(kind):
    parameters = inspect.signature(kind).parameters
    leaves = {leaf.name: leaf for leaf in names_of(kind.root.schema).leaves.values()}
    assert set(leaves) <= set(parameters)
    given = ["model", "reward_funcs", "train_dataset", "eval_dataset"]
    if kind is api.SFTTrainer:
        given.remove("reward_funcs")
    assert "prompt_data" in kind.__doc__ and list(parameters)[: len(given)] == given
    assert kind.__doc__.count(" environment:") == kind.__doc__.count(" tools:") == 1


def test_settings_stub_is_that_of_the_configuration(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import write_settings

    assert write_settings.FILE.read_text() == write_settings.text(), "run python scripts/write_settings.py"


PROGRAM = """
from pathlib import Path

from lightrft_visual import FlowGRPOTrainer, GRPOTrainer, PPOTrainer, SFTTrainer, evaluate
from lightrft_visual.rewards import register_scorer


class Env:
    def step(self, action: object) -> None: ...


def crop(box: str) -> str:
    return box


@register_scorer("brevity")
def brevity(completions: list[str]) -> list[float]:
    return [1.0 for _ in completions]


rows: list[dict[str, object]] = [{"prompt": "a"}]
scores: list[float] = brevity(["a"])
GRPOTrainer("m", brevity, environment=Env, tools=[crop, "tools.py:search"], lr=1e-3, output_dir=Path("x"))
GRPOTrainer("m", environment_factory=Env, tools=crop, prompt_data=rows, adam_betas=(0.9, 0.95), plugins=["x.py"])
GRPOTrainer("m", remote_rm_url=["a", "b"], target_modules=("q_proj",), prompt_data_probs=[0.5, 0.5])
FlowGRPOTrainer("m", pair_data=rows, num_inference_steps=4, save_dir=Path("x"))
SFTTrainer("m", eval_data=Path("x"), learning_rate=1e-3, config=Path("x"))
GRPOTrainer("m", config=[Path("x"), "y"])
FlowGRPOTrainer("m", config=Path("x"))
PPOTrainer("m", config=Path("x"))
evaluate("m", suite=Path("x"))
GRPOTrainer("m", seed="x", environment=3, num_inference_steps=4)  # WRONG
"""


# No trainer takes an object of these libraries, and to read them takes two minutes.
UNREAD = "accelerate bokeh datasets deepspeed diffusers fastapi matplotlib peft ray torch torchvision transformers vllm"


@pytest.mark.slow
def test_type_checker_takes_what_trainers_take_from_a_program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    unread = ",".join(f"{name}.*" for name in UNREAD.split())
    (tmp_path / "mypy.ini").write_text(f"[mypy]\n[mypy-{unread}]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", tmp_path / "cache"]
    done = finished([*map(str, command), "program.py"], 600, cwd=tmp_path, env=os.environ | {"MYPYPATH": str(ROOT)})
    wrong = 1 + next(line for line, text in enumerate(PROGRAM.splitlines()) if "WRONG" in text)
    told = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(told) == 3 and all(line.startswith(f"program.py:{wrong}: ") for line in told), done.stdout + done.stderr


def test_algorithm_is_a_default_that_a_setting_wins_over():
    assert PPOTrainer().config.algorithm.advantage_estimator == "gae"
    assert RLOOTrainer().config.algorithm.advantage_estimator == "rloo"
    assert UnifiedTrainer().config.model.embedded_family == "janus"
    assert GRPOTrainer(advantage_estimator="dr_grpo").config.algorithm.advantage_estimator == "dr_grpo"
    assert GRPOTrainer("embedded", None, None, None, None, [hook := StepHook()]).callbacks == [hook]
    assert FlowGRPOTrainer(diffusion_algorithm="awm").config.algorithm.diffusion_algorithm == "awm"


def test_settings_of_python_types_reach_the_configuration(tmp_path):
    config = GRPOTrainer(lr=1e-5, adam_betas=(0.8, 0.9), output_dir=tmp_path, bf16=True, max_ckpt_num=2).config
    assert (config.train.actor_learning_rate, config.train.adam_betas) == (1e-5, [0.8, 0.9])
    assert (config.output.output_dir, config.model.bf16, config.output.max_ckpt_num) == (str(tmp_path), True, 2)
    config = GRPOTrainer(config="experiment/vl/geometry3k_grpo", seed=numpy.int64(7), lr=numpy.float32(0.5)).config
    assert (config.train.seed, config.train.actor_learning_rate) == (7, 0.5) and config.data.prompt_data != "embedded"
    (tmp_path / "run.yaml").write_text("train: {seed: 3}")
    own = {"adam_betas": numpy.array([0.75, 0.5]), "engine_kwargs": {"a": (numpy.int64(3), tmp_path)}}
    own |= {"lr": numpy.float64(0.5), "bf16": numpy.bool_(True), "kwargs": {"exact": {"a": numpy.float32(0.5)}}}
    config = GRPOTrainer("org/model", {"exact": numpy.float32(0.5)}, ROWS, config=tmp_path / "run.yaml", **own).config
    assert (config.train.actor_learning_rate, config.train.adam_betas, config.train.seed) == (0.5, [0.75, 0.5], 3)
    assert (config.model.bf16, config.rollout.engine_kwargs) == (True, {"a": [3, str(tmp_path)]})
    assert (config.reward.components, config.reward.kwargs) == ({"exact": 0.5}, {"exact": {"a": 0.5}})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"n_sample_per_prompt": 4},
            "unknown setting 'n_sample_per_prompt' .keyword argument.; did you mean 'n_samples",
        ),
        ({"num_steps": 4}, "it belongs to diffusion runs, and this is a vision-language run$"),
        ({"model": "a", "pretrain": "b"}, "pretrain says the same as model"),
        ({"model": "a", "model.pretrain": "b"}, "model.pretrain says the same as model"),
        ({"train_dataset": ROWS, "data.prompt_data": "b"}, "data.prompt_data says the same as train_dataset"),
        ({"train_dataset": ROWS, "data.manifest": ROWS}, "data.manifest says the same as train_dataset"),
        ({"reward_funcs": score, "reward.reward_fn": "a.py:f"}, "reward.reward_fn says the same as reward_funcs"),
        ({"reward_funcs": [3]}, "a reward is a function.*not a int"),
        ({"reward_funcs": ["exact", "format"], "reward_weights": [1.0]}, "reward_weights has 1 numbers for 2 rewards"),
        ({"reward_funcs": ["exact"], "reward_weights": 0.5}, "reward_weights is 0.5: give a list"),
        ({"reward_funcs": []}, "reward_funcs is empty"),
        ({"reward_funcs": {"mine": score}}, "functions are given as a list, with reward_weights"),
        ({"reward_funcs": "exakt"}, "there is no scorer named 'exakt'; did you mean 'exact'"),
        ({"reward_funcs": {"exact": 1.0}, "reward_weights": [2.0]}, "a mapping or a recipe has weights of its own"),
        ({"reward_weights": [1.0]}, "reward_weights are those of reward_funcs: give the rewards too"),
        ({"tools": [3]}, "tools has a int: give functions"),
        ({"reward_funcs": ["exact", "mine.yaml"]}, "reward 'mine.yaml': a recipe says all rewards: give it alone"),
        ({"train_dataset": ROWS, "prompt_data": ROWS}, "prompt_data says the same as train_dataset"),
        ({"callbacks": [type("Mine", (), {"on_rollout": print, "on_sync": print})()]}, "did you mean 'on_rollouts'"),
        ({"model": "embedded", "processing_class": object()}, "processing_class belongs to a loaded model"),
        ({"output_dir": score}, "output_dir is score, of the program"),
        ({"reward_fun": score}, "unknown setting 'reward_fun' .*did you mean 'reward_fn'"),
        ({"model": 3}, "model is a int: give a hub name, a folder"),
        ({"model": "/nowhere/model"}, "--pretrain: /nowhere/model does not exist"),
        ({"model": "/nowhere/model", "top_p": 3}, "top_p is 3(.|\n)*--pretrain: /nowhere/model does not exist"),
        ({"reward_funcs": "none.py"}, "--remote_rm_url: none.py does not exist"),
        ({"reward_funcs": {"*": [["func", "none.py:f", 1.0]]}}, "reward recipe: none.py does not exist"),
        ({"reward_funcs": {"*": [["model", "./none", 1.0]]}}, "no reward_pretrain .* the model './none'"),
        ({"train_dataset": ROWS, "prompt_data_probs": "0.5,0.5"}, "2 mixing probabilities for 1 data sets"),
        ({"config": {"seed": 3}}, "config is a dict: give a list"),
        *(
            pytest.param(*case, marks=pytest.mark.plugin("compat"))
            for case in (
                ({"args": {"num_generations": 8}}, "unknown setting 'args' .*each setting is a keyword"),
                ({"rollout_func": score}, "unknown setting 'rollout_func' .*--environment FILE.py:CLASS"),
                ({"peft_config": {"r": 8}}, "unknown setting 'peft_config' .*--lora_rank R"),
            )
        ),
    ],
)
def test_what_cannot_work_is_refused_when_the_trainer_is_made(arguments, told):
    with pytest.raises(ConfigError, match=told):
        GRPOTrainer(**arguments)


@pytest.mark.plugin("embedded")
@pytest.mark.plugin("compat")
def test_wrong_arguments_are_told_beside_wrong_settings():
    told = ["a reward is a function", "environment is a int", "unknown setting 'lerning_rate'", "max_steps is 'x'"]
    with pytest.raises(ConfigError) as refused:
        GRPOTrainer(reward_funcs=5, environment=5, lerning_rate=1, max_steps="x", use_vllm="no")
    assert all(each in str(refused.value) for each in (*told, "--engine_type hf")), refused.value


class Env:
    pass


@pytest.mark.plugin("embedded")
@pytest.mark.plugin("compat")
@pytest.mark.parametrize(
    ("arguments", "told", "untold"),
    [
        ({"environment": 5}, ["environment is a int"], ["no environment named"]),
        ({"environment": Env, "tools": [5]}, ["tools has a int"], ["environment is"]),
        ({"environment": 5, "tools": [5]}, ["environment is a int", "tools has a int"], ["no environment named"]),
        ({"environment": 5, "max_turns": 3}, ["environment is a int"], ["max_turns"]),
        ({"tools": [5], "max_turns": 3}, ["tools has a int"], ["max_turns"]),
        ({"prompt_data": [], "lerning_rate": 1}, ["prompt_data has no rows", "'lerning_rate'"], ["prompt_data is"]),
        ({"prompt_data": ROWS, "use_vllm": "no"}, ["--engine_type hf"], ["prompt_data"]),
        ({"train_dataset": 5, "lerning_rate": 1}, ["train_dataset is a int", "'lerning_rate'"], []),
        (
            {"train_dataset": {"test": ROWS}, "prompt_split": "test", "use_vllm": "no"},
            ["--engine_type hf"],
            ["no split"],
        ),
    ],
)
def test_wrong_arguments_bring_no_errors_of_what_is_right(arguments, told, untold):
    with pytest.raises(ConfigError) as refused:
        GRPOTrainer(model="embedded", reward_funcs=score, **arguments)
    assert all(each in str(refused.value) for each in told), refused.value
    assert not any(each in str(refused.value) for each in untold), refused.value


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset", "prompt_data"])
def test_data_without_rows_alone_are_a_data_error(name):
    with pytest.raises(DataError, match=f"^{name} has no rows$"):
        GRPOTrainer(**{name: []})


@pytest.mark.parametrize("given", [{"reward_funcs": score}, {"reward_weights": [1.0]}])
def test_rewards_of_a_supervised_run_are_refused_by_their_own_name(given):
    with pytest.raises(ConfigError, match=f"^{next(iter(given))} belongs to runs with rewards"):
        api.SFTTrainer("embedded", ROWS, **given)


def test_train_with_a_checkpoint_says_how_a_trainer_is_resumed():
    with GRPOTrainer("embedded", score) as trainer, pytest.raises(ConfigError, match="give the trainer resume_from="):
        trainer.train(resume_from_checkpoint=True)


def test_closed_trainer_says_so_beside_another_of_the_same_function_and_train_is_fit():
    trainer, other = (GRPOTrainer(model="embedded", reward_funcs=score) for _ in range(2))
    trainer.close()
    for work in (trainer.train, trainer.evaluate):
        with pytest.raises(ConfigError, match="this trainer is closed"):
            work()
    other.close()


@pytest.mark.plugin("embedded")
def test_fit_gives_memory_of_the_device_back_once_the_trainer_is_gone(monkeypatch):
    from deepspeed.accelerator import get_accelerator

    from lightrft_visual import launch

    class Trained:
        pass

    def run(config, callbacks):
        made.append(weakref.ref(trainer := Trained()))
        trainer.itself = trainer
        return trainer

    made, emptied = [], []
    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(api, "_result", lambda trainer, history: None)
    monkeypatch.setattr(get_accelerator(), "empty_cache", lambda: emptied.append(made[0]()))
    with GRPOTrainer(model="embedded", reward_funcs=score) as trainer:
        trainer.fit()
    assert emptied == [None]


def test_a_trainer_that_is_refused_lets_go_of_what_it_was_given_and_another_keeps_the_same():
    held, model = dict(given._objects), SimpleNamespace(save_pretrained=pytest.fail)
    with GRPOTrainer((model, "processor"), score, ROWS) as kept:
        names = {*given._objects} - {*held}
        for wrong in ({"learning_rat": 1.0}, {"eval_data": []}, {"config": "no_such_recipe"}):
            with pytest.raises((ConfigError, DataError)):
                GRPOTrainer((SimpleNamespace(save_pretrained=pytest.fail), "processor"), score, list(ROWS), **wrong)
            assert {*given._objects} == {*held} | names
        assert given.given(kept.config.model.pretrain) is model
    assert given._objects == held


@pytest.mark.plugin("embedded")
def test_evaluate_looks_for_no_checkpoint_before_fit_and_after_it_where_the_run_saved_its_own(monkeypatch, tmp_path):
    from lightrft_visual import launch
    from lightrft_visual.runtime.checkpoint import manager

    seen = []

    @contextmanager
    def started(config):
        seen.append((config.output.resume_from, config.output.load_checkpoint, config.output.use_tensorboard))
        yield SimpleNamespace(evaluate=lambda: {"eval_reward": 1.0})

    monkeypatch.setattr(launch, "started", started)
    monkeypatch.setattr(manager, "resolve_resume", lambda source, root: Path(root, source))
    trainer = GRPOTrainer(
        "embedded",
        load_checkpoint=True,
        output_dir=tmp_path / "out",
        ckpt_path=tmp_path / "saved",
        use_tensorboard=True,
    )
    assert trainer.evaluate() == {"eval_reward": 1.0}
    trainer._result = api.Result({"step": 2.0}, [], [], tmp_path / "out", None, None)
    trainer.evaluate()
    assert seen == [(None, False, False), (str(tmp_path / "saved" / "auto"), False, False)]
    trainer = GRPOTrainer("embedded", score, ROWS, output_dir=tmp_path / "out")
    trainer._result = api.Result({"step": 2.0}, [], [], tmp_path / "out", None, None)
    with pytest.raises(ConfigError, match="nothing to evaluate on: give eval_dataset"):
        trainer.evaluate()


@pytest.mark.plugin("embedded")
def test_save_of_several_ranks_is_the_first_ones_also_where_another_comes_late(monkeypatch, tmp_path):
    trainer = GRPOTrainer("embedded", output_dir=tmp_path / "out")
    (tmp_path / "trained").mkdir()
    trainer._result = api.Result({}, [], [], tmp_path / "out", tmp_path / "trained", None)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert trainer.save(tmp_path / "copy") == tmp_path / "copy" and (tmp_path / "copy").is_dir()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="is there already"):
        trainer.save(tmp_path / "copy")


@pytest.mark.plugin("embedded")
def test_a_folder_that_save_made_brings_the_settings_of_its_run(tmp_path):
    for name, text in (("config.resolved.yaml", "sampling: {height: 32}\n"), ("checkpoint-final/manifest.json", "{}")):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(text)
    trainer = FlowGRPOTrainer("embedded", output_dir=tmp_path / "run")
    trainer._result = api.Result({}, [], [], tmp_path / "run", tmp_path / "run" / "checkpoint-final", None)
    assert Checkpoint.of(trainer.save(tmp_path / "saved")).run == {"sampling": {"height": 32}}


class Broken(list):
    def __getitem__(self, index):
        raise ZeroDivisionError("division by zero")


def test_data_without_rows_are_refused_when_the_trainer_is_made_and_rows_that_raise_are_named():
    table = SimpleNamespace(columns=["prompt"], __len__=lambda: 1)
    for data, told in (
        (5, "is a int, without rows"),
        ([], "has no rows"),
        (table, "give a datasets.Dataset made of it"),
        (iter(ROWS), "without rows by number: .* list.stream.take"),
        ({"prompt": ["a", "b"], "reference": ["c"]}, "no split 'train', and no lists of one length as columns"),
        ({"test": ROWS}, "no split"),
    ):
        with pytest.raises(DataError, match=f"train_dataset.*{told}"):
            GRPOTrainer(train_dataset=data)
    with pytest.raises(DataError, match="train_dataset:row 3: ZeroDivisionError: division by zero"):
        given.source_of(Broken(ROWS), "train_dataset", "train")[3]


def test_given_rows_have_lists_in_place_of_arrays_as_pandas_holds_lists_and_keep_arrays_that_are_media():
    message = {"role": "user", "content": numpy.array([{"type": "text", "text": "q"}], dtype=object)}
    frame = numpy.zeros((4, 4, 3), numpy.uint8)
    row = {
        "prompt": numpy.array([message], dtype=object),
        "reference": numpy.array(["cat", "dog"], dtype=object),
        "reward_model": {"ground_truth": numpy.array(["cat", "dog"])},
        "images": [frame],
    }
    read = given.source_of([row], "train_dataset", "train")[0]
    assert read["prompt"] == [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
    assert read["reference"] == read["reward_model"]["ground_truth"] == ["cat", "dog"]
    assert read["images"][0] is frame


@pytest.mark.plugin("unified")
def test_reward_of_ones_own_stands_in_place_of_that_of_the_embedded_task():
    assert UnifiedTrainer().config.reward.reward_recipe.startswith("{drawing")
    config = UnifiedTrainer(None, score).config
    assert config.reward.reward_recipe is None and config.guard.gold_recipe is not None
    config = UnifiedTrainer(None, score, ROWS).config
    assert config.guard.gold_recipe is None
    assert UnifiedTrainer(reward_recipe="{'*': [[rule, exact, 1.0]]}").config.reward.reward_recipe.startswith("{'*'")


def reward_of(*arguments):
    return GRPOTrainer(None, *arguments).config.reward


def test_functions_are_named_by_text_kept_apart_and_found_again_in_this_program_alone():
    first, second = reward_of([score, lambda completions: [0.0] * len(completions)]).reward_fn.split(",")
    assert given.given(first) is score
    assert given.given(second).__name__ == "reward" and given.given(second)(["a"]) == [0.0]
    other = SimpleNamespace(__name__="score")
    one, two = given.give("score", score), given.give("score", other)
    assert one != two and given.given(one) is score and given.given(two) is other
    with pytest.raises(ConfigError, match="python:nobody is an object of another program"):
        given.given("python:nobody")


def test_rewards_of_each_form_reach_their_setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(completions): ...\n")
    assert reward_of("http://host/reward").remote_rm_url == "http://host/reward"
    assert reward_of("mine.py:score").reward_fn == "mine.py:score"
    assert reward_of("org/judge").reward_pretrain == "org/judge"
    assert reward_of(["exact", "format"]).components == {"exact": 1.0, "format": 1.0}
    assert reward_of({"exact": 0.8}).components == {"exact": 0.8}
    recipe = {"count": [["rule", "exact", 1.0]]}
    assert json.loads(reward_of(recipe).reward_recipe) == recipe
    (tmp_path / "rewards.yaml").write_text(json.dumps(recipe))
    for form in ("rewards.yaml", Path("rewards.yaml"), ["rewards.yaml"]):
        assert reward_of(form).reward_recipe == "rewards.yaml"
    recipe = {"count": (("func", Path("mine.py:score"), numpy.int64(2)),)}
    assert json.loads(reward_of(recipe).reward_recipe) == {"count": [["func", "mine.py:score", 2]]}


def test_functions_of_one_name_have_weights_of_their_own():
    functions = [partial(constant, 1.0), partial(constant, 2.0), lambda completions: [3.0] * len(completions)]
    trainer = GRPOTrainer(reward_funcs=[*functions, "exact"], reward_weights=[10.0, 1.0, 0.5, 0.0])
    config = trainer.config.reward
    assert [key for _, key, _ in json.loads(config.reward_recipe)["*"]] == ["constant", "constant_2", "reward", "exact"]
    engine = RewardComputationEngine.from_config(config)
    assert engine.score_media(["a", "b"], references=["a", "b"]).score.tolist() == [13.5, 13.5]
    engine.close()


@pytest.mark.parametrize("weights", [None, [2.0, 0.5]])
def test_a_file_with_reward_func_is_summed_with_a_scorer_and_weighed(tmp_path, weights):
    (tmp_path / "mine.py").write_text("def reward_func(queries):\n    return [1.0] * len(queries)\n")
    trainer = GRPOTrainer(reward_funcs=[tmp_path / "mine.py", "exact"], reward_weights=weights)
    engine = RewardComputationEngine.from_config(trainer.config.reward)
    wanted = 2.0 if weights is None else 2.5
    assert engine.score_media([""], references=[""]).score.tolist() == [wanted]
    engine.close()


def rows_of(data, split="train"):
    config = GRPOTrainer(train_dataset=data).config
    source = open_source(config.data.prompt_data, split)
    return [source[index] for index in range(len(source))]


def test_rows_of_lists_columns_and_datasets_are_the_same_and_paths_stay_paths(tmp_path, monkeypatch):
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    table = datasets.Dataset.from_list(ROWS)
    for data in (ROWS, columns, table, datasets.DatasetDict(train=table)):
        assert rows_of(data) == ROWS
    assert rows_of(table.select([1])) == ROWS[1:]
    shouted = table.with_transform(lambda batch: batch | {"prompt": [each.upper() for each in batch["prompt"]]})
    assert [row["prompt"] for row in rows_of(shouted)] == ["HOW MANY?", "WHICH COLOUR?"]
    monkeypatch.chdir(tmp_path)
    for name in ("rows", "a", "b"):
        (tmp_path / f"{name}.jsonl").touch()
    assert GRPOTrainer(train_dataset=tmp_path / "rows.jsonl").config.data.prompt_data == str(tmp_path / "rows.jsonl")
    assert GRPOTrainer(train_dataset=["a.jsonl", "b.jsonl"]).config.data.prompt_data == "a.jsonl,b.jsonl"


def test_diffusion_trainers_take_texts_pairs_by_their_columns_and_one_differentiable_reward():
    trainer = FlowGRPOTrainer(None, score, ["a red circle, large", "a blue square"])
    rows = given.given(trainer.config.data.prompt_data)
    assert rows == [{"prompt": "a red circle, large"}, {"prompt": "a blue square"}]
    with pytest.raises(ConfigError, match="my rows.jsonl does not exist"):  # a file by its name
        FlowGRPOTrainer(None, score, ["my rows.jsonl"])
    with pytest.raises(ConfigError, match="no reward is given"):
        FlowGRPOTrainer(train_dataset=["a red circle, large"])
    pairs = [{"prompt": "a", "chosen": "x.png", "rejected": "y.png"}]
    assert lightrft_visual.DiffusionDPOTrainer(train_dataset=pairs).config.data.pair_data.startswith("python:")
    assert lightrft_visual.DiffusionDPOTrainer(None, score, ROWS).config.data.pair_data is None
    config = lightrft_visual.RewardFLTrainer(reward_funcs=[score]).config
    assert given.given(config.algorithm.differentiable_reward) is score
    config = lightrft_visual.RewardFLTrainer(reward_funcs=Path(f"{__file__}:score")).config
    assert config.algorithm.differentiable_reward == f"{__file__}:score"
    with pytest.raises(ConfigError, match="--differentiable_reward: .* has no function or class 'scor'"):
        lightrft_visual.RewardFLTrainer(None, f"{__file__}:scor", ["a red circle"])
    with pytest.raises(ConfigError, match="one differentiable reward"):
        lightrft_visual.RewardFLTrainer(reward_funcs=[score, score])


PAIRS = [{"prompt": "a", "chosen": "x.png", "rejected": "y.png"}]
FORMS_OF_ROWS = {
    "rows": lambda rows: rows,
    "columns": lambda rows: {name: [row[name] for row in rows] for name in rows[0]},
    "dataset": datasets.Dataset.from_list,
    "datasets": lambda rows: datasets.DatasetDict(train=datasets.Dataset.from_list(rows)),
    "transformed": lambda rows: datasets.Dataset.from_list([{"row": 0}]).with_transform(
        lambda batch: {name: [row[name] for row in rows] for name in rows[0]}
    ),
    "hub": lambda rows: "org/pairs",
}


@pytest.mark.parametrize("form", FORMS_OF_ROWS)
def test_pairs_of_every_form_are_trained_on_offline_and_prompts_online(monkeypatch, form):
    for rows, offline in ((PAIRS, True), (ROWS, False)):
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, own=rows, **__: datasets.Dataset.from_list(own))
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: "")
        reward = None if offline else score
        data = lightrft_visual.DiffusionDPOTrainer(None, reward, FORMS_OF_ROWS[form](rows)).config.data
        assert (data.pair_data is not None) == offline and data.prompt_data.startswith("python:")


def test_pairs_under_columns_of_ones_own_are_trained_on_offline():
    rows = [{"prompt": "a", "win": "x.png", "lose": "y.png"}]
    own = {"chosen_key": "win", "rejected_key": "lose"}
    for names in (own, {f"data.{name}": column for name, column in own.items()}):
        assert lightrft_visual.DiffusionDPOTrainer(train_dataset=rows, **names).config.offline


@pytest.mark.parametrize("form", sorted(FORMS_OF_ROWS.keys() - {"hub"}))
def test_settings_that_name_data_take_what_the_program_holds(form):
    for name, kind, rows in (
        ("pair_data", lightrft_visual.DiffusionDPOTrainer, PAIRS),
        ("prompt_data", GRPOTrainer, ROWS[:1]),
        ("eval_data", GRPOTrainer, ROWS[:1]),
    ):
        named = {"eval_split": "train"} if name == "eval_data" else {}
        with kind(**{name: FORMS_OF_ROWS[form](rows)} | named) as trainer:
            spec = getattr(trainer.config.data, name)
            source = open_source(spec, "train")
            assert [source[index] for index in range(len(source))] == rows
        with pytest.raises(ConfigError, match="of a trainer that is closed"):
            open_source(spec, "train")


def test_hub_name_is_loaded_and_one_that_is_not_there_is_a_data_error(monkeypatch):
    def load(name, split):
        if name != "org/questions":
            raise FileNotFoundError("offline")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: "")
    assert rows_of("org/questions") == ROWS
    with pytest.raises(DataError, match="'org/other' is no file here, and of the hub .split train.: offline"):
        GRPOTrainer(train_dataset="org/other")


def test_a_loaded_model_on_a_device_is_told_that_it_takes_room_there(caplog):
    held = torch.nn.Linear(2**14, 2**15, bias=False, device="meta")  # 2 GiB
    for model, told in ((held, "2.0 GiB"), (torch.nn.Linear(2, 2), "")):
        caplog.clear()
        with pytest.raises(ConfigError, match="comes with its processor"), saved(model):
            pass
        assert (told in caplog.text) and bool(told) == ("give it on the CPU" in caplog.text)


def test_loaded_model_without_its_processor_is_refused():
    with pytest.raises(ConfigError, match="comes with its processor"):
        GRPOTrainer(SimpleNamespace(save_pretrained=pytest.fail), score, ROWS).fit()


def tiny_llama():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **sizes))


def deleted(model, lora):
    model.add_adapter(lora)
    model.delete_adapter("default")
    return model


def pipeline_of(model, lora):
    return SimpleNamespace(components={"transformer": peft.get_peft_model(model, lora)}, save_pretrained=pytest.fail)


ADAPTED = {
    "PeftModel": peft.get_peft_model,
    "its base": lambda model, lora: peft.get_peft_model(model, lora).get_base_model(),
    "the model that it was made of": lambda model, lora: (model, peft.get_peft_model(model, lora))[0],
    "compiled": lambda model, lora: torch.compile(peft.get_peft_model(model, lora)),
    "deleted adapter": deleted,
    "of this package": lambda model, lora: add_lora(model, ModelConfig(lora_rank=2)).get_base_model(),
    "part of a pipeline": pipeline_of,
}


@pytest.mark.parametrize("form", ADAPTED)
def test_layers_of_peft_in_a_loaded_model_are_refused_with_what_removes_them(form):
    found = ADAPTED[form](tiny_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    told = r"^(model|transformer) has adapters: merge or .* .merge_and_unload\(\) or unload\(\) of a PeftModel"
    with pytest.raises(ConfigError, match=told), saved(found, SimpleNamespace(save_pretrained=lambda folder: None)):
        pass


def test_a_loaded_model_whose_adapters_are_unloaded_is_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTRFT_CACHE", str(tmp_path))
    model = tiny_llama()
    found = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).unload()
    with saved(found, SimpleNamespace(save_pretrained=lambda folder: None)) as folder:
        again = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


def test_other_ranks_of_a_host_wait_for_a_loaded_model_and_write_none_also_without_file_locks(monkeypatch, tmp_path):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LIGHTRFT_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    written, model = [], torch.nn.Linear(1, 1)
    model.save_pretrained = written.append
    with saved(model, model) as folder:
        assert folder.is_dir() and len(written) == 2
    assert not folder.exists()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(time, "sleep", lambda _: folder.mkdir(parents=True))  # meanwhile the first one has written it
    with saved(model, model) as again:
        assert again == folder and again.is_dir()
    assert folder.is_dir() and len(written) == 2


def test_a_loaded_model_that_a_callback_evaluates_within_its_own_run_is_not_written_again(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTRFT_CACHE", str(tmp_path))
    model = torch.nn.Linear(1, 1)
    model.save_pretrained = lambda folder: (folder / "weights").touch()
    with saved(model, model) as outer:
        with saved(model, model) as inner:
            assert inner == outer
        assert (outer / "weights").is_file()
    assert not outer.exists()


def of_another_run(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)


def of_another_host(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "another")


@pytest.mark.parametrize(("other_place", "world"), [(of_another_run, "1"), (of_another_host, "2")])
def test_a_loaded_model_has_a_folder_for_each_run_and_host_of_a_cache(monkeypatch, tmp_path, other_place, world):
    """One that ends first takes its folder away, and its processor may be another."""
    for name, value in {
        "LIGHTRFT_CACHE": str(tmp_path),
        "RANK": "0",
        "WORLD_SIZE": world,
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)

    class Loaded:
        components = {}

        def save_pretrained(self, folder):
            (folder / "config.json").write_text("{}")

    with saved(Loaded()) as one:
        other_place(monkeypatch)
        with saved(Loaded()) as other:
            assert other != one
        assert (one / "config.json").is_file() and not other.exists()


class Template:
    """A processor. writing: called where it is written for a run."""

    def __init__(self, text, writing=None):
        self.text, self.writing = text, writing

    def save_pretrained(self, folder):
        Path(folder, "template").write_text(self.text)
        if self.writing is not None and "given" in Path(folder).parts:
            self.writing()


def left_by_a_run_that_ended_at_once(processor, port="29500", host=None):
    """A process has its folder and ends by os._exit, as the first rank does where another one has failed."""
    if (child := os.fork()) == 0:
        os.environ["MASTER_PORT"] = port
        if host is not None:
            arguments.socket.gethostname = lambda: host
        with saved(Template("weights"), processor):
            os._exit(0)
    os.waitpid(child, 0)


@pytest.fixture
def given_models(monkeypatch, tmp_path):
    """The folder of loaded models of the first of two ranks."""
    for name, value in {
        "LIGHTRFT_CACHE": tmp_path,
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "MASTER_PORT": 29500,
    }.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path / "given"


def test_a_loaded_model_takes_no_folder_that_another_processor_lies_in(given_models):
    left_by_a_run_that_ended_at_once(Template("old"))
    assert len(list(given_models.rglob("template"))) == 1
    with saved(Template("weights"), Template("new")) as folder:
        assert (folder / "template").read_text() == "new"


def test_what_runs_of_this_host_have_left_is_removed_and_what_others_hold_stays(given_models):
    left_by_a_run_that_ended_at_once(Template("old"), port="29501")
    left_by_a_run_that_ended_at_once(Template("half", partial(os._exit, 0)), port="29502")
    left_by_a_run_that_ended_at_once(Template("old"), host="another")
    with saved(Template("weights"), Template("held")) as held, saved(Template("weights"), Template("new")) as folder:
        assert held.is_dir() and folder.is_dir()
        here = [each.name for each in given_models.iterdir() if each not in (held.parent, folder.parent)]
        assert [name.split("-", 1)[1] for name in here] == ["another-29500"]
    assert [each.name for each in given_models.iterdir()] == here


@pytest.mark.parametrize("part", ["config", "generation_config"])
def test_a_loaded_model_with_other_settings_has_a_folder_of_its_own(monkeypatch, given_models, part):
    model = tiny_llama()
    with saved(model, Template("one")) as one, monkeypatch.context() as patch:
        patch.setattr(getattr(model, part), "eos_token_id", 3)
        with saved(model, Template("one")) as other:
            assert one != other


def test_folder_of_a_loaded_model_whose_writing_fails_is_removed(given_models):
    with pytest.raises(ZeroDivisionError), saved(Template("weights"), Template("broken", lambda: 1 / 0)):
        pytest.fail("nothing is there")
    assert list(given_models.iterdir()) == []


CHAT = [{"role": "user", "content": "how many?"}]


@pytest.mark.parametrize(
    ("prompts", "images", "rows"),
    [
        ("a", 1, [{"prompt": "a", "images": [1]}]), ("a", [1, 2], [{"prompt": "a", "images": [1, 2]}]),
        (["a", {"prompt": "b"}], [None, 2], [{"prompt": "a"}, {"prompt": "b", "images": [2]}]),
        ([{"prompt": "a", "images": [1]}], [None], [{"prompt": "a", "images": [1]}]),
        ({"prompt": "a"}, None, [{"prompt": "a"}]), (CHAT, 1, [{"prompt": CHAT, "images": [1]}]),
        ([CHAT, CHAT], None, [{"prompt": CHAT}] * 2),
    ],
)  # fmt: skip
def test_prompts_to_sample_are_texts_rows_or_conversations_one_or_several(prompts, images, rows):
    assert inference._asked(prompts, images, "images") == rows


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        *(({"n": n}, "n is .*1 or more") for n in (0, 2.0)),
        *(({"temperature": each}, "temperature is .*give 0, which is greedy") for each in ("hot", float("nan"))),
        ({"prompts": None}, "prompts is a NoneType: give a text"),
        *(
            ({"prompts": ["a"], "images": each}, "images is a .*: give a list with those of each prompt")
            for each in (3, "a.png", Path("a.png"))
        ),
        ({"config": "mine"}, "config is of a trainer: give settings by their names"),
        *(
            ({name: value}, f"^{name} is of runs: sample answers each prompt that it is given")
            for name, value in (
                ("on_bad_row", "skip"),
                ("data.on_long_prompt", "skip"),
                ("max_eval_samples", 2),
                ("eval_data", ROWS),
            )
        ),
        ({"model": ("embedded", None, None)}, "model is a tuple: give a hub name"),
    ],
)
def test_what_cannot_be_sampled_is_refused_before_anything_loads(asked, told):
    with pytest.raises(ConfigError, match=told):
        inference.sample(**{"model": "embedded", "prompts": "a"} | asked)


def test_evaluate_of_what_is_no_model_is_refused():
    with pytest.raises(ConfigError, match="model is a tuple: give a hub name"):
        inference.evaluate(("embedded", None, None), ["a"])


@pytest.mark.plugin("embedded")
@pytest.mark.parametrize("policy", ["stop", "rollback"])
def test_a_checkpoint_of_a_run_whose_guard_acts_is_evaluated_without_the_guard(tmp_path, monkeypatch, policy):
    monkeypatch.setattr("lightrft_visual.runtime.checkpoint.manifest.read_manifest", lambda folder: {"model": None})
    judge = {"gold_recipe": "{'*': [[rule, exact, 1.0]]}", "policy": policy}
    config = GRPOTrainer("embedded", output_dir=tmp_path, max_steps=4, config="embedded_vl", **judge).config
    write_resolved(config, tmp_path / inference.SETTINGS)
    (tmp_path / "checkpoint-000001").mkdir()
    (tmp_path / "checkpoint-000001" / inference.STATE).touch()
    checkpoint = inference.Checkpoint.of(tmp_path / "checkpoint-000001")
    with inference._configured(checkpoint, None, None, {}) as found:
        assert (found.guard.watch, found.guard.policy, found.guard.keeps_best) == (False, "warn", False)


def test_second_run_beside_one_that_goes_on_in_the_process_is_refused():
    from lightrft_visual import launch

    with launch._RUNNING, pytest.raises(ConfigError, match="another run goes on in this process"):
        GRPOTrainer().fit()
    assert launch._RUNNING.acquire(blocking=False) and launch._RUNNING.release() is None


@pytest.mark.parametrize(
    "recipe",
    [
        "reward: {components: {math: 0.9, format: 0.1}, kwargs: {format: {tags: [a]}}}",
        "reward: {reward_recipe: {'*': [[rule, math, 1.0]]}}",
        "reward: {remote_rm_url: 'http://localhost/score'}",
    ],
)
def test_rewards_given_to_a_trainer_stand_in_place_of_those_of_its_recipe(tmp_path, recipe):
    def length(completions):
        return [1.0] * len(completions)

    (tmp_path / "run.yaml").write_text(recipe)
    named = {
        name: {each: getattr(trainer.config.reward, each) for each in (*REWARDS, "kwargs")}
        for name, rewards in {"scorer": "exact", "function": length, "recipe": {"*": [["rule", "exact", 1.0]]}}.items()
        for trainer in [GRPOTrainer("org/model", rewards, ROWS, config=str(tmp_path / "run.yaml"))]
    }
    nothing = dict.fromkeys(REWARDS) | {"components": {}, "kwargs": {}}
    assert named["scorer"] == nothing | {"components": {"exact": 1.0}}
    assert named["function"] == nothing | {"reward_fn": named["function"]["reward_fn"]}
    kept = {"remote_rm_url": named["recipe"]["remote_rm_url"]}  # which a recipe may name
    assert named["recipe"] == nothing | {"reward_recipe": '{"*": [["rule", "exact", 1.0]]}'} | kept
