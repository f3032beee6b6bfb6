"""What a vision-language run cannot do with its model and data, refused before a model is loaded."""

from ...config.algorithm import AlgorithmConfig
from ...config.vl import RolloutConfig, RunConfig
from ...errors import ConfigError
from ...models.loading import Checkpoint, open_checkpoint, open_critic
from ...models.routing import check_balance, count_experts
from ...models.vlm.families import VLMFamily
from ...rewards.recipe import recipe_of


def check_abilities(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError for settings that this model cannot follow, or that would do nothing with it."""
    if config.train.packing_samples:
        checkpoint.family.require_packing()
    if config.algorithm.papo_coef > 0 and checkpoint.processor is None:
        raise ConfigError("papo_coef hides parts of images: this model reads text only")
    if config.rollout.noisy_rollout_share > 0 and checkpoint.processor is None:
        raise ConfigError("noisy_rollout_share adds noise to images: this model reads text only")
    _check_experts(config.algorithm, config.distributed.sp_size, checkpoint)
    if config.model.target_parameters and config.distributed.zero_stage == 3:
        raise ConfigError("target_parameters: peft computes with whole weights of experts, which ZeRO-3 divides; use 2")
    if config.algorithm.drawing_entropy_coef is not None and not checkpoint.family.draws:
        raise ConfigError("drawing_entropy_coef is of the tokens of images: this model writes text only; leave it out")
    if config.algorithm.entropy_target is not None and checkpoint.family.draws:
        raise ConfigError("entropy_target is one entropy: this model's answers and images have each their own")
    measured = checkpoint.processor is not None and not checkpoint.family.draws
    if not measured and config.rollout.image_dependence_every not in (0, RolloutConfig.image_dependence_every):
        raise ConfigError("image_dependence_every measures models that see and do not draw; leave it out")
    _check_heads(config, checkpoint)


def _check_experts(algorithm: AlgorithmConfig, sequence: int, checkpoint: Checkpoint) -> None:
    mode, balances = algorithm.routing_replay, algorithm.router_aux_loss_coef > 0
    asked = f"routing_replay {mode}" if mode != "off" else "router_aux_loss_coef"
    if (mode != "off" or balances) and not count_experts(checkpoint.config):
        raise ConfigError(f"{asked} is for mixtures of experts: this model has no routers; leave it out")
    if balances:
        check_balance(checkpoint.config)
    if sequence > 1 and (mode == "old" or balances):
        raise ConfigError(f"{asked}: with sp_size no rank sees all choices of a sequence; leave it out")


def _check_heads(config: RunConfig, checkpoint: Checkpoint) -> None:
    text, sequence = checkpoint.config.get_text_config(), config.distributed.sp_size
    heads = getattr(text, "num_attention_heads", None)
    for name, size in (("engine_tp_size", config.rollout.engine_tp_size), ("sp_size", sequence)):
        if size > 1 and (heads is None or heads % size):
            raise ConfigError(f"{name} {size} does not divide the model's {heads or 'missing'} attention heads")
    state = "its linear attention carries a state along a row" if checkpoint.family.carries_state else None
    refused = checkpoint.family.sharing_refused(config.model.attn_implementation) or state
    if sequence > 1 and refused:
        raise ConfigError(f"sp_size {sequence} divides packed rows over ranks: {refused}; leave it at 1")
    if sequence > 1 and checkpoint.family.draws:
        raise ConfigError(f"sp_size {sequence}: a model that draws is scored on whole rows; leave it at 1")
    if config.model.compile and (refused or count_experts(checkpoint.config)):
        raise ConfigError(f"compile: {refused or 'its experts are noted between operations'}; leave it out")


def check_beside(config: RunConfig, policy: Checkpoint) -> None:
    """Raise ConfigError for a critic or a teacher that does not read what the policy's samples hold."""
    critic, teacher = config.model.critic_pretrain, config.model.teacher_pretrain
    if critic is not None:
        family, size, tokens = open_critic(critic, config.model)
        known, own = {*tokens.values()}, policy.tokenizer.get_vocab()
        few = size < min(len(policy.tokenizer), policy.config.get_text_config().vocab_size)
        other = few or any(token in known and tokens.get(text) != token for text, token in own.items())
        _check_reads(f"critic_pretrain {critic}", family, policy, other)
    if teacher is not None:
        opened = open_checkpoint(teacher, config.model, config.data)
        other = opened.tokenizer.get_vocab() != policy.tokenizer.get_vocab()
        _check_reads(f"teacher_pretrain {teacher}", opened.family, policy, other)


def check_judges(config: RunConfig) -> None:
    """Raise ConfigError for a judge by vLLM in this process, where the policy's engine has several ranks there: vLLM
    knows one number of ranks in a process."""
    ranks = config.rollout.engine_tp_size
    if ranks == 1 or config.rollout.engine_type != "vllm" or config.distributed.split:
        return
    for rewards in filter(None, (config.reward, config.gold)):
        recipe = recipe_of(rewards)
        for entry in recipe.components() if recipe else ():
            here = (entry.transport or rewards.reward_transport) == "inprocess"
            if entry.key == "judge" and entry.kwargs.get("engine") == "vllm" and here:
                told = "in one process vLLM's engines have as many ranks: use engine hf, or reward_transport ray"
                raise ConfigError(f"scorer judge: engine vllm beside a policy of engine_tp_size {ranks}: {told}")


def _check_reads(named: str, family: VLMFamily, policy: Checkpoint, other_tokens: bool) -> None:
    if type(family) is not type(policy.family):
        raise ConfigError(f"{named} is a {family.config.model_type}, the policy is of another family")
    if other_tokens:
        raise ConfigError(f"{named} has other tokens than the policy: it cannot read its responses")
    try:
        if policy.processor is not None:
            family.check_processor(policy.processor)
    except ConfigError as error:
        raise ConfigError(f"{named} cannot read images from the policy's processor: {error}") from error
