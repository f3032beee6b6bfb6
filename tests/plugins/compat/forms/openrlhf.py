"""OpenRLHF: `labels` holds the answers; logs come back beside the rewards."""

import torch


def reward_func(queries, prompts, labels):
    rewards = [float(query.endswith(str(label))) for query, label in zip(queries, labels)]
    tensor = torch.tensor(rewards)
    return {"rewards": tensor, "scores": tensor, "extra_logs": {"right": tensor}}


def with_keywords(queries, prompts, labels, **kwargs):
    return torch.tensor(
        [float(query[len(prompt) :] == label) for query, prompt, label in zip(queries, prompts, labels)]
    )
