"""What clients train on who learn from sequences: transitions, each beside places where the client never was.

Axis letters: C clients, E examples over all clients, T transitions over all users, U users.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recleak.data.interactions import Interactions
from recleak.data.sampling import Complement, negatives_at
from recleak.data.sequences import Transitions
from recleak.errors import DataError
from recleak.geometry import kilometers
from recleak.models.base import Model
from recleak.training.local import Examples

if TYPE_CHECKING:
    from recleak.training.cohort import LocalTraining


@dataclass(frozen=True, eq=False)
class LocalTransitions:
    """The examples of C clients, client after client: from `before` one goes to `item` rather than to `against`."""

    client: NDArray[np.int64]  # i64[C]
    before: NDArray[np.int64]  # i64[E]
    item: NDArray[np.int64]  # i64[E]
    against: NDArray[np.int64]  # i64[E]
    gap: NDArray[np.int64]  # i64[E]: seconds since `before`
    distance: NDArray[np.float32]  # f32[E]: km from `before` to `item`
    distance_against: NDArray[np.float32]  # f32[E]: km from `before` to `against`
    offset: NDArray[np.int64]  # i64[C + 1]: client c has examples offset[c] to offset[c + 1]
    positives: NDArray[np.float32]  # f32[C]: transitions
    n_items: int

    @cached_property
    def count(self) -> NDArray[np.int64]:
        """How many examples each client has, i64[C]."""
        return np.diff(self.offset)

    @cached_property
    def owner(self) -> NDArray[np.int64]:
        """The position of each example's client, i64[E]."""
        return np.repeat(np.arange(len(self.client)), self.count)


@dataclass(frozen=True, eq=False)
class TransitionExamples:
    """Where these examples come from: the transitions in train, and negatives that are drawn for each."""

    transitions: Transitions
    free: Complement
    negatives: int  # per transition
    resample: bool  # negatives are drawn anew in every round; else once for all
    seed: int

    @classmethod
    def of(
        cls,
        train: Interactions,
        *,
        negatives: int = 1,
        resample: bool = True,
        spare: tuple[Interactions, ...] = (),
        seed: int = 0,
    ) -> TransitionExamples:
        """Examples from a training part with repeats; items of the parts in `spare` are no negatives either."""
        transitions = Transitions.of(train)
        if not len(transitions):
            raise DataError(
                "nobody goes from one place to another in the training part",
                remedy="Check the split: users need at least two check-ins at different places.",
            )
        return cls(transitions, Complement.of(train, *spare), negatives, resample, seed)

    @cached_property
    def count(self) -> NDArray[np.int64]:
        """How many examples each user has, i64[U]."""
        return self.transitions.count * self.negatives

    @property
    def positives(self) -> NDArray[np.int64]:
        """How many transitions each user has, i64[U]: what its update or model weighs."""
        return self.transitions.count

    def draw(self, client: NDArray[np.int64], round: int) -> LocalTransitions:
        """The examples of some clients in one round; each has a transition and an item that it does not have."""
        moves = self.transitions
        count = moves.count[client]
        if (idle := np.flatnonzero(count == 0)).size:
            raise DataError(
                f"{idle.size:,} clients have no transition to train on (first: user {client[idle[0]]})",
                remedy="Leave them out of the cohort.",
            )
        user = np.repeat(client, count)  # i64[n]
        position = np.arange(len(user)) - np.repeat(np.cumsum(count) - count, count)
        at = np.repeat(moves.offset[user] + position, self.negatives)  # i64[E]
        when = round if self.resample else None
        drawn = negatives_at(self.free, user, position, self.negatives, seed=self.seed, round=when)  # i32[n, q]
        against = drawn.reshape(-1).astype(np.int64)
        before = moves.before[at]
        return LocalTransitions(
            client,
            before,
            moves.item[at],
            against,
            moves.gap[at],
            moves.distance[at].astype(np.float32),
            kilometers(moves.place[before], moves.place[against]).astype(np.float32),
            np.concatenate([[0], np.cumsum(count * self.negatives)]),
            count.astype(np.float32),
            moves.n_items,
        )


def examples_of(
    model: Model, train: Interactions, local: LocalTraining, spare: tuple[Interactions, ...], seed: int
) -> Examples | TransitionExamples:
    """Where the examples of a model's clients come from."""
    negatives, resample = local.negatives, local.resample
    if model.needs_transitions:
        return TransitionExamples.of(train, negatives=negatives, resample=resample, spare=spare, seed=seed)
    return Examples.of(train, negatives=negatives, loss=local.loss, resample=resample, spare=spare, seed=seed)
