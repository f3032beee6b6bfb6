"""Tokens that vLLM works on in the first step of n samples a prompt, and CPU milliseconds of a weight sync by part.

    python scripts/bench/engine_prefill.py [--samples 16] [--size 448]

A prompt that is computed once for its n samples costs its tokens once, and of each further sample the last block alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

PROMPTS, REPEATS = 4, 15


def milliseconds(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        taken.append(1000 * (time.process_time() - began))
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--size", type=int, default=448)
    arguments = parser.parse_args()

    from safetensors.torch import load_file
    from transformers import AutoProcessor

    from lightrft_visual.experience.prompts import PromptBatch
    from lightrft_visual.experience.sampling import SamplingSettings
    from lightrft_visual.launch import quiet_libraries
    from lightrft_visual.plugins.embedded.warmup import WarmUp, embedded_checkpoint
    from lightrft_visual.rollout.multimodal import MultimodalDataProcessor
    from lightrft_visual.rollout.stage import RolloutStage
    from lightrft_visual.rollout.vllm.engine import VLLMEngine, VLLMSettings

    quiet_libraries()
    model = str(embedded_checkpoint(WarmUp(), report=lambda text: None))
    engine = VLLMEngine(VLLMSettings(model=model, max_model_len=1024, max_num_seqs=PROMPTS * arguments.samples))
    processor = AutoProcessor.from_pretrained(model)
    scheduler, tokens = engine.llm.llm_engine.engine_core.engine_core.scheduler, []
    schedule = scheduler.schedule

    def counted(*given, **named):
        output = schedule(*given, **named)
        tokens.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = counted
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many shapes are there?"}]}]
    text = processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    images = [[Image.effect_noise((arguments.size, arguments.size), 9 + i).convert("RGB")] for i in range(PROMPTS)]
    stage = RolloutStage(engine, MultimodalDataProcessor(processor.tokenizer, processor, 1000), run_seed=3)
    settings = SamplingSettings(n=arguments.samples, max_new_tokens=4)
    made = stage.generate(PromptBatch.of([text] * PROMPTS, images), settings)
    length = len(made[0].prompt.token_ids)
    weights = load_file(f"{model}/model.safetensors")
    reload = {"weights_iterator": None}

    def reload_alone() -> None:
        reload["weights_iterator"] = iter(weights.items())
        engine.llm.collective_rpc("reload_weights", kwargs=reload)

    print(f"{PROMPTS} prompts of {length} tokens, {arguments.samples} samples each: first step {tokens[0]} tokens")
    print(f"one by one it would be {PROMPTS * arguments.samples * length}")
    print(
        f"sync {milliseconds(lambda: engine.update_weights(iter(weights.items()))):.1f} ms CPU, of which weights alone"
    )
    print(f"{milliseconds(reload_alone):.1f}, resets of the caches {milliseconds(engine.reset_caches):.2f}")


if __name__ == "__main__":
    main()
