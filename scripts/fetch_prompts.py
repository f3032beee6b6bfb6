#!/usr/bin/env python
"""Fetch prompt sets that are larger than those of examples/datasets.

    python scripts/fetch_prompts.py ocr pickscore                  below LIGHTRFT_DATA (or VRL_DATA_ROOT), else ./data
    python scripts/fetch_prompts.py ocr --folder /data --base_url https://mirror.example/flow_grpo

It prints the settings that name them; below LIGHTRFT_DATA `data.manifest=ocr/train.txt` does too. A file that is there
already stays. Each file is read as a run would read it before it takes its name. The sets are those of
Flow-GRPO's repository, under the licence there.
"""

import argparse
import os
import sys
import tempfile
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

from lightrft_visual.config.given_files import ROOT_VARIABLES
from lightrft_visual.data.sources import open_source
from lightrft_visual.errors import DataError

BASE_URL = "https://raw.githubusercontent.com/yifan123/flow_grpo/main/dataset"
SETS = {
    "ocr": ("ocr/train.txt", "ocr/test.txt"),
    "pickscore": ("pickscore/train.txt", "pickscore/test.txt"),
    "geneval": ("geneval/train_metadata.jsonl", "geneval/test_metadata.jsonl"),
}
MAX_BYTES = 256 * 1024 * 1024
SECONDS = 60.0  # without an answer


def main(arguments: list[str] | None = None) -> int:
    """0 when everything that was asked for is there, else 1, with a line for each file that is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=SETS, metavar="SET", help=", ".join(SETS))
    parser.add_argument("--folder", type=Path, help=f"default: ${', $'.join(ROOT_VARIABLES)}, else ./data")
    parser.add_argument("--base_url", default=BASE_URL, help="of a mirror with the same files")
    chosen = parser.parse_args(arguments)
    roots = [os.environ[name] for name in ROOT_VARIABLES if os.environ.get(name)]
    folder = chosen.folder or Path(*roots[:1] or ["data"]).expanduser()
    failed = 0
    for name in chosen.sets:
        targets = [folder / file for file in SETS[name]]
        for file, target in zip(SETS[name], targets):
            if target.exists():
                print(f"{target}: there already")
                continue
            try:
                count = fetch(f"{chosen.base_url.rstrip('/')}/{file}", target)
                print(f"{target}: {count} prompts")
            except DataError as error:
                failed += 1
                print(f"error: {error}", file=sys.stderr)
        if all(target.exists() for target in targets):
            print(f"data.manifest={targets[0]} data.eval_manifest={targets[1]}")
    return 1 if failed else 0


def fetch(url: str, target: Path) -> int:
    """Fetch one file; the number of its rows. Raises DataError for what cannot be fetched or read, and keeps none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        file = Path(place) / target.name
        file.write_bytes(_body(url, target))
        rows = open_source(file, "train")
        if not len(rows) or not isinstance(rows[0].get("prompt"), str):
            raise DataError(f"{url} is no prompt set: it has no column prompt")
        file.replace(target)
        return len(rows)


def _body(url: str, target: Path) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            body = answer.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise DataError(f"{url} answers {error.code} {error.reason}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise DataError(
            f"{url} cannot be reached ({reason}). On a host without network bring the file to {target} yourself, name "
            "a mirror by --base_url, or use the small sets of examples/datasets (data.manifest=datasets/ocr/train.txt)"
        ) from None
    if len(body) > MAX_BYTES:
        raise DataError(f"{url} is larger than {MAX_BYTES >> 20} MiB")
    return body


if __name__ == "__main__":
    raise SystemExit(main())
