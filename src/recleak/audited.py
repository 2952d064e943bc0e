"""A system with all that was stored of it: its attacks over seeds, and for each question the strongest one.

The attacker is chosen on validation users; what is said of it is of the other users. Users are the same people in every
seed, so intervals resample users and seeds crossed (`metrics.intervals.bootstrap_crossed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recleak.cells import HISTORY, MEMBERSHIP, Ask, Baselines, Cell, loaded
from recleak.errors import DataError
from recleak.experiment import System
from recleak.files import read_json, read_table
from recleak.metrics.comparison import (
    Counts,
    Difference,
    strongest,
)
from recleak.metrics.inference import PerUser
from recleak.metrics.intervals import Estimate, bootstrap_crossed, both_ways

VANTAGES = {
    "Server": "The server that receives uploads",
    "Peers": "A node of the gossip, or a group of them, that receives models",
    "Aggregator": "The server that receives sums of uploads",
    "Audience": "Somebody who sees the lists that users are shown",
    "Holder": "Somebody who holds users' vectors",
}
BySeed = dict[int, PerUser]
_COMMUNITY_FACTS = ("rounds", "curve", "curve_as_victim", "separation")
_FACTS = ("vantage", "knowledge", "direction", "roc")  # of an attack that was graded
_ITEM_FACTS = ("thresholds", "slopes")
AS_VICTIM = "_as_victim"  # after a metric of adversaries: what each user adds to their mean as a victim
COMMUNITY_METRICS = ("auc", "accuracy", "bound")
_AGAIN = "Delete the folder of the cell; it will be measured again."
_COLUMNS: dict[str, pl.DataType] = {
    **{"user": pl.Int64(), "valid": pl.Boolean(), "auc": pl.Float64(), "exposed": pl.Float64()},
    **{"round": pl.Int64(), "activity": pl.Int64()},
}
_ITEM_COLUMNS: dict[str, pl.DataType] = {
    "f1": pl.Float64(),
    **dict.fromkeys(("positives", "negatives"), pl.Int64()),
    **{f"{name}{at}": pl.Int64() for name in ("hits", "alarms") for at in ("", "@1%", "@0.1%")},
}


@dataclass(frozen=True, eq=False)
class Attacked:
    """One attack on one system, over seeds; without users if it makes no sense, and then it says why."""

    ask: Ask
    seeds: list[int]  # those that were graded
    facts: list[dict[str, Any]]  # of each of them
    users: list[pl.DataFrame]  # of each of them, all users
    reasons: list[str]  # of the others

    @property
    def reason(self) -> str | None:
        """Why there are no users."""
        if self.users:
            return None
        return next(iter(self.reasons), "It was not run.")

    @property
    def vantage(self) -> str:
        """Where it stands."""
        return str(self.facts[0].get("vantage", "")) if self.facts else ""

    @property
    def reads_history(self) -> bool:
        """Whether it reads what users did, beside what they are shown."""
        return bool(self.facts and self.facts[0].get("history", False))

    def values(self, metric: str, *, valid: bool) -> list[PerUser]:
        """A metric by user, for each seed: of validation users, or of the others."""
        found = []
        for frame in self.users:
            part = frame.filter((pl.col("valid") == valid) & pl.col(metric).is_not_null())
            found.append(per_user(part, metric))
        return found

    def graded(self, metric: str) -> list[PerUser]:
        """A metric for each seed, of the users on whom the attacker was not chosen, for intervals.

        Of communities a value counts a user as an adversary and as a victim; only their mean is that of adversaries.
        """
        if not self.ask.community:
            return self.values(metric, valid=False)
        return [both_ways_of(frame, metric, metric + AS_VICTIM) for frame in self.users]

    @property
    def auc(self) -> BySeed:
        """By test user."""
        return dict(zip(self.seeds, self.graded("auc"), strict=True))

    def counts(self, hits: str, trials: str) -> list[Counts]:
        """Hits of trials by test user, for each seed."""
        parts = [frame.filter(~pl.col("valid")) for frame in self.users]
        return [Counts(*(part[name].to_numpy() for name in ("user", hits, trials))) for part in parts]


@dataclass(frozen=True, eq=False)
class Contest:
    """The attacks on one question, and the nulls."""

    question: str
    attacks: list[Attacked]
    nulls: list[Attacked]

    @cached_property
    def chosen(self) -> Attacked | None:
        """The strongest attack on validation users, of those who see most: who receives uploads could add them up.

        Of those who see lists, one that reads lists alone, if there is one: what users did tells the same whatever is
        shown, and would hide what lists tell.
        """
        for vantage in VANTAGES:
            here = [each for each in self.attacks if each.vantage == vantage]
            found = _chosen([each for each in here if not each.reads_history]) or _chosen(here)
            if found is not None:
                return found
        return None

    @cached_property
    def null(self) -> Attacked | None:
        """The strongest null on validation users, where the chosen attack stands, of those graded on the same users.

        Of an attribute the first one, which says the same of all users: a drawn guess is as good on average, and where
        it is better, that is luck.
        """
        if self.chosen is None:
            return None
        nulls = [each for each in self.nulls if each.vantage == self.chosen.vantage]
        if not self.chosen.reads_history:  # who does not read it is not compared with who does
            nulls = [each for each in nulls if each.ask.settings["use"] != HISTORY]
        nulls = [each for each in nulls if each.ask.aside == self.chosen.ask.aside]
        return _chosen(nulls[:1] if self.chosen.ask.attribute else nulls)

    @cached_property
    def excess(self) -> BySeed:
        """The AUC of the strongest attack beyond that of the strongest null, by test user."""
        if self.chosen is None or self.null is None:
            return {}
        ours, theirs = self.chosen.auc, self.null.auc
        return {seed: _minus(ours[seed], theirs[seed]) for seed in common(ours, theirs)}


@dataclass(frozen=True, eq=False)
class Audited:
    """A system with all that was stored of it."""

    system: System
    cells: list[Cell]  # one per seed, with all asks
    canaries: list[Cell]
    baselines: list[Baselines]
    level: float

    @cached_property
    def attacked(self) -> list[Attacked]:
        """Every ask, in order."""
        found = []
        for ask in self.cells[0].asks:
            made = Attacked(ask, [], [], [], [])
            for cell in self.cells:
                file = cell.path / f"{ask.key}.json"
                if not file.exists():
                    continue
                items = ask.question == MEMBERSHIP
                needed = _ITEM_FACTS if items else _COMMUNITY_FACTS if ask.community else ()
                facts = stored(file, "reason")
                if facts["reason"] is not None:
                    made.reasons.append(str(facts["reason"]))
                    continue
                made.seeds.append(cell.seed)
                made.facts.append(_with(facts, file, *_FACTS, *needed))
                n_users = loaded(self.system.data).n_users
                made.users.append(_graded(file.with_suffix(".parquet"), n_users, ask))
            found.append(made)
        return found

    def of_kind(self, *kinds: str) -> list[Attacked]:
        """The asks of some kinds."""
        return [each for each in self.attacked if each.ask.kind in kinds]

    @cached_property
    def contests(self) -> list[Contest]:
        """One for each question, in order."""
        questions = dict.fromkeys(each.ask.question for each in self.of_kind("attack"))
        kinds = {kind: self.of_kind(kind) for kind in ("attack", "null")}
        return [
            Contest(name, *([each for each in some if each.ask.question == name] for some in kinds.values()))
            for name in questions
        ]

    def estimate(self, values: Sequence[PerUser]) -> dict[str, Any]:
        """The columns of a value, of users whose values are from 0 to 1."""
        given = [each for each in values if len(each.user) > 1]
        if not given:
            return nothing()
        users, numbers = [each.user for each in given], [each.value for each in given]
        found = bootstrap_crossed(users, numbers, seed=0, level=self.level)
        return columns(found, len(given)) | {"low": max(0.0, found.low), "high": min(1.0, found.high)}

    def utility(self, metric: str) -> BySeed:
        """The recommender's."""
        cells = [cell for cell in self.cells if has_utility(cell)]
        return {cell.seed: per_user(ranked(cell.path / "utility.parquet", metric), metric) for cell in cells}


def stored(file: Path, *names: str) -> dict[str, Any]:
    """Facts of a cell, with these among them; an error that says what to do if a file is not what we write."""
    try:
        facts = read_json(file)
    except (OSError, ValueError) as error:
        raise DataError(f"not facts of a cell ({error!s:.200})", file=file, remedy=_AGAIN) from error
    return _with(facts, file, *names)


def _with(facts: Any, file: Path, *names: str) -> dict[str, Any]:
    if not isinstance(facts, dict) or not set(names) <= set(facts):
        raise DataError(f"got {facts!r:.80}, expected an object with {', '.join(names)}", file=file, remedy=_AGAIN)
    return facts


def _graded(file: Path, n_users: int, ask: Ask) -> pl.DataFrame:
    """The grades of users who are there: of own items, or of another question."""
    frame = read_table(file)
    expected = _COLUMNS | (_ITEM_COLUMNS if ask.question == MEMBERSHIP else {"accuracy": pl.Float64()})
    if ask.community:
        expected |= {f"{name}{suffix}": pl.Float64() for name in COMMUNITY_METRICS for suffix in ("", AS_VICTIM)}
    kinds = {name: frame.schema.get(name) for name in expected}
    if kinds != expected or not bool(frame["user"].is_between(0, n_users, closed="left").all()):
        problem = f"got the columns {dict(frame.schema)!s:.200}, expected {expected!s:.400} of {n_users:,} users"
        raise DataError(problem, file=file, remedy=_AGAIN)
    return frame


def ranked(file: Path, *metrics: str, by: str | None = None) -> pl.DataFrame:
    """Ranking metrics of users, each once, with these among them: of one recommender, or of several `by` name."""
    frame = read_table(file)
    kinds = frame.schema
    numbers = [name for name in frame.columns if name not in ("user", by)]
    whole = kinds.get("user") == pl.Int64 and {*metrics} <= {*numbers} and (by is None or kinds.get(by) == pl.String)
    whole = whole and all(kinds[name] == pl.Float64 for name in numbers) and not any(frame.null_count().row(0))
    if not whole or frame.select(name for name in ("user", by) if name).is_duplicated().any():
        expected = ", ".join(["numbers of users", *metrics])
        problem = f"got the columns {dict(kinds)!s:.200}, expected {expected}, each user once"
        raise DataError(problem, file=file, remedy=_AGAIN)
    return frame


def has_utility(cell: Cell) -> bool:
    """Whether its system was trained."""
    return (cell.path / "utility.parquet").exists()


def both_ways_of(frame: pl.DataFrame, row: str, column: str) -> PerUser:
    """A value for each user, of two columns: as an adversary, if the attacker was not chosen on it, and as a victim."""
    victims = frame.filter(pl.col(column).is_not_null())
    own = victims.select(pl.when(~pl.col("valid")).then(pl.col(row)).fill_null(float("nan")).alias("own"))["own"]
    if bool(own.is_nan().all()):
        return PerUser(np.zeros(0, np.int64), np.zeros(0), 0)
    return PerUser(victims["user"].to_numpy(), both_ways(own.to_numpy(), victims[column].to_numpy()), 0)


def per_user(table: pl.DataFrame, metric: str) -> PerUser:
    """A column by user."""
    return PerUser(table["user"].to_numpy(), table[metric].to_numpy(), 0)


def _chosen(candidates: Iterable[Attacked]) -> Attacked | None:
    able = {each.ask.name: each for each in candidates if each.users}
    values = {name: each.values("auc", valid=True) for name, each in able.items()}
    values = {name: each for name, each in values.items() if each and all(len(one.user) for one in each)}
    graded = {name: able[name].values("auc", valid=False) for name in values}
    values = {name: each for name, each in values.items() if all(len(one.user) > 1 for one in graded[name])}
    return able[strongest(values)] if values else None


def columns(estimate: Estimate | Difference, seeds: int) -> dict[str, Any]:
    """A value with its interval, as tables have it."""
    users = estimate.n if isinstance(estimate, Estimate) else estimate.users
    return {
        "value": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "users": users,
        "seeds": seeds,
    }


def nothing() -> dict[str, Any]:
    """The same where there is none."""
    return {"value": None, "low": None, "high": None, "users": 0, "seeds": 0}


def common(first: BySeed, second: BySeed) -> list[int]:
    """The seeds that both have, with at least two users in common."""
    seeds = (seed for seed in first if seed in second)
    return [seed for seed in seeds if len(np.intersect1d(first[seed].user, second[seed].user)) > 1]


def _minus(first: PerUser, second: PerUser) -> PerUser:
    """The difference for the users of both."""
    user, one, other = np.intersect1d(first.user, second.user, assume_unique=True, return_indices=True)
    return PerUser(user, first.value[one] - second.value[other], 0)
