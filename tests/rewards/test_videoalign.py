"""VideoAlign on a tiny Qwen2-VL: ratings are those of the published forward, written anew from its facts."""

import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from tiny_judges import hidden_states
from torchvision.transforms.functional import InterpolationMode, resize
from transformers import AutoModelForImageTextToText, AutoProcessor

from lightrft_visual.data.media import Video
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint
from lightrft_visual.rewards import RewardComputationEngine, recipe_from_components
from lightrft_visual.rewards.functions import videoalign
from lightrft_visual.rewards.functions.videoalign import QUESTION, RATED, TOKENS, VideoAlign, frame_indices

MEANS = {"VQ_mean": 0.3, "VQ_std": 2.0, "MQ_mean": -0.1, "MQ_std": 0.5, "TA_mean": 0.2, "TA_std": 1.5}
PROMPTS = ["a cat jumps", "two red circles roll over a table"]
CLIPS = [np.random.default_rng(seed).integers(0, 255, (count, 64, 96, 3), np.uint8) for seed, count in ((0, 5), (1, 9))]


@pytest.fixture(scope="module", params=[1, 3], ids=["one output", "three outputs"])
def files(request, tmp_path_factory):
    """(folder of the shape, folder of the weights in their published form, network with unmerged adapters, head)."""
    shape, folder = tmp_path_factory.mktemp("shape"), tmp_path_factory.mktemp("videoreward")
    build_tiny_checkpoint(str(shape), "qwen2_vl")
    model, processor = AutoModelForImageTextToText.from_pretrained(shape), AutoProcessor.from_pretrained(shape)
    torch.manual_seed(0)
    model.resize_token_embeddings(len(processor.tokenizer) + len(TOKENS))
    adapted = get_peft_model(
        model,
        LoraConfig(r=4, lora_alpha=8, target_modules=r".*language_model.*(q_proj|up_proj)", init_lora_weights=False),
    )
    head = torch.nn.Linear(model.config.text_config.hidden_size, request.param, bias=False)
    state = {"base_model.model.rm_head.weight": head.weight.detach()}
    for name, tensor in adapted.state_dict().items():
        old = name.replace("model.model.language_model.", "model.model.").replace(
            "model.model.visual.", "model.visual."
        )
        state[old] = tensor.clone()
    for step, weights in ((90, {}), (100, state)):  # the last one counts
        (folder / f"checkpoint-{step}").mkdir()
        torch.save(weights, folder / f"checkpoint-{step}" / "model.pth")
    settings = {
        "data_config": {"fps": 2, "num_frames": None, "max_frame_pixels": 200704},
        "model_config": {"output_dim": request.param},
        "peft_lora_config": {"lora_alpha": 8, "lora_r": 4, "use_rslora": False},
        "inference_config": MEANS,
    }
    (folder / "model_config.json").write_text(json.dumps(settings))
    return str(shape), str(folder), adapted.eval(), head


@torch.no_grad()
def published(files, clip, prompt, frames):
    """The head at every token, three taken."""
    model, processor = files[2].base_model.model, AutoProcessor.from_pretrained(files[0])
    processor.tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    shown = torch.from_numpy(clip[frames]).permute(0, 3, 1, 2)
    shown = resize(shown, [280, 392], InterpolationMode.BICUBIC, antialias=True)  # 64 x 96 at 100352 pixels and more
    text = (
        "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>"
        f"{QUESTION.replace('{prompt}', prompt)}<|im_end|>\n<|im_start|>assistant\n"
    )
    start = processor.apply_chat_template([{"role": "user", "content": "!"}], tokenize=False).partition(
        "<|im_start|>user"
    )
    fixed = {"do_resize": False, "do_sample_frames": False}
    batch = processor(text=[start[0] + text], videos=[shown], return_tensors="pt", videos_kwargs=fixed)
    ids, hidden = batch["input_ids"], hidden_states(model, batch, model.config.video_token_id)
    logits = (hidden @ files[3].weight.T)[0]
    ratings = []
    for index, (name, token) in enumerate(zip(RATED, processor.tokenizer.convert_tokens_to_ids(list(TOKENS)))):
        outputs = logits[ids[0] == token]
        assert len(outputs) == 1
        raw = outputs[0, index if len(files[3].weight) == 3 else 0].item()
        ratings.append((raw - MEANS[f"{name}_mean"]) / MEANS[f"{name}_std"])
    return ratings


@pytest.mark.slow
def test_ratings_are_those_of_the_published_forward_with_adapters(files):
    shape, weights, _, _ = files
    settings = {"weights": weights, "model": shape, "bf16": False, "video_fps": 4.0}
    engine = RewardComputationEngine(
        reward_recipe=recipe_from_components({"videoalign": 1.0}, {"videoalign": settings})
    )
    result = engine.score_media(PROMPTS, videos=[Video(clip, {}) for clip in CLIPS])
    expected = [published(files, *pair) for pair in zip(CLIPS, PROMPTS, ([0, 1, 3, 4], [0, 3, 5, 8]))]
    assert result.score.tolist() == pytest.approx([sum(ratings) for ratings in expected], abs=1e-5)
    for index, name in enumerate(RATED):
        found = next(values for key, values in result.components.items() if key.endswith(name.lower()))
        assert found.tolist() == pytest.approx([ratings[index] for ratings in expected], abs=1e-5)
    assert abs(expected[0][0] - expected[1][0]) > 1e-4


def test_frames_looked_at_are_two_a_second_and_at_least_four():
    assert frame_indices(81, 16.0, 2.0) == [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]
    assert frame_indices(9, 16.0, 2.0) == [0, 3, 5, 8]
    assert frame_indices(3, 16.0, 2.0) == [0, 2]
    assert frame_indices(9, 16.0, 2.0, count=6) == [0, 2, 3, 5, 6, 8]
    assert len(frame_indices(20_000, 16.0, 2.0)) == 768


def test_of_a_drawn_clip_only_the_frames_that_are_looked_at_are_turned_into_images(monkeypatch):
    turned, own, scorer = [], videoalign.video_frames, VideoAlign.__new__(VideoAlign)
    monkeypatch.setattr(videoalign, "video_frames", lambda frames: turned.append(len(frames)) or own(frames))
    scorer.video_fps, scorer._data = 16.0, {"max_frame_pixels": 128 * 28 * 28}
    drawn = torch.rand(3, 81, 32, 48, generator=torch.Generator().manual_seed(0))
    shown = scorer.clip(drawn)
    assert turned == [len(shown)] == [10]
    assert torch.equal(shown, scorer.clip(Video((drawn.permute(1, 2, 3, 0) * 255).round().byte().numpy(), {})))


def test_frames_that_are_none_are_no_frames():
    scorer = VideoAlign.__new__(VideoAlign)
    scorer.video_fps, scorer._data = 16.0, {"max_frame_pixels": 128 * 28 * 28}
    first, second = (Image.new("RGB", (28, 28), (shade, 0, 0)) for shade in (0, 200))
    assert torch.equal(scorer.clip([first, None, second]), scorer.clip([first, second]))
    with pytest.raises(ConfigError, match="two frames"):
        scorer.clip([None, first])


def test_a_clip_that_cannot_be_rated_is_an_error(files):
    scorer = VideoAlign(files[1], files[0], bf16=False)
    with pytest.raises(ConfigError, match="two frames"):
        scorer.inputs([CLIPS[0][:1]], ["a cat"])
    with pytest.raises(ConfigError, match="no model_config"):
        VideoAlign(files[0], files[0])
