"""What models keep in fp32 stays so beside weights that train in bf16, and what is said where it cannot."""

import logging
from pathlib import Path

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from forked import on_ranks
from torch import nn

from lightrft_visual.config.shared import DistributedConfig
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings
from lightrft_visual.runtime.precision import FP32Kept, named_for_fp32
from lightrft_visual.runtime.train_engine import TrainEngine

FINE = 1 + 2**-12  # more than bf16 has
BATCHES = [(rank, step) for step in range(3) for rank in range(2)]


class Denoiser(nn.Module):
    """A model of which diffusers loads the norm and the gain in fp32; the gain is frozen."""

    _keep_in_fp32_modules = ("norm", "gain")

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8).bfloat16(), nn.LayerNorm(8), nn.Linear(8, 4).bfloat16()
        self.gain = nn.Parameter(torch.full((8,), FINE), requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.body(values.bfloat16()).to(self.norm.weight.dtype)) * self.gain
        return self.head(hidden.bfloat16()).float()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))


def plain() -> list[float]:
    """The norm's weight after the same steps by AdamW alone, on fp32 weights that the model's are copies of."""
    torch.manual_seed(0)
    model = Denoiser()
    masters = {name: weight.detach().float() for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(
        [weight.requires_grad_() for weight in masters.values()], 1e-2, (0.9, 0.95), weight_decay=0.0
    )
    trained = {name: weight for name, weight in model.named_parameters() if name in masters}
    for step in range(3):
        model.zero_grad()
        sum(model(batch(rank, step)).square().mean() / 2 for rank in range(2)).backward()
        for name, weight in trained.items():
            masters[name].grad = weight.grad.float()
        optimizer.step()
        for name, weight in trained.items():
            weight.data.copy_(masters[name])
    return model.norm.weight.tolist()


def trained(stage: int, folder: str, **settings) -> dict:
    """Types and values after three steps, of which the last is made again after loading what was saved before it."""
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage, **settings), bf16=True)
    torch.manual_seed(0)
    model = Denoiser()
    schedule = OptimizerSettings(1e-2, total_steps=9, max_norm=0.0, scheduler="constant_with_warmup")
    engine = strategy.prepare(model, schedule)
    start = weight_of(engine, "gain")
    for step in range(2):
        update(engine, step)
    engine.save(folder, "two")
    update(engine, 2)
    first = weight_of(engine, "norm.weight")
    engine.load(folder, "two")
    update(engine, 2)
    return {
        "types": {name: str(weight.dtype) for name, weight in model.named_parameters()},
        "saved": saved_names(Path(folder, "two")),
        "gain": start,
        "norm": first,
        "again": weight_of(engine, "norm.weight"),
    }


def saved_names(folder: Path) -> list[str]:
    """Weights of the checkpoint's files; frozen ones have a place of their own in some of them."""
    found: set[str] = set()
    for file in folder.glob("*model_states.pt"):
        state = torch.load(file, weights_only=False)
        found |= {*(state["module"] or {}), *(state.get("frozen_param_fragments") or {})}
    return sorted(found)


def update(engine: TrainEngine, step: int) -> None:
    engine.accumulate(engine(batch(collectives.rank(), step)).square().mean() / 2, last=True)
    assert engine.step().applied


def weight_of(engine: TrainEngine, name: str) -> list[float]:
    weight = dict(engine.module.named_parameters())[name]
    with engine.gathered([weight]):
        return weight.detach().float().tolist()


def scored(stage: int) -> dict:
    torch.manual_seed(0)
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage), bf16=True)
    model = Denoiser()
    strategy.prepare_inference(model)(batch(0, 0))
    return {name: str(weight.dtype) for name, weight in model.named_parameters()}


def accumulated(stage: int, **settings) -> float:
    """The relative error of a gradient that is summed over 64 micro-batches of one sign."""
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage, **settings), bf16=True)
    engine = strategy.prepare(torch.nn.Linear(16, 16, bias=False), OptimizerSettings(1e-3, 9, max_norm=0.0))
    draw, wanted = torch.Generator().manual_seed(0), torch.zeros(16, 16, dtype=torch.float64)
    for number in range(64):
        inputs = torch.rand(4, 16, generator=draw).bfloat16()
        wanted += inputs.double().sum(dim=0).expand(16, 16)
        engine.accumulate(engine(inputs).float().sum() / collectives.world_size(), last=number == 63)
    found = safe_get_full_grad(next(engine.module.parameters())).double()
    return ((found - wanted).norm() / wanted.norm()).item()


def by_case(out: str) -> dict:
    """bf16 training of a model whose library keeps a part in fp32."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lightrft_visual.runtime.precision").addHandler(handler)
    DeepspeedStrategy(DistributedConfig(), bf16=True).setup_distributed()
    results: dict = {"plain": plain()}
    cases = {"0": (0, {}), "1_fp32": (1, {"grad_accum_dtype": "fp32"}), "2": (2, {})}
    cases |= {"2_host": (2, {"adam_offload": True}), "3": (3, {})}
    for name, (stage, settings) in cases.items():
        said.clear()
        results[name] = trained(stage, f"{out}/{name}", **settings) | {"said": list(said)}
    cases = {"2": (2, {}), "2_host": (2, {"adam_offload": True}), "2_bf16": (2, {"grad_accum_dtype": "bf16"})}
    cases |= {"1_fp32": (1, {"grad_accum_dtype": "fp32"}), "3": (3, {})}
    results["accumulated"] = {name: accumulated(stage, **settings) for name, (stage, settings) in cases.items()}
    results["frozen"] = {str(stage): scored(stage) for stage in (2, 3)}
    return results


KEPT = ("0", "1_fp32", "2", "2_host")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    return on_ranks(by_case, str(tmp_path_factory.mktemp("precision")))


@pytest.mark.parametrize("case", KEPT)
def test_a_named_part_trains_in_fp32(results, case):
    for rank in results:
        types = rank[case]["types"]
        assert types["norm.weight"] == types["norm.bias"] == types["gain"] == "torch.float32"
        assert types["body.weight"] == types["head.weight"] == "torch.bfloat16"
        assert rank[case]["norm"] != torch.tensor(rank[case]["norm"]).bfloat16().tolist()
        assert rank[case]["norm"] == pytest.approx(rank["plain"], abs=2e-4)  # gradients travel in bf16
        assert rank[case]["said"] == []
    assert results[0][case]["norm"] == results[1][case]["norm"]


def test_zero_3_trains_it_in_bf16_and_says_so_once(results):
    types = results[0]["3"]["types"]
    assert types["norm.weight"] == "torch.bfloat16" and types["gain"] == "torch.float32"
    told = "2 weights that the model keeps in fp32 (norm.weight, norm.bias) compute in bfloat16, as ZeRO-3"
    assert [line.startswith(told) for line in results[0]["3"]["said"]] == [True] and results[1]["3"]["said"] == []


@pytest.mark.parametrize("case", [*KEPT, "3"])
def test_frozen_values_are_whole_and_a_checkpoint_has_what_trains_and_gives_the_same_step(results, case):
    for rank in results:
        assert rank[case]["gain"] == [1 + 2**-12] * 8
        assert rank[case]["again"] == rank[case]["norm"]
    trained = ["body.bias", "body.weight", "head.bias", "head.weight", "norm.bias", "norm.weight"]
    assert results[0][case]["saved"] == trained


@pytest.mark.parametrize("stage", ("2", "3"))
def test_a_frozen_copy_has_the_same_types(results, stage):
    types = results[0]["frozen"][stage]
    assert types["norm.weight"] == types["gain"] == "torch.float32" and types["body.weight"] == "torch.bfloat16"


def test_names_are_whole_parts_of_paths():
    class Experts(nn.Module):
        _keep_in_fp32_modules_strict = ["gate.weight"]

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.gate_up = nn.Linear(2, 2), nn.Linear(2, 2)

    model = nn.ModuleDict({"language_model": Experts(), "tower": nn.Linear(2, 2)})
    assert list(named_for_fp32(model)) == ["language_model.gate.weight"]
    assert list(named_for_fp32(Experts())) == ["gate.weight"]


def test_weights_that_were_loaded_to_be_trained_and_are_frozen_are_named_with_what_keeps_them(caplog):
    model = Denoiser().requires_grad_(False).bfloat16()  # an expert that serves no trained step
    FP32Kept(model, divided=True).warn(torch.bfloat16)
    assert "3 weights" in caplog.text and "So does --trainable_models" in caplog.text


def test_gradients_of_many_micro_batches_add_up_in_fp32(results):
    for rank in results:
        errors = rank["accumulated"]
        assert max(errors[name] for name in ("1_fp32", "2", "2_host", "3")) < 1e-3 < 3e-3 < errors["2_bf16"], errors
