"""What a program gives has a name as long as somebody holds it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from lightrft_visual.errors import ConfigError
from lightrft_visual.given import forget, give, given, names_given


def of_a_trainer(value: object) -> tuple[list[str], str]:
    with names_given() as names:
        text = give("rows", value)
    return names, text


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_what_is_given_inside_another_list_of_names_stays_when_the_other_forgets(in_a_thread):
    mine, others = [1], [2]
    with ThreadPoolExecutor(1) as threads, names_given() as outer:
        own = give("rows", mine)
        names, text = threads.submit(of_a_trainer, others).result() if in_a_thread else of_a_trainer(others)
    assert len(outer) == len(names) == 1
    forget(outer)
    assert given(text) is others
    with pytest.raises(ConfigError, match="closed"):
        given(own)
    forget(names)
    with pytest.raises(ConfigError, match="closed"):
        given(text)
