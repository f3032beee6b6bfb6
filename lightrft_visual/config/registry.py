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

from __future__ import annotations

from typing import Any

from .constraints import PluginMissing, Registry, load_target
from .kinds import (
    AdvantageEstimator,
    Aggregation,
    CheckpointResolver,
    DifferentiableReward,
    DiffusionAlgorithm,
    DiffusionFamily,
    Engine,
    EnvironmentChoice,
    Hook,
    KLEstimator,
    LossTerm,
    PolicyLoss,
    PolicyMask,
    RewardForm,
    RolloutMetric,
    RowForm,
    Scorer,
    Service,
    Task,
    TISMode,
    VLMFamily,
)

ALGORITHMS, MODELS, TRAINER, PLUGINS = (
    f"lightrft_visual.{room}" for room in ("algorithms", "models", "trainer", "plugins")
)

advantage_estimators = Registry("advantage estimator", AdvantageEstimator)
policy_losses = Registry("policy loss", PolicyLoss)
aggregations = Registry("aggregation", Aggregation)
kl_estimators = Registry("KL estimator", KLEstimator)
tis_modes = Registry("TIS mode", TISMode)
diffusion_algorithms = Registry("diffusion algorithm", DiffusionAlgorithm)
engines = Registry("rollout engine", Engine)
vlm_families = Registry("vision-language family", VLMFamily)
diffusion_families = Registry("diffusion family", DiffusionFamily)
hooks = Registry("hook", Hook)
loss_terms = Registry("term of the policy loss", LossTerm)
policy_masks = Registry("mask of the policy loss", PolicyMask)
rollout_metrics = Registry("rollout metric", RolloutMetric)
differentiable_rewards = Registry("differentiable reward", DifferentiableReward)
environments = Registry("environment", EnvironmentChoice)
scorers = Registry("scorer", Scorer)
row_forms = Registry("form of data rows", RowForm)
reward_forms = Registry("form of reward functions", RewardForm)
tasks = Registry("built-in task", Task)  # prompt_data of vision-language runs
drawing_tasks = Registry("built-in drawing task", Task)  # and of diffusion runs
checkpoint_resolvers = Registry("built-in model", CheckpointResolver)
services = Registry("service of a plug-in", Service)


def service(name: str) -> Any | None:
    """What a plug-in does for the core, None where it is not there. `services.load` raises then."""
    try:
        return services.load(name)
    except PluginMissing:
        return None


def checkpoint_folder(model: Any, name: str, task: str) -> str:
    """`name`, or the folder that it stands for. model: a run's model section; task: its prompt_data."""
    return checkpoint_resolvers.load(name)(model, name, task) if name in checkpoint_resolvers else name


def pipeline_folder(name: str, family: str = "auto") -> str:
    """The same of a diffusion pipeline."""
    if name not in checkpoint_resolvers or checkpoint_resolvers[name].pipeline is None:
        return name
    return load_target(checkpoint_resolvers[name].pipeline)(name, family)


# ---------------------------------------------------------------------------------------------------------------------
# Vision-language runs
# ---------------------------------------------------------------------------------------------------------------------

_advantages = f"{ALGORITHMS}.advantages"
for _entry in (
    AdvantageEstimator("gae", f"{_advantages}:GAECalculator", "PPO: generalised advantage estimation", critic=True),
    AdvantageEstimator(
        "rloo", f"{_advantages}:RLOOCalculator", "reward minus the mean of the prompt's other samples", grouped=True,
    ),
    AdvantageEstimator("reinforce", f"{_advantages}:ReinforceCalculator", "the reward itself, no baseline"),
    AdvantageEstimator(
        "reinforce_baseline", f"{_advantages}:GroupMeanCalculator", "REINFORCE++-baseline: minus the group's mean",
        grouped=True,
    ),
    AdvantageEstimator(
        "group_norm", f"{_advantages}:GroupNormCalculator", "GRPO: minus the group's mean, over its std (n - 1)",
        aliases=("grpo",), grouped=True,
    ),
    AdvantageEstimator(
        "dr_grpo", f"{_advantages}:GroupMeanCalculator", "Dr. GRPO: minus the group's mean", grouped=True
    ),
    AdvantageEstimator(
        "cpgd", f"{_advantages}:CPGDCalculator", "CPGD: minus the group's mean, over its std (n)", grouped=True
    ),
    AdvantageEstimator(
        "gdpo", f"{_advantages}:GDPOCalculator", "GDPO: each reward over its own std in the group, then their sum",
        grouped=True, components=True,
    ),
    AdvantageEstimator(
        "distillation", f"{_advantages}:DistillationCalculator", "0: the teacher's term alone teaches",
        reads_log_probs=True,
    ),
):  # fmt: skip
    advantage_estimators.add(_entry)

_losses, _far, _covariance = (f"{ALGORITHMS}.{name}" for name in ("policy_losses", "off_policy", "covariance"))
for _entry in (
    PolicyLoss("ppo", f"{_losses}:ppo_loss", "clipped ratio of each token; clip-higher, dual clip"),
    PolicyLoss("gspo", f"{_losses}:gspo_loss", "clipped ratio of the sequence"),
    PolicyLoss("gmpo", f"{_losses}:gmpo_loss", "geometric mean of clipped token ratios"),
    PolicyLoss("cispo", f"{_losses}:cispo_loss", "clipped importance weight on the log-prob; no token is dropped"),
    PolicyLoss("cpgd", f"{_losses}:cpgd_loss", "policy gradient on clipped log ratios, with a drift term"),
    PolicyLoss("sapo", f"{_losses}:sapo_loss", "smooth gate on the ratio of each token instead of a clip"),
    PolicyLoss(
        "luspo", f"{_losses}:gspo_loss", "GSPO with each sequence weighed by its length",
        aggregation="seq-mean-token-sum",
    ),
    PolicyLoss(
        "dppo_tv", f"{_far}:dppo_tv_loss", "tokens whose probability moved too far leave the loss",
        weighs_rollouts=True,
    ),
    PolicyLoss("dppo_kl", f"{_far}:dppo_kl_loss", "the same by a binary KL", weighs_rollouts=True),
    PolicyLoss(
        "vespo", f"{_far}:vespo_loss", "smooth weight of the sequence by its whole ratio", weighs_rollouts=True
    ),
    PolicyLoss(
        "clip_cov", f"{_covariance}:clip_cov_loss", "PPO clip without a few tokens that cost entropy",
        chooses=f"{_covariance}:clip_cov_tokens",
    ),
    PolicyLoss(
        "kl_cov", f"{_covariance}:kl_cov_loss", "no clip; a penalty on the tokens that cost the most entropy",
        chooses=f"{_covariance}:kl_cov_tokens",
    ),
):  # fmt: skip
    policy_losses.add(_entry)

policy_masks.add(
    PolicyMask(
        "off_policy",
        f"{_far}:off_policy_sequences",
        "`off_policy_delta`: DeepSeek-V3.2's off-policy sequence mask",
        setting="off_policy_delta",
    )
)

for _entry in (
    LossTerm(
        "entropy", f"{ALGORITHMS}.loss_terms:EntropyBonus", "`entropy_coef`: a bonus for entropy",
        settings=("entropy_coef", "entropy_target"),
    ),
    LossTerm(
        "balance", f"{ALGORITHMS}.loss_terms:Balance", "`router_aux_loss_coef`: experts in equal use",
        settings=("router_aux_loss_coef",),
    ),
    LossTerm(
        "perception", f"{ALGORITHMS}.loss_terms:Perception", "`papo_coef`: PAPO's perception loss",
        settings=("papo_coef",),
    ),
):  # fmt: skip
    loss_terms.add(_entry)

_both, _sees, _draws = ("vl", "diffusion"), ("vl",), ("diffusion",)
for _name, _about, _kinds in (  # in the order in which they follow a step
    ("ema", "`enable_ema`: an average of the weights, for evaluation and export", _both),
    ("entropy_target", "`entropy_target`: an entropy bonus steered to a wanted entropy", _sees),
    ("reference_refresh", "`ref_update_steps`: the reference takes over the policy's weights", _sees),
    ("reward_weights", "`reward_weights_file`: weights of rewards, read anew when the file changes", _both),
    ("noisy_rollouts", "`noisy_rollout_share`: some samples of a prompt see a noisy image", _sees),
    ("balanced_rollouts", "`balance_rollouts`: prompts dealt to ranks by the expected length of responses", _sees),
    ("rollouts_ahead", "`max_staleness`: the age of tokens that are trained on", _both),
    ("guard", "a gold reward, learnt bands, alarms", _both),
    ("image_dependence", "`image_dependence_every`: how much answers change with another's image", _sees),
    ("trained_prompts", "the metric `trained_prompt_num`: how many different prompts were trained on", _draws),
    ("routing", "`routing_replay`: experts that were chosen are used again", _sees),
    ("compiled_blocks", "`compile`: programs of torch.compile for the blocks", _sees),
    ("episodes", "`environment`, `tools`: metrics of turns and calls", _sees),
    ("records", "rollouts that people are shown", _both),
    ("conditions", "what each evaluation was made with, in its file", _both),
    ("selective_replay", "`selective_replay`: samples of earlier steps in the place of groups that agree", _sees),
    ("context_parallel", "`sp_size`: ranks share the tokens of one forward of the denoiser", _draws),
):
    hooks.add(Hook(_name, f"{TRAINER}.features.{_name}:build", _about, kinds=_kinds))

_aggregation = f"{ALGORITHMS}.loss_terms"
for _entry in (
    Aggregation("token-mean", f"{_aggregation}:token_mean", "every token counts alike (DAPO)"),
    Aggregation("seq-mean-token-sum", f"{_aggregation}:seq_mean_token_sum", "sum over a response, mean of responses"),
    Aggregation("seq-mean-token-mean", f"{_aggregation}:seq_mean_token_mean", "every response counts alike (GRPO)"),
    Aggregation(
        "seq-mean-token-sum-norm", f"{_aggregation}:seq_mean_token_sum_norm", "sum over a constant length (Dr. GRPO)"
    ),
):
    aggregations.add(_entry)

for _entry in (
    KLEstimator("k1", f"{ALGORITHMS}.kl:k1", "log ratio: unbiased; as a loss its gradient averages 0", as_loss=False),
    KLEstimator("k2", f"{ALGORITHMS}.kl:k2", "half its square: as a loss on-policy its gradient is the KL's"),
    KLEstimator("k3", f"{ALGORITHMS}.kl:k3", "ratio - 1 - log ratio: unbiased and never negative"),
    KLEstimator(
        "k3_unbiased", f"{ALGORITHMS}.kl:k3_unbiased", "k3; as a loss weighed by policy / old policy", weighted=True
    ),
):
    kl_estimators.add(_entry)

for _entry in (
    TISMode("off", None, "no correction", corrects=False),
    TISMode("token", f"{_losses}:token_log_weights", "one weight a token"),
    TISMode("sequence", f"{_losses}:sequence_log_weights", "the product over the sequence"),
):
    tis_modes.add(_entry)

for _entry in (
    Engine(
        "vllm", "lightrft_visual.rollout.vllm.engine:VLLMEngine.from_config", "vLLM in this process",
        tensor_parallel=True, resident=True, check="lightrft_visual.rollout.vllm.arguments:check_engine",
        worker="lightrft_visual.rollout.vllm.engine:worker_engine", continues=True, reads_patches=False,
    ),
    Engine(
        "hf", "lightrft_visual.rollout.hf:TransformersEngine.from_config", "the trainer's own model: where vLLM is not",
        worker="lightrft_visual.rollout.hf:worker_engine", adapters_alone=True, continues=True, draws=True,
    ),
    Engine(
        "sglang", "lightrft_visual.plugins.sglang.engine:SGLangEngine.from_config",
        "SGLang beside this process: Qwen-VL and text models on CUDA", resident=True,
        check="lightrft_visual.plugins.sglang.arguments:check_engine",
        worker="lightrft_visual.plugins.sglang.engine:worker_engine", continues=True,
    ),
):  # fmt: skip
    engines.add(_entry)

_builtin = "lightrft_visual.rollout.builtin"
for _entry in (
    EnvironmentChoice("tools", "lightrft_visual.rollout.tools:ToolEnvironment", "runs the functions of `--tools`"),
    EnvironmentChoice("zoom", f"{_builtin}.zoom:Zoom", "a tool that enlarges a region of the image"),
    EnvironmentChoice("python", f"{_builtin}.python:PythonCalculator", "a calculator in Python's notation"),
    EnvironmentChoice("click", f"{_builtin}.click:Click", "a click on the `target` of a screen is rewarded"),
):
    environments.add(_entry)


# ---------------------------------------------------------------------------------------------------------------------
# Diffusion runs
# ---------------------------------------------------------------------------------------------------------------------

_diffusion = f"{ALGORITHMS}.diffusion"
_any_trajectory = ("ode", "sde", "sde_reflow", "dance", "cps")
for _entry in (
    DiffusionAlgorithm(
        "flow_grpo", f"{_diffusion}:flow_grpo", "clipped ratios of SDE steps",
        trajectories=("sde", "sde_reflow", "cps"), guard=True,
    ),
    DiffusionAlgorithm(
        "dance_grpo", f"{_diffusion}:dance_grpo", "as Flow-GRPO, steps of constant eta", trajectories=("dance",),
        guard=True, noise_level=0.3, timestep_choice="random", embedded="embedded/dance_grpo",
    ),
    DiffusionAlgorithm(
        "mix_grpo", f"{_diffusion}:flow_grpo", "Flow-GRPO on a window of SDE steps that slides", guard=True,
        trajectories=("sde", "sde_reflow", "cps"), sde_window_size=4, sde_window_move="slide",
        embedded="embedded/mix_grpo",
    ),
    DiffusionAlgorithm(
        "flow_dppo", f"{_diffusion}:flow_dppo", "Flow-GRPO with a KL mask in place of the clip", keep_means=True,
        embedded="embedded/flow_dppo",
    ),
    DiffusionAlgorithm(
        "temp_flow_grpo", f"{_diffusion}:temp_flow_grpo", "Flow-GRPO that branches at one step, weighted by its noise",
        sde_window_size=1, sde_window_move="anywhere", same_latent=True, embedded="embedded/temp_flow_grpo",
    ),
    DiffusionAlgorithm(
        "diffusion_nft", f"{_diffusion}:diffusion_nft", "policy improvement on the forward process",
        trajectories=_any_trajectory, trains_on="data", reference=True, old_policy=True,
        clipped_advantages=True, timestep_choice="random", embedded="embedded/diffusion_nft",
    ),
    DiffusionAlgorithm(
        "ddpo", f"{_diffusion}:ddpo", "clipped ratios of DDIM steps", prediction="epsilon", num_steps=50,
        noise_level=1.0, embedded="embedded/ddpo",
    ),
    DiffusionAlgorithm(
        "dpok", f"{_diffusion}:dpok", "policy gradient of DDIM steps with a KL", prediction="epsilon", num_steps=50,
        noise_level=1.0, embedded="embedded/dpok",
    ),
    DiffusionAlgorithm(
        "awm", f"{_diffusion}:awm", "the loss of pretraining, weighted by advantages", trajectories=_any_trajectory,
        prediction=None, trains_on="data", old_policy=True, clipped_advantages=True, timestep_choice="random",
        clip_range=1.0, decay_type=3, embedded="embedded/awm",
    ),
    DiffusionAlgorithm(
        "dgpo", f"{_diffusion}:dgpo", "a prompt's better samples against its worse ones", trajectories=_any_trajectory,
        prediction=None, trains_on="data", reference=True, coupled="groups", timestep_choice="random", decay_type=3,
        min_sigma=0.3, embedded="embedded/dgpo",
    ),
    DiffusionAlgorithm(
        "crd", f"{_diffusion}:crd", "the model's implicit reward fitted to the given one, within each prompt",
        trajectories=_any_trajectory, prediction=None, trains_on="data", reference=True, old_policy=True,
        coupled="groups", clipped_advantages=True, timestep_choice="random", embedded="embedded/crd",
    ),
    DiffusionAlgorithm(
        "diffusion_dpo", f"{_diffusion}:diffusion_dpo", "pairs of a preferred and another sample",
        trajectories=_any_trajectory, prediction=None, trains_on="data", reference=True, coupled="pairs",
        timestep_choice="random", decay_type=3, dpo_beta=5000.0, embedded="embedded/diffusion_dpo",
    ),
    DiffusionAlgorithm(
        "rwr", f"{_diffusion}:rwr", "reward-weighted regression: supervised, weighted by exp(advantage)",
        trajectories=_any_trajectory, prediction=None, trains_on="data", timestep_choice="random",
        embedded="embedded/rwr",
    ),
    DiffusionAlgorithm(
        "diffusion_opd", f"{_diffusion}:diffusion_opd", "distillation from a teacher on the model's own SDE steps",
        grouped=False, teacher=True, n_samples_per_prompt=1, embedded="embedded/diffusion_opd",
    ),
    DiffusionAlgorithm(
        "reward_fl", f"{_diffusion}:reward_fl", "the gradient of a differentiable reward", trajectories=("ode",),
        trains_on="reward", grouped=False, num_steps=8, learning_rate=2.5e-6, warmup_steps=10,
        n_samples_per_prompt=1, train_batch_size=8, embedded="embedded/reward_fl",
    ),
):  # fmt: skip
    diffusion_algorithms.add(_entry)

_families = f"{MODELS}.vlm.families"
for _entry in (
    VLMFamily(
        "qwen_vl", f"{_families}.qwen:QwenVL", "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, dense and MoE",
        model_types=("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        processors=("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"),
    ),
    VLMFamily(
        "glm", f"{_families}.glm:Glm", "GLM-4.1V, GLM-4.5V, GLM-4.6V; images only",
        model_types=("glm4v", "glm4v_moe", "glm46v"), processors=("Glm4vProcessor", "Glm46VProcessor"),
    ),
    VLMFamily(
        "idefics", f"{_families}.idefics:Idefics", "Idefics 3, SmolVLM; images only",
        model_types=("idefics3", "smolvlm"), processors=("Idefics3Processor", "SmolVLMProcessor"),
    ),
    VLMFamily(
        "minicpm", f"{_families}.minicpm:MiniCPM", "MiniCPM-V 4.6; images only",
        model_types=("minicpmv4_6",), processors=("MiniCPMV4_6Processor",),
    ),
    VLMFamily(
        "internvl", f"{_families}.internvl:InternVL", "InternVL in transformers' own form; images only",
        model_types=("internvl",), processors=("InternVLProcessor",),
    ),
    VLMFamily(
        "janus", f"{PLUGINS}.unified.family:Janus", "Janus, Janus-Pro: answers in text or images; engine hf",
        model_types=("janus",), processors=("JanusProcessor",),
    ),
    VLMFamily(
        "llava", f"{_families}.llava:Llava", "LLaVA 1.5, Pixtral; images only",
        model_types=("llava",), processors=("LlavaProcessor", "PixtralProcessor"),
    ),
    VLMFamily(
        "text", f"{_families}.text:TextOnly", "causal language models without vision; packing for Qwen",
        model_types=("qwen2", "qwen3"),
    ),
):  # fmt: skip
    vlm_families.add(_entry)

_families = f"{MODELS}.diffusion.families"
for _entry in (
    DiffusionFamily("sd3", f"{_families}.sd3:StableDiffusion3", "SD3, SD3.5", pipeline="StableDiffusion3Pipeline"),
    DiffusionFamily("flux", f"{_families}.flux:Flux", "FLUX; guidance is an embedding", pipeline="FluxPipeline"),
    DiffusionFamily(
        "flux_kontext", f"{_families}.flux_kontext:FluxKontext", "FLUX.1 Kontext: an image in, one out",
        pipeline="FluxKontextPipeline",
    ),
    DiffusionFamily("flux2_klein", f"{_families}.flux2:Flux2Klein", "FLUX.2 [klein]", pipeline="Flux2KleinPipeline"),
    DiffusionFamily("flux2", f"{_families}.flux2:Flux2", "FLUX.2 [dev]; guidance embedded", pipeline="Flux2Pipeline"),
    DiffusionFamily("wan", f"{_families}.wan:Wan", "Wan text-to-video", pipeline="WanPipeline"),
    DiffusionFamily(
        "wan_i2v", f"{_families}.wan:WanImageToVideo", "Wan image-to-video", pipeline="WanImageToVideoPipeline"
    ),
    DiffusionFamily(
        "hunyuan_video15", f"{_families}.hunyuan_video15:HunyuanVideo15", "HunyuanVideo 1.5, text to video",
        pipeline="HunyuanVideo15Pipeline",
    ),
    DiffusionFamily("ltx2", f"{_families}.ltx2:LTX2", "LTX-2, text to video; no sound", pipeline="LTX2Pipeline"),
    DiffusionFamily("z_image", f"{_families}.z_image:ZImage", "Z-Image", pipeline="ZImagePipeline"),
    DiffusionFamily("qwen_image", f"{_families}.qwen_image:QwenImage", "Qwen-Image", pipeline="QwenImagePipeline"),
    DiffusionFamily(
        "qwen_image21", f"{_families}.qwen_image21:QwenImage21", "Qwen-Image 2.1", pipeline="QwenImage21Pipeline"
    ),
    DiffusionFamily(
        "qwen_image_edit", f"{_families}.qwen_image_edit:QwenImageEdit", "Qwen-Image-Edit: an image in, one out",
        pipeline="QwenImageEditPipeline",
    ),
    DiffusionFamily(
        "qwen_image_edit_plus", f"{_families}.qwen_image_edit:QwenImageEditPlus",
        "Qwen-Image-Edit 2509 and later: up to three images in, one out", pipeline="QwenImageEditPlusPipeline",
    ),
    DiffusionFamily(
        "cosmos_predict2", f"{_families}.cosmos:CosmosPredict2", "Cosmos-Predict2",
        pipeline="Cosmos2TextToImagePipeline",
    ),
    DiffusionFamily(
        "sd15", f"{_families}.sd15:StableDiffusion15", "Stable Diffusion 1.5", pipeline="StableDiffusionPipeline",
        prediction="epsilon",
    ),
):  # fmt: skip
    diffusion_families.add(_entry)


# ---------------------------------------------------------------------------------------------------------------------
# Rewards
# ---------------------------------------------------------------------------------------------------------------------

for _name, _target, _about in (
    ("exact", "exact:Exact", "the final answer equals the reference"),
    ("numeric", "numeric:Numeric", "numbers within a tolerance"),
    ("choice", "choice:Choice", "the letter of a multiple choice"),
    ("format", "format:Format", "the form of a response"),
    ("math", "math:Math", "mathematical answers, by math-verify"),
    ("ocr", "ocr:OCR", "the text that an image shows"),
    ("clip_score", "clip_score:CLIPScore", "CLIP similarity of image and prompt"),
    ("pick_score", "pick_score:PickScore", "PickScore, human preference"),
    ("aesthetic", "aesthetic:Aesthetic", "LAION's aesthetic predictor"),
    ("hpsv2", "hpsv2:HPSv2", "Human Preference Score v2"),
    ("hpsv3", "hpsv3:HPSv3", "Human Preference Score v3: Qwen2-VL with a head"),
    ("videoalign", "videoalign:VideoAlign", "VideoAlign: visual quality, motion and alignment of whole clips"),
    ("image_reward", "image_reward:ImageReward", "ImageReward, human preference"),
    ("unified_reward", "unified_reward:UnifiedReward", "UnifiedReward behind an OpenAI-compatible server"),
    ("geneval", "geneval:GenEval", "GenEval: objects, numbers, colours and positions, by a detector and rules"),
    ("jpeg_compressibility", "jpeg:Compressibility", "small JPEG files"),
    ("jpeg_incompressibility", "jpeg:Incompressibility", "large JPEG files"),
    ("pixel", "pixel:Pixel", "simple rules over pixels"),
    ("source_likeness", "source_likeness:SourceLikeness", "colours as in the image that it was made from"),
    ("judge", "judge:Judge", "any vision-language model in the run, by a template with a schema of the reply"),
    ("vlm_judge", "vlm_judge:VLMJudge", "a vision-language model behind an OpenAI-compatible server"),
    ("multi", "multi:MultiScorer", "a weighted sum of others"),
    ("environment", "environment:EnvironmentReward", "what the environment gave in the turns of an episode"),
):
    scorers.add(Scorer(_name, f"lightrft_visual.rewards.functions.{_target}", _about))
for _name, _target, _about in (
    ("face_similarity", "face.scorer:FaceSimilarity", "the face of a reference image"),
    ("geometry3k", "compat.graders:Geometry3K", "Geometry3K as EasyR1 or verl (`grader`) grades it, by mathruler"),
    (
        "shape_match", "embedded.scorers.shape_match:ShapeMatch",
        "the embedded captions: colour, shape, coverage, background",
    ),
    (
        "picture_quality", "embedded.scorers.shape_match:PictureQuality",
        "how well any clean drawing explains the image",
    ),
    (
        "shape_judge", "embedded.scorers.judge_scorer:ShapeJudgeScorer",
        "the embedded captions, by a classifier; for measuring",
    ),
):  # fmt: skip
    scorers.add(Scorer(_name, f"{PLUGINS}.{_target}", _about))

for _entry in (
    DifferentiableReward(
        "shape_match", f"{PLUGINS}.embedded.scorers.shape_match:embedded_shape_match", "the embedded captions"
    ),
    DifferentiableReward("face_similarity", f"{PLUGINS}.face.reward:face_similarity", "the face of the first frame"),
):
    differentiable_rewards.add(_entry)


_rows, _local, _compat = "lightrft_visual.data.forms", "lightrft_visual.rewards.local.callables", f"{PLUGINS}.compat"
for _entry in (  # in the order in which they are tried
    RowForm(
        "verl", f"{_compat}.rows:verl", "verl: messages in `prompt`, the answer in `reward_model`", with_prompt=True
    ),
    RowForm("conversations", f"{_compat}.rows:conversations", "LLaVA, ShareGPT: `conversations` of {from, value}"),
    RowForm("messages", f"{_rows}:messages", "OpenAI's chat form: `messages` of {role, content}"),
    RowForm("question", f"{_compat}.rows:question", "EasyR1 and many others: `problem`, `question`, `query`"),
    RowForm("input_label", f"{_compat}.rows:input_label", "OpenRLHF: `input`, and the answer in `label`"),
    RowForm("geometry3k", f"{_compat}.rows:geometry3k", "`problem`, with EasyR1's and verl's words on how to answer"),
):  # fmt: skip
    row_forms.add(_entry)
for _name, _target, _about in (  # the first that fits is taken
    ("verl", f"{_compat}.rewards:VERL", "verl, called for each sample"),
    ("verl_batch", f"{_compat}.rewards:VERL_BATCH", "verl, called once"),
    ("easyr1", f"{_compat}.rewards:EASYR1", "EasyR1, called once"),
    ("easyr1_each", f"{_compat}.rewards:EASYR1_EACH", "EasyR1, called for each sample"),
    ("roll", f"{_compat}.rewards:ROLL", "ROLL, called for each sample"),
    ("flow_grpo", f"{_compat}.rewards:FLOW_GRPO", "flow_grpo, images as one tensor"),
    ("openrlhf", f"{_local}:OPENRLHF", "OpenRLHF, labels are the references"),
    ("lightrft", f"{_local}:LIGHTRFT", "LightRFT, with the rewards of models"),
    ("by_position", f"{_compat}.rewards:BY_POSITION", "LightRFT's files, three parameters of any name"),
    ("trl_chat", f"{_compat}.rewards:TRL_CHAT", "TRL, completions as chat messages"),
    ("trl", f"{_compat}.rewards:TRL", "TRL, completions as texts"),
    ("native", f"{_local}:NATIVE", "parameters are named after the inputs of docs/rewards.md"),
):
    reward_forms.add(RewardForm(_name, _target, _about))


# ---------------------------------------------------------------------------------------------------------------------
# Plug-ins
# ---------------------------------------------------------------------------------------------------------------------

_embedded = f"{PLUGINS}.embedded.resolve"
tasks.add(Task("embedded", f"{_embedded}:place_questions", "questions about drawn scenes", gold={"exact": 1.0}))
tasks.add(
    Task(
        "embedded_reasoning", f"{_embedded}:place_questions", "answered after a chain of tokens", gold={"exact": 1.0},
        reward=f"{PLUGINS}.embedded.reasoning:REWARD", preset="embedded_reasoning",
    )
)  # fmt: skip
for _name, _about, _reward in (
    ("embedded_zoom", "a mark that is seen by a closer look", "exact"),
    ("embedded_click", "a button on a screen", "environment"),
):
    _recipe = f'{{"*": [["rule", "{_reward}", 1.0]]}}'
    tasks.add(Task(_name, f"{_embedded}:place_questions", _about, reward=_recipe, preset=_name))
environments.add(
    EnvironmentChoice(
        "embedded_zoom", f"{PLUGINS}.embedded.zoom:EmbeddedZoom", "the task of this name: a quarter, closer"
    )
)
drawing_tasks.add(
    Task(
        "embedded", f"{_embedded}:place_captions", "captions of coloured shapes",
        reward='{"*": [["rule", "shape_match", 1.0]]}', judge='{"*": [["rule", "shape_judge", 1.0]]}',
        sets=f"{PLUGINS}.embedded.gold:embedded_gold", training_reward="shape_match",
    )
)  # fmt: skip
checkpoint_resolvers.add(
    CheckpointResolver(
        "embedded", f"{_embedded}:resolve_checkpoint", "a tiny model, built at its first use",
        pipeline=f"{_embedded}:resolve_pipeline", shape=f"{_embedded}:checkpoint_shape",
        pipeline_shape=f"{_embedded}:pipeline_shape",
    )
)  # fmt: skip
for _name, _target, _about in (
    ("memory_plan", "memory_plan.service", "what a run will hold, before it loads; sizes that fit"),
    ("placement", "ray.placement", "rollouts in workers of their own (placement split)"),
    ("ray_rewards", "ray.reward_pool", "rewards in Ray actors"),
    ("unified", "unified.service", "the embedded model that also draws, and its task"),
    ("kernels", "liger.kernels", "Liger's kernels in vision-language models (use_liger_kernel)"),
    ("converter", "compat.convert", "files of TRL, verl, OpenRLHF and EasyR1 as a command"),
    ("lightrft", "compat.lightrft", "experience makers with the strategy and the arguments of LightRFT"),
    ("other_environments", "compat.environments", "environments of TRL, OpenRLHF and OpenEnv"),
    ("other_names", "compat.names", "settings under the names of TRL, verl, EasyR1, OpenRLHF and Flow-GRPO"),
):
    services.add(Service(_name, f"{PLUGINS}.{_target}", _about))


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
