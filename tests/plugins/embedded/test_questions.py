"""The embedded visual question task: files, determinism, splits without overlap, answers that fit the drawing."""

import json
import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lightrft_visual.errors import ConfigError
from lightrft_visual.plugins.embedded import questions
from lightrft_visual.plugins.embedded.task import SPLITS, build_task, split_of, supervised_pairs


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return build(tmp_path_factory.mktemp("task"), seed=3)


def build(folder, seed=3, n_train=60):
    return build_task(questions.SOURCE, folder, seed=seed, n_train=n_train, n_eval=20, n_demonstrations=60)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_name_existing_images_of_the_asked_size_and_every_kind_has_its_share(task):
    rows = read(task.train)
    assert len(rows) == 60 and len(read(task.test)) == 20
    for row in rows:
        assert set(row) == {"prompt", "images", "reference", "label"}
        assert row["reference"] in questions.ANSWERS[row["label"]]
        for name in row["images"]:
            with Image.open(task.folder / name) as image:
                assert (image.size, image.mode, image.format) == ((56, 56), "RGB", "PNG")
    assert Counter(row["label"] for row in read(task.test)) == questions._SHARES
    assert set(questions._SHARES) == set(questions.KINDS) == set(questions.QUESTIONS)


def test_same_arguments_give_the_same_bytes_and_longer_tasks_extend_shorter_ones(task, tmp_path):
    again = build(tmp_path, n_train=80)
    assert read(again.train)[:60] == read(task.train)
    for row in read(task.train):
        for name in row["images"]:
            assert (again.folder / name).read_bytes() == (task.folder / name).read_bytes()


def contents(task, split):
    """What the rows of a split show: the pixels of images, and the text of questions without one."""
    images = {Image.open(path).tobytes() for path in (task.folder / "images" / split).iterdir()}
    return images | {row["prompt"].encode() for row in read(task.folder / f"{split}.jsonl") if not row["images"]}


def test_no_image_is_in_two_splits_whatever_the_seed(task, tmp_path):
    other = build(tmp_path, seed=4)
    assert read(other.train) != read(task.train)
    shown = {split: contents(task, split) | contents(other, split) for split in SPLITS}
    for split, own in shown.items():
        assert own and {split_of(content) for content in own} == {split}
    assert sum(map(len, shown.values())) == len(set().union(*shown.values()))


def test_only_the_demonstrations_lack_combinations_of_colour_and_shape():
    def looks(split):
        rng, found = random.Random(1), set()
        for _ in range(150):
            found |= questions.draw_question("shape", split, rng, 56).looks
        return found

    every = {(colour, shape) for colour in questions.COLOURS for shape in questions.SHAPES}
    assert looks("demonstrations") == questions.SHOWN_LOOKS < every
    assert looks("train") == looks("dev") == looks("test") == every


def test_evaluation_is_on_dev_or_test(task):
    assert (task.held_out("dev"), task.held_out("test")) == (task.dev, task.test)
    with pytest.raises(ConfigError, match="eval_split is 'train'.*dev or test"):
        task.held_out("train")


def test_a_finished_task_is_found_and_not_written_again(task):
    before = task.train.stat().st_mtime_ns
    assert build(task.folder.parent) == task
    assert task.train.stat().st_mtime_ns == before
    assert [path.name for path in task.folder.parent.glob("[!.]*")] == [task.folder.name]


def separate_shapes(scene) -> int:
    """Connected regions of non-background pixels, counted by flood fill."""
    ink = np.any(np.asarray(questions.draw_scenes([scene], 56)) != questions.BACKGROUND, axis=-1)
    count, left = 0, {(int(y), int(x)) for y, x in np.argwhere(ink)}
    while left:
        count, stack = count + 1, [left.pop()]
        while stack:
            y, x = stack.pop()
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            stack.extend(near)
    return count


def extent(scene) -> int:
    """Height in pixels of what is drawn."""
    ink = np.argwhere(np.any(np.asarray(questions.draw_scenes([scene], 56)) != questions.BACKGROUND, axis=-1))
    return int(ink[:, 0].max() - ink[:, 0].min() + 1)


@pytest.mark.parametrize("kind", questions.KINDS)
def test_the_answer_is_what_is_drawn(kind):
    rng = random.Random(0)
    for _ in range(40):
        question, scenes, answer = questions.make_question(kind, rng)
        if kind == "count":
            assert separate_shapes(scenes[0]) == int(answer)
        elif kind == "colour":
            drawn = {
                tuple(pixel) for pixel in np.asarray(questions.draw_scenes(scenes[:1], 56)).reshape(-1, 3).tolist()
            }
            assert drawn == {questions.BACKGROUND, questions.COLOURS[answer]}
        elif kind == "shape":
            assert scenes[0].shape == answer
        elif kind == "size":
            assert answer == ("large" if extent(scenes[0]) > 28 else "small")
        elif kind == "two_images":
            assert scenes[0].colour == answer != scenes[1].colour
        else:
            assert question.removesuffix(" which word is last?").split()[-1] == answer


def test_vocabulary_holds_every_word_of_the_task(task):
    def words(text):
        return set(text.replace("?", " ?").replace("<image>", " ").split())

    known = set().union(*map(words, questions.vocabulary_texts()))
    for row in read(task.train):
        assert words(row["prompt"]) | words(row["reference"]) <= known


def test_warm_up_pairs_are_the_demonstrations_with_their_answers_in_a_reproducible_order(task):
    pairs = list(supervised_pairs(task.demonstrations, seed=1, epochs=1))
    rows = read(task.demonstrations)
    assert sorted((p.prompt, p.answer) for p in pairs) == sorted((r["prompt"], r["reference"]) for r in rows)
    assert all(path.startswith(str(task.folder)) for pair in pairs for path in pair.images)
    endless = list(islice(supervised_pairs(task.demonstrations, seed=1), 150))
    assert endless[:60] == pairs and endless == list(islice(supervised_pairs(task.demonstrations, seed=1), 150))
    assert endless[60:120] != pairs and set(endless[60:120]) == set(pairs)


def test_docs_say_the_share_of_each_kind():
    text = (Path(__file__).resolve().parents[3] / "docs" / "data.md").read_text()
    shares = dict(re.findall(r"^- `(\w+)`, (\d+) %:", text, re.M))
    assert {kind: int(share) for kind, share in shares.items()} == {k: 5 * n for k, n in questions._SHARES.items()}
