"""What is changed inside other libraries, but for one setting as long as a `with` lasts, as they leave no other way.

Each entry says why, and in which versions it was seen to be needed. An entry goes when the library offers a setting.
"""

import glob
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from inspect import signature
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

SHARED_MEMORY = "deepspeed_shm_comm"
SEEDS_OF_A_BLOCK = 32


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Inside, a variable of the environment has this value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


@contextmanager
def without_shared_memory() -> Iterator[None]:
    """Inside, `deepspeed.init_distributed` starts without its collectives over shared memory.

    Why: gloo is as fast for what a run exchanges. DeepSpeed would compile them (40 s at the first start, by a C++
    compiler that the host may lack), and make a named buffer of 66 MiB a rank: two runs with the same MASTER_PORT
    would share it, and of a killed run it would stay in memory until the host restarts.
    Versions: DeepSpeed 0.14 to 0.19 have no setting for it.
    """
    import deepspeed

    with patch.dict(deepspeed.ops.__compatible_ops__, {SHARED_MEMORY: False}):
        yield


@contextmanager
def gradients_one_by_one() -> Iterator[None]:
    """Inside, optimizers of ZeRO-3 are made that reduce each gradient of a block when it is there, also where the block
    is gathered at once (`zero3_loading.gather_by_blocks`).

    Why: they would wait for the backward hook of the block, which comes before the gradients where none of its inputs
    has one, as behind frozen embeddings. Zeros would be reduced, and the gradients never.
    Versions: DeepSpeed 0.19, which does so for experts that a batch does not use.
    """
    from deepspeed.runtime.zero import stage3

    with patch.object(stage3, "z3_leaf_parameter", lambda parameter: False):
        yield


def local_rank_under_open_mpi() -> AbstractContextManager[None]:
    """Inside, `deepspeed.initialize` finds LOCAL_RANK as the number that Open MPI gave to this task.

    Why: it refuses any other. A launcher that a task of `mpirun` starts numbers ranks of its own, which get the task's
    variables too.
    Versions: DeepSpeed 0.14 to 0.19.
    """
    name = "OMPI_COMM_WORLD_LOCAL_RANK"
    return variable(name, os.environ["LOCAL_RANK"]) if name in os.environ else nullcontext()


def settle_gradients(engine: Any) -> None:
    """Have an optimizer of ZeRO 2 or 3 take the gradients of all micro-batches of a step, none of which was the last.

    Why: with its states on the host it takes those of the last micro-batch's backward, with what was added up for their
    weights: a weight that this one does not use would lose its gradient. It takes all by what DeepSpeed calls itself
    where it does not count micro-batches.
    Versions: DeepSpeed 0.19.8.
    """
    engine.set_gradient_accumulation_boundary(True)
    engine.optimizer.finalize_gradient_accumulation_boundary()


def forget_gradients(zero: Any) -> None:
    """Take the gradients of a step, applied or discarded, out of an optimizer of ZeRO 1 to 3.

    Why: where they are kept a backward writes over those alone whose weights it uses. Those of other weights would be
    applied again, or what is not finite of a discarded step; and with its states on the host ZeRO 2 adds to what it
    added up in fp32, of which no step would be applied any more.
    Versions: DeepSpeed 0.19.8.
    """
    sums = getattr(zero, "averaged_gradients", {})
    sums.update(dict.fromkeys(sums))
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        for weights in getattr(zero, name, ()):
            if weights.grad is not None:
                weights.grad.zero_()
    if (kept := getattr(zero, "grad_partitions_flat_buffer", None)) is not None:
        kept.zero_()
    for kept in getattr(zero, "accumulated_grads_in_cpu", {}).values():
        kept.zero_()


@contextmanager
def folder_taken_literally(engine: Any) -> Iterator[None]:
    """Inside, this train engine loads a checkpoint of the folder that it is given, also where the path holds `[`.

    Why: it reads the path as a pattern. Beside `run[1]` it would load the weights of `run1`.
    Versions: DeepSpeed 0.14 to 0.19.
    """
    found_by = engine._get_all_ckpt_names
    with patch.object(engine, "_get_all_ckpt_names", lambda folder, tag: found_by(glob.escape(folder), tag)):
        yield


@contextmanager
def without_compiled_functions() -> Iterator[None]:
    """Inside, functions that are decorated with `torch.compile` stay as they are written.

    Why: where it compiles no layers, vLLM would still compile one small function of its sampler, in seconds.
    torch reads the variable when the decorator is applied, so what the trainer compiles later is compiled.
    Versions: vLLM 0.26 to 0.32, torch 2.11 to 2.13.
    """
    with variable("TORCHDYNAMO_DISABLE", "1"):
        yield


@contextmanager
def number_of_threads_settable() -> Iterator[None]:
    """Afterwards `torch.set_num_threads` is what it was before.

    Why: vLLM's worker on CPU replaces it by a function that does nothing, for the rest of the process, so that threads
    stay on the cores that they are bound to. In the trainer's process none are bound.
    Versions: vLLM 0.32.
    """
    import torch

    with patch.object(torch, "set_num_threads", torch.set_num_threads):
        yield


@contextmanager
def stream_of_its_own(accelerator: Any) -> Iterator[None]:
    """Inside, vLLM finds that this thread has chosen its stream, and leaves it there.

    Why: else vLLM gives the thread another one, for good, where it first asks for the stream on CUDA, as its NCCL does
    with engine_tp_size. All that the trainer computes would go there, while DeepSpeed's ZeRO-3 lets the default stream
    wait for its look at the gradients, and would read what it found before it is there.
    Versions: vLLM 0.26 to 0.32 with DeepSpeed 0.19.8, on CUDA.
    """
    with accelerator.stream(accelerator.current_stream()):
        yield


@contextmanager
def decoder_class_of_its_own(model: str, trust_remote_code: bool = False) -> Iterator[None]:
    """Inside, transformers makes models of this checkpoint with a subclass in place of their language model's class.

    Why: for torch.compile vLLM's transformers backend changes the class of the language model in place: how it is made
    and how it is called. The trainer's model is of that class too, and its next forward would fail. vLLM, which builds
    its model inside, changes the subclass.
    Versions: vLLM 0.26 to 0.32, for models of which it has no code of its own.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        found = AutoModel.from_config(config, trust_remote_code=trust_remote_code)
    own = type(found.get_decoder())
    name = own.__name__
    # A model of text alone is of this class itself, which transformers takes from the package of its file.
    homes = [sys.modules.get(module) for module in (own.__module__, own.__module__.rpartition(".")[0])]
    homes = [home for home in homes if getattr(home, name, None) is own]
    other = type(name, (own,), {"__module__": own.__module__, "__qualname__": own.__qualname__})
    with ExitStack() as inside:
        for home in homes:
            inside.enter_context(patch.object(home, name, other))
        yield


def program_limit(count: int) -> dict[str, Any]:
    """What torch.compile is given so that it makes up to `count` programs of a function, where it gives up after 8.

    Why: PyTorch before 2.13 has one limit, of the process, which is raised there and stays.
    Versions: torch 2.13 takes it with the function, and nothing is changed.
    """
    import torch

    if "recompile_limit" in signature(torch.compile).parameters:
        return {"recompile_limit": count}
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, count)
    return {}


def draw_seeds_in_blocks(worker: Any) -> None:
    """Have the sampler of vLLM's worker on a host without accelerator draw the seeds of a request's tokens in blocks.

    Why: it draws one for each token of each request, in a loop on the host: 7 of 115 ms of 64 samples of 32 tokens.
    The numbers are the same: a generator gives one after the other, however many it is asked for.
    Versions: vLLM 0.32; earlier ones draw otherwise, and are left as they are.
    """
    import torch
    from vllm.v1.sample.ops import topk_topp_sampler as ops

    sampler = getattr(worker.model_runner.sampler, "topk_topp_sampler", None)  # the second runner's draws otherwise
    if sampler is None or sampler.forward != getattr(sampler, "forward_cpu", None):
        return
    if not hasattr(torch.ops._C, "fused_gumbel_argmax") or sampler.use_fp64_gumbel:
        return
    ahead: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()

    def seed_of(generator: Any) -> int:
        seed = next(ahead.get(generator, iter(())), None)
        if seed is None:
            block = torch.randint(0, 2**31, (SEEDS_OF_A_BLOCK,), generator=generator, dtype=torch.long)
            seed, *others = block.tolist()
            ahead[generator] = iter(others)
        return seed

    def forward(logits: Any, generators: dict[int, Any], k: Any, p: Any) -> tuple[Any, Any]:
        logits = ops.apply_top_k_top_p(logits, k, p).float()
        seeds = torch.randint(0, 2**31, (len(logits),), dtype=torch.long)  # of rows without a generator
        seeds[list(generators)] = torch.tensor([seed_of(each) for each in generators.values()], dtype=torch.long)
        return torch.ops._C.fused_gumbel_argmax(logits, seeds), logits.log_softmax(dim=-1)

    sampler.forward = forward


def let_ray_read_environment() -> None:
    """Have Ray, where it is imported already, read its variables of the environment again.

    Why: vLLM imports it when it checks an engine's settings. A process that is told only then how the cluster of its
    run asks who calls would not do so.
    Versions: Ray 2.60, which does the same where it starts a cluster; earlier ones have no such cache.
    """
    initialize = getattr(getattr(sys.modules.get("ray._raylet"), "Config", None), "initialize", None)
    if initialize is not None:
        initialize("")


def forget_model(model: Any) -> None:
    """Take the model of an engine that ends out of vLLM's notes of reloaded layers and of language models.

    Why: the first are kept by the layer, weakly, yet the loaders in them refer to the layer; the second refer to the
    model, up to 0.28. Weights of an engine would stay in memory as long as the process, and on CUDA vLLM would start
    no second engine there.
    Versions: vLLM 0.26 to 0.32; those without such notes have nothing to forget.
    """
    notes = sys.modules.get("vllm.model_executor.model_loader.reload.layerwise")
    found = sys.modules.get("vllm.model_executor.models.interfaces")
    for layer in model.modules():
        getattr(notes, "LAYERWISE_INFO", {}).pop(layer, None)
        getattr(found, "_language_model_by_module", {}).pop(layer, None)


def begin_reload_anew(model: Any) -> None:
    """Take out of vLLM's notes what came of a reload that broke.

    Why: it holds a layer's weights back until all of them are there. Those of the broken reload would count in the
    next, which then fills a layer by halves, or fails.
    Versions: vLLM 0.32; earlier ones without such notes have nothing to forget.
    """
    notes = sys.modules.get("vllm.model_executor.model_loader.reload.layerwise")
    for layer in model.modules():
        if (note := getattr(notes, "LAYERWISE_INFO", {}).get(layer)) is not None:
            note.load_numel, note.loaded_weights = 0, []


def forget_allocators_error(device: int) -> None:
    """Clear the error that an earlier engine of this process may have left in the allocator of vLLM's sleep.

    Why: memory that is freed while it sleeps, or that there was none of, leaves one, and the allocator gives no more.
    A call that raises it clears it; this one asks for no memory.
    Versions: vLLM 0.26 to 0.32, on CUDA.
    """
    cumem: Any = sys.modules.get("vllm.device_allocator.cumem")
    if cumem is not None and cumem.CuMemAllocator.instance is not None:
        with suppress(RuntimeError):
            cumem.create_and_map((device, 0, 0, 0))
