"""GenEval (arXiv 2310.11513): does the image show the objects, numbers, colours and positions that are asked for?

A detector finds COCO's objects and CLIP names their colours; rules over both give 1 or 0. Rules and thresholds are
those of the published evaluation. Samples bring its rows: `tag`, `include` and `exclude`, as columns of the data.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from ...runtime.offload import on_device
from ...runtime.usercode.calls import Failed
from .clip import CLIPPairs
from .mask_detector import Found, MaskDetector

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEMPLATES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
# GenEval's own names where they are not COCO's, and where checkpoints have Pascal's.
RENAMED = {"mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard", "sofa": "couch"}
RENAMED |= {"motorbike": "motorcycle", "aeroplane": "airplane", "tvmonitor": "tv"}
RENAMED |= {"pottedplant": "potted plant", "diningtable": "dining table"}
GREY = (153, 153, 153)  # what lies around an object whose colour is asked
Objects = dict[str, list[Found]]  # by name, the surest first
ColourOf = Callable[[Image.Image, Sequence[Found]], list[str]]


def overlap(a: Found, b: Found) -> float:
    """Intersection over union of two boxes, whose last pixels count too."""

    def area(left: float, top: float, right: float, bottom: float) -> float:
        return max(right - left + 1, 0) * max(bottom - top + 1, 0)

    shared = area(
        *(max(x, y) for x, y in zip(a.box[:2], b.box[:2])), *(min(x, y) for x, y in zip(a.box[2:], b.box[2:]))
    )
    union = area(*a.box) + area(*b.box) - shared
    return shared / union if union else 0.0


def kept(found: Sequence[Found], threshold: float, most: int = 16, most_overlap: float = 1.0) -> Objects:
    """The objects of an image that count.

    Args:
        found: by the detector, of any score.
        threshold: those above it count.
        most: of each name, the surest.
        most_overlap: intersection over union from which on the less sure of two of one name is left out; 1: never.
    """
    objects: Objects = {}
    for name in {each.name for each in found}:
        own = sorted((each for each in found if each.name == name and each.score > threshold), key=lambda e: -e.score)
        chosen: list[Found] = []
        for each in own[:most]:
            if most_overlap == 1 or all(overlap(other, each) < most_overlap for other in chosen):
                chosen.append(each)
        if chosen:
            objects[name] = chosen
    return objects


def relations(a: Found, b: Found, threshold: float = 0.1) -> set[str]:
    """Where an object is of another: left of, right of, above, below.

    Args:
        a: the object.
        b: the other.
        threshold: offsets within the objects' sizes times it are none; the rest must make up more than half of the
            distance of the centres.
    """
    first, second = (np.array(each.box, dtype=float).reshape(2, 2) for each in (a, b))
    offset = first.mean(axis=0) - second.mean(axis=0)
    sizes = np.abs(first[1] - first[0]) + np.abs(second[1] - second[0])
    moved = np.maximum(np.abs(offset) - threshold * sizes, 0) * np.sign(offset)
    if np.all(np.abs(moved) < 1e-3):
        return set()
    x, y = moved / np.linalg.norm(offset)
    named = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in named.items() if holds}


def verdict(
    image: Image.Image, objects: Objects, asked: Mapping[str, Any], colours: ColourOf, position_threshold: float = 0.1
) -> bool:
    """Whether the image shows what is asked for.

    Args:
        image: in RGB.
        objects: that were found in it.
        asked: its `include` must all hold, its `exclude` must none; numbers, colours and positions are those of the
            surest objects.
        colours: names the colour of each object.
        position_threshold: of `relations`.
    """
    correct, groups = True, list[list[Found] | None]()
    for given in asked.get("include") or ():
        wanted = {name: value for name, value in given.items() if value is not None}  # a table's rows have all columns
        count = wanted["count"]
        own: list[Found] | None = objects.get(wanted["class"], [])[:count]
        if len(own or ()) < count or ("color" in wanted and colours(image, own or ()).count(wanted["color"]) < count):
            own = None
        elif "position" in wanted:
            relation, target = wanted["position"]
            others = groups[target]
            if others is None or any(
                relation not in relations(each, other, position_threshold) for each in own or () for other in others
            ):
                own = None
        correct = correct and own is not None
        groups.append(own)
    return correct and not any(
        len(objects.get(each["class"], [])) >= each["count"] for each in asked.get("exclude") or ()
    )


class GenEval:
    """1 where the published rules hold, else 0; None for a sample without `include`, a failure where it asks for what
    the models have no name for. A video: the share of its frames.

    detector: a Mask2Former checkpoint of COCO's objects; clip: of the colours. Thresholds are the published ones.
    """

    checkpoints = ("detector", "clip")

    def __init__(
        self,
        detector: str = "facebook/mask2former-swin-small-coco-instance",
        clip: str = "openai/clip-vit-large-patch14",
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        position_threshold: float = 0.1,
        max_objects: int = 16,
        max_overlap: float = 1.0,
        offload: bool = True,
    ) -> None:
        self.threshold, self.counting_threshold = threshold, counting_threshold
        self.position_threshold, self.max_objects, self.max_overlap = position_threshold, max_objects, max_overlap
        self.offload, self.detector = offload, MaskDetector(detector, "geneval", RENAMED)
        self.names = self.detector.names
        self._clip = CLIPPairs(clip, None, "geneval", 16, False)
        self._models = self.detector.model, self._clip.model
        self._said: dict[str, torch.Tensor] = {}

    def __call__(
        self, frames: list[list[Any]], metadata: list[dict[str, Any]], device: Any
    ) -> list[float | Failed | None]:
        def share(images: list[Any], asked: dict[str, Any]) -> float | Failed | None:
            if not images or not asked.get("include"):
                return None
            objects = [*asked["include"], *(asked.get("exclude") or ())]
            if unknown := {each["class"] for each in objects} - {*self.names}:
                return Failed(f"geneval: the detector finds no {', '.join(sorted(unknown))}")
            if unknown := {each.get("color") for each in objects} - {*COLOURS, None}:
                return Failed(f"geneval: no colour that it tells apart is {', '.join(sorted(unknown))}")
            return sum(self._judge(image, asked, device) for image in images) / len(images)

        with ExitStack() as stay:  # one for all samples: each is looked at by itself
            for model in self._models:
                stay.enter_context(on_device(model, device, self.offload))
            return [share(*sample) for sample in zip(frames, metadata)]

    def _judge(self, image: Image.Image, asked: Mapping[str, Any], device: Any) -> bool:
        """The verdict on one image."""
        image = ImageOps.exif_transpose(image).convert("RGB")
        threshold = self.counting_threshold if asked.get("tag") == "counting" else self.threshold
        objects = kept(self.detector(image, device), threshold, self.max_objects, self.max_overlap)
        return verdict(image, objects, asked, lambda i, own: self.colours(i, own, device), self.position_threshold)

    def colours(self, image: Image.Image, objects: Sequence[Found], device: Any) -> list[str]:
        """Of each object, by CLIP on its box with grey around its mask; the mean of a colour's sentences counts.

        Args:
            image: in RGB.
            objects: found in the image.
            device: on which CLIP runs.
        """
        if not objects:
            return []
        seen, _ = self._clip.embed([cut_out(image, each) for each in objects], [""] * len(objects), device)
        means = torch.stack([self._means(each.name, device) for each in objects])
        return [COLOURS[int(index)] for index in (means @ seen.unsqueeze(-1)).squeeze(-1).argmax(dim=1)]

    def _means(self, name: str, device: Any) -> torch.Tensor:
        """(colours, D) of unit length, made once for each name."""
        if name not in self._said:
            texts = [text.format(colour=colour, name=name) for colour in COLOURS for text in TEMPLATES]
            _, said = self._clip.embed([Image.new("RGB", (8, 8))] * len(texts), texts, device)
            means = said.reshape(len(COLOURS), len(TEMPLATES), -1).mean(dim=1)
            self._said[name] = torch.nn.functional.normalize(means, dim=-1)
        return self._said[name]


def cut_out(image: Image.Image, found: Found) -> Image.Image:
    """The object's box, with grey where its mask is not."""
    if found.mask is not None:
        image = Image.composite(image, Image.new("RGB", image.size, GREY), Image.fromarray(found.mask))
    return image.crop(tuple(round(edge) for edge in found.box))
