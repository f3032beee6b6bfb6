"""From a checked configuration to a diffusion trainer. Everything cheap is checked before anything big loads."""

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from ...algorithms.diffusion import Loss
from ...algorithms.diffusion.denoising_batch import first_share, share_of_steps
from ...config import registry
from ...config.constraints import check_call, divisors, load_target, nearest, said
from ...config.diffusion import DiffusionRunConfig, evaluation_sampling, lora_folders, rollout_noise, rollout_sampling
from ...config.kinds import Task, check_hooks
from ...config.placement import ResourcesConfig
from ...config.shared import RECOMPUTES, RewardConfig
from ...data.drawing_prompts import DrawPrompts, PreferencePairs
from ...errors import ConfigError, told_of
from ...experience.diffusion_sampling import TRAIN_TIMESTEPS
from ...models.diffusion.families.base import ONE_NETWORK, join_lora
from ...models.diffusion.forward_graphs import check_graphs
from ...models.diffusion.opening import adapter_of, named_family, pipeline_class
from ...models.diffusion.policy import DiffusionPolicy, LoraSettings
from ...models.weight_copies import WeightCopy
from ...rewards.batch import RewardBatch
from ...rewards.engine import RewardComputationEngine, check_placed
from ...rewards.probe import plausible_media, probed
from ...rewards.settings import check_references, check_reward_config, scored_labels
from ...rollout.diffusion_sampler import DiffusionSampler, window_starts
from ...runtime import collectives
from ...runtime.checkpoint.same_model import check_model, fingerprint
from ...runtime.deepspeed import DeepspeedStrategy, OptimizerSettings
from ...runtime.files import FolderLock
from ...runtime.start_up import log_stage
from ...runtime.train_engine import TrainEngine
from ..loop import LoopSettings
from ..run_state import check_output
from ..start import check_update, fit_to_data, folders_held, open_run, refused_data_listed, start_strategy, with_reward
from .evaluation import DiffusionEvaluation, DrawingGold
from .maker import DiffusersEngine, DiffusionExperienceMaker, PairExperience, TrainingReward, reward_batch
from .parts import DiffusionParts, DrawingSource
from .stages import DiffusionSampling, RolloutGraphs, TrainedVelocity, drawing_batch
from .trainer import DiffusionTrainer, RewardFLTrainer

logger = logging.getLogger(__name__)


def build_diffusion_trainer(config: DiffusionRunConfig, callbacks: Sequence[Any] = ()) -> DiffusionTrainer:
    """The trainer of a diffusion run. callbacks: hooks of a user.

    Raises ConfigError or DataError before any model is loaded for whatever can be known by then.
    """
    check_hooks(callbacks)
    if config.distributed.split:
        registry.services.load("drawing_placement").check_remote(config)
    config = with_reward(config, registry.drawing_tasks)
    strategy = start_strategy(config)  # before users' files are loaded, which may take the rank's device
    check_reward_config(config.reward)
    trained_on = TrainingReward.from_config(config)
    say_idle(config)
    if config.sampling.cuda_graphs:
        check_graphs()
    _check_ranks(config)
    with folders_held(config.output) as locks:
        return _built(config, strategy, trained_on, locks, callbacks)


def _built(
    config: DiffusionRunConfig,
    strategy: DeepspeedStrategy,
    trained_on: TrainingReward | None,
    locks: list[FolderLock],
    callbacks: Sequence[Any],
) -> DiffusionTrainer:
    resume_folder = check_output(config.output)
    named = config.data.prompt_data
    task = registry.drawing_tasks[named] if named in registry.drawing_tasks else None
    config = _placed(config)
    fingerprinted = _fingerprint(config)
    check_model(resume_folder, fingerprinted, config.output.resume_other_model)
    log_stage("reading the prompts")
    with refused_data_listed(config.output.output_dir):
        prompts, eval_prompts = _prompts(config)
    step_size = _fit_to_data(config, len(prompts))
    sets = [each for each in (prompts, eval_prompts) if each is not None]
    if trained_on is not None:
        _check_training_reward(trained_on, config, prompts, strategy)
    judged, golden = _judged(config, prompts, eval_prompts, task)
    scored = next(iter(sets[1:] if config.offline else sets), None)
    config.reward = probed(config.reward, scored, partial(_drawn, config, scored))
    if judged is not None:
        columns = set().union(*(each.columns for each in golden))
        with told_of("gold"):
            judged = probed(judged, golden[0], partial(_drawn, config, golden[0]), columns)
    rewards = _rewards(config, strategy, sets, trained_on is None)
    resources = config.distributed.resources
    gold = _gold(judged, strategy, golden, eval_prompts, task, resources)
    check_placed(resources, rewards, gold.rewards if gold is not None else None)
    algorithm, total_steps, loss = config.algorithm.entry, _total_steps(config, len(prompts)), loss_of(config)
    loop = LoopSettings(total_steps, config.output, resume_folder, fingerprinted, step_size)
    run = open_run(config, loop, locks, sets)
    log_stage("loading the models" + (", whose first steps compile them" if config.model.compile else ""))
    policy, engine = _policy(config, strategy, algorithm, total_steps)
    old = WeightCopy(policy.trainable_parameters(), torch.float32) if config.keeps_old_policy else None
    teacher = load_teacher(config, strategy, policy)
    model = TrainedVelocity(engine, policy, config.sampling.cuda_graphs)
    sampler = DiffusionSampler(rollout_sampling(config), rollout_noise(config))
    sampling = DiffusionSampling(model, sampler, config.sampling, config.train.seed)
    sampler.say_noise(model, sampling.latent_shape)
    drawing = _engine(config, sampling, old)
    maker: DiffusionExperienceMaker | PairExperience
    if config.offline:
        maker = PairExperience(sampling, rewards, drawing, run.timer)
    else:
        graphs = RolloutGraphs.from_config(config, policy)
        maker = DiffusionExperienceMaker(drawing, rewards, config.algorithm, run.timer, run.hooks, graphs)
    parts = DiffusionParts(
        **run._asdict(),
        config=config,
        policy=policy,
        engine=engine,
        algorithm=algorithm,
        loss=loss,
        maker=maker,
        prompts=DrawingSource(config, prompts, drawing if config.distributed.split else None),
        evaluation=_evaluation(config, model, eval_prompts, rewards, gold),
        old=old,
        trained_on=trained_on,
        gold=gold,
        teacher=teacher,
        sequence=strategy.sequence,
    )
    trainer = RewardFLTrainer if algorithm.trains_on == "reward" else DiffusionTrainer
    return trainer(parts, callbacks)


def loss_of(config: DiffusionRunConfig) -> Loss:
    """What the run trains with. Raises ConfigError where the algorithm's function gives no loss."""
    entry = config.algorithm.entry
    loss, rewarded = entry.load()(config), "context, start, conditions, schedule, reward, denominator"
    methods = {"loss": rewarded if entry.trains_on == "reward" else "context, batch, denominator"}
    if entry.coupled:
        methods["terms"] = "context, batch"
    for name, given in methods.items():
        told = f"diffusion algorithm {entry.name!r} gave a {type(loss).__name__}"
        if not hasattr(loss, name):
            raise ConfigError(f"{told}, which has no method {name!r}")
        check_call(getattr(loss, name), given, f"{told}, whose {name}")
    return loss


def _engine(config: DiffusionRunConfig, sampling: DiffusionSampling, old: WeightCopy | None) -> Any:
    """What draws rollouts: this rank's own sampling, or workers on devices of their own."""
    own = DiffusersEngine(sampling, config.sampling.n_samples_per_prompt, old, config.algorithm)
    if not config.distributed.split:
        return own
    path = registry.pipeline_folder(config.model.pretrain, config.model.family)
    return registry.services.load("drawing_placement").remote_drawing(config, own, path)


def _evaluation(
    config: DiffusionRunConfig, model: TrainedVelocity, prompts: DrawPrompts | None,
    rewards: RewardComputationEngine, gold: DrawingGold | None,
) -> DiffusionEvaluation | None:  # fmt: skip
    """The fixed evaluation, with a seed of its own where `eval_seed` gives one and noise of each row's own; None
    without prompts."""
    if prompts is None:
        return None
    output = config.output
    seed = config.train.seed if output.eval_seed is None else output.eval_seed
    drawn = replace(config.sampling, same_latent=False)
    sampling = DiffusionSampling(model, DiffusionSampler(evaluation_sampling(config)), drawn, seed)
    return DiffusionEvaluation(sampling, prompts, rewards, output.records_kept, gold)


def _rewards(
    config: DiffusionRunConfig, strategy: DeepspeedStrategy, sets: list[DrawPrompts], asked: bool
) -> RewardComputationEngine:
    """The reward engine. sets: prompts of training and of evaluation; asked: Reward FL asks it for evaluations only."""
    scored = sets[1:] if config.offline else sets
    trained = sets[:1] if asked and not config.offline else []  # others ask rewards for evaluations only
    judged = trained or sets[1:]
    check_references(config.reward, trained, sets[1:])
    rewards = RewardComputationEngine.from_config(
        config.reward,
        strategy=strategy,
        resources=config.distributed.resources,
        labels=set().union(*(each.labels for each in scored)),
        columns=scored[0].columns if scored else set(),
        references=judged[0].has_references if judged else None,
        labels_cut_away=lambda: set().union(*(each.labels_cut_away() for each in scored)),
    )
    collectives.meet()  # as `data/prompts.py` does, for models of rewards
    if config.algorithm.gdpo:
        rewards.require_weights("gdpo")
    return rewards


def _fingerprint(config: DiffusionRunConfig) -> dict[str, Any]:
    """What is trained, for checkpoints."""
    model = config.model
    settings = {
        "pipeline": pipeline_class(registry.pipeline_folder(model.pretrain, model.family)),
        "lora_rank": model.lora_rank,
        "lora_alpha": model.lora_alpha if model.lora_rank else None,
        "target_modules": model.target_modules if model.lora_rank else None,
        "trainable_models": model.trainable_models,
    } | {"zero_stage": config.distributed.zero_stage, "bf16": model.bf16, "kind_of_run": config.kind_of_run}
    built_in = model.pretrain in registry.checkpoint_resolvers
    return fingerprint(model.pretrain, None if built_in else model.pretrain, settings)


def _check_training_reward(
    reward: TrainingReward, config: DiffusionRunConfig, prompts: DrawPrompts, strategy: DeepspeedStrategy
) -> None:
    """Raise ConfigError or RewardError for a reward that does not know the prompts, or that has no gradient."""
    reward.check_prompts(prompts, config.reward.reward_max_invalid)
    sampling = config.sampling
    frames = [sampling.num_frames] if _moving(config) else []
    reward.check_gradient(prompts[0], (1, 3, *frames, sampling.height, sampling.width), strategy.device)


def _drawn(config: DiffusionRunConfig, prompts: DrawPrompts, index: int) -> RewardBatch:
    """A sample of the data as rewards see it, with an image or video of the run's size."""
    sampling = config.sampling
    media = plausible_media(sampling.height, sampling.width, sampling.num_frames if _moving(config) else None)
    return reward_batch(drawing_batch([prompts[index]], [0], first=0), media[None])


def _moving(config: DiffusionRunConfig) -> bool:
    model = config.model
    built_in = model.pretrain in registry.checkpoint_resolvers
    return not built_in and adapter_of(model.pretrain, model.family).draws_videos()


def say_idle(config: DiffusionRunConfig) -> None:
    """Say which setting, that recipes share between algorithms, does nothing in this run."""
    together, algorithm = config.train.steps_per_forward, config.algorithm
    if together > 1 and algorithm.entry.trains_on == "reward" and collectives.is_rank_0():
        name = algorithm.diffusion_algorithm
        logger.warning("steps_per_forward %d does nothing: %s draws each step from the one before", together, name)


def _check_ranks(config: DiffusionRunConfig) -> None:
    world = collectives.world_size()
    size, n = config.sampling.rollout_batch_size, config.sampling.n_samples_per_prompt
    step = _prompts_step(config)
    if size % step:
        works = nearest(size, range(step, size + step, step))
        told = said(config.sampling, "rollout_batch_size") + ("" if config.offline else f" * n_samples_per_prompt {n}")
        raise ConfigError(f"{told} does not divide over {world} ranks; use {works} for rollout_batch_size")
    parts = world // config.distributed.sp_size
    check_update(config.train, parts, divisors(size * n, math.lcm(parts, config.coupled_samples)))


def _prompts_step(config: DiffusionRunConfig) -> int:
    """Of what rollout_batch_size is a multiple, so that the ranks share a rollout evenly."""
    world = collectives.world_size()
    return world if config.offline else world // math.gcd(world, config.sampling.n_samples_per_prompt)


def _fit_to_data(config: DiffusionRunConfig, prompts: int) -> int:
    """Cut rollout_batch_size to the prompts, or pairs, that there are, and the updates with it, and say so.

    Raises ConfigError for fewer than the ranks share evenly.
    """
    step = _prompts_step(config)
    if prompts < step:
        raise ConfigError(f"{config.data.prompt_data} has {prompts} prompt(s), and the ranks need a multiple of {step}")
    multiple = math.lcm(collectives.world_size() // config.distributed.sp_size, config.coupled_samples)
    named = "pairs of the data" if config.offline else "prompts of the data"
    return fit_to_data(config.sampling, config.train, prompts, step, multiple, named)


def _placed(config: DiffusionRunConfig) -> DiffusionRunConfig:
    """The configuration with files in the place of the name of a built-in task."""
    config = copy.deepcopy(config)
    if config.data.prompt_data in registry.drawing_tasks:
        registry.drawing_tasks[config.data.prompt_data].put_files(config)
    return config


def _prompts(config: DiffusionRunConfig) -> tuple[DrawPrompts, DrawPrompts | None]:
    """Prompts of training and of evaluation, if there are any. Raises DataError, and ConfigError for settings that no
    model of the run's family follows."""
    model, data = config.model, config.data
    adapter = named_family(pipeline_class(registry.pipeline_folder(model.pretrain, model.family)), model.family)
    adapter.check(config)
    images = adapter.most_source_images or int(adapter.takes_first_frame)  # that the model takes of a row
    labels = scored_labels(config.reward) if data.on_bad_row == "skip" else None
    if config.offline:
        prompts = PreferencePairs(data.prompt_data, data.prompt_split, data.max_samples, data)
        if adapter.draws_videos():
            raise ConfigError(f"pair_data holds images, and {adapter.__name__} draws videos: train a model of images")
    else:
        prompts = DrawPrompts(data.prompt_data, data.prompt_split, data.max_samples, data, images, labels)
    if data.eval_data is None or data.max_eval_samples == 0:
        return prompts, None
    return prompts, DrawPrompts(data.eval_data, data.eval_split, data.max_eval_samples, data, images, labels)


def _total_steps(config: DiffusionRunConfig, prompts: int) -> int:
    if config.train.max_steps > 0:
        return config.train.max_steps
    return -(-prompts * config.train.num_episodes // config.sampling.rollout_batch_size)


def _policy(config, strategy: DeepspeedStrategy, algorithm, total_steps: int) -> tuple[DiffusionPolicy, TrainEngine]:
    model, lora = config.model, LoraSettings.from_config(config.model)
    divided = {"trainable": model.trained_denoisers, "divide": strategy.divide}
    policy = _loaded(config, strategy, model.pretrain, lora=lora, **divided)
    if algorithm.trains_on == "reward" or len(policy.denoisers) > 1:
        policy.train_only(_trained_experts(config, policy))
    policy.family.follow(config)
    if model.compile:
        policy.compile_blocks()
    if model.vae_tiling:
        policy.family.pipeline.vae.enable_tiling()
    if model.gradient_checkpointing in RECOMPUTES:
        policy.enable_gradient_checkpointing(model.use_gradient_checkpointing_offload, model.gradient_checkpointing)
    policy.move_to(strategy.device)
    settings = OptimizerSettings.from_config(config.train, config.train.learning_rate, config.updates(total_steps))
    engine = strategy.prepare(policy, settings)
    if config.algorithm.beta > 0 or algorithm.reference:
        policy.keep_reference()
    return policy, engine


def _loaded(config: DiffusionRunConfig, strategy: DeepspeedStrategy, name: str, **own: Any) -> DiffusionPolicy:
    """A pipeline of the run, on the host. A collective. own: what is not of the run."""
    model, path = config.model, registry.pipeline_folder(name, config.model.family)
    policy = DiffusionPolicy.from_pretrained(
        path, dtype=strategy.dtype, text_length=model.max_sequence_length, family=model.family,
        tokenizer=model.tokenizer_path, **own,
    )  # fmt: skip
    collectives.meet()  # as `data/prompts.py` does
    return policy


def _trained_experts(config: DiffusionRunConfig, policy: DiffusionPolicy) -> set[str]:
    """The networks that serve a step with gradient and, with Reward FL, timesteps between the boundaries.

    Raises ConfigError where there is none, and for boundaries on a model of one network.
    """
    s, a, sampling = config.sampling, config.algorithm, rollout_sampling(config)
    shape = policy.latent_shape(s.height, s.width, s.num_frames)
    sampler = DiffusionSampler(sampling, rollout_noise(config))
    timesteps, sigmas = sampler.schedule(policy, shape)
    share = a.timestep_fraction if a.timestep_choice == "first" else 1.0
    if a.entry.trains_on == "steps":  # of all windows
        starts = window_starts(sampling.moving_steps, sampler.noise)
        steps = torch.cat([first_share(sampler.stochastic_steps(start), share) for start in starts])
        return policy.family.serving(timesteps[steps.unique()])
    if a.entry.trains_on == "data":
        noisy = int(((sigmas > 0) & (sigmas >= a.min_sigma)).sum())
        return policy.family.serving(timesteps[: share_of_steps(noisy, share)])
    serving = policy.family.serving(timesteps[a.mid_timestep : a.final_timestep + 1])
    between = (a.min_timestep_boundary, a.max_timestep_boundary)
    if between == (0.0, 1.0):
        return serving
    if len(policy.denoisers) == 1:
        raise ConfigError(ONE_NETWORK)
    first, end = (round(TRAIN_TIMESTEPS * share) for share in between)
    noise, _ = policy.family.default_schedule(TRAIN_TIMESTEPS, shape, s.flow_shift)
    chosen = policy.family.serving(noise[first:end])
    if serving.isdisjoint(chosen):
        raise ConfigError(
            f"the timesteps between the boundaries {between} are served by {', '.join(sorted(chosen))}, but steps "
            f"mid_timestep {a.mid_timestep} to final_timestep {a.final_timestep} by {', '.join(sorted(serving))}"
        )
    return serving & chosen


@told_of("gold")
def _judged(
    config: DiffusionRunConfig, prompts: DrawPrompts, held_out: DrawPrompts | None, task: Task | None
) -> tuple[RewardConfig | None, list[DrawPrompts]]:
    """What `guard.gold_*` names, and the data that it scores: those of rollouts, unless they are none of its, and the
    held-out ones, where a built-in task may have a judge of its own. Raises ConfigError where they do not fit it."""
    own = task.judge if task is not None and held_out is not None else None
    judged = config.guard.gold(config.reward) or (RewardConfig(reward_recipe=own) if own is not None else None)
    trained = [prompts] if config.guard.judges_rollouts and not config.offline else []
    evaluated = [held_out] if held_out is not None else []
    if judged is None or not trained + evaluated:
        return None, []
    check_reward_config(judged)
    check_references(judged, trained, evaluated)
    return judged, trained + evaluated


@told_of("gold")
def _gold(
    judged: RewardConfig | None, strategy: DeepspeedStrategy, sets: list[DrawPrompts],
    held_out: DrawPrompts | None, task: Task | None, resources: ResourcesConfig | None = None,
) -> DrawingGold | None:  # fmt: skip
    """Scores by gold, where there is any. sets: as of `_judged`."""
    if judged is None:
        return None
    rewards = RewardComputationEngine.from_config(
        judged,
        strategy=strategy,
        resources=resources,
        labels=set().union(*(each.labels for each in sets)),
        columns=set().union(*(each.columns for each in sets)),
        references=any(each.has_references for each in sets),
    )
    collectives.meet()
    if held_out is None or task is None or task.sets is None:
        return DrawingGold(rewards)
    return load_target(task.sets)(rewards, held_out)


def load_teacher(
    config: DiffusionRunConfig, strategy: DeepspeedStrategy, policy: DiffusionPolicy
) -> DiffusionPolicy | None:
    """The frozen model of on-policy distillation: the teacher's denoisers on the device, whole on every rank; its
    prompts are encoded by the policy's encoders.

    A folder of LoRA weights alone, as runs leave it, lies beside the weights of the run's model.

    Args:
        config: of the run; None is returned where it names no teacher.
        strategy: for the device and the precision.
        policy: that learns from it.

    Raises:
        ConfigError: for a pipeline of another family, whose latents or conditions would be others, and for LoRA weights
            of another model.
    """
    model = config.model
    if model.teacher_pretrain is None:
        return None
    folder = Path(model.teacher_pretrain)
    adapters = bool(lora_folders(folder)) and not (folder / DiffusionPipeline.config_name).is_file()
    teacher = _loaded(config, strategy, model.pretrain if adapters else model.teacher_pretrain)
    if type(teacher.family) is not type(policy.family):
        raise ConfigError(
            f"teacher_pretrain {model.teacher_pretrain} is of family {type(teacher.family).__name__}, the model of "
            f"{type(policy.family).__name__}: on-policy distillation compares steps of one family"
        )
    teacher.family.follow(config)
    pipeline = teacher.family.pipeline
    if adapters:
        join_lora(pipeline, folder)
    idle = [name for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)]
    pipeline.register_modules(**{name: None for name in idle if name not in teacher.denoisers})
    teacher.requires_grad_(False).eval()
    teacher.move_to(strategy.device)
    return teacher
