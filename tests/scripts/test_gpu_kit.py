"""The kit for the first visit to a GPU: its shapes are the published ones, a part that fails is told, not lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import torch
import transformers
from forked import run_on_ranks
from safetensors.torch import load_file
from waiting import polls

from lightrft_visual.errors import ConfigError
from lightrft_visual.models.tiny.vlm import build_tokenizer

KIT = Path(__file__).parents[2] / "scripts" / "gpu"
sys.path.insert(0, str(KIT))

import check  # noqa: E402
import measured  # noqa: E402
import node  # noqa: E402
import parts  # noqa: E402
import shapes  # noqa: E402


def language_model(shape):
    return transformers.AutoModelForImageTextToText.from_config(shape(build_tokenizer(shapes.TEXTS)))


@pytest.mark.parametrize(
    ("build", "billions", "within"),
    [
        (lambda: language_model(shapes.qwen_3b), 3.75, 0.05),
        (lambda: language_model(shapes.qwen_7b), 8.29, 0.05),
        (lambda: diffusers.SD3Transformer2DModel(**shapes.SD35_MEDIUM), 2.5, 0.3),
        (lambda: diffusers.WanTransformer3DModel(**shapes.WAN_1_3B), 1.4, 0.1),
    ],
    ids=["3b", "7b", "sd3", "wan"],
)
def test_a_model_has_the_published_number_of_parameters(build, billions, within):
    with torch.device("meta"):
        model = build()
    assert sum(each.numel() for each in model.parameters()) / 1e9 == pytest.approx(billions, abs=within)


def test_the_mixture_of_experts_is_one_with_fused_experts_as_published(tmp_path):
    (file,) = shapes.mixture_of_experts(tmp_path / "moe").glob("*.safetensors")
    saved = load_file(file)
    assert saved["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (32, 128, 128)
    assert saved["model.language_model.layers.1.mlp.experts.down_proj"].shape == (32, 64, 128)


def test_all_parts_together_take_at_most_25_minutes_and_those_of_a_node_20():
    assert sum(parts.LIMITS[name] for name in parts.PARTS) <= 25 * 60
    assert sum(limit for _, limit in node.PARTS.values()) <= 20 * 60


def test_a_card_is_busy_where_any_kernel_runs_and_not_in_ranges_that_are_named():
    from torch.autograd import DeviceType

    def event(start: float, end: float, device=DeviceType.CUDA, named: bool = False) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(time_range=span, device_type=device, is_user_annotation=named)

    kernels = [event(5e6, 7e6), event(0, 2e6), event(1e6, 3e6), event(1e6, 2e6)]
    others = [event(0, 9e6, DeviceType.CPU), event(0, 9e6, named=True)]
    assert measured.busy_seconds([*kernels, *others]) == 5.0
    assert measured.busy_seconds(others) == 0.0


def test_the_peak_is_of_the_card_once_it_is_started_and_of_the_process_without_one(monkeypatch):
    """PyTorch's own counts what a sleeping engine has given back: on an H200 123 GiB where 88 were taken."""
    import deepspeed.accelerator

    asked, free = [], iter((70, 20, 50))

    def memory(rank: int) -> tuple[int, int]:
        asked.append(rank)
        left = next(free, None)
        if left is None:
            taken.over.set()
        return left or 90, 100

    started = iter((False, False))  # before the run has chosen its device nobody asks
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: next(started, True))
    monkeypatch.setenv("LOCAL_RANK", "3")
    card = SimpleNamespace(device_name=lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory)
    host = SimpleNamespace(device_name=lambda: "cpu", max_memory_allocated=lambda: 7)
    for device, peak in ((card, 80), (host, 7)):
        monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda device=device: device)
        taken = measured.MostTaken()
        taken.start()
        taken.join(30)
        assert not taken.is_alive() and taken.peak() == peak
    assert asked == [3] * 4


def test_the_share_of_the_peak_is_that_of_what_is_computed_once(monkeypatch):
    monkeypatch.setattr(parts, "host", lambda: {"device": "NVIDIA H100 80GB HBM3, 79 GiB"})
    measured = {"flops": 989e12, "again": 3e14, "computed_tokens": 300.0, "busy_seconds": 0.5}
    run = object.__new__(parts.Run)
    run.timed, run.measured = [{}, {"time_train": 2.0, "tokens": 500.0}], measured
    rows, busy = dict(parts.work(run)), "share of the train phase in which the card worked"
    peak = "share of peak FLOPs while training (tokens computed once, with attention)"
    assert rows[peak].startswith("50.0%; 494")
    assert rows[busy] == "25%, 0.50 of 2.00 s" and rows["tokens of a step, computed and all"] == "300, 500"
    monkeypatch.setattr(parts, "host", lambda: {"device": "NVIDIA L40S, 44 GiB"})
    assert dict(parts.work(run))[peak].startswith("136.6%; 494")
    run.measured = {"busy_seconds": None}
    assert dict(parts.work(run, "zero_2: ")) == {f"zero_2: {busy}": "no card"}


def test_two_ranks_measure_what_they_tell_each_other(tmp_path, monkeypatch):
    def on_two_ranks(command: list[str], cwd: Path) -> SimpleNamespace:
        run_on_ranks(KIT / "node.py", command[command.index("--rank") :], dict(os.environ), ranks=2, limit=260)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(node.subprocess, "run", on_two_ranks)
    rows = dict(node.bandwidth(tmp_path, "tiny"))
    assert list(rows) == [f"all-reduce of {mib} MiB inside a host, bus bandwidth" for mib in (1, 4)]
    assert all(float(value.removesuffix(" GB/s")) > 0 for value in rows.values())


@pytest.mark.parametrize(
    ("local_ranks", "groups"),
    [
        ([0, 1, 2], {"inside a host": [[0, 1, 2]]}),
        ([0, 1, 0, 1], {"inside a host": [[0, 1], [2, 3]], "between the first ranks of hosts": [[0, 2]],
                        "of all ranks": [[0, 1, 2, 3]]}),
        ([0, 1, 0], {"inside a host": [[0, 1]], "between the first ranks of hosts": [[0, 2]],
                     "of all ranks": [[0, 1, 2]]}),
        ([0, 0], {"between the first ranks of hosts": [[0, 1]], "of all ranks": [[0, 1]]}),
    ],
)  # fmt: skip
def test_bandwidth_is_measured_inside_each_host_and_between_hosts_where_there_are_several(local_ranks, groups):
    assert node.reaches(local_ranks) == groups


def test_the_parts_that_compare_with_one_rank_tell_how_much_of_the_card_was_used(tmp_path, monkeypatch):
    """Runs of several ranks were not profiled, nor long enough for it."""

    def ran(folder, size, name, flags, steps, *others, **more) -> SimpleNamespace:
        metrics = {"loss": 1.0, "grad_norm": 1.0, "reward_mean": 1.0, "time_step": 1.0}
        measured = {"busy_seconds": 0.5 if steps >= parts.PROFILED else None}
        return SimpleNamespace(steps=[metrics], measured=measured, median=lambda name: 1.0, phases=lambda: "")

    monkeypatch.setattr(node, "seeing", ran)
    rows, busy = dict(node.zero(tmp_path, "tiny")), "share of the train phase in which the card worked"
    assert rows[f"zero_2: {busy}"] == rows[f"zero_3: {busy}"] == "50%, 0.50 of 1.00 s"


def test_a_parts_run_of_several_ranks_is_started_on_this_host_or_by_a_list_of_hosts(monkeypatch):
    assert parts.started(["a.py", "b"], 4)[1:] == ["-m", "lightrft_visual", "launch", "--ranks", "4", "a.py", "b"]
    monkeypatch.setenv("GPU_CHECK_HOSTFILE", "/hosts")
    assert parts.started(["a.py"], 4)[1:] == ["-m", "deepspeed.launcher.runner", "--hostfile", "/hosts", "a.py"]


def test_a_part_is_skipped_in_one_line_where_its_package_is_missing(tmp_path, monkeypatch):
    def missing():
        raise ConfigError("engine_type sglang needs the package sglang: pip install it")

    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setattr("lightrft_visual.plugins.sglang.arguments.require_package", missing)
    for part, package in ((parts.liger, "liger_kernel"), (parts.engines_sglang, "sglang")):
        (row,) = part(tmp_path, "tiny")
        assert row[0] == "skipped" and f"needs the package {package}" in row[1]


CUT_OFF = r"""
import pathlib, subprocess, sys
if sys.argv[1] == "slow":
    run = "import pathlib, sys, time\nwhile True:\n    pathlib.Path(sys.argv[1]).touch()\n    time.sleep(0.05)"
    pathlib.Path(sys.argv[2], "slow.rows.json").write_text('[["a", "1"]]')
    subprocess.run([sys.executable, "-c", run, pathlib.Path(sys.argv[2], "alive")], start_new_session=True)
"""


def test_a_part_that_is_cut_off_keeps_its_rows_and_its_runs_end_too(tmp_path, monkeypatch):
    """They would keep the card's memory from the next part. Ranks have sessions of their own."""
    monkeypatch.setattr(check, "HERE", tmp_path)
    monkeypatch.setattr(parts, "host", lambda: {"device": "some card", "torch": "2"})
    (tmp_path / "parts.py").write_text(CUT_OFF)
    result = check.run_part("slow", tmp_path, "real", 4)
    assert result["rows"] == [["a", "1"]] and "cut off after 4 s" in result["error"]
    lines = check.table([result]).splitlines()
    assert lines[0] == "Device: some card. torch 2." and "| slow | a | 1 |" in lines
    check.run_part("quick", tmp_path, "tiny", 60)  # what was tried on tiny shapes is still to be done on a card
    assert check.done_before(tmp_path / "quick.json", "tiny") and not check.done_before(tmp_path / "quick.json", "real")
    assert not check.done_before(tmp_path / "other.json", "tiny")
    assert ends(tmp_path / "alive")


def ends(alive: Path) -> bool:
    """Whether what touches this file does so no longer, soon."""
    for _ in polls(30, 0.3):  # on a busy machine it may be dying still
        alive.unlink(missing_ok=True)
        time.sleep(0.3)
        if not alive.exists():
            return True
    return False


def test_a_kit_that_is_ended_takes_the_run_of_its_part_with_it(tmp_path):
    (tmp_path / "parts.py").write_text(CUT_OFF)
    program = (
        f"import pathlib, sys; sys.path.insert(0, {str(KIT)!r}); import check;"
        "check.HERE = pathlib.Path(sys.argv.pop());"
        "check.parts.LIMITS = {'slow': 300}; check.parts.PARTS = {}; check.main()"
    )
    kit = subprocess.Popen([sys.executable, "-c", program, "--only", "slow", "--out", str(tmp_path), str(tmp_path)])
    assert any((tmp_path / "alive").exists() for _ in polls(120))
    kit.terminate()
    assert kit.wait(60) == 143 and ends(tmp_path / "alive")


def test_parts_of_several_ranks_follow_one_that_fails_and_are_told_in_one_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "HERE", tmp_path)
    monkeypatch.setattr(parts, "host", lambda: {"device": "some card"})
    monkeypatch.setenv("GPU_CHECK_RANKS", "another")
    (tmp_path / "node.py").write_text(
        "import os, sys\nsys.exit(os.environ['GPU_CHECK_RANKS'] != '2' or 3 * (sys.argv[1] == 'bandwidth'))"
    )
    options = ["--ranks", "2", "--size", "tiny", "--only", "bandwidth,zero", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["check.py", *options])
    with pytest.raises(SystemExit, match="True"):
        check.main()
    told = capsys.readouterr().out
    assert "bandwidth: exit code 3; see bandwidth.log" in told and "zero: ok" in told
    assert json.loads((tmp_path / "ranks_2" / "zero.json").read_text())["part"] == "zero"
    assert "| zero | whole part |" in told


def test_a_part_that_one_card_has_done_is_still_to_be_done_by_several_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "HERE", tmp_path)
    monkeypatch.setattr(parts, "host", lambda: {"device": "some card"})
    monkeypatch.setenv("GPU_CHECK_RANKS", "another")
    monkeypatch.setattr(parts, "end_by_signals", lambda: None)
    monkeypatch.setattr(node, "PARTS", {"flow_grpo": node.PARTS["flow_grpo"]})
    (tmp_path / "node.py").touch()
    (tmp_path / "flow_grpo.json").write_text('{"part": "flow_grpo", "size": "tiny", "error": null}')
    monkeypatch.setattr(sys, "argv", ["check.py", "--ranks", "2", "--size", "tiny", "--out", str(tmp_path)])
    for told in ("flow_grpo: ok", "flow_grpo: done before"):
        with pytest.raises(SystemExit, match="False"):
            check.main()
        assert told in capsys.readouterr().out


def test_docs_get_the_table_of_the_asked_size_with_the_device_of_each_result(tmp_path, monkeypatch):
    """Also from a host without a card, which all parts have been brought to."""
    for name, size, device in (("grpo", "real", "H200"), ("resume", "real", "H100"), ("sleep", "tiny", "cpu")):
        done = {"part": name, "size": size, "error": None, "rows": [["what", name]], "seconds": 1}
        (tmp_path / f"{name}.json").write_text(json.dumps(done | {"host": {"device": device, "torch": "2"}}))
    page, ended = tmp_path / "page.md", []
    page.write_text("# Page\n")
    monkeypatch.setattr(parts, "PARTS", dict.fromkeys(("grpo", "resume")))
    monkeypatch.setattr(parts, "end_by_signals", lambda: None)
    monkeypatch.setattr(sys, "argv", ["check.py", "--out", str(tmp_path), "--docs", str(page)])
    monkeypatch.setattr(sys, "exit", ended.append)
    check.main()
    check.main()
    lines = page.read_text().splitlines()
    assert ended == [False, False] and lines.count("| grpo | what | grpo |") == 1 and "cpu" not in page.read_text()
    assert lines.index("Device: H200. torch 2.") < lines.index("Device: H100. torch 2.")


@pytest.mark.parametrize(("prompts", "ranks", "shared"), [(4, 1, 4), (4, 2, 4), (4, 3, 6), (4, 8, 8)])
def test_prompts_of_a_part_are_as_many_as_its_ranks_can_share(prompts, ranks, shared):
    assert parts.shared(prompts, ranks) == shared


def test_a_hangup_ends_the_kit_unless_it_is_ignored_as_under_nohup(monkeypatch):
    for before, taken in ((signal.SIG_DFL, {signal.SIGTERM, signal.SIGHUP}), (signal.SIG_IGN, set())):
        handlers = {}
        with monkeypatch.context() as patch:
            patch.setattr(signal, "getsignal", lambda number, before=before: before)
            patch.setattr(signal, "signal", handlers.__setitem__)
            parts.end_by_signals()
        assert handlers.keys() == taken
        for number, handler in handlers.items():
            with pytest.raises(SystemExit, match=str(128 + number)):
                handler(number, None)


def test_the_parts_are_listed_by_an_interpreter_that_has_nothing_installed(tmp_path):
    (tmp_path / "python3").write_text(f'#!/bin/bash\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    listed = subprocess.run(
        ["bash", KIT / "check.sh", "--ranks", "2", "--list"], capture_output=True, text=True, timeout=60,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert "killed_rank: at most" in listed.stdout and listed.returncode == 0, listed.stderr
