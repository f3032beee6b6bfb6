"""vLLM beside the trainer in one process: every rank is an engine worker (external launcher), as in OpenRLHF's and
TRL's colocated mode. Tested with vLLM 0.26 to 0.32."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ...batches.rollouts import PromptFeatures
from ...batches.sampling import Completion, SamplingSettings
from ...config.vl import RunConfig
from ...errors import RolloutError
from ...models.loading import Checkpoint
from ...models.vlm.modality import banned_token_ids
from ...strategy import collectives
from ...strategy.deepspeed import TrainEngine
from ...strategy.host import free_port
from .rules import FIRST_TOKEN_SCALE
from .tensor_parallel import PromptSharing


@dataclass
class VLLMSettings:
    """What the engine is built from. `banned_ids` are never sampled; `max_model_len` counts prompt and response."""

    model: str
    max_model_len: int
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    memory_utilization: float = 0.5
    enable_sleep: bool = False
    max_images: int = 10
    max_videos: int = 1
    max_num_seqs: int = 256
    seed: int = 0
    banned_ids: list[int] = field(default_factory=list)
    trust_remote_code: bool = False
    vision: bool = True
    processor_kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: RunConfig, checkpoint: Checkpoint) -> VLLMSettings:
        """Those of a run; rows of all ranks of an engine are in flight at once."""
        rollout, data = config.rollout, config.data
        samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt // collectives.world_size()
        pixels = {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}
        return cls(
            model=checkpoint.path,
            max_model_len=rollout.prompt_max_len + rollout.generate_max_len,
            dtype="bfloat16" if config.model.bf16 else "float32",
            tensor_parallel_size=rollout.engine_tp_size,
            memory_utilization=rollout.engine_mem_util,
            enable_sleep=rollout.enable_engine_sleep,
            max_images=rollout.limit_mm_image_per_prompt,
            max_videos=rollout.limit_mm_video_per_prompt,
            max_num_seqs=max(1, min(256, samples * rollout.engine_tp_size)),
            seed=config.train.seed,
            banned_ids=banned_token_ids(checkpoint.config, checkpoint.tokenizer),
            trust_remote_code=config.model.trust_remote_code,
            vision=checkpoint.vision,
            processor_kwargs={name: value for name, value in pixels.items() if value is not None},
        )


def _prepare_environment() -> None:
    """vLLM reads these at import and start; an explicit setting of the user's stays."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if get_accelerator().device_name() == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port())


class VLLMEngine:
    """Generation by vLLM's `LLM` in this process.

    With tensor_parallel_size above 1, neighbouring ranks are one engine: all of them call each method together, and
    each gets the completions of its own requests. Raises ConfigError when the ranks do not divide into such groups,
    RolloutError when the engine cannot be built or returns fewer completions than asked for.
    """

    shares_weights = False

    def __init__(self, settings: VLLMSettings):
        self.sharing = PromptSharing(settings.tensor_parallel_size)
        _prepare_environment()
        self.settings = settings
        self.asleep = False
        self.failure: str | None = None
        self.llm = self._build()
        self.tokenizer = self.llm.get_tokenizer()

    @classmethod
    def from_config(cls, config: RunConfig, checkpoint: Checkpoint, actor: TrainEngine) -> VLLMEngine:
        """The engine of a run; the actor's weights come by `update_weights`."""
        return cls(VLLMSettings.from_config(config, checkpoint))

    def _build(self):
        # Imported late: vLLM detects its platform and reads the environment above at import.
        from vllm import LLM, EngineArgs

        from .rules import sampling_rules
        from .shared_memory import use_private_name

        s = self.settings
        on_cpu = get_accelerator().device_name() == "cpu"
        if on_cpu and s.tensor_parallel_size > 1:
            use_private_name()
        extra: dict[str, Any] = {}
        if s.vision:
            extra["limit_mm_per_prompt"] = {"image": s.max_images, "video": s.max_videos}
            extra["mm_processor_kwargs"] = s.processor_kwargs or None
            if "mm_device_do_normalize" in {each.name for each in fields(EngineArgs)}:
                # On, vLLM takes the image processor's mean and deviation for videos too, which may have others.
                extra["mm_device_do_normalize"] = False
        try:
            return LLM(
                model=s.model,
                dtype=s.dtype,
                max_model_len=s.max_model_len,
                tensor_parallel_size=s.tensor_parallel_size,
                distributed_executor_backend="external_launcher",
                gpu_memory_utilization=s.memory_utilization,
                enable_sleep_mode=s.enable_sleep and not on_cpu,
                enforce_eager=on_cpu,
                max_num_seqs=s.max_num_seqs,
                max_num_batched_tokens=max(8192, s.max_model_len),
                logprobs_mode="processed_logprobs",
                logits_processors=[sampling_rules(s.banned_ids)],
                seed=s.seed,
                trust_remote_code=s.trust_remote_code,
                disable_log_stats=True,
                **extra,
            )
        except Exception as error:
            raise RolloutError(f"vLLM could not load {s.model}: {type(error).__name__}: {error}") from error

    def generate(self, prompts: Sequence[PromptFeatures], settings: SamplingSettings) -> list[list[Completion]]:
        """n completions per prompt, in order. With FIRE the first token is drawn at its own temperature."""
        prompts, own = self.sharing.share(prompts)
        entries = [self._entry(prompt) for prompt in prompts]
        params = [self._params(settings, prompt.seed) for prompt in prompts]
        outputs = self._run(entries, params) if entries else []
        return [self._completions(output, settings) for output in outputs[own]]

    def _run(self, prompts: list[dict[str, Any]], params: list) -> list:
        if self.failure is not None:
            # Requests of the failed call are still in vLLM's scheduler; it would turn in circles on them.
            raise RolloutError(f"the engine failed before: {self.failure}")
        try:
            return self.llm.generate(prompts, params, use_tqdm=False)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise RolloutError(f"vLLM failed while generating: {self.failure}") from error

    def _entry(self, prompt: PromptFeatures) -> dict[str, Any]:
        entry: dict[str, Any] = {"prompt": prompt.text}
        media = {name: items for name, items in (("image", prompt.images), ("video", prompt.videos)) if items}
        if media:
            entry["multi_modal_data"] = media
        return entry

    def _params(self, settings: SamplingSettings, seed: int):
        from vllm import SamplingParams

        extra_args = None
        if settings.first_token_temperature is not None and not settings.greedy:
            extra_args = {FIRST_TOKEN_SCALE: settings.temperature / settings.first_token_temperature}
        return SamplingParams(
            n=settings.n,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=settings.max_new_tokens,
            min_tokens=settings.eos_banned_tokens,
            seed=None if settings.greedy else seed,
            logprobs=0,
            flat_logprobs=True,
            extra_args=extra_args,
            detokenize=False,  # token by token it costs as much as a small model; `_completions` does it in one call
        )

    def _completions(self, output, settings: SamplingSettings) -> list[Completion]:
        if len(output.outputs) != settings.n:
            raise RolloutError(f"vLLM returned {len(output.outputs)} completions where {settings.n} were asked for")
        tokens = [list(one.token_ids) for one in output.outputs]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=settings.skip_special_tokens)
        prompt = list(output.prompt_token_ids)
        return [
            Completion(token_ids, self._log_probs(one, settings), text, one.finish_reason == "length", prompt)
            for one, token_ids, text in zip(output.outputs, tokens, texts)
        ]

    def _log_probs(self, one, settings: SamplingSettings) -> list[float] | None:
        if not settings.full_distribution or one.logprobs is None:
            return None
        if list(one.logprobs.token_ids) != list(one.token_ids):
            raise RolloutError("vLLM's log-probs are not those of the sampled tokens, one for each")
        return list(one.logprobs.logprobs)

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load new weights in place (checkpoint names), then drop every cache that was computed with the old ones."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named_tensors)})
        self.llm.apply_model(_refresh_tied_head)
        self.reset_caches()

    def reset_caches(self) -> None:
        """Prefix cache, multimodal cache and encoder cache. Leaving one out serves features of the old weights."""
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def sleep(self) -> None:
        """Free weights and KV cache on the accelerator until `wake`; nothing to free on CPU."""
        if self.settings.enable_sleep and get_accelerator().device_name() != "cpu" and not self.asleep:
            self.llm.sleep(level=1)
            self.asleep = True

    def wake(self) -> None:
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False

    def close(self) -> None:
        """Shut the engine down, and with it torch's process group, which vLLM takes to be its own: do it last."""
        self.llm.llm_engine.engine_core.shutdown()


def _refresh_tied_head(model: torch.nn.Module) -> None:
    """Repack `lm_head` after a reload: on CPU its packed copy of tied embeddings would stay at the old weights."""
    if get_accelerator().device_name() != "cpu":
        return
    for name, module in model.named_modules():
        if name.split(".")[-1] == "lm_head" and hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)
