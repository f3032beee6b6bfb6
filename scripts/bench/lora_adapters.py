"""LoRA in vLLM: merged weights handed over, as runs do, against adapters alone. CPU seconds of sync and generation.

    OMP_NUM_THREADS=1 python scripts/bench/lora_adapters.py [--rank 4] [--rounds 8] [--turns 2]

The embedded model, adapters on the language model only, 8 prompts with an image x 8 samples x 32 tokens; each form in a
process of its own, in turn. Both are compared with the trainer's log-probs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

FORMS, ALPHA, NUMBER = ("merged", "adapters"), 16, 1


def take_adapters(worker, tensors: dict, rank: int) -> None:
    """In vLLM's worker: the adapter of number NUMBER made anew of tensors by peft's names."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = worker.model_runner.lora_manager
    helper = PEFTHelper.from_dict({"r": rank, "lora_alpha": ALPHA, "target_modules": "all-linear"})
    names = manager._adapter_manager.model.hf_to_vllm_mapper.get_rename_mapper()
    own = {name: tensor.clone() for name, tensor in tensors.items()}  # vLLM scales them in place
    adapter = LoRAModel.from_lora_tensors(NUMBER, own, helper, device="cpu", weights_mapper=names)
    manager._adapter_manager.remove_adapter(NUMBER)
    manager._adapter_manager.add_adapter(adapter)
    manager._adapter_manager.activate_adapter(NUMBER)


def actor_of(path: str, rank: int):
    """(checkpoint, actor with adapters that change its answers)"""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    from lightrft_visual.config.vl import DataConfig, ModelConfig
    from lightrft_visual.models.loading import open_checkpoint
    from lightrft_visual.models.vlm.actor import Actor

    torch.manual_seed(0)
    checkpoint = open_checkpoint(path, ModelConfig(), DataConfig())
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    settings = LoraConfig(r=rank, lora_alpha=ALPHA, target_modules="all-linear", exclude_modules=".*visual.*")
    model = get_peft_model(model, settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    return checkpoint, Actor(model, checkpoint.family.banned_ids(checkpoint.tokenizer), checkpoint.eos_ids)


def measure(form: str, arguments: argparse.Namespace) -> dict[str, float]:
    import torch
    from PIL import Image

    from lightrft_visual.experience.model_inputs import ModelInputs
    from lightrft_visual.experience.prompts import PromptBatch
    from lightrft_visual.experience.rollouts import collate
    from lightrft_visual.experience.sampling import SamplingSettings
    from lightrft_visual.launch import quiet_libraries
    from lightrft_visual.plugins.embedded.warmup import WarmUp, embedded_checkpoint
    from lightrft_visual.rollout.multimodal import MultimodalDataProcessor
    from lightrft_visual.rollout.parity import log_prob_difference
    from lightrft_visual.rollout.stage import RolloutStage
    from lightrft_visual.rollout.vllm.engine import VLLMEngine, VLLMSettings
    from lightrft_visual.rollout.weight_sync import named_weights
    from lightrft_visual.runtime.deepspeed import TrainEngine

    quiet_libraries()
    checkpoint, actor = actor_of(str(embedded_checkpoint(WarmUp(), report=lambda text: None)), arguments.rank)
    extra = {"enable_lora": True, "max_loras": 1, "max_lora_rank": max(8, arguments.rank)} if form == "adapters" else {}
    banned = checkpoint.family.banned_ids(checkpoint.tokenizer)
    engine = VLLMEngine(VLLMSettings(checkpoint.path, 512, max_num_seqs=64, banned_ids=banned, extra=extra))
    tensors = {
        name.replace(".default.", "."): p.detach() for name, p in actor.model.named_parameters() if "lora_" in name
    }
    if form == "adapters":
        from vllm.lora.request import LoRARequest

        generate, request = engine.llm.generate, LoRARequest("policy", NUMBER, "tensors")
        engine.llm.generate = lambda *given, **named: generate(*given, lora_request=request, **named)

    def sync() -> None:
        if form == "merged":
            engine.update_weights(named_weights(TrainEngine(SimpleNamespace(module=actor), 0, 1.0)))
        else:
            engine.llm.collective_rpc(take_adapters, args=(tensors, arguments.rank))
            engine.reset_caches()

    stage = RolloutStage(engine, MultimodalDataProcessor(checkpoint.tokenizer, checkpoint.processor, 400), run_seed=3)
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>how many?<|im_end|>\n<|im_start|>assistant\n"
    images = [[Image.effect_noise((56, 56), 9 + number).convert("RGB")] for number in range(8)]
    settings = SamplingSettings(n=8, max_new_tokens=32, min_new_tokens=32)
    taken = []
    for _ in range(arguments.rounds):
        began = time.process_time()
        sync()
        synced = time.process_time()
        rollouts = stage.generate(PromptBatch.of([text] * 8, images), settings)
        taken.append((synced - began, time.process_time() - synced))
    samples = collate(rollouts, checkpoint.tokenizer.pad_token_id, True)
    with torch.no_grad():
        ours = actor(ModelInputs.of(samples), settings.scoring, with_entropy=False).log_probs
    difference = log_prob_difference(ours, samples.rollout_log_probs, samples.action_mask)
    seconds, generation = (statistics.median(column) for column in zip(*taken))
    return {"sync": seconds, "generate": generation, "difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--form", choices=FORMS, help="one of them, in this process")
    arguments = parser.parse_args()
    if arguments.form is not None:
        print("\n" + json.dumps({"form": arguments.form, **measure(arguments.form, arguments)}), flush=True)
        return
    for form in FORMS * arguments.turns:
        command = [sys.executable, *sys.argv, "--form", form]
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        found = json.loads(next(line for line in lines if line.startswith('{"form"')))
        print(
            f"{form}: sync {found['sync']:.4f} s, generate {found['generate']:.3f} s, {found['difference']:.1e} apart"
        )


if __name__ == "__main__":
    main()
