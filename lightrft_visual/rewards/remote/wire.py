"""The JSON of remote rewards, ours and OpenRLHF's: requests and replies, written and read with limits."""

import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from ...data.bad_rows import MAX_DEPTH
from ...data.media import MAX_FRAMES
from ...errors import ConfigError, DataError, RewardError, did_you_mean
from ...given import unique_name
from ..batch import MAX_SCORE, Failed, RewardBatch, Scores, metric_name
from ..imaging import MAX_PIXELS, EncodedImages, decode_image
from ..local.callables import score_key

LIGHTRFT, OPENRLHF, AUTO = "lightrft", "openrlhf", "auto"
NOT_SCORED = "the server could not score it"
BROKEN = "no finite number"  # stands for one in `components`
MAX_EXTRAS = 200  # further numbers by name that one reply may bring


class BadReply(Exception):
    """A reply that holds nothing usable for any sample; the text says why, without repeating the reply."""


def encode_request(batch: RewardBatch, wire: str, encoded: EncodedImages, image_format: str = "png") -> dict[str, Any]:
    """The body of one request. Optional fields are left out when no sample has them; references, when no data has any.

    Args:
        batch: the samples of the request.
        wire: LIGHTRFT or OPENRLHF.
        encoded: holds images and videos that are encoded already.
        image_format: png or jpeg.
    """
    if wire == OPENRLHF:
        own = {"query": batch.queries, "prompts": batch.prompts, "labels": _plain(batch.labels_or_references)}
        return own | _media(batch, encoded, image_format)
    body: dict[str, Any] = {"queries": batch.queries, "prompts": batch.prompts}
    body |= {"ids": batch.ids, "group_ids": batch.group_ids}
    if any(label is not None for label in batch.labels):
        body["labels"] = _plain(batch.labels)
    if batch.has_references:
        body["references"] = _plain(batch.references)
    if any(batch.metadata):
        body["metadata"] = _plain(batch.metadata)
    if batch.data_columns:
        body["columns"] = sorted(batch.data_columns)
    return body | _media(batch, encoded, image_format)


def wires_of(setting: str, remotes: Mapping[str, str]) -> dict[str, str]:
    """The wire of each entry of remote_rm_url, {name: entry}, by `reward_wire`; of any other entry under "".
    Raises ConfigError for a wire or name that does not exist, and for a list of another length.
    """
    parts = [part.strip() for part in setting.split(",") if part.strip()] or [AUTO]
    pairs = [part.rpartition("=") for part in parts]
    for *_, wire in pairs:
        if wire not in (AUTO, LIGHTRFT, OPENRLHF):
            raise ConfigError(f"reward_wire: there is no wire {wire!r}{did_you_mean(wire, (AUTO, LIGHTRFT, OPENRLHF))}")
    if all(mark for _, mark, _ in pairs):
        for key in (key.strip() for key, *_ in pairs):
            if key not in remotes and "://" not in key:
                raise ConfigError(f"reward_wire: remote_rm_url has no {key!r}{did_you_mean(key, remotes)}")
        return {"": AUTO} | {remotes.get(key.strip(), key.strip()): wire for key, _, wire in pairs}
    if len(parts) == 1:
        return {"": parts[0]}
    if any(mark for _, mark, _ in pairs) or len(parts) != len(remotes):
        raise ConfigError(
            f"reward_wire is {setting!r}: give one wire for all, one for each of the {len(remotes)} entries of "
            "remote_rm_url in their order, or url=wire with commas"
        )
    return {"": AUTO} | dict(zip(remotes.values(), parts))


def _media(batch: RewardBatch, encoded: EncodedImages, image_format: str) -> dict[str, Any]:
    """The fields of images and videos, where there are any."""
    body: dict[str, Any] = {}
    for name, samples in (("images", batch.images), ("source_images", batch.source_images)):
        if any(samples):
            body[name] = [[encoded.encode(image, image_format) for image in sample] for sample in samples]
    if any(batch.videos):
        body["videos"] = [[encoded.frames(video, image_format) for video in sample] for sample in batch.videos]
    return body | ({"generated": True} if batch.generated else {})


def _plain(value: Any) -> Any:
    """JSON values only: times, dates and decimals as text; what JSON cannot hold (images, tensors, bytes) is null."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 1):
        value = value.tolist()
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (date, time, timedelta, Decimal)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else None


def decode_reply(reply: Any, size: int) -> Scores:
    """Scores of a parsed reply. A score that is not a plain finite number within ±MAX_SCORE makes its sample failed;
    null means not applicable. Raises BadReply when the reply as a whole is unusable."""
    if not isinstance(reply, Mapping):
        raise BadReply(f"the reply is a JSON {type(reply).__name__}, not an object")
    try:
        key = score_key(reply, "the reply is an object")
    except RewardError as error:
        raise BadReply(str(error)) from None
    if not isinstance(reply[key], list) or len(reply[key]) != size:
        count = len(reply[key]) if isinstance(reply[key], list) else "no list of"
        raise BadReply(f"the reply has {count} scores for {size} samples")
    told = reply.get("failed") or []
    if not isinstance(told, list) or not all(type(each) is int and 0 <= each < size for each in told):
        raise BadReply('"failed" of the reply is no list of positions of samples')
    problems = [NOT_SCORED if index in told else _problem(entry) for index, entry in enumerate(reply[key])]
    scores = Scores.of([entry if problem is None else Failed(problem) for entry, problem in zip(reply[key], problems)])
    _read_extras(scores, reply)
    return scores


def _problem(entry: Any) -> str | None:
    if entry is None:
        return None
    if not isinstance(entry, (bool, int, float)):
        return f"a score is a JSON {'string' if isinstance(entry, str) else type(entry).__name__}"
    if isinstance(entry, float) and not math.isfinite(entry):
        return "a score is not finite"
    return f"a score is beyond ±{MAX_SCORE:.0e}" if abs(entry) > MAX_SCORE else None  # of an integer of any length


def _read_extras(scores: Scores, reply: Mapping[str, Any]) -> None:
    """`components` of our wire, `extra_logs` of OpenRLHF's: one number a sample, or one for all. Numbers that are none
    become NaN; they do not count. Other shapes are BadReply; in `extra_logs`, which hold metrics alone, left out."""
    names: dict[str, str] = {}
    for group in ("components", "extra_logs"):
        ours, named = group == "components", reply.get(group)
        if ours and not isinstance(named, Mapping | None):
            raise BadReply('"components" of the reply is no object')
        for name, given in list(named.items())[:MAX_EXTRAS] if isinstance(named, Mapping) else ():
            entries = [given] * len(scores.values) if isinstance(given, int | float) else given
            listed = isinstance(entries, list)
            if listed and len(entries) == len(scores.values):
                broken = [_problem(e) is not None for e in entries]
                usable = [math.nan if bad or e is None else float(e) for e, bad in zip(entries, broken)]
                unique = names.setdefault(name, unique_name(metric_name(name), scores.extras))
                scores.extras[unique] = torch.tensor(usable, dtype=torch.float64)
                scores.broken[unique] = torch.tensor(broken, dtype=torch.bool)
            elif ours and entries is not None:
                told = f"{len(entries) if listed else 'no list of'} values for {len(scores.values)} samples"
                raise BadReply(f"component {metric_name(name)!r} has {told}")


def decode_request(
    body: Any, max_samples: int, max_images: int, max_pixels: int = MAX_PIXELS, all_pixels: int = 2**32
) -> RewardBatch:
    """The batch of a request, either wire. Raises DataError that names the field, never its content.

    Args:
        body: the request, parsed.
        max_samples: of the request.
        max_images: of a sample; also videos of a sample. A video has at most MAX_FRAMES frames.
        max_pixels: of an image or frame.
        all_pixels: of all of them together, as few bytes may stand for many.
    """
    if not isinstance(body, Mapping):
        raise DataError("the body is not a JSON object")
    openrlhf = "queries" not in body  # there `labels` are the references
    queries = body.get("query" if openrlhf else "queries")
    if not _is_strings(queries):
        raise DataError('"queries" must be a list of strings')
    size, left = len(queries), all_pixels
    if not 0 < size <= max_samples:
        raise DataError(f"{size} samples in one request; 1 to {max_samples} are allowed")

    def column(name: str, default: Any = None) -> list[Any]:
        values = body.get(name)
        if values is None:
            return [default] * size
        if not isinstance(values, list) or len(values) != size:
            raise DataError(f'"{name}" must be a list of {size} entries')
        return values

    def numbers(name: str) -> list[int]:
        return [number if isinstance(number, int) else place for place, number in enumerate(column(name))]

    def images(sample: Any, name: str, most: int = max_images) -> list[Any]:
        sample = [sample] if isinstance(sample, str) else sample or []
        if not isinstance(sample, list) or len(sample) > most:
            raise DataError(f'"{name}" must hold lists of at most {most} base64 images')
        return [None if image is None else decoded(image) for image in sample]

    def decoded(text: str) -> Any:
        nonlocal left
        image = decode_image(text, max_pixels)
        left -= image.width * image.height
        if left < 0:
            told = f"the images of one request have more than {all_pixels} pixels together"
            raise DataError(f"{told}: send fewer samples at once, or raise --max_body_mb")
        return image

    prompts, metadata, videos = column("prompts", ""), column("metadata", {}), column("videos")
    if not _is_strings(prompts):
        raise DataError('"prompts" must be a list of strings')
    if not all(isinstance(sample, Mapping) for sample in metadata):
        raise DataError('"metadata" must be a list of objects')
    if not all(sample is None or (isinstance(sample, list) and len(sample) <= max_images) for sample in videos):
        raise DataError('"videos" must hold lists of videos, each a list of base64 frames')
    columns = body.get("columns") or []
    if not _is_strings(columns):
        raise DataError('"columns" must be a list of strings')
    labels, inner = column("labels"), [value for sample in metadata for value in sample.values()]
    for name, values in (("metadata", inner), ("labels", labels), ("references", column("references"))):
        if any(map(_is_deep, values)):
            raise DataError(f'"{name}" is nested deeper than {MAX_DEPTH} levels')
    sources = column("source_images") if "source_images" in body else []
    return RewardBatch(
        prompts=prompts,
        responses=[q[len(p) :] if q.startswith(p) else q for q, p in zip(queries, prompts)],
        labels=[None if label is None else str(label) for label in labels],
        references=list(labels) if openrlhf and "references" not in body else column("references"),
        metadata=[dict(sample) for sample in metadata],
        images=[images(sample, "images") for sample in column("images")],
        videos=[[images(video, "videos", MAX_FRAMES) for video in sample or []] for sample in videos],
        source_images=[images(sample, "source_images") for sample in sources],
        ids=numbers("ids"),
        group_ids=numbers("group_ids"),
        generated=body.get("generated") is True,
        data_columns=frozenset(columns),
        data_references=openrlhf or body.get("references") is not None,
    )


def _is_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _is_deep(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Whether more lists and mappings lie inside each other than rows may have."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else None
    return inner is not None and (levels == 0 or any(_is_deep(each, levels - 1) for each in inner))


def encode_reply(scores: Scores) -> dict[str, Any]:
    """The server's reply: null where there is no score, and the positions of failed samples in "failed".

    JSON has no infinity: an infinite score is failed, an infinite or broken number beside it is a text."""
    reply: dict[str, Any] = {"rewards": _numbers(scores.values)}
    if scores.extras:
        reply["components"] = {
            name: [BROKEN if bad and each is None else each for each, bad in zip(_numbers(values), unusable)]
            for name, values in scores.extras.items()
            for unusable in [scores.unusable(name).tolist()]
        }
    failed = scores.failed | scores.values.isinf()
    if failed.any():
        reply["failed"] = failed.nonzero().flatten().tolist()
    return reply


def _numbers(values: torch.Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
