"""A scorer, as a user would add it: this file alone, named by --plugins."""

from __future__ import annotations

from lightrft_visual.config import registry


@registry.scorers.register("vowels", about="share of vowels in a response")
def vowels(completions):
    return [sum(letter in "aeiou" for letter in text.lower()) / max(1, len(text)) for text in completions]
