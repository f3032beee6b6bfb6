"""The learning rates are those of transformers' schedules of the same names, to the last bit."""

import pytest
import torch
from transformers import get_scheduler

from lightrft_visual.runtime.seeding import rate_schedule


def rates(make, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=3e-4)
    schedule, found = make(optimizer), []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", ["constant_with_warmup", "linear", "cosine", "cosine_with_min_lr"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (3, 40), (1, 7), (5, 5)])
def test_the_same_rates(name: str, warmup: int, total: int) -> None:
    specific = {"min_lr_rate": 0.1} if name == "cosine_with_min_lr" else None

    def theirs(optimizer):
        return get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=specific)

    ours = rates(lambda optimizer: rate_schedule(name, optimizer, warmup, total), total)
    assert ours == rates(theirs, total)


def test_a_kept_state_goes_on() -> None:
    """Also that of a checkpoint whose schedule was transformers' own."""
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1.0)
    before = get_scheduler("linear", optimizer, 0, 10)
    for _ in range(4):
        optimizer.step()
        before.step()
    after = rate_schedule("linear", optimizer, 0, 10)
    after.load_state_dict(before.state_dict())
    assert after.get_last_lr() == before.get_last_lr()
    optimizer.step()
    after.step()
    assert after.get_last_lr() == [0.5]


@pytest.mark.parametrize("name", ["constant_with_warmup", "linear", "cosine", "cosine_with_min_lr"])
def test_beyond_its_end_a_schedule_stays_at_its_last_rate(name: str) -> None:
    """As where a run goes on with fewer updates a step: it has made more of them than the whole of it now has."""
    found = rates(lambda optimizer: rate_schedule(name, optimizer, 2, 10), 25)
    assert set(found[11:]) == {found[10]}
