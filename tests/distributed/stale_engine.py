"""A plugin: engines with weights of their own, one loses those of the first update, one keeps them in eight bits."""

from __future__ import annotations

import copy

import torch

from lightrft_visual.config import registry
from lightrft_visual.rollout.hf import TransformersEngine


class LosesASync(TransformersEngine):
    shares_weights = False
    syncs = 0

    def update_weights(self, named_tensors):
        self.syncs += 1
        if self.syncs != 2:  # the first is the start's
            self.actor.model.load_state_dict(dict(named_tensors), strict=False)


class InEightBits(TransformersEngine):
    shares_weights = False

    def update_weights(self, named_tensors):
        rounded = {name: tensor.to(torch.float8_e4m3fn).to(tensor.dtype) for name, tensor in named_tensors}
        self.actor.model.load_state_dict(rounded, strict=False)


@registry.engines.register("in_eight_bits", about="for tests")
def in_eight_bits(config, checkpoint, actor):
    return InEightBits(copy.deepcopy(actor.module), checkpoint.tokenizer)


@registry.engines.register("loses_a_sync", about="for tests")
def loses_a_sync(config, checkpoint, actor):
    return LosesASync(copy.deepcopy(actor.module), checkpoint.tokenizer)
