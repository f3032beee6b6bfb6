"""From a run's settings to SGLang's server arguments, whose names are checked before anything is loaded."""

import inspect
import os
from importlib.util import find_spec
from typing import Any

from deepspeed.accelerator import get_accelerator

from ...config.vl import RunConfig
from ...errors import ConfigError
from ...models.loading import Checkpoint
from ...rollout.resident import check_engine_kwargs
from ...runtime import collectives
from ...runtime.start_up import importing

VERSION = "0.5.23"  # the one whose source this adapter was written against
INSTALL = (
    f"engine_type sglang needs the package sglang: pip install sglang=={VERSION}, on a host with CUDA and in an "
    "environment without vLLM, whose torch is another; or use --engine_type vllm, or hf"
)
# Arguments of SGLang that a setting of the run decides.
DECIDED_BY = {
    "model_path": "pretrain", "dtype": "bf16", "context_length": "prompt_max_len and generate_max_len",
    "random_seed": "seed", "tp_size": "engine_tp_size", "mem_fraction_static": "engine_mem_util",
    "enable_memory_saver": "enable_engine_sleep", "trust_remote_code": "trust_remote_code",
    "disable_cuda_graph": "engine_enforce_eager", "max_running_requests": "engine_max_num_seqs",
    "chunked_prefill_size": "engine_max_num_batched_tokens", "kv_cache_dtype": "engine_kv_cache_dtype",
    "quantization": "engine_quantization",
}  # fmt: skip
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # whose processed images are handed over as they are
TEXT_ONLY = ("qwen2", "qwen3", "llama", "mistral")
MOST_SEQUENCES, FEWEST_BATCHED_TOKENS = 256, 8192
CONTEXT_MARGIN = 4  # SGLang ends a request a few tokens before the context is full
MOST_OF_FREE = 0.9  # memory that weights and cache may take; SGLang computes in the rest


def prepare_environment() -> None:
    """SGLang reads these when it starts; an explicit setting of the user's stays, except where results hang on it."""
    # Its cache of image embeddings is not emptied with the others: it would serve those of an older vision tower.
    os.environ["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    # Of a launcher: a process group of SGLang's own would wait for that launcher's store.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)


def require_package() -> None:
    """ConfigError, which says how to install it, where SGLang is not there."""
    found = find_spec("sglang")
    if found is None or found.origin is None:  # a folder of that name, without the package, is found without an origin
        raise ConfigError(INSTALL)


def context_length(config: RunConfig) -> int:
    """Tokens of prompt and response."""
    return config.rollout.prompt_max_len + config.rollout.generate_max_len


def server_arguments(config: RunConfig, checkpoint: Checkpoint, device: int, on_cpu: bool = False) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`, which are those of its ServerArgs, for a run.

    Args:
        config: of the run.
        checkpoint: of its model.
        device: number of this process's one.
        on_cpu: whether it has none.

    Raises:
        ConfigError: for an argument of engine_kwargs that SGLang does not know, or that another setting decides.
    """
    rollout, model, length = config.rollout, config.model, context_length(config)
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt // collectives.world_size()
    dtype = "bfloat16" if model.bf16 else "float32"
    arguments: dict[str, Any] = {
        "model_path": checkpoint.path,
        "dtype": dtype,
        "context_length": length + CONTEXT_MARGIN,
        "tp_size": 1,
        "base_gpu_id": device,
        "mem_fraction_static": rollout.engine_mem_util,
        "enable_memory_saver": rollout.enable_engine_sleep and not on_cpu,
        "disable_cuda_graph": bool(rollout.engine_enforce_eager) or on_cpu,
        "max_running_requests": rollout.engine_max_num_seqs or max(1, min(MOST_SEQUENCES, samples)),
        "chunked_prefill_size": rollout.engine_max_num_batched_tokens or max(FEWEST_BATCHED_TOKENS, length),
        "kv_cache_dtype": rollout.engine_kv_cache_dtype,
        "quantization": rollout.engine_quantization,
        "random_seed": config.train.seed % 2**31,
        "trust_remote_code": model.trust_remote_code,
        "log_level": "error",
    }
    extra = rollout.engine_kwargs
    check_engine_kwargs("SGLang has no server argument", extra, known_arguments(), arguments, DECIDED_BY)
    return arguments | _usual(dtype, on_cpu) | extra


def _usual(dtype: str, on_cpu: bool) -> dict[str, Any]:
    """What a user may set otherwise."""
    usual: dict[str, Any] = {"schedule_policy": "lpm"}
    if on_cpu:  # its plain operations, which have no deterministic mode
        cpu = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
        return usual | cpu | {"disable_overlap_schedule": True, "enable_deterministic_inference": False}
    if dtype == "float32":
        usual["attention_backend"] = "triton"  # the others have no float32
    # Requests' seeds are read in this mode alone; without it a response depends on what else is in the batch.
    return usual | {"enable_deterministic_inference": True}


def share_of_free(util: float, total: float, free: float) -> float:
    """A share of the device's memory as SGLang counts: of what is free when it starts.

    The trainer has its part by then.

    Args:
        util: `engine_mem_util`, which is of all of the memory.
        total: bytes of the memory.
        free: those that are free now.
    """
    return min(util * total / max(1.0, free), MOST_OF_FREE)


def known_arguments() -> set[str]:
    """Names that the installed SGLang's ServerArgs takes."""
    with importing():
        from sglang.srt.server_args import ServerArgs
    return set(inspect.signature(ServerArgs).parameters)


def check_engine(config: RunConfig, checkpoint: Checkpoint) -> None:
    """ConfigError for what this engine cannot do, before any model is loaded."""
    kind, rollout = checkpoint.config.model_type, config.rollout
    if kind not in (*FAMILIES, *TEXT_ONLY):
        served = ", ".join((*FAMILIES, *TEXT_ONLY))
        others = "vllm, or hf" if checkpoint.family.served else "hf"
        raise ConfigError(f"engine_type sglang is built for {served}, not for {kind}: use --engine_type {others}")
    if rollout.use_fire:
        raise ConfigError("use_fire draws the first token at its own temperature, which SGLang cannot: use vllm, or hf")
    require_package()
    on_cpu = get_accelerator().device_name() == "cpu"
    server_arguments(config, checkpoint, device=0, on_cpu=on_cpu)
