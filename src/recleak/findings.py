"""Findings: what an audit found, as tables. Everything that is shown (terminal, JSON, report) is made from them.

Every table speaks of a *system*: the data, the model, the protocol and the defense in force. A value stands with its
interval (`low`, `high`), over how many users and seeds it is, and the nulls are rows beside the attacks. What could not
be measured is a row without a value that gives the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import polars as pl
from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table
from rich.text import Text

from recleak.errors import DataError, RecleakError
from recleak.files import read_json, read_table, refuse_links, replace_table, replace_text

VERSION = 1
SYSTEM = ("data", "model", "protocol", "defense")  # labels as the experiment gives them

_SYSTEM = dict.fromkeys(SYSTEM, pl.String)
_VALUE = {"value": pl.Float64, "low": pl.Float64, "high": pl.Float64, "users": pl.Int64, "seeds": pl.Int64}
_ATTACK = {"question": pl.String, "attack": pl.String}

TABLES: Mapping[str, pl.Schema] = {
    # Every attack and every null against every system, by metric. Test users only. role: attack | null. reason: why
    # there is no value; or of an AUC, which other attack answers alike. Of communities, the interval is over users as
    # adversaries and as victims.
    "scores": pl.Schema(
        {**_SYSTEM, **_ATTACK, "role": pl.String, "vantage": pl.String, "metric": pl.String, **_VALUE}
        | {"reason": pl.String}
    ),
    # For every system and question: the attack that was strongest on validation users, graded on test users, beside the
    # strongest null. excess: its AUC minus the null's on the same users. verdict: leaks | not found (less than 0.05) |
    # cannot tell (it may be 0, or more than that) | not measured.
    "verdicts": pl.Schema(
        {**_SYSTEM, **_ATTACK, "direction": pl.Int64, "candidates": pl.Int64, **_VALUE}
        | {"null": pl.String, "null_value": pl.Float64, "null_low": pl.Float64, "null_high": pl.Float64}
        | {"excess": pl.Float64, "excess_low": pl.Float64, "excess_high": pl.Float64}
        | {"verdict": pl.String, "words": pl.String}
    ),
    # Each defense minus the reference on the same users: leakage (question, attack), or utility (question: utility).
    "comparisons": pl.Schema(
        {**_SYSTEM, "reference": pl.String, **_ATTACK, "metric": pl.String, **_VALUE}
        | {"p": pl.Float64, "p_holm": pl.Float64}
    ),
    # The recommender beside chance and the baselines.
    "utility": pl.Schema({**_SYSTEM, "recommender": pl.String, "metric": pl.String, **_VALUE}),
    # What a defense promises, what it composes to, and what canaries show at least.
    "ledger": pl.Schema(
        {**_SYSTEM, "mechanism": pl.String, "unit": pl.String, "neighbors": pl.String}
        | {"claimed": pl.Float64, "composed": pl.Float64, "delta": pl.Float64, "times": pl.Int64, "words": pl.String}
        | {"canaries": pl.Int64, "at_least": pl.Float64, "level": pl.Float64}
    ),
    # Receiver operating characteristic over all pairs of the test users of one seed.
    "roc": pl.Schema({**_SYSTEM, **_ATTACK, "role": pl.String, "seed": pl.Int64, "fpr": pl.Float64, "tpr": pl.Float64}),
    # AUC by part of something. kind: round (x: the round of a user's first upload) | component | activity | the name of
    # an attribute. kind accuracy: of communities, the accuracy instead, after the round x.
    "parts": pl.Schema(
        {**_SYSTEM, **_ATTACK, "kind": pl.String, "part": pl.String, "x": pl.Float64, **_VALUE, "reason": pl.String}
    ),
    # Every user under every attack, nulls aside; rank 1 is the most exposed user of that attack, system and seed.
    # exposed: the share of own items that are told, or the probability given to the user's own class of an attribute,
    # or the share of the adversaries in whose community the user is that find it.
    "risk": pl.Schema(
        {**_SYSTEM, **_ATTACK, "seed": pl.Int64, "user": pl.String, "activity": pl.Int64}
        | {"auc": pl.Float64, "exposed": pl.Float64, "rank": pl.Int64}
    ),
}
_BULKY = ("risk",)  # not part of findings.json
_COLORS = {"leaks": "red", "not found": "green", "cannot tell": "yellow", "not measured": "yellow"}


class _About(BaseModel):
    """What must be of these types, where it is there: reports are made from it."""

    model_config = ConfigDict(extra="allow", strict=True)

    title: str = ""
    experiment: dict[str, Any] = {}
    systems: list[dict[str, str]] = []
    attacks: list[dict[str, Any]] = []
    fingerprints: dict[str, str] = {}
    notes: list[str] = []
    level: float = Field(default=0.95, gt=0, lt=1)
    validation: float = Field(default=0.25, gt=0, lt=1)
    self_test: bool = False
    environment: dict[str, str] = {}
    command: str = ""


class FindingsError(RecleakError):
    """A folder without findings that can be used."""


@dataclass(frozen=True, eq=False, repr=False)
class Findings:
    """The tables of an audit, and what it was about."""

    about: Mapping[str, Any]
    """version (of this format), recleak, title, experiment (resolved), systems (a list: the labels of SYSTEM, and text:
    each in full words), attacks (a list: attack, question, vantage, role, text, knowledge), notes (sentences),
    level, validation (share of the users), self_test (bool), environment (names to values), command"""
    scores: pl.DataFrame
    verdicts: pl.DataFrame
    comparisons: pl.DataFrame
    utility: pl.DataFrame
    ledger: pl.DataFrame
    roc: pl.DataFrame
    parts: pl.DataFrame
    risk: pl.DataFrame

    @classmethod
    def of(cls, about: Mapping[str, Any], rows: Mapping[str, list[dict[str, Any]] | pl.DataFrame]) -> Findings:
        """From rows by table; a table that is not given is empty."""
        unknown = sorted(set(rows) - set(TABLES))
        if unknown:
            raise ValueError(f"Got the tables {unknown}, expected some of {list(TABLES)}.")
        tables = {}
        for name, schema in TABLES.items():
            given = rows.get(name, [])
            frame = given if isinstance(given, pl.DataFrame) else pl.DataFrame(given, schema=schema, orient="row")
            tables[name] = frame.select(pl.col(column).cast(kind) for column, kind in schema.items())
            if tables[name].schema != schema:  # a column of objects stays one
                raise ValueError(f"got the table {name} with {tables[name].schema!s:.200}, expected {schema!s:.200}")
        return cls({"version": VERSION, **about}, **tables)

    @property
    def tables(self) -> dict[str, pl.DataFrame]:
        """All tables by name."""
        return {name: getattr(self, name) for name in TABLES}

    def write(self, folder: Path) -> None:
        """findings.json (all but the users) and findings/NAME.parquet; each file whole or not at all."""
        for name, frame in self.tables.items():
            replace_table(folder / "findings" / f"{name}.parquet", frame)
        replace_text(folder / "findings.json", json.dumps(self.as_json, indent=2, allow_nan=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Findings:
        """What `write` wrote."""
        path = folder / "findings.json"
        if not path.is_file():
            raise FindingsError(f"{folder}: no findings.json.\n  Give a folder that `recleak audit` wrote.")
        try:
            refuse_links(folder)
            about = read_json(path)["about"]
            if about["version"] != VERSION:
                raise ValueError(f"version {about['version']!r:.40}, expected {VERSION}")
            _About.model_validate(about)
            rows = {name: read_table(folder / "findings" / f"{name}.parquet") for name in TABLES}
            return cls.of(about, rows)
        except (ValueError, KeyError, TypeError, OSError, DataError, pl.exceptions.PolarsError) as error:
            problem = f"{error!s:.500}".replace("\n", " ")
            raise FindingsError(f"{path}: not findings of this version ({problem}).\n  Audit again.") from error

    @cached_property
    def as_json(self) -> dict[str, Any]:
        """For machines: what it is about and all tables but the users', as lists of rows."""
        return {
            "about": dict(self.about),
            **{name: _finite(frame).to_dicts() for name, frame in self.tables.items() if name not in _BULKY},
        }

    @cached_property
    def summary(self) -> pl.DataFrame:
        """A row per system and question: the strongest attack beside the strongest null, the utility, the verdict."""
        worth = self.utility.filter(pl.col("recommender") == pl.col("model"))
        first = worth["metric"][0] if len(worth) else "utility"
        worth = worth.filter(pl.col("metric") == first).select(*SYSTEM, pl.col("value").alias(first))
        rate = self.scores.filter(pl.col("metric") == "tpr@1%", pl.col("role") == "attack").select(
            *SYSTEM, *_ATTACK, pl.col("value").alias("tpr@1%")
        )
        columns = (*_ATTACK, "value", "low", "high", "null", "null_value")
        rows = self.verdicts.select(*SYSTEM, *columns, "verdict")
        rows = rows.join(rate, on=[*SYSTEM, *_ATTACK], how="left", maintain_order="left")
        rows = rows.join(worth, on=list(SYSTEM), how="left", maintain_order="left")
        return rows.select(*SYSTEM, *columns, "tpr@1%", first, "verdict").rename({"value": "auc"})

    def report(self, path: Path | str) -> Path:
        """Write the report: one page that needs nothing else."""
        from recleak.report import write

        return write(self, Path(path))

    def __rich__(self) -> Table:
        table = Table(title=Text(str(self.about.get("title", ""))))
        for heading in self._shown[0]:
            table.add_column(heading)
        for *cells, verdict in self._shown[1]:
            table.add_row(*map(Text, cells), Text(verdict, style=_COLORS.get(verdict, "")))
        return table

    def _repr_html_(self) -> str:
        """For notebooks."""
        head = "".join(f"<th>{escape(each)}</th>" for each in self._shown[0])
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self._shown[1])
        title = escape(str(self.about.get("title", "")))
        return f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    @cached_property
    def _shown(self) -> tuple[list[str], list[list[str]]]:
        """Headings and cells of a short table; what is the same in all rows is left out."""
        *_, utility, _ = self.summary.columns
        several = [name for name in (*SYSTEM, "question") if name == "defense" or self.summary[name].n_unique() > 1]
        rows = []
        for row in self.summary.iter_rows(named=True):
            auc = "" if row["auc"] is None else f"{row['auc']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
            null = "" if row["null"] is None else f"{row['null_value']:.3f} {row['null']}"
            numbers = ["" if row[name] is None else f"{row[name]:.3f}" for name in ("tpr@1%", utility)]
            rows.append([*(row[name] for name in several), row["attack"] or "", auc, null, *numbers, row["verdict"]])
        return [*several, "strongest attack", "AUC", "best null", "TPR at 1 % FPR", utility, "verdict"], rows

    def __repr__(self) -> str:
        counts = ", ".join(f"{name} {len(frame):,}" for name, frame in self.tables.items() if len(frame))
        return f"Findings({self.about.get('title', '')!r}: {counts})"


def _finite(frame: pl.DataFrame) -> pl.DataFrame:
    """JSON has no infinity and no NaN: they become null."""
    numbers = [name for name, kind in frame.schema.items() if kind == pl.Float64]
    return frame.with_columns(pl.when(pl.col(name).is_finite()).then(pl.col(name)).alias(name) for name in numbers)
