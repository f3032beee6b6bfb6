"""Bad rows of every cause at once, for models that see and for text models: counted exactly, or an end with a table."""

import json
from collections import Counter

import hostile
import pytest
from PIL import Image

from lightrft_visual.config.vl import DataConfig, RolloutConfig
from lightrft_visual.data.prompts import PromptDataset, RowChecks
from lightrft_visual.errors import DataError
from lightrft_visual.models.tiny.vlm import build_processor, build_tokenizer

GOOD = 20


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file of 20 good rows, every other one with an image, among the bad ones."""
    folder = tmp_path_factory.mktemp("hostile")
    Image.new("RGB", (56, 56), "red").save(folder / "good.png")
    good = [{"prompt": f"row {n}", "images": ["good.png"] * (n % 2)} for n in range(GOOD)]
    (folder / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in good))
    causes = [cause for cause, _ in hostile.bad_rows(tmp_path_factory.mktemp("again"))]
    return hostile.write(folder, folder / "good.jsonl", GOOD), Counter(causes)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def opened(path, model_input, decode=True, **settings):
    settings = {"on_bad_row": "skip", "on_long_prompt": "skip", "max_bad_share": 0.9} | settings
    checks = RowChecks(limits=RolloutConfig(), model_input=model_input, prompt_max_len=256, decode=decode)
    return PromptDataset(str(path), DataConfig(**settings), split="train", max_rows=10**6, checks=checks)


def test_a_model_that_sees(rows, tokenizer):
    path, wanted = rows
    data = opened(path, build_processor("qwen2_5_vl", tokenizer))
    assert data.bad.causes == wanted and len(wanted) >= 20 and len(data) == GOOD
    assert data.bad.inspected == GOOD + wanted.total()
    listed = {row.source: row.message for row in data.bad.rows.values()}
    assert len(listed) == wanted.total() and all(message.startswith(source) for source, message in listed.items())


def test_a_text_model_leaves_out_rows_with_media_too(rows, tokenizer):
    path, wanted = rows
    data = opened(path, tokenizer, decode=False)
    assert all(not row.images and not row.videos for row in data)
    vision = "vision token in the text"  # a word as any other for a model that reads text
    assert len(data) == GOOD // 2 + wanted[vision]
    undecoded = wanted[hostile.AT_RUN_TIME] + wanted["video damaged"]
    assert data.bad.causes["media"] == GOOD // 2 + undecoded and not data.bad.causes[vision]


def test_more_than_five_percent_end_the_start_with_a_line_for_each_cause(rows, tokenizer):
    path, wanted = rows
    with pytest.raises(DataError) as caught:
        opened(path, build_processor("qwen2_5_vl", tokenizer), max_bad_share=DataConfig.max_bad_share)
    first, *table = str(caught.value).split("\n")
    total = wanted.total()
    assert f"{total} of {GOOD + total} rows left out" in first and "max_bad_share = 0.05" in first
    found = dict(line.strip().split(": ", 1)[0].split(" x ")[::-1] for line in table)
    assert found == {cause: str(count) for cause, count in wanted.items()}
    assert all("rows.jsonl:" in line for line in table)
