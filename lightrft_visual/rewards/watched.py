"""Weights of rewards that a file may change while a run goes on."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from ..config.recipes import load_yaml
from ..errors import ConfigError, did_you_mean
from ..runtime.collectives import broadcast_object, is_rank_0

log = logging.getLogger(__name__)
LARGEST = 1e6  # no sane weight is larger: a slip of the hand must not make rewards that are not finite


class WatchedWeights:
    """`{component: weight}` of a YAML or JSON file, read again by rank 0 when it has changed.

    names: of the components that there are. What the file leaves out keeps the weight of the recipe. Raises ConfigError
    on construction where the file is missing or wrong; later on the last good weights stay, and it is said.
    """

    def __init__(self, path: str, names: Collection[str]) -> None:
        self.path, self.names = Path(path), names
        self._seen = self._stamp()
        self.weights = self._read()

    def refresh(self) -> None:
        """The weights of now, the same on every rank. A collective."""
        if is_rank_0() and (stamp := self._stamp()) != self._seen:
            self._seen = stamp
            try:
                found = self._read()
            except ConfigError as error:
                log.warning("%s; the reward weights stay as they are", error)
            else:
                log.warning("reward weights were %s; from here on they are %s", self.weights, found)
                self.weights = found
        self.weights = broadcast_object(self.weights)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def _read(self) -> dict[str, float]:
        where = f"reward_weights_file {self.path}"
        if not self.path.is_file():
            raise ConfigError(f"{where} is no file; write one such as 'exact: 0.8' before the run starts")
        found, _ = load_yaml(self.path)
        if not found and not self.path.read_text().strip():  # perhaps just being written
            raise ConfigError(f"{where} is empty; write {{}} for the weights of the recipe")
        for name, weight in found.items():
            if name not in self.names:
                raise ConfigError(f"{where}: there is no component {name!r}{did_you_mean(str(name), self.names)}")
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not abs(weight) <= LARGEST:
                raise ConfigError(
                    f"{where}: the weight of {name} is {str(weight)[:50]}, not a number within ±{LARGEST:.0e}"
                )
        return {name: float(weight) for name, weight in found.items()}
