"""What runs in a Ray actor of rewards: a scorer, or a reward model. It imports little, as each actor waits for it."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...rewards.batch import Call, RewardBatch, Scores, Source
from ...rewards.local.callables import CallableSource
from ...rewards.registry import instantiate
from ...runtime.usercode.loading import load_reward_fn
from .actors import built_again


def build_source(
    name: str, target: Callable[..., Any] | str, settings: Mapping[str, Any], form: str, lenient: bool = False
) -> Source:
    """A scorer from what the trainer named.

    Args:
        name: of the reward.
        target: class or function of a scorer, or `path.py:name` of a function.
        settings: arguments of the class, or fixed ones of the function.
        form: how a function of a file is called, as of `CallableSource`.
        lenient: as of `CallableSource`.
    """
    if isinstance(target, str):
        return CallableSource(load_reward_fn(target), name, settings, form, lenient=lenient)
    scorer = instantiate(target, settings)
    return scorer if isinstance(scorer, Source) else CallableSource(scorer, name, lenient=lenient)


def build_model(name: str, path: str) -> Source:
    """A reward model by its folder, which stays on the device of this process."""
    from ...rewards.local.models import load_reward_model

    return load_reward_model(name, path, offload=False)


class RewardActor:
    """One source. threads: of its operations, as many as the trainer's, so that both add in the same order. variables:
    with the tokens that it sends, which Ray would log if they were of its environment."""

    def __init__(
        self, build: Callable[..., Source], arguments: tuple, threads: int, variables: Mapping[str, str]
    ) -> None:
        torch.set_num_threads(threads)
        os.environ.update(variables)
        with built_again():
            self._source = build(*arguments)

    def score(self, batch: RewardBatch, device: str | None) -> Scores:
        """The source's; device: that it computes on, None for this process's accelerator."""
        if device is None:
            from deepspeed.accelerator import get_accelerator

            device = get_accelerator().current_device_name()
        return self._source.score(batch, Call(device=device))
