"""vLLM beside the trainer in one process: every rank is an engine worker (external launcher), as in OpenRLHF's and
TRL's colocated mode. Tested with vLLM 0.26 to 0.32."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ...config.vl import RunConfig
from ...data.rendering import prompt_ids, special_tokens
from ...errors import RolloutError
from ...experience.rollouts import Completion, PromptFeatures, SamplingSettings
from ...models.loading import Checkpoint
from ...runtime.checkpoint.export import TRANSPOSED, as_published
from ...runtime.host_memory import no_shared_memory
from ...runtime.seeding import derive_seed
from ...runtime.start_up import importing
from ...runtime.train_engine import TrainEngine
from ...runtime.vendor_patches import (
    begin_reload_anew,
    decoder_class_of_its_own,
    draw_seeds_in_blocks,
    forget_allocators_error,
    forget_model,
    number_of_threads_settable,
    stream_of_its_own,
    without_compiled_functions,
)
from ..engine import Finished
from ..episodes import Admission
from ..resident import ResidentEngine
from ..weight_sync import Posted, WeightPost
from . import beside_weights
from .arguments import VLLMSettings, check_temperature, checked, engine_arguments, prepare_environment
from .rules import FIRST_TOKEN_SCALE, sampling_rules
from .workers import PromptSharing, load_posted, use_private_name

DO_SAMPLE = "do_sample_frames"  # in a video's metadata: whether its frames are still to be chosen


class VLLMEngine(ResidentEngine):
    """Generation by vLLM's `LLM` in this process.

    With tensor_parallel_size above 1, neighbouring ranks are one engine: all of them call each method together, and
    each gets the completions of its own requests. With `own_ranks` they are processes that vLLM starts instead, and
    this one is alone. Raises ConfigError when the ranks do not divide into such groups or vLLM refuses the settings,
    RolloutError when the engine cannot be built or returns fewer completions than asked for.
    """

    post: WeightPost | None = None  # of weights, to ranks that vLLM has started; one version stays on the host
    ignores_video_metadata = False  # what is told with a video; vLLM reads what is told beside it

    def __init__(self, settings: VLLMSettings):
        self.sharing = PromptSharing(1 if settings.own_ranks else settings.tensor_parallel_size)
        self.in_step = self.sharing.group is not None  # ranks are one engine
        prepare_environment(settings.dtype)
        self.settings, self.enable_sleep = settings, settings.enable_sleep
        self.llm = self._build()
        if settings.starts_ranks:
            self.post = WeightPost(turns=1)
        self.tokenizer = self.llm.get_tokenizer()
        self.ignores_video_metadata = ignores_video_metadata(self.llm.llm_engine.model_config.hf_config.model_type)

    @classmethod
    def from_config(cls, config: RunConfig, checkpoint: Checkpoint, actor: TrainEngine | None = None) -> VLLMEngine:
        """The engine of a run, or of a process that does nothing else.

        Args:
            config: of the run.
            checkpoint: that it starts from.
            actor: not read; weights come by `update_weights`.
        """
        return cls(VLLMSettings.from_config(config, checkpoint))

    def _build(self):
        s = self.settings
        on_cpu = get_accelerator().device_name() == "cpu"
        plain = without_compiled_functions() if on_cpu else nullcontext()
        # Imported late: vLLM detects its platform and reads the environment at import.
        with importing(), plain:
            from vllm import LLM

        private = on_cpu and s.tensor_parallel_size > 1 and not s.own_ranks
        take_away = use_private_name() if private else None
        arguments = engine_arguments(s, on_cpu)
        second_runner, transformers = checked(arguments)
        rules = sampling_rules(s.banned_ids, second_runner)
        beside = transformers and not s.own_ranks  # ranks that vLLM starts are processes without a trainer
        apart = decoder_class_of_its_own(s.model, s.trust_remote_code) if beside else nullcontext()
        plain = without_compiled_functions() if on_cpu and arguments["enforce_eager"] else nullcontext()
        if self.enable_sleep and not on_cpu:
            get_accelerator().empty_cache()  # of what an earlier engine left, too
            forget_allocators_error(get_accelerator().current_device())
        threads = torch.get_num_threads()
        try:
            with apart, plain, number_of_threads_settable(), stream_of_its_own(get_accelerator()):
                llm = LLM(**arguments, logits_processors=[rules])
        except Exception as error:
            # Of further arguments the names alone: values may be secrets.
            asked = {"engine_quantization": s.quantization, "engine_kwargs": ", ".join(s.extra)}
            given = "".join(f", with {name} {value}" for name, value in asked.items() if value)
            told = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EROFS) and no_shared_memory():
                told += "; is /dev/shm full or read-only (df -h /dev/shm)? For a container: docker run --shm-size 16g"
            raise RolloutError(f"vLLM could not load {s.model}{given}: {told}") from error
        if torch.get_num_threads() != threads:  # on CUDA vLLM 0.32 leaves one, for optimizers on the host too
            torch.set_num_threads(threads)
        if take_away is not None:
            take_away()
        if on_cpu:
            llm.collective_rpc(draw_seeds_in_blocks)
        return llm

    def generate(
        self, prompts: Sequence[PromptFeatures], settings: SamplingSettings, finished: Finished | None = None
    ) -> list[list[Completion]]:
        """n completions per prompt, in order. With FIRE the first token is drawn at its own temperature.

        Args: as of `RolloutEngine`, which says by `streams` what finished is.
        """
        own = slice(0, len(prompts))
        if self.sharing.group is not None:
            prompts, own = self.sharing.share(prompts)
        entries = [self.entry(prompt) for prompt in prompts]
        params = [self.params(settings, _stream(prompt), prompt.limit) for prompt in prompts]
        if not entries:
            return []
        first = self.llm.request_counter.counter + own.start
        made: dict[int, list[Completion]] = {}

        def take(output) -> None:
            number = int(output.request_id) - first
            if 0 <= number < own.stop - own.start:
                made[number] = self.completions(output, settings, len(prompts[own][number].continued))
                if finished is not None:
                    finished(number, made[number])

        with watched(self.llm.llm_engine, take):
            self._run(entries, params)
        return [made[number] for number in range(len(made))]

    def admission(self, settings: SamplingSettings) -> VLLMAdmission | None:
        """Requests one after the other; None where ranks are one engine and must be given the same ones."""
        if self.in_step:
            return None
        self.make_ready()
        return VLLMAdmission(self, settings)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, what vLLM raises is a RolloutError, and the end of the engine."""
        try:
            yield
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise RolloutError(f"vLLM failed while generating: {self.failure}") from error

    def _run(self, prompts: list[dict[str, Any]], params: list) -> list:
        self.make_ready()
        with self.working():
            return self.llm.generate(prompts, params, use_tqdm=False)

    def entry(self, prompt: PromptFeatures) -> dict[str, Any]:
        """A request as vLLM takes it."""
        entry: dict[str, Any] = {"prompt": prompt.text}
        media = {name: items for name, items in (("image", prompt.images), ("video", prompt.videos)) if items}
        if prompt.unexpanded is not None:
            entry = {"prompt_token_ids": list(prompt.unexpanded)}
        elif prompt.messages is not None and not media:  # a template may write other special tokens than vLLM adds
            entry = {"prompt_token_ids": prompt.token_ids + prompt.continued}
        elif prompt.continued or special_tokens(prompt.text, self.tokenizer):  # which vLLM adds to every text
            entry = {"prompt_token_ids": prompt_ids([prompt.text], self.tokenizer)[0] + prompt.continued}
        if media:
            entry["multi_modal_data"] = media
        if self.ignores_video_metadata and prompt.videos:
            taken = [{k: v for k, v in each.metadata.items() if k != DO_SAMPLE} for each in prompt.videos]
            entry["mm_processor_kwargs"] = {"video_metadata": taken, DO_SAMPLE: False}
        return entry

    def params(self, settings: SamplingSettings, seed: int, limit: int | None = None):
        """vLLM's sampling parameters. Raises ConfigError for a temperature that it does not draw at.

        Args:
            settings: of the samples.
            seed: of the first of them.
            limit: most tokens, where the settings' own limit is larger.
        """
        from vllm import SamplingParams

        check_temperature(settings.temperature)
        extra_args = None
        if settings.first_token_temperature is not None and not settings.greedy:
            extra_args = {FIRST_TOKEN_SCALE: settings.temperature / settings.first_token_temperature}
        return SamplingParams(
            n=1 if settings.greedy else settings.n,  # vLLM refuses several that are equal
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=settings.max_new_tokens if limit is None else min(limit, settings.max_new_tokens),
            min_tokens=settings.eos_banned_tokens,
            seed=None if settings.greedy else seed,
            logprobs=0,
            flat_logprobs=True,
            extra_args=extra_args,
            detokenize=False,  # token by token it costs as much as a small model; `completions` does it at the end
        )

    def completions(self, output, settings: SamplingSettings, continued: int) -> list[Completion]:
        """The samples of a finished request. Raises RolloutError where they are not as many as were asked for.

        Args:
            output: vLLM's.
            settings: that it was asked with.
            continued: tokens of the response that stand behind the prompt.
        """
        found = output.outputs * settings.n if settings.greedy else output.outputs
        if len(found) != settings.n:
            raise RolloutError(f"vLLM returned {len(found)} completions where {settings.n} were asked for")
        prompt = list(output.prompt_token_ids)
        prompt = prompt[: len(prompt) - continued]
        made = []
        for one in found:
            token_ids, truncated = list(one.token_ids), one.finish_reason == "length"
            text = settings.text(token_ids, truncated, self.tokenizer)
            log_probs = self._log_probs(one, settings)
            made.append(Completion(token_ids, log_probs, text, truncated, prompt, experts=experts_of(one)))
        return made

    def _log_probs(self, one, settings: SamplingSettings) -> list[float] | None:
        if not settings.full_distribution or one.logprobs is None:
            return None
        if list(one.logprobs.token_ids) != list(one.token_ids):
            raise RolloutError("vLLM's log-probs are not those of the sampled tokens, one for each")
        return list(one.logprobs.logprobs)

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], posted: Posted | None = None) -> None:
        """Load new weights in place (checkpoint names), then drop every cache that was computed with the old ones.

        posted: where the same lie, for ranks that vLLM has started; without it they get a copy of their own.
        An engine that sleeps is woken, but for a KV cache that went with the old weights: `wake` or `generate` takes it
        back, when the caller has made room for it.
        """
        if self.asleep:
            self.wake()
        kind = self.llm.llm_engine.model_config.hf_config.model_type
        if kind in TRANSPOSED:
            named_tensors, posted = ((name, as_published(kind, name, each)) for name, each in named_tensors), None
        try:
            if self.post is not None:
                self.llm.collective_rpc(load_posted, args=(posted or self.post.post(named_tensors),))
            else:
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named_tensors)})
        except Exception as error:
            try:
                self.llm.apply_model(begin_reload_anew)
            except Exception as other:
                error.add_note(f"what vLLM had begun to fill stays so: {other}")
            raise
        self.llm.apply_model(_repack)
        self.lacks_weights = False
        self.reset_caches()

    def reset_caches(self) -> None:
        """Prefix cache, multimodal cache and encoder cache. Leaving one out serves features of the old weights."""
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def _let_go(self, keep_weights: bool) -> None:
        if self.asleep:  # its weights stay on the host until new ones take their place
            return
        if self.lacks_cache:  # before vLLM 0.31 it would count as asleep already, and keep its weights on the device
            get_accelerator().empty_cache()
            self._take_back("kv_cache")
        if not keep_weights:
            self.llm.collective_rpc(beside_weights.keep)
        self.llm.sleep(level=1 if keep_weights else 2)  # kept weights are copied to host memory and back

    def _take_back(self, what: str | None) -> None:
        self.llm.wake_up(tags=what and [what])
        if what == "weights":
            self.llm.collective_rpc(beside_weights.restore)

    def close(self) -> None:
        """Shut the engine down, and with it torch's process group, which vLLM takes to be its own: do it last.

        It wakes first where there is room: CUDA prints an error for memory that vLLM frees while it sleeps.
        """
        accelerator = get_accelerator()
        if self.asleep or self.lacks_cache:
            accelerator.empty_cache()
            free, total = torch.accelerator.get_memory_info()  # DeepSpeed's fails where devices are named by their ids
            if free > self.settings.memory_utilization * total:
                self._take_back(None if self.asleep else "kv_cache")  # what is there already cannot be taken back
        if not self.settings.starts_ranks:
            self.llm.apply_model(forget_model)
        self.llm.llm_engine.engine_core.shutdown()


def experts_of(one: Any) -> torch.Tensor | None:
    """(tokens, layers, k) that vLLM says a completion's prompt and tokens went through; None where it says nothing."""
    found = getattr(one, "routed_experts", None)
    if found is None:
        return None
    return torch.from_numpy(found.astype("uint8" if found.dtype.itemsize == 1 else "int16"))  # its memory is vLLM's


class VLLMAdmission(Admission):
    """An `Admission` of one `VLLMEngine`: its own step loop, to which requests come at any time.

    Copy i of a prompt is drawn with the seed that vLLM gives the i-th sample of one request. What a request is batched
    with depends on when it comes, which can show in the last bits of its log-probs.
    """

    def __init__(self, engine: VLLMEngine, settings: SamplingSettings) -> None:
        self.engine, self.settings = engine, replace(settings, n=1)
        self._keys: dict[int, int] = {}  # of requests that are not finished, by vLLM's number

    @property
    def busy(self) -> bool:
        return bool(self._keys)

    def add(self, key: int, request: PromptFeatures) -> None:
        engine = self.engine
        params = engine.params(self.settings, request.seed + request.copy, request.limit)
        self._keys[engine.llm.request_counter.counter] = key
        with engine.working():
            engine.llm.enqueue([engine.entry(request)], [params], use_tqdm=False)

    def step(self) -> list[tuple[int, Completion]]:
        engine = self.engine
        with engine.working():
            outputs = [output for output in engine.llm.llm_engine.step() if output.finished]
        found = []
        for output in sorted(outputs, key=lambda each: int(each.request_id)):
            (completion,) = engine.completions(output, self.settings, 0)
            found.append((self._keys.pop(int(output.request_id)), completion))
        return found

    def close(self) -> None:
        if self._keys:
            self.engine.llm.llm_engine.abort_request([str(number) for number in self._keys])
            self._keys.clear()


@contextmanager
def watched(engine: Any, finished: Callable[[Any], None]) -> Iterator[None]:
    """Inside, every finished output of vLLM's engine goes to `finished` at the step that ends it."""
    step = engine.step

    def told() -> list[Any]:
        outputs = step()
        for output in outputs:
            if output.finished:
                finished(output)
        return outputs

    engine.step = told
    try:
        yield
    finally:
        engine.step = step


def ignores_video_metadata(model_type: str) -> bool:
    """Whether this vLLM leaves aside the metadata that come with a video, by which the model places its frames in time:
    before 0.31 its code of Qwen2.5-VL did."""
    from vllm import __version_tuple__ as version

    return model_type == "qwen2_5_vl" and version[:2] < (0, 31)


def _stream(prompt: PromptFeatures) -> int:
    """The seed of a prompt's responses; of one that is made in segments, each segment has its own."""
    if not (prompt.copy or prompt.continued):
        return prompt.seed
    return derive_seed(prompt.seed, prompt.copy, len(prompt.continued))


def _repack(model: torch.nn.Module) -> None:
    """On CPU the head and experts compute with packed copies, which a reload leaves as they were: those of a head that
    is tied to the embeddings at the old weights, those of experts in the plain order of a checkpoint."""
    if get_accelerator().device_name() != "cpu":
        return
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and name.split(".")[-1] == "lm_head":
            method.process_weights_after_loading(module)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None and hasattr(kernel.fused_experts, "process_weights_after_loading"):
            kernel.fused_experts.process_weights_after_loading(module)
