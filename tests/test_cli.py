"""The command lightrft-visual, without a run."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from waiting import finished

from lightrft_visual import cli, inference, local_ranks
from lightrft_visual.config.leaves import names_of
from lightrft_visual.config.load import CONFIG_DIRS
from lightrft_visual.config.recipes import LayerReader
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.observe import doctor
from lightrft_visual.runtime.presence import TASKS, handled

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}


def command(*arguments: str) -> str:
    done = CliRunner().invoke(cli.cli, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return finished([sys.executable, *words], 300, env=ENVIRONMENT)


def test_a_report_says_its_own_lines_alone(tmp_path):
    done = python("-m", "lightrft_visual", "report", str(tmp_path / "none"))
    assert done.returncode == 1 and not done.stdout and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ") and "none" in done.stderr


INTERRUPTED = """
import runpy, signal, sys


class Finder:
    def find_spec(self, name, path, target=None):
        if name == INSIDE:
            signal.raise_signal(signal.SIGINT)


sys.meta_path.insert(0, Finder())
runpy.run_module("lightrft_visual", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        ("omegaconf", "train grpo"),
        ("lightrft_visual.launch", "train grpo"),
        ("lightrft_visual.local_ranks", "launch --ranks 2 train grpo"),
    ],
)
def test_ctrl_c_while_modules_are_imported_ends_the_command_with_a_line(inside, words):
    done = python("-c", f"INSIDE = {inside!r}\n{INTERRUPTED}", *words.split())
    assert (done.returncode, done.stderr.strip()) == (130, "error: ended by Ctrl-C")


def test_end_of_input_inside_a_verb_is_no_ctrl_c(monkeypatch):
    def ends(**given):
        raise click.Abort from EOFError("ran out of input")

    monkeypatch.setattr(cli, "cli", ends)
    with pytest.raises(EOFError, match="ran out of input"):
        cli.main()


@pytest.mark.parametrize(("words", "code"), [("--help", 0), ("--version", 0), ("doctor --none", 2), ("nothing", 2)])
def test_what_click_answers_itself_has_its_exit_code(words, code):
    done = python("-m", "lightrft_visual", *words.split())
    assert done.returncode == code and bool(done.stderr) == (code > 0) and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ["doctor", "choices", "--help"])
def test_an_output_that_cannot_be_written_is_an_error_in_a_line(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lightrft_visual", words], stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=300, env=ENVIRONMENT,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "error: the output of this program cannot be written: No space left on device\n"


@pytest.mark.parametrize("name", cli.ALGORITHMS)
def test_help_is_25_lines_of_settings_that_exist(name):
    lines = command("train", name, "--help").splitlines()
    assert len(lines) <= 25 and max(map(len, lines[:-1])) <= 120
    flags = {line.split()[0].removeprefix("--") for line in lines if line.startswith("  --")}
    root, defaults = cli.ALGORITHMS[name]
    known = {leaf.name for leaf in names_of(root.schema).leaves.values()}
    assert flags == set(cli.FIRST[root.kind]) and flags <= known and set(defaults) <= known
    assert ("its plan" in lines[-2]) == (name != "sft")


def test_help_of_a_section_help_all_and_choices_say_what_they_are_asked_for():
    said = command("train", "grpo", "--help", "guard")
    assert "--gold_fn" in said and "--pretrain" not in said
    everything = command("train", "grpo", "--help-all")
    assert "--gold_fn" in everything and "--n_samples_per_prompt int (8)" in everything
    assert {"k1", "k2", "k3"} <= {line.split()[0] for line in command("choices", "kl_estimator").splitlines()}
    assert "group_norm" in command("choices", "--advantage_estimator")
    assert "| `group_norm`, `grpo` |" in command("choices")


@pytest.mark.parametrize(
    "words, told",
    [
        ("train grpo --help rollouts", "no section 'rollouts'; did you mean 'rollout'"),
        ("train grop", "no algorithm 'grop'; did you mean 'grpo'"),
        ("plan --config embedded_vl grpo", "no algorithm '--config'; it comes before the settings"),
        ("choices policy_los", "did you mean 'policy_loss'"),
        ("recipes list zzz", "no recipe's name contains 'zzz'"),
        ("recipes copy embedded_vl none/x.yaml", "the recipe cannot be copied: .*No such file"),
    ],
)
def test_what_a_verb_does_not_know_is_answered_with_the_nearest(words, told):
    with pytest.raises(ConfigError, match=told):
        command(*words.split())


WRONG = [
    ("train grpo --n_sample_per_prompt 4", "'n_sample_per_prompt'.*'n_samples_per_prompt'"),
    ("recipes show embeded_vl", "there is no recipe 'embeded_vl'; did you mean 'embedded_vl'"),
    ("eval org/model --data embedded --temprature 0", "did you mean 'temperature'"),
    ("eval org/model --data none.jsonl", "none.jsonl does not exist"),
    ("sample org/model --prompt a --temperature warm", "give 0, which is greedy"),
    ("sample org/model --prompt a --image none.png", "'none.png' does not exist"),
    ("serve-reward --scorer exat", "did you mean 'exact'"),
]


def test_what_is_wrong_with_a_command_is_a_line_and_a_code_before_torch():
    code = (
        f"import sys\nfrom lightrft_visual.cli import main\nfor words in {[words for words, _ in WRONG]}:\n"
        "    sys.argv[1:] = words.split()\n    try:\n        main()\n    except SystemExit as left:\n"
        "        print('left', left.code, 'torch' in sys.modules, file=sys.stderr)\n"
    )
    *said, end = python("-c", code).stderr.split("left 2 False\n")
    assert len(said) == len(WRONG) and not end
    for text, (words, told) in zip(said, WRONG):
        assert re.search(told, text, re.DOTALL), words


def test_recipes_are_listed_shown_and_copied(tmp_path):
    assert "experiment/vl/geometry3k_grpo" in command("recipes", "list").splitlines()
    assert command("recipes", "list", "geometry3k_dapo").splitlines() == ["experiment/vl/geometry3k_dapo"]
    shown = command("recipes", "show", "embedded_vl")
    command("recipes", "copy", "embedded_vl", str(tmp_path / "mine.yaml"))
    assert (tmp_path / "mine.yaml").read_text() == shown
    with pytest.raises(ConfigError, match="is there already"):
        command("recipes", "copy", "embedded_vl", str(tmp_path / "mine.yaml"))


def test_each_recipe_that_is_copied_is_read_where_it_lies(tmp_path):
    reader = LayerReader(names_of(RunConfig), CONFIG_DIRS)
    for number, name in enumerate(command("recipes", "list").splitlines()):
        command("recipes", "copy", name, str(copied := tmp_path / f"{number}.yaml"))
        assert len(reader.read(copied)) == len(reader.read(name)), name


def test_pairs_of_words_are_settings_and_arguments_of_the_functions_in_python_are_told_by_their_flags():
    words = ["--temperature", "0.5", "--engine-type=hf", "--bf16", "--top_k", "3", "seed=4"]
    wanted = {"temperature": "0.5", "engine_type": "hf", "bf16": "true", "top_k": "3", "seed": "4"}
    assert cli._pairs(words) == wanted
    assert cli._pairs(["--no_bf16", "--no-compile", "seed=4"]) == {"bf16": "false", "compile": "false", "seed": "4"}
    inside = [
        "--reward.kwargs.numeric.tolerance",
        "0.1",
        "--engine_kwargs.enforce_eager=false",
        "--data.input_key",
        "5",
    ]
    found = {"reward.kwargs.numeric.tolerance": 0.1, "engine_kwargs.enforce_eager": False, "data.input_key": "5"}
    assert cli._pairs(inside) == found
    for words in (["--model", "x"], ["--prompts=a"]):
        with pytest.raises(ConfigError, match=f"{words[0].partition('=')[0]}: here .*"):
            cli._pairs(words)


TEXTS = {"system_prompt": "Rules: answer # briefly", "prompt_split": "@x", "format": "1e3"}
NUMBERS = {"temperature": ("1e-1", 0.1), "bf16": ("false", False), "sigmas": ("[1.0, 0.5]", [1.0, 0.5])}


@pytest.mark.parametrize(
    ("verb", "config", "read"),
    [("eval", "{}", ()), ("sample", "{}", ("temperature",)), ("sample", "{sampling: {height: 8}}", NUMBERS)],
    ids=["eval", "answers", "draws"],
)
def test_settings_reach_a_run_as_they_were_written_and_a_pipeline_as_numbers(tmp_path, monkeypatch, verb, config, read):
    """Of a pipeline text stays text, too, whatever YAML would make of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.resolved.yaml").write_text(config)
    (tmp_path / "checkpoint-final").mkdir()
    seen = {}
    for name in ("evaluation", "sample"):
        monkeypatch.setattr(inference, name, lambda *_, **settings: seen.update(settings) or {"metrics": {}})
    texts = TEXTS if read is not NUMBERS else {"negative_prompt": "blurry: yes", "prompt_2": "", "sound": "@x"}
    written = texts | {name: text for name, (text, _) in NUMBERS.items()}
    more = ["--prompt", "a"] if verb == "sample" else []
    with suppress(KeyError):  # of conditions that were not measured
        command(
            verb, str(tmp_path / "checkpoint-final"), *more, *(f"--{name}={text}" for name, text in written.items())
        )
    assert {name: seen[name] for name in texts} == texts
    assert {name: seen[name] for name in NUMBERS} == {name: NUMBERS[name][name in read] for name in NUMBERS}


def test_of_several_ranks_the_first_alone_says_what_was_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(inference, "sample", lambda *_, **settings: [["blue"]])
    told = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        told.append(command("sample", str(tmp_path), "--prompt", "which?").strip())
    assert told == ["which? -> blue", ""]


ABSENT = ("torch", "wandb", "num2words")


def test_doctor_says_what_is_missing_and_how_to_get_it(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda name: None if name in ABSENT else "1.0")
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    lines = list(doctor.told())
    assert any(line.startswith("missing  torch: bash scripts/setup.sh") for line in lines)
    assert "without  wandb, for --use_wandb: pip install 'lightrft_visual[wandb]'" in lines
    assert "without  num2words, for the processor of SmolVLM: pip install num2words" in lines
    assert any(line.startswith("device   ") for line in lines)


def test_doctor_of_a_host_with_devices_looks_for_headers_of_python_and_a_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "nvidia_devices", lambda: 2)
    monkeypatch.setattr(doctor, "unseen_devices", lambda: "torch sees none")
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    lines = list(doctor.told())
    how = f"apt-get install python3.{sys.version_info.minor}-dev"
    assert f"without  {tmp_path / 'Python.h'}, for Triton's first kernel: {how}" in lines
    assert "missing  torch sees none" in lines
    (tmp_path / "Python.h").touch()
    assert f"ok       {tmp_path / 'Python.h'}" in list(doctor.told())


RANK = """
import os, signal, sys, time
from pathlib import Path

rank, folder = os.environ["RANK"], Path(sys.argv[1])
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
(folder / f"{rank}_{os.environ['MASTER_PORT']}_{os.environ['WORLD_SIZE']}").touch()
while not got:
    time.sleep(0.01)
time.sleep(0.3 * int(rank))
(folder / f"saved_{rank}").touch()
sys.exit(3 * int(rank))
"""


def test_launch_of_no_rank_is_refused():
    told = CliRunner().invoke(cli.cli, ["launch", "--ranks", "0", "train", "grpo"])
    assert told.exit_code == 2 and "--ranks" in told.output


def test_launch_with_an_unknown_option_of_its_own_starts_nothing(monkeypatch):
    monkeypatch.setattr(local_ranks, "start_ranks", lambda *given: pytest.fail("ranks are started"))
    told = CliRunner().invoke(cli.cli, ["launch", "--rank", "2", "train", "grpo"])
    assert told.exit_code == 2 and "No such option '--rank'. Did you mean '--ranks'?" in told.output


def test_launch_leaves_options_behind_a_script_to_the_script(monkeypatch):
    monkeypatch.setattr(local_ranks, "start_ranks", lambda arguments, ranks: print(*arguments, ranks))
    told = CliRunner().invoke(cli.cli, ["launch", "--ranks", "1", "own.py", "--ranks", "2", "--help"])
    assert told.output == "own.py --ranks 2 --help 1\n"


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "2"}, "SLURM_STEP_NUM_TASKS is 2 here"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE is 2 here"),
        ({"PET_NNODES": "3"}, "PET_NNODES is 3 here"),
        ({"WORLD_SIZE": "8", "PET_NNODES": "1:4", "OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)
def test_launch_on_each_of_several_hosts_is_told_once_that_it_starts_a_run_of_one(there, told, monkeypatch, caplog):
    for name in ("RANK", "WORLD_SIZE", "PET_NNODES", *TASKS):
        monkeypatch.delenv(name, raising=False)
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(local_ranks.subprocess, "Popen", lambda *given, **named: None)
    monkeypatch.setattr(local_ranks, "_codes", lambda processes: [0])
    assert local_ranks.start_ranks(["own.py"], 2) == 0
    assert [text.split(",")[0] for text in caplog.messages] == ([told] if told else [])


def test_launch_ends_when_a_rank_has_failed_though_another_one_is_stopped(tmp_path):
    """A stopped process ends by nothing but SIGKILL."""
    stops = "if os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGSTOP)"
    (tmp_path / "rank.py").write_text(f"import os, signal\n{stops}\nraise SystemExit(3)")
    line = [sys.executable, "-m", "lightrft_visual", "launch", "--ranks", "2", str(tmp_path / "rank.py")]
    ended = subprocess.run(line, env=ENVIRONMENT, timeout=300)
    assert ended.returncode == 3


def test_launch_asks_ranks_to_end_that_go_on_waiting_for_one_that_has_failed(tmp_path, monkeypatch):
    (tmp_path / "rank.py").write_text("import os, time\nassert os.environ['RANK'] == '0'\ntime.sleep(250)")
    monkeypatch.setattr(local_ranks, "GRACE", 1.0)
    assert local_ranks.start_ranks([str(tmp_path / "rank.py")], 2) == 1


@pytest.mark.parametrize(("action", "code"), [(signal.SIG_IGN, 0), (signal.SIG_DFL, 128 + signal.SIGHUP)])
def test_launch_forwards_a_hangup_but_where_it_is_ignored_as_under_nohup(tmp_path, action, code):
    told = "import os, signal, time\nos.kill(os.getppid(), signal.SIGHUP)\n"
    told += "time.sleep(0 if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else 250)"
    (tmp_path / "rank.py").write_text(told)
    with handled(signal.SIGHUP, action):
        assert local_ranks.start_ranks([str(tmp_path / "rank.py")], 1) == code


def test_launch_forwards_a_signal_and_waits_for_every_rank(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    line = [sys.executable, "-m", "lightrft_visual", "launch", "--ranks", "2", str(tmp_path / "rank.py"), str(tmp_path)]
    launcher = subprocess.Popen(line, env=ENVIRONMENT)
    ends = time.monotonic() + 60
    while len(list(tmp_path.glob("*_2"))) < 2 and time.monotonic() < ends:
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=60) == 3
    assert {path.name for path in tmp_path.glob("saved_*")} == {"saved_0", "saved_1"}
    assert len({path.name.split("_")[1] for path in tmp_path.glob("*_2")}) == 1
