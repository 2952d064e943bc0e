"""An attack of an audit at the wire: what it listens to, whether it makes sense there, how it goes on after a kill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recleak.attacks.base import WhoBelongs, listener_of
from recleak.attacks.community_targets import colluding
from recleak.attacks.shift import shifts, without_shift
from recleak.cells import Ask
from recleak.errors import RecleakError
from recleak.grading import grade_communities, grade_holders
from recleak.made import Made
from recleak.models.components import Component
from recleak.protocols.centralized import Centralized
from recleak.protocols.federated import Federated
from recleak.protocols.gossip import Gossip
from recleak.protocols.published import Published
from recleak.protocols.recorded import Recorded
from recleak.protocols.vectors import Vectors
from recleak.storing import (
    graded_both_ways,
    lookouts_of,
    node_of,
    set_aside,
    truth_of_communities,
    truth_of_mark,
)
from recleak.watching import Grade, Watching, spread
from recleak.wire import (
    Aggregator,
    Audience,
    Broadcast,
    Holder,
    Message,
    Peers,
    Push,
    Server,
    Upload,
    Vantage,
)

_FAILED = "failed: why"  # in the state of a tap
_VANTAGES: Mapping[type, Sequence[type[Vantage[Any]]]] = {
    Federated: (Server, Aggregator),
    Gossip: (Peers,),
    Centralized: (Audience,),
    Published: (Audience,),
    Vectors: (Holder, Server),
    Recorded: (Server, Aggregator),
}


class Wiretap(Watching[Any, Any]):
    """An attack that listens; of uploads perhaps to one role's part only: all others read as if nobody trained them.

    Which rows are sent stays visible. An attack that cannot go on does not end the run for the others. One on
    communities is graded after every round.
    """

    def __init__(self, attack: Any, made: Made, ask: Ask | None = None) -> None:
        knowledge, users = made.knowledge(ask), torch.arange(made.train.n_users)
        question, grade = None, None
        community = ask is not None and bool(ask.community)
        leader: Tensor | None = users if community else node_of(made)
        if ask is not None and ask.mark is not None:
            leader = lookouts_of(made, attack)
            targets = torch.from_numpy(ask.mark.items(made.split.train)).float()
            public = {"targets": targets.expand(1 if leader is None else len(leader), -1)}
            public |= {} if leader is None else {"leaders": leader}
            knowledge = replace(knowledge, public={**knowledge.public, **public})
            question = WhoBelongs(torch.arange(len(public["targets"])), users)
            plain: Grade = partial(grade_holders, truth=truth_of_mark(made, ask), leader=leader)
            grade = partial(graded_both_ways, grade=plain)
        if attack.vantage is Peers or getattr(attack, "vector", "sent") == "mean":
            groups = colluding(len(users), getattr(attack, "colluders", 0.0), made.seed, leader)
            knowledge = replace(knowledge, public={**knowledge.public, "groups": groups})
        if ask is not None and community:
            aside = set_aside(attack, knowledge)
            question, truth = WhoBelongs(users, users), truth_of_communities(made, ask, aside)
            plain = partial(grade_communities, truth=truth, size=ask.community, leader=users, aside=aside)
            grade = partial(graded_both_ways, grade=plain)
        vantage = Peers(groups) if attack.vantage is Peers else attack.vantage()
        super().__init__(vantage, attack, knowledge, question, grade, spread(made.protocol.rounds))
        self.failed: str | None = None  # why it could not go on
        role = "" if ask is None else ask.role
        self._listener = None if ask is None or question is not None else listener_of(attack)
        self._about = ("", "") if ask is None else (ask.role, ask.kind)
        self._names = {part.name for part in made.components if _has_role(part, role)} if role else None
        self._still: dict[str, Tensor] = {}  # what the defense does to what is not listened to, with the sign reversed

    def receive(self, message: Message) -> None:
        """The message, with zeros for what is not listened to, or what the defense makes of them."""
        if isinstance(message, Broadcast) and self._names is not None:
            found = shifts(self.knowledge, message.params)
            self._still = {name: -value for name, value in found.items() if name not in self._names}
        if isinstance(message, Upload) and (names := self._names) is not None:

            def keep(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
                return tensor if name in names else torch.zeros_like(tensor)

            heard = without_shift(self.knowledge, self._still, message.update.map(keep))
            message = replace(message, update=heard)
        if self.failed is None:
            try:
                super().receive(message)
            except RecleakError as error:
                self.failed = str(error)

    def listens_as(self, other: Wiretap) -> bool:
        """Whether both keep the same of what they hear: neither is asked before the end, and listeners are equal."""
        return self._listener is not None and self._listener == other._listener and self._about == other._about

    def take(self, other: Wiretap) -> None:
        """What another one heard, who listened for this one too."""
        self._state, self.failed = other._state, other.failed

    def state(self) -> dict[str, Tensor]:
        """The attack's, and its failure."""
        failed = {} if self.failed is None else {_FAILED: torch.tensor(list(self.failed.encode()), dtype=torch.uint8)}
        return {**super().state(), **failed}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Both."""
        super().restore({name: value for name, value in state.items() if name != _FAILED})
        if _FAILED in state:
            self.failed = bytes(state[_FAILED].tolist()).decode()


class Hearing:
    """Whose models the members of one group received, and in which tick first: whom an audit asks the group about."""

    def __init__(self, vantage: Peers) -> None:
        self.vantage = vantage
        self.first = torch.full((vantage.groups.shape[1],), -1)  # i64[U]; -1: never, and members of the group

    def receive(self, message: Message) -> None:
        """Of a push, who sent it."""
        if isinstance(message, Push):
            group = self.vantage.groups[0]
            sender = message.sender[group[message.receiver]]
            self.first[sender[(self.first[sender] < 0) & ~group[sender]]] = message.round

    def state(self) -> dict[str, Tensor]:
        """Who was heard."""
        return {"first": self.first.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The same."""
        self.first = state["first"].clone()

    def close(self) -> None:
        """Nothing is open."""


def listening_for(taps: Mapping[str, Wiretap]) -> dict[str, str]:
    """By the name of each tap the name of the one that listens for it, perhaps itself: of those alike the first."""
    found: dict[str, str] = {}
    for name, tap in taps.items():
        found[name] = next((other for other in dict.fromkeys(found.values()) if tap.listens_as(taps[other])), name)
    return found


def _has_role(part: Component, role: str) -> bool:
    return role in (part.role, f"{part.role}.{part.layer}")


def seeded(attack: Any, settings: Mapping[str, Any], seed: int) -> Any:
    """The adversary's own draws differ from seed to seed, also those of an attack that a chain begins with, unless the
    settings give one.
    """
    if not is_dataclass(attack) or isinstance(attack, type):
        return attack
    changes: dict[str, Any] = {}
    for name in [each.name for each in fields(attack) if each.init]:
        given, value = settings.get(name), getattr(attack, name)
        if name == "seed":
            changes[name] = seed if given is None else given
        elif hasattr(value, "fold"):
            changes[name] = seeded(value, given if isinstance(given, Mapping) else {}, seed)
    return replace(attack, **changes) if changes else attack


def no_sense(attack: Any, made: Made, ask: Ask) -> str | None:
    """Why an attack cannot be run against a system, if so."""
    if attack.vantage not in _VANTAGES[type(made.protocol)]:
        return f"There is no vantage point {attack.vantage.__name__} in this protocol."
    if attack.vantage is Server and made.defense.secure_aggregation:
        return "Secure aggregation: no upload of a single client reaches the server. Attack the sums instead."
    if attack.vantage is Server and isinstance(made.protocol, Recorded) and made.protocol.vantage == "Aggregator":
        return "The recording is of sums: no upload of a single client is in it. Attack the sums instead."
    if ask.role and attack.vantage is not Server:
        return "Only uploads are read by parts."
    if ask.role and not any(part.shared and _has_role(part, ask.role) for part in made.components):
        return f"Nothing of the role {ask.role} is sent."
    return None
