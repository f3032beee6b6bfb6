"""Models and data sets by their names on the hub: one process of a host fetches, and errors say where was looked."""

import hashlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from .files import cache_folder, wait_for_lock
from .presence import ranks_on_host

logger = logging.getLogger(__name__)
NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")  # owner/name, with a revision behind @
FILES = (".jsonl", ".json", ".csv", ".txt", ".parquet")
FIRST_RANK_LIMIT = 30.0  # seconds that other ranks wait until the first one has begun
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
IGNORED = ["*.fp16.*", "*non_ema*", "consolidated*.safetensors", "original/*"]  # second copies of weights


def is_hub_name(text: str) -> bool:
    """Whether it may be a name of the hub, and is nothing here."""
    return NAME.fullmatch(text) is not None and not text.endswith(FILES) and not os.path.exists(text)


def offline() -> bool:
    """Whether libraries are told not to fetch anything."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def looked_at(name: str, cache: str = "HF_HUB_CACHE") -> str:
    """Where a name was looked for: the folder here, the cache, and the hub where that is allowed.

    Args:
        name: of a model or data set.
        cache: the setting of `huggingface_hub.constants`, or `HF_DATASETS_CACHE` for prepared data sets.
    """
    from huggingface_hub import constants

    if cache == "HF_DATASETS_CACHE":
        folders = [os.environ.get(cache) or os.path.join(constants.HF_HOME, "datasets"), constants.HF_HUB_CACHE]
    else:
        folders = [getattr(constants, cache)]
    hub = "HF_HUB_OFFLINE is set, so the hub was not asked" if offline() else "and the hub"
    return f"looked at: folder {Path(name).absolute()}, {', '.join(f'cache {each}' for each in folders)}; {hub}"


@contextmanager
def first_on_host(name: str) -> Iterator[None]:
    """Inside, one process of this host at a time, that of local rank 0 first: the others find what it has fetched.

    Nothing waits where one process is alone on its host, nor, but for local rank 0's beginning, without file locks.
    """
    if ranks_on_host() < 2:
        yield
        return
    run = f"{name}|{os.environ.get('MASTER_ADDR')}|{os.environ.get('MASTER_PORT')}|{os.getppid()}"
    path = cache_folder() / "turns" / hashlib.sha256(run.encode()).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    begun, first = path.with_suffix(".begun"), os.environ.get("LOCAL_RANK", "0") == "0"
    ends = time.monotonic() + FIRST_RANK_LIMIT
    while not first and not begun.exists() and time.monotonic() < ends:
        time.sleep(0.05)
    with open(path.with_suffix(".lock"), "a") as file:
        wait_for_lock(file)
        if first:
            begun.touch()
        yield


def fetch_model(name: str, code: bool = False, files: Sequence[str] = PATTERNS) -> None:
    """Bring a model of the hub into the cache, in this host's order; nothing for folders and offline.

    Args:
        name: a folder, or a name of the hub.
        code: also its Python files.
        files: patterns of the names of others.

    Raises:
        ConfigError: the hub cannot be reached, and the cache has nothing of it.
    """
    if os.path.isdir(name) or offline() or not (is_hub_name(name) or NAME.fullmatch(f"owner/{name}")):
        return  # the first models of the hub have no owner
    with first_on_host(name):
        if why := _unanswered(name, allow_patterns=[*files, *["*.py"] * code], ignore_patterns=IGNORED):
            raise ConfigError(f"model {name} cannot be loaded ({looked_at(name)}, which did not answer: {why})")


def _unanswered(name: str, **wanted: Any) -> str:
    """Fetch from the hub. Why it does not answer, "" where it does: whoever loads a name would ask again, for up to a
    minute, and says by itself whatever else is wrong."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot_download(name, **wanted)
    except LocalEntryNotFoundError as error:
        return str(error.__cause__ or error).splitlines()[0]
    except (OSError, ValueError):
        return ""
    return ""


def _prepared(name: str, split: str) -> Any:
    """A data set as its loader has left it in the cache, None where it has not."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase
    from datasets.packaged_modules.cache.cache import Cache

    owner, _, own = name.rpartition("/")
    if not any(Path(config.HF_DATASETS_CACHE).glob(f"{owner}___{camelcase_to_snakecase(own)}/*/*/*/")):
        return None
    return Cache(dataset_name=own, repo_id=name, version="auto", hash="auto").as_dataset(split=split)


def load_data_set(name: str, split: str) -> Any:
    """The `datasets.Dataset` of a hub name, `owner/name` or `owner/name@revision`. DataError where it cannot be had."""
    import datasets

    plain, _, revision = name.partition("@")
    try:
        with first_on_host(f"{name}|{split}"), tempfile.TemporaryDirectory() as nothing_yet:
            # Into a cache of its own: else what was fetched before would be the answer.
            asked = {"repo_type": "dataset", "revision": revision or None, "cache_dir": nothing_yet}
            why = "" if offline() else _unanswered(plain, allow_patterns=["README.md"], **asked)
            if revision and (why or offline()):
                logger.warning("%s: without the hub nothing says of which revision the cache's is", name)
            if not why:
                return datasets.load_dataset(plain, split=split, **({"revision": revision} if revision else {}))
            if (found := _prepared(plain, split)) is None:
                raise ConnectionError(f"it did not answer: {why}")
            logger.warning("the hub does not answer for %s (%s): what the cache has of it is taken", plain, why)
            return found
    except Exception as error:  # of any kind: the hub's, the network's, the reader's
        way_on = " (give load_dataset(name, configuration) from Python)" if "Config name" in str(error) else ""
        told = f"is no file here, and of the hub (split {split}): {error}{way_on}"
        raise DataError(f"{name!r} {told}; {looked_at(plain, 'HF_DATASETS_CACHE')}") from error
