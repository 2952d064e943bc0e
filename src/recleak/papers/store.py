"""What was measured: one small file per (run, ask, variant, seed), and what the files of a cell add up to.

A file's name is a hash of what it answers, with the seed; it is written all or nothing, and never again. So a
reproduction that was killed continues, and two tables that need the same number share it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recleak.errors import RecleakError
from recleak.files import read_json
from recleak.papers.base import Cell, Claim, Paper, Point, Scalar, Verdict

if TYPE_CHECKING:  # its package brings torch, which is slow to import
    from recleak.metrics.intervals import Estimate

Curve = list[tuple[float, float]]  # (x, y) in the order of x
_DIGITS = 5  # decimals of a user's value
_RESAMPLES = 2000
_LEVEL = 0.95
USERS = "user"  # the metric that says of which users the others of an answer are, in their order


class StoreError(RecleakError):
    """A stored result that cannot be used."""


@dataclass(frozen=True)
class Question:
    """What one file answers, seed aside."""

    runner: str
    code: int
    variant: str
    run: Mapping[str, Scalar]
    ask: Mapping[str, Scalar]

    @property
    def key(self) -> dict[str, Any]:
        """As JSON; 1 and 1.0 are the same."""
        return {
            "runner": self.runner,
            "code": self.code,
            "variant": self.variant,
            "run": _plain(self.run),
            "ask": _plain(self.ask),
        }

    @property
    def name(self) -> str:
        """The start of its files' names."""
        return hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:20]


def _plain(settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {
        name: float(value) if isinstance(value, int) and not isinstance(value, bool) else value
        for name, value in sorted(settings.items())
    }


@dataclass(frozen=True)
class Answer:
    """What a file holds."""

    metrics: dict[str, NDArray[np.float64]]
    series: dict[str, Curve]
    seconds: float


@dataclass(frozen=True)
class Store:
    """A folder of results."""

    folder: Path

    def seeds(self, question: Question) -> list[int]:
        """The seeds for which there is an answer."""
        found = (path.stem.rpartition("-")[2] for path in self.folder.glob(f"{question.name}-*.json"))
        return sorted(int(seed) for seed in found if seed.isdecimal() and len(seed) < 19)

    def has(self, question: Question, seed: int) -> bool:
        """Whether there is an answer."""
        return self._path(question, seed).exists()

    def read(self, question: Question, seed: int) -> Answer:
        """The answer for a seed."""
        path = self._path(question, seed)
        try:
            got = read_json(path)
            if got["key"] != question.key:
                raise ValueError("it answers another question")
            return Answer(
                {name: _read_values(values) for name, values in got["metrics"].items()},
                {name: [(float(x), float(y)) for x, y in points] for name, points in got["series"].items()},
                float(got["seconds"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise StoreError(
                f"{path}: not a stored result ({error!s:.200}).\n  Delete it; it will be measured again."
            ) from error

    def write(
        self,
        question: Question,
        seed: int,
        metrics: Mapping[str, NDArray[np.float64]],
        series: Mapping[str, Sequence[Any]],
        seconds: float,
    ) -> None:
        """Keep an answer. A point of a series is a pair, or a number whose x is its place, from 0."""
        content = {
            "key": question.key,
            "seed": seed,
            "seconds": round(seconds, 2),
            "metrics": {name: _values(name, values) for name, values in metrics.items()},
            "series": {name: _curve(name, points) for name, points in series.items()},
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(question, seed)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with open(partial, "w", encoding="utf-8") as file:
                json.dump(content, file, separators=(",", ":"), allow_nan=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise

    def _path(self, question: Question, seed: int) -> Path:
        return self.folder / f"{question.name}-{seed}.json"


def _read_values(values: Any) -> NDArray[np.float64]:
    """One number per graded user, or one."""
    if not isinstance(values, list) or not values or any(type(each) not in (int, float) for each in values):
        raise ValueError(f"a metric is {values!r:.40}, expected a list of numbers")
    return np.asarray(values, np.float64)


def _values(name: str, values: NDArray[np.float64]) -> list[float]:
    array = np.atleast_1d(np.asarray(values, np.float64))
    if array.ndim != 1 or len(array) == 0 or not np.isfinite(array).all():
        raise StoreError(
            f"Got the metric {name} with shape {array.shape} and {np.count_nonzero(~np.isfinite(array))} values that "
            "are no numbers, expected one number per graded user, or one.\n  Leave out users without a value."
        )
    return [_short(value) for value in array.tolist()]


def _short(value: float) -> float:
    """To 5 decimals, or 5 digits if it is smaller than 1."""
    return round(value, _DIGITS) if abs(value) >= 1 else float(f"{value:.{_DIGITS}g}")


def _curve(name: str, points: Sequence[Any]) -> list[list[float]]:
    pairs = [point if isinstance(point, list | tuple) else (place, point) for place, point in enumerate(points)]
    curve = [[float(x), _short(float(y))] for x, y in pairs]
    if not np.isfinite(np.asarray(curve)).all():
        raise StoreError(f"Got the series {name} with points that are no numbers, expected numbers.")
    return curve


# --- what it adds up to -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ours:
    """A cell as we measured it; blank if nothing is stored."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    users: int = 0
    seeds: int = 0
    seconds: float = 0.0
    curve: Curve = field(default_factory=list)


@dataclass(frozen=True)
class Judged:
    """A claim with the verdict on each comparison, on our numbers and on the paper's own."""

    claim: Claim
    ours: tuple[Verdict, ...]
    theirs: tuple[Verdict, ...]
    seeds: tuple[int, ...]
    "For each comparison, those of its difference, or of its cell with the fewest."
    differences: tuple[Ours | None, ...] = ()
    "For each comparison, left - right user by user; None where its cells were not measured on the same users."

    @property
    def verdict(self) -> Verdict:
        """On our numbers."""
        return self.claim.verdict(self.ours)

    @property
    def on_one_seed(self) -> bool:
        """Whether our verdict would be another without the comparisons that have a cell with one seed."""
        sure: list[Verdict] = [
            judged if seeds > 1 else "not run" for judged, seeds in zip(self.ours, self.seeds, strict=True)
        ]
        return self.claim.verdict(sure) != self.verdict

    @property
    def published(self) -> Verdict:
        """On the published numbers, which have no intervals."""
        return self.claim.verdict(self.theirs)


class Results:
    """The stored results of a paper in one variant, over all seeds that are stored."""

    def __init__(
        self, paper: Paper, store: Store, *, code: int, variant: str, known: Mapping[str, Ours] | None = None
    ) -> None:
        self.paper, self.store, self.code, self.variant = paper, store, code, variant
        self.known = self._shared(known or {})
        self._found: dict[tuple[str, ...], Ours] = {}
        self._answers: dict[tuple[str, int], Answer] = {}

    def question(self, cell: Cell) -> Question:
        """What is measured for a cell that is no ratio."""
        variant = self.paper.measured_as(cell.run, self.variant)
        said = {name: value for name, value in cell.run.items() if value != self.paper.defaults.get(name)}
        return Question(self.paper.runner, self.code, variant, said, cell.ask)

    def ours(self, name: str) -> Ours:
        """A cell by its full id: the mean over users and seeds, its interval by a bootstrap over both.

        Of a cell that is known from elsewhere and also stored, what has more seeds counts, and then what is stored. So
        a table shows of each cell the best that there is, and cells side by side may be of other seeds, as its legend
        says: who compares two of them asks `judge`.
        """
        stored, known = self._stored(name), self.known.get(name, Ours())
        return stored if stored.seeds >= known.seeds else known

    def _shared(self, known: Mapping[str, Ours]) -> dict[str, Ours]:
        """What is known, for all cells that ask the same: of several, what has the most seeds."""
        best: dict[tuple[str, ...], Ours] = {}
        for name, ours in known.items():
            key = self._key(self.paper.cells[name])
            if key not in best or ours.seeds > best[key].seeds:
                best[key] = ours
        keys = {name: self._key(cell) for name, cell in self.paper.cells.items()} if best else {}
        return {name: best[key] for name, key in keys.items() if key in best}

    def _key(self, cell: Cell) -> tuple[str, ...]:
        """The same for cells that are the same number."""
        if cell.ratio is not None:
            return "ratio", *cell.ratio
        kind = "metric" if cell.series is None else "series"
        return self.question(cell).name, kind, str(cell.metric or cell.series)

    def _stored(self, name: str) -> Ours:
        cell = self.paper.cells[name]
        key = self._key(cell)
        if key not in self._found:
            self._found[key] = self._ratio(cell.ratio) if cell.ratio is not None else self._measured(cell)
        return self._found[key]

    def judge(self, claim: Claim) -> Judged:
        """The verdicts on a claim's comparisons: by the differences of the same users in the same seeds where both
        cells are stored with who their users are (also if more seeds of one are known), else by the intervals of both.
        """
        ours, theirs, seeds, differences = [], [], [], []
        for comparison in claim.holds_if:
            right = comparison.right
            mine = [self._interval(name) for name in comparison.cells]
            published = [self._published(name) for name in comparison.cells]
            if not isinstance(right, str):
                mine.append(Point(value=right))
                published.append(Point(value=right))
            difference = self._difference(comparison.left, right) if isinstance(right, str) else None
            differences.append(difference)
            ours.append(
                comparison.judge(mine[0], mine[1]) if difference is None else comparison.judge_difference(difference)
            )
            theirs.append(comparison.judge(published[0], published[1]))
            counted = [self.ours(name).seeds for name in comparison.cells]
            seeds.append(min(counted) if difference is None else difference.seeds)
        return Judged(claim, tuple(ours), tuple(theirs), tuple(seeds), tuple(differences))

    def _difference(self, left: str, right: str) -> Ours | None:
        """Left - right of two cells, of the same users in the seeds that are stored of both: a single one only where
        `ours` has no more of one of the cells.
        """
        from recleak.metrics.intervals import bootstrap_crossed

        mine, other = (self._by_seed(self.paper.cells[name]) for name in (left, right))
        common = sorted(mine.keys() & other.keys())
        if len(common) < max(1, min(2, *(self.ours(name).seeds for name in (left, right)))):
            return None
        users, values = [], []
        for seed in common:
            (who, value), (theirs, beside) = mine[seed], other[seed]
            if len(who) < 2 or not np.array_equal(who, theirs):
                return None
            users.append(who.astype(np.int64))
            values.append(value - beside)
        estimate = bootstrap_crossed(users, values, seed=0, level=_LEVEL, resamples=_RESAMPLES)
        return Ours(estimate.value, estimate.low, estimate.high, max(map(len, users)), len(values))

    def _by_seed(self, cell: Cell) -> dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """The users of a cell and a value for each; of no seed, if some answer does not say who its users are."""
        if cell.metric is None:
            return {}
        question, found = self.question(cell), {}
        for seed in self.store.seeds(question):
            metrics = self._answer(question, seed).metrics
            users, values = metrics.get(USERS), metrics.get(cell.metric)
            if users is None or values is None or len(users) != len(values):
                return {}
            found[seed] = users, values
        return found

    def _interval(self, name: str) -> Ours | Point | None:
        ours = self.ours(name)
        return None if ours.value is None else ours

    def _published(self, name: str) -> Ours | Point | None:
        value = self.paper.cells[name].published
        return None if value is None else Point(value=value)

    def _answer(self, question: Question, seed: int) -> Answer:
        key = (question.name, seed)
        if key not in self._answers:
            self._answers[key] = self.store.read(question, seed)
        return self._answers[key]

    def _measured(self, cell: Cell) -> Ours:
        from recleak.metrics.intervals import bootstrap_two_level

        question = self.question(cell)
        answers = [self._answer(question, seed) for seed in self.store.seeds(question)]
        seconds = sum(answer.seconds for answer in answers)
        if cell.series is not None:
            curves = [answer.series[cell.series] for answer in answers if cell.series in answer.series]
            return Ours(seeds=len(curves), seconds=seconds, curve=_mean_curve(curves)) if curves else Ours()
        values = [answer.metrics[cell.metric] for answer in answers if cell.metric in answer.metrics]
        if not values:
            return Ours()
        return _summary(
            bootstrap_two_level(values, seed=0, level=_LEVEL, resamples=_RESAMPLES), [values], len(values), seconds
        )

    def _ratio(self, names: Sequence[str]) -> Ours:
        from recleak.metrics.intervals import bootstrap_ratio

        cells = [self.paper.cells[name] for name in names]
        questions = [self.question(cell) for cell in cells]
        seeds = sorted(set.intersection(*(set(self.store.seeds(question)) for question in questions)))
        parts: list[list[NDArray[np.float64]]] = []
        for cell, question in zip(cells, questions, strict=True):
            found = [self._answer(question, seed).metrics.get(cell.metric or "") for seed in seeds]
            parts.append([values for values in found if values is not None])
        if not seeds or any(len(part) < len(seeds) for part in parts):
            return Ours()
        a0, a1, b0, b1 = parts
        if _mean(b0) == _mean(b1):
            return Ours()  # nothing was paid, so there is no ratio
        estimate = bootstrap_ratio(a0, a1, b0, b1, seed=0, level=_LEVEL, resamples=_RESAMPLES)
        different = {question.name: question for question in questions}.values()
        seconds = sum(self._answer(question, seed).seconds for question in different for seed in seeds)
        return _summary(estimate, parts, len(seeds), seconds)


def _mean(values: Sequence[NDArray[np.float64]]) -> float:
    return float(np.mean([each.mean() for each in values]))


def _summary(estimate: Estimate, parts: Sequence[Sequence[NDArray[np.float64]]], seeds: int, seconds: float) -> Ours:
    """One number from one seed has no interval: it says nothing about its noise."""
    users = min(max(len(each) for each in part) for part in parts)
    alone = users == 1 and seeds == 1
    low, high = (None, None) if alone else (estimate.low, estimate.high)
    return Ours(estimate.value, low, high, users, seeds, seconds)


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    """Point by point; if seeds differ in length, as far as all go."""
    points = [np.asarray(same).mean(axis=0) for same in zip(*curves, strict=False)]
    return [(float(x), float(y)) for x, y in points]
