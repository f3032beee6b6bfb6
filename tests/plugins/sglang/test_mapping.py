"""What SGLang is asked, and how its answers are read; no package is needed."""

from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.errors import RolloutError
from lightrft_visual.experience.rollouts import PromptFeatures, SamplingSettings
from lightrft_visual.experience.vision import VisionTensors
from lightrft_visual.plugins.sglang.mapping import (
    NEVER,
    buckets,
    completion,
    request,
    sampling_parameters,
    sglang_name,
)

EOS = [9]
WORDS = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))


def prompt(**fields) -> PromptFeatures:
    return PromptFeatures(**({"text": "?", "token_ids": [1, 2, 3], "group_id": 4, "seed": 11} | fields))


def answer(tokens=(5, 9), log_probs=(-0.5, -1.5), kind="stop", prompt_tokens=3, reason=None) -> dict:
    meta = {"prompt_tokens": prompt_tokens, "finish_reason": {"type": kind} | (reason or {})}
    meta["output_token_logprobs"] = [(value, token, None) for value, token in zip(log_probs, tokens)]
    return {"output_ids": list(tokens), "meta_info": meta}


def test_sampling_settings_by_sglangs_names():
    settings = SamplingSettings(temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=8, min_new_tokens=3)
    assert sampling_parameters(settings, 5, [7, 8], EOS) == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_new_tokens": 8, "min_new_tokens": 3, "stop_token_ids": [9],
        "skip_special_tokens": True, "logit_bias": {"7": NEVER, "8": NEVER}, "sampling_seed": 5,
    }  # fmt: skip
    plain = sampling_parameters(SamplingSettings(temperature=0.0), 5, [], EOS)
    assert "sampling_seed" not in plain and "logit_bias" not in plain and plain["min_new_tokens"] == 0


def test_each_response_is_a_request_with_a_seed_of_its_own():
    asked = request(prompt(), SamplingSettings(n=3), [], EOS)
    seeds = [each["sampling_seed"] for each in asked["sampling_params"]]
    assert asked["input_ids"] == [[1, 2, 3]] * 3 and len(set(seeds)) == 3
    assert all("n" not in each for each in asked["sampling_params"])
    # the same seed where a response goes on, or is drawn alone
    later = request(prompt(copy=2, continued=[5, 6]), SamplingSettings(n=1), [], EOS)
    assert later["input_ids"] == [[1, 2, 3, 5, 6]] and later["sampling_params"][0]["sampling_seed"] == seeds[2]


def test_images_go_in_as_the_trainers_own_patches():
    pixels, grid = torch.ones(4, 6), torch.tensor([[1, 2, 2]])
    vision = VisionTensors.of(pixel_values=pixels, image_grid_thw=grid)
    asked = request(prompt(images=["an image"], vision=vision), SamplingSettings(n=2), [], EOS)
    ((first,), (second,)) = asked["image_data"]
    assert first["format"] == second["format"] == "processor_output"
    assert first["pixel_values"] is pixels and second["image_grid_thw"] is grid
    assert "image_data" not in request(prompt(), SamplingSettings(), [], EOS)
    with pytest.raises(RolloutError, match="prompt 4 has videos"):
        request(prompt(videos=["a video"]), SamplingSettings(), [], EOS)


def test_a_response_with_log_probs_of_its_tokens():
    settings = SamplingSettings(max_new_tokens=2)
    made = completion(answer(), prompt(), settings, EOS, WORDS)
    assert (made.token_ids, made.log_probs, made.truncated) == ([5, 9], [-0.5, -1.5], False)
    assert made.text == "5" and made.prompt_token_ids == [1, 2, 3]
    assert all(type(value) is float for value in made.log_probs) and all(type(token) is int for token in made.token_ids)
    cut = completion(answer((5, 6), kind="length"), prompt(), settings, EOS, WORDS)
    assert cut.truncated and cut.text == "5 6"
    whole = SamplingSettings(max_new_tokens=2, skip_special_tokens=False)
    assert completion(answer(), prompt(), whole, EOS, WORDS).text == "5 9"
    narrowed = SamplingSettings(max_new_tokens=2, top_p=0.9)
    assert completion(answer(), prompt(), narrowed, EOS, WORDS).log_probs is None


@pytest.mark.parametrize(
    "output, message",
    [
        (answer(kind="abort", reason={"message": "out of memory"}), "gave up a response: abort, out of memory"),
        (answer((5,), (-1.0,), kind="length"), "cut a response after 1 of 2 tokens"),
        (answer((5, 6)), "stopped at token 6, which is no end token"),
        (answer(prompt_tokens=7), "prompt 4: SGLang saw 7 tokens, given were 3"),
        (answer((5, 9), (-1.0,)), "not those of the sampled tokens"),
        (answer((5, 9), (-1.0, float("nan"))), "not finite"),
    ],
)
def test_answers_that_do_not_fit_are_refused(output, message):
    with pytest.raises(RolloutError, match=message):
        completion(output, prompt(), SamplingSettings(max_new_tokens=2), EOS, WORDS)


def test_weights_have_the_names_that_sglangs_loaders_read():
    assert sglang_name("model.language_model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert sglang_name("model.visual.blocks.0.attn.qkv.weight") == "visual.blocks.0.attn.qkv.weight"
    for name in ("model.layers.0.mlp.up_proj.weight", "lm_head.weight"):
        assert sglang_name(name) == name


def test_a_bucket_has_one_dtype_and_at_most_so_many_bytes():
    tensors = [("a", torch.zeros(4)), ("b", torch.zeros(4)), ("c", torch.zeros(1)), ("d", torch.zeros(3).bfloat16())]
    tensors.append(("e", torch.zeros(100).bfloat16()))
    found = [[name for name, _ in bucket] for bucket in buckets(tensors, most=32)]
    assert found == [["a", "b"], ["c"], ["d"], ["e"]]
    assert list(buckets([])) == []
