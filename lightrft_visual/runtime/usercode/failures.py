"""How a scorer says that it could not score, without ending the run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Failed:
    """One sample that a scorer tried and could not score; `reason` is a few words without any payload.

    A scorer may put it in its list of scores. It makes the sample invalid, where None only leaves the scorer out.
    """

    reason: str


class ScoringFailed(Exception):
    """A scorer gave no scores for a whole call; its samples become invalid, the run goes on."""
