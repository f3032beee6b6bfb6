"""The plan of a diffusion run: what one rank holds in each of its phases, from the load to the export."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import astuple, replace
from functools import cache
from math import ceil, prod
from pathlib import Path
from unittest.mock import patch

import torch
from diffusers import DiffusionPipeline
from torch import nn
from transformers import PreTrainedModel

from ...algorithms.diffusion import training_guidance
from ...config.diffusion import DiffusionRunConfig, gradient_steps, lora_folders, rollout_noise, trained_steps
from ...config.placement import GIB, Device
from ...config.shared import NONE, RECOMPUTES
from ...experience.vision import MASK, NEGATIVE
from ...models.diffusion.policy import DiffusionPolicy
from ...models.diffusion.prompt_cache import LATENTS_AT_ONCE
from ...runtime.host_copies import MOST_PINNED
from .meta import Held, Work, held_bytes, remembered, weights_bytes
from .pipelines import pipeline_policy
from .process import program
from .reward_models import RewardModel, judging, reward_items
from .table import HOST, Item, Phase, Plan
from .times import DISK, HOST_MEMORY, Speeds
from .zero import FP32, Model, Zero, in_use

T = torch.Tensor
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "connectors", "image_encoder")
FEW_SAMPLES = 2  # that are looked at
FEW_FRAMES, MORE_FRAMES = 3, 5  # latent frames that are looked at of a video
STEP_CALLS = 80  # operations of a step beside the network: of the sampler, or of the loss


def computed_models(config: DiffusionRunConfig) -> dict[str, "Computed | None"]:
    """Those of a run's policy and teacher, if it has one; None for one whose shape is not known. A teacher that is a
    folder of LoRA weights is as the policy."""
    policy, path = pipeline_policy(config), config.model.teacher_pretrain
    found = {"policy": None if policy is None else Computed(config, policy)}
    if path is not None:
        other = deepcopy(config)
        other.model.pretrain, other.model.lora_rank = path, 0
        as_policy = bool(lora_folders(path)) and not Path(path, DiffusionPipeline.config_name).is_file()
        teacher = None if as_policy else pipeline_policy(other)
        found["teacher"] = found["policy"] if as_policy else None if teacher is None else Computed(other, teacher)
    return found


class Computed:
    """Forwards of a policy on meta tensors: what they hold for a number of samples, each worked out once.

    denoised(count, guidance, backward), decoded(count, backward): `Held` of a step of the trained network, and of the
    decoder. latent_bytes, media_bytes: of one sample, fp32.
    """

    def __init__(self, config: DiffusionRunConfig, policy: DiffusionPolicy):
        self.config, self.policy, self.family = config, policy, policy.family
        s = config.sampling
        self.latent_shape = policy.latent_shape(s.height, s.width, s.num_frames)
        self.latent_bytes = prod(self.latent_shape) * FP32
        self.media_bytes = 3 * s.height * s.width * s.num_frames * FP32
        self.width = 2 if config.model.bf16 else FP32
        self.tables_made = False
        parts = self.family.pipeline.components.items()
        self.part_bytes = {name: weights_bytes(part) for name, part in parts if isinstance(part, nn.Module)}
        self.denoised, self.decoded = cache(self._denoise), cache(self._decode)
        if config.model.gradient_checkpointing in RECOMPUTES:  # what it keeps on the host is counted, not moved
            policy.enable_gradient_checkpointing(how=config.model.gradient_checkpointing)

    def conditions(self, count: int, negative: bool) -> dict[str, T]:
        """Of `count` samples, with the shapes that the families' text encoders give."""
        pipeline, dtype = self.family.pipeline, self.family.dtype
        network = next(iter(self.family.denoisers().values())).config
        names = ("joint_attention_dim", "text_dim", "text_embed_dim", "cross_attention_dim", "cap_feat_dim")
        if network.get("use_prompt_embeddings"):  # LTX-2 before 2.3 projects its texts to the width of cross-attention
            names = ("caption_channels",)
        wide = next(network[name] for name in names if network.get(name))
        if self.family.most_source_images:
            found = self.family.planned_conditions(count, wide)
            guided = ("context", MASK) if negative and self.family.uses_negative else ()
            return found | {NEGATIVE + name: found[name].clone() for name in guided}
        two = getattr(pipeline, "text_encoder_3", None) is not None or "StableDiffusion3" in type(pipeline).__name__
        length = self.family.text_length + (pipeline.text_encoder.config.max_position_embeddings if two else 0)
        found = {"context": torch.empty(count, length, wide, dtype=dtype, device="meta")}
        if network.get("pooled_projection_dim"):
            found["pooled"] = torch.empty(count, network["pooled_projection_dim"], dtype=dtype, device="meta")
        if type(pipeline).__name__.startswith(("QwenImage", "ZImage")):
            found[MASK] = torch.ones(count, length, dtype=torch.long, device="meta")
        if negative and self.family.uses_negative:
            found |= {NEGATIVE + name: value.clone() for name, value in found.items()}
        if self.family.takes_first_frame:
            channels = network["in_channels"] - self.latent_shape[0]
            shape = (count, channels, *self.latent_shape[1:])
            found["first_frame"] = torch.empty(shape, dtype=torch.float32, device="meta")
        return found

    def condition_bytes(self) -> tuple[int, int]:
        """Of one prompt, which its samples share, and of one sample: first frames."""
        conditions = self.conditions(1, self.config.sampling.guidance_scale > 1)
        sizes = {name: value.numel() * value.element_size() for name, value in conditions.items()}
        own = sizes.pop("first_frame", 0)
        return sum(sizes.values()), own

    def _denoise(self, count: int, guidance: float, backward: bool) -> Held:
        """A step of the trained network over `count` samples; of two experts one runs.

        From two samples on each further one holds and takes the same, or so much more than the one before where a
        network takes its samples one by one, and backward adds a gradient of all for each.
        """
        if (further := count - FEW_SAMPLES) > 2:
            few = zip(*(self.denoised(FEW_SAMPLES + one, guidance, backward) for one in range(3)))
            pairs = further * (further - 1) // 2
            return Held(*(one + further * (two - one) + pairs * (three - 2 * two + one) for one, two, three in few))
        if self.config.plugins:  # code of the user's own
            return self._denoised(count, guidance, backward)
        how = self.config.model if backward else replace(self.config.model, gradient_checkpointing=NONE)
        sizes = {name: dict(network.config) for name, network in self.family.denoisers().items()}
        conditions = {name: value.shape for name, value in self.conditions(count, guidance > 1).items()}
        shape = f"{sizes} {how} {self.latent_shape} {conditions} {count} {guidance > 1} {backward}"
        return remembered(shape, lambda: self._denoised(count, guidance, backward))

    def _denoised(self, count: int, guidance: float, backward: bool) -> Held:
        if not self.tables_made:  # of positions, which some networks make in their first forward and keep
            self.tables_made = True
            self._denoised(1, guidance, False)
        latents = torch.zeros(count, *self.latent_shape, device="meta")
        times = torch.zeros(count, device="meta")
        conditions = self.conditions(count, guidance > 1)
        self.policy.train(backward)
        with patch.object(self.family, "denoiser_names", self.policy.trainable[-1:]):
            return held_bytes(
                self.policy, lambda: self.family.velocity(latents, times, conditions, guidance), backward=backward
            )

    def _decode(self, count: int, backward: bool) -> Held:
        """The decoder over as many of `count` samples as go through it at once.

        Video decoders take one latent frame after the other: a long video holds what a short one does and so much more
        for each further frame.
        """
        part = min(count, max(1, LATENTS_AT_ONCE // prod(self.latent_shape)))
        if len(self.latent_shape) == 4 and self.latent_shape[1] > MORE_FRAMES:
            few, more = (self._decoded(part, frames, backward) for frames in (FEW_FRAMES, MORE_FRAMES))
            further = (self.latent_shape[1] - FEW_FRAMES) / (MORE_FRAMES - FEW_FRAMES)
            held = Held(*(round(first + further * (second - first)) for first, second in zip(few, more)))
        else:
            held = self._decoded(part, None, backward)
        turns = ceil(count / part)
        work = astuple(held.work.times(count / part, turns))
        return Held(held.kept * turns, held.peak + held.kept * (turns - 1), *work)

    def _decoded(self, count: int, frames: int | None, backward: bool) -> Held:
        shape = self.latent_shape if frames is None else (self.latent_shape[0], frames, *self.latent_shape[2:])
        vae = self.family.pipeline.vae

        def held() -> Held:
            latents = torch.zeros(count, *shape, device="meta", requires_grad=backward)
            return held_bytes(vae, lambda: self.family.decode(latents), backward=backward)

        if self.config.plugins:  # code of the user's own
            return held()
        return remembered(f"{type(self.family)} {dict(vae.config)} {vae.dtype} {count} {shape} {backward}", held)


class DiffusionPlanner:
    """Puts a plan together; `plan()` is all that others call. models: as of `computed_models`, the policy's known."""

    def __init__(
        self, config: DiffusionRunConfig, models: Mapping[str, Computed | None], judges: Mapping[str, RewardModel],
        device: Device, ranks: int, local: int,
    ) -> None:  # fmt: skip
        self.config, self.models, self.judges = config, models, judges
        self.device, self.ranks, self.local = device, ranks, local
        self.computed = computed = models["policy"]
        self.policy = computed.policy
        self.zero = Zero(config.distributed, ranks, device.on_cpu)
        self.speeds = Speeds.of(device, computed.width, self.zero, local)
        self.model = replace(Model.of(self.policy, computed.width), name="denoisers")
        s, a, train = config.sampling, config.algorithm, config.train
        self.samples = ceil(s.rollout_batch_size * s.n_samples_per_prompt / ranks)
        self.drawn = min(self.samples, s.micro_rollout_batch_size)  # at once
        self.sequence = config.distributed.sp_size
        self.own = max(1, train.train_batch_size * self.sequence // ranks)
        self.micro = min(self.own, train.micro_train_batch_size)
        self.rewarded = a.entry.trains_on == "reward"
        self.reference = a.beta > 0 or a.entry.reference
        beside = [computed] * (self.reference + config.keeps_old_policy) + [models.get("teacher")]
        self.beside = [each for each in beside if each is not None]  # whose forwards run beside the trained network's
        self.steps, self.together, self.guidance = trained_steps(config), train.steps_per_forward, s.guidance_scale
        if self.rewarded:
            self.steps = len(gradient_steps(s.num_steps, a.mid_timestep, a.final_timestep))
        else:
            self.guidance = training_guidance(config)

    def plan(self) -> Plan:
        """The plan of the run."""
        about = (
            f"{self.config.model.pretrain}, {self.model.numbers / 1e9:.2f} billion weights, "
            f"{self.model.trained / 1e6:.0f} million of them trained, ZeRO-{self.zero.stage}, "
            f"{self.samples} samples a rank and step"
        )
        if self.config.distributed.split:
            about += "; a trainer's device alone, those of the rollout workers hold a pipeline each"
        step = (self._generate(), self._score(), self._train(), self._sync())
        phases = (self._load(), *step, self._resume(), self._export())
        own = {name: getattr(self.config.model, name) for name in ("use_gradient_checkpointing_offload", "vae_tiling")}
        used = in_use(self.config, **own, offload_trainer=True)  # a setting of vision-language runs
        tokens = 0.0  # a denoiser's are not counted
        unknown = [name for name, each in self.models.items() if each is None]
        unknown += [name for name, each in self.judges.items() if not each.model.numbers]
        trained = self._trained_work()
        return Plan(
            about, self.device, self.ranks, self.local, phases, used, trained, tokens, tuple(unknown),
            resumes=self.config.output.resumes_from is not None,
        )  # fmt: skip

    # -- what stands there all the time --------------------------------------------------------------------------

    def _parts(self, *names: str) -> int:
        return sum(self.computed.part_bytes.get(name, 0) for name in names)

    def _always(
        self, at_work: tuple[str, ...] = (), stepped: bool = True, judge: str | None = None, training: bool = False
    ) -> list[Item]:
        """Denoisers, what their optimizer keeps, and copies; text encoders and VAE wait on the host.

        judge: the reward model at work. training: whether gradients are counted apart.
        """
        config, share = self.config, self.zero.share(3)
        items = [*program(self.device, engine=False), self.zero.weights(self.model)]
        items += self.zero.optimizer(self.model, stepped)
        items += [] if training else self.zero.kept(self.model)
        for name, names in (("text encoders", ENCODERS), ("VAE", ("vae",))):
            there = bool(set(names) & set(at_work))
            items.append(Item(f"{name}: weights", self._parts(*names)).on_host(not there))
        if config.output.async_save and stepped:
            items += self.zero.saved(self.model)
        if config.sampling.cuda_graphs and stepped:
            items.append(self._step("graph of a denoising step"))
        copy = FP32 * self.model.trained / share
        if config.train.enable_ema:
            items.append(Item("average of the weights (EMA), fp32", copy, "lora_rank, enable_ema false"))
        if (teacher := self.models.get("teacher")) is not None:
            size = Model.of(teacher.policy, teacher.width).bytes
            items.append(Item("teacher: weights", size, "a smaller teacher_pretrain"))
        if config.keeps_old_policy:
            items.append(Item("old policy, fp32", copy, "lora_rank"))
        if self.reference and config.model.lora_rank == 0:
            items.append(Item("reference: weights", self.model.trained * self.model.width / share, "lora_rank"))
        return items + reward_items(self.judges, self.zero, judge)

    def _lent(self) -> list[Item]:
        """The average in evaluations, and the old policy where it draws."""
        lower = "eval_ema false, lora_rank" if self.config.output.eval_ema else "lora_rank"
        lends = self.config.keeps_old_policy or self.config.output.eval_ema
        return [self.zero.standing_in(self.model, lower)] if lends else []

    def _drawn(self) -> list[Item]:
        """What the step's samples hold: on the device until they are trained on, their media on the host."""
        if self.rewarded:
            return []
        points = self.config.sampling.num_steps + 1 if rollout_noise(self.config).keep_path else 1
        if self.config.algorithm.entry.trains_on != "steps":
            points = 1
        if rollout_noise(self.config).keep_means:
            points += self.config.sampling.num_steps
        told, own = self.computed.condition_bytes()
        latents = self.samples * (points * self.computed.latent_bytes + own)
        micro = self.config.sampling.micro_rollout_batch_size * self.computed.media_bytes
        kept = 1 if self.device.on_cpu or micro > MOST_PINNED else 2  # page-locked parts stay taken beside the whole
        media = Item("decoded samples", kept * self.samples * self.computed.media_bytes, "rollout_batch_size", HOST)
        lower = "rollout_batch_size, sde_window_size"
        prompts = min(self.samples, self.config.sampling.rollout_batch_size)  # a rank may have a sample of each
        texts = Item("texts and images to edit", prompts * told, "source_pixels, rollout_batch_size", HOST)
        return [Item("latents of the samples", latents, lower), media, texts]

    def _graphs(self) -> Item:
        """Of the rollout's forwards, where they are kept for the update and within their limit."""
        config, size = self.config, 0.0
        if config.rollout_graphs_serve and len(self.policy.trainable) == 1:
            one = self.computed.denoised(1, config.sampling.guidance_scale, backward=True).kept
            size = one * self.samples * self.steps
        fits = size <= config.train.rollout_graph_gib * GIB
        return Item("graphs of the rollout", size if fits else 0, "rollout_graph_gib")

    # -- phases --------------------------------------------------------------------------------------------------

    def _load(self) -> Phase:
        copy = self.zero.on_its_way("denoisers on their way", self.model)
        always = self._always(stepped=False)
        moments = [always] if self.device.on_cpu else [[*always, copy]]
        size = self.model.bytes + self._parts(*ENCODERS, "vae")
        return Phase.fullest("load", size / DISK, self.device.on_cpu, *moments)

    def _generate(self) -> Phase:
        """Text encoders, then the denoiser, then the VAE are at work; Reward FL does all of it while it trains. Where
        rollout workers draw, this is the trainer's evaluation, in micro-batches of as many."""
        always, drawn, lent = self._always(), [*self._drawn(), self._graphs()], self._lent()
        forward = self._step("a denoising step")
        decoding = self._decoded(self.drawn, backward=False).peak
        decoded = Item("decoding", decoding, "vae_tiling, micro_rollout_batch_size")
        moments = [
            [*self._always(ENCODERS), *self._drawn(), self._encoding()],
            [*always, *drawn, *lent, forward, *self.zero.gathered(self.model)],
            [*self._always(("vae",)), *drawn, *lent, decoded],
        ]
        seconds = 0.0 if self.rewarded else self._generate_seconds()
        return Phase.fullest("generate", seconds, self.device.on_cpu, *moments)

    def _step(self, name: str) -> Item:
        """What a forward of the sampler takes."""
        size = self.computed.denoised(self.drawn, self.config.sampling.guidance_scale, backward=False).peak
        return Item(name, size + self.drawn * self.computed.condition_bytes()[0], "micro_rollout_batch_size")

    def _generate_seconds(self) -> float:
        """Texts, all denoising steps, and the decoder over this rank's samples."""
        count, steps = self.drawn, self.config.sampling.num_steps
        turns = ceil(self.samples / count)
        one = self._denoising(count, self.config.sampling.guidance_scale, False)
        seconds = steps * self.speeds.seconds(one.times(self.samples / count, turns))
        decoded = self.computed.decoded(count, False).work.times(self.samples / count, turns)
        gathered = self.speeds.gathering(self.model, turns * steps)
        return seconds + self.speeds.seconds(decoded) + gathered + self._encode_seconds()

    def _denoising(self, count: int, guidance: float, backward: bool, of: Computed | None = None) -> Work:
        """Of a step of the network, or of another one, over `count` samples, and of the sampler's or the loss's
        operations after it."""
        work = (of or self.computed).denoised(count, guidance, backward=backward).work
        return work + Work(calls=STEP_CALLS * (1 + 2 * backward))

    def _encode_seconds(self) -> float:
        """Text encoders and VAE to the device and back, and the step's different texts through the encoders."""
        size, numbers = self._parts(*ENCODERS, "vae"), self._parts(*ENCODERS) / self.computed.width
        prompts = ceil(self.samples / self.config.sampling.n_samples_per_prompt)
        tokens = prompts * self.computed.conditions(1, negative=False)["context"].shape[1]
        moved = 0.0 if self.speeds.alone else 2 * size / self.speeds.link
        return moved + self.speeds.seconds(Work(2 * numbers * tokens))

    def _encoding(self) -> Item:
        """Of the texts of one call: what every layer of an encoder gives, which several pipelines read."""
        family = self.policy.family
        tokens = family.texts_at_once * self.computed.conditions(1, negative=False)["context"].shape[1]
        parts = [family.pipeline.components.get(name) for name in ENCODERS]
        shapes = [part.config.get_text_config() for part in parts if isinstance(part, PreTrainedModel)]
        layers = [(each.num_hidden_layers + 1) * each.hidden_size for each in shapes]
        return Item("texts in the encoders", tokens * max(layers, default=0) * self.computed.width)

    def _decoded(self, count: int, backward: bool) -> Held:
        """A tiled decoder works on tiles of 256 pixels, so its activations are those of such a tile."""
        held = self.computed.decoded(count, backward)
        s = self.config.sampling
        if not self.config.model.vae_tiling or backward:
            return held
        share = min(1.0, 256 * 256 / (s.height * s.width))
        media = count * self.computed.media_bytes
        return held._replace(peak=int(held.peak * share) + media)

    def _score(self) -> Phase:
        """Reward models are at work one after the other, functions on the host."""
        held = [*self._drawn(), self._graphs()]
        seconds = judging(self.judges, self.speeds, self.samples, 0)
        moments = ([*self._always(judge=name), *held] for name in self.judges or [None])
        return Phase.fullest("score", seconds, self.device.on_cpu, *moments)

    def _train(self) -> Phase:
        always, zero, model = self._always(("vae",) if self.rewarded else (), training=True), self.zero, self.model
        activations, host = self._reward_gradient() if self.rewarded else self._replayed()
        batch = self._update_items()
        lower = "gradient_checkpointing, use_gradient_checkpointing_offload, bf16, steps_per_forward, "
        lower += "micro_train_batch_size, sp_size"
        held = [
            Item("activations of a micro-batch", activations, lower),
            Item("activations kept on the host", host, "micro_train_batch_size", HOST),
        ]
        micro_batches = ceil(self.own / self.config.train.micro_train_batch_size)
        backward = [*always, *batch, *zero.gathered(model), *zero.gradients(model, micro_batches), *held]
        kept = [*always, *batch, *zero.gradients(model, 1), self._graphs(), self._beside_graphs()]
        step = [*always, *batch, *zero.step(model)]
        return Phase.fullest("train", self._train_seconds(), self.device.on_cpu, backward, kept, step)

    def _train_seconds(self) -> float:
        """Of all updates: forwards and backwards, what the ranks exchange, and the optimizer's step."""
        speeds = self.speeds
        updates = max(1.0, self.samples * self.sequence / self.own) * self.config.train.max_epochs
        seconds = self._drawn_for_reward() if self.rewarded else self._replay_seconds()
        _, kept = self._reward_gradient() if self.rewarded else self._replayed()  # there and back, not page-locked
        kept *= 1 if self.rewarded else ceil(self.steps / self.together)
        seconds += 0.0 if speeds.alone else 2 * kept / HOST_MEMORY
        forwards = ceil(self.own / self.micro) * ceil(trained_steps(self.config) / self.together)
        exchanged = speeds.reducing(self.model, forwards)
        exchanged += speeds.gathering(self.model, 2 * forwards)
        tensors = sum(parameter.requires_grad for parameter in self.policy.parameters())
        step = speeds.optimizer_step(self.model, tensors)
        return updates * (self.own / self.micro * seconds + exchanged + step)

    def _trained_work(self) -> Work:
        """Of forward and backward of a step's updates, whichever phase runs the forwards."""
        samples = self.samples * self.config.train.max_epochs
        if self.rewarded:
            one = self.computed.denoised(self.micro, self.guidance, backward=True).work.times(self.steps)
            return (one + self.computed.decoded(self.micro, True).work).times(samples / self.micro)
        one = self.computed.denoised(self._replayed_at_once(), self.guidance, backward=True).work
        return one.times(samples * self.steps / self._replayed_at_once())

    def _replayed_at_once(self) -> int:
        """Samples of a forward of an update, each at one of its steps; of shared tokens a part."""
        return ceil(self.micro * self.together / self.sequence)

    def _replay_seconds(self) -> float:
        """Of the trained steps of one micro-batch."""
        kept = self._graphs().bytes > 0
        samples, turns = (self.drawn, self.steps) if kept else (self.micro, ceil(self.steps / self.together))
        count = ceil(samples / self.sequence) if kept else self._replayed_at_once()
        share = self.steps * samples / self.sequence / (turns * count)
        work = self._denoising(count, self.guidance, True)
        if kept:  # the forward was the rollout's
            work += self._denoising(count, self.guidance, False).times(-1.0)
        beside = [self._denoising(count, self.guidance, False, of) for of in self.beside]
        each = sum(self.speeds.seconds(one.times(share, 1)) for one in (work, *beside))
        return turns * each * self.micro / samples

    def _drawn_for_reward(self) -> float:
        """Of the samples of one micro-batch, drawn and decoded with a gradient through the last steps."""
        plain, learnt = (self._denoising(self.micro, self.guidance, backward) for backward in (False, True))
        decoded = self.speeds.seconds(self.computed.decoded(self.micro, True).work)
        steps = (self.config.sampling.num_steps - self.steps) * self.speeds.seconds(plain)
        steps += self.steps * self.speeds.seconds(learnt)
        return steps + decoded + self._encode_seconds() * self.micro / self.own

    def _update_items(self) -> list[Item]:
        """The samples of one update on the device, all of them on the host: those of all ranks of a group."""
        if self.rewarded:
            return []
        latents, *others = self._drawn()
        share = min(float(self.sequence), self.own / self.samples)
        prompts = min(self.own, self.config.sampling.rollout_batch_size)
        size = latents.bytes * share + prompts * self.computed.condition_bytes()[0]
        update = Item("samples of an update", size, "train_batch_size")
        return [Item(latents.name, latents.bytes * self.sequence, latents.lower, HOST), update, *others]

    def _replayed(self) -> tuple[float, float]:
        """(device, host) bytes of a micro-batch of denoising steps, forward and backward. Others run while its graph is
        there. Of several trained experts the first and the last graph of an update has a sample of each other one."""
        count = self._replayed_at_once()
        held = self.computed.denoised(count, self.guidance, backward=True)
        if len(self.policy.trainable) > 1:
            more = self.computed.denoised(1, 1.0, backward=True).kept
            held = held._replace(kept=held.kept + more, peak=held.peak + more)
        beside = max((each.denoised(count, self.guidance, backward=False).peak for each in self.beside), default=0)
        return self._on_device(held, 1, beside)

    def _beside_graphs(self) -> Item:
        """The reference's forward over all kept steps of a micro-batch of the rollout."""
        size = 0
        if self._graphs().bytes and self.reference:
            rows, guidance = self.drawn * self.steps, self.config.sampling.guidance_scale
            size = self.computed.denoised(rows, guidance, backward=False).peak
        return Item("reference on the kept steps", size, "micro_rollout_batch_size, rollout_graph_gib")

    def _on_device(self, held: Held, times: int, beside: float = 0) -> tuple[float, float]:
        """(device, host) bytes of `times` graphs, of which one is in backward; with offload graphs wait on the host."""
        kept = times * held.kept
        if self.config.model.use_gradient_checkpointing_offload:
            return max(held.peak - held.kept, beside), kept
        return max(kept - held.kept + held.peak, kept + beside), 0

    def _reward_gradient(self) -> tuple[float, float]:
        """(device, host) bytes of the steps with gradient and the decoding of a micro-batch, until its backward."""
        step = self.computed.denoised(self.micro, self.guidance, backward=True)
        decoded = self._decoded(self.micro, backward=True)
        device, host = self._on_device(step, self.steps)
        if self.config.model.use_gradient_checkpointing_offload:
            return max(device, decoded.peak - decoded.kept), host + decoded.kept
        return max(device, self.steps * step.kept + decoded.peak), 0

    def _sync(self) -> Phase:
        """Sampling uses the trained weights themselves, or workers take versions of them."""
        items = self._always()
        if self.config.distributed.split:
            versions = (self.config.asynchronous.ahead + 2) * self.model.trained * self.model.width
            items += [*self._lent(), *self.zero.for_workers(self.model, versions / self.local)]
        return Phase.fullest("sync", 0.0, self.device.on_cpu, items)

    def _resume(self) -> Phase:
        read = self.zero.read_back(self.model)
        items = [*self._always(stepped=False), *self.zero.moments(self.model), read]
        return Phase.fullest("resume", 2 * read.bytes / DISK, self.device.on_cpu, items)

    def _export(self) -> Phase:
        """Adapters to all ranks' hosts, a denoiser's at once; all weights to rank 0's one by one, where two meet."""
        model, adapters = self.model, self.config.model.lora_rank > 0
        numbers, at_once = (model.trained,) * 2 if adapters else (model.numbers, 2 * model.widest)
        lent = self._lent() if self.config.output.eval_ema else []
        gathered = Item("weights gathered to export", at_once * model.width if self.zero.stage == 3 else 0)
        size = numbers * model.width / (1 if adapters else self.local)
        items = [*self._always(), *lent, gathered, Item("weights to export", size, "lora_rank, bf16", HOST)]
        return Phase.fullest("export", self.speeds.writing(numbers * model.width), self.device.on_cpu, items)
