"""Seconds that two ranks generate for, with prompts where they come up and dealt by expected length.

    torchrun --nproc_per_node 2 scripts/bench/balanced_rollouts.py OUT --lengths 16 64 256

A tiny model and engine hf; a prompt's label says how long its responses are, which the first round shows. Each rank
writes OUT/RANK.json: for both ways seconds and tokens of each round, and the responses.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.experience.rollouts import PromptFeatures, Rollouts, SamplingSettings
from lightrft_visual.models.loading import load_transformer, open_checkpoint
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout.engine import RolloutStage
from lightrft_visual.rollout.hf import TransformersEngine
from lightrft_visual.trainer.features.balanced_rollouts import BalancedRolloutsHook

ROUNDS, PROMPTS, SAMPLES = 4, 8, 4  # prompts of a rank in a round


def requests(round_number: int, lengths: list[int]) -> list[PromptFeatures]:
    """This rank's, the lengths of all ranks in any order."""
    draw, rank, ranks = random.Random(round_number), dist.get_rank(), dist.get_world_size()
    chosen = [lengths[number % len(lengths)] for number in range(PROMPTS * ranks)]
    draw.shuffle(chosen)
    numbers = range(rank, PROMPTS * ranks, ranks)
    first = round_number * PROMPTS * ranks
    return [
        PromptFeatures(
            "p", [70 + (first + n) % 20, 71, 72], first + n, label=f"of {chosen[n]}", limit=chosen[n], seed=first + n
        )
        for n in numbers
    ]


def generated(engine: TransformersEngine, lengths: list[int], hook: BalancedRolloutsHook | None) -> list[dict]:
    """Rounds with a hook or without."""
    stage, settings = RolloutStage(engine, None, 0), SamplingSettings(SAMPLES, max_new_tokens=max(lengths))
    rounds = []
    for number in range(ROUNDS):
        own = requests(number, lengths)
        wanted = own if hook is None else hook.on_prompts(own)
        dist.barrier()
        began = time.monotonic()
        made = Rollouts(stage.draw(wanted, settings), settings)
        seconds, tokens = time.monotonic() - began, sum(len(each.token_ids) for each in made)
        made = made if hook is None else hook.on_rollouts(made)
        assert [each.prompt for each in made[::SAMPLES]] == own
        responses = [[each.sample_id, each.token_ids, each.log_probs, each.text] for each in made]
        rounds.append({"seconds": seconds, "tokens": tokens, "responses": responses})
    return rounds


def main() -> None:
    """Both ways, after a round to warm up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 256])
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    folder = build_tiny_checkpoint(arguments.out / "model")
    dist.barrier()
    checkpoint = open_checkpoint(str(folder), ModelConfig(), DataConfig())
    actor = Actor(load_transformer(checkpoint.path, ModelConfig(), torch.float32), [], [])  # which never ends by itself
    engine = TransformersEngine(actor, checkpoint.tokenizer, micro_batch_size=2 * SAMPLES)
    engine.generate(requests(0, [4]), SamplingSettings(1, max_new_tokens=4))
    hook = BalancedRolloutsHook(max(arguments.lengths))
    found = {name: generated(engine, arguments.lengths, each) for name, each in (("plain", None), ("balanced", hook))}
    (arguments.out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    if dist.get_rank() == 0:
        other = [json.loads((arguments.out / f"{rank}.json").read_text()) for rank in range(dist.get_world_size())]
        for name in found:
            for unit in ("seconds", "tokens"):
                sums = [[each[name][number][unit] for each in other] for number in range(ROUNDS)]
                told = ", ".join(f"{max(each) / (sum(each) / len(each)):.3f}" for each in sums)
                print(f"{name}: {unit} of the slowest rank by the mean rank's, each round: {told}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
