"""Where rollouts are made, and how far they may run ahead of the trainer; see docs/scale_out.md."""

import re
from dataclasses import dataclass
from typing import Annotated

from .constraints import (
    Constraint,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    not_usual,
    one_of,
    require,
)

AUTO = "auto"


_gpus = Constraint(
    lambda value: value == AUTO or (str(value).isdigit() and int(value) > 0), "it is a positive number, or auto"
)


def _devices(value: list[int]) -> bool:
    return all(device >= 0 for device in value) and len(set(value)) == len(value) > 0


Devices = Annotated[list[int] | None, Constraint(_devices, "it is a list of different device numbers, such as [0, 1]")]


# Settings, other than rollout_devices, that only rollout workers read.
OF_WORKERS = ("rollout_num_gpus", "rollout_num_workers", "require_cluster", "weight_transfer")


@dataclass
class ResourcesConfig(Section):
    """Devices of the trainer and of the rollout workers, with placement split. Numbers are those of the host."""

    visible_devices: Devices = None  # those that the run may use; default: all that a launcher left visible
    trainer_devices: Devices = None  # those that the launcher gave the ranks, which is the default
    rollout_devices: Devices = None  # default: the others
    trainer_num_gpus: PositiveInt | None = None  # ranks; as many as the launcher has to start
    rollout_num_gpus: Annotated[str, _gpus] = AUTO  # auto: all others
    rollout_num_workers: PositiveInt | None = None  # engines; default: one a GPU of the rollouts, one without GPUs
    rollout_num_cpus: NonNegativeFloat = 1.0  # that Ray reserves for each worker
    # how workers get weights: device: from card to card; host: by host memory; auto: by card where that can be
    weight_transfer: Annotated[str, one_of(AUTO, "host", "device")] = "host"
    # reward models in Ray actors of their own, with either placement: naming one of the first three asks for it
    reward_devices: Devices = None  # of this host
    reward_num_gpus: PositiveFloat | None = None  # that an existing cluster gives to all actors of a reward together
    reward_num_workers: PositiveInt | None = None  # actors of each reward; default: one a device, or one
    require_cluster: bool = False  # refuse to start without RAY_ADDRESS

    @property
    def rewards_placed(self) -> bool:
        """Whether reward models are to be in actors."""
        named = self.reward_devices, self.reward_num_gpus, self.reward_num_workers
        return any(value is not None for value in named)

    @property
    def trainer_ranks(self) -> int | None:
        """Ranks of the trainer, where these settings say how many."""
        return self.trainer_num_gpus or len(self.trainer_devices or ()) or None

    def check(self) -> None:
        """Devices of the sides, which must not overlap."""
        trainer, rollout = set(self.trainer_devices or ()), set(self.rollout_devices or ())
        reward = set(self.reward_devices or ())
        require(not trainer & rollout, f"devices {sorted(trainer & rollout)} are the trainer's and the rollouts' alike")
        shared = sorted(reward & (trainer | rollout))
        require(not shared, f"devices {shared} are the rewards' and the trainer's or the rollouts' alike")
        require(
            not reward or self.reward_num_gpus is None,
            "reward_devices names devices of this host, reward_num_gpus a number of an existing cluster's: use one",
        )
        if self.visible_devices is not None:
            beyond = sorted((trainer | rollout | reward) - set(self.visible_devices))
            require(not beyond, f"devices {beyond} are not among visible_devices {self.visible_devices}")
        if self.rollout_devices and self.rollout_num_gpus != AUTO:
            require(
                int(self.rollout_num_gpus) == len(self.rollout_devices),
                f"rollout_num_gpus is {self.rollout_num_gpus}, but rollout_devices names {len(self.rollout_devices)}",
            )


@dataclass
class AsyncConfig(Section):
    """How far rollouts run ahead of the trainer, with placement split."""

    # policy versions that a trained token may be old; 0: rollouts and training one after the other
    max_staleness: NonNegativeInt = 0
    batches_ahead: PositiveInt | None = None  # batches that are generated ahead; default: max_staleness
    partial_rollouts: bool = False  # responses in segments: weights change, and prompts join, while long ones go on
    partial_tokens: PositiveInt = 256  # of a segment
    # old log-probs of the loss: behaviour: the engine's, so that these bound the ratio; none: the trainer's as
    # of this step, for tis_mode or without any correction. Default: none with a tis_mode, else behaviour
    stale_correction: Annotated[str | None, one_of("behaviour", "none")] = None

    @property
    def ahead(self) -> int:
        """Batches that are generated ahead of the one that is trained on."""
        return (self.batches_ahead or self.max_staleness) if self.max_staleness else 0

    def check(self) -> None:
        """What belongs to runs with a staleness."""
        others = not_usual(self, ("batches_ahead", "stale_correction", "partial_rollouts"))
        require(
            self.max_staleness > 0 or not others,
            "batches_ahead, stale_correction and partial_rollouts belong to a max_staleness above 0",
        )

    def behaviour(self, corrected: bool) -> bool:
        """Whether old log-probs are the engine's. corrected: whether the loss weighs by these."""
        unset = self.stale_correction is None and self.max_staleness > 0 and not corrected
        return unset or self.stale_correction == "behaviour"

    def check_run(self, split: bool, corrected: bool) -> None:
        """Raise ConfigError where a run of this placement cannot take stale tokens. corrected: as of `behaviour`."""
        told = "max_staleness above 0 runs rollouts beside training: add --placement split"
        require(split or not self.max_staleness, told)
        require(
            not (corrected and self.stale_correction == "behaviour"),
            "tis_mode and stale_correction behaviour both correct for the engine's policy: use one of them",
        )


GIB = 2**30
PRESENT = "present"


@dataclass(frozen=True)
class Device:
    """One accelerator and its share of the host.

    memory: bytes that a process can allocate, the driver's own share taken off; host: bytes of host memory for each
    accelerator of a usual host; flops: of dense bfloat16 products a second; bandwidth: of its memory, link: to the
    host, each in bytes a second; ranks: accelerators of a usual host. On the CPU device memory and host memory are one.
    """

    name: str
    memory: float
    host: float
    flops: float
    bandwidth: float
    link: float
    ranks: int = 8

    @property
    def on_cpu(self) -> bool:
        """Whether the models lie in host memory."""
        return self.name == "cpu"


def _card(name: str, memory: float, host: int, tflops: float, bandwidth: int, link: int, ranks: int = 8) -> Device:
    return Device(name, memory * GIB, host * GIB, tflops * 1e12, bandwidth * 1e9, link * 1e9, ranks)


# Memory as the driver reports it. Products, memory and link of the vendors' data sheets; hosts as clouds rent them.
DEVICES = {
    device.name: device
    for device in (
        _card("a10-24gb", 22.0, 48, 125, 600, 25, 4),
        _card("a100-40gb", 39.4, 120, 312, 1555, 25),
        _card("a100-80gb", 79.1, 120, 312, 2039, 25),
        _card("b200-180gb", 178.0, 240, 2250, 8000, 50),
        _card("h100-80gb", 79.1, 240, 989, 3350, 50),
        _card("h200-141gb", 139.8, 240, 989, 4800, 50),
        _card("h20-96gb", 95.0, 240, 148, 4000, 50),
        _card("l4-24gb", 22.0, 48, 121, 300, 25),
        _card("l40s-48gb", 44.4, 96, 362, 864, 25),
        _card("l40-48gb", 44.4, 96, 181, 864, 25),
        _card("rtx4090-24gb", 23.5, 64, 165, 1008, 25, 1),
        _card("rtx5090-32gb", 31.3, 64, 209, 1792, 50, 1),
    )
}
NAMES = (PRESENT, "cpu", *DEVICES)


def of_product(product: str) -> list[Device]:
    """Those of DEVICES that are sold by this name, such as "NVIDIA H100 80GB HBM3"."""
    words = re.split(r"[\s-]+", product.lower().replace("rtx ", "rtx"))
    return [device for name, device in DEVICES.items() if name.partition("-")[0] in words]
