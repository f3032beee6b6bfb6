"""One choice of every kind, as a user would add it: this file alone, named by --plugins."""

from dataclasses import dataclass
from pathlib import Path

import torch

from lightrft_visual.algorithms.advantages import AdvantageCalculator
from lightrft_visual.algorithms.diffusion.context import LossContext, forward_noise
from lightrft_visual.algorithms.diffusion.denoising_batch import DenoisingBatch
from lightrft_visual.algorithms.loss_terms import LossOutputs, LossTerm
from lightrft_visual.algorithms.policy_losses import TokenLoss
from lightrft_visual.config import registry
from lightrft_visual.data.forms import Content
from lightrft_visual.models.diffusion.families.sd3 import StableDiffusion3
from lightrft_visual.models.vlm.families.qwen import QwenVL
from lightrft_visual.rewards.local.forms import Form
from lightrft_visual.rollout.hf import TransformersEngine
from lightrft_visual.trainer.hooks import StepHook


@registry.advantage_estimators.register("my_sign", about="the sign of the advantage", grouped=True)
class Sign(AdvantageCalculator):
    def group_rewards(self, statistics):
        return statistics.centered().sign()


@registry.policy_losses.register("my_loss")
def my_loss(inputs, config):
    """The plain policy gradient."""
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    clipped = torch.zeros_like(inputs.action_mask)
    return TokenLoss(-ratio * inputs.advantages, clipped, {"my_loss_seen": torch.full_like(ratio, 0.25)})


@registry.aggregations.register("my-half", about="half of token-mean")
def my_half(values, mask, denominators):
    return torch.where(mask, values, 0.0).sum() / denominators.tokens / 2


@registry.kl_estimators.register("my_abs", about="the size of the log ratio")
def my_abs(log_probs, ref_log_probs):
    return (log_probs - ref_log_probs).abs()


@registry.policy_masks.register("my_gains", about="nothing is unlearned")
def my_gains(inputs, config):
    return inputs.advantages >= 0 if config.policy_loss == "my_loss" else None


@registry.tis_modes.register("my_root", about="square roots of the weights")
def my_root(log_weights):
    return log_weights / 2


class TwoTokens(TransformersEngine):
    def generate(self, prompts, settings):
        completions = super().generate(prompts, settings)
        for each in (one for group in completions for one in group):
            each.token_ids, each.log_probs = each.token_ids[:2], each.log_probs[:2]
            each.truncated = True
        return completions


@registry.engines.register("my_engine", about="transformers, with two tokens a response")
def my_engine(config, checkpoint, actor):
    return TwoTokens.from_config(config, checkpoint, actor)


@registry.vlm_families.register("my_qwen", model_types=("qwen2_5_vl",), processors=("Qwen2_5_VLProcessor",))
class CalmQwen(QwenVL):
    """Qwen2.5-VL that never shouts."""

    def banned_ids(self, tokenizer):
        return sorted({*super().banned_ids(tokenizer), tokenizer.convert_tokens_to_ids("!")})


@registry.environments.register("my_echo", about="says what was said")
class Echo:
    def step(self, action):
        return action.text, 0.5, not action.text, {}


@registry.scorers.register("my_letters", about="letters of a response")
def my_letters(completions, per_letter=1.0):
    return [per_letter * len(text) for text in completions]


@registry.differentiable_rewards.register("my_redness", about="how red an image is")
def my_redness(weight=1.0):
    def score(media, prompts, metadata):
        return weight * media[:, 0].flatten(1).mean(dim=1), torch.ones(len(media), dtype=torch.bool)

    return score


class Quiet(LossTerm):
    """Adds nothing to the loss but a metric."""

    def share(self, inputs, mode, denominators):
        return torch.zeros(()), {"my_tokens": inputs.action_mask.sum() / denominators.tokens}


@registry.loss_terms.register("my_quiet", about="tokens that count")
def my_quiet(config):
    return Quiet()


class Steps(StepHook):
    """Reports the number of steps before the present one."""

    def setup(self, context):
        self.finished = context.step

    def on_prompts(self, requests):
        self.before = self.finished()
        return requests

    def metrics(self):
        return {"my_steps_before": self.before}


@registry.hooks.register("my_steps", about="steps before the present one")
def my_steps(parts):
    return Steps()


@registry.rollout_metrics.register("my_reward_square", about="squares of the rewards")
def my_reward_square(experience):
    return experience.info["reward"].square(), experience.valid.bool()


@registry.row_forms.register("my_rows", about="the prompt in `asked`")
def my_rows(raw):
    return Content(raw["asked"]) if "asked" in raw else None


my_rewards = registry.reward_forms.register("my_rewards", about="completions in `said`")(
    Form("my form", {"said": lambda batch: batch.completions}, fits=lambda names, takes_all, function: "said" in names)
)


@registry.tasks.register("my_prompts", about="prompts of a file beside this one")
@registry.drawing_tasks.register("my_prompts", about="prompts of a file beside this one")
def my_prompts(config):
    config.data.prompt_data = str(Path(__file__).with_name("my_prompts.jsonl"))


@registry.checkpoint_resolvers.register("my_model", about="a folder beside this file")
def my_model(model, name, task):
    return str(Path(__file__).with_name(name))


@registry.services.register("my_service", about="what another plug-in may ask for")
def my_service():
    return "served"


@dataclass(frozen=True)
class Imitation:
    """Flow matching on the samples that are better than their group."""

    guidance_scale: float

    def loss(self, context: LossContext, rows: DenoisingBatch, denominator: float) -> LossOutputs:
        noise = forward_noise(context.seed, rows)
        time = rows.sigma.view(-1, *[1] * (rows.data.dim() - 1))
        mixed = (1 - time) * rows.data + time * noise
        velocity = context.velocity(mixed, rows.timesteps, rows.conditions, self.guidance_scale)
        weight = rows.advantages.clamp(min=0) * rows.valid
        error = (velocity - (noise - rows.data)).square().flatten(1).mean(dim=1)
        return LossOutputs((weight * error).sum() / denominator, means={"my_weight": float(weight.mean())})


@registry.diffusion_algorithms.register("my_imitation", trajectories=("ode",), trains_on="data", num_steps=3)
def my_imitation(config):
    """Imitates its own better samples."""
    return Imitation(config.sampling.guidance_scale)


@registry.diffusion_families.register("my_sd3", pipeline="StableDiffusion3Pipeline")
class QueriesOnly(StableDiffusion3):
    """SD3, of which only the queries are adapted."""

    lora_targets = ("attn.to_q",)
