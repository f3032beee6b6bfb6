"""Nearest names for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean X?' when a known name is close, and the list of known names, for the end of a message."""
    names = sorted({str(entry) for entry in known})
    close = get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    listed = ", ".join(names[:30]) + (", ..." if len(names) > 30 else "")
    return f"{hint} (known: {listed or 'none'})"
