"""Face similarity with a gradient in the pixels: is it the same face as in the first frame or a reference image?

After ROLL's Reward FL, which keeps a person's face in image-to-video by the cosine of face embeddings. The detector
only says where the face is and carries no gradient; cutting out, aligning and embedding it do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export.passes import move_to_device_pass

from ...errors import ConfigError
from ...rewards.functions.image_scoring import load_tensors
from ...runtime.usercode.loading import load_reward_fn
from .scorer import REFERENCE_COLUMNS, FaceDetector, FaceFinder, Faces, existing, image_in

T = torch.Tensor
NAME = "differentiable_reward face_similarity"


def face_similarity(
    embedder: str, weights: str | None = None, detector: str | None = None, size: int = 112, scale: float = 127.5
) -> DifferentiableFaceSimilarity:
    """The reward of a face model; its arguments are those of `differentiable_kwargs`.

    Args:
        embedder: a torch face model that maps (n, 3, size, size), `(pixel - 127.5) / scale`, to (n, D):
            `path.py:build`, a function without arguments that returns the module; a torch.export program (.pt2);
            TorchScript (.pt, .ts); or a folder with one such file.
        weights: of a module from `path.py:build` (.safetensors, .pt); None: as it was built.
        detector: a YuNet ONNX file, or `path.py:function` that maps (H, W, 3) uint8 RGB to a (2, 3) alignment matrix or
            None; without one each frame is taken as an aligned face.
        size: pixels of an aligned face's side.
        scale: of the embedder's pixels, see there.

    Raises:
        ConfigError: for a missing file, and for an ONNX embedder, which OpenCV runs without a gradient.
    """
    finder: FaceFinder | None = None
    if detector is not None:
        finder = load_reward_fn(detector) if ".py:" in detector else FaceDetector(existing(detector), size).matrix
    return DifferentiableFaceSimilarity(load_face_model(embedder, weights), finder, size, scale)


def load_face_model(embedder: str, weights: str | None = None) -> nn.Module:
    """The frozen model in evaluation mode; see `face_similarity`."""
    embedder = _in_folder(embedder)
    if weights is not None and ".py:" not in embedder:
        raise ConfigError(f"{NAME}: weights belong to an embedder given as path.py:build")
    if ".py:" in embedder:
        model = load_reward_fn(embedder)()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{NAME}: {embedder} returned a {type(model).__name__}, not a torch module")
        if weights is not None:
            try:
                model.load_state_dict(load_tensors(weights, "face_similarity"))
            except RuntimeError as error:
                raise ConfigError(f"{NAME}: {weights} does not fit {embedder}: {error}") from error
    elif embedder.endswith(".onnx"):
        raise ConfigError(
            f"{NAME}: {embedder} is an ONNX file, which has no gradient here; give the torch model as path.py:build "
            "with its weights, or as a torch.export program (.pt2). The rule face_similarity scores with ONNX"
        )
    elif embedder.endswith(".pt2"):
        return _Exported(existing(embedder))  # holds no training mode
    else:
        model = torch.jit.load(existing(embedder), map_location="cpu")
    for parameter in model.parameters():  # TorchScript's modules refuse requires_grad_ as a whole
        parameter.requires_grad_(False)
    return model.eval()


class _Exported(nn.Module):
    """A torch.export program. It names the device of its constants and of what it makes, which Module.to leaves."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.program = torch.export.load(path)
        self.device: torch.device | None = None
        self.to(torch.device("cpu"))

    def to(self, device: torch.device) -> _Exported:  # type: ignore[override]
        if device != self.device:
            moved = move_to_device_pass(self.program, device)
            self.module, self.device = moved.module().requires_grad_(False), device
        return self

    def forward(self, faces: T) -> T:
        return self.module(faces)


def _in_folder(embedder: str) -> str:
    """The torch model in a folder, such as ROLL's reward_model_path; anything else as it is. ConfigError where the
    folder has none."""
    if not Path(embedder).is_dir():
        return embedder
    names = sorted(file.name for file in Path(embedder).iterdir())
    models = [name for name in names if Path(name).suffix in (".pt2", ".pt", ".ts")]
    if len(models) == 1:
        return str(Path(embedder, models[0]))
    found = f"{len(models)} torch models" if models else f"no torch model ({', '.join(names[:5]) or 'nothing'})"
    raise ConfigError(
        f"{NAME}: the folder {embedder} holds {found}, and ONNX files such as antelopev2's have no gradient here. Give "
        "the same face model (antelopev2: glintr100, an iResNet100) as torch: a torch.export program (.pt2) in the "
        "folder, or differentiable_kwargs.embedder=path.py:build with its weights; its ONNX file scores evaluations as "
        "the rule face_similarity"
    )


class DifferentiableFaceSimilarity:
    """Cosine of the face embeddings, averaged over the frames with a face; for videos (B, 3, T, H, W) and images.

    The reference is an image in one of REFERENCE_COLUMNS of the sample's metadata (the first frame of an
    image-to-video row stands in `input_image`). Not clamped at 0: an unlike face needs a gradient too. Samples without
    a reference, without a face in it, or without a face in any frame are marked invalid.
    """

    needs = f"a first frame, or a picture in the column {' or '.join(REFERENCE_COLUMNS)}"

    def __init__(self, model: nn.Module, finder: FaceFinder | None = None, size: int = 112, scale: float = 127.5):
        self.model, self._faces = model, Faces(model, finder, size, scale)

    def __call__(self, media: T, prompts: list[str], metadata: list[dict[str, Any]]) -> tuple[T, T]:
        """(scores (B) with gradient, valid (B) bool)."""
        self.model.to(media.device)
        clips = media.float().unsqueeze(2) if media.dim() == 4 else media.float()
        scores = [self._score(clip.transpose(0, 1), row) for clip, row in zip(clips, metadata)]
        valid = torch.tensor([score is not None for score in scores], device=media.device)
        nothing = media.sum() * 0  # so that scores keep their graph when no sample has a face
        return torch.stack([nothing if score is None else score for score in scores]), valid

    def knows(self, prompt: str, metadata: dict[str, Any]) -> bool:
        """Whether there is a face to compare with."""
        return image_in(metadata) is not None

    def _score(self, frames: T, row: dict[str, Any]) -> T | None:
        wanted = self._faces.reference(None, row, frames.device)
        made = None if wanted is None else self._faces.embedded(frames)
        return None if made is None else (made @ wanted).mean()
