"""A Flow-GRPO iteration beside the loop that its authors publish: the same embedded SD3, prompts, reward, in turn.

    python scripts/bench/against_flow_grpo.py [--rounds 3] [--iterations 10] [--ours FLAGS] [--batch 64]

Prints a markdown table: seconds, of the processor beside those of the wall, as a machine may do other work, of
iterations after a warm-up of 3. OMP_NUM_THREADS: of both sides, default 2.

The other side is not their code, but a plain loop written after it (github.com/yifan123/flow_grpo,
scripts/train_sd3.py at commit ac4c86e, MIT): their script asks for a CUDA machine, wandb, old versions of diffusers and
transformers, and settings of a 768-pixel model. Like theirs it

1. encodes the prompt of every sample anew in each batch;
2. samples with diffusers' transformer under peft's LoRA (rank 32, alpha 64, gaussian), one step at a time by the SDE of
   the paper, keeps all latents and log-probs, and decodes;
3. asks for rewards in a thread, and waits for them after the last batch;
4. takes advantages within a prompt, whose samples are found by its text, and leaves samples of advantage 0 out;
5. shuffles the samples, and goes through batch after batch and denoising step after denoising step, one forward and
   backward each, of the first 99 % of the steps; gradients are averaged over all of them, clipped to 1, AdamW steps;
6. updates an exponential average of the weights, every 8th update.

One update an iteration, no guidance and no KL, as in the run beside it; fp32, diffusers' scheduler.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model
from torchvision.transforms.functional import to_pil_image

from lightrft_visual.plugins.embedded.captions import embedded_prompts
from lightrft_visual.plugins.embedded.resolve import resolve_pipeline
from lightrft_visual.plugins.embedded.shape_match import ShapeMatch
from lightrft_visual.runtime.files import cache_root

T = torch.Tensor
TARGETS = [
    "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
    "attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v",
]  # fmt: skip
CLIP_RANGE, ADVANTAGE_LIMIT, NOISE_LEVEL, FRACTION = 1e-4, 5.0, 0.7, 0.99
WARM_UP = 3  # iterations


@dataclass
class Samples:
    """B samples of one batch: latents (B, K + 1, …), timesteps and log_probs (B, K), embeddings (B, …)."""

    latents: T
    timesteps: T
    log_probs: T
    context: T
    pooled: T

    def select(self, index: T) -> Samples:
        return Samples(**{name: value[index] for name, value in vars(self).items()})


class Loop:
    """See the module's docstring."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        model, prompts = resolve_pipeline("embedded"), embedded_prompts(cache_root())[0]
        self.pipeline = StableDiffusion3Pipeline.from_pretrained(model)
        self.pipeline.set_progress_bar_config(disable=True)
        for part in self.pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                part.requires_grad_(False)
        torch.manual_seed(options.seed)
        lora = LoraConfig(r=32, lora_alpha=64, init_lora_weights="gaussian", target_modules=TARGETS)
        self.transformer = self.pipeline.transformer = get_peft_model(self.pipeline.transformer, lora)
        self.weights = [weight for weight in self.transformer.parameters() if weight.requires_grad]
        self.average = [weight.detach().clone() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.weights, lr=options.rate, weight_decay=0.0)
        lines = Path(prompts).read_text(encoding="utf-8").splitlines()
        self.texts = [json.loads(line)["prompt"] for line in lines]
        self.settings = json.loads(Path(model, "lightrft_visual.json").read_text())
        self.reward, self.threads, self.updates = ShapeMatch(), ThreadPoolExecutor(8), 0

    def encode(self, texts: list[str]) -> tuple[T, T]:
        length = self.settings["text_length"]
        with torch.no_grad():
            context, _, pooled, _ = self.pipeline.encode_prompt(
                texts, None, None, do_classifier_free_guidance=False, max_sequence_length=length
            )
        return context, pooled

    def prompts(self, iteration: int) -> list[str]:
        """Each of the chosen prompts `images` times, shuffled."""
        generator = torch.Generator().manual_seed(self.options.seed + iteration)
        chosen = torch.randperm(len(self.texts), generator=generator)[: self.options.prompts].tolist()
        repeated = [self.texts[index] for index in chosen for _ in range(self.options.images)]
        return [repeated[index] for index in torch.randperm(len(repeated), generator=generator).tolist()]

    def step(self, v: T, index: T, x: T, following: T | None = None) -> tuple[T, T]:
        """The next latents and their log-prob (B) at the steps `index` (B) or (1)."""
        sigmas = self.pipeline.scheduler.sigmas
        sigma, sigma_next = (sigmas[each].view(-1, 1, 1, 1) for each in (index, index + 1))
        dt = sigma_next - sigma
        std = NOISE_LEVEL * (sigma / (1 - torch.where(sigma == 1, sigmas[1], sigma))).sqrt()
        mean = x * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
        spread = std * (-dt).sqrt()
        if following is None:
            following = mean + spread * torch.randn_like(mean)
        density = -((following.detach() - mean) ** 2) / (2 * spread**2) - spread.log() - 0.5 * math.log(2 * math.pi)
        return following, density.mean(dim=(1, 2, 3))

    def velocity(self, x: T, timesteps: T, context: T, pooled: T) -> T:
        return self.transformer(
            hidden_states=x, timestep=timesteps, encoder_hidden_states=context, pooled_projections=pooled,
            return_dict=False,
        )[0]  # fmt: skip

    @torch.no_grad()
    def sample(self, texts: list[str]) -> tuple[Samples, T]:
        """Samples of the texts, and their images (B, 3, H, W) in 0..1."""
        context, pooled = self.encode(texts)
        scheduler, side = self.pipeline.scheduler, self.options.size // self.pipeline.vae_scale_factor
        scheduler.set_timesteps(self.options.steps)
        x = torch.randn(len(texts), self.pipeline.vae.config.latent_channels, side, side)
        latents, log_probs = [x], []
        for index, timestep in enumerate(scheduler.timesteps):
            v = self.velocity(x, timestep.expand(len(texts)), context, pooled)
            x, log_prob = self.step(v, torch.tensor([index]), x)
            latents.append(x)
            log_probs.append(log_prob)
        config = self.pipeline.vae.config
        images = self.pipeline.vae.decode(x / config.scaling_factor + config.shift_factor, return_dict=False)[0]
        timesteps = scheduler.timesteps.repeat(len(texts), 1)
        kept = Samples(torch.stack(latents, 1), timesteps, torch.stack(log_probs, 1), context, pooled)
        return kept, (images / 2 + 0.5).clamp(0, 1)

    def score(self, images: T, texts: list[str]) -> T:
        return torch.tensor(self.reward([[to_pil_image(image)] for image in images], texts))

    def advantages(self, texts: list[str], rewards: T) -> T:
        """(B), within the samples of a text."""
        found = torch.zeros_like(rewards)
        for text in set(texts):
            mine = torch.tensor([each == text for each in texts])
            found[mine] = (rewards[mine] - rewards[mine].mean()) / (rewards[mine].std(correction=0) + 1e-4)
        return found.clamp(-ADVANTAGE_LIMIT, ADVANTAGE_LIMIT)

    def train(self, samples: Samples, advantages: T) -> float:
        """One update; the mean of the losses of its forwards."""
        kept = advantages.nonzero()[:, 0]
        kept = kept[torch.randperm(len(kept))]
        steps = int(self.options.steps * FRACTION)
        batches, losses = kept.split(self.options.batch), []
        for batch in batches:
            some, weight = samples.select(batch), advantages[batch]
            for index in range(steps):
                x, following = some.latents[:, index], some.latents[:, index + 1]
                v = self.velocity(x, some.timesteps[:, index], some.context, some.pooled)
                _, log_prob = self.step(v, torch.full((len(batch),), index), x, following)
                ratio = (log_prob - some.log_probs[:, index]).exp()
                clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
                loss = torch.maximum(-weight * ratio, -weight * clipped).mean()
                (loss / (steps * len(batches))).backward()
                losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._average()
        return float(torch.stack(losses).mean())

    @torch.no_grad()
    def _average(self) -> None:
        self.updates += 1
        if self.updates % 8:
            return
        share = 1 - min((1 + self.updates) / (10 + self.updates), 0.9)
        for average, weight in zip(self.average, self.weights):
            average.add_(share * (weight - average))

    def iteration(self, number: int) -> dict[str, float]:
        """Collect and learn; seconds of the wall and of the processor, mean reward, loss."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.transformer.eval()
        texts, parts, waiting = self.prompts(number), [], []
        for start in range(0, len(texts), self.options.batch):
            some = texts[start : start + self.options.batch]
            samples, images = self.sample(some)
            parts.append(samples)
            waiting.append(self.threads.submit(self.score, images, some))
        joined = Samples(**{name: torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])})
        rewards = torch.cat([each.result() for each in waiting])
        self.transformer.train()
        loss = self.train(joined, self.advantages(texts, rewards))
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        return spent | {"reward": float(rewards.mean()), "loss": loss}


def seconds_table(sides: list[list[list[dict[str, float]]]]) -> None:
    print("| an iteration | ours | the published loop | ratio |\n|---|---|---|---|")
    for name, said in (("wall", "seconds of the wall"), ("cpu", "seconds of the processor")):
        a, b = (statistics.median(each[name] for run in side for each in run[WARM_UP:]) for side in sides)
        print(f"| {said} | {a:.3f} | {b:.3f} | {a / b:.2f} |")
    for name in ("reward", "loss"):
        print(f"| {name}, first iteration | {' | '.join(f'{side[0][0][name]:.4g}' for side in sides)} | |")


def ours(options: argparse.Namespace) -> list[dict[str, float]]:
    """Each iteration of a run of step_time.py."""
    images = options.prompts * options.images
    command = (
        f"{Path(__file__).with_name('step_time.py')} drawing --steps {options.iterations - 1} --json {options.out} "
        f"--rollout_batch_size {options.prompts} --n_samples_per_prompt {options.images} --train_batch_size {images} "
        f"--num_steps {options.steps} --seed {options.seed} --scheduler model_default --enable_ema true {options.ours}"
    )
    subprocess.run([sys.executable, *command.split()], check=True, stdout=sys.stderr)
    return json.loads(options.out.read_text())["steps"]


def theirs(options: argparse.Namespace) -> list[dict[str, float]]:
    """Each iteration of the loop, in a process of its own."""
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--loop", str(options.out)], check=True)
    return json.loads(options.out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"prompts": 8, "images": 8, "steps": 10, "batch": 64, "size": 32, "rounds": 3, "iterations": 10}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--ours", default="", help="further flags of our side, such as '--steps_per_forward 1'")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--loop", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.iterations += WARM_UP
    if options.loop:
        loop = Loop(options)
        options.loop.write_text(json.dumps([loop.iteration(number) for number in range(options.iterations)]))
        return
    sides = [[], []]
    with tempfile.TemporaryDirectory() as work:
        options.out = Path(work, "iterations.json")
        for _ in range(options.rounds):
            for side, run in zip(sides, (ours, theirs)):
                side.append(run(options))
    seconds_table(sides)


if __name__ == "__main__":
    main()
