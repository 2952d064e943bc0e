"""Messages between nodes: who sends to whom, who stays, and what is on its way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recleak import random
from recleak.errors import ConfigError

_NAMES = ("sent", "sender", "receiver")


def random_views(
    nodes: NDArray[np.int64], degree: int, seed: int, epoch: int, kept: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Distinct random peers of each node, i64[n, degree], never itself; the first ones are those in `kept`, i64[n, k],
    where it is not -1.

    Every set of peers is equally likely, as random peer sampling aims at (Jelasity et al. 2007).
    """
    n = len(nodes)
    if degree >= n:
        raise ConfigError(f"degree is {degree}, expected at most {n - 1}: the other nodes.")
    view = np.full((n, degree), -1, np.int64)
    if kept is not None:
        view[:, : kept.shape[1]] = kept
    for place in range(degree):
        todo, attempt = np.flatnonzero(view[:, place] < 0), 0
        while len(todo):
            drawn = nodes[random.below(n, seed, "peer", epoch, nodes[todo], place, attempt)]
            twice = (view[todo] == drawn[:, None]).any(1) | (drawn == nodes[todo])
            view[todo[~twice], place] = drawn[~twice]
            todo, attempt = todo[twice], attempt + 1
    return view


def best_heard(
    heard: NDArray[np.float32], nodes: NDArray[np.int64], stay: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """The best senders that each node heard, i64[n, stay], best first, then -1 where it heard fewer.

    `heard` is how good what each user sent was for each node, f32[n, U]; below 0: it was not heard. Who is equally good
    comes in random order.
    """
    place, sender = np.nonzero(heard >= 0)
    lot = random.bits(seed, "equally good", epoch, nodes[place], sender)
    order = np.lexsort((lot, -heard[place, sender], place))
    place, sender = place[order], sender[order]
    rank = np.arange(len(place)) - np.searchsorted(place, place)
    best = np.full((len(nodes), stay), -1, np.int64)
    best[place[rank < stay], rank[rank < stay]] = sender[rank < stay]
    return best


@dataclass(frozen=True, eq=False)
class Mail:
    """n messages on their way."""

    sent: NDArray[np.int64]  # i64[n]: the tick in which each was sent
    sender: NDArray[np.int64]
    receiver: NDArray[np.int64]

    @classmethod
    def join(cls, parts: Sequence[Mail]) -> Mail:
        """All of several."""
        none = np.zeros(0, np.int64)
        return cls(*(np.concatenate([none, *(getattr(part, name) for part in parts)]) for name in _NAMES))

    def select(self, place: NDArray[np.int64] | NDArray[np.bool_]) -> Mail:
        """Some of them."""
        return Mail(self.sent[place], self.sender[place], self.receiver[place])

    def by_tick(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The ticks in which they were sent, each with the places of its messages."""
        for sent in np.unique(self.sent).tolist():
            yield sent, np.flatnonzero(self.sent == sent)
