"""The embedded model from Python: several runs in one process, and what their checkpoints do."""

import pytest
from forked import run_alone

from lightrft_visual.models.diffusion.opening import save_text_length
from lightrft_visual.models.tiny.diffusion import TEXT_LENGTH, TinyDiffusionSettings, build_pipeline

pytestmark = pytest.mark.usefixtures("cache_root")  # child processes would fill the user's own

PROGRAM = """
import sys
from lightrft_visual import GRPOTrainer, evaluate, sample

rows = [{"prompt": "how many shapes?", "reference": "1"}, {"prompt": "what colour is it?", "reference": "red"}]
for number, engine in enumerate(("vllm", "vllm", "hf")):
    result = GRPOTrainer(
        "embedded", "exact", rows, rows, engine_type=engine, rollout_batch_size=2, n_samples_per_prompt=2,
        train_batch_size=4, generate_max_len=4, max_steps=1, save_steps=1, image_dependence_every=0,
        output_dir=f"{sys.argv[1]}/run {number}",
    ).fit()
    assert result.metrics["step"] == 1
print("one after the other")
numbered = result.output_dir / "checkpoint-000001"
assert evaluate(numbered, reward_funcs="exact", eval_dataset=rows)["eval_reward"] == result.metrics["eval_reward"]
asked = dict(prompts=["how many shapes?"], temperature=0)
assert sample(numbered, **asked) == sample(result.checkpoint, **asked)
print("a numbered checkpoint")
"""


def test_embedded_model_trains_several_times_in_a_process_and_its_checkpoints_evaluate(tmp_path):
    pytest.importorskip("vllm")
    (tmp_path / "program.py").write_text(PROGRAM)
    assert "a numbered checkpoint" in run_alone(tmp_path / "program.py", tmp_path, limit=600).splitlines()


BROKEN = """
import sys
from lightrft_visual import GRPOTrainer
from lightrft_visual.errors import ConfigError

def fit(callbacks):
    return GRPOTrainer(
        "embedded", "exact", [{"prompt": "how many shapes?", "reference": "1"}], callbacks=callbacks, engine_type="hf",
        n_samples_per_prompt=2, generate_max_len=4, max_steps=1, image_dependence_every=0, output_dir=sys.argv[1],
    ).fit()

class Refuses:
    def setup(self, context):
        raise ConfigError("not this run")

try:
    fit([Refuses()])
except ConfigError as error:
    kept = error  # as a notebook keeps the last one
assert "not this run" in str(kept)
assert fit([]).metrics["step"] == 1
print("the folder is free")
"""


def test_start_that_fails_at_a_hook_lets_go_of_its_folder(tmp_path):
    (tmp_path / "program.py").write_text(BROKEN)
    assert "the folder is free" in run_alone(tmp_path / "program.py", tmp_path / "run", limit=600)


DRAWN = """
import sys
from lightrft_visual import FlowGRPOTrainer, evaluate
from lightrft_visual.inference import Checkpoint
from lightrft_visual.models.diffusion.opening import saved_text_length

def redness(images):
    return [image.convert("RGB").resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]

small = dict(num_steps=2, eval_num_steps=2, height=32, width=32, n_samples_per_prompt=2, rollout_batch_size=2)
rows = [{"prompt": "a red circle"}, {"prompt": "a blue square"}]
result = FlowGRPOTrainer(
    sys.argv[1], redness, rows, rows, seed=3, train_batch_size=4, max_steps=1, save_steps=1, report=False,
    output_dir=sys.argv[2], **small
).fit()
for each in (result.output_dir / "checkpoint-000001", result.checkpoint):
    found = evaluate(each, reward_funcs=redness, eval_dataset=rows)["eval_reward"]
    assert abs(found - result.metrics["eval_reward"]) < 1e-6, (each, found, result.metrics["eval_reward"])
with Checkpoint.of(result.checkpoint).model(sys.argv[2]) as joined:
    assert saved_text_length(joined) == saved_text_length(sys.argv[1])
print("as in the run")
"""


def test_checkpoint_of_a_drawing_run_and_its_exported_adapters_evaluate_as_the_run_did(tmp_path):
    """The joined pipeline has texts of as many tokens as that which the adapters were trained on."""
    build_pipeline(TinyDiffusionSettings(layers=1)).save_pretrained(tmp_path / "model")
    save_text_length(tmp_path / "model", TEXT_LENGTH)
    (tmp_path / "program.py").write_text(DRAWN)
    told = run_alone(tmp_path / "program.py", tmp_path / "model", tmp_path / "run", limit=600)
    assert "as in the run" in told
