"""What other libraries are told where they have a setting, and changed where they have none."""

import torch

from lightrft_visual.runtime.vendor_patches import program_limit


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
    assert len(made) == 12 > before == torch._dynamo.config.recompile_limit
