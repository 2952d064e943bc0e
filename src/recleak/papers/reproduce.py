"""Measuring a paper again: which runs are missing, in which order, in this process or side by side in others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recleak.data.catalog import locate
from recleak.errors import ConfigError, RecleakError, unknown_name
from recleak.jobs import do_all
from recleak.papers.base import Paper, Scalar, runner_module
from recleak.papers.cells_file import from_json
from recleak.papers.store import Question, Results, Store


@dataclass(frozen=True)
class Measured:
    """What one ask gave on one run."""

    metrics: Mapping[str, NDArray[np.float64]]
    "By name: one value per graded user (none that is NaN), or one value. `store.USERS` says who these users are: "
    "claims about two cells with the same users are judged by their differences."
    series: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    "By name: numbers, or pairs (x, y)."
    seconds: float = 0.0
    "What the ask cost in that run: for an attack its own time, for utility the training."


class Runner(Protocol):
    """What a paper's `runner` names; its module may have a number `VERSION`: results of another number do not count.

    Where one run needs what another gave, the module has `needs(run)`, pairs of a run and an ask that are measured
    first, and `hear(run, variant, seed, series)`, which is told what is stored of them before a run. Where runs are
    large, `needed_bytes(run, variant)` says what one takes, before any begins; 0 for one that is not.
    """

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
    """The runs that are missing: seed 0 of everything before seed 1, each in the order in which cells need it, but
    those that need another run come after those that need none.
    """
    paper = results.paper
    asked: dict[str, tuple[Question, set[str]]] = {}
    for name in cells:
        enough = name in results.known and results.known[name].seeds >= seeds
        for cell in paper.needs(paper.cells[name]) if not enough else ():
            question = results.question(cell)
            asked.setdefault(question.name, (question, set()))[1].add(str(cell.metric or cell.series))
    runs: list[Run] = []
    for seed in range(seeds):
        missing = [each for each in asked.values() if not _answered(results.store, each[0], seed, each[1])]
        needed = {other.name: other for question, _ in missing for other in _needs(question)}
        missing += [
            (other, set[str]())
            for name, other in needed.items()
            if not results.store.has(other, seed) and all(name != question.name for question, _ in missing)
        ]
        groups: dict[str, list[Wanted]] = {}
        for question, names in missing:
            same_run = replace(question, ask={})
            groups.setdefault(same_run.name, []).append(Wanted(question, frozenset(names)))
        runs += sorted((Run(seed, tuple(wanted)) for wanted in groups.values()), key=_waits)
    return runs


def _needs(question: Question) -> list[Question]:
    """What has to be stored before this can be measured well."""
    needs = getattr(import_module(question.runner.partition(":")[0]), "needs", None)
    return [] if needs is None else [replace(question, run=run, ask=ask) for run, ask in needs(question.run)]


def _waits(run: Run) -> bool:
    return bool(_needs(run.wanted[0].question))


def with_data(paper: Paper, runs: Sequence[Run]) -> tuple[list[Run], dict[str, int]]:
    """The runs that can be made, and how many cannot by the name of their data: those that not everybody can have."""
    data = [str(run.wanted[0].question.run.get("data", "")) for run in runs]
    lacking = {name for name in set(data) & set(paper.unavailable) if locate(name) is None}
    left_out = Counter(name for name in data if name in lacking)
    return [run for run, name in zip(runs, data, strict=True) if name not in lacking], dict(left_out)


def _answered(store: Store, question: Question, seed: int, names: set[str]) -> bool:
    if not store.has(question, seed):
        return False
    answer = store.read(question, seed)
    return names <= {*answer.metrics, *answer.series}


# --- measuring ----------------------------------------------------------------------------------------------------


def measure_all(paper: Paper, runs: Sequence[Run], store: Store, *, workers: int = 1) -> int:
    """Measure what is missing and store it; returns how many runs failed. An error in one does not stop the others."""
    runner_module(paper)  # an import that fails does so here, once
    work = partial(measure, runner=paper.runner, store=store)
    sizes = [needed_bytes(run) for run in runs]
    outcomes = do_all(runs, work, workers=workers, needs=sizes, after=_after(runs))
    return sum(bool(outcome.problems) for outcome in outcomes.values())


def _after(runs: Sequence[Run]) -> list[set[int]]:
    """For each run the places of those that measure what it needs: else it would measure that itself, again."""
    place = {(wanted.question.name, run.seed): at for at, run in enumerate(runs) for wanted in run.wanted}
    needed = [{(each.name, run.seed) for each in _needs(run.wanted[0].question)} for run in runs]
    return [{place[name] for name in names & place.keys()} for names in needed]


def needed_bytes(run: Run) -> int:
    """What is known of the memory that a run takes; 0: nothing."""
    question = run.wanted[0].question
    tells = getattr(import_module(question.runner.partition(":")[0]), "needed_bytes", None)
    try:
        return 0 if tells is None else int(tells(question.run, question.variant))
    except RecleakError:  # measuring will say what is wrong
        return 0


def measure(run: Run, threads: int, *, runner: str, store: Store) -> Iterator[str]:
    """One run, each answer stored as it comes; yields what is wrong with answers."""
    module, _, function = runner.partition(":")
    call: Runner = getattr(import_module(module), function)
    first, asks = run.wanted[0].question, [wanted.question.ask for wanted in run.wanted]
    for other in _needs(first):
        if store.has(other, run.seed):
            import_module(module).hear(other.run, other.variant, run.seed, store.read(other, run.seed).series)
    answers = iter(call(first.run, asks, variant=first.variant, seed=run.seed, threads=threads))
    for wanted in run.wanted:
        got = next(answers, None)
        if got is None:
            raise ConfigError(f"{runner}: fewer answers than the {len(asks)} asks, expected one for each, in order.")
        yield from _keep(store, wanted, run.seed, got)


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


def store_of(paper: Paper, folder: Path) -> Store:
    """A paper's part of the folder of results."""
    return Store(folder / paper.name)


def results_of(paper: Paper, folder: Path, variant: str | None, known: Path | None = None) -> Results:
    """The stored results of the runner as it is now; and what a file of cells knows, if it is of the same runner."""
    module, _ = runner_module(paper)
    code, name = getattr(module, "VERSION", 0), paper.variant(variant)
    cells = {} if known is None else from_json(known, paper, code, name)
    return Results(paper, store_of(paper, folder), code=code, variant=name, known=cells)
