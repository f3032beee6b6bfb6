"""The adapter against a stand-in that accepts what the real package's signatures accept, and nothing else."""

import inspect
import os
import random
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from engine_rig import environment_restored
from fake_sglang import INTERFACE, Fake
from tiny_models import checkpoint_of

from lightrft_visual.config.algorithm import AlgorithmConfig
from lightrft_visual.config.vl import RolloutConfig, RunConfig
from lightrft_visual.errors import ConfigError, RolloutError
from lightrft_visual.experience.rollouts import PromptFeatures, SamplingSettings
from lightrft_visual.plugins.sglang import engine as module
from lightrft_visual.plugins.sglang.arguments import VERSION, check_engine, server_arguments

EOS = 9
MODULES = {
    "Engine": "sglang.srt.entrypoints.engine",
    "MultiprocessingSerializer": "sglang.srt.utils.common",
    "monkey_patch_torch_reductions": "sglang.srt.utils.patch_torch",
    "FlattenedTensorBucket": "sglang.srt.weight_sync.tensor_bucket",
    "ServerArgs": "sglang.srt.server_args",
    "SamplingParams": "sglang.srt.sampling.sampling_params",
}


TOKENIZER = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))


def card() -> SimpleNamespace:
    """The third of a host."""
    answers = {"device_name": "cuda", "current_device": 3, "empty_cache": None, "current_device_name": "cpu"}
    return SimpleNamespace(**{name: lambda value=value: value for name, value in answers.items()})


def stop(ids, sampling):
    return [len(ids), EOS], [-0.25, -0.5], {"type": "stop", "matched": EOS}


@pytest.fixture
def fake(monkeypatch):
    with environment_restored():
        fake = Fake(stop)
        fake.install(monkeypatch)
        for name in ("plugins.sglang.engine", "rollout.resident"):
            found = import_module(f"lightrft_visual.{name}")
            monkeypatch.setattr(found, "get_accelerator", card)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (60 * 2**30, 80 * 2**30))
        yield fake
        fake.loop.close()


def engine_with(**rollout) -> module.SGLangEngine:
    """Of a model whose token 7 is never sampled."""
    family = SimpleNamespace(banned_ids=lambda tokenizer: [7])
    checkpoint = SimpleNamespace(path="a/model", tokenizer=TOKENIZER, eos_ids=[EOS], family=family)
    config = run_with(**({"prompt_max_len": 14, "generate_max_len": 6} | rollout))
    config.model.bf16 = True
    return module.SGLangEngine(config, checkpoint)


def prompts(count: int) -> list[PromptFeatures]:
    return [PromptFeatures(text="?", token_ids=[1] * (index + 2), group_id=index) for index in range(count)]


def run_with(**rollout) -> RunConfig:
    own = RolloutConfig(engine_type="sglang", **({"prompt_max_len": 64, "generate_max_len": 64} | rollout))
    return RunConfig(rollout=own, algorithm=AlgorithmConfig(tis_mode="token" if own.coarse else "off"))


def test_the_engine_is_built_and_this_process_left_as_it_was(fake):
    handler = signal.getsignal(signal.SIGTERM)
    made = engine_with(engine_kwargs={"page_size": 16})
    (given,) = fake.named("Engine.__init__")
    given = given["kwargs"]
    wanted = {"base_gpu_id": 3, "dtype": "bfloat16", "context_length": 24, "enable_memory_saver": True, "page_size": 16}
    assert {name: given[name] for name in wanted} == wanted
    assert given["enable_deterministic_inference"] is True  # else seeds are not read
    assert signal.getsignal(signal.SIGTERM) is handler
    made.close()
    assert fake.order() == ["__init__", "flush_cache", "shutdown"]


@pytest.mark.parametrize(("free", "util", "given"), [(60, 0.3, 0.4), (80, 0.5, 0.5), (40, 0.5, 0.9)])
def test_the_engine_fills_a_share_of_the_device_and_not_of_what_the_trainer_leaves(
    fake, monkeypatch, free, util, given
):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (free * 2**30, 80 * 2**30))
    engine_with(engine_mem_util=util)
    assert fake.named("Engine.__init__")[0]["kwargs"]["mem_fraction_static"] == pytest.approx(given)


def test_ranks_that_are_seeded_alike_draw_other_ports_and_nccl_stays_as_it_is(fake, monkeypatch):
    drawn, start = [], fake.start

    def begin(**kwargs):
        drawn.append(random.random())  # by which SGLang looks for the port of its process group
        os.environ |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
        return start(**kwargs)

    monkeypatch.setattr(sys.modules["sglang"], "Engine", begin)
    os.environ["NCCL_NVLS_ENABLE"] = "1"
    for _ in range(2):
        random.seed(3)
        engine_with()
        assert random.random() == random.Random(3).random()
        assert {name: os.environ[name] for name in os.environ if name.startswith("NCCL_")} == {"NCCL_NVLS_ENABLE": "1"}
    assert drawn[0] != drawn[1]


def test_prompts_are_answered_in_order_and_told_one_by_one(fake):
    made = engine_with()
    told = []
    asked = SamplingSettings(n=2, max_new_tokens=4)
    found = made.generate(prompts(3), asked, lambda number, completions: told.append((number, len(completions))))
    assert [[each.token_ids for each in row] for row in found] == [[[2, EOS]] * 2, [[3, EOS]] * 2, [[4, EOS]] * 2]
    assert found[1][0].text == "3" and found[1][0].log_probs == [-0.25, -0.5]
    assert sorted(told) == [(0, 2), (1, 2), (2, 2)]
    calls = fake.named("Engine.async_generate")
    assert len(calls) == 3 and all(call["return_logprob"] for call in calls)
    seeds = [each["sampling_seed"] for call in calls for each in call["sampling_params"]]
    assert len(calls[0]["sampling_params"]) == 2 and calls[0]["sampling_params"][0]["logit_bias"] == {"7": -1e9}
    assert len(set(seeds[:2])) == 2
    assert made.generate([], asked) == []


def test_a_segment_asks_for_no_more_than_the_context_holds(fake):
    def long(ids, sampling):
        assert len(ids) + sampling["max_new_tokens"] <= 20
        count = sampling["max_new_tokens"]
        return [5] * count, [-0.5] * count, {"type": "length"}

    fake.answer = long
    engine = engine_with()
    begun = PromptFeatures("a", list(range(10)), 0, continued=[5] * 6, seed=1)
    fresh = PromptFeatures("b", list(range(10)), 1, seed=2)
    made = engine.generate([begun, fresh], SamplingSettings(n=1, max_new_tokens=6))
    assert [len(group[0].token_ids) for group in made] == [4, 6]


def test_after_a_failure_the_engine_says_so(fake):
    made = engine_with()
    fake.answer = lambda ids, sampling: ([5], [-1.0], {"type": "abort", "message": "no memory"})
    with pytest.raises(RolloutError, match="gave up a response: abort, no memory"):
        made.generate(prompts(1), SamplingSettings())
    with pytest.raises(RolloutError, match="the engine failed before: .*no memory"):
        made.generate(prompts(1), SamplingSettings())


def test_weights_come_in_a_session_and_void_the_caches(fake):
    made = engine_with()
    fake.calls.clear()
    weights = {"model.visual.a": torch.arange(6.0).view(2, 3), "lm_head.weight": torch.ones(3, dtype=torch.bfloat16)}
    made.update_weights(weights.items())
    assert fake.order() == [
        "begin_weight_update", "update_weights_from_tensor", "update_weights_from_tensor", "end_weight_update",
        "flush_cache",
    ]  # fmt: skip
    assert set(fake.loaded) == {"visual.a", "lm_head.weight"}
    assert torch.equal(fake.loaded["visual.a"], weights["model.visual.a"])
    assert all(call["flush_cache"] is False for call in fake.named("Engine.update_weights_from_tensor"))

    fake.refuse = "shape mismatch"
    with pytest.raises(RolloutError, match="refuses the weights: shape mismatch"):
        made.update_weights(weights.items())
    assert fake.order()[-1] == "end_weight_update"


def test_sleep_without_weights_takes_the_cache_back_after_new_ones(fake):
    made = engine_with()
    fake.calls.clear()
    made.sleep(keep_weights=False)
    made.wake()
    with pytest.raises(RolloutError, match="slept without its weights"):
        made.generate(prompts(1), SamplingSettings())
    made.update_weights([("lm_head.weight", torch.ones(2))])
    assert fake.order()[-1] == "end_weight_update"  # the caller makes room for the cache first
    made.wake()
    made.sleep()
    made.wake()
    tags = [given["tags"] for name, given in fake.calls if name.endswith("memory_occupation")]
    assert tags == [["kv_cache", "weights"], ["weights"], ["kv_cache"], ["kv_cache"], ["kv_cache"]]
    assert fake.order() == [
        "release_memory_occupation", "resume_memory_occupation",
        "begin_weight_update", "update_weights_from_tensor", "end_weight_update",
        "resume_memory_occupation", "flush_cache",
        "release_memory_occupation", "resume_memory_occupation",
    ]  # fmt: skip
    assert not made.lacks_weights and made.generate(prompts(1), SamplingSettings())


def test_weights_that_it_kept_while_it_sleeps_are_released_alone_for_new_ones(fake):
    made = engine_with()
    fake.calls.clear()
    made.sleep()
    made.sleep(keep_weights=False)
    made.update_weights([("lm_head.weight", torch.ones(2))])
    made.wake()
    tags = [given["tags"] for name, given in fake.calls if name.endswith("memory_occupation")]
    assert tags == [["kv_cache"], ["weights"], ["weights"], ["kv_cache"]]


def test_an_engine_that_has_not_taken_its_cache_back_releases_its_weights_alone(fake):
    """As before a checkpoint behind a sync. SGLang ends its process where memory is released twice."""
    made = engine_with()
    for _ in range(2):
        fake.calls.clear()
        made.sleep(keep_weights=False)
        made.update_weights([("lm_head.weight", torch.ones(2))])
    made.sleep()
    made.wake()
    tags = [given["tags"] for name, given in fake.calls if name.endswith("memory_occupation")]
    assert tags == [["weights"], ["weights"], ["kv_cache"]]
    assert made.generate(prompts(1), SamplingSettings())


@pytest.mark.parametrize(
    "rollout, message",
    [
        ({"engine_kwargs": {"page_sise": 16}}, "no server argument 'page_sise'; did you mean 'page_size'"),
        ({"engine_kwargs": {"max_running_requests": 4}}, "set by the run itself; use engine_max_num_seqs"),
        ({"engine_kwargs": {"log_level": "info"}}, "set by the run itself; leave it out"),
        ({"use_fire": True}, "use_fire .* SGLang cannot"),
    ],
)
def test_settings_are_refused_before_a_model_is_loaded(fake, tmp_path, rollout, message):
    with pytest.raises(ConfigError, match=message):
        check_engine(run_with(**rollout), checkpoint_of(tmp_path, "qwen2"))


def test_settings_of_a_run_by_sglangs_names(fake, tmp_path):
    config = run_with(
        engine_max_num_seqs=30, engine_max_num_batched_tokens=4096, engine_kv_cache_dtype="fp8_e5m2",
        engine_quantization="fp8", engine_kwargs={"enable_deterministic_inference": False},
    )  # fmt: skip
    checkpoint = checkpoint_of(tmp_path, "qwen2_5_vl")
    check_engine(config, checkpoint)
    given = server_arguments(config, checkpoint, device=1)
    wanted = {"max_running_requests": 30, "chunked_prefill_size": 4096, "kv_cache_dtype": "fp8_e5m2"}
    wanted |= {"quantization": "fp8", "enable_deterministic_inference": False, "attention_backend": "triton"}
    assert {name: given[name] for name in wanted} == wanted


def test_models_that_sglang_is_not_built_for_are_named(fake, tmp_path):
    with pytest.raises(ConfigError, match="built for qwen2_vl.*not for internvl"):
        check_engine(run_with(), checkpoint_of(tmp_path, "internvl"))


def _installed() -> bool:
    found = find_spec("sglang")
    return found is not None and found.origin is not None


@pytest.mark.skipif(_installed(), reason="sglang is installed")
def test_without_the_package_it_is_said_how_to_install_the_version_of_the_stand_in(tmp_path):
    assert INTERFACE["version"] == VERSION
    with pytest.raises(ConfigError, match=f"pip install sglang=={VERSION}"):
        check_engine(run_with(), checkpoint_of(tmp_path, "qwen2"))


@pytest.mark.skipif(not _installed(), reason="sglang is not installed: it is for CUDA")
@pytest.mark.parametrize("name", [name for name in INTERFACE if name != "version"])
def test_the_installed_package_has_the_same_signatures(name):
    if import_module("sglang").__version__ != VERSION:
        pytest.skip(f"sglang {import_module('sglang').__version__} is installed, {VERSION} is compared")
    found = import_module(MODULES[name.split(".")[0]])
    for part in name.split("."):
        found = getattr(found, part)
    ours = [each.rstrip("=").lstrip("*") for each in INTERFACE[name].split()]
    theirs = [each for each in inspect.signature(found).parameters if each != "self"]
    assert theirs == [each for each in ours if each]
