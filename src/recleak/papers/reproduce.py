"""Measuring a paper again: which runs are missing, in which order, in this process or side by side in others."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from recleak.errors import ConfigError, RecleakError, unknown_name
from recleak.machine import cores as cores
from recleak.machine import end_with_parent, interrupts_wait, kept_to, shares
from recleak.papers.base import Paper, Scalar, runner_module
from recleak.papers.store import Question, Results, Store
from recleak.terminal import err, say

_WIDE = 70  # characters from which there is room for a bar


@dataclass(frozen=True)
class Measured:
    """What one ask gave on one run."""

    metrics: Mapping[str, NDArray[np.float64]]
    "By name: one value per graded user (none that is NaN), or one value."
    series: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    "By name: numbers, or pairs (x, y)."
    seconds: float = 0.0
    "What the ask cost in that run: for an attack its own time, for utility the training."


class Runner(Protocol):
    """What a paper's `runner` names; its module may have a number `VERSION`: results of another number do not count."""

    def __call__(
        self,
        run: Mapping[str, Scalar],
        asks: Sequence[Mapping[str, Scalar]],
        *,
        variant: str,
        seed: int,
        threads: int,
    ) -> Iterable[Measured]:
        """One training run, then one `Measured` for each ask, in order; what is yielded is stored at once.

        It prints nothing and shows no progress of its own.
        """


# --- what to measure ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """Which part of a paper; nothing given means all of it."""

    tables: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def cells(self, paper: Paper) -> list[str]:
        """The full ids, headline tables first; a ratio is in if all its parts are."""
        tables = [table.id for table in paper.all_tables]
        self._check("table", self.tables, tables)
        for kind, given in (("data", self.data), ("model", self.models)):
            self._check(kind, given, {str(cell.run[kind]) for cell in paper.cells.values() if kind in cell.run})
        ordered = sorted(paper.all_tables, key=lambda table: not table.headline)
        return [
            table.full(cell)
            for table in ordered
            for cell in table.cells
            if table.id in (self.tables or tables) and all(self._fits(part.run) for part in paper.needs(cell))
        ]

    def _fits(self, run: Mapping[str, Scalar]) -> bool:
        return (not self.data or run.get("data") in self.data) and (not self.models or run.get("model") in self.models)

    @staticmethod
    def _check(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
        names = set(known)
        for name in given:
            if name not in names:
                raise unknown_name(kind, name, names)


@dataclass(frozen=True)
class Wanted:
    """An answer that is missing, and the metrics and series that cells take from it."""

    question: Question
    names: frozenset[str]


@dataclass(frozen=True)
class Run:
    """One training run with all that is asked of it."""

    seed: int
    wanted: tuple[Wanted, ...]

    @property
    def label(self) -> str:
        """For a line of progress."""
        settings = self.wanted[0].question.run
        names = sorted(settings, key=lambda name: (name != "data", name != "model"))
        return f"{' '.join(str(settings[name]) for name in names)}, seed {self.seed}"


def plan(results: Results, cells: Iterable[str], seeds: int) -> list[Run]:
    """The runs that are missing: seed 0 of everything before seed 1, each in the order in which cells need it."""
    paper = results.paper
    asked: dict[str, tuple[Question, set[str]]] = {}
    for name in cells:
        for cell in paper.needs(paper.cells[name]):
            question = results.question(cell)
            asked.setdefault(question.name, (question, set()))[1].add(str(cell.metric or cell.series))
    runs: list[Run] = []
    for seed in range(seeds):
        groups: dict[str, list[Wanted]] = {}
        for question, names in asked.values():
            if not _answered(results.store, question, seed, names):
                same_run = Question(question.runner, question.code, question.variant, question.run, {})
                groups.setdefault(same_run.name, []).append(Wanted(question, frozenset(names)))
        runs += [Run(seed, tuple(wanted)) for wanted in groups.values()]
    return runs


def _answered(store: Store, question: Question, seed: int, names: set[str]) -> bool:
    if not store.has(question, seed):
        return False
    answer = store.read(question, seed)
    return names <= {*answer.metrics, *answer.series}


# --- measuring ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a run went: seconds, and what went wrong (the message, and for what nobody foresaw the traceback)."""

    seconds: float
    problems: tuple[str, ...] = ()


def measure_all(paper: Paper, runs: Sequence[Run], store: Store, *, workers: int = 1) -> int:
    """Measure what is missing and store it; returns how many runs failed. An error in one does not stop the others."""
    if workers < 1:
        raise ConfigError(f"workers is {workers}, expected at least 1.")
    runner_module(paper)  # an import that fails does so here, once
    workers = min(workers, max(1, len(runs)))
    outcomes = _here(paper, runs, store) if workers == 1 else _beside(paper, runs, store, workers)
    failed = 0
    with _Progress(len(runs)) as progress:
        try:
            for run, outcome in outcomes:
                failed += bool(outcome.problems)
                progress.done(run, outcome)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt("interrupted; what was measured is stored: run again to continue.") from interrupt
    return failed


def _here(paper: Paper, runs: Sequence[Run], store: Store) -> Iterator[tuple[Run, Outcome]]:
    for run in runs:
        yield run, measure(paper.runner, run, store, threads=cores())


def measure(runner: str, run: Run, store: Store, *, threads: int) -> Outcome:
    """One run, each answer stored as it comes."""
    begin, problems = time.perf_counter(), []
    try:
        module, _, function = runner.partition(":")
        call: Runner = getattr(import_module(module), function)
        first, asks = run.wanted[0].question, [wanted.question.ask for wanted in run.wanted]
        answers = iter(call(first.run, asks, variant=first.variant, seed=run.seed, threads=threads))
        for wanted in run.wanted:
            got = next(answers, None)
            if got is None:
                raise ConfigError(
                    f"{runner}: fewer answers than the {len(asks)} asks, expected one for each, in order."
                )
            problems += _keep(store, wanted, run.seed, got)
    except RecleakError as error:
        problems.append(str(error))
    except Exception:
        problems.append(traceback.format_exc().rstrip())
    return Outcome(time.perf_counter() - begin, tuple(problems))


def _keep(store: Store, wanted: Wanted, seed: int, got: Measured) -> list[str]:
    """Store an answer; one that is unusable, or lacks something, does not spoil those that follow."""
    what = " ".join(f"{name}={value}" for name, value in wanted.question.ask.items())
    try:
        store.write(wanted.question, seed, got.metrics, got.series, got.seconds)
    except RecleakError as error:
        return [f"{what}: {error}"]
    given = {*got.metrics, *got.series}
    lacking = sorted(wanted.names - given)
    return [f"{what}: got {', '.join(sorted(given))}, expected also {', '.join(lacking)}."] if lacking else []


def _beside(paper: Paper, runs: Sequence[Run], store: Store, workers: int) -> Iterator[tuple[Run, Outcome]]:
    """Each run in a process of its own, which keeps to its cores, gives its memory back, and may die alone."""
    context = multiprocessing.get_context("spawn")
    free, waiting = shares(workers), list(reversed(runs))
    going: dict[Connection, tuple[Run, SpawnProcess, float, list[int]]] = {}
    try:
        while waiting or going:
            while waiting and free:
                run, share = waiting.pop(), free.pop(0)
                receive, send = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(send, paper.runner, run, store, len(share), sys.path))
                with interrupts_wait(), kept_to(share):
                    process.start()
                send.close()
                going[receive] = (run, process, time.perf_counter(), share)
            ready = multiprocessing.connection.wait(list(going))
            for receive in [each for each in going if each in ready]:
                run, process, begin, share = going.pop(receive)
                try:
                    outcome = receive.recv()
                except EOFError:
                    process.join()
                    died = f"its process died (exit code {process.exitcode}). If memory ran out, use fewer workers."
                    outcome = Outcome(time.perf_counter() - begin, (died,))
                receive.close()
                process.join()
                free.append(share)
                yield run, outcome
    finally:
        for _, process, *_ in going.values():
            process.terminate()
            process.join()


def _child(send: Connection, runner: str, run: Run, store: Store, threads: int, path: list[str]) -> None:
    """A process begins: no interrupts, it ends with its parent, and imports what its parent can."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.path[:] = path
    send.send(measure(runner, run, store, threads=threads))


# --- progress -----------------------------------------------------------------------------------------------------


class _Progress:
    """Runs done and time left: a bar in a terminal, else a line for each run. Problems are always lines."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        beside = (BarColumn(),) if err.width >= _WIDE else ()
        self._bar = RichProgress(
            TextColumn("run"),
            MofNCompleteColumn(),
            *beside,
            TextColumn("{task.fields[left]}"),
            console=err,
            disable=not (err.is_terminal and total),
            transient=True,
        )
        self._total, self._count, self._clock, self._since = total, 0, clock, clock()
        self._task = self._bar.add_task("runs", total=total, left="")

    def done(self, run: Run, outcome: Outcome) -> None:
        """One more is over."""
        self._count += 1
        left = (self._clock() - self._since) / self._count * (self._total - self._count)
        shown = f"{_time(left)} left" if self._count < self._total else ""
        self._bar.update(self._task, completed=self._count, left=shown)
        if not err.is_terminal:
            line = f"run {self._count}/{self._total}: {run.label}: {_time(outcome.seconds)}"
            say(f"{line}; {shown}" if shown else line, to=err)
        for problem in outcome.problems:
            say(f"error: {run.label}: {problem}", to=err, style="red")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _time(seconds: float) -> str:
    """A duration that is easily read.

    >>> _time(3.21), _time(130), _time(7500)
    ('3.2 s', '2 min 10 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def store_of(paper: Paper, folder: Path) -> Store:
    """A paper's part of the folder of results."""
    return Store(folder / paper.name)


def results_of(paper: Paper, folder: Path, variant: str | None) -> Results:
    """The stored results of the runner as it is now."""
    module, _ = runner_module(paper)
    code = getattr(module, "VERSION", 0)
    return Results(paper, store_of(paper, folder), code=code, variant=paper.variant(variant))
