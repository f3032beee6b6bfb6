"""A plugin: an engine with weights of its own that loses those of the first update."""

from __future__ import annotations

import copy

from lightrft_visual.config import registry
from lightrft_visual.rollout.hf import TransformersEngine


class LosesASync(TransformersEngine):
    shares_weights = False
    syncs = 0

    def update_weights(self, named_tensors):
        self.syncs += 1
        if self.syncs != 2:  # the first is the start's
            self.actor.model.load_state_dict(dict(named_tensors), strict=False)


@registry.engines.register("loses_a_sync", about="for tests")
def loses_a_sync(config, checkpoint, actor):
    return LosesASync(copy.deepcopy(actor.module), checkpoint.tokenizer)
