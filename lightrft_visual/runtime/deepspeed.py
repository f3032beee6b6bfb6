"""DeepSpeed ZeRO 0 to 3 behind one small interface: prepare, accumulate, guarded step, save and load.

Gradients of all micro-batches of a train batch are accumulated by hand-set boundaries, so that micro-batches may differ
in number and size from step to step. Losses come in as additive shares (their sum over micro-batches and ranks is the
loss of the train batch), hence the factor `world_size` against DeepSpeed's averaging.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator
from deepspeed.runtime.zero.partition_parameters import is_zero_param

from ..errors import CheckpointError, ConfigError, NonFiniteError
from . import collectives, vendor_patches, watchdog
from .checkpoint.ranks import files_of_ranks, stage_3, stages_1_and_2
from .extension_builds import CPU_ADAM, SHARED_MEMORY, build_first
from .host_memory import keep_freed_memory, unlink_buffers
from .offload import OptimizerOffload
from .precision import FP32Kept
from .safe_loading import use_safe_loading
from .seeding import rate_schedule, seed_everything
from .sequence import SequenceGroup
from .zero3_loading import Divide, divide, loading_divided

logger = logging.getLogger(__name__)

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}  # without a launcher


class Distribution(Protocol):
    """What a strategy reads of a run's `distributed` section; see `config.shared.DistributedConfig`."""

    zero_stage: int
    local_rank: int
    collective_timeout: float
    sp_size: int
    adam_offload: bool
    zpg: int

    def accumulated_in(self, bf16: bool) -> str | None:
        """Type in which gradients of micro-batches are added up; None: that of the weights."""


class Training(Protocol):
    """What an optimizer reads of a run's `train` section."""

    adam_betas: tuple[float, float]
    l2: float
    max_norm: float

    def schedule(self, updates: int) -> tuple[str, float]:
        """(name of the schedule, share of warm-up) of so many optimizer steps."""


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule; `total_steps` counts optimizer steps. `max_norm` 0 turns clipping off.

    rate_of: the learning rate of a parameter by its name, for those that have one of their own; else None.
    """

    learning_rate: float
    total_steps: int
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_norm: float = 1.0
    scheduler: str = "cosine_with_min_lr"
    warmup_ratio: float = 0.03
    rate_of: Callable[[str], float | None] | None = None

    def groups(self, module: nn.Module, dtype: torch.dtype) -> list[dict[str, Any]]:
        """The trained parameters by their learning rates and types, those of `learning_rate` and `dtype` first.

        DeepSpeed flattens each group into one tensor, and takes its own precision from the first one.
        """
        found: dict[tuple[float, torch.dtype], list[nn.Parameter]] = {(self.learning_rate, dtype): []}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                own = self.rate_of(name) if self.rate_of is not None else None
                found.setdefault((self.learning_rate if own is None else own, parameter.dtype), []).append(parameter)
        by_type = sorted(found.items(), key=lambda group: group[0][1] != dtype)
        return [{"params": parameters, "lr": rate} for (rate, _), parameters in by_type if parameters]

    @classmethod
    def from_config(cls, train: Training, learning_rate: float, updates: int) -> OptimizerSettings:
        """Those of a run of `updates` optimizer steps."""
        scheduler, warmup_ratio = train.schedule(updates)
        return cls(learning_rate, updates, tuple(train.adam_betas), train.l2, train.max_norm, scheduler, warmup_ratio)


@dataclass(frozen=True)
class StepResult:
    """applied: whether weights moved; grad_norm: before clipping, inf when the step was skipped."""

    applied: bool
    grad_norm: float
    learning_rate: float


def join(accelerator: DeepSpeedAccelerator, timeout: timedelta) -> None:
    """Make the process group that the environment describes, for torch and DeepSpeed. One rank binds no port.

    timeout: of its collectives. Raises ConfigError where another program has the port of several ranks.
    """
    on_host = accelerator.device_name() == "cpu"
    backend = "gloo" if on_host else accelerator.communication_backend_name()
    alone = int(os.environ["WORLD_SIZE"]) == 1
    if not (alone and on_host):
        build_first(SHARED_MEMORY)
    if alone:
        if not dist.is_initialized():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        with vendor_patches.without_shared_memory() if on_host else nullcontext():
            deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
        return
    try:
        deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"port {os.environ['MASTER_PORT']} of this host, at which the ranks meet, is taken by another run or "
            "program; choose a free one for this run: deepspeed --master_port PORT"
        ) from error
    if on_host:
        collectives.barrier()  # every rank has opened its buffer
        unlink_buffers(collectives.rank())


class DeepspeedStrategy:
    """Process groups, ZeRO settings and precision of one run."""

    def __init__(self, config: Distribution, *, bf16: bool = False, micro_batch_size: int = 1, seed: int = 42):
        self.config, self.bf16, self.micro_batch_size, self.seed = config, bf16, micro_batch_size, seed
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
        if "RANK" not in os.environ:
            os.environ.update(ALONE)
        if self.config.local_rank >= 0:  # the launcher's argument; it sets the variable too
            os.environ["LOCAL_RANK"] = str(self.config.local_rank)
        accelerator = get_accelerator()
        if accelerator.device_name() != "cpu":
            accelerator.set_device(int(os.environ["LOCAL_RANK"]))
        collectives.share_cores()  # images are prepared on the host, whatever the accelerator is
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
            return self._optimizer(settings.groups(module, self.dtype), settings)

        def scheduler(made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
            if self.config.zero_stage == 0:
                made.state.clear()  # in bf16 DeepSpeed has stepped on gradients of zero, which Adam would count
            return self._scheduler(made, settings)

        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config=self._train_config(settings),
            dist_init_required=False,
        )
        kept.warn(self.dtype)
        use_safe_loading(engine)
        return TrainEngine(engine, self.config.zero_stage, settings.max_norm)

    def prepare_inference(self, module: nn.Module, on_host: bool = False) -> nn.Module:
        """Place a frozen module (reference, reward model): sharded under ZeRO-3, whole otherwise.

        Weights take this run's precision and buffers keep theirs, as in a module that is trained: rotary frequencies in
        bfloat16 would turn positions far into a text by whole radians. on_host: they stay there, for `OffloadedModule`.
        """
        module.eval().requires_grad_(False)
        kept = FP32Kept(module, divided=self.divide is not None)
        if self.config.zero_stage != 3:
            for parameter in module.parameters():
                dtype = torch.float32 if parameter in kept else self.dtype
                parameter.data = parameter.data.to("cpu" if on_host else self.device, dtype)
            for buffer in module.buffers():
                buffer.data = buffer.data.to(self.device)
            return module
        self._divided(module, kept)
        return self.prepare_divided(module)

    def prepare_divided(self, module: nn.Module) -> nn.Module:
        """Divide a frozen module over the ranks in the precision that it has; only under ZeRO-3."""
        module.eval().requires_grad_(False)
        self.divide(module.parameters())
        module.to(self.device)
        engine, *_ = deepspeed.initialize(model=module, config=self._divided_config(), dist_init_required=False)
        return engine

    def _optimizer(self, parameters: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
        arguments = {"lr": settings.learning_rate, "betas": settings.betas, "weight_decay": settings.weight_decay}
        if self.config.adam_offload:
            return _cpu_adam(parameters, arguments)
        return torch.optim.AdamW(parameters, fused=has_fused_adamw(self.device.type), **arguments)

    def _scheduler(self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings):
        warmup = math.ceil(settings.total_steps * settings.warmup_ratio)
        return rate_schedule(settings.scheduler, optimizer, warmup, max(1, settings.total_steps))

    def _train_config(self, settings: OptimizerSettings) -> dict[str, Any]:
        c = self.config
        zero: dict[str, Any] = {"stage": c.zero_stage, "overlap_comm": c.overlap_comm}
        if c.adam_offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": get_accelerator().device_name() != "cpu"}
        config = self._base_config(zero | self._division())
        config["gradient_clipping"] = settings.max_norm
        accumulated = c.accumulated_in(self.bf16)
        if accumulated is not None:
            config["data_types"] = {"grad_accum_dtype": accumulated}
        return config

    def _divided_config(self) -> dict[str, Any]:
        """Of ZeRO-3 without an optimizer."""
        return self._base_config({"stage": 3} | self._division())

    def _division(self) -> dict[str, Any]:
        return {"zero_hpz_partition_size": self.config.zpg} if self.config.zpg > 1 else {}

    def _base_config(self, zero: dict[str, Any]) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
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

    On the host PyTorch's usual one stays.
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


def _cpu_adam(parameters: list[dict[str, Any]], arguments: dict[str, Any]) -> torch.optim.Optimizer:
    """DeepSpeed's Adam on the host, which is compiled at its first use. ConfigError when that fails."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    try:
        build_first(CPU_ADAM)
        return DeepSpeedCPUAdam(parameters, adamw_mode=True, **arguments)
    except Exception as error:  # the builder raises whatever the compiler or the loader raised
        raise ConfigError(
            f"adam_offload needs DeepSpeed's CPUAdam, which could not be built here ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'}); it takes a C++ compiler and ninja"
        ) from error


def _load_weights(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
    """Saved weights into a module; frozen parameters may be left out. CheckpointError for any other difference."""
    missing, unexpected = dst.load_state_dict(src, strict=False)
    frozen = {name for name, parameter in dst.named_parameters() if not parameter.requires_grad}
    lost = [name for name in missing if name not in frozen]
    if lost or unexpected:
        raise CheckpointError(
            f"the checkpoint is of another model: {len(lost)} weights are missing in it ({', '.join(lost[:3])}), "
            f"{len(unexpected)} are unknown ({', '.join(unexpected[:3])})"
        )


class TrainEngine:
    """A module under DeepSpeed: call it to run forward, `accumulate` losses, then `step`.

    The module is in evaluation mode (no dropout, no gradient checkpointing), except from a forward with gradient until
    `accumulate` has run its backward, which recomputes parts of that forward: there it is in training mode.
    A loss or gradient that is not finite on any rank leaves the weights of every rank as they were.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, zero_stage: int, max_norm: float):
        self.engine, self.zero_stage, self.max_norm = engine, zero_stage, max_norm
        self._bad: torch.Tensor | None = None  # on the device: whether a loss since the last step was not finite
        self._states, self._weights = OptimizerOffload(), OptimizerOffload()
        self._training(False)

    @property
    def module(self) -> nn.Module:
        """The module under DeepSpeed, its weights on the device."""
        if self._weights.away:
            self._weights.come_back()
        return self.engine.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward: in training mode where gradients are recorded, in evaluation mode otherwise."""
        if torch.is_grad_enabled():
            self._training(True)
            return self.engine(*args, **kwargs)
        before = self.module.training  # true between a forward with gradient and its backward
        self._training(False)
        try:
            return self.engine(*args, **kwargs)
        finally:
            self._training(before)

    def _training(self, mode: bool) -> None:
        if self.module.training is not mode:
            self.module.train(mode)

    @property
    def poisoned(self) -> bool:
        """Whether a loss since the last step was not finite; of all ranks once the last one is accumulated. Waits for
        the device."""
        return self._bad is not None and bool(self._bad.item())

    def accumulate(self, loss: torch.Tensor, last: bool, told: torch.Tensor | None = None) -> torch.Tensor | None:
        """Backward of one micro-batch's share; `last` marks the last one before `step`, which is a collective.

        Losses are looked at on the device, and ranks tell each other at the last one. Where a loss was not finite on
        any rank, that one sends NaN through backward on all ranks: the same hooks and collectives run everywhere, and
        the step is then discarded everywhere.

        Args:
            told: numbers (n) that this rank tells the others with the last one.

        Returns: what all ranks told (ranks, n), float64, on the device; None where nothing is told.
        """
        if self._weights.away or self._states.away:
            self._reload()
        bad = (~torch.isfinite(loss.detach())).float().reshape(())
        self._bad = bad if self._bad is None else torch.maximum(self._bad, bad)
        if last:
            own = self._bad.double().reshape(1)
            gathered = collectives.all_gather_numbers(own if told is None else torch.cat([own, told.to(own)]))
            self._bad = gathered[:, 0].amax()
            loss = loss * torch.where(self._bad > 0, math.nan, 1.0).to(loss.dtype)
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * collectives.world_size(), scale_wrt_gas=False)
        self._training(False)
        return gathered[:, 1:] if last and told is not None else None

    def step(self) -> StepResult:
        """Apply the accumulated gradients, unless they are not finite on some rank; the caller counts those. The host
        waits for the device here, once a step."""
        rate = self.engine.lr_scheduler.get_last_lr()[0]
        if self.zero_stage == 0:
            return self._plain_step(rate)
        self.engine.step()
        applied, norm = not self.engine.optimizer.overflow, self.engine.get_global_grad_norm()
        poisoned, norm = self._read_with_bad(math.inf if norm is None else norm)
        if poisoned and applied:
            raise NonFiniteError("a non-finite loss was stepped on: DeepSpeed did not discard its gradients")
        return StepResult(applied, norm if applied else math.inf, rate)

    def _read_with_bad(self, norm: torch.Tensor | float) -> tuple[bool, float]:
        """(whether a loss since the last step was not finite, a norm), in one read of the device."""
        bad, self._bad = self._bad, None
        if bad is None:
            return False, float(norm)
        both = torch.stack([bad.double(), torch.as_tensor(norm).to(bad.device).double().reshape(())]).tolist()
        return both[0] > 0, both[1]

    def _plain_step(self, rate: float) -> StepResult:
        """ZeRO-0 has no check of its own: the norm of the reduced gradients decides, before the optimizer sees them."""
        gradients = [p.grad for p in self._stage_0_parameters() if p.grad is not None]
        norm = torch.stack([gradient.float().norm() for gradient in gradients]).norm() if gradients else 0.0
        poisoned, norm = self._read_with_bad(norm)
        if poisoned or not math.isfinite(norm):
            self.engine.optimizer.zero_grad()
            self.engine.zero_grad()
            return StepResult(False, math.inf, rate)
        self.engine.step()
        return StepResult(True, norm, rate)

    def _stage_0_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.engine.module.parameters() if p.requires_grad]

    def offload(self) -> None:
        """Move optimizer states, fp32 weights and gradient buffers to the host until training needs them; ZeRO 1 to 3.

        Every rank calls it, between optimizer steps.
        """
        if not self._states.away:
            self._states.leave(self._state_tensors(), self._gradient_buckets())

    def offload_weights(self) -> None:
        """Move the weights to the host, which come back when the module is next used. Every rank calls it."""
        if not self._weights.away:
            self._weights.leave(self._weight_tensors())

    def bring_back(self) -> None:
        """The weights to the device, for those who hold the parameters themselves; every use of this engine does it."""
        if self._weights.away:
            self._weights.come_back()

    def _reload(self) -> None:
        self.bring_back()
        self._states.come_back()

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        """What only training reads."""
        zero = self.engine.optimizer
        for state in zero.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value) and value.dim())
        if self.zero_stage < 3:
            yield from zero.single_partition_of_fp32_groups
            return
        yield from zero.fp32_partitioned_groups_flat
        yield zero.grad_partitions_flat_buffer

    def _gradient_buckets(self) -> list[torch.Tensor]:
        """Where ZeRO-3 puts gradients together before it reduces them: a gigabyte in bfloat16, kept between steps."""
        if self.zero_stage < 3:
            return []
        return [bucket.buffer for bucket in self.engine.optimizer.ipg_buckets.values() if bucket.buffer is not None]

    def _weight_tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self.engine.module.parameters():
            yield parameter.data
            if is_zero_param(parameter):
                yield from (part for part in (parameter.ds_tensor, parameter.ds_secondary_tensor) if part is not None)

    @contextmanager
    def gathered(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Whole parameters inside the block; a collective under ZeRO-3, nothing otherwise."""
        self.bring_back()
        if self.zero_stage != 3:
            yield
            return
        with deepspeed.zero.GatheredParameters(parameters):
            yield

    def save(self, folder: str, tag: str) -> None:
        """Write trained weights, optimizer and schedule of this rank; every rank calls it.

        Frozen weights, such as the base of adapters, are left out: every run loads them anew.
        """
        self._reload()
        self.engine.save_checkpoint(folder, tag=tag, save_latest=False, exclude_frozen_parameters=True)

    @property
    def saved_bytes(self) -> int:
        """About what the ranks' parts of `save` take together: weights, and Adam's three float32 numbers for each."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return sum(getattr(p, "ds_numel", p.numel()) * (p.element_size() + 12) for p in trained)

    def load(self, folder: str, tag: str, saved_ranks: int | None = None) -> None:
        """Weights, optimizer and schedule of this rank; every rank calls it. saved_ranks: how many saved them; None
        where they were as many as now.

        Learning rate, betas and weight decay stay those of this run's settings: DeepSpeed would put the saved ones in
        their place, and a rate that was changed for the resumed run would be ignored.
        """
        self._reload()
        scheduler = self.engine.lr_scheduler
        rates = list(scheduler.base_lrs)
        set_here = [{name: group[name] for name in ("betas", "weight_decay")} for group in self._optimizer_groups()]
        if self.zero_stage == 0 or saved_ranks in (None, collectives.world_size()):
            loaded, _ = self.engine.load_checkpoint(folder, tag=tag, custom_load_fn=_load_weights)
            if loaded is None:
                raise CheckpointError(f"DeepSpeed found no state in {folder}/{tag}")
        else:
            self._load_of_ranks(Path(folder) / tag, saved_ranks)
        for group, values in zip(self._optimizer_groups(), set_here, strict=True):
            group.update(values)
        if rates != scheduler.base_lrs:
            saved = scheduler.base_lrs[0]
            logger.warning("%s: the learning rate was %g; from here on it is %g", tag, saved, rates[0])
            self._use_rates(rates)

    def _load_of_ranks(self, folder: Path, saved_ranks: int) -> None:
        """What another number of ranks saved."""
        engine, zero, divided = self.engine, self.engine.optimizer, self.zero_stage == 3
        named = "*zero_pp_rank_0_mp_rank_00_model_states.pt" if divided else "mp_rank_00_model_states.pt"
        paths = sorted(folder.glob(named))
        if not paths:
            raise CheckpointError(f"{folder} has no {named}: was it saved with ZeRO-{self.zero_stage}?")
        model, read = engine.checkpoint_engine.load(str(paths[0]), map_location="cpu"), engine.checkpoint_engine.map
        saved = [read(path)["optimizer_state_dict"] for path in files_of_ranks(folder, saved_ranks, "optim_states")]
        if divided:
            zero.checkpoint_event_prologue()
            content = stage_3(saved, zero, collectives.rank(), collectives.world_size())
            for name, buffer in engine.module.named_buffers():
                if name in model["buffer_names"]:
                    buffer.copy_(model["module"][name])
        else:
            _load_weights(model["module"], engine.module)
            content = stages_1_and_2(saved, zero, collectives.rank())
        zero.load_state_dict({collectives.rank(): content}, load_from_fp32_weights=True)
        if divided:
            zero.checkpoint_event_epilogue()
        engine.lr_scheduler.load_state_dict(model["lr_scheduler"])
        for name in ("global_steps", "global_samples", "skipped_steps"):
            setattr(engine, name, model[name])

    def _optimizer_groups(self) -> list[dict[str, Any]]:
        return self.engine.lr_scheduler.optimizer.param_groups

    def _use_rates(self, base: list[float]) -> None:
        scheduler = self.engine.lr_scheduler
        scheduler.base_lrs = base
        scheduler._last_lr = [rate * shape(scheduler.last_epoch) for rate, shape in zip(base, scheduler.lr_lambdas)]
        for group, start, rate in zip(self._optimizer_groups(), base, scheduler._last_lr):
            group["initial_lr"], group["lr"] = start, rate
