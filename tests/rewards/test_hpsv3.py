"""HPSv3 on a tiny Qwen2-VL: the score is that of the published forward, written anew from its facts."""

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_judges import hidden_states

from lightrft_visual.errors import ConfigError
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint
from lightrft_visual.rewards.functions.hpsv3 import QUESTION, TOKEN, HPSv3, rating_head

PICTURES = [Image.effect_noise((90, 60), 90).convert("RGB"), Image.new("RGB", (40, 80), "green")]
PROMPTS = ["a cat", "two red circles on a table"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(folder of the shape, weights under the names of the published file)."""
    folder = tmp_path_factory.mktemp("hpsv3")
    from transformers import AutoModelForImageTextToText, AutoProcessor

    build_tiny_checkpoint(str(folder), "qwen2_vl")
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    torch.manual_seed(0)
    model.resize_token_embeddings(len(processor.tokenizer) + 1)
    state = {}
    for name, tensor in model.state_dict().items():
        old = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        state[old] = tensor.clone().contiguous()
    state |= {
        f"rm_head.{name}": tensor
        for name, tensor in rating_head(model.config.text_config.hidden_size).state_dict().items()
    }
    save_file(state, folder / "weights.safetensors")
    return str(folder), str(folder / "weights.safetensors"), model, state


def published(scorer, model, state, image, prompt):
    """The head at every token, one taken."""
    batch = scorer.inputs([image], [prompt])
    hidden = hidden_states(model, batch, model.config.image_token_id)
    first, second, last = ((state[f"rm_head.{number}.weight"], state[f"rm_head.{number}.bias"]) for number in (0, 3, 5))
    rating = hidden
    for weight, bias in (first, second):
        rating = torch.relu(rating @ weight.T + bias)
    rating = rating @ last[0].T + last[1]
    return rating[batch["input_ids"] == scorer._processor.tokenizer.convert_tokens_to_ids(TOKEN)][0, 0]


@torch.no_grad()
def test_scores_are_those_of_the_published_forward(files):
    folder, weights, model, state = files
    scorer = HPSv3(weights, folder, bf16=False, batch_size=2)
    found = scorer([[PICTURES[0]], [PICTURES[1], PICTURES[0]], []], [*PROMPTS, "nothing"], "cpu")
    single = [published(scorer, model, state, *pair).item() for pair in zip(PICTURES, PROMPTS)]
    again = published(scorer, model, state, PICTURES[0], PROMPTS[1]).item()
    assert found[:2] == pytest.approx([single[0], (single[1] + again) / 2], abs=1e-5) and found[2] is None
    assert abs(single[0] - single[1]) > 1e-4


def test_every_image_has_as_many_tokens_and_the_token_stands_once(files):
    scorer = HPSv3(files[1], files[0], bf16=False)
    batch = scorer.inputs(PICTURES, PROMPTS)
    counts = (batch["input_ids"] == files[2].config.image_token_id).sum(dim=1)
    assert all(224 <= int(count) <= 288 for count in counts)  # 256 but for whole patches, as they are rounded up
    text = scorer._processor.tokenizer.decode(batch["input_ids"][0])
    assert text.count(TOKEN) == 1 and "Textual prompt - a cat" in text
    assert QUESTION.endswith("this image: <|Reward|>\n\nEND\n")
    with pytest.raises(ConfigError, match="question's own"):
        scorer([[PICTURES[0]]], [f"a {TOKEN}"], "cpu")


def test_marks_of_images_and_videos_that_a_prompt_spells_are_left_out(files):
    scorer = HPSv3(files[1], files[0], bf16=False)
    plain, *spelt = scorer([[PICTURES[0]]] * 3, ["a cat", "a <|image_pad|>cat", "a cat<|video_pad|>"], "cpu")
    assert spelt == pytest.approx([plain] * 2, abs=1e-5)


def test_weights_that_do_not_fit_are_an_error(files, tmp_path):
    folder, _, _, state = files
    for name, changed in (
        ("less", {key: tensor for key, tensor in state.items() if "layers.0.mlp" not in key}),
        ("head", {key: tensor for key, tensor in state.items() if not key.startswith("rm_head.5")}),
        ("more", state | {"model.layers.0.other.weight": torch.zeros(2)}),
    ):
        save_file({key: tensor.clone() for key, tensor in changed.items()}, tmp_path / f"{name}.safetensors")
        with pytest.raises(ConfigError, match="do not fit"):
            HPSv3(str(tmp_path / f"{name}.safetensors"), folder)
