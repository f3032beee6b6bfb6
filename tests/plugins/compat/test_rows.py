"""Data of other systems, each in a file as that system writes it; one test for each row of docs/coming_from.md."""

import json
import logging

import datasets
import numpy as np
import pytest
import row_files
from row_files import parts, roles

from lightrft_visual.config.diffusion import DiffusionDataConfig
from lightrft_visual.config.sft import SFTDataConfig
from lightrft_visual.config.vl import DataConfig
from lightrft_visual.data.drawing_prompts import DrawPrompts
from lightrft_visual.data.prompts import PromptDataset
from lightrft_visual.data.rows import parse_row, response_of
from lightrft_visual.errors import ConfigError, DataError

png, read = row_files.png, row_files.read


@pytest.mark.parametrize("column", ["video", "videos"])
@pytest.mark.parametrize("mark", ["<image>", "<video>"])
def test_llava_video_whose_place_is_marked_as_an_image_is_read(column, mark):
    turns = [{"from": "human", "value": f"{mark}what?"}, {"from": "gpt", "value": "red"}]
    row = parse_row({column: "a.mp4", "conversations": turns}, DataConfig(), source="rows", root=None)
    assert (parts(row), row.videos, row.images) == ("[video]what?", ["a.mp4"], [])
    row = parse_row({column: "a.mp4", "image": "a.png", "conversations": turns}, DataConfig(), source="rows", root=None)
    assert (row.videos, row.images) == (["a.mp4"], ["a.png"])


@pytest.mark.parametrize("column", ["image_path", "img", "image_url", "pics"])
def test_llava_places_of_images_stay_beside_a_video_where_the_images_have_a_column_of_any_name(column):
    turns = [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "red"}]
    raw = {"video": "a.mp4", column: "data:image/png;base64,iVBORw0KGgo=", "conversations": turns}
    config = DataConfig(images_key=column) if column == "pics" else DataConfig()
    row = parse_row(raw, config, source="rows", root=None)
    assert parts(row) == "[image][video]what?" and len(row.images) == len(row.videos) == 1


def test_verl(read, png, tmp_path):
    def rows(image):
        return [{
            "data_source": "hiyouga/geometry3k",
            "prompt": [{"role": "user", "content": "<image>Find x."}],
            "images": [image],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "3"},
            "extra_info": {"split": "train", "index": 0, "answer": "3", "question": "<image>Find x."},
        }]  # fmt: skip

    for image in ({"image": "a.png"}, {"image": png}, {"bytes": png, "path": None}):
        (row,) = read("train.parquet", rows(image))
        assert (parts(row), row.reference, row.label) == ("[image]Find x.", "3", "hiyouga/geometry3k")
        assert row.images[0].size == (30, 20)
        assert row.metadata["data_source"] == row.label and row.metadata["extra_info"]["index"] == 0


def test_alpaca_input_stands_below_the_instruction(read):
    rows = [{"instruction": "Add.", "input": more, "answer": "5"} for more in ("2 and 3", "", None)]
    assert [parts(row) for row in read("alpaca.jsonl", rows)] == ["Add.\n2 and 3", "Add.", "Add."]


def test_alpaca_system_stands_before_the_instruction(read):
    rows = [
        {"instruction": "Add.", "input": "2 and 3", "system": said, "answer": "5"} for said in ("Be brief.", "", None)
    ]
    first, *others = read("alpaca.jsonl", rows)
    assert roles(first) == ["system", "user"] and first.prompt[0]["content"][0]["text"] == "Be brief."
    assert [roles(row) for row in others] == [["user"], ["user"]]
    assert {parts(row) for row in (first, *others)} == {"Add.\n2 and 3"} and first.metadata["instruction"] == "Add."


@pytest.mark.parametrize("asked", [{"instruction": "Add.", "input": ""}, {"query": "Add."}])
@pytest.mark.parametrize("written", [lambda turns: turns, json.dumps])
def test_history_of_alpaca_and_ms_swift_rows_is_earlier_turns_behind_the_system_message(read, asked, written):
    turns = [["Count.", "1"], ["Go on.", "2"]]
    rows = [asked | {"answer": "5", "system": "Be brief.", "history": written(turns)}]
    rows += [asked | {"answer": "5", "history": told} for told in ([], None, "written in 1990")]
    first, *others = read("history.jsonl", rows)
    assert roles(first) == ["system", "user", "assistant", "user", "assistant", "user"]
    texts = [message["content"][0]["text"] for message in first.prompt]
    assert texts == ["Be brief.", "Count.", "1", "Go on.", "2", "Add."]
    assert [roles(row) for row in others] == [["user"]] * 3
    (row,) = read("messages.jsonl", [asked | {"answer": "5", "history": [{"role": "user", "content": "Count."}]}])
    assert roles(row) == ["user", "user"]
    with pytest.raises(DataError, match="column 'history' must hold pairs of a question and its answer"):
        read("other.jsonl", [asked | {"answer": "5", "history": [["Count.", None]]}])


def test_trl_completion_is_what_supervised_training_answers_whatever_the_reference_column_holds(read):
    said = {"role": "assistant", "content": "it is 5"}
    asked = [{"role": "user", "content": "2 and 3?"}]
    rows = [
        {"prompt": "2 and 3?", "completion": "it is 5", "answer": "5"},
        {"prompt": asked, "completion": [said], "answer": "5"},
        {"messages": [*asked, said], "answer": "5"},
        {"instruction": "2 and 3?", "input": "", "output": "it is 5", "answer": "5"},
    ]
    for row in read("trl.jsonl", rows):
        assert (parts(row), response_of(row, "response"), row.reference) == ("2 and 3?", "it is 5", "5")


SAID = {"role": "assistant", "content": "it is 5"}
SEVERAL = [{"role": "assistant", "content": "wait"}, {"role": "user", "content": "and?"}, SAID]


@pytest.mark.parametrize("prompt", ["2 and 3?", [{"role": "user", "content": "2 and 3?"}]])
@pytest.mark.parametrize("written", [lambda turns: turns, json.dumps])
def test_of_a_trl_completion_of_several_messages_a_supervised_run_trains_the_last_behind_the_others(prompt, written):
    raw = {"prompt": prompt, "completion": written(SEVERAL), "answer": "5"}
    row = parse_row(raw, SFTDataConfig(), source="rows", root=None)
    assert roles(row) == ["user", "assistant", "user"] and row.prompt[0]["content"] == [
        {"type": "text", "text": "2 and 3?"}
    ]
    assert (response_of(row, "response"), row.reference) == ("it is 5", "5")
    given = parse_row(raw, DataConfig(), source="rows", root=None)
    assert (roles(given), given.reference) == (["user"], "5")


def test_a_trl_completion_of_one_mapping_is_the_message_that_is_trained():
    row = parse_row({"prompt": "q", "completion": SAID, "answer": "5"}, SFTDataConfig(), source="rows", root=None)
    assert (parts(row), response_of(row, "response")) == ("q", "it is 5")


@pytest.mark.parametrize(
    "completion", [[], 3, ["it is 5"], np.array(["it", "is"]), [*SEVERAL, {"role": "user", "content": "and?"}]]
)
def test_a_trl_completion_that_does_not_end_with_an_answer_is_refused_where_it_is_trained(completion):
    raw = {"prompt": "q", "completion": completion, "answer": "5"}
    with pytest.raises(DataError, match="column 'completion' must hold a text, or chat messages that end"):
        parse_row(raw, SFTDataConfig(), source="rows", root=None)
    assert parse_row(raw, DataConfig(), source="rows", root=None).reference == "5"
    named = parse_row(raw | {"response": "five"}, SFTDataConfig(), source="rows", root=None)
    assert response_of(named, "response") == "five"


@pytest.mark.parametrize("completion", [3, ["it is 5"], SEVERAL, json.dumps(SEVERAL), [*SEVERAL, *SEVERAL[1:2]]])
def test_a_named_completion_that_is_no_reference_is_refused_where_rewards_have_no_other(completion):
    raw, named = {"prompt": "q", "completion": completion}, DataConfig(data_format="completion")
    with pytest.raises(DataError, match="rows: column 'completion' must hold a text, or one message of the assistant"):
        parse_row(raw, named, source="rows", root=None)
    assert parse_row(raw, DataConfig(), source="rows", root=None).reference is None
    assert parse_row(raw | {"answer": "5"}, named, source="rows", root=None).reference == "5"
    own = SFTDataConfig(data_format="completion")
    row = parse_row(raw | {"response": "five"}, own, source="rows", root=None)
    assert (response_of(row, "response"), row.reference) == ("five", None)


@pytest.mark.parametrize("text", ["[120, 30]", '[{"bbox": [1, 2], "label": "dog"}]', '[{"role": "subject"}]', "[]"])
def test_a_trl_completion_that_is_a_text_of_json_is_a_text(text):
    raw = {"prompt": "where?", "completion": text}
    assert response_of(parse_row(raw, SFTDataConfig(), source="rows", root=None), "response") == text
    assert parse_row(raw, DataConfig(), source="rows", root=None).reference == text


def test_a_completion_of_pandas_that_is_nan_is_none():
    raw = {"prompt": "q", "completion": float("nan"), "answer": "5"}
    assert response_of(parse_row(raw, SFTDataConfig(), source="rows", root=None), "response") == "5"


def test_a_completion_beside_verls_columns_is_what_supervised_training_answers():
    raw = {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "5"}, "completion": [SAID]}
    assert response_of(parse_row(raw, SFTDataConfig(), source="rows", root=None), "response") == "it is 5"
    assert parse_row(raw, DataConfig(), source="rows", root=None).reference == "5"


def test_what_an_answer_has_beside_its_text_matters_to_runs_alone_that_train_it():
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    raw = {"messages": [{"role": "user", "content": "q"}, called], "answer": "5"}
    assert parse_row(raw, DataConfig(data_format="messages"), source="rows", root=None).reference == "5"
    own = SFTDataConfig(data_format="completion", response_key="solution")
    row = parse_row({"prompt": "q", "completion": ["a", "b"], "solution": "five"}, own, source="rows", root=None)
    assert response_of(row, "solution") == "five"
    for beside in (float("nan"), None, " ", []):
        raw = {"messages": [{"role": "user", "content": "q"}, {**SAID, "tool_calls": beside, "audio": beside}]}
        assert response_of(parse_row(raw, SFTDataConfig(), source="rows", root=None), "response") == "it is 5"


def test_a_trl_completion_with_tool_calls_is_refused_where_it_is_trained():
    completion = [*SEVERAL[:2], {**SAID, "tool_calls": [{"id": "1"}]}]
    for turns in (completion, completion[2:]):
        with pytest.raises(DataError, match="the answer has tool_calls"):
            parse_row({"prompt": "q", "completion": turns}, SFTDataConfig(), source="rows", root=None)


def test_llava(read):
    rows = [
        {"id": "1", "image": "a.png", "conversations": [
            {"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A square."},
            {"from": "human", "value": "Which colour?"}, {"from": "gpt", "value": "Red."}]},
        {"id": "2", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
    ]  # fmt: skip
    first, second = read("llava.json", rows)
    assert roles(first) == ["user", "assistant", "user"] and parts(first) == "Which colour?"
    assert first.prompt[0]["content"][0] == {"type": "image"} and first.images[0].size == (30, 20)
    assert (first.reference, first.metadata) == ("Red.", {"id": "1"})
    assert (parts(second), second.reference, second.images) == ("Hello", "Hi", [])


def test_sharegpt(read):
    turns = [{"from": "human", "value": "<image><image>Which?"}, {"from": "gpt", "value": "the second"}]
    row = {"conversations": turns, "system": "Be brief.", "images": ["a.png", "a.png"], "solution": "2"}
    (row,) = read("sharegpt.jsonl", [row])
    assert roles(row) == ["system", "user"] and parts(row) == "[image][image]Which?"
    assert (len(row.images), row.reference) == (2, "2")
    with pytest.raises(DataError, match="turn 0 of conversations is from 'tool'"):
        read("sharegpt.jsonl", [{"conversations": [{"from": "tool", "value": "x"}]}])


def test_tool_calls_beside_a_turn_of_sharegpt_are_refused_as_those_of_messages_are():
    asked, said = {"from": "human", "value": "2 and 3?"}, {"from": "gpt", "value": "it is 5"}
    calling = {"from": "gpt", "value": "I add", "tool_calls": [{"id": "1"}]}
    for config in (DataConfig(), SFTDataConfig()):
        with pytest.raises(DataError, match="message 1 has tool_calls, which are not read"):
            parse_row({"conversations": [asked, calling, asked, said]}, config, source="rows", root=None)
        row = {"conversations": [asked, {**said, "tool_calls": None}], "answer": "5"}
        assert parse_row(row, config, source="rows", root=None).reference == "5"
    answered = {"conversations": [asked, calling], "answer": "5"}
    with pytest.raises(DataError, match="the answer has tool_calls"):
        parse_row(answered, SFTDataConfig(), source="rows", root=None)
    assert parse_row(answered, DataConfig(), source="rows", root=None).reference == "5"


def test_easyr1_and_trl(read, png):
    image = {"bytes": png, "path": None}
    message = {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "Find x."}]}
    rows = {
        "easyr1": {"problem": "<image>Find x.", "answer": "3", "images": [image]},
        "trl": {"prompt": [message], "image": image, "solution": "3"},
    }
    for name, own in rows.items():
        (row,) = read(f"{name}.parquet", [own])
        assert (parts(row), row.reference, row.images[0].size) == ("[image]Find x.", "3", (30, 20))
        assert name == "trl" or row.metadata["problem"] == "<image>Find x."
    (row,) = read("trl.jsonl", [{"prompt": "Find x.", "solution": "3"}])
    assert (parts(row), row.reference) == ("Find x.", "3")


def test_openrlhf(read):
    (row,) = read("openrlhf.jsonl", [{"input": "What is 1 + 2?", "label": "3", "level": 1}])
    assert (parts(row), row.reference, row.label) == ("What is 1 + 2?", "3", None)
    assert row.metadata == {"input": "What is 1 + 2?", "level": 1}
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    (row,) = read("openrlhf.jsonl", [{"input": json.dumps(messages), "label": 3}])
    assert (parts(row), row.reference) == ("What is 1 + 2?", 3)


def test_hugging_face_image_columns(tmp_path, png):
    features = datasets.Features(
        {"image": datasets.Image(), "question": datasets.Value("string"), "answer": datasets.Value("string")}
    )
    rows = {"image": [{"bytes": png, "path": None}], "question": ["Which colour?"], "answer": ["red"]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    dataset = PromptDataset(str(tmp_path / "saved"), DataConfig(), split="train", max_rows=9)
    row = dataset.load(0)
    assert (parts(row), row.reference, row.images[0].size) == ("[image]Which colour?", "red", (30, 20))


def test_vrl_manifest(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('A sign that says "OPEN".\n\nA red cube.\n')
    rows = DrawPrompts(str(path), "train", 9, DiffusionDataConfig(), False).rows
    assert [row.prompt for row in rows] == ['A sign that says "OPEN".', "A red cube."]


def test_metadata_csv_of_video_trainers(tmp_path, png):
    path = tmp_path / "metadata.csv"
    path.write_text('video,prompt,input_image\nclip.mp4,"a man, walking",a.png\n')
    (row,) = DrawPrompts(str(path), "train", 9, DiffusionDataConfig(), True)
    assert (row.prompt, row.images[0].size) == ("a man, walking", (30, 20))


QUESTION = {"problem": "q", "answer": "3"}


def test_what_is_recognised_is_said_in_one_line(read, caplog):
    with caplog.at_level(logging.INFO):
        read("easyr1.jsonl", [{**QUESTION, "image": "a.png"}] * 3)
    lines = [record.getMessage() for record in caplog.records if "rows read as" in record.getMessage()]
    assert len(lines) == 1 and "rows read as question, images from column 'image'; --data_format plain" in lines[0]


def test_a_setting_overrules_the_columns(read):
    with pytest.raises(DataError, match="no column 'prompt'"):
        read("a.jsonl", [QUESTION], data_format="plain")
    with pytest.raises(DataError, match="not a row of data_format verl; it has: problem, answer"):
        read("a.jsonl", [QUESTION], data_format="verl")
    (row,) = read("a.jsonl", [{**QUESTION, "question": "other"}], input_key="question")
    assert parts(row) == "other"
    (row,) = read("a.jsonl", [{"prompt": "mine", **QUESTION}])
    assert (parts(row), row.form) == ("mine", None)
    (row,) = read("a.jsonl", [{"prompt": "mine", **QUESTION}], data_format="question")
    assert (parts(row), row.form) == ("q", "question")
    with pytest.raises(ConfigError, match="data_format"):
        DataConfig(data_format="llama")


def test_geometry3k_asks_in_the_words_of_easyr1_and_verl(read, png):
    (row,) = read(
        "a.parquet", [{"images": [png], "problem": "<image>Find x. ", "answer": "3"}], data_format="geometry3k"
    )
    assert parts(row).startswith("[image]Find x. You FIRST think") and parts(row).endswith(
        "within <think> </think> tags. The final answer MUST BE put in \\boxed{}."
    )
    assert row.reference == "3"
