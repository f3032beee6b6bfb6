"""The device `sim`: host memory that PyTorch takes for another device's, so that code for accelerators runs on CPUs."""

import fcntl
import functools
import hashlib
import sys
import types
from pathlib import Path

import torch

NAME = "sim"


class _Event:
    def __init__(self, *args, **kwargs) -> None: ...

    def record(self, *args) -> None: ...

    def wait(self, *args) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        return 0.0


@functools.cache
def load() -> types.ModuleType:
    """Compile (once an environment) and register the device; the C++ module."""
    from torch.utils.cpp_extension import get_default_build_root
    from torch.utils.cpp_extension import load as compile_extension

    source, of = Path(__file__).with_name("device.cpp"), f"{sys.prefix} {torch.__version__}"
    folder = Path(get_default_build_root(), f"lightrft_simulated_{hashlib.sha256(of.encode()).hexdigest()[:8]}")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "turn", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # until the file is closed, or the process ends
        (folder / "lock").unlink(missing_ok=True)  # torch's own, of a test that was killed while it compiled
        how = {"extra_cflags": ["-O1"], "build_directory": str(folder), "verbose": False}
        native = compile_extension("lightrft_simulated_device", [str(source)], **how)
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    module.native = native
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.synchronize = lambda device=None: None
    module.manual_seed = module.manual_seed_all = lambda seed: None  # its random numbers are the CPU generator's
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.memory_allocated = lambda device=None: native.allocated()
    module.max_memory_allocated = lambda device=None: native.peak()
    module.reset_peak_memory_stats = lambda device=None: native.reset_peak()
    module.empty_cache = lambda: None
    module.Event = _Event
    torch._register_device_module(NAME, module)
    sys.modules[f"torch.{NAME}"] = module
    torch.utils.generate_methods_for_privateuse1_backend()
    return native
