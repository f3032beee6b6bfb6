"""Copies of weights have memory of their own; LoRA adds into the base's output, with peft's results in fewer passes."""

from unittest.mock import patch

import deepspeed
import forked
import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as PeftLinear
from tiny_families import sd3_policy
from torch import nn
from watched import Operations

from lightrft_visual.models.diffusion.policy import LoraSettings
from lightrft_visual.models.weight_copies import (
    AddedLoraLinear,
    FollowingWeights,
    WeightAverage,
    WeightCopy,
    lora_config,
)  # fmt: skip
from lightrft_visual.runtime.vendor_patches import without_shared_memory


def layer():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def moved(parameters, by=1.0):
    with torch.no_grad():
        for each in parameters:
            each.add_(by)


@pytest.mark.parametrize(("decay", "warmup", "rate"), [(0.75, False, 0.25), (0.9, True, 1 - 3 / 12)])
def test_update_by_hand_at_its_interval_and_in_a_warm_up_that_forgets_the_start_soon(decay, warmup, rate):
    """In the warm-up (1 + 2) / (10 + 2) is below 0.9."""
    model = layer()
    before = model.weight.detach().clone()
    average = WeightAverage(model.parameters(), decay, interval=2, warmup=warmup)
    moved(model.parameters())
    average.step()
    assert torch.equal(average.copies[0], before)
    average.step()
    torch.testing.assert_close(average.copies[0], before + rate)
    average.steps = 999
    average.step()
    torch.testing.assert_close(average.copies[0], before + 1 - decay * (1 - rate))


def test_swapped_lends_the_copy_and_gives_the_weights_back_bit_for_bit_and_gradients_are_theirs():
    model, inputs = layer(), torch.randn(4, 3)
    copy = WeightCopy(model.parameters())
    before = copy.copies[0].clone()
    moved(model.parameters(), 0.1)
    after = model.weight.detach().clone()
    assert torch.equal(copy.copies[0], before)  # it has memory of its own, on a CPU too
    wanted = torch.autograd.grad(model(inputs).square().sum(), model.weight)
    loss = model(inputs).square().sum()
    with pytest.raises(RuntimeError), torch.no_grad(), copy.swapped():
        assert torch.equal(model.weight, before)
        raise RuntimeError
    assert torch.equal(model.weight, after) and torch.equal(copy.copies[0], before)
    assert torch.equal(*torch.autograd.grad(loss, model.weight), *wanted)


def test_state_round_trip_and_mismatch():
    average = WeightAverage(layer().parameters(), 0.5, 3)
    average.step()
    other = WeightAverage(nn.Linear(3, 2).parameters(), 0.5, 3)
    other.load_state_dict(average.state_dict())
    assert other.steps == 1 and all(torch.equal(a, b) for a, b in zip(average.copies, other.copies))
    with pytest.raises(ValueError, match="tensor 0"):
        WeightAverage(nn.Linear(4, 2).parameters(), 0.5, 3).load_state_dict(average.state_dict())


def test_weights_of_the_copys_type_are_not_copied_while_it_stands_in_for_them():
    model = layer()
    copy, home = WeightCopy(model.parameters()), model.weight.data_ptr()
    with copy.swapped():
        assert model.weight.data_ptr() == copy.copies[0].data_ptr()
    assert model.weight.data_ptr() == home


def lend_what_zero_3_keeps_whole():
    """As it does with small weights: a look at others takes one collective, and one brings its own back."""
    with without_shared_memory():
        deepspeed.init_distributed("gloo")
    model = nn.Sequential(layer(), layer())
    deepspeed.zero.Init(module=model)
    own, wanted = list(model.parameters()), layer().weight
    own[0].all_gather(own)
    for each in own:
        each.ds_persist = True  # as the engine says of small ones
    copy = WeightCopy(own)
    moved([each.ds_tensor for each in own])
    backend = deepspeed.comm.comm.cdb
    with patch.object(backend, "all_gather_into_tensor", wraps=backend.all_gather_into_tensor) as gathers:
        with copy.swapped():
            assert gathers.call_count == 1 and torch.equal(own[0], wanted) and torch.equal(own[2], wanted)
        assert gathers.call_count == 2 and torch.equal(own[0], wanted + 1) and torch.equal(own[2], wanted + 1)
    torch.testing.assert_close(own[0].ds_tensor - copy.copies[0], torch.ones(3), rtol=0, atol=1e-6)
    own[0].ds_persist = False  # a large one, whole just now
    with copy.swapped():
        assert torch.equal(own[0], wanted) and torch.equal(own[2], wanted)


def copies_on_two_ranks(whole):
    """What a rank saves of an average and of a reference, and what others have of all ranks' states, or of `whole`."""
    torch.distributed.init_process_group("gloo")
    average, model = WeightAverage(layer().bfloat16().parameters(), 0.5), layer()
    average.step()
    following = FollowingWeights(model, layer().parameters, every=1, mixup=0.5)
    with torch.no_grad():
        for index, each in enumerate([*average.copies, *model.parameters()]):
            each.fill_(index + 1)
    found = []
    for state, other in (
        (average.state_dict(), WeightAverage(layer().parameters(), 0.5)),
        (following.state_dict(), FollowingWeights(layer(), layer().parameters, every=1, mixup=0.5)),
    ):
        other.load_state_dict(state if whole is None else whole[len(found)])
        held = other.values
        found.append((state, [float(each.detach().mean()) for each in held], getattr(other, "steps", 0)))
    with pytest.raises(ValueError, match="tensors"):
        average.load_state_dict({"steps": torch.tensor(1), "7": torch.ones(2), "8": torch.ones(2), "9": torch.ones(2)})
    lend_what_zero_3_keeps_whole()
    return found


@pytest.mark.slow
def test_two_ranks_save_each_tensor_once_and_both_have_all_of_them_again():
    of_ranks = list(zip(*forked.on_ranks(copies_on_two_ranks, None)))
    joined = []
    for saved, held, steps in (zip(*each) for each in of_ranks):
        assert [sorted(state.keys() - {"steps", "ranks"}) for state in saved] == [["0"], ["1"]]
        assert held[0] == held[1] and held[0] in ([1, 2], [3, 4]) and steps[0] == steps[1]
        joined.append(saved)
    alone = WeightAverage(layer().parameters(), 0.5)
    alone.load_state_dict(alone.state_of_ranks(joined[0]))
    assert alone.steps == 1 and [float(each.mean()) for each in alone.copies] == [1, 2]
    follows = FollowingWeights(layer(), layer().parameters, every=1, mixup=0.5)
    follows.load_state_dict(follows.state_of_ranks(joined[1]))
    assert [float(each.detach().mean()) for each in follows.values] == [3, 4]
    # As a rank of an earlier version, and one that was alone, saves them.
    wholes = alone.state_dict(), follows.state_dict()
    for state_of_rank in forked.on_ranks(copies_on_two_ranks, wholes):
        assert [held for _, held, _ in state_of_rank] == [[1, 2], [3, 4]]


def test_an_average_of_bf16_weights_keeps_small_moves_also_across_a_swap():
    model = layer().bfloat16()
    nn.init.constant_(model.weight, 1.0)
    average = WeightAverage(model.parameters(), 0.9)
    nn.init.constant_(model.weight, 1.0078125)  # the next bf16 number
    weights = model.weight.detach().clone()
    average.step()
    wanted = torch.full((2, 3), 1 + 0.1 * 0.0078125)
    with average.swapped():
        assert model.weight.dtype == torch.bfloat16 and torch.equal(model.weight, wanted.bfloat16())
    assert torch.equal(model.weight, weights)
    torch.testing.assert_close(average.copies[0], wanted, atol=1e-7, rtol=0)


def test_a_reference_follows_every_few_steps_by_the_formula_of_tr_dpo():
    """arXiv 2404.09656: ref = mixup * policy + (1 - mixup) * ref."""
    model, frozen = layer(), layer()
    start = frozen.weight.detach().clone()
    following = FollowingWeights(frozen, model.parameters, every=3, mixup=0.6)
    moved(model.parameters())
    assert [following.step(number) for number in (1, 2, 3, 4)] == [False, False, True, False]
    torch.testing.assert_close(frozen.weight, start + 0.6)
    saved = {name: value.clone() for name, value in following.state_dict().items()}
    assert following.step(6)
    torch.testing.assert_close(frozen.weight, start + 0.84)
    following.load_state_dict(saved)
    torch.testing.assert_close(frozen.weight, start + 0.6)
    torch.testing.assert_close(model.weight, start + 1.0)


def test_a_reference_in_bf16_follows_by_moves_that_bf16_rounds_away_also_after_a_resume():
    model, frozen, other = (layer().bfloat16() for _ in range(3))
    for each in (model, frozen, other):
        nn.init.constant_(each.weight, 1.0)
    following, resumed = (FollowingWeights(each, model.parameters, every=1, mixup=0.05) for each in (frozen, other))
    nn.init.constant_(model.weight, 1.015625)  # two bf16 numbers on
    wanted = 1.0
    for number in range(12):
        assert following.step(number)
        wanted += 0.05 * (1.015625 - wanted)
        if number == 5:
            saved = {name: value.clone() for name, value in following.state_dict().items()}
    assert frozen.weight.dtype == torch.bfloat16 and torch.equal(frozen.weight, torch.full((2, 3), wanted).bfloat16())
    assert frozen.weight.mean() > 1
    resumed.load_state_dict(resumed.state_of_ranks([saved]))
    for number in range(6):
        resumed.step(number)
    assert torch.equal(other.weight, frozen.weight)
    torch.testing.assert_close(resumed.values, following.values, atol=0, rtol=0)
    resumed.load_state_dict({name: value.bfloat16() for name, value in saved.items()})  # as versions before saved it
    assert torch.equal(resumed.values[0], other.weight.float())
    assert FollowingWeights(frozen, model.parameters, every=1, mixup=1.0).values[0].dtype == torch.bfloat16


# --- LoRA -----------------------------------------------------------------------------------------------------------


def lora_layer(kind, scaling_of=(4, 8), dtype=torch.float32, **settings):
    torch.manual_seed(0)
    base = nn.Linear(24, 40).requires_grad_(False)
    config = LoraConfig(r=scaling_of[0], lora_alpha=scaling_of[1], **settings)
    made = kind(base, "default", config=config, r=scaling_of[0], lora_alpha=scaling_of[1])
    nn.init.normal_(made.lora_B["default"].weight, std=0.1)
    return made.to(dtype)


def passed(made, x):
    """Output, and the gradients of the input and of both small matrices."""
    x = x.clone().requires_grad_()
    out = made(x)
    out.square().sum().backward()
    found = [x.grad, made.lora_A["default"].weight.grad, made.lora_B["default"].weight.grad]
    made.zero_grad()
    return [out.detach(), *found]


@pytest.mark.parametrize(("scaling_of", "shape"), [((4, 8), (5, 24)), ((4, 7), (2, 3, 5, 24))])
def test_output_and_gradients_are_those_of_peft(scaling_of, shape):
    x = torch.randn(*shape)
    found, wanted = (passed(lora_layer(kind, scaling_of), x) for kind in (AddedLoraLinear, PeftLinear))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_half_precision_is_nearer_to_the_exact_result_than_peft():
    x, half = torch.randn(64, 24), torch.bfloat16
    exact = lora_layer(PeftLinear)(x)
    ours, pefts = ((lora_layer(kind, dtype=half)(x.to(half)) - exact).norm() for kind in (AddedLoraLinear, PeftLinear))
    assert ours <= pefts


VIEWS = ("aten::view", "aten::t", "aten::_unsafe_view", "aten::expand")


def test_the_output_is_passed_over_twice_and_not_four_times():
    x = torch.randn(3, 5, 24)
    counts = []
    for kind in (AddedLoraLinear, PeftLinear):
        made = lora_layer(kind)
        with torch.no_grad(), Operations() as passes:
            made(x)
        counts.append(sum(shape[-1] == 40 and name not in VIEWS for name, shape, _ in passes.made))
    assert counts == [2, 4]  # base, low rank added in; base, low rank, scaled, added


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.5}, {"lora_bias": True}, {"use_dora": True}])
def test_what_is_not_plain_lora_goes_through_peft(settings, monkeypatch):
    asked = []
    forward = PeftLinear.forward
    monkeypatch.setattr(PeftLinear, "forward", lambda self, x: asked.append(self) or forward(self, x))
    made, x = lora_layer(AddedLoraLinear, **settings).train(), torch.randn(3, 24)
    torch.manual_seed(1)
    got = made(x)
    torch.manual_seed(1)
    assert asked == [made] and torch.equal(got, forward(made, x))


def add_second(made):
    made.unmerge()
    made.update_layer("second", 2, lora_alpha=2, config=LoraConfig(r=2, init_lora_weights=False))
    made.set_adapter(["default", "second"])


def test_switched_off_merged_and_of_two_adapters_it_is_peft():
    both, x = (lora_layer(AddedLoraLinear), lora_layer(PeftLinear)), torch.randn(3, 24)
    off, merged = lambda made: made.enable_adapters(False), lambda made: (made.enable_adapters(True), made.merge())
    for change in (off, merged, add_second):
        for made in both:
            torch.manual_seed(3)
            change(made)
        torch.testing.assert_close(*(made(x) for made in both))


def test_a_layer_that_adds_nothing_yet_is_the_one_switched_off_bit_by_bit_whatever_the_inputs_layout():
    """Policy and reference before the first step; attention gives its projections parts of one tensor."""
    made = lora_layer(AddedLoraLinear, dtype=torch.bfloat16)
    nn.init.zeros_(made.lora_B["default"].weight)
    for x in (torch.randn(6, 9, 24).bfloat16().split([5, 4], dim=1)[0], torch.randn(6, 24).bfloat16()):
        added = made(x)
        made.enable_adapters(False)
        assert torch.equal(made(x), added)
        made.enable_adapters(True)


def test_policies_have_it_under_the_names_that_checkpoints_and_pipelines_know():
    policy = sd3_policy(LoraSettings(2, 4))
    adapted = policy.denoisers["transformer"].transformer_blocks[0].attn.to_q
    assert type(adapted) is AddedLoraLinear
    assert {"base_layer.weight", "lora_A.default.weight", "lora_B.default.weight"} <= set(adapted.state_dict())
    assert "_custom_modules" not in lora_config(2, 4, init_lora_weights="gaussian", target_modules=["to_q"]).to_dict()
