"""From a checked configuration to the parts of a vision-language run. Cheap checks come before big loads."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from ...algorithms.kl import get_kl_controller
from ...algorithms.loss_terms import PartSettings
from ...config import registry
from ...config.constraints import divisors, nearest, said
from ...config.sft import SFTRunConfig
from ...config.shared import RewardConfig
from ...config.vl import DataConfig, RunConfig, mixing_probabilities
from ...data.prompts import PromptDataset, RowChecks
from ...data.rendering import check_template_kwargs
from ...data.sampler import PromptSampler, PromptSupply, epoch_quotas
from ...data.validation import EvaluationRows
from ...errors import ConfigError, told_of
from ...experience.rollouts import SamplingSettings
from ...models.loading import Checkpoint, add_lora, freeze, load_transformer, open_checkpoint
from ...models.vlm.actor import Actor, Critic
from ...models.vlm.families import VLMFamily, family_of
from ...models.vlm.probe import prove_family
from ...rewards.engine import RewardComputationEngine, check_placed
from ...rewards.probe import probed
from ...rewards.settings import check_references, check_reward_config, scored_labels
from ...rollout.engine import RolloutEngine, build_engine, check_engine, engine_in_words
from ...rollout.parity import ParityGate
from ...rollout.weight_sync import EngineWeights
from ...runtime import collectives
from ...runtime.checkpoint.same_model import check_model, fingerprint
from ...runtime.deepspeed import DeepspeedStrategy, OptimizerSettings
from ...runtime.files import FolderLock
from ...runtime.offload import OffloadedModule
from ...runtime.sequence import own_scores
from ...runtime.start_up import log_stage
from ...runtime.train_engine import TrainEngine
from ..features.dynamic_sampling import ResamplingMaker
from ..features.rollouts_ahead import RolloutsAhead
from ..loop import LoopSettings
from ..run_state import check_output
from ..start import check_update, fit_to_data, folders_held, open_run, refused_data_listed, start_strategy, with_reward
from .checks import check_abilities, check_beside, check_judges
from .episodes import data_processor, episode_stage, warn_of_template, with_environment_reward, with_tools
from .evaluation import Evaluation
from .maker import ExperienceMaker, MakerSettings, log_probs_of
from .parts import PromptSource, VLParts, answered, prompt_batch
from .updates import parts_of_loss

logger = logging.getLogger(__name__)
C = TypeVar("C", RunConfig, SFTRunConfig)
# Of parts of the model; the projector first, which may be a part of the tower.
OWN_RATES = "projector_learning_rate", "vision_learning_rate"
EVALUATED_AT_ONCE = 64  # prompts with media, at least: few parts, and their images of a megapixel fit in 5 GB


def build_parts(config: RunConfig) -> VLParts:
    """The parts of a run.

    Raises ConfigError or DataError before any model is loaded for whatever can be known by then.
    """
    config = with_environment_reward(with_reward(config, registry.tasks))
    strategy = start_strategy(config)  # before users' files are loaded, which may take the rank's device
    check_reward_config(config.reward)
    check_judges(config)
    _check_ranks(config)
    with folders_held(config.output) as locks:
        return _build_parts(config, strategy, locks)


def _build_parts(config: RunConfig, strategy: DeepspeedStrategy, locks: list[FolderLock]) -> VLParts:
    resume_folder = check_output(config.output)
    named, judged = config.model.pretrain, config.gold
    log_stage("reading tokenizer, processor and data, checking the engine's settings")
    config, checkpoint = _open(config)
    model = model_of(named, config, checkpoint, config.algorithm.estimator.critic)
    check_model(resume_folder, model, config.output.resume_other_model)
    with refused_data_listed(config.output.output_dir):
        dataset, eval_set = _datasets(config, checkpoint)
    step_size = _fit_to_data(config, dataset)
    sets = [each for each in (dataset, eval_set) if each is not None]
    golden = sets if config.guard.judges_rollouts else sets[1:]
    judged = judged if golden else None
    check_references(config.reward, sets[:1], sets[1:])
    if judged is not None:
        with told_of("gold"):
            check_reward_config(judged)
            check_references(judged, sets[:1] if golden is sets else [], sets[1:])
    answer = partial(answered, dataset, checkpoint, config)
    columns = set().union(*(each.columns for each in sets))
    config.reward = probed(config.reward, dataset, answer, columns)
    with told_of("gold"):
        judged = probed(judged, dataset, answer, columns)
    rewards = _rewards(config, strategy, checkpoint, sets)
    total_steps, sampler = prompt_schedule(config, dataset, config.rollout.rollout_batch_size)
    loop = LoopSettings(total_steps, config.output, resume_folder, model, step_size)
    run = open_run(config, loop, locks, sets)
    resources = config.distributed.resources
    with told_of("gold"):
        gold = None if judged is None else _scorer(judged, strategy, checkpoint, golden, resources=resources)
    check_placed(resources, rewards, gold)
    log_stage("loading the models")
    (actor, critic, reference), frozen = _models(config, strategy, checkpoint, total_steps)
    prove(config, actor.module, checkpoint, model)
    models = actor, critic, reference, _teacher(config, strategy, checkpoint)
    loss_parts = _loss_parts(config, actor)
    log_stage(f"starting the engine ({engine_in_words(config, checkpoint)})")
    engine = _engine(config, checkpoint, actor, critic)
    maker = _maker(config, strategy, checkpoint, models, engine, rewards, run)
    prompts = _prompts(config, checkpoint, maker, PromptSupply(dataset, sampler))
    return VLParts(
        **run._asdict(),
        config=config,
        strategy=strategy,
        checkpoint=checkpoint,
        actor=actor,
        critic=critic,
        maker=_resampling(config, maker, prompts),
        dataset=dataset,
        prompts=prompts,
        evaluation=_evaluation(config, maker, eval_set, checkpoint, gold),
        loss_parts=loss_parts,
        gate=_gate(config, maker, engine, actor, strategy, checkpoint),
        reference_module=frozen,
        gold=gold,
    )


def _rewards(
    config: RunConfig, strategy: DeepspeedStrategy, checkpoint: Checkpoint, sets: list[PromptDataset]
) -> RewardComputationEngine:
    """What scores the responses. sets: the one that is trained on, and that of evaluations where there is one."""
    rewards = _scorer(
        config.reward,
        strategy,
        checkpoint,
        sets,
        packing_samples=config.train.packing_samples,
        resources=config.distributed.resources,
        labels_cut_away=lambda: set().union(*(each.labels_cut_away() for each in sets)),
    )
    if config.algorithm.estimator.components:
        rewards.require_weights(f"advantage_estimator {config.algorithm.advantage_estimator}")
    return rewards


def _scorer(
    rewards: RewardConfig, strategy: DeepspeedStrategy, checkpoint: Checkpoint, sets: list[PromptDataset], **more: Any
) -> RewardComputationEngine:
    scorer = RewardComputationEngine.from_config(
        rewards,
        tokenizer=checkpoint.tokenizer,
        strategy=strategy,
        labels=set().union(*(each.labels for each in sets)),
        # A column of some rows counts: a function is given None for the others.
        columns=set().union(*(each.columns for each in sets)),
        references=sets[0].has_references,
        **more,
    )
    collectives.meet()  # as `data/prompts.py` does, for models of rewards
    scorer.check_videos(set().union(*(each.video_labels for each in sets)))
    return scorer


def _check_ranks(config: RunConfig) -> None:
    world, rollout, train = collectives.world_size(), config.rollout, config.train
    size = rollout.rollout_batch_size
    if size % world:
        works = nearest(size, range(world, size + world, world))
        raise ConfigError(f"{said(rollout, 'rollout_batch_size')} does not divide over {world} ranks; use {works}")
    parts = world // config.distributed.sp_size
    check_update(train, parts, divisors(rollout.rollout_batch_size * rollout.n_samples_per_prompt, parts))
    if not config.distributed.split and world % rollout.engine_tp_size:
        raise ConfigError(f"engine_tp_size {rollout.engine_tp_size} does not divide {world} ranks")


def _fit_to_data(config: RunConfig, dataset: PromptDataset) -> int:
    world = collectives.world_size()
    prompts = sum(epoch_quotas(dataset.sizes, mixing_probabilities(config.data.prompt_data_probs)))
    parts = world // config.distributed.sp_size
    return fit_to_data(config.rollout, config.train, prompts, world, parts, "prompts of a pass over the data")


def open_model(config: C) -> tuple[C, Checkpoint]:
    """The configuration with folders in the place of built-in tasks and models, and the checkpoint's small parts."""
    config = copy.deepcopy(config)
    if collectives.is_rank_0():
        _resolve_names(config)
    collectives.meet()
    _resolve_names(config)  # other ranks find it in the cache
    checkpoint = open_checkpoint(config.model.pretrain, config.model, config.data)
    check_template_kwargs(checkpoint.processor or checkpoint.tokenizer, config.data)
    for name in OWN_RATES:
        frozen = name == "vision_learning_rate" and config.model.freeze_prefix.lower() == "true"
        if getattr(config.train, name) is not None and (frozen or not checkpoint.vision):
            why = "freeze_prefix true freezes the vision tower" if checkpoint.vision else "this model reads text only"
            raise ConfigError(f"{name}: {why}; leave it out")
    return config, checkpoint


def _open(config: RunConfig) -> tuple[RunConfig, Checkpoint]:
    """As `open_model`, with what the model and the engine cannot do refused."""
    config, checkpoint = open_model(config)
    checkpoint = with_tools(config, checkpoint)
    warn_of_template(config, checkpoint)
    check_abilities(config, checkpoint)
    check_beside(config, checkpoint)
    _resolve_sharing(config, checkpoint)
    check_engine(config, checkpoint)
    if config.distributed.split:
        registry.services.load("placement").check_remote(config)
    return config, checkpoint


def model_of(named: str, config: RunConfig | SFTRunConfig, checkpoint: Checkpoint, critic: bool) -> dict[str, Any]:
    """What is trained, for checkpoints.

    Args:
        named: the model as the command names it.
        config: of the run.
        checkpoint: the model's small parts.
        critic: whether one is trained beside it.
    """
    model = config.model
    settings = {
        "model_type": checkpoint.config.model_type,
        "lora_rank": model.lora_rank,
        "lora_alpha": model.lora_alpha if model.lora_rank else None,
        "target_modules": model.target_modules if model.lora_rank else None,
        "freeze_prefix": model.freeze_prefix,
        "critic": critic,
        "own_rates": ", ".join(name for name in OWN_RATES if getattr(config.train, name) is not None),
    } | {"zero_stage": config.distributed.zero_stage, "bf16": model.bf16, "kind_of_run": config.kind_of_run}
    return fingerprint(named, None if named in registry.checkpoint_resolvers else checkpoint.path, settings)


def _resolve_sharing(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Set share_prefix to what this run does. Raises ConfigError where it is asked for and cannot be done."""
    train, attention = config.train, config.model.attn_implementation
    refused = checkpoint.family.sharing_refused(attention)
    if train.share_prefix and refused:
        raise ConfigError(f"share_prefix: {refused}; leave it out, or set it to false")
    if train.share_prefix is None:
        several = config.rollout.n_samples_per_prompt > 1
        train.share_prefix = checkpoint.family.shares_prompts(None, several, attention)
        if several and refused and collectives.is_rank_0():
            logger.warning("each sample's prompt is computed anew, share_prefix is off: %s", refused)


def _resolve_names(config: RunConfig | SFTRunConfig) -> None:
    """Put folders and files in the place of names of built-in tasks and models."""
    model, task = config.model, config.data.prompt_data
    if task in registry.tasks:
        registry.tasks[task].put_files(config)
    for name in ("pretrain", "teacher_pretrain", "critic_pretrain"):
        given = getattr(model, name)
        if given is not None:
            setattr(model, name, registry.checkpoint_folder(model, given, task))


def _datasets(config: RunConfig, checkpoint: Checkpoint) -> tuple[PromptDataset, PromptDataset | None]:
    rollout, renderer = config.rollout, checkpoint.processor or checkpoint.tokenizer
    family = type(checkpoint.family)
    # By the policy "error" a label without a recipe is told later, with all the labels that the data have.
    labels = scored_labels(config.reward) if config.data.on_bad_row == "skip" else None
    checks = RowChecks(
        limits=rollout, model_input=renderer, prompt_max_len=rollout.prompt_max_len, media=family, labels=labels,
        tools=checkpoint.tools,
    )  # fmt: skip
    dataset, eval_set = datasets_of(config.data, checks)
    dataset.check_draw_column()
    return dataset, eval_set


def datasets_of(data: DataConfig, checks: RowChecks) -> tuple[PromptDataset, PromptDataset | None]:
    """Rows of training and of evaluation, if there are any."""
    dataset = PromptDataset.for_training(data, checks)
    if data.eval_data is None or data.max_eval_samples == 0:
        return dataset, None
    return dataset, PromptDataset.for_evaluation(data, checks)


def prompt_schedule(config: RunConfig | SFTRunConfig, dataset: PromptDataset, size: int) -> tuple[int, PromptSampler]:
    """(steps of the run, the order of its data).

    Args:
        config: for seed, mixing, and how long the run is.
        dataset: of prompts.
        size: prompts of a step.
    """
    data, train = config.data, config.train
    shares = mixing_probabilities(data.prompt_data_probs)
    sampler = PromptSampler(dataset.sizes, size, seed=train.seed, probabilities=shares, mixing=data.prompt_mixing)
    return (train.max_steps if train.max_steps > 0 else sampler.num_batches(train.num_episodes)), sampler


def _actor_optimizer(
    config: RunConfig | SFTRunConfig, family: VLMFamily, model: torch.nn.Module, total_steps: int
) -> OptimizerSettings:
    """With the learning rates of vision tower and projector. Raises ConfigError where one of them is of nothing."""
    train, names = config.train, [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    rates = train.projector_learning_rate, train.vision_learning_rate
    parts = dict(zip(OWN_RATES, zip((family.projectors, family.towers), rates), strict=True))

    def part_of(name: str) -> str | None:
        return next(
            (part for part, (prefixes, _) in parts.items() if any(f".{p}." in f".{name}" for p in prefixes)), None
        )

    def rate_of(name: str) -> tuple[str, float] | None:
        rate = parts[part][1] if (part := part_of(name)) else None
        return (part, rate) if part and rate is not None else None

    trained = {part_of(name) for name in names}
    for part, (_, rate) in parts.items():
        if rate is not None and part not in trained:
            raise ConfigError(f"{part}: no such parameter of this model is trained (freeze_prefix, or no vision tower)")
    trained_steps = max(1, total_steps - max(0, train.freezing_actor_steps))
    settings = OptimizerSettings.from_config(train, train.actor_learning_rate, config.updates(trained_steps))
    return replace(settings, rate_of=rate_of)


def load_actor(
    config: RunConfig | SFTRunConfig, strategy: DeepspeedStrategy, checkpoint: Checkpoint, total_steps: int
) -> tuple[TrainEngine, Callable[..., Actor]]:
    """The policy, and what makes another one of a transformers model.

    Args:
        config: of the run.
        strategy: of the run.
        checkpoint: whose weights are loaded.
        total_steps: of the run, for the schedule.
    """
    model = config.model
    with strategy.loading():
        transformer = load_transformer(checkpoint.path, model, strategy.dtype)
    if getattr(transformer, "is_quantized", False):
        raise ConfigError(f"pretrain {checkpoint.path} holds quantized weights, which no run trains: give full ones")
    freeze(transformer, model.freeze_prefix)
    banned = checkpoint.family.banned_ids(checkpoint.tokenizer)
    extra = {"share_prefix": bool(config.train.share_prefix), "sequence": strategy.sequence}
    new_actor = partial(Actor, banned_ids=banned, eos_ids=checkpoint.eos_ids, **extra)
    policy = new_actor(add_lora(transformer, model))
    return strategy.prepare(policy, _actor_optimizer(config, checkpoint.family, policy, total_steps)), new_actor


def _models(config: RunConfig, strategy: DeepspeedStrategy, checkpoint: Checkpoint, total_steps: int):
    """((actor, critic or None, reference score function or None), the reference's own module or None)."""
    model, (actor, new_actor) = config.model, load_actor(config, strategy, checkpoint, total_steps)
    critic = None
    if config.algorithm.estimator.critic:
        with strategy.loading():
            backbone = load_transformer(model.critic_pretrain or checkpoint.path, model, strategy.dtype)
        freeze(backbone, model.freeze_prefix)
        shares = family_of(backbone.config).able_to_share(config.train.share_prefix, model.attn_implementation)
        settings = OptimizerSettings.from_config(
            config.train, config.train.critic_learning_rate, config.updates(total_steps)
        )
        critic = strategy.prepare(Critic(backbone, shares, strategy.sequence), settings)
    reference, frozen = None, None
    if config.algorithm.init_kl_coef > 0:
        reference, frozen = _reference(config, strategy, checkpoint, actor, new_actor)
    return (actor, critic, reference), frozen


def _reference(config: RunConfig, strategy: DeepspeedStrategy, checkpoint: Checkpoint, actor: TrainEngine, new_actor):
    """(log-probs of the starting policy: the adapters switched off under LoRA, else a frozen copy; that copy)."""
    if config.model.lora_rank:

        def without_adapters(inputs, rule):
            with actor.module.model.disable_adapter():
                return actor(replace(inputs, routing=None), rule, with_entropy=False).log_probs

        return own_scores(without_adapters, strategy.sequence), None
    with strategy.loading():
        transformer = load_transformer(checkpoint.path, config.model, strategy.dtype)
    on_host = config.rollout.offload_reference
    frozen = strategy.prepare_inference(new_actor(transformer), on_host)
    score = own_scores(log_probs_of(frozen), strategy.sequence)
    return (OffloadedModule(frozen, score, strategy.device) if on_host else score), frozen


def _teacher(config: RunConfig, strategy: DeepspeedStrategy, checkpoint: Checkpoint):
    """Log-probs of the model to learn from, None without one."""
    path = config.model.teacher_pretrain
    if path is None:
        return None
    teacher = open_checkpoint(path, config.model, config.data)
    with strategy.loading():
        transformer = load_transformer(path, config.model, strategy.dtype)
    shares = teacher.family.able_to_share(config.train.share_prefix, config.model.attn_implementation)
    scorer = Actor(transformer, teacher.family.banned_ids(teacher.tokenizer), checkpoint.eos_ids, shares)
    frozen = strategy.prepare_inference(scorer)
    prove(config, scorer, teacher, fingerprint(path, teacher.path, {}))
    return own_scores(log_probs_of(frozen), strategy.sequence)


def prove(config: RunConfig | SFTRunConfig, actor: Actor, checkpoint: Checkpoint, model: dict[str, Any]) -> None:
    """Say that an adapter which no test has proven runs this model right. Raises ConfigError where it does not.

    Args:
        config: for the lengths that are tried.
        actor: which is trained.
        checkpoint: for tokenizer and family.
        model: what the model is known by at later starts.
    """
    proven = prove_family(actor, checkpoint, config.rollout.prompt_max_len + config.response_max_len, model)
    if proven:
        log_stage(proven)


def _engine(config: RunConfig, checkpoint: Checkpoint, *trained: TrainEngine | None) -> RolloutEngine:
    """The run's own engine, or the way to those of its workers. trained: the actor first; they wait on the host where
    that is asked for, as engines take their share of the device when they start, or refuse to."""
    for each in filter(None, trained if config.rollout.offload_trainer else ()):
        each.offload()
        each.offload_weights()
    if config.distributed.split:
        return registry.services.load("placement").RemoteEngine.from_config(config, checkpoint)
    engine = build_engine(config, checkpoint, trained[0])
    engine.sleep(keep_weights=False)  # the trainer's come before the first rollout; until then what resumes needs room
    return engine


def _loss_parts(config: RunConfig, actor: TrainEngine) -> list[PartSettings]:
    """Raises ConfigError where a micro-batch's budget of tokens does not hold a prompt with an image drawn for it."""
    drawing = actor.module.drawing
    tokens = None if drawing is None else drawing.tokens
    budget, longest = config.train.max_tokens_per_batch, config.rollout.prompt_max_len + (tokens or 0)
    if 0 < budget < longest:
        raise ConfigError(
            f"max_tokens_per_batch {budget} is less than a drawing may have: prompt_max_len + the {tokens or 0} "
            f"tokens of an image = {longest}"
        )
    return parts_of_loss(config.algorithm, config.response_max_len, tokens)


def _prompts(
    config: RunConfig, checkpoint: Checkpoint, maker: ExperienceMaker, supply: PromptSupply
) -> PromptSource | RolloutsAhead:
    source = PromptSource(
        supply,
        lambda samples, ids: prompt_batch(samples, checkpoint, config.data, ids),
        maker.rollout_stage.data_processor.features,
        keeps_ready=config.rollout.dynamic_sampling,
    )
    if not config.asynchronous.max_staleness:
        return source
    stage, sampling = maker.rollout_stage, maker.settings.sampling
    return RolloutsAhead(source, config.asynchronous, maker.engine, lambda batch: stage.announce(batch, sampling))


def _resampling(config: RunConfig, maker: ExperienceMaker, prompts: PromptSource) -> ExperienceMaker | ResamplingMaker:
    tries = config.rollout.dynamic_sampling_max_tries if config.rollout.dynamic_sampling else 1
    if tries == 1:
        return maker
    return ResamplingMaker(maker, tries, prompts.next_again, config.algorithm.estimator.components)


def _sampling(config: RunConfig) -> SamplingSettings:
    return SamplingSettings.from_config(config.rollout, config.response_max_len if config.episodes.used else None)


def _maker(config, strategy, checkpoint, models, engine, rewards, run) -> ExperienceMaker:
    actor, critic, reference, teacher = models
    actor, critic = (None if each is None else own_scores(each, strategy.sequence) for each in (actor, critic))
    settings = MakerSettings(
        engine=engine,
        sampling=_sampling(config),
        algorithm=config.algorithm,
        micro_batch_size=config.rollout.micro_rollout_batch_size,
        run_seed=config.train.seed,
        weights_follow=True,
        score_policy=config.algorithm.reads_log_probs,
        data_processor=data_processor(config, checkpoint),
        rewards=rewards,
        timer=run.timer,
        other_scores={} if teacher is None else {"teacher_log_probs": teacher},
        hooks=run.hooks,
        stage=episode_stage(config, checkpoint),
        divided=config.distributed.zero_stage == 3,
        in_step=config.distributed.zero_stage == 3 or strategy.sequence is not None,
    )
    return ExperienceMaker(
        actor, critic, reference, checkpoint.tokenizer, get_kl_controller(config.algorithm), strategy.device, settings,
        vision=checkpoint.processor is not None,
    )  # fmt: skip


def _evaluation(config, maker, eval_set, checkpoint, gold) -> Evaluation | None:
    if eval_set is None:
        return None
    output, samples = config.output, EvaluationRows(eval_set)
    prompts = prompt_batch(list(samples), checkpoint, config.data, torch.arange(len(eval_set)))
    sampling = replace(_sampling(config), n=output.eval_samples_per_prompt, first_token_temperature=None)
    greedy = replace(sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1)
    seed, own_seed, kept = config.train.seed, output.eval_seed, output.records_kept
    at_once = max(config.rollout.rollout_batch_size, EVALUATED_AT_ONCE)
    return Evaluation(maker, prompts, sampling, greedy, kept, seed, samples, own_seed, gold, at_once)


def _gate(config, maker, engine, actor, strategy, checkpoint) -> ParityGate | None:
    if config.rollout.parity_every == 0:
        return None
    return ParityGate.from_config(
        config,
        checkpoint,
        stage=maker.rollout_stage,
        engine=engine,
        score=own_scores(log_probs_of(actor), strategy.sequence),
        reload=lambda: engine.update_weights(EngineWeights(engine, actor)),
        device=strategy.device,
    )
