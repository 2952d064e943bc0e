"""Attribute inference by the server: which gender, age group or occupation an upload betrays.

`FromUpdates` is the attack of APM (Zhang et al., "Comprehensive Privacy Analysis on Federated Recommender System
against Attribute Inference Attacks", section 3.3): a learner reads what users changed, trained on some whose attribute
is known. `KnownColumns` needs no known user: where attributes are among the user features, rows of the user matrix that
belong to classes a user does not have stay where they are. `ThroughItems` is a chain: first which items are a user's
own, then what these tell. The guesses that cost nothing stand at the end.

The adversary's labels are public knowledge by the name `labels of ATTRIBUTE`, i64[U], -1 for users it must infer.
Axis letters: C clients of a message, U users, I items, d factors, F user features, K classes, p columns, n seen users.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from recleak import kernels, random
from recleak.attacks.alignment import GradientAlignment
from recleak.attacks.base import Knowledge, State, WhichAttribute, WhichItems
from recleak.attacks.careful import of_parts
from recleak.attacks.learners import Learner, Logistic, Network
from recleak.attacks.membership import FromUploads, pairs_with_odds, rows_with_noise
from recleak.attacks.preparation import Parts, Preparation
from recleak.attacks.rows import KeepsRows, seen_rows
from recleak.attacks.shift import shifts, without_shift
from recleak.errors import ConfigError
from recleak.kernels import F32, I64
from recleak.models.components import Component
from recleak.update import Update
from recleak.wire import Broadcast, Server, ServerMessage, Upload

Summary = Literal["raw", "norms"]
Reading = Literal["norm", "rank one"]
_SHIFT = "shift/"  # before the name of a component in the state


# --- what is known of users -------------------------------------------------------------------------------------------


def known_labels(knowledge: Knowledge, question: WhichAttribute) -> Tensor:
    """The classes that the adversary knows, i64[U], -1 for the others."""
    label = public(knowledge, f"labels of {question.attribute}", "i64[U], -1 for users whose class it must infer")
    if label.shape != (knowledge.n_users,) or int(label.max()) >= len(question.classes):
        raise ConfigError(
            f"The adversary's labels of {question.attribute} are {list(label.shape)} up to {int(label.max())}, "
            f"expected [{knowledge.n_users}] below {len(question.classes)}: one for each user, -1 if unknown."
        )
    if not bool((label >= 0).any()):
        raise ConfigError(
            f"The adversary knows the {question.attribute} of no user, expected at least one.\n"
            "  Give it labels of some users, or choose KnownColumns, which needs none."
        )
    return label


def proportions(label: Tensor, classes: int) -> Tensor:
    """The share of each class among the known users, f32[K]."""
    count = torch.bincount(label[label >= 0], minlength=classes)
    return count / count.sum()


def public(knowledge: Knowledge, name: str, form: str) -> Tensor:
    """A table of the public knowledge; `form` says in an error what it should be."""
    if name not in knowledge.public:
        got = ", ".join(knowledge.public) or "nothing"
        raise ConfigError(
            f"The attack needs `{name}`, got {got} as public knowledge.\n"
            f"  Give Knowledge(..., public={{'{name}': {form}}})."
        )
    return knowledge.public[name]


def by_learner(
    knowledge: Knowledge, question: WhichAttribute, client: Tensor, rows: Tensor, learner: Learner, seed: int
) -> Tensor:
    """What a learner says of the asked clients from the rows f32[n, p] of those that were seen, i64[n]; f32[., K].

    It always predicts all users of unknown class, so that an answer does not depend on who else was asked. A client
    that was never seen gets the proportions of the known labels; one whose label is known gets that label.
    """
    label, classes = known_labels(knowledge, question), len(question.classes)
    chance = proportions(label, classes).repeat(knowledge.n_users, 1)  # f32[U, K]
    known = label[client] >= 0
    if bool(known.any()):
        mine, others = rows[known].numpy(), rows[~known].numpy()
        found = learner.fit_predict(mine, label[client[known]].numpy(), classes, others, seed)
        chance[client[~known]] = torch.from_numpy(found).float()
    chance[label >= 0] = torch.eye(classes)[label[label >= 0]]
    return chance[question.client]


# --- rows by client ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RowPerClient(KeepsRows):
    """Attacks that turn each client of an upload into a row.

    shift: "known" takes away what the defense in force does to numbers that a client did not change (`attacks.shift`):
    who clips values moves them in the first rounds, more than any client does. "ignored": uploads as they are.
    """

    shift: Literal["known", "ignored"] = "known"

    vantage: ClassVar[type[Server]] = Server
    question: ClassVar[type[WhichAttribute]] = WhichAttribute

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shift not in ("known", "ignored"):
            raise ConfigError(f"shift is {self.shift!r}, expected 'known' or 'ignored'.")

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        """Keep what the defense does to a broadcast; turn each client of an upload into a row."""
        if isinstance(message, Broadcast) and self.shift == "known" and self._counts(message.round):
            kept = {name: value for name, value in state.items() if not name.startswith(_SHIFT)}
            found = shifts(knowledge, message.params)
            return {**kept, **{_SHIFT + name: value for name, value in found.items()}}
        if not isinstance(message, Upload) or not self._counts(message.round) or not message.update.n_clients:
            return state
        shift = {name.removeprefix(_SHIFT): value for name, value in state.items() if name.startswith(_SHIFT)}
        update = without_shift(knowledge, shift, message.update)
        return self._with(state, update.client, self._rows(knowledge, update))

    def _rows(self, knowledge: Knowledge, update: Update) -> Tensor:
        raise NotImplementedError


# --- a learner on what was changed ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FromUpdates(RowPerClient):
    """A learner on the flattened changes of each client.

    parts: the components that it reads, as dotted prefixes ("user", "item", "head", "head.1"); none: all.
    rounds: the mean of all participations of a client (noise of independent draws averages out), or its last one, or
    the one in a certain round, as in the paper.
    summary: of an item's row "raw" has every coordinate, "norms" one number: its movement along the client's mean
    movement. Own items and negatives move in opposite senses, so the sign counts more than the length. Where users are
    known by their features raw rows told far more (their directions follow the user's vector), where users have free
    vectors the one number told as much as all coordinates.
    sketch: item columns are folded into so many (each is added to one of them, with a sign, both a function of `seed`,
    the item and the coordinate: Weinberger et al. 2009), which keeps inner products of users on average. Without it a
    user's row has all coordinates of the item table: 240,000 for MovieLens-1M with 64 factors.

    The defaults are those that told most in one run on MovieLens-100K (12 rounds, one seed; picked on the users whom it
    was graded on, so not a careful choice): all participations, rows of length 1, 50 principal components. There
    `learner=Logistic()` was quicker than APM's network and as strong. `learner=Careful()` chooses part, scale and
    learner on the known users.
    noise: "known" divides each column by the standard deviation of the noise that the defense in force puts on it, a
    column of a sketch by that of all numbers that it is made of, so that a reduction to the directions of the largest
    variance finds those that stand out of the noise. What is kept of uploads is the same as without it.
    An item that a client did not send did not change.
    """

    learner: Learner = field(default_factory=Network)
    parts: tuple[str, ...] = ()
    summary: Summary = "raw"
    sketch: int | None = None
    noise: Literal["ignored", "known"] = "ignored"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.noise not in ("ignored", "known"):
            raise ConfigError(f"noise is {self.noise!r}, expected 'ignored' or 'known'.")
        super().__post_init__()
        if self.summary not in get_args(Summary):
            raise ConfigError(f"summary is {self.summary!r}, expected one of {', '.join(get_args(Summary))}.")
        if self.sketch is not None and self.sketch < 1:
            raise ConfigError(f"sketch is {self.sketch}, expected at least 1, or None for all columns.")

    def init(self, knowledge: Knowledge) -> State:
        """Nobody was seen; the parts are checked."""
        _chosen(knowledge, self.parts)
        return super().init(knowledge)

    def listener(self) -> FromUpdates:
        """All learners read the same rows, and the noise that they know is taken into account later."""
        return replace(self, learner=Network(), noise="ignored")

    def answer(self, knowledge: Knowledge, state: State, question: WhichAttribute) -> Tensor:
        """Train on the known clients that were seen, predict the others."""
        client, rows = self.read(state)
        learner = of_parts(self.learner, self.columns(knowledge))
        return by_learner(knowledge, question, client, self.weighed(knowledge, rows), learner, self.seed)

    def columns(self, knowledge: Knowledge) -> Parts:
        """Of which components a row is made, and how many columns each has."""
        return tuple((part.name, self._width(knowledge, part)) for part in _chosen(knowledge, self.parts))

    def weighed(self, knowledge: Knowledge, rows: Tensor) -> Tensor:
        """Rows that `read` gave, f32[n, p], as the learner gets them; they are changed in place."""
        if self.noise == "ignored" or not len(rows):
            return rows
        return rows.div_(torch.cat([self._spread(knowledge, part) for part in _chosen(knowledge, self.parts)]))

    def _spread(self, knowledge: Knowledge, part: Component) -> Tensor:
        """The standard deviation of the noise in each column of a component, f32[p]; 1 where there is none."""
        variance = torch.full((self._width(knowledge, part),), knowledge.defense.noise(part.name) ** 2)
        if part.storage == "per_item":
            variance *= rows_with_noise(knowledge)
        if part.storage == "per_item" and self.sketch is not None:
            width = 1 if self.summary == "norms" else prod(part.shape)
            place, _ = _hashed(self.seed, part.name, knowledge.n_items, width, self.sketch)
            variance *= torch.from_numpy(np.bincount(place.reshape(-1), minlength=self.sketch))  # numbers in a column
        return torch.where(variance > 0, variance.sqrt(), 1.0)

    def _width(self, knowledge: Knowledge, part: Component) -> int:
        """How many columns a component has in a row."""
        numbers = prod(part.shape)
        if part.storage != "per_item":
            return numbers
        return self.sketch or knowledge.n_items * (1 if self.summary == "norms" else numbers)

    def _rows(self, knowledge: Knowledge, update: Update) -> Tensor:
        pieces = []
        for part in _chosen(knowledge, self.parts):
            if part.storage != "per_item":
                pieces.append(update.values[part.name].unsqueeze(-1).flatten(1))
                continue
            rows = update.rows[part.name].unsqueeze(-1).flatten(1)  # f32[N, d]
            if self.summary == "norms":
                rows = _along_mean(rows, update)
            pieces.append(self._folded(part.name, rows, update))
        return torch.cat(pieces, dim=1)

    def _folded(self, name: str, rows: Tensor, update: Update) -> Tensor:
        """Item rows f32[N, d] as one row for each client: f32[C, I d], or f32[C, sketch]."""
        clients, width = update.n_clients, rows.shape[1]
        if self.sketch is None:
            table = rows.new_zeros(clients * update.n_items, width)
            return table.index_copy_(0, update.owner * update.n_items + update.item, rows).view(clients, -1)
        place, sign = _hashed(self.seed, name, update.n_items, width, self.sketch)
        table = rows.new_zeros(clients, self.sketch)
        where = (update.owner.numpy(), update.item.numpy(), place, sign)
        kernels.fold_rows(rows.contiguous().numpy(), *where, table.numpy())
        return table


def _chosen(knowledge: Knowledge, parts: tuple[str, ...]) -> list[Component]:
    """The shared components that prefixes name, in the model's order."""
    shared = [part for part in knowledge.components if part.shared]

    def within(name: str, prefix: str) -> bool:
        return f"{name}.".startswith(f"{prefix}.")

    for prefix in parts:
        if not any(within(part.name, prefix) for part in shared):
            names = ", ".join(part.name for part in shared) or "none"
            raise ConfigError(f"parts has {prefix!r}, expected the beginning of a shared component's name: {names}.")
    return [part for part in shared if not parts or any(within(part.name, prefix) for prefix in parts)]


def _along_mean(rows: Tensor, update: Update) -> Tensor:
    """The movement of each row along the mean movement of its client's rows, f32[N, 1].

    Own items and negatives move along the gradients of their scores, in opposite senses; these gradients are alike for
    all items of a client. The mean movement has their direction, in the sense of whichever kind moves more in sum.
    """
    count = update.offset.diff().clamp(min=1).unsqueeze(1)
    mean = rows.new_zeros(update.n_clients, rows.shape[1]).index_add_(0, update.owner, rows) / count
    unit = mean / mean.norm(dim=1, keepdim=True).clamp(min=1e-20)
    along: Tensor = (rows * unit[update.owner]).sum(1, keepdim=True)
    return along


@lru_cache(maxsize=4)
def _hashed(seed: int, name: str, n_items: int, width: int, columns: int) -> tuple[I64, F32]:
    """The column of the sketch i64[I, d] and the sign f32[I, d] of every coordinate of an item table."""
    item, coordinate = np.arange(n_items)[:, None], np.arange(width)
    place = random.below(columns, seed, f"sketch of {name}", item, coordinate)
    sign = 1 - 2 * random.below(2, seed, f"signs of {name}", item, coordinate)
    return place, sign.astype(np.float32)


# --- the exact leak ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KnownColumns(RowPerClient):
    """Which of the rows of the user matrix E_U (its transpose, f32[F, d]) moved at all.

    z_u = E_U x_u, so row f moves by x_uf times one vector G of the user. A one-hot attribute has x = 1 for the user's
    class and 0 for the others: their rows do not move. No labelled user is needed, only which feature is which class,
    which who built the system knows: `columns of ATTRIBUTE`, i64[K], in the public knowledge.

    reading "norm": how far each class's row moved, the mean over participations. "rank one": under noise a row alone
    says little, but the matrix M of a participation is x G and noise, with the same x_u in all of them. So x_u is the
    first eigenvector of the summed M M^T, f32[F, F]; independent noise of equal size adds the same to all eigenvalues
    and turns no eigenvector. (To subtract the expected length of the noise from that of each row would take the same
    from all classes, and change no order.) The answer is each class's share of the summed squares.
    """

    component: str = "user.encoder"
    reading: Reading = "rank one"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reading not in get_args(Reading):
            raise ConfigError(f"reading is {self.reading!r}, expected one of {', '.join(get_args(Reading))}.")

    def init(self, knowledge: Knowledge) -> State:
        """Nobody was seen; the component is checked."""
        part = {part.name: part for part in knowledge.components if part.shared}.get(self.component)
        if part is None or part.storage != "dense" or len(part.shape) != 2:
            names = ", ".join(part.name for part in knowledge.components if part.shared and part.storage == "dense")
            raise ConfigError(
                f"component is {self.component!r}, expected a shared matrix with a row for each user feature, one of: "
                f"{names or 'none'}.\n  The attack is for models with user features, as feature-gcn."
            )
        return super().init(knowledge)

    def listener(self) -> KnownColumns:
        """What it keeps is the same for all attributes."""
        return self

    def answer(self, knowledge: Knowledge, state: State, question: WhichAttribute) -> Tensor:
        """Shares of the classes; equal ones for a client that was never seen."""
        name, classes = f"columns of {question.attribute}", len(question.classes)
        column = public(knowledge, name, "i64[K], the place of each class among the user features")
        if column.shape != (classes,):
            raise ConfigError(f"`{name}` is {list(column.shape)}, expected [{classes}]: one for each class.")
        chance = torch.full((knowledge.n_users, classes), 1 / classes)
        client, rows = seen_rows(state, question.client)
        if len(client):
            square = rows.double().square()  # f64[n, F]
            if self.reading == "rank one":
                value, vector = torch.linalg.eigh(rows.double())
                square = vector[:, :, -1].square() * value[:, -1:]  # of x_u, but for its length and sign
            total = square[:, column].sum(1, keepdim=True)
            moved = total > 1e-12 * square.sum(1, keepdim=True)  # else there is nothing but rounding
            chance[client] = torch.where(moved, square[:, column] / total.clamp(min=1e-300), 1 / classes).float()
        return chance[question.client]

    def _rows(self, knowledge: Knowledge, update: Update) -> Tensor:
        moved = update.values[self.component]  # f32[C, F, d]
        return moved.norm(dim=2) if self.reading == "norm" else moved @ moved.mT


# --- the chain --------------------------------------------------------------------------------------------------------


def learner_of_items() -> Logistic:
    """A logistic regression on rows of length 1 with a column for each item."""
    return Logistic(C=10.0, prepare=Preparation("unit", "none"))


@dataclass(frozen=True, kw_only=True)
class ThroughItems:
    """First which items are a user's own, then what these tell about the user.

    `membership` reads uploads and answers for every pair of a client and an item that it has evidence on; a pair
    without any was not trained on. The users' probabilities are rows for a learner, as if they were interactions.
    """

    membership: FromUploads = field(default_factory=lambda: GradientAlignment(shadow_rows=0, participation="all"))
    learner: Learner = field(default_factory=learner_of_items)
    seed: int = 0

    vantage: ClassVar[type[Server]] = Server
    question: ClassVar[type[WhichAttribute]] = WhichAttribute

    def init(self, knowledge: Knowledge) -> State:
        """As the membership attack."""
        return self.membership.init(knowledge)

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        """As the membership attack."""
        return self.membership.fold(knowledge, state, message)

    def listener(self) -> FromUploads:
        """That of the membership attack."""
        return self.membership.listener()

    def answer(self, knowledge: Knowledge, state: State, question: WhichAttribute) -> Tensor:
        """Probabilities of items, then of classes."""
        pair, _ = pairs_with_odds(state, knowledge.n_items)
        client, item = pair // knowledge.n_items, pair % knowledge.n_items
        chance = self.membership.answer(knowledge, state, WhichItems(client, item)).float()
        seen, place = torch.unique(client, return_inverse=True)
        rows = torch.zeros(len(seen), knowledge.n_items).index_put_((place, item), chance)
        return by_learner(knowledge, question, seen, rows, self.learner, self.seed)


# --- who does not listen ----------------------------------------------------------------------------------------------


class _Blind:
    """Whoever does not look at messages."""

    vantage: ClassVar[type[Server]] = Server
    question: ClassVar[type[WhichAttribute]] = WhichAttribute

    def init(self, knowledge: Knowledge) -> State:
        """It keeps nothing."""
        return {}

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        """It reads nothing."""
        return state


@dataclass(frozen=True, kw_only=True)
class TrueItems(_Blind):
    """What the true interactions tell to the reader of the chain: a reference beside attacks, and no attack.

    It needs `own items`, i64[n, 2] of a client and an item, in the public knowledge: **no adversary has them**. An
    audit, which holds the truth, hands them over. What `ThroughItems` lacks to it is what hides the interactions; a
    better reader may tell more.
    """

    learner: Learner = field(default_factory=learner_of_items)
    seed: int = 0

    def answer(self, knowledge: Knowledge, state: State, question: WhichAttribute) -> Tensor:
        """Classes from rows of zeros and ones."""
        pair = public(knowledge, "own items", "i64[n, 2], a client and an item: the truth, for a reference")
        seen, place = torch.unique(pair[:, 0], return_inverse=True)
        rows = torch.zeros(len(seen), knowledge.n_items).index_put_((place, pair[:, 1]), torch.ones(len(pair)))
        return by_learner(knowledge, question, seen, rows, self.learner, self.seed)


# --- guesses that cost nothing ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MajorityClass(_Blind):
    """Everybody has the class that most known users have; of equals, the first."""

    def answer(self, knowledge: Knowledge, state: State, question: WhichAttribute) -> Tensor:
        """The same for all."""
        classes = len(question.classes)
        share = proportions(known_labels(knowledge, question), classes)
        return torch.eye(classes)[share.argmax()].repeat(len(question.client), 1)


@dataclass(frozen=True, kw_only=True)
class Proportional(_Blind):
    """A class drawn for each client by the proportions of the known labels."""

    seed: int = 0

    def answer(self, knowledge: Knowledge, state: State, question: WhichAttribute) -> Tensor:
        """The drawn class of each client."""
        classes = len(question.classes)
        share = proportions(known_labels(knowledge, question), classes).double()
        lot = torch.from_numpy(random.uniform(self.seed, "proportional guess", question.client.numpy()))
        drawn = torch.searchsorted(share.cumsum(0), lot, right=True).clamp(max=classes - 1)
        return torch.eye(classes)[drawn]
