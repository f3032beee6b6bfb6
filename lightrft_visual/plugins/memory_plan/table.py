"""What a rank holds in each phase of a run, and how that is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...config.placement import GIB, Device
from .meta import Work

DEVICE, HOST = "device", "host"
ONCE = ("load", "resume", "export")  # phases that are no part of a step
SMALL = 0.03  # of a phase: what is less needs no advice
# Ends of names of what a run holds whatever its batches are; the rest of a plan is estimated.
CERTAIN = (": weights", ": gradients", ": fp32 weights and Adam's moments", ": gradients in fp32")


@dataclass(frozen=True)
class Item:
    """Bytes of one thing on one rank. lower: the settings that make it smaller, separated by commas; may be empty."""

    name: str
    bytes: float
    lower: str = ""
    where: str = DEVICE

    def on_host(self, share: bool = True) -> Item:
        """The same in host memory, where `share`."""
        return Item(self.name, self.bytes, self.lower, HOST) if share else self


@dataclass(frozen=True)
class Phase:
    """The fullest moments of a phase on one rank, and its rough time in seconds."""

    name: str
    items: tuple[Item, ...]
    seconds: float = 0.0

    @classmethod
    def fullest(cls, name: str, seconds: float, one_memory: bool, *moments: Iterable[Item]) -> Phase:
        """Of several moments the one that holds most: on the device and on the host each its own.

        Args:
            name: of the phase.
            seconds: that it takes.
            one_memory: device and host are one, as on the CPU.
            moments: what each holds.
        """
        found = [tuple(item for item in moment if item.bytes > 0) for moment in moments]
        items: list[Item] = []
        for own in [(HOST, DEVICE)] if one_memory else [(HOST,), (DEVICE,)]:
            most = max(found, key=lambda each: sum(_sum(each, where) for where in own))
            items += [item for item in most if item.where in own]
        return cls(name, tuple(items), seconds)

    def total(self, where: str) -> float:
        """Bytes on the device or on the host."""
        return _sum(self.items, where)


def _sum(items: Iterable[Item], where: str) -> float:
    return sum(item.bytes for item in items if item.where == where)


@dataclass(frozen=True)
class Plan:
    """The phases of a run on one rank of `ranks` (`local` of them on a host). about: the model, in words.

    in_use: settings that are on already, which are not advised. trained: what forward and backward of a step's updates
    compute, of `tokens` tokens, each shared prompt once. unknown: models that are not counted, as their shapes are
    nowhere to be found. refused: why the run cannot start whatever memory there is, in words; else empty. resumes:
    whether it goes on from a checkpoint; else its phase resume is of a later run, and ends none. Limits are
    `device.memory` and the host's memory by rank; on the CPU both are one.
    """

    about: str
    device: Device
    ranks: int
    local: int
    phases: tuple[Phase, ...]
    in_use: frozenset[str] = frozenset()
    trained: Work = Work()
    tokens: float = 0.0
    unknown: tuple[str, ...] = ()
    refused: str = ""
    resumes: bool = False

    def needed(self, phase: Phase) -> list[tuple[str, float, float]]:
        """(where, bytes needed, bytes there are) of a phase."""
        device, host = phase.total(DEVICE), phase.total(HOST)
        if self.device.on_cpu:
            return [(HOST, device + host, self.device.host)]
        return [(DEVICE, device, self.device.memory), (HOST, host, self.device.host)]

    @property
    def fits(self) -> bool:
        """Whether every phase has the memory that it needs, and the run can start."""
        return not self.lacking() and not self.refused

    @property
    def possible(self) -> bool:
        """Whether weights, gradients and optimizer states alone have the memory that they need in every phase."""
        certain = (
            Phase(phase.name, tuple(item for item in phase.items if item.name.endswith(CERTAIN)))
            for phase in self.phases
        )
        return all(needed <= limit for phase in certain for _, needed, limit in self.needed(phase))

    def lacking(self) -> list[tuple[Phase, str, float]]:
        """(phase, where, bytes too many) of those that do not fit, the worst first."""
        found = [
            (phase, where, needed - limit)
            for phase in self._met()
            for where, needed, limit in self.needed(phase)
            if needed > limit
        ]
        return sorted(found, key=lambda each: -each[2])

    def fullest(self) -> Phase:
        """The phase that holds most on the device."""
        return max(self._met(), key=lambda phase: phase.total(DEVICE))

    def _met(self) -> list[Phase]:
        return [phase for phase in self.phases if phase.name != "resume" or self.resumes]

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(phase.seconds for phase in self.phases if phase.name not in ONCE)

    def peak(self) -> float:
        """Bytes of the fullest phase on the device; on the CPU with what is there on the host."""
        return max(self.needed(phase)[0][1] for phase in self._met())

    def verdict(self) -> str:
        """One or two sentences: whether it fits, the largest item, and what would lower it."""
        lacking = self.lacking()
        if self.fits:
            phase = self.fullest()
            where, needed, limit = self.needed(phase)[0]
            item = self._items(phase, where)[0]
            return (
                f"it fits: {_gib(needed)} of {_gib(limit)} GiB in phase {phase.name}; the largest item is {item.name}, "
                f"{_gib(item.bytes)} GiB"
            )
        lines = [f"it does not fit: {self.refused}"] if self.refused else []
        for phase, where, over in lacking[:1]:
            says = f"it does not fit: phase {phase.name} wants {_gib(over)} GiB more {where} memory than there is"
            lines += [says, *self._advice(phase, where)]
        return "\n".join(lines)

    def _items(self, phase: Phase, where: str) -> list[Item]:
        """Largest first; on the CPU all of them, as there is one memory."""
        found = [item for item in phase.items if self.device.on_cpu or item.where == where]
        return sorted(found, key=lambda item: -item.bytes)

    def _advice(self, phase: Phase, where: str) -> list[str]:
        """The largest item, and what would lower those that anything does."""
        items = self._items(phase, where)
        lines = [f"the largest item is {items[0].name}, {_gib(items[0].bytes)} GiB"]
        for item in items:
            left = [setting for setting in item.lower.split(", ") if setting and setting not in self.in_use]
            if left and item.bytes > SMALL * phase.total(where):
                lines.append(f"  {item.name} ({_gib(item.bytes)} GiB) is lowered by: {', '.join(left)}")
        return lines

    def text(self) -> str:
        """The table: a line a phase, below it what it holds; then the verdict."""
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        lines = [f"plan of one rank of {ranks} ({self.local} on a host) of {self.device.name}: {self.about}"]
        lines.append(f"{'phase':<44}{'device GiB':>12}{'host GiB':>12}{'seconds':>10}")
        for phase in self.phases:
            head = f"{_gib(phase.total(DEVICE)):>12}{_gib(phase.total(HOST)):>12}{_seconds(phase.seconds):>10}"
            lines.append(f"{phase.name:<44}{head}")
            for item in sorted(phase.items, key=lambda item: -item.bytes):
                columns = f"{_gib(item.bytes):>12}" if item.where == DEVICE else f"{'':>12}{_gib(item.bytes):>12}"
                lines.append(f"  {item.name:<42}{columns}")
        limit = "" if self.device.on_cpu else f"{_gib(self.device.memory)}"
        lines.append(f"{'there is':<44}{limit:>12}{_gib(self.device.host):>12}")
        lines += [f"not known: {', '.join(self.unknown)}"] if self.unknown else []
        return "\n".join([*lines, self.verdict()])


def _gib(count: float) -> str:
    value = count / GIB
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2f}" if value >= 0.005 else "0.00"


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.1 else "<0.1"
