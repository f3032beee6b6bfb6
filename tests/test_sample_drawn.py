"""`sample` of diffusion models beside those that draw images from text: videos, edits, other names of the guidance."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import deepspeed.accelerator
import diffusers
import imageio.v2 as imageio
import numpy as np
import pytest
import tiny_families
import tiny_wan_parts
import torch
from click.testing import CliRunner
from diffusers import DiffusionPipeline
from peft import LoraConfig
from PIL import Image
from safetensors.torch import load_file

from lightrft_visual import inference, sample
from lightrft_visual.cli import cli
from lightrft_visual.data.video import load_video
from lightrft_visual.errors import ConfigError, DataError
from lightrft_visual.experience.diffusion_sampling import DiffusionBatch, SamplingConfig
from lightrft_visual.inference import Checkpoint, _as_in_the_run
from lightrft_visual.models.diffusion.opening import family_of, save_text_length
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, LoraSettings
from lightrft_visual.rollout.diffusion_sampler import DiffusionSampler
from lightrft_visual.trainer.diffusion.trainer import DiffusionTrainer
from lightrft_visual.trainer.hooks import Hooks

RUN = (
    "sampling: {{height: {height}, width: {width}, num_frames: {frames}, eval_num_steps: 2, guidance_scale: {scale}}}\n"
)


def left_by_a_run(folder, name, height=32, width=48, frames=1, scale=3.0):
    """A checkpoint of a family's tiny pipeline beside the settings of the run that left it."""
    getattr(tiny_families, name)().save_pretrained(folder / "checkpoint-final")
    (folder / "config.resolved.yaml").write_text(RUN.format(height=height, width=width, frames=frames, scale=scale))
    return folder / "checkpoint-final"


def pixels(drawn):
    return np.stack([np.asarray(image, dtype=float) for image in drawn])


@pytest.mark.parametrize("name, size, frames", [("wan", (32, 48), 5), ("ltx2", (64, 96), 17)])
def test_sample_video_model_gives_frames_of_the_runs_size_and_number(tmp_path, name, size, frames):
    (videos,) = sample(left_by_a_run(tmp_path, name, *size, frames), ["a red ball"], n=2, seed=4)
    assert [len(video) for video in videos] == [frames, frames]
    assert {image.size for video in videos for image in video} == {size[::-1]}
    assert np.abs(pixels(videos[0]) - pixels(videos[1])).max() > 0


def test_sample_of_several_ranks_draws_on_the_device_of_each(monkeypatch):
    chosen, used = [], []

    class Pipeline:
        def __call__(self, prompt, generator):
            return SimpleNamespace(images=[prompt])

        def set_progress_bar_config(self, disable):
            pass

        def enable_model_cpu_offload(self, device):
            used.append(device)

    accelerator = SimpleNamespace(
        device_name=lambda: "sim", set_device=chosen.append, current_device_name=lambda: f"sim:{chosen[-1]}"
    )
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(inference, "_as_in_the_run", lambda pipeline, run: {})
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    checkpoint = SimpleNamespace(run={}, image_key="", text_length=int, pipeline=lambda bf16: Pipeline())
    assert inference._drawn(checkpoint, [{"prompt": "a red ball"}], 1, 0, {}, False) == [["a red ball"]]
    assert used == ["sim:1"]


def test_sample_command_writes_a_video_that_can_be_read(tmp_path):
    folder, out = left_by_a_run(tmp_path, "wan", frames=5), tmp_path / "drawn"
    told = CliRunner().invoke(cli, ["sample", str(folder), "--prompt", "a red ball", "--out", str(out)])
    assert told.exit_code == 0, told.output
    assert load_video(out / "000_00.mp4").frames[0].shape == (32, 48, 3)
    with imageio.get_reader(out / "000_00.mp4") as reader:
        assert reader.get_meta_data()["fps"] == 16  # as Wan's videos are shown


def test_sample_guidance_of_a_run_is_the_pipelines_own_setting_of_that_meaning(tmp_path):
    folder = left_by_a_run(tmp_path, "qwen_image")
    as_in_the_run, told, without = (
        pixels(sample(folder, ["a red ball"], **own)[0])
        for own in ({}, {"true_cfg_scale": 3.0, "negative_prompt": ""}, {"true_cfg_scale": 1.0})
    )
    assert (as_in_the_run == told).all() and (as_in_the_run != without).any()


def test_sample_guides_by_a_pipelines_guider_as_the_run_did(tmp_path):
    folder = left_by_a_run(tmp_path, "hunyuan_video15", frames=5, scale=5.0)
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.guider = pipeline.guider.new(guidance_scale=5.0)
    pipeline.set_progress_bar_config(disable=True)
    asked = dict(height=32, width=48, num_frames=5, num_inference_steps=2, output_type="pil", negative_prompt="")
    (expected,) = pipeline(prompt="a red ball", generator=torch.Generator().manual_seed(0), **asked).frames
    (found,) = sample(folder, ["a red ball"], negative_prompt="")[0]
    assert (pixels(found) == pixels(expected)).all()


@pytest.mark.parametrize("tiled", [False, True])
def test_sample_decodes_in_tiles_where_the_run_did(tmp_path, monkeypatch, tiled):
    found, decode = [], diffusers.AutoencoderKL.decode

    def watched(vae, *given, **named):
        found.append(vae.use_tiling)
        return decode(vae, *given, **named)

    monkeypatch.setattr(diffusers.AutoencoderKL, "decode", watched)
    folder = left_by_a_run(tmp_path, "sd15")
    with (tmp_path / "config.resolved.yaml").open("a") as settings:
        settings.write(f"model: {{vae_tiling: {str(tiled).lower()}}}\n")
    sample(folder, ["a red ball"], width=32)
    assert found == [tiled]


def test_cosmos_is_evaluated_without_its_guardrails_and_draws_with_them_alone(tmp_path):
    final = left_by_a_run(tmp_path, "cosmos")
    index = json.loads((final / "model_index.json").read_text()) | {"safety_checker": [None, None]}
    (final / "model_index.json").write_text(json.dumps(index))
    pipeline = tiny_families.cosmos()
    assert _as_in_the_run(pipeline, {"guidance_scale": 3.0})["guidance_scale"] == 2.0
    DiffusionPolicy(family_of(pipeline, 5), LoraSettings(rank=2)).save_lora(tmp_path / "adapters")
    with Checkpoint.of(tmp_path / "adapters", str(final)).model() as joined:
        assert DiffusionPolicy.from_pretrained(joined).latent_shape(32, 32) == (16, 1, 4, 4)
    with pytest.raises(ConfigError, match="pip install cosmos_guardrail"):
        sample(final, ["a red ball"])


def test_sample_video_depends_on_the_image_of_the_prompt_and_an_edit_has_the_runs_size(tmp_path):
    folder = left_by_a_run(tmp_path / "video", "wan_i2v", width=32, frames=5)
    red, blue = (Image.new("RGB", (64, 48), colour) for colour in ("red", "blue"))
    first, second = (sample(folder, ["it moves"], images=[image.resize((32, 32))])[0][0] for image in (red, blue))
    assert (pixels(first) != pixels(second)).any()
    folder = left_by_a_run(tmp_path / "edit", "flux_kontext")
    ((image,),) = sample(folder, ["a"], images=[red], _auto_resize=False)
    assert image.size == (48, 32)


def test_sample_reads_images_from_the_column_that_the_run_does_and_those_given_beside_the_prompts_win(tmp_path):
    red, blue = (Image.new("RGB", (32, 32), colour) for colour in ("red", "blue"))
    usual = left_by_a_run(tmp_path / "usual", "wan_i2v", width=32, frames=5)
    named = shutil.copytree(usual.parent, tmp_path / "named") / usual.name
    with open(named.parent / "config.resolved.yaml", "a") as file:
        file.write("data: {image_key: photo}\n")
    (wanted,) = sample(usual, ["it moves"], images=[red])[0]
    for folder, row, images in (
        (usual, {"input_image": red}, None),
        (usual, {"input_image": red, "images": [blue]}, None),
        (usual, {"image": red}, None),
        (usual, {"input_image": blue}, red),
        (named, {"photo": [red], "input_image": blue}, None),
        (named, {}, red),
    ):
        (found,) = sample(folder, {"prompt": "it moves"} | row, images=images)[0]
        assert (pixels(found) == pixels(wanted)).all(), row


@pytest.mark.parametrize("name", ["wan_i2v", "qwen_image_edit"])
def test_sample_of_a_model_that_starts_from_an_image_says_so_where_none_is_given(tmp_path, name):
    with pytest.raises(ConfigError, match="draws from an image: give it by images"):
        sample(left_by_a_run(tmp_path, name, width=32), ["a"])


def test_sample_reads_texts_from_the_column_that_the_run_does_or_prompt(tmp_path):
    folder = left_by_a_run(tmp_path, "flux")
    with open(tmp_path / "config.resolved.yaml", "a") as file:
        file.write("data: {input_key: caption}\n")
    plain, *others = (
        pixels(sample(folder, [row])[0]) for row in ("a", {"caption": "a", "prompt": "b"}, {"prompt": "a"})
    )
    assert all((plain == other).all() for other in others)
    with pytest.raises(ConfigError, match="a mapping with one under 'caption'"):
        sample(folder, [{"text": "a"}])


def test_sample_command_gives_the_images_where_the_run_reads_them(tmp_path):
    folder, out = left_by_a_run(tmp_path, "wan_i2v", width=32, frames=5), tmp_path / "drawn"
    with open(tmp_path / "config.resolved.yaml", "a") as file:
        file.write("data: {image_key: photo}\n")
    Image.new("RGB", (32, 32), "red").save(tmp_path / "red.png")
    words = ["--prompt", "a", "--prompt", "b", "--image", str(tmp_path / "red.png"), "--out", str(out)]
    told = CliRunner().invoke(cli, ["sample", str(folder), *words])
    assert told.exit_code == 0 and len(list(out.glob("*.mp4"))) == 2, told.output


def test_sample_settings_are_the_pipelines_arguments_or_a_runs_steps(tmp_path):
    folder = left_by_a_run(tmp_path, "flux")
    runs, pipelines = (
        pixels(sample(folder, ["a"], **own)[0]) for own in ({"num_steps": 3}, {"num_inference_steps": 3})
    )
    assert (runs == pipelines).all() and (runs != pixels(sample(folder, ["a"])[0])).any()


def test_a_pipeline_with_adapters_is_refused_with_what_merges_them():
    pipeline = tiny_families.sd3()
    pipeline.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    with pytest.raises(ConfigError, match="transformer has adapters: merge or remove them first .*fuse_lora"):
        sample(pipeline, ["a"])
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    assert len(sample(pipeline, ["a"], height=32, width=32, num_inference_steps=1)[0]) == 1


@pytest.mark.parametrize(
    ("name", "asked", "told"),
    [
        ("sd15", {"height": 33}, "StableDiffusionPipeline: .height. and .width. have to be divisible by"),
        ("z_image", {"images": [Image.new("RGB", (32, 32))]}, "ZImagePipeline draws from text alone"),
        (
            "flux", {"guidance_scal": 3.0},
            "'guidance_scal' is no argument of FluxPipeline; did you mean 'guidance_scale'",
        ),
    ],
)  # fmt: skip
def test_sample_what_the_pipeline_refuses_is_a_config_error_with_its_name(tmp_path, name, asked, told):
    with pytest.raises(ConfigError, match=told):
        sample(left_by_a_run(tmp_path, name), ["a"], **asked)


def test_sample_missing_image_and_prompt_that_is_no_text_are_said_before_a_pipeline_is_loaded(tmp_path):
    (tmp_path / "model_index.json").write_text("no pipeline")
    with pytest.raises(DataError, match="no.png"):
        sample(tmp_path, ["a"], images=["no.png"])
    with pytest.raises(ConfigError, match="a diffusion model draws texts"):
        sample(tmp_path, [{"prompt": [{"role": "user", "content": "a"}]}])


@pytest.mark.parametrize("told_by", ["the run", "the folder"])
def test_sample_texts_have_as_many_tokens_as_in_the_run(tmp_path, told_by):
    folder = left_by_a_run(tmp_path, "sd3", 32, 32)
    if told_by == "the run":
        with open(tmp_path / "config.resolved.yaml", "a") as file:
            file.write("model: {max_sequence_length: 7}\n")
    else:
        save_text_length(folder, 7)
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    asked = dict(height=32, width=32, num_inference_steps=2, guidance_scale=3.0, output_type="pil")
    wanted, usual = (
        pipeline("a red ball", generator=torch.Generator().manual_seed(4), **asked, **more).images
        for more in ({"max_sequence_length": 7}, {})
    )
    (drawn,) = sample(folder, ["a red ball"], seed=4)
    assert np.abs(pixels(drawn) - pixels(wanted)).max() <= 1 < np.abs(pixels(usual) - pixels(wanted)).max()


@pytest.mark.parametrize("command", ["eval", "sample"])
def test_folder_of_a_run_and_a_slip_in_its_checkpoint_are_answered_with_the_checkpoints_there_are(tmp_path, command):
    run, more = tmp_path / "run", ["--prompt", "a"] if command == "sample" else []
    for name in ("checkpoint-000001", "checkpoint-final"):
        (run / name).mkdir(parents=True)
    (run / "config.resolved.yaml").write_text("{}\n")
    for named, told in ((run, "is the folder of a run"), (run / "checkpoint-fina", "does not exist")):
        done = CliRunner().invoke(cli, [command, str(named), *more])
        there = f"{run}/checkpoint-000001, {run}/checkpoint-final"
        assert str(done.exception) == f"{named} {told}; name a checkpoint of the run: {there}"


def test_a_checkpoint_that_a_run_resumes_from_is_drawn_with_by_one_process(monkeypatch):
    """Its export is a folder of one process, which the others do not have."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="checkpoint-final to draw on several ranks"):
        with inference._exported(SimpleNamespace(path="run/checkpoint-000001"), {}):
            pass


UNIPC = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
# Name of a tiny pipeline, the scheduler of its folder (None: its own), and of a run: `scheduler` and `flow_shift`.
EVALUATED = [
    ("sd15", diffusers.PNDMScheduler(beta_schedule="scaled_linear", steps_offset=1), "model_default", None),
    ("sd15", diffusers.DDIMScheduler(clip_sample=True, set_alpha_to_one=False, steps_offset=1), "model_default", None),
    ("wan", UNIPC, "model_default", 2.0),
    ("wan", None, "flow_match_euler_stock", 4.0),
    ("sd3", None, "flow_match_euler", 5.0),
    ("flux", None, "flow_match_euler", 5.0),
    ("hunyuan_video15", None, "model_default", 5.0),
]


STEPS = 3
TEXT = "a red ball " * 100  # longer than any model here reads


def evaluated(policy, scheduler, flow_shift, latents):
    """What a run's evaluation draws from these latents."""
    batch = DiffusionBatch(policy.encode_prompts([TEXT]), latents.shape[1:], 1, 1.0, latents)
    config = SamplingConfig(STEPS, scheduler=scheduler, flow_shift=flow_shift)
    drawn = DiffusionSampler(config).sample(policy, batch, generator=torch.Generator())
    with torch.no_grad():
        return policy.decode(drawn.latents)[0].clamp(0, 1)


@pytest.mark.parametrize("left_by", ["the run beside", "the export"])
@pytest.mark.parametrize(("name", "own", "scheduler", "flow_shift"), EVALUATED)
def test_sample_draws_what_the_runs_evaluation_drew(tmp_path, name, own, scheduler, flow_shift, left_by):
    frames = 5 if name in ("wan", "hunyuan_video15") else 1
    pipeline = tiny_families.pipeline_of(name)
    if own is not None:
        pipeline.scheduler = own
    if name == "hunyuan_video15":
        pipeline.guider = pipeline.guider.new(guidance_scale=1.0)
    length = 400 if name == "hunyuan_video15" else 77 if name == "sd15" else 5
    policy, before = DiffusionPolicy(family_of(pipeline, length)), pipeline.scheduler
    latents = torch.randn(1, *policy.latent_shape(32, 32, frames), generator=torch.Generator().manual_seed(3))
    sampling = {"scheduler": scheduler, "flow_shift": flow_shift, "guidance_scale": 1.0}
    size = {"height": 32, "width": 32} | ({"num_frames": frames} if frames > 1 else {})
    wanted = evaluated(policy, scheduler, flow_shift, latents)
    if left_by == "the export":
        parts = SimpleNamespace(policy=policy)
        config = SimpleNamespace(model=SimpleNamespace(lora_rank=0), sampling=SimpleNamespace(**sampling))
        DiffusionTrainer.export(
            SimpleNamespace(config=config, parts=parts, hooks=Hooks([])), tmp_path / "checkpoint-final"
        )
        assert pipeline.scheduler is before
    else:
        pipeline.save_pretrained(tmp_path / "checkpoint-final")
        run = {"sampling": {**sampling, **size, "eval_num_steps": STEPS}, "model": {"max_sequence_length": length}}
        (tmp_path / "config.resolved.yaml").write_text(json.dumps(run))
    given = policy.family.pipeline._pack_latents(latents, 1, *latents.shape[1:]) if name == "flux" else latents
    asked = {**size, "num_inference_steps": STEPS, "latents": given, "output_type": "pt"}
    asked |= {} if name == "hunyuan_video15" else {"guidance_scale": 1.0}  # there it is the guider's
    (found,) = sample(tmp_path / "checkpoint-final", [TEXT], **asked)[0]
    found = found.transpose(0, 1) if frames > 1 else found
    whole = name == "wan" or (name, scheduler) == ("sd3", "flow_match_euler")  # timesteps of its scheduler
    assert float((found - wanted).abs().max()) < (6e-3 if whole and scheduler != "flow_match_euler_stock" else 5e-4)


@pytest.mark.parametrize(("name", "scheduler"), [("cosmos", "flow_match_euler"), ("flux", "flow_match_euler_stock")])
def test_timesteps_that_no_setting_of_a_stock_scheduler_says_are_said(caplog, name, scheduler):
    pipeline = tiny_families.pipeline_of(name)
    own = pipeline.scheduler
    _as_in_the_run(pipeline, {"guidance_scale": 3.0, "scheduler": scheduler, "flow_shift": 2.0})
    assert pipeline.scheduler is own
    assert "draws at its own timesteps; the run's evaluations had scheduler " + scheduler in caplog.text


def test_a_size_of_images_to_edit_that_no_stock_pipeline_is_told_is_said(caplog):
    pipeline = tiny_families.pipeline_of("qwen_image_edit")
    _as_in_the_run(pipeline, {"guidance_scale": 3.0, "source_pixels": None})
    assert not caplog.text
    _as_in_the_run(pipeline, {"guidance_scale": 3.0, "source_pixels": 4096})
    assert "QwenImageEditPipeline scales images to edit its own way; the run had source_pixels 4096" in caplog.text


@pytest.mark.parametrize(("name", "unguided"), [("z_image", 0.0), ("hunyuan_video15", 1.0)])
def test_a_run_without_guidance_is_sampled_without_it(name, unguided):
    pipeline = tiny_families.pipeline_of(name)
    for scale in (0.0, 1.0, 3.0):
        found = _as_in_the_run(pipeline, {"guidance_scale": scale})
        own = found["guidance_scale"] if name == "z_image" else pipeline.guider.guidance_scale
        assert own == (scale if scale > 1 else unguided)


def trained(name, trainable=None, text_length=5):
    """The policy of a tiny pipeline, whose LoRA weights are no longer those of the start."""
    pipeline = tiny_families.pipeline_of(name)
    policy = DiffusionPolicy(family_of(pipeline, text_length), LoraSettings(rank=2, alpha=4), trainable)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.normal_(std=0.3, generator=generator)
    return policy


@pytest.mark.parametrize("expert", ["transformer", "transformer_2"])
def test_adapters_of_either_expert_alone_are_sampled_and_evaluated_as_they_were_trained(tmp_path, expert):
    policy = trained("wan_two_experts", (expert,))
    policy.save_lora(tmp_path / "checkpoint-final")
    base = tiny_families.pipeline_of("wan_two_experts")
    base.save_pretrained(tmp_path / "base")
    latents = torch.randn(1, *policy.latent_shape(32, 32, 5), generator=torch.Generator().manual_seed(3))
    wanted = evaluated(policy, "flow_match_euler", 1.0, latents)
    sampling = {"scheduler": "flow_match_euler", "flow_shift": 1.0, "guidance_scale": 1.0, "eval_num_steps": STEPS}
    run = {"sampling": {**sampling, "height": 32, "width": 32, "num_frames": 5}, "model": {"max_sequence_length": 5}}
    (tmp_path / "config.resolved.yaml").write_text(json.dumps(run))
    asked = {"base": str(tmp_path / "base"), "latents": latents, "output_type": "pt"}
    (found,) = sample(tmp_path / "checkpoint-final", ["a red ball"], **asked)[0]
    untrained = evaluated(DiffusionPolicy(family_of(base, 5)), "flow_match_euler", 1.0, latents)
    assert 3 * (found.transpose(0, 1) - wanted).abs().max() < (untrained - wanted).abs().max()
    with Checkpoint.of(tmp_path / "checkpoint-final", asked["base"]).model() as joined:
        read = evaluated(DiffusionPolicy.from_pretrained(joined), "flow_match_euler", 1.0, latents)
    torch.testing.assert_close(read, wanted, rtol=0, atol=1e-3)


def test_adapters_of_a_model_given_by_its_parts_are_joined_with_them(tmp_path):
    tiny_wan_parts.write_parts(tmp_path)
    given = {"tokenizer": str(tmp_path / "umt5-xxl"), "lora": LoraSettings(rank=2)}
    DiffusionPolicy.from_pretrained(str(tmp_path / "paths.json"), **given).save_lora(tmp_path / "checkpoint-final")
    model = {"pretrain": str(tmp_path / "paths.json"), "tokenizer_path": given["tokenizer"]}
    (tmp_path / "config.resolved.yaml").write_text(json.dumps({"sampling": {}, "model": model}))
    with Checkpoint.of(tmp_path / "checkpoint-final").model() as joined:
        found = DiffusionPipeline.from_pretrained(joined)
    assert type(found).__name__ == "WanImageToVideoPipeline" and found.config.boundary_ratio == 0.9
    size = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2}
    (videos,) = sample(tmp_path / "checkpoint-final", ["a"], images=[Image.new("RGB", (32, 32), "red")], **size)
    assert len(videos[0]) == 5


def test_adapters_are_joined_once_on_a_host_in_the_precision_of_the_run(tmp_path, monkeypatch, caplog):
    policy = trained("qwen_image")
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.mul_(0.02)
    policy.save_lora(tmp_path / "checkpoint-final")
    base = tiny_families.pipeline_of("qwen_image")
    run = {"sampling": {}, "model": {"bf16": True}}
    (tmp_path / "config.resolved.yaml").write_text(json.dumps(run))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29501"}.items():
        monkeypatch.setenv(name, value)
    checkpoint = Checkpoint.of(tmp_path / "checkpoint-final", base)
    with checkpoint.model() as joined:
        assert re.search(r"half precision keeps [0-7]?[0-9] % of .*: bf16=False", caplog.text)
        (weights,) = Path(joined, "transformer").glob("*.safetensors")
        assert {each.dtype for each in load_file(weights).values()} == {torch.bfloat16}
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setattr(Checkpoint, "pipeline", None)
        with checkpoint.model() as found:
            assert found == joined
        assert Path(joined).is_dir()
    assert not Path(joined).exists()


@pytest.mark.parametrize("loaded", [True, False])
def test_adapters_of_a_run_that_named_no_text_length_are_sampled_with_the_familys(tmp_path, loaded):
    trained("qwen_image").save_lora(tmp_path / "checkpoint-final")
    base = tiny_families.pipeline_of("qwen_image")
    base.save_pretrained(tmp_path / "base")
    base = base if loaded else str(tmp_path / "base")
    assert Checkpoint.of(tmp_path / "checkpoint-final", base).text_length() == 1024
    assert Checkpoint.of(tmp_path / "base").text_length() is None
