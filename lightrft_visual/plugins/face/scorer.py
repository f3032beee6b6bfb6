"""Is it the same face as in a reference image?"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from ...data.media import is_path, load_image
from ...errors import ConfigError, DataError, RewardError
from ...rewards.imaging import to_pil
from ...runtime.offload import on_device

T = torch.Tensor
REFERENCE_COLUMNS = ("reference_image", "face_image", "input_image")
# (H, W, 3) uint8 RGB -> (2, 3) matrix from image to aligned-face pixels, or None where there is no face
FaceFinder = Callable[[np.ndarray], np.ndarray | None]


class Faces:
    """Embeddings of faces, of unit length, with a gradient in the pixels where the model has one.

    model: of aligned faces (n, 3, size, size), `(pixel - 127.5) / scale`, to (n, D). finder: of the face in an image;
    without one each image is taken as an aligned face.
    """

    def __init__(self, model: Callable[[T], T], finder: FaceFinder | None, size: int, scale: float):
        self.model, self.finder, self.size, self.scale = model, finder, size, scale
        self._known: dict[str, T | None] = {}  # of references, by path

    def embedded(self, frames: Iterable[T]) -> T | None:
        """(n, D) of the frames (3, H, W) in 0..1 that have a face; None when none has."""
        faces = [face for face in map(self._aligned, frames) if face is not None]
        if not faces:
            return None
        made = self.model((torch.stack(faces) * 255 - 127.5) / self.scale)
        return nn.functional.normalize(made.flatten(1).float(), dim=-1)

    def _aligned(self, frame: T) -> T | None:
        """(3, size, size)."""
        if self.finder is None:
            size = (self.size, self.size)
            return nn.functional.interpolate(frame[None], size, mode="bilinear", antialias=True)[0]
        shown = (frame.detach().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
        matrix = self.finder(shown)
        return None if matrix is None else warp(frame, matrix, self.size)

    @torch.no_grad()
    def reference(self, given: Any, row: dict[str, Any], device: Any) -> T | None:
        """(D), the embedding of the reference image; None without an image or a face.

        Args:
            given: an image in any form of the data's; None: the one in the row's REFERENCE_COLUMNS.
            row: metadata of the sample.
            device: of the frames to compare with.
        """
        given = image_in(row) if _empty(given) else given
        if given is None:
            return None
        if not is_path(given):
            return self._first(given, device)
        if str(given) not in self._known:
            self._known[str(given)] = self._first(given, device)
        return self._known[str(given)]

    def _first(self, given: Any, device: Any) -> T | None:
        try:
            image = load_image(given) if isinstance(given, (str, Path, bytes, Mapping)) else to_pil(given)
        except DataError as error:
            raise RewardError(f"face_similarity, the reference image: {error}") from error
        found = self.embedded([pixels_of(image, device)])
        return None if found is None else found[0]


def existing(path: str) -> str:
    """The path, if there is a file. Raises ConfigError otherwise."""
    if not Path(path).is_file():
        raise ConfigError(f"face_similarity: the file {path} does not exist")
    return path


def image_in(row: Mapping[str, Any]) -> Any:
    """What the first of REFERENCE_COLUMNS that is not empty holds; None without one."""
    named = (row.get(column) for column in REFERENCE_COLUMNS)
    return next((each for each in named if not _empty(each)), None)


def _empty(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and not cell)


def pixels_of(image: Image.Image, device: Any) -> T:
    """(3, H, W) in 0..1."""
    return torch.from_numpy(np.array(image.convert("RGB"))).to(device).permute(2, 0, 1).float() / 255


def warp(frame: T, matrix: np.ndarray, size: int) -> T:
    """(3, size, size): the frame under an affine map, bilinear, black outside.

    What cv2.warpAffine does, with a gradient.

    Args:
        frame: (3, H, W).
        matrix: (2, 3), from pixels of the frame to those of the result.
        size: pixels of the result's side.
    """
    height, width = frame.shape[-2:]
    full = torch.eye(3, dtype=torch.float64)
    full[:2] = torch.as_tensor(np.asarray(matrix), dtype=torch.float64)
    steps = torch.arange(size, dtype=torch.float64)
    rows, columns = torch.meshgrid(steps, steps, indexing="ij")
    places = torch.stack([columns, rows, torch.ones_like(rows)], dim=-1) @ torch.linalg.inv(full).T
    x, y = (places[..., 0] + 0.5) * 2 / width - 1, (places[..., 1] + 0.5) * 2 / height - 1
    grid = torch.stack([x, y], dim=-1).to(frame)[None]
    return nn.functional.grid_sample(frame[None], grid, padding_mode="zeros", align_corners=False)[0]


class FaceSimilarity:
    """Cosine of the face embeddings of the made image and of a reference image, at least 0; for a video the mean
    over the frames with a face.

    embedder: a face model by path: ONNX (.onnx, run by OpenCV on the CPU) or TorchScript (.pt, .ts) that maps
    (n, 3, size, size) images, `(pixel - 127.5) / scale`, to (n, D); ArcFace models are of this form. detector: a
    YuNet ONNX file that finds and aligns faces; without one each image is taken as an aligned face already.
    The reference image stands in the sample's reference, or in one of REFERENCE_COLUMNS, or else it is what
    the sample was made from: its first frame or the image that was edited. Relative paths start at the data's folder
    in columns, and at the working directory in references.
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
        finder = None if detector is None else FaceDetector(existing(detector), size).matrix
        self._model = _OnnxModel(existing(embedder)) if embedder.endswith(".onnx") else _TorchModel(embedder, offload)
        self._faces = Faces(self._model, finder, size, scale)

    def __call__(
        self,
        frames: list[list[Any]],
        references: list[Any],
        metadata: list[dict[str, Any]],
        source_images: list[list[Any]],
        device: Any,
    ) -> list[float | None]:
        rows = [{REFERENCE_COLUMNS[-1]: own[0]} | row if own else row for row, own in zip(metadata, source_images)]
        with self._model.at_work(device):
            return [self._similarity(*sample, device) for sample in zip(frames, references, rows)]

    def _similarity(self, images: list[Any], reference: Any, row: dict[str, Any], device: Any) -> float | None:
        wanted = self._faces.reference(reference, row, device)
        made = None if wanted is None else self._faces.embedded(pixels_of(image, device) for image in images)
        return None if made is None else float((made @ wanted).clamp(min=0).mean())


class _OnnxModel:
    def __init__(self, path: str) -> None:
        import cv2

        self._net = cv2.dnn.readNetFromONNX(path)

    def at_work(self, device: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def __call__(self, faces: T) -> T:
        rows = []
        for face in faces.cpu().numpy():  # one at a time: exported models often have a fixed batch of 1
            self._net.setInput(face[None])
            rows.append(torch.from_numpy(self._net.forward().copy()).flatten())
        return torch.stack(rows).to(faces.device)


class _TorchModel:
    def __init__(self, path: str, offload: bool) -> None:
        self._model, self._offload = torch.jit.load(existing(path), map_location="cpu").eval(), offload

    def at_work(self, device: Any) -> AbstractContextManager[Any]:
        """Inside, it is where the faces are; it goes there and back once for all samples."""
        return on_device(self._model, device, self._offload)

    def __call__(self, faces: T) -> T:
        return self._model(faces)


class FaceDetector:
    """YuNet: the largest face, aligned to five points as ArcFace expects."""

    # Eyes, nose and mouth corners in a 112 x 112 aligned face (ArcFace's reference points), x and y.
    POINTS = np.array([[38.29, 51.70], [73.53, 51.50], [56.03, 71.74], [41.55, 92.37], [70.73, 92.20]], np.float32)

    def __init__(self, path: str, size: int) -> None:
        import cv2

        self._cv2, self._size = cv2, size
        self._yunet = cv2.FaceDetectorYN.create(path, "", (320, 320))

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
