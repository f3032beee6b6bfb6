"""Blocks that torch.compile made: the same velocities and gradients, few programs for all sizes, LoRA on and off.

On the host its C++ compiler takes two minutes for all of these programs (they were compared once): there the programs
are traced and run as they are, and the compiler makes one of them.
"""

import pytest
import torch
import torch._dynamo
from deepspeed.accelerator import get_accelerator
from equality import with_adapters
from tiny_families import sd3_policy
from torch import nn
from watched import Operations

from lightrft_visual.models.diffusion.policy import LoraSettings, repeated_blocks

DEVICE = get_accelerator().device_name()


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    """What other tests of this process compiled, or left on the stack of modes, would count here."""
    assert torch._C._len_torch_function_stack() == 0
    torch._dynamo.reset()


def policy(backend=None, lora=None, layers=1):
    torch.manual_seed(0)
    made = with_adapters(sd3_policy(lora, layers))
    if backend is not None:
        made.compile_blocks(backend)
    made.move_to(torch.device(DEVICE))
    return made


def asked(made, count):
    torch.manual_seed(count)
    texts = ["a red circle", "a blue cross", "a green ring", "a red cross"][:count]
    latents = torch.randn(count, *made.latent_shape(32, 32)).to(made.device)
    return latents, torch.full((count,), 500.0, device=made.device), made.encode_prompts(texts)


def test_compiled_blocks_compute_the_same_with_lora_without_it_and_backward():
    lora = LoraSettings(2, 4)
    plain, compiled = policy(lora=lora), policy("eager" if DEVICE == "cpu" else "inductor", lora)
    assert list(plain.state_dict()) == list(compiled.state_dict())
    torch._dynamo.utils.counters.clear()
    for count in (2, 4):
        found = []
        for each in (plain, compiled):
            with torch.no_grad():
                rolled_out = each(*asked(each, count))
                with each.reference():
                    reference = each(*asked(each, count))
            replayed = each(*asked(each, count))
            torch.testing.assert_close(rolled_out, replayed.detach(), rtol=1e-4, atol=1e-5)
            assert not torch.allclose(rolled_out, reference, atol=1e-3)
            found.append(
                (rolled_out, reference, torch.autograd.grad(replayed.square().mean(), each.trainable_parameters()))
            )
        torch.testing.assert_close(found[0][:2], found[1][:2], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-3, atol=1e-6)
    programs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < programs <= 3  # rollout, replay, reference
    assert not torch._dynamo.utils.counters["graph_break"]


def test_checkpointed_programs_keep_the_results_of_attention():
    found = []
    for how, backend in (("none", None), ("attention", "aot_eager")):
        made = policy(backend)
        inputs = asked(made, 3)
        made.train()
        if how != "none":
            made.enable_gradient_checkpointing(how=how)
        with Operations() as calls:
            gradients = torch.autograd.grad(made(*inputs).square().mean(), made.trainable_parameters())
        found.append((calls.attentions, gradients))
    assert found[1][0] == found[0][0] > 0
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-6)


def test_the_compiler_makes_a_program_for_the_host_or_the_accelerator():
    plain, compiled = policy(), policy("inductor")
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        torch.testing.assert_close(compiled(*asked(compiled, 3)), plain(*asked(plain, 3)), rtol=1e-4, atol=1e-5)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and counters["inductor"]


def test_blocks_are_those_that_diffusers_names_or_the_lists_of_layers():
    class Named(nn.Module):
        _repeated_blocks = ["Linear"]

        def __init__(self):
            super().__init__()
            self.deep = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))

    named = Named()
    assert repeated_blocks(named) == [named.deep[0], named.deep[2]]
    transformer = policy(layers=2).denoisers["transformer"]
    assert repeated_blocks(transformer) == list(transformer.transformer_blocks)
