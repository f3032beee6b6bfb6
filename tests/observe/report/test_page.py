"""report.html: complete in itself, escaped, small, and there for partial and damaged runs."""

import json
import math
import os
import random
import re
import shutil
import statistics
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from observe_runs import make_run, scene
from PIL import Image

from lightrft_visual.errors import DataError
from lightrft_visual.observe.recorder import RunRecorder
from lightrft_visual.observe.report import examples
from lightrft_visual.observe.report.curves import RESPONSES, reward_section, training_section
from lightrft_visual.observe.report.data import RunData, load_run, phase_times, taken_together
from lightrft_visual.observe.report.examples import turns
from lightrft_visual.observe.report.page import (
    MAX_BYTES,
    comparison_section,
    distinct_names,
    duration,
    printable,
    script,
    write_report,
)

HOSTILE = [
    "<script>alert(1)</script>",
    "</td></table><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "<|im_start|>user\n<script>alert(2)</script><|image_pad|><|im_end|>",
    "'; javascript:alert(1) //",
    "\x00\x1b[31m\ud800 ends",
    "<!-- <!DOCTYPE html> ]]> &lt;b&gt;",
    "<iframe src=https://example.com></iframe><link rel=stylesheet href=//example.com>",
]


class Elements(HTMLParser):
    """Collects the elements of a page and what they refer to."""

    def __init__(self, path):
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, name, attributes):
        self.names.append(name)
        for key, value in attributes:
            if key in ("src", "href", "srcset", "action", "data", "poster", "xlink:href"):
                self.links.append(value or "")
            if key.startswith("on"):
                self.handlers.append(key)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    make_run(folder)
    return folder


def test_the_page_is_complete_in_itself(run_folder, tmp_path):
    path = write_report([run_folder], tmp_path / "report.html")
    page = Elements(path)
    assert all(link.startswith(("data:image/", "#")) for link in page.links)
    assert not page.handlers and page.names.count("script") == 1
    text = path.read_text()
    code, digest = script()
    own = text.replace(code, "")
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{digest}'" in own
    assert "@import" not in own and "url(" not in own and "http" not in own.replace("http-equiv", "")
    assert len(own) < 1_000_000 and len(code) < 1_500_000


def test_every_part_is_there(run_folder, tmp_path):
    text = write_report([run_folder], tmp_path / "report.html").read_text()
    for title in ("Reward", "Evaluation", "Examples", "Training", "Time per phase", "Set-up"):
        assert f"<h2>{title}</h2>" in text
    for part in ("Best", "Worst", "At random", "Evaluation at step 30", "Evaluation at step 0", "Contact sheet at 30"):
        assert part in text
    assert text.count("data-chart=") >= 5 and text.count('src="data:image/') >= 9
    assert "How many? (1)" in text and "exact 1" in text and "torch" in text
    assert "topsecretvalue" not in text


def test_rows_left_out_of_the_data_are_counted_by_cause(tmp_path):
    make_run(tmp_path / "run")
    rows = [("a:1", "file missing", "start"), ("a:2", "image damaged", "step 3"), ("a:9", "image damaged", "step 7")]
    lines = [
        json.dumps({"source": source, "cause": cause, "message": f"{source}: <b>it</b>", "found": found})
        for source, cause, found in rows
    ]
    (tmp_path / "run" / "bad_rows.jsonl").write_text("\n".join([*lines, '{"source": "torn']))
    text = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "<h2>Rows left out of the data</h2>" in text
    cells = re.findall(r"<tr><td>([^<]*)</td><td class=.n.>(\d+)</td><td>([^<]*)</td><td>([^<]*)</td></tr>", text)
    assert cells == [
        ("image damaged", "2", "step 3, step 7", "a:2: &lt;b&gt;it&lt;/b&gt;"),
        ("file missing", "1", "start", "a:1: &lt;b&gt;it&lt;/b&gt;"),
    ]
    (tmp_path / "run" / "bad_rows.jsonl").unlink()
    assert "Rows left out" not in write_report([tmp_path / "run"], tmp_path / "report.html").read_text()


def test_text_cannot_inject_markup(tmp_path):
    run = RunRecorder(tmp_path / "run")
    plain = RunRecorder(tmp_path / "plain")
    fields = ("prompt", "response", "reference")
    for recorder, texts in ((run, HOSTILE), (plain, [f"x{index}" for index in range(len(HOSTILE))])):
        recorder.log_step(1, dict.fromkeys(texts[:5], 1.0))
        recorder.log_eval(1, {texts[1]: 1.0})
        records = [
            {**dict.fromkeys(fields, text), "reward": 1.0, "components": {text: 1.0}, "images": texts[6:]}
            for text in texts[:6]
        ]
        (recorder.folder / "rollouts").mkdir()
        lines = [json.dumps(record) for record in records]
        (recorder.folder / "rollouts" / "eval_step_000001.jsonl").write_text("\n".join(lines))
        (recorder.folder / "env.json").write_text(json.dumps({"command": texts, "versions": {texts[0]: texts[1]}}))
        (recorder.folder / "config.resolved.yaml").write_text(json.dumps({texts[0]: texts[2]}))
    hostile = Elements(write_report([run.folder], tmp_path / "hostile.html", title=HOSTILE[0]))
    harmless = Elements(write_report([plain.folder], tmp_path / "plain.html", title="x"))
    allowed = {"span", "div"}  # labels of special tokens and turns
    assert [n for n in hostile.names if n not in allowed] == [n for n in harmless.names if n not in allowed]
    assert not hostile.handlers and hostile.links == harmless.links


def test_partial_and_damaged_runs(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "env.json").write_text("{}")
    assert "Nothing has been recorded yet" in write_report([empty], tmp_path / "e.html").read_text()
    (empty / "metrics.csv").write_text("step,loss\n1,0.5\n2,na")
    (empty / "env.json").write_text("{torn")
    (empty / "config.resolved.yaml").write_text("a: [")
    (empty / "rollouts").mkdir()
    (empty / "rollouts" / "eval_step_000001.jsonl").write_text('{"prompt": 5, "reward": "x"}\n[1]\n{"torn')
    (empty / "rollouts" / "step_000001.jsonl").write_text("")
    (empty / "eval_epoch_000001").mkdir()
    (empty / "eval_epoch_000001" / "contact_sheet.png").write_bytes(b"no picture")
    text = write_report([empty], tmp_path / "e.html").read_text()
    assert "loss" in text and "no valid reward" in text and "image not shown" in text


@pytest.mark.parametrize(
    ("rewards", "shown"), [((math.nan, 0.5, 0.25), "0.5 at step 1"), ((math.nan,), "nan at step 0")]
)
def test_the_highest_evaluation_is_that_of_the_finite_ones_where_there_are_any(tmp_path, rewards, shown):
    run = RunRecorder(tmp_path)
    for step, reward in enumerate(rewards):
        run.log_eval(step, {"eval_reward": reward})
    assert shown in write_report([tmp_path], tmp_path / "report.html").read_text()


def test_a_falling_loss_is_a_gain_and_its_lowest_value_the_best(tmp_path):
    for name in ("a", "b"):
        run = RunRecorder(tmp_path / name)
        for step, loss in enumerate((6.0, 3.5, 4.0)):
            run.log_eval(step, {"eval_loss": loss, "eval_drift": step, "eval_diversity": step, "eval_reward_x": step})
    text = write_report([tmp_path / "a"], tmp_path / "report.html").read_text()
    assert '<td class="n up">-2</td>' in text and "lowest 3.5 at step 1" in text and "evaluation loss" in text
    assert [text.count(f'<td class="n{color}">+2</td>') for color in (" down", "", " up")] == [1, 1, 1]
    text = write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "report.html").read_text()
    assert text.count("6.000 → 4.000") == 2 and ">greedy</th>" not in text


def test_images_outside_the_run_are_not_read(tmp_path):
    scene(1).save(tmp_path / "outside.png")
    rollouts = tmp_path / "run" / "rollouts"
    rollouts.mkdir(parents=True)
    names = ["../../outside.png", str(tmp_path / "outside.png")]
    record = {"prompt": "p", "reward": 1.0, "images": names}
    (rollouts / "eval_step_000001.jsonl").write_text(json.dumps(record))
    text = write_report([tmp_path / "run"], tmp_path / "r.html").read_text()
    assert 'src="data:image/' not in text and text.count("image not shown") == 2


def test_comparison_of_runs(run_folder, tmp_path):
    make_run(tmp_path / "second", steps=20, seed=2)
    text = write_report([run_folder, tmp_path / "second"], tmp_path / "both.html").read_text()
    assert "<h2>Comparison</h2>" in text and "train.seed" in text and "reward.hf_token" not in text
    assert text.count(">first</span>") > 3 and text.count(">second</span>") > 3
    make_run(tmp_path / "other" / "first", steps=1)
    text = write_report([run_folder, tmp_path / "other" / "first"], tmp_path / "names.html").read_text()
    assert f"{run_folder.parent.name}/first" in text and "other/first" in text


def test_large_runs_stay_below_ten_megabytes(tmp_path):
    run = RunRecorder(tmp_path / "run")
    names = [f"figure_{index}" for index in range(150)]
    rows = [",".join(["step", *names])]
    rng = random.Random(0)
    rows += [",".join([str(step), *(f"{rng.random():.6f}" for _ in names)]) for step in range(600)]
    (run.folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    noise = Image.effect_noise((512, 512), 100).convert("RGB")
    for step in range(3):
        records = [
            {"prompt": "<" * 50_000, "response": "&" * 50_000, "reward": i, "images": [noise.rotate(i + 9 * step)] * 4}
            for i in range(9)
        ]  # fmt: skip
        run.save_rollouts(step, records, "eval_step")
    path = write_report([run.folder], tmp_path / "report.html")
    assert path.stat().st_size < MAX_BYTES
    text = path.read_text()
    assert "more characters" in text and "In metrics.csv only" in text


def test_phase_times_by_hand():
    metrics = {
        "time_generate": [(1, 2.0), (2, 2.0)],
        "time_reward": [(1, 1.0), (2, 3.0)],
        "time_idle": [(1, 0.0), (2, 0.0)],
        "time_step": [(1, 4.0), (2, 6.0)],
    }
    times = phase_times(metrics)
    assert list(times.phases) == ["generate", "reward"] and times.total == 10.0
    assert times.share("generate") == 0.4 and times.unaccounted == pytest.approx(0.2)
    assert times.limit_overlapped == 2.5  # steps of at least 2 and 3 seconds
    assert times.limit_hiding("reward") == 3.0  # max(4 - 1, 1) and max(6 - 3, 3)
    assert phase_times({"loss": [(1, 1.0)]}) is None
    huge = {"time_train": [(1, 1e308), (2, 1e308), (3, 2.0)], "time_step": [(1, 1e308), (2, 1.7e308), (3, 2.5)]}
    assert phase_times(huge).steps == [2.5]  # their sum is infinite
    assert duration(0.25) == "250 ms" and duration(90) == "90.0 s" and duration(8000) == "2 h 13 min"


def test_prompt_turns_and_special_tokens():
    prompt = (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|>Hi<|im_end|>\n"
    )
    assert turns(prompt) == [("user", [("", False), ("image ×2", True), ("Hi", False)])]
    assert turns("<b>plain</b>") == [("", [("<b>plain</b>", False)])]
    assert turns(5) == [("", [("5", False)])]


def test_what_html_and_utf8_cannot_carry_is_replaced():
    assert printable("a\ud800\x00b\n") == "a��b\n" and printable(None) == "" and printable(3) == 3


def test_metrics_that_never_change_take_no_panel(tmp_path):
    run = RunRecorder(tmp_path / "run")
    for step in range(1, 5):
        run.log_step(step, {"loss": 1.0, "clip_frac": 0.0, "entropy": step, "odd": 2.5})
    text = write_report([run.folder], tmp_path / "r.html").read_text()
    assert "The same at every step: clip_frac 0, odd 2.5." in text
    assert "<b>loss</b>" in text and "<b>entropy</b>" in text and "<b>clip_frac</b>" not in text


def test_a_line_of_another_name_than_its_panel_is_named_and_no_two_lines_of_a_panel_are_alike(tmp_path):
    runs = [RunData(tmp_path, name, {}, {}, {}, {}) for name in ("first", "second")]
    runs[1].metrics["reward/exact"] = [(1, 0.5)]
    (panel,) = reward_section(runs, 100)
    assert panel.title == "reward/exact" and [name for name, _ in panel.legend] == ["second"]
    (panel,) = reward_section(runs[1:], 100)
    assert not panel.legend and panel.note == "0.5"
    runs[1].evaluation |= {"eval_gold": [(1, 0.5)], "eval_reward_gold": [(1, 0.25)]}
    (panel,) = [each for each in reward_section(runs[1:], 100) if each.title == "evaluation, by kind"]
    assert [name for name, _ in panel.legend] == ["eval_gold", "gold"]


def test_answers_and_drawn_images_of_one_model_stand_apart(tmp_path):
    run = RunRecorder(tmp_path / "run")
    for step in range(1, 5):
        both = {f"{name}_{kind}": step + place for name in ("entropy", "loss") for place, kind in enumerate(RESPONSES)}
        run.log_step(step, both | {"reward_answer_mean": step / 5, "reward_drawing_mean": step / 6})
    evaluated = {f"{name}_{kind}": 0.5 for name in ("eval_reward", "eval_gold") for kind in RESPONSES}
    records = [
        {"prompt": "a red circle", "response": "", "reward": place / 10} | kind
        for place in range(8)
        for kind in ({}, {"kind": "drawing"})
    ]
    run.log_eval(4, {"eval_reward": 0.5, "eval_reward_colour": 0.1} | evaluated)
    run.save_rollouts(4, records, "eval_step")
    found = load_run(run.folder)
    titles = [each.title for each in reward_section([found], 100)]
    assert titles[1:3] == ["reward of answers", "reward of drawn images"] and "evaluation, by kind" in titles
    legends = [[name for name, _ in each.legend] for each in reward_section([found], 100)]
    assert legends[1] == legends[2] == ["training", "evaluation", "evaluation, gold"]
    (group,) = [panels for title, panels in training_section([found], 100)["groups"] if title == "By kind of response"]
    assert [each.title for each in group] == ["entropy, by kind of response", "loss, by kind of response"]
    text = write_report([run.folder], tmp_path / "r.html").read_text()
    assert "Best, answers" in text and "Worst, drawn images" in text


ALIASES = [f"{new}: &{new} [{', '.join(['*' + old] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi")]
DAMAGES = {
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a bomb of aliases": "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(ALIASES),
    "columns twice": "step,step,loss,loss\n1,1,2,3\n2,2,1e400,-1e400\n\n3,3,nan,x\n",
    "times without end": "step,time_step,time_train,time_sync\n1,1,1e308,1e308\n2,1,1e308,1e308\n",
    "a field too long": "step,loss\n1," + "9" * 200_000 + "\n",
}


@pytest.mark.parametrize("name", ["metrics.csv", "config.resolved.yaml", "env.json", "rollouts/eval_step_000010.jsonl"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_report_is_written_whatever_stands_in_place_of_a_file(damaged_run, name, damage):
    made, path = DAMAGES[damage], damaged_run / name
    path.write_text(made) if isinstance(made, str) else made(path)
    assert "</html>" in write_report([damaged_run], damaged_run / "report.html").read_text()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    make_run(folder, steps=10).close()
    return folder


@pytest.fixture
def damaged_run(whole_run, tmp_path):
    return shutil.copytree(whole_run, tmp_path / "run")


def seeds(tmp_path, count=3):
    for seed in range(1, count + 1):
        make_run(tmp_path / f"plain_seed{seed}", steps=20, seed=seed)
    return [tmp_path / f"plain_seed{seed}" for seed in range(1, count + 1)]


def test_three_seeds_are_one_line_with_mean_and_deviation(tmp_path):
    folders = seeds(tmp_path)
    runs = [load_run(folder) for folder in folders]
    (one,) = taken_together(runs, None)
    assert one.name == "plain_seed (3 seeds)"
    values = [dict(run.metrics["loss"])[7] for run in runs]
    mean, deviation = sum(values) / 3, statistics.stdev(values)
    assert dict(one.metrics["loss"])[7] == pytest.approx(mean)
    (band,) = [ends for step, *ends in one.bands["metrics"]["loss"] if step == 7]
    assert band == pytest.approx([mean - deviation, mean + deviation])
    (panel,) = [each for _, panels in training_section([one], 100)["groups"] for each in panels if each.title == "loss"]
    (line,) = panel.chart["lines"]
    assert len(line["band"]["x"]) == 20 and panel.chart["y"][0] <= min(line["band"]["low"])
    text = write_report(folders, tmp_path / "seeds.html").read_text()
    assert "plain_seed (3 seeds)" in text and "1.000 ± 0.000" in text


def test_copies_of_a_seed_are_no_seeds_and_a_folder_that_is_given_twice_is_one_run(tmp_path):
    first, second = seeds(tmp_path, 2)
    copy = shutil.copytree(first, tmp_path / "plain_copy")
    for folders, told in (([first, copy, second], "3 runs, 2 seeds"), ([first, copy], "2 runs, 1 seed")):
        (one,) = taken_together([load_run(folder) for folder in folders], True)
        assert one.name == f"plain ({told})"
    text = write_report([first, second, first / ".." / first.name], tmp_path / "report.html").read_text()
    assert "<title>plain_seed1 vs plain_seed2</title>" in text


def test_a_shorter_seed_takes_nothing_from_the_longer_ones_and_the_name_says_so(tmp_path):
    folders = seeds(tmp_path, 4)
    make_run(folders[0], steps=3, seed=1)
    make_run(folders[1], steps=30, seed=2)
    runs = [load_run(folder) for folder in folders]
    (one,) = taken_together(runs, None)
    assert one.name == "plain_seed (4 seeds, 3 at the last step)" and one.last_step == 20
    losses = [dict(run.metrics["loss"]) for run in runs]
    assert dict(one.metrics["loss"])[3] == pytest.approx(statistics.fmean(loss[3] for loss in losses))
    assert dict(one.metrics["loss"])[20] == pytest.approx(statistics.fmean(loss[20] for loss in losses[1:]))


def test_a_seed_that_has_only_begun_stays_apart(tmp_path):
    *_, begun = folders = seeds(tmp_path, 4)
    for name in ("metrics.csv", "eval_metrics.csv"):
        (begun / name).unlink()
    one, alone = taken_together([load_run(folder) for folder in folders], None)
    assert one.name == "plain_seed (3 seeds)" and one.last_step == 20 and alone.folder == begun


def test_two_seeds_are_compared_unless_asked_for_as_one(tmp_path):
    runs = [load_run(folder) for folder in seeds(tmp_path, 2)]
    assert taken_together(runs, None) == runs and len(taken_together(runs, True)) == 1


def test_groups_of_other_settings_stay_apart(tmp_path):
    folders = seeds(tmp_path, 4)
    for folder in folders[2:]:
        add_settings(folder, "algorithm:\n  eps_clip: 0.3\n")
    first, second = taken_together([load_run(folder) for folder in folders], True)
    assert first.config != second.config and [bool(each.bands) for each in (first, second)] == [True, True]


def add_settings(folder, text):
    config = folder / "config.resolved.yaml"
    config.write_text(config.read_text() + text)


def test_two_seeds_beside_a_group_of_three_stay_apart_unless_asked_for(tmp_path):
    folders = seeds(tmp_path, 5)
    for folder in folders[3:]:
        add_settings(folder, "algorithm:\n  eps_clip: 0.3\n")
    runs = [load_run(folder) for folder in folders]
    first, *others = taken_together(runs, None)
    assert first.name == "plain_seed (3 seeds)" and others == runs[3:]
    first, second = taken_together(runs, True)
    assert second.name == "plain_seed (2 seeds)"
    assert comparison_section([first, second])["differences"] == [
        ["train.seed", "1, 2, 3", "4, 5"],
        ["algorithm.eps_clip", "–", "0.3"],
    ]


def test_seeds_of_one_loaded_model_and_data_are_one_whichever_process_they_ran_in(tmp_path):
    """A copy of the model is named by its weights, then by host and process; data that is given again gets a number."""
    folders = seeds(tmp_path)
    for folder, process, number in zip(folders, (16748, 18935, 20001), ("", "_2", "_4")):
        path = f"/cache/given/{'0a' * 16}-vm-1.local-{process}"
        add_settings(folder, f"model: {{pretrain: {path}}}\ndata: {{eval_data: 'python:eval_dataset{number}'}}\n")
    runs = [load_run(folder) for folder in folders]
    assert [row[0] for row in comparison_section(runs)["differences"]] == ["train.seed"]
    assert len(taken_together(runs, None)) == 1


def test_other_weights_and_other_rewards_of_a_program_keep_runs_apart(tmp_path):
    folders = seeds(tmp_path)
    for folder, digest, reward in zip(folders, ("0a", "0b", "0a"), ("close_1", "close_1", "close_2")):
        path = f"/cache/given/{digest * 16}-vm-7"
        add_settings(folder, f"model: {{pretrain: {path}}}\nrewards: {{reward_fn: 'python:{reward}'}}\n")
    runs = [load_run(folder) for folder in folders]
    assert taken_together(runs, True) == runs


def test_a_run_is_named_by_run_name_and_by_its_folder_where_two_have_the_same(tmp_path):
    folders = seeds(tmp_path)
    add_settings(folders[0], "output: {run_name: far <b>out</b>}\n")
    text = write_report(folders[:1], tmp_path / "one.html").read_text()
    assert "<h1>far &lt;b&gt;out&lt;/b&gt;</h1>" in text
    for folder in folders[1:]:
        add_settings(folder, "output: {run_name: 17}\n")
    runs = [load_run(folder) for folder in folders]
    assert [run.name for run in runs] == ["far <b>out</b>", "17", "17"]
    assert distinct_names(runs) == ["far <b>out</b>", "plain_seed2", "plain_seed3"]


def test_settings_of_evaluations_are_compared_and_keep_runs_apart(tmp_path):
    folders = seeds(tmp_path)
    for folder, ema, drawn in zip(folders, ("true", "false", "true"), (4, 4, 1)):
        more = f"output_dir: {folder}, eval_ema: {ema}, eval_samples_per_prompt: {drawn}, eval_seed: {drawn}"
        add_settings(folder, f"output: {{{more}}}\n")
    runs = [load_run(folder) for folder in folders]
    assert taken_together(runs, True) == runs
    assert comparison_section(runs)["differences"] == [
        ["train.seed", "1", "2", "3"],
        ["output.eval_ema", "True", "False", "True"],
        ["output.eval_samples_per_prompt", "4", "4", "1"],
        ["output.eval_seed", "4", "4", "1"],
    ]


def test_folders_that_are_no_run_and_a_page_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(DataError, match="absent is not the folder of a run"):
        write_report([tmp_path / "absent"], tmp_path / "x.html")
    with pytest.raises(DataError):
        write_report([], tmp_path / "x.html")
    make_run(tmp_path / "run")
    for folder, told in (("other", "other is not the folder of a run$"), ("run/checkpoint-final", r"; \S+/run is$")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        with pytest.raises(DataError, match=told):
            write_report([tmp_path / "run", tmp_path / folder], tmp_path / "x.html")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/page.html cannot be written: \w+"):
        write_report([tmp_path / "run"], tmp_path / "file" / "page.html")


def test_an_alarm_of_an_evaluation_stands_with_its_samples_and_others_with_those_of_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr(examples, "_cards", lambda records, thumbnails, folder: {"Best": records})
    for name in ("eval_step", "step"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"of": "{name}"}}\n')
    alarms = [{"step": 4, "signal": signal, "text": "fell"} for signal in ("eval_gold", "gold")]
    run = SimpleNamespace(
        eval_rollouts=[(4, tmp_path / "eval_step.jsonl")], train_rollouts=[(4, tmp_path / "step.jsonl")], alarms=alarms
    )
    blocks = examples.guard_section(run, None)
    assert [block["cards"] for block in blocks] == [[{"of": "eval_step"}], [{"of": "step"}]]


def test_a_comparison_counts_alarms_and_says_how_those_ended_that_did_not_finish(tmp_path):
    told = {name: f"<i> & {name}" for name in "bc"}
    for name, how, alarms in (("a", "finished", 0), ("b", "stopped", 2), ("c", "failed", 0), ("d", None, 0)):
        make_run(tmp_path / name)
        if how:
            (tmp_path / name / "ended.json").write_text(json.dumps({"how": how, "text": told.get(name, "")}))
        (tmp_path / name / "alarms.jsonl").write_text('{"step": 4, "signal": "gold", "text": "fell"}\n' * alarms)
    found = comparison_section([load_run(tmp_path / name) for name in "abcd"])
    assert found["columns"][-1] == "alarms" and [row["values"][-1] for row in found["rows"]] == ["0", "2", "0", "0"]
    page = write_report([tmp_path / name for name in "abcd"], tmp_path / "x.html", by_seed=False).read_text()
    for how, name in (("stopped", "b"), ("failed", "c")):
        assert f'<p class="small ending {how}"><b>{name}: {how}</b> &lt;i&gt; &amp; {name}</p>' in page
    assert page.count('class="small ending') == 2
    assert comparison_section([load_run(tmp_path / name) for name in "ad"])["columns"][-1] == "median step"
    together = comparison_section(taken_together([load_run(tmp_path / name) for name in "abcd"], True))
    assert together["rows"][0]["values"][-1] == "2" and [end["how"] for _, end in together["endings"]] == [
        "stopped",
        "failed",
    ]


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', '{"how": 3}', '{"how": ["failed"]}'])
def test_a_damaged_end_is_no_end(tmp_path, text):
    make_run(tmp_path / "run")
    (tmp_path / "run" / "ended.json").write_text(text)
    assert "small ending" not in write_report([tmp_path / "run"], tmp_path / "x.html").read_text()
