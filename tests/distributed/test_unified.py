"""A model that sees and draws, on ranks of which one has nothing but questions and the other nothing but captions."""

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


def test_ranks_with_one_kind_each_train_like_one_with_both(one_rank, two_ranks):
    ours, theirs = rows(one_rank / "unified"), rows(two_ranks / "unified_3")
    assert len(ours) == UNIFIED_STEPS
    assert max(abs(a[name] - b[name]) for a, b in zip(ours, theirs, strict=True) for name in NAMES) < 1e-4
    drawn = [[record.get("kind") for record in step] for step in rollouts(two_ranks / "unified_3")]
    assert all(kinds == [None] * 4 + ["drawing"] * 4 for kinds in drawn)


def test_both_kinds_are_trained_on_as_sampled_and_each_loss_is_a_mean_of_its_own(one_rank):
    packed, padded = rows(one_rank / "unified_packed"), rows(one_rank / "unified")
    for row in (*packed, *padded):
        assert row["ratio_max_dev_first"] <= 5e-5 and row["rollout_logp_diff_max"] <= 5e-5 and row["parity"] <= 5e-5
        assert row["response_length"] < 64 and row["grad_norm"] > 0.1
        assert row["loss"] == pytest.approx(2 * row["loss_answer"] + row["loss_drawing"], abs=1e-5)
    for one, other in zip(packed, padded, strict=True):
        assert all(one[name] == pytest.approx(other[name], abs=1e-4) for name in ("loss_drawing", "loss_answer"))


def test_a_model_trained_on_both_kinds_loads_in_transformers(one_rank):
    found = rows(one_rank / "both")
    assert len(found) == 2
    for row in found:
        assert row["ratio_max_dev_first"] <= 5e-5 and row["rollout_logp_diff_max"] <= 5e-5 and row["grad_norm"] > 0
    kinds = [[record.get("kind") for record in step] for step in rollouts(one_rank / "both")]
    assert all({*step} == {None, "drawing"} for step in kinds)
    images = {
        (record.get("kind"), len(record.get("images", ()))) for step in rollouts(one_rank / "both") for record in step
    }
    assert images == {(None, 0), ("drawing", 1)}
    sheets = [*(one_rank / "both").glob("eval_epoch_*/contact_sheet.png")]
    assert sheets and {Image.open(sheet).width for sheet in sheets} == {2 * 234 + 10}  # both held-out captions
    saved = one_rank / "both" / "checkpoint-final"
    trained, base = (AutoModelForImageTextToText.from_pretrained(path) for path in (saved, one_rank / "janus"))
    before = dict(base.named_parameters())
    changed = {name: not torch.equal(value, before[name]) for name, value in trained.named_parameters()}
    assert not any(moved for name, moved in changed.items() if "vqmodel" in name)
    assert changed["lm_head.weight"] and any(moved for name, moved in changed.items() if "generation_head" in name)
    processor = AutoProcessor.from_pretrained(saved)
    ids = processor.tokenizer("where?", return_tensors="pt")
    assert trained.generate(**ids, max_new_tokens=3, min_new_tokens=3).shape[1] == ids["input_ids"].shape[1] + 3
