"""A progress bar for rounds: loss, clients per second, time left. Silent when nobody looks."""

from __future__ import annotations

import time
from math import isnan
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from recleak.terminal import err

_WIDE = 70  # characters from which there is room for a bar


class Progress:
    """Rounds of a run; writes to the terminal's error stream only, and to nothing else."""

    def __init__(self, rounds: int, done: int = 0, *, shown: bool = True) -> None:
        """`done` rounds were made before, by a run that was interrupted."""
        beside = (BarColumn(), TimeRemainingColumn()) if err.width >= _WIDE else ()
        self._bar = RichProgress(
            TextColumn("round"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            *beside,
            console=err,
            disable=not (shown and err.is_terminal),
            transient=True,
        )
        self._task = self._bar.add_task("rounds", total=rounds, completed=done, facts="")
        self._since, self._clients = time.monotonic(), 0

    def round(self, number: int, loss: float, clients: int) -> None:
        """One more round is over."""
        self._clients += clients
        rate = self._clients / max(time.monotonic() - self._since, 1e-9)
        shown = "nobody answered" if isnan(loss) else f"loss {loss:.4f}"
        self._bar.update(self._task, completed=number, facts=f"{shown}  {rate:,.1f} clients/s")

    def __enter__(self) -> Progress:
        self._bar.start()
        self._since = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
