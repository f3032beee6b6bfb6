"""`cuda_graphs` beside forwards without; see recorded_graphs.py. Those of every family are in test_families.py."""

import pytest
import torch
from equality import with_adapters
from simulated.recorded_graphs import Recording
from tiny_families import sd3_policy

from lightrft_visual.errors import ConfigError
from lightrft_visual.models.diffusion import forward_graphs
from lightrft_visual.models.diffusion.forward_graphs import ForwardGraphs, check_graphs, on_graphs
from lightrft_visual.models.diffusion.policy import LoraSettings
from lightrft_visual.trainer.diffusion.stages import TrainedVelocity


@pytest.fixture
def device(monkeypatch):
    made = Recording()
    monkeypatch.setattr(forward_graphs, "get_accelerator", lambda: made)
    return made


def asked(policy, count, seed=0):
    torch.manual_seed(seed)
    texts = ["a red circle", "a blue cross", "a green ring"][:count]
    latents = torch.randn(count, *policy.latent_shape(32, 32))
    return latents, torch.full((count,), 500.0 - seed), policy.encode_prompts(texts, ""), 3.0


def test_replays_give_the_velocities_of_new_inputs_and_of_weights_as_they_are(device):
    plain = with_adapters(sd3_policy(LoraSettings(2, 4)))
    policy = with_adapters(sd3_policy(LoraSettings(2, 4)))
    policy.load_state_dict(plain.state_dict())
    velocity = on_graphs(policy, policy)

    def same(count, seed):
        with torch.no_grad():
            found = velocity(*asked(policy, count, seed))
            torch.testing.assert_close(found, plain(*asked(plain, count, seed)), rtol=1e-5, atol=1e-6)
            return found

    first = same(3, 0)
    kept = first.clone()
    same(3, 1)
    same(2, 2)
    assert torch.equal(first, kept)  # the next replay does not write over what was handed out
    assert [graph.replays for graph in device.graphs] == [2 + 1, 1 + 1]  # one more each, which is compared
    for each in (plain, policy):  # in their memory, as an optimizer's step
        for weight in each.trainable_parameters():
            weight.data.mul_(1.5)
    same(3, 3)
    assert len(device.graphs) == 2
    for each in (plain, policy):  # other memory, as an average that stands in
        for weight in each.trainable_parameters():
            weight.data = weight.data * 0.5
    same(3, 4)
    assert device.pools == [None, (0, 1), None] and device.graphs[-1].replays == 1  # its form is known


def test_forwards_with_gradients_and_of_the_reference_use_no_graph(device):
    policy = with_adapters(sd3_policy(LoraSettings(2, 4)))
    velocity, inputs = TrainedVelocity(policy, policy, graphs=True).velocity, asked(policy, 2)
    trained = velocity(*inputs)
    torch.autograd.grad(trained.square().sum(), policy.trainable_parameters())
    assert not device.graphs
    with torch.no_grad():
        torch.testing.assert_close(velocity(*inputs), trained.detach(), rtol=1e-5, atol=1e-6)
        with policy.reference():
            assert not torch.allclose(policy(*inputs), trained.detach(), atol=1e-3)
    assert [graph.replays for graph in device.graphs] == [2]


class Counting(torch.nn.Linear):
    calls = 0

    def forward(self, given, how=None):
        self.calls += 1
        return super().forward(given) * self.calls


class Reading(torch.nn.Linear):
    def forward(self, given):
        return super().forward(given) * given.max().item()


@torch.no_grad()
def run(network, *given):
    graphs = ForwardGraphs(network)
    graphs.serving = True
    return network(*given)


@pytest.mark.parametrize(
    ("network", "given", "told"),
    [
        (Reading(3, 3), torch.ones(2, 3), "cannot be recorded, leave it out: operation not permitted"),
        (Counting(3, 3), torch.ones(2, 3), "a replay is .* off the forward: leave it out"),
        (torch.nn.Linear(3, 3), torch.ones(2, 3, device="meta"), "reads a tensor on the host"),
    ],
    ids=["host_reads", "python_counts", "host_tensor"],
)
def test_a_forward_that_no_graph_repeats_is_refused(device, network, given, told):
    with pytest.raises(ConfigError, match=f"cuda_graphs: .*{told}"):
        run(network, given)


def test_of_more_shapes_than_are_kept_the_oldest_gives_way(device, monkeypatch):
    monkeypatch.setattr(forward_graphs, "MOST", 2)
    network = torch.nn.Linear(3, 3)
    graphs = ForwardGraphs(network)
    graphs.serving = True
    with torch.no_grad():
        for count in (1, 2, 3, 2, 1):
            assert network(torch.ones(count, 3)).shape == (count, 3)
    assert len(device.graphs) == 4


def test_running_out_of_memory_is_no_matter_of_the_model(device):
    class Large(torch.nn.Module):
        def forward(self, given):
            raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        run(Large(), torch.ones(1))


def test_a_host_without_graphs_is_refused():
    with pytest.raises(ConfigError, match="cuda_graphs: DeepSpeed records no graphs on cpu: leave it out"):
        check_graphs()
