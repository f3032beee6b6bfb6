"""What engines of these tests share."""

import pytest
from engine_rig import environment_restored

from lightrft_visual.rollout.vllm.arguments import prepare_environment


@pytest.fixture(scope="session", autouse=True)
def models_are_looked_at_here():
    """vLLM looks at each model class in a process of its own, ten seconds each, so that CUDA is left alone."""
    with environment_restored():
        prepare_environment("float32")
        registry = pytest.importorskip("vllm.model_executor.models.registry")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield
