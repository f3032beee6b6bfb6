"""vLLM as runs on CPUs import it, for the processes that are forked with it: it takes longer than many a short run."""

from lightrft_visual.rollout.vllm import arguments

arguments.prepare_environment("float32")
with arguments.without_compiled_functions():
    from vllm import LLM, EngineArgs  # noqa: F401
