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

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import objects
from recleak.accounting import ledger, participations
from recleak.attacks.base import Knowledge, WhichItems
from recleak.canaries import Canaries, bound, plant
from recleak.data.interactions import Interactions
from recleak.data.sampling import evaluation_candidates
from recleak.data.source import open_data
from recleak.data.split import Order, Split, leave_one_out
from recleak.defenses.base import Defense
from recleak.errors import ConfigError, RecleakError
from recleak.experiment import Data, System, digest
from recleak.files import replace_table, replace_text
from recleak.grading import grade_users, pairs_seen, shuffled, truth_of
from recleak.metrics.comparison import is_validation
from recleak.metrics.ranking import Ranks, Scorer, rank
from recleak.models.base import Model
from recleak.models.components import Component
from recleak.protocols.federated import Federated, train_federated
from recleak.recording import Listening
from recleak.training.cohort import DivergedError
from recleak.training.executor import InProcess
from recleak.utility import BASELINES, union
from recleak.wire import Aggregator, Message, Server, Upload, Vantage

VERSION = 2  # of what a cell's files mean: those of another number do not count
KS = (10, 20)
_DELTA = 1e-6  # of ledger and canaries; times the canaries it must be far below 1 - their level
NULLS: Mapping[type[Vantage[Any]], Sequence[str]] = {
    Server: ("random", "all-positive", "popularity"),
    Aggregator: ("popularity-of-sums",),
}
_SCOUTS: Mapping[type[Vantage[Any]], str] = {Server: "random", Aggregator: "popularity-of-sums"}  # what pairs are asked
_FAILED = "failed: why"  # in the state of a tap
Kind = Literal["attack", "null", "component", "canary"]


@dataclass(frozen=True)
class Ask:
    """One attack of a cell. kind: an attack, a null, an attack on one role's part of uploads, or one on canaries."""

    name: str  # its label
    settings: Mapping[str, Any]
    kind: Kind = "attack"
    role: str = ""  # the only role whose values it sees, if any
    shuffle: bool = False
    validation: float = 0.25

    @property
    def key(self) -> str:
        """The name of its files."""
        settings = {name: value for name, value in self.settings.items() if name != "name"}
        parts = [settings, self.kind, self.role, self.shuffle, self.validation, *_code(settings)]
        return digest(parts)


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


@lru_cache(maxsize=2)
def loaded(data: Data) -> Interactions:
    """The interactions; the last two are kept."""
    return open_data(data.name, data.preset)


def split_of(data: Data, seed: int) -> Split:
    """Leave-one-out, by time if there are times."""
    interactions = loaded(data)
    order: Order = data.order or ("time" if "time" in interactions.rows.columns else "random")
    return leave_one_out(interactions, by=order, seed=seed)


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Made:
    """The objects that a cell's settings name."""

    split: Split
    train: Interactions  # with canaries, if any
    model: Model
    protocol: Federated
    defense: Defense
    seed: int

    @property
    def components(self) -> tuple[Component, ...]:
        """With the sharing policy in force."""
        return self.defense.sharing(self.model.components())

    @property
    def knowledge(self) -> Knowledge:
        """What an adversary knows: the model, how clients train, the defense, and how popular items are."""
        popularity = torch.from_numpy(self.split.train.popularity.astype(np.float32))
        return Knowledge(
            self.model,
            self.train.n_users,
            self.train.n_items,
            self.components,
            self.protocol.local,
            self.defense,
            {"popularity": popularity},
        )


def measure(cell: Cell, threads: int) -> None:
    """Train, attack, grade, store. What is wrong for good is stored as the reason; other errors are raised."""
    replace_text(cell.path / "system.json", json.dumps(cell.description, indent=2) + "\n")
    split = split_of(cell.system.data, cell.seed)
    canaries = plant(split.train, spare=(split.valid, split.test), seed=cell.seed) if cell.canaries else None
    settings = cell.system.settings
    made = _Made(
        split,
        split.train if canaries is None else canaries.train,
        objects.build("model", settings["model"]),
        objects.build("protocol", settings["protocol"]),
        objects.build("defense", settings["defense"]),
        cell.seed,
    )
    try:
        _measure(cell, made, threads, canaries)
    except (ConfigError, DivergedError) as error:
        for ask in cell.asks:
            _store_reason(cell, ask, str(error))
        if not (cell.path / "facts.json").exists():
            _store(cell, "facts", {"reason": str(error), "ledger": []})
    for left in cell.path.glob("work-*"):
        shutil.rmtree(left, ignore_errors=True)


def _measure(cell: Cell, made: _Made, threads: int, canaries: Canaries | None) -> None:
    taps: dict[str, _Tap] = {}
    for ask in cell.asks:
        attack = _seeded(objects.build("attack", ask.settings), ask.settings.get("seed", cell.seed))
        reason = _no_sense(attack, made, ask)
        if reason is None:
            try:
                taps[ask.key] = _Tap(attack, made, ask.role)
            except RecleakError as error:
                reason = str(error)
        if reason is not None:
            _store_reason(cell, ask, reason)
    seen = {tap.attack.vantage for tap in taps.values()}
    scouts = {
        vantage: _Tap(objects.build("attack", {"use": name}), made)
        for vantage, name in _SCOUTS.items()
        if vantage in seen
    }
    trained = train_federated(
        made.protocol,
        made.model,
        made.train,
        defense=made.defense,
        taps=[*taps.values(), *scouts.values()],
        executor=InProcess(threads),
        seed=cell.seed,
        directory=cell.path / f"work-{digest(sorted(taps))}",
        show_progress=False,
    )
    rounds = _first_rounds(made)
    for ask in cell.asks:
        if (tap := taps.get(ask.key)) is None:
            continue
        if tap.failed is not None:
            _store_reason(cell, ask, tap.failed)
        elif canaries is None:
            asked = pairs_seen(scouts[tap.attack.vantage].state(), made.train.n_items)
            _store_grades(cell, ask, tap, asked, made, rounds)
        else:
            _store_bound(cell, ask, tap, canaries.of(np.flatnonzero(rounds >= 0)))
    if canaries is None:
        ranks = _ranks(made.split, trained, cell.system.data, cell.seed)
        replace_table(cell.path / "utility.parquet", _metrics(ranks))
    entries = ledger(
        made.defense,
        components=made.model.components(),
        n_items=made.train.n_items,
        participations=participations(made.protocol, made.train, seed=cell.seed),
        training=made.protocol.local,
        aggregation=made.protocol.aggregation,
        delta=_DELTA,
    )
    _store(cell, "facts", {"reason": None, "ledger": [asdict(entry) for entry in entries]})


class _Tap(Listening[Any, WhichItems]):
    """An attack that listens; of uploads perhaps to one role's part only: the changes of all others read as zero.

    Which rows are sent stays visible. An attack that cannot go on does not end the run for the others.
    """

    def __init__(self, attack: Any, made: _Made, role: str = "") -> None:
        super().__init__(attack.vantage(), attack, made.knowledge)
        self.failed: str | None = None  # why it could not go on
        self._names = {part.name for part in made.components if role in ("", part.role)}

    def receive(self, message: Message) -> None:
        """The message, with zeros for what is not listened to."""
        if isinstance(message, Upload):

            def keep(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
                return tensor if name in self._names else torch.zeros_like(tensor)

            message = replace(message, update=message.update.map(keep))
        if self.failed is None:
            try:
                super().receive(message)
            except RecleakError as error:
                self.failed = str(error)

    def state(self) -> dict[str, Tensor]:
        """The attack's, and its failure."""
        failed = {} if self.failed is None else {_FAILED: torch.tensor(list(self.failed.encode()), dtype=torch.uint8)}
        return {**super().state(), **failed}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Both."""
        super().restore({name: value for name, value in state.items() if name != _FAILED})
        if _FAILED in state:
            self.failed = bytes(state[_FAILED].tolist()).decode()


def _seeded(attack: Any, seed: int) -> Any:
    """The adversary's own draws differ from seed to seed, unless the settings give one."""
    if is_dataclass(attack) and not isinstance(attack, type) and "seed" in {each.name for each in fields(attack)}:
        return replace(attack, seed=seed)
    return attack


def _no_sense(attack: Any, made: _Made, ask: Ask) -> str | None:
    """Why an attack cannot be run against a system, if so."""
    if attack.vantage not in _SCOUTS:
        return f"There is no vantage point {attack.vantage.__name__} in this protocol."
    if attack.vantage is Server and made.defense.secure_aggregation:
        return "Secure aggregation: no upload of a single client reaches the server. Attack the sums instead."
    if ask.role and attack.vantage is not Server:
        return "A sum is not read by parts."
    if ask.role and not any(part.shared and part.role == ask.role for part in made.components):
        return f"Nothing of the role {ask.role} is sent."
    return None


def _first_rounds(made: _Made) -> NDArray[np.int64]:
    """The round in which each user took part first, i64[U]; -1: in none."""
    first = np.full(made.train.n_users, -1, np.int64)
    eligible = np.flatnonzero(made.train.activity).astype(np.int64)
    for round in reversed(range(made.protocol.rounds)):
        first[made.protocol.participants(eligible, round, made.seed)] = round
    return first


def _ranks(split: Split, scorer: Scorer, data: Data, seed: int) -> Ranks:
    """Where the held-out items come out; a user's other items do not compete."""
    sampled = None if data.candidates is None else evaluation_candidates(split, data.candidates, seed=seed).items
    known = split.train if len(split.valid) == 0 else union(split.train, split.valid)
    return rank(scorer, known, split.test, sampled)


def _metrics(ranks: Ranks) -> pl.DataFrame:
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
        ranks = {name: _ranks(split, fit(split.train), self.data, self.seed) for name, fit in BASELINES.items()}
        every = {"chance": next(iter(ranks.values())).constant(), **ranks}
        tables = [_metrics(each).with_columns(pl.lit(name).alias("recommender")) for name, each in every.items()]
        replace_table(self.path, pl.concat(tables))


# --- storing ----------------------------------------------------------------------------------------------------------


def _store(cell: Cell, name: str, content: Mapping[str, Any]) -> None:
    replace_text(cell.path / f"{name}.json", json.dumps(content, indent=1, allow_nan=False) + "\n")


def _about(ask: Ask) -> dict[str, Any]:
    return {"attack": ask.name, "kind": ask.kind, "role": ask.role, "settings": dict(ask.settings)}


def _store_reason(cell: Cell, ask: Ask, reason: str) -> None:
    _store(cell, ask.key, {**_about(ask), "reason": reason})


def _store_grades(
    cell: Cell,
    ask: Ask,
    tap: Listening[Any, WhichItems],
    question: WhichItems,
    made: _Made,
    rounds: NDArray[np.int64],
) -> None:
    truth = truth_of(question, made.train)
    if ask.shuffle:
        truth = shuffled(question, truth, cell.seed)
    valid = is_validation(question.client.numpy(), ask.validation)
    graded = grade_users(question, tap.answer(question), truth, valid)
    who = graded.users["user"].to_numpy()
    users = graded.users.with_columns(
        pl.Series("round", rounds[who]), pl.Series("activity", made.train.activity[who].astype(np.int64))
    )
    replace_table(cell.path / f"{ask.key}.parquet", users)
    facts = {
        "reason": None,
        "vantage": type(tap.vantage).__name__,
        "knowledge": str(tap.knowledge),
        "direction": graded.direction,
        "thresholds": {name: None if value is None else repr(value) for name, value in graded.thresholds.items()},
        "slopes": graded.slopes,
        "roc": graded.roc,
    }
    _store(cell, ask.key, {**_about(ask), **facts})


def _store_bound(cell: Cell, ask: Ask, tap: Listening[Any, WhichItems], canaries: Canaries) -> None:
    found = bound(canaries, tap.answer(canaries.question).double().numpy(), delta=_DELTA)
    _store(cell, ask.key, {**_about(ask), "reason": None, "bound": asdict(found)})
