"""The random numbers of a cohort: one stream per client.

A simulated client's draw is a function of (seed, round, client, purpose, moment, item row, coordinate) and of nothing
else: not of the chunk, the order of clients, or which other rows exist. A real device draws from the operating system:
a seed that the server knows is no noise.

Axis letters: C clients, n rows that are drawn for, each of one client.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import special
from torch import Tensor

from recleak import random
from recleak.update import Update

_BLOCK = 1 << 18  # draws at a time: bounds the working memory; the result does not depend on it

_Quantile: TypeAlias = Callable[[NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class Streams:
    """Random numbers of C clients. Make one with `Streams.simulated` or `Streams.from_os`.

    Equal keys give equal draws, so two draws that must be independent differ in their purpose (`within`), in their
    moment (`at`), or in their row.
    """

    n_clients: int  # C
    key: NDArray[np.uint64] | None  # u64[C]: from (seed, round, client, moments); None draws from the operating system
    path: tuple[str, ...] = ()  # the purposes around the one that a draw names
    every: NDArray[np.uint64] | None = None  # u64[C]: the key of draws that are the same in every round

    @classmethod
    def simulated(cls, seed: int, round: int, client: ArrayLike | Tensor) -> Streams:
        """Reproducible streams of simulated clients, i64[C], in one round."""
        client = np.atleast_1d(_numpy(client))
        keys = (random.bits(seed, "client stream", each, client) for each in (round, 0))
        return cls(len(client), next(keys), every=next(keys))

    @classmethod
    def from_os(cls, n_clients: int = 1) -> Streams:
        """Streams of a real device: every draw is fresh from the operating system, and none can be repeated."""
        return cls(n_clients, None)

    def within(self, name: str) -> Streams:
        """The same clients with draws for a purpose of their own, as each mechanism of a chain needs them."""
        return replace(self, path=(*self.path, name))

    def at(self, moment: ArrayLike | Tensor) -> Streams:
        """The same clients at a moment of their local training, such as an epoch: i64[C], or one number for all."""
        if self.key is None:
            return self
        words = _numpy(moment)
        if words.ndim and words.shape != (self.n_clients,):
            raise ValueError(f"Got moments of shape {words.shape}, expected ({self.n_clients},): one per client.")
        return replace(self, key=random.bits(0, "moment", self.key, words))

    def lasting(self) -> Streams:
        """The same clients with draws that do not change from round to round; a real device has to keep its own."""
        return replace(self, key=self.every).within("lasting")

    def select(self, positions: ArrayLike | Tensor) -> Streams:
        """The clients at these positions (i64), in this order."""
        places = np.atleast_1d(_numpy(positions))
        key, every = (None if each is None else each[places] for each in (self.key, self.every))
        return replace(self, n_clients=len(places), key=key, every=every)

    def uniform(self, purpose: str, position: Tensor, row: Tensor, shape: tuple[int, ...] = ()) -> Tensor:
        """Uniform numbers in (0, 1], f32[n, *shape]; 1 only where float32 rounds to it, once in 2^25 draws.

        `position` i64[n] is the place of a client among the C, `row` i64[n] the number of an item, or 0.
        """
        return self._draw("uniform", lambda u: u, purpose, position, row, shape)

    def normal(self, purpose: str, position: Tensor, row: Tensor, shape: tuple[int, ...] = ()) -> Tensor:
        """Standard normal numbers, f32[n, *shape], for rows as in `uniform`."""
        return self._draw("normal", special.ndtri, purpose, position, row, shape)

    def laplace(self, purpose: str, position: Tensor, row: Tensor, shape: tuple[int, ...] = ()) -> Tensor:
        """Laplace numbers of scale 1 (standard deviation sqrt 2), f32[n, *shape], for rows as in `uniform`."""
        return self._draw("laplace", _laplace_quantile, purpose, position, row, shape)

    def normal_like(self, update: Update, name: str) -> Tensor:
        """Standard normal numbers for every coordinate of a component, keyed by client and item."""
        return self.normal(name, *_rows(update, name))

    def laplace_like(self, update: Update, name: str) -> Tensor:
        """Laplace numbers of scale 1 for every coordinate of a component, keyed by client and item."""
        return self.laplace(name, *_rows(update, name))

    def _draw(
        self, kind: str, quantile: _Quantile, purpose: str, position: Tensor, row: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        client, item = _numpy(position), _numpy(row)
        if client.shape != item.shape or client.ndim != 1:
            raise ValueError(f"Got positions {client.shape} and rows {item.shape}, expected two vectors of one length.")
        if len(client) and not (client.min() >= 0 and client.max() < self.n_clients):
            wrong = client[(client < 0) | (client >= self.n_clients)][0]
            raise ValueError(
                f"Got client position {wrong}, expected 0 to {self.n_clients - 1}: there are {self.n_clients} streams. "
                "Take the same clients from the streams as from the update (`select`)."
            )
        label, size = repr((*self.path, purpose, kind)), prod(shape)  # repr: ("a/b", "c") is not ("a", "b/c")
        drawn = np.empty((len(client), size), np.float32)
        high, wide = max(1, _BLOCK // max(1, size)), max(1, min(size, _BLOCK))
        for top in range(0, len(client), high):
            part = slice(top, top + high)
            for left in range(0, size, wide):
                place = np.arange(left, min(left + wide, size))
                bits = self._bits(label, client[part, None], item[part, None], place)
                # 52 bits and a half are exact in float64: the open interval, symmetric around 1/2.
                drawn[part, left : left + wide] = quantile(
                    ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
                )
        return torch.from_numpy(drawn).reshape(len(client), *shape).to(position.device)

    def _bits(
        self, label: str, client: NDArray[np.int64], item: NDArray[np.int64], place: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        if self.key is not None:
            return random.bits(0, label, self.key[client], item, place)
        return np.frombuffer(os.urandom(8 * len(client) * len(place)), np.uint64).reshape(len(client), len(place))


def _laplace_quantile(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """-sign(t) log(1 - |t|) with t = 2u - 1, which is exact. scipy's log1p is one code for every place in an array."""
    t = 2 * u - 1
    quantile: NDArray[np.float64] = -np.sign(t) * special.log1p(-np.abs(t))
    return quantile


def _rows(update: Update, name: str) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """The position and row of each row of a component, and the shape of one row."""
    if name in update.rows:
        return update.owner, update.item, tuple(update.rows[name].shape[1:])
    position = torch.arange(update.n_clients, device=update.client.device)
    return position, torch.zeros_like(position), tuple(update.values[name].shape[1:])


def _numpy(numbers: ArrayLike | Tensor) -> NDArray[np.int64]:
    return np.asarray(numbers.cpu() if isinstance(numbers, Tensor) else numbers, np.int64)
