"""The batch after the present one: prepared beside the step, with the results, order and errors of one that is not."""

import threading
from dataclasses import replace

import pytest
import row_files
import torch
from row_files import BAD, supply

from lightrft_visual.data.bad_rows import LONG_PROMPT
from lightrft_visual.data.prompts import RowChecks
from lightrft_visual.data.sampler import PromptSampler
from lightrft_visual.errors import DataError
from lightrft_visual.experience.rollouts import PromptBatch, PromptFeatures
from lightrft_visual.trainer.vl.parts import PromptSource

path, SIZE = row_files.twelve_rows, 4


def make(rows, ids) -> PromptBatch:
    texts = [row.prompt[0]["content"][-1]["text"] for row in rows]
    return PromptBatch.of(texts, [row.images for row in rows], ids=ids)


class Preparing:
    """`features` that notes its calls and refuses the prompt of a number."""

    def __init__(self, refused: int = -1) -> None:
        self.refused, self.calls, self.threads, self.parallel = refused, [], [], []

    def __call__(self, batch: PromptBatch) -> list[PromptFeatures]:
        self.calls.append(batch.prompts)
        self.threads.append(threading.current_thread().name)
        self.parallel.append(torch.get_num_threads())
        if self.refused in batch.ids.tolist():
            raise DataError(f"number {self.refused} is refused")
        return [PromptFeatures(text, [1], int(number)) for text, number in zip(batch.prompts, batch.ids)]


def prompts_of(path, features, keeps_ready=False, size=SIZE, **settings) -> PromptSource:
    return PromptSource(supply(path, size, **settings), make, features, keeps_ready)


def ids(number: int) -> torch.Tensor:
    return torch.arange(SIZE) + SIZE * number


def test_batches_are_the_same_and_the_sampler_counts_only_those_taken(path):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    plain, features = prompts_of(path, None), Preparing()
    ahead, prepared = prompts_of(path, features), 0
    for number in range(7):
        ahead.prepare_next()
        ahead.prepare_next()  # one batch ahead, whoever asks
        assert ahead.supply.sampler.state_dict() == plain.supply.sampler.state_dict()
        one, two = plain.next(number), ahead.next(number)
        assert one.prompts == two.prompts and torch.equal(one.ids, two.ids) and one.prepared is None
        if two.prepared is not None:
            prepared += 1
            assert [(each.text, each.group_id) for each in two.prepared] == list(zip(one.prompts, one.ids.tolist()))
            assert two.select([1]).prepared is None
    # Where a row turns out bad, its batch is not prepared ahead; once all are known, every batch is.
    assert 7 - len(BAD) <= prepared == len(features.calls) < 7
    assert ahead.supply.dataset.bad.causes == plain.supply.dataset.bad.causes == {"image damaged": 3}
    # Beside the step, to which parallel operations are left.
    assert set(features.parallel) == {1} and all(name.startswith("prompts") for name in features.threads)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)


def test_an_error_is_raised_by_the_batch_it_belongs_to(path):
    order = prompts_of(path, None)
    batches = [order.next(number).prompts for number in range(5)]
    ahead, strict = prompts_of(path, Preparing(refused=14)), prompts_of(path, Preparing(), on_bad_row="error")
    for number in range(3):
        ahead.prepare_next()
        assert ahead.next(number).prompts == batches[number]
    ahead.prepare_next()
    with pytest.raises(DataError, match="number 14 is refused"):
        ahead.next(3)
    assert ahead.next(4).prompts == batches[4]
    taken, stream = 0, PromptSampler([12], 1, seed=3).take(12)
    with pytest.raises(DataError, match="is damaged"):  # of the twelve rows three are bad
        for number in range(3):
            strict.prepare_next()
            strict.next(number)
            taken += SIZE
    assert not set(stream[:taken]) & set(BAD) and set(stream[taken : taken + SIZE]) & set(BAD)


def test_batches_are_numbered_over_the_run_and_a_resumed_source_goes_on(path):
    source, again, begun = prompts_of(path, None), prompts_of(path, None), prompts_of(path, Preparing())
    first = source.next(0)
    again.load_state_dict(source.state_dict())
    assert torch.equal(first.ids, ids(0)) and source.taken == again.taken == SIZE
    second, resumed = source.next(1), again.next(1)
    assert torch.equal(second.ids, ids(1)) and torch.equal(resumed.ids, ids(1))
    assert second.prompts == resumed.prompts != first.prompts
    begun.prepare_next()  # and a resume moves the source behind what was begun
    begun.load_state_dict(begun.state_dict() | {"taken": SIZE})
    batch = begun.next(0)
    assert batch.prepared is None and torch.equal(batch.ids, ids(1))
    larger = prompts_of(path, None, size=SIZE + 1)
    larger.load_state_dict(source.state_dict())  # of two batches
    assert larger.next(2).ids.tolist() == list(range(2 * SIZE, 3 * SIZE + 1))  # and none of theirs again


def test_bad_rows_met_before_a_checkpoint_count_in_the_run_that_resumes_from_it(path):
    whole, counts, states = prompts_of(path, None, size=1), [], []
    for number in range(12):
        whole.next(number)
        counts.append(len(whole.supply.dataset.bad))
        states.append(whole.state_dict())
    begun = next(number for number, count in enumerate(counts) if count == 1)
    resumed = prompts_of(path, None, size=1)
    resumed.load_state_dict(states[begun])
    assert len(resumed.supply.dataset.bad) == counts[begun]  # and not those that were found later
    for number in range(begun + 1, 12):
        resumed.next(number)
        assert len(resumed.supply.dataset.bad) == counts[number]
    assert resumed.supply.dataset.bad.rows == whole.supply.dataset.bad.rows


def test_bad_rows_that_settings_may_have_made_good_since_or_that_end_the_run_are_met_again(path):
    begun = prompts_of(path, None)
    for number in range(3):
        begun.next(number)
    damaged, *long = begun.supply.dataset.bad.rows
    for name in long:
        begun.supply.dataset.bad.rows[name] = replace(begun.supply.dataset.bad.rows[name], cause=LONG_PROMPT)
    state = begun.state_dict()
    for limit, policy, known in ((None, "skip", {damaged, *long}), (9, "skip", {damaged}), (None, "error", set())):
        resumed = prompts_of(path, None, on_bad_row=policy, on_long_prompt=policy)
        resumed.supply.dataset.checks = RowChecks(prompt_max_len=limit)
        resumed.load_state_dict(state)
        assert {*resumed.supply.dataset.bad.rows} == known and len(resumed.supply._known) == len(known)


@pytest.mark.parametrize("size", [4, 5, 6])
def test_a_resumed_source_that_has_met_bad_rows_goes_on_with_the_same_prompts_in_the_same_order(path, size):
    whole = prompts_of(path, None, size=size)
    states = [whole.next(number) and whole.state_dict() for number in range(4)]
    wanted = [whole.next(number).prompts for number in range(4, 7)]
    for begun, state in enumerate(states, start=1):
        resumed = prompts_of(path, None, size=size)
        resumed.load_state_dict(state)
        assert [resumed.next(number).prompts for number in range(begun, 7)][4 - begun :] == wanted


def test_a_further_batch_of_a_step_is_prepared_where_makers_may_ask_for_it(path):
    features = Preparing()
    source = prompts_of(path, features, keeps_ready=True)
    taken = [source.next(0), source.next_again(), source.next_again()]
    assert [batch.ids.tolist() for batch in taken] == [ids(number).tolist() for number in range(3)]
    assert source._begun is not None and source._begun.ids.tolist() == ids(3).tolist()
    assert prompts_of(path, Preparing()).state_dict()["taken"] == 0
