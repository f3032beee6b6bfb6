"""What engines of these tests share."""

from importlib.util import find_spec

import pytest
from engine_rig import environment_restored

from lightrft_visual.rollout.vllm.arguments import prepare_environment


@pytest.fixture(scope="session", autouse=True)
def done_once():
    """vLLM looks at each model class in a process of its own, ten seconds each, so that CUDA is left alone; and each
    engine goes through all modules of the process for kernels, which the first one has replaced."""
    with environment_restored():
        prepare_environment("float32")
        registry = pytest.importorskip("vllm.model_executor.models.registry")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        if find_spec("vllm.triton_utils.dispatcher"):
            from vllm.triton_utils import dispatcher

            own, done = dispatcher.register_kernels, []
            patch.setattr(dispatcher, "register_kernels", lambda given: done or done.append(own(given)))
        yield
