"""Jobs that take long: one after the other in this process, or side by side in others, with progress.

A job stores what it finds by itself. What happens to one, an error or the death of its process, does not stop others.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from recleak.errors import ConfigError, RecleakError
from recleak.machine import cores, end_with_parent, give_back, interrupts_wait, kept_to, memory_line, shares
from recleak.terminal import err, say

_WIDE = 70  # characters from which there is room for a bar
_OLD = 60.0  # seconds after which a process gets no further job


class Job(Protocol):
    """What is done: a value that another process can be given."""

    @property
    def label(self) -> str:
        """For a line of progress."""
        ...


J = TypeVar("J", bound=Job)
Work = Callable[[J, int], Iterable[str] | None]
"""Does a job with so many threads; may yield what went wrong and was not worth stopping for."""


@dataclass(frozen=True)
class Outcome:
    """How a job went: seconds, and what went wrong (the message, and for what nobody foresaw the traceback)."""

    seconds: float
    problems: tuple[str, ...] = ()


class Cluster(Protocol):
    """Other machines that do jobs (`deploy.ray`)."""

    def outcomes(self, jobs: Sequence[Any], work: Work[Any]) -> Iterator[tuple[int, Outcome]]:
        """How each job went, with its place, as they end."""
        ...


def do_all(
    jobs: Sequence[J],
    work: Work[J],
    *,
    workers: int = 1,
    what: str = "run",
    cluster: Cluster | None = None,
    needs: Sequence[int] = (),
    after: Sequence[Collection[int]] = (),
) -> dict[int, Outcome]:
    """All jobs, in order; how each went, by its place. `work` is a function of a module, or a partial of one.

    With a cluster they are done there, and `workers` is its business. `needs`: the bytes that large jobs are known to
    take; it is told first, and an error if those side by side need more than is free. `after`: for each job the places
    of those that are over before it begins, however they went; one worker does jobs in the order in which they are
    given, and a cluster, which does them in any, is refused.
    """
    if workers < 1:
        raise ConfigError(f"workers is {workers}, expected at least 1.")
    if cluster is not None and any(after):
        raise ConfigError(
            "Got jobs that wait for others, and a cluster, which does jobs in any order.\n"
            "  Do them here, without a cluster."
        )
    workers = min(workers, max(1, len(jobs)))
    if (large := [each for each in needs if each]) and cluster is None:
        say(memory_line(large, workers), to=err)
    if cluster is not None and jobs:
        outcomes = cluster.outcomes(jobs, work)
    else:
        outcomes = _here(jobs, work) if workers == 1 else _beside(jobs, work, workers, after)
    done: dict[int, Outcome] = {}
    with Progress(len(jobs), what) as progress:
        try:
            for place, outcome in outcomes:
                done[place] = outcome
                progress.done(jobs[place].label, outcome)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt("interrupted; what was measured is stored: run again to continue.") from interrupt
    return done


def _here(jobs: Sequence[J], work: Work[J]) -> Iterator[tuple[int, Outcome]]:
    for place, job in enumerate(jobs):
        yield place, attempt(job, work, cores())


def attempt(job: J, work: Work[J], threads: int) -> Outcome:
    """One job in this process; whatever goes wrong is told in the outcome."""
    begin, problems = time.perf_counter(), list[str]()
    try:
        problems.extend(work(job, threads) or ())
    except RecleakError as error:
        problems.append(str(error))
    except Exception:
        problems.append(traceback.format_exc().rstrip())
    give_back()
    return Outcome(time.perf_counter() - begin, tuple(problems))


@dataclass
class _Worker:
    """A process that does one job at a time, and what it is doing."""

    process: SpawnProcess
    connection: Connection
    share: list[int]
    born: float
    place: int = -1
    since: float = 0.0

    def give(self, place: int, job: Job) -> None:
        self.place, self.since = place, time.perf_counter()
        self.connection.send(job)

    def result(self) -> Outcome:
        try:
            outcome: Outcome = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            died = f"its process died (exit code {self.process.exitcode}). If memory ran out, use fewer workers."
            outcome = Outcome(time.perf_counter() - self.since, (died,))
        return outcome

    def end(self) -> None:
        self.connection.close()
        self.process.join()


def _beside(
    jobs: Sequence[J], work: Work[J], workers: int, after: Sequence[Collection[int]]
) -> Iterator[tuple[int, Outcome]]:
    """Jobs in processes that keep to their cores and may die alone; a process that is old gives its memory back."""
    free, waiting = shares(workers), list(range(len(jobs)))
    going: dict[Connection, _Worker] = {}
    try:
        while waiting or going:
            while free and (place := _next(waiting, [each.place for each in going.values()], after)) is not None:
                worker = _start(work, free.pop(0))
                going[worker.connection] = worker
                waiting.remove(place)
                worker.give(place, jobs[place])
            ready = multiprocessing.connection.wait(list(going))
            for connection in [each for each in going if each in ready]:
                worker = going[connection]
                done, outcome = worker.place, worker.result()
                young = time.perf_counter() - worker.born < _OLD and worker.process.is_alive()
                others = [each.place for each in going.values() if each is not worker]
                place = _next(waiting, others, after) if young else None
                if place is not None:
                    waiting.remove(place)
                    worker.give(place, jobs[place])
                else:
                    del going[connection]
                    worker.end()
                    free.append(worker.share)
                yield done, outcome
    finally:
        for worker in going.values():
            worker.process.terminate()
            worker.process.join()


def _next(waiting: Sequence[int], going: Collection[int], after: Sequence[Collection[int]]) -> int | None:
    """The first job all of whose `after` are over; of jobs that only wait for each other, the first.

    >>> _next([1, 2], [0], [[], [0], []]), _next([1], [0], [[], [0]]), _next([1], [], [[], [0]])
    (2, None, 1)
    """
    left = {*waiting, *going}
    ready = (place for place in waiting if not after or left.isdisjoint(after[place]))
    return next(ready, waiting[0] if waiting and not going else None)


def _start(work: Work[J], share: list[int]) -> _Worker:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, work, len(share), sys.path))
    with interrupts_wait(), kept_to(share):
        process.start()
    theirs.close()
    return _Worker(process, mine, share, time.perf_counter())


def _child(connection: Connection, work: Work[J], threads: int, path: list[str]) -> None:
    """A process begins: no interrupts, it ends with its parent, and imports what its parent can."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.path[:] = path
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(attempt(job, work, threads))


# --- progress -----------------------------------------------------------------------------------------------------


class Progress:
    """Jobs done and time left: a bar in a terminal, else a line for each job. Problems are always lines."""

    def __init__(self, total: int, what: str = "run", clock: Callable[[], float] = time.monotonic) -> None:
        beside = (BarColumn(),) if err.width >= _WIDE else ()
        self._bar = RichProgress(
            TextColumn(what),
            MofNCompleteColumn(),
            *beside,
            TextColumn("{task.fields[left]}"),
            console=err,
            disable=not (err.is_terminal and total),
            transient=True,
        )
        self._what, self._total, self._count, self._clock, self._since = what, total, 0, clock, clock()
        self._task = self._bar.add_task("jobs", total=total, left="")

    def done(self, label: str, outcome: Outcome) -> None:
        """One more is over."""
        self._count += 1
        left = (self._clock() - self._since) / self._count * (self._total - self._count)
        shown = f"{duration(left)} left" if self._count < self._total else ""
        self._bar.update(self._task, completed=self._count, left=shown)
        if not err.is_terminal:
            line = f"{self._what} {self._count}/{self._total}: {label}: {duration(outcome.seconds)}"
            say(f"{line}; {shown}" if shown else line, to=err)
        for problem in outcome.problems:
            say(f"error: {label}: {problem}", to=err, style="red")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def duration(seconds: float) -> str:
    """A duration that is easily read.

    >>> duration(3.21), duration(130), duration(7500)
    ('3.2 s', '2 min 10 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
