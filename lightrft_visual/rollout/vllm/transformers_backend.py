"""vLLM's transformers backend beside a trainer: models of which vLLM has no code of its own, such as Emu3.

For torch.compile vLLM changes the class of the language model in place: how it is made and how it is called. In a
process of its own that harms nobody. Here the trainer's model is of that class too, and its next forward would fail.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoConfig, AutoModel


@contextmanager
def decoder_class_of_its_own(model: str, trust_remote_code: bool = False) -> Iterator[None]:
    """Inside, transformers makes models of this checkpoint with a subclass in place of their language model's class.

    vLLM, which builds its model inside, then changes the subclass.
    """
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        found = AutoModel.from_config(config, trust_remote_code=trust_remote_code)
    own = type(found.get_decoder())
    home, name = sys.modules[own.__module__], own.__name__
    setattr(home, name, type(name, (own,), {"__module__": own.__module__, "__qualname__": own.__qualname__}))
    try:
        yield
    finally:
        setattr(home, name, own)
