"""Prompts whose keys and values are held once give their responses what they give each of them in a row of its own."""

import pytest
import torch
from tiny_models import checkpoint_of
from torch.nn.functional import scaled_dot_product_attention as attention
from transformers import Cache

from lightrft_visual.models.decoding import Followed, PromptLayer, cache_of


@pytest.mark.parametrize("dtype, apart", [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("prompts", [[0, 0, 1, 1, 2, 2], [2, 0, 1, 0, 0], [1]], ids=["even", "uneven", "one"])
def test_responses_read_what_they_read_of_rows_of_their_own(prompts, dtype, apart):
    torch.manual_seed(0)
    cache, mask = Cache(layers=[PromptLayer()]), torch.ones(3, 5, dtype=torch.long)
    mask[1, :2] = mask[2, :4] = 0
    shown = [torch.randn(3, 2, 5, 7).to(dtype) for _ in range(2)]
    cache.update(*shown, 0)
    followed, responses, read = Followed.of(cache, mask, prompts, most=3), torch.tensor(prompts), []
    own = [torch.randn(len(responses), 2, 3, 7).to(dtype) for _ in range(2)]
    query = torch.randn(len(responses), 6, 3, 7).to(dtype)
    for step in range(3):
        keys = cache.update(*(each[:, :, step : step + 1] for each in own), 0)
        read.append(followed.attend(0, query[:, :, step : step + 1], *keys, 0.3))
    key, value = (
        torch.cat([one[responses], other], dim=2).repeat_interleave(3, dim=1) for one, other in zip(shown, own)
    )
    seen = torch.cat(
        [
            mask[responses].bool()[:, None].expand(-1, 3, -1),
            torch.ones(3, 3).tril().bool().expand(len(responses), 3, 3),
        ],
        2,
    )
    wanted = attention(query.float(), key.float(), value.float(), seen[:, None], scale=0.3)
    made = torch.cat(read, dim=1).transpose(1, 2)
    assert made.dtype is dtype and (made - wanted).abs().max() <= apart
    assert cache.get_seq_length() == 8


def test_layers_with_windows_keep_transformers_own_cache(root):
    config = checkpoint_of(root, "qwen2").config
    assert isinstance(cache_of(config, once=True).layers[0], PromptLayer)
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "layer_types": None}
    other = type(config)(**config.to_dict() | windows)
    assert not any(isinstance(layer, PromptLayer) for layer in cache_of(other, once=True).layers)
    assert not any(isinstance(layer, PromptLayer) for layer in cache_of(config, once=False).layers)
