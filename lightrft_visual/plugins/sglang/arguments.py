"""From a run's settings to SGLang's server arguments, whose names are checked before anything is loaded."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from deepspeed.accelerator import get_accelerator

from ...config.vl import RunConfig
from ...errors import ConfigError, did_you_mean
from ...models.loading import Checkpoint
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


@dataclass
class SGLangSettings:
    """What the engine is built from.

    banned_ids: never sampled; eos_ids: end a response; context_length: of prompt and response, in tokens;
    max_batched_tokens: of one forward at most; extra: other server arguments by SGLang's names.
    """

    model: str
    context_length: int
    dtype: str = "float32"
    memory_utilization: float = 0.5
    enable_sleep: bool = False
    max_running: int = MOST_SEQUENCES
    max_batched_tokens: int | None = None
    enforce_eager: bool = False
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    seed: int = 0
    banned_ids: list[int] = field(default_factory=list)
    eos_ids: list[int] = field(default_factory=list)
    trust_remote_code: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: RunConfig, checkpoint: Checkpoint) -> SGLangSettings:
        """Those of a run."""
        rollout = config.rollout
        samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt // collectives.world_size()
        return cls(
            model=checkpoint.path,
            context_length=rollout.prompt_max_len + rollout.generate_max_len,
            dtype="bfloat16" if config.model.bf16 else "float32",
            memory_utilization=rollout.engine_mem_util,
            enable_sleep=rollout.enable_engine_sleep,
            max_running=rollout.engine_max_num_seqs or max(1, min(MOST_SEQUENCES, samples)),
            max_batched_tokens=rollout.engine_max_num_batched_tokens,
            enforce_eager=rollout.engine_enforce_eager,
            kv_cache_dtype=rollout.engine_kv_cache_dtype,
            quantization=rollout.engine_quantization,
            seed=config.train.seed,
            banned_ids=checkpoint.family.banned_ids(checkpoint.tokenizer),
            eos_ids=list(checkpoint.eos_ids),
            trust_remote_code=config.model.trust_remote_code,
            extra=dict(rollout.engine_kwargs),
        )


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


def server_arguments(settings: SGLangSettings, device: int, on_cpu: bool = False) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`, which are those of its ServerArgs. device: number of this process's one.

    Raises ConfigError for an `extra` that SGLang does not know, or that another setting decides.
    """
    s = settings
    arguments: dict[str, Any] = {
        "model_path": s.model,
        "dtype": s.dtype,
        "context_length": s.context_length + CONTEXT_MARGIN,
        "tp_size": 1,
        "base_gpu_id": device,
        "mem_fraction_static": s.memory_utilization,
        "enable_memory_saver": s.enable_sleep and not on_cpu,
        "disable_cuda_graph": s.enforce_eager or on_cpu,
        "max_running_requests": s.max_running,
        "chunked_prefill_size": s.max_batched_tokens or max(FEWEST_BATCHED_TOKENS, s.context_length),
        "kv_cache_dtype": s.kv_cache_dtype,
        "quantization": s.quantization,
        "random_seed": s.seed % 2**31,
        "trust_remote_code": s.trust_remote_code,
        "log_level": "error",
    }
    _check_extra(s.extra, set(arguments))
    return arguments | _usual(s.dtype, on_cpu) | s.extra


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


def _check_extra(extra: dict[str, Any], own: set[str]) -> None:
    known = known_arguments()
    for name in extra:
        if name not in known:
            raise ConfigError(f"engine_kwargs: SGLang has no server argument {name!r}{did_you_mean(name, known)}")
        if name in own:
            by = f"use {DECIDED_BY[name]}" if name in DECIDED_BY else "leave it out"
            raise ConfigError(f"engine_kwargs: {name} is set by the run itself; {by}")


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
    server_arguments(SGLangSettings.from_config(config, checkpoint), device=0, on_cpu=on_cpu)
