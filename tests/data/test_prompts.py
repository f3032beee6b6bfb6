"""Prompt data sets from files of every kind: the same rows, checks at start, rendering and length limits."""

import io
import itertools
import json
import logging
import re
import threading
import zipfile

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from played_ranks import played
from tiny_models import begin_with_bos

import lightrft_visual.data.prompts as prompts_module
import lightrft_visual.data.rendering as rendering
import lightrft_visual.data.video as video_module
from lightrft_visual.config.vl import DataConfig, RolloutConfig
from lightrft_visual.data import bad_rows
from lightrft_visual.data.bad_rows import TOLD, BadRow, BadRows, cause_of, list_bad_rows
from lightrft_visual.data.media import image_size
from lightrft_visual.data.prompts import PromptDataset, PromptRow, RowChecks
from lightrft_visual.data.rendering import check_template_kwargs, messages_of, render_answer, render_prompt
from lightrft_visual.data.rows import parse_row
from lightrft_visual.errors import ConfigError, DataError
from lightrft_visual.given import GivenRows
from lightrft_visual.models.tiny.vlm import build_processor, build_tokenizer
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor
from lightrft_visual.runtime import collectives

PADS = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


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


def open_rows(spec, split="train", max_rows=10**6, checks=None, **settings):
    """A share of bad rows that fits files of a few rows; the limit has tests of its own."""
    settings.setdefault("max_bad_share", 0.9)
    return PromptDataset(str(spec), DataConfig(**settings), split=split, max_rows=max_rows, checks=checks)


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


@pytest.mark.parametrize("name", ["set[1]", "a::b/set", "s*t"])
def test_a_folder_of_data_files_whose_path_is_a_pattern_is_refused_and_one_that_was_saved_is_read(folder, name):
    for each in (name, "set1"):
        (folder / each).mkdir(parents=True)
        write_jsonl(folder / each / "train.jsonl", ROWS[:1])
    with pytest.raises(DataError, match="reads .* as a pattern, .* rename it, or name its files"):
        open_rows(folder / name)
    assert len(open_rows(folder / name / "train.jsonl", image_root=str(folder))) == 1
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    saved = (folder / "saved").rename(folder / name / "saved")
    if "::" not in name:
        assert len(open_rows(saved, image_root=str(folder))) == 3
        return
    with pytest.raises(DataError, match="as a pattern"):
        open_rows(saved)


def test_images_inside_hugging_face_data_sets_stay_encoded(folder):
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20)).save(buffer, "PNG")
    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    rows = {"prompt": ["q", "r"], "images": [[{"bytes": buffer.getvalue(), "path": None}], []]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder / "saved")
    first, second = open_rows(folder / "saved")
    assert first.images == [{"bytes": buffer.getvalue(), "path": None}] and second.images == []


@pytest.mark.parametrize(
    ("text", "told"),
    [("see \ud800", r"is not text in UTF-8: 'see \\\\ud800'"), ("see <|image_pad|>", r"holds <\|image_pad\|>, which")],
)
def test_a_system_prompt_that_no_row_can_have_is_refused_by_its_name(jsonl, processor, text, told):
    with pytest.raises(ConfigError, match=f"^system_prompt {told}"):
        open_rows(jsonl, checks=RowChecks(None, processor, 10**6), system_prompt=text, on_bad_row="skip")


def test_max_rows_counts_good_rows_of_each_file_and_says_where_it_cuts(folder, jsonl, caplog):
    caplog.set_level(logging.INFO)
    rows = [{"prompt": ""}, *ROWS, {"nothing": 1}]
    mixed = write_jsonl(folder / "mixed.jsonl", rows)
    dataset = open_rows(f"{mixed},{jsonl}", max_rows=2, on_bad_row="skip")
    assert dataset.sizes == [2, 2] and dataset.bad.causes == {"prompt form": 1}
    assert f"{mixed}: the first 2 usable rows of 5 are taken (max_samples, of" in caplog.text
    assert f"{jsonl}: the first 2 usable rows of 3 are taken" in caplog.text
    caplog.clear()
    assert len(open_rows(jsonl, max_rows=3)) == 3 and "are taken" not in caplog.text
    assert dataset[2].source == f"{jsonl}:1"  # files follow each other


def test_ranks_that_have_opened_their_data_meet_without_a_time_limit_before_they_tell_each_other(jsonl, monkeypatch):
    """A host without a cache of its own fetches them first."""
    told = []
    for owner, name in (
        (prompts_module, "open_source"), (collectives, "meet"), (collectives, "all_gather_object"),
    ):  # fmt: skip
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, n=name, plain=plain: told.append(n) or plain(*given))
    open_rows(jsonl)
    assert told[:3] == ["open_source", "meet", "all_gather_object"] and told.count("meet") == 1


@pytest.mark.parametrize(("videos", "counts"), [([], (2, 18, 34, 40)), (["a.mp4"], range(2, 41, 2))])
def test_checks_of_many_rows_say_how_far_they_are_and_ranks_meet_sooner_where_there_are_videos(
    folder, monkeypatch, caplog, videos, counts
):
    monkeypatch.setattr(prompts_module, "_CHUNK", 16)
    monkeypatch.setattr(prompts_module, "_SILENCE", -1.0)
    monkeypatch.setattr(prompts_module, "check_video", lambda *given, **settings: None)
    with caplog.at_level(logging.INFO):
        open_rows(write_jsonl(folder / "many.jsonl", [ROWS[2] | {"videos": videos}] * 40))
    said = [line for line in caplog.messages if line.endswith("rows are checked")]
    assert said == [f"{folder}/many.jsonl: {count} of 40 rows are checked" for count in counts]


def test_all_threads_have_a_part_of_few_rows(folder, monkeypatch):
    seen = set()
    monkeypatch.setattr(
        PromptDataset, "_inspect", lambda self, source, row: seen.add(threading.get_ident()) or met(row)
    )
    everyone, known = threading.Barrier(8), prompts_module._Found(None, frozenset(), None, False)

    def met(row):
        everyone.wait(60)
        return known

    open_rows(write_jsonl(folder / "few.jsonl", [ROWS[2]] * 16))
    assert len(seen) == 8


PLAIN = [{"prompt": f"what is {number} plus 1?"} for number in range(3)]
OTHERS = {
    "shuffled without a seed": (PLAIN[::-1], "3 rows, .* on rank 0, 3 rows, .* on rank 1, 3"),
    "longer": (PLAIN * 2, r"\[3\] rows on rank 0, \[6\] rows on rank 1, 3"),
}


@pytest.mark.parametrize("how", OTHERS)
def test_ranks_with_other_data_are_refused_on_all_of_them_alike(monkeypatch, how):
    rows, told = OTHERS[how]
    held = [GivenRows(rows if rank % 2 else PLAIN, "train_dataset") for rank in range(4)]
    monkeypatch.setattr(prompts_module, "open_source", lambda path, split: held[collectives.rank()])
    raised = played(monkeypatch, 4, lambda rank: open_rows("python:train_dataset"))
    assert len({str(error) for error in raised}) == 1 and isinstance(raised[0], DataError)
    assert re.search(f"^python:train_dataset: ranks do not have the same data: {told}; .*with a seed", str(raised[0]))


class DrawnAnew:
    """Rows in other words each time."""

    def __init__(self):
        self.words = itertools.count()

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return {"prompt": f"what is {index}? {next(self.words)}"}


def test_rows_that_are_drawn_anew_at_each_reading_are_nobodys_own(monkeypatch):
    monkeypatch.setattr(prompts_module, "open_source", lambda path, split: GivenRows(DrawnAnew(), "train_dataset"))
    assert [len(each) for each in played(monkeypatch, 2, lambda rank: open_rows("python:train_dataset"))] == [2, 2]


def test_a_bad_row_stops_the_start_naming_file_row_and_path_or_is_counted(folder, caplog):
    """Each cause: test_hostile_rows.py."""
    path = write_jsonl(folder / "rows.jsonl", [ROWS[0], {"prompt": "q", "images": ["gone.png"]}, ROWS[2]])
    with pytest.raises(DataError, match=rf"^{path}:3: .*file not found: {folder}/gone.png"):
        open_rows(path)
    with caplog.at_level(logging.WARNING):
        dataset = open_rows(path, on_bad_row="skip")
    assert [row.reference for row in dataset] == ["red", "3"] and dataset.bad.causes == {"file missing": 1}
    assert "gone.png" in caplog.text and "1 of 3 rows left out (33.3%): 1 x file missing" in caplog.text


def test_unusable_files(folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (folder / "rows.xlsx").write_text("a")
    (folder / "empty.jsonl").touch()
    (folder / "nothing").mkdir()
    cases = {
        "data/gone.jsonl": "not found: .*gone.jsonl",
        "rows.xlsx": "unknown kind",
        "empty.jsonl": "no usable row",
        "nothing": "not a data set folder",
    }
    for name, message in cases.items():
        with pytest.raises(DataError, match=message):
            open_rows(folder / name)
    for name, told in (
        (" , ", "no data set named"),
        ("hiyouga/geometry3k", "is no file here, and of the hub .*OFFLINE is"),
    ):
        with pytest.raises(DataError, match=told):
            open_rows(name)


def test_rendering_follows_the_chat_template(jsonl, processor, tokenizer):
    first, second, third = open_rows(jsonl)
    config = DataConfig()
    assert render_prompt(first, processor, config) == (
        f"<|im_start|>user\n{PADS}what colour is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert f"first {PADS} or {PADS}<|im_end|>" in render_prompt(second, processor, config)
    assert render_prompt(third, tokenizer, config) == render_prompt(third, processor, config)
    with pytest.raises(DataError, match="rows.jsonl:1: .*no processor"):
        render_prompt(first, tokenizer, config)
    bare = build_tokenizer()
    bare.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        render_prompt(third, bare, config)
    for template in (
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ):
        bare.chat_template = template
        with pytest.raises(DataError, match="rows.jsonl:5: the chat template refuses the prompt: .+"):
            render_prompt(third, bare, config)
    raw = DataConfig(apply_chat_template=False)
    assert render_prompt(PromptRow("as it stands <image>"), bare, raw) == "as it stands <image>"
    brief = DataConfig(system_prompt="Be brief.")
    with_system = render_prompt(third, processor, brief)
    assert with_system.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nwhat is 1 plus 2?")
    third.prompt.insert(0, {"role": "system", "content": [{"type": "text", "text": "mine"}]})
    own = render_prompt(third, processor, brief)
    assert "mine" in own and "brief" not in own


def test_chat_template_reads_what_it_is_given_besides_and_a_name_that_it_does_not_read_is_refused():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if enable_thinking else '<answer>' }}"
    )
    row = PromptRow([{"role": "user", "content": [{"type": "text", "text": "what?"}]}])
    for given, end in (
        ({}, "<answer>"),
        ({"enable_thinking": True}, "<think>"),
        ({"enable_thinking": False}, "<answer>"),
    ):
        config = DataConfig(chat_template_kwargs=given)
        check_template_kwargs(tokenizer, config)
        assert render_prompt(row, tokenizer, config) == f"what?{end}"
    for name, told in ("enable_think", "reads no enable_think"), ("messages", "messages is set by the run itself"):
        with pytest.raises(ConfigError, match=told):
            check_template_kwargs(tokenizer, DataConfig(chat_template_kwargs={name: True}))


@pytest.mark.parametrize(
    ("template", "system", "roles", "told"),
    [
        (
            "{% for m in messages if m.role != 'developer' %}",
            None,
            ("developer", "user"),
            "message 0, of role 'developer'",
        ),
        ("{% for m in messages if m.role == 'user' %}", "Be brief.", ("user",), "message 0, of role 'system'"),
        ("{% for m in messages %}", None, ("user", "system", "user"), None),
        ("{% for m in messages if m.role == 'user' %}{{ messages[0].content }}", "Be brief.", ("user", "user"), None),
    ],
)
def test_a_message_that_the_template_leaves_out_is_an_error_with_its_role(
    tokenizer, monkeypatch, template, system, roles, told
):
    monkeypatch.setattr(tokenizer, "chat_template", f"{template}{{{{ m.content }}}}\n{{% endfor %}}")
    messages = [{"role": role, "content": [{"type": "text", "text": "a"}]} for role in roles]
    row, config = PromptRow(messages, source="rows:3"), DataConfig(system_prompt=system)
    if told is None:
        assert render_prompt(row, tokenizer, config)
        return
    with pytest.raises(DataError, match=f"rows:3: the chat template leaves out {told}, of a prompt of "):
        render_prompt(row, tokenizer, config)


ASKED = "{% for m in messages if m.role != 'assistant' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ANSWER = (
    "{% set said = (messages | selectattr('role', 'eq', 'assistant') | first | default({})).content | default('') %}"
)
THOUGHTS = "{% set parts = said.split('</think>') %}{% set thought = parts[0].replace('<think>', '').strip() %}"
OPENED = (  # thoughts are opened by the prompt, as Qwen3.5's are
    f"{ANSWER}{THOUGHTS}{ASKED}<|im_start|>assistant\n<think>\n{{% if said %}}{{{{ thought if parts[1:] else '' }}}}"
    "\n</think>\n\n{{ parts[-1].strip() }}<|im_end|>\n{% endif %}"
)
WITHOUT_END = (  # nothing stands behind an answer, as of GLM's
    f"{ANSWER}{THOUGHTS}{ASKED}<|assistant|>{{% if said %}}{{{{ '\n<think>' }}}}{{{{ thought if parts[1:] else '' }}}}"
    "</think>\n{{ parts[-1].strip() }}{% endif %}"
)
TURNS = f"{ANSWER}{ASKED}<start>model\n{{% if said %}}{{{{ said.strip() }}}}<|im_end|>\n{{% endif %}}"  # Gemma's
DROPPED = f"{ANSWER}{THOUGHTS}{ASKED}<start>model\n{{% if said %}}{{{{ parts[-1].strip() }}}}<|im_end|>{{% endif %}}"
OTHER = f"{ANSWER}{ASKED}{{% if said %}}{{{{ said }}}}{{% else %}}<start>{{% endif %}}"
REFUSED = f"{ANSWER}{ASKED}{{% if said %}}{{{{ raise_exception('no answers') }}}}{{% endif %}}"


@pytest.mark.parametrize(
    ("template", "answer", "trained", "end"),
    [
        (None, "42", "42", "<|im_end|>"),
        (None, "<think>\nI see\n</think>\n\n42 ", "<think>\nI see\n</think>\n\n42 ", "<|im_end|>"),
        (OPENED, "42", "\n</think>\n\n42", "<|im_end|>"),
        (OPENED, "<think>\nI see\n</think>\n\n42", "I see\n</think>\n\n42", "<|im_end|>"),
        (WITHOUT_END, "42", "\n<think></think>\n42", "<|endoftext|>"),
        (OPENED, " ", " ", "<|endoftext|>"),
        (WITHOUT_END, "<think>I see</think>42", "\n<think>I see</think>\n42", "<|endoftext|>"),
        (TURNS, "42", "42", "<|im_end|>"),
        (TURNS.replace("<|im_end|>", "<|turn_end|>"), "42", "42", "<|endoftext|>"),  # as of base checkpoints
    ],
)
def test_an_answer_is_what_the_template_writes_of_it_up_to_its_first_end_token(
    tokenizer, caplog, monkeypatch, template, answer, trained, end
):
    monkeypatch.setattr(tokenizer, "chat_template", template or tokenizer.chat_template)
    TOLD.clear()
    row, config = PromptRow([{"role": "user", "content": [{"type": "text", "text": "is it 42?"}]}]), DataConfig()
    prompt, ends = render_prompt(row, tokenizer, config), {"<|endoftext|>": 1, "<|im_end|>": 2}
    assert render_answer(answer, prompt, messages_of(row, config), tokenizer, ends, {}) == (trained, ends[end])
    assert not caplog.records


@pytest.mark.parametrize(
    ("answer", "trained"),
    [
        ("42<|im_end|>\n", ("42", 2)),
        (" 42 <|endoftext|>", (" 42 ", 1)),
        (" 42\n", (" 42\n", 1)),
        ("<|im_end|>", ("", 2)),
    ],
)
def test_an_end_token_that_an_answer_brings_along_is_trained_once_with_and_without_a_template(
    tokenizer, answer, trained
):
    ends = {"<|endoftext|>": 1, "<|im_end|>": 2}
    assert render_answer(answer, "is it 42?", None, tokenizer, ends, {}) == trained
    row, config = PromptRow([{"role": "user", "content": [{"type": "text", "text": "is it 42?"}]}]), DataConfig()
    prompt = render_prompt(row, tokenizer, config)
    text, _ = render_answer(answer, prompt, messages_of(row, config), tokenizer, ends, {})
    assert text.strip() == trained[0].strip()


def test_what_a_template_leaves_out_is_remembered_once_it_is_known(tokenizer, monkeypatch):
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    turns = [{"role": role, "content": [{"type": "text", "text": "so"}]} for role in ("developer", "user")]
    asked, render = [], rendering._templated

    def watched(messages, source, model_input, given):
        known = [key for key in rendering._LEFT_OUT.get(model_input, {}) if key[0] == tokenizer.chat_template]
        asked.append(None if source else known)
        return render(messages, source, model_input, given)

    monkeypatch.setattr(rendering, "_templated", watched)
    for _ in range(2):
        with pytest.raises(DataError, match="leaves out message 0, of role 'developer'"):
            render_prompt(PromptRow(turns, source="rows:1"), tokenizer, DataConfig())
    assert asked == [None, [], None]


@pytest.mark.parametrize("template", [DROPPED, OTHER, REFUSED])
def test_an_answer_that_the_template_does_not_write_whole_stands_as_it_is_and_that_is_said_once(
    tokenizer, caplog, monkeypatch, template
):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    TOLD.clear()
    row, config = PromptRow([{"role": "user", "content": [{"type": "text", "text": "how many?"}]}]), DataConfig()
    prompt, ends = render_prompt(row, tokenizer, config), {"<|endoftext|>": 1, "<|im_end|>": 2}
    for answer in ("<think>I see</think>42", "<think>so</think>7"):
        assert render_answer(answer, prompt, messages_of(row, config), tokenizer, ends, {}) == (answer, 1)
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "trained as they stand" in caplog.text


def test_a_response_is_as_long_as_the_template_writes_it(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", OPENED)
    write_jsonl(folder / "said.jsonl", [{"prompt": "how many?", "response": "42"}])
    most = len(tokenizer.encode("\n</think>\n\n42")) + 1

    def opened(longest):
        supervised = dict(response_key="response", response_max_len=longest, ends={"<|im_end|>": 2})
        return open_rows(folder / "said.jsonl", checks=RowChecks(None, tokenizer, 100, **supervised))

    found = opened(most)
    assert len(found) == 1 and found.longest == lengths(found, tokenizer)[0] + most
    with pytest.raises(DataError, match=f"the response has {most} tokens with its end token"):
        opened(most - 1)


def lengths(dataset, processor):
    """Tokens of each row as the check at the start counts them."""
    checks = RowChecks(None, processor, 10**6)
    checked = PromptDataset(dataset.bad.name, dataset.config, split="train", max_rows=10**6, checks=checks)
    sizes = [[image_size(image) for image in row.images] for row in dataset]
    return checked._lengths([checked._found(row, own) for row, own in zip(dataset, sizes)])


def test_images_inside_a_zip_are_refused_with_the_name_of_the_archive(folder):
    (folder / "zipped").mkdir()
    with zipfile.ZipFile(folder / "zipped" / "train.zip", "w") as archive:
        archive.write(folder / "a.png", "a.png")
        archive.writestr("metadata.csv", "file_name,prompt\na.png,what?\n")
    with pytest.raises(DataError, match="inside .*/zipped/train.zip, and archives are not read: unpack it"):
        open_rows(folder / "zipped")


def test_labels_of_rows_with_videos_are_known(folder, processor):
    video = {"prompt": "<video>what?", "videos": [["a.png", "a.png", "a.png"]]}
    rows = [video | {"label": "seen"}, video, {"prompt": "what?", "label": "read"}]
    for checks in (None, RowChecks(None, processor, 1000)):
        dataset = open_rows(write_jsonl(folder / "videos.jsonl", rows), checks=checks)
        assert (dataset.labels, dataset.video_labels) == ({"seen", "read", None}, {"seen", None})


def test_videos_of_held_out_rows_are_decoded_once_at_the_start(folder, processor, monkeypatch):
    path, decoded = write_jsonl(folder / "videos.jsonl", [{"prompt": "<video>what?", "videos": [["a.png"] * 3]}]), []
    plain = video_module.load_image
    monkeypatch.setattr(video_module, "load_image", lambda *own, **given: decoded.append(own) or plain(*own, **given))
    checks = RowChecks(None, processor, 1000)
    assert len(PromptDataset.for_evaluation(DataConfig(eval_data=path), checks)) == 1 and len(decoded) == 3


def test_a_video_that_the_processor_refuses_is_a_bad_row(folder, tokenizer):
    videos = [{"prompt": "<video>what?", "videos": [["a.png"] * frames]} for frames in (1, 2)]
    path = write_jsonl(folder / "videos.jsonl", videos)
    checks = RowChecks(None, build_processor("qwen3_vl", tokenizer), 1000)
    with pytest.raises(DataError, match=r"videos.jsonl:1: .*processor cannot read its videos: t:1 must be larger"):
        open_rows(path, checks=checks)
    assert len(open_rows(path, checks=checks, on_bad_row="skip", max_bad_share=0.5)) == 1


def test_lengths_count_expanded_images_and_videos_without_decoding(folder, tokenizer, processor, monkeypatch):
    video = {"prompt": "<video>what?", "videos": [["a.png", "a.png", "a.png"]]}
    dataset = open_rows(write_jsonl(folder / "rows.jsonl", [*ROWS, video]))
    prompts = [render_prompt(row, processor, dataset.config) for row in dataset]
    exact = MultimodalDataProcessor(tokenizer, processor, 10**6).process_multimodal_batch(
        prompts, [row.images for row in dataset], all_videos=[row.videos for row in dataset]
    )
    monkeypatch.setattr(prompts_module, "load_image", None)
    assert lengths(dataset, processor) == [len(ids) for ids in exact.all_prompt_token_ids]


def test_lengths_count_the_first_token_once_where_the_template_wrote_it(jsonl):
    processor = build_processor("qwen2_5_vl", build_tokenizer())
    dataset = open_rows(jsonl)
    plain = lengths(dataset, processor)
    begin_with_bos(processor)
    assert lengths(dataset, processor) == [count + 1 for count in plain]


def test_lengths_count_no_token_that_the_template_of_a_tokenizer_does_not_write(folder):
    tokenizer = build_tokenizer()
    text = open_rows(write_jsonl(folder / "text.jsonl", ROWS[2:]))
    plain = lengths(text, tokenizer)
    begin_with_bos(tokenizer, in_template=False)
    assert lengths(text, tokenizer) == plain


def test_long_prompts_are_refused_or_skipped_never_cut(folder, jsonl, processor, caplog):
    counts = lengths(open_rows(jsonl), processor)
    assert max(counts) == counts[1]
    assert len(open_rows(jsonl, checks=RowChecks(None, processor, counts[1]))) == 3
    short = RowChecks(None, processor, counts[1] - 1)
    with pytest.raises(DataError, match=rf"jsonl:3: the prompt has {counts[1]} tokens, .*--on_long_prompt skip"):
        open_rows(jsonl, checks=short, on_bad_row="skip")
    dataset = open_rows(jsonl, checks=short, on_long_prompt="skip")
    assert [row.reference for row in dataset] == ["red", "3"] and dataset.bad.causes == {"long prompt": 1}
    assert [(row.index, row.source) for row in dataset] == [(0, f"{jsonl}:1"), (1, f"{jsonl}:5")]
    with pytest.raises(DataError, match="no usable row among 3: .*3 x long prompt"):
        open_rows(jsonl, checks=RowChecks(None, processor, 1), on_long_prompt="skip")


def test_bad_rows_are_listed_once_also_by_a_resumed_run(folder, tmp_path):
    path = write_jsonl(folder / "rows.jsonl", [{"prompt": "q"}, {"prompt": ""}])
    found = tmp_path / "bad_rows.jsonl"
    for resumed in (False, True, False):
        dataset = open_rows(path, on_bad_row="skip")
        list_bad_rows(tmp_path, resumed, dataset.bad)
        dataset.bad.add(BadRow("other:1", "image damaged", "other:1: damaged", "step 3"))
        lines = [json.loads(line) for line in found.read_text().splitlines()]
        assert [(row["source"], row["cause"], row["found"]) for row in lines] == [
            (f"{path}:3", "prompt form", "start"),
            ("other:1", "image damaged", "step 3"),
        ]
        assert lines[0]["message"].startswith(f"{path}:3: ")


def test_the_list_of_bad_rows_is_read_once_whatever_is_found_in_the_run(tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(bad_rows, "read_jsonl", lambda path: reads.append(path) or [])
    sets = BadRows("training", 1.0), BadRows("held out", 1.0)
    list_bad_rows(tmp_path, True, *sets)
    for number in range(3):
        for each in sets:
            each.add(BadRow(f"a:{number}", "image damaged", "damaged", "step 3"))
    assert len(reads) == 1 and len((tmp_path / bad_rows.FILE_NAME).read_text().splitlines()) == 3


def test_a_truncated_image_inside_a_parquet_file_is_named_by_file_and_row(folder):
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 9).save(buffer, "JPEG")
    image = {"bytes": buffer.getvalue()[:-500], "path": None}
    path = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "q", "images": [image]}]), path)
    dataset = open_rows(path)
    with pytest.raises(DataError, match=r"rows.parquet:row 0: image <\d+ bytes> is damaged") as caught:
        dataset.load(0)
    assert cause_of(caught.value) == "image damaged"
    with pytest.raises(DataError, match=r"rows.parquet:row 0: image .* is damaged.*--on_bad_row skip"):
        PromptDataset.for_evaluation(DataConfig(eval_data=str(path)))


def test_a_list_of_texts_in_a_reference_of_csv_is_several_answers_and_any_other_a_text(folder):
    cells = ['["red", "crimson"]', "[1, 2]", "[]", "[red]", "red"]
    lines = ["prompt,reference", *('what?,"' + cell.replace('"', '""') + '"' for cell in cells)]
    (folder / "rows.csv").write_text("\n".join(lines))
    assert [row.reference for row in open_rows(folder / "rows.csv")] == [["red", "crimson"], *cells[1:]]
    supervised = open_rows(folder / "rows.csv", checks=RowChecks(response_key="response"))
    assert [row.reference for row in supervised] == cells
    rows = open_rows(write_jsonl(folder / "rows.jsonl", [{"prompt": "what?", "reference": cells[0]}]))
    assert rows[0].reference == cells[0]  # a file with types has a list of its own for it


def test_csv_and_text_files_are_rows(folder):
    (folder / "metadata.csv").write_text('prompt,reference,extra\n"how many, here?",3,x\nwhat?,red,y\n')
    (folder / "lines.txt").write_text("a red circle\n\n  a blue square \n")
    rows, lines = open_rows(folder / "metadata.csv"), open_rows(folder / "lines.txt")
    assert [(row.reference, row.metadata) for row in rows] == [("3", {"extra": "x"}), ("red", {"extra": "y"})]
    assert "how many, here?" in str(rows[0].prompt)
    assert len(lines) == 2 and "a blue square" in str(lines[1].prompt)
    (folder / "metadata.csv").write_text("prompt,reference\nfirst?,1\nhow many, here?,3\nlast?,2\n")
    with pytest.raises(DataError, match=r"metadata.csv:row 1: 1 more field\(s\) than the header: \['3'\]"):
        open_rows(folder / "metadata.csv")


@pytest.mark.parametrize(
    ("checks", "cause", "told"),
    [
        (
            RowChecks(RolloutConfig(limit_mm_image_per_prompt=1)), "too many images",
            "rows.jsonl:3.*2 images, above limit_mm_image_per_prompt = 1",
        ),
        (
            RowChecks(labels=frozenset({"colour", "text"})), "label without a recipe",
            "the label 'n' has no reward recipe.*--on_bad_row skip",
        ),
    ],
)  # fmt: skip
def test_rows_that_the_run_cannot_take_are_found_before_it_starts(jsonl, checks, cause, told):
    with pytest.raises(DataError, match=told):
        open_rows(jsonl, checks=checks)
    dataset = open_rows(jsonl, checks=checks, on_bad_row="skip")
    assert len(dataset) == 2 and dataset.labels == {"colour", "text"} and dataset.bad.causes == {cause: 1}


def test_a_row_without_a_label_is_bad_where_labels_are_told(folder):
    with pytest.raises(DataError, match="the row has no label"):
        open_rows(write_jsonl(folder / "none.jsonl", [{"prompt": "q"}]), checks=RowChecks(labels=frozenset({"n"})))


def test_labels_beyond_max_rows_are_read_when_asked_for_each_by_one_rank(folder, monkeypatch):
    rows = [{"prompt": "q", "label": label} for label in ("a", "a", "b", "c")]
    first = write_jsonl(folder / "one.jsonl", [*rows, {"prompt": "", "label": "bad"}])
    second = write_jsonl(folder / "two.jsonl", rows[:1])
    data = open_rows(f"{first},{second}", max_rows=2)
    assert data.labels == {"a"} and data.labels_cut_away() == {"b", "c"}
    assert open_rows(second).labels_cut_away() == set()
    read = set()

    def seen(*row, index, **given):
        read.add((collectives.rank(), index))
        return parse_row(*row, index=index, **given)

    monkeypatch.setattr(prompts_module, "parse_row", seen)
    found = played(monkeypatch, 2, lambda rank: open_rows(f"{first},{second}", max_rows=2).labels_cut_away())
    assert found == [{"b", "c"}] * 2 and {each for each in read if each[1] > 1} == {(0, 2), (0, 3), (1, 4)}


def test_a_prompt_of_megabytes_is_too_long_without_being_tokenized(folder, processor, monkeypatch):
    text = "how many circles are there? " * 600_000  # 16 MiB
    write_jsonl(folder / "huge.jsonl", [{"prompt": "short", "reference": "1"}, {"prompt": text, "reference": "1"}])
    real, given = type(processor.tokenizer).__call__, []

    def counted(self, texts, **options):
        given.append(sum(map(len, texts)))
        return real(self, texts, **options)

    monkeypatch.setattr(type(processor.tokenizer), "__call__", counted)
    checks = RowChecks(None, processor, 512)
    with pytest.raises(DataError, match=f"huge.jsonl:3: .*{len(text)} characters, above prompt_max_len = 512"):
        open_rows(folder / "huge.jsonl", checks=checks)
    dataset = open_rows(folder / "huge.jsonl", checks=checks, on_long_prompt="skip")
    assert len(dataset) == 1 and max(given) < 1000
    with pytest.raises(DataError, match="prompt 0 has .* characters"):
        MultimodalDataProcessor(processor.tokenizer, processor, 512).process_multimodal_batch([text])


@pytest.mark.parametrize("change", ["reordered", "edited", "grown"])
def test_a_resumed_run_knows_its_data_wherever_they_lie(tmp_path, change):
    rows = [{"prompt": f"what is {number} plus 1?"} for number in range(100)]
    others = {
        "reordered": rows[1:] + rows[:1],
        "edited": [{"prompt": row["prompt"].replace("plus", "and")} for row in rows],
        "grown": [*rows, {"prompt": "and now?"}],
    }
    for name, written in (("first", rows), ("moved", rows), ("other", others[change])):
        write_jsonl(tmp_path / f"{name}.jsonl", written)
    saved = open_rows(tmp_path / "first.jsonl").fingerprint
    for known in (saved, None):  # None: of a version that kept none
        open_rows(tmp_path / "moved.jsonl").check_resumed(known)
    with pytest.raises(DataError, match="cannot resume on this data: its rows or their order are others now"):
        open_rows(tmp_path / "other.jsonl").check_resumed(saved)
