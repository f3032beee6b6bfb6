"""manifest.json: a checkpoint's files with sizes and SHA-256, and the proof that all of them were written."""

import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import CheckpointError
from ..files import write_atomic

FORMAT = 3


class OtherFormat(CheckpointError):
    """A checkpoint of another version of this package, whose format this one does not read."""


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is a `PeftModel`; where nobody has imported peft there is none."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def plain_name(name: str) -> str:
    """The name of a weight without the layers that peft has put around it."""
    return re.sub(r"\.base_layer(?=\.)", "", name)


MANIFEST = "manifest.json"
HASH_THREADS = 4  # hashlib lets go of the interpreter lock, so threads read and hash in parallel


def list_files(folder: Path) -> list[str]:
    """Relative POSIX paths of all files below `folder`, sorted, the manifest itself left out."""
    paths = (path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    return [name for name in names if name != MANIFEST]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal digits. CheckpointError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def sync_file(path: Path) -> None:
    """Wait until a file's (or folder's) content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.EBADF)):  # some file systems flush no folders
            raise
    finally:
        os.close(descriptor)


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """{relative path: {"size": bytes, "sha256": hex}}; each file is flushed to the disk first."""

    def describe(name: str) -> dict[str, Any]:
        path = folder / name
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link: a checkpoint holds its files itself")
        sync_file(path)
        return {"size": path.stat().st_size, "sha256": file_sha256(path)}

    names = list(names)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return dict(zip(names, pool.map(describe, names)))


def seal(content: Mapping[str, Any]) -> str:
    """Hash of a manifest without its own seal, so that damage to the manifest itself is seen."""
    body = {key: value for key, value in content.items() if key != "seal"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write and flush manifest.json; it comes last, after every file that it lists."""
    sealed = {"format": FORMAT, **content}
    sealed["seal"] = seal(sealed)
    write_atomic(folder / MANIFEST, json.dumps(sealed, indent=1, sort_keys=True))
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync_file(path)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, its seal checked. CheckpointError names the file when it is missing or damaged, OtherFormat the
    version that wrote it."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint folder; auto takes the newest of the output folder")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete, or not one of this package")
    try:
        content = json.loads(path.read_bytes())
        whole = isinstance(content, dict) and content.get("seal") == seal(content)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not whole:
        raise CheckpointError(f"{path} is damaged: its content does not match its own hash")
    if content.get("format") != FORMAT:
        wrote = (content.get("versions") or {}).get("lightrft_visual") or "another one"
        raise OtherFormat(
            f"{path} has format {content.get('format', 1)!r}, this version of lightrft_visual reads {FORMAT}: resume "
            f"with the version that wrote it ({wrote}), or name another checkpoint by resume_from"
        )
    return content


def check_sizes(folder: Path, content: Mapping[str, Any]) -> None:
    """Compare every file that a manifest lists with the disk: presence and size."""
    for name, expected in content["files"].items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path} is missing")
        size = path.stat().st_size
        if size != expected["size"]:
            raise CheckpointError(f"{path} is damaged: {size} bytes, {expected['size']} were written")


def check_hashes(folder: Path, content: Mapping[str, Any], names: Iterable[str]) -> None:
    """Compare the content of files that a manifest lists with what was written.

    Args:
        folder: of the checkpoint.
        content: of its manifest.
        names: of the files to read, as the manifest lists them.
    """
    names = list(names)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        for name, found in zip(names, pool.map(lambda name: file_sha256(folder / name), names)):
            if found != content["files"][name]["sha256"]:
                raise CheckpointError(f"{folder / name} is damaged: its content is not what was written")
