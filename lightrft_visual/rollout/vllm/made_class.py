"""Classes that a function makes, for processes that vLLM starts: pickle knows a class by its module's name alone."""

from __future__ import annotations

import copyreg
from abc import ABCMeta
from collections.abc import Callable


class MadeClass(ABCMeta):
    """Metaclass of such a class. made_by: (function of a module, its arguments), which make it anew."""

    made_by: tuple[Callable[..., type], tuple]


copyreg.pickle(MadeClass, lambda made: made.made_by)
