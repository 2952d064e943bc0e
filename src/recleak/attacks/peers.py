"""Own items and attributes at nodes of a gossip: what one group of colluding nodes reads in the models it receives.

A received model is its sender's own and, merged into it, those of others. `ItemsOfPeers` takes away what models have in
common (`attacks.moved`) and takes the rows that moved farthest for the sender's own items. `PeersThroughItems` goes on
from there to attributes, as `ThroughItems` does for uploads. `VectorsOfPeers` reads the senders' vectors, where models
are sent with them. The guesses that cost nothing stand at the end.

The group is the one row of the public `groups`, bool[1, nodes]; `colluders` is the share of all nodes that side with
its first member, and who places adversaries reads it.
Axis letters: U users, I items, B users at a time, m models of a message, k models that can be compared, d factors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from recleak import random
from recleak.attacks.attribute import MajorityClass, Proportional, by_learner, learner_of_items
from recleak.attacks.base import Knowledge, State, WhichAttribute, WhichItems
from recleak.attacks.community import PeerCommunity
from recleak.attacks.community_targets import groups_of
from recleak.attacks.learners import Learner
from recleak.attacks.membership import popularity_odds, public_popularity
from recleak.attacks.moved import directions, moved_rows, nothing_common, popular_side, received, senders, table_of
from recleak.attacks.rows import KeepsRows, Rounds
from recleak.attacks.vectors import odds_of, plain_logistic, popular_items, probabilities
from recleak.errors import ConfigError
from recleak.wire import Disclosure, PeerMessage, Peers

_BLOCK = 256  # users whose probabilities of all items are in memory at a time


@dataclass(frozen=True, kw_only=True)
class _OfPeers(KeepsRows):
    """Attacks of one group that turn each model it receives into a row of the sender."""

    colluders: float = 0.0

    vantage: ClassVar[type[Peers]] = Peers

    def __post_init__(self) -> None:
        super().__post_init__()
        PeerCommunity(colluders=self.colluders)  # the same is wrong with both

    def init(self, knowledge: Knowledge) -> State:
        """Nobody has sent anything; there is one group."""
        if len(groups := groups_of(knowledge)) != 1:
            raise ConfigError(f"Got {len(groups)} groups, expected one: the attack is that of one adversary.")
        return super().init(knowledge)


# --- own items --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ItemsOfPeers(_OfPeers):
    """The items whose rows moved farthest from what models have in common, along the direction of the sender's own.

    Movements become log odds by their standard deviation within a model, and probabilities that add up to the mean
    number of items per user. rounds: the log odds of all models of a sender add up, or those of its last one count, or
    of what arrived in a certain tick. popularity: a prior from the public knowledge on top of what models say.
    """

    popularity: bool = False

    def init(self, knowledge: Knowledge) -> State:
        """Nobody has sent anything, and nothing is known to be common."""
        return {**super().init(knowledge), **nothing_common(knowledge, 1)}

    def fold(self, knowledge: Knowledge, state: State, message: PeerMessage) -> State:
        """Turn every model into evidence, if something was received before this tick."""
        if isinstance(message, Disclosure) or not len(message.model):
            return state
        state, who, what = received(knowledge, state, message)
        if not len(what) or not self._counts(message.round):
            return state
        direction = directions(knowledge, message)
        along = None if direction is None else direction[what]
        models, side = message.params[table_of(knowledge)], popular_side(knowledge)
        moved = moved_rows(models, state["common"], who, what, along, side)  # f32[k, I]
        return self._with(state, senders(message)[what], odds_of(moved))

    def listener(self) -> ItemsOfPeers:
        """The prior comes with the answer."""
        return replace(self, popularity=False)

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        """Probabilities; 0 for who was not heard of."""
        chance = torch.zeros(len(question.client), dtype=torch.float64)
        asked = torch.unique(question.client)
        for some in torch.split(asked[state["participations"][asked] > 0], _BLOCK):
            mine = torch.isin(question.client, some)
            found = self.chances(knowledge, state, some)  # f64[B, I]
            chance[mine] = found[torch.searchsorted(some, question.client[mine]), question.item[mine]]
        return chance

    def chances(self, knowledge: Knowledge, state: State, client: Tensor) -> Tensor:
        """The probabilities of all items of clients that were heard of, i64[B] -> f64[B, I]."""
        if not len(client):
            return torch.empty(0, knowledge.n_items, dtype=torch.float64)
        odds = torch.stack([state[f"{self.ROW}{number}"] for number in client.tolist()])
        if self.popularity:
            odds = odds + popularity_odds(knowledge, torch.arange(knowledge.n_items))
        return probabilities(odds, knowledge)


# --- attributes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PeersThroughItems:
    """First which items are a sender's own, then what these tell about it: `ThroughItems` at nodes."""

    rounds: Rounds = "all"
    colluders: float = 0.0
    learner: Learner = field(default_factory=learner_of_items)
    seed: int = 0

    vantage: ClassVar[type[Peers]] = Peers
    question: ClassVar[type[WhichAttribute]] = WhichAttribute

    def __post_init__(self) -> None:
        _ = self.membership

    @property
    def membership(self) -> ItemsOfPeers:
        """Which items: without a prior, which is the same for all senders."""
        return ItemsOfPeers(rounds=self.rounds, colluders=self.colluders)

    def init(self, knowledge: Knowledge) -> State:
        """As the membership attack."""
        return self.membership.init(knowledge)

    def fold(self, knowledge: Knowledge, state: State, message: PeerMessage) -> State:
        """As the membership attack."""
        return self.membership.fold(knowledge, state, message)

    def listener(self) -> ItemsOfPeers:
        """The attack on items."""
        return self.membership

    def answer(self, knowledge: Knowledge, state: State, question: WhichAttribute) -> Tensor:
        """Probabilities of items, then of classes."""
        client = state["participations"].nonzero().squeeze(1)
        parts = [self.membership.chances(knowledge, state, some).float() for some in torch.split(client, _BLOCK)]
        return by_learner(knowledge, question, client, torch.cat(parts), self.learner, self.seed)


@dataclass(frozen=True, kw_only=True)
class VectorsOfPeers(_OfPeers):
    """A learner on the senders' vectors, where these are sent: of all models of a sender the mean, or the last one."""

    learner: Learner = field(default_factory=plain_logistic)
    seed: int = 0

    question: ClassVar[type[WhichAttribute]] = WhichAttribute

    def init(self, knowledge: Knowledge) -> State:
        """Nobody has sent anything; whether vectors are sent is checked."""
        if not _vectors(knowledge):
            raise ConfigError(
                "No vector of users is sent, expected one: the attack reads those of senders.\n"
                "  Read what their models tell of items instead: attributes-of-peers-through-items."
            )
        return super().init(knowledge)

    def fold(self, knowledge: Knowledge, state: State, message: PeerMessage) -> State:
        """Keep the sender's own row of each model."""
        if isinstance(message, Disclosure) or not len(message.model) or not self._counts(message.round):
            return state
        sender = senders(message)
        own = [message.params[name][torch.arange(len(sender)), sender].flatten(1) for name in _vectors(knowledge)]
        return self._with(state, sender, torch.cat(own, dim=1))

    def listener(self) -> VectorsOfPeers:
        """All learners read the same vectors."""
        return replace(self, learner=plain_logistic())

    def answer(self, knowledge: Knowledge, state: State, question: WhichAttribute) -> Tensor:
        """Train on the known senders, predict the others."""
        return by_learner(knowledge, question, *self.read(state), self.learner, self.seed)


def _vectors(knowledge: Knowledge) -> list[str]:
    """The tables of users' vectors that models are sent with."""
    tables = [part for part in knowledge.components if part.storage == "per_user" and part.shared]
    return [part.name for part in tables if len(part.shape) == 1]


# --- guesses that cost nothing: they read no message ------------------------------------------------------------------


class _Blind:
    """Who does not look at models."""

    vantage: ClassVar[type[Peers]] = Peers

    def init(self, knowledge: Knowledge) -> State:
        """Whether popularity is known is checked."""
        public_popularity(knowledge)
        return {}

    def fold(self, knowledge: Knowledge, state: State, message: PeerMessage) -> State:
        """It reads nothing."""
        return state


@dataclass(frozen=True, kw_only=True)
class RandomItemsOfPeers(_Blind):
    """Random items, as many as a user has on average."""

    seed: int = 0

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        """Drawn by (client, item)."""
        lot = random.uniform(self.seed, "random items of peers", question.client.numpy(), question.item.numpy())
        mean = float(public_popularity(knowledge).sum()) / knowledge.n_users
        return torch.where(torch.from_numpy(lot) < mean / knowledge.n_items, 1.0, 1e-30).double()


@dataclass(frozen=True, kw_only=True)
class AllItemsOfPeers(_Blind):
    """Everything is everybody's."""

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        """Certain of all."""
        return torch.ones(len(question.client), dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class PopularItemsOfPeers(_Blind):
    """Everybody's own items are the most popular ones."""

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        """The same for all users."""
        return popular_items(knowledge)[question.item]


@dataclass(frozen=True, kw_only=True)
class MajorityOfPeers(MajorityClass):
    """Everybody has the class that most known users have, to nodes."""

    vantage: ClassVar[type[Peers]] = Peers  # type: ignore[assignment]

    def fold(self, knowledge: Knowledge, state: State, message: PeerMessage) -> State:  # type: ignore[override]
        """It reads nothing."""
        return state


@dataclass(frozen=True, kw_only=True)
class ProportionalOfPeers(Proportional):
    """A class drawn by the proportions of the known labels, to nodes."""

    vantage: ClassVar[type[Peers]] = Peers  # type: ignore[assignment]

    def fold(self, knowledge: Knowledge, state: State, message: PeerMessage) -> State:  # type: ignore[override]
        """It reads nothing."""
        return state
