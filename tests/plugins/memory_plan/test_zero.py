"""What the plan says of DeepSpeed's states against the states themselves, and closed forms."""

import gc
from dataclasses import replace

import deepspeed
import pytest
import torch
from forked import on_ranks
from torch import nn

from lightrft_visual.config.shared import DistributedConfig
from lightrft_visual.plugins.memory_plan.meta import LiveBytes
from lightrft_visual.plugins.memory_plan.table import DEVICE, HOST
from lightrft_visual.plugins.memory_plan.zero import BUCKET, Model, Zero
from lightrft_visual.rollout.weight_sync import BUCKET_BYTES
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings


def distinct_bytes(tensors) -> int:
    """Of different storages."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def states_by_stage() -> dict[str, list[int]]:
    """What the optimizer of a small module holds that two ranks train, before and after its first step."""
    found = {}
    for stage, bf16 in ((0, False), (0, True), (1, False), (2, False), (2, True), (3, True)):
        strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage), bf16=bf16)
        if not torch.distributed.is_initialized():
            strategy.setup_distributed()
        module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 64)).to(strategy.dtype)
        module[0].requires_grad_(False)
        engine = strategy.prepare(module, OptimizerSettings(1e-4, total_steps=4))
        states = []
        for _ in range(2):
            optimizer = getattr(engine.engine.optimizer, "optimizer", engine.engine.optimizer)
            masters = [p for group in optimizer.param_groups for p in group["params"]] if stage or bf16 else []
            if stage == 3:
                masters = list(engine.engine.optimizer.fp32_partitioned_groups_flat)
            moments = [v for state in optimizer.state.values() for v in state.values() if v.numel() > 1]
            states.append(distinct_bytes([*masters, *moments]))
            engine.accumulate(engine(torch.randn(4, 256, dtype=strategy.dtype)).float().square().sum(), last=True)
            engine.step()
        if stage == 3:
            kept = engine.engine.optimizer
            found["kept"] = [kept.grad_partitions_flat_buffer.nbytes] + [
                b.buffer.nbytes for b in kept.ipg_buckets.values()
            ]
        found[f"{stage} {'bf16' if bf16 else 'fp32'}"] = states
    return found


def parts_by_division() -> dict[int, int]:
    """Bytes of what a rank of two holds of the weights of a module, by zpg."""
    found = {}
    for zpg in (1, 2):
        strategy = DeepspeedStrategy(DistributedConfig(zero_stage=3, zpg=zpg), bf16=True)
        if not torch.distributed.is_initialized():
            strategy.setup_distributed()
        module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 64)).to(strategy.dtype)
        engine = strategy.prepare(module, OptimizerSettings(1e-4, total_steps=4))
        parts = [(each.ds_tensor, each.ds_secondary_tensor) for each in engine.module.parameters()]
        found[zpg] = sum(part.nbytes for pair in parts for part in pair if part is not None)
    return found


TRAINED = 256 * 256 + 256 + 256 * 64 + 64  # of that module
BILLION = Model(trained=10**9, frozen=10**8, largest=10**6, widest=10**6, width=2)


def zero(stage: int, ranks: int = 8, on_cpu: bool = False, **settings) -> Zero:
    return Zero(DistributedConfig(zero_stage=stage, **settings), ranks, on_cpu)


@pytest.mark.slow
def test_the_optimizers_states_are_those_planned() -> None:
    found = on_ranks(states_by_stage, ranks=2)[0]
    assert found.pop("kept") == [2 * TRAINED, 2 * BUCKET]
    assert [each.bytes for each in zero(3, ranks=2).kept(Model(TRAINED, 0, 9, 9, 2))] == [2 * TRAINED, 2 * BUCKET]
    for name, (before, after) in found.items():
        stage, width = int(name[0]), 2 if name.endswith("bf16") else 4
        model = Model(TRAINED, 256 * 256 + 256, 256 * 256, 256 * 256, width)
        planned = [zero(stage, ranks=2).optimizer(model, stepped)[0].bytes for stepped in (False, True)]
        assert [before, after] == planned, name


ADDING = ((0, None, True), (0, None, False), (1, None, True), (1, "fp32", True), (2, None, True), (2, "bf16", True))


def gradients_by_stage() -> list[list[float]]:
    """Bytes of each trained number that gradients take on one rank: between updates, once two micro-batches were added
    up, and in the step before AdamW works.

    Reductions, which change nothing on one rank, are left out: a thread of gloo holds what it has reduced for a moment
    longer.
    """
    deepspeed.comm.all_reduce = deepspeed.comm.reduce = lambda *_, **__: None
    found = []
    for stage, added_up, bf16 in ADDING:
        config = DistributedConfig(zero_stage=stage, grad_accum_dtype=added_up)
        strategy = DeepspeedStrategy(config, bf16=bf16)
        if not torch.distributed.is_initialized():
            strategy.setup_distributed()
        layers = [nn.Linear(512, 512, bias=False) for _ in range(8)]
        engine = strategy.prepare(nn.Sequential(*layers).to(strategy.dtype), OptimizerSettings(1e-4, total_steps=4))
        kept = getattr(engine.engine.optimizer, "fp32_groups_gradients_flat", ())
        known = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
        numbers = 8 * 512**2
        with LiveBytes(known) as live:
            for last in (False, True):
                loss = engine(torch.randn(4, 512, dtype=strategy.dtype)).float().square().sum()
                engine.accumulate(loss, last=last)
            summed, live.peak = live.now, live.now
            getattr(engine.engine.optimizer, "optimizer", engine.engine.optimizer).step = lambda *_: None
            engine.step()
        stays = sum(each.nbytes for each in kept)
        found.append([round(size / numbers, 1) for size in (stays, stays + summed, stays + live.peak)])
    return found


@pytest.mark.slow
def test_gradients_take_what_is_planned_between_updates_in_backward_and_in_the_step() -> None:
    """A norm of sums in fp32 takes a layer of them beside."""
    for (stage, added_up, bf16), (stays, summed, stepping) in zip(ADDING, on_ranks(gradients_by_stage, ranks=1)[0]):
        model = Model(10**6, 0, 10**6 // 4, 10**6 // 4, 2 if bf16 else 4)
        settings = zero(stage, ranks=1, grad_accum_dtype=added_up)
        kept, backward, step = (
            sum(item.bytes for item in items if "buckets" not in item.name) / model.trained
            for items in (
                settings.kept(model), settings.gradients(model, 1), settings.step(model),
            )
        )  # fmt: skip
        told = (stage, added_up, bf16)
        assert (kept, backward) == (stays, summed), told
        assert step <= stepping <= step + (1 if settings.in_fp32(model) else 0), told


def offloaded_states() -> dict[tuple[int, str | None], list[int]]:
    """Of optimizers on the host: bytes there, of the buffers, and of gradients on the device, once two micro-batches
    were added up."""
    found = {}
    for stage, added_up in ((1, None), (2, None), (2, "bf16"), (3, None)):
        config = DistributedConfig(zero_stage=stage, adam_offload=True, grad_accum_dtype=added_up)
        strategy = DeepspeedStrategy(config, bf16=True)
        if not torch.distributed.is_initialized():
            strategy.setup_distributed()
        module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 64)).to(strategy.dtype)
        engine = strategy.prepare(module, OptimizerSettings(1e-4, total_steps=4))
        for last in (False, True):
            loss = engine(torch.randn(4, 256, dtype=strategy.dtype)).float().square().sum()
            engine.accumulate(loss, last=last)
        zero = engine.engine.optimizer
        sums = [each.flat_partition.nbytes for each in getattr(zero, "averaged_gradients", {}).values() if each]
        engine.step()
        moments = [v for state in zero.optimizer.state.values() for v in state.values() if v.numel() > 1]
        if stage == 3:
            held = [*zero.fp32_partitioned_groups_flat, zero.grad_partitions_flat_buffer]
        else:
            held = [*zero.single_partition_of_fp32_groups, *zero.accumulated_grads_in_cpu.values()]
            held += [*zero.param_buffer_of_bit16_for_cpu_offload_groups]
        held += [each.grad for each in held if each.grad is not None]
        buffers = [getattr(zero, f"temp_grad_buffer_for_{kind}_offload", None) for kind in ("gpu", "cpu")]
        buffered = [each.nbytes for each in buffers if each is not None]
        found[stage, added_up] = [distinct_bytes([*held, *moments]), *buffered, *sums]
    return found


@pytest.mark.slow
def test_what_an_offloaded_optimizer_holds_on_the_host_is_planned() -> None:
    module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 64))
    model = Model.of(module, 2)
    for (stage, added_up), found in on_ranks(offloaded_states, ranks=1)[0].items():
        settings = zero(stage, ranks=1, on_cpu=True, adam_offload=True, grad_accum_dtype=added_up)
        planned = [*settings.optimizer(model), *settings.gradients(model)[: settings.in_fp32(model)]]
        assert [each.bytes for each in planned] == found, (stage, added_up)


def test_what_is_page_locked_of_an_offloaded_optimizer_takes_powers_of_two() -> None:
    """Each of 3 MiB times the bytes of a number takes a third more."""
    size = 3 * 2**20
    whole, parts = Model(size, 0, 2**20, 2**20, 2), Model(size, 0, 2**20, 2**20, 2, 0, (size,))
    plain, apart = (zero(2, 1, adam_offload=True, grad_accum_dtype=each) for each in (None, "bf16"))
    assert plain.optimizer(whole)[-1].bytes == (4 + 4 + 2) * 2**20
    assert apart.optimizer(parts)[-1].bytes == (4 + 4 + 2 + 2) * 2**20
    assert zero(3, 1, adam_offload=True).optimizer(whole)[-1].bytes == (4 + 4) * 2**20


@pytest.mark.slow
def test_weights_that_are_divided_twice_are_planned_twice() -> None:
    """With zpg each of so many ranks keeps a part of the weights beside its part among all."""
    numbers = 256 * 256 + 256 + 256 * 64 + 64
    model = Model(trained=numbers, frozen=0, largest=256 * 256, widest=256 * 256, width=2)
    planned = {zpg: zero(3, ranks=2, zpg=zpg).weights(model).bytes for zpg in (1, 2)}
    assert on_ranks(parts_by_division, ranks=2)[0] == planned
    assert zero(3, ranks=32, zpg=8).divided(32) == 1 + 4


def test_stages_divide_what_they_divide() -> None:
    by_stage = {stage: zero(stage) for stage in range(4)}
    weights = {stage: each.weights(BILLION).bytes for stage, each in by_stage.items()}
    assert weights == {0: 2.2e9, 1: 2.2e9, 2: 2.2e9, 3: 2.2e9 / 8}
    states = {stage: each.optimizer(BILLION)[0].bytes for stage, each in by_stage.items()}
    assert states == {0: 12e9, 1: 12e9 / 8, 2: 12e9 / 8, 3: 12e9 / 8}
    held = {stage: by_stage[stage].gradients(BILLION, micro_batches=1)[0].bytes for stage in range(4)}
    assert held == {0: 2e9, 1: 2e9, 2: 4e9 / 8, 3: 4e9 / 8}  # 2 and 3 add up in fp32
    assert by_stage[2].gathered(BILLION) == [] and by_stage[3].gathered(BILLION)[0].bytes == 2 * (10**9 + 10**6)
    blocks = replace(BILLION, block=2 * 10**7)
    assert by_stage[3].gathered(blocks)[0].bytes == 2 * (10**9 + 2 * 10**7)


def test_a_step_has_gradients_twice_where_their_sums_are_not_in_fp32() -> None:
    steps = {(stage, bits): zero(stage, grad_accum_dtype=bits).step(BILLION)[-1].bytes
             for stage, bits in ((0, None), (1, None), (2, None), (2, "bf16"))}  # fmt: skip
    assert steps == {(0, None): 6e9, (1, None): 8e9 / 8, (2, None): 4e9 / 8, (2, "bf16"): 8e9 / 8}
    sums = [zero(2, grad_accum_dtype=bits).gradients(BILLION)[0].bytes for bits in (None, "bf16")]
    assert sums == [4e9 / 8, 2e9 / 8 * 2]


def test_stage_1_has_whole_sums_in_fp32_from_the_start_where_it_adds_up_in_it() -> None:
    """DeepSpeed's BF16_Optimizer: 4 bytes of each number on each rank, and gradients in bf16 beside."""
    summing = zero(1, grad_accum_dtype="fp32")
    assert [each.bytes for each in summing.kept(BILLION)] == [4e9]
    assert [each.bytes for each in summing.gradients(BILLION)] == [6e9]
    assert [each.bytes for each in summing.step(BILLION)] == [4e9, 2e9]
    assert zero(1).kept(BILLION) == zero(1, adam_offload=True, grad_accum_dtype="fp32").kept(BILLION) == []


def test_gradients_in_fp32_of_weights_in_bf16_come_as_one_tensor() -> None:
    """DeepSpeed's stages 1 and 2 take it with the first gradient; of a 3B model on an H200 these are 14 GiB."""
    assert zero(2).gradients_at_once(BILLION) and not zero(1).gradients_at_once(BILLION)
    assert zero(1, grad_accum_dtype="fp32").gradients_at_once(BILLION)
    assert not zero(0).gradients_at_once(BILLION)
    assert zero(3).gradients_at_once(BILLION) and zero(3).gradients_at_once(replace(BILLION, width=4))
    assert zero(2, adam_offload=True).gradients_at_once(BILLION)  # on the device too
    assert not zero(2, adam_offload=True, grad_accum_dtype="bf16").gradients_at_once(BILLION)
    assert not zero(2).gradients_at_once(replace(BILLION, width=4))


def test_stage_3_holds_the_whole_model_beside_its_part_while_engine_hf_generates() -> None:
    assert zero(2).whole(BILLION) == []
    assert zero(3).whole(BILLION)[0].bytes == 2.2e9


def test_stage_3_hands_weights_over_in_buckets() -> None:
    assert zero(2).handed_over(BILLION) == []
    assert zero(3).handed_over(BILLION)[0].bytes == BUCKET_BYTES
    assert zero(3).handed_over(Model(1000, 0, 10, 10, width=2))[0].bytes == 2000
    assert zero(3).handed_over(Model(10**9, 0, 10, 10**9, width=2))[0].bytes == 2 * 10**9
    assert zero(2).on_its_way("it", BILLION).bytes == 2.2e9
    assert zero(3).on_its_way("it", BILLION).bytes == 2e6  # one weight


def test_buckets_are_whole_on_accelerators_and_touched_on_the_host() -> None:
    small = Model(trained=1000, frozen=0, largest=10, widest=10, width=2)
    assert zero(2).gradients(small)[1].bytes == 2 * BUCKET
    assert zero(2, overlap_comm=True).gradients(small)[1].bytes == 4 * BUCKET
    assert zero(2, on_cpu=True).gradients(small)[1].bytes == 2 * 1000
    large = replace(BILLION, trained=BUCKET // 2)  # stage 3 reduces a copy of what is in its one bucket
    assert zero(3).gradients(large)[1].bytes == zero(3, overlap_comm=True).gradients(large)[1].bytes
    assert zero(3).gradients(large)[1].bytes == 2 * (BUCKET + BUCKET // 2)


def test_stage_3_keeps_room_for_gradients_between_updates() -> None:
    assert [each.bytes for each in zero(3).kept(BILLION)] == [4e9 / 8, 2 * BUCKET]
    offloaded = zero(3, adam_offload=True).kept(BILLION)
    assert [each.bytes for each in offloaded] == [0, 2 * BUCKET]  # those on the host are counted with the states
    assert zero(2).kept(BILLION) == []
    stepping = [each.bytes for each in zero(3).step(BILLION)]
    assert stepping == [4e9 / 8, 2 * BUCKET, 4e9 / 8]  # a subgroup's gradients are copied


@pytest.mark.parametrize("stage", [1, 2])
def test_offloaded_states_lie_on_the_host(stage: int) -> None:
    states = zero(stage, adam_offload=True).optimizer(BILLION)[0]
    assert states.where == HOST and states.bytes == (12 + 4 + 2) * 1e9 / 8
    gradients = zero(2, adam_offload=True).gradients(BILLION)[0]
    assert gradients.where == DEVICE and gradients.bytes == 4e9 / 8 and "grad_accum_dtype bf16" in gradients.lower
    assert zero(2, adam_offload=True, grad_accum_dtype="bf16").gradients(BILLION)[0].bytes == 0
    assert all(item.where == HOST for item in zero(stage, adam_offload=True).step(BILLION))
    assert zero(stage).step(BILLION)[0].where == DEVICE


def test_stage_3_steps_a_billion_numbers_of_a_rank_at_once_however_many_ranks_there_are() -> None:
    """DeepSpeed counts a rank's own part of the weights."""
    model = Model(trained=8 * 10**9, frozen=0, largest=10**6, widest=10**6, width=2)
    steps = {ranks: zero(3, ranks).step(model)[-1].bytes for ranks in (1, 4, 16)}
    assert steps == {1: 4 * 10**9, 4: 4 * 10**9, 16: 2 * 10**9}
    offloaded = {bits: zero(3, 4, adam_offload=True, grad_accum_dtype=bits).optimizer(model) for bits in (None, "bf16")}
    assert [items[0].bytes for items in offloaded.values()] == [(12 + 4 + 4) * 2 * 10**9, (12 + 4 + 2) * 2 * 10**9]
