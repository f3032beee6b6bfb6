#!/usr/bin/env python
"""Read damaged and hostile files of every accepted format; only the package's own errors may come out.

    python scripts/fuzz.py --cases 20000            all formats in turn, from the same seed the same cases
    python scripts/fuzz.py --only mp4 --cases 500
    python scripts/fuzz.py --replay 7341            one case again, with its traceback

Each case is a small real file (PNG, JPEG, WebP, GIF, BMP, TIFF, PPM, MP4, Parquet, jsonl, json, CSV, text, a state file
in safetensors) with a few random changes, a row of random values, or one of `fuzz_outside.py`: a recipe, a command
line, a model folder, a run folder, a request to the reward server, a reply of one. A case fails when anything but an
error of this package is raised, when the process dies, when it takes more than 2 s of processor time or the most
memory of the process rises by more than 1 GB.
The exit code is 1 when a case fails.
"""

import argparse
import io
import json
import logging
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from PIL import Image

from lightrft_visual.config import registry
from lightrft_visual.config.diffusion import DiffusionDataConfig
from lightrft_visual.config.vl import DataConfig
from lightrft_visual.data.drawing_prompts import DrawPrompts
from lightrft_visual.data.media import image_size, load_image
from lightrft_visual.data.prompts import PromptDataset
from lightrft_visual.data.video import load_video
from lightrft_visual.errors import LightRFTVisualError
from lightrft_visual.runtime.checkpoint.state import load_state, save_state

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_outside import OUTSIDE  # noqa: E402

CPU_SECONDS, WALL_SECONDS, GROWTH = 2.0, 10, 2**30
MARK = "case: "
IMAGES = ("png", "jpeg", "webp", "gif", "bmp", "tiff", "ppm")
TABLES = ("parquet", "jsonl", "json", "csv", "txt")
FILES = (*IMAGES, "mp4", *TABLES, "safetensors")
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
ROWS = [
    {"prompt": "what colour is it?", "images": ["a.png"], "reference": "red", "label": "colour"},
    {"prompt": "<image> or <image>?", "images": ["a.png", "b.jpg"], "reference": 2, "extra": {"a": [1, 2.5, None]}},
    {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "q"}]}]},
    {"prompt": "<video>q", "videos": [{"video": ["a.png", "a.png"], "fps": 1, "max_pixels": 784}], "answer": "3"},
    {"conversations": [{"from": "human", "value": "<image>q"}, {"from": "gpt", "value": "a"}], "image": "a.png"},
]
TEXT = {
    "jsonl": ["".join(json.dumps(row) + "\n" for row in ROWS).encode()],
    "json": [json.dumps(ROWS).encode()],
    "csv": [
        b'prompt,image,reference\n"how many, here?",a.png,3\nwhat?,,red\nq,b.jpg,\n',
        b"\xef\xbb\xbfprompt, b\nq, 1\n",
    ],
    "txt": ["a red circle\n\n <image> a blue square\u2028\n".encode()],
}
TEXTS = (
    "", " ", "a.png", "<image>", "<video><image>", "\ud800", "user", "text", "image", "[", '[{"role": "user"}]', "\0",
    '[{"role": "user", "content": "q"}]', "data:image/png;base64,AAAA", "http://[", "file://%00", "file://[",
    "x" * 5000, "[" * 3000 + "]" * 3000, "<|image_pad|>", "gone.png", "../..", "/dev/zero", "/proc/self/mem", "a" * 300,
)  # fmt: skip
VALUES = (
    0, -1, 2**63, 10**400, 1.5, float("nan"), float("inf"), True, None, 10**9, b"", b"\x89PNG", b"x" * 99,
)  # fmt: skip


class Hang(BaseException):
    """A case that does not end; no handler for Exception can swallow it."""


# -- files to start from -----------------------------------------------------------------------------------------------


@cache
def originals(kind: str) -> list[bytes]:
    """Small whole files of a kind."""
    if kind in IMAGES:
        return [_image(kind, mode) for mode in ("RGB", "L", *(("RGBA", "P") if kind in ("png", "webp", "gif") else ()))]
    return {"mp4": _videos, "parquet": _parquets, "safetensors": _states}[kind]() if kind not in TEXT else TEXT[kind]


def _image(kind: str, mode: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(pixels).convert(mode if mode != "P" or kind != "webp" else "RGB")
    image.save(buffer, kind.upper(), **({"exif": exif} if kind in ("png", "jpeg", "webp", "tiff") else {}))
    return buffer.getvalue()


def _videos() -> list[bytes]:
    import av

    files = []
    for container, codec in (("mp4", "mpeg4"), ("matroska", "mpeg4"), ("avi", "mjpeg")):
        buffer = io.BytesIO()
        with av.open(buffer, "w", format=container) as output:
            stream = output.add_stream(codec, rate=8)
            stream.width, stream.height = 64, 48
            stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            for level in range(10):
                frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 20 * level, np.uint8), format="rgb24")
                output.mux(stream.encode(frame))
            output.mux(stream.encode())
        files.append(buffer.getvalue())
    animation = io.BytesIO()
    frames = [Image.new("L", (32, 24), 20 * level) for level in range(6)]
    frames[0].save(animation, "GIF", save_all=True, append_images=frames[1:], duration=100)
    return [*files, animation.getvalue()]


def _parquets() -> list[bytes]:
    image = {"bytes": _image("png", "RGB"), "path": None}
    rows = [
        {"prompt": f"q {n}", "images": [image], "reference": str(n), "extra": {"n": n, "x": [0.5]}} for n in range(6)
    ]
    files = []
    for compression in ("NONE", "SNAPPY", "ZSTD"):
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer, row_group_size=2, compression=compression)
        files.append(buffer.getvalue())
    return files


def _states() -> list[bytes]:
    state = {"step": 3, "tensor": torch.arange(6.0).reshape(2, 3), "array": np.arange(4), "pair": (1, "a"), 2: b"bytes",
             "image": Image.new("RGB", (4, 3)), "number": np.float32(1.5)}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        save_state(path, state)
        return [path.read_bytes()]


# -- changes -----------------------------------------------------------------------------------------------------------


def damaged(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """The file after a few changes. other: a file to take pieces of."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        place = rng.randrange(len(data) + 1) if rng.random() < 0.5 else rng.randrange(min(len(data), 200) + 1)
        change = rng.randrange(8)
        if change == 0 and data:
            data[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif change == 1 and data:
            data[min(place, len(data) - 1)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif change == 2:
            data[place : place + 4] = struct.pack(rng.choice("<>") + "I", rng.choice(NUMBERS))
        elif change == 3:
            del data[place : place + rng.choice((1, 2, 4, 64))]
        elif change == 4:
            data[place:place] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 4, 32))))
        elif change == 5:
            start = rng.randrange(len(other))
            data[place:place] = other[start : start + rng.choice((4, 32, 200))]
        elif change == 6:
            del data[place:]
        else:
            data[place:place] = data[max(0, place - 50) : place] * rng.choice((1, 3, 40))
    return bytes(data)


def png_of_other_size(content: bytes, rng: random.Random) -> bytes:
    """A PNG whose header promises another size or depth, with a checksum that fits."""
    size = struct.pack(">II", *(rng.choice((0, 1, 7, 32, 7000, 60_000, 2**31 - 1)) for _ in range(2)))
    header = b"IHDR" + size + bytes([rng.choice((1, 8, 16)), rng.choice((0, 2, 3, 6)), 0, 0, rng.randrange(2)])
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


def strange(rng: random.Random, depth: int = 0) -> Any:
    """A value that a row may hold, plain or hostile."""
    kind = rng.randrange(14 if depth < 4 else 11)
    if kind == 11:
        return [strange(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 12:
        keys = ("role", "content", "type", "text", "image", "image_url", "url", "video", "bytes", "path", "fps", "from")
        return {rng.choice(keys): strange(rng, depth + 1) for _ in range(rng.randrange(4))}
    if kind == 13:
        value: Any = "x"
        for _ in range(rng.choice((30, 40, 5000))):
            value = [value] if rng.random() < 0.5 else {"a": value}
        return value
    return rng.choice(TEXTS) if kind < 6 else rng.choice(VALUES)


# -- cases -------------------------------------------------------------------------------------------------------------


class Fuzzer:
    """Runs cases by number. folder: for the files that they need; its content is overwritten."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        for name in ("a.png", "b.jpg"):
            (folder / name).write_bytes(_image("jpeg" if name.endswith("jpg") else "png", "RGB"))

    def run(self, number: int, only: str | None = None) -> str:
        """One case; returns its kind and outcome. Raises what no user should see."""
        kind = only or KINDS[number % len(KINDS)]
        rng = random.Random(f"{self.seed}/{kind}/{number}")
        try:
            CASES[kind](self, kind, rng)
        except LightRFTVisualError as error:
            str(error).encode("utf-8")  # it must be printable
            return f"{kind} refused"
        return f"{kind} read"

    def content(self, kind: str, rng: random.Random) -> bytes:
        """A damaged file of a kind."""
        files = originals(kind)
        whole = rng.choice(files)
        if kind == "png" and rng.random() < 0.2:
            return png_of_other_size(whole, rng)
        return damaged(whole, rng.choice(originals(rng.choice(FILES))), rng)

    def changed(self, content: bytes, rng: random.Random) -> bytes:
        """A text with random changes."""
        return damaged(content, rng.choice(originals("json")), rng)

    def strange(self, rng: random.Random) -> Any:
        """Any value."""
        return strange(rng)

    def image(self, kind: str, rng: random.Random) -> None:
        """An image as bytes, its header and its pixels."""
        content = self.content(kind, rng)
        image_size(content)
        load_image(content)

    def video(self, kind: str, rng: random.Random) -> None:
        """A video as bytes, with options now and then."""
        content = self.content(kind, rng)
        names = ("fps", "nframes", "min_frames", "max_frames", "max_pixels", "resized_height", "resized_width")
        options = {name: strange(rng, 9) for name in names if rng.random() < 0.05}
        load_video({"video": content, **options})

    def table(self, kind: str, rng: random.Random) -> None:
        """A data file, all rows read and decoded."""
        path = self.folder / f"rows.{kind}"
        path.write_bytes(self.content(kind, rng))
        self._read(path, DataConfig(on_bad_row="skip", max_bad_share=1.0))

    def values(self, kind: str, rng: random.Random) -> None:
        """Rows of random values, from a jsonl file; tests/fuzz/test_any_row.py has them as they are."""
        names = ("prompt", "images", "image", "image_path", "videos", "video", "reference", "label", "conversations",
                 "messages", "input", "problem", "answer", "reward_model", "extra")  # fmt: skip
        rows = _spoiled([dict(rng.choice(ROWS)) for _ in range(2)], names, (1, 2, 5), rng)
        style = rng.choice(("auto", "plain", *registry.row_forms.names())) if rng.random() < 0.3 else "auto"
        config = DataConfig(on_bad_row="skip", max_bad_share=1.0, data_format=style)
        self._read(self._written("values.jsonl", rows), config)

    def drawing(self, kind: str, rng: random.Random) -> None:
        """Rows of a diffusion run, with and without first frames."""
        names = ("prompt", "input_image", "reference", "label", "extra")
        rows = _spoiled([{"prompt": "q", "input_image": "a.png"} for _ in range(3)], names, (1, 2), rng)
        path = self._written("drawing.jsonl", rows)
        config = DiffusionDataConfig(on_bad_row="skip", max_bad_share=1.0)
        prompts = DrawPrompts(str(path), "train", 100, config, rng.random() < 0.7)
        for index in range(len(prompts)):
            prompts[index]

    def state(self, kind: str, rng: random.Random) -> None:
        """A state file of a checkpoint."""
        path = self.folder / "state.safetensors"
        path.write_bytes(self.content(kind, rng))
        load_state(path)

    def _written(self, name: str, rows: list[dict[str, Any]]) -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows if _is_json(row)), encoding="utf-8")
        return path

    def _read(self, path: Path, config: DataConfig) -> None:
        dataset = PromptDataset(str(path), config, split="train", max_rows=100)
        for index in range(len(dataset)):
            try:
                dataset.load(index)
            except LightRFTVisualError:
                continue


def _spoiled(
    rows: list[dict[str, Any]], names: tuple[str, ...], counts: tuple[int, ...], rng: random.Random
) -> list[dict[str, Any]]:
    for row in rows:
        row.update({rng.choice(names): strange(rng) for _ in range(rng.choice(counts))})
    return rows


def _is_json(row: dict[str, Any]) -> bool:
    try:
        json.dumps(row)
    except (TypeError, RecursionError, ValueError):
        return False
    return True


CASES: dict[str, Callable[[Fuzzer, str, random.Random], None]] = {
    **dict.fromkeys(IMAGES, Fuzzer.image),
    "mp4": Fuzzer.video,
    **dict.fromkeys(TABLES, Fuzzer.table),
    "values": Fuzzer.values,
    "drawing": Fuzzer.drawing,
    "safetensors": Fuzzer.state,
    **OUTSIDE,
}
KINDS = tuple(CASES)


def checked(fuzzer: Fuzzer, number: int, only: str | None = None) -> tuple[str, str | None]:
    """(kind and outcome, what is wrong or None) of one case, within the bounds of time and memory."""

    def hang(*_: Any) -> None:
        raise Hang(f"no end after {WALL_SECONDS} s")

    signal.signal(signal.SIGALRM, hang)
    signal.alarm(WALL_SECONDS)
    peak, start = _peak(), time.process_time()
    try:
        outcome = fuzzer.run(number, only)
    except (Exception, Hang):
        return "failed", traceback.format_exc(limit=-4)
    finally:
        signal.alarm(0)
    seconds = time.process_time() - start
    if seconds > CPU_SECONDS:
        return outcome, f"{seconds:.1f} s of processor time"
    if _peak() - peak > GROWTH:
        return outcome, f"{_peak() / 2**30:.1f} GB"
    return outcome, None


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_here(numbers: range, seed: int, only: str | None) -> None:
    """Run cases in this process, one line of JSON before and after each."""
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), seed)
        checked(fuzzer, 0, only)  # what loads at first use is not the case's own time
        for number in numbers:
            print(MARK + json.dumps({"number": number}), flush=True)
            outcome, wrong = checked(fuzzer, number, only)
            found = {"number": number, "outcome": outcome, "wrong": wrong, "peak": _peak()}
            print(MARK + json.dumps(found), flush=True)


def run_apart(options: argparse.Namespace) -> int:
    """Run all cases in processes of their own, so that one that dies is a failed case; returns the failed ones."""
    outcomes, failed, number, peak = Counter(), 0, 0, 0
    while number < options.cases:
        command = [sys.executable, __file__, "--child", str(number), "--cases", str(options.cases)]
        command += ["--seed", str(options.seed), *(["--only", options.only] if options.only else [])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            last: dict[str, Any] = {"number": number}
            for line in child.stdout:
                if not line.startswith(MARK):  # what a library says
                    continue
                last = json.loads(line.removeprefix(MARK))
                if "outcome" not in last:
                    continue
                outcomes[last["outcome"]] += 1
                peak = max(peak, last["peak"])
                if last["wrong"]:
                    failed += 1
                    print(f"case {last['number']}: {last['outcome']}: {last['wrong']}", flush=True)
        number = last["number"] + 1
        if "outcome" not in last:
            failed += 1
            print(f"case {last['number']}: the process died with code {child.returncode}", flush=True)
    for outcome, count in sorted(outcomes.items()):
        print(f"{outcome}: {count}")
    print(f"{options.cases} cases, {failed} failed, at most {peak / 2**30:.2f} GB")
    return failed


def main(arguments: list[str]) -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--replay", type=int, metavar="CASE")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if options.child is not None:
        return run_here(range(options.child, options.cases), options.seed, options.only)
    if options.replay is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(Fuzzer(Path(folder), options.seed).run(options.replay, options.only))
        return None
    sys.exit(1 if run_apart(options) else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
