"""Attribute inference by an outsider who sees the lists that users are shown, and perhaps what they did before.

GERAI's attacker (Zhang et al., WWW 2021, section 5.3): the one-hot codes of a user's history and of its top K, added
up, into a network with one hidden layer of 100. The history is the same whatever recommends, so that it hides what a
defense changes: `history=False` reads lists alone.

Public knowledge: `labels of ATTRIBUTE` i64[U] (-1 for who must be inferred); `history` f32[U, I], what users did; for
`ShadowLists`, `shadow users` i64[n] and `shadow lists` i64[n, K], lists that the adversary's own copy of the system,
defense and all, showed to users whose labels it knows.
Axis letters: U users, I items, B users of a message, K places in a list, S sessions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from recleak.attacks.attribute import MajorityClass, Proportional, by_learner, known_labels, proportions
from recleak.attacks.base import Knowledge, State, WhichAttribute
from recleak.attacks.learners import Learner, Network
from recleak.attacks.preparation import Preparation
from recleak.errors import ConfigError
from recleak.wire import Audience, AudienceMessage, Recommendations

Weighing = Literal["alike", "discounted"]


def gerai_network() -> Network:
    """The attacker of the paper: one hidden layer of 100 on the plain codes."""
    return Network(hidden=(100,), members=1, epochs=30, prepare=Preparation("none", "none"))


@dataclass(frozen=True, kw_only=True)
class FromLists:
    """A learner on the items that each user was shown, with or without what it did before.

    top: how many places of a list count; None: all. sessions: how many, from the first on; None: all.
    weighing "discounted": a place counts 1 / log2(1 + place), so that the first item says more.
    """

    learner: Learner = field(default_factory=gerai_network)
    top: int | None = None
    history: bool = True
    sessions: int | None = None
    weighing: Weighing = "alike"
    seed: int = 0

    vantage: ClassVar[type[Audience]] = Audience
    question: ClassVar[type[WhichAttribute]] = WhichAttribute

    def __post_init__(self) -> None:
        for name in ("top", "sessions"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1, or None for all.")
        if self.weighing not in get_args(Weighing):
            raise ConfigError(f"weighing is {self.weighing!r}, expected one of {', '.join(get_args(Weighing))}.")

    def init(self, knowledge: Knowledge) -> State:
        """Nobody was seen; whether there is a history is checked."""
        if self.history:
            _history(knowledge)
        return {
            "shown": torch.zeros(knowledge.n_users, knowledge.n_items),
            "seen": torch.zeros(knowledge.n_users, dtype=torch.int64),
        }

    def fold(self, knowledge: Knowledge, state: State, message: AudienceMessage) -> State:
        """The items of a message added to what its users were shown."""
        if not isinstance(message, Recommendations) or (self.sessions is not None and message.round >= self.sessions):
            return state
        shown = state["shown"].clone()
        shown[message.user] += self.coded(message.item, knowledge.n_items)
        return {"shown": shown, "seen": state["seen"].index_add(0, message.user, torch.ones_like(message.user))}

    def coded(self, item: Tensor, n_items: int) -> Tensor:
        """Lists i64[B, K] as the sum of the codes of their items, f32[B, I]."""
        item = item if self.top is None else item[:, : self.top]
        place = torch.arange(item.shape[1])
        weight = torch.ones(item.shape[1]) if self.weighing == "alike" else 1 / torch.log2(place + 2.0)
        there = item >= 0
        rows = torch.zeros(len(item), n_items)
        return rows.scatter_add_(1, item.clamp(min=0), torch.where(there, weight.expand(item.shape), 0.0))

    def read(self, knowledge: Knowledge, state: State) -> tuple[Tensor, Tensor]:
        """Who was seen, i64[n], and what a learner reads of them, f32[n, I]."""
        client = state["seen"].nonzero().squeeze(1)
        rows = state["shown"][client]
        return client, rows + _history(knowledge)[client] if self.history else rows

    def answer(self, knowledge: Knowledge, state: State, question: WhichAttribute) -> Tensor:
        """Train on the known users that were seen, predict the others."""
        return by_learner(knowledge, question, *self.read(knowledge, state), self.learner, self.seed)


@dataclass(frozen=True, kw_only=True)
class ShadowLists(FromLists):
    """An adversary that adapts: it also learns from lists that its own copy of the defended system shows.

    It knows model, protocol and defense, and the history of users whose attribute it knows (shadow users). It trains
    the system on them, as often as it likes, and so sees more lists with known labels than the world has. The audit
    runs the copy for it and hands it the lists.
    """

    def answer(self, knowledge: Knowledge, state: State, question: WhichAttribute) -> Tensor:
        """Train on known users, as the system and as its copies saw them."""
        for name in ("shadow users", "shadow lists"):
            if name not in knowledge.public:
                raise ConfigError(
                    f"The attack needs `{name}` as public knowledge: lists of a copy of the system.\n"
                    "  The audit makes them for a centralized system; for lists of your own use from-lists."
                )
        who, item = knowledge.public["shadow users"], knowledge.public["shadow lists"]
        label, classes = known_labels(knowledge, question), len(question.classes)
        more = self.coded(item, knowledge.n_items)
        if self.history:
            more = more + _history(knowledge)[who]
        more, who = more[label[who] >= 0], who[label[who] >= 0]
        client, rows = self.read(knowledge, state)
        known = label[client] >= 0
        chance = proportions(label, classes).repeat(knowledge.n_users, 1)
        x = torch.cat([rows[known], more]).numpy()
        y = torch.cat([label[client[known]], label[who]]).numpy()
        found = self.learner.fit_predict(x, y, classes, rows[~known].numpy(), self.seed)
        chance[client[~known]] = torch.from_numpy(found).float()
        chance[label >= 0] = torch.eye(classes)[label[label >= 0]]
        return chance[question.client]


@dataclass(frozen=True, kw_only=True)
class FromHistory:
    """The same learner on what users did before, without a look at lists: what lists have to add something to."""

    learner: Learner = field(default_factory=gerai_network)
    seed: int = 0

    vantage: ClassVar[type[Audience]] = Audience
    question: ClassVar[type[WhichAttribute]] = WhichAttribute

    def init(self, knowledge: Knowledge) -> State:
        """Whether there is a history is checked."""
        _history(knowledge)
        return {}

    def fold(self, knowledge: Knowledge, state: State, message: AudienceMessage) -> State:
        """It reads nothing."""
        return state

    def answer(self, knowledge: Knowledge, state: State, question: WhichAttribute) -> Tensor:
        """Train on known users, predict the others."""
        everybody = torch.arange(knowledge.n_users)
        return by_learner(knowledge, question, everybody, _history(knowledge), self.learner, self.seed)


@dataclass(frozen=True, kw_only=True)
class MajorityOfAudience(MajorityClass):
    """Everybody has the class that most known users have, to who sees lists."""

    vantage: ClassVar[type[Audience]] = Audience  # type: ignore[assignment]

    def fold(self, knowledge: Knowledge, state: State, message: AudienceMessage) -> State:  # type: ignore[override]
        """It reads nothing."""
        return state


@dataclass(frozen=True, kw_only=True)
class ProportionalOfAudience(Proportional):
    """A class drawn by the proportions of the known labels, to who sees lists."""

    vantage: ClassVar[type[Audience]] = Audience  # type: ignore[assignment]

    def fold(self, knowledge: Knowledge, state: State, message: AudienceMessage) -> State:  # type: ignore[override]
        """It reads nothing."""
        return state


def _history(knowledge: Knowledge) -> Tensor:
    """What users did, f32[U, I]."""
    if "history" not in knowledge.public:
        raise ConfigError(
            "The attack reads users' history, and it is not known.\n"
            "  Give Knowledge(..., public={'history': f32[U, I]}), or read lists alone: history=False."
        )
    history = knowledge.public["history"]
    if history.shape != (knowledge.n_users, knowledge.n_items):
        raise ConfigError(
            f"The history is {list(history.shape)}, expected [{knowledge.n_users}, {knowledge.n_items}]: users, items."
        )
    return history
