"""report.html is rewritten as a run goes, and never ends it."""

import logging

import pytest

from lightrft_visual.observe.recorder import RunRecorder
from lightrft_visual.observe.report import page as module
from lightrft_visual.observe.report.page import ReportWriter


def test_the_report_is_written_as_the_run_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EVERY", 2)
    run, report = RunRecorder(tmp_path), ReportWriter(tmp_path, active=True)
    run.log_step(1, {"reward_mean": 0.5})
    assert report.next_step == 2 and not (tmp_path / "report.html").exists()
    run.log_step(2, {"reward_mean": 0.6})
    report.write_due(2)
    assert "reward" in (tmp_path / "report.html").read_text()
    run.log_eval(2, {"eval_reward": 0.123})
    assert report.write() == tmp_path / "report.html"
    assert "0.123" in (tmp_path / "report.html").read_text()


def test_reports_become_rarer_as_a_run_grows(tmp_path, monkeypatch):
    written = []
    report = ReportWriter(tmp_path, active=True)
    monkeypatch.setattr(module, "write_report", lambda *arguments: written.append(step))
    for step in range(1, 2001):
        if step >= report.next_step:
            report.write_due(step)
    assert written[:4] == [50, 100, 150, 200]
    assert written[-1] - written[-2] == int(written[-2] * 1.1) - written[-2] > 100
    assert len(written) < 25


def test_each_evaluation_of_a_short_run_is_on_the_page_and_fewer_of_a_long_one(tmp_path, monkeypatch):
    written = []
    report = ReportWriter(tmp_path, active=True)
    monkeypatch.setattr(module, "write_report", lambda *arguments: written.append(step))
    for step in (0, 50, 50, 999, 1000, 1099, 1100, 1100, 1209, 1210):
        report.write_news(step)
    assert written == [0, 50, 50, 999, 1099, 1209]


def test_a_report_that_fails_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    def fail(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(module, "write_report", fail)
    with caplog.at_level(logging.ERROR):
        assert ReportWriter(tmp_path, active=True).write() is None
    assert "report.html could not be written" in caplog.text and "ZeroDivisionError" in caplog.text


def test_an_inactive_writer_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "write_report", lambda *arguments: pytest.fail("written"))
    report = ReportWriter(tmp_path, active=False)
    report.write_due(1)
    assert report.write() is None
