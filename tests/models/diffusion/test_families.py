"""Every family, tiny: rollout, ratio 1 on the first pass, one update, decode, LoRA into the stock pipeline."""

import json
from contextlib import nullcontext
from functools import partial

import pytest
import tiny_families
import torch
from equality import with_adapters
from PIL import Image
from simulated.recorded_graphs import Recording
from tiny_families import after_a_step, pipeline_of
from watched import Operations

from lightrft_visual.algorithms.diffusion.context import LossContext
from lightrft_visual.algorithms.diffusion.denoising_batch import experience_of, samples_at, trainable_steps
from lightrft_visual.algorithms.diffusion.flow_grpo import FlowGRPO
from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.diffusion_sampling import DiffusionBatch, NoiseConfig, SamplingConfig, SamplingResult
from lightrft_visual.experience.items import make_experience_batch, split_experience_batch
from lightrft_visual.experience.vision import separate, stacked
from lightrft_visual.models.diffusion import forward_graphs
from lightrft_visual.models.diffusion.families import qwen_image
from lightrft_visual.models.diffusion.families.base import by_kind, fuse_lora, join_lora, pack
from lightrft_visual.models.diffusion.families.cosmos import CosmosPredict2
from lightrft_visual.models.diffusion.families.flux2 import Flux2, Flux2Klein
from lightrft_visual.models.diffusion.families.qwen_image21 import QwenImage21
from lightrft_visual.models.diffusion.families.qwen_image_edit import QwenImageEdit
from lightrft_visual.models.diffusion.families.sd15 import StableDiffusion15
from lightrft_visual.models.diffusion.forward_graphs import on_graphs
from lightrft_visual.models.diffusion.opening import adapter_of, family_of
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, LoraSettings, repeated_blocks
from lightrft_visual.rollout.diffusion_sampler import DiffusionSampler, euler_step, sample_generators
from lightrft_visual.runtime import collectives

SOURCE_PIXELS = 64 * 64
PROMPTS = ["a red circle", "a blue cross on a green square"]  # of different lengths
IMAGE, VIDEO = (32, 32, 1), (32, 32, 5)
# family: size in pixels and frames, guidance; others: an image, guided by 3
CASES = {name: (IMAGE, 3.0) for name in tiny_families.FAMILIES if name != "ltx23"} | {
    **{name: (VIDEO, 3.0) for name in ("wan", "wan_i2v", "wan_two_experts", "hunyuan_video15")},
    "sd3": (IMAGE, 4.5),
    **{name: (IMAGE, 3.5) for name in ("flux", "flux_kontext", "flux2")},
    "ltx2": ((64, 96, 17), 3.0),
    "qwen_image21": ((64, 64, 1), 3.0),
}
VIDEOS = ("wan", "wan_i2v", "wan_two_experts", "hunyuan_video15", "ltx2")
OF_THEIR_OWN = ("qwen_image21", "qwen_image_edit", "qwen_image_edit_plus", "sd15")
TEXT_LENGTHS = {"hunyuan_video15": 400, "ltx2": 32, "ltx23": 32} | dict.fromkeys(OF_THEIR_OWN)  # others: 5


def policy_of(name, lora=2, length=0):
    family = family_of(pipeline_of(name), length or TEXT_LENGTHS.get(name, 5))
    family.source_pixels = SOURCE_PIXELS
    family.guidance_scale_2 = 2.0 if name == "wan_two_experts" else None
    return DiffusionPolicy(family, LoraSettings(rank=lora, alpha=4))


@pytest.mark.parametrize("name", CASES)
def test_every_block_that_attends_has_adapters(name):
    """Also those that name their projections otherwise than others of the same network."""
    for denoiser in policy_of(name).denoisers.values():
        blocks = [each for each in repeated_blocks(denoiser) if "att" in str([*dict(each.named_modules())])]
        without = [
            type(block).__name__ for block in blocks if not any("lora_" in n for n, _ in block.named_parameters())
        ]
        assert blocks and not without
        half = [
            name
            for name, each in denoiser.named_modules()
            if type(getattr(each, "to_out", None)) is torch.nn.Linear and "lora_" in str([*each.state_dict()])
        ]
        assert not half


def test_a_text_length_where_the_model_has_its_own_is_refused():
    config = DiffusionRunConfig()
    config.model.max_sequence_length, config.algorithm.diffusion_algorithm = 5, "ddpo"
    with pytest.raises(ConfigError, match="this model reads 77 tokens: leave max_sequence_length out"):
        StableDiffusion15.check(config)
    assert policy_of("sd15", length=5).family.text_length == 77  # a folder of before may have any
    config.algorithm.diffusion_algorithm = "flow_grpo"
    with pytest.raises(ConfigError, match="this model reads texts of any length"):
        QwenImageEdit.check(config)


def test_flow_match_euler_shifts_as_the_pipeline_does_for_this_number_of_steps():
    policy = policy_of("flux2")
    shape = policy.family.latent_shape(*IMAGE)
    own, plain = (
        DiffusionSampler(SamplingConfig(num_steps=4, scheduler=name)).schedule(policy, shape)[1]
        for name in ("model_default", "flow_match_euler")
    )
    torch.testing.assert_close(own, plain)


def test_texts_that_are_longer_than_what_the_encoder_reads_are_said_once(caplog):
    policy = policy_of("wan")
    policy.encode_prompts(["a"])
    assert not caplog.messages
    for _ in range(2):
        policy.encode_prompts(PROMPTS)
    assert [text for text in caplog.messages if text.endswith("of which the model reads 5 (max_sequence_length)")]
    assert len(caplog.messages) == 1


def stock_of(name):
    pipeline = pipeline_of(name)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def shared_of(policy, name):
    """What samples refer to, for models that edit: source images of both prompts, in one size or in two."""
    if not policy.family.most_source_images:
        return None
    red, blue = Image.new("RGB", (40, 40), "red"), Image.new("RGB", (80, 20), "blue")
    return policy.encode_edits(PROMPTS, [[red], [red, blue] if name.endswith("plus") else [blue]], "")


def conditions_of(policy, name, negative=""):
    if (shared := shared_of(policy, name)) is not None:
        return stacked(shared, policy.device)
    conditions = policy.encode_prompts(PROMPTS, negative if policy.family.uses_negative else None)
    if policy.family.takes_first_frame:
        frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "blue")]
        conditions |= stacked(policy.encode_first_frames(frames, *CASES[name][0]), policy.device)
    return conditions


def latents_of(policy, conditions, start, guidance, **sampling):
    """What the sampler makes of given noise."""
    batch = DiffusionBatch(conditions, start.shape[1:], len(start), guidance, start)
    return DiffusionSampler(SamplingConfig(**sampling)).sample(policy, batch, generator=torch.Generator()).latents


def velocities(model, latents, timesteps, conditions, guidance=1.0):
    with torch.no_grad():
        return model.velocity(latents, torch.as_tensor(timesteps).expand(len(latents)), conditions, guidance)


def rollout(policy, name):
    size, guidance = CASES[name]
    conditions = conditions_of(policy, name)
    batch = DiffusionBatch(conditions, policy.latent_shape(*size), 2, guidance)
    sampler = DiffusionSampler(SamplingConfig(4, trajectory="sde"), NoiseConfig(noise_level=0.5))
    result = sampler.sample(policy, batch, generator=sample_generators(0, 0, range(2)))
    ids, shared = torch.arange(2), shared_of(policy, name)
    own = conditions if shared is None else {}
    return sampler, guidance, result, experience_of(result, own, group_id=ids, sample_id=ids, shared=shared)


@pytest.mark.parametrize("name", ["sd15", "qwen_image", "z_image"])
def test_attention_that_is_kept_does_not_run_in_backward_and_changes_nothing(name):
    policy, (size, guidance), found = with_adapters(policy_of(name)), CASES[name], []
    latents, times = torch.randn(2, *policy.latent_shape(*size)), torch.tensor([950.0, 300.0])
    conditions = conditions_of(policy, name)
    policy.train()
    for how in ("none", "attention"):
        if how == "attention":
            policy.enable_gradient_checkpointing(how=how)
        policy.zero_grad()
        with Operations() as calls:
            velocity = policy(latents, times, conditions, guidance)
            before = calls.attentions
            velocity.square().mean().backward()
        assert calls.attentions == before > 0
        found.append((velocity.detach(), [weight.grad for weight in policy.trainable_parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_forward_gives_the_velocities_of_other_latents_and_times(name, monkeypatch):
    device = Recording()
    monkeypatch.setattr(forward_graphs, "get_accelerator", lambda: device)
    policy, (size, guidance) = with_adapters(policy_of(name)), CASES[name]
    conditions, found = conditions_of(policy, name), []
    shape, times = (2, *policy.latent_shape(*size)), torch.tensor([[950.0, 300.0], [900.0, 100.0]])
    inputs = [(torch.randn(shape), at) for at in times]
    if name == "z_image":  # each length of a text is a form
        assert not policy.family.takes_graphs
        return
    told = pytest.raises(ConfigError, match="cannot be recorded, leave it out: operation not permitted")
    with torch.no_grad(), nullcontext() if policy.family.takes_graphs else told:
        for velocity in (policy, on_graphs(policy, policy)):
            found.append([velocity(*each, conditions, guidance) for each in inputs])
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
        assert sum(graph.replays - 1 for graph in device.graphs) >= 2 * len(device.graphs)  # all but what is compared
    assert device.graphs


# Those that others of a part more show: one expert, one source image, flux2 with another reader of texts.
SHOWN_BY_OTHERS = ("wan", "qwen_image_edit", "flux2_klein")


@pytest.mark.parametrize("name", [name for name in CASES if name not in SHOWN_BY_OTHERS])
def test_rollout_replay_update_and_lora(name, tmp_path):
    policy = policy_of(name)
    sampler, guidance, result, experience = rollout(policy, name)
    assert torch.isfinite(result.latents).all()
    with torch.no_grad():
        media = policy.decode(result.latents)
    height, width, frames = CASES[name][0]
    assert media.shape == (2, 3, *([frames] if name in VIDEOS else []), height, width)

    experience.advantages = torch.tensor([1.0, -1.0])
    algorithm = FlowGRPO(rule=sampler.rule(policy), noise_level=0.5, guidance_scale=guidance, clip_range=0.1)
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=1.0)
    for step in trainable_steps(experience).T:
        outcome = algorithm.loss(LossContext(policy, policy), samples_at(experience, step), 6)
        assert outcome.means["ratio_mean"] == 1.0 and outcome.maxima["logp_diff_max"] == 0.0
        outcome.loss.backward()
    optimizer.step()
    rows = samples_at(experience, trainable_steps(experience)[:, 0])
    with torch.no_grad():
        trained = policy(rows.x, rows.timesteps, rows.conditions, guidance)
        with policy.reference():
            base = policy(rows.x, rows.timesteps, rows.conditions, guidance)
    assert not torch.equal(trained, base)

    def velocity_in(pipeline):
        read = family_of(pipeline, policy.family.text_length)
        read.guidance_scale_2 = policy.family.guidance_scale_2
        return velocities(read, rows.x, rows.timesteps, rows.conditions, guidance)

    policy.save_lora(tmp_path)
    stock, joined = pipeline_of(name), pipeline_of(name)
    if not hasattr(stock, "load_lora_weights"):
        stock.transformer.load_lora_adapter(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    else:
        stock.load_lora_weights(tmp_path)
    if "transformer_2" in policy.denoisers:
        stock.load_lora_weights(tmp_path / "transformer_2", load_into_transformer_2=True)
    torch.testing.assert_close(velocity_in(stock), trained, rtol=1e-4, atol=1e-6)
    join_lora(joined, tmp_path)
    torch.testing.assert_close(velocity_in(joined), trained, rtol=1e-4, atol=1e-6)
    fuse_lora(joined)
    torch.testing.assert_close(velocity_in(joined), trained, rtol=1e-4, atol=1e-5)
    denoisers = family_of(joined, policy.family.text_length).denoisers().values()
    assert not any("lora" in name for each in denoisers for name, _ in each.named_modules())


# Whose stock pipelines are asked for the same images: lengths of texts.
STOCK = {
    "sd3": 5, "flux": 5, "qwen_image": 200, "qwen_image21": None, "z_image": 60, "hunyuan_video15": 400, "ltx2": 32,
    "flux2": 300, "flux2_klein": 40,
}  # fmt: skip
SILENT = {f"{kind}{name}": value for kind in ("", "audio_")
          for name, value in (("stg_scale", 0.0), ("modality_scale", 1.0), ("guidance_rescale", 0.0))}  # fmt: skip
READ_NEGATIVE = ("sd3", "qwen_image", "qwen_image21", "z_image", "hunyuan_video15", "ltx2")  # others are told none here


def without_sound(module, arguments, named):
    """What the stock pipeline's own forward lacks to draw videos alone."""
    return arguments, named | {"isolate_modalities": True}


def given_to_ltx2(pipeline, latents):
    """The stock pipeline normalises the latents that it is given."""
    vae = pipeline.vae
    return pipeline._denormalize_latents(latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)


@pytest.mark.parametrize("name", STOCK)
def test_all_trained_weights_draw_the_same_images_in_the_stock_pipeline(name, tmp_path):
    (height, width, frames), guidance = CASES[name]
    text_length, asked = STOCK[name], {"max_sequence_length": STOCK[name]}
    policy = DiffusionPolicy(family_of(pipeline_of(name), text_length))
    conditions = conditions_of(policy, name, "a dog" if name in READ_NEGATIVE else "")
    start = torch.randn(2, *policy.latent_shape(height, width, frames))
    stock, ours = after_a_step(policy, conditions, start, guidance, 0.01, tmp_path)
    if name == "hunyuan_video15":
        stock.tokenizer_max_length, stock.guider.guidance_scale = text_length, guidance
        stock.vae.enable_slicing()  # it decodes no batch
    else:
        asked["true_cfg_scale" if name.startswith("qwen") else "guidance_scale"] = guidance
    if name in ("hunyuan_video15", "qwen_image21"):
        del asked["max_sequence_length"]
    given = {"flux": pack, "qwen_image": pack, "qwen_image21": lambda each: each.flatten(2).transpose(1, 2)}
    if name == "ltx2":
        stock.transformer.register_forward_pre_hook(without_sound, with_kwargs=True)
        given["ltx2"], asked = partial(given_to_ltx2, stock), asked | SILENT
    latents, drawn = given.get(name, lambda each: each)(start), []
    asked = asked | ({"num_frames": frames} if name in VIDEOS else {})
    for rows in ([0], [1]) if name == "qwen_image21" else ([0, 1],):  # in a batch its texts would change each other
        negative = {"negative_prompt": ["a dog"] * len(rows)} if name in READ_NEGATIVE else {}
        theirs = stock(
            prompt=[PROMPTS[row] for row in rows], height=height, width=width, num_inference_steps=3,
            latents=latents[rows], output_type="pt", **asked, **negative,
        )  # fmt: skip
        drawn.append(theirs.frames.transpose(1, 2) if name in VIDEOS else theirs.images[:, :3])
    torch.testing.assert_close(ours, torch.cat(drawn), rtol=1e-4, atol=1e-4)
    untrained = pipeline_of(name).transformer.state_dict()
    assert any(not torch.equal(value, untrained[key]) for key, value in stock.transformer.state_dict().items())


def test_each_expert_of_wan_is_guided_by_its_own_scale_as_in_the_stock_pipeline():
    policy, pipeline = policy_of("wan_two_experts"), stock_of("wan_two_experts")
    start = torch.randn(1, *policy.latent_shape(32, 32, 5))
    asked = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4, "max_sequence_length": 5}
    asked |= {"guidance_scale": 3.0, "guidance_scale_2": 30.0, "latents": start, "output_type": "latent"}
    theirs = pipeline(PROMPTS[0], "", **asked).frames
    sigmas, conditions = pipeline.scheduler.sigmas[:-1].tolist(), policy.encode_prompts(PROMPTS[:1], "")
    assert sigmas[0] > policy.family.boundary / 1000 > sigmas[-1]
    policy.family.guidance_scale_2 = 30.0
    ours = latents_of(policy, conditions, start, 3.0, num_steps=4, sigmas=sigmas)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    policy.family.guidance_scale_2 = None
    assert (latents_of(policy, conditions, start, 3.0, num_steps=4, sigmas=sigmas) - theirs).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "setting", "told"),
    [
        ("wan_two_experts", {"guidance_scale_2": 2.0}, None),
        ("wan", {"guidance_scale_2": 2.0}, "this model has one network"),
        ("wan", {"frame_rate": 12.0}, "frame_rate is read by LTX-2"),
    ],
)
def test_settings_that_a_model_does_not_read_are_refused(name, setting, told):
    config = DiffusionRunConfig()
    vars(config.sampling).update(setting)
    with pytest.raises(ConfigError, match=told) if told else nullcontext():
        policy_of(name).family.follow(config)


@pytest.mark.parametrize(
    ("family", "algorithm", "setting", "told"),
    [
        (StableDiffusion15, "awm", {"trajectory": "dance"}, "trajectory ode or sde, not dance"),
        (StableDiffusion15, "awm", {"flow_shift": 3.0}, "leave scheduler, timesteps"),
        (StableDiffusion15, "awm", {"trajectory": "sde"}, None),
        (Flux2, "flow_grpo", {"negative_prompt": "blurred"}, "reads no negative prompt"),
        (Flux2, "flow_grpo", {"negative_prompt": "blurred", "guidance_scale": 1.0}, None),
        (QwenImage21, "flow_grpo", {"height": 32, "width": 48}, "must be multiples of 32"),
        (Flux2Klein, "flow_grpo", {"negative_prompt": "blurred"}, None),  # as its checkpoint says
    ],
)
def test_settings_that_no_model_of_a_family_reads_are_refused_before_it_is_loaded(family, algorithm, setting, told):
    config = DiffusionRunConfig()
    config.algorithm.diffusion_algorithm = algorithm
    vars(config.sampling).update({"scheduler": "model_default", "guidance_scale": 3.0} | setting)
    with pytest.raises(ConfigError, match=told) if told else nullcontext():
        family.check(config)


def test_a_frame_rate_is_followed_where_positions_in_time_are_seconds():
    policy, config = policy_of("ltx2"), DiffusionRunConfig()
    asked = torch.randn(2, 4, 3, 2, 3), [800.0, 300.0], policy.encode_prompts(PROMPTS)
    usual = velocities(policy, *asked)
    config.sampling.frame_rate = 12.0
    policy.family.follow(config)
    assert policy.family.frame_rate == 12 and (usual - velocities(policy, *asked)).abs().max() > 1e-4


def test_samples_of_both_experts_in_one_batch_have_each_their_own_scale():
    policy = policy_of("wan_two_experts")
    asked = torch.randn(2, *policy.latent_shape(*VIDEO)), [700.0, 500.0], policy.encode_prompts(PROMPTS, "")
    mixed = velocities(policy, *asked, 3.0)
    policy.family.guidance_scale_2 = None
    high, low = (velocities(policy, *asked, scale) for scale in (3.0, 2.0))
    torch.testing.assert_close(mixed, torch.stack([high[0], low[1]]))


@pytest.mark.parametrize("lora", [0, 2])
def test_a_block_of_hunyuan_video_gives_a_sample_the_same_alone_and_in_a_batch_in_bf16(lora):
    (block,) = with_adapters(policy_of("hunyuan_video15", lora)).family.pipeline.transformer.transformer_blocks
    torch.manual_seed(0)
    inputs = (torch.randn(4, 7, 32), torch.randn(4, 5, 32), torch.randn(4, 32), torch.ones(4, 5))
    inputs = tuple(each.bfloat16() for each in inputs)
    together = block.bfloat16()(*inputs)
    for index in range(4):
        alone = block(*(each[index : index + 1] for each in inputs))
        assert all(torch.equal(one[0], batch[index]) for one, batch in zip(alone, together))


def test_an_expert_that_only_another_rank_needs_runs_and_changes_nothing():
    policy = policy_of("wan_i2v")
    inputs = torch.randn(2, *policy.latent_shape(*VIDEO)), torch.tensor([950.0, 940.0])
    conditions = conditions_of(policy, "wan_i2v")
    alone = policy(*inputs, conditions, 1.0)
    calls = []
    for name, denoiser in policy.denoisers.items():
        denoiser.register_forward_hook(lambda *_, name=name: calls.append(name))
    with policy.running({"transformer_2"}):
        together = policy(*inputs, conditions, 1.0)
    assert calls == ["transformer", "transformer_2"] and torch.equal(alone, together)
    together.square().sum().backward()
    gradients = [weight.grad for weight in policy.denoisers["transformer_2"].parameters() if weight.requires_grad]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("flux", {"shift": 1.0}), ("flux", {"shift": 3.0}), ("qwen_image", {"shift": 2.0}),
     ("qwen_image", {"use_dynamic_shifting": True, "shift_terminal": 0.02}), ("sd3", {"use_dynamic_shifting": True})],
)  # fmt: skip
def test_timesteps_are_those_of_the_stock_pipeline_whatever_its_scheduler_shifts(name, settings):
    pipeline = stock_of(name)
    pipeline.scheduler = tiny_families.euler(**settings)
    family = family_of(pipeline, 5)
    shape = family.latent_shape(*IMAGE)
    found = family.default_schedule(3, shape, None)
    pipeline(PROMPTS[0], height=32, width=32, num_inference_steps=3, max_sequence_length=5, output_type="latent")
    torch.testing.assert_close(found[0], pipeline.scheduler.timesteps)
    torch.testing.assert_close(found[1], pipeline.scheduler.sigmas[:-1])
    if "shift_terminal" in settings:  # stretched to its last sigma, one step is 0 / 0
        with pytest.raises(ConfigError, match=r"no schedule of 1 step\(s\).*num_steps or eval_num_steps"):
            family.default_schedule(1, shape, None)
    given = family.default_schedule(3, shape, 4.0)
    pipeline.scheduler = tiny_families.euler(**settings | {"shift": 4.0, "use_dynamic_shifting": False})
    if family.names_sigmas:  # a scheduler that does not shift by size shifts its own ends too
        torch.testing.assert_close(given, family.default_schedule(3, shape, None))


def test_the_cosmos_ode_matches_the_stock_pipeline_from_its_first_noise_on():
    policy, start = policy_of("cosmos", lora=0), torch.randn(1, 16, 1, 4, 4)
    timesteps, sigmas = policy.family.default_schedule(4, start.shape[1:], None)
    assert sigmas[0].item() == pytest.approx(80 / 81)
    conditions, x = policy.encode_prompts(PROMPTS[:1], "a dog"), start * policy.family.starting_scale(float(sigmas[0]))
    for step in range(3):  # the pipeline ends at its smallest sigma, ours goes on to 0
        x = euler_step(x, velocities(policy, x, timesteps[step], conditions, 3.0), sigmas[step], sigmas[step + 1])
    settings = {"height": 32, "width": 32, "num_inference_steps": 4, "max_sequence_length": 5, "guidance_scale": 2.0}
    settings |= {"negative_prompt": "a dog", "latents": start, "output_type": "latent"}
    theirs = stock_of("cosmos")(PROMPTS[0], **settings).images
    torch.testing.assert_close((x / (1 - sigmas[3]))[:, :, 0], theirs, rtol=1e-4, atol=1e-4)
    ours = latents_of(policy, conditions, start, 3.0, num_steps=4)
    end = euler_step(x, velocities(policy, x, timesteps[3], conditions, 3.0), sigmas[3], 0.0)
    torch.testing.assert_close(ours, end, rtol=1e-4, atol=1e-4)


def test_cosmos_loads_without_its_safety_checker(tmp_path):
    pipeline_of("cosmos").save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["safety_checker"] = [None, None]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    policy = DiffusionPolicy.from_pretrained(str(tmp_path), text_length=5)
    with torch.no_grad():
        assert policy.decode(torch.randn(1, *policy.latent_shape(32, 32))).shape == (1, 3, 32, 32)


def test_each_step_of_ltx23_is_the_stock_pipelines_where_it_keeps_sound_out():
    """Its guidance by modality, turned to 0 for videos, is the forward in which they do not hear the sound."""
    policy, pipeline, steps, theirs = policy_of("ltx23", lora=0), stock_of("ltx23"), [], []
    start = torch.randn(2, *policy.latent_shape(64, 96, 17))
    policy.family.frame_rate = 12.0
    pipeline.transformer.register_forward_hook(
        lambda module, arguments, named, found: theirs.append(found[0]) if named["isolate_modalities"] else None,
        with_kwargs=True,
    )

    def keep(pipeline, number, timestep, given):
        steps.append((timestep, given["latents"]))
        return {}

    pipeline(
        PROMPTS, height=64, width=96, num_frames=17, num_inference_steps=3, frame_rate=12.0, max_sequence_length=32,
        latents=given_to_ltx2(pipeline, start), output_type="latent", callback_on_step_end=keep,
        guidance_scale=1.0, modality_scale=0.0, stg_scale=0.0, guidance_rescale=0.0, audio_guidance_scale=1.0,
        audio_modality_scale=2.0, audio_stg_scale=0.0, audio_guidance_rescale=0.0,
    )  # fmt: skip
    timesteps, sigmas = policy.family.default_schedule(3, start.shape[1:], None)
    conditions, x = policy.encode_prompts(PROMPTS), start
    assert torch.equal(timesteps, torch.stack([timestep for timestep, _ in steps]))
    for (timestep, latents), velocity, sigma, end in zip(steps, theirs, sigmas, [*sigmas[1:], 0.0], strict=True):
        found = velocities(policy, x, timestep, conditions)
        x = euler_step(x, found, sigma, end)
        for one, other in ((found, velocity), (x, latents)):
            torch.testing.assert_close(one.flatten(2).transpose(1, 2), other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "lora"),
    [("ltx23", LoraSettings()), ("ltx2", LoraSettings(rank=2, target_modules=("to_q", "to_k", "net.2")))],
)
def test_ltx2_trains_what_draws_videos_and_no_more(name, lora):
    policy = with_adapters(DiffusionPolicy(family_of(pipeline_of(name), 32), lora), 1.0)
    latents, timesteps = torch.randn(2, *policy.latent_shape(64, 96, 17)), torch.tensor([800.0, 300.0])
    policy(latents, timesteps, policy.encode_prompts(PROMPTS, ""), 3.0).square().sum().backward()
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    hears = {name for name, _ in policy.named_parameters() if "audio" in name}
    assert trained and hears and not trained & hears
    assert all(weight.grad is not None and weight.grad.any() for weight in policy.trainable_parameters())


def test_ltx2_refuses_texts_that_its_registers_do_not_fill():
    with pytest.raises(ConfigError, match="must be a multiple of 16"):
        family_of(pipeline_of("ltx2"), 24)
    with pytest.raises(ConfigError, match="has no registers"):
        family_of(tiny_families.ltx2(connectors_are={"video_connector_num_learnable_registers": None}), 32)


@pytest.mark.parametrize("size", [(32, 64, 9), (64, 32, 9)])
def test_ltx2_refuses_a_side_of_one_latent_where_its_decoder_mirrors_edges(size):
    family = family_of(pipeline_of("ltx2"), 32)
    with pytest.raises(ConfigError, match="must be at least 64 for this model"):
        family.latent_shape(*size)
    family.pipeline.vae.register_to_config(decoder_spatial_padding_mode="zeros")
    assert family.latent_shape(*size)[2:] == (size[0] // 32, size[1] // 32)


def test_qwen_image_runs_over_as_much_of_the_texts_as_the_longest_one_takes(monkeypatch):
    policy, lengths = policy_of("qwen_image", lora=0, length=200), []
    conditions = policy.encode_prompts(PROMPTS)
    asked = torch.randn(2, *policy.latent_shape(32, 32)), [500.0, 300.0], conditions
    policy.family.pipeline.transformer.register_forward_pre_hook(
        lambda module, arguments, named: lengths.append(named["encoder_hidden_states"].shape[1]), with_kwargs=True
    )
    short = velocities(policy, *asked)
    monkeypatch.setattr(qwen_image, "TEXT_STEP", 200)
    torch.testing.assert_close(short, velocities(policy, *asked), atol=1e-5, rtol=1e-5)
    longest = int(conditions["mask"].sum(dim=1).max())
    assert conditions["context"].shape[1] == longest and lengths == [-(-longest // 64) * 64, 200] and lengths[0] < 200


def test_texts_are_kept_by_their_own_lengths():
    """In the cache of prompts and as items of the replay buffer; another neighbour changes nothing in the numbers."""
    policy = policy_of("z_image", lora=0, length=200)
    lengths = [policy.remember_prompts([text])[text]["mask"].shape[1] for text in PROMPTS]
    result = SamplingResult(torch.zeros(2, *policy.latent_shape(32, 32)), torch.ones(1), torch.ones(1))
    ids = {"group_id": torch.arange(2), "sample_id": torch.arange(2)}
    items = split_experience_batch(experience_of(result, policy.encode_prompts(PROMPTS, "a dog"), **ids))
    kept = [{key: len(value) for key, value in item.prompt_embeds.items()} for item in items]
    (without,) = {row["negative_mask"] for row in kept}
    assert [(row["context"], row["mask"]) for row in kept] == list(zip(lengths, lengths)) and lengths[0] < lengths[1]
    assert all(row["negative_context"] == without != lengths[0] for row in kept)
    again = make_experience_batch([items[1], items[0]])
    for key, value in policy.encode_prompts(PROMPTS[::-1], "a dog").items():
        assert torch.equal(again.prompt_embeds[key], value)
    assert [len(item.prompt_embeds["context"]) for item in split_experience_batch(again)] == lengths[::-1]


def test_the_ddim_ode_matches_the_stock_scheduler_up_to_its_last_step():
    policy = policy_of("sd15", lora=0)
    timesteps, sigmas = policy.family.default_schedule(5, (4, 16, 16), None)
    scheduler = policy.family.pipeline.scheduler
    scheduler.set_timesteps(5)
    assert timesteps.tolist() == scheduler.timesteps.tolist()
    start, conditions = torch.randn(2, 4, 16, 16), policy.encode_prompts(PROMPTS)
    x = start
    for step in timesteps[:-1]:
        x = scheduler.step(velocities(policy, x, step, conditions), int(step), x).prev_sample
    data = (x - sigmas[-1] * velocities(policy, x, timesteps[-1], conditions)) / (1 - sigmas[-1] ** 2).sqrt()
    ours = latents_of(policy, conditions, start, 1.0, num_steps=5, trajectory="ode")
    torch.testing.assert_close(ours, data, rtol=1e-4, atol=1e-4)


def test_experts_that_serve_no_trained_step_are_frozen():
    policy = policy_of("wan_i2v")
    assert policy.family.serving(torch.tensor([950.0, 400.0])) == {"transformer", "transformer_2"}
    assert policy.family.serving(torch.tensor([400.0, 300.0])) == {"transformer_2"}
    policy.train_only({"transformer_2"})
    trained = {name.split(".")[1] for name, weight in policy.named_parameters() if weight.requires_grad}
    assert policy.trainable == ("transformer_2",) and trained == {"transformer_2"}
    with pytest.raises(ConfigError, match="trainable_models leaves out"):
        policy.train_only({"transformer"})


def test_image_to_video_is_known_before_loading(tmp_path):
    pipeline_of("wan_i2v").save_config(tmp_path)
    pipeline_of("wan").save_config(tmp_path / "text")
    for path, family, takes in (
        (tmp_path, "auto", True), ("anything", "wan_i2v", True), (tmp_path / "text", "auto", False),
        ("anything", "sd3", False),
    ):  # fmt: skip
        assert adapter_of(str(path), family).takes_first_frame == takes
    with pytest.raises(ConfigError, match="no diffusers pipeline"):
        adapter_of(str(tmp_path / "missing"))


def test_image_to_video_with_expanded_timesteps_is_refused_as_it_is_loaded():
    pipeline = pipeline_of("wan_i2v")
    pipeline.register_to_config(expand_timesteps=True)
    with pytest.raises(ConfigError, match="not built yet; use 14B"):
        family_of(pipeline)


@pytest.mark.parametrize("name", ["sd3", "flux2", "cosmos", "qwen_image", "qwen_image21"])
def test_images_are_encoded_as_they_are_decoded_and_a_model_of_videos_encodes_none(name):
    if name == "sd3":
        with pytest.raises(ConfigError, match="draws videos"):
            policy_of("wan").encode_images([Image.new("RGB", (32, 32))], 32, 32)
    policy, (height, width, frames) = policy_of(name), CASES[name][0]
    image = Image.new("RGB", (64, 64), (200, 30, 60))
    latents = policy.encode_images([image, image.resize((20, 20))], height, width)
    assert latents.shape == (2, *policy.latent_shape(height, width, frames)) and latents.dtype == torch.float32
    torch.testing.assert_close(latents[0], latents[1])
    vae = policy.family.pipeline.vae
    pixels = (torch.tensor([200, 30, 60]) / 127.5 - 1).view(1, 3, 1, 1).expand(1, 3, height, width)
    with torch.no_grad():
        if name == "qwen_image21":
            pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)  # opaque
        stock = vae.encode(pixels if latents.dim() == 4 and not name.startswith("qwen_image") else pixels[:, :, None])
        expected = vae.decode(stock.latent_dist.mode()).sample[:, :3] / 2 + 0.5
        found = policy.decode(latents[:1])
    torch.testing.assert_close(found, expected[:, :, 0] if expected.dim() == 5 else expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sd3", "sd15", "wan", "ltx2", "qwen_image", "qwen_image21", "z_image", "flux2"])
def test_prompts_encoded_together_are_those_encoded_alone(name):
    """To rounding, as is what the pipeline gives for each by itself."""
    policy = policy_of(name)
    texts = ["a red circle", "a dog", "a very large blue cross on white", "", "two green rings", "a cat", "x", "y", "z"]
    together = policy.remember_prompts(texts)
    plain = getattr(type(policy.family).encode_prompts, "__wrapped__", type(policy.family).encode_prompts)
    with torch.no_grad():
        for text in (texts[0], texts[2], texts[8]):
            again, alone = (
                separate(made)[0] for made in (policy.family.encode_prompts([text]), plain(policy.family, [text]))
            )
            assert together[text].keys() == alone.keys()
            for key, value in together[text].items():
                torch.testing.assert_close(value, again[key], rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(value, alone[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scale", "refused"), [(1.0, False), (1.5, True), (2.0, True), (2.1, False)])
def test_a_scale_at_which_the_cosmos_pipeline_does_not_guide_is_refused(scale, refused):
    config = DiffusionRunConfig()
    config.sampling.guidance_scale = scale
    with pytest.raises(ConfigError, match=f"guidance_scale {scale:g} .* use 1") if refused else nullcontext():
        CosmosPredict2.check(config)
    given = CosmosPredict2.stock_guidance(None, scale, None)["guidance_scale"]
    assert refused or (given > 1) == (scale > 1)


def test_samples_of_several_kinds_run_apart_and_ask_no_other_rank_where_weights_are_whole(monkeypatch):
    monkeypatch.setattr(collectives, "all_reduce_max", None)
    latents, ran = torch.arange(4.0).view(4, 1), []

    def run(kind, some, timesteps, conditions):
        ran.append((kind, some.flatten().tolist(), conditions["text"].tolist()))
        return some + kind

    conditions = {"text": torch.arange(4) * 10}
    found = by_kind([7, 5, 7, 5], torch.nn.Linear(1, 1), run, latents, torch.zeros(4), conditions)
    assert found.flatten().tolist() == [7, 6, 9, 8]
    assert ran == [(7, [0, 2], [0, 20]), (5, [1, 3], [10, 30])]
