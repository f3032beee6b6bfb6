"""A tiny CLIP; the helpers beside the tests are importable in every import mode of pytest."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTextConfig, CLIPVisionConfig

    folder = tmp_path_factory.mktemp("clip")
    tokenizer = tiny_clip_tokenizer()
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = CLIPTextConfig(vocab_size=len(tokenizer), max_position_embeddings=16, eos_token_id=1, **size)
    vision = CLIPVisionConfig(image_size=32, patch_size=16, **size)
    torch.manual_seed(0)
    config = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=24)
    CLIPModel(config).save_pretrained(folder)
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(processor, tokenizer).save_pretrained(folder)
    return str(folder)


def tiny_clip_tokenizer():
    from transformers import CLIPTokenizer

    letters = [chr(c) for c in range(97, 123)]
    names = ["<|startoftext|>", "<|endoftext|>", *letters, *(c + "</w>" for c in letters)]
    return CLIPTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[])
