"""Sampling rules inside vLLM's sampler: tokens that may never be drawn, and FIRE's hot first token.

Both are done by one processor, the scaling first: a finite logit bias would be shrunk by it and let banned tokens
through, and vLLM's own temperature stops at 2. vLLM divides by the ordinary temperature afterwards. vLLM has two model
runners, each with its own kind of logits processor: `rules_first` and `rules_second`. Requests' seeds are vLLM's own
affair on both.
"""

from __future__ import annotations


def sampling_rules(banned_ids: list[int], second_runner: bool) -> type:
    """A vLLM logits processor class that bans `banned_ids` and scales the logits of each request's first token."""
    if second_runner:
        from .rules_second import rules_class
    else:
        from .rules_first import rules_class
    return rules_class(banned_ids)
