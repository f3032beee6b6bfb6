"""The embedded visual question task: files, determinism, answers that fit the drawing, warm-up pairs."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from PIL import Image

from lightrft_visual.embedded import questions
from lightrft_visual.errors import DataError


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return questions.build_embedded_task(tmp_path_factory.mktemp("task"), seed=3, n_train=60, n_eval=20)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_name_existing_images_of_the_asked_size(task):
    rows = read(task.train)
    assert len(rows) == 60 and len(read(task.test)) == 20
    for row in rows:
        assert set(row) == {"prompt", "images", "reference", "label"}
        assert row["reference"] in questions.ANSWERS[row["label"]]
        for name in row["images"]:
            with Image.open(task.folder / name) as image:
                assert (image.size, image.mode, image.format) == ((56, 56), "RGB", "PNG")


def test_every_kind_has_its_share(task):
    assert Counter(row["label"] for row in read(task.test)) == questions._SHARES
    assert set(questions._SHARES) == set(questions.KINDS) == set(questions.QUESTIONS)


def test_same_arguments_give_the_same_bytes_and_longer_tasks_extend_shorter_ones(task, tmp_path):
    again = questions.build_embedded_task(tmp_path, seed=3, n_train=80, n_eval=20)
    assert read(again.train)[:60] == read(task.train)
    for row in read(task.train):
        for name in row["images"]:
            assert (again.folder / name).read_bytes() == (task.folder / name).read_bytes()


def test_splits_and_seeds_differ(task, tmp_path):
    other = questions.build_embedded_task(tmp_path, seed=4, n_train=60, n_eval=20)
    assert read(other.train) != read(task.train)
    test_images = {path.read_bytes() for path in (task.folder / "images/test").iterdir()}
    assert not test_images & {path.read_bytes() for path in (task.folder / "images/train").iterdir()}


def test_a_finished_task_is_found_and_not_written_again(task):
    before = task.train.stat().st_mtime_ns
    assert questions.build_embedded_task(task.folder.parent, seed=3, n_train=60, n_eval=20) == task
    assert task.train.stat().st_mtime_ns == before
    assert [path.name for path in task.folder.parent.iterdir()] == [task.folder.name]


def test_losing_the_race_to_another_process_keeps_its_files(task, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    questions._publish(scratch, task.folder)
    assert not scratch.exists() and len(read(task.train)) == 60


@pytest.mark.parametrize("sizes", [{"n_train": 0}, {"n_eval": -1}, {"size": 8}])
def test_impossible_sizes_are_refused(tmp_path, sizes):
    with pytest.raises(DataError, match="embedded task"):
        questions.build_embedded_task(tmp_path, **sizes)


def separate_shapes(scene) -> int:
    """Connected regions of non-background pixels, counted by flood fill."""
    ink = np.any(np.asarray(questions.draw_scene(scene, 56)) != questions.BACKGROUND, axis=-1)
    count, left = 0, {(int(y), int(x)) for y, x in np.argwhere(ink)}
    while left:
        count, stack = count + 1, [left.pop()]
        while stack:
            y, x = stack.pop()
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            stack.extend(near)
    return count


@pytest.mark.parametrize("kind", questions.KINDS)
def test_the_answer_is_what_is_drawn(kind):
    rng = random.Random(0)
    for _ in range(40):
        question, scenes, answer = questions.make_question(kind, rng)
        if kind == "count":
            assert separate_shapes(scenes[0]) == int(answer)
        elif kind == "colour":
            drawn = {tuple(pixel) for pixel in np.asarray(questions.draw_scene(scenes[0], 56)).reshape(-1, 3).tolist()}
            assert drawn == {questions.BACKGROUND, questions.COLOURS[answer]}
        elif kind == "shape":
            assert scenes[0].shape == answer
        elif kind == "position":
            ink = (
                np.argwhere(
                    np.any(np.asarray(questions.draw_scene(scenes[0], 56)) != questions.BACKGROUND, axis=-1)
                ).mean(0)
                - 28
            )
            axis, far = int(np.abs(ink).argmax()), ink[int(np.abs(ink).argmax())] > 0
            assert answer == (("top", "bottom"), ("left", "right"))[axis][int(far)]
        elif kind == "comparison":
            first, second = map(separate_shapes, scenes)
            assert answer == ("first" if first > second else "second")
        else:
            assert eval(question.removeprefix("what is ").rstrip("?").replace("plus", "+")) == int(answer)


def test_vocabulary_holds_every_word_of_the_task(task):
    def words(text):
        return set(text.replace("?", " ?").replace("<image>", " ").split())

    known = set().union(*map(words, questions.vocabulary_texts()))
    for row in read(task.train):
        assert words(row["prompt"]) | words(row["reference"]) <= known


def test_warm_up_pairs_are_reproducible_and_noisy_to_the_asked_degree(task):
    pairs = list(questions.supervised_pairs(task.train, seed=1, random_share=0.0, epochs=1))
    rows = read(task.train)
    assert sorted((pair.prompt, pair.answer) for pair in pairs) == sorted((r["prompt"], r["reference"]) for r in rows)
    assert all(path.startswith(str(task.folder)) for pair in pairs for path in pair.images)
    endless = questions.supervised_pairs(task.train, seed=1)
    first = list(islice(endless, 6000))
    assert first == list(islice(questions.supervised_pairs(task.train, seed=1), 6000))
    truth = {(r["prompt"], tuple(str(task.folder / n) for n in r["images"])): r["reference"] for r in rows}
    visual = [pair for pair in first if pair.kind != "text"]
    right = np.mean([pair.answer == truth[pair.prompt, pair.images] for pair in visual])
    chance = np.mean([1 / len(questions.ANSWERS[pair.kind]) for pair in visual])
    assert right == pytest.approx(0.4 + 0.6 * chance, abs=0.03)
