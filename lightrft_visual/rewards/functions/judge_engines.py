"""What a judge in the run answers with: transformers, or an engine of vLLM beside the trainer in this process."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from ...errors import ConfigError
from ...models.weight_files import load_whole
from ...runtime.offload import on_device
from .image_scoring import in_batches, load_checkpoint

Messages = list[dict[str, Any]]
Reply = tuple[str, int, bool]  # text, tokens, whether max_tokens cut it


class TransformersReplies:
    """By transformers: the weights wait on the host between calls where `offload` is set."""

    def __init__(self, model: str, bf16: bool, max_tokens: int, batch_size: int, offload: bool) -> None:
        self.max_tokens, self.batch_size, self.offload = max_tokens, batch_size, offload
        self._processor = _processor_of(model)
        self.marks = marks_of(self._processor.tokenizer)
        dtype = torch.bfloat16 if bf16 else torch.float32
        self._model = load_checkpoint(partial(load_whole, AutoModelForImageTextToText), model, "judge", dtype=dtype)

    @torch.no_grad()
    def __call__(self, asked: Sequence[Messages], device: Any) -> list[Reply]:
        """Greedily, questions of like length together; in the order of `asked`."""
        found: dict[int, Reply] = {}
        order = sorted(range(len(asked)), key=lambda index: len(str(asked[index])))
        with on_device(self._model, device, self.offload) as model:
            for part in in_batches(self.batch_size, len(order)):
                inputs = self._processor.apply_chat_template(
                    [asked[order[i]] for i in part], add_generation_prompt=True, tokenize=True, return_dict=True,
                    return_tensors="pt", padding=True,
                ).to(device)  # fmt: skip
                made = model.generate(**inputs, do_sample=False, max_new_tokens=self.max_tokens)
                made = made[:, inputs["input_ids"].shape[1] :]
                texts = self._processor.batch_decode(made, skip_special_tokens=True)
                pad, ends = self._processor.tokenizer.pad_token_id, model.generation_config.eos_token_id
                ends = {pad, *(ends if isinstance(ends, list) else [ends])}
                cut = [token not in ends for token in made[:, -1].tolist()]
                found |= zip((order[i] for i in part), zip(texts, (made != pad).sum(dim=1).tolist(), cut))
        return [found[index] for index in range(len(asked))]

    def close(self) -> None:
        """Nothing to end."""


class VLLMReplies:
    """By vLLM, each rank an engine of its own; on CUDA it sleeps between calls where `sleep` is set.

    mem_util: share of the device while it is awake. max_length: tokens of question, images and reply.
    """

    def __init__(
        self, model: str, bf16: bool, max_tokens: int, batch_size: int, sleep: bool, mem_util: float, max_length: int
    ) -> None:
        from ...rollout.vllm.arguments import VLLMSettings, host_cache
        from ...rollout.vllm.engine import VLLMEngine

        _processor_of(model)
        config = load_checkpoint(AutoConfig.from_pretrained, model, "judge")
        max_length = min(max_length, getattr(config.get_text_config(), "max_position_embeddings", max_length))
        room = host_cache(config.get_text_config(), 2 if bf16 else 4, batch_size, max_length)
        settings = VLLMSettings(
            model, max_length, "bfloat16" if bf16 else "float32", memory_utilization=mem_util, enable_sleep=sleep,
            max_num_seqs=batch_size, host_cache=room,
        )  # fmt: skip
        self.max_tokens, self._engine = max_tokens, VLLMEngine(settings)
        self.marks = marks_of(self._engine.tokenizer)
        self._engine.sleep()

    def __call__(self, asked: Sequence[Messages], device: Any) -> list[Reply]:
        """Greedily, all at once."""
        from vllm import SamplingParams

        self._engine.wake()
        try:
            parameters = SamplingParams(temperature=0.0, max_tokens=self.max_tokens, detokenize=False)
            special = {"add_special_tokens": False}  # the template's alone; vLLM up to 0.29 adds others
            questions = [_for_vllm(each) for each in asked]
            made = self._engine.llm.chat(questions, parameters, use_tqdm=False, tokenization_kwargs=special)
        finally:
            self._engine.sleep()
        replies = [each.outputs[0] for each in made]  # vLLM's text lacks bytes that are no whole character
        texts = self._engine.tokenizer.batch_decode([each.token_ids for each in replies], skip_special_tokens=True)
        return [(t, len(each.token_ids), each.finish_reason == "length") for t, each in zip(texts, replies)]

    def close(self) -> None:
        """Give its memory back."""
        self._engine.close()


def _processor_of(model: str) -> Any:
    processor = load_checkpoint(AutoProcessor.from_pretrained, model, "judge", padding_side="left")
    if not hasattr(processor, "tokenizer"):  # it is one
        raise ConfigError(f"judge: {model} is a model of texts alone: name a vision-language model")
    return processor


def marks_of(tokenizer: Any) -> list[str]:
    """Tokens with a meaning of their own, such as a place for an image: a question holds those of its template only."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return sorted({*added, *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)


def _for_vllm(messages: Messages) -> Messages:
    def part(each: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "image_pil", "image_pil": each["image"]} if "image" in each else dict(each)

    return [
        {**m, "content": [part(each) for each in m["content"]] if isinstance(m["content"], list) else m["content"]}
        for m in messages
    ]
