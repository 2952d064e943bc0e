"""Attributes and own items from vectors: what somebody reads who holds the embeddings of users, and maybe of items.

A user's vector is made of what the user did, so it may tell whatever that tells. `FromVectors` learns an attribute from
the vectors of users who have told theirs. `ScoredItems` needs no such users: a recommender puts a user's vector where
its own items score high, so the items that score highest are taken for the user's own. Popular items score high for
everybody, so `PopularItems`, who sees no vector, stands beside.

Axis letters: U users, I items, B users of a message, J items with a vector, d coordinates, n pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from recleak.attacks.attribute import MajorityClass, Proportional, by_learner
from recleak.attacks.base import Knowledge, State, WhichAttribute, WhichItems
from recleak.attacks.learners import Learner, Logistic
from recleak.attacks.membership import calibrated, popularity_odds, public_popularity
from recleak.attacks.preparation import Preparation
from recleak.errors import ConfigError
from recleak.wire import Embeddings, Holder, HolderMessage

Scoring = Literal["product", "cosine", "distance"]
_BLOCK = 256  # users whose scores of all items are in memory at a time


def plain_logistic() -> Logistic:
    """A logistic regression on coordinates of mean 0 and variance 1."""
    return Logistic(C=0.1, prepare=Preparation("standard", "none"))


@dataclass(frozen=True, kw_only=True)
class _Keeps:
    """Attacks that keep the vectors they were sent: of each user and item, the last."""

    vantage: ClassVar[type[Holder]] = Holder

    def init(self, knowledge: Knowledge) -> State:
        """Nobody was seen."""
        return {
            "user seen": torch.zeros(knowledge.n_users, dtype=torch.int64),
            "item seen": torch.zeros(knowledge.n_items, dtype=torch.int64),
        }

    def fold(self, knowledge: Knowledge, state: State, message: HolderMessage) -> State:
        """Vectors in the place of former ones."""
        if not isinstance(message, Embeddings):
            return state
        state = dict(state)
        for side, who, vector in (("user", message.user, message.vector), ("item", message.item, message.item_vector)):
            seen = state[f"{side} seen"]
            if len(who) and int(who.max()) >= len(seen):
                raise ConfigError(f"Got a vector of the {side} {int(who.max())}, expected numbers below {len(seen)}.")
            table = state.get(f"{side} vector", torch.zeros(len(seen), vector.shape[1]))
            if table.shape[1] != vector.shape[1]:
                raise ConfigError(
                    f"Got vectors of {table.shape[1]} and of {vector.shape[1]} numbers, expected equal ones."
                )
            state[f"{side} vector"] = table.index_copy(0, who, vector)
            state[f"{side} seen"] = seen.index_fill(0, who, 1)
        return state


# --- attributes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FromVectors(_Keeps):
    """A learner on users' vectors, trained on those whose attribute is known."""

    learner: Learner = field(default_factory=plain_logistic)
    seed: int = 0

    question: ClassVar[type[WhichAttribute]] = WhichAttribute

    def answer(self, knowledge: Knowledge, state: State, question: WhichAttribute) -> Tensor:
        """Train on the known users that have a vector, predict the others."""
        client = state["user seen"].nonzero().squeeze(1)
        rows = state["user vector"][client] if len(client) else torch.empty(0, 0)
        return by_learner(knowledge, question, client, rows, self.learner, self.seed)


@dataclass(frozen=True, kw_only=True)
class MajorityOfHolder(MajorityClass):
    """Everybody has the class that most known users have, to who holds vectors."""

    vantage: ClassVar[type[Holder]] = Holder  # type: ignore[assignment]

    def fold(self, knowledge: Knowledge, state: State, message: HolderMessage) -> State:  # type: ignore[override]
        """It reads nothing."""
        return state


@dataclass(frozen=True, kw_only=True)
class ProportionalOfHolder(Proportional):
    """A class drawn by the proportions of the known labels, to who holds vectors."""

    vantage: ClassVar[type[Holder]] = Holder  # type: ignore[assignment]

    def fold(self, knowledge: Knowledge, state: State, message: HolderMessage) -> State:  # type: ignore[override]
        """It reads nothing."""
        return state


# --- own items --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ScoredItems(_Keeps):
    """A user's own items are those whose vectors fit its vector best, among all items that have one.

    scoring: the inner product, as factorizations rank; the cosine, which does not see how long an item's vector is; the
    distance, negative, as metric models rank. Which of them the recommender uses need not be known: the audit chooses
    on validation users. Scores become log odds by their standard deviation within a user, and probabilities that add up
    to the mean number of items per user.
    """

    scoring: Scoring = "product"

    def __post_init__(self) -> None:
        if self.scoring not in get_args(Scoring):
            raise ConfigError(f"scoring is {self.scoring!r}, expected one of {', '.join(get_args(Scoring))}.")

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        """Probabilities; 0 where a user or an item has no vector."""
        chance = torch.zeros(len(question.client), dtype=torch.float64)
        item = state["item seen"].nonzero().squeeze(1)
        if not len(item):
            return chance
        rows, place = state["item vector"][item], state["item seen"].cumsum(0) - 1
        asked = torch.unique(question.client)
        for some in torch.split(asked[state["user seen"][asked] > 0], _BLOCK):
            score = self._scores(state["user vector"][some], rows)
            found = probabilities(odds_of(score), knowledge)  # f64[B, J]
            mine = torch.isin(question.client, some) & (state["item seen"][question.item] > 0)
            who = torch.searchsorted(some, question.client[mine])
            chance[mine] = found[who, place[question.item[mine]]]
        return chance

    def _scores(self, user: Tensor, item: Tensor) -> Tensor:
        """f32[B, d], f32[J, d] -> f32[B, J]."""
        if self.scoring == "distance":
            return -torch.cdist(user, item)
        if self.scoring == "cosine":
            user, item = (torch.nn.functional.normalize(each, dim=1) for each in (user, item))
        return user @ item.T


@dataclass(frozen=True, kw_only=True)
class PopularItems:
    """Everybody's own items are the most popular ones: what sales figures tell without any vector."""

    vantage: ClassVar[type[Holder]] = Holder

    def init(self, knowledge: Knowledge) -> State:
        """Whether popularity is known is checked."""
        public_popularity(knowledge)
        return {}

    def fold(self, knowledge: Knowledge, state: State, message: HolderMessage) -> State:
        """It reads nothing."""
        return state

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        """The same for all users."""
        return popular_items(knowledge)[question.item]


def popular_items(knowledge: Knowledge) -> Tensor:
    """The probability that an item is anybody's own, by how popular it is, f64[I]."""
    odds = popularity_odds(knowledge, torch.arange(knowledge.n_items)).unsqueeze(0)
    return probabilities(odds, knowledge)[0]


def odds_of(score: Tensor) -> Tensor:
    """Scores as log odds, by their standard deviation within a user, f32[B, J]."""
    spread = score.std(1, keepdim=True, correction=0).clamp(min=1e-12)
    return 2 * (score - score.mean(1, keepdim=True)) / spread


def probabilities(odds: Tensor, knowledge: Knowledge) -> Tensor:
    """Log odds of items f32[B, J] as probabilities that add up to the mean number of items per user, f64[B, J]."""
    usual = float(public_popularity(knowledge).sum()) / max(knowledge.n_users, 1)
    owner = torch.arange(len(odds)).repeat_interleave(odds.shape[1])
    return calibrated(odds.flatten(), owner, torch.full((len(odds),), usual)).view(odds.shape)
