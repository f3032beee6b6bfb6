"""Lines and tables in a log file; nothing from text can drive the terminal."""

import io
import os
import sys

import pytest
from rich.console import Console

from lightrft_visual.config.load import _print_once
from lightrft_visual.observe.console import RunConsole, clip_text, short, step_line
from lightrft_visual.runtime.files import Escaped


def test_one_line_a_step():
    metrics = {
        "reward_mean": 0.53125, "reward_std": 0.44, "loss": 1e-5, "grad_norm": float("nan"), "time_generate": 0.5,
        "time_train": 0.25, "time_step": 1.0,
    }  # fmt: skip
    line = step_line(12, 150, metrics)
    assert line == "step 12/150  reward 0.5312±0.44  loss 1.0e-05  grad nan  1.00s (generate 50% train 25%)"
    assert step_line(3, None, {}) == "step 3"
    assert short(123456.0) == "1.2e+05" and short(0.0) == "0"


def lines(**options):
    stream = io.StringIO()
    console = RunConsole(10, stream=stream, active=True, **options)
    return console, stream


def test_plain_lines_without_a_terminal():
    console, stream = lines(line_every=2)
    for step in (1, 2, 3, 10):  # the last step is always shown
        console.step(step, {"loss": 1.0})
    console.evaluation(3, {"eval_reward": 0.5, "step": 3})
    console.close()
    assert (
        stream.getvalue() == "step 2/10  loss 1  0:00 left\nstep 10/10  loss 1\nevaluation at step 3: eval_reward 0.5\n"
    )


def test_a_step_says_its_components_speed_and_the_time_left(monkeypatch):
    clock = iter((0.0, 10.0, 12.0, 14.0, 130.0))
    monkeypatch.setattr("lightrft_visual.observe.console.time.monotonic", lambda: next(clock))
    console, stream = lines()
    metrics = {
        "reward_mean": 0.5, "reward/format": 1.0, "reward/exact": 0.25, "reward/time": 3.0,
        "reward/exact/failures": 0.0,
        "tokens": 500.0, "time_step": 2.0,
    }  # fmt: skip
    for step in (1, 2, 10):
        console.step(step, metrics)
    console.done(10, {"eval_reward": 0.954}, {"eval_reward": 0.395}, {"model": "run/checkpoint-final"})
    shown = stream.getvalue().splitlines()
    assert shown[0] == "step 1/10  reward 0.5  format 1  exact 0.25  250 tok/s  2.00s"
    assert shown[1].endswith("2.00s  0:16 left") and shown[2].endswith("2.00s")
    assert shown[3] == "done: 10 steps in 2:10; eval reward 0.395 -> 0.954; model run/checkpoint-final"


def test_the_bar_tells_the_time_left_that_the_line_tells_also_of_slow_steps(monkeypatch):
    stream, clock = io.StringIO(), iter((0.0, 40.0, 80.0, 120.0))
    stream.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("lightrft_visual.observe.console.time.monotonic", lambda: next(clock))
    console = RunConsole(83, stream=stream, active=True)
    for step in (1, 2, 3):
        console.step(step, {})
    shown = io.StringIO()
    Console(file=shown, width=120).print(console._progress.get_renderable())
    console.close()
    assert "3/83" in shown.getvalue() and shown.getvalue().rstrip().endswith("53:20 left")
    assert "step 3/83  53:20 left" in stream.getvalue()


def test_a_run_that_never_begins_leaves_the_terminal_alone_and_one_that_does_keeps_its_cursor(monkeypatch):
    """As of evaluations and samples, which nothing closes the bar behind."""
    stream, before = io.StringIO(), sys.stdout
    stream.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    console = RunConsole(83, stream=stream, active=True)
    assert stream.getvalue() == "" and sys.stdout is before
    console.begin(2)
    shown = stream.getvalue()
    console.close()
    assert "2/83" in stream.getvalue() and shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert sys.stdout is before


def test_the_last_line_of_a_resumed_run_tells_the_steps_that_its_time_is_of():
    console, stream = lines()
    console.begin(3)
    console.done(4, {}, {}, {})
    console.done(10, {}, {}, {})
    assert stream.getvalue() == "done: step 4, 1 step in 0:00\ndone: step 10, 7 steps in 0:00\n"


def test_samples_are_shown_cut_and_without_control_tokens():
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>how many?<|im_end|>\n<|im_start|>assistant"
    assert clip_text(text) == "user how many? assistant"
    assert clip_text("a <| b |> c") == "a <| b |> c"
    assert len(clip_text("x" * 1000)) == 300 and clip_text("a\n b") == "a b"


def test_table_shows_a_good_and_a_bad_sample():
    console, stream = lines(table_every=5)
    records = [
        {"prompt": "how [bold]many[/bold]?", "response": "two", "reward": 1.0, "reference": "2"},
        {"prompt": "which?", "response": "\x1b[31mred\x07", "reward": 0.0, "reference": None},
    ]
    console.samples(4, records)
    assert stream.getvalue() == ""
    console.samples(5, records)
    text = stream.getvalue()
    assert "good" in text and "bad" in text and "[bold]" in text
    assert "\x1b[31mred" not in text and "\x07" not in text


def test_an_evaluation_is_one_line_whatever_control_characters_its_labels_hold():
    run, file = lines()
    run.evaluation(0, {"eval_reward/a\x1b[31mRED\x07\rX\nnext": 1.0})
    assert file.getvalue() == "evaluation at step 0: eval_reward/a\\x1b[31mRED\\x07\\rX\\nnext 1\n"


def test_silent_on_other_ranks():
    stream = io.StringIO()
    console = RunConsole(10, stream=stream, active=False)
    console.step(1, {"loss": 1.0})
    console.message("hello")
    console.samples(10, [{"prompt": "p", "reward": 1.0}])
    console.close()
    assert stream.getvalue() == ""


def test_a_screen_whose_encoding_lacks_a_character_shows_its_escape(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii", write_through=True))
    RunConsole(1, active=True).message("größe")
    _print_once("größe")
    assert shown.getvalue() == b"gr\\xf6\\xdfe\n" * 2


@pytest.mark.parametrize("within", [lambda stream: stream, Escaped], ids=["a stream", "the screen"])
def test_an_output_that_nobody_reads_any_more_is_remembered_and_costs_no_step(within):
    reader, number = os.pipe()
    stream = open(number, "w")
    console = RunConsole(10, stream=within(stream), active=True)
    console.message("step 1")
    assert console.output.lost is None and os.read(reader, 100) == b"step 1\n"
    os.close(reader)
    console.message("step 2")
    console.message("step 3")
    assert str(console.output.lost) == "the output of this program cannot be written: Broken pipe"
    with pytest.raises(BrokenPipeError):  # by what it still holds
        stream.close()
