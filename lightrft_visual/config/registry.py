"""Every choice by name, with what it needs: what configurations are checked against, trainers built from, and help and
documentation written from. `python -m lightrft_visual.config.registry` prints docs/choices.md.

A file of your own adds to it and is named by `--plugins my_file.py`::

    from lightrft_visual.algorithms.advantages import AdvantageCalculator
    from lightrft_visual.config import registry

    @registry.advantage_estimators.register("sign", about="the sign of the reward minus the group's mean", grouped=True)
    class Sign(AdvantageCalculator):
        def group_rewards(self, statistics):
            return statistics.centered().sign()

Entries of the package name their code as 'module:attribute', which is imported on first use: nothing here loads torch.
"""

import os
from typing import Any

from ..errors import ConfigError, refused_as
from . import kinds
from .constraints import Choice, PluginMissing, Registry, load_target

PACKAGE = "lightrft_visual"
ALGORITHMS, MODELS, ROLLOUT, PLUGINS = (f"{PACKAGE}.{room}" for room in ("algorithms", "models", "rollout", "plugins"))

# What the code of an entry is, is said in kinds.py, and here for plain choices.
advantage_estimators = Registry("advantage estimator", kinds.AdvantageEstimator, "config")
policy_losses = Registry("policy loss", kinds.PolicyLoss, "inputs, config")
# A function of (values (B, A), mask (B, A), LossDenominators) to a scalar share.
aggregations = Registry("aggregation", Choice, "values, mask, denominators")
kl_estimators = Registry("KL estimator", kinds.KLEstimator, "log_probs, ref_log_probs")
tis_modes = Registry("TIS mode", kinds.TISMode, "log_weights")
diffusion_algorithms = Registry("diffusion algorithm", kinds.DiffusionAlgorithm, "config")
engines = Registry("rollout engine", kinds.Engine, "config, checkpoint, actor")
vlm_families = Registry("vision-language family", kinds.VLMFamily)
diffusion_families = Registry("diffusion family", kinds.DiffusionFamily)
hooks = Registry("hook", kinds.Hook, "parts")
loss_terms = Registry("term of the policy loss", kinds.LossTerm, "config")
policy_masks = Registry("mask of the policy loss", kinds.PolicyMask, "inputs, config")
# A function of an Experience to values (B) or (B, A), whose mean is a column in metrics.csv, or to (values, mask),
# or to None where a run has no such number. Those of the package are in trainer/vl/updates.py.
rollout_metrics = Registry("rollout metric", Choice, "experience")
# A function of its settings (differentiable_kwargs) to a `rewards.differentiable.PixelReward`.
differentiable_rewards = Registry("differentiable reward", kinds.Reward)
# A class of `rollout.environments.Environment`, or a function that makes one; `tools` takes the functions of `--tools`.
environments = Registry("environment", Choice)
scorers = Registry("scorer", kinds.Reward)  # a class built with the recipe's settings, or a function; docs/rewards.md
row_forms = Registry("form of data rows", kinds.RowForm, "row")
reward_forms = Registry("form of reward functions", Choice)  # a `rewards.local.forms.Form`
tasks = Registry("built-in task", kinds.Task, "config")  # prompt_data of vision-language runs
drawing_tasks = Registry("built-in drawing task", kinds.Task, "config")  # and of diffusion runs
checkpoint_resolvers = Registry("built-in model", kinds.CheckpointResolver, "model, name, task")
services = Registry("service", Choice)  # of a room above or a plug-in: a module with functions that callers name


def service(name: str) -> Any | None:
    """What a plug-in does for the core, None where it is not there. `services.load` raises then."""
    try:
        return services.load(name)
    except PluginMissing:
        return None


def checkpoint_folder(model: Any, name: str, task: str) -> str:
    """`name`, or the folder that it stands for.

    Args:
        model: a run's model section.
        name: of a built-in model; a hub name or a folder stays as it is.
        task: prompt_data of the run.
    """
    if name not in checkpoint_resolvers:
        return name
    folder = checkpoint_resolvers.load(name)(model, name, task)
    with refused_as(ConfigError, f"the folder of the built-in model {name!r}"):
        return os.fspath(folder)


def pipeline_folder(name: str, family: str = "auto") -> str:
    """The same of a diffusion pipeline."""
    if name not in checkpoint_resolvers or checkpoint_resolvers[name].pipeline is None:
        return name
    return os.fspath(load_target(checkpoint_resolvers[name].pipeline)(name, family))


# ---------------------------------------------------------------------------------------------------------------------
# Vision-language runs
# ---------------------------------------------------------------------------------------------------------------------

entry = advantage_estimators.below(ALGORITHMS)
entry("gae", "advantages:GAECalculator", "PPO: generalised advantage estimation", critic=True)
entry("rloo", "advantages:RLOOCalculator", "reward minus the mean of the prompt's other samples", grouped=True)
entry("reinforce", "advantages:ReinforceCalculator", "the reward itself; with advantages_norm REINFORCE++")
entry(
    "reinforce_baseline", "advantages:GroupMeanCalculator",
    "minus the group's mean; with advantages_norm REINFORCE++-baseline", grouped=True,
)  # fmt: skip
entry(
    "group_norm", "advantages:GroupNormCalculator", "GRPO: minus the group's mean, over its std (n - 1)",
    aliases=("grpo",), grouped=True,
)  # fmt: skip
entry("dr_grpo", "advantages:GroupMeanCalculator", "Dr. GRPO: minus the group's mean", grouped=True)
entry("cpgd", "advantages:CPGDCalculator", "CPGD: minus the group's mean, over its std (n)", grouped=True)
entry(
    "gdpo", "advantages:GDPOCalculator", "GDPO: each reward over its own std in the group, then their sum",
    grouped=True, components=True,
)  # fmt: skip
entry("distillation", "advantages:DistillationCalculator", "0: the teacher's term alone teaches", reads_log_probs=True)

entry = policy_losses.below(ALGORITHMS)
entry("ppo", "policy_losses:ppo_loss", "clipped ratio of each token; clip-higher, dual clip")
entry("gspo", "policy_losses:gspo_loss", "clipped ratio of the sequence")
entry("gmpo", "policy_losses:gmpo_loss", "geometric mean of clipped token ratios")
entry("cispo", "policy_losses:cispo_loss", "clipped importance weight on the log-prob; no token is dropped")
entry("cpgd", "policy_losses:cpgd_loss", "policy gradient on clipped log ratios, with a drift term")
entry("sapo", "policy_losses:sapo_loss", "smooth gate on the ratio of each token instead of a clip")
entry(
    "luspo", "policy_losses:gspo_loss", "GSPO with each sequence weighed by its length",
    aggregation="seq-mean-token-sum",
)  # fmt: skip
entry(
    "dppo_tv", "off_policy:dppo_tv_loss", "tokens whose probability moved too far leave the loss", weighs_rollouts=True
)
entry("dppo_kl", "off_policy:dppo_kl_loss", "the same by a binary KL", weighs_rollouts=True)
entry("vespo", "off_policy:vespo_loss", "smooth weight of the sequence by its whole ratio", weighs_rollouts=True)
entry(
    "clip_cov", "covariance:clip_cov_loss", "PPO clip without a few tokens that cost entropy",
    chooses=f"{ALGORITHMS}.covariance:clip_cov_tokens",
)  # fmt: skip
entry(
    "kl_cov", "covariance:kl_cov_loss", "no clip; a penalty on the tokens that cost the most entropy",
    chooses=f"{ALGORITHMS}.covariance:kl_cov_tokens",
)  # fmt: skip

policy_masks.below(ALGORITHMS)(
    "off_policy", "off_policy:off_policy_sequences", "`off_policy_delta`: DeepSeek-V3.2's off-policy sequence mask",
    setting="off_policy_delta",
)  # fmt: skip

entry = loss_terms.below(ALGORITHMS)
entry(
    "entropy", "loss_terms:EntropyBonus", "`entropy_coef`: a bonus for entropy",
    settings=("entropy_coef", "entropy_target"),
)  # fmt: skip
entry(
    "balance", "loss_terms:Balance", "`router_aux_loss_coef`: experts in equal use", settings=("router_aux_loss_coef",)
)
entry("perception", "loss_terms:Perception", "`papo_coef`: PAPO's perception loss", settings=("papo_coef",))

entry = hooks.below(f"{PACKAGE}.trainer.features")
_both, _sees, _draws = ("vl", "diffusion"), ("vl",), ("diffusion",)
for _name, _about, _kinds in (  # in the order in which they follow a step
    ("ema", "`enable_ema`: an average of the weights, for evaluation and export", _both),
    ("entropy_target", "`entropy_target`: an entropy bonus steered to a wanted entropy", _sees),
    ("reference_refresh", "`ref_update_steps`: the reference takes over the policy's weights", _sees),
    ("noisy_rollouts", "`noisy_rollout_share`: some samples of a prompt see a noisy image", _sees),
    ("balanced_rollouts", "`balance_rollouts`: prompts dealt to ranks by the expected length of responses", _sees),
    ("rollouts_ahead", "`max_staleness`: the age of tokens that are trained on", _both),
    ("guard", "a gold reward, learnt bands, alarms", _both),
    ("image_dependence", "`image_dependence_every`: how much answers change where the image is hidden", _sees),
    ("trained_prompts", "the metric `trained_prompt_num`: how many different prompts were trained on", _draws),
    ("routing", "`routing_replay`: experts that were chosen are used again", _sees),
    ("compiled_blocks", "`compile`: programs of torch.compile for the blocks", _sees),
    ("episodes", "`environment`, `tools`: metrics of turns and calls", _sees),
    ("records", "rollouts that people are shown", _both),
    ("conditions", "what each evaluation was made with, in its file", _both),
    ("selective_replay", "`selective_replay`: samples of earlier steps in the place of groups that agree", _sees),
    ("context_parallel", "`sp_size`: ranks share the tokens of one forward of the denoiser", _draws),
):
    entry(_name, f"{_name}:build", _about, kinds=_kinds)

entry = aggregations.below(ALGORITHMS)
entry("token-mean", "loss_terms:token_mean", "every token counts alike (DAPO)")
entry("seq-mean-token-sum", "loss_terms:seq_mean_token_sum", "sum over a response, mean of responses")
entry("seq-mean-token-mean", "loss_terms:seq_mean_token_mean", "every response counts alike (GRPO)")
entry("seq-mean-token-sum-norm", "loss_terms:seq_mean_token_sum_norm", "sum over a constant length (Dr. GRPO)")

entry = kl_estimators.below(ALGORITHMS)
entry("k1", "kl:k1", "log ratio: unbiased; as a loss its gradient averages 0", as_loss=False)
entry("k2", "kl:k2", "half its square: as a loss on-policy its gradient is the KL's")
entry("k3", "kl:k3", "ratio - 1 - log ratio: unbiased and never negative")
entry("k3_unbiased", "kl:k3", "k3; as a loss weighed by policy / old policy", weighted=True)

entry = tis_modes.below(ALGORITHMS)
entry("off", None, "no correction", corrects=False)
entry("token", "policy_losses:token_log_weights", "one weight a token")
entry("sequence", "policy_losses:sequence_log_weights", "the product over the sequence")

entry = engines.below(PACKAGE)
entry(
    "vllm", "rollout.vllm.engine:VLLMEngine.from_config", "vLLM in this process", tensor_parallel=True, resident=True,
    check="lightrft_visual.rollout.vllm.arguments:check_engine",
    worker="lightrft_visual.rollout.vllm.engine:VLLMEngine.from_config", continues=True, reads_patches=False,
)  # fmt: skip
entry(
    "hf", "rollout.hf:TransformersEngine.from_config", "the trainer's own model: where vLLM is not",
    worker="lightrft_visual.rollout.hf:worker_engine", adapters_alone=True, continues=True, draws=True,
)  # fmt: skip
entry(
    "sglang", "plugins.sglang.engine:SGLangEngine",
    "SGLang beside this process: Qwen-VL and text models on CUDA", resident=True,
    check="lightrft_visual.plugins.sglang.arguments:check_engine",
    worker="lightrft_visual.plugins.sglang.engine:SGLangEngine", continues=True,
)  # fmt: skip

entry = environments.below(ROLLOUT)
entry("tools", "tools:ToolEnvironment", "runs the functions of `--tools`")
entry("zoom", "builtin.zoom:Zoom", "a tool that enlarges a region of the image")
entry("python", "builtin.python:PythonCalculator", "a calculator in Python's notation")
entry("click", "builtin.click:Click", "a click on the `target` of a screen is rewarded")


# ---------------------------------------------------------------------------------------------------------------------
# Diffusion runs
# ---------------------------------------------------------------------------------------------------------------------

_any_trajectory = ("ode", "sde", "sde_reflow", "dance", "cps")
_on_data = {  # of any model's finished samples
    "trajectories": _any_trajectory, "prediction": None, "trains_on": "data", "timestep_choice": "random",
}  # fmt: skip


def _algorithm(name: str, about: str, code: str = "", **facts: Any) -> None:
    """One whose function (code: where that is not its name's) and recipe for the embedded model have its name."""
    add = diffusion_algorithms.below(ALGORITHMS)
    add(name, f"diffusion:{code or name}", about, embedded=f"embedded/{name}", **facts)


_algorithm("flow_grpo", "clipped ratios of SDE steps", trajectories=("sde", "sde_reflow", "cps"), guard=True)
_algorithm(
    "dance_grpo", "as Flow-GRPO, steps of constant eta", trajectories=("dance",), guard=True, noise_level=0.3,
    timestep_choice="random",
)  # fmt: skip
_algorithm(
    "mix_grpo", "Flow-GRPO on a window of SDE steps that slides", "flow_grpo", guard=True,
    trajectories=("sde", "sde_reflow", "cps"), sde_window_size=4, sde_window_move="slide",
)  # fmt: skip
_algorithm("flow_dppo", "Flow-GRPO with a KL mask in place of the clip", keep_means=True)
_algorithm(
    "temp_flow_grpo", "Flow-GRPO that branches at one step, weighted by its noise", sde_window_size=1,
    sde_window_move="anywhere", same_latent=True,
)  # fmt: skip
_algorithm(
    "diffusion_nft", "policy improvement on the forward process", trajectories=_any_trajectory, trains_on="data",
    reference=True, old_policy=True, clipped_advantages=True, timestep_choice="random",
)  # fmt: skip
_algorithm("ddpo", "clipped ratios of DDIM steps", prediction="epsilon", num_steps=50, noise_level=1.0)
_algorithm(
    "dpok", "policy gradient of DDIM steps with a KL", prediction="epsilon", num_steps=50, noise_level=1.0, beta=0.01
)
_algorithm(
    "awm", "the loss of pretraining, weighted by advantages", **_on_data, old_policy=True, clipped_advantages=True,
    clip_range=1.0, decay_type=3,
)  # fmt: skip
_algorithm(
    "dgpo", "a prompt's better samples against its worse ones", **_on_data, reference=True, coupled="groups",
    decay_type=3, min_sigma=0.3,
)  # fmt: skip
_algorithm(
    "crd", "the model's implicit reward fitted to the given one, within each prompt", **_on_data, reference=True,
    old_policy=True, coupled="groups", clipped_advantages=True,
)  # fmt: skip
_algorithm(
    "diffusion_dpo", "pairs of a preferred and another sample", **_on_data, reference=True, coupled="pairs",
    decay_type=3, dpo_beta=5000.0,
)  # fmt: skip
_algorithm("rwr", "reward-weighted regression: supervised, weighted by exp(advantage)", **_on_data)
_algorithm(
    "diffusion_opd", "distillation from a teacher on the model's own SDE steps", grouped=False, teacher=True,
    n_samples_per_prompt=1,
)  # fmt: skip
_algorithm(
    "reward_fl", "the gradient of a differentiable reward", trajectories=("ode",), trains_on="reward", grouped=False,
    num_steps=8, learning_rate=2.5e-6, warmup_steps=10, n_samples_per_prompt=1, train_batch_size=8,
)  # fmt: skip

entry = vlm_families.below(f"{MODELS}.vlm.families")
entry(
    "qwen_vl", "qwen:QwenVL", "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, dense and MoE",
    model_types=("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    processors=("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"),
)  # fmt: skip
entry(
    "glm", "glm:Glm", "GLM-4.1V, GLM-4.5V, GLM-4.6V; images only",
    model_types=("glm4v", "glm4v_moe", "glm46v"), processors=("Glm4vProcessor", "Glm46VProcessor"),
)  # fmt: skip
entry(
    "idefics", "idefics:Idefics", "Idefics 3, SmolVLM; images only", model_types=("idefics3", "smolvlm"),
    processors=("Idefics3Processor", "SmolVLMProcessor"),
)  # fmt: skip
entry(
    "minicpm", "minicpm:MiniCPM", "MiniCPM-V 4.6; images only", model_types=("minicpmv4_6",),
    processors=("MiniCPMV4_6Processor",),
)  # fmt: skip
entry(
    "internvl", "internvl:InternVL", "InternVL in transformers' own form; images only",
    model_types=("internvl",), processors=("InternVLProcessor",),
)  # fmt: skip
vlm_families.below(PLUGINS)(
    "janus", "unified.family:Janus", "Janus, Janus-Pro: answers in text or images; engine hf", model_types=("janus",),
    processors=("JanusProcessor",),
)  # fmt: skip
entry(
    "llava", "llava:Llava", "LLaVA 1.5, Pixtral; images only", model_types=("llava",),
    processors=("LlavaProcessor", "PixtralProcessor"),
)  # fmt: skip
entry(
    "text", "text:TextOnly", "causal language models without vision; packing for Qwen",
    model_types=("qwen2", "qwen3"),
)  # fmt: skip

entry = diffusion_families.below(f"{MODELS}.diffusion.families")
for _name, _code, _about in (  # the pipeline's class is named as the family's
    ("sd3", "sd3:StableDiffusion3", "SD3, SD3.5"),
    ("flux", "flux:Flux", "FLUX; guidance is an embedding"),
    ("flux_kontext", "flux_kontext:FluxKontext", "FLUX.1 Kontext: an image in, one out"),
    ("flux2_klein", "flux2:Flux2Klein", "FLUX.2 [klein]"),
    ("flux2", "flux2:Flux2", "FLUX.2 [dev]; guidance embedded"),
    ("wan", "wan:Wan", "Wan text-to-video"),
    ("wan_i2v", "wan:WanImageToVideo", "Wan image-to-video"),
    ("hunyuan_video15", "hunyuan_video15:HunyuanVideo15", "HunyuanVideo 1.5, text to video"),
    ("ltx2", "ltx2:LTX2", "LTX-2, text to video; no sound"),
    ("z_image", "z_image:ZImage", "Z-Image"),
    ("qwen_image", "qwen_image:QwenImage", "Qwen-Image"),
    ("qwen_image21", "qwen_image21:QwenImage21", "Qwen-Image 2.1"),
    ("qwen_image_edit", "qwen_image_edit:QwenImageEdit", "Qwen-Image-Edit: an image in, one out"),
    ("qwen_image_edit_plus", "qwen_image_edit:QwenImageEditPlus",
     "Qwen-Image-Edit 2509 and later: up to three images in, one out"),
):  # fmt: skip
    entry(_name, _code, _about, pipeline=f"{_code.partition(':')[2]}Pipeline")
entry("cosmos_predict2", "cosmos:CosmosPredict2", "Cosmos-Predict2", pipeline="Cosmos2TextToImagePipeline")
entry(
    "sd15", "sd15:StableDiffusion15", "Stable Diffusion 1.5", pipeline="StableDiffusionPipeline",
    prediction="epsilon",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Rewards
# ---------------------------------------------------------------------------------------------------------------------

entry = scorers.below(f"{PACKAGE}.rewards.functions")
entry("exact", "answers:Exact", "the final answer equals the reference")
entry("numeric", "answers:Numeric", "numbers within a tolerance")
entry("choice", "answers:Choice", "the letter of a multiple choice")
entry("format", "format:Format", "the form of a response")
entry("math", "math:Math", "mathematical answers, by math-verify")
entry("ocr", "ocr:OCR", "the text that an image shows")
entry("clip_score", "clip:CLIPScore", "CLIP similarity of image and prompt")
entry("pick_score", "clip:PickScore", "PickScore, human preference")
entry("aesthetic", "aesthetic:Aesthetic", "LAION's aesthetic predictor")
entry("hpsv2", "clip:HPSv2", "Human Preference Score v2")
entry("hpsv3", "hpsv3:HPSv3", "Human Preference Score v3: Qwen2-VL with a head")
entry("videoalign", "videoalign:VideoAlign", "VideoAlign: visual quality, motion and alignment of whole clips")
entry("image_reward", "image_reward:ImageReward", "ImageReward, human preference")
entry("unified_reward", "unified_reward:UnifiedReward", "UnifiedReward behind an OpenAI-compatible server")
entry("geneval", "geneval:GenEval", "GenEval: objects, numbers, colours and positions, by a detector and rules")
entry("jpeg_compressibility", "jpeg:Compressibility", "small JPEG files")
entry("jpeg_incompressibility", "jpeg:Incompressibility", "large JPEG files")
entry("judge", "judge:Judge", "any vision-language model in the run, by a template with a schema of the reply")
entry("vlm_judge", "vlm_judge:VLMJudge", "a vision-language model behind an OpenAI-compatible server")
entry("multi", "multi:MultiScorer", "a weighted sum of others")
entry("environment", "environment:EnvironmentReward", "what the environment gave in the turns of an episode")

entry = scorers.below(PLUGINS)
_faces = ("reference_image", "face_image")
entry("face_similarity", "face.scorer:FaceSimilarity", "the face of a reference image", image_columns=_faces)
entry("geometry3k", "compat.graders:Geometry3K", "Geometry3K as EasyR1 or verl (`grader`) grades it, by mathruler")
entry("shape_match", "embedded.shape_match:ShapeMatch", "the embedded captions: colour, shape, coverage, background")
entry("shape_judge", "embedded.shape_judge:ShapeJudgeScorer", "the embedded captions, by a classifier; for measuring")

entry = differentiable_rewards.below(PLUGINS)
entry("shape_match", "embedded.shape_match:EmbeddedShapeMatch", "the embedded captions")
entry("face_similarity", "face.reward:face_similarity", "the face of the first frame", image_columns=_faces)


# in the order in which they are tried
entry = row_forms.below(PACKAGE)
entry("verl", "plugins.compat.rows:verl", "verl: messages in `prompt`, the answer in `reward_model`", with_prompt=True)
entry("completion", "plugins.compat.rows:prompt_completion", "TRL: `prompt` and `completion`", with_prompt=True)
entry("conversations", "plugins.compat.rows:conversations", "LLaVA, ShareGPT: `conversations` of {from, value}")
entry("messages", "data.forms:messages", "OpenAI's chat form: `messages` of {role, content}")
entry("question", "plugins.compat.rows:question", "EasyR1 and many others: `problem`, `question`, `query`")
entry("input_label", "plugins.compat.rows:input_label", "OpenRLHF: `input`, and the answer in `label`")
entry("geometry3k", "plugins.compat.rows:geometry3k", "`problem`, with EasyR1's and verl's words on how to answer")

entry = reward_forms.below(PACKAGE)  # the first that fits is taken
entry("verl", "plugins.compat.rewards:VERL", "verl, called for each sample")
entry("verl_batch", "plugins.compat.rewards:VERL_BATCH", "verl, called once")
entry("easyr1", "plugins.compat.rewards:EASYR1", "EasyR1, called once")
entry("easyr1_each", "plugins.compat.rewards:EASYR1_EACH", "EasyR1, called for each sample")
entry("roll", "plugins.compat.rewards:ROLL", "ROLL, called for each sample")
entry("flow_grpo", "plugins.compat.rewards:FLOW_GRPO", "flow_grpo, images as one tensor")
entry("openrlhf", "rewards.local.forms:OPENRLHF", "OpenRLHF, labels are the references")
entry("lightrft", "rewards.local.forms:LIGHTRFT", "LightRFT, with the rewards of models")
entry("by_position", "plugins.compat.rewards:BY_POSITION", "LightRFT's files, three parameters of any name")
entry("trl_chat", "plugins.compat.rewards:TRL_CHAT", "TRL, completions as chat messages")
entry("trl", "plugins.compat.rewards:TRL", "TRL, completions as texts")
entry("native", "rewards.local.forms:NATIVE", "parameters are named after the inputs of docs/rewards.md")


# ---------------------------------------------------------------------------------------------------------------------
# Plug-ins
# ---------------------------------------------------------------------------------------------------------------------

_embedded = f"{PLUGINS}.embedded"

entry = tasks.below(_embedded)
entry("embedded", "resolve:place_questions", "questions about drawn scenes", gold={"exact": 1.0})
entry(
    "embedded_reasoning", "resolve:place_questions", "answered after a chain of tokens", gold={"exact": 1.0},
    reward=f"{_embedded}.reasoning:REWARD", preset="embedded_reasoning",
)  # fmt: skip
for _name, _about, _reward in (
    ("embedded_zoom", "a mark that is seen by a closer look", "exact"),
    ("embedded_click", "a button on a screen", "environment"),
):
    entry(_name, "resolve:place_questions", _about, reward=f'{{"*": [["rule", "{_reward}", 1.0]]}}', preset=_name)
environments.below(_embedded)("embedded_zoom", "zoom:EmbeddedZoom", "the task of this name: a quarter, closer")
drawing_tasks.below(_embedded)(
    "embedded", "resolve:place_captions", "captions of coloured shapes",
    reward='{"*": [["rule", "shape_match", 1.0]]}', judge='{"*": [["rule", "shape_judge", 1.0]]}',
    sets=f"{_embedded}.gold:embedded_gold", training_reward="shape_match",
)  # fmt: skip
checkpoint_resolvers.below(_embedded)(
    "embedded", "resolve:resolve_checkpoint", "a tiny model, built at its first use",
    pipeline=f"{_embedded}.resolve:resolve_pipeline", shape=f"{_embedded}.resolve:checkpoint_shape",
    pipeline_shape=f"{_embedded}.resolve:pipeline_shape",
)  # fmt: skip

entry = services.below(PLUGINS)
entry("memory_plan", "memory_plan.check", "what a run will hold, before it loads; sizes that fit")
entry("placement", "ray.rollout.engine", "rollouts in workers of their own (placement split)")
entry("drawing_placement", "ray.drawing", "the same of diffusion runs")
entry("ray_rewards", "ray.reward_pool", "rewards in Ray actors")
entry("unified", "unified.task", "the embedded model that also draws, and its task")
entry("kernels", "liger.kernels", "Liger's kernels in vision-language models (use_liger_kernel)")
entry("converter", "compat.convert", "files of TRL, verl, OpenRLHF and EasyR1 as a command")
entry("lightrft", "compat.lightrft", "experience makers with the strategy and the arguments of LightRFT")
entry("other_environments", "compat.environments", "environments of TRL, OpenRLHF and OpenEnv")
entry("other_names", "compat.names", "settings under the names of TRL, verl, EasyR1, OpenRLHF and Flow-GRPO")
services.below(PACKAGE)("recipes", "rewards.recipe", "what recipes of rewards name that is not there")


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------

# What selects an entry -> its registry, in the order of docs/choices.md.
ALL: dict[str, Registry] = {
    "--advantage_estimator": advantage_estimators,
    "--policy_loss": policy_losses,
    "--loss_agg_mode": aggregations,
    "--kl_estimator": kl_estimators,
    "--tis_mode": tis_modes,
    "settings of its own, for a term of the loss": loss_terms,
    "settings of its own, for a mask of the loss": policy_masks,
    "settings of its own, for a hook": hooks,
    "--engine_type": engines,
    "--environment": environments,
    "--diffusion_algorithm": diffusion_algorithms,
    "the checkpoint's model type": vlm_families,
    "--family": diffusion_families,
    "reward.components.NAME=WEIGHT": scorers,
    "--differentiable_reward": differentiable_rewards,
    "--data_format": row_forms,
    "--reward_form": reward_forms,
}


def table(registry: Registry) -> str:
    """The entries of a registry as a markdown table: names, what differs from the usual, one line."""
    lines = ["| name | what it is | needs |", "|---|---|---|"]
    for entry in registry:
        names = ", ".join(f"`{name}`" for name in (entry.name, *entry.aliases))
        needs = ", ".join(f"{fact} {_shown(value)}".strip() for fact, value in entry.needs().items())
        lines.append(f"| {names} | {entry.about} | {needs} |")
    return "\n".join(lines)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "" if value else "no"
    return " or ".join(value) if isinstance(value, tuple) else str(value).rpartition(":")[2]


def page() -> str:
    """docs/choices.md."""
    head = "# Choices\n\nWritten by `python -m lightrft_visual.config.registry`; a test compares. "
    head += "How to add one of your own: [architecture](architecture.md#to-add).\n"
    parts = [f"\n## {r.kind[0].upper()}{r.kind[1:]}: `{setting}`\n\n{table(r)}\n" for setting, r in ALL.items()]
    return head + "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
