"""A paper as data: its tables cell by cell with the published numbers, and its claims as comparisons between cells.

A paper is a TOML file. A table may list its `cells`, or be written as it is printed: `rows` with their published
numbers, `columns`, and what both share; each crossing is a cell, whose id is made by the table's `name` pattern.
"""

from __future__ import annotations

import itertools
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from recleak.errors import ConfigError, NotFoundError, unknown_name

Scalar = bool | int | float | str
Verdict = Literal["holds", "does not hold", "within noise", "not run"]
_SHOWN = 3  # problems of a file at a time
UNKNOWN = "-"  # in a row of published numbers: the paper gives none


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Variant(_Frozen):
    """A way to read the paper, such as its text or its published code."""

    name: str
    text: str
    same: dict[str, tuple[Scalar, ...]] = Field(default_factory=dict)
    "Runs with one of these values for each of these settings are those of the first variant: not measured again."


class Cell(_Frozen):
    """One number of a table (or one line of a figure), and what has to be measured for it."""

    id: str
    "Unique in its paper once the table's id and a slash are put before it."
    row: str
    column: str
    run: dict[str, Scalar] = Field(default_factory=dict)
    "What decides a training run."
    ask: dict[str, Scalar] = Field(default_factory=dict)
    "What is measured on that run."
    metric: str | None = None
    "Which of the metrics that the ask gives."
    series: str | None = None
    "Or which of its series."
    ratio: tuple[str, str, str, str] | None = None
    "Or |a0 - a1| / |b0 - b1| of four other cells."
    published: float | None = None

    @model_validator(mode="after")
    def _check(self) -> Cell:
        kinds = [name for name in ("metric", "series", "ratio") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(f"cell {self.id}: got {' and '.join(kinds) or 'none'} of metric, series, ratio; give one")
        if (self.ratio is None) != bool(self.run and self.ask):
            raise ValueError(f"cell {self.id}: expected `run` and `ask`, or `ratio` instead of both")
        return self


class _Axis(_Frozen):
    """A row or a column of a table as it is printed."""

    label: str
    id: str = ""
    run: dict[str, Scalar] = Field(default_factory=dict)
    ask: dict[str, Scalar] = Field(default_factory=dict)
    over: dict[str, Scalar] = Field(default_factory=dict)
    "Of a row: settings in the place of those that columns ask for; where a column has none of these, there is no cell."
    name: str = ""
    "Of a row: how the ids of its cells are made, in the place of the table's pattern."
    metric: str | None = None
    series: str | None = None
    published: tuple[float | Literal["-"], ...] | None = None


class _Change(_Frozen):
    """What is asked otherwise for some of the cells of a table."""

    where: dict[str, tuple[Scalar, ...]]
    "Cells whose run or ask has one of these values for each of these settings."
    ask: dict[str, Scalar] | None = None
    "Settings in the place of those that rows and columns ask for; without any, there is no cell."

    def concerns(self, settings: Mapping[str, Scalar]) -> bool:
        """Whether a cell of these settings is one of them."""
        return all(settings.get(name) in values for name, values in self.where.items())


class _Grid(_Frozen):
    rows: tuple[_Axis, ...]
    columns: tuple[_Axis, ...]
    name: str = "{row}/{column}"
    run: dict[str, Scalar] = Field(default_factory=dict)
    ask: dict[str, Scalar] = Field(default_factory=dict)
    metric: str | None = None
    series: str | None = None
    changes: tuple[_Change, ...] = ()

    def cells(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            if row.published is not None and len(row.published) != len(self.columns):
                raise ValueError(
                    f"row {row.label}: got {len(row.published)} published numbers for {len(self.columns)} columns"
                )
            for position, column in enumerate(self.columns):
                run, ask = {**self.run, **row.run, **column.run}, {**self.ask, **row.ask, **column.ask}
                if not row.over.keys() <= ask.keys():
                    continue
                ask |= row.over
                changes = [change for change in self.changes if change.concerns({**run, **ask})]
                if any(change.ask is None for change in changes):
                    continue
                for change in changes:
                    ask |= change.ask or {}
                metric = column.metric or row.metric or self.metric
                series = column.series or row.series or self.series
                words = {**run, **ask, "metric": metric, "series": series, "row": row.id, "column": column.id}
                given = UNKNOWN if row.published is None else row.published[position]
                yield {
                    "id": _filled(row.name or self.name, words),
                    "row": row.label,
                    "column": column.label,
                    "run": run,
                    "ask": ask,
                    "metric": metric,
                    "series": series,
                    "published": None if given == UNKNOWN else given,
                }


class Chart(_Frozen):
    """How a figure is drawn. `panel`, `color` and `dash` are patterns as `name` is, filled with a paper's `labels`."""

    x: str = ""
    "What the axis says."
    y: str = ""
    at: str = "column"
    "The setting that is x of a cell with a metric; a series has its own x."
    log: Literal["", "x", "y", "xy"] = ""
    panel: str = ""
    color: str = "{row}"
    dash: str = ""
    bars: bool = False


class Way(_Frozen):
    """An attack, a defense, or a measure, with its name in a picture."""

    label: str
    run: dict[str, Scalar] = Field(default_factory=dict)
    "Settings that a run must have; if a run fits two ways, the one that names more of it counts."
    ask: dict[str, Scalar] = Field(default_factory=dict)
    metric: str = ""
    point: str = ""
    "What stands beside a point, a pattern."


class Tradeoff(_Frozen):
    """A picture of privacy against utility: a point for each attack on each run whose utility is also measured."""

    title: str
    panel: str
    leak: str
    "What the axis of the attacks says."
    utility: Way
    chance: Way
    "A guess without knowledge, as a line."
    attacks: tuple[Way, ...]
    defenses: tuple[Way, ...] = Field(min_length=1)
    "The first is no defense; each other one is a line from there through its runs, in the order of the file."
    without: tuple[str, ...] = ()
    "Tables whose cells are not in it."


class Table(_Frozen):
    """A table or a figure."""

    id: str
    title: str
    headline: bool = False
    "Measured first."
    chart: Chart | None = None
    cells: tuple[Cell, ...]

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, given: Any) -> Any:
        """Cells from rows and columns."""
        if not isinstance(given, dict) or not {"rows", "columns"} & given.keys():
            return given
        grid = {name: given[name] for name in _Grid.model_fields if name in given}
        rest = {name: value for name, value in given.items() if name not in grid}
        return {**rest, "cells": [*rest.get("cells", ()), *_Grid.model_validate(grid).cells()]}

    def full(self, cell: Cell) -> str:
        """A cell's id in the paper."""
        return f"{self.id}/{cell.id}"


class Interval(Protocol):
    """What a comparison needs of a measured number; without an end, the interval is not known."""

    @property
    def low(self) -> float | None: ...  # noqa: D102
    @property
    def high(self) -> float | None: ...  # noqa: D102


class Point(_Frozen):
    """A number that is what it is."""

    value: float

    @property
    def low(self) -> float:
        """Itself."""
        return self.value

    @property
    def high(self) -> float:
        """Itself."""
        return self.value


class Comparison(_Frozen):
    """`left > right` or `left < right` by at least a margin (which may be negative: a slack), or equal up to it: `~`.

    In a file it is a list: `[left, sign, right]` or `[left, sign, right, margin]`; the right may be a number.
    """

    left: str
    sign: Literal[">", "<", "~"]
    right: str | float
    margin: float = 0.0

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, given: Any) -> Any:
        if isinstance(given, list | tuple):
            if not 3 <= len(given) <= 4:
                raise ValueError(f"got {given}, expected [left, sign, right] or [left, sign, right, margin]")
            return dict(zip(("left", "sign", "right", "margin"), given, strict=False))
        return given

    @model_validator(mode="after")
    def _check(self) -> Comparison:
        if self.sign == "~" and self.margin <= 0:
            raise ValueError(f"{self}: `~` needs a margin above 0, as the fourth of the list")
        return self

    def __str__(self) -> str:
        right = self.right if isinstance(self.right, str) else f"{self.right:g}"
        if self.sign == "~":
            return f"{self.left} ~ {right} ± {self.margin:g}"
        shift = self.margin if self.sign == ">" else -self.margin
        return f"{self.left} {self.sign} {right}" + (f" {'+' if shift > 0 else '-'} {abs(shift):g}" if shift else "")

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells that it names."""
        return (self.left, self.right) if isinstance(self.right, str) else (self.left,)

    def judge(self, left: Interval | None, right: Interval | None) -> Verdict:
        """Whether all of the left interval lies on the claimed side of all of the right one, or on the other side.

        Stricter than a test of the difference: intervals may overlap although the difference is certain.
        """
        if left is None or right is None:
            return "not run"
        if left.low is None or left.high is None or right.low is None or right.high is None:
            return "within noise"  # one number says nothing about its noise
        return self._verdict(left.low - right.high, left.high - right.low)

    def judge_difference(self, difference: Interval) -> Verdict:
        """The same by the interval of left - right, where both were measured on the same users."""
        if difference.low is None or difference.high is None:
            return "within noise"
        return self._verdict(difference.low, difference.high)

    def _verdict(self, least: float, most: float) -> Verdict:
        """By the ends of left - right."""
        if self.sign == "<":
            least, most = -most, -least
        if self.sign == "~":
            inside = -self.margin <= least and most <= self.margin
            outside = least > self.margin or most < -self.margin
        else:
            inside, outside = least > self.margin, most < self.margin or most == least == self.margin
        return "holds" if inside else "does not hold" if outside else "within noise"


class Claim(_Frozen):
    """A sentence of the paper, and the comparisons that must hold for it.

    In a file, `for_each` gives lists of words: each comparison is repeated with every choice of them for its `{word}`s.
    """

    text: str
    where: str
    holds_if: tuple[Comparison, ...] = Field(min_length=1)
    at_least: int | None = Field(default=None, ge=1)
    "How many comparisons must hold (default: all); for claims such as `in most cases`."

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "for_each" not in given:
            return given
        rest = {name: value for name, value in given.items() if name != "for_each"}
        choices = [
            dict(zip(given["for_each"], words, strict=True)) for words in itertools.product(*given["for_each"].values())
        ]
        comparisons = [
            [_filled(part, words) if isinstance(part, str) else part for part in comparison]
            for words in choices
            for comparison in given.get("holds_if", ())
        ]
        return {**rest, "holds_if": comparisons}

    def verdict(self, judged: Sequence[Verdict]) -> Verdict:
        """Of the comparisons' verdicts, in their order."""
        count, needed = Counter(judged), self.at_least or len(judged)
        if count["holds"] >= needed:
            return "holds"
        if count["does not hold"] > len(judged) - needed:
            return "does not hold"
        return "not run" if count["not run"] else "within noise"


class Paper(_Frozen):
    """What a paper published and claims, and the function that measures it again."""

    name: str
    title: str
    runner: str
    "An import path, `module:function`; see `recleak.papers.reproduce.Runner`."
    variants: tuple[Variant, ...] = Field(min_length=1)
    "The first is the default."
    tables: tuple[Table, ...] = ()
    figures: tuple[Table, ...] = ()
    claims: tuple[Claim, ...] = ()
    defaults: dict[str, Scalar] = Field(default_factory=dict)
    "What a setting of a run is where a cell does not say it: a cell that does asks for the same run."
    labels: dict[str, str] = Field(default_factory=dict)
    "In pictures: what a setting's value is called."
    tradeoff: Tradeoff | None = None
    unavailable: tuple[str, ...] = ()
    "Data sets that not everybody can have: without them, their runs are left out, and blank cells say so."

    @property
    def all_tables(self) -> tuple[Table, ...]:
        """Tables, then figures."""
        return (*self.tables, *self.figures)

    @cached_property
    def cells(self) -> dict[str, Cell]:
        """All cells by their full id."""
        return {table.full(cell): cell for table in self.all_tables for cell in table.cells}

    def needs(self, cell: Cell) -> list[Cell]:
        """The cells that are measured for it: itself, or those of its ratio."""
        if cell.ratio is None:
            return [cell]
        return [needed for name in cell.ratio for needed in self.needs(self.cells[name])]

    def measured_as(self, run: Mapping[str, Scalar], variant: str) -> str:
        """The variant under which a run is measured: the first, where the given one does not change the run."""
        same = next((each.same for each in self.variants if each.name == variant), {})
        unchanged = bool(same) and all(run.get(name) in values for name, values in same.items())
        return self.variants[0].name if unchanged else variant

    def caption(self, pattern: str, cell: Cell) -> str:
        """A pattern filled with what a cell is: its settings by their labels, its row and its column."""
        given = {**cell.run, **cell.ask, "metric": cell.metric, "series": cell.series}
        named = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in given.items()}
        words = {name: self.labels.get(value, value) for name, value in named.items()}
        try:
            return _filled(pattern, {**words, "row": cell.row, "column": cell.column})
        except ValueError as error:
            raise ConfigError(f"{self.name}: in a picture of the cell {cell.id}, {error}.") from error

    def check(self) -> Paper:
        """Ids are unique, and every name leads somewhere; returns the paper itself."""
        known = self.cells
        total = [table.full(cell) for table in self.all_tables for cell in table.cells]
        _unique("table", [table.id for table in self.all_tables])
        _unique("cell", total)
        _unique("variant", [variant.name for variant in self.variants])
        for name, cell in known.items():
            for part in cell.ratio or ():
                if part not in known:
                    raise _unknown_cell(part, known, f"the ratio {name}")
                if known[part].metric is None:
                    raise ConfigError(f"The ratio {name} names {part}, which is no metric. Name cells with a metric.")
        for table in self.figures:
            if (chart := table.chart) is not None:
                for cell in table.cells:
                    self.caption(f"{{{chart.at}}}{chart.panel}{chart.color}{chart.dash}", cell)
        for claim in self.claims:
            if claim.at_least is not None and claim.at_least > len(claim.holds_if):
                raise ConfigError(
                    f"The claim {claim.text!r}: at_least is {claim.at_least}, expected at most {len(claim.holds_if)}."
                )
            for part in (name for comparison in claim.holds_if for name in comparison.cells):
                if part not in known:
                    raise _unknown_cell(part, known, f"the claim {claim.text!r}")
                if known[part].series is not None:
                    raise ConfigError(f"The claim {claim.text!r} names {part}, a series. Name cells with a metric.")
        return self

    def variant(self, name: str | None) -> str:
        """A variant's name; the first if none is given."""
        names = [variant.name for variant in self.variants]
        if name is not None and name not in names:
            raise unknown_name("variant", name, names)
        return name or names[0]


def _filled(pattern: str, words: Mapping[str, object]) -> str:
    try:
        return pattern.format_map(words)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{pattern!r}: got {error}, expected words of {', '.join(words)}") from error


def _unique(kind: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"Got the {kind} {twice[0]!r} twice, expected unique ids. Rename one.")


def _unknown_cell(got: str, known: Iterable[str], where: str) -> NotFoundError:
    """As `unknown_name`, with the cells of the same table only: a paper has hundreds."""
    same = [name for name in known if name.split("/")[0] == got.split("/")[0]]
    return unknown_name(f"cell (in {where})", got, same or {name.split("/")[0] + "/..." for name in known})


# --- files --------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """The papers of this package."""
    return sorted(each.name[:-5] for each in files(__package__).iterdir() if each.name.endswith(".toml"))


def load(paper: str) -> Paper:
    """A paper by its name, or by the path of its TOML file."""
    if paper.endswith(".toml"):
        place: Traversable = Path(paper)
    elif paper in (known := names()):
        place = files(__package__) / f"{paper}.toml"
    else:
        raise unknown_name("paper", paper, known)
    try:
        return Paper.model_validate(tomllib.loads(place.read_text(encoding="utf-8"))).check()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{paper}: no TOML ({error}).") from error
    except ValidationError as error:
        found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ConfigError(f"{paper}: {'; '.join(found[:_SHOWN])}.\n  Mend the file.") from error


def runner_module(paper: Paper) -> tuple[ModuleType, str]:
    """The module of a paper's runner, and the function's name."""
    module, _, function = paper.runner.partition(":")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{paper.name}: the runner {paper.runner} cannot be imported ({error}).") from error
    if not callable(getattr(found, function, None)):
        raise ConfigError(f"{paper.name}: got the runner {paper.runner!r}, expected `module:function`.")
    return found, function
