"""Rows of diffusion runs: what rewards find in them, and which are refused by file and row."""

import json

import numpy as np
import pytest
from PIL import Image

from lightrft_visual.config.diffusion import DiffusionDataConfig
from lightrft_visual.config.vl import DataConfig
from lightrft_visual.data import bad_rows
from lightrft_visual.data.drawing_prompts import DrawPrompts
from lightrft_visual.data.rows import parse_row
from lightrft_visual.errors import DataError

SKIP = DiffusionDataConfig(on_bad_row="skip", max_bad_share=0.9)


def prompts(tmp_path, *rows, **settings) -> list:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(DrawPrompts(str(path), "train", 100, DiffusionDataConfig(**settings), False).rows)


def test_a_column_that_a_flag_names_keeps_its_name_for_rewards_and_is_required(tmp_path):
    given = {"caption": "a cat", "kind": "x", "target": "cat", "label": "other"}
    (row,) = prompts(tmp_path, given, input_key="caption", label_key="kind", reference_key="target")
    assert (row.prompt, row.label, row.reference, row.metadata) == ("a cat", "x", "cat", given)
    for flag in ("label_key", "reference_key"):
        with pytest.raises(DataError, match=rf"prompts.jsonl:1: no column 'kin' \({flag}\); the row has: prompt, kind"):
            prompts(tmp_path, {"prompt": "a cat", "kind": "x"}, **{flag: "kin"})


@pytest.mark.parametrize(("label", "wanted"), [(3.0, "3"), (3, "3"), ("3.0", "3.0"), (True, "True"), (None, None)])
def test_a_whole_number_that_a_table_with_gaps_made_a_float_is_a_label_of_seeing_and_drawing_runs(
    tmp_path, label, wanted
):
    raw = {"prompt": "a cat", "label": label}
    (drawn,) = prompts(tmp_path, raw)
    assert drawn.label == parse_row(raw, DataConfig(), source="", root=None).label == wanted
    for other in (0.5, ["a"], {"a": 1}):  # a run that draws takes any label
        assert prompts(tmp_path, raw | {"label": other})[0].label == str(other)
    for other in (0.5, float("inf"), ["a"]):
        with pytest.raises(DataError, match="a label is a short name, not"):
            parse_row(raw | {"label": other}, DataConfig(), source="", root=None)
    assert parse_row(raw | {"label": np.float32(2)}, DataConfig(), source="", root=None).label == "2"


def test_images_that_rewards_look_for_start_where_those_of_prompts_do(tmp_path):
    for file in (tmp_path / "a.png", tmp_path / "other" / "b.png"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    cells = ["a.png", "/b.png", "", {"bytes": None, "path": "c.png"}, None, "img_0042"]
    found = [str(tmp_path / "a.png"), "/b.png", "", {"bytes": None, "path": str(tmp_path / "c.png")}, None, "img_0042"]
    rows = [{"prompt": "a cat", "reference_image": cell, "named": "a.png"} for cell in cells]
    assert [row.metadata["reference_image"] for row in prompts(tmp_path, *rows)] == found
    seen = [parse_row(row, DataConfig(images_key=""), source="", root=tmp_path).metadata for row in rows]
    assert [row["reference_image"] for row in seen] == found and {row["named"] for row in seen} == {"a.png"}
    (row,) = prompts(tmp_path, {"prompt": "a cat", "face_image": "b.png"}, image_root=str(tmp_path / "other"))
    assert row.metadata["face_image"] == str(tmp_path / "other" / "b.png")


def test_bad_rows_are_refused_with_the_way_out_or_skipped_and_counted(tmp_path):
    rows = [{"prompt": "a cat"}, ["a"], {"text": "no prompt"}, None, {"prompt": " "}, {"prompt": "a dog"}]
    rows.append({"prompt": "\ud800"})
    with pytest.raises(DataError, match=r"prompts.jsonl:2: .*--on_bad_row skip"):
        prompts(tmp_path, *rows)
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(rows))
    kept = DrawPrompts(str(path), "train", 100, SKIP, False)
    assert [row.prompt for row in kept] == ["a cat", "a dog"]
    assert kept.bad.causes == {"row form": 2, "prompt form": 2, "text not Unicode": 1}
    assert [row.source for row in kept.rows] == [f"{path}:row 0", f"{path}:row 5"]
    assert next(kept.rows) is not next(kept.rows)  # they stay in their file, whatever columns they have
    assert len(DrawPrompts(str(path), "train", 1, SKIP, False)) == 1


def test_a_file_that_changes_during_a_run_is_refused_by_file_and_row(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a cat"}\n{"prompt": "a dog"}\n')
    rows = DrawPrompts(str(path), "train", 100, DiffusionDataConfig(), False)
    for changed, told in (
        ('{"text": "a dog"}', "no text in column 'prompt'; the row has: text; give --input_key text"),
        ('{"prompt: "a dog"}', "not valid JSON"),
    ):
        path.write_text(f'{{"prompt": "a cat"}}\n{changed}\n\n\n')
        with pytest.raises(DataError, match=rf"^\S+prompts.jsonl:2: {told}"):
            rows[1]


def test_broken_first_frames_are_skipped_and_good_ones_decoded(tmp_path):
    Image.new("RGB", (8, 6), "red").save(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    Image.effect_noise((64, 64), 9).save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:-500])  # which only decoding shows
    path = tmp_path / "metadata.csv"
    path.write_text("prompt,input_image\na,good.png\nb,broken.png\nc,missing.png\nd,\ne,cut.jpg\n")
    kept = DrawPrompts(str(path), "train", 100, SKIP, True)
    assert kept.bad.causes == {"not an image": 1, "file missing": 1, "media missing": 1, "image damaged": 1}
    assert kept[0].images[0].size == (8, 6)
    assert next(kept.rows).metadata == {"input_image": str(tmp_path / "good.png")}
    with pytest.raises(DataError, match=r"metadata.csv:row 1: .*broken.png"):
        DrawPrompts(str(path), "train", 100, DiffusionDataConfig(), True)


def test_a_first_frame_that_a_model_of_text_alone_does_not_read_is_told_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(bad_rows, "TOLD", {})
    rows = [{"prompt": "a cat", "input_image": "missing.png"}] * 2
    assert [row.images for row in prompts(tmp_path, *rows)] == [[], []]
    prompts(tmp_path, {"prompt": "a cat", "input_image": None, "image": "of_the_reward.png"})
    assert caplog.messages == ["column 'input_image' (image_key) is not read: the model draws from text alone"]


@pytest.mark.parametrize("image", ["https://host/a.png", "large.png"])
def test_an_image_that_settings_of_other_runs_would_allow_is_refused_with_what_they_are_of(tmp_path, image):
    Image.new("L", (8000, 8000)).save(tmp_path / "large.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a cat", "input_image": image}))
    with pytest.raises(DataError, match="in vision-language runs (set allow_remote_media|raise max_image_pixels)"):
        DrawPrompts(str(tmp_path / "rows.jsonl"), "train", 100, DiffusionDataConfig(), True)


def test_lists_stand_in_a_cell_of_csv_as_json(tmp_path):
    for name in ("a", "b"):
        Image.new("RGB", (8, 6), "red").save(tmp_path / f"{name}.png")
    path = tmp_path / "metadata.csv"
    path.write_text('prompt,input_image,reference\nx,"[""a.png"", ""b.png""]","[""red"", ""crimson""]"\ny,[],\n')
    kept = DrawPrompts(str(path), "train", 100, SKIP, 2)
    assert next(kept.rows).images == [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    assert next(kept.rows).reference == ["red", "crimson"]
    assert len(kept) == 1 and kept.bad.causes == {"media missing": 1}


def test_images_to_edit_are_read_from_the_usual_columns_and_counted(tmp_path):
    for name in ("a", "b"):
        Image.new("RGB", (8, 6), "red").save(tmp_path / f"{name}.png")
    path = tmp_path / "edits.jsonl"
    rows = [{"input_image": "a.png"}, {"images": ["a.png", "b.png"]}, {"image": "b.png", "images": []}, {"images": []}]
    rows += [{"images": ["a.png", "b.png", "a.png"]}, {"images": ["a.png", None]}]
    path.write_text("".join(json.dumps({"prompt": str(i)} | row) + "\n" for i, row in enumerate(rows)))
    kept = DrawPrompts(str(path), "train", 100, SKIP, 2)
    assert [(row.prompt, len(row.images)) for row in kept] == [("0", 1), ("1", 2), ("2", 1)]
    assert kept.bad.causes == {"media missing": 2, "media count": 1}
    assert [row.metadata for row in kept.rows] == [
        {"input_image": str(tmp_path / "a.png")},
        {"input_image": str(tmp_path / "a.png")},
        {"input_image": str(tmp_path / "b.png"), "images": []},
    ]
    with pytest.raises(DataError, match=r"edits.jsonl:1: .*column 'photo' has none"):
        DrawPrompts(str(path), "train", 100, DiffusionDataConfig(image_key="photo"), 2)
