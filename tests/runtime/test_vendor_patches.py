"""What other libraries are told where they have a setting, and changed where they have none."""

import inspect
import sys
from types import SimpleNamespace

import torch

from lightrft_visual.runtime.vendor_patches import forget_model, program_limit


def test_program_limit_of_a_function_lets_it_have_that_many_programs_and_leaves_the_process_alone():
    made, before = [], torch._dynamo.config.recompile_limit

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    def scaled(x, by):
        return x * len(by)

    program = torch.compile(scaled, backend=backend, dynamic=True, **program_limit(20))
    words = [f"{'a' * number}" for number in range(1, 13)]  # each a program of its own
    assert [float(program(torch.ones(3), word).sum()) for word in words] == [3.0 * number for number in range(1, 13)]
    own = "recompile_limit" in inspect.signature(torch.compile).parameters  # else the process's is raised
    assert len(made) == 12 > before and torch._dynamo.config.recompile_limit == (before if own else 20)


def test_an_engine_that_ends_leaves_nothing_of_its_model_in_vllms_notes(monkeypatch):
    """Those of vLLM up to 0.28 (language models) and of 0.32 (layers), both by a module."""
    model, other = torch.nn.Sequential(torch.nn.Linear(3, 5)), torch.nn.Linear(3, 5)
    languages, layers = {model: model[0], other: other}, {model[0]: "loader", other: "loader"}
    interfaces = SimpleNamespace(_language_model_by_module=languages)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.interfaces", interfaces)
    layerwise = SimpleNamespace(LAYERWISE_INFO=layers)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload.layerwise", layerwise)
    forget_model(model)
    assert set(languages) == set(layers) == {other}
