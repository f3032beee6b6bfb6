"""When report.html is rewritten while a run goes on."""

from __future__ import annotations

import logging
from pathlib import Path

from .page import write_report

logger = logging.getLogger(__name__)

REPORT = "report.html"
EVERY = 50  # steps between two reports at first
GROWTH = 1.1  # a long run's report takes longer to write, so each comes at a step at least this much later


class ReportWriter:
    """Rewrites report.html of a run's folder: at evaluations, every `every` steps and ever more rarely, at the end.

    A report that cannot be written is logged with its traceback and never ends the run.

    Args:
        folder: the run's output folder.
        active: whether this process writes at all; rank 0 of a run whose configuration asks for a report.
        every: steps between two reports while the run is young.
    """

    def __init__(self, folder: str | Path, active: bool, every: int = EVERY):
        self.folder, self.active, self.every = Path(folder), active, every
        self._next = every

    def after_step(self, step: int) -> None:
        """Write where enough steps have passed since the last report of this kind."""
        if step >= self._next:
            self._next = max(step + self.every, int(step * GROWTH))
            self.write()

    def write(self) -> Path | None:
        """Write the report of what the folder holds now; None where it is off or failed."""
        if not self.active:
            return None
        try:
            return write_report([self.folder], self.folder / REPORT)
        except Exception:
            logger.exception("%s could not be written; the run goes on", REPORT)
            return None
