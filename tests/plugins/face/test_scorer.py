"""The scorer of faces, by TorchScript and by ONNX."""

import base64

import numpy as np
import pytest
import torch
from PIL import Image

from lightrft_visual.errors import ConfigError, RewardError
from lightrft_visual.plugins.face import scorer
from lightrft_visual.plugins.face.scorer import FaceSimilarity
from lightrft_visual.rewards import RewardComputationEngine, build_scorer, recipe_from_components


def score(name, settings, prompts, images=None, **columns):
    recipe = recipe_from_components({name: 1.0}, {name: settings})
    engine = RewardComputationEngine(reward_recipe=recipe)
    engine.config.reward_max_invalid = 1.0
    return engine.score_media(prompts, images, None, **columns)


class MeanColor(torch.nn.Module):
    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.mean(dim=(2, 3)) + 1.1


@pytest.fixture
def embedder(tmp_path) -> str:
    torch.jit.trace(MeanColor(), torch.zeros(1, 3, 16, 16)).save(str(tmp_path / "face.pt"))
    return str(tmp_path / "face.pt")


def test_face_similarity_by_torchscript(tmp_path, embedder):
    red, blue = Image.new("RGB", (20, 20), "red"), Image.new("RGB", (20, 20), "blue")
    red.save(tmp_path / "red.png")
    metadata = [{"reference_image": str(tmp_path / "red.png")}, {"face_image": red}, {}]
    settings = {"embedder": embedder, "size": 16}
    result = score("face_similarity", settings, [""] * 3, [red, blue, red], metadata=metadata)
    vector = torch.tensor([2.1, 0.1, 0.1])
    wanted = float(vector @ vector.flip(0) / (vector @ vector))
    assert result.score[:2].tolist() == pytest.approx([1.0, wanted], abs=1e-4)
    assert result.valid.tolist() == [True, True, False]
    assert result.metrics["reward/face_similarity/not_applicable"] == 1


def test_the_model_is_put_to_work_once_for_all_samples(embedder, monkeypatch):
    """On an accelerator each time is a copy of its weights."""
    visits, plain = [], scorer.on_device

    def counted(*given):
        visits.append(given)
        return plain(*given)

    monkeypatch.setattr(scorer, "on_device", counted)
    red = Image.new("RGB", (20, 20), "red")
    score(
        "face_similarity", {"embedder": embedder, "size": 16}, [""] * 3, [red] * 3, metadata=[{"face_image": red}] * 3
    )
    assert len(visits) == 1


def test_face_similarity_to_the_first_frame_that_is_no_path(embedder):
    """As rows of the hub have it: decoded, so that no column names it."""
    red, blue = Image.new("RGB", (20, 20), "red"), Image.new("RGB", (20, 20), "blue")
    columns = {"metadata": [{}, {"face_image": blue}, {}], "source_images": [[red], [red], []]}
    result = score("face_similarity", {"embedder": embedder, "size": 16}, [""] * 3, [red, blue, red], **columns)
    assert result.score[:2].tolist() == pytest.approx([1.0, 1.0], abs=1e-4)
    assert result.valid.tolist() == [True, True, False]


def test_a_reference_is_read_in_the_forms_of_the_data(tmp_path, embedder):
    red, blue = Image.new("RGB", (20, 20), "red"), Image.new("RGB", (20, 20), "blue")
    blue.save(tmp_path / "blue.png")
    content = (tmp_path / "blue.png").read_bytes()
    cells = [{"bytes": content, "path": "blue.png"}, base64.b64encode(content).decode(), ""]
    metadata = [{"reference_image": cell} for cell in cells]
    settings = {"embedder": embedder, "size": 16}
    result = score("face_similarity", settings, [""] * 3, [blue] * 3, metadata=metadata, source_images=[[], [], [red]])
    assert result.score[:2].tolist() == pytest.approx([1.0, 1.0], abs=1e-4) and result.score[2] < 0.2
    with pytest.raises(RewardError, match="the reference image: file not found: .*gone.png"):
        score("face_similarity", settings, [""], [blue], metadata=[{"face_image": str(tmp_path / "gone.png")}])


# GlobalAveragePool and Flatten of a (1, 3, 16, 16) picture, as an ONNX file.
MEAN_COLOR_ONNX = (
    "CAg6YQoZCgF4EgFwIhFHbG9iYWxBdmVyYWdlUG9vbAoPCgFwEgF5IgdGbGF0dGVuEgFnWhsKAXgSFgoUCAESEAoCCAEKAggDCgIIEAoCCBBiEwoB"
    "eRIOCgwIARIICgIIAQoCCANCBAoAEA0="
)


def test_face_similarity_by_onnx(tmp_path):
    path = tmp_path / "face.onnx"
    path.write_bytes(base64.b64decode(MEAN_COLOR_ONNX))
    red, pink = Image.new("RGB", (20, 20), (255, 0, 0)), Image.new("RGB", (20, 20), (255, 0, 255))
    settings = {"embedder": str(path), "size": 16}
    result = score("face_similarity", settings, ["", "", ""], [red, pink, red], references=[red, red, None])
    # Pixels become 1 and -1: (1, -1, -1) and (1, -1, 1), whose cosine is 1/3.
    assert result.score[:2].tolist() == pytest.approx([1.0, 1 / 3], abs=1e-5)
    assert result.valid.tolist() == [True, True, False]


def test_no_face_found_is_masked_and_counted(embedder):
    scorer = FaceSimilarity(embedder, size=16)
    scorer._faces.finder = lambda rgb: np.eye(2, 3) if rgb.max() else None
    white, black = Image.new("RGB", (8, 8), "white"), Image.new("RGB", (8, 8), "black")
    engine = RewardComputationEngine(custom_reward_func=scorer)
    result = engine.score_media(["", ""], [white, black], references=[white] * 2)
    assert result.valid.tolist() == [True, False] and result.score[0] == pytest.approx(1)


def test_a_missing_embedder_is_an_error():
    with pytest.raises(ConfigError, match="face_similarity: the file"):
        build_scorer("face_similarity", {"embedder": "/nowhere/face.onnx"})
