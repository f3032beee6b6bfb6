"""Constraints at the fields: what they refuse, what they say, and that OmegaConf reads such fields as plain ones."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from omegaconf import OmegaConf

from lightrft_visual.config import registry
from lightrft_visual.config.constraints import (
    NonNegativeFloat,
    PositiveInt,
    Section,
    Share,
    one_of,
    positive_or,
    registered,
    require,
    within,
)
from lightrft_visual.config.leaves import Names
from lightrft_visual.errors import ConfigError


@dataclass
class Inner(Section):
    """Fields of every kind."""

    count: PositiveInt = 1  # how many
    limit: PositiveInt | None = None
    weight: NonNegativeFloat = 0.0
    share: Annotated[float, Share] = 0.5
    half_open: Annotated[float, within("(0, 1]")] = 1.0
    steps: Annotated[int, positive_or(-1, "no limit")] = -1
    mode: Annotated[str, one_of("a", "b")] = "a"
    loss: Annotated[str, registered(registry.policy_losses, "none")] = "none"  # which
    numbers: list[float] = field(default_factory=list)
    anything: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """The one rule over two fields."""
        require(self.limit is None or self.count <= self.limit, "count must not be above limit")


@dataclass
class Whole(Section):
    """One section."""

    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count is 0; it must be positive"),
        ({"limit": -1}, "limit is -1; it must be positive"),
        ({"weight": -0.5}, "weight is -0.5; it must not be negative"),
        ({"share": 1.5}, r"share is 1.5; it is a share and must lie in \[0, 1\]"),
        ({"half_open": 0.0}, r"half_open is 0.0; it must lie in \(0, 1\]"),
        ({"steps": 0}, "steps is 0; it must be positive, or -1 for no limit"),
        ({"mode": "c"}, "mode is 'c'; it must be one of: a, b"),
        (
            {"loss": "pp"},
            "loss is 'pp'; it must be one of: none, ppo, .*--plugins names a file that adds one",
        ),
        ({"numbers": [1.0, float("nan")]}, "numbers is nan; it must be a finite number"),
        ({"weight": float("inf")}, "weight is inf; it must be a finite number"),
        ({"count": 3, "limit": 2}, "count must not be above limit"),
    ],
)
def test_refused_in_the_words_of_the_constraint(values, message):
    with pytest.raises(ConfigError, match=message):
        Inner(**values)


def test_the_edges_and_none_are_taken():
    edges = Inner(half_open=1.0, share=0.0, steps=7, limit=None, anything={"x": float("nan")})
    assert (edges.half_open, edges.share, edges.steps, edges.limit) == (1.0, 0.0, 7, None)


def test_omegaconf_reads_annotated_fields_as_plain_ones():
    tree = OmegaConf.structured(Whole)
    OmegaConf.update(tree, "inner.count", "5")
    OmegaConf.update(tree, "inner.limit", "6")
    assert OmegaConf.to_object(tree).inner == Inner(count=5, limit=6)
    OmegaConf.update(tree, "inner.count", "-5")
    with pytest.raises(ConfigError, match="count is -5"):
        OmegaConf.to_object(tree)


def test_help_has_the_plain_type_the_choices_and_the_comment():
    leaves = Names(Whole).leaves
    assert (leaves["inner.limit"].type_name, leaves["inner.count"].help) == ("int | None", "how many")
    assert leaves["inner.mode"].help == "a | b"
    assert leaves["inner.loss"].help == f"none | {' | '.join(registry.policy_losses.names())}; which"
