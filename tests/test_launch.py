"""How a run ends that was not done."""

from __future__ import annotations

import os

import pytest

from lightrft_visual import launch
from lightrft_visual.errors import RewardError
from lightrft_visual.strategy import watchdog


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def ended(monkeypatch):
    def end(code):
        raise Ended(code)

    for name in ("bound_spinning", "quiet_libraries"):
        monkeypatch.setattr(launch, name, lambda: None)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(watchdog, "stage", lambda: "reward")

    def run(error):
        def build():
            raise error

        with pytest.raises(Ended) as caught:
            launch._run(build)
        return caught.value.args[0]

    return run


@pytest.mark.parametrize("code", [0, None, 3])
def test_leaving_from_inside_a_run_is_a_failure(ended, code, capsys):
    assert ended(SystemExit(code)) == 1
    assert f"error: sys.exit({code!r}) was called before the run was done (stage reward)" in capsys.readouterr().err


def test_the_stage_stands_in_the_first_line(ended, capsys):
    assert ended(RewardError("score raised KeyError: 'x'\n  File \"mine.py\", line 3")) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == ["error: RewardError: score raised KeyError: 'x' (stage reward)", '  File "mine.py", line 3']
