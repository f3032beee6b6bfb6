"""Face similarity with a gradient: known cosines, faces that are not there, models by path."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from lightrft_visual.errors import ConfigError
from lightrft_visual.plugins.face.reward import DifferentiableFaceSimilarity, load_face_model
from lightrft_visual.plugins.face.scorer import warp
from lightrft_visual.rewards.differentiable import check_scores, load_differentiable

MODEL_FILE = """
import torch

class MeanColor(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(3, 3, bias=False)

    def forward(self, pixels):
        return self.mix(pixels.mean(dim=(2, 3)))

def build():
    return MeanColor()

def number():
    return 3

def find(rgb):
    import numpy
    return None if rgb.max() < 10 else numpy.array([[0.5, 0.0, 0.0], [0.0, 0.5, 0.0]])
"""


class MeanColor(nn.Module):
    def forward(self, pixels):
        return pixels.mean(dim=(2, 3))


def flat(*colour: float, size: int = 8) -> torch.Tensor:
    return torch.tensor(colour, dtype=torch.float32).view(3, 1, 1).expand(3, size, size).clone()


RED = Image.new("RGB", (20, 20), (255, 0, 0))


def bright(rgb: np.ndarray) -> np.ndarray | None:
    """A face finder: dark frames have no face; elsewhere the whole frame is one."""
    return None if rgb.max() < 10 else np.array([[1.0, 0, 0], [0, 1.0, 0]])


def test_known_cosines_with_a_gradient() -> None:
    media = torch.stack([flat(1, 0, 0), flat(1, 0, 1)]).requires_grad_(True)
    scores, valid = DifferentiableFaceSimilarity(MeanColor(), size=4)(media, ["", ""], [{"input_image": RED}] * 2)
    assert valid.tolist() == [True, True]
    assert scores.tolist() == pytest.approx([1.0, 1 / 3], abs=1e-5)  # (1, -1, -1) with itself and with (1, -1, 1)
    scores[1].backward()
    assert media.grad[1].abs().sum() > 0 and not media.grad[0].any()


def test_the_gradient_is_the_derivative() -> None:
    reward = DifferentiableFaceSimilarity(MeanColor(), bright, size=4)
    media = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.2
    media.requires_grad_(True)
    reward(media, [""], [{"input_image": RED}])[0].sum().backward()
    values = []
    for shift in (1e-2, -1e-2):
        moved = media.detach().clone()
        moved[0, 1, 2, 2] += shift
        values.append(reward(moved, [""], [{"input_image": RED}])[0].item())
    assert media.grad[0, 1, 2, 2].item() == pytest.approx((values[0] - values[1]) / 2e-2, rel=0.02)


def test_samples_without_face_or_reference_are_marked() -> None:
    reward = DifferentiableFaceSimilarity(MeanColor(), bright, size=4)
    media = torch.stack([flat(1, 0, 0), flat(0, 0, 0), flat(1, 0, 0), flat(1, 0, 0)]).requires_grad_(True)
    black = Image.new("RGB", (8, 8))
    rows = [{"input_image": RED}, {"input_image": RED}, {}, {"reference_image": black}]
    scores, valid = reward(media, [""] * 4, rows)
    assert valid.tolist() == [True, False, False, False]
    check_scores((scores, valid), media, "face_similarity")
    scores, valid = reward(torch.zeros(2, 3, 8, 8, requires_grad=True), ["", ""], rows[:2])
    assert not valid.any() and scores.requires_grad and scores.tolist() == [0.0, 0.0]  # no face at all: still a graph


def test_prompts_without_a_reference_are_not_known() -> None:
    reward = DifferentiableFaceSimilarity(MeanColor())
    rows = [{}, {"reference_image": ""}, {"face_image": None}, {"reference_image": "", "input_image": RED}]
    assert [reward.knows("", row) for row in rows] == [False, False, False, True]


def test_a_video_averages_its_frames_with_a_face() -> None:
    frames = torch.stack([flat(1, 0, 0), flat(0, 0, 0), flat(1, 0, 1)], dim=1)[None]
    scores, valid = DifferentiableFaceSimilarity(MeanColor(), bright, size=4)(frames, [""], [{"input_image": RED}])
    assert valid.tolist() == [True] and scores.tolist() == pytest.approx([(1 + 1 / 3) / 2], abs=1e-5)


def test_the_warp_is_that_of_opencv() -> None:
    cv2 = pytest.importorskip("cv2")
    frame = np.random.default_rng(0).integers(0, 255, (40, 30, 3), dtype=np.uint8)
    matrix = np.array([[0.6, 0.2, 1.3], [-0.2, 0.6, 7.1]])
    theirs = cv2.warpAffine(frame.astype(np.float32), matrix, (16, 16))
    ours = warp(torch.from_numpy(frame).permute(2, 0, 1).float(), matrix, 16).permute(1, 2, 0).numpy()
    np.testing.assert_allclose(ours, theirs, atol=8)  # OpenCV rounds places to 1/32 of a pixel


def test_a_model_and_a_detector_by_path(tmp_path) -> None:
    (tmp_path / "face.py").write_text(MODEL_FILE)
    save_file({"mix.weight": torch.eye(3)}, tmp_path / "face.safetensors")
    RED.save(tmp_path / "red.png")
    reward = load_differentiable(
        "face_similarity",
        {"embedder": f"{tmp_path}/face.py:build", "weights": f"{tmp_path}/face.safetensors",
         "detector": f"{tmp_path}/face.py:find", "size": 4},
    )  # fmt: skip
    media = torch.stack([flat(1, 0, 1), flat(0, 0, 0)]).requires_grad_(True)
    scores, valid = reward(media, ["", ""], [{"input_image": str(tmp_path / "red.png")}] * 2)
    assert valid.tolist() == [True, False] and scores[0].item() == pytest.approx(1 / 3, abs=1e-5)
    assert not any(parameter.requires_grad for parameter in reward.model.parameters())


@pytest.mark.parametrize("form", ["exported", "torchscript"])
def test_a_saved_program_is_frozen_and_carries_the_gradient_of_the_pixels(tmp_path, form) -> None:
    model = nn.Sequential(MeanColor(), nn.Linear(3, 3, bias=False))
    nn.init.eye_(model[1].weight)
    path = tmp_path / "face.pt2"
    if form == "exported":
        batch = torch.export.Dim("batch", min=1, max=64)
        program = torch.export.export(model, (torch.zeros(2, 3, 4, 4),), dynamic_shapes=({0: batch},))
        torch.export.save(program, path)
    else:
        torch.jit.trace(model, torch.zeros(2, 3, 4, 4)).save(str(tmp_path / "face.pt"))
        path = tmp_path  # a folder stands for the only model in it
    media = flat(1, 0, 1)[None].requires_grad_(True)
    reward = load_differentiable("face_similarity", {"embedder": str(path), "size": 4})
    scores, _ = reward(media, [""], [{"input_image": RED}])
    scores.sum().backward()
    assert scores.item() == pytest.approx(1 / 3, abs=1e-5) and media.grad.abs().sum() > 0
    assert not any(each.requires_grad for each in reward.model.parameters())


class Centred(MeanColor):
    """With a constant, and a tensor that it makes: both are of the device that it is exported on."""

    def forward(self, pixels):
        return super().forward(pixels) - torch.tensor([0.1, 0.2, 0.3]) + torch.arange(3, device=pixels.device)


def test_a_saved_program_moves_to_the_device_of_the_pixels_with_what_it_names(tmp_path) -> None:
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(Centred(), (torch.zeros(2, 3, 4, 4),), dynamic_shapes=(batch,))
    torch.export.save(program, tmp_path / "face.pt2")
    model = load_face_model(str(tmp_path / "face.pt2"))
    here = model.to(torch.device("cpu"))(torch.zeros(3, 3, 4, 4))
    assert here[0].tolist() == pytest.approx([-0.1, 0.8, 1.7])
    away = model.to(torch.device("meta"))(torch.zeros(3, 3, 4, 4, device="meta"))  # which refuses others' tensors
    assert away.device.type == "meta" and away.shape == here.shape


@pytest.mark.parametrize(
    "settings,message",
    (
        ({}, "needs differentiable_kwargs.embedder"),
        ({"embeder": "x"}, "no setting 'embeder'.*embedder"),
        ({"embedder": "/nowhere/face.onnx"}, "no gradient here"),
        ({"embedder": "/nowhere/face.pt2"}, "does not exist"),
        ({"embedder": "/nowhere/face.pt", "weights": "w.pt"}, "path.py:build"),
        ({"embedder": "HERE/face.py:number"}, "not a torch module"),
        ({"embedder": "HERE/face.py:build", "weights": "HERE/wrong.safetensors"}, "does not fit"),
        ({"embedder": "HERE/face.py:build", "detector": "/nowhere/yunet.onnx"}, "does not exist"),
    ),
)
def test_what_cannot_work_is_said_before_training(settings, message, tmp_path) -> None:
    (tmp_path / "face.py").write_text(MODEL_FILE)
    save_file({"other": torch.eye(3)}, tmp_path / "wrong.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_differentiable("face_similarity", {k: v.replace("HERE", str(tmp_path)) for k, v in settings.items()})


def test_a_folder_of_onnx_files_says_which_model_has_a_gradient(tmp_path) -> None:
    """antelopev2, as ROLL's reward_model_path names it."""
    for name in ("glintr100.onnx", "scrfd_10g_bnkps.onnx"):
        (tmp_path / name).write_bytes(b"onnx")
    with pytest.raises(ConfigError, match=r"glintr100.onnx.*no gradient here.*iResNet100\) as torch.*\.pt2"):
        load_differentiable("face_similarity", {"embedder": str(tmp_path)})
    exported = torch.export.export(torch.nn.AvgPool2d(4), (torch.zeros(2, 3, 16, 16),))
    torch.export.save(exported, tmp_path / "glintr100.pt2")
    assert load_differentiable("face_similarity", {"embedder": str(tmp_path), "size": 16})._faces.size == 16
