"""LightRFT: makes the reward of all models' scores; label_map says which is whose."""

import torch


def reward_fn(model_reward_list, labels, queries, refs, label_map):
    rewards = [model_reward_list[label_map[label or "exactness"]][index] for index, label in enumerate(labels)]
    return torch.stack(rewards), {"first": model_reward_list[0]}


def exactness(queries, refs):
    return [float(query.endswith(str(ref))) for query, ref in zip(queries, refs)]


def brevity(completions):
    return [1.0 / len(completion) for completion in completions]
