"""Batches that are begun ahead of the trainer, as part of a checkpoint: a resumed run trains on what was drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ....data.media import Video
from ....experience.rollouts import Completion, Episode, PromptFeatures, SamplingSettings, Turn
from ....experience.vision import InParts, VisionTensors, parts_of
from ....runtime.files import to_json
from .episodes import HeldEpisode

Plain = dict[str, Any]
Told = Callable[[list[Completion], int | None], list[Completion]]


@dataclass
class Begun:
    """A batch that workers are at, or are done with. asked: what they were asked for, in plain values. futures: of its
    pieces in order, each of (completions of prompts, version of the weights). told: versions of tokens are the policy's
    already."""

    asked: Plain
    futures: list[Future]
    told: bool = False

    @classmethod
    def kept(cls, batch: Plain | None, prompts: Sequence[PromptFeatures], settings: SamplingSettings) -> Begun | None:
        """A batch of a checkpoint; None where it is not there, or is of other prompts or by other settings.

        Args:
            batch: one of `InFlight`.
            prompts, settings: that are asked for now.
        """
        asked = asked_for(prompts, settings)
        if batch is None or batch["asked"] != asked:
            return None
        future: Future = Future()
        made = [[_completion(each, prompt) for each in own] for own, prompt in zip(batch["made"], prompts, strict=True)]
        future.set_result((made, None))
        return cls(asked, [future], told=True)

    def completions(self, tell: Told) -> Iterator[list[Completion]]:
        """Each prompt's. Waits, and raises what a piece raised. tell: versions of the policy, of those of weights."""
        for future in self.futures:
            made, version = future.result()
            for own in made:
                yield own if self.told else tell(own, version)


def asked_for(prompts: Sequence[PromptFeatures], settings: SamplingSettings) -> Plain:
    """What makes the responses of a policy: seeds, tokens and settings."""
    own = [[prompt.seed, list(prompt.token_ids)] for prompt in prompts]
    return {"prompts": own, "settings": dict(vars(settings))}


class InFlight(Mapping[str, Any]):
    """The state of batches that are begun, as plain values. It is made when it is first read, and waits for the
    responses then: a trainer notes where it stands before each step, and writes that down seldom.

    A batch is None, and is drawn again, where a piece of it failed, of which who asks for it is told, or where the step
    that trains on it was given up after it had let go of images.
    """

    def __init__(self, batches: Sequence[Begun], tell: Told) -> None:
        self.batches, self.tell = list(batches), tell

    @cached_property
    def _state(self) -> Plain:
        return {"begun": [self._batch(each) for each in self.batches]}

    def _batch(self, batch: Begun) -> Plain | None:
        if any(future.exception() is not None for future in batch.futures):
            return None
        made = list(batch.completions(self.tell))
        held = [one for own in made for one in own if isinstance(one, HeldEpisode)]
        owners = [own for one in held for own in (one.episode, one.prompt) if own is not None]
        if any(medium is None for own in owners for medium in (*own.images, *own.videos)):
            return None
        return {"asked": batch.asked, "made": [[_plain(one) for one in own] for own in made]}

    def __getitem__(self, name: str) -> Any:
        return self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def _plain(own: Completion) -> Plain:
    """A response in tensors, texts and numbers, without the prompt that was asked for."""
    found: Plain = {
        "token_ids": torch.tensor(own.token_ids),
        "log_probs": None if own.log_probs is None else torch.tensor(own.log_probs, dtype=torch.float64),
        "versions": None if own.versions is None else torch.tensor(own.versions),
        **{name: getattr(own, name) for name in ("text", "truncated", "image", "experts")},
    }
    if isinstance(own, HeldEpisode):
        found["episode"] = _plain_episode(own.episode)
        found["prompt"] = None if own.prompt is None else _plain_prompt(own.prompt)
    return found


def _completion(plain: Plain, prompt: PromptFeatures) -> Completion:
    numbers = {name: None if (own := plain[name]) is None else own.tolist() for name in ("log_probs", "versions")}
    others = {name: plain[name] for name in ("text", "truncated", "image", "experts")}
    changed = plain.get("prompt") and _prompt(plain["prompt"], prompt)
    ids = plain["token_ids"].tolist()
    common = {**numbers, **others, "prompt_token_ids": list((changed or prompt).token_ids)}
    if "episode" not in plain:
        return Completion(ids, **common)
    return HeldEpisode(ids, **common, episode=_episode(plain["episode"]), prompt=changed)


def _plain_episode(own: Episode) -> Plain:
    turns = [{**vars(turn), "info": json.loads(to_json(turn.info))} for turn in own.turns]
    media = {"turns": turns, "turn_ids": torch.tensor(own.turn_ids), "vision": [_tensors(each) for each in own.vision]}
    return {**vars(own), **media, "videos": [tuple(each) for each in own.videos]}


def _episode(plain: Plain) -> Episode:
    turns, vision = [Turn(**each) for each in plain["turns"]], [_vision(each) for each in plain["vision"]]
    videos = [Video(*each) for each in plain["videos"]]
    made = {"turns": turns, "turn_ids": plain["turn_ids"].tolist(), "vision": vision, "videos": videos}
    return Episode(**{**plain, **made})


def _plain_prompt(own: PromptFeatures) -> Plain:
    """What an environment may have changed."""
    found = {name: getattr(own, name) for name in ("text", "token_ids", "images", "messages", "unexpanded")}
    return {**found, "videos": [tuple(each) for each in own.videos], "vision": _tensors(own.vision)}


def _prompt(plain: Plain, asked: PromptFeatures) -> PromptFeatures:
    videos = [Video(*each) for each in plain["videos"]]
    return replace(asked, **{**plain, "videos": videos, "vision": _vision(plain["vision"])})


def _tensors(own: VisionTensors) -> list[list[dict[str, torch.Tensor]]]:
    """By sample and part."""
    return [[dict(part) for part in parts_of(sample)] for sample in own.samples]


def _vision(plain: list[list[dict[str, torch.Tensor]]]) -> VisionTensors:
    return VisionTensors([InParts(parts) if len(parts) > 1 else parts[0] for parts in plain])
