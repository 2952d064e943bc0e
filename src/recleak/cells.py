"""A cell of an audit: one system trained once, with all attacks at its wire, each graded; and what is stored of it.

    cells/HASH/system.json          what was trained, with which seed, on which data
    cells/HASH/facts.json           the ledger; or why the system cannot be trained
    cells/HASH/utility.parquet      each user's ranking metrics
    cells/HASH/ATTACK.json          an attack: what it knew, its curve; or the reason why there is nothing
    cells/HASH/ATTACK.parquet       its grades, user by user

Files are whole or not there, and hold nothing that differs from one run to the next: no times, no machine. A cell that
was killed continues from the last checkpoint of its training (`work-...`) and ends with the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from recleak import objects
from recleak.data.interactions import Interactions
from recleak.data.marks import Mark
from recleak.data.sampling import evaluation_candidates
from recleak.data.sequences import held_out
from recleak.data.source import open_data
from recleak.data.split import Order, Split, leave_one_out
from recleak.experiment import Data, System, digest
from recleak.files import replace_table
from recleak.metrics.next_item import NextScorer, rank_next
from recleak.metrics.ranking import Ranks, Scorer, rank
from recleak.utility import BASELINES, union
from recleak.wire import Aggregator, Audience, Holder, Peers, Server, Vantage

VERSION = 2  # of what a cell's files mean: those of another number do not count
_GRADED = 2  # what is stored of communities and marks: of another number it does not count
_GUESSED = 2  # the same of attributes: from 2 on a lot decides between equally likely classes
KS = (10, 20)
MEMBERSHIP = "membership"  # the question which items are a user's own
COMMUNITY = "community"  # who is similar to an adversary's items; other questions are named after their attribute
NULLS: Mapping[type[Vantage[Any]], Sequence[str]] = {
    Server: ("random", "all-positive", "popularity"),
    Aggregator: ("popularity-of-sums",),
    Holder: ("popular-items",),
    Peers: ("random-of-peers", "all-positive-of-peers", "popularity-of-peers"),
}
GIVEN = "given"  # the folder of what was read, where outputs exist already
RECORDED = "recorded"  # the protocol of a federation that ran elsewhere
PUBLISHED = ("published", "vectors", RECORDED)  # the protocols of lists, vectors and messages that exist already
HISTORY = "from-history"  # the null of attacks that also read what users did: what that tells alone
ATTRIBUTE_NULLS: Mapping[type[Vantage[Any]], Sequence[str]] = {
    Server: ("majority", "proportional"),
    Audience: ("majority-of-audience", "proportional-of-audience"),
    Holder: ("majority-of-holder", "proportional-of-holder"),
    Peers: ("majority-of-peers", "proportional-of-peers"),
}
COMMUNITY_NULLS: Mapping[type[Vantage[Any]], Sequence[tuple[str, Mapping[str, Any]]]] = {  # of marks too
    Server: (
        ("random users", {"use": "community", "scoring": "random"}),
        ("activity", {"use": "community", "scoring": "activity"}),
    ),
    Aggregator: (("random users of sums", {"use": "community-of-sums", "scoring": "random"}),),
    Peers: (("random peers", {"use": "community-of-peers", "scoring": "random"}),),
}
REFERENCE = ("true interactions", {"use": "true-items"})  # beside attacks on uploads: the audit holds the truth
Kind = Literal["attack", "null", "reference", "component", "canary"]


@dataclass(frozen=True)
class Ask:
    """One attack of a cell. kind: an attack, a null, a reader of the truth, an attack on one role's part of uploads, or
    one on canaries.
    """

    name: str  # its label
    settings: Mapping[str, Any]
    kind: Kind = "attack"
    role: str = ""  # the only role whose values it sees, if any: user, item, head, or a layer such as head.1
    shuffle: bool = False
    validation: float = 0.25
    attribute: str = ""  # what it is asked about; without one, about own items
    known: float = 0.0  # share of the users whose attribute the adversary knows
    community: int = 0  # how many users it looks for, if it is asked who is similar to it
    mark: Mark | None = None  # the items, if it is asked who has them

    @property
    def question(self) -> str:
        """As in the tables of findings."""
        if self.mark is not None:
            return self.mark.name
        if self.attribute in (MEMBERSHIP, COMMUNITY):  # a column of somebody's data may be called so
            return f"attribute {self.attribute}"
        return self.attribute or (COMMUNITY if self.community else MEMBERSHIP)

    @property
    def aside(self) -> float:
        """The share of all users who side with each adversary and are not looked for: with the mean of whose vectors an
        attack on communities scores.
        """
        attack = objects.build("attack", self.settings) if self.community else None
        return float(getattr(attack, "colluders", 0.0)) if getattr(attack, "vector", "sent") == "mean" else 0.0

    @property
    def key(self) -> str:
        """The name of its files."""
        settings = {name: value for name, value in self.settings.items() if name != "name"}
        parts = [settings, self.kind, self.role, self.shuffle, self.validation, *_code(settings)]
        if self.mark is not None:
            return digest([*parts, "mark", asdict(self.mark), _GRADED])
        if self.community:
            aside = ["aside"] if settings.get("vector") == "mean" else []  # before, those who side with it were graded
            return digest([*parts, COMMUNITY, self.community, _GRADED, *aside])
        return digest([*parts, self.attribute, self.known, _GUESSED] if self.attribute else parts)


def community_nulls(vantage: type[Vantage[Any]], aside: float = 0.0) -> list[tuple[str, Mapping[str, Any]]]:
    """The nulls of attacks on communities, with their names; where a share of all users is `aside`, of the others."""
    if not aside:
        return [*COMMUNITY_NULLS[vantage]]
    apart = {"vector": "mean", "colluders": aside}  # so they are graded as the attack is; they read no vector
    return [(f"{name}, {100 * aside:g} % aside", {**guess, **apart}) for name, guess in COMMUNITY_NULLS[vantage]]


@dataclass(frozen=True)
class Cell:
    """One training run, and what is wanted of it."""

    system: System
    seed: int
    fingerprint: str  # of the data
    asks: tuple[Ask, ...]
    folder: Path  # of all cells
    canaries: bool = False

    @property
    def label(self) -> str:
        """For a line of progress."""
        words = " ".join(dict.fromkeys(self.system.labels.values()))
        return f"{words}{', canaries' if self.canaries else ''}, seed {self.seed}"

    @property
    def published(self) -> bool:
        """Whether outputs are given, and nothing is trained or held out."""
        return is_published(self.system)

    @property
    def description(self) -> dict[str, Any]:
        """All that decides the result."""
        return {
            "version": VERSION,
            **self.system.settings,
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "canaries": self.canaries,
            **({"code": found} if (found := _code(self.system.settings)) else {}),
        }

    @property
    def path(self) -> Path:
        """Where its files are."""
        return self.folder / digest(self.description)

    def missing(self) -> Cell | None:
        """The cell with what is not there yet; None if all is."""
        left = tuple(ask for ask in self.asks if not (self.path / f"{ask.key}.json").exists())
        return replace(self, asks=left) if left or not (self.path / "facts.json").exists() else None


def _code(settings: Mapping[str, Any]) -> list[str]:
    """Digests of the user's own modules."""
    return [f"{name} {digest(text)}" for name, text in sorted(objects.sources(settings).items())]


sent: dict[Data, Interactions] = {}  # data that came with a cell to another machine


@lru_cache(maxsize=2)
def loaded(data: Data) -> Interactions:
    """The interactions; the last two are kept."""
    return sent[data] if data in sent else open_data(data.name, data.preset)


def split_of(data: Data, seed: int) -> Split:
    """Leave-one-out, by time if there are times."""
    interactions = loaded(data)
    order: Order = data.order or ("time" if "time" in interactions.rows.columns else "random")
    return leave_one_out(interactions, by=order, seed=seed)


def whole_of(data: Data) -> Split:
    """Everything, nothing held out: for outputs that exist already."""
    interactions = loaded(data)
    nothing = interactions.take(np.zeros(len(interactions), bool))
    return Split(interactions, nothing, nothing, "nothing is held out")


def is_published(system: System) -> bool:
    """Whether its outputs are given, and nothing is trained."""
    return system.protocol.settings["use"] in PUBLISHED


def ranks_of(split: Split, scorer: Scorer, data: Data, seed: int) -> Ranks:
    """Where the held-out items come out; a user's other items do not compete."""
    known = split.train if len(split.valid) == 0 else union(split.train, split.valid)
    return rank(scorer, known, split.test, _sampled(split, data, seed))


def valid_ranks_of(split: Split, scorer: Scorer, data: Data, seed: int) -> Ranks:
    """The same of validation items, before anything is known of the held-out ones."""
    count = data.candidates
    sampled = None if count is None else evaluation_candidates(split, count, part="valid", seed=seed).items
    return rank(scorer, split.train, split.valid, sampled)


def next_ranks_of(split: Split, scorer: NextScorer, data: Data, seed: int) -> Ranks:
    """The same by a model of what comes next, which knows where the user was; its other places compete too."""
    return rank_next(scorer, held_out(split), _sampled(split, data, seed))


def _sampled(split: Split, data: Data, seed: int) -> NDArray[np.int32] | None:
    """The items that held-out ones are ranked against, i32[U, K]; None: all."""
    return None if data.candidates is None else evaluation_candidates(split, data.candidates, seed=seed).items


def metrics_of(ranks: Ranks) -> pl.DataFrame:
    """Hit and NDCG of each user."""
    values = {f"{name}@{k}": metric(k) for name, metric in (("hit", ranks.hit), ("ndcg", ranks.ndcg)) for k in KS}
    return pl.DataFrame({"user": ranks.users, **values})


# --- baselines: once for all systems on the same data -----------------------------------------------------------------


@dataclass(frozen=True)
class Baselines:
    """Chance, and recommenders without a wire, on the split of one seed."""

    data: Data
    seed: int
    fingerprint: str
    folder: Path

    @property
    def label(self) -> str:
        """For a line of progress."""
        return f"{Path(self.data.name).name} baselines, seed {self.seed}"

    @property
    def path(self) -> Path:
        """Where its table is."""
        parts = [VERSION, asdict(self.data), self.seed, self.fingerprint]
        return self.folder / f"{digest(parts)}.parquet"

    def missing(self) -> Baselines | None:
        """Itself, if its table is not there yet."""
        return None if self.path.exists() else self

    def measure(self) -> None:
        """All of them, user by user."""
        split = split_of(self.data, self.seed)
        ranks = {name: ranks_of(split, fit(split.train), self.data, self.seed) for name, fit in BASELINES.items()}
        every = {"chance": next(iter(ranks.values())).constant(), **ranks}
        tables = [metrics_of(each).with_columns(pl.lit(name).alias("recommender")) for name, each in every.items()]
        replace_table(self.path, pl.concat(tables))
