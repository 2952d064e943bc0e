"""What clients train on: ragged examples, and the plan of batches that each client walks through.

Axis letters: C clients, E examples over all clients, N item rows over all clients, S steps, B examples in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.data.interactions import Interactions
from recleak.data.sampling import Complement, negatives_at
from recleak.errors import DataError

Loss = Literal["bce", "bpr", "taylor"]  # taylor: bce to second order around a score of 0
_LANES = 32  # a batch is padded to a multiple: torch takes two registers of 16 at a time, and treats the rest otherwise


@dataclass(frozen=True, eq=False)
class LocalData:
    """The examples of C clients, client after client."""

    client: NDArray[np.int64]  # i64[C]
    item: NDArray[np.int64]  # i64[E]
    label: NDArray[np.float32]  # f32[E]: 1 for the client's own items, 0 for negatives
    against: NDArray[np.int64] | None  # i64[E]: for pairwise losses, the item that `item` is preferred to; else None
    offset: NDArray[np.int64]  # i64[C + 1]: client c has examples offset[c] to offset[c + 1]
    n_items: int
    own: NDArray[np.bool_] | None = None  # bool[E]: a neighbor in the client's star graph; None: every positive is one

    @cached_property
    def count(self) -> NDArray[np.int64]:
        """How many examples each client has, i64[C]."""
        return np.diff(self.offset)

    @cached_property
    def owner(self) -> NDArray[np.int64]:
        """The position of each example's client, i64[E]."""
        return np.repeat(np.arange(len(self.client)), self.count)

    def select(self, positions: NDArray[np.int64]) -> LocalData:
        """The clients at these positions, in this order."""
        count = self.count[positions]
        offset = np.concatenate([[0], np.cumsum(count)])
        example = np.repeat(self.offset[positions] - offset[:-1], count) + np.arange(offset[-1])
        against = None if self.against is None else self.against[example]
        own = None if self.own is None else self.own[example]
        item, label = self.item[example], self.label[example]
        return LocalData(self.client[positions], item, label, against, offset, self.n_items, own)


@dataclass(frozen=True, eq=False)
class Examples:
    """Where clients' examples come from: their positives in train, and negatives that are drawn for them."""

    train: Interactions
    free: Complement
    negatives: int  # per positive
    loss: Loss
    resample: bool  # negatives are drawn anew in every round; else once for all
    seed: int

    @classmethod
    def of(
        cls,
        train: Interactions,
        *,
        negatives: int = 4,
        loss: Loss = "bce",
        resample: bool = False,
        spare: tuple[Interactions, ...] = (),
        seed: int = 0,
    ) -> Examples:
        """Examples from a training part; items of the parts in `spare` are no negatives either."""
        train = train.distinct()
        return cls(train, Complement.of(train, *spare), negatives, loss, resample, seed)

    @cached_property
    def count(self) -> NDArray[np.int64]:
        """How many examples each user has, i64[U]."""
        return self.train.activity * (self.negatives + (self.loss != "bpr"))

    @property
    def positives(self) -> NDArray[np.int64]:
        """How many own items each user has, i64[U]: what its update or model weighs."""
        return self.train.activity

    @cached_property
    def _item(self) -> NDArray[np.int32]:
        return self.train.item  # a table in pieces would be put together at every call

    def draw(self, client: NDArray[np.int64], round: int) -> LocalData:
        """The examples of some clients in one round."""
        positives = self.train.activity[client]
        if (idle := np.flatnonzero(positives == 0)).size:
            raise DataError(
                f"{idle.size:,} clients have no interactions to train on (first: user {client[idle[0]]})",
                remedy="Leave them out of the cohort, or filter the data (data.prepare.at_least).",
            )
        if (full := np.flatnonzero(self.free.size[client] == 0)).size:
            raise DataError(
                f"{full.size:,} clients have every item, hence no negative (first: user {client[full[0]]})",
                remedy="Leave them out of the cohort.",
            )
        user = np.repeat(client, positives)  # i64[P]
        position = np.arange(len(user)) - np.repeat(np.cumsum(positives) - positives, positives)
        own = self._item[self.train.indptr[user] + position].astype(np.int64)
        other = negatives_at(
            self.free, user, position, self.negatives, seed=self.seed, round=round if self.resample else None
        ).astype(np.int64)  # i64[P, q]
        if self.loss == "bpr":
            item, against = np.repeat(own, self.negatives), other.reshape(-1)
            label = np.ones(len(item), np.float32)
        else:
            item, against = np.concatenate([own[:, None], other], axis=1).reshape(-1), None
            label = np.zeros((len(own), 1 + self.negatives), np.float32)
            label[:, 0] = 1
            label = label.reshape(-1)
        offset = np.concatenate([[0], np.cumsum(self.count[client])])
        return LocalData(client, item, label, against, offset, self.train.n_items)


@dataclass(frozen=True, eq=False)
class Held:
    """The item rows that clients hold: one flat table, client after client."""

    item: NDArray[np.int64]  # i64[N], ascending within a client
    offset: NDArray[np.int64]  # i64[C + 1]
    of_item: NDArray[np.int64]  # i64[E]: the row of each example's item
    of_against: NDArray[np.int64] | None  # i64[E]
    own: NDArray[np.int64]  # i64[P]: rows of the clients' own items
    own_offset: NDArray[np.int64]  # i64[C + 1]


def positives_of(data: LocalData) -> Tensor:
    """How many own items each client trains on, f32[C]."""
    own = data.label > 0 if data.own is None else data.own
    key = np.unique(data.owner[own] * data.n_items + data.item[own])
    return torch.from_numpy(np.bincount(key // data.n_items, minlength=len(data.client)).astype(np.float32))


def held_rows(data: LocalData, also: NDArray[np.int64] | None = None) -> Held:
    """The rows that the examples touch, and those given as keys position * I + item."""
    n_items, clients = data.n_items, len(data.client)
    key = data.owner * n_items + data.item
    against = None if data.against is None else data.owner * n_items + data.against
    parts = [part for part in (key, against, also) if part is not None]
    union = np.sort(np.concatenate(parts))
    union = union[np.diff(union, prepend=-1) > 0]
    own_key = np.sort(key[data.label > 0 if data.own is None else data.own])
    own = np.searchsorted(union, own_key[np.diff(own_key, prepend=-1) > 0])
    bounds = np.arange(clients + 1) * n_items
    offset = np.searchsorted(union, bounds)
    return Held(
        item=union % n_items,
        offset=offset,
        of_item=np.searchsorted(union, key),
        of_against=None if against is None else np.searchsorted(union, against),
        own=own,
        own_offset=np.searchsorted(own, offset),
    )


@dataclass(frozen=True, eq=False)
class Plan:
    """Which examples each client sees at each of its steps; clients are sorted so that the active ones come first."""

    example: NDArray[np.int64]  # i64[S, C, B]; padding is the client's first example with weight 0
    weight: NDArray[np.float32]  # f32[S, C, B]: 1 / size of the batch, or 0
    steps: NDArray[np.int64]  # i64[C], descending
    per_epoch: NDArray[np.int64]  # i64[C]: steps in an epoch
    active: NDArray[np.int64]  # i64[S]: how many clients still train at each step


def padded(batch_size: int | None, count: NDArray[np.int64]) -> NDArray[np.int64]:
    """The padded width of a client's batches, i64[C]. With full batches (None) it depends on its examples.

    Full batches have one of few widths (32, 64, 96, 128, 192, 256, 384, ...), so that many clients share one.
    """
    size = count if batch_size is None else np.full_like(count, batch_size)
    half = 2 ** np.ceil(np.log2(np.maximum(size, 2))).astype(np.int64) // 4  # half of the power of two below
    lanes = np.maximum(_LANES, half) if batch_size is None else _LANES
    return -(-size // lanes) * lanes


def steps_per_epoch(batch_size: int | None, count: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many batches make an epoch, i64[C]; the last one may be smaller."""
    return np.ones_like(count) if batch_size is None else -(-count // batch_size)


def shuffles(
    client: NDArray[np.int64], count: NDArray[np.int64], *, epochs: int, seed: int, round: int, shuffle: bool = True
) -> Iterator[NDArray[np.int64]]:
    """The order of each client's n examples in every epoch, i64[epochs, n]: a function of (seed, round, client)."""
    key = random.bits(seed, "shuffle", round, client[:, None], np.arange(2))
    for c, n in enumerate(count.tolist()):
        order = np.empty((epochs, n), np.int64)
        generator = np.random.Generator(np.random.Philox(key=key[c]))
        for epoch in range(epochs):
            order[epoch] = generator.permutation(n) if shuffle else np.arange(n)
        yield order


def plan(data: LocalData, *, epochs: int, batch_size: int | None, seed: int, round: int, shuffle: bool = True) -> Plan:
    """Batches without replacement, in a new order each epoch: a function of (seed, round, client) and nothing else."""
    count = data.count
    per_epoch = steps_per_epoch(batch_size, count)
    steps = per_epoch * epochs
    if np.any(np.diff(steps) > 0):
        raise ValueError("Got clients in another order, expected them sorted by their number of steps, descending.")
    width = int(padded(batch_size, count).max())
    example = np.empty((int(steps[0]), len(count), width), np.int64)
    weight = np.zeros(example.shape, np.float32)
    orders = shuffles(data.client, count, epochs=epochs, seed=seed, round=round, shuffle=shuffle)
    for c, (n, order) in enumerate(zip(count.tolist(), orders, strict=True)):
        batches, size = int(per_epoch[c]), n if batch_size is None else batch_size
        slots = np.zeros((epochs, batches * size), np.int64)
        slots[:, :n] = order
        shares = np.zeros(batches * size, np.float32)
        shares[:n] = np.float32(1 / size)
        shares[(batches - 1) * size : n] = np.float32(1 / (n - (batches - 1) * size))
        mine = example[: epochs * batches, c]
        mine[:, :size] = slots.reshape(-1, size) + data.offset[c]
        mine[:, size:] = data.offset[c]
        weight[: epochs * batches, c, :size] = np.tile(shares.reshape(batches, size), (epochs, 1))
        example[epochs * batches :, c] = data.offset[c]
    active = np.searchsorted(-steps, -np.arange(example.shape[0]), side="left")
    return Plan(example, weight, steps, per_epoch, active)
