"""The embedded tasks of several turns: what is drawn, what a closer look shows, demonstrations, presets."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from lightrft_visual.config import registry
from lightrft_visual.config.environment import EpisodeConfig
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint, build_tokenizer
from lightrft_visual.plugins.embedded import click, zoom
from lightrft_visual.plugins.embedded.questions import COLOURS
from lightrft_visual.plugins.embedded.task import SPLITS, build_task, supervised_pairs
from lightrft_visual.plugins.embedded.warmup import PairEncoder
from lightrft_visual.rollout.environments import Action, environment_factory
from lightrft_visual.rollout.tool_calls import parse_tool_calls

ROWS = 40


@pytest.fixture(scope="module", params=[zoom, click], ids=["zoom", "click"])
def task(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param.__name__)
    return request.param, build_task(request.param.SOURCE, folder, 2, ROWS, 20, 56, ROWS)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def colours_of(image: Image.Image) -> set[tuple[int, int, int]]:
    return {tuple(each) for each in np.asarray(image).reshape(-1, 3).tolist()} - {*zoom.GROUNDS}


def scenes(count: int = 40) -> list[dict]:
    rng = random.Random(0)
    return [zoom.make_scene(rng) for _ in range(count)]


def test_plate_is_empty_in_the_scene_and_has_its_mark_from_near_alone():
    assert len({(zoom.part_of(scene), scene["colour"]) for scene in scenes(300)}) == 16  # every quarter and colour
    for scene in scenes():
        assert colours_of(zoom.draw_scene(scene)) == {zoom.PLATE_COLOUR}
        for part in range(1, 5):
            expected = {COLOURS[scene["colour"]], zoom.PLATE_COLOUR} if part == zoom.part_of(scene) else set()
            assert colours_of(zoom.closer(scene, part)) == expected
    assert len({zoom.draw_scene(scene | {"colour": colour}).tobytes() for colour in COLOURS}) == 1


def look(environment, part: int):
    messages, reward, done, info = environment.step(Action("", [], parse_tool_calls(zoom.call_text(part))))
    return messages[0]["content"], info


def test_zoom_environment_shows_the_quarter_and_refuses_others():
    environment = environment_factory(EpisodeConfig(environment="embedded_zoom"))()
    scene = scenes(1)[0]
    environment.reset({"scene": scene})
    (part,), info = look(environment, zoom.part_of(scene))
    assert COLOURS[scene["colour"]] in colours_of(part["image"]) and info["tool_errors"] == 0
    content, info = look(environment, 5)
    assert "there is no part 5" in content and info["tool_errors"] == 1
    assert environment.step(Action("red"))[:3] == (None, None, True)


CHECKS = Path(__file__).parents[3] / "scripts/bench/zoom_checks.py"
NAMES = "EmbeddedZoomOfAnother", "EmbeddedZoomOfNothing"


def test_environments_for_measuring_show_other_colours_or_nothing():
    shown = set()
    factories = [environment_factory(EpisodeConfig(environment=f"{CHECKS}:{name}")) for name in NAMES]
    for seed in range(20):
        other, nothing = (factory() for factory in factories)
        scene = scenes(1)[0]
        for environment in (other, nothing):
            environment.reset({"scene": scene, "seed": seed})
        (part,), _ = look(other, zoom.part_of(scene))
        shown |= colours_of(part["image"])
        (part,), _ = look(nothing, zoom.part_of(scene))
        assert part["image"].tobytes() == zoom.draw_scene(scene).tobytes()
    assert shown == {*COLOURS.values(), zoom.PLATE_COLOUR}


def test_only_demonstrations_have_turns(task):
    module, files = task
    column = {zoom: "scene", click: "target"}[module]
    for split in SPLITS:
        for row in read(files.folder / f"{split}.jsonl"):
            assert ("turns" in row) <= (split == "demonstrations")
            assert column in row or row["label"] in ("seen", "placed")


def test_demonstrations_of_zoom_end_with_what_they_saw(tmp_path):
    files = build_task(zoom.SOURCE, tmp_path, 3, 1, 0, 56, 2 * ROWS)
    found = 0
    for row in read(files.demonstrations):
        if row["label"] == "seen":
            assert COLOURS[row["reference"]] in colours_of(Image.open(files.folder / row["images"][0]))
            continue
        if row["label"] == "placed":
            image = np.asarray(Image.open(files.folder / row["images"][0]).convert("L"))
            quarters = [image[y : y + 28, x : x + 28].max() for y in (0, 28) for x in (0, 28)]
            assert quarters.index(255) + 1 == int(row["reference"])
            continue
        *looks, (role, answer) = row["turns"]
        assert role == "assistant" and [turn[0] for turn in looks] == ["assistant", "tool"] * (len(looks) // 2)
        (call,) = parse_tool_calls(looks[-2][1])
        seen = call.arguments["part"] == zoom.part_of(row["scene"])
        assert (COLOURS[row["reference"]] in colours_of(Image.open(files.folder / looks[-1][1]))) == seen
        assert not seen or answer == row["reference"]
        found += seen
    assert 0.1 * ROWS < found < 0.6 * ROWS


def test_middle_of_every_quarter_is_inside_its_button_and_one_is_lit():
    rng = random.Random(0)
    for number in range(50):
        buttons, lit = click.make_buttons(rng), number % 4
        image = click.draw_screen(buttons, lit)
        for index, box in enumerate(buttons):
            x, y = click.middle_of(box)
            assert box[0] <= x <= box[2] and box[1] <= y <= box[3]
            assert image.getpixel((x, y)) == (click.LIT if index == lit else click.DIM)


def test_demonstrations_of_click_call_the_tool_on_any_button(tmp_path):
    files = build_task(click.SOURCE, tmp_path, 3, 1, 0, 56, 4 * ROWS)
    rows = read(files.demonstrations)
    clicks = [row for row in rows if row["label"] == "button"]
    right = 0
    for row in clicks:
        environment = environment_factory(EpisodeConfig(environment="click"))()
        environment.reset(row | {"images": [Image.open(files.folder / row["images"][0])]})
        ((_, text),) = row["turns"]
        right += environment.step(Action(text, [], parse_tool_calls(text)))[1]
    assert len(clicks) == 2 * ROWS and 0.05 < right / len(clicks) < 0.5


@pytest.mark.parametrize(
    ("module", "call", "most"), [(zoom, zoom.call_text(3), 20), (click, click.call_text(14, 42), 28)]
)
def test_call_takes_few_tokens(module, call, most):
    tokenizer = build_tokenizer(module.SOURCE.vocabulary_texts(), tools=True)
    ids = tokenizer.encode(call)
    assert len(ids) < most and tokenizer.decode(ids) == call
    assert parse_tool_calls(call)[0].error is None


def test_pairs_of_a_conversation_are_read_with_their_images(tmp_path):
    files = build_task(zoom.SOURCE, tmp_path, 3, 1, 0, 56, 12)
    folder = build_tiny_checkpoint(tmp_path / "model", texts=zoom.vocabulary_texts(), tools=True)
    encode = PairEncoder(
        AutoTokenizer.from_pretrained(folder), AutoProcessor.from_pretrained(folder), zoom.SOURCE.schemas()
    )
    pairs = list(supervised_pairs(files.demonstrations, seed=0, epochs=1))
    inputs = encode.batch(pairs)
    looks = sum(role == "tool" for pair in pairs for role, _ in pair.before)
    assert sum(len(each["image_grid_thw"]) for each in inputs.vision.samples) == len(pairs) + looks and looks > 0
    texts = [encode.tokenizer.decode(ids) for ids in inputs.sequences]
    assert all("<tool_call>zoom part</tool_call>" in text for text in texts)
    assert any("<|im_start|>tool\n<|vision_start|>" in text for text in texts)


@pytest.mark.parametrize(("name", "turns"), [("embedded_zoom", 3), ("embedded_click", 1)])
def test_task_has_its_own_preset_environment_and_reward(name, turns):
    config = parse_run(RunConfig, ["--prompt_data", name]).config
    assert config.episodes.used and config.episodes.max_turns == turns
    assert config.episodes.environment in registry.environments
    assert registry.tasks[name].own_reward()
