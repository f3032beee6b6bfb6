"""What a program gives has a name as long as somebody holds it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightrft_visual.errors import ConfigError
from lightrft_visual.given import GivenRows, forget, give, given, names_given


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


class Asked:
    """Rows that wait in `__getitem__` until another thread is in it, for a while."""

    def __init__(self) -> None:
        self.both = threading.Barrier(2)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, bool]:
        try:
            self.both.wait(0.5)
            return {"beside": True}
        except threading.BrokenBarrierError:
            return {"beside": False}


def test_rows_of_a_program_are_asked_for_by_one_thread_at_a_time():
    rows = GivenRows(Asked(), "train_dataset")
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rows.__getitem__, (0, 1))) == [{"beside": False}] * 2
