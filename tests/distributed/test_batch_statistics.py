"""Two gloo ranks with uneven shares of a batch agree with one rank that holds all of it."""

from dataclasses import asdict
from types import SimpleNamespace

import forked
import torch
import torch.distributed as dist

from lightrft_visual.algorithms.advantages import assign_advantages, get_advantage_calculator
from lightrft_visual.algorithms.policy_losses import LossInputs, global_denominators, high_entropy_masks, policy_loss
from lightrft_visual.config.vl import AlgorithmConfig

SHARES = [[slice(0, 5)], [slice(5, 6), slice(6, 8)]]  # micro-batches of each rank; no group is cut between ranks
CONFIG = AlgorithmConfig(
    advantage_estimator="group_norm", advantages_norm=True, reward_running_norm=True,
    reward_running_norm_minus_mean=True, entropy_coef=0.1, high_entropy_token_ratio=0.4,
)  # fmt: skip


def batch():
    make = torch.Generator().manual_seed(0)
    mask = torch.arange(6) < torch.tensor([6, 2, 4, 1, 5, 3, 0, 6]).unsqueeze(1)
    return {
        "log_probs": torch.randn(8, 6, generator=make),
        "old_log_probs": torch.randn(8, 6, generator=make),
        "entropy": torch.rand(8, 6, generator=make),
        "rewards": torch.randn(8, generator=make),
        "action_mask": mask,
        "group_id": torch.tensor([3, 3, 1, 1, 1, 2, 2, 2]),
        "valid": torch.tensor([1, 1, 1, 0, 1, 1, 1, 1]).bool(),
    }


def statistics(parts):
    """Everything that is a figure of the whole batch, from this rank's micro-batches."""
    data = batch()
    experiences = [
        SimpleNamespace(
            action_mask=data["action_mask"][part], group_id=data["group_id"][part], valid=data["valid"][part],
            kl=None, values=None, info={}, packed_seq_lens=None,
        )
        for part in parts
    ]  # fmt: skip
    calculator, rewards = get_advantage_calculator("group_norm", CONFIG), [data["rewards"][part] for part in parts]
    assign_advantages(calculator, experiences, rewards, 0.0, {"max_new_tokens": 6})
    masks = [each.action_mask & each.valid.unsqueeze(1) for each in experiences]
    denominators = global_denominators(masks, max_tokens=6)
    chosen = high_entropy_masks([data["entropy"][part] for part in parts], masks, CONFIG.high_entropy_token_ratio)
    losses = []
    for part, each, mask, kept in zip(parts, experiences, masks, chosen):
        inputs = LossInputs(
            data["log_probs"][part], data["old_log_probs"][part], each.advantages, mask,
            entropy=data["entropy"][part], policy_mask=kept,
        )  # fmt: skip
        losses.append(policy_loss(inputs, CONFIG, denominators).loss)
    return {
        "advantages": torch.cat([each.advantages for each in experiences]),
        "chosen": torch.cat(chosen),
        "loss": torch.stack(losses).sum(),
        "denominators": asdict(denominators),
        "running": asdict(calculator.running["running"]),
    }


def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(statistics(SHARES[rank]), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_agree_with_one(tmp_path):
    forked.spawn(work, 2, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    whole = statistics([slice(0, 8)])
    torch.testing.assert_close(torch.cat([rank["advantages"] for rank in ranks]), whole["advantages"])
    assert torch.equal(torch.cat([rank["chosen"] for rank in ranks]), whole["chosen"])
    torch.testing.assert_close(ranks[0]["loss"] + ranks[1]["loss"], whole["loss"], atol=1e-6, rtol=1e-6)
    assert ranks[0]["denominators"] == ranks[1]["denominators"] == whole["denominators"]
    for rank in ranks:
        torch.testing.assert_close(rank["running"], whole["running"])
