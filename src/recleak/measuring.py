"""Measuring a cell: train its system once with all attacks at the wire, grade each, store what there is.

What is wrong for good is stored as the reason. A cell that was killed continues from the last checkpoint of its
training (`work-...`) and ends with the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import objects, random
from recleak.accounting import averaging, ledger, participations
from recleak.attacks.audience import ShadowLists
from recleak.attacks.base import Knowledge, WhoBelongs
from recleak.attacks.community import colluding
from recleak.canaries import Canaries, plant
from recleak.cells import MEMBERSHIP, Ask, Cell, metrics_of, ranks_of, split_of, whole_of
from recleak.central import central_ledger, seen_history, shadow_lists, train_central
from recleak.data.features import UserFeatures, classes_of, user_features
from recleak.data.interactions import Interactions
from recleak.data.split import Split
from recleak.defenses.base import Defense, all_components
from recleak.defenses.blurme import fitted_to
from recleak.defenses.feature_noise import with_categories
from recleak.errors import ConfigError, RecleakError
from recleak.experiment import digest
from recleak.files import replace_table, replace_text
from recleak.grading import grade_communities, grade_holders, pairs_seen
from recleak.metrics.comparison import is_known
from recleak.models.base import Model
from recleak.models.components import Component
from recleak.protocols.centralized import Centralized, CentralizedModel
from recleak.protocols.federated import Federated, FederatedModel, train_federated
from recleak.protocols.gossip import Gossip, GossipModel, train_gossip
from recleak.protocols.published import Published
from recleak.storing import (
    DELTA,
    lookouts_of,
    store,
    store_attribute,
    store_bound,
    store_community,
    store_grades,
    store_mark,
    store_reason,
    truth_of_communities,
    truth_of_mark,
)
from recleak.training.attributes import PrivateAttributes, attributes_of
from recleak.training.cohort import DivergedError
from recleak.training.executor import InProcess
from recleak.watching import Watching, spread
from recleak.wire import Aggregator, Audience, Message, Peers, Server, Upload, Vantage

_FAILED = "failed: why"  # in the state of a tap
_FEATURES = ("gender", "age", "occupation")  # what models with user features read, where the data have it
_SCOUTS: Mapping[type[Vantage[Any]], str] = {Server: "random", Aggregator: "popularity-of-sums"}  # what pairs are asked
_VANTAGES = {Federated: (Server, Aggregator), Gossip: (Peers,), Centralized: (Audience,), Published: (Audience,)}


@dataclass(frozen=True, eq=False)
class Made:
    """The objects that a cell's settings name."""

    split: Split
    train: Interactions  # with canaries, if any
    model: Model
    protocol: Federated | Gossip | Centralized | Published
    defense: Defense
    features: UserFeatures | None
    seed: int
    attributes: PrivateAttributes | None = None  # of users, for a defense that protects them

    @property
    def components(self) -> tuple[Component, ...]:
        """With the sharing policy in force."""
        return all_components(self.model.components(), self.defense)

    def knowledge(self, ask: Ask | None = None) -> Knowledge:
        """What an adversary knows: the model, how clients train, the defense, and how popular items are.

        Who is asked about an attribute knows that of some users, and which columns of the users' features encode it.
        """
        public = {"popularity": torch.from_numpy(self.split.train.popularity.astype(np.float32))}
        if ask is not None and ask.community:
            public["targets"] = self.targets
        if ask is not None and ask.attribute:
            label, _ = self.classes(ask)
            known = is_known(np.arange(len(label)), ask.known)
            public[f"labels of {ask.attribute}"] = torch.from_numpy(np.where(known, label, -1))
            if isinstance(self.protocol, Published):
                public |= {"history": self.history} if self.protocol.history else {}
            elif isinstance(self.protocol, Centralized):
                public |= {"history": self.history, **self._shadow(ask)}
            elif self.features is not None and ask.attribute in self.features.groups:
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

    @cached_property
    def history(self) -> Tensor:
        """What an outsider sees of what users did before lists are shown, f32[U, I]."""
        return seen_history(self.defense, self.split, self.seed)

    def _shadow(self, ask: Ask) -> dict[str, Tensor]:
        """Lists of the adversary's own copy of the system, for an attack that reads them."""
        if not issubclass(objects.find("attack", ask.settings["use"]), ShadowLists):  # type: ignore[arg-type]
            return {}
        known = is_known(np.arange(self.train.n_users), ask.known)
        if ask.known not in self._copies:
            self._copies[ask.known] = shadow_lists(self, known)
        return self._copies[ask.known]

    @cached_property
    def _copies(self) -> dict[float, dict[str, Tensor]]:
        return {}

    @property
    def targets(self) -> Tensor:
        """Every user as an adversary that looks for who is similar to it, f32[U, I]."""
        return torch.from_numpy((self.split.train.matrix().toarray() > 0).astype(np.float32))

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
    split = whole_of(cell.system.data) if cell.published else split_of(cell.system.data, cell.seed)
    canaries = plant(split.train, spare=(split.valid, split.test), seed=cell.seed) if cell.canaries else None
    try:
        _measure(cell, _made(cell, split, canaries), threads, canaries)
    except (ConfigError, DivergedError) as error:
        for ask in cell.asks:
            store_reason(cell, ask, str(error))
        if not (cell.path / "facts.json").exists():
            store(cell, "facts", {"reason": str(error), "ledger": []})
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
    kind = objects.find("model", settings["model"]["use"])
    if getattr(kind, "needs_labels", False):
        protected = settings["model"].get("attributes", [name for name in _FEATURES if name in train.attributes])
        classes = [len(classes_of(split.train, name)[1]) for name in protected]
        settings["model"] = {"attributes": protected, "classes": classes, **settings["model"]}
    model, protocol, defense = (objects.build(kind, settings[kind]) for kind in ("model", "protocol", "defense"))
    if features is not None:
        defense = with_categories(defense, [(each.start, each.stop) for each in features.groups.values()])
    sizes = {name: len(classes_of(split.train, name)[1]) for name in _FEATURES if name in split.train.attributes}
    defense = fitted_to(defense.for_attributes(sizes), split.train)
    private = None
    if defense.needs_attributes:
        public = torch.from_numpy(is_known(np.arange(train.n_users), defense.insensitive))
        private = attributes_of(split.train, sizes, public)
    return Made(split, train, model, protocol, defense, features, cell.seed, private)


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
            store_reason(cell, ask, reason)
    seen = {taps[ask.key].attack.vantage for ask in cell.asks if ask.key in taps and ask.question == MEMBERSHIP}
    scouts = {
        vantage: _Tap(objects.build("attack", {"use": name}), made)
        for vantage, name in _SCOUTS.items()
        if vantage in seen
    }
    trained = _train(cell, made, taps, list(scouts.values()), threads)
    rounds = _first_rounds(made)
    for ask in cell.asks:
        if (tap := taps.get(ask.key)) is None:
            continue
        if tap.failed is not None:
            store_reason(cell, ask, tap.failed)
        elif ask.attribute:
            store_attribute(cell, ask, tap, made, rounds)
        elif ask.community:
            store_community(cell, ask, tap, made, rounds)
        elif ask.mark is not None:
            store_mark(cell, ask, tap, made, rounds)
        elif canaries is None:
            asked = pairs_seen(scouts[tap.attack.vantage].state(), made.train.n_items)
            store_grades(cell, ask, tap, asked, made, rounds)
        else:
            store_bound(cell, ask, tap, canaries.of(np.flatnonzero(rounds >= 0)))
    if canaries is None and trained is not None:
        ranks = ranks_of(made.split, trained, cell.system.data, cell.seed)
        replace_table(cell.path / "utility.parquet", metrics_of(ranks))
    entries = []
    if isinstance(made.protocol, Centralized) and isinstance(trained, CentralizedModel):
        entries = central_ledger(made.protocol, made.defense, trained, delta=DELTA)
    elif isinstance(trained, FederatedModel | GossipModel) and isinstance(made.protocol, Federated | Gossip):
        entries = ledger(
            made.defense,
            components=made.model.components(),
            n_items=made.train.n_items,
            participations=_participations(made, trained),
            training=made.protocol.local,
            aggregation=averaging(made.protocol),
            delta=DELTA,
        )
    store(cell, "facts", {"reason": None, "ledger": [asdict(entry) for entry in entries]})


def _train(
    cell: Cell, made: Made, taps: Mapping[str, _Tap], scouts: Sequence[_Tap], threads: int
) -> FederatedModel | GossipModel | CentralizedModel | None:
    """By the system's protocol, with all taps; users tell what they keep if an adversary plays one of them."""
    listening = [*taps.values(), *scouts]
    if isinstance(made.protocol, Published):
        made.protocol.send(made.train, listening)
        return None
    if isinstance(made.protocol, Centralized):
        return train_central(made, made.split, listening, made.seed, cell.path / f"work-{digest(sorted(taps))}")
    plays = any(getattr(tap.attack, "vector", "") in ("told", "mean") for tap in listening)
    confidants = range(made.train.n_users) if plays else ()
    features = None if made.features is None else made.features.values
    work = cell.path / f"work-{digest(sorted(taps))}"
    if isinstance(made.protocol, Gossip):
        return train_gossip(
            made.protocol,
            made.model,
            made.train,
            valid=made.split.valid,
            defense=made.defense,
            taps=listening,
            threads=threads,
            user_features=features,
            confidants=confidants,
            seed=cell.seed,
            directory=work,
            show_progress=False,
        )
    return train_federated(
        made.protocol,
        made.model,
        made.train,
        defense=made.defense,
        taps=listening,
        executor=InProcess(threads),
        user_features=features,
        attributes=made.attributes,
        confidants=confidants,
        seed=cell.seed,
        directory=work,
        show_progress=False,
    )


def _participations(made: Made, trained: FederatedModel | GossipModel) -> NDArray[np.int64]:
    """How often each user trained and told of it, i64[n]."""
    if isinstance(made.protocol, Federated):
        return participations(made.protocol, made.train, seed=made.seed)
    if isinstance(trained, GossipModel):
        return np.array([times for times in trained.trainings if times], np.int64)
    raise AssertionError("a gossip gives its own result")


def _first_rounds(made: Made) -> NDArray[np.int64]:
    """The round in which each user took part first, i64[U]; -1: in none."""
    first = np.full(made.train.n_users, -1, np.int64)
    eligible = np.flatnonzero(made.train.activity).astype(np.int64)
    if isinstance(made.protocol, Published):
        first[made.protocol.users(made.train)] = 0
        return first
    if not isinstance(made.protocol, Federated):
        first[eligible] = 0  # everybody sends from the first tick on, or is shown lists in the first session
        return first
    for round in reversed(range(made.protocol.rounds)):
        first[made.protocol.participants(eligible, round, made.seed)] = round
    return first


# --- at the wire ------------------------------------------------------------------------------------------------------


class _Tap(Watching[Any, Any]):
    """An attack that listens; of uploads perhaps to one role's part only: the changes of all others read as zero.

    Which rows are sent stays visible. An attack that cannot go on does not end the run for the others. One on
    communities is graded after every round.
    """

    def __init__(self, attack: Any, made: Made, ask: Ask | None = None) -> None:
        knowledge, users = made.knowledge(ask), torch.arange(made.train.n_users)
        question, grade = None, None
        if ask is not None and ask.community:
            question, truth = WhoBelongs(users, users), truth_of_communities(made, ask)
            grade = partial(grade_communities, truth=truth, size=ask.community, leader=users)
        leader: Tensor | None = users
        if ask is not None and ask.mark is not None:
            leader = lookouts_of(made, attack)
            targets = torch.from_numpy(ask.mark.items(made.split.train)).float()
            public = {"targets": targets.expand(1 if leader is None else len(leader), -1)}
            public |= {} if leader is None else {"leaders": leader}
            knowledge = replace(knowledge, public={**knowledge.public, **public})
            question = WhoBelongs(torch.arange(len(public["targets"])), users)
            grade = partial(grade_holders, truth=truth_of_mark(made, ask), leader=leader)
        if attack.vantage is Peers:
            groups = colluding(len(users), getattr(attack, "colluders", 0.0), made.seed)[leader]
            knowledge = replace(knowledge, public={**knowledge.public, "groups": groups})
        vantage = Peers(groups) if attack.vantage is Peers else attack.vantage()
        super().__init__(vantage, attack, knowledge, question, grade, spread(made.protocol.rounds))
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
    if attack.vantage not in _VANTAGES[type(made.protocol)]:
        return f"There is no vantage point {attack.vantage.__name__} in this protocol."
    if attack.vantage is Server and made.defense.secure_aggregation:
        return "Secure aggregation: no upload of a single client reaches the server. Attack the sums instead."
    if ask.role and attack.vantage is not Server:
        return "A sum is not read by parts."
    if ask.role and not any(part.shared and _has_role(part, ask.role) for part in made.components):
        return f"Nothing of the role {ask.role} is sent."
    return None
