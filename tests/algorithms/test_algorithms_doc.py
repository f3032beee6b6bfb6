"""docs/algorithms.md names every choice there is, and no flag that does not exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from lightrft_visual.config import registry
from lightrft_visual.config.leaves import names_of
from lightrft_visual.config.vl import AlgorithmConfig, RunConfig

KINDS = ("advantage_estimators", "policy_losses", "policy_masks", "aggregations", "kl_estimators", "tis_modes")

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text()


def test_every_choice_is_documented():
    for name in (name for kind in KINDS for name in vars(registry)[kind].names()):
        assert f"`{name}`" in TEXT


def test_flags_exist_and_none_is_left_out():
    leaves = {leaf.name for leaf in names_of(RunConfig).leaves.values()}
    named = set(re.findall(r"--([a-z_]+)(?![a-z_.])", TEXT))
    assert named <= leaves
    own = {leaf.name for leaf in fields(AlgorithmConfig)}
    assert {name for name in own if f"`{name}`" not in TEXT and name not in named} == set()


def test_defaults_are_those_of_the_configuration():
    config = AlgorithmConfig()
    for name, value in re.findall(r"`--([a-z_]+) ([0-9.]+)`", TEXT):
        if name in ("overlong_buffer_len", "overlong_buffer_penalty_factor", "lambd", "init_kl_coef", "tis_cap"):
            assert value in (str(getattr(config, name)), "0"), name
