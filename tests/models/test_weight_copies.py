"""Copies of weights have memory of their own."""

import pytest
import torch
from torch import nn

from lightrft_visual.models.weight_copies import FollowingWeights, WeightAverage, WeightCopy


def layer():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def test_update_by_hand_and_interval():
    model = layer()
    before = model.weight.detach().clone()
    average = WeightAverage(model.parameters(), decay=0.75, interval=2)
    with torch.no_grad():
        model.weight.add_(1.0)
    average.step()
    assert torch.equal(average.copies[0], before)
    average.step()
    torch.testing.assert_close(average.copies[0], before + 0.25)


def test_warm_up_forgets_the_start_soon():
    model = layer()
    before = model.weight.detach().clone()
    average = WeightAverage(model.parameters(), decay=0.9, interval=2, warmup=True)
    with torch.no_grad():
        model.weight.add_(1.0)
    average.step(), average.step()
    torch.testing.assert_close(average.copies[0], before + 1 - 3 / 12)  # (1 + 2) / (10 + 2) is below 0.9
    average.steps = 999
    average.step()
    torch.testing.assert_close(average.copies[0], before + 1 - 0.9 * 3 / 12)


def test_swapped_lends_the_copy_and_gives_the_weights_back_bit_for_bit():
    model = layer()
    copy = WeightCopy(model.parameters())
    before = copy.copies[0].clone()
    with torch.no_grad():
        model.weight.mul_(1.1)
    after = model.weight.detach().clone()
    assert torch.equal(copy.copies[0], before)  # it has memory of its own, on a CPU too
    with pytest.raises(RuntimeError), copy.swapped():
        assert torch.equal(model.weight, before)
        raise RuntimeError
    assert torch.equal(model.weight, after) and torch.equal(copy.copies[0], before)


def test_gradients_across_a_swap_are_those_of_the_weights():
    model, inputs = layer(), torch.randn(4, 3)
    copy = WeightCopy(model.parameters())
    with torch.no_grad():
        model.weight.add_(0.5)
    loss = model(inputs).square().sum()
    with torch.no_grad(), copy.swapped():
        model(inputs)
    loss.backward()
    swapped = model.weight.grad.clone()
    model.zero_grad()
    model(inputs).square().sum().backward()
    assert torch.equal(swapped, model.weight.grad)


def test_state_round_trip_and_mismatch():
    average = WeightAverage(layer().parameters(), 0.5, 3)
    average.step()
    other = WeightAverage(nn.Linear(3, 2).parameters(), 0.5, 3)
    other.load_state_dict(average.state_dict())
    assert other.steps == 1 and all(torch.equal(a, b) for a, b in zip(average.copies, other.copies))
    with pytest.raises(ValueError, match="tensor 0"):
        WeightAverage(nn.Linear(4, 2).parameters(), 0.5, 3).load_state_dict(average.state_dict())


def test_an_average_of_bf16_weights_keeps_small_moves_also_across_a_swap():
    model = layer().bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    average = WeightAverage(model.parameters(), 0.9)
    with torch.no_grad():
        model.weight.fill_(1.0078125)  # the next bf16 number
    weights = model.weight.detach().clone()
    average.step()
    wanted = torch.full((2, 3), 1 + 0.1 * 0.0078125)
    torch.testing.assert_close(average.copies[0], wanted, atol=1e-7, rtol=0)
    with average.swapped():
        assert model.weight.dtype == torch.bfloat16 and torch.equal(model.weight, wanted.bfloat16())
    assert torch.equal(model.weight, weights)
    torch.testing.assert_close(average.copies[0], wanted, atol=1e-7, rtol=0)


def test_a_reference_follows_every_few_steps_by_the_formula_of_tr_dpo():
    """arXiv 2404.09656: ref = mixup * policy + (1 - mixup) * ref."""
    model, frozen = layer(), layer()
    start = frozen.weight.detach().clone()
    following = FollowingWeights(frozen, model.parameters, every=3, mixup=0.6)
    with torch.no_grad():
        model.weight.add_(1.0)
    assert [following.step(number) for number in (1, 2, 3, 4)] == [False, False, True, False]
    torch.testing.assert_close(frozen.weight, start + 0.6)
    saved = {name: value.clone() for name, value in following.state_dict().items()}
    assert following.step(6)
    torch.testing.assert_close(frozen.weight, start + 0.84)
    following.load_state_dict(saved)
    torch.testing.assert_close(frozen.weight, start + 0.6)
    torch.testing.assert_close(model.weight, start + 1.0)
