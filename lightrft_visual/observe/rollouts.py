"""Rollouts as records for people: plain dicts that go to rollouts/*.jsonl, the console table and the report.

A record has `prompt, response, reward, components, reference, label, group_id, sample_id, response_length, truncated,
valid` and, where the sample has them, `images` and `videos` (in memory until they are stored, paths afterwards).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..data.imaging import frames_first, is_video, to_uint8
from ..experience.rollouts import Rollout
from ..runtime.collectives import all_gather_object
from ..runtime.seeding import derive_seed

Record = dict[str, Any]


def records_from_rollouts(rollouts: Sequence[Rollout]) -> list[Record]:
    """One record for each rollout, scored or not; its images by reference."""
    return [
        {
            "prompt": rollout.prompt.caption if rollout.prompt.draws else rollout.prompt.text,
            "response": rollout.text,
            "reward": rollout.reward,
            "components": dict(rollout.components),
            "reference": rollout.prompt.reference,
            "label": rollout.prompt.label,
            "group_id": rollout.prompt.group_id,
            "sample_id": rollout.sample_id,
            "response_length": len(rollout.token_ids),
            "truncated": rollout.truncated,
            "valid": rollout.valid,
        }
        | {name: list(media) for name, media in _media(rollout).items() if media}
        | ({"kind": "drawing"} if rollout.prompt.draws else {})
        | ({"distorted": True} if rollout.distorted else {})
        for rollout in rollouts
    ]


def _media(rollout: Rollout) -> dict[str, list]:
    images = [*rollout.prompt.images, *([] if rollout.image is None else [rollout.image])]
    return {"images": images, "videos": rollout.prompt.videos}


def records_from_media(
    prompts: Sequence[str],
    media: Sequence[Any],
    rewards: torch.Tensor,
    components: Mapping[str, torch.Tensor] | None = None,
    *,
    valid: torch.Tensor | None = None,
    group_ids: torch.Tensor | None = None,
) -> list[Record]:
    """Records of B generated images ([C, H, W] in 0..1, PIL) or videos ([C, T, H, W] in 0..1, lists of frames).

    rewards (B); components {name: (B)}; valid (B) bool; group_ids (B).
    """
    records = []
    for index, prompt in enumerate(prompts):
        kind = "videos" if is_video(media[index]) else "images"
        record: Record = {
            "prompt": prompt,
            "reward": float(rewards[index]),
            "components": {name: float(values[index]) for name, values in (components or {}).items()},
            "sample_id": index,
            "valid": True if valid is None else bool(valid[index]),
            kind: [media[index]],
        }
        if group_ids is not None:
            record["group_id"] = int(group_ids[index])
        records.append(record)
    return records


def score(record: Mapping[str, Any]) -> float | None:
    """The record's reward, or None where it has none, is invalid or is not a number."""
    reward = record.get("reward")
    if not isinstance(reward, int | float) or reward != reward or not record.get("valid", True):
        return None
    return float(reward)


def best_and_worst(records: Sequence[Record], count: int) -> tuple[list[Record], list[Record]]:
    """The `count` records with the highest and with the lowest reward; ties keep their order.

    None is in both, and none of the worst has the highest reward: where all are equal there is no worst.
    """
    scored = sorted((record for record in records if score(record) is not None), key=lambda r: -score(r))
    best = scored[: min(count, (len(scored) + 1) // 2)]
    below = [record for record in scored[len(best) :] if score(record) < score(scored[0])]
    return best, below[::-1][:count]


def pick_random(records: Sequence[Record], count: int, seed: int = 0) -> list[Record]:
    """`count` records drawn without replacement, the same for a seed, in their order."""
    indices = sorted(random.Random(seed).sample(range(len(records)), min(count, len(records))))
    return [records[index] for index in indices]


def select(records: Sequence[Record], count: int, seed: int = 0) -> list[Record]:
    """At most `count` records that show the range: a third best, a third worst, the rest at random."""
    if len(records) <= count:
        return list(records)
    best, worst = best_and_worst(records, count // 3)
    shown = {id(record) for record in (*best, *worst)}
    others = [record for record in records if id(record) not in shown]
    return [*best, *worst, *pick_random(others, count - len(best) - len(worst), seed)]


def gather_records(records: Sequence[Record], count: int, run_seed: int, step: int) -> list[Record]:
    """The `count` records to keep of all ranks, on every rank (a collective).

    Each rank sends only its own selection, so images of at most `count` samples a rank cross the network.
    """
    everyone = gather_all(own_choice(records, count, run_seed, step))
    return own_choice(everyone, count, run_seed, step)


def own_choice(records: Sequence[Record], count: int, run_seed: int, step: int) -> list[Record]:
    """The records of one rank among which `gather_records` chooses; the same ones for the same scores."""
    return select(records, count, derive_seed(run_seed, step, "rollouts"))


def gather_all(records: Sequence[Record]) -> list[Record]:
    """The records of all ranks, by sample_id, on every rank (a collective); see `packed` for their images."""
    everyone = [record for part in all_gather_object([packed(record) for record in records]) for record in part]
    return sorted(everyone, key=lambda record: record.get("sample_id", 0))


def packed(record: Record) -> Record:
    """The record with its tensors as uint8 arrays, one byte a value: what is sent.

    An image of a batch is a view, and pickling a view takes the storage of the whole batch along. The floats of a
    video [C, T, H, W] become [T, C, H, W], the order that uint8 videos have.
    """
    kinds = {kind: record[kind] for kind in ("images", "videos") if record.get(kind)}
    return record | {kind: [_packed_media(each) for each in media] for kind, media in kinds.items()}


def _packed_media(media: Any) -> Any:
    if not isinstance(media, torch.Tensor):
        return media
    return to_uint8(frames_first(media) if is_video(media) else media).numpy()
