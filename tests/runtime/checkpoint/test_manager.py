"""Checkpoints are complete or not there: rotation, damage, failures, resume."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lightrft_visual.errors import CheckpointError, ConfigError
from lightrft_visual.runtime.checkpoint import manager as manager_module
from lightrft_visual.runtime.checkpoint import manifest
from lightrft_visual.runtime.checkpoint.manager import CheckpointManager, resolve_resume, verify
from lightrft_visual.runtime.checkpoint.manifest import MANIFEST
from lightrft_visual.runtime.files import check_space


def write_files(folder: Path, text: str = "weights") -> None:
    (folder / "model.bin").write_text(text * 50)
    (folder / "zero").mkdir()
    (folder / "zero" / "rank_0.bin").write_bytes(bytes(range(256)))
    (folder / "state.json").write_text("{}")


def saved(root: Path, *steps: int, **settings) -> CheckpointManager:
    manager = CheckpointManager(root, **settings)
    for step in steps:
        manager.save(step, write_files)
    return manager


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_a_save_is_named_by_step_and_lists_its_files(tmp_path):
    path = CheckpointManager(tmp_path).save(12, write_files, metrics={"eval_reward": 0.5})
    assert path == tmp_path / "checkpoint-000012"
    manifest = verify(path)
    assert (manifest["step"], manifest["world_size"], manifest["metrics"]) == (12, 1, {"eval_reward": 0.5})
    assert list(manifest["files"]) == ["model.bin", "state.json", "zero/rank_0.bin"]
    assert manifest["files"]["model.bin"]["size"] == 350
    assert (tmp_path / "latest").read_text() == "checkpoint-000012\n"


def test_the_step_of_a_checkpoint_needs_no_leading_zeros(tmp_path):
    saved(tmp_path, 60)
    assert resolve_resume(str(tmp_path / "checkpoint-60"), tmp_path) == tmp_path / "checkpoint-000060"
    with pytest.raises(CheckpointError):
        resolve_resume(str(tmp_path / "checkpoint-6"), tmp_path)


@pytest.mark.parametrize("mode, best", [("max", 2), ("min", 1)])
def test_rotation_keeps_the_best_and_the_last(tmp_path, mode, best):
    manager = CheckpointManager(tmp_path, max_num=1, keep_best=("reward", mode))
    for step, reward in enumerate([0.1, 0.9, 0.5, float("nan"), 0.3], start=1):
        manager.save(step, write_files, metrics={"reward": reward})
    assert folders(tmp_path) == [f"checkpoint-{best:06d}", "checkpoint-000005"]


@settings(max_examples=15, deadline=None)
@given(
    rewards=st.lists(st.floats(-1, 1), min_size=1, max_size=6),
    max_num=st.integers(1, 4),
)
def test_rotation_never_exceeds_its_number_by_more_than_the_best(tmp_path_factory, rewards, max_num):
    root = tmp_path_factory.mktemp("rotation")
    manager = CheckpointManager(root, max_num, ("reward", "max"))
    for step, reward in enumerate(rewards):
        manager.save(step, lambda folder: (folder / "a").write_text("a"), metrics={"reward": reward})
        kept = [int(name[-6:]) for name in folders(root)]
        best = max(range(step + 1), key=lambda index: (rewards[index], index))
        assert step in kept and best in kept
        assert len(kept) <= max(max_num, 2 if best != step else 1)
        assert len(kept) >= min(step + 1, max_num)
    shutil.rmtree(root)


def test_named_checkpoints_neither_rotate_nor_are_rotated_nor_resumed(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / ".staging-other-model").mkdir()  # of another run
    CheckpointManager(tmp_path, max_num=1).save(2, write_files, name="checkpoint-final")
    assert folders(tmp_path) == [".staging-other-model", "checkpoint-000001", "checkpoint-000002", "checkpoint-final"]
    saved(tmp_path, 3, 4, max_num=1)
    assert {"checkpoint-000004", "checkpoint-final"} == {name for name in folders(tmp_path) if name[0] != "."}
    assert resolve_resume("auto", tmp_path) == tmp_path / "checkpoint-000004"
    with pytest.raises(CheckpointError, match="exported model"):
        resolve_resume(str(tmp_path / "checkpoint-final"), tmp_path)


def test_names_are_no_paths_and_settings_are_checked(tmp_path):
    for name in ("checkpoint-../x", "../checkpoint-1", ".hidden", "a/b"):
        with pytest.raises(CheckpointError, match="name"):
            CheckpointManager(tmp_path).save(1, write_files, name=name)
    with pytest.raises(CheckpointError, match="resumable"):
        CheckpointManager(tmp_path).save(1, write_files, name="model", resumable=True)
    with pytest.raises(ConfigError, match="max_ckpt_num"):
        CheckpointManager(tmp_path, max_num=0)
    with pytest.raises(ConfigError, match="max or min"):
        CheckpointManager(tmp_path, keep_best=("reward", "best"))


def test_a_folder_that_is_no_checkpoint_is_never_overwritten(tmp_path):
    (tmp_path / "models").mkdir()
    manager = CheckpointManager(tmp_path)
    manager.check_target("models")  # empty: nothing to lose
    (tmp_path / "models" / "precious").write_text("1")
    with pytest.raises(CheckpointError, match="not be overwritten"):
        manager.check_target("models")
    with pytest.raises(CheckpointError, match="not be overwritten"):
        manager.save(1, write_files, name="models")
    assert folders(tmp_path) == ["models"] and (tmp_path / "models" / "precious").exists()
    manager.save(1, write_files, name="new")
    manager.save(2, lambda folder: (folder / "x").write_text("2"), name="new")
    assert verify(tmp_path / "new")["step"] == 2


def test_half_a_checkpoint_over_which_a_run_resumed_is_put_aside_when_its_step_is_saved(tmp_path):
    manager = saved(tmp_path, 1, 2)
    (tmp_path / "checkpoint-000002" / MANIFEST).unlink()
    assert resolve_resume("auto", tmp_path).name == "checkpoint-000001"
    manager.save(2, write_files)
    assert verify(tmp_path / "checkpoint-000002")["step"] == 2
    (aside,) = tmp_path.glob("checkpoint-000002.incomplete-*")
    assert any(aside.iterdir())


def test_a_new_run_in_an_old_folder_does_not_lose_to_old_checkpoints_and_leaves_what_is_none(tmp_path):
    saved(tmp_path, 80, 90, 100)
    foreign = tmp_path / "checkpoint-000001"
    foreign.mkdir()
    (foreign / "mine").write_text("precious")
    manager = saved(tmp_path, 10)
    assert resolve_resume("auto", tmp_path) == tmp_path / "checkpoint-000010"
    assert folders(tmp_path) == [foreign.name, "checkpoint-000010", "checkpoint-000090", "checkpoint-000100"]
    assert (foreign / "mine").read_text() == "precious"
    manager.save(10, lambda folder: (folder / "other").write_text("new"))  # again: it is replaced
    assert list(verify(tmp_path / "checkpoint-000010")["files"]) == ["other"]


def linked(path: Path) -> None:
    shutil.move(path, path.parents[2] / "copy")
    path.symlink_to(path.parents[2] / "copy")


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "missing": Path.unlink,
    "nested too deep": lambda path: path.write_text("[" * 100_000 + "]" * 100_000),
    "nested as deep as is read": lambda path: path.write_text('{"files": ' + "[" * 994 + "]" * 994 + "}"),
    "linked": linked,
}


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, damage) for name in ("model.bin", "zero/rank_0.bin") for damage in DAMAGES]
    + [("manifest.json", damage) for damage in DAMAGES if damage != "linked"],
)
def test_every_damage_is_refused_by_name_and_auto_says_what_it_skips(tmp_path, damage, name, caplog):
    saved(tmp_path, 1, 2)
    path = tmp_path / "checkpoint-000002"
    DAMAGES[damage](path / name)
    for read in (verify, lambda path: resolve_resume(str(path), tmp_path)):
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            read(path)
    assert resolve_resume("auto", tmp_path) == tmp_path / "checkpoint-000001"
    assert name == "manifest.json" or ("checkpoint-000002" in caplog.text and name in caplog.text)


def test_nothing_to_resume_from_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        resolve_resume("auto", tmp_path / "absent")
    (tmp_path / "checkpoint-000003").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        resolve_resume("auto", tmp_path)
    with pytest.raises(CheckpointError, match="manifest.json"):
        resolve_resume(str(tmp_path / "checkpoint-000003"), tmp_path)
    with pytest.raises(CheckpointError, match="no such checkpoint folder; auto takes the newest"):
        resolve_resume(str(tmp_path / "elsewhere"), tmp_path)
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no complete checkpoint in .*run .a run saves some with save_steps"):
        resolve_resume(str(tmp_path / "run"), tmp_path)


def test_a_runs_folder_means_its_newest_checkpoint_whatever_the_hint_says(tmp_path):
    saved(tmp_path, 1, 2)
    for content in ("checkpoint-000009\n", "", "\0\0", None):
        (tmp_path / "latest").unlink() if content is None else (tmp_path / "latest").write_text(content)
        assert resolve_resume(str(tmp_path), tmp_path / "elsewhere") == tmp_path / "checkpoint-000002"


def test_too_little_space_is_seen_before_writing(tmp_path, monkeypatch):
    manager = saved(tmp_path, 1)
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    with pytest.raises(CheckpointError, match="MiB free"):
        manager.save(2, lambda folder: pytest.fail("must not write"))
    assert folders(tmp_path) == ["checkpoint-000001"]
    # An exported model has no optimizer: what a checkpoint takes says nothing of it.
    manager.save(2, lambda folder: (folder / "a").write_text("a"), name="checkpoint-final")
    assert folders(tmp_path) == ["checkpoint-000001", "checkpoint-final"]


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_a_disk_that_turns_read_only_keeps_the_last_checkpoint(tmp_path, monkeypatch, call):
    manager = saved(tmp_path, 1)

    def refuse(*arguments):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(CheckpointError, match="Read-only"):
            manager.save(2, write_files)
    assert resolve_resume("auto", tmp_path) == tmp_path / "checkpoint-000001"
    assert manager.save(3, write_files).name == "checkpoint-000003"


def test_a_run_that_goes_on_gives_up_what_was_saved_later_but_for_a_best_one_of_its_own_steps(tmp_path):
    manager = saved(tmp_path, 1, 2)
    first, second = (tmp_path / f"checkpoint-00000{step}" for step in (1, 2))
    for step, by_first in ((1, [second.name]), (3, ["checkpoint-best", second.name])):
        manager.save(step, write_files, name="checkpoint-best", resumable=True)
        assert manager.given_up(first) == by_first and manager.given_up(second) == by_first[:-1]
    assert manager.given_up(tmp_path / "elsewhere" / first.name) == []
    manager.save(1, write_files, name="checkpoint-best", resumable=True)  # anew, as the guard's rollback does
    assert manager.given_up(tmp_path / "checkpoint-best") == [second.name]


def test_a_file_system_that_flushes_no_folders_takes_checkpoints(tmp_path, monkeypatch):
    fsync = os.fsync

    def of_files(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    saved(tmp_path, 1)
    assert verify(tmp_path / "checkpoint-000001")["step"] == 1


def test_a_root_that_cannot_be_made_and_an_empty_save_are_refused(tmp_path):
    (tmp_path.parent / "file").write_text("")
    with pytest.raises(CheckpointError, match="preparing"):
        CheckpointManager(tmp_path.parent / "file" / "run").save(1, write_files)
    with pytest.raises(CheckpointError, match="nothing was written"):
        CheckpointManager(tmp_path).save(1, lambda folder: None)
    assert folders(tmp_path) == []


def test_leftovers_of_a_killed_save_go_at_the_next(tmp_path):
    manager = saved(tmp_path, 1)
    for name in (".staging-checkpoint-000002", ".staging-removed-checkpoint-000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("half")
    manager.save(3, write_files)
    assert folders(tmp_path) == ["checkpoint-000001", "checkpoint-000003"]


def test_a_checkpoint_that_is_a_link_is_rotated_away_and_what_it_points_to_stays(tmp_path):
    manager, elsewhere = saved(tmp_path / "run", 1, 2, max_num=1), tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("checkpoint-000002", ".staging-removed-checkpoint-000001", ".replaced-checkpoint-000002"):
        path = tmp_path / "run" / name
        path.rename(elsewhere / name) if path.exists() else (elsewhere / name).mkdir()
        path.symlink_to(elsewhere / name)
    manager.save(3, write_files)
    assert folders(tmp_path / "run") == ["checkpoint-000003"]
    assert verify(elsewhere / "checkpoint-000002")["step"] == 2 and len(folders(elsewhere)) == 3


def test_a_replaced_checkpoint_that_is_a_link_goes_and_what_it_points_to_stays(tmp_path):
    manager = saved(tmp_path / "run", 1)
    (tmp_path / "run" / "checkpoint-000001").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "checkpoint-000001").symlink_to(tmp_path / "elsewhere")
    manager.save(1, write_files)
    assert not (tmp_path / "run" / "checkpoint-000001").is_symlink()
    assert folders(tmp_path / "run") == ["checkpoint-000001"] and verify(tmp_path / "elsewhere")["step"] == 1


def test_a_kill_between_the_renames_of_a_replacement_loses_nothing(tmp_path):
    manager = saved(tmp_path, 5)
    os.rename(tmp_path / "checkpoint-000005", tmp_path / ".replaced-checkpoint-000005")
    assert resolve_resume("auto", tmp_path) == tmp_path / ".replaced-checkpoint-000005"
    manager.save(6, write_files)
    assert folders(tmp_path) == ["checkpoint-000005", "checkpoint-000006"]


def test_an_export_leaves_what_another_run_replaces_in_the_same_folder(tmp_path):
    (tmp_path / ".replaced-other").mkdir()
    CheckpointManager(tmp_path).save(1, write_files, name="mine")
    assert (tmp_path / ".replaced-other").is_dir() and not (tmp_path / "other").exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_of_a_checkpoint_follow_the_umask_whatever_library_wrote_them(tmp_path, umask, mode):
    """safetensors makes files that only their owner can read."""

    def write(folder: Path) -> None:
        write_files(folder)
        save_file({"w": torch.ones(2)}, folder / "zero" / "model.safetensors")

    before = os.umask(umask)
    try:
        path = CheckpointManager(tmp_path / "run").save(1, write)
    finally:
        os.umask(before)
    files = [each for each in path.rglob("*") if each.is_file()]
    assert {each.name: oct(each.stat().st_mode & 0o777) for each in files} == {each.name: oct(mode) for each in files}
    assert len(files) == 5 and verify(path)


def fails(error: Exception | None, folder: Path) -> None:
    (folder / "part").write_text("x")
    if error is not None:
        raise error
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


def failed_chain() -> RuntimeError:
    error = RuntimeError("the writer broke")
    error.__context__ = OSError(122, "Disk quota exceeded", "/data/x")
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (None, "the disk is full"),
        (OSError(28, "No space left on device", "/data/x"), "the disk is full: /data/x"),
        (OSError(27, "File too large"), "a file would be larger than its file system or a limit"),
        (failed_chain(), "the disk quota is used up: /data/x"),
        (RuntimeError("[enforce fail at inline_container.cc:858] . unexpected pos 64 vs 0"), "torch could not write"),
        (ValueError("I/O error: No space left on device (os error 28)"), "the disk is full"),
    ],
)
def test_a_full_disk_behind_any_error_is_said_in_words_with_the_room_left(tmp_path, error, words):
    manager = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"MiB free\)\. Make room") as caught:
        manager.save(2, partial(fails, error))
    assert words in str(caught.value) and folders(tmp_path) == ["checkpoint-000001"]


def test_room_for_checkpoints_is_looked_for_before_training(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100 << 20, 0, 50 << 20))
    check_space(tmp_path / "new", 10 << 20, kept=3)
    assert not caplog.text
    check_space(tmp_path, 20 << 20, kept=3)
    assert "50 MiB free, a checkpoint takes about 20 MiB, and up to 4 of them are there" in caplog.text
    with pytest.raises(CheckpointError, match=r"50 MiB free, a checkpoint takes about 60 MiB\. Make room.*ckpt_path"):
        check_space(tmp_path, 60 << 20, kept=3)


def test_hashes_at_resume_are_read_by_all_ranks_a_share_each(tmp_path, monkeypatch):
    CheckpointManager(tmp_path).save(1, lambda folder: [(folder / f"{n:02}").write_text("x" * n) for n in range(29)])
    read: list[str] = []
    real = manifest.file_sha256
    monkeypatch.setattr(manifest, "file_sha256", lambda path: read.append(path.name) or real(path))
    monkeypatch.setattr(manager_module, "world_size", lambda: 3)
    for number in range(3):
        monkeypatch.setattr(manager_module, "rank", lambda number=number: number)
        before = len(read)
        assert resolve_resume("auto", tmp_path).name == "checkpoint-000001"
        assert len(read) - before in (9, 10)
    assert sorted(read) == [f"{n:02}" for n in range(29)]
