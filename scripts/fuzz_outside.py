"""Cases of `scripts/fuzz.py` beside data: recipes, arguments, model folders, run folders, requests and replies."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pickle
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import httpx
import torch
from PIL import Image

from lightrft_visual.config.leaves import names_of
from lightrft_visual.config.load import CONFIG_DIRS, parse_run, resolved_yaml
from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.config.spellings import ROOTS
from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.errors import DataError
from lightrft_visual.models.loading import load_transformer, open_checkpoint
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint
from lightrft_visual.observe.recorder import RunRecorder
from lightrft_visual.observe.report.page import write_report
from lightrft_visual.rewards.batch import MAX_SCORE
from lightrft_visual.rewards.imaging import encode_image
from lightrft_visual.rewards.remote.client import Exchange, RemoteClient, RequestFailed
from lightrft_visual.rewards.remote.server import create_app
from lightrft_visual.rewards.remote.wire import decode_reply


class FuzzTools(Protocol):
    """What a case takes of the script that runs it: a folder for its files, and changes."""

    folder: Path

    def changed(self, content: bytes, rng: random.Random) -> bytes: ...

    def strange(self, rng: random.Random) -> Any: ...


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefghijk", "bcdefghijkl")
)
YAMLS = (
    BOMB, "&a [*a]", "train: &a {seed: *a}", "[" * 100_000, "{a: " * 3000,
    "train: {seed: !!python/object:os.system x}",
    "train: {seed: 2024-99-99}", "train: {seed: " + "9" * 5000 + "}", "? [1, 2]\n: 3", "1: 2", "- 1", "", "null", "x",
    "train: 5", "train: [1]", "train: {seed: ${x}}", "train: {seed: '${oc.env:HOME}'}", "output: {output_dir: '${'}",
    "defaults: 5", "defaults: [{a: b, c: d}]", "defaults: [/gone]", "defaults: [self]", "train: {lr: .nan}", "\0",
    "\ufeff",
    "!!set {a}", "train: {seed: !!int x}", "%YAML 3.0\n---\na: b", "--- 1\n--- 2", "train: !!binary x", "<<: [1]",
)  # fmt: skip
WORDS = (
    "", " ", "0", "-1", "1e400", "nan", "true", "null", "${x}", "${", "${oc.env:HOME}", "\udcff\udcfe", "x" * 300,
    "é" * 200,
    "a/" * 3000, "[1,", "{a: b}", "[]", "{", "a=b", "~", "~nobody/x", "/dev/zero", "/proc/self/mem", "http://a b/c",
    "http://[", "http://h:99999", "\x00", "9" * 5000, "1,2,3", "*", "&a", "!!int x", "2024-99-99", "a.b.c",
    "embedded", "[" * 3000,
    "'", '"', "None", "1_000", "0x10", "1:30", "\u202e", "\ud800", "x.py", "x.py:f", "{'a': {'b': [1]}}",
)  # fmt: skip
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_PORT")
METRICS_LINES = (
    "step,loss,loss\n1,2,3\n", "step,step\n1,2\n", "loss,step\n1,2\n", "step\n", "\n",
    "step,loss\n1,1e400\n2,-1e400\n",
    "step,loss\n1,nan\n", "step," + "x" * 200_000 + "\n1,2\n", "step,loss\n" + "9" * 5000 + ",1\n",
    'step,"loss\n1,2\n', "\0",
    "step,reward_mean\n-5,1\n", "step,time_step,time_train\n1,0,0\n",
    "step,time_step,time_train\n1,1e308,1e308\n2,1e308,-1\n",
)  # fmt: skip
RECORDS = (
    '{"step": 1e400}', '{"step": 1, "reward": 1e400}', '{"step": ' + "9" * 5000 + "}", "[" * 20_000, '{"a": ' * 5000,
    "null", '{"step": null, "images": 5, "components": [1]}',
    '{"images": [null, {"a": 1}], "prompt": {"x": 1}, "reward": "x"}',
    '{"images": ["../../../etc/passwd", "/etc/passwd", "\\u0000"], "response": "\\ud800"}',
    '{"reward": NaN, "truncated": 3}', '{"step": "x", "text": ["a"]}', '{"step": [1]}',
    '{"step": {}, "reward": [1]}', '{"cause": [1], "source": {}}',
)  # fmt: skip


def as_json(value: Any, ascii_only: bool = True) -> bytes:
    """A value in JSON as far as it goes; a document that is nested too deep for that stands for one that is."""
    try:
        return json.dumps(value, default=str, skipkeys=True, ensure_ascii=ascii_only).encode(errors="replace")
    except (RecursionError, ValueError):
        return b'{"a": ' * 20_000


# -- configuration -----------------------------------------------------------------------------------------------------


@cache
def recipes() -> list[str]:
    """Texts of all shipped recipes and layers."""
    return [file.read_text() for folder in CONFIG_DIRS for file in sorted(folder.rglob("*.yaml"))]


def recipe(fuzzer: FuzzTools, kind: str, rng: random.Random) -> None:
    """A recipe: a shipped one damaged, a hostile document, or known settings of random values."""
    root = rng.choice(ROOTS)
    choice = rng.random()
    if choice < 0.5:
        content = fuzzer.changed(rng.choice(recipes()).encode(), rng)
    elif choice < 0.7:
        content = rng.choice(YAMLS).encode(errors="surrogatepass")
    else:
        names = sorted(names_of(root.schema).leaves)
        flat = {rng.choice(names): fuzzer.strange(rng) for _ in range(rng.choice((1, 3)))}
        flat.pop("plugins", None)
        content = as_json(flat, rng.random() < 0.5)
    path = fuzzer.folder / "recipe.yaml"
    path.write_bytes(content)
    if b"plugins" in content:  # would be imported
        return
    run = parse_run(root.schema, ["--config", str(path)], preset=rng.choice((None, root.preset)))
    resolved_yaml(run.config).encode("utf-8")


def arguments(fuzzer: FuzzTools, kind: str, rng: random.Random) -> None:
    """A command line of known and unknown names with random words, under odd variables of a launcher."""
    root = rng.choice(ROOTS)
    names = [name for name in sorted(names_of(root.schema).leaves) if name != "plugins"]
    argv: list[str] = []
    for _ in range(rng.choice((1, 2, 5))):
        name = rng.choice(names) if rng.random() < 0.8 else rng.choice(("/base/distributed", "config", "x", "", *WORDS))
        word = rng.choice(WORDS)
        flag = name.rpartition(".")[2] if rng.random() < 0.5 else name
        argv += rng.choice(([f"--{flag}", word], [f"--{flag}={word}"], [f"{name}={word}"], [f"--no_{flag}"], [word]))
    if any("plugins" in word for word in argv):
        return
    odd = {name: rng.choice(("abc", "-1", "", " 1", "1e3", "²")) for name in RANKS if rng.random() < 0.05}
    with patch.dict(os.environ, odd), contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run = parse_run(root.schema, argv, preset=rng.choice((None, root.preset)))
        resolved_yaml(run.config).encode("utf-8")


# -- model folders -----------------------------------------------------------------------------------------------------


@cache
def checkpoints() -> list[Path]:
    """Tiny whole checkpoints, one that sees and one of text alone."""
    root = Path(tempfile.mkdtemp(prefix="fuzz-models-"))
    return [build_tiny_checkpoint(root / family, family, hidden=64) for family in ("qwen2_5_vl", "qwen2")]


class Harmful:
    """What a pickled file of weights may ask for."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (open, (str(self.mark), "w"))


def model(fuzzer: FuzzTools, kind: str, rng: random.Random) -> None:
    """A checkpoint folder with a damaged, strange, missing or harmful file, opened and loaded."""
    folder = fuzzer.folder / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(rng.choice(checkpoints()), folder)
    mark = fuzzer.folder / "harmed"
    for _ in range(rng.choice((1, 1, 2))):
        _damage_model(fuzzer, folder, mark, rng)
    try:
        checkpoint = open_checkpoint(str(folder), ModelConfig(), DataConfig())
        sorted(checkpoint.eos_ids)
        load_transformer(str(folder), ModelConfig(), torch.float32)
    finally:
        assert not mark.exists(), "a pickle was run"


def _damage_model(fuzzer: FuzzTools, folder: Path, mark: Path, rng: random.Random) -> None:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    path = rng.choice(files)
    choice = rng.random()
    if choice < 0.5 and path.suffix == ".json":
        with contextlib.suppress(ValueError, RecursionError):  # no JSON is left, or one too deep to write
            read = json.loads(path.read_text())
            path.write_text(json.dumps(_changed_json(read, fuzzer, rng), default=str, skipkeys=True))
    elif choice < 0.75:
        path.write_bytes(fuzzer.changed(path.read_bytes(), rng))
    elif choice < 0.85:
        path.unlink()
    elif choice < 0.93:
        for weights in folder.glob("*.safetensors"):
            with contextlib.suppress(IsADirectoryError):  # an earlier change has made it one
                weights.unlink()
        (folder / "pytorch_model.bin").write_bytes(rng.choice((pickle.dumps(Harmful(mark)), b"", b"PK\3\4")))
    else:
        path.unlink()
        rng.choice((os.mkfifo, os.mkdir, lambda gone: os.symlink(gone, gone)))(path)


def _changed_json(content: Any, fuzzer: FuzzTools, rng: random.Random) -> Any:
    """The JSON document with one of its values, at any depth, replaced or gone."""
    place = content
    while isinstance(place, dict) and place:
        key = rng.choice(sorted(place))
        if isinstance(place[key], dict) and rng.random() < 0.7:
            place = place[key]
            continue
        if rng.random() < 0.2:
            del place[key]
        else:
            place[key] = rng.choice((0, -1, 1, 3, None, "x", [], {}, True, 2.5, 10**6, [None], fuzzer.strange(rng)))
        break
    return content


# -- run folders -------------------------------------------------------------------------------------------------------


@cache
def whole_run() -> Path:
    """The folder of a small recorded run."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-run-")) / "run"
    run = RunRecorder(folder, active=True)
    run.write_env()
    (folder / "config.resolved.yaml").write_text("train:\n  seed: 1\nreward:\n  reward_fn: x.py:f\n")
    for step in range(1, 5):
        run.log_step(step, {"reward_mean": step / 4, "loss": 0.5, "time_train": 0.2, "time_step": 0.4})
        record = {"prompt": "p", "response": "r", "reward": step / 4, "components": {"a": 1.0}, "images": [_image()]}
        run.log_eval(step, {"eval_reward": step / 4})
        run.save_rollouts(step, [record], "eval_step")
        run.save_rollouts(step, [record])
        run.log_line("alarms.jsonl", step, {"text": "odd"})
    run.save_contact_sheet(4, [record])
    run.close()
    return folder


def _image() -> Image.Image:
    return Image.new("RGB", (20, 20), "red")


def report(fuzzer: FuzzTools, kind: str, rng: random.Random) -> None:
    """The report of a run's folder whose files are damaged, hostile, or no files."""
    folder = fuzzer.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole_run(), folder)
    for _ in range(rng.choice((1, 2, 4))):
        path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()))
        choice = rng.random()
        if choice < 0.35:
            path.write_bytes(fuzzer.changed(path.read_bytes(), rng))
        elif choice < 0.8:
            known = {".yaml": YAMLS, ".csv": METRICS_LINES, ".jsonl": RECORDS, ".json": (*RECORDS, "[]", "{")}
            texts = known.get(path.suffix, ("", "x"))
            path.write_bytes(
                "\n".join(rng.choice(texts) for _ in range(rng.choice((1, 1, 3)))).encode(errors="replace")
            )
        else:
            path.unlink()
            rng.choice((os.mkfifo, os.mkdir, lambda gone: os.symlink(gone, gone)))(path)
    write_report([folder] * rng.choice((1, 1, 2)), fuzzer.folder / "report.html").read_text(encoding="utf-8")


# -- the reward server and its client ----------------------------------------------------------------------------------


@cache
def app() -> Any:
    """A server of a reward that takes everything."""
    return create_app(lambda completions: [0.5 for _ in completions])


def body(fuzzer: FuzzTools, kind: str, rng: random.Random) -> None:
    """A request to the reward server: it answers in JSON, never with an error of its own."""
    whole: Any = {"queries": ["p: a", "b"], "prompts": ["p: ", ""], "images": [[encode_image(_image())], []]}
    names = ("queries", "query", "prompts", "labels", "references", "images", "metadata", "ids", "label", "videos", "x")
    for _ in range(rng.choice((0, 1, 2))):
        value = fuzzer.strange(rng)
        whole[rng.choice(names)] = rng.choice((value, [value], [value, value], [[value], None]))
    content = as_json(whole)
    content = fuzzer.changed(content, rng) if rng.random() < 0.5 else content
    odd = rng.choice(({}, {}, {}, {"content-length": "²"}, {"content-encoding": "gzip"}, {"content-type": "x"}))

    headers = {"content-type": b"application/json"} | {name: text.encode() for name, text in odd.items()}

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app(), raise_app_exceptions=True)
        async with (
            app().router.lifespan_context(app()),
            httpx.AsyncClient(transport=transport, base_url="http://t") as http,
        ):
            return await http.post("/reward", content=content, headers=[*headers.items()])

    answer = asyncio.run(ask())
    assert answer.status_code in (200, 400, 413, 415, 422) and isinstance(answer.json(), dict), answer.text[:500]
    if answer.status_code != 200:
        raise DataError(answer.json()["error"])


@cache
def client() -> RemoteClient:
    """The client that a run asks its reward servers by."""
    return RemoteClient(RewardConfig(reward_retries=0, reward_timeout=20.0))


def reply(fuzzer: FuzzTools, kind: str, rng: random.Random) -> None:
    """A reply of a reward server: usable scores, or samples that have failed for a reason."""
    value = fuzzer.strange(rng)
    whole = {rng.choice(("rewards", "scores", "score", "x")): rng.choice(([0.5, 1], [value, 1], value, [value] * 2))}
    if rng.random() < 0.5:
        whole[rng.choice(("components", "extra_logs", "failed"))] = rng.choice(
            (value, [value], {"a": value}, {"a": [1, value]})
        )
    content = as_json(whole)
    content = fuzzer.changed(content, rng) if rng.random() < 0.4 else content
    status = rng.choice((200, 200, 200, 200, 204, 301, 400, 404, 429, 500, 503, 599))
    odd = {"Retry-After": rng.choice(("²", "9" * 400, "-1")), "Content-Encoding": rng.choice(("gzip", "br", "x, gzip"))}
    odd |= {"Location": "http://[", "Content-Length": "99"}
    headers = [(name, text.encode()) for name, text in odd.items() if rng.random() < 0.15]

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers=headers, stream=httpx.ByteStream(content))

    client()._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), timeout=None)
    exchange = Exchange(["http://host/score"], lambda: b"{}", lambda found: decode_reply(found, 2))
    try:
        scores = client().loop.submit(client().exchange(exchange)).result(30)
    except RequestFailed as failure:
        raise DataError(str(failure)) from None
    used = scores.values[~scores.failed & scores.values.isfinite()]
    assert len(scores.values) == len(scores.failed) == 2 and bool((used.abs() <= MAX_SCORE).all())


OUTSIDE: dict[str, Callable[[FuzzTools, str, random.Random], None]] = {
    "recipe": recipe, "arguments": arguments, "model": model, "report": report, "body": body, "reply": reply,
}  # fmt: skip
