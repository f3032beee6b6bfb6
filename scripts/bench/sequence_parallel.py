"""One row of tokens on 1, 2 and 4 ranks: what each keeps for backward, its processor time, and how far results differ.

    deepspeed --num_gpus 4 scripts/bench/sequence_parallel.py [--tokens 4096] [--hidden 512] [--layers 4]

A text model with random weights and tied to nothing; gloo ranks on a host without an accelerator. Kept: storages that
autograd saves, parameters left out. Time: processor time of a rank's forward and backward, the median of the rounds.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightrft_visual.config.vl import DistributedConfig
from lightrft_visual.experience.model_inputs import ModelInputs
from lightrft_visual.experience.sampling import ScoringRule
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy
from lightrft_visual.runtime.sequence import SequenceGroup


def model_of(asked: argparse.Namespace) -> Qwen2ForCausalLM:
    """The same weights on every rank."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096, hidden_size=asked.hidden, intermediate_size=4 * asked.hidden, num_hidden_layers=asked.layers,
        num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def inputs_of(tokens: int) -> ModelInputs:
    """Two samples, the longer one three quarters of the row; the second half of each is its response."""
    lengths = [3 * tokens // 4, tokens - 3 * tokens // 4]
    ids = torch.randint(4096, (1, tokens), generator=torch.Generator().manual_seed(1))
    actions = [length // 2 for length in lengths]
    mask = torch.arange(max(actions)).unsqueeze(0) < torch.tensor(actions).unsqueeze(1)
    return ModelInputs(ids, torch.ones_like(ids), mask, lengths, actions)


def kept_bytes(actor: Actor, inputs: ModelInputs) -> tuple[float, int]:
    """(the loss, bytes that autograd keeps) of one forward, and its backward."""
    own = {parameter.untyped_storage().data_ptr() for parameter in actor.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = -actor(inputs, ScoringRule(), with_entropy=False).log_probs.sum() / inputs.action_mask.sum()
    loss.backward()
    return loss.item(), sum(storages.values())


def main() -> None:
    """Prints a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 4096), ("hidden", 512), ("layers", 4), ("rounds", 3), ("local_rank", -1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    DeepspeedStrategy(DistributedConfig(local_rank=asked.local_rank)).setup_distributed()
    inputs, model, first = inputs_of(asked.tokens), model_of(asked), {}
    if collectives.is_rank_0():
        print("| ranks of a row | kept for backward | processor seconds a rank | gradients differ by |")
        print("|---|---|---|---|", flush=True)
    sizes = [size for size in (1, 2, 4) if collectives.world_size() % size == 0]
    for size in sizes:
        actor = Actor(model, [], [], sequence=SequenceGroup.of(size))
        times = []
        for _ in range(asked.rounds):
            model.zero_grad(set_to_none=True)
            collectives.barrier()
            began = time.process_time()
            _, kept = kept_bytes(actor, inputs)
            times.append(time.process_time() - began)
        copies = collectives.world_size() // size  # each row is there as often
        gradients = {name: collectives.all_reduce_sum(p.grad) / copies for name, p in model.named_parameters()}
        first = first or gradients
        apart = max(((each - first[name]).abs().max() / each.abs().max()).item() for name, each in gradients.items())
        if collectives.is_rank_0():
            print(f"| {size} | {kept / 2**20:.0f} MiB | {median(times):.2f} | {apart:.1e} |", flush=True)
        if actor.backbone.slices is not None:
            for hook in actor.backbone.slices.hooks:
                hook.remove()


if __name__ == "__main__":
    main()
