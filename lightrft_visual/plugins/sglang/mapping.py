"""What SGLang is asked, and what its answers mean; nothing here needs the package."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from ...errors import RolloutError
from ...experience.rollouts import Completion, PromptFeatures, SamplingSettings
from ...rollout.weight_sync import BUCKET_BYTES
from ...runtime.host_memory import in_buckets
from ...runtime.seeding import derive_seed

T = torch.Tensor
NEVER = -1e9  # added to the logit of a token that must not be drawn
IMAGE_TENSORS = ("pixel_values", "image_grid_thw")
_PREFIXES = {"model.language_model.": "model.", "model.visual.": "visual."}  # transformers' names in memory: SGLang's


def sampling_parameters(
    settings: SamplingSettings, seed: int, banned_ids: Sequence[int], eos_ids: Sequence[int]
) -> dict[str, Any]:
    """SGLang's sampling parameters of one response.

    Args:
        settings: how its tokens are chosen.
        seed: of the response; a greedy one needs none.
        banned_ids: tokens that must not be drawn.
        eos_ids: tokens that end it.
    """
    asked: dict[str, Any] = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "max_new_tokens": settings.max_new_tokens,
        "min_new_tokens": settings.eos_banned_tokens,
        "stop_token_ids": list(eos_ids),
        "skip_special_tokens": settings.skip_special_tokens,
    }
    if banned_ids:
        asked["logit_bias"] = {str(token): NEVER for token in banned_ids}
    if not settings.greedy:
        asked["sampling_seed"] = seed
    return asked


def within_context(prompt: PromptFeatures, settings: SamplingSettings, context_length: int) -> SamplingSettings:
    """The settings for a response that is made in segments: the last one may ask for more tokens than there is room
    for, with which SGLang refuses a request.

    Args:
        prompt: with the tokens of earlier segments.
        settings: of the call.
        context_length: tokens of prompt and response at most.
    """
    room = context_length - len(prompt.token_ids) - len(prompt.continued)
    if not prompt.continued or room >= settings.max_new_tokens:
        return settings
    return replace(settings, max_new_tokens=room)


def request(
    prompt: PromptFeatures, settings: SamplingSettings, banned_ids: Sequence[int], eos_ids: Sequence[int]
) -> dict[str, Any]:
    """Keyword arguments of `Engine.async_generate` for the n responses to a prompt.

    Each response is a request of its own with a seed of its own: SGLang gives the samples of one request the same
    seed, with which they would all be the same. A response's seed does not change where it is continued: SGLang draws
    by seed and position, so segments are those of one call. The prompt goes in as the trainer's token ids, expanded,
    with the processor's patches beside them. Raises RolloutError for a prompt with videos.

    Args:
        prompt: with the tokens of earlier segments, if there are any.
        settings: n, and how tokens are chosen.
        banned_ids, eos_ids: as of `sampling_parameters`.
    """
    if prompt.videos:
        raise RolloutError(f"prompt {prompt.group_id} has videos, which engine sglang does not take: use vllm, or hf")
    seeds = [derive_seed(prompt.seed, prompt.copy + index) for index in range(settings.n)]
    asked: dict[str, Any] = {
        "input_ids": [prompt.token_ids + prompt.continued] * settings.n,
        "sampling_params": [sampling_parameters(settings, seed, banned_ids, eos_ids) for seed in seeds],
        "return_logprob": True,
    }
    if prompt.images:
        tensors = {name: prompt.vision.get(name) for name in IMAGE_TENSORS}
        asked["image_data"] = [[{"format": "processor_output"} | tensors]] * settings.n
    return asked


def completion(
    output: dict[str, Any], prompt: PromptFeatures, settings: SamplingSettings, eos_ids: Sequence[int], tokenizer: Any
) -> Completion:
    """A response from SGLang's answer. Raises RolloutError for an answer that does not fit what was asked.

    Args:
        output: the answer to one request.
        prompt, settings: of the request.
        eos_ids: tokens that may end a response.
        tokenizer: decodes it.
    """
    meta, token_ids = output["meta_info"], [int(token) for token in output["output_ids"]]
    reason = meta["finish_reason"] or {}
    kind = reason.get("type")
    if kind not in ("stop", "length"):
        raise RolloutError(f"SGLang gave up a response: {kind or 'no reason'}, {reason.get('message', 'no message')}")
    truncated = kind == "length"
    if truncated and len(token_ids) < settings.max_new_tokens:
        raise RolloutError(
            f"SGLang cut a response after {len(token_ids)} of {settings.max_new_tokens} tokens: its KV cache is too "
            "small for one whole sequence; raise engine_mem_util"
        )
    if not truncated and token_ids[-1] not in eos_ids:
        raise RolloutError(f"SGLang stopped at token {token_ids[-1]}, which is no end token of the model: {reason}")
    expected = len(prompt.token_ids) + len(prompt.continued)
    if meta["prompt_tokens"] != expected:
        raise RolloutError(
            f"prompt {prompt.group_id}: SGLang saw {meta['prompt_tokens']} tokens, given were {expected}; it has "
            "expanded placeholders that were expanded already"
        )
    log_probs = _log_probs(meta, token_ids) if settings.full_distribution else None
    text = settings.text(token_ids, truncated, tokenizer)
    return Completion(token_ids, log_probs, text, truncated, list(prompt.token_ids))


def _log_probs(meta: dict[str, Any], token_ids: list[int]) -> list[float]:
    """Natural logs, one a token, at the sampling temperature, over all tokens that are not banned."""
    entries = meta.get("output_token_logprobs") or []
    if [int(entry[1]) for entry in entries] != token_ids:
        raise RolloutError("SGLang's log-probs are not those of the sampled tokens, one for each")
    values = [float(entry[0]) for entry in entries]
    if not all(map(math.isfinite, values)):
        raise RolloutError("SGLang gave a log-prob that is not finite for a token that it sampled")
    return values


def sglang_name(name: str) -> str:
    """The name under which SGLang's loaders look for a weight of transformers' model."""
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], most: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Neighbours of one dtype and together at most `most` bytes, or one tensor that is larger, by SGLang's names.

    A bucket is one row of bytes: of several dtypes some would not start at a multiple of their size.
    """
    for _, alike in groupby(named_tensors, lambda each: each[1].dtype):
        for bucket in in_buckets(alike, most, lambda each: each[1].nbytes):
            yield [(sglang_name(name), tensor) for name, tensor in bucket]
