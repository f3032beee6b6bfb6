"""The core without plug-ins: it imports, reads configurations and trains; a plug-in that is asked for is named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(
    each.name for each in (ROOT / "lightrft_visual" / "plugins").iterdir() if (each / "__init__.py").exists()
)
DELETED = (*PLUGINS, "")  # each in turn, and the whole room

ASKS = """
import importlib, json, os, sys
from pathlib import Path
sys.path.append(sys.argv[2])
import blocked
blocked.block()
root, model, told = Path(sys.argv[1]), sys.argv[3], {}
os.chdir(Path(model).parent)
names = [".".join(each.relative_to(root).with_suffix("").parts) for each in (root / "lightrft_visual").rglob("*.py")]
names = sorted(name.removesuffix(".__init__") for name in names if not name.endswith("__main__"))
names = [name for name in names if not name.startswith(blocked.ROOM)]
for name in names:
    importlib.import_module(name)
assert len(names) > 150 and blocked.ROOM not in sys.modules
from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import parse_run, resolved_yaml
from lightrft_visual.config.load import _show_plan
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.rewards.settings import check_reward_config
from lightrft_visual.trainer.diffusion.build import build_diffusion_trainer
from lightrft_visual.trainer.vl.build import _open, _resolve_names

def vl(*argv):
    return parse_run(RunConfig, list(argv), preset=None).config

def diffusion(*argv):
    return parse_run(DiffusionRunConfig, list(argv), preset=None).config

own = ("--pretrain", model, "--prompt_data", "rows.jsonl")
asks = {
    "embedded": lambda: _resolve_names(vl()),
    "embedded model": lambda: _resolve_names(vl("--prompt_data", "rows.jsonl")),
    "embedded drawings": lambda: build_diffusion_trainer(diffusion("--output_dir", "out")),
    "sglang": lambda: _open(vl(*own, "--engine_type", "sglang")),
    "ray": lambda: _open(vl(*own, "--engine_type", "hf", "--placement", "split")),
    "face": lambda: check_reward_config(vl(*own, "reward.components.face_similarity=1.0").reward),
    "memory_plan": lambda: _show_plan(vl(*own)),
    "compat": lambda: check_reward_config(vl(*own, "--reward_fn", "mine.py:length", "--reward_form", "verl").reward),
    "compat setting": lambda: vl(*own, "--model_name_or_path", "there"),
}
for name, ask in asks.items():
    try:
        ask()
    except ConfigError as error:
        told[name] = str(error)
resolved_yaml(vl(*own))
print(json.dumps(told))
"""

# A child for what is asked and for each folder, of a process that has imported other libraries, and nothing of this
# package. The copy alone: an editable install finds modules that the copy lacks in the folder that it was made from.
STEPS = """
import json, os, runpy, sys
from pathlib import Path
import datasets, deepspeed, diffusers, peft, torch, transformers
import deepspeed.runtime.zero.muon.muon_optimizer, torch.distributed
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in getattr(each, "__module__", "")]
assert not any(name.startswith("lightrft_visual") for name in sys.modules)
room, out, (names, asks, step) = Path(sys.argv[1]), Path(sys.argv[2]), map(json.loads, sys.argv[3:])

def run(words, folder):
    folder.mkdir()
    if not (child := os.fork()):
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1), os.dup2(log, 2)
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")
        sys.exit(0)
    (folder / "code").write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))

run(asks, out / "asks")
for name in names:
    (room / name).rename(out / "away")
    run([*step, "--output_dir", str(out / f"run_{name}" / "out")], out / f"run_{name}")
    (out / "away").rename(room / name)
"""

REWARD = "def length(completions, **kwargs):\n    return [float(len(each) % 7) for each in completions]\n"
STEP = (
    "--engine_type hf --max_steps 1 --rollout_batch_size 2 --n_samples_per_prompt 2 --train_batch_size 4 "
    "--micro_train_batch_size 2 --generate_max_len 4 --prompt_max_len 64 --auto_micro_batches "
    "--gradient_checkpointing auto"
)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A folder with a tiny model of random weights, prompts and a reward function."""
    folder = tmp_path_factory.mktemp("own")
    build_tiny_checkpoint(folder / "model", "qwen2_5_vl")
    prompts = ("a red circle", "a blue cross", "a green square", "where?")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (folder / "mine.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def stepped(tmp_path_factory, own) -> Path:
    """Where the runs without each of the folders are: run_NAME with log.txt, code and out; what is asked in asks."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("lightrft_visual", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = ["examples/train_grpo_vl.py", *STEP.split(), "--pretrain", str(own / "model"), "--prompt_data"]
    command += [str(own / "rows.jsonl"), "--reward_fn", f"{own}/mine.py:length"]
    (folder / "asks.py").write_text(ASKS)
    asks = ["asks.py", str(folder), str(ROOT / "tests"), str(own / "model")]
    program = [sys.executable, "-c", STEPS, str(folder / "lightrft_visual" / "plugins"), str(folder)]
    done = subprocess.run(
        [*program, *map(json.dumps, (DELETED, asks, command))], cwd=folder, capture_output=True, text=True, timeout=800,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_every_file_of_the_core_imports_without_plug_ins_and_one_that_is_asked_for_is_named(stepped):
    said = (stepped / "asks" / "log.txt").read_text(errors="replace")
    assert (stepped / "asks" / "code").read_text() == "0", said[-3000:]
    told = next(json.loads(line) for line in said.splitlines() if line.startswith('{"embedded'))
    setting = told.pop("compat setting")
    assert len(told) == 8, told
    for name, text in told.items():
        assert f"needs the plug-in {name.split()[0]}, which is not there" in text
    assert setting.startswith("unknown setting 'model_name_or_path'") and "pretrain" not in setting


@pytest.mark.slow
@pytest.mark.parametrize("deleted", DELETED)
def test_a_step_is_trained_without_the_folder_of_a_plug_in(deleted, stepped):
    """The empty name is the whole room. Without memory_plan the sizes that are given stay."""
    run = stepped / f"run_{deleted}"
    told = (run / "log.txt").read_text(errors="replace")
    assert (run / "code").read_text() == "0", told[-3000:]
    assert "step 1/1" in told and (run / "out" / "checkpoint-final").is_dir()
    gone = deleted in ("memory_plan", "")
    assert ("auto_micro_batches needs the plug-in memory_plan: the sizes stay" in told) == gone
    assert "gradient_checkpointing: none" in (run / "out" / "config.resolved.yaml").read_text()
