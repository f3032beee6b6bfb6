"""Training forwards run in training mode, scoring in evaluation mode, whatever was done before."""

import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from forked import on_ranks
from tiny_models import checkpoint_of, features_of, inputs_of, mixed_prompts, rollouts_of

from lightrft_visual.config.vl import DataConfig, DistributedConfig, ModelConfig
from lightrft_visual.experience.rollouts import Rollout, ScoringRule
from lightrft_visual.models.loading import add_lora, freeze, load_transformer, open_checkpoint
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout.parity import log_prob_difference
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings
from lightrft_visual.runtime.seeding import choose_deterministic, strict_if_deterministic
from lightrft_visual.runtime.train_engine import TrainEngine, _left_out

RULE = ScoringRule(temperature=1.0)


class PlainBackend:
    """What TrainEngine needs of DeepSpeed's engine, with ordinary backward passes."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self, *arguments, **named):
        return self.module(*arguments, **named)

    def set_gradient_accumulation_boundary(self, last: bool) -> None:
        self.last = last

    def backward(self, loss, scale_wrt_gas: bool) -> None:
        loss.backward()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoint_of(tmp_path_factory.mktemp("checkpoints"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def inputs(checkpoint):
    return inputs_of(checkpoint, rollouts_of(checkpoint, mixed_prompts(videos=False)))


def engine_of(checkpoint, **settings) -> TrainEngine:
    model = ModelConfig(**settings)
    transformer = load_transformer(checkpoint.path, model, torch.float32)
    torch.manual_seed(0)
    actor = Actor(add_lora(transformer, model), [], checkpoint.eos_ids)
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return TrainEngine(PlainBackend(actor), zero_stage=0, max_norm=1.0)


def with_saved_bytes(run):
    """(result, bytes that autograd keeps of this forward for its backward, weights aside)."""
    kept: dict[int, int] = {}

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter) and not (tensor._base is not None and tensor._base.is_leaf):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return result, sum(kept.values())


def test_gradient_checkpointing_keeps_a_third_at_most_and_gives_the_same_gradients(checkpoint, inputs):
    sizes, gradients = [], []
    for checkpointing in (False, True):
        engine = engine_of(checkpoint, gradient_checkpointing=checkpointing)
        output, size = with_saved_bytes(partial(engine, inputs, RULE))
        sizes.append(size)
        engine.accumulate(output.log_probs.sum(), last=True)
        gradients.append([p.grad for p in engine.module.parameters() if p.grad is not None])
    assert sizes[1] <= sizes[0] / 3
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-4)


def test_scoring_is_without_dropout_and_training_with_it(checkpoint, inputs):
    engine = engine_of(checkpoint, lora_rank=4, lora_dropout=0.5)
    with torch.no_grad():
        first, second = (engine(inputs, RULE).log_probs for _ in range(2))
    assert torch.equal(first, second)
    trained = engine(inputs, RULE).log_probs
    assert (trained - first).abs().max() > 1e-3
    with torch.no_grad():
        assert torch.equal(engine(inputs, RULE).log_probs, first)
    assert engine.module.training  # backward is still to come
    engine.accumulate(trained.sum(), last=True)
    assert not any(module.training for module in engine.module.modules())


def test_what_backward_recomputes_has_the_dropout_of_the_forward_though_scoring_came_between(checkpoint, inputs):
    engine = engine_of(checkpoint, lora_rank=4, lora_dropout=0.5)
    run = partial(engine, inputs, RULE)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            engine.module.transformer.gradient_checkpointing_enable({"use_reentrant": False})
        engine.module.zero_grad()
        torch.manual_seed(1)
        loss = run().log_probs.sum()
        with torch.no_grad():
            run()
        engine.accumulate(loss, last=True)
        gradients.append([p.grad.clone() for p in engine.module.parameters() if p.grad is not None])
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-4)


def test_backward_alone_is_strict_where_a_run_is_deterministic():
    def mode() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    before = torch.get_deterministic_debug_mode()
    with strict_if_deterministic(False):
        assert mode() == (False, False)
    try:
        choose_deterministic()
        with pytest.raises(ValueError), strict_if_deterministic(True):
            assert mode() == (True, False)
            raise ValueError
        assert mode() == (True, True)
    finally:
        torch.set_deterministic_debug_mode(before)


def test_hooks_that_are_left_out_come_back_in_their_places_and_others_as_the_block_leaves_them():
    ran, module = [], torch.nn.Identity()
    hooks = {name: module.register_forward_hook(lambda *_, name=name: ran.append(name)) for name in "abcd"}
    with _left_out([hooks["a"], hooks["c"]]):
        hooks["b"].remove()
        module.register_forward_hook(lambda *_: ran.append("e"))
        module(None)
        ran.append("|")
    module(None)
    assert "".join(ran) == "de|acde"


@pytest.mark.slow
def test_the_reference_is_the_starting_policy_in_bfloat16_whatever_zero_divides(checkpoint):
    (differences,) = on_ranks(differences_by_stage, checkpoint.path, ranks=1)
    assert differences.keys() == {0, 2, 3}
    assert max(differences.values()) <= 1e-3, differences


# Where gradients are added up, and in what, differs.
DISCARDING = {
    "2": {"zero_stage": 2},
    "1, on the host": {"zero_stage": 1, "adam_offload": True},
    "2, on the host": {"zero_stage": 2, "adam_offload": True},
    "2, on the host, bf16": {"zero_stage": 2, "adam_offload": True, "grad_accum_dtype": "bf16"},
    "3": {"zero_stage": 3},
    "3, on the host": {"zero_stage": 3, "adam_offload": True},
}


@pytest.mark.slow
def test_states_and_weights_that_wait_on_the_host_change_no_step(tmp_path):
    for results in on_ranks(by_stage, str(tmp_path)):
        summed = results.pop("summed_in_fp32")
        assert summed["seen"] and summed["moved"] == summed["regrouped"] == summed["plain"]
        assert results.keys() == {2, 3}
        for stage, result in results.items():
            assert result["seen"] and result["moved"] == result["plain"], stage
            assert result["adam_offload"] == pytest.approx(result["plain"], abs=1e-5), stage


def test_a_discarded_step_leaves_nothing_in_the_next_one_and_a_step_nothing_for_weights_without_a_gradient_behind():
    (found,) = on_ranks(steps_after_one_that_was_discarded, ranks=1)
    for case, ((norms, weight), (norms_after, weight_after)) in found.items():
        assert norms_after == pytest.approx(norms, rel=1e-6), case
        torch.testing.assert_close(weight_after, weight, atol=0, rtol=0, msg=case)
        assert norms == pytest.approx(found["2"][0][0], rel=5e-3), case
        assert (weight - found["2"][0][1]).abs().mean() < 1e-3, case


class Leaving(torch.nn.Sequential):
    """Of which a forward may leave the last one out."""

    def forward(self, inputs: torch.Tensor, whole: bool) -> torch.Tensor:
        return super().forward(inputs) if whole else self[1](self[0](inputs))


USED = [(True, True), (False, False), (False, True), (True, False)]  # a weight in the two micro-batches of a step


def steps_after_one_that_was_discarded() -> dict[str, list[tuple[list[float], torch.Tensor]]]:
    """By case, norms of the gradients of steps in bf16, some of which leave a weight out, and that weight; of a run
    alone, and of one with a lost step before each."""
    found: dict[str, list[tuple[list[float], torch.Tensor]]] = {}
    for name, settings in DISCARDING.items():
        for lost in (False, True):
            strategy = DeepspeedStrategy(DistributedConfig(**settings), bf16=True)
            if not found and not lost:
                strategy.setup_distributed()
            engine, inputs = made(strategy, Leaving)
            norms: list[float] = []
            for uses in USED:
                for bad in (True, False) if lost else (False,):
                    for last in (False, True):
                        loss = engine(inputs, bad or uses[last]).float().square().mean()
                        engine.accumulate(loss * math.nan if bad else loss, last)
                    result = engine.step()
                    assert result.applied is not bad, (name, uses)
                    norms += [] if bad else [result.grad_norm]
            weight = engine.module[-1].weight
            with engine.gathered([weight]):
                found.setdefault(name, []).append((norms, weight.detach().float().clone()))
    return found


def test_a_folder_with_brackets_in_its_path_is_loaded_and_not_one_that_its_name_fits_as_a_pattern(tmp_path):
    (found,) = on_ranks(loaded_beside_another, str(tmp_path), ranks=1)
    for stage, (saved, loaded, alone) in found.items():
        assert saved == loaded == alone, stage


def loaded_beside_another(out: str) -> dict[int, tuple]:
    """By stage, sums of the weights that were saved, and of those that were loaded with and without a decoy beside."""
    found = {}
    for stage in (0, 2, 3):
        strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage))
        if not found:
            strategy.setup_distributed()
        engine, inputs = made(strategy)
        engine.save(f"{out}/{stage}/run1", "middle")
        saved, sums = stepped(engine, inputs), []
        folders = f"{out}/{stage}/run[1]", f"{out}/{stage}/[a]*/run"
        for folder in folders:
            engine.save(folder, "middle")
        for folder in folders:
            stepped(engine, inputs)
            engine.load(folder, "middle")
            with engine.gathered(list(engine.module.parameters())):
                sums.append([p.double().sum().item() for p in engine.module.parameters()])
        found[stage] = saved, *sums
    return found


def test_a_run_that_goes_on_with_more_steps_has_the_rates_of_the_longer_schedule_from_its_first_update_on(tmp_path):
    (found,) = on_ranks(rates_of_a_longer_run, str(tmp_path), ranks=1)
    for stage, (rates, moved) in found.items():
        assert rates == [1e-2, 0.75e-2, 0.5e-2, 0.25e-2, 0.5e-2, 0.375e-2], stage
        assert moved, stage


def rates_of_a_longer_run(out: str) -> dict[int, tuple[list[float], bool]]:
    """By stage, the rates of a linear schedule of four updates and, from there on, of one of eight; and whether the
    first update of the latter moved the weights."""
    found = {}
    for stage in (0, 2):
        strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage))
        if not found:
            strategy.setup_distributed()
        rates, sums = [], []
        for total, updates in ((4, 4), (8, 2)):
            engine, inputs = made(strategy, total_steps=total, scheduler="linear")
            if total == 8:
                engine.load(f"{out}/{stage}", "end")
            for _ in range(updates):
                engine.accumulate(engine(inputs).square().sum(), last=True)
                rates.append(engine.step().learning_rate)
                sums.append(sum(p.double().sum().item() for p in engine.module.parameters()))
            engine.save(f"{out}/{stage}", "end")
        found[stage] = rates, sums[3] != sums[4]
    return found


def test_a_run_that_goes_on_with_another_max_norm_clips_to_it(tmp_path):
    (found,) = on_ranks(moved_after_a_load, str(tmp_path), ranks=1)
    for stage, (clipped, loose) in found.items():
        assert clipped < loose / 50, stage


def moved_after_a_load(out: str) -> dict[int, list[float]]:
    """By stage, Adam's largest moment after one update whose gradient is clipped to a small and to a large norm, behind
    a checkpoint of the other one."""
    found = {}
    for stage in (0, 1, 2, 3):
        strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage))
        if not found:
            strategy.setup_distributed()
        norms = []
        for saved, loaded in ((100.0, 1e-3), (1e-3, 100.0)):
            folder = f"{out}/{stage}/{saved}"
            for max_norm in (saved, loaded):
                engine, inputs = made(strategy, max_norm=max_norm)
                if max_norm == saved:
                    engine.save(folder, "end")
            engine.load(folder, "end")
            stepped(engine, inputs)
            norms.append(max(float(m.abs().max()) for m in engine._moments()))
        found[stage] = norms
    return found


# What is trained, and what a backward runs again. LoRA leaves the inputs of the first block without gradients.
TRAINED = {
    "all": {},
    "all, run again": {"gradient_checkpointing": "full"},
    "adapters": {"lora_rank": 4},
    "adapters, run again": {"lora_rank": 4, "gradient_checkpointing": "full"},
    "adapters, run again but attention": {"lora_rank": 4, "gradient_checkpointing": "attention"},
    "without the tower": {"freeze_prefix": "true"},
}


@pytest.mark.slow
def test_blocks_that_zero_3_gathers_at_once_have_the_gradients_of_whole_weights(checkpoint):
    for gradients in on_ranks(gradients_by_blocks, checkpoint.path):
        for name in TRAINED:
            whole, divided = gradients[name]
            assert whole.norm() > 0
            torch.testing.assert_close(divided, whole, atol=1e-6, rtol=1e-4, msg=f"{name}: {(divided - whole).norm()}")


def gradients_by_blocks(folder: str) -> dict[str, list[torch.Tensor]]:
    """Those of two micro-batches by ZeRO-2 and by ZeRO-3, which has one block at a time together."""
    checkpoint = open_checkpoint(folder, ModelConfig(), DataConfig())
    inputs = inputs_of(checkpoint, rollouts_of(checkpoint, mixed_prompts(videos=False)))
    results: dict[str, list[torch.Tensor]] = {}
    for name, settings in TRAINED.items():
        for stage in (2, 3):
            strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage))
            if not results:
                strategy.setup_distributed()
            model = ModelConfig(**settings)
            with strategy.loading():
                transformer = load_transformer(folder, model, strategy.dtype)
            freeze(transformer, model.freeze_prefix)
            torch.manual_seed(0)
            actor = Actor(add_lora(transformer, model), [], checkpoint.eos_ids)
            engine = strategy.prepare(actor, OptimizerSettings(1e-2, total_steps=4))
            first, *_, last = actor.backbone.base.language_model.layers
            seen: list[int] = []
            weight = last.mlp.up_proj.weight
            first.register_full_backward_pre_hook(lambda *_, s=seen, w=weight: s.append(w.numel()))
            for final in (False, True):
                engine.accumulate(engine(inputs, RULE).log_probs.sum() / 1000, last=final)
            assert len(seen) == 2 and (sum(seen) == 0) is (stage == 3)  # divided again
            found = (safe_get_full_grad(p).flatten() for p in actor.parameters() if p.requires_grad)
            results.setdefault(name, []).append(torch.cat(list(found)))
    return results


LENGTH = 1890


def differences_by_stage(folder: str) -> dict[int, float]:
    """Between actor and reference in bfloat16 before any step, at positions up to 1,900; by ZeRO stage."""
    checkpoint = open_checkpoint(folder, ModelConfig(), DataConfig())
    prompts = features_of(checkpoint, mixed_prompts().select([0, 1]))
    ids = torch.randint(256, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    inputs = inputs_of(checkpoint, [Rollout(prompt, ids, None, "", False, sample_id=0) for prompt in prompts])
    differences = {}
    for stage in (0, 2, 3):
        strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage), bf16=True)
        if not stage:
            strategy.setup_distributed()

        def new_actor(strategy=strategy):
            with strategy.loading():
                transformer = load_transformer(folder, ModelConfig(), strategy.dtype)
            return Actor(transformer, [], checkpoint.eos_ids)

        actor = strategy.prepare(new_actor(), OptimizerSettings(1e-4, total_steps=4))
        reference = strategy.prepare_inference(new_actor())
        with torch.no_grad():
            ours, theirs = (model(inputs, ScoringRule()).log_probs for model in (actor, reference))
        differences[stage] = log_prob_difference(ours, theirs, inputs.action_mask, mean=True)
    return differences


def trained(strategy: DeepspeedStrategy, offload: bool, folder: str) -> tuple[list[float], list[bool]]:
    """(weights after three steps, whether states were on the host when they had to be)."""
    engine, inputs = made(strategy)
    seen = []
    for step in range(3):
        if offload:
            rest(engine)
            seen.append(bytes_held(engine) == 0)
            # ZeRO-3's bucket of gradients, far larger than this model, leaves nothing behind.
            seen.append(sum(size * len(kept) for size, kept in engine._states.memory.free.items()) < 100_000)
            with torch.no_grad():
                together = engine(inputs)
            seen.append(bool(engine._states.away) and not engine._weights.away)
            seen.append(torch.equal(alone(engine, inputs), together))
            engine.offload_weights()
        if step == 1:
            engine.save(folder, "middle")
            rest(engine) if offload else None
        engine.accumulate(engine(inputs).square().sum(), last=True)
        seen.append(not engine._states.away and bytes_held(engine) > 0)
        assert engine.step().applied
    rest(engine) if offload else None
    return resumed(engine, inputs, folder), seen


@torch.no_grad()
def alone(engine: TrainEngine, inputs: torch.Tensor) -> torch.Tensor:
    """What the last rank says by forwards that no other rank takes part in; of the first one together."""
    with engine.whole() if engine.zero_stage == 3 else nullcontext():
        for _ in range(3 * collectives.rank()):
            said = engine.module(inputs)
    divided = {parameter.numel() for parameter in engine.module.parameters()} == {0}
    assert divided is (engine.zero_stage == 3)
    together = engine(inputs)
    return said if collectives.rank() else together


def made(
    strategy: DeepspeedStrategy, kind: type = torch.nn.Sequential, total_steps: int = 9, **settings: str
) -> tuple[TrainEngine, torch.Tensor]:
    torch.manual_seed(0)
    module = kind(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 200))
    module[0].weight.requires_grad_(False)
    inputs = torch.randn(6, 4).to(strategy.dtype)
    return strategy.prepare(module, OptimizerSettings(1e-2, total_steps, **settings)), inputs


def resumed(engine: TrainEngine, inputs: torch.Tensor, folder: str) -> list[float]:
    engine.load(folder, "middle")
    return stepped(engine, inputs)


def stepped(engine: TrainEngine, inputs: torch.Tensor) -> list[float]:
    engine.accumulate(engine(inputs).square().sum(), last=True)
    engine.step()
    with engine.gathered(list(engine.module.parameters())):
        return [p.double().sum().item() for p in engine.module.parameters()]


def summed_in_fp32(out: str) -> dict:
    """ZeRO 1 in bf16 that adds gradients up in fp32 is another optimizer of DeepSpeed. regrouped: what a run on another
    number of ranks would load."""
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=1, grad_accum_dtype="fp32"), bf16=True)
    plain, _ = trained(strategy, False, f"{out}/plain_fp32")
    moved, seen = trained(strategy, True, f"{out}/moved_fp32")
    engine, inputs = made(strategy)
    engine._load_of_ranks(Path(out, "plain_fp32", "middle"), 2)
    return {"plain": plain, "moved": moved, "seen": all(seen), "regrouped": stepped(engine, inputs)}


def rest(engine: TrainEngine) -> None:
    engine.offload()
    engine.offload_weights()


def bytes_held(engine: TrainEngine) -> int:
    """Of weights and of what the optimizer keeps."""
    tensors = [*engine._state_tensors(), *engine._weight_tensors()]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def by_stage(out: str) -> dict:
    """Three optimizer steps of ZeRO 2 and 3, states and weights at rest on the host in between or not."""
    results: dict = {}
    for stage in (2, 3):
        strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage))
        if not results:
            strategy.setup_distributed()
        plain, _ = trained(strategy, False, f"{out}/plain{stage}")
        moved, seen = trained(strategy, True, f"{out}/moved{stage}")
        on_host = DeepspeedStrategy(DistributedConfig(zero_stage=stage, adam_offload=True))
        there = resumed(*made(on_host), f"{out}/plain{stage}")  # a checkpoint of Adam on the device
        results[stage] = {"plain": plain, "moved": moved, "seen": all(seen), "adam_offload": there}
    return results | {"summed_in_fp32": summed_in_fp32(out)}
