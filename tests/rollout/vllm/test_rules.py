"""Banned tokens and FIRE's first token, on tensors, for both of vLLM's model runners."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_rig import environment_restored

from lightrft_visual.rollout.vllm.arguments import prepare_environment
from lightrft_visual.rollout.vllm.rules import FIRST_TOKEN_SCALE, sampling_rules

BANNED = [3, 5]
VOCABULARY = 8


@pytest.fixture(autouse=True, scope="module")
def vllm_environment():
    with environment_restored():
        prepare_environment("float32")
        yield


def params(scale: float | None = None):
    return SimpleNamespace(extra_args=None if scale is None else {FIRST_TOKEN_SCALE: scale})


def expected(logits: torch.Tensor, scales: list[float], banned: list[int] = BANNED) -> torch.Tensor:
    wanted = logits * torch.tensor(scales).unsqueeze(1)
    wanted[:, banned] = -torch.inf
    return wanted


# --- first runner: rows move, and bring the list of their drawn tokens -----------------------------------------------


class FirstRunner:
    def __init__(self, banned=BANNED):
        self.rules = sampling_rules(banned, second_runner=False)(None, torch.device("cpu"), False)

    def update(self, added=(), removed=(), moved=()):
        self.rules.update_state(SimpleNamespace(added=added, removed=removed, moved=moved))

    def apply(self, logits):
        return self.rules.apply(logits.clone())


def test_first_runner_scales_each_rows_first_token_alone():
    runner, logits = FirstRunner(), torch.randn(3, VOCABULARY)
    drawn = [[], [], []]
    runner.update(added=[(0, params(0.1), None, drawn[0]), (1, params(), None, drawn[1]), (2, params(2.0), None, [])])
    assert torch.equal(runner.apply(logits), expected(logits, [0.1, 1, 2]))
    drawn[0].append(7)
    assert torch.equal(runner.apply(logits), expected(logits, [1, 1, 2]))
    runner.update(removed=[2])
    runner.update(None or ())
    assert torch.equal(runner.apply(logits), expected(logits, [1, 1, 1]))


def test_first_runner_follows_rows_that_move():
    from vllm.v1.sample.logits_processor import MoveDirectionality

    runner, logits = FirstRunner([]), torch.randn(3, VOCABULARY)
    runner.update(added=[(0, params(0.1), None, []), (2, params(0.5), None, [])])
    runner.update(moved=[(0, 2, MoveDirectionality.SWAP)])
    assert torch.equal(runner.apply(logits), expected(logits, [0.5, 1, 0.1], []))
    runner.update(removed=[0], moved=[(2, 0, MoveDirectionality.UNIDIRECTIONAL)])
    assert torch.equal(runner.apply(logits), expected(logits, [0.1, 1, 1], []))


def test_processes_that_vllm_starts_are_given_the_rules():
    for second_runner in (False, True):
        rules = sampling_rules(BANNED, second_runner)
        again = pickle.loads(pickle.dumps({"logits_processors": [rules]}))["logits_processors"][0]
        assert again is not rules and again.__mro__[1:] == rules.__mro__[1:] and again.made_by[1] == (BANNED,)
    runner, logits = FirstRunner(), torch.randn(2, VOCABULARY)
    runner.rules = pickle.loads(pickle.dumps(type(runner.rules)))(None, torch.device("cpu"), False)
    assert torch.equal(runner.apply(logits), expected(logits, [1, 1]))


# --- second runner: requests keep a slot, rows are in any order ------------------------------------------------------


class SecondRunner:
    """prompt_len by slot; a step is [(slot, position of the token that was fed)]."""

    def __init__(self, prompt_len: list[int], banned=BANNED):
        lengths = SimpleNamespace(gpu=torch.tensor(prompt_len, dtype=torch.int32), np=np.array(prompt_len, np.int32))
        states = SimpleNamespace(device=torch.device("cpu"), max_num_reqs=len(prompt_len), prompt_len=lengths)
        self.rules = sampling_rules(banned, second_runner=True)(None, states)

    def step(self, logits, rows: list[tuple[int, int]]):
        self.rules.apply_staged_writes()
        slots = [slot for slot, _ in rows]
        context = SimpleNamespace(
            expanded_idx_mapping=torch.tensor(slots, dtype=torch.int32),
            idx_mapping_np=np.unique(np.array(slots, np.int32)),
            pos=torch.tensor([position for _, position in rows]),
        )
        return self.rules.apply(logits.clone(), context)


def test_second_runner_scales_each_requests_first_token_alone():
    runner, logits = SecondRunner([4, 2, 6]), torch.randn(3, VOCABULARY)
    assert [runner.rules.add_request(slot, params(scale)) for slot, scale in enumerate((0.1, None, 2.0))] == [True] * 3
    # Rows of slots 2, 0, 1: the end of a prompt, of a piece of a prompt, and of a prompt.
    assert torch.equal(runner.step(logits, [(2, 5), (0, 2), (1, 1)]), expected(logits, [2, 1, 1]))
    assert torch.equal(runner.step(logits, [(0, 3), (2, 6), (1, 2)]), expected(logits, [0.1, 1, 1]))
    assert torch.equal(runner.step(logits[:2], [(0, 4), (2, 7)]), expected(logits[:2], [1, 1]))


def test_second_runner_forgets_what_had_the_slot_before_and_leaves_a_request_alone_that_asks_for_nothing():
    runner, logits = SecondRunner([4]), torch.randn(1, VOCABULARY)
    runner.rules.add_request(0, params(0.1))
    assert torch.equal(runner.step(logits, [(0, 3)]), expected(logits, [0.1]))
    runner.rules.add_request(0, params())
    assert torch.equal(runner.step(logits, [(0, 3)]), expected(logits, [1]))
    runner = SecondRunner([4], banned=[])
    assert [runner.rules.add_request(0, params(scale)) for scale in (None, 0.5)] == [False, True]


def test_second_runner_keeps_its_rules_where_what_was_made_with_the_model_is_lost():
    """An engine that sleeps without its weights (level 2): vLLM 0.32 makes these rules in the weights' memory."""
    runner, logits = SecondRunner([4, 2]), torch.randn(2, VOCABULARY)
    for made in vars(runner.rules).values():
        if isinstance(made, torch.Tensor):
            made.zero_()
    for slot, scale in enumerate((0.1, None)):
        runner.rules.add_request(slot, params(scale))
    assert torch.equal(runner.step(logits, [(0, 3), (1, 1)]), expected(logits, [0.1, 1]))
