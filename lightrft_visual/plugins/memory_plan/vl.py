"""The plan of a vision-language run: what one rank holds in each of its phases, from the load to the export.

All lengths are the longest that the settings allow: prompts of `prompt_max_len`, whole of images as far as
`max_pixels` lets them be, and responses of `generate_max_len`, or episodes of `max_episode_tokens`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, groupby
from math import ceil

from ...config import registry
from ...config.placement import GIB, Device
from ...config.vl import RunConfig
from ...experience.batch_plan import SampleRef, computed_tokens, most_tokens
from ...rollout.hf import holds_prompts_once
from ...rollout.vllm.arguments import host_cache, most_sequences
from .meta import Work
from .process import host_engine, program
from .reward_models import RewardModel, judging, reward_items
from .table import HOST, Item, Phase, Plan
from .times import DISK, ENGINE_CALLS, SYNC_CALLS, Speeds
from .vl_shape import MicroBatch, VLShape
from .zero import BUCKETS, FP32, Model, Zero, in_use, rounded

FP8 = 1  # byte
ASLEEP = 0.75 * GIB  # what an engine keeps on an accelerator while it sleeps: CUDA graphs, its context
TOKEN_BYTES = 8 + 8 + 1 + 6 * FP32  # of a sample on the host: id, masks, log-probs, values and their like
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}  # of engines, in items
MEDIA_CACHE = 4 * GIB  # vLLM's cache of processed images at most


class VLPlanner:
    """Puts a plan together; `plan()` is all that others call. shapes: as of `shapes_of`, the policy's a known one."""

    def __init__(
        self, config: RunConfig, shapes: Mapping[str, VLShape | None], judges: Mapping[str, RewardModel],
        device: Device, ranks: int, local: int,
    ) -> None:  # fmt: skip
        self.config, self.shapes, self.judges = config, shapes, judges
        self.device, self.ranks, self.local = device, ranks, local
        self.shape = shape = shapes["policy"]
        self.zero = Zero(config.distributed, ranks, device.on_cpu)
        rollout = config.rollout
        self.samples = ceil(rollout.rollout_batch_size * rollout.n_samples_per_prompt / ranks)
        self.prompts = ceil(rollout.rollout_batch_size / ranks)
        self.answer = max(config.response_max_len, shape.drawn_tokens)
        self.length = rollout.prompt_max_len + self.answer
        self.guided = shape.drawn_tokens > 0 and rollout.guidance_scale != 1  # a half without prompt beside each sample
        self.split = config.distributed.split  # the engine is on devices of its own, which are not planned here
        self.resident = registry.engines[rollout.engine_type].resident and not self.split
        self.engine = TITLES.get(rollout.engine_type, rollout.engine_type)
        self.speeds = Speeds.of(device, shape.width, self.zero, local)

    def plan(self) -> Plan:
        """The plan of the run."""
        model = self.shape.model
        trained = f", {model.trained / 1e6:.0f} million of them trained" if model.frozen else ""
        about = (
            f"{self.config.model.pretrain}, {self.shape.base / 1e9:.2f} billion weights{trained}, "
            f"ZeRO-{self.zero.stage}, {self.samples} samples a rank and step"
        )
        if self.split:
            about += "; a trainer's device alone, those of the rollout workers hold an engine each"
        step = (self._generate(), self._score(), self._train(), self._sync())
        phases = (self._load(), *step, self._resume(), self._export())
        trained = self._update_work(self._micro_batch()).times(self._updates())
        moves = self.config.rollout.offload_trainer or self.zero.stage == 0 or self.config.distributed.adam_offload
        used = in_use(self.config, offload_reference=self.config.rollout.offload_reference, offload_trainer=moves)
        unknown = [name for name, each in self.shapes.items() if each is None]
        unknown += [name for name, each in self.judges.items() if not each.model.numbers]
        return Plan(
            about, self.device, self.ranks, self.local, phases, used, trained, self._tokens(), tuple(unknown),
            self._engine_lacks(), self.config.output.resumes_from is not None,
        )  # fmt: skip

    # -- what stands there all the time --------------------------------------------------------------------------

    def _models(
        self, train_states: bool = True, stepped: bool = True, scoring: bool = False, judge: str | None = None,
        training: bool = False, waiting: Sequence[str] = (),
    ) -> list[Item]:  # fmt: skip
        """Weights of all models; train_states: and what the optimizers keep, unless it waits on the host.

        scoring: whether the reference is at work; else it may wait on the host. judge: the reward model at work.
        training: whether gradients are counted apart. waiting: trained models whose weights are away too, where
        `offload_trainer` moves them.
        """
        trained = self._trained
        moves = self.config.rollout.offload_trainer and not self.device.on_cpu
        left = [each for each in trained if not (moves and each.name in waiting)]
        items = [*program(self.device, self.resident), *map(self.zero.weights, left)]
        if self.config.model.lora_rank == 0 and self.config.algorithm.init_kl_coef > 0:
            away, reference = self.config.rollout.offload_reference and not self.device.on_cpu, self._reference()
            items += [reference] if scoring or not away else []
            if self.config.algorithm.ref_update_mixup < 1 and self.shape.width < FP32:
                size = FP32 * self.shape.base / self.zero.share(3)
                items.append(Item("reference that is moved, fp32", size, "zero_stage 3, ref_update_mixup 1", HOST))
            if away:  # its memory on the host stays while it is at work
                items += [reference.on_host(), *rounded("reference", self._parameters())]
        if (teacher := self.shapes.get("teacher")) is not None:
            size = self.zero.divided(teacher.base * self.shape.width)
            items.append(Item("teacher: weights", size, "zero_stage 3, bf16"))
        waits = self.config.rollout.offload_trainer and not train_states
        states = [item for each in trained for item in self.zero.optimizer(each, stepped)]
        kept = [item for each in trained for item in self.zero.kept(each)]
        waiting_too = [*states, *(item for item in kept if not item.name.endswith(BUCKETS))]  # those hold nothing then
        held = states if training else waiting_too if waits else [*states, *kept]
        items += [item.on_host(waits) for item in held]
        if moves:  # places on the host are kept for the next time
            places = sum(self.zero.weights(each).bytes for each in trained if each.name in self._away)
            places += 0 if waits else sum(item.bytes for item in waiting_too)
            items.append(Item("places of weights and optimizer that wait", places, "zero_stage 3, lora_rank", HOST))
        if self.config.output.async_save and stepped:
            items += [item for each in trained for item in self.zero.saved(each)]
        if stepped:
            items += [item for item in self._kept() if item.where == HOST or judge is not None]
        if self.config.train.enable_ema:
            size = FP32 * self.shape.model.trained / self.zero.share(3)
            items.append(Item("average of the weights (EMA), fp32", size, "enable_ema false"))
        return items + reward_items(self.judges, self.zero, judge)

    @property
    def _away(self) -> tuple[str, ...]:
        """Models whose weights wait with `offload_trainer` while responses are generated: not those that do it."""
        return ("policy", "critic") if self.resident or self.split else ("critic",)

    def _reference(self) -> Item:
        size = self.zero.divided(self.shape.base * self.shape.width)
        return Item("reference: weights", size, "offload_reference, zero_stage 3, lora_rank, init_kl_coef 0, bf16")

    @property
    def _trained(self) -> list[Model]:
        return [replace(self.shape.model, name="policy"), *([] if self._critic is None else [self._critic])]

    @cached_property
    def _critic(self) -> Model | None:
        """None without one, or where its shape is nowhere to be found. A value head takes the place of its own."""
        own = self.shapes.get("critic")
        if own is None:
            return None
        head = own.whole.get_output_embeddings().weight
        dropped = 0 if head is own.whole.get_input_embeddings().weight else head.numel()
        return replace(own.model, trained=own.model.trained - dropped, name="critic")

    def _batch(self, copies: int = 1) -> list[Item]:
        """The step's samples on the host: each prompt's patches once, its images, and numbers by token.

        copies: ranks whose samples this one holds.
        """
        tokens = copies * self.samples * self.length * TOKEN_BYTES
        return [
            Item("patches and images of the batch", copies * self._media_bytes(), "max_pixels, prompt_max_len", HOST),
            Item("tokens of the batch", tokens, where=HOST),
        ]

    def _next_batch(self) -> Item:
        """What is prepared ahead while a step is trained on."""
        return Item("patches and images of the next batch", self._media_bytes(), "max_pixels, prompt_max_len", HOST)

    def _media_bytes(self) -> float:
        _, patches, size = self.shape.media_bytes()
        pixels = patches * self.shape.patch_side**2 * 3
        return self.prompts * (size + pixels)

    # -- the engine ----------------------------------------------------------------------------------------------

    def _engine(self, awake: bool) -> list[Item]:
        rollout = self.config.rollout
        if not self.resident:
            return []
        weights = self._engine_weights
        if self.device.on_cpu:
            sequences = most_sequences(rollout, self.samples)
            return host_engine(weights, host_cache(self.shape.text, self.shape.width, sequences, self.length))
        if not awake and rollout.enable_engine_sleep:
            return [Item(f"{self.engine} asleep", ASLEEP)]
        room = rollout.engine_mem_util * self.device.memory
        items = [
            Item(f"{self.engine}: weights", weights, "engine_tp_size, engine_quantization, bf16"),
            Item(f"{self.engine}: KV cache and work space", max(room - weights, self._least_cache()),
                 "engine_mem_util"),
        ]  # fmt: skip
        if rollout.engine_type == "vllm":
            _, _, size = self.shape.media_bytes()
            items.append(Item("vLLM: cache of processed images", min(MEDIA_CACHE, self.prompts * size), where=HOST))
        return items

    @property
    def _engine_weights(self) -> float:
        rollout = self.config.rollout
        return self.shape.base * (FP8 if rollout.engine_quantization else self.shape.width) / rollout.engine_tp_size

    def _kept(self) -> list[Item]:
        """What an engine keeps of its weights while models judge an evaluation, or a round that another may follow:
        vLLM in page-locked memory, which PyTorch has from then on, SGLang on the device."""
        rollout, judges_more = self.config.rollout, self.config.data.eval_data or self.config.rollout.dynamic_sampling
        sleeps = self.resident and rollout.enable_engine_sleep and not self.device.on_cpu
        if not (sleeps and judges_more and self.judges):
            return []
        name, size = f"{self.engine}: weights while models judge", self._engine_weights
        item = Item(name, size, "engine_tp_size, bf16")
        if rollout.engine_type != "vllm":
            return [item]
        part = size / (self.shape.base * self.shape.width)
        return [item.on_host(), *rounded(name, (part * each for each in self._parameters()))]

    def _parameters(self) -> list[int]:
        """Bytes of each of the checkpoint's weights."""
        return [each.numel() * self.shape.width for each in self.shape.whole.parameters()]

    def _engine_lacks(self) -> str:
        """Why the engine cannot start, where its share of a device is too small; else empty."""
        share, memory = self.config.rollout.engine_mem_util, self.device.memory
        needed = self._engine_weights + self._least_cache()
        if not self.resident or self.device.on_cpu or needed <= share * memory:
            return ""
        larger = f"engine_mem_util at least {ceil(100 * needed / memory) / 100:g}, or " if needed < memory else ""
        return (
            f"engine_mem_util {share:g} leaves {self.engine} {share * memory / GIB:.1f} GiB of a device, and its "
            f"weights with one whole sequence take {needed / GIB:.1f}: set {larger}a larger engine_tp_size"
        )

    def _lent(self) -> list[Item]:
        """The average, while it is evaluated or exported."""
        lends = self.config.output.eval_ema
        return [self.zero.standing_in(self.shape.model, "eval_ema false, lora_rank")] if lends else []

    def _least_cache(self) -> float:
        """Keys and values of one whole sequence, below which an engine does not start."""
        rollout = self.config.rollout
        width = FP8 if rollout.engine_kv_cache_dtype.startswith("fp8") else self.shape.width
        return self.length * self.shape.cache_bytes(width, self.length) / rollout.engine_tp_size

    def _in_flight(self) -> int:
        """Sequences that the engine works on at once, on one rank's share of it."""
        rollout = self.config.rollout
        if not self.resident:
            return min(self.samples, rollout.micro_rollout_batch_size)
        most = rollout.engine_max_num_seqs or 256
        cache = next((item.bytes for item in self._engine(True) if "KV cache" in item.name), 0.0)
        room = cache / max(1.0, self._least_cache()) * 2  # responses are half of their longest on average
        return max(1, min(self.samples, most, int(room)))

    # -- phases --------------------------------------------------------------------------------------------------

    def _load(self) -> Phase:
        """The checkpoint in host memory on its way to the device; then the engine starts."""
        copy = self.zero.on_its_way("the checkpoint on its way", self.shape.model)
        models = self._models(stepped=False)
        loaded = [*self._models(train_states=False, stepped=False, waiting=self._away), *self._engine(awake=True)]
        frozen = len({"reference: weights", "teacher: weights"} & {item.name for item in models})
        copies = 1 + (self._critic is not None) + frozen
        seconds = copies * self.shape.model.bytes / DISK + (30 if self.resident else 2)
        moments = [loaded] if self.device.on_cpu else [[*models, copy], [*loaded, copy]]
        return Phase.fullest("load", seconds, self.device.on_cpu, *moments)

    def _generate(self) -> Phase:
        items = [*self._models(train_states=False, waiting=self._away), *self._engine(awake=True), *self._batch()]
        if not self.resident and not self.split:
            items += self._lent()
            held = self._cached_tokens(self._in_flight(), self.answer) * (1 + self.guided)
            items.append(Item("keys and values", held * self.shape.cache_bytes(self.shape.width, self.length),
                              "micro_rollout_batch_size"))  # fmt: skip
            items += self.zero.whole(self.shape.model)
        return Phase.fullest("generate", self._generate_seconds(), self.device.on_cpu, items)

    def _cached_tokens(self, rows: int, answer: float) -> float:
        """Tokens with keys and values in the engine: engine hf holds a prompt once where its responses can share it."""
        rollout, attention = self.config.rollout, self.config.model.attn_implementation
        shared = self.shape.family.sharing_refused(attention) is None and holds_prompts_once(self.shape.model_config)
        prompts = rows if self.resident or not shared else ceil(rows / rollout.n_samples_per_prompt)
        return rows * answer + prompts * rollout.prompt_max_len

    def _generate_seconds(self) -> float:
        """Prompts, each once, then a token of every sample at a time."""
        rollout, shape, speeds = self.config.rollout, self.shape, self.speeds
        rows, answer, size = self._in_flight(), self.answer, rollout.engine_tp_size
        weights = shape.base * shape.width / size
        cache = self._cached_tokens(rows, answer / 2) * shape.cache_bytes(shape.width, self.length) / size
        turns = ceil(self.samples / rows)
        seconds = speeds.seconds(shape.reading(self.prompts * rollout.prompt_max_len / size, self.prompts))
        if self.resident and not self.device.on_cpu:
            work = Work(2 * shape.base * rows / size, calls=ENGINE_CALLS * shape.text.num_hidden_layers)
            graphs = not rollout.engine_enforce_eager
            return seconds + speeds.decoding(turns * answer, weights, cache, work, graphs)
        gathered = speeds.gathering(shape.model, 1) if not self.resident else 0.0
        return seconds + gathered + speeds.decoding(turns * answer, weights, cache, shape.one_token(rows), False)

    def _score(self) -> Phase:
        rollout, device = self.config.rollout, self.device
        samples = self._samples(min(self.samples, rollout.micro_rollout_batch_size))
        prompts = ceil(len(samples) / rollout.n_samples_per_prompt)
        peak = self.shape.scoring(self._scored(self._batch_of(samples, computed_tokens(samples), prompts)), device)
        always = [*self._engine(awake=False), *self._batch()]
        forward = Item("forward of a micro-batch", peak, "micro_rollout_batch_size")
        moments = [[*self._models(False, scoring=True), *always, *self.zero.gathered(self.shape.model), forward]]
        moments += [[*self._models(False, judge=name), *always] for name in self.judges]
        return Phase.fullest("score", self._score_seconds(samples, prompts), device.on_cpu, *moments)

    def _score_seconds(self, samples: list[SampleRef], prompts: int) -> float:
        """Forwards of all roles over micro-batches of so many samples, then of the reward models."""
        batch = self._batch_of(samples, computed_tokens(samples), prompts)
        algorithm, train = self.config.algorithm, self.config.train
        updates = max(1.0, self.samples * self.shape.sequence / self._own())
        later = 1.0 if train.separate_old_log_probs else (updates - 1) / updates  # old log-probs of all updates but one
        own = 1.0 if algorithm.reads_log_probs else later
        own += sum(each is not None for each in self.shapes.values()) - 1
        reference = float(algorithm.init_kl_coef > 0)
        forwards, calls = self._tokens() / (batch.rows * batch.length), ceil(self.samples / len(samples))
        seconds = self.speeds.gathering(self.shape.model, (own + reference) * calls)
        for times, adapters in ((own, True), (reference, False)):
            work = self.shape.work(self._scored(batch), self.device, False, adapters)
            seconds += times * self.speeds.seconds(work.times(forwards, calls))
        return seconds + judging(self.judges, self.speeds, self.samples, self.samples * self.length)

    def _tokens(self) -> int:
        """That are computed in a pass over the step's samples."""
        return computed_tokens(self._samples(self.samples))

    @cached_property
    def _shares(self) -> bool:
        train, attention = self.config.train, self.config.model.attn_implementation
        several = self.config.rollout.n_samples_per_prompt > 1
        return self.shape.family.shares_prompts(train.share_prefix, several, attention)

    def _samples(self, count: int) -> list[SampleRef]:
        """The longest samples of a rank, group after group."""
        rollout, each = self.config.rollout, self.config.rollout.n_samples_per_prompt
        return [
            SampleRef(0, i, self.length, i, i // each if self._shares else None, rollout.prompt_max_len)
            for i in range(count)
        ]

    def _own(self) -> int:
        """Samples of an update on one rank, or on the ranks that hold them together."""
        return max(1, self.config.train.train_batch_size * self.shape.sequence // self.ranks)

    def _micro_batch(self) -> MicroBatch:
        """The largest of training, as the replay buffer plans them."""
        train, samples = self.config.train, self._samples(self._own())
        most = most_tokens(samples, train.micro_train_batch_size, train.max_tokens_per_batch or None)
        return self._batch_of(samples, most, self.prompts, train.packing_samples)

    def _batch_of(self, samples: list[SampleRef], tokens: int, prompts: int, packed: bool = False) -> MicroBatch:
        """So many tokens of the samples. prompts: different ones among as many samples that share nothing."""
        answer = self.answer
        if self._shares:
            lengths, continues = _shared_row(samples, tokens)
            prompts = continues.count(None)
            return MicroBatch(1, tokens, answer * (len(lengths) - prompts), prompts, lengths, continues)
        rows = ceil(tokens / self.length)
        if packed:
            lengths = [min(self.length, tokens - start) for start in range(0, tokens, self.length)]
            return MicroBatch(1, tokens, min(tokens, rows * answer), min(rows, prompts), lengths)
        return MicroBatch(rows, self.length, rows * answer, min(rows, prompts))

    def _train(self) -> Phase:
        train, zero = self.config.train, self.zero
        batch, own = self._micro_batch(), self._own()
        lower = "gradient_checkpointing, sp_size, bf16, "
        lower += "max_tokens_per_batch" if train.max_tokens_per_batch else "micro_train_batch_size"
        micro_batches = ceil(computed_tokens(self._samples(own)) / (batch.rows * batch.length))
        always = [
            *self._models(training=True),
            *self._engine(awake=False),
            *self._batch(self.shape.sequence),
            self._next_batch(),
        ]
        moments: list[list[Item]] = []
        for trained in self._trained:
            rests = [item for other in self._trained if other.name != trained.name for item in zero.kept(other)]
            rests += zero.gathered(trained)
            activations = self.shapes[trained.name].training(self._learnt_from(batch), self.device)
            held = Item("activations of a micro-batch", activations, lower)
            whole = micro_batches > 1 or zero.stage == 0 or zero.gradients_at_once(trained)
            backward = self._backward(zero.gradients(trained, micro_batches), held, whole)
            moments += [[*always, *rests, *moment] for moment in (*backward, zero.step(trained))]
        return Phase.fullest("train", self._train_seconds(batch, micro_batches), self.device.on_cpu, *moments)

    def _train_seconds(self, batch: MicroBatch, micro_batches: int) -> float:
        """Of all updates: forward and backward, what the ranks exchange, and the optimizer's step. A critic takes what
        the policy takes."""
        speeds, shape, work = self.speeds, self.shape, self._update_work(batch)
        found = 0.0
        for model in self._trained:
            found += speeds.seconds(work) + speeds.reducing(model, micro_batches)
            found += speeds.gathering(model, 2 * micro_batches)
            found += speeds.optimizer_step(model, shape.trained_tensors)
        return self._updates() * found

    def _updates(self) -> int:
        """Of a step."""
        return ceil(self.samples * self.shape.sequence / self._own()) * self.config.train.max_epochs

    def _update_work(self, batch: MicroBatch) -> Work:
        """Of the policy's forwards and backwards of one update, the largest of which is over `batch`."""
        times = computed_tokens(self._samples(self._own())) / (batch.rows * batch.length)
        return self.shape.work(self._learnt_from(batch), self.device, backward=True).times(times, ceil(times))

    def _learnt_from(self, batch: MicroBatch) -> MicroBatch:
        """What a forward of an update computes of it: PAPO's half hidden images are in the same one."""
        return self._scored(batch.twice() if self.config.algorithm.papo_coef > 0 else batch)

    def _scored(self, batch: MicroBatch) -> MicroBatch:
        """What a forward computes for its log-probs: those of guided images are of two halves."""
        return batch.twice() if self.guided and self.config.rollout.guidance_log_probs == "guided" else batch

    def _backward(self, gradients: list[Item], held: Item, whole: bool) -> list[list[Item]]:
        """What gradients and activations take: of one micro-batch the ones come as the others go, layer by layer.

        whole: those of the micro-batches before, or room for all, are there.
        """
        if whole:
            return [[*gradients, held]]
        begun = [item for item in gradients if item.name.endswith(BUCKETS) and not self.device.on_cpu]
        return [[*begun, held], [*gradients, replace(held, bytes=held.bytes / self.shape.text.num_hidden_layers)]]

    def _sync(self) -> Phase:
        size = self.shape.base * self.shape.width
        models = self._models(train_states=False, waiting=["critic"])  # a probe of the gate reads the policy's
        items = [*models, *self._engine(awake=True), self._next_batch(), *self._lent()]
        beside = not self.config.rollout.enable_engine_sleep or self.config.output.eval_ema
        if self.resident and beside:  # else the cache comes back after the weights
            items.append(Item("a weight on its way", self.shape.model.largest * self.shape.width))
            items += self.zero.handed_over(self.shape.model)
        moved = sum(item.bytes for item in items if item.where == HOST and "fp32" in item.name)
        if self.split:
            versions = self.config.asynchronous.ahead + 2
            items += self.zero.for_workers(self.shape.model, versions * size / self.local)
        calls = SYNC_CALLS * len(list(self.shape.whole.parameters())) if self.resident else 0
        seconds = self.speeds.seconds(Work(moved=3 * size if self.resident else 0, calls=calls))
        return Phase.fullest("sync", seconds + 2 * moved / self.device.link, self.device.on_cpu, items)

    def _resume(self) -> Phase:
        """Optimizer states are on the device while the engine sleeps; models are read one after the other."""
        read = max(map(self.zero.read_back, self._trained), key=lambda item: item.bytes)
        moments = [item for each in self._trained for item in self.zero.moments(each)]
        items = [*self._models(stepped=False), *moments, *self._engine(awake=False), read]
        return Phase.fullest("resume", 2 * read.bytes / DISK, self.device.on_cpu, items)  # for its hashes, and again

    def _export(self) -> Phase:
        """All weights to rank 0's host, beside an engine that may be awake; adapters are merged one by one."""
        model, size = self.shape.model, self.shape.base * self.shape.width
        merged = 2 * model.widest * model.width if self.config.model.lora_rank else 0
        items = [*self._models(train_states=False, waiting=["critic"]), *self._engine(awake=True), *self._lent()]
        items += [Item("a weight with its adapters", merged), *self.zero.handed_over(model)]
        items.append(Item("weights to export", size / self.local, "bf16", HOST))
        return Phase.fullest("export", self.speeds.writing(size), self.device.on_cpu, items)


def _shared_row(samples: list[SampleRef], tokens: int) -> tuple[list[int], list[int | None]]:
    """(lengths, continues) of the segments of a row with each group's prompt once, cut off after so many tokens."""
    segments: list[tuple[int, int | None]] = []
    for _, group in groupby(samples, lambda sample: sample.group):
        prompt = len(segments)
        for sample in group:
            segments += [] if len(segments) > prompt else [(sample.prompt, None)]
            segments.append((sample.tokens - sample.prompt, prompt))
    begins = accumulate((length for length, _ in segments), initial=0)
    kept = [(min(length, tokens - begin), of) for (length, of), begin in zip(segments, begins) if begin < tokens]
    return [length for length, _ in kept], [of for _, of in kept]
