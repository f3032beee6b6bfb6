"""vLLM's own checks of engine arguments as on an H100: CUDA and Triton claimed, no model loaded; spoils its process."""

import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import torch

from lightrft_visual.errors import ConfigError
from lightrft_visual.rollout.vllm.arguments import (
    SECOND_RUNNERS_RULES,
    VLLMSettings,
    checked,
    engine_arguments,
    prepare_environment,
)
from lightrft_visual.rollout.vllm.rules import sampling_rules

COMPILED = ("_C_stable_libtorch", "vllm_flash_attn", "vllm_flash_attn.flash_attn_interface")
OPTIONS = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "no sleep": {"enable_sleep": False},
    "float32": {"dtype": "float32"},
    "many sequences": {"max_num_seqs": 1024, "max_num_batched_tokens": 16384},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "fp8 weights": {"quantization": "fp8"},
    "pixels": {"processor_kwargs": {"max_pixels": 50176}},
    "refused": {"kv_cache_dtype": "fp9"},
    "extra": {"extra": {"enable_prefix_caching": False, "block_size": 32}},
}


def claim_cuda(folder: str) -> None:
    """Everything that vLLM asks about the device from now on is answered as on an H100."""
    from vllm import EngineArgs

    EngineArgs(model=folder).create_engine_config()  # what this imports would look for compiled parts of CUDA
    for name in COMPILED:
        sys.modules[f"vllm.{name}"] = MagicMock()
    for name in ("fp8", "block_fp8"):
        setattr(torch.ops._C, f"cutlass_scaled_mm_supports_{name}", lambda capability: True)
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H100(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id=0):
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return 80 << 30

        def is_cumem_allocator_available(self):
            return True

    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"]:
        for attribute, value in (("current_platform", H100()), ("_current_platform", H100()), ("HAS_TRITON", True)):
            if attribute in vars(module):
                setattr(module, attribute, value)


def said(check, rules) -> str:
    """What vLLM's loader of one runner says about a processor: 'ok', or its error."""
    try:
        check([rules])
    except ValueError as error:
        return str(error)
    return "ok"


def accepted(settings: VLLMSettings) -> dict[str, str]:
    """By runner, what vLLM says about the arguments and the rules for it; and about the other runner's rules.

    vLLM 0.26 takes the first runner for everything that has rules: there only that one is asked.
    """
    from vllm import EngineArgs, envs
    from vllm.v1.sample.logits_processor import _load_logitsprocs_by_fqcns as first_loader

    runners = [("first", False, first_loader)]
    if find_spec(SECOND_RUNNERS_RULES) is not None:
        from vllm.v1.worker.gpu.sample import logits_processor

        runners.append(("second", None, logits_processor.build_custom_logits_processors_params_validator))
    else:
        runners.append(("first by vLLM's choice", None, first_loader))
    arguments, result = engine_arguments(settings, on_cpu=False), {}
    for runner, wanted, loader in runners:
        envs.VLLM_USE_V2_MODEL_RUNNER = wanted
        try:
            second, _ = checked(arguments)
        except ConfigError as error:
            result[runner] = str(error)
            continue
        assert second is (runner == "second")
        rules = sampling_rules([3, 5], second)
        result[runner] = said(loader, rules)
        whole = EngineArgs(**arguments, logits_processors=[rules]).create_engine_config()
        assert whole.use_v2_model_runner is second
        if runners[-1][0] == "second":
            result[f"{runner}, the other's rules"] = said(loader, sampling_rules([3, 5], not second))
    return result


def accepted_of(folders: list[str]) -> dict[str, dict[str, str]]:
    """Every option of the first folder's model, and each of the others as it is."""
    prepare_environment("float32")
    claim_cuda(folders[0])
    cases = [(folders[0], name) for name in OPTIONS] + [(folder, "plain") for folder in folders[1:]]
    results = {}
    for folder, name in cases:
        vision = "vl" in Path(folder).name
        defaults = {"max_model_len": 512, "dtype": "bfloat16", "enable_sleep": True, "vision": vision}
        settings = VLLMSettings(**({"model": folder} | defaults | OPTIONS[name]))
        results[f"{Path(folder).name}, {name}"] = accepted(settings)
    return results
