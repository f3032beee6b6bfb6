"""Is it the same face as in a reference image?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...errors import ConfigError
from ...rewards.imaging import to_pil
from ...runtime.offload import on_device

REFERENCE_COLUMNS = ("reference_image", "face_image", "input_image")


class KnownReferences:
    """Embeddings of reference faces, kept by path. embed: (D) of unit length of an RGB image; None without a face."""

    def __init__(self, embed: Callable[[Image.Image, Any], torch.Tensor | None]):
        self._embed = embed
        self._known: dict[str, torch.Tensor | None] = {}

    def find(self, given: Any, row: dict[str, Any], device: Any) -> torch.Tensor | None:
        """Of an image or path, else of one in the row's REFERENCE_COLUMNS; None without an image or a face in it."""
        if given is None:
            named = (row.get(column) for column in REFERENCE_COLUMNS)
            given = next((each for each in named if each is not None and str(each)), None)
        if given is None:
            return None
        if not isinstance(given, (str, Path)):
            return self._embed(to_pil(given).convert("RGB"), device)
        if str(given) not in self._known:
            with Image.open(given) as image:
                self._known[str(given)] = self._embed(image.convert("RGB"), device)
        return self._known[str(given)]


class FaceSimilarity:
    """Cosine of the face embeddings of the made image and of a reference image, at least 0; for a video the mean
    over the frames with a face.

    embedder: a face model by path: ONNX (.onnx, run by OpenCV on the CPU) or TorchScript (.pt, .ts) that maps
    (n, 3, size, size) images, `(pixel - 127.5) / scale`, to (n, D); ArcFace models are of this form. detector: a
    YuNet ONNX file that finds and aligns faces; without one each image is taken as an aligned face already.
    The reference image is a path or PIL image in the sample's reference, or in one of REFERENCE_COLUMNS.
    An image in which no face is found does not apply (None): it is masked and counted, not scored 0.
    """

    def __init__(
        self,
        embedder: str,
        detector: str | None = None,
        size: int = 112,
        scale: float = 127.5,
        offload: bool = True,
    ) -> None:
        for path in (embedder, detector):
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"scorer face_similarity: the file {path} does not exist")
        self.size, self.scale, self.offload = size, scale, offload
        self._embed = _OnnxModel(embedder) if embedder.endswith(".onnx") else _TorchModel(embedder, offload)
        self._detector = None if detector is None else FaceDetector(detector, size)
        self._references = KnownReferences(self._embedding_of)

    def __call__(
        self, frames: list[list[Any]], references: list[Any], metadata: list[dict[str, Any]], device: Any
    ) -> list[float | None]:
        scores: list[float | None] = []
        for images, reference, row in zip(frames, references, metadata):
            wanted = self._references.find(reference, row, device)
            scores.append(None if wanted is None else self._similarity(images, wanted, device))
        return scores

    def _similarity(self, pictures: list[Any], wanted: torch.Tensor, device: Any) -> float | None:
        faces = [face for face in map(self._face, pictures) if face is not None]
        if not faces:
            return None
        cosines = self._embeddings(faces, device) @ wanted
        return float(cosines.clamp(min=0).mean())

    def _embedding_of(self, picture: Image.Image, device: Any) -> torch.Tensor | None:
        face = self._face(picture)
        return None if face is None else self._embeddings([face], device)[0]

    def _face(self, picture: Image.Image) -> np.ndarray | None:
        """(size, size, 3) uint8 RGB of the aligned face."""
        picture = picture.convert("RGB")
        if self._detector is not None:
            return self._detector.face(np.asarray(picture))
        return np.asarray(picture.resize((self.size, self.size), Image.Resampling.BILINEAR))

    def _embeddings(self, faces: list[np.ndarray], device: Any) -> torch.Tensor:
        """(n, D) float32 of unit length."""
        pixels = torch.from_numpy(np.stack(faces)).permute(0, 3, 1, 2).float()
        return torch.nn.functional.normalize(self._embed((pixels - 127.5) / self.scale, device), dim=-1)


class _OnnxModel:
    def __init__(self, path: str) -> None:
        import cv2

        self._net = cv2.dnn.readNetFromONNX(path)

    def __call__(self, pixels: torch.Tensor, device: Any) -> torch.Tensor:
        rows = []
        for image in pixels.numpy():  # one at a time: exported models often have a fixed batch of 1
            self._net.setInput(image[None])
            rows.append(torch.from_numpy(self._net.forward().copy()).flatten())
        return torch.stack(rows).float()


class _TorchModel:
    def __init__(self, path: str, offload: bool) -> None:
        self._model = torch.jit.load(path, map_location="cpu").eval()
        self._offload = offload

    def __call__(self, pixels: torch.Tensor, device: Any) -> torch.Tensor:
        with on_device(self._model, device, self._offload) as model:
            return model(pixels.to(device)).float().cpu()


class FaceDetector:
    """YuNet: the largest face, aligned to five points as ArcFace expects."""

    # Eyes, nose and mouth corners in a 112 x 112 aligned face (ArcFace's reference points), x and y.
    POINTS = np.array([[38.29, 51.70], [73.53, 51.50], [56.03, 71.74], [41.55, 92.37], [70.73, 92.20]], np.float32)

    def __init__(self, path: str, size: int) -> None:
        import cv2

        self._cv2, self._size = cv2, size
        self._yunet = cv2.FaceDetectorYN.create(path, "", (320, 320))

    def face(self, rgb: np.ndarray) -> np.ndarray | None:
        """(size, size, 3) uint8 of the largest face, or None."""
        matrix = self.matrix(rgb)
        return None if matrix is None else self._cv2.warpAffine(rgb, matrix, (self._size, self._size))

    def matrix(self, rgb: np.ndarray) -> np.ndarray | None:
        """(2, 3) affine map from the pixels of rgb (H, W, 3) to those of the aligned largest face, or None."""
        self._yunet.setInputSize((rgb.shape[1], rgb.shape[0]))
        _, found = self._yunet.detect(np.ascontiguousarray(rgb[..., ::-1]))
        if found is None or not len(found):
            return None
        largest = max(found, key=lambda row: row[2] * row[3])
        # YuNet lists the person's right eye first, which is on the image's left, as in POINTS.
        points = largest[4:14].reshape(5, 2).astype(np.float32)
        return self._cv2.estimateAffinePartial2D(points, self.POINTS * (self._size / 112))[0]
