"""Compiled blocks of a vision-language model: the same losses and gradients, and few programs for all lengths.

The compiler itself would take minutes on the host: its programs are traced here and run as they are.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo
from equality import loss_and_gradients
from moe import moe_checkpoint
from peft import LoraConfig, get_peft_model
from tiny_models import checkpoint_of, features_of, grouped_rollouts, inputs_of, load, prompts_for, text_prompts
from whole_runs import rows, run_plan

from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import SamplingSettings
from lightrft_visual.models.vlm.actor import Actor, Critic
from lightrft_visual.rollout.hf import TransformersEngine
from lightrft_visual.trainer.features.compiled_blocks import compile_blocks


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoint_of(tmp_path_factory.mktemp("models"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return checkpoint_of(tmp_path_factory.mktemp("texts"), "qwen2")


def actors(checkpoint, share_prefix: bool = False, adapted: bool = False, checkpointed: bool = False) -> list[Actor]:
    """One as it is and one whose blocks are compiled, of equal weights."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        model = load(checkpoint.path, checkpoint.vision)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if adapted:
            model = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
        made.append(Actor(model, [], checkpoint.eos_ids, share_prefix))
    assert compile_blocks(made[1], "eager") == (4 if checkpoint.vision else 2)  # two of text, two of the tower
    return made


def compare(pair: list[Actor], inputs) -> None:
    (loss, gradients), (other, theirs) = (loss_and_gradients(each, [inputs]) for each in pair)
    assert loss == pytest.approx(other, abs=1e-6) and gradients.keys() == theirs.keys()
    for name, each in gradients.items():
        torch.testing.assert_close(each, theirs[name], rtol=1e-5, atol=1e-6)


def test_losses_and_gradients_are_the_same_and_other_lengths_share_the_programs(checkpoint):
    """Packed, prompts computed once; padded below."""
    pair, programs = actors(checkpoint, share_prefix=True), []
    for seed in (0, 1, 2):
        rollouts = grouped_rollouts(checkpoint, prompts_for(checkpoint, False), seed=seed)
        compare(pair, inputs_of(checkpoint, rollouts[: 6 + seed], True))
        programs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < programs[0] and programs[1] == programs[2] <= 16


def test_adapters_and_checkpointed_blocks_are_compiled_too(text):
    pair = actors(text, adapted=True, checkpointed=True)
    inputs = inputs_of(text, grouped_rollouts(text, text_prompts()))
    for each in pair:
        each.train()
    compare(pair, inputs)
    made = []
    for each in pair:
        with torch.no_grad(), each.model.disable_adapter():
            made.append(each.backbone.hidden_states(inputs))
    torch.testing.assert_close(*made, rtol=1e-5, atol=1e-6)


def test_a_critic_is_compiled_and_a_generation_stays_as_it_is(text):
    actor, critic = Actor(load(text.path, False), [], text.eos_ids), Critic(load(text.path, False))
    assert compile_blocks(actor, "eager") == 2
    prompts = [replace(each, group_id=place) for place, each in enumerate(features_of(text, text_prompts()))]
    TransformersEngine(actor, text.tokenizer).generate(prompts, SamplingSettings(n=1, max_new_tokens=4))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    inputs = inputs_of(text, grouped_rollouts(text, text_prompts()))
    with torch.no_grad():
        critic.value_head.weight.normal_()
        plain = critic(inputs)
        assert compile_blocks(critic, "eager") == 2
        torch.testing.assert_close(critic(inputs), plain, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_what_cannot_be_compiled_is_refused(tmp_path, checkpoint):
    experts, eager = moe_checkpoint(tmp_path), load(checkpoint.path, checkpoint.vision)
    eager.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match="not a mixture of experts"):
        compile_blocks(Actor(load(experts.path, experts.vision), [], experts.eos_ids))
    with pytest.raises(ConfigError, match="not a qwen2_5_vl like this"):
        compile_blocks(Actor(eager, [], checkpoint.eos_ids))


RUN = (
    "--bf16 true --lora_rank 3 --target_modules q_proj,down_proj --packing_samples --engine_type hf "
    "--rollout_batch_size 3 --n_samples_per_prompt 3 --train_batch_size 9 --micro_train_batch_size 5 "
    "--generate_max_len 5 --max_steps 2 --max_eval_samples 0 --report false --parity_every 0"
).split()


@pytest.mark.slow
def test_a_run_with_adapters_in_half_precision_and_checkpointed_blocks_trains_as_without_programs(tmp_path, cache_root):
    runs = {"plain": RUN, "compiled": [*RUN, "--compile"]}
    runs = {name: [*flags, "--gradient_checkpointing"] for name, flags in runs.items()}
    run_plan(runs, tmp_path, cache_root, driver=Path(__file__).parent / "compiled_runs.py")
    steps = list(zip(rows(tmp_path / "compiled"), rows(tmp_path / "plain"), strict=True))
    assert len(steps) == 2 and steps[1][0]["policy_version"] == 1
    for compiled, plain in steps:
        assert compiled["reward_mean"] == plain["reward_mean"] and compiled["grad_norm"] > 0
        for name in ("entropy", "grad_norm", "policy_loss"):
            assert compiled[name] == pytest.approx(plain[name], rel=0.02, abs=1e-6), name
