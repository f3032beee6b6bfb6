"""What a file of another system means beyond its words: what it leaves unset, and settings that others change.

Names of found settings are the system's own, where they are not settings here.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...config.spellings import ONE_OF_THESE
from .names import CONVERTS
from .shell import Outside, ShellText

Found = dict[str, Any]
Names = Iterable[str]

ESTIMATORS = ("advantage_estimator", "algorithm.adv_estimator", "algo.advantage.estimator")
OF_CRITIC = ("lambd", "value_clip", "critic_learning_rate")
SIZES = [path.rpartition(".")[2] for path in ONE_OF_THESE[0]]


def unset_there(system: str, verb: str, taken: Mapping[str, Any], text: str) -> Found:
    """The settings whose values a file leaves to its system, by their names here.

    Args:
        system: of the file, one of CONVERTS.
        verb: the command that the file becomes: grpo, rloo, ppo or sft.
        taken: the settings of the file, by their names here.
        text: of the file, which may name a module with defaults of its own.
    """
    entry = CONVERTS[system]
    own = (values for module, values in entry.get("defaults_of", {}).items() if module in text)
    usual = dict(next(own, entry.get(f"defaults_{verb}", entry["defaults"])))
    if "eval_data" not in taken:
        usual.pop("eval_split", None)
    estimator = taken.get("advantage_estimator", "gae" if verb == "ppo" else verb)
    if estimator in entry["whitens"]:
        usual["advantages_norm"] = True
    if any(name in taken for name in SIZES):
        usual = {name: value for name, value in usual.items() if name not in SIZES}
    if system == "verl" and taken.get("policy_loss") in NO_DUAL_CLIP:
        usual.pop("dual_clip", None)
    if estimator != "gae":  # without a critic they are read by nothing
        usual = {name: value for name, value in usual.items() if name not in OF_CRITIC}
    return {name: value for name, value in usual.items() if name not in taken}


def meant(system: str, verb: str, found: Found, left_out: dict[str, str], whole: bool) -> None:
    """Write into `found` what the file's settings mean together, and into `left_out` those that do not count there.

    Args:
        system, verb: as of `unset_there`.
        found: the settings of the file.
        left_out: what a person is told of settings, by name.
        whole: no other file holds settings, so that what is not there has its system's default.
    """
    _schedule(found, left_out)  # before steps of other kinds are counted anew
    for told, here in CONVERTS[system].get("means", {}).items():
        name, _, value = told.partition("=")
        if name in found and _is(found, name, value):
            del found[name]
            found |= {each: value for each, value in here.items() if each != "told"}
            left_out |= {name: here["told"]} if "told" in here else {}
    path, function = (found.get(f"custom_reward_function.{end}") for end in ("path", "name"))
    if isinstance(path, str) and not isinstance(path, Outside):
        found["reward_fn"] = type(path)(f"{path}:{function or 'compute_score'}")
        del found["custom_reward_function.path"]
        found.pop("custom_reward_function.name", None)
    for name, split in (("data.train_files", "prompt_split"), ("data.val_files", "eval_split")):
        if system == "easyr1" and re.fullmatch(r"[^@\s,]+@\w+", str(found.get(name))):
            path, _, found[split] = str(found[name]).partition("@")
            found[name] = type(found[name])(path)
    if system in ("verl", "easyr1"):
        _of_verl(found, left_out)
        found.setdefault("bf16", True)
    if verb != "sft" and system in ("verl", "easyr1"):
        if system == "easyr1" and found.keys() & {*OLDER_KL}:
            _kl_of_older_easyr1(found, left_out, whole)
        if whole or found.keys() & {*KL_SWITCHES, *KL_OF_LOSS}:  # without a switch, verl's default is off
            _kl_of_verl(found, left_out, whole, reward=system == "easyr1")
    elif system == "verl":
        _columns_of_verl(found)
    elif system == "openrlhf":
        _of_openrlhf(verb, found, left_out)
    elif system == "trl":
        _of_trl(verb, found, left_out, whole)


def _is(found: Mapping[str, Any], name: str, *words: str) -> bool:
    return str(found.get(name)).lower() in words


def _number(value: Any) -> float | None:
    """A value that is written out; None for others."""
    if isinstance(value, (Outside, ShellText, bool)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _first(found: Mapping[str, Any], *names: str) -> Any:
    """The value of the first of these settings that is there; None without one."""
    return next((found[name] for name in names if found.get(name) is not None), None)


def _drop(found: Found, left_out: dict[str, str], names: Names, why: str) -> None:
    for name in names:
        if found.pop(name, None) is not None:
            left_out[name] = why


# -- verl and EasyR1 -------------------------------------------------------------------------------------------------

ACTOR = "actor_rollout_ref.actor."
KL_OF_LOSS = (f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type")
KL_SWITCHES = {"algorithm.disable_kl", "algorithm.use_kl_loss", "algorithm.use_kl_in_reward", f"{ACTOR}use_kl_loss"}
OLDER_KL = tuple(f"worker.actor.{end}" for end in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))  # of older EasyR1
# Losses that average in a way of their own, whatever loss_agg_mode says.
AVERAGED_BY = dict.fromkeys(("gspo", "sapo", "geo_mean"), "seq-mean-token-mean")
OF_LOSS = {"clip_cov": ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"), "kl_cov": ("kl_cov_ratio", "ppo_kl_coef")}
NO_DUAL_CLIP = ("gspo", "clip_cov")  # which have one here


def _of_verl(found: Found, left_out: dict[str, str]) -> None:
    estimator = "algorithm.adv_estimator"
    if _is(found, "algorithm.norm_adv_by_std_in_grpo", "false") and _is(found, estimator, "grpo"):
        found["advantage_estimator"] = "dr_grpo"
        del found[estimator]
    if _is(found, "algorithm.norm_adv_by_std_in_grpo", "true", "false"):
        del found["algorithm.norm_adv_by_std_in_grpo"]
    if found.keys() & {"env.rollout.n", "rollout_manager.n_trajectory"}:  # of verl-agent and VAGEN, beside an n of 1
        found.pop("actor_rollout_ref.rollout.n", None)
    _loss_of_verl(found, left_out)
    budget = f"{ACTOR}ppo_max_token_len_per_gpu"
    if _is(found, f"{ACTOR}use_dynamic_bsz", "true") and found.get(budget) is not None:
        del found[f"{ACTOR}use_dynamic_bsz"]
        found.setdefault("packing_samples", True)
        tokens, ranks = map(_number, (found[budget], found.get(f"{ACTOR}ulysses_sequence_parallel_size")))
        if tokens and ranks:  # of one rank there, of all that share a sequence here
            found[budget] = int(tokens * ranks)
    elif found.pop(f"{ACTOR}use_dynamic_bsz", None) is not None:
        _drop(found, left_out, (budget,), "use_dynamic_bsz says that it does not count there")
    for name in [each for each in found if each.endswith(".exclude_modules")]:
        if _first(found, *(name.replace("exclude_modules", rank) for rank in ("lora_rank", "rank"))) in (None, 0):
            _drop(found, left_out, (name,), "without a rank of LoRA it does not count there")
        elif "visual" in str(found.get(name)):
            del found[name]
            found["freeze_prefix"] = "true"
    if not _is(found, "reward_model.enable", "true"):
        _drop(found, left_out, ("reward_model.model.path",), "reward_model.enable says that it does not count there")
    found.pop("reward_model.enable", None)
    if str(found.get("algorithm.kl_ctrl.type", found.get("algorithm.kl_type"))) == "adaptive":
        for end, own in (("target", "kl_target"), ("horizon", "kl_horizon")):
            there = ("algorithm.kl_ctrl.target_kl" if end == "target" else "algorithm.kl_ctrl.horizon",
                     f"algorithm.kl_{end}")  # fmt: skip
            found[own] = next((found.pop(name) for name in there if name in found), 0.1 if end == "target" else 10_000)
    for name in ("algorithm.kl_ctrl.type", "algorithm.kl_type"):
        if _is(found, name, "fixed", "adaptive"):
            del found[name]
            rest = ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon", "algorithm.kl_target")
            _drop(found, left_out, (*rest, "algorithm.kl_horizon"), f"{name} says that it does not count there")


def _loss_of_verl(found: Found, left_out: dict[str, str]) -> None:
    mode = str(found.get(f"{ACTOR}policy_loss.loss_mode")).lower()
    if mode in AVERAGED_BY:
        found[f"{ACTOR}loss_agg_mode"] = AVERAGED_BY[mode]
    for loss, ends in OF_LOSS.items():
        if mode != loss:
            names = [f"{ACTOR}policy_loss.{end}" for end in ends]
            _drop(found, left_out, names, "policy_loss.loss_mode says that it does not count there")
    if mode in NO_DUAL_CLIP:
        _drop(found, left_out, (f"{ACTOR}clip_ratio_c",), f"{mode} has no dual clip there")
    correction = "algorithm.rollout_correction."
    if _is(found, f"{correction}bypass_mode", "true") and not _is(found, f"{correction}loss_type", "reinforce"):
        names = [f"{correction}rollout_is", f"{correction}rollout_is_threshold"]
        _drop(found, left_out, names, "bypass_mode says that it weighs nothing there")
    low, high = f"{ACTOR}clip_ratio_low", f"{ACTOR}clip_ratio_high"
    both = found.pop(f"{ACTOR}clip_ratio", None)
    for name in (low, high):
        if name in found and found[name] is None:
            found[name] = both
    if both not in (None, found.get(low, 0.2), found.get(high, 0.2)):
        left_out[f"{ACTOR}clip_ratio"] = "clip_ratio_low and clip_ratio_high count there, and are 0.2 unless set"


def _columns_of_verl(found: Found) -> None:
    """Of supervised data: names inside a column of dictionaries are read with it, as column.name."""
    for kind, usual in (("prompt", "question"), ("response", "answer")):
        inside = found.pop(f"data.{kind}_dict_keys", None)
        if inside:
            names = inside if isinstance(inside, list) else [inside]
            found[f"data.{kind}_key"] = ".".join([str(found.get(f"data.{kind}_key", usual)), *map(str, names)])


def _kl_of_verl(found: Found, left_out: dict[str, str], whole: bool, reward: bool) -> None:
    """Both systems hold weights and forms of a KL that other settings turn off. reward: EasyR1, whose KL is in the
    reward unless it is in the loss."""
    off = _is(found, "algorithm.disable_kl", "true")
    there = "algorithm.use_kl_loss" if reward else f"{ACTOR}use_kl_loss"
    in_loss = _is(found, there, "true") and not off
    in_reward = (reward and not in_loss or _is(found, "algorithm.use_kl_in_reward", "true")) and not off
    of_reward = ("algorithm.kl_ctrl.kl_coef",) if reward else ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    if in_loss and in_reward:
        told = "a run here has one KL: that of the loss is taken; for this one leave --use_kl_loss out"
        _drop(found, left_out, of_reward, told)
    elif not in_reward:
        _drop(found, left_out, of_reward, "use_kl_in_reward says that it does not count there")
    if off:
        names = ("algorithm.kl_coef", "algorithm.kl_penalty")
        _drop(found, left_out, names, "disable_kl says that it does not count there")
    if not in_loss:
        _drop(found, left_out, KL_OF_LOSS, "use_kl_loss says that it does not count there")
    for name in ("algorithm.disable_kl", "algorithm.use_kl_in_reward", there):
        if _is(found, name, "true", "false"):
            del found[name]
    if not (in_loss or in_reward):
        found["init_kl_coef"] = 0
        return
    found["use_kl_loss"] = in_loss
    weight = "algorithm.kl_coef" if reward else KL_OF_LOSS[0] if in_loss else of_reward[0]
    form = "algorithm.kl_penalty" if reward or not in_loss else KL_OF_LOSS[1]
    if whole:
        found.setdefault(weight, 0.001)
        found.setdefault(form, "low_var_kl" if in_loss and not reward else "kl")


def _kl_of_older_easyr1(found: Found, left_out: dict[str, str], whole: bool) -> None:
    """By the names of today, which weigh one KL. It is in the loss unless told otherwise, by a weight and a form of its
    own there."""
    used, *own = OLDER_KL
    in_loss = not _is(found, used, "false")
    if _is(found, used, "true", "false"):
        del found[used]
    found["algorithm.use_kl_loss"] = in_loss
    told = f"{used} says that it does not count there"
    for there, here, usual in zip(own, ("algorithm.kl_coef", "algorithm.kl_penalty"), (0.001, "low_var_kl")):
        if in_loss:
            _drop(found, left_out, (here,), told)
            value = found.pop(there, usual if whole else None)
            found |= {} if value is None else {here: value}
        else:
            _drop(found, left_out, (there,), told)


# -- OpenRLHF --------------------------------------------------------------------------------------------------------


def _of_openrlhf(verb: str, found: Found, left_out: dict[str, str]) -> None:
    """A length of an overlong buffer turns it on; a length of everything holds that of a response; messages have a
    template whatever is told; a critic starts from the reward model; several URLs share the samples."""
    column = str(found.get("input_key", found.get("data.input_key")))
    if column in ("message", "messages") and not found.keys() & {"apply_chat_template", "data.apply_chat_template"}:
        found["apply_chat_template"] = True
        left_out["apply_chat_template"] = (
            f"where the column {column} holds messages, OpenRLHF's multimodal forks apply it without being asked"
        )
    for prefix in ("", "reward."):
        if found.get(f"{prefix}overlong_buffer_len") is not None:
            found["overlong_buffer"] = True
    clip = _first(found, "reward.clip_range", "reward_clip_range")
    if isinstance(clip, list) and len(clip) == 2 and (high := _number(clip[1])) and _number(clip[0]) == -high:
        found["reward_clip"] = high
        for name in ("reward.clip_range", "reward_clip_range"):
            found.pop(name, None)
    for name in ("data.max_len", "max_len"):
        whole = _number(found.get(name))
        new = _number(_first(found, "rollout.max_new_tokens", "max_new_tokens", "generate_max_len"))
        if verb != "sft" and whole and new and whole > new and "prompt_max_len" not in found:
            found["prompt_max_len"] = int(whole - new)
            del found[name]
        elif verb != "sft" and whole and not new:
            told = f"a response may have what its prompt leaves of {whole:g} tokens there"
            _drop(found, left_out, (name,), f"{told}: write --prompt_max_len and --generate_max_len")
    urls = _first(found, "reward.remote_url", "remote_rm_url")
    if verb != "sft" and _first(found, *ESTIMATORS) in (None, "gae") and urls is None:
        model = _first(found, "reward.model_name_or_path", "reward_pretrain")
        others = ("critic.model_name_or_path", "critic_pretrain", "train.agent_func_path", "agent_func_path")
        if isinstance(model, str) and not isinstance(model, Outside) and _first(found, *others) is None:
            found["critic_pretrain"] = type(model)(model.partition(",")[0])
    for name in ("reward.remote_url", "remote_rm_url"):
        if isinstance(urls, str) and not isinstance(urls, Outside) and name in found:
            found[name] = type(urls)(urls.replace(",", "|"))
    if verb == "sft" and "max_epochs" in found:  # passes over the data there
        found["num_episodes"] = found.pop("max_epochs")


# -- TRL -------------------------------------------------------------------------------------------------------------


GROUPS_OF_TRL = {"grpo": 8, "rloo": 2, "ppo": 1}  # samples of a prompt


def _of_trl(verb: str, found: Found, left_out: dict[str, str], whole: bool) -> None:
    if whole:
        found.setdefault("per_device_train_batch_size", 8)
        found.setdefault("gradient_accumulation_steps", 1)
    if whole and verb in GROUPS_OF_TRL:
        found.setdefault("num_generations", GROUPS_OF_TRL[verb])
    if whole and verb in ("grpo", "rloo"):
        found.setdefault("beta", 0.0 if verb == "grpo" else 0.05)
    if verb == "ppo":
        for name, same in (("critic_learning_rate", "learning_rate"), ("critic_pretrain", "reward_model_path")):
            if same in found:  # one optimizer there, and one start of two models
                found.setdefault(name, found[same])
        if "sft_model_path" in found:
            found.pop("model_name_or_path", None)  # it names the tokenizer
            found["pretrain"] = found.pop("sft_model_path")
    if _is(found, "use_peft", "true"):
        for name, value in (("lora_rank", 16), ("lora_alpha", 32), ("lora_dropout", 0.05)):
            if name.replace("rank", "r") not in found:  # a computed one keeps its name there
                found.setdefault(name, value)
        del found["use_peft"]
    elif _is(found, "use_peft", "none", "false") and found.pop("peft", None) is None:
        names = [name for name in found if name.startswith("lora_")]
        _drop(found, left_out, names, "without use_peft it does not count there")
        found.pop("use_peft", None)
    if "lora_rank" in found and not {"target_modules", "lora_target_modules"} & found.keys():
        told = "peft chooses by the model's class there, mostly q_proj and v_proj; here all linear layers: write "
        left_out["target_modules"] = f"{told}--target_modules q_proj,v_proj"
    if _is(found, "fp16", "true") and "bf16" not in found:
        found["bf16"] = False
    betas = [_number(found.get(name, usual)) for name, usual in (("adam_beta1", 0.9), ("adam_beta2", 0.999))]
    if None not in betas and found.keys() & {"adam_beta1", "adam_beta2"}:
        _drop(found, {}, ("adam_beta1", "adam_beta2"), "")
        found |= {"adam_betas": betas} if betas != [0.9, 0.999] else {}
    if verb in ("grpo", "rloo"):
        if verb == "grpo":
            _loss_of_trl(found)
            _entropy_of_trl(found, left_out, whole)
            _correction_of_trl(found, left_out, whole)
        else:
            found.setdefault("loss_agg_mode", "seq-mean-token-sum")
            if (_number(found.get("num_iterations")) or 1) > 1 or "steps_per_generation" in found:
                left_out["loss"] = (
                    "its ratios are of whole responses there, of tokens here; at the first update both are 1"
                )
            if "normalize_advantages" in found:
                found["advantages_norm"] = found.pop("normalize_advantages")
        _kl_of_trl(verb, found)
    if verb in GROUPS_OF_TRL:
        _sizes_of_trl(found, left_out)


def _loss_of_trl(found: Found) -> None:
    loss, high = found.get("policy_loss"), _number(found.get("epsilon_high"))
    if loss == "cispo" and high is not None and high > 1:  # the largest ratio itself there
        found["epsilon_high"] = round(high - 1, 6)
        found.pop("epsilon", None)
    if _is(found, "importance_sampling_level", "token", "sequence"):
        if found.pop("importance_sampling_level") == "sequence" and loss != "luspo":
            found["policy_loss"] = "gspo"
    for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
        if name in found:
            found[name.replace("temperature", "tau")] = found.pop(name)


def _entropy_of_trl(found: Found, left_out: dict[str, str], whole: bool) -> None:
    usual = {"entropy_target": 0.2, "entropy_coef_delta": 0.005, "entropy_coef_max": 1.0}
    if not _is(found, "use_adaptive_entropy", "true"):
        _drop(found, left_out, (*usual, "entropy_coef_min"), "without use_adaptive_entropy it does not count there")
    elif whole:
        found |= usual | found
    if _is(found, "use_adaptive_entropy", "true", "false"):
        del found["use_adaptive_entropy"]


def _correction_of_trl(found: Found, left_out: dict[str, str], whole: bool) -> None:
    """Of what vLLM samples, on unless a file turns it off."""
    start = "vllm_importance_sampling_"
    on = str(found.pop(f"{start}correction", True)).lower() != "false"
    if not on or not _is(found, "use_vllm", "true"):
        why = f"{'use_vllm' if on else f'{start}correction'} says that it does not count there"
        _drop(found, left_out, [name for name in found if name.startswith(start)], why)
    elif whole:
        found.setdefault(f"{start}mode", "sequence_mask")
        if not found.keys() & {f"{start}cap", f"{start}clip_max"}:
            found[f"{start}cap"] = 3.0


def _kl_of_trl(verb: str, found: Found) -> None:
    """In the loss of GRPO, in the reward of RLOO."""
    if _number(beta := found.get("beta")) is not None:
        del found["beta"]
        found["init_kl_coef"] = beta
        if verb == "grpo" and _number(beta):
            found |= {"use_kl_loss": True, "kl_estimator": found.get("kl_estimator", "k3")}


def _launched(found: Found, *names: str) -> float | None:
    """What the launcher is told by one of these names."""
    return next((_number(found[name].value) for name in names if isinstance(found.get(name), Outside)), None)


def _sizes_of_trl(found: Found, left_out: dict[str, str]) -> None:
    """A rollout there is as many micro-batches of every rank as an update accumulates, unless it says otherwise; its
    steps count updates."""
    of_host = _launched(found, "nproc_per_node", "nproc-per-node")
    hosts = _launched(found, "nnodes") if "nnodes" in found else 1
    ranks = _launched(found, "num_processes") or (of_host and hosts and of_host * hosts)
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    size, accumulated, group = (_number(found.get(name)) for name in names)
    if not (size and accumulated and group):
        return
    batches = _number(found.pop("steps_per_generation", None)) or accumulated
    whole = _number(found.pop("generation_batch_size", None))
    if whole:
        batches = whole / size / (ranks or 1)
    samples = whole or size * batches * (ranks or 1)
    if samples >= group and samples % group == 0:
        found["rollout_batch_size"] = int(samples / group)
        told = "prompts of a rollout on one rank: multiply by the number of ranks"
    else:
        told = f"prompts of a rollout there are {samples:g} samples of each rank, in groups of {group:g}: write this "
        told += "number for all ranks"
    if whole is None and ranks is None:
        left_out["rollout_batch_size"] = told
    if total := _number(found.get("total_episodes")):  # samples there
        del found["total_episodes"]
        found["max_steps"] = math.ceil(total / samples)
        left_out |= {"max_steps": f"{total:g} samples on one rank: divide by the ranks"} if ranks is None else {}
    updates = batches / accumulated * (_number(found.get("num_iterations")) or 1)
    for name in ("max_steps", "save_steps", "eval_steps") if updates > 1 else ():
        steps = _number(found.get(name)) or 0
        if steps >= 1 and whole and ranks is None:
            left_out[name] = f"it counts updates there, {updates:g} of a rollout on one rank: divide by those on all"
        elif steps >= 1:
            found[name] = max(1, round(steps / updates))


# -- all of them -----------------------------------------------------------------------------------------------------

SCHEDULERS = ("lr_scheduler", "lr_scheduler_type", "lr_decay_style", "warmup_style")
WARM_UPS = ("lr_warmup_steps", "warmup_steps")
STEPS = ("max_steps", "total_training_steps")


def _schedule(found: Found, left_out: dict[str, str]) -> None:
    """Constant rates are those of a schedule with a warm-up, and steps of a warm-up a share of the run's."""
    for name in [name for name in found if name.endswith(SCHEDULERS) and "critic" not in name]:
        kind = str(found[name]).lower()
        if kind in ("constant", "constant_with_warmup", "cosine"):
            del found[name]
            found["lr_scheduler"] = "cosine_with_min_lr" if kind == "cosine" else "constant_with_warmup"
        if kind == "cosine":
            ends = [each for each in found if each.endswith("min_lr_ratio") and "critic" not in each]
            least = [found.pop(each) for each in ends][-1:] or [0]
            if _number(least[0]) != 0.1:
                told = f"cosine ends at {least[0] or 0} of the learning rate there, cosine_with_min_lr at a tenth"
                left_out["lr_scheduler"] = told
    total = next((_number(found[name]) for name in found if name.endswith(STEPS) and "optim" not in name), None)
    for name in [name for name in found if name.endswith(WARM_UPS) and "critic" not in name]:
        steps = _number(found[name])
        if steps is not None and (steps < 0 or (steps == 0 and "warmup_ratio" in found)):
            del found[name]
        elif steps is not None and (steps < 1 or (total and total >= steps)):
            del found[name]
            found["lr_warmup_ratio"] = steps if steps < 1 else round(steps / (total or 1), 6)
        elif found[name] is not None:
            left_out["lr_warmup_ratio"] = f"write the share of the run's steps; {name} there: {found.pop(name)}"
