"""Qwen2-VL with a head that reads at tokens of its own, as HPSv3 and VideoAlign have it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

from ...data.rendering import MediaConventions, without_marks
from ...errors import ConfigError, refused_as
from ...models.weight_files import LOADING
from .image_scoring import load_checkpoint

HEAD = "rm_head."


def processor_with(tokens: Sequence[str], model: str, scorer: str) -> tuple[Any, dict[str, int]]:
    """A processor with more tokens, and their ids.

    Args:
        tokens: at which a head reads.
        model: folder or hub name that has the processor.
        scorer: for messages.
    """
    processor = load_checkpoint(AutoProcessor.from_pretrained, model, scorer, padding_side="right")
    processor.tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    return processor, dict(zip(tokens, processor.tokenizer.convert_tokens_to_ids(list(tokens))))


def asked(processor: Any, medium: str, question: str, prompts: Sequence[str]) -> list[str]:
    """For each prompt, without the marks of images and videos that it spells, the text of a chat.

    Args:
        processor: of `processor_with`.
        medium: `image` or `video`, of which each chat has one.
        question: after it; the prompt stands for {prompt}.
        prompts: one for each chat.
    """
    marks = MediaConventions.reserved(processor)
    prompts = [without_marks(text, marks) for text in prompts]
    parts = [[{"type": medium}, {"type": "text", "text": question.replace("{prompt}", text)}] for text in prompts]
    chats = [[{"role": "user", "content": content}] for content in parts]
    return [processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]


def with_head(
    config: Any, state: dict[str, torch.Tensor], head: nn.Module, dtype: torch.dtype, scorer: str
) -> nn.Module:
    """The network with the published weights and a head as its `rm_head`. Raises ConfigError where names or shapes do
    not fit.

    Args:
        config: of Qwen2-VL; its vocabulary becomes that of the weights.
        state: the published weights, out of which those of the head are taken.
        head: to load them into; it keeps its own precision.
        dtype: of the network.
        scorer: for messages.
    """
    own = {name[len(HEAD) :]: state.pop(name) for name in list(state) if name.startswith(HEAD)}
    words = [tensor for name, tensor in state.items() if name.endswith("embed_tokens.weight")]
    with refused_as(ConfigError, f"scorer {scorer}: weights and model do not fit"), LOADING:
        config.get_text_config().vocab_size = words[0].shape[0]  # with the tokens of its own
        model, report = Qwen2VLForConditionalGeneration.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
        head.load_state_dict(own)
        model.rm_head = head
    wrong = [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in report[kind]]
    if wrong:
        raise ConfigError(f"scorer {scorer}: weights and model do not fit: {', '.join(map(str, wrong[:5]))}")
    return model.eval()


@torch.no_grad()
def read_at(model: nn.Module, batch: Any, tokens: dict[str, int], scorer: str) -> torch.Tensor:
    """(B, K, outputs) float32: what the head says at each of the K tokens, in the order of the text.

    As in the published forwards, positions count tokens, of images and videos too. Raises ConfigError where a text
    does not have each token once.

    Args:
        model: of `with_head`.
        batch: what the processor made of B texts and their media, on the model's device.
        tokens: K ids by token, of `processor_with`.
        scorer: for messages.
    """
    ids = batch["input_ids"]
    found = torch.stack([ids == token for token in tokens.values()])
    if not bool((found.sum(dim=2) == 1).all()):
        raise ConfigError(f"{scorer}: a prompt holds one of {', '.join(tokens)}, which are the question's own")
    positions = torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
    hidden = model.model(**batch, position_ids=positions, use_cache=False).last_hidden_state
    width = next(model.rm_head.parameters()).dtype
    return model.rm_head(hidden[found.any(dim=0)].to(width)).float().unflatten(0, (len(ids), len(tokens)))
