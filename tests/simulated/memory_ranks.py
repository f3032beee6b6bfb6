"""Run by two ranks: the device itself, its collectives, bytes of it while states are away, and around a guest."""

import gc
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from forked import leave
from simulated.accelerator import install

from lightrft_visual.config.vl import DistributedConfig
from lightrft_visual.models.weight_copies import standing_in, whole_on_host
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings
from lightrft_visual.runtime.offload import OffloadedModule, on_device


def allocated() -> int:
    gc.collect()
    return get_accelerator().memory_allocated()


def trained(stage: int, folder: str) -> dict[str, int]:
    """An engine after a step, without its states, without its weights too, after the next step, and at most while it
    goes back to what it saved then."""
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage))
    before = allocated()
    module = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 256))
    weights = sum(parameter.nbytes for parameter in module.parameters())
    engine = strategy.prepare(module, OptimizerSettings(1e-2, total_steps=9))
    inputs = torch.randn(6, 64).to(strategy.device)

    def step() -> int:
        engine.accumulate(engine(inputs).square().sum(), last=True)
        engine.step()
        return allocated() - before

    seen = {"weights": weights, "after": step()}
    engine.offload()
    seen["states_away"] = allocated() - before
    engine.offload_weights()
    seen["all_away"] = allocated() - before
    seen["next"] = step()
    engine.save(folder, f"stage_{stage}")
    get_accelerator().reset_peak_memory_stats()
    engine.load(folder, f"stage_{stage}")
    seen["loading"] = get_accelerator().max_memory_allocated() - before
    seen["again"] = step()
    optimizer = engine.engine.lr_scheduler.optimizer
    for fused, move in ((False, engine.save), (True, engine.load)):
        for group in optimizer.param_groups:
            group["fused"] = fused
        move(folder, f"plain_{stage}")
    seen["counted_on"] = {state["step"].device.type for state in optimizer.state.values()} == {strategy.device.type}
    return seen


def visited() -> dict[str, int]:
    """A guest at home, inside, and at home again."""
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=0))
    before = allocated()
    module = strategy.prepare_inference(torch.nn.Linear(512, 512), on_host=True)
    guest = OffloadedModule(module, module, strategy.device)
    home = allocated() - before
    with guest:
        inside = allocated() - before
        answer = guest(torch.ones(1, 512).to(strategy.device)).cpu()
    assert torch.allclose(answer, module(torch.ones(1, 512)), atol=1e-5)
    del answer
    return {"home": home, "inside": inside, "again": allocated() - before, "size": 512 * 513 * 4}


def taken_along(device: torch.device) -> dict[str, int]:
    """A module of the host that works on the device for a while, with a buffer; copies of its weights to the host."""
    module = torch.nn.BatchNorm1d(2048, affine=True)
    before, homes = allocated(), [each.data_ptr() for each in module.parameters()]
    with on_device(module, device, offload=True):
        inside = allocated() - before
        answer = module(torch.ones(2, 2048, device=device)).cpu()
    same = sum(each.data_ptr() == home for each, home in zip(module.parameters(), homes))
    assert torch.allclose(answer, module(torch.ones(2, 2048))) and module.running_mean.device.type == "cpu"
    del answer
    module.to(device)
    with on_device(module, device, offload=True):
        pass
    assert all(each.device.type == "cpu" for each in module.parameters())  # was on the device before: leaves it too
    return {"inside": inside, "again": allocated() - before, "same": same, "size": 4 * 2048 * 4}


def exported() -> dict[str, int]:
    """The most that the device held beside it while a model that is divided was copied to rank 0's host, written, and
    used again."""
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=3))
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    wanted = [each.detach().clone() for each in module.parameters()]
    engine = strategy.prepare(module, OptimizerSettings(1e-2, total_steps=9))
    before, native = allocated(), get_accelerator()
    native.reset_peak_memory_stats()
    copies = whole_on_host(engine.module.parameters(), keep=collectives.is_rank_0())
    with standing_in(copies):
        same = [torch.equal(a, b.data.cpu()) for a, b in zip(wanted, engine.module.parameters())]
        homes = {each.device.type for each in engine.module.state_dict().values()}
    peak = native.max_memory_allocated() - before
    engine(torch.ones(1, 512).to(strategy.device))
    return {"peak": peak, "whole": sum(each.nbytes for each in wanted), "same": sum(same), "on_host": homes == {"cpu"}}


def tried_arithmetic() -> None:
    """Results, views and memory of the device are the host's; host tensors are refused."""
    x, w = torch.randn(5, 4, device="sim"), torch.nn.Linear(4, 3).to("sim")
    w(x).square().mean().backward()
    twin = torch.nn.Linear(4, 3)
    twin.load_state_dict({name: value.cpu() for name, value in w.state_dict().items()})
    twin(x.cpu()).square().mean().backward()
    assert torch.allclose(w.weight.grad.cpu(), twin.weight.grad, atol=1e-6)
    host, chosen = torch.randn(5, 4), torch.tensor([[2], [0], [1], [3], [2]])
    refused("same device", lambda: x + host)
    refused("same device", lambda: torch.cat([x, host]))
    refused("same device", lambda: x @ host.T)
    refused("same device", lambda: x.gather(1, chosen))
    refused("same device", lambda: x.masked_fill(host > 0, 0))
    refused("same device", lambda: x.index_put_((chosen[:, 0],), host))
    refused("device type for generator", lambda: torch.randn(3, device="sim", generator=torch.Generator()))
    assert torch.equal((x[chosen[:, 0]] * torch.tensor(2.0)).cpu(), x.cpu()[chosen[:, 0]] * 2)
    x[1:3].zero_()
    assert x.cpu()[1:3].abs().sum() == 0 and x.cpu()[0].abs().sum() > 0
    before = allocated()
    big = torch.empty(1 << 20, device="sim")
    assert allocated() - before == 4 << 20
    del big
    assert allocated() == before


def refused(told: str, action) -> None:
    try:
        action()
    except RuntimeError as error:
        assert told in str(error)
    else:
        raise AssertionError(f"nothing said: {told}")


def tried_collectives(rank: int) -> None:
    """Those of the simulated process group take tensors of the device only; ours take host tensors as well."""
    mine = torch.arange(4.0, device="sim") + 10 * rank
    largest, sent, whole, half, swapped = mine.clone(), mine.clone(), *(torch.zeros(n, device="sim") for n in (8, 2, 4))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.broadcast(sent, src=1)
    assert largest.cpu().tolist() == sent.cpu().tolist() == [10, 11, 12, 13]
    dist.all_gather_into_tensor(whole, mine)
    assert whole.cpu().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    parts = [torch.zeros(4, device="sim") for _ in range(2)]
    dist.all_gather(parts, mine)
    assert parts[1].cpu().tolist() == [10, 11, 12, 13]
    dist.reduce_scatter_tensor(half, mine)
    assert half.cpu().tolist() == ([10, 12] if rank == 0 else [14, 16])
    dist.all_to_all_single(swapped, mine)
    assert swapped.cpu().tolist() == ([0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13])
    objects, box = [None, None], ["text"] if rank == 0 else [None]
    dist.all_gather_object(objects, {"rank": rank})
    dist.broadcast_object_list(box, src=0)
    assert objects == [{"rank": 0}, {"rank": 1}] and box == ["text"]
    refused("device type cpu", lambda: dist.all_reduce(torch.zeros(1)))
    assert collectives.all_reduce_sum(torch.tensor([1.0, rank])).tolist() == [2, 1]
    assert collectives.all_reduce_max(torch.tensor([1.0, rank])).tolist() == [1, 1]
    assert collectives.all_gather_numbers(torch.tensor([1.0, rank])).tolist() == [[1, 0], [1, 1]]
    assert collectives.all_reduce_sum(mine).device == mine.device
    received = collectives.exchange_objects([torch.tensor([rank, other]) for other in range(2)])
    assert received[1 - rank].tolist() == [1 - rank, rank]
    collectives.barrier()


def main(out: str) -> None:
    install()
    strategy = DeepspeedStrategy(DistributedConfig())
    strategy.setup_distributed()
    tried_arithmetic()
    tried_collectives(collectives.rank())
    results = {"guest": visited(), "taken_along": taken_along(strategy.device), "exported": exported()}
    results |= {f"stage_{stage}": trained(stage, out) for stage in (2, 3)}
    Path(out, f"{collectives.rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
    sys.stdout.flush()
    os._exit(0)  # as ranks of the fork server end: the end of an interpreter aborts at times, when all is done
