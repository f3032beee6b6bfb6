"""The transformers engine under ZeRO-3: ranks that have different work to do stay in step, and sample as one would."""

from __future__ import annotations

import json

from engine_rig import hf_rig
from launched import run_ranks
from tiny_models import checkpoint_of, mixed_prompts

from lightrft_visual.experience.rollouts import SamplingSettings


def test_ranks_with_different_prompts_sample_as_one_rank_does(root, tmp_path):
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    rig = hf_rig(checkpoint)
    alone = rig.decided_token_ids(mixed_prompts(), SamplingSettings(n=2, max_new_tokens=6))
    run_ranks("sharded_ranks.py", checkpoint.path, str(tmp_path), str(rig.stage.run_seed), timeout=180)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert max(first["figures"] + second["figures"]) <= 1e-5
    assert first["tokens"][0] == [alone[2 * i + copy] for i in (0, 2, 4, 5) for copy in range(2)]
    assert first["tokens"][1] == [alone[2 * i + copy] for i in (1, 0) for copy in range(2)]
    assert second["tokens"] == [alone[:2], []]
