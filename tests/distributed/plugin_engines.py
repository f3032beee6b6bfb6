"""A plugin: an engine whose tokens follow from each response's stream alone, and a reward of any response.

What other ranks, micro-batches and processors round otherwise then changes no token. The weights decide the log-probs.
Two more engines have weights of their own: one loses those of the first update, one keeps them in eight bits.
"""

import copy
from unittest.mock import patch

import torch

from lightrft_visual.config import registry
from lightrft_visual.rollout import hf

ENDS = 0.15  # chance of the end token, at each token of a text


class GivenTokens(hf.TransformersEngine):
    def generate(self, prompts, settings, finished=None):
        end, vocabulary = int(self.actor.eos_ids[0]), self.actor.head[0].out_features

        def given(logits, noise, settings):
            """(tokens, log-probs) as `hf.draw`: of the tokens that are not banned one like the other."""
            allowed = logits.isfinite()
            wanted = (noise * allowed.sum(dim=-1)).floor().long() + 1
            tokens = torch.searchsorted(allowed.cumsum(dim=-1), wanted.unsqueeze(1)).squeeze(1)
            if logits.shape[-1] == vocabulary:
                tokens = torch.where((noise < ENDS) & allowed[:, end], end, tokens)
            return tokens, logits.log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)

        with patch.object(hf, "draw", given):
            return super().generate(prompts, settings, finished)


registry.engines.register("given", about="for tests", draws=True)(GivenTokens.from_config)


@registry.scorers.register("response_spread", "the mean of the response's token ids, of 256, modulo 1")
def response_spread(completion_ids):
    return [sum(ids) / len(ids) / 256 % 1 for ids in completion_ids]


class LosesASync(hf.TransformersEngine):
    shares_weights = False
    syncs = 0

    def update_weights(self, named_tensors):
        self.syncs += 1
        if self.syncs != 2:  # the first is the start's
            self.actor.model.load_state_dict(dict(named_tensors), strict=False)


class InEightBits(hf.TransformersEngine):
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
