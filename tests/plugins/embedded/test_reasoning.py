"""The embedded reasoning task: files and splits, chains and answers that fit the drawing, forms of demonstrations."""

import json
import random
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from lightrft_visual.config import registry
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.models.tiny.vlm import build_tokenizer
from lightrft_visual.plugins.embedded import questions, reasoning
from lightrft_visual.plugins.embedded.task import SPLITS, build_task, split_of, supervised_pairs
from lightrft_visual.rewards.functions.format import Format
from lightrft_visual.rewards.recipe import load_recipe
from lightrft_visual.trainer.start import with_reward

ROWS = 60


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reasoning")
    return build_task(reasoning.SOURCE, folder, seed=2, n_train=ROWS, n_eval=30, n_demonstrations=ROWS)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_only_demonstrations_show_responses(task):
    for split in SPLITS:
        rows = read(task.folder / f"{split}.jsonl")
        expected = {"prompt", "images", "reference", "label"} | ({"demonstration"} if split == SPLITS[0] else set())
        assert all(set(row) == expected for row in rows)
        assert len(Counter(row["label"] for row in rows)) == len(reasoning.KINDS)
        for row in rows:
            (name,) = row["images"]
            assert split_of(Image.open(task.folder / name).tobytes()) == split


def test_the_chain_counts_what_is_drawn_and_ends_at_the_answer():
    rng, answers = random.Random(0), Counter()
    for _ in range(60):
        prompt, scenes, chain, answer = reasoning.make_question("two", rng)
        drawn = [scene.colour for scene in scenes]
        asked = [word for word in chain.split() if word in questions.COLOURS]
        assert prompt == f"how many {asked[0]} and {asked[1]} shapes?"
        counted = {colour: part.split() for colour, part in zip(asked, chain.replace(asked[1], "|").split("|"))}
        assert len(counted[asked[0]]) - 1 == drawn.count(asked[0]) and len(counted[asked[1]]) == drawn.count(asked[1])
        numbers = [int(word) for word in chain.split() if word.isdigit()]
        assert numbers == list(range(1, int(answer) + 1))
        answers[answer] += 1
    assert len(answers) == 4 and max(answers.values()) < 30


def test_shapes_stand_in_quarters_of_their_own():
    rng = random.Random(1)
    for _ in range(30):
        _, scenes, _, _ = reasoning.make_question("three", rng)
        image = np.asarray(questions.draw_scenes(scenes, 56))
        quarters = [image[y : y + 28, x : x + 28] for y in (0, 28) for x in (0, 28)]
        shown = [{tuple(p) for p in quarter.reshape(-1, 3).tolist()} - {questions.BACKGROUND} for quarter in quarters]
        colours = Counter(tuple(found)[0] for found in shown if len(found) == 1)
        assert all(len(found) <= 1 for found in shown)
        assert colours == Counter(questions.COLOURS[scene.colour] for scene in scenes)


def test_a_part_of_the_demonstrations_has_the_form_that_the_reward_asks_for(task):
    shown = [pair.answer for pair in supervised_pairs(task.demonstrations, seed=0, epochs=1)]
    right = sum(Format()(shown))
    assert 0.05 * ROWS < right < 0.4 * ROWS
    assert {row["demonstration"] for row in read(task.demonstrations)} == set(shown)


def test_right_responses_have_sixteen_to_thirty_tokens():
    tokenizer = build_tokenizer(reasoning.vocabulary_texts())
    lengths = set()
    for kind in reasoning.KINDS:
        for seed in range(30):
            _, _, chain, answer = reasoning.make_question(kind, random.Random(seed))
            response = next(iter(reasoning.FORMS)).format(chain=chain, answer=answer)
            lengths.add(len(tokenizer.encode(response)) + 1)
    assert min(lengths) >= 16 and max(lengths) <= 30 and len(lengths) > 6


def test_the_task_has_its_own_preset_and_reward():
    config = parse_run(RunConfig, ["--prompt_data", "embedded_reasoning"]).config
    assert config.rollout.generate_max_len == 48
    recipe = load_recipe(with_reward(config, registry.tasks).reward.reward_recipe)
    assert {entry.key: entry.weight for entry in recipe.components()} == {"exact": 0.8, "format": 0.2}
    config.reward.reward_fn = "mine.py:score"
    assert with_reward(config, registry.tasks) is config
    assert parse_run(RunConfig, []).config.rollout.generate_max_len == 8
