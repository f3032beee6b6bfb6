"""DeepSpeed's own files, loaded without running what a pickle in them may ask for."""

import pickle
import zipfile
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from ..errors import CheckpointError
from .checkpoint.behind import write_file

# The only classes, besides tensors and plain containers, that ZeRO's optimizer files hold (DeepSpeed 0.19). Each is a
# record without side effects.
DEEPSPEED_CLASSES = [ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]


class _EnumByValue(pickle.Pickler):
    """Python 3.11.0 to 3.11.3 pickle an enum as a call of `getattr`, which the safe reader rightly refuses."""

    def reducer_override(self, obj: Any) -> Any:
        return (type(obj), (obj.value,)) if isinstance(obj, Enum) else NotImplemented


# What torch.save asks of a pickle module.
_PICKLE = SimpleNamespace(__name__="pickle", Pickler=_EnumByValue)


class SafeCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's files, read with `weights_only=True` (DeepSpeed itself unpickles anything) and written to suit, in
    torch's own form, which can be mapped into memory."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write a state dict, its classes pickled by names that `load` knows."""
        write_file(Path(path), state_dict, partial(torch.save, f=path, pickle_module=_PICKLE))

    def map(self, path: Any) -> Any:
        """As `load`; tensors are read from the file where they are used."""
        return self.load(str(path), map_location="cpu", mmap=zipfile.is_zipfile(path))

    def load(self, path: str, map_location: Any = None, mmap: bool = False) -> Any:
        """The file's content. CheckpointError, before any of it is run, when it holds a class that is not listed."""
        try:
            with torch.serialization.safe_globals(DEEPSPEED_CLASSES):
                return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap or None)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{path} is refused: it holds more than DeepSpeed's state") from error
        except (RuntimeError, OSError, EOFError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
