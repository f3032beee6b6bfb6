"""Rows that turn out bad during a run: replaced, counted and bounded, the same on any number of ranks."""

from dataclasses import asdict

import pytest
import row_files
from row_files import BAD, supply

import lightrft_visual.data.sampler as supply_module
from lightrft_visual.data.bad_rows import BadRow, TooManyBadRows
from lightrft_visual.data.sampler import PromptSampler
from lightrft_visual.errors import DataError

path = row_files.twelve_rows


def indices(rows):
    return [row.index for row in rows]


def test_a_bad_row_gives_its_place_to_the_next_of_the_order(path):
    stream = PromptSampler([12], 1, seed=3).take(24)
    rows = supply(path)
    batches = [indices(rows.next_rows(step)) for step in (1, 2)]
    # Places keep their good row; the bad ones are filled from behind the batch.
    wanted, order = [], list(stream)
    for _ in range(2):
        batch, order = order[:4], order[4:]
        while any(index in BAD for index in batch):
            place = next(place for place, index in enumerate(batch) if index in BAD)
            batch[place] = order.pop(0)
        wanted.append(batch)
    assert [sorted(batch) for batch in batches] == [sorted(batch) for batch in wanted]
    assert all(row.images[0].size == (64, 64) for row in rows.next_rows(3))


@pytest.mark.parametrize(("mixing", "of_the_first"), [("turns", {0, 4}), ("even", {2})])
def test_a_bad_row_of_mixed_batches_gives_its_place_to_one_of_its_data_set(path, mixing, of_the_first):
    good = path.with_name("good.jsonl")
    good.write_text("".join(f'{{"prompt": "good {row}"}}\n' for row in range(12)))
    rows = supply(f"{path},{good}")
    rows.sampler = PromptSampler(rows.dataset.sizes, 4, seed=3, mixing=mixing)
    for step in range(1, 13):
        known = len(rows.dataset.bad.rows)
        ahead = [row.result() for row in rows.look_ahead()]
        batch = indices(rows.next_rows(step))
        assert sum(index < 12 for index in batch) in of_the_first and not {*batch} & {*BAD}
        assert rows.sampler.consumed == 4 * step
        assert len(rows.dataset.bad.rows) > known or indices(ahead) == batch
    assert len(rows.dataset.bad.rows) == len(BAD)


def test_bad_rows_are_counted_once_with_the_step_that_met_them(path):
    rows = supply(path)
    for step in range(1, 9):
        assert len(rows.next_rows(step)) == 4
    bad = rows.dataset.bad
    assert bad.causes == {"image damaged": 3}
    assert {row.found for row in bad.rows.values()} <= {"step 1", "step 2", "step 3"}
    assert all(f"rows.jsonl:{index + 1}: image " in bad.rows[f"{path}:{index + 1}"].message for index in BAD)


def test_a_resumed_run_gets_the_same_rows(path):
    one = supply(path)
    one.next_rows(1)
    two = supply(path)
    two.sampler.load_state_dict(one.sampler.state_dict())
    assert [indices(one.next_rows(step)) for step in (2, 3, 4)] == [indices(two.next_rows(step)) for step in (2, 3, 4)]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"on_bad_row": "error"}, r"rows.jsonl:\d+: image .*cut.jpg is damaged.*--on_bad_row skip"),
        ({"max_bad_share": 0.2}, r"3 of 12 rows left out \(25.0%\): 3 x image damaged; .*max_bad_share = 0.2"),
        ({"max_bad_share": 1.0}, "no usable row is left"),
    ],
)
def test_bad_rows_end_the_run_by_the_policy_or_where_there_are_too_many(path, settings, told):
    rows = supply(path, **settings)
    if told.startswith("no usable"):
        (path.parent / "good.jpg").unlink()
    with pytest.raises(DataError, match=told):
        for step in range(9):
            rows.next_rows(step)


def test_bad_rows_of_before_a_resume_count_in_the_share_that_ends_the_run(path):
    before, after = (supply(path, batch_size=1, max_bad_share=0.2) for _ in range(2))
    while not len(before.dataset.bad):
        before.next_rows(1)
    after.sampler.load_state_dict(before.sampler.state_dict())
    after.go_on([asdict(row) for row in before.dataset.bad.rows.values() if row.found != BadRow.found])
    with pytest.raises(TooManyBadRows, match="3 of 12 rows left out"):
        after.next_rows(2)


def test_the_first_usable_rows_leave_the_order_alone(path):
    rows = supply(path)
    assert indices(rows.first_rows(4, 0)) == [0, 2, 3, 6] and rows.sampler.consumed == 0
    assert len(rows.first_rows(99, 0)) == 9


def test_two_ranks_take_turns_in_the_batch_that_one_rank_gets(path, monkeypatch):
    """Both ranks of a world of two are played one after the other, until each knows what the other reports."""
    alone = indices(supply(path).next_rows(1))
    reports: dict[int, list] = {0: [], 1: []}
    while True:
        batches, before = [], [len(reports[rank]) for rank in (0, 1)]
        for rank in (0, 1):
            rows, heard = supply(path), []

            def gather(mine, rank=rank, heard=heard):
                turn = len(heard)
                heard.append(mine)
                other = reports[1 - rank][turn] if turn < len(reports[1 - rank]) else {}
                return [mine, other] if rank == 0 else [other, mine]

            with monkeypatch.context() as patched:
                patched.setattr(supply_module.collectives, "rank", lambda rank=rank: rank)
                patched.setattr(supply_module.collectives, "world_size", lambda: 2)
                patched.setattr(supply_module.collectives, "all_gather_object", gather)
                rows_of_rank = rows.next_rows(1)
            reports[rank] = heard
            batches.append(indices(rows_of_rank))
        if [len(reports[rank]) for rank in (0, 1)] == before:
            break
    assert [index for pair in zip(*batches) for index in pair] == alone


def test_rows_that_were_loaded_ahead_are_the_same_and_loaded_once(path, monkeypatch):
    plain, ahead = supply(path), supply(path)
    loads = []
    load = ahead.dataset.load
    monkeypatch.setattr(ahead.dataset, "load", lambda index: loads.append(index) or load(index))
    for step in (1, 2, 3):
        before = len(loads)
        ahead.look_ahead()
        ahead.look_ahead()
        assert ahead.sampler.consumed == plain.sampler.consumed
        assert indices(ahead.next_rows(step)) == indices(plain.next_rows(step))
        assert ahead.sampler.consumed == plain.sampler.consumed
        of_this_step = loads[before:]
        assert len(of_this_step) == len(set(of_this_step)) >= 4
