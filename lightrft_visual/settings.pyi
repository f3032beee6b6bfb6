"""Settings of runs as keyword arguments; written by scripts/write_settings.py from the configuration."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, TypedDict

StrPath = str | PathLike[str]
Code = StrPath | Callable[..., Any]

class VLSettings(TypedDict, total=False):
    pretrain: StrPath
    """hub name, checkpoint folder, or embedded: the tiny model built here. Default: 'embedded'."""
    critic_pretrain: StrPath | None
    """default: the actor's checkpoint with a fresh value head."""
    teacher_pretrain: StrPath | None
    """on-policy distillation: a model of the same tokens, often a larger one."""
    bf16: bool
    """weights and forwards in bfloat16; optimizer states in float32. Default: False."""
    attn_implementation: str
    """auto | sdpa | eager | flash_attention_2 | flash_attention_3. Default: 'auto'."""
    compile: bool
    """torch.compile of the blocks of trained models: slower to start, fewer kernels a step. Default: False."""
    use_liger_kernel: bool
    """Liger's Triton kernels for norms, gated MLPs and rotary positions: fewer a step. Default: False."""
    gradient_checkpointing: bool | str
    """none | attention | full | auto; what of blocks runs again in backward; auto: by the plan, on a card.
    Default: 'auto'."""
    freeze_prefix: str | Sequence[str]
    """comma-separated parameter prefixes; 'true' is the vision tower, Qwen's merger in it. Default: ''."""
    lora_rank: int
    """0 trains all weights. Default: 0."""
    lora_alpha: int
    """adapters are scaled by lora_alpha / lora_rank. Default: 16."""
    lora_dropout: float
    """share of the adapters' inputs that training drops. Default: 0.0."""
    target_modules: str | Sequence[str]
    """or a comma-separated list of module names. Default: 'all-linear'."""
    target_parameters: str | Sequence[str]
    """LoRA on experts: comma-separated, such as experts.gate_up_proj,experts.down_proj. Default: ''."""
    trust_remote_code: bool
    """run Python files that come with the checkpoint. Default: False."""
    embedded_family: str
    """qwen2_vl | qwen2_5_vl | qwen3_vl | internvl | qwen2 | janus; qwen2 reads text only; janus also draws,
    by engine hf. Default: 'qwen2_5_vl'."""
    prompt_data: Any
    """embedded, a file, a folder or a hub name; several by commas. Default: 'embedded'."""
    prompt_split: str
    """split of a data set of the hub, or file of a folder. Default: 'train'."""
    eval_data: Any | None
    """default: the embedded held-out prompts when prompt_data is embedded."""
    eval_split: str
    """the same for evaluation. Default: 'test'."""
    max_samples: int
    """at most so many prompts of each data set are read. Default: 100000000."""
    max_eval_samples: int
    """at most so many of each data set are evaluated. Default: 500."""
    input_key: str
    """column of the prompt. Default: 'prompt'."""
    reference_key: str
    """column of the right answer, for rewards. Default: 'reference'."""
    label_key: str
    """column that names the recipe of a sample's rewards. Default: 'label'."""
    image_root: StrPath | None
    """folder that relative image paths start from; default: the data file's folder."""
    on_bad_row: str
    """error | skip; skipped rows are counted by cause and listed in bad_rows.jsonl. Default: 'error'."""
    max_bad_share: float
    """a larger share of skipped rows ends the run. Default: 0.05."""
    prompt_data_probs: str | Sequence[float] | None
    """comma-separated mixing probabilities, one per data set."""
    prompt_mixing: str
    """shuffled | even | turns; each batch of rows in any order, with an even share of every data set, or of
    one data set in turns. Default: 'shuffled'."""
    images_key: str
    """empty: no images are read. Default: 'images'."""
    videos_key: str
    """empty: no videos are read. Default: 'videos'."""
    draw_key: str
    """a column that is true in rows to be answered by an image. Default: 'draw'."""
    apply_chat_template: bool
    """prompts are messages of the model's chat template. Default: True."""
    chat_template_kwargs: dict[str, Any]
    """what it reads besides, such as enable_thinking. Default: {}."""
    system_prompt: str | None
    """put before each prompt that has none."""
    data_format: str
    """auto | plain | verl | completion | conversations | messages | question | input_label | geometry3k; of
    the rows, see docs/coming_from.md. Default: 'auto'."""
    on_long_prompt: str
    """error | skip. Default: 'error'."""
    allow_remote_media: bool
    """fetch http(s) images named in rows; private addresses stay refused. Default: False."""
    max_image_pixels: int
    """refused before decoding. Default: 50000000."""
    min_pixels: int | None
    """passed to the image processor: images are resized into [min, max] pixels."""
    max_pixels: int | None
    """larger images are made smaller; default: the processor's."""
    engine_type: str
    """vllm | hf | sglang. Default: 'vllm'."""
    engine_tp_size: int
    """devices that share one engine. Default: 1."""
    engine_mem_util: float
    """share of the device's memory that the engine may fill. Default: 0.5."""
    enable_engine_sleep: bool
    """free the engine's memory while training; CUDA only. Default: True."""
    engine_enforce_eager: bool | None
    """vLLM without CUDA graphs and compiled layers; None: on CPU hosts only."""
    engine_max_num_seqs: int | None
    """sequences in flight; default: all samples of a step, at most 256."""
    engine_max_num_batched_tokens: int | None
    """of one forward; default: 8192 or one whole sequence."""
    engine_kv_cache_dtype: str
    """vLLM's names, such as fp8. Default: 'auto'."""
    engine_quantization: str | None
    """vLLM's names, such as fp8: weights are quantised as loaded."""
    engine_kwargs: dict[str, Any]
    """other engine arguments by vLLM's names. Default: {}."""
    offload_trainer: bool
    """optimizer states, gradients and weights wait on the host while they are not used. Default: False."""
    offload_reference: bool
    """the reference model's weights are on the device for its forwards only. Default: False."""
    limit_mm_image_per_prompt: int
    """images that the engine takes in one prompt. Default: 10."""
    limit_mm_video_per_prompt: int
    """videos that the engine takes in one prompt. Default: 1."""
    rollout_batch_size: int
    """prompts a step, over all ranks. Default: 128."""
    micro_rollout_batch_size: int
    """samples a forward, per rank. Default: 8."""
    n_samples_per_prompt: int
    """responses of a prompt: the size of a group. Default: 8."""
    temperature: float
    """of sampling, and of the log-probs that are trained. Default: 1.0."""
    top_p: float
    """tokens are sampled among the likeliest of this probability. Default: 1.0."""
    top_k: int
    """tokens are sampled among so many likeliest. Default: -1."""
    prompt_max_len: int
    """tokens of a prompt, image tokens included. Default: 1024."""
    generate_max_len: int
    """tokens of a response. Default: 1024."""
    min_new_tokens: int
    """tokens before the end token; 1 is as 0: an end token alone is a response. Default: 1."""
    use_fire: bool
    """first token at first_token_temperature (arXiv 2410.21236). Default: False."""
    first_token_temperature: float
    """of the first token, with use_fire. Default: 10.0."""
    guidance_scale: float
    """classifier-free guidance of drawn images; 1 is none. Default: 1.0."""
    guidance_log_probs: str
    """guided | conditional; of drawn tokens: of what they are drawn from, or of the prompt alone (one forward
    pass less to train on). Default: 'guided'."""
    noisy_rollout_share: float
    """of a prompt's responses, from a noisy image. Default: 0.0."""
    noisy_rollout_strength: int
    """of the noise at first: a step of 1,000. Default: 500."""
    balance_rollouts: bool
    """ranks generate for each other, by the length that responses are expected to have. Default: False."""
    dynamic_sampling: bool
    """DAPO: resample until the batch holds only groups with different rewards. Default: False."""
    dynamic_sampling_max_tries: int
    """rollouts of a step at most; 1: none is drawn again. Default: 4."""
    parity_every: int
    """steps between the gate's probes; rollouts are compared as they come. 0: no gate. Default: 50."""
    image_dependence_every: int
    """steps between measurements of what depends on the image; 0: none. Default: 10."""
    parity_tolerance: float | None
    """default: 1e-4 in fp32 (largest); means: 0.05 in bf16, 0.3 in fp8."""
    max_turns: int
    """responses of an episode. Default: 8."""
    max_episode_tokens: int | None
    """behind the prompt, sampled and observed ones; default: max_turns * generate_max_len."""
    env_timeout: float
    """seconds of one reset or step. Default: 60.0."""
    max_environments: int
    """that a rank or worker keeps at once, each in a process; more wait for room. Default: 128."""
    on_environment_error: str
    """mask | end | stop; mask: the sample teaches nothing; end: the episode ends with what it has; stop: the
    run ends. Default: 'mask'."""
    on_turn_limit: str
    """truncate | end | invalid; an episode that reaches max_turns: truncate: it is cut off; end: it is
    finished; invalid: it teaches nothing. Default: 'truncate'."""
    on_token_limit: str
    """truncate | end | invalid; likewise one with an answer of generate_max_len, or max_episode_tokens.
    Default: 'truncate'."""
    turn_gamma: float
    """discount of a reward by each turn before it. Default: 1.0."""
    observation_max_tokens: int | None
    """longer text is cut in the middle; default: no limit of its own."""
    reward_fn: StrPath | Sequence[StrPath] | None
    """path.py:function, or several, comma-separated."""
    reward_form: str
    """auto | native | a system of docs/coming_from.md: how functions by path are called. Default: 'auto'."""
    reward_pretrain: StrPath | Sequence[StrPath] | None
    """local reward model folders, comma-separated, each optionally name=folder."""
    remote_rm_url: StrPath | Sequence[StrPath] | None
    """URLs, comma-separated, or path.py with reward_func."""
    components: dict[str, float]
    """{name: weight}, laid over reward_recipe. Default: {}."""
    kwargs: dict[str, Any]
    """{component: {setting: value}}. Default: {}."""
    reward_recipe: StrPath | None
    """YAML or JSON file, or inline YAML: {label: [[type, key, weight], ...]}."""
    reward_wire: str
    """JSON form of remote_rm_url: auto | lightrft | openrlhf for all, a list in the order of the URLs, or
    url=wire,.... Default: 'auto'."""
    reward_probe: bool
    """ask every function and URL once, with a sample of the data, before any model loads. Default: True."""
    reward_timeout: float
    """deadline of one remote call, seconds, retries included. Default: 60.0."""
    reward_retries: int
    """on connection errors, 429 and 5xx only. Default: 3."""
    reward_concurrency: int
    """remote requests in flight at once. Default: 32."""
    on_reward_error: str
    """error | skip; skip: samples that a function raises on, or scores badly, become invalid. Default:
    'error'."""
    reward_max_invalid: float
    """share of invalid scores in one step above which the run stops. Default: 0.5."""
    reward_token_env: str | None
    """environment variable that holds the bearer token of remote rewards."""
    reward_image_format: str
    """png | jpeg; png is lossless. Default: 'png'."""
    reward_fn_timeout: float | None
    """run user callables in a subprocess with this limit, seconds."""
    reward_transport: str
    """inprocess | ray; where local scorers run. Default: 'inprocess'."""
    reward_cpu_offload: bool
    """keep local reward models off the accelerator between uses. Default: True."""
    advantage_estimator: str
    """gae | rloo | reinforce | reinforce_baseline | group_norm | grpo | dr_grpo | cpgd | gdpo | distillation.
    Default: 'group_norm'."""
    policy_loss: str
    """ppo | gspo | gmpo | cispo | cpgd | sapo | luspo | dppo_tv | dppo_kl | vespo | clip_cov | kl_cov.
    Default: 'ppo'."""
    loss_agg_mode: str
    """token-mean | seq-mean-token-sum | seq-mean-token-mean | seq-mean-token-sum-norm. Default: 'token-mean'."""
    eps_clip: float
    """ratios are clipped to 1 - eps_clip, 1 + eps_clip. Default: 0.2."""
    eps_clip_high: float | None
    """clip-higher (DAPO); default: eps_clip."""
    dual_clip: float | None
    """bounds the loss of negative advantages."""
    value_clip: float
    """how far new values may go from old ones. Default: 0.2."""
    gamma: float
    """discount a token. Default: 1.0."""
    lambd: float
    """of GAE. Default: 0.95."""
    init_kl_coef: float
    """weight of the divergence from the reference at the start; 0: no reference. Default: 0.01."""
    ref_update_steps: int
    """steps after which the reference is moved to the policy; 0: it never moves. Default: 0."""
    ref_update_mixup: float
    """share of the policy in the moved reference. Default: 1.0."""
    kl_target: float | None
    """mean KL per token; set: adaptive controller."""
    kl_horizon: int
    """samples in which an adaptive weight moves by about a fifth at most. Default: 10000."""
    kl_estimator: str
    """k1 | k2 | k3 | k3_unbiased. Default: 'k1'."""
    use_kl_loss: bool
    """KL as a loss term instead of in the reward. Default: False."""
    entropy_coef: float
    """weight of an entropy bonus in the loss. Default: 0.0."""
    drawing_entropy_coef: float | None
    """of the tokens of images; default: entropy_coef."""
    entropy_target: float | None
    """nats; set: entropy_coef moves so that the entropy stays above it."""
    entropy_coef_step: float
    """by which it moves each step, for entropy_target. Default: 0.0001."""
    entropy_coef_max: float
    """and its upper end; the lower one is 0. Default: 0.005."""
    high_entropy_token_ratio: float
    """top share of tokens by entropy (2506.01939); 0: all. Default: 1.0."""
    cpgd_alpha: float
    """weight of the policy-drift term of the cpgd loss. Default: 0.0."""
    vespo_k_pos: float
    """vespo's weight W^k exp(lambda (1 - W)), for positive advantages. Default: 2.0."""
    vespo_lambda_pos: float
    """decay of weights where advantages are positive. Default: 3.0."""
    vespo_k_neg: float
    """and for negative ones. Default: 3.0."""
    vespo_lambda_neg: float
    """decay of weights where advantages are negative. Default: 2.0."""
    cov_share: float
    """of all tokens, that clip_cov and kl_cov choose. Default: 0.0002."""
    clip_cov_low: float
    """clip_cov chooses among tokens whose covariance lies between these. Default: 1.0."""
    clip_cov_high: float
    """covariances above it are left alone. Default: 5.0."""
    kl_cov_coef: float
    """weight of |log ratio| at the tokens that kl_cov chooses. Default: 1.0."""
    off_policy_delta: float | None
    """mean log(old / policy) of a sequence from which on its tokens of negative advantage leave the loss;
    none: no mask."""
    tis_mode: str
    """off | token | sequence; weights for rollout/trainer mismatch. Default: 'off'."""
    sapo_tau_pos: float
    """sharpness of the sapo loss's gate, for positive advantages. Default: 1.0."""
    sapo_tau_neg: float
    """and for the others. Default: 1.05."""
    tis_cap: float
    """largest weight of truncated importance sampling. Default: 2.0."""
    tis_mask: bool
    """drop tokens (sequences) above the cap instead of truncating their weight. Default: False."""
    tis_floor: float
    """tis_mask drops those below it too (IcePop); 0 for none. Default: 0.0."""
    answer_loss_weight: float
    """of a model that also draws: of the loss of answers in text. Default: 1.0."""
    drawing_loss_weight: float
    """and of that of images; each is a mean over its own kind. Default: 1.0."""
    mask_truncated: bool
    """answers cut at generate_max_len stay in their group's statistics, not in the loss. Default: False."""
    papo_coef: float
    """weight of PAPO's perception loss: KL between seeing and half-hidden images. Default: 0.0."""
    papo_mask_ratio: float
    """share of image patches that are hidden for it. Default: 0.6."""
    papo_entropy_coef: float
    """weight against the entropy of both policies (double entropy loss). Default: 0.0."""
    teacher_coef: float
    """weight of log teacher - log policy in each token's advantage. Default: 0.0."""
    selective_replay: int
    """samples of a kind kept to replace those without advantage; 0: off. Default: 0."""
    routing_replay: str
    """off | rollout | old; whose choice of experts is used again. Default: 'off'."""
    router_aux_loss_coef: float
    """weight of the loss that balances a mixture's experts. Default: 0.0."""
    overlong_buffer: bool
    """responses near generate_max_len are penalized (DAPO). Default: False."""
    overlong_buffer_len: int
    """tokens before the limit where the penalty begins. Default: 1024."""
    overlong_buffer_penalty_factor: float
    """the penalty at the limit. Default: 1.0."""
    reward_running_norm: bool
    """rewards are divided by their running standard deviation. Default: False."""
    reward_running_norm_minus_mean: bool
    """and their running mean is taken off. Default: False."""
    reward_clip: float
    """0 turns it off; else rewards are clamped into [-reward_clip, reward_clip]. Default: 0.0."""
    advantages_norm: bool
    """advantages of a step get mean 0 and standard deviation 1. Default: False."""
    advantage_clip: float
    """0 turns it off. Default: 0.0."""
    train_batch_size: int
    """samples of an update; 0: all of a rollout. Default: 0."""
    groups_per_update: int | None
    """or: prompts whose samples make an update (verl)."""
    gradient_accumulation_steps: int | None
    """or: micro-batches of a rank that make an update (TRL)."""
    micro_train_batch_size: int
    """samples of one forward and backward on a rank. Default: 8."""
    max_tokens_per_batch: int
    """with packing: fill each micro-batch up to this many tokens instead of by count. Default: 0."""
    packing_samples: bool
    """samples of a micro-batch lie in one sequence without padding. Default: False."""
    share_prefix: bool | None
    """compute a prompt once for its samples; default: where the model is shown to train equally."""
    num_episodes: int
    """passes over the prompt data. Default: 1."""
    max_epochs: int
    """passes over the replay buffer for each rollout. Default: 1."""
    max_steps: int
    """rollout steps; -1: as many as num_episodes gives. Default: -1."""
    actor_learning_rate: float
    """of the policy. Default: 1e-06."""
    vision_learning_rate: float | None
    """of the vision tower; default: actor_learning_rate."""
    projector_learning_rate: float | None
    """of what joins tower and language model; default as above."""
    critic_learning_rate: float
    """of the critic (PPO). Default: 9e-06."""
    lr_warmup_ratio: float
    """share of the steps in which the learning rate rises. Default: 0.03."""
    lr_scheduler: str
    """cosine_with_min_lr | constant_with_warmup | linear. Default: 'cosine_with_min_lr'."""
    adam_betas: Sequence[float]
    """of AdamW. Default: [0.9, 0.95]."""
    l2: float
    """weight decay. Default: 0.0."""
    max_norm: float
    """gradients are clipped to this norm. Default: 1.0."""
    freezing_actor_steps: int
    """PPO: train the critic alone for this many steps first. Default: -1."""
    enable_ema: bool
    """an average of the weights is kept, evaluated and saved. Default: False."""
    ema_beta: float
    """share of the average that each step keeps. Default: 0.992."""
    separate_old_log_probs: bool
    """of a forward pass of their own even in a rollout's first update. Default: False."""
    seed: int
    """of data, sampling and new weights. Default: 42."""
    zero_stage: int
    """0 | 1 | 2 | 3. Default: 2."""
    adam_offload: bool
    """optimizer states lie on the host. Default: False."""
    zpg: int
    """ZeRO++ hierarchical partition size. Default: 1."""
    overlap_comm: bool
    """ZeRO reduces gradients while backward goes on. Default: False."""
    grad_accum_dtype: str | None
    """fp32 | bf16; of the sum over micro-batches; default: fp32 with ZeRO 2 and 3, else as the weights."""
    sp_size: int
    """ranks that train on a micro-batch together, each on a slice of its tokens (Ulysses). Default: 1."""
    deterministic: bool
    """operations that give the same bits each time, where there are such; slower. Default: False."""
    local_rank: int
    """set by the launcher. Default: -1."""
    collective_timeout: float
    """seconds after which a dead or stalled rank ends all ranks. Default: 600.0."""
    placement: str | None
    """colocated | split; colocated: every rank generates and trains in turn; split: rollouts are made by
    workers on Ray, which is the default where resources names devices of the rollouts."""
    visible_devices: Sequence[int] | None
    """those that the run may use; default: all that a launcher left visible."""
    trainer_devices: Sequence[int] | None
    """those that the launcher gave the ranks, which is the default."""
    rollout_devices: Sequence[int] | None
    """default: the others."""
    trainer_num_gpus: int | None
    """ranks; as many as the launcher has to start."""
    rollout_num_gpus: str
    """auto: all others. Default: 'auto'."""
    rollout_num_workers: int | None
    """engines; default: one a GPU of the rollouts, one without GPUs."""
    rollout_num_cpus: float
    """that Ray reserves for each worker. Default: 1.0."""
    weight_transfer: str
    """auto | host | device; how workers get weights: device: from card to card; host: by host memory; auto:
    by card where that can be. Default: 'host'."""
    reward_devices: Sequence[int] | None
    """of this host."""
    reward_num_gpus: float | None
    """that an existing cluster gives to all actors of a reward together."""
    reward_num_workers: int | None
    """actors of each reward; default: one a device, or one."""
    require_cluster: bool
    """refuse to start without RAY_ADDRESS. Default: False."""
    max_staleness: int
    """policy versions that a trained token may be old; 0: rollouts and training one after the other. Default:
    0."""
    batches_ahead: int | None
    """batches that are generated ahead; default: max_staleness."""
    partial_rollouts: bool
    """responses in segments: weights change, and prompts join, while long ones go on. Default: False."""
    partial_tokens: int
    """of a segment. Default: 256."""
    stale_correction: str | None
    """behaviour | none; old log-probs of the loss: behaviour: the engine's, so that these bound the ratio;
    none: the trainer's as of this step, for tis_mode or without any correction. Default: none with a
    tis_mode, else behaviour."""
    watch: bool
    """look at every step's and evaluation's metrics, and warn. Default: True."""
    policy: str
    """warn | stop | rollback; what an alarm does beside warning. Default: 'warn'."""
    gold_recipe: StrPath | None
    """a reward recipe that training never sees; default: of the embedded tasks their own."""
    gold_fn: StrPath | Sequence[StrPath] | None
    """or path.py:function."""
    gold_every: int
    """score the rollouts of every so many steps by gold too; 0: evaluations only. Default: 1."""
    patience: int
    """steps in a row outside before an alarm. Default: 2."""
    keep_best: bool | None
    """keep a checkpoint of the best gold; default: with policy rollback."""
    output_dir: StrPath
    """holds all that a run writes. Default: 'outputs/run'."""
    save_path: StrPath | None
    """the final model; default: <output_dir>/checkpoint-final."""
    ckpt_path: StrPath | None
    """default: <output_dir>."""
    save_steps: int | None
    """-1: none; default: ten times a run, and every 50 steps at least."""
    eval_steps: int | None
    """as save_steps; evaluation always runs before the first step and at the end."""
    logging_steps: int
    """a line on the screen every so many steps; metrics.csv has all. Default: 1."""
    max_ckpt_num: int
    """checkpoints that are kept. Default: 3."""
    async_save: bool
    """write checkpoints while the run goes on, from a copy in host memory. Default: False."""
    load_checkpoint: bool
    """same as resume_from=auto. Default: False."""
    resume_from: StrPath | None
    """a checkpoint folder, or auto."""
    resume_other_model: bool
    """resume although the checkpoint was trained from another model. Default: False."""
    sigterm_exit_code: int
    """of a run that SIGTERM ended after a checkpoint. Default: 143."""
    best_metric: str | None
    """column of eval_metrics.csv by which the best checkpoint is kept."""
    eval_samples_per_prompt: int
    """samples of each evaluated prompt. Default: 4."""
    eval_seed: int | None
    """of what the evaluation draws; default: seed."""
    eval_ema: bool | None
    """evaluate and export the EMA weights; default: with enable_ema."""
    use_wandb: bool
    """metrics go to Weights & Biases too. Default: False."""
    use_tensorboard: bool
    """metrics go to TensorBoard too. Default: False."""
    save_trajectories: bool
    """rollouts are written to rollouts/. Default: True."""
    num_trajectories_to_save: int
    """rollouts of a step that are written. Default: 8."""
    report: bool
    """report.html at the end. Default: True."""
    run_name: str | None
    """in logs and the report; default: the folder's."""
    plan_device: str | None
    """what --dry_run plans for, such as h100-80gb; default: the device of this machine."""
    plan_world_size: int | None
    """ranks of that plan; default: the trainer's, else a host of the device."""
    plan: str
    """warn | refuse | force; A run that does not fit by its plan: warn, and refuse it where weights,
    gradients and states alone do not fit; refuse it; or force its start.. Default: 'warn'."""
    auto_micro_batches: bool | None
    """Micro-batches as large as the plan has room for; what is given is the least. Default: on an
    accelerator.."""
    plugins: StrPath | Sequence[StrPath] | None
    """files or modules that add choices of your own, imported first; comma-separated."""
    lr: float
    """actor_learning_rate."""
    learning_rate: float
    """actor_learning_rate."""
    num_train_epochs: int
    """num_episodes."""
    lr_scheduler_type: str
    """lr_scheduler."""
    warmup_ratio: float
    """lr_warmup_ratio."""
    weight_decay: float
    """l2."""
    max_grad_norm: float
    """max_norm."""
    loss: str
    """policy_loss."""
    entropy_loss_coef: float
    """entropy_coef."""
    vllm_mem_util: float
    """engine_mem_util."""
    vllm_enable_sleep: bool
    """enable_engine_sleep."""
    vllm_kv_cache_dtype: str
    """engine_kv_cache_dtype."""
    save_dir: StrPath
    """output_dir."""
    resume: bool
    """load_checkpoint."""
    per_device_train_batch_size: int
    """micro_train_batch_size."""
    environment_factory: Code | None
    """environment."""

class DiffusionSettings(TypedDict, total=False):
    pretrain: StrPath
    """hub name, checkpoint folder, or embedded: the tiny model built here. Default: 'embedded'."""
    teacher_pretrain: StrPath | None
    """of diffusion_opd: a pipeline of the same family, or LoRA weights of this one."""
    tokenizer_path: StrPath | None
    """of the text encoder; only for a .json file of parts."""
    family: str
    """auto | sd3 | flux | flux_kontext | flux2_klein | flux2 | wan | wan_i2v | hunyuan_video15 | ltx2 |
    z_image | qwen_image | qwen_image21 | qwen_image_edit | qwen_image_edit_plus | cosmos_predict2 | sd15;
    checked against the pipeline's class; auto takes what the pipeline is. Default: 'auto'."""
    bf16: bool
    """weights and forwards in bfloat16; optimizer states in float32. Default: False."""
    lora_rank: int
    """0 trains all weights. Default: 32."""
    lora_alpha: int
    """adapters are scaled by lora_alpha / lora_rank. Default: 64."""
    target_modules: str | Sequence[str] | None
    """comma-separated module suffixes; default: the attention projections."""
    trainable_models: str | Sequence[str] | None
    """comma-separated denoisers (transformer, transformer_2); default: all."""
    max_sequence_length: int | None
    """tokens of the T5 or LLM encoder; default: the family's own."""
    gradient_checkpointing: bool | str
    """none | attention | full | auto; what of blocks runs again in backward; auto: by the plan, on a card.
    Default: 'auto'."""
    compile: bool
    """torch.compile of the denoisers' blocks: slower to start, faster steps. Default: False."""
    vae_tiling: bool
    """decode large images in overlapping tiles: less memory, blended at the seams. Default: False."""
    use_gradient_checkpointing_offload: bool
    """keep checkpointed activations in host memory; checkpoints too. Default: False."""
    num_steps: int | None
    """default: 10, reward_fl 8, ddpo and dpok 50."""
    eval_num_steps: int
    """denoising steps in evaluation. Default: 40."""
    scheduler: str
    """model_default | flow_match_euler | flow_match_euler_stock. Default: 'model_default'."""
    trajectory: str | None
    """ode | sde | sde_reflow | dance | cps; default: the algorithm's."""
    flow_shift: float | None
    """of the scheduler's own schedule; timesteps and sigmas are taken as they are."""
    timesteps: Sequence[float] | None
    """1000..0, instead of the scheduler's; num_steps becomes their number."""
    sigmas: Sequence[float] | None
    """1..0, likewise."""
    noise_level: float | None
    """default: 0.7, dance_grpo 0.3, ddpo and dpok 1; sde_reflow has none."""
    sde_window_size: int | None
    """this many stochastic steps, the rest by ODE; default: 0, no window; mix_grpo 4, temp_flow_grpo 1."""
    sde_window_move: str | None
    """random | anywhere | slide | cycle; default: random, mix_grpo slide, temp_flow_grpo anywhere."""
    sde_window_interval: int
    """slide, cycle: policy steps between moves. Default: 25."""
    sde_window_stride: int
    """slide, cycle: denoising steps of a move. Default: 1."""
    sde_window_range: Sequence[int] | None
    """first step and end of the steps it lies in; default: 0 and num_steps/2."""
    log_prob: str
    """mean | sum; over latent dimensions. Default: 'mean'."""
    same_latent: bool | None
    """all samples of a prompt start from the same noise; default: temp_flow_grpo only."""
    guidance_scale: float
    """of classifier-free guidance; 1: none. Default: 4.5."""
    guidance_scale_2: float | None
    """of Wan 2.2's low-noise expert; default: guidance_scale."""
    negative_prompt: str
    """for guidance. Default: ''."""
    height: int
    """pixels. Default: 512."""
    width: int
    """pixels. Default: 512."""
    num_frames: int
    """above 1: videos. Default: 1."""
    frame_rate: float | None
    """frames a second of LTX-2's videos, which move by it; default: 24."""
    source_pixels: int | None
    """area that images to edit are scaled to; default: the pipeline's 1024^2."""
    rollout_batch_size: int
    """prompts a step, over all ranks. Default: 8."""
    n_samples_per_prompt: int | None
    """default: 24, reward_fl and diffusion_opd 1, of pair_data 2."""
    micro_rollout_batch_size: int
    """samples a forward, per rank. Default: 8."""
    cuda_graphs: bool
    """graphs of the denoisers' forwards in rollouts and evaluations: for small images, which the host is slow
    with. Default: False."""
    prompt_data: Any
    """embedded, a file, a folder or a hub name; several by commas. Default: 'embedded'."""
    prompt_split: str
    """split of a data set of the hub, or file of a folder. Default: 'train'."""
    eval_data: Any | None
    """default: the embedded held-out prompts when prompt_data is embedded."""
    eval_split: str
    """the same for evaluation. Default: 'test'."""
    max_samples: int
    """at most so many prompts of each data set are read. Default: 100000000."""
    max_eval_samples: int
    """at most so many of each data set are evaluated. Default: 96."""
    input_key: str
    """column of the prompt. Default: 'prompt'."""
    reference_key: str
    """column of the right answer, for rewards. Default: 'reference'."""
    label_key: str
    """column that names the recipe of a sample's rewards. Default: 'label'."""
    image_root: StrPath | None
    """folder that relative image paths start from; default: the data file's folder."""
    on_bad_row: str
    """error | skip; skipped rows are counted by cause and listed in bad_rows.jsonl. Default: 'error'."""
    max_bad_share: float
    """a larger share of skipped rows ends the run. Default: 0.05."""
    pair_data: Any | None
    """pairs of images for offline diffusion_dpo, in the place of prompts and rollouts."""
    chosen_key: str
    """columns of the pair's images; Pick-a-Pic's are known. Default: 'chosen'."""
    rejected_key: str
    """column of the image that was not preferred. Default: 'rejected'."""
    image_key: str
    """first frame of image-to-video models, images to edit; else `images`, `image`. Default: 'input_image'."""
    reward_fn: StrPath | Sequence[StrPath] | None
    """path.py:function, or several, comma-separated."""
    reward_form: str
    """auto | native | a system of docs/coming_from.md: how functions by path are called. Default: 'auto'."""
    reward_pretrain: StrPath | Sequence[StrPath] | None
    """local reward model folders, comma-separated, each optionally name=folder."""
    remote_rm_url: StrPath | Sequence[StrPath] | None
    """URLs, comma-separated, or path.py with reward_func."""
    components: dict[str, float]
    """{name: weight}, laid over reward_recipe. Default: {}."""
    kwargs: dict[str, Any]
    """{component: {setting: value}}. Default: {}."""
    reward_recipe: StrPath | None
    """YAML or JSON file, or inline YAML: {label: [[type, key, weight], ...]}."""
    reward_wire: str
    """JSON form of remote_rm_url: auto | lightrft | openrlhf for all, a list in the order of the URLs, or
    url=wire,.... Default: 'auto'."""
    reward_probe: bool
    """ask every function and URL once, with a sample of the data, before any model loads. Default: True."""
    reward_timeout: float
    """deadline of one remote call, seconds, retries included. Default: 60.0."""
    reward_retries: int
    """on connection errors, 429 and 5xx only. Default: 3."""
    reward_concurrency: int
    """remote requests in flight at once. Default: 32."""
    on_reward_error: str
    """error | skip; skip: samples that a function raises on, or scores badly, become invalid. Default:
    'error'."""
    reward_max_invalid: float
    """share of invalid scores in one step above which the run stops. Default: 0.5."""
    reward_token_env: str | None
    """environment variable that holds the bearer token of remote rewards."""
    reward_image_format: str
    """png | jpeg; png is lossless. Default: 'png'."""
    reward_fn_timeout: float | None
    """run user callables in a subprocess with this limit, seconds."""
    reward_transport: str
    """inprocess | ray; where local scorers run. Default: 'inprocess'."""
    reward_cpu_offload: bool
    """keep local reward models off the accelerator between uses. Default: True."""
    diffusion_algorithm: str
    """flow_grpo | dance_grpo | mix_grpo | flow_dppo | temp_flow_grpo | diffusion_nft | ddpo | dpok | awm |
    dgpo | crd | diffusion_dpo | rwr | diffusion_opd | reward_fl. Default: 'flow_grpo'."""
    clip_range: float | None
    """default: 1e-4, awm 1."""
    adv_clip_max: float
    """advantages are clamped to ±this; 0 turns the clamp off. Default: 5.0."""
    global_std: bool
    """divide by the std of all rewards instead of the group's. Default: False."""
    gdpo: bool
    """normalise each reward in its group, then sum by weight, then over the batch (2601.05242). Default:
    False."""
    beta: float | None
    """weight of the KL to the base; not of diffusion_nft; default: 0, dpok 0.01."""
    kl_form: str
    """full | published; full: s² holds |dt|; published (sde, dance): not. Default: 'full'."""
    timestep_fraction: float
    """share of the stochastic steps to train on. Default: 1.0."""
    timestep_choice: str | None
    """first | random; which: the first, or each sample's own; default: random for dance_grpo and losses on
    finished samples."""
    cfg_in_training: bool
    """guide the training forward as the rollout was. Default: True."""
    detach_guidance: bool
    """no gradient through the unguided branch, as in Flow-GRPO's code. Default: False."""
    grpo_guard: bool
    """arXiv 2510.22319. Default: False."""
    nft_beta: float
    """how far the implicit policies lie from the old one. Default: 1.0."""
    nft_kl_beta: float
    """weight of the divergence from the reference. Default: 0.0001."""
    decay_type: int | None
    """0 | 1 | 2 | 3; old policy's; default 1, awm, dgpo, diffusion_dpo 3."""
    decay_counts: str
    """updates | rollouts; n of the decay: its code's, or steps. Default: 'updates'."""
    adv_mode: str
    """all | positive_only | negative_only | one_only | binary. Default: 'all'."""
    awm_weighting: str
    """uniform | time | time_squared | huber; of the error of each timestep. Default: 'huber'."""
    awm_power: float
    """of huber. Default: 0.25."""
    old_beta: float
    """AWM: weight of the distance to the rollout policy's velocity. Default: 1.0."""
    crd_beta: float
    """what the implicit reward of crd is multiplied by. Default: 1.0."""
    rwr_temperature: float
    """a sample's weight is exp(A / this). Default: 1.0."""
    dppo_threshold: float
    """flow_dppo: KL to the rollout policy from which on a step may be masked. Default: 1e-05."""
    dpo_beta: float | None
    """sharpness of the preference; default: dgpo 100, diffusion_dpo 5000."""
    dpo_reference: str
    """base | old; what errors are compared with; old: of the rollouts. Default: 'base'."""
    min_sigma: float | None
    """finished samples: least noise; default: 0, dgpo 0.3."""
    mid_timestep: int
    """Reward FL: first step with gradient. Default: 4."""
    final_timestep: int
    """Reward FL: last step, from which the data is predicted. Default: 7."""
    min_timestep_boundary: float
    """Reward FL: shares of the schedule's 1,000 timesteps, from noise on; the. Default: 0.0."""
    max_timestep_boundary: float
    """expert that serves those in between is the one that trains. Default: 1.0."""
    reward_fl_weight: float
    """of the reward in the loss. Default: 1.0."""
    score_mean: float
    """taken off scores. Default: 0.0."""
    score_std: float
    """scores are divided by it. Default: 1.0."""
    score_target: float | None
    """Reward FL: images that reach this score have no gradient, as in ReFL's hinge."""
    differentiable_reward: StrPath | None
    """Of Reward FL: shape_match (the default with the embedded prompts), face_similarity, or
    path.py:function.."""
    differentiable_kwargs: dict[str, Any]
    """settings of a named one, {setting: value}. Default: {}."""
    train_batch_size: int | None
    """samples of an update, over all ranks; 0: all of a rollout; default: 96 (reward_fl 8), or all where that
    is no part."""
    groups_per_update: int | None
    """or: prompts whose samples make an update (VRL)."""
    gradient_accumulation_steps: int | None
    """or: micro-batches of a rank that make an update (ROLL)."""
    micro_train_batch_size: int
    """samples of one forward and backward on a rank. Default: 8."""
    steps_per_forward: int
    """denoising steps of a micro-batch in one forward; memory grows with it. Default: 1."""
    rollout_graph_gib: float
    """graphs of the rollout's forwards that are kept for its only update, per rank, in place of a replay;
    larger ones are not kept, 0 keeps none. Default: 1.0."""
    max_epochs: int
    """rounds of updates over the samples of a step. Default: 1."""
    num_episodes: int
    """as many steps as so many passes over the prompts take; each draws its own at random. Default: 1."""
    max_steps: int
    """-1: as many as num_episodes asks for. Default: -1."""
    learning_rate: float | None
    """default: 3e-4, reward_fl 2.5e-6."""
    warmup_steps: int | None
    """default: 0, reward_fl 10."""
    lr_scheduler_type: str
    """constant | cosine | linear. Default: 'constant'."""
    adam_betas: Sequence[float]
    """of AdamW. Default: [0.9, 0.999]."""
    l2: float
    """weight decay. Default: 0.0001."""
    max_norm: float
    """gradients are clipped to this norm. Default: 1.0."""
    enable_ema: bool
    """an average of the weights is kept, evaluated and saved. Default: False."""
    ema_beta: float
    """share of the average that each step keeps. Default: 0.9."""
    ema_interval: int
    """optimizer steps between EMA updates. Default: 8."""
    seed: int
    """of data, sampling and new weights. Default: 42."""
    zero_stage: int
    """0 | 1 | 2 | 3. Default: 2."""
    adam_offload: bool
    """optimizer states lie on the host. Default: False."""
    zpg: int
    """ZeRO++ hierarchical partition size. Default: 1."""
    overlap_comm: bool
    """ZeRO reduces gradients while backward goes on. Default: False."""
    grad_accum_dtype: str | None
    """fp32 | bf16; of the sum over micro-batches; default: fp32 with ZeRO 2 and 3, else as the weights."""
    sp_size: int
    """ranks that train on a micro-batch together, each on a slice of its tokens (Ulysses). Default: 1."""
    deterministic: bool
    """operations that give the same bits each time, where there are such; slower. Default: False."""
    local_rank: int
    """set by the launcher. Default: -1."""
    collective_timeout: float
    """seconds after which a dead or stalled rank ends all ranks. Default: 600.0."""
    placement: str | None
    """colocated | split; colocated: every rank generates and trains in turn; split: rollouts are made by
    workers on Ray, which is the default where resources names devices of the rollouts."""
    visible_devices: Sequence[int] | None
    """those that the run may use; default: all that a launcher left visible."""
    trainer_devices: Sequence[int] | None
    """those that the launcher gave the ranks, which is the default."""
    rollout_devices: Sequence[int] | None
    """default: the others."""
    trainer_num_gpus: int | None
    """ranks; as many as the launcher has to start."""
    rollout_num_gpus: str
    """auto: all others. Default: 'auto'."""
    rollout_num_workers: int | None
    """engines; default: one a GPU of the rollouts, one without GPUs."""
    rollout_num_cpus: float
    """that Ray reserves for each worker. Default: 1.0."""
    weight_transfer: str
    """auto | host | device; how workers get weights: device: from card to card; host: by host memory; auto:
    by card where that can be. Default: 'host'."""
    reward_devices: Sequence[int] | None
    """of this host."""
    reward_num_gpus: float | None
    """that an existing cluster gives to all actors of a reward together."""
    reward_num_workers: int | None
    """actors of each reward; default: one a device, or one."""
    require_cluster: bool
    """refuse to start without RAY_ADDRESS. Default: False."""
    max_staleness: int
    """policy versions that a trained token may be old; 0: rollouts and training one after the other. Default:
    0."""
    batches_ahead: int | None
    """batches that are generated ahead; default: max_staleness."""
    partial_rollouts: bool
    """responses in segments: weights change, and prompts join, while long ones go on. Default: False."""
    partial_tokens: int
    """of a segment. Default: 256."""
    stale_correction: str | None
    """behaviour | none; old log-probs of the loss: behaviour: the engine's, so that these bound the ratio;
    none: the trainer's as of this step, for tis_mode or without any correction. Default: none with a
    tis_mode, else behaviour."""
    watch: bool
    """look at every step's and evaluation's metrics, and warn. Default: True."""
    policy: str
    """warn | stop | rollback; what an alarm does beside warning. Default: 'warn'."""
    gold_recipe: StrPath | None
    """a reward recipe that training never sees; default: of the embedded tasks their own."""
    gold_fn: StrPath | Sequence[StrPath] | None
    """or path.py:function."""
    gold_every: int
    """score the rollouts of every so many steps by gold too; 0: evaluations only. Default: 1."""
    patience: int
    """steps in a row outside before an alarm. Default: 2."""
    keep_best: bool | None
    """keep a checkpoint of the best gold; default: with policy rollback."""
    output_dir: StrPath
    """holds all that a run writes. Default: 'outputs/run'."""
    save_path: StrPath | None
    """the final model; default: <output_dir>/checkpoint-final."""
    ckpt_path: StrPath | None
    """default: <output_dir>."""
    save_steps: int | None
    """-1: none; default: ten times a run, and every 50 steps at least."""
    eval_steps: int | None
    """as save_steps; evaluation always runs before the first step and at the end."""
    logging_steps: int
    """a line on the screen every so many steps; metrics.csv has all. Default: 1."""
    max_ckpt_num: int
    """checkpoints that are kept. Default: 3."""
    async_save: bool
    """write checkpoints while the run goes on, from a copy in host memory. Default: False."""
    load_checkpoint: bool
    """same as resume_from=auto. Default: False."""
    resume_from: StrPath | None
    """a checkpoint folder, or auto."""
    resume_other_model: bool
    """resume although the checkpoint was trained from another model. Default: False."""
    sigterm_exit_code: int
    """of a run that SIGTERM ended after a checkpoint. Default: 143."""
    best_metric: str | None
    """column of eval_metrics.csv by which the best checkpoint is kept."""
    eval_samples_per_prompt: int
    """samples of each evaluated prompt. Default: 4."""
    eval_seed: int | None
    """of what the evaluation draws; default: seed."""
    eval_ema: bool | None
    """evaluate and export the EMA weights; default: with enable_ema."""
    use_wandb: bool
    """metrics go to Weights & Biases too. Default: False."""
    use_tensorboard: bool
    """metrics go to TensorBoard too. Default: False."""
    save_trajectories: bool
    """rollouts are written to rollouts/. Default: True."""
    num_trajectories_to_save: int
    """rollouts of a step that are written. Default: 8."""
    report: bool
    """report.html at the end. Default: True."""
    run_name: str | None
    """in logs and the report; default: the folder's."""
    plan_device: str | None
    """what --dry_run plans for, such as h100-80gb; default: the device of this machine."""
    plan_world_size: int | None
    """ranks of that plan; default: the trainer's, else a host of the device."""
    plan: str
    """warn | refuse | force; A run that does not fit by its plan: warn, and refuse it where weights,
    gradients and states alone do not fit; refuse it; or force its start.. Default: 'warn'."""
    auto_micro_batches: bool | None
    """Micro-batches as large as the plan has room for; what is given is the least. Default: on an
    accelerator.."""
    plugins: StrPath | Sequence[StrPath] | None
    """files or modules that add choices of your own, imported first; comma-separated."""
    lr: float | None
    """learning_rate."""
    num_train_epochs: int
    """max_epochs."""
    lr_warmup_steps: int | None
    """warmup_steps."""
    weight_decay: float
    """l2."""
    max_grad_norm: float
    """max_norm."""
    save_dir: StrPath
    """output_dir."""
    resume: bool
    """load_checkpoint."""
    images_key: str
    """image_key."""
    num_inference_steps: int | None
    """num_steps."""
    per_device_train_batch_size: int
    """micro_train_batch_size."""

class SFTSettings(TypedDict, total=False):
    pretrain: StrPath
    """hub name, checkpoint folder, or embedded: the tiny model built here. Default: 'embedded'."""
    bf16: bool
    """weights and forwards in bfloat16; optimizer states in float32. Default: False."""
    attn_implementation: str
    """auto | sdpa | eager | flash_attention_2 | flash_attention_3. Default: 'auto'."""
    use_liger_kernel: bool
    """Liger's Triton kernels for norms, gated MLPs and rotary positions: fewer a step. Default: False."""
    gradient_checkpointing: bool | str
    """none | attention | full | auto; what of blocks runs again in backward; auto: by the plan, on a card.
    Default: 'auto'."""
    freeze_prefix: str | Sequence[str]
    """comma-separated parameter prefixes; 'true' is the vision tower, Qwen's merger in it. Default: ''."""
    lora_rank: int
    """0 trains all weights. Default: 0."""
    lora_alpha: int
    """adapters are scaled by lora_alpha / lora_rank. Default: 16."""
    lora_dropout: float
    """share of the adapters' inputs that training drops. Default: 0.0."""
    target_modules: str | Sequence[str]
    """or a comma-separated list of module names. Default: 'all-linear'."""
    target_parameters: str | Sequence[str]
    """LoRA on experts: comma-separated, such as experts.gate_up_proj,experts.down_proj. Default: ''."""
    trust_remote_code: bool
    """run Python files that come with the checkpoint. Default: False."""
    embedded_family: str
    """qwen2_vl | qwen2_5_vl | qwen3_vl | internvl | qwen2 | janus; qwen2 reads text only; janus also draws,
    by engine hf. Default: 'qwen2_5_vl'."""
    prompt_data: Any
    """embedded, a file, a folder or a hub name; several by commas. Default: 'embedded'."""
    prompt_split: str
    """split of a data set of the hub, or file of a folder. Default: 'train'."""
    eval_data: Any | None
    """default: the embedded held-out prompts when prompt_data is embedded."""
    eval_split: str
    """the same for evaluation. Default: 'test'."""
    max_samples: int
    """at most so many prompts of each data set are read. Default: 100000000."""
    max_eval_samples: int
    """at most so many of each data set are evaluated. Default: 500."""
    input_key: str
    """column of the prompt. Default: 'prompt'."""
    reference_key: str
    """column of the right answer, for rewards. Default: 'reference'."""
    image_root: StrPath | None
    """folder that relative image paths start from; default: the data file's folder."""
    on_bad_row: str
    """error | skip; skipped rows are counted by cause and listed in bad_rows.jsonl. Default: 'error'."""
    max_bad_share: float
    """a larger share of skipped rows ends the run. Default: 0.05."""
    prompt_data_probs: str | Sequence[float] | None
    """comma-separated mixing probabilities, one per data set."""
    prompt_mixing: str
    """shuffled | even | turns; each batch of rows in any order, with an even share of every data set, or of
    one data set in turns. Default: 'shuffled'."""
    images_key: str
    """empty: no images are read. Default: 'images'."""
    videos_key: str
    """empty: no videos are read. Default: 'videos'."""
    apply_chat_template: bool
    """prompts are messages of the model's chat template. Default: True."""
    chat_template_kwargs: dict[str, Any]
    """what it reads besides, such as enable_thinking. Default: {}."""
    system_prompt: str | None
    """put before each prompt that has none."""
    data_format: str
    """auto | plain | verl | completion | conversations | messages | question | input_label | geometry3k; of
    the rows, see docs/coming_from.md. Default: 'auto'."""
    on_long_prompt: str
    """error | skip. Default: 'error'."""
    allow_remote_media: bool
    """fetch http(s) images named in rows; private addresses stay refused. Default: False."""
    max_image_pixels: int
    """refused before decoding. Default: 50000000."""
    min_pixels: int | None
    """passed to the image processor: images are resized into [min, max] pixels."""
    max_pixels: int | None
    """larger images are made smaller; default: the processor's."""
    response_key: str
    """column of what is to be answered; rows without it: their reference. Default: 'response'."""
    prompt_max_len: int
    """images expanded. Default: 1024."""
    generate_max_len: int
    """of the response, its end token included. Default: 1024."""
    train_batch_size: int
    """samples of an update. Default: 32."""
    gradient_accumulation_steps: int | None
    """or: micro-batches of a rank that make an update (TRL)."""
    micro_train_batch_size: int
    """samples of one forward and backward on a rank. Default: 8."""
    max_tokens_per_batch: int
    """with packing: fill each micro-batch up to this many tokens instead of by count. Default: 0."""
    packing_samples: bool
    """samples of a micro-batch lie in one sequence without padding. Default: False."""
    num_episodes: int
    """passes over the prompt data. Default: 1."""
    max_steps: int
    """optimizer steps; -1: as many as num_episodes gives. Default: -1."""
    actor_learning_rate: float
    """of the policy. Default: 1e-05."""
    vision_learning_rate: float | None
    """of the vision tower; default: actor_learning_rate."""
    projector_learning_rate: float | None
    """of what joins tower and language model; default as above."""
    lr_warmup_ratio: float
    """share of the steps in which the learning rate rises. Default: 0.03."""
    lr_scheduler: str
    """cosine_with_min_lr | constant_with_warmup | linear. Default: 'cosine_with_min_lr'."""
    adam_betas: Sequence[float]
    """of AdamW. Default: [0.9, 0.95]."""
    l2: float
    """weight decay. Default: 0.0."""
    max_norm: float
    """gradients are clipped to this norm. Default: 1.0."""
    seed: int
    """of data, sampling and new weights. Default: 42."""
    zero_stage: int
    """0 | 1 | 2 | 3. Default: 2."""
    adam_offload: bool
    """optimizer states lie on the host. Default: False."""
    zpg: int
    """ZeRO++ hierarchical partition size. Default: 1."""
    overlap_comm: bool
    """ZeRO reduces gradients while backward goes on. Default: False."""
    grad_accum_dtype: str | None
    """fp32 | bf16; of the sum over micro-batches; default: fp32 with ZeRO 2 and 3, else as the weights."""
    deterministic: bool
    """operations that give the same bits each time, where there are such; slower. Default: False."""
    local_rank: int
    """set by the launcher. Default: -1."""
    collective_timeout: float
    """seconds after which a dead or stalled rank ends all ranks. Default: 600.0."""
    output_dir: StrPath
    """holds all that a run writes. Default: 'outputs/run'."""
    save_path: StrPath | None
    """the final model; default: <output_dir>/checkpoint-final."""
    ckpt_path: StrPath | None
    """default: <output_dir>."""
    save_steps: int | None
    """-1: none; default: ten times a run, and every 50 steps at least."""
    eval_steps: int | None
    """as save_steps; evaluation always runs before the first step and at the end."""
    logging_steps: int
    """a line on the screen every so many steps; metrics.csv has all. Default: 1."""
    max_ckpt_num: int
    """checkpoints that are kept. Default: 3."""
    async_save: bool
    """write checkpoints while the run goes on, from a copy in host memory. Default: False."""
    load_checkpoint: bool
    """same as resume_from=auto. Default: False."""
    resume_from: StrPath | None
    """a checkpoint folder, or auto."""
    resume_other_model: bool
    """resume although the checkpoint was trained from another model. Default: False."""
    sigterm_exit_code: int
    """of a run that SIGTERM ended after a checkpoint. Default: 143."""
    best_metric: str | None
    """column of eval_metrics.csv by which the best checkpoint is kept."""
    use_wandb: bool
    """metrics go to Weights & Biases too. Default: False."""
    use_tensorboard: bool
    """metrics go to TensorBoard too. Default: False."""
    report: bool
    """report.html at the end. Default: True."""
    run_name: str | None
    """in logs and the report; default: the folder's."""
    plugins: StrPath | Sequence[StrPath] | None
    """files or modules that add choices of your own, imported first; comma-separated."""
    lr: float
    """actor_learning_rate."""
    learning_rate: float
    """actor_learning_rate."""
    num_train_epochs: int
    """num_episodes."""
    lr_scheduler_type: str
    """lr_scheduler."""
    warmup_ratio: float
    """lr_warmup_ratio."""
    weight_decay: float
    """l2."""
    max_grad_norm: float
    """max_norm."""
    save_dir: StrPath
    """output_dir."""
    resume: bool
    """load_checkpoint."""
    per_device_train_batch_size: int
    """micro_train_batch_size."""
