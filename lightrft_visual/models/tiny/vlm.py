"""Tiny but real checkpoints, built on the spot: real architectures, tokenizer, processor and chat template.

They load through the same code as hub checkpoints. About 0.5 M parameters; head_dim 32 is the smallest that vLLM's CPU
attention takes.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
    Qwen2Tokenizer,
)

from ...runtime.seeding import seed_everything

# What a tokenizer learns its words from where no others are given.
TEXTS = (
    "how many shapes are there?", "what colour is it?", "which shape is it?", "how large is it?",
    "first  second  what colour is the first?", "red green blue yellow which word is last?", "1", "2", "3", "ring",
    "square", "triangle", "small", "large", *("red", "green", "blue", "yellow") * 3,
)  # fmt: skip
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

_QWEN_MEDIA = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
_INTERNVL_MEDIA = {"image": "<IMG_CONTEXT>\n", "video": "<video>\n"}
_INTERNVL_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_JANUS_MEDIA = {"image": "<image_placeholder>\n", "video": ""}
_JANUS_TOKENS = {
    "image_token": "<image_placeholder>",
    "boi_token": "<begin_of_image>",
    "eoi_token": "<end_of_image>",
}
JANUS_SIDE, JANUS_PATCH = 56, 14  # pixels of what it sees; an image is (56 / 14) ** 2 = 16 tokens, seen or drawn
JANUS_DRAWN, JANUS_CODES = 16, 128  # pixels of what it draws, four a token
INTERNVL_TILE, INTERNVL_PATCH = 56, 14  # pixels; a tile takes (56 / 14 / 2) ** 2 = 4 tokens

TOOL_TOKENS = ("<tool_call>", "</tool_call>")  # of one token each, as in the vocabularies of Qwen2.5 and later
_CHAT_TEMPLATE = (
    # Tools in few tokens: a whole schema would be several hundred of this vocabulary.
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}<tool_call>{{ tool['function']['name'] }}"
    "{% for name in tool['function']['parameters']['properties'] %} {{ name }}{% endfor %}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}IMAGE_PLACEHOLDER"
    "{% elif part['type'] == 'video' %}VIDEO_PLACEHOLDER"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyFamily:
    """How the tiny model of one family is built.

    config: from (settings of the text model, token text to id, hidden size, tied embeddings) to the configuration.
    processor: from (tokenizer, largest pixels of an image) to the family's own; None for text only. media: placeholders
    by kind. special_tokens: those that the tokenizer has by names of their own. draws: its answers may be images.
    """

    config: Callable[[dict, Callable[[str], int], int, bool], PretrainedConfig]
    processor: Callable[[Qwen2Tokenizer, int], ProcessorMixin] | None
    media: dict[str, str]
    special_tokens: dict[str, str] = field(default_factory=dict)
    draws: bool = False


def chat_template(family: str) -> str:
    """ChatML with the placeholders of a family."""
    media = TINY_FAMILIES[family].media
    return _CHAT_TEMPLATE.replace("IMAGE_PLACEHOLDER", media["image"]).replace("VIDEO_PLACEHOLDER", media["video"])


def build_tokenizer(texts: Iterable[str] = TEXTS, family: str = "qwen2_5_vl", tools: bool = False) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer of the Qwen2 class, of at most 512 tokens, special ones and TOOL_TOKENS aside; every
    string round-trips.

    Args:
        texts: that it learns its words from.
        family: of TINY_FAMILIES, for its chat template and special tokens.
        tools: whether it has TOOL_TOKENS.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    named = TINY_FAMILIES[family].special_tokens
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        **({"extra_special_tokens": named} if named else {"additional_special_tokens": list(SPECIAL_TOKENS)}),
    )
    if named:  # the tokenizer takes one of the two arguments only
        tokenizer.add_tokens([*SPECIAL_TOKENS], special_tokens=True)
    if tools:
        tokenizer.add_tokens([*TOOL_TOKENS])
    tokenizer.chat_template = chat_template(family)
    return tokenizer


def build_processor(family: str, tokenizer: Qwen2Tokenizer, max_pixels: int = 448 * 448) -> ProcessorMixin:
    """The family's own processor; images are resized to multiples of the merged patch, or cut into tiles.

    Args:
        family: of TINY_FAMILIES, one that sees.
        tokenizer: the family's.
        max_pixels: of an image, in all its tiles; Janus sees all images in one size.
    """
    return TINY_FAMILIES[family].processor(tokenizer, max_pixels)


def _internvl_processor(tokenizer: Qwen2Tokenizer, max_pixels: int) -> ProcessorMixin:
    size = {"height": INTERNVL_TILE, "width": INTERNVL_TILE}
    tiles = max(1, min(4, max_pixels // INTERNVL_TILE**2))
    return transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(
            size=size, crop_to_patches=True, min_patches=1, max_patches=tiles
        ),
        tokenizer=tokenizer,
        video_processor=transformers.InternVLVideoProcessor(size=size),
        image_seq_length=(INTERNVL_TILE // INTERNVL_PATCH // 2) ** 2,
        chat_template=chat_template("internvl"),
    )


def _janus_processor(tokenizer: Qwen2Tokenizer, max_pixels: int) -> ProcessorMixin:
    size = {"height": JANUS_SIDE, "width": JANUS_SIDE}
    half = [0.5, 0.5, 0.5]  # pixels in -1..1, as the decoder of drawn images gives them
    return transformers.JanusProcessor(
        image_processor=transformers.JanusImageProcessor(size=size, image_mean=half, image_std=half),
        tokenizer=tokenizer,
        num_image_tokens=(JANUS_SIDE // JANUS_PATCH) ** 2,
        chat_template=chat_template("janus"),
    )


def tiny_config(family: str, tokenizer: Qwen2Tokenizer, *, tie_embeddings: bool, hidden: int = 128, layers: int = 2):
    """The configuration object of a tiny model.

    Args:
        family: of TINY_FAMILIES.
        tokenizer: the family's, whose vocabulary the model has.
        tie_embeddings: the head has the weights of the token embeddings.
        hidden: width of the text model, a multiple of 32.
        layers: of the text model.
    """
    if family not in TINY_FAMILIES:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(TINY_FAMILIES)}")
    token_id = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": max(1, hidden // 64),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": token_id("<|endoftext|>"),
        "eos_token_id": token_id("<|im_end|>"),
    }
    return TINY_FAMILIES[family].config(text, token_id, hidden, tie_embeddings)


def _qwen2(text: dict, token_id: Callable[[str], int], hidden: int, tied: bool) -> PretrainedConfig:
    return transformers.Qwen2Config(**text, tie_word_embeddings=tied)


def _internvl(text: dict, token_id: Callable[[str], int], hidden: int, tied: bool) -> PretrainedConfig:
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": [INTERNVL_TILE, INTERNVL_TILE],
        "patch_size": [INTERNVL_PATCH, INTERNVL_PATCH],
    }
    return transformers.InternVLConfig(
        vision_config=vision,
        text_config=text | {"model_type": "qwen2"},
        image_token_id=token_id("<IMG_CONTEXT>"),
        image_seq_length=(INTERNVL_TILE // INTERNVL_PATCH // 2) ** 2,
        tie_word_embeddings=tied,
    )


def _janus(text: dict, token_id: Callable[[str], int], hidden: int, tied: bool) -> PretrainedConfig:
    vision = {
        "hidden_size": 64,
        "mlp_ratio": 4.0,
        "num_hidden_layers": 3,  # with two, shapes are not counted
        "num_attention_heads": 2,
        "image_size": JANUS_SIDE,
        "patch_size": JANUS_PATCH,
        "num_image_tokens": (JANUS_SIDE // JANUS_PATCH) ** 2,
        "projection_dim": hidden,
        "initializer_range": 0.1,  # near 1 / sqrt(width), as below: at 0.02 what is seen hardly reaches the answers
    }
    drawing = {
        "num_embeddings": JANUS_CODES,
        "latent_channels": 32,
        "base_channels": 64,  # in 32 groups that are normalised each; with one channel a group colours are lost
        "channel_multiplier": [1, 1, 1],  # halved twice
        "num_res_blocks": 0,
        "projection_dim": hidden,
        "image_token_embed_dim": hidden,
        "initializer_range": 0.05,  # at 0.02 some seeds stay where colours are known and shapes are not
    }
    return transformers.JanusConfig(
        text_config=text | {"model_type": "llama", "initializer_range": 0.08},
        vision_config=vision,
        vq_config=drawing,
        image_token_id=token_id("<image_placeholder>"),
        tie_word_embeddings=tied,
    )


_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_TOWER = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}


def _qwen_shared(token_id: Callable[[str], int], tied: bool) -> dict:
    return {
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "tie_word_embeddings": tied,
    }


def _qwen2_vl(text: dict, token_id: Callable[[str], int], hidden: int, tied: bool) -> PretrainedConfig:
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": hidden, "num_heads": 2, "mlp_ratio": 2}
    text = text | {"rope_parameters": _MROPE}
    return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **_qwen_shared(token_id, tied))


def _qwen2_5_vl(text: dict, token_id: Callable[[str], int], hidden: int, tied: bool) -> PretrainedConfig:
    own = {"out_hidden_size": hidden, "window_size": 112, "fullatt_block_indexes": [1], "tokens_per_second": 2}
    text = text | {"rope_parameters": _MROPE}
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=_TOWER | own, **_qwen_shared(token_id, tied))


def _qwen3_vl(text: dict, token_id: Callable[[str], int], hidden: int, tied: bool) -> PretrainedConfig:
    own = {"out_hidden_size": hidden, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    text = text | {"head_dim": 32, "rope_parameters": _MROPE | {"mrope_interleaved": True}}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=_TOWER | own, **_qwen_shared(token_id, tied))


def _qwen(
    name: str, config: Callable, processor: type, videos: type = transformers.Qwen2VLVideoProcessor, patch: int = 14
) -> TinyFamily:
    def build(tokenizer: Qwen2Tokenizer, max_pixels: int) -> ProcessorMixin:
        size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": max_pixels}
        shared = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "size": size}
        return processor(
            image_processor=transformers.Qwen2VLImageProcessor(**shared),
            tokenizer=tokenizer,
            video_processor=videos(**shared),
            chat_template=chat_template(name),
        )

    return TinyFamily(config, build, _QWEN_MEDIA)


TINY_FAMILIES: dict[str, TinyFamily] = {
    "qwen2_vl": _qwen("qwen2_vl", _qwen2_vl, transformers.Qwen2VLProcessor),
    "qwen2_5_vl": _qwen("qwen2_5_vl", _qwen2_5_vl, transformers.Qwen2_5_VLProcessor),
    "qwen3_vl": _qwen("qwen3_vl", _qwen3_vl, transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor, 16),
    "internvl": TinyFamily(_internvl, _internvl_processor, _INTERNVL_MEDIA, _INTERNVL_TOKENS),
    "qwen2": TinyFamily(_qwen2, None, _QWEN_MEDIA),
    "janus": TinyFamily(_janus, _janus_processor, _JANUS_MEDIA, _JANUS_TOKENS, draws=True),
}
FAMILIES = tuple(name for name, family in TINY_FAMILIES.items() if not family.draws)  # those that write text only
VISION_FAMILIES = tuple(name for name in FAMILIES if TINY_FAMILIES[name].processor is not None)


def build_tiny_model(config) -> PreTrainedModel:
    """A randomly initialised float32 model of the class that the Auto classes map `config` to."""
    auto = AutoModelForCausalLM if config.model_type == "qwen2" else AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = [config.get_text_config().eos_token_id]
    model.generation_config.do_sample = True
    return model


def build_tiny_checkpoint(
    folder: Path,
    family: str = "qwen2_5_vl",
    *,
    texts: Iterable[str] = TEXTS,
    tie_embeddings: bool = False,
    seed: int = 0,
    hidden: int = 128,
    layers: int = 2,
    tools: bool = False,
) -> Path:
    """Write an untrained tiny checkpoint: config, weights, tokenizer, processor, chat template.

    Args:
        folder: which is written to, and returned.
        family: of TINY_FAMILIES.
        texts, tools: as of `build_tokenizer`.
        tie_embeddings, hidden, layers: as of `tiny_config`.
        seed: of the weights.
    """
    seed_everything(seed)
    tokenizer = build_tokenizer(texts, family=family, tools=tools)
    config = tiny_config(family, tokenizer, tie_embeddings=tie_embeddings, hidden=hidden, layers=layers)
    model = build_tiny_model(config)
    if TINY_FAMILIES[family].draws:  # what the model's own `generate` reads to draw
        drawing = model.generation_config
        drawing._from_model_config = False  # else transformers leaves out what only some models have when it loads them
        drawing.bos_token_id = drawing.pad_token_id = tokenizer.pad_token_id
        drawing.guidance_scale = 3.0
        drawing.generation_kwargs = {"boi_token_id": tokenizer.convert_tokens_to_ids(tokenizer.boi_token)}
    model.save_pretrained(folder)
    if TINY_FAMILIES[family].processor is not None:
        build_processor(family, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
