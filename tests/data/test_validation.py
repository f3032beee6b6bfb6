"""Evaluation rows with remote media: one that is gone is masked and counted, by the policy for bad rows."""

import base64
import io
import json
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from lightrft_visual.config.vl import DataConfig
from lightrft_visual.data import prompts as prompts_module
from lightrft_visual.data.prompts import PromptDataset
from lightrft_visual.data.validation import EvaluationRows
from lightrft_visual.errors import DataError
from lightrft_visual.experience.rollouts import PromptBatch
from lightrft_visual.given import forget, give
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor

IMAGES = ("here.png", "https://host/there.png", "https://host/gone.png", "here.png")


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Four rows; two are remote, of which those in `gone` cannot be had."""
    Image.new("RGB", (56, 56), "red").save(tmp_path / "here.png")
    lines = [json.dumps({"prompt": "what is it?", "images": [image]}) + "\n" for image in IMAGES]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    gone, local = {IMAGES[2]}, prompts_module.load_image

    def load(image, **settings):
        if image in gone:
            raise DataError(f"{image}: HTTP 404", "not fetched")
        return Image.new("RGB", (28, 28)) if str(image).startswith("https") else local(image, **settings)

    monkeypatch.setattr(prompts_module, "load_image", load)

    def build(**settings):
        config = DataConfig(eval_data=str(tmp_path / "rows.jsonl"), allow_remote_media=True, **settings)
        return EvaluationRows(PromptDataset.for_evaluation(config)), gone

    return build


def test_a_row_that_is_gone_is_masked_and_counted_and_asked_for_again(rows, tmp_path):
    evaluation, gone = rows(on_bad_row="skip", max_bad_share=0.5)
    found = evaluation.fetch([2, 0, 1, 3], step=5)
    assert (found.indices, found.masked, found.lost) == ([0, 0, 1, 3], [True, False, False, False], 1)
    assert list(found.rows) == [1] and found.rows[1].images[0].size == (28, 28)
    (bad,) = evaluation.dataset.bad.rows.values()
    assert (bad.cause, bad.found) == ("not fetched", "evaluation at step 5") and "rows.jsonl:3" in bad.message
    gone.clear()
    again = evaluation.fetch([2, 0, 1, 3], step=10)
    assert (again.indices, again.lost, sorted(again.rows)) == ([2, 0, 1, 3], 0, [1, 2])
    assert len(evaluation.dataset.bad) == 1
    evaluation, gone = rows(on_bad_row="skip", max_bad_share=0.5)
    gone |= {IMAGES[1], IMAGES[2]}
    found = evaluation.fetch([1, 2], step=0)  # all of a rank's
    assert (found.indices, found.masked, found.rows, found.lost) == ([0, 0], [True, True], {}, 2)


def test_by_the_policy_it_ends_the_run(rows):
    evaluation, _ = rows()
    with pytest.raises(DataError, match=r"rows.jsonl:3: .*HTTP 404 \(in runs --on_bad_row skip leaves such rows out\)"):
        evaluation.fetch([0, 2], step=0)
    evaluation, _ = rows(on_bad_row="skip", max_bad_share=0.2)
    with pytest.raises(DataError, match=r"1 of 4 rows left out \(25.0%\): 1 x not fetched; .*max_bad_share"):
        evaluation.fetch([0, 2], step=0)


def test_rows_that_several_evaluations_miss_are_held_against_the_share_one_evaluation_at_a_time(rows):
    evaluation, gone = rows(on_bad_row="skip", max_bad_share=0.25)
    for step, missing in enumerate((IMAGES[1], IMAGES[2], IMAGES[1])):
        gone.clear()
        gone.add(missing)
        assert evaluation.fetch([0, 1, 2, 3], step).lost == 1
    assert len(evaluation.dataset.bad) == 2  # both are listed
    gone |= {IMAGES[1], IMAGES[2]}
    with pytest.raises(DataError, match=r"2 of 4 rows left out \(50.0%\): 2 x not fetched; .*max_bad_share"):
        evaluation.fetch([0, 1, 2, 3], step=9)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_of_images_inside_a_file_an_evaluation_keeps_how_they_are_read_and_of_others_their_paths(tmp_path, kind):
    Image.new("RGB", (56, 56), "red").save(tmp_path / "here.png")
    inside = io.BytesIO()
    Image.new("RGB", (28, 28), "blue").save(inside, "png")
    bytes_of, path = inside.getvalue(), tmp_path / f"rows.{kind}"
    if kind == "parquet":
        images = [[{"bytes": None, "path": "here.png"}, {"bytes": bytes_of, "path": None}], []]
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["same?", "why?"], "images": images}), path)
    else:
        images = [["here.png", base64.b64encode(bytes_of).decode()], []]
        lines = [{"prompt": prompt, "images": own} for prompt, own in zip(("same?", "why?"), images)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    dataset = PromptDataset.for_evaluation(DataConfig(eval_data=str(path)))
    kept = [row.images for row in EvaluationRows(dataset)]
    assert callable(kept[0][1]) and kept[0][1]() == dataset[0].images[1] and kept[1] == []
    assert kind == "parquet" or kept[0][0] == dataset[0].images[0]
    batch = PromptBatch.of(["same?", "why?"], images=kept)
    processor = MultimodalDataProcessor(SimpleNamespace(get_vocab=lambda: ["a"]), None, 64)
    loaded, _ = processor.media(batch)
    assert [[image.getpixel((0, 0)) for image in own] for own in loaded] == [[(255, 0, 0), (0, 0, 255)], []]


def test_a_row_whose_images_lie_inside_the_file_is_read_once_for_all_of_them(tmp_path, monkeypatch):
    inside, path, read = io.BytesIO(), tmp_path / "rows.jsonl", []
    Image.new("RGB", (28, 28)).save(inside, "png")
    images = [base64.b64encode(inside.getvalue()).decode()] * 3
    path.write_text(json.dumps({"prompt": "same?", "images": images}) + "\n")
    own = PromptDataset.__getitem__
    monkeypatch.setattr(PromptDataset, "__getitem__", lambda self, index: read.append(index) or own(self, index))
    (row,) = EvaluationRows(PromptDataset.for_evaluation(DataConfig(eval_data=str(path))))
    read.clear()
    assert [image() for image in row.images] == images and read == [0]


def test_images_that_a_program_holds_are_kept_as_they_are():
    """Its rows may be drawn anew at each reading."""
    image = Image.new("RGB", (28, 28))
    name = give("rows", [{"prompt": "what?", "images": [image]}])
    rows = EvaluationRows(PromptDataset.for_evaluation(DataConfig(eval_data=name)))
    assert [row.images for row in rows] == [[image]] and next(iter(rows)).images[0] is image
    forget([name.removeprefix("python:")])
