"""Work that is counted on meta tensors, and the seconds that a plan makes of it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightrft_visual.config.load import parse_run
from lightrft_visual.config.placement import DEVICES
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.plugins.memory_plan import check, process, times
from lightrft_visual.plugins.memory_plan.meta import Held, Work, held_bytes, on_meta
from lightrft_visual.plugins.memory_plan.times import Speeds
from lightrft_visual.plugins.memory_plan.zero import Model, Zero, rounded

CARD = DEVICES["h100-80gb"]
ROWS, WIDTH, OUT = 7, 33, 65
PRODUCT = 2 * ROWS * WIDTH * OUT


def speeds_of(device, width, ranks, local, stage="2") -> Speeds:
    settings = parse_run(RunConfig, ["--zero_stage", stage]).config.distributed
    return Speeds.of(device, width, Zero(settings, ranks, device.on_cpu), local)


def counted(module: nn.Module, run, backward: bool = True) -> Work:
    return held_bytes(module, run, backward=backward).work


def layer(**more) -> tuple[nn.Module, torch.Tensor]:
    return on_meta(lambda: nn.Linear(WIDTH, OUT, **more)), torch.zeros(ROWS, WIDTH, device="meta", requires_grad=True)


def test_a_trained_layer_has_three_products_and_a_frozen_one_two() -> None:
    module, x = layer()
    assert counted(module, lambda: module(x)).flops == 3 * PRODUCT
    module.requires_grad_(False)
    assert counted(module, lambda: module(x)).flops == 2 * PRODUCT
    assert counted(module, lambda: module(x), backward=False).flops == PRODUCT


def test_checkpointing_computes_forward_again_and_that_is_told_apart() -> None:
    module, x = layer()
    work = counted(module, lambda: checkpoint(lambda y: module(y).sigmoid(), x, use_reentrant=False))
    assert (work.flops, work.again) == (4 * PRODUCT, PRODUCT)


@pytest.mark.parametrize("causal,share", [(False, 1.0), (True, 0.5)])
def test_attention_has_two_products_forward_and_five_backward(causal: bool, share: float) -> None:
    heads, length, size = 3, 17, 5
    x = torch.zeros(1, heads, length, size, device="meta", requires_grad=True)
    work = counted(nn.Identity(), lambda: F.scaled_dot_product_attention(x, x, x, is_causal=causal))
    assert work.flops == share * 3.5 * 4 * heads * length**2 * size


def test_views_are_calls_that_move_nothing() -> None:
    x = torch.zeros(6, 5, device="meta")
    assert counted(nn.Identity(), lambda: x.t()[1:], backward=False).moved == 0
    work = counted(nn.Identity(), lambda: x.t() + 1, backward=False)
    assert (work.moved, work.calls) == (2 * 30 * 4, 2)


def test_a_smaller_last_micro_batch_has_as_many_calls() -> None:
    assert Work(10, 2, 4, 8).times(1.5, 2) == Work(15, 3, 6, 16)
    assert Held(1, 2, 3, 4, 5, 6).work == Work(3, 4, 5, 6)


def test_a_card_waits_for_its_host_where_operations_are_many() -> None:
    speeds = speeds_of(CARD, 2, 1, 1)
    small, large = Work(flops=1e9, calls=10_000), Work(flops=1e15, calls=100)
    assert speeds.seconds(small) == pytest.approx(10_000 * times.CALL, rel=1e-3)
    assert speeds.seconds(large) == pytest.approx(1e15 / (times.PRODUCTS * CARD.flops), rel=1e-3)
    assert speeds_of(CARD, 4, 1, 1).products == speeds.products * times.FLOAT32


def test_a_host_computes_what_it_starts(monkeypatch) -> None:
    monkeypatch.setattr(times, "smallest_call", lambda: 1e-6)
    speeds = speeds_of(replace(CARD, name="cpu", flops=1e9), 4, 1, 1)
    work = Work(flops=7e8, calls=1000)
    assert speeds.seconds(work) == pytest.approx(7e8 / (times.HOST_PRODUCTS * 1e9) + 1000 * times.HOST_CALL * 1e-6)


def test_ranks_of_several_hosts_exchange_by_the_network_and_one_rank_nothing() -> None:
    near, far = (speeds_of(CARD, 2, 16, local, "3") for local in (16, 8))
    assert near.peers == 9 * far.peers
    model, alone = Model(trained=10**9, frozen=0, largest=10**6, widest=10**6, width=2), speeds_of(CARD, 2, 1, 1, "3")
    assert alone.reducing(model, 4) == alone.gathering(model, 2) == 0
    assert far.reducing(model, 4) == pytest.approx(4 * 15 / 16 * 2e9 / far.peers)
    assert far.gathering(model, 2) == pytest.approx(2 * 15 / 16 * 2e9 / far.peers)


@pytest.mark.parametrize(
    ("product", "gib", "like"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80gb"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 39.5, "a100-40gb"),
        ("NVIDIA H200", 139.8, "h200-141gb"),
        ("NVIDIA L4", 22.0, "l4-24gb"),
        ("NVIDIA L40", 44.9, "l40-48gb"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090-24gb"),
    ],
)
def test_the_card_that_is_there_is_known_by_its_product_name(monkeypatch, product, gib, like) -> None:
    card = SimpleNamespace(device_name=lambda: "cuda", total_memory=lambda: gib * 2**30)
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: card)
    monkeypatch.setattr(process, "device_products", lambda: [product])
    found, listed = process.present(8), DEVICES[like]
    assert (found.name, found.flops, found.link, found.memory) == (like, listed.flops, listed.link, gib * 2**30)
    assert speeds_of(found, 2, 8, 8).peers == speeds_of(listed, 2, 8, 8).peers


def test_a_card_that_is_not_listed_has_the_speeds_of_one_with_as_much_memory(monkeypatch) -> None:
    card = SimpleNamespace(device_name=lambda: "cuda", total_memory=lambda: 44 * 2**30)
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: card)
    monkeypatch.setattr(process, "device_products", lambda: ["Another 48GB"])
    assert (process.present(1).name, process.present(1).flops) == ("cuda", DEVICES["l40s-48gb"].flops)


def test_a_step_of_stage_0_is_over_all_of_a_model() -> None:
    model = Model(10**9, 0, 10**6, 10**6, width=2)
    whole, part = (speeds_of(CARD, 2, 8, 8, stage).optimizer_step(model, 1) for stage in ("0", "1"))
    assert whole == pytest.approx(8 * part, rel=0.1)  # but for starting operations


def test_ranks_of_a_host_are_no_more_than_its_cards(monkeypatch) -> None:
    card = SimpleNamespace(device_name=lambda: "cuda", total_memory=lambda: 80 * 2**30, device_count=lambda: 4)
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: card)
    monkeypatch.setattr(process, "device_products", lambda: ["NVIDIA H100"])
    config = parse_run(RunConfig, ["--plan_world_size", "16"]).config
    device, *ranks = check.named_device(config)
    assert ranks == [16, 4] and device.host == process.host_memory() / 4
    assert check.named_device(parse_run(RunConfig, "--plan_world_size 16 --plan_device cpu".split()).config)[2] == 16


def test_page_locked_tensors_take_powers_of_two() -> None:
    (item,) = rounded("states", [3 * 2**20, 2**20])
    assert item.bytes == 2**20 and item.where == "host"
    assert rounded("states", [2**20, 0]) == []


@pytest.mark.slow
def test_small_micro_batches_and_an_engine_without_graphs_take_longer() -> None:
    argv = "--pretrain Qwen/Qwen2.5-VL-3B-Instruct --bf16 --lora_rank 32 --generate_max_len 256 --engine_type vllm "
    argv += "--prompt_max_len 283 --rollout_batch_size 16 --n_samples_per_prompt 8 --train_batch_size 128"

    def seconds(*more: str) -> dict[str, float]:
        config = parse_run(RunConfig, [*argv.split(), *more]).config
        return {phase.name: phase.seconds for phase in check.Planner(CARD, 1, 1).plan(config).phases}

    small, large = (seconds("--micro_train_batch_size", size) for size in ("8", "32"))
    assert small["train"] > 1.5 * large["train"]
    assert seconds("--engine_enforce_eager", "true")["generate"] > 5 * large["generate"]
