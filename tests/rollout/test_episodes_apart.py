"""Episodes with environments in processes of their own: bad ones are masked and told, one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from bad_environment import SECONDS, TOLD
from episode_rig import batch_of, rig_of, stage_of
from tiny_models import checkpoint_of

from lightrft_visual.config.environment import EpisodeConfig
from lightrft_visual.errors import RolloutError
from lightrft_visual.experience.rollouts import SamplingSettings
from lightrft_visual.rollout.environment_pool import ProcessHost
from lightrft_visual.rollout.episodes import EpisodeLimits

FILE = Path(__file__).with_name("bad_environment.py")
SETTINGS = SamplingSettings(n=1, max_new_tokens=4)


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    return rig_of(checkpoint_of(tmp_path_factory.mktemp("checkpoints"), "qwen2_vl"), size=64)


def episodes_of(rig, kinds: list[str], on_error: str = "mask"):
    """An episode of two turns with an environment of each kind."""
    host = ProcessHost(EpisodeConfig(environment=f"{FILE}:Bad", env_timeout=SECONDS))
    stage = stage_of(rig, limits=EpisodeLimits(2, 400, on_error))
    stage.host = host
    batch = batch_of([0] * len(kinds), images=False)
    batch = replace(batch, metadata=[{"kind": kind} for kind in kinds])
    try:
        return stage.generate(batch, SETTINGS)
    finally:
        host.close()


def test_every_bad_environment_masks_its_own_sample_and_no_other(rig):
    kinds = [name for kind in TOLD for name in (kind, "good")]
    made = episodes_of(rig, kinds)
    assert len(made) == len(kinds)
    wrong = {kind for kind, each in zip(kinds, made) if each.valid == (TOLD.get(kind) is not None)}
    assert not wrong
    untold = {k for k, each in zip(kinds, made) if TOLD.get(k) and TOLD[k] not in each.episode.failure}
    assert not untold
    assert Counter(each.valid for each in made)[False] == sum(told is not None for told in TOLD.values()) >= 40


def test_bad_environment_stops_the_run_where_the_policy_says_so(rig):
    with pytest.raises(RolloutError, match="KeyError.*on_environment_error stop"):
        episodes_of(rig, ["good", "raises"], on_error="stop")
