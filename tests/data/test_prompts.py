"""Prompt data sets from files of every kind: the same rows, checks at start, rendering and length limits."""

from __future__ import annotations

import io
import json
import logging

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from lightrft_visual.config.vl import DataConfig, RolloutConfig, mixing_probabilities
from lightrft_visual.data.prompts import PromptDataset, PromptRow, render_prompt
from lightrft_visual.embedded.questions import build_embedded_task, vocabulary_texts
from lightrft_visual.embedded.tiny_vlm import build_processor, build_tokenizer
from lightrft_visual.errors import ConfigError, DataError
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor

PADS = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(vocabulary_texts())


@pytest.fixture(scope="module")
def processor(tokenizer):
    return build_processor("qwen2_5_vl", tokenizer)


@pytest.fixture
def folder(tmp_path):
    for name, size in (("a.png", (56, 56)), ("b.png", (84, 112))):
        Image.new("RGB", size, (200, 30, 30)).save(tmp_path / name)
    return tmp_path


ROWS = [
    {"prompt": "what colour is it?", "images": ["a.png"], "reference": "red", "label": "colour", "level": 1},
    {"prompt": "first <image> or <image>", "images": ["b.png", "a.png"], "reference": "1", "label": "n", "level": 2},
    {"prompt": "what is 1 plus 2?", "images": [], "reference": "3", "label": "text", "level": 3},
]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return str(path)


def open_rows(spec, split="train", max_rows=10**6, **settings):
    return PromptDataset(str(spec), DataConfig(**settings), split=split, max_rows=max_rows)


def content(dataset):
    return [(row.prompt, row.images, row.reference, row.label, row.metadata) for row in dataset]


@pytest.fixture
def jsonl(folder):
    return write_jsonl(folder / "rows.jsonl", ROWS)


def test_every_kind_of_file_gives_the_same_rows(folder, jsonl):
    wanted = content(open_rows(jsonl))
    assert wanted[1][1] == [str(folder / "b.png"), str(folder / "a.png")]
    (folder / "rows.json").write_text(json.dumps(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(folder / "splits")
    for name in ("rows.json", "rows.parquet", "saved", "splits"):
        assert content(open_rows(folder / name, image_root=str(folder))) == wanted, name


def test_a_folder_of_data_files_loads_by_split(folder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    (folder / "set").mkdir()
    write_jsonl(folder / "set" / "train.jsonl", ROWS)
    write_jsonl(folder / "set" / "test.jsonl", ROWS[:1])
    assert len(open_rows(folder / "set", image_root=str(folder))) == 3
    assert len(open_rows(folder / "set", split="test", image_root=str(folder))) == 1
    with pytest.raises(DataError, match="no split 'dev'; it has: .*train"):
        open_rows(folder / "set", split="dev")


def test_images_inside_hugging_face_data_sets_stay_encoded(folder):
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20)).save(buffer, "PNG")
    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    rows = {"prompt": ["q", "r"], "images": [[{"bytes": buffer.getvalue(), "path": None}], []]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder / "saved")
    first, second = open_rows(folder / "saved")
    assert first.images == [{"bytes": buffer.getvalue(), "path": None}] and second.images == []


def test_rows_know_where_they_come_from(folder, jsonl):
    dataset = open_rows(jsonl)
    assert [row.source for row in dataset] == [f"{jsonl}:{line}" for line in (1, 3, 5)]
    assert [row.index for row in dataset] == [0, 1, 2]


def test_several_files_follow_each_other(folder, jsonl):
    other = write_jsonl(folder / "other.jsonl", [{"prompt": "where?"}])
    dataset = open_rows(f"{jsonl}, {other}")
    assert dataset.sizes == [3, 1] and dataset[3].source == f"{other}:1"


def test_max_rows_counts_good_rows_of_each_file(folder, jsonl):
    rows = [{"prompt": ""}, *ROWS, {"nothing": 1}]
    mixed = write_jsonl(folder / "mixed.jsonl", rows)
    dataset = open_rows(f"{mixed},{jsonl}", max_rows=2, on_bad_row="skip")
    assert dataset.sizes == [2, 2] and dataset.skipped == {"bad row": 1}


def bad_rows(folder):
    (folder / "broken.png").write_bytes(b"not a picture")
    return {
        "missing image": ({"prompt": "q", "images": ["gone.png"]}, f"file not found: {folder / 'gone.png'}"),
        "broken image": ({"prompt": "q", "images": ["broken.png"]}, f"{folder / 'broken.png'} is not an image"),
        "missing column": ({"question": "q"}, "no column 'prompt'"),
        "counts": ({"prompt": "<image>", "images": []}, "1 image placeholder"),
        "remote": ({"prompt": "q", "images": ["http://host/a.png"]}, "allow_remote"),
        "video": ({"prompt": "q", "videos": ["gone.mp4"]}, "gone.mp4"),
    }


@pytest.mark.parametrize("case", ["missing image", "broken image", "missing column", "counts", "remote", "video"])
def test_a_bad_row_stops_the_start_naming_file_row_and_path_or_is_counted(folder, case, caplog):
    bad, message = bad_rows(folder)[case]
    path = write_jsonl(folder / "rows.jsonl", [ROWS[0], bad, ROWS[2]])
    with pytest.raises(DataError) as caught:
        open_rows(path)
    assert str(caught.value).startswith(f"{path}:3: ") and message in str(caught.value)
    with caplog.at_level(logging.WARNING):
        dataset = open_rows(path, on_bad_row="skip")
    assert [row.reference for row in dataset] == ["red", "3"] and dataset.skipped == {"bad row": 1}
    assert message in caplog.text and "1 row(s) skipped as bad row, 2 left" in caplog.text


def test_malformed_json_names_its_line(folder):
    path = folder / "rows.jsonl"
    path.write_text('{"prompt": "q"}\n{"prompt": \n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: not valid JSON"):
        open_rows(path)
    assert len(open_rows(path, on_bad_row="skip")) == 1


def test_limits_on_pixels_apply_at_start(jsonl):
    with pytest.raises(DataError, match="rows.jsonl:3: .*84x112 pixels, above max_image_pixels = 5000"):
        open_rows(jsonl, max_image_pixels=5000)


def test_unusable_files(folder):
    (folder / "rows.xlsx").write_text("a")
    (folder / "object.json").write_text("{}")
    (folder / "rows.parquet").write_text("no parquet")
    (folder / "empty.jsonl").touch()
    (folder / "nothing").mkdir()
    cases = {
        "gone.jsonl": "not found: .*gone.jsonl",
        "rows.xlsx": "unknown kind",
        "object.json": "expected a list",
        "rows.parquet": "not a parquet",
        "empty.jsonl": "no usable row",
        "nothing": "not a data set folder",
    }
    for name, message in cases.items():
        with pytest.raises(DataError, match=message):
            open_rows(folder / name)
    with pytest.raises(DataError, match="no data set named"):
        open_rows(" , ")


def test_rendering_follows_the_chat_template(jsonl, processor):
    first, second, third = open_rows(jsonl)
    config = DataConfig()
    assert render_prompt(first, processor, config) == (
        f"<|im_start|>user\n{PADS}what colour is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert f"first {PADS} or {PADS}<|im_end|>" in render_prompt(second, processor, config)
    with_system = render_prompt(third, processor, DataConfig(system_prompt="Be brief."))
    assert with_system.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nwhat is 1 plus 2?")


def test_a_rows_own_system_message_wins(processor):
    row = PromptRow([{"role": "system", "content": [{"type": "text", "text": "mine"}]},
                     {"role": "user", "content": [{"type": "text", "text": "q"}]}])  # fmt: skip
    rendered = render_prompt(row, processor, DataConfig(system_prompt="theirs"))
    assert "mine" in rendered and "theirs" not in rendered


def test_text_only_models_take_text_rows_only(jsonl, tokenizer, processor):
    first, _, third = open_rows(jsonl)
    assert render_prompt(third, tokenizer, DataConfig()) == render_prompt(third, processor, DataConfig())
    with pytest.raises(DataError, match="rows.jsonl:1: .*no processor"):
        render_prompt(first, tokenizer, DataConfig())


def test_without_chat_template(jsonl):
    bare = build_tokenizer(vocabulary_texts())
    bare.chat_template = None
    row = open_rows(jsonl)[2]
    with pytest.raises(ConfigError, match="no chat template"):
        render_prompt(row, bare, DataConfig())
    raw = DataConfig(apply_chat_template=False)
    assert render_prompt(PromptRow("as it stands <image>"), bare, raw) == "as it stands <image>"


def test_lengths_count_expanded_images_without_decoding(folder, jsonl, tokenizer, processor):
    dataset = open_rows(jsonl)
    prompts = [render_prompt(row, processor, dataset.config) for row in dataset]
    exact = MultimodalDataProcessor(tokenizer, processor, 10**6).process_multimodal_batch(
        prompts, [row.images for row in dataset]
    )
    assert list(dataset._lengths(list(dataset), processor)) == [len(ids) for ids in exact.all_prompt_token_ids]


def test_long_prompts_are_refused_or_skipped_never_cut(folder, jsonl, processor, caplog):
    lengths = list(open_rows(jsonl)._lengths(list(open_rows(jsonl)), processor))
    assert max(lengths) == lengths[1]
    open_rows(jsonl).check_lengths(processor, lengths[1])
    with pytest.raises(DataError, match=rf"rows.jsonl:3: the prompt has {lengths[1]} tokens, above prompt_max_len"):
        open_rows(jsonl).check_lengths(processor, lengths[1] - 1)
    dataset = open_rows(jsonl, on_long_prompt="skip")
    dataset.check_lengths(processor, lengths[1] - 1)
    assert [row.reference for row in dataset] == ["red", "3"] and dataset.skipped == {"long prompt": 1}
    assert [row.index for row in dataset] == [0, 1]
    dataset.check_lengths(processor, lengths[1] - 1)
    with pytest.raises(DataError, match="no row of at most prompt_max_len = 1"):
        dataset.check_lengths(processor, 1)


def test_videos_are_counted_too(folder, processor, tokenizer):
    rows = [{"prompt": "<video>what?", "videos": [["a.png", "a.png", "a.png"]]}]
    dataset = open_rows(write_jsonl(folder / "v.jsonl", rows))
    prompt = render_prompt(dataset[0], processor, dataset.config)
    data = MultimodalDataProcessor(tokenizer, processor, 10**6)
    exact = data.process_multimodal_batch([prompt], all_videos=[dataset[0].videos]).all_prompt_token_ids[0]
    assert list(dataset._lengths([dataset[0]], processor)) == [len(exact)]


def test_a_placeholder_token_typed_into_the_text_is_found_at_start(folder, processor):
    path = write_jsonl(folder / "rows.jsonl", [{"prompt": "what is <|image_pad|>?"}])
    with pytest.raises(DataError, match="rows.jsonl:1: .* 1 image placeholder.* but 0 image"):
        open_rows(path).check_lengths(processor, 100)


def test_mixing_probabilities_are_numbers():
    assert mixing_probabilities(None) is None
    assert mixing_probabilities("0.7, 0.3") == [0.7, 0.3]
    with pytest.raises(ConfigError, match="0.7,x"):
        DataConfig(prompt_data_probs="0.7,x")


def test_the_embedded_task_loads_for_training_and_evaluation(tmp_path, processor):
    task = build_embedded_task(tmp_path, n_train=40, n_eval=20)
    config = DataConfig(prompt_data=str(task.train), eval_data=str(task.test), max_eval_samples=10)
    train, evaluation = PromptDataset.for_training(config), PromptDataset.for_evaluation(config)
    assert (len(train), len(evaluation)) == (40, 10)
    train.check_lengths(processor, 64)
    assert not train.skipped
    with pytest.raises(ConfigError, match="no eval_data"):
        PromptDataset.for_evaluation(DataConfig())


def test_csv_and_text_files_are_rows(folder):
    (folder / "metadata.csv").write_text('prompt,reference,extra\n"how many, here?",3,x\nwhat?,red,y\n')
    (folder / "lines.txt").write_text("a red circle\n\n  a blue square \n")
    rows = open_rows(folder / "metadata.csv")
    assert [(row.reference, row.metadata) for row in rows] == [("3", {"extra": "x"}), ("red", {"extra": "y"})]
    assert "how many, here?" in str(rows[0].prompt)
    assert [
        len(open_rows(folder / "lines.txt")),
        "a blue square" in str(open_rows(folder / "lines.txt")[1].prompt),
    ] == [2, True]


def test_a_csv_row_with_more_fields_than_the_header_is_a_bad_row(folder):
    path = folder / "metadata.csv"
    path.write_text("prompt,reference\nfirst?,1\nhow many, here?,3\nlast?,2\n")
    with pytest.raises(DataError, match=r"metadata.csv:row 1: 1 more field\(s\) than the header: \['3'\]"):
        open_rows(path)
    dataset = open_rows(path, on_bad_row="skip")
    assert [row.reference for row in dataset] == ["1", "2"] and dataset.skipped == {"bad row": 1}


@pytest.mark.parametrize(
    "name,is_hub_name", [("hiyouga/geometry3k", True), ("data/rows.jsonl", False), ("/a/b", False)]
)
def test_a_name_on_the_hub_is_answered_by_how_to_save_it(folder, name, is_hub_name):
    with pytest.raises(DataError, match=f"data set not found: {name}") as caught:
        open_rows(name)
    advice = "datasets.load_dataset('hiyouga/geometry3k').save_to_disk('geometry3k')"
    assert (advice in str(caught.value)) == is_hub_name


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_more_images_than_the_engine_takes_are_found_before_it_starts(folder, policy):
    path = write_jsonl(folder / "many.jsonl", ROWS)
    config, limits = DataConfig(on_bad_row=policy), RolloutConfig(limit_mm_image_per_prompt=1)
    if policy == "error":
        with pytest.raises(DataError, match=r"many.jsonl:3.*2 images, above limit_mm_image_per_prompt = 1"):
            PromptDataset(path, config, split="train", max_rows=10, limits=limits)
        return
    dataset = PromptDataset(path, config, split="train", max_rows=10, limits=limits)
    assert len(dataset) == 2 and dataset.skipped["bad row"] == 1
