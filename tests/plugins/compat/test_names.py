"""Settings under the names of other systems that mean something else here are answered by what to write."""

import re

from lightrft_visual.config.leaves import names_of
from lightrft_visual.config.spellings import DIFFERENT, ROOTS
from lightrft_visual.plugins.compat.names import SPOKEN


def test_every_advice_is_given_somewhere_and_names_settings_that_there_are() -> None:
    for name in {**DIFFERENT, **SPOKEN.different}:
        advised = []
        for names in (names_of(root.schema) for root in ROOTS):
            advice = None if names.find(name) else names.hint(name)
            if advice:
                flags = re.findall(r"(?<!deepspeed )--(\w+)", advice)
                assert all(names.find(flag) for flag in flags), (name, advice)
                advised.append(advice)
        assert advised, name
