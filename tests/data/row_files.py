"""Rows written to a file and read back; fixtures for tests of forms, of bad rows and of the plug-in compat."""

import io
import json

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from lightrft_visual.config.vl import DataConfig
from lightrft_visual.data.prompts import PromptDataset
from lightrft_visual.data.sampler import PromptSampler, PromptSupply

BAD = (1, 4, 5)


@pytest.fixture
def png(tmp_path):
    """The bytes of a.png, which lies beside the rows."""
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20), "red").save(buffer, "PNG")
    (tmp_path / "a.png").write_bytes(buffer.getvalue())
    return buffer.getvalue()


@pytest.fixture
def read(tmp_path, png):
    """Rows written to a file of the kind that the name shows, and read back."""

    def reader(name, rows, **settings):
        path = tmp_path / name
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif name.endswith(".json"):
            path.write_text(json.dumps(rows))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset = PromptDataset(str(path), DataConfig(**settings), split="train", max_rows=100)
        return [dataset.load(index) for index in range(len(dataset))]

    return reader


def parts(row):
    """The last message as text, with a mark for each image."""
    return "".join(part.get("text", f"[{part['type']}]") for part in row.prompt[-1]["content"])


def roles(row):
    return [message["role"] for message in row.prompt]


@pytest.fixture
def twelve_rows(tmp_path):
    """Twelve rows, of which three have an image that only decoding shows to be damaged."""
    Image.effect_noise((64, 64), 9).save(tmp_path / "good.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "good.jpg").read_bytes()[:-500])
    rows = [{"prompt": f"row {row}", "images": ["cut.jpg" if row in BAD else "good.jpg"]} for row in range(12)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def supply(path, batch_size=4, **settings):
    settings = {"on_bad_row": "skip", "max_bad_share": 0.5} | settings
    dataset = PromptDataset(str(path), DataConfig(**settings), split="train", max_rows=100)
    return PromptSupply(dataset, PromptSampler([len(dataset)], batch_size, seed=3))
