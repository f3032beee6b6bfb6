"""Lines and tables in a log file; nothing from text can drive the terminal."""

from __future__ import annotations

import io

from lightrft_visual.observe.console import RunConsole, clip_text, short, step_line


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
    for step in range(1, 4):
        console.step(step, {"loss": 1.0})
    console.evaluation(3, {"eval_reward": 0.5, "step": 3})
    console.close()
    assert stream.getvalue() == "step 2/10  loss 1\nevaluation at step 3: eval_reward 0.5\n"


def test_the_last_step_is_always_shown():
    console, stream = lines(line_every=7)
    console.step(10, {})
    assert "step 10/10" in stream.getvalue()


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


def test_silent_on_other_ranks():
    stream = io.StringIO()
    console = RunConsole(10, stream=stream, active=False)
    console.step(1, {"loss": 1.0})
    console.message("hello")
    console.samples(10, [{"prompt": "p", "reward": 1.0}])
    console.close()
    assert stream.getvalue() == ""


def test_long_text_is_cut():
    assert len(clip_text("x" * 1000)) == 300 and clip_text("a\n b") == "a b"
