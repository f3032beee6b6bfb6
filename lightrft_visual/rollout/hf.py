"""Generation by the trainer's own transformers model: for models that vLLM lacks, and where vLLM is not installed.

Slower than vLLM, but nothing can be out of step: the weights that are sampled from are the ones that are trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PretrainedConfig, PreTrainedTokenizerBase
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ..config.vl import RunConfig
from ..errors import ConfigError
from ..experience.rollouts import Completion, PromptFeatures, SamplingSettings
from ..experience.types import ModelInputs
from ..experience.vision import VisionTensors
from ..models.loading import Checkpoint, add_lora, load_transformer
from ..models.routing import of_responses
from ..models.vlm.actor import Actor, Backbone
from ..runtime import collectives
from ..runtime.host_copies import on_host, to_device
from ..runtime.seeding import derive_seed
from ..runtime.train_engine import TrainEngine
from .engine import Finished, RolloutEngine, diverged
from .weight_sync import take_over

T = torch.Tensor


@dataclass
class _Sample:
    """One response in the making: its prompt, which of the n it is, and the most tokens of its text."""

    prompt: PromptFeatures
    copy: int
    most: int


class TransformersEngine(RolloutEngine):
    """The rollout engine over an `Actor`, plain or prepared for training: it samples from the trainer's own weights and
    holds no memory between two calls.

    tokenizer: decodes responses. micro_batch_size: responses that are decoded together.

    A response depends on its prompt and its place among the n alone: each has a random stream of its own. Under ZeRO-3
    each device holds the whole model during `generate`, which every rank of the process group must call: gathered layer
    by layer at each token, weights would take many times as long as the computation.
    """

    shares_weights = True
    streams = True

    def __init__(
        self,
        actor: Actor | TrainEngine,
        tokenizer: PreTrainedTokenizerBase,
        micro_batch_size: int = 8,
    ):
        self.source = actor
        self.tokenizer, self.micro_batch_size = tokenizer, micro_batch_size
        self._divided = actor if isinstance(actor, TrainEngine) and actor.zero_stage == 3 else None
        self.in_step = self._divided is not None and collectives.world_size() > 1
        _check_cache(self.actor)

    @classmethod
    def from_config(cls, config: RunConfig, checkpoint: Checkpoint, actor: TrainEngine) -> TransformersEngine:
        """The engine of a run.

        Args:
            config: for the size of micro-batches.
            checkpoint: for its tokenizer.
            actor: which is trained, and sampled from.
        """
        return cls(actor, checkpoint.tokenizer, config.rollout.micro_rollout_batch_size)

    @property
    def actor(self) -> Actor:
        """The model that is sampled from."""
        return self.source.module if isinstance(self.source, TrainEngine) else self.source

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[PromptFeatures], settings: SamplingSettings, finished: Finished | None = None
    ) -> list[list[Completion]]:
        """n completions per prompt, in order. log_probs are None where top_p or top_k leave no softmax.

        Args: as of `RolloutEngine`, which says by `streams` what finished is.
        """
        # Answers apart from images: those are shorter, and decoding goes on to the longest of a micro-batch.
        most = settings.max_new_tokens
        order = [number for draws in (False, True) for number, each in enumerate(prompts) if each.draws is draws]
        samples = [
            _Sample(prompt, prompt.copy + copy, min(most, most if prompt.limit is None else prompt.limit))
            for prompt in (prompts[number] for number in order)
            for copy in range(settings.n)
        ]
        size = self.micro_batch_size
        decode = self._decode if self.actor.backbone.routers is None else self._decode_with_experts
        made: list[list[Completion]] = [[] for _ in prompts]
        with self._evaluating():
            for start in range(0, len(samples), size):
                positions = (order[index // settings.n] for index in range(start, len(samples)))
                for number, completion in zip(positions, decode(samples[start : start + size], settings)):
                    made[number].append(completion)
                    if finished is not None and len(made[number]) == settings.n:
                        finished(number, made[number])
        return made

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The whole model, without dropout, and without gradient checkpointing, which turns the key-value cache off."""
        actor, training = self.actor, self.actor.training
        actor.eval()
        try:
            with self._divided.whole() if self._divided else nullcontext():
                yield
        finally:
            actor.train(training)

    def _decode_with_experts(self, samples: list[_Sample], settings: SamplingSettings) -> list[Completion]:
        """As `_decode`, of a mixture of experts with the experts of their tokens."""
        with self.actor.backbone.routers.recorded() as passes:
            made = self._decode(samples, settings)
        if passes:
            different = {id(each.prompt): len(each.prompt.token_ids + each.prompt.continued) for each in samples}
            prompts = [list(different).index(id(each.prompt)) for each in samples]
            chosen = of_responses(passes, list(different.values()), prompts, [len(each.token_ids) for each in made])
            for completion, experts in zip(made, chosen):
                completion.experts = experts
        return made

    def _decode(self, samples: list[_Sample], settings: SamplingSettings) -> list[Completion]:
        """Sample the responses of one micro-batch."""
        actor = self.actor
        device = actor.banned_ids.device
        longest = [actor.drawing.tokens if each.prompt.draws else each.most for each in samples]
        lengths, limit = torch.tensor(longest, device=device), max(longest)
        choice = Choice.of(actor, [sample.prompt.draws for sample in samples], settings)
        hidden, decoding = self._prefill(samples, choice, limit)
        noise = uniform_noise(samples, limit).to(device)
        done = torch.zeros(len(lengths), dtype=torch.bool, device=device)
        tokens, log_probs = [], []
        for step in range(limit):
            chosen, log_prob = choice.next(hidden, noise[:, step], step)
            tokens.append(chosen)
            log_probs.append(log_prob)
            done |= torch.isin(chosen, actor.eos_ids) | (lengths <= step + 1)
            if step + 1 == limit or done.all():
                break
            hidden = decoding.next(chosen[choice.sources])
        chosen, scores = torch.stack(tokens, dim=1), torch.stack(log_probs, dim=1).cpu()
        if not scores.isfinite().all():
            raise diverged("the logits that engine hf samples from", actor)
        images = {} if actor.drawing is None else self._images(chosen, choice)
        chosen = chosen.cpu()
        return [
            self._completion(sample, chosen[i], scores[i], settings, images.get(i)) for i, sample in enumerate(samples)
        ]

    def _prefill(self, samples: list[_Sample], choice: Choice, limit: int) -> tuple[T, Decoding]:
        """(last hidden states, where they go on) of every row that is decoded: the responses, then the halves without
        prompt of those that `choice` guides. Each different prompt is run once."""
        actor = self.actor
        shown = [sample.prompt for sample in samples]
        prompts = {id(prompt): prompt for prompt in shown}
        for index in choice.guided:
            prompt = shown[index]
            ids = actor.drawing.without_prompt(torch.tensor(prompt.token_ids)).tolist()
            shown.append(prompts.setdefault(("unguided", id(prompt)), replace(prompt, token_ids=ids)))
        indices = {id(prompt): number for number, prompt in enumerate(prompts.values())}
        inputs = prompt_inputs(list(prompts.values()), self.tokenizer.pad_token_id).to(actor.banned_ids.device)
        return Decoding.of(actor.backbone, inputs, [indices[id(prompt)] for prompt in shown], limit)

    def _images(self, chosen: T, choice: Choice) -> dict[int, Any]:
        """What was drawn, by row."""
        indices, drawing = on_host(choice.drawn).tolist(), self.actor.drawing
        if not indices:
            return {}
        tokens = chosen[choice.drawn][:, : drawing.tokens]
        return dict(zip(indices, drawing.images(tokens - drawing.first)))

    def _completion(self, sample: _Sample, drawn: T, scores: T, settings: SamplingSettings, image: Any) -> Completion:
        text, truncated = "", False
        if sample.prompt.draws:
            length = self.actor.drawing.tokens
        else:
            ends = torch.isin(drawn, self.actor.eos_ids.cpu()).nonzero()
            truncated = not len(ends) or int(ends[0]) >= sample.most
            length = min(len(drawn), sample.most) if truncated else int(ends[0]) + 1
            text = settings.text(drawn[:length].tolist(), truncated, self.tokenizer)
        log_probs = scores[:length].tolist() if settings.full_distribution else None
        prompt = list(sample.prompt.token_ids)
        return Completion(drawn[:length].tolist(), log_probs, text, truncated, prompt, image)


class OwnWeightsEngine(TransformersEngine):
    """The same over a model of its own, for a process beside the trainer's.

    Weights come by the names of the checkpoint; with LoRA adapters alone, by their names in the trainer's model.
    """

    shares_weights = False

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Into the parameters of these names; see `take_over`."""
        own = dict(self.actor.model.named_parameters())
        for name, tensor in named_tensors:
            take_over(own[name], tensor)


def worker_engine(config: RunConfig, checkpoint: Checkpoint) -> OwnWeightsEngine:
    """The engine of a process that does nothing else."""
    model = config.model
    transformer = load_transformer(checkpoint.path, model, torch.bfloat16 if model.bf16 else torch.float32)
    actor = Actor(add_lora(transformer, model), checkpoint.family.banned_ids(checkpoint.tokenizer), checkpoint.eos_ids)
    actor.to(get_accelerator().current_device_name()).requires_grad_(False)
    return OwnWeightsEngine(actor.eval(), checkpoint.tokenizer, config.rollout.micro_rollout_batch_size)


def _check_cache(actor: Actor) -> None:
    """Raise ConfigError for a model that does not go on from a key-value cache."""
    backbone, transformer = actor.backbone, actor.transformer
    layers = DynamicCache(config=backbone.config).layers
    attends = not layers or any(isinstance(layer, CacheLayerMixin) for layer in layers)
    takes = "past_key_values" in signature(backbone.base.forward).parameters
    if not (takes and attends and getattr(transformer, "_supports_default_dynamic_cache", lambda: True)()):
        raise ConfigError(
            f"engine hf goes on from a key-value cache, which model type {backbone.config.model_type!r} does not take: "
            "use engine vllm"
        )


@dataclass
class Choice:
    """How the next token of each of R responses is chosen: from the text's head, or from the one that draws.

    drawn, text: which responses are images and which are not, as indices: by masks the host would wait for the device
    at every token. guided: indices of those whose hidden states without prompt come behind the R. sources: for each row
    that is decoded the response whose token it goes on with.
    """

    actor: Actor
    settings: SamplingSettings
    drawn: T
    text: T
    guided: list[int]
    sources: T

    @classmethod
    def of(cls, actor: Actor, drawn: list[bool], settings: SamplingSettings) -> Choice:
        """For R responses.

        Args:
            actor: which is sampled from.
            drawn: whether each is an image.
            settings: how tokens are chosen.
        """
        device = actor.banned_ids.device
        guided = [i for i, draws in enumerate(drawn) if draws and settings.guidance_scale != 1]
        sources = torch.tensor([*range(len(drawn)), *guided], device=device)
        of_kind = ([i for i, draws in enumerate(drawn) if draws is kind] for kind in (True, False))
        images, text = (to_device(torch.tensor(each, dtype=torch.long), device) for each in of_kind)
        return cls(actor, settings, images, text, guided, sources)

    def next(self, hidden: T, noise: T, step: int) -> tuple[T, T]:
        """(token ids (R), their log-probs (R)).

        Args:
            hidden: (R + guided, H) last hidden states.
            noise: (R) float64 in [0, 1).
            step: number of the token.
        """
        count, text = len(noise), self.text
        if self.actor.drawing is None:
            return draw(_step_logits(self.actor, hidden, step, self.settings), noise, self.settings)
        tokens, log_probs = noise.new_zeros(count, dtype=torch.long), noise.new_zeros(count, dtype=torch.float32)
        logits = _step_logits(self.actor, hidden[text], step, self.settings)
        tokens[text], log_probs[text] = draw(logits, noise[text], self.settings)
        tokens[self.drawn], log_probs[self.drawn] = self._code(hidden, noise[self.drawn], step)
        return tokens, log_probs

    def _code(self, hidden: T, noise: T, step: int) -> tuple[T, T]:
        drawing, scale, count = self.actor.drawing, self.settings.guidance_scale, len(self.drawn) + len(self.text)
        own = hidden[self.drawn]
        read = drawing.guided(own, hidden[count:] if self.guided else None, scale)
        conditional = scale != 1 and self.settings.guidance_log_probs == "conditional"
        if conditional:
            read = torch.cat([read, drawing.features(own)])
        logits = drawing.head(read, in_float32=True) / step_temperature(step, self.settings)
        codes, log_probs = draw(logits[: len(own)], noise, self.settings)
        if conditional:
            alone = logits[len(own) :].log_softmax(dim=-1)
            log_probs = alone.gather(1, codes.unsqueeze(1)).squeeze(1)
        return codes + drawing.first, log_probs


class PromptLayer(DynamicLayer):
    """One layer of a cache: keys and values (P, key heads, S, D) of prompts. From the moment that `own` of responses
    (R, key heads, most, D) are there, `update` takes one token of each, and gives the keys and values of these alone.
    """

    own: tuple[T, T] | None = None
    length = 0  # of the responses

    def update(self, key_states: T, value_states: T, *args, **kwargs) -> tuple[T, T]:
        """Take keys and values (B, key heads, tokens, D) in; returns what stands in for all of them."""
        if self.own is None:
            return super().update(key_states, value_states, *args, **kwargs)
        for held, new in zip(self.own, (key_states, value_states)):
            held[:, :, self.length] = new.squeeze(2)
        self.length += 1
        return tuple(each[:, :, : self.length] for each in self.own)


@dataclass
class Decoding:
    """R responses that go on, behind P prompts whose keys and values are held once, whatever the number of responses.

    transformers' cache holds a row for each response, copies of its prompt, all of which it copies anew at each token
    to make room for one more, and again for each query head of a key head. Here a response has room for its own tokens
    alone. It attends to its prompt together with that prompt's other responses, then to itself, and the two results
    become one softmax by their sums of exponentials (as Hydragen, arXiv 2402.05099).

    mask: of what is in the cache (R, cached), as models take it; where prompts are held once, of four dimensions, so
    that they make none themselves. bias (P, 1, 1, S): -inf at padding of such prompts; None where each response has a
    row. members (P * largest group) and back (R): responses by prompt, small groups filled up, and where each is there;
    None where they lie so. attended: whether attention has looked at such prompts.
    """

    backbone: Backbone
    cache: DynamicCache
    positions: T
    mask: T
    bias: T | None = None
    members: T | None = None
    back: T | None = None
    attended: bool = False

    @classmethod
    def of(cls, backbone: Backbone, inputs: ModelInputs, prompts: list[int], most: int) -> tuple[T, Decoding]:
        """(last hidden states (R, H), their decoding) after the prompts.

        Args:
            backbone: which runs them.
            inputs: the prompts (P, S), left-padded.
            prompts: of each response the number of its prompt.
            most: tokens of a response.
        """
        once, cache = backbone.by_segments and holds_prompts_once(backbone.config), DynamicCache(config=backbone.config)
        if once:
            cache.layers = [PromptLayer() for _ in cache.layers]
        hidden, positions, mask = backbone.prefill(inputs, cache)
        chosen = to_device(numbers := torch.tensor(prompts), mask.device)
        hidden, positions = hidden[chosen], positions[..., chosen, :]
        if not once:
            cache.reorder_cache(chosen)  # of layers of all kinds, those of linear attention too
            return hidden, cls(backbone, cache, positions, mask[chosen])
        for layer in cache.layers:
            sizes = ((len(prompts), each.shape[1], most, each.shape[3]) for each in (layer.keys, layer.values))
            layer.own = tuple(layer.keys.new_empty(size) for size in sizes)
        groups = [(numbers == prompt).nonzero().squeeze(1) for prompt in range(len(mask))]
        filled = pad_sequence(groups, batch_first=True, padding_value=len(prompts)).flatten()
        given: list[T] = []
        if filled.tolist() != [*range(len(prompts))]:
            back = filled.new_empty(len(prompts) + 1)  # the last: of what fills up
            back[filled] = torch.arange(len(filled))
            given = [to_device(each, mask.device) for each in (filled.clamp(max=len(prompts) - 1), back[:-1])]
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(mask == 0, float("-inf"))
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=mask.device)
        return hidden, cls(backbone, cache, positions, mask, bias[:, None, None], *given)

    def next(self, tokens: T) -> T:
        """Last hidden states (R, H) of one more token of each response."""
        given: dict[str, Any] = {"prompts": self}
        if self.bias is None:
            given, self.mask = {}, F.pad(self.mask, (0, 1), value=1)
        output = self.backbone.base(
            input_ids=tokens.unsqueeze(1),
            attention_mask=self.mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
            **given,
        )
        self.positions = self.positions + 1
        if given and not self.attended:  # responses have read themselves alone
            raise ConfigError("this model's attention takes no prompts apart from responses: use engine vllm")
        return output.last_hidden_state[:, -1]

    def attend(self, layer: int, query: T, key: T, value: T, scale: float | None) -> T:
        """(R, 1, heads, D) what the next token of each response reads of its prompt and of the response.

        Args:
            layer: number of the layer.
            query: (R, heads, 1, D).
            key: (R, key heads, tokens, D) of the responses, as `PromptLayer.update` gave them.
            value: likewise.
            scale: of scores; None: D ** -0.5.
        """
        self.attended = True
        prompts, (count, heads, _, width) = self.cache.layers[layer], query.shape
        query = query.squeeze(2).float() * (width**-0.5 if scale is None else scale)
        query = query.view(count, key.shape[1], heads // key.shape[1], width)
        grouped = query if self.members is None else query[self.members]
        grouped = grouped.unflatten(0, (len(self.bias), -1)).transpose(1, 2)  # (P, key heads, group, heads a key, D)
        read, total = _read(grouped.flatten(2, 3), prompts.keys, prompts.values, self.bias)
        read, total = (each.unflatten(2, grouped.shape[2:4]).transpose(1, 2).flatten(0, 1) for each in (read, total))
        if self.back is not None:
            read, total = read[self.back], total[self.back]
        own, own_total = _read(query, key, value)
        made = own.lerp(read, (total - own_total).sigmoid())
        return made.flatten(1, 2).unsqueeze(1).to(value.dtype)


def holds_prompts_once(config: PretrainedConfig) -> bool:
    """Whether all layers cache keys and values, of all tokens: not windows, states, or what keys are made of."""
    layers = DynamicCache(config=config).layers
    latent = hasattr(config.get_text_config(), "kv_lora_rank")
    return bool(layers) and not latent and all(type(layer) is DynamicLayer for layer in layers)


def _read(query: T, key: T, value: T, bias: T | None = None) -> tuple[T, T]:
    """(what queries (..., Q, D) read of keys and values (..., S, D), the logarithm of their sums of exponentials
    (..., Q, 1)), in float32: trainer and engine differ by no rounded scores."""
    scores = torch.matmul(query, key.float().transpose(-1, -2))
    if bias is not None:
        scores += bias
    largest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    return torch.matmul(weights, value.float()) / total, largest + total.log()


def prompt_inputs(prompts: Sequence[PromptFeatures], pad_id: int) -> ModelInputs:
    """Left-padded prompts (B, S) with their patches."""
    ids = [torch.tensor(prompt.token_ids + prompt.continued) for prompt in prompts]
    sequences = pad_sequence(ids, batch_first=True, padding_value=pad_id, padding_side="left")
    mask = pad_sequence([torch.ones_like(each) for each in ids], batch_first=True, padding_side="left")
    vision = VisionTensors.gather(prompt.vision for prompt in prompts)
    return ModelInputs(sequences, mask, torch.zeros(len(mask), 0, dtype=torch.bool), vision=vision)


def uniform_noise(samples: Sequence[_Sample], steps: int) -> T:
    """(rows, steps) float64 in [0, 1): each row's own stream, made on the host so that devices agree."""
    streams = []
    for sample in samples:
        generator = torch.Generator().manual_seed(derive_seed(sample.prompt.seed, sample.copy))
        begun = len(sample.prompt.continued)
        streams.append(torch.rand(begun + steps, dtype=torch.float64, generator=generator)[begun:])
    return torch.stack(streams)


def _step_logits(actor: Actor, hidden: T, step: int, settings: SamplingSettings) -> T:
    """(B, V) float32 at the sampling temperature of response token `step`, banned tokens at -inf."""
    logits = actor.head[0](hidden, in_float32=True)
    logits = logits / step_temperature(step, settings)
    banned = actor.banned_with_eos if step < settings.eos_banned_tokens else actor.banned_ids
    return logits.index_fill(1, banned, float("-inf"))


def step_temperature(step: int, settings: SamplingSettings) -> float:
    """By which the logits of response token `step` are divided; 1 where the likeliest token is taken."""
    if settings.greedy:
        return 1.0
    first = settings.first_token_temperature
    return first if step == 0 and first is not None else settings.temperature


def draw(logits: T, noise: T, settings: SamplingSettings) -> tuple[T, T]:
    """(tokens (B), their log-probs (B)), by inverse transform, or the largest where greedy.

    Args:
        logits: (B, V) at the sampling temperature, -inf where a token is banned.
        noise: (B) float64 in [0, 1).
        settings: for greedy, top_k and top_p; log-probs are those of all logits.
    """
    if settings.greedy:
        tokens = logits.argmax(dim=-1)
    else:
        kept = logits if settings.full_distribution else truncated(logits, settings.top_k, settings.top_p)
        mass = kept.softmax(dim=-1).double().cumsum(dim=-1)
        total = mass[:, -1]
        # Below the total even when rounded, so that the token found has mass of its own and is never a banned one.
        level = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(mass, level.unsqueeze(1), right=True).squeeze(1)
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)  # beyond the end where logits are not finite
    return tokens, logits.log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)


def truncated(logits: T, top_k: int, top_p: float) -> T:
    """The logits with those that are not to be drawn at -inf.

    Args:
        logits: (B, V).
        top_k: so many of the largest stay; 0 or below: all.
        top_p: of these the smallest set of so much mass stays.
    """
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if top_p < 1:
        ordered, positions = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        outside = probabilities.cumsum(dim=-1) - probabilities >= top_p
        logits = logits.masked_fill(outside.scatter(1, positions, outside), float("-inf"))
    return logits
