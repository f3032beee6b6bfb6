"""Run by each rank: diffusion runs one after the other in one process: run_drawing.py plan.json

plan.json: as in run_many.py. Every run leaves facts_rank<r>.json: what its rank's samples were worth, how much of the
optimizer state it holds, and what a swap of weights does under this run's ZeRO stage.
"""

import json
from functools import partial
from pathlib import Path

import torch
from run_many import as_program, each_run, trainer_of


def fit(entry: dict) -> None:
    from lightrft_visual.runtime import collectives

    trainer = trainer_of(entry)
    advantages: dict[int, list[float]] = {}
    append = trainer.buffer.append

    def recorded(experience) -> None:
        for sample, value in zip(experience.sample_id.tolist(), experience.advantages.tolist()):
            advantages.setdefault(sample, []).append(value)
        append(experience)

    trainer.buffer.append = recorded
    trainer.fit()
    facts = {"advantages": advantages, "optimizer_elements": optimizer_elements(trainer), "swaps": swaps(trainer)}
    facts["copied_elements"] = copied_elements(trainer)
    facts["updates"] = trainer.updates
    if trainer.config.model.bf16:
        facts["fp32"] = frozen_in_fp32(trainer)
    trainer.close()
    Path(entry["folder"], f"facts_rank{collectives.rank()}.json").write_text(json.dumps(facts))


def optimizer_elements(trainer) -> int:
    """Numbers in the Adam state of this rank."""
    optimizer = trainer.engine.engine.optimizer
    state = getattr(optimizer, "optimizer", optimizer).state  # ZeRO-0 wraps nothing
    return sum(value.numel() for group in state.values() for value in group.values() if torch.is_tensor(value))


def average_of(trainer):
    """The average of the weights, or None."""
    from lightrft_visual.trainer.features.ema import EmaHook

    return next((hook.average for hook in trainer.hooks if isinstance(hook, EmaHook)), None)


def copied_elements(trainer) -> dict[str, int]:
    """Numbers in the copies of the trained weights that this rank keeps."""
    kept = {"ema": average_of(trainer), "old": trainer.parts.old, "reference": trainer.parts.policy._reference}
    return {name: sum(each.numel() for each in copy.copies) for name, copy in kept.items() if copy is not None}


def frozen_in_fp32(trainer) -> list[str]:
    """Names of frozen weights that are fp32 and equal, bit for bit, to the ones that the pipeline's folder holds."""
    from diffusers import DiffusionPipeline

    from lightrft_visual.models.weight_copies import gathered

    stored = DiffusionPipeline.from_pretrained(trainer.config.model.pretrain).components
    found = []
    for name, denoiser in trainer.parts.policy.denoisers.items():
        loaded = dict(stored[name].named_parameters())
        frozen = [(key, weight) for key, weight in denoiser.named_parameters() if not weight.requires_grad]
        with gathered([weight for _, weight in frozen]):
            for key, weight in frozen:
                whole = loaded[key.replace(".base_layer", "")]
                if weight.dtype == torch.float32 and torch.equal(weight.cpu(), whole):
                    found.append(f"{name}.{key}")
    return found


@torch.no_grad()
def swaps(trainer) -> dict[str, dict[str, float | bool]]:
    """For each kept copy of the weights: how far the swapped velocity is from the model's own, and what came back."""
    from lightrft_visual.models.weight_copies import gathered

    policy = trainer.parts.policy
    if policy.family.most_source_images:
        return {}  # a text alone is nothing to it
    conditions = policy.encode_prompts(["a red circle"])
    side = trainer.config.sampling.height
    latents = torch.randn((1, *policy.latent_shape(side, side)), generator=torch.Generator().manual_seed(0))

    def velocity():
        return trainer.engine(latents, torch.tensor([500.0]), conditions, 1.0)

    def weights():
        parameters = policy.trainable_parameters()
        with gathered(parameters):
            return [parameter.detach().clone() for parameter in parameters]

    found = {}
    kept = {"ema": average_of(trainer), "old": trainer.parts.old}
    contexts = {name: copy.swapped for name, copy in kept.items() if copy is not None} | {"reference": policy.reference}
    if trainer.config.model.lora_rank == 0 and trainer.config.algorithm.beta == 0:
        del contexts["reference"]
    for name, context in contexts.items():
        before, mine = weights(), velocity()
        with context():
            swapped = velocity()
        found[name] = {
            "difference": float((swapped - mine).abs().max()),
            "velocity_back": torch.equal(velocity(), mine),
            "weights_back": all(torch.equal(a, b) for a, b in zip(before, weights(), strict=True)),
        }
    return found


if __name__ == "__main__":
    as_program(partial(each_run, run=fit))
