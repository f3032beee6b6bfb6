"""Names of the hub: one process of a host fetches first, and errors say where was looked."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError

from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.data.sources import open_source
from lightrft_visual.errors import ConfigError, DataError
from lightrft_visual.models.loading import open_checkpoint
from lightrft_visual.runtime import hub

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import sys, time
from pathlib import Path
from lightrft_visual.runtime.hub import first_on_host
log = Path(sys.argv[1])
with first_on_host("org/model"):
    with log.open("a") as file: file.write(f"in {sys.argv[2]}\\n")
    time.sleep(0.3)
    with log.open("a") as file: file.write(f"out {sys.argv[2]}\\n")
"""


def test_ranks_of_a_host_take_turns_and_local_rank_0_is_first(tmp_path):
    shared = os.environ | {"PYTHONPATH": str(ROOT), "LIGHTRFT_CACHE": str(tmp_path), "LOCAL_WORLD_SIZE": "3"}
    shared |= {"MASTER_PORT": "1234", "WORLD_SIZE": "3"}
    log, ranks = tmp_path / "log", []
    for rank in (2, 1, 0):
        command = [sys.executable, "-c", RANK, str(log), str(rank)]
        ranks.append(subprocess.Popen(command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
        time.sleep(0.2 if rank else 0)
    assert [rank.wait(60) for rank in ranks] == [0, 0, 0]
    told = log.read_text().split()
    assert told[:4] == ["in", "0", "out", "0"]
    assert told[1::2] == [each for rank in told[1::4] for each in (rank, rank)]


@pytest.mark.parametrize(
    ("text", "is_name"),
    [("org/name", True), ("org/name@v1.2", True), ("name", False), ("org/rows.jsonl", False), ("/a/b", False)],
)
def test_names_are_told_from_paths(text, is_name):
    assert hub.is_hub_name(text) is is_name


def test_a_model_is_fetched_unless_offline_and_what_is_nowhere_says_where_was_looked(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **named: asked.append(name))
    monkeypatch.setenv("LIGHTRFT_CACHE", str(tmp_path))
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.fetch_model("org/model")
    assert asked == []
    with pytest.raises(ConfigError, match="model org/none cannot be loaded .looked at: folder .*org/none, cache .*hub; "
                       "HF_HUB_OFFLINE is set"):  # fmt: skip
        open_checkpoint("org/none", ModelConfig(), DataConfig())
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.fetch_model("org/model")
    assert asked == ["org/model"]
    with hub.first_on_host("org/model"):  # alone nothing is locked
        assert not list(tmp_path.iterdir())


def test_second_copies_of_weights_are_not_fetched(monkeypatch):
    asked = {}
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **named: asked.update(named))
    hub.fetch_model("org/model")
    wanted = ["model.safetensors", "text_encoder/model.safetensors", "params.json"]
    others = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "original/model.safetensors"]
    assert [*huggingface_hub.utils.filter_repo_objects(wanted + others, **asked)] == wanted


@pytest.mark.parametrize("model", ["org/none", "none"])
def test_a_hub_that_does_not_answer_is_asked_once_and_the_models_name_is_said(monkeypatch, model):
    asked = []

    def none(name, **named):
        asked.append(named["allow_patterns"])
        raise LocalEntryNotFoundError("no such snapshot") from ConnectionError("Name or service not known")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", none)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **named: asked.append(named))
    told = f"model {model} cannot be loaded .*the hub, which did not answer: Name or serv"
    with pytest.raises(ConfigError, match=told):
        open_checkpoint(model, ModelConfig(), DataConfig())
    assert asked == [hub.PATTERNS]


def test_rows_of_the_hub_are_read_and_those_that_are_nowhere_say_where_was_looked(monkeypatch):
    asked = {}

    def load(name, split, **named):
        if name != "org/rows":
            raise ConnectionError("no network")
        asked.update(named, split=split)
        return datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: "")
    source = open_source("org/rows@v2", "test")
    assert [source[index]["prompt"] for index in range(len(source))] == ["a", "b"]
    assert asked == {"revision": "v2", "split": "test"}
    with pytest.raises(DataError, match="'org/other' is no file here, and of the hub .split train.: no network; "
                       "looked at: folder .*org/other, cache .*datasets, cache .*hub"):  # fmt: skip
        open_source("org/other", "train")


def test_data_of_several_configurations_are_refused_with_the_way_on(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: a\n  data_files: a.jsonl\n- config_name: b\n  data_files: b.jsonl\n---\n"
    )
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "q"}\n')
    with pytest.raises(DataError, match=r"(?s)Config name is missing.* \(name one of its files, or give load_dataset"):
        open_source(tmp_path, "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="(?s)not a data set folder(?!.*load_dataset)"):
        open_source(tmp_path / "empty", "train")
    plain = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: plain(str(tmp_path), split=split))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: "")
    with pytest.raises(DataError, match=r"(?s)Config name is missing.* \(give load_dataset"):
        open_source("org/rows", "train")
    (tmp_path / "README.md").unlink()
    with pytest.raises(DataError, match='Unknown split "trian". Should be one of .*; looked at') as told:
        open_source("org/rows", "trian")
    assert "load_dataset(" not in str(told.value)


def prepared_as(name, folder):
    """Rows in a cache of data sets as `datasets` leaves those of the hub there."""
    (folder / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    own = name.rpartition("___")[2]
    datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), cache_dir=str(folder / "made"))
    (made,) = (folder / "made/json").glob("*/*/*/")
    (folder / name / "default/0.0.0").mkdir(parents=True)
    (made / "json-train.arrow").rename(made / f"{own}-train.arrow")
    info = json.loads((made / "dataset_info.json").read_text()) | {"dataset_name": own}
    (made / "dataset_info.json").write_text(json.dumps(info))
    made.rename(folder / name / "default/0.0.0/abc")


@pytest.mark.parametrize("prepared", ["", "org___my_rows", "org___others", "other___my_rows"])
def test_a_data_set_of_a_hub_that_does_not_answer_is_that_of_the_cache_or_refused_and_never_asked_for_again(
    prepared, tmp_path, monkeypatch, caplog
):
    def none(name, cache_dir, **_):
        assert not os.listdir(cache_dir)  # what was fetched before is no answer of the hub
        raise LocalEntryNotFoundError("no such snapshot") from ConnectionError("Name or service not known")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    if prepared:
        prepared_as(prepared, tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", none)
    monkeypatch.setattr(datasets, "load_dataset", None)
    if prepared == "org___my_rows":
        assert hub.load_data_set("org/MyRows", "train")["prompt"] == ["a", "b"]
        assert "nothing says of which revision" not in caplog.text
        assert hub.load_data_set("org/MyRows@v1.0", "train")["prompt"] == ["a", "b"]
        assert "org/MyRows@v1.0: without the hub nothing says of which revision" in caplog.text
        return
    with pytest.raises(DataError, match="split train.: it did not answer: Name or service not known; looked at"):
        hub.load_data_set("org/MyRows", "train")
