"""Measuring a cell: train its system once with all attacks at the wire, grade each, store what there is.

What is wrong for good is stored as the reason. A cell that was killed continues from the last checkpoint of its
training (`work-...`) and ends with the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import objects, random
from recleak.accounting import ledger, participations
from recleak.attacks.base import Knowledge, WhichAttribute, WhichItems
from recleak.canaries import Canaries, bound, plant
from recleak.cells import Ask, Cell, metrics_of, ranks_of, split_of
from recleak.data.features import UserFeatures, classes_of, user_features
from recleak.data.interactions import Interactions
from recleak.data.split import Split
from recleak.defenses.base import Defense
from recleak.defenses.feature_noise import with_categories
from recleak.errors import ConfigError, RecleakError
from recleak.experiment import digest
from recleak.files import replace_table, replace_text
from recleak.grading import grade_users, pairs_seen, shuffled, truth_of
from recleak.metrics.comparison import is_known, is_validation
from recleak.metrics.linearized import auc_values, macro_f1_values
from recleak.models.base import Model
from recleak.models.components import Component
from recleak.protocols.federated import Federated, train_federated
from recleak.recording import Listening
from recleak.training.cohort import DivergedError
from recleak.training.executor import InProcess
from recleak.wire import Aggregator, Message, Server, Upload, Vantage

_DELTA = 1e-6  # of ledger and canaries; times the canaries it must be far below 1 - their level
_FAILED = "failed: why"  # in the state of a tap
_FEATURES = ("gender", "age", "occupation")  # what models with user features read, where the data have it
_SCOUTS: Mapping[type[Vantage[Any]], str] = {Server: "random", Aggregator: "popularity-of-sums"}  # what pairs are asked


@dataclass(frozen=True, eq=False)
class Made:
    """The objects that a cell's settings name."""

    split: Split
    train: Interactions  # with canaries, if any
    model: Model
    protocol: Federated
    defense: Defense
    features: UserFeatures | None
    seed: int

    @property
    def components(self) -> tuple[Component, ...]:
        """With the sharing policy in force."""
        return self.defense.sharing(self.model.components())

    def knowledge(self, ask: Ask | None = None) -> Knowledge:
        """What an adversary knows: the model, how clients train, the defense, and how popular items are.

        Who is asked about an attribute knows that of some users, and which columns of the users' features encode it.
        """
        public = {"popularity": torch.from_numpy(self.split.train.popularity.astype(np.float32))}
        if ask is not None and ask.attribute:
            label, _ = self.classes(ask)
            known = is_known(np.arange(len(label)), ask.known)
            public[f"labels of {ask.attribute}"] = torch.from_numpy(np.where(known, label, -1))
            if self.features is not None and ask.attribute in self.features.groups:
                columns = torch.arange(self.features.values.shape[1])[self.features.groups[ask.attribute]]
                public[f"columns of {ask.attribute}"] = columns
        return Knowledge(
            self.model,
            self.train.n_users,
            self.train.n_items,
            self.components,
            self.protocol.local,
            self.defense,
            public,
        )

    def classes(self, ask: Ask) -> tuple[NDArray[np.int64], list[str]]:
        """Each user's class of the attribute, i64[U]; in the audit's test of itself, in a random order."""
        label, names = classes_of(self.split.train, ask.attribute)
        if ask.shuffle:
            have = np.flatnonzero(label >= 0)
            mixed = have[random.bits(self.seed, "shuffled attribute", have).argsort()]
            label = label.copy()
            label[have] = label[mixed]
        return label, names


def measure(cell: Cell, threads: int) -> None:
    """Train, attack, grade, store. What is wrong for good is stored as the reason; other errors are raised."""
    replace_text(cell.path / "system.json", json.dumps(cell.description, indent=2) + "\n")
    split = split_of(cell.system.data, cell.seed)
    canaries = plant(split.train, spare=(split.valid, split.test), seed=cell.seed) if cell.canaries else None
    try:
        _measure(cell, _made(cell, split, canaries), threads, canaries)
    except (ConfigError, DivergedError) as error:
        for ask in cell.asks:
            _store_reason(cell, ask, str(error))
        if not (cell.path / "facts.json").exists():
            _store(cell, "facts", {"reason": str(error), "ledger": []})
    for left in cell.path.glob("work-*"):
        shutil.rmtree(left, ignore_errors=True)


def _made(cell: Cell, split: Split, canaries: Canaries | None) -> Made:
    """The objects; a model that reads user features gets those of the data, and learns how many there are."""
    train, settings = split.train if canaries is None else canaries.train, dict(cell.system.settings)
    features = None
    if getattr(objects.find("model", settings["model"]["use"]), "needs_user_features", False):
        rated = "rating" in split.train.rows.columns and not split.train.rows["rating"].null_count()
        levels = sorted(split.train.rows["rating"].unique().to_list()) if rated else ()
        attributes = [name for name in _FEATURES if name in split.train.attributes]
        features = user_features(split.train, attributes=attributes, levels=levels if len(levels) > 1 else ())
        settings["model"] = {"n_features": features.values.shape[1], **settings["model"]}
    model, protocol, defense = (objects.build(kind, settings[kind]) for kind in ("model", "protocol", "defense"))
    if features is not None:
        defense = with_categories(defense, [(each.start, each.stop) for each in features.groups.values()])
    return Made(split, train, model, protocol, defense, features, cell.seed)


def _measure(cell: Cell, made: Made, threads: int, canaries: Canaries | None) -> None:
    taps: dict[str, _Tap] = {}
    for ask in cell.asks:
        attack = _seeded(objects.build("attack", ask.settings), ask.settings.get("seed", cell.seed))
        reason = _no_sense(attack, made, ask)
        if reason is None:
            try:
                taps[ask.key] = _Tap(attack, made, ask)
            except RecleakError as error:
                reason = str(error)
        if reason is not None:
            _store_reason(cell, ask, reason)
    seen = {taps[ask.key].attack.vantage for ask in cell.asks if ask.key in taps and not ask.attribute}
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
        user_features=None if made.features is None else made.features.values,
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
        elif ask.attribute:
            _store_attribute(cell, ask, tap, made, rounds)
        elif canaries is None:
            asked = pairs_seen(scouts[tap.attack.vantage].state(), made.train.n_items)
            _store_grades(cell, ask, tap, asked, made, rounds)
        else:
            _store_bound(cell, ask, tap, canaries.of(np.flatnonzero(rounds >= 0)))
    if canaries is None:
        ranks = ranks_of(made.split, trained, cell.system.data, cell.seed)
        replace_table(cell.path / "utility.parquet", metrics_of(ranks))
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


def _first_rounds(made: Made) -> NDArray[np.int64]:
    """The round in which each user took part first, i64[U]; -1: in none."""
    first = np.full(made.train.n_users, -1, np.int64)
    eligible = np.flatnonzero(made.train.activity).astype(np.int64)
    for round in reversed(range(made.protocol.rounds)):
        first[made.protocol.participants(eligible, round, made.seed)] = round
    return first


# --- at the wire ------------------------------------------------------------------------------------------------------


class _Tap(Listening[Any, Any]):
    """An attack that listens; of uploads perhaps to one role's part only: the changes of all others read as zero.

    Which rows are sent stays visible. An attack that cannot go on does not end the run for the others.
    """

    def __init__(self, attack: Any, made: Made, ask: Ask | None = None) -> None:
        super().__init__(attack.vantage(), attack, made.knowledge(ask))
        self.failed: str | None = None  # why it could not go on
        role = "" if ask is None else ask.role
        self._names = {part.name for part in made.components if _has_role(part, role)} if role else None

    def receive(self, message: Message) -> None:
        """The message, with zeros for what is not listened to."""
        if isinstance(message, Upload) and (names := self._names) is not None:

            def keep(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
                return tensor if name in names else torch.zeros_like(tensor)

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


def _has_role(part: Component, role: str) -> bool:
    return role in (part.role, f"{part.role}.{part.layer}")


def _seeded(attack: Any, seed: int) -> Any:
    """The adversary's own draws differ from seed to seed, unless the settings give one."""
    if is_dataclass(attack) and not isinstance(attack, type) and "seed" in {each.name for each in fields(attack)}:
        return replace(attack, seed=seed)
    return attack


def _no_sense(attack: Any, made: Made, ask: Ask) -> str | None:
    """Why an attack cannot be run against a system, if so."""
    if attack.vantage not in _SCOUTS:
        return f"There is no vantage point {attack.vantage.__name__} in this protocol."
    if attack.vantage is Server and made.defense.secure_aggregation:
        return "Secure aggregation: no upload of a single client reaches the server. Attack the sums instead."
    if ask.role and attack.vantage is not Server:
        return "A sum is not read by parts."
    if ask.role and not any(part.shared and _has_role(part, ask.role) for part in made.components):
        return f"Nothing of the role {ask.role} is sent."
    return None


# --- storing ----------------------------------------------------------------------------------------------------------


def _store(cell: Cell, name: str, content: Mapping[str, Any]) -> None:
    replace_text(cell.path / f"{name}.json", json.dumps(content, indent=1, allow_nan=False) + "\n")


def _about(ask: Ask) -> dict[str, Any]:
    about = {"attack": ask.name, "question": ask.question, "kind": ask.kind, "role": ask.role}
    return {**about, "settings": dict(ask.settings)}


def _store_reason(cell: Cell, ask: Ask, reason: str) -> None:
    _store(cell, ask.key, {**_about(ask), "reason": reason})


def _store_grades(
    cell: Cell,
    ask: Ask,
    tap: Listening[Any, WhichItems],
    question: WhichItems,
    made: Made,
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


def _store_attribute(
    cell: Cell, ask: Ask, tap: Listening[Any, WhichAttribute], made: Made, rounds: NDArray[np.int64]
) -> None:
    """Graded on the users who took part and whose attribute the adversary does not know.

    AUC and macro F1 are of all validation users, and of all others, as values by user (`metrics.linearized`).
    """
    label, names = made.classes(ask)
    user = np.arange(len(label))
    asked = user[(rounds >= 0) & (label >= 0) & ~is_known(user, ask.known)]
    answer = tap.answer(WhichAttribute(torch.from_numpy(asked), ask.attribute, tuple(names))).double().numpy()
    valid, own = is_validation(asked, ask.validation), label[asked]
    direction = 1
    if len(names) == 2 and len(np.unique(own[valid])) > 1 and auc_values(answer[valid], own[valid]).mean() < 0.5:
        answer, direction = answer[:, ::-1], -1  # that is a leak too: read the other way round
    guess = answer.argmax(axis=1)
    auc, f1 = np.full(len(asked), np.nan), np.full(len(asked), np.nan)
    for part in (valid, ~valid):
        if len(np.unique(own[part])) > 1:
            auc[part] = auc_values(answer[part], own[part])
            f1[part] = macro_f1_values(guess[part], own[part], len(names))
    frame = pl.DataFrame(
        {
            "user": asked,
            "valid": valid,
            "label": own,
            "guess": guess,
            "auc": auc,
            "f1": f1,
            "accuracy": (guess == own).astype(np.float64),
            "exposed": answer[np.arange(len(own)), own] / np.maximum(answer.sum(axis=1), 1e-12),
            "round": rounds[asked],
            "activity": made.train.activity[asked].astype(np.int64),
        }
    ).with_columns(pl.col("auc", "f1").fill_nan(None))
    replace_table(cell.path / f"{ask.key}.parquet", frame)
    facts = {
        "reason": None,
        "vantage": type(tap.vantage).__name__,
        "knowledge": str(tap.knowledge),
        "classes": names,
        "direction": direction,
        "roc": [],
    }
    _store(cell, ask.key, {**_about(ask), **facts})


def _store_bound(cell: Cell, ask: Ask, tap: Listening[Any, WhichItems], canaries: Canaries) -> None:
    found = bound(canaries, tap.answer(canaries.question).double().numpy(), delta=_DELTA)
    _store(cell, ask.key, {**_about(ask), "reason": None, "bound": asdict(found)})
