"""A model that sees and draws, on ranks of which one has nothing but questions and the other nothing but captions."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from plans import UNIFIED_STEPS
from transformers import AutoModelForImageTextToText, AutoProcessor
from whole_runs import rollouts, rows

NAMES = (
    "loss", "loss_answer", "loss_drawing", "reward_mean", "reward_answer_mean", "reward_drawing_mean", "grad_norm",
    "kl", "entropy_answer", "entropy_drawing", "response_length",
)  # fmt: skip


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_with_one_kind_each_train_like_one_with_both(one_rank, two_ranks, stage):
    ours, theirs = rows(one_rank / "unified"), rows(two_ranks / f"unified_{stage}")
    assert len(ours) == UNIFIED_STEPS
    assert max(abs(a[name] - b[name]) for a, b in zip(ours, theirs, strict=True) for name in NAMES) < 1e-4
    drawn = [[record.get("kind") for record in step] for step in rollouts(two_ranks / f"unified_{stage}")]
    assert all(kinds == [None] * 4 + ["drawing"] * 4 for kinds in drawn)


@pytest.mark.parametrize("name", ["unified", "unified_packed"])
def test_both_kinds_are_trained_on_as_sampled(one_rank, name):
    for row in rows(one_rank / name):
        assert row["ratio_max_dev_first"] <= 1e-5 and row["rollout_logp_diff_max"] <= 1e-5 and row["parity"] <= 1e-5
        assert row["response_length"] < 64 and row["grad_norm"] > 0.1
        assert row["loss"] == pytest.approx(2 * row["loss_answer"] + row["loss_drawing"], abs=1e-5)


def test_a_loss_of_each_kind_is_a_mean_of_its_own(one_rank):
    for packed, padded in zip(rows(one_rank / "unified_packed"), rows(one_rank / "unified")):
        assert packed["loss_drawing"] == pytest.approx(padded["loss_drawing"], abs=1e-5)
        assert packed["loss_answer"] == pytest.approx(padded["loss_answer"], abs=1e-5)


def test_homogeneous_batches_are_of_one_kind(one_rank):
    for row in rows(one_rank / "unified_apart"):
        assert row["loss"] == pytest.approx((2 * row["loss_answer"] + row["loss_drawing"]) / 2, abs=1e-5)
        assert row["ratio_max_dev_first"] <= 1e-5 and row["grad_norm"] > 0.1


def test_emu3_is_trained_on_both_kinds_and_its_checkpoint_loads_in_transformers(one_rank):
    found = rows(one_rank / "emu3")
    assert len(found) == 2
    for row in found:
        assert row["ratio_max_dev_first"] <= 1e-5 and row["rollout_logp_diff_max"] <= 1e-5 and row["grad_norm"] > 0
    kinds = [[record.get("kind") for record in step] for step in rollouts(one_rank / "emu3")]
    assert all({*step} == {None, "drawing"} for step in kinds)
    images = {
        (record.get("kind"), len(record.get("images", ()))) for step in rollouts(one_rank / "emu3") for record in step
    }
    assert images == {(None, 0), ("drawing", 1)}
    sheets = [*(one_rank / "emu3").glob("eval_epoch_*/contact_sheet.png")]
    assert sheets and {Image.open(sheet).width for sheet in sheets} == {2 * 234 + 10}  # both held-out captions
    saved = one_rank / "emu3" / "checkpoint-final"
    trained, base = (AutoModelForImageTextToText.from_pretrained(path) for path in (saved, one_rank / "tiny_emu3"))
    before = dict(base.named_parameters())
    changed = {name: not torch.equal(value, before[name]) for name, value in trained.named_parameters()}
    assert all(moved == ("vqmodel" not in name) for name, moved in changed.items())
    processor = AutoProcessor.from_pretrained(saved)
    ids = processor.tokenizer("where?", return_tensors="pt")
    assert trained.generate(**ids, max_new_tokens=3, min_new_tokens=3).shape[1] == ids["input_ids"].shape[1] + 3


def test_emu3_is_divided_over_ranks_and_trains_alike(one_rank, two_ranks):
    ours, theirs = rows(one_rank / "emu3"), rows(two_ranks / "emu3_3")
    assert max(abs(a[name] - b[name]) for a, b in zip(ours, theirs, strict=True) for name in NAMES if name in a) < 1e-4


@pytest.mark.parametrize("name", ["emu3_seeing", "emu3_vllm"])
def test_emu3_trains_on_what_it_reads_as_sampled_by_either_engine(one_rank, name):
    found = rows(one_rank / name)
    assert len(found) == 2
    for row in found:
        assert row["ratio_max_dev_first"] <= 1e-5 and row["rollout_logp_diff_max"] <= 1e-5 and row["parity"] <= 1e-5
        assert row["grad_norm"] > 0
    kinds = [[record.get("kind") for record in step] for step in rollouts(one_rank / name)]
    assert all({*step} == {None, "drawing"} for step in kinds)
    seen = [record for step in rollouts(one_rank / name) for record in step if record.get("kind") is None]
    assert {len(record.get("images", ())) for record in seen} == {0, 1, 2}


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_of_which_one_reads_all_images_train_like_one(one_rank, two_ranks, stage):
    ours, theirs = rows(one_rank / "emu3_seeing"), rows(two_ranks / f"emu3_seeing_{stage}")
    assert max(abs(a[name] - b[name]) for a, b in zip(ours, theirs, strict=True) for name in NAMES if name in a) < 1e-4
