"""Copies of the trained weights: EMA for evaluation, the old policy of DiffusionNFT, the reference of full training."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import nn

from ..runtime.checkpoint.ranks import part_of, share
from ..runtime.collectives import broadcast_tensor, rank, world_size

T = torch.Tensor

RANKS = "ranks"  # in a saved state: over how many the whole tensors were dealt


def gathered(parameters: list[nn.Parameter]) -> Any:
    """A context in which the parameters are whole on every rank; outside ZeRO-3 they always are."""
    if not any(is_zero_param(parameter) for parameter in parameters):
        return nullcontext()
    return deepspeed.zero.GatheredParameters(parameters)


def whole_on_host(parameters: Iterable[nn.Parameter], keep: bool) -> list[tuple[nn.Parameter, T]]:
    """Parameters and whole copies of them on the host where `keep`: no device has more than one whole at a time. A
    collective under ZeRO-3."""
    found = []
    for parameter in parameters:
        with gathered([parameter]):
            if keep:
                found.append((parameter, parameter.detach().to("cpu", copy=True)))
    return found


@contextmanager
def standing_in(copies: Iterable[tuple[T, T]]) -> Iterator[None]:
    """Inside, parameters hold these values, of their own dtype where something computes with them. Nothing is copied:
    who writes into them writes into the copies."""
    homes = [(parameter, parameter.data, copy) for parameter, copy in copies]
    for parameter, _, copy in homes:
        parameter.data = copy
    try:
        yield
    finally:
        for parameter, home, _ in homes:
            parameter.data = home


def _holder(parameter: nn.Parameter) -> T:
    """What has the part of a parameter that this rank holds: its padded share (n) under ZeRO-3, else the whole."""
    return parameter.ds_tensor if is_zero_param(parameter) else parameter


def _held(parameter: nn.Parameter) -> T:
    return _holder(parameter).data


@torch.no_grad()
def _show_new_values(parameters: Iterable[nn.Parameter]) -> None:
    """After their parts have changed: small weights, which ZeRO-3 keeps whole on every rank, are gathered again by one
    collective, large ones that are whole just now by one each, and the second divisions within a host (zpg) made anew.
    All ranks call it."""
    divided = [parameter for parameter in parameters if is_zero_param(parameter)]
    whole = [parameter for parameter in divided if parameter.ds_status == ZeroParamStatus.AVAILABLE]
    twice = [each for each in divided if each.ds_secondary_tensor is not None]
    if whole:
        whole[0].partition(whole)
    for parameter in divided:
        parameter.ds_secondary_tensor = None
    if small := [each for each in whole if each.ds_persist]:
        small[0].all_gather_coalesced(small).wait()
    for parameter in whole:
        if not parameter.ds_persist:  # together they may be gigabytes
            parameter.all_gather([parameter])
    for parameter in twice:
        if parameter.ds_status != ZeroParamStatus.AVAILABLE:  # one at a time: together they are a whole model
            parameter.all_gather([parameter])
            parameter.partition()


class KeptWeights:
    """Values that are kept of parameters, and saved by the ranks together.

    copies: the values, as far as this rank holds them; None for those of the parameters themselves.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], copies: list[T] | None) -> None:
        self.parameters, self.copies = list(parameters), copies

    @property
    def values(self) -> list[T]:
        """What this rank holds of them: its shares under ZeRO-3."""
        return self.copies or [_held(parameter) for parameter in self.parameters]

    def _own(self, ranks: int) -> list[bool]:
        """Which of them a rank of so many saves: its shares under ZeRO-3; of what all hold whole each in turn."""
        turn = rank() % ranks
        return [is_zero_param(each) or index % ranks == turn for index, each in enumerate(self.parameters)]

    def state_dict(self) -> dict[str, T]:
        """What this rank saves, by index."""
        ranks = world_size()
        dealt = {RANKS: torch.tensor(ranks)} if ranks > 1 else {}
        saved = zip(self.values, self._own(ranks))
        return {str(index): value for index, (value, mine) in enumerate(saved) if mine} | dealt

    def state_of_ranks(self, states: Sequence[Mapping[str, T]]) -> dict[str, T]:
        """What this rank holds, of the states of another number of ranks: shares under ZeRO-3 are divided anew."""
        joined = {name: value for state in states for name, value in state.items() if name != RANKS}
        for index, parameter in enumerate(self.parameters):
            if is_zero_param(parameter):
                pieces, size = [state[str(index)] for state in states], parameter.ds_numel
                joined[str(index)] = part_of(pieces, size, share(size, world_size()), rank())
        return joined

    def _saved(self, state: Mapping[str, T]) -> Iterator[T]:
        """The values of a state, one after the other; a collective where it is a rank's of several. ValueError where
        count or shapes differ from the parameters of this run."""
        ranks = int(state.get(RANKS, 1))
        own = self._own(ranks)
        if len(state.keys() - {RANKS}) != sum(own):
            told = f"the model trains {len(own)}, of which it should have {sum(own)}"
            raise ValueError(f"the saved copy has {len(state.keys() - {RANKS})} tensors; {told}")
        for index, (parameter, part, mine) in enumerate(zip(self.parameters, self.values, own)):
            saved = state[str(index)] if mine else torch.empty_like(part)
            if saved.shape != part.shape:
                raise ValueError(f"tensor {index} of the saved copy is {tuple(saved.shape)}, not {tuple(part.shape)}")
            if ranks > 1 and not is_zero_param(parameter):
                saved = saved.to(part.device, part.dtype)
                broadcast_tensor(saved, index % ranks)
            yield saved


class WeightCopy(KeptWeights):
    """A copy of parameters with its own memory, moved towards them by `update` and lent to the model by `swapped`.

    The copy is made by clone: on a CPU run `.detach().cpu()` would alias the weights and follow every step. dtype: of
    the copy, None for that of the weights; one that is averaged takes fp32, as bf16 rounds small moves away. Under
    ZeRO-3 a rank copies the part of the weights that it holds, so it must be made after DeepSpeed's engine.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None) -> None:
        own = list(parameters)
        super().__init__(own, [held.to(dtype or held.dtype, copy=True) for held in map(_held, own)])

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """copy = decay * copy + (1 - decay) * weight; decay 0 copies the weights."""
        for copy, parameter in zip(self.values, self._held_parts()):
            copy.lerp_(parameter.to(copy.device, copy.dtype), 1.0 - decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model computes with the copy inside this context and gets its weights back, bit for bit, afterwards.

        Nothing is copied where dtypes are the same; a collective under ZeRO-3. Run no optimizer step inside. Graphs
        recorded before may be differentiated after it, not inside.
        """
        lent = [copy.to(part) for copy, part in zip(self.values, self._held_parts())]
        try:
            with standing_in(zip(map(_holder, self.parameters), lent)):
                _show_new_values(self.parameters)
                yield
        finally:
            _show_new_values(self.parameters)

    def _held_parts(self) -> list[T]:
        """What this rank holds of each parameter. Raises RuntimeError where ZeRO-3 divided them after the copy."""
        parts = [_held(parameter) for parameter in self.parameters]
        if any(part.shape != copy.shape for part, copy in zip(parts, self.values)):
            raise RuntimeError("the weights were divided over ranks after this copy was made: make it afterwards")
        return parts

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, T]) -> None:
        """Raises ValueError where count or shapes differ from the parameters of this run. All ranks call it."""
        for copy, value in zip(self.values, self._saved(state)):
            copy.copy_(value)

    def resume(self, state: Mapping[str, T] | None) -> None:
        """The saved copy, or one of the resumed weights where the run that is resumed kept none."""
        if state is None:
            self.update(0.0)
        else:
            self.load_state_dict(state)


class FollowingWeights(KeptWeights):
    """A frozen model that is moved towards a trained one of the same parameters, now and then (TR-DPO, arXiv
    2404.09656: its hard update with a mixup of 1, its soft update below).

    trained: gives the parameters that train. every: steps between two moves. mixup: share of the trained weights.
    Where the frozen model's own type would round small moves away, its values in fp32 are on the host.
    """

    def __init__(
        self, frozen: nn.Module, trained: Callable[[], Iterable[nn.Parameter]], every: int, mixup: float
    ) -> None:
        own = list(frozen.parameters())
        rounds = mixup < 1 and any(parameter.dtype != torch.float32 for parameter in own)
        exact = (_held(parameter).to("cpu", torch.float32, copy=True) for parameter in own)
        super().__init__(own, [*exact] if rounds else None)
        self.trained, self.every, self.mixup = trained, every, mixup

    def step(self, number: int) -> bool:
        """After step `number`: whether the frozen model was moved. All ranks call it."""
        if number % self.every:
            return False
        self._write(self.mixup, (_held(parameter) for parameter in self.trained()))
        return True

    @torch.no_grad()
    def _write(self, share: float, values: Iterable[T]) -> None:
        for parameter, own, value in zip(self.parameters, self.values, values, strict=True):
            own.lerp_(value.to(own.device, own.dtype), share)
            if self.copies:
                _held(parameter).copy_(own)
        _show_new_values(self.parameters)

    def load_state_dict(self, state: Mapping[str, T]) -> None:
        """Go on with the saved weights. All ranks call it."""
        self._write(1.0, self._saved(state))


class WeightAverage(WeightCopy):
    """EMA of the weights, updated every `interval` optimizer steps (Flow-GRPO: decay 0.9 every 8).

    warmup: after optimizer step n the decay is at most (1 + n) / (10 + n), so that the start is soon forgotten.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], decay: float, interval: int = 1, warmup: bool = False
    ) -> None:
        super().__init__(parameters, torch.float32)
        self.decay, self.interval, self.warmup, self.steps = decay, interval, warmup, 0

    def step(self) -> None:
        """Call after each optimizer step."""
        self.steps += 1
        if self.steps % self.interval == 0:
            soft = (1 + self.steps) / (10 + self.steps)
            self.update(min(self.decay, soft) if self.warmup else self.decay)

    def state_dict(self) -> dict[str, T]:
        """As the copy's, with the optimizer steps so far."""
        return super().state_dict() | {"steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: dict[str, T]) -> None:
        """The inverse of `state_dict`."""
        state = dict(state)
        self.steps = int(state.pop("steps"))
        super().load_state_dict(state)


class AddedLoraLinear(Linear):
    """peft's layer with the same weights, names and state; only the arithmetic of its forward is another.

    peft scales the product of the two small matrices and adds it to the base's output, each time making a new tensor of
    that size. Here the second product is added into the base's output while it is made (`addmm`). What is not plain
    LoRA with one adapter goes through peft's own forward.
    """

    def forward(self, x: T, *args: Any, **kwargs: Any) -> T:
        """(…, in) to (…, out)."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        if args or kwargs or self.merged or len(names) != 1 or not self._plain(x, names[0]):
            return super().forward(x, *args, **kwargs)
        flat = x.reshape(-1, x.shape[-1])  # switched off too: a base's bias is rounded otherwise where x is a split's
        out = self.base_layer(flat)
        if not self.disable_adapters:
            low = self.lora_A[names[0]](flat)
            out = out.addmm_(low, self.lora_B[names[0]].weight.t(), alpha=self.scaling[names[0]])
        return out.view(*x.shape[:-1], out.shape[-1])

    def _plain(self, x: T, name: str) -> bool:
        weight = self.lora_B[name].weight
        return (
            name not in self.lora_variant
            and not self.lora_bias[name]
            and isinstance(self.lora_dropout[name], nn.Identity)
            and weight.dtype == x.dtype == self.base_layer.weight.dtype
            and not is_zero_param(weight)  # ZeRO-3 gathers weights in the forward of their own module
        )


def lora_config(rank: int, alpha: int, **settings: Any) -> LoraConfig:
    """Of peft, whose layers add as `AddedLoraLinear` does. settings: others of `LoraConfig`, by its names."""
    config = LoraConfig(r=rank, lora_alpha=alpha, **settings)
    config._register_custom_module({nn.Linear: AddedLoraLinear})
    return config
