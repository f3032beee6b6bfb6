"""What the loop does beside its steps."""

from __future__ import annotations

import gc

import pytest

from lightrft_visual.trainer.loop import start_up_objects_aside


def test_the_collector_skips_what_start_up_made_until_the_steps_end():
    with pytest.raises(RuntimeError), start_up_objects_aside():
        assert gc.get_freeze_count() > 0
        raise RuntimeError("a stage failed")
    assert gc.get_freeze_count() == 0
