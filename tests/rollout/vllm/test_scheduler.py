"""vLLM's scheduler on a host without accelerator: no prompt is split."""

from types import SimpleNamespace

import pytest


@pytest.mark.parametrize("lists", [1, 2])  # vLLM's answer has grown
@pytest.mark.parametrize("room, freed", [(7, []), (5, ["a"]), (0, ["a"])])
def test_a_prompt_that_vllm_would_split_waits_and_keeps_no_image(monkeypatch, lists, room, freed):
    from vllm.v1.core.sched.scheduler import Scheduler

    from lightrft_visual.rollout.vllm.scheduler import WholePromptScheduler

    theirs = ([0], room, 90, *([1] for _ in range(lists)))
    monkeypatch.setattr(Scheduler, "_try_schedule_encoder_inputs", lambda self, *given, **named: theirs)
    scheduler, seen = WholePromptScheduler.__new__(WholePromptScheduler), []
    scheduler.encoder_cache_manager = SimpleNamespace(free=seen.append)
    found = scheduler._try_schedule_encoder_inputs("a", 3, 7, 100, shift_computed_tokens=0)
    assert found == (theirs if not freed else ([], 0, 100, *([] for _ in range(lists))))
    assert seen == freed
