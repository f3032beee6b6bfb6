"""DeepSpeed ZeRO 0 to 3 behind one small interface: the ranks of a run, and modules that it prepares."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any, Self

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator
from deepspeed.runtime.zero.partition_parameters import is_zero_param

from ..errors import ConfigError, LightRFTVisualError, reason_of
from . import collectives, presence, vendor_patches, watchdog
from .host_memory import keep_freed_memory
from .precision import FP32Kept
from .safe_loading import SafeCheckpointEngine
from .seeding import choose_deterministic, rate_schedule, seed_everything
from .sequence import SequenceGroup
from .train_engine import TrainEngine
from .usercode.surroundings import device_here
from .zero3_loading import Divide, divide, gather_by_blocks, loading_divided

logger = logging.getLogger(__name__)
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}  # what one rank needs
_set_here: dict[str, str] = {}  # of these by the last run of this process, which no launcher has started
# Of a rank whose host only prepares: with one for each of 16 cores of a virtual machine every small operation waited
# 8 ms for the slowest of them, with four it took less than 1.
FEW_THREADS = 4


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule; `total_steps` counts optimizer steps. `max_norm` 0 turns clipping off.

    rate_of: the part of the model and its learning rate, for parameters (by name) of those that have one; else None.
    """

    learning_rate: float
    total_steps: int
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_norm: float = 1.0
    scheduler: str = "cosine_with_min_lr"
    warmup_steps: int = 0
    rate_of: Callable[[str], tuple[str, float] | None] | None = None

    def groups(self, module: nn.Module, dtype: torch.dtype) -> list[dict[str, Any]]:
        """The trained parameters by parts with rates of their own, whatever these are, and types; the rest comes first.

        DeepSpeed flattens each group into one tensor, and takes its own precision from the first one.
        """
        rest = "", self.learning_rate
        found: dict[tuple[tuple[str, float], torch.dtype], list[nn.Parameter]] = {(rest, dtype): []}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                own = self.rate_of(name) if self.rate_of is not None else None
                found.setdefault((own or rest, parameter.dtype), []).append(parameter)
        by_type = sorted(found.items(), key=lambda group: group[0][1] != dtype)
        return [{"params": parameters, "lr": rate} for ((_, rate), _), parameters in by_type if parameters]

    @classmethod
    def from_config(cls, train: Any, learning_rate: float, updates: int) -> Self:
        """Those of a run.

        Args:
            train: section of the configuration.
            learning_rate: of parameters without a rate of their own.
            updates: optimizer steps of the run.
        """
        scheduler, warmup_steps = train.schedule(updates)
        return cls(learning_rate, updates, tuple(train.adam_betas), train.l2, train.max_norm, scheduler, warmup_steps)


def join(accelerator: DeepSpeedAccelerator, timeout: timedelta) -> None:
    """Make the process group that the environment describes, for torch and DeepSpeed. One rank binds no port.

    timeout: of its collectives. Raises ConfigError where another program has the port of several ranks, and
    LightRFTVisualError where not all of them come in that time.
    """
    on_host = accelerator.device_name() == "cpu"
    backend = "gloo" if on_host else accelerator.communication_backend_name()
    if presence.ranks_started() == 1 and not dist.is_initialized():
        begin = partial(dist.init_process_group, backend, rank=0, world_size=1, timeout=timeout)
        begin(store=dist.HashStore())
        if deepspeed.comm.is_initialized():  # an earlier run's engine ended its group: let DeepSpeed forget that
            deepspeed.comm.destroy_process_group()
            begin(store=dist.HashStore())
    try:
        with vendor_patches.without_shared_memory() if on_host else nullcontext(), _endable():
            deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" not in str(error):
            place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            told = f"not all {presence.ranks_started()} ranks came to {place}, or rank 0 is not to be reached there"
            late = f"within {timeout.total_seconds():.0f} s (collective_timeout)"
            raise LightRFTVisualError(
                f"{told} {late}: look at what the others said last; torch says: {reason_of(error)}"
            ) from error
        raise ConfigError(
            f"port {os.environ['MASTER_PORT']} of this host, at which the ranks meet, is taken by another run or "
            "program; choose a free one for this run: deepspeed --master_port PORT"
        ) from error


@contextmanager
def _endable() -> Iterator[None]:
    """Inside, signals end a process that waits for other ranks: torch waits in C++, where no handler of Python's is
    called, and there is nothing to save. What is ignored stays so."""
    asked = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if presence.ranks_started() > 1 else ()
    with ExitStack() as inside:
        for number in asked:
            if signal.getsignal(number) != signal.SIG_IGN:
                inside.enter_context(presence.handled(number, signal.SIG_DFL))
        yield


class DeepspeedStrategy:
    """Process groups, ZeRO settings and precision of one run. config: its section `distributed`."""

    def __init__(self, config: Any, *, bf16: bool = False, seed: int = 42):
        self.config, self.bf16, self.seed = config, bf16, seed
        self.sequence: SequenceGroup | None = None  # this rank's, from `setup_distributed` on

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def device(self) -> torch.device:
        """This rank's accelerator, or the CPU."""
        accelerator = get_accelerator()
        return torch.device(accelerator.current_device_name())

    def setup_distributed(self) -> None:
        """Join the process group of the launcher (a group of one without a launcher) and seed this rank.

        Raises ConfigError where sp_size does not divide the ranks, or where their port is taken.
        """
        if presence.ranks_started() == 1:
            alone = ALONE | {"LOCAL_RANK": str(device_here() or 0)}  # which a program may have chosen
            if os.environ.get("RANK") and not (_set_here and _set_here.items() <= os.environ.items()):
                alone |= {name: os.environ[name] for name in alone if os.environ.get(name)}
            else:
                _set_here.update(alone)
                if several := presence.above_one(presence.TASKS):
                    told = f"{several} without RANK: each of these tasks is a run of one rank"
                    logger.warning("%s; have one task a host start torchrun instead (docs/multi_node.md)", told)
            os.environ.update(alone)
        if self.config.deterministic:
            choose_deterministic()
        if self.config.local_rank >= 0:  # the launcher's argument; it sets the variable too
            os.environ["LOCAL_RANK"] = str(self.config.local_rank)
        accelerator = get_accelerator()
        if accelerator.device_name() != "cpu":
            accelerator.set_device(int(os.environ["LOCAL_RANK"]))
        on_host = accelerator.device_name() == "cpu" or self.config.adam_offload
        collectives.share_cores(None if on_host else FEW_THREADS)
        join(accelerator, timedelta(seconds=self.config.collective_timeout))
        if accelerator.device_name() == "cpu":
            keep_freed_memory()
        collectives.bound(self.config.collective_timeout)
        watchdog.start(self.config.collective_timeout)
        self.sequence = SequenceGroup.of(self.config.sp_size)
        seed_everything(self.seed)

    def loading(self) -> AbstractContextManager[None]:
        """Around the loading of a transformers model that is given to `prepare` or `prepare_inference` afterwards.

        Under ZeRO-3 no rank holds the whole of it at any time. All ranks load together.
        """
        return loading_divided(self._divided_config()) if self.config.zero_stage == 3 else nullcontext()

    @property
    def divide(self) -> Divide | None:
        """What leaves this rank its part of parameters that are whole; None where the ZeRO stage divides none."""
        return partial(divide, settings=self._divided_config()) if self.config.zero_stage == 3 else None

    def _divided(self, module: nn.Module, kept: FP32Kept) -> None:
        """Under ZeRO-3: what of a module is still whole takes the run's precision and is divided; buffers are moved."""
        if self.divide is not None:
            for parameter in module.parameters():
                if not is_zero_param(parameter) and parameter not in kept:
                    parameter.data = parameter.data.to(self.dtype)
            self.divide(module.parameters())
            module.to(self.device)

    def prepare(self, module: nn.Module, settings: OptimizerSettings) -> TrainEngine:
        """Wrap a module for training."""
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError("nothing to train: every parameter is frozen (freeze_prefix)")
        kept = FP32Kept(module, divided=self.divide is not None)
        self._divided(module, kept)

        def optimizer(_: None) -> torch.optim.Optimizer:
            kept.restore()  # DeepSpeed has cast the weights, and takes the optimizer's as they are
            arguments = {"lr": settings.learning_rate, "betas": settings.betas, "weight_decay": settings.weight_decay}
            # On the host it is as fast as DeepSpeed's CPUAdam, which would first be compiled for a minute.
            fused = self.config.adam_offload or has_fused_adamw(self.device.type)
            return torch.optim.AdamW(settings.groups(module, self.dtype), fused=fused, **arguments)

        def scheduler(made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
            if self.config.zero_stage == 0:
                made.state.clear()  # in bf16 DeepSpeed has stepped on gradients of zero, which Adam would count
            return rate_schedule(settings.scheduler, made, settings.warmup_steps, max(1, settings.total_steps))

        with vendor_patches.gradients_one_by_one(), vendor_patches.local_rank_under_open_mpi():
            engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=optimizer,
                lr_scheduler=scheduler,
                config=self._train_config(module, settings),
                dist_init_required=False,
            )
        kept.warn(self.dtype)
        engine.checkpoint_engine = SafeCheckpointEngine()
        return TrainEngine(engine, self.config.zero_stage, settings.max_norm, self.config.deterministic)

    def prepare_inference(self, module: nn.Module, on_host: bool = False) -> nn.Module:
        """Place a frozen module (reference, reward model): sharded under ZeRO-3, whole otherwise.

        Weights take this run's precision and buffers keep theirs, as in a module that is trained: rotary frequencies in
        bfloat16 would turn positions far into a text by whole radians. on_host: they stay there, for `OffloadedModule`.
        """
        module.eval().requires_grad_(False)
        kept = FP32Kept(module, divided=self.divide is not None)
        if self.config.zero_stage != 3:
            home = torch.device("cpu") if on_host else self.device
            for parameter in module.parameters():
                parameter.data = parameter.data.to(home, torch.float32 if parameter in kept else self.dtype)
            return module.to(home)
        self._divided(module, kept)
        return self.prepare_divided(module)

    def prepare_divided(self, module: nn.Module) -> nn.Module:
        """Divide a frozen module over the ranks in the precision that it has; only under ZeRO-3."""
        module.eval().requires_grad_(False)
        self.divide(module.parameters())
        module.to(self.device)
        config = self._divided_config(**gather_by_blocks(module))
        with vendor_patches.local_rank_under_open_mpi():
            engine, *_ = deepspeed.initialize(model=module, config=config, dist_init_required=False)
        return engine

    def _train_config(self, module: nn.Module, settings: OptimizerSettings) -> dict[str, Any]:
        c = self.config
        zero: dict[str, Any] = {"stage": c.zero_stage, "overlap_comm": c.overlap_comm}
        if c.zero_stage == 3:
            zero |= gather_by_blocks(module)
        if c.adam_offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": get_accelerator().device_name() != "cpu"}
        config = self._base_config(zero)
        config["gradient_clipping"] = settings.max_norm
        accumulated = c.accumulated_in(self.bf16)
        if accumulated is not None:
            config["data_types"] = {"grad_accum_dtype": accumulated}
        if accumulated == "fp32" and c.zero_stage == 1:  # it would round its sums to the weights' type to reduce them
            config["communication_data_type"] = "fp32"
        return config

    def _divided_config(self, **more: int) -> dict[str, Any]:
        """Of ZeRO-3 without an optimizer. more: of its settings."""
        return self._base_config({"stage": 3} | more)

    def _base_config(self, zero: dict[str, Any]) -> dict[str, Any]:
        if self.config.zpg > 1:
            zero = zero | {"zero_hpz_partition_size": self.config.zpg}
        return {
            "train_micro_batch_size_per_gpu": 1,  # asked for; only DeepSpeed's own count of samples reads it
            # Only a switch here: boundaries are set by hand and losses are not divided by it. 1 would turn the
            # accumulation buffers of ZeRO's offload path off.
            "gradient_accumulation_steps": 2,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.bf16, "check_grad_overflow": True} if self.bf16 else {"enabled": False},
            "steps_per_print": 10**9,
            "wall_clock_breakdown": False,
        }


@cache
def has_fused_adamw(device_type: str) -> bool:
    """Whether an accelerator has AdamW as one kernel, which makes no temporaries of gigabytes; tried once on a number.

    On the host PyTorch's usual one stays, but with `adam_offload`.
    """
    if device_type == "cpu":
        return False
    weight = torch.zeros(1, device=device_type, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    try:
        torch.optim.AdamW([weight], fused=True).step()
    except (NotImplementedError, RuntimeError):
        return False
    return True
