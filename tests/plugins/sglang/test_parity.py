"""SGLang itself, where it can be imported: what it samples is what the trainer scores. Without a GPU on the CPU."""

from importlib.util import find_spec

import pytest
from deepspeed.accelerator import get_accelerator
from engine_rig import Rig, environment_restored
from tiny_models import actor_of, checkpoint_of, prompts_for

from lightrft_visual.config.vl import RolloutConfig, RunConfig
from lightrft_visual.experience.rollouts import SamplingSettings
from lightrft_visual.plugins.sglang.engine import SGLangEngine

found = find_spec("sglang")
pytestmark = pytest.mark.skipif(found is None or found.origin is None, reason="sglang is not installed: it is for CUDA")
PLAIN = SamplingSettings(n=3, max_new_tokens=6)
WARM = SamplingSettings(n=2, temperature=0.7, max_new_tokens=5, min_new_tokens=3)
ON_CPU = {"max_total_tokens": 4096}  # by its share of the host's memory it would have room for millions


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen2"])
def test_parity_as_loaded_and_after_a_sync(tmp_path, kind):
    checkpoint = checkpoint_of(tmp_path, kind)
    on_cpu = get_accelerator().device_name() == "cpu"
    banned = checkpoint.family.banned_ids(checkpoint.tokenizer)
    rollout = RolloutConfig(
        engine_type="sglang", prompt_max_len=768, generate_max_len=256, engine_mem_util=0.2, engine_max_num_seqs=16,
        engine_enforce_eager=True, enable_engine_sleep=False, engine_kwargs=ON_CPU if on_cpu else {},
    )  # fmt: skip
    batch = prompts_for(checkpoint, videos=False)
    with environment_restored():
        engine = SGLangEngine(RunConfig(rollout=rollout), checkpoint)
        try:
            rig = Rig(checkpoint, actor_of(checkpoint, banned), engine)
            figures = [rig.difference(batch, PLAIN)]
            for sampling in (PLAIN, WARM):
                rig.move()
                rig.sync()
                figures.append(rig.difference(batch, sampling))
            if not on_cpu:
                first, again = rig.token_ids(batch, PLAIN), rig.token_ids(batch, PLAIN)
                # Its cache makes other shapes of the second call, by which a token now and then is rounded to another.
                assert sum(one != other for one, other in zip(first, again, strict=True)) <= 1
        finally:
            engine.close()
    print("differences", kind, figures)
    assert max(figures) <= 1e-4, figures
