"""Run by two ranks under ZeRO-3: reward models that are divided over them, against whole copies; RANK.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launched import leave
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from reward_rollouts import make_samples

from lightrft_visual.config.shared import DistributedConfig, RewardConfig
from lightrft_visual.rewards import RewardComputationEngine
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy

MARK = "<|vision_start|><|image_pad|><|vision_end|>"
RECIPE = "{text: [[model, text, 1.0]], both: [[model, judge, 1.0], [model, text, 2.0]], none: [[rule, exact, 1.0]]}"


def samples_of(rank: int):
    """Other numbers on each rank: 20 texts and 2 with images against 3 texts and 1 that no model reads."""
    if rank == 0:
        labels = ["both"] * 2 + ["text"] * 20
        pictures = [[Image.new("RGB", (56, 56), colour)] for colour in ("red", "blue")] + [[]] * 20
        prompts = [MARK + "count"] * 2 + [f"no {i}" for i in range(20)]
    else:
        labels, pictures, prompts = ["text"] * 3 + ["none"], [[]] * 4, ["is 1", "more 2", "no picture", "is 3"]
    return make_samples(["1"] * len(labels), references=["1"] * len(labels), labels=labels, images=pictures,
                        prompts=prompts)  # fmt: skip


def held(engine: RewardComputationEngine, whole: bool) -> dict[str, int]:
    """Numbers of each model in this rank's part; small weights DeepSpeed also leaves together after a first use."""
    found = {}
    for name, source in engine._sources.items():
        module = source.held.module if whole else source.held.engine.module
        parameters = list(module.parameters())
        found[name] = sum(each.numel() if whole else each.ds_tensor.numel() for each in parameters)
    return found


def main(classifier: str, judge: str, out: str) -> None:
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=3), bf16=True)
    strategy.setup_distributed()
    config = RewardConfig(reward_pretrain=f"judge={judge},text={classifier}", reward_recipe=RECIPE)
    results = {}
    for name, given in (("whole", None), ("divided", strategy)):
        engine = RewardComputationEngine.from_config(config, strategy=given)
        scores = [engine.compute_rewards([samples_of(collectives.rank())]).score.tolist() for _ in range(2)]
        results[name] = {"scores": scores, "held": held(engine, given is None)}
    Path(out, f"{collectives.rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
