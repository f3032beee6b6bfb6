"""Tiny reward models: a sequence classifier over letters, a Qwen2-VL with a head, and the plain forward of one."""

from pathlib import Path

import torch


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789 :."]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def build_classifier(folder: Path) -> str:
    """The folder, with the model in it."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"num_key_value_heads": 2, "max_position_embeddings": 40}
    config = Qwen2Config(vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, **size)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


def save_with_head(folder: Path) -> None:
    """The Qwen2.5-VL in the folder becomes a reward model."""
    from safetensors.torch import save_file
    from transformers import AutoModelForImageTextToText

    from lightrft_visual.models.loading import HEAD_FILE, VLRewardModel

    torch.manual_seed(0)
    judge = VLRewardModel(AutoModelForImageTextToText.from_pretrained(folder))
    state = {name: value.detach().contiguous() for name, value in judge.score_head.state_dict().items()}
    save_file(state, folder / HEAD_FILE)


def hidden_states(model, batch, token_id: int) -> torch.Tensor:
    """Of a Qwen2-VL's last layer, as published forwards have them: features of an image or video stand where its token
    is, and positions count tokens."""
    ids, kind = batch["input_ids"], "video" if "video_grid_thw" in batch else "image"
    seen = batch["pixel_values_videos" if kind == "video" else "pixel_values"]
    features = model.model.visual(seen, grid_thw=batch[f"{kind}_grid_thw"])
    features = getattr(features, "pooler_output", features)
    features = torch.cat(features) if isinstance(features, (tuple, list)) else features
    embedded = model.model.language_model.embed_tokens(ids)
    embedded = embedded.masked_scatter((ids == token_id).unsqueeze(-1), features)
    positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
    return model.model.language_model(inputs_embeds=embedded, position_ids=positions, use_cache=False)[0]
