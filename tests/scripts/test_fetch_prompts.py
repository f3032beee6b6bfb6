"""Prompt sets from a server on this machine: what is written is what a run reads, and failures say what to do."""

import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lightrft_visual.data.sources import open_source

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import fetch_prompts  # noqa: E402


@pytest.fixture
def served(tmp_path: Path, monkeypatch):
    """(URL, folder that it serves)."""
    folder = tmp_path / "served"
    (folder / "ocr").mkdir(parents=True)
    (folder / "ocr" / "train.txt").write_text('A sign that says "One"\nA sign that says "Two"\n')
    (folder / "ocr" / "test.txt").write_text('A sign that says "Three"\n')
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *arguments: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", folder
    server.shutdown()
    server.server_close()


def test_files_are_fetched_once_below_the_data_root(served, tmp_path, monkeypatch, capsys) -> None:
    url, folder = served
    monkeypatch.setenv("LIGHTRFT_DATA", str(tmp_path / "root"))
    assert fetch_prompts.main(["ocr", "--base_url", url]) == 0
    assert "train.txt: 2 prompts" in capsys.readouterr().out
    assert [row["prompt"] for row in open_source("ocr/test.txt", "train")] == ['A sign that says "Three"']
    (folder / "ocr" / "test.txt").write_text("Another\n")
    assert fetch_prompts.main(["ocr", "--base_url", url]) == 0
    assert "there already" in capsys.readouterr().out
    assert open_source("ocr/test.txt", "train")[0]["prompt"] == 'A sign that says "Three"'


@pytest.mark.parametrize(("variable", "root"), [("VRL_DATA_ROOT", "theirs"), (None, "data")])
def test_the_settings_that_name_a_set_are_printed_and_find_it(served, tmp_path, monkeypatch, capsys, variable, root):
    monkeypatch.delenv("LIGHTRFT_DATA", raising=False)
    monkeypatch.delenv("VRL_DATA_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    if variable:
        monkeypatch.setenv(variable, root)
    assert fetch_prompts.main(["ocr", "--base_url", served[0]]) == 0
    settings = dict(word.split("=") for word in capsys.readouterr().out.splitlines()[-1].split())
    assert settings == {"data.manifest": f"{root}/ocr/train.txt", "data.eval_manifest": f"{root}/ocr/test.txt"}
    assert len(open_source(settings["data.manifest"], "train")) == 2


def test_without_a_network_or_by_an_unknown_name_it_says_what_to_do(tmp_path, capsys) -> None:
    assert fetch_prompts.main(["ocr", "--base_url", "http://127.0.0.1:1", "--folder", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "cannot be reached" in told and "--base_url" in told and "datasets/ocr/train.txt" in told
    assert not list((tmp_path / "ocr").iterdir())
    with pytest.raises(SystemExit):
        fetch_prompts.main(["ocrr"])
    assert "choose from ocr" in capsys.readouterr().err.replace("'", "")


def test_what_is_missing_or_no_prompt_set_leaves_no_file_and_the_others_are_fetched(served, tmp_path, capsys) -> None:
    url, folder = served
    (folder / "ocr" / "train.txt").write_text("")
    (folder / "geneval").mkdir()
    (folder / "geneval" / "train_metadata.jsonl").write_text('{"tag": "counting"}\n')
    assert fetch_prompts.main(["ocr", "geneval", "--base_url", url, "--folder", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert told.count("error: ") == 3 and f"error: {url}/geneval/test_metadata.jsonl answers 404" in told
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["test.txt"]
