"""Operations of a micro-batch, forward and backward: blocks as they are, compiled (`compile`), with Liger's kernels
(`use_liger_kernel`, where the package is installed), and compiled with two denoising steps in one forward
(`steps_per_forward 2`; what is said then is half of them, those of one step).

    python scripts/bench/operations.py [vl|drawing]

An operation is one call of a kernel: a matrix product, an attention, or a loop over elements; views and new memory are
none. Blocks have the widths of Qwen2.5-VL-3B (LoRA on all linear layers) and of Stable Diffusion 3.5 medium (LoRA on
attention). A model of one block more of a kind than another says what a block of that kind costs, and the sum over all
blocks is the micro-batch. It takes some minutes: the compiler makes each program for the host, where it makes as many
operations of a block as elsewhere. Liger's kernels do not run on the host: a call of one counts, and computes nothing.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile, record_function

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "gpu")]

RANK = 16
PLAIN, COMPILED, LIGER, TOGETHER = "as they are", "compiled", "Liger's kernels", "compiled, two steps a forward"
# They start no kernel: other views of the same memory, or memory that is not written.
FREE = {
    f"aten::{name}"
    for name in (
        "view", "_unsafe_view", "_reshape_alias", "reshape", "expand", "expand_as", "permute", "transpose", "t",
        "slice", "select", "as_strided", "unsqueeze", "squeeze", "split", "split_with_sizes", "chunk", "unbind",
        "detach", "alias", "narrow", "flatten", "unflatten", "view_as", "empty", "empty_like", "empty_strided",
        "new_empty", "new_empty_strided", "resize_", "result_type", "is_nonzero", "item", "_local_scalar_dense",
        "lift_fresh", "set_", "movedim", "resolve_conj", "resolve_neg", "contiguous", "to", "_to_copy", "clone",
    )
}  # fmt: skip


def starts_kernels(event: Any) -> bool:
    """Whether this event or one inside it is an operation."""
    named = event.name.startswith(("aten::", "graph_")) or "_fused_" in event.name
    return (named and event.name not in FREE) or any(starts_kernels(child) for child in event.cpu_children)


def operations(step: Callable[[], None]) -> int:
    """Of one step, which has run before. An operation that is made of others counts as those."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    return sum(
        starts_kernels(event) and not any(starts_kernels(child) for child in event.cpu_children)
        for event in seen.events()
    )


class Uncomputed:
    """In the place of a Triton kernel: its call is an event of the profiler."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._called

    def _called(self, *given: Any, **settings: Any) -> None:
        with record_function("graph_of_liger"):
            pass


def use_uncomputed(model: torch.nn.Module) -> None:
    """Let a model call Liger's kernels as on a card, without values; what is held against them at start fits."""
    import liger_kernel.ops as ops

    from lightrft_visual.plugins.liger import kernels as liger

    for module in (ops.rms_norm, ops.swiglu, ops.rope):
        for name in [name for name in vars(module) if name.endswith("_kernel") or name == "_triton_rope"]:
            setattr(module, name, Uncomputed())
    liger._same = lambda made, wanted: True
    liger.use_kernels(model)


def vision_language(text: int, vision: int, how: str) -> int:
    """Of a policy of so many text and vision blocks."""
    import shapes
    from transformers import Qwen2_5_VLForConditionalGeneration

    from lightrft_visual.experience.rollouts import ScoringRule
    from lightrft_visual.experience.types import ModelInputs
    from lightrft_visual.experience.vision import VisionTensors
    from lightrft_visual.models.tiny.vlm import build_tokenizer
    from lightrft_visual.models.vlm.actor import Actor
    from lightrft_visual.trainer.features.compiled_blocks import compile_blocks

    config = shapes.qwen_3b(build_tokenizer())
    config.text_config.num_hidden_layers, config.text_config.vocab_size = text, 1031
    config.text_config.layer_types = ["full_attention"] * text
    config.vision_config.depth, config.vision_config.fullatt_block_indexes = vision, [vision - 1]
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    if how == LIGER:
        use_uncomputed(model)
    adapted = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"))
    actor = Actor(adapted, [], [1])
    if how == COMPILED:
        compile_blocks(actor)
    image, side = config.image_token_id, 8  # 8 x 8 patches are 4 x 4 tokens
    ids = torch.randint(5, 200, (2, 40))
    ids[:, 3:19] = image
    patches = (
        config.vision_config.in_channels * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2
    )
    media = {
        "pixel_values": torch.randn(2 * side * side, patches), "image_grid_thw": torch.tensor([[1, side, side]] * 2),
    }  # fmt: skip
    mask = torch.ones(2, 8, dtype=torch.bool)
    inputs = ModelInputs(
        sequences=ids, attention_mask=torch.ones_like(ids), action_mask=mask, vision=VisionTensors([media])
    )

    def step() -> None:
        actor(inputs, ScoringRule(1.0), with_entropy=False).log_probs.sum().backward()

    step()
    step()
    return operations(step)


def drawing(both: int, plain: int, how: str) -> int:
    """Of a denoiser of so many blocks with two attentions, and of so many others behind them."""
    import shapes
    from diffusers import SD3Transformer2DModel

    from lightrft_visual.models.diffusion.policy import repeated_blocks

    torch.manual_seed(0)
    shape = shapes.SD35_MEDIUM | {"num_layers": both + plain, "dual_attention_layers": tuple(range(both))}
    model = SD3Transformer2DModel(**shape)
    model.requires_grad_(False)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    model.add_adapter(LoraConfig(r=RANK, target_modules=targets))
    for block in repeated_blocks(model) if how != PLAIN else ():
        block.compile(dynamic=True)
    width, steps = shape["joint_attention_dim"], 2 if how == TOGETHER else 1
    samples = 2 * steps
    given = {
        "hidden_states": torch.randn(samples, 16, 8, 8), "encoder_hidden_states": torch.randn(samples, 7, width),
        "pooled_projections": torch.randn(samples, shape["pooled_projection_dim"]),
        "timestep": torch.linspace(500.0, 300.0, samples),
    }  # fmt: skip

    def step() -> None:
        model(**given).sample.square().sum().backward()

    step()
    step()
    return operations(step) // steps


def counted(
    count: Callable[[int, int, str], int], first: tuple[int, int], all_blocks: tuple[int, int], ways: Sequence[str]
) -> Iterator[int]:
    """In each of the ways, of a model of all blocks: of those of a small one, and of what a block more of each kind
    costs."""
    for how in ways:
        torch._dynamo.reset()
        base, more = count(*first, how), [0, 0]
        for kind in range(2):
            torch._dynamo.reset()
            sizes = [first[0] + (kind == 0), first[1] + (kind == 1)]
            more[kind] = count(*sizes, how) - base
        yield base + sum(each * (wanted - has) for each, wanted, has in zip(more, all_blocks, first))


MODELS = {
    "vl": ("Qwen2.5-VL-3B, LoRA", vision_language, (1, 1), (36, 32), (COMPILED, LIGER)),
    "drawing": ("SD3.5 medium, LoRA", drawing, (1, 1), (13, 11), (COMPILED, TOGETHER)),
}


def main() -> None:
    """Prints a table: a row for each model and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=MODELS, help="one of them; default: both")
    given = parser.parse_args()
    inductor.cpp.enable_kernel_profile = True  # each loop over elements is an event of the profiler
    print("| micro-batch | blocks | operations | share |\n|---|---|---|---|")
    for kind, (name, count, first, all_blocks, known) in MODELS.items():
        ways = [way for way in known if way != LIGER or find_spec("liger_kernel")]
        if given.kind in (None, kind):
            plain = 0
            for way, made in zip((PLAIN, *ways), counted(count, first, all_blocks, (PLAIN, *ways))):
                plain = plain or made
                print(f"| {name} | {way} | {made:,} | {made / plain:.2f} |", flush=True)


if __name__ == "__main__":
    main()
