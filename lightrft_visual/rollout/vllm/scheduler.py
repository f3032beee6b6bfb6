"""vLLM's scheduler on a host without accelerator, which `engine_arguments` names to vLLM: vLLM alone imports this."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class WholePromptScheduler(Scheduler):
    """Computes each prompt in one step: a split one makes vLLM rewind its request's generator, which has no offset on
    CPU.

    Without chunked prefill vLLM still splits a prompt before an image for which the step's encoder has no room. Here it
    waits a step instead. A step that begins with an empty encoder has room for all images of any prompt, as they are
    tokens of it, and the room is at least `max_model_len`.
    """

    def _try_schedule_encoder_inputs(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int, encoder_compute_budget: int, *other, **named
    ) -> tuple:
        found = super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, num_new_tokens, encoder_compute_budget, *other, **named
        )
        if found[1] == num_new_tokens:
            return found
        self.encoder_cache_manager.free(request)  # who waits keeps no room that others need
        return [], 0, encoder_compute_budget, *([] for _ in found[3:])
