"""The random numbers of a cohort: one stream per client.

A simulated client's draw is a function of (seed, round, client, purpose, moment, item row, coordinate) and of nothing
else: not of the chunk, the order of clients, or which other rows exist. A real device draws from the operating system:
a seed that the server knows is no noise.

Axis letters: C clients, n rows that are drawn for, each of one client.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from recleak import draws, random
from recleak.update import Update

_BLOCK = 1 << 18  # draws from the operating system at a time: bounds the working memory
_LAWS = {"uniform": draws.UNIFORM, "normal": draws.NORMAL, "laplace": draws.LAPLACE}


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
        return self._draw("uniform", purpose, position, row, shape)

    def normal(self, purpose: str, position: Tensor, row: Tensor, shape: tuple[int, ...] = ()) -> Tensor:
        """Standard normal numbers, f32[n, *shape], for rows as in `uniform`."""
        return self._draw("normal", purpose, position, row, shape)

    def laplace(self, purpose: str, position: Tensor, row: Tensor, shape: tuple[int, ...] = ()) -> Tensor:
        """Laplace numbers of scale 1 (standard deviation sqrt 2), f32[n, *shape], for rows as in `uniform`."""
        return self._draw("laplace", purpose, position, row, shape)

    def normal_like(self, update: Update, name: str) -> Tensor:
        """Standard normal numbers for every coordinate of a component, keyed by client and item."""
        return self.normal(name, *places(update, name), _shape(update, name))

    def laplace_like(self, update: Update, name: str) -> Tensor:
        """Laplace numbers of scale 1 for every coordinate of a component, keyed by client and item."""
        return self.laplace(name, *places(update, name), _shape(update, name))

    def add_normal(self, out: Tensor, scale: float, purpose: str, position: Tensor, row: Tensor) -> None:
        """Add scale times what `normal` draws, in place and without a second array, to f32[n, *shape]."""
        self._add("normal", out, scale, purpose, position, row)

    def add_laplace(self, out: Tensor, scale: float, purpose: str, position: Tensor, row: Tensor) -> None:
        """Add scale times what `laplace` draws, in place and without a second array, to f32[n, *shape]."""
        self._add("laplace", out, scale, purpose, position, row)

    def state(self, kind: str, purpose: str) -> np.uint64:
        """What all draws of a law for a purpose begin with, before a client's key: for compiled loops that draw."""
        return draws.start(repr((*self.path, purpose, kind)))  # repr: ("a/b", "c") is not ("a", "b/c")

    def _draw(self, kind: str, purpose: str, position: Tensor, row: Tensor, shape: tuple[int, ...]) -> Tensor:
        client, item = self._places(position, row)
        drawn = np.empty((len(client), prod(shape)), np.float32)
        if self.key is None:
            for part in _blocks(drawn):
                part[:] = _from_os(kind, part.size)
        else:
            draws.draw(_LAWS[kind], self.state(kind, purpose), self.key, client, item, drawn)
        return torch.from_numpy(drawn).reshape(len(client), *shape).to(position.device)

    def _add(self, kind: str, out: Tensor, scale: float, purpose: str, position: Tensor, row: Tensor) -> None:
        if out.shape[:1] != position.shape:
            raise ValueError(
                f"Got a tensor of shape {tuple(out.shape)} and positions {tuple(position.shape)}, "
                "expected a position for each row of the tensor."
            )
        plain = out.device.type == "cpu" and out.dtype == torch.float32 and out.is_contiguous()
        if not plain or out.requires_grad:  # correct everywhere, with a second array
            out.add_(scale * self._draw(kind, purpose, position, row, tuple(out.shape[1:])).to(out))
            return
        client, item = self._places(position, row)
        sums = out.numpy().reshape(len(client), prod(out.shape[1:]))
        if self.key is None:
            for part in _blocks(sums):
                part += np.float32(scale) * _from_os(kind, part.size)
        else:
            draws.add(_LAWS[kind], np.float32(scale), self.state(kind, purpose), self.key, client, item, sums)
        torch.autograd.graph.increment_version(out)  # torch does not see what numpy changes

    def _places(self, position: Tensor, row: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The place of each row's client, and its item, checked: compiled loops do not look."""
        client, item = _numpy(position), _numpy(row)
        if client.shape != item.shape or client.ndim != 1:
            raise ValueError(f"Got positions {client.shape} and rows {item.shape}, expected two vectors of one length.")
        if len(client) and not (client.min() >= 0 and client.max() < self.n_clients):
            wrong = client[(client < 0) | (client >= self.n_clients)][0]
            raise ValueError(
                f"Got client position {wrong}, expected 0 to {self.n_clients - 1}: there are {self.n_clients} streams. "
                "Take the same clients from the streams as from the update (`select`)."
            )
        return np.ascontiguousarray(client), np.ascontiguousarray(item)


def _blocks(numbers: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Views of contiguous numbers, in parts of bounded size."""
    flat = numbers.reshape(-1)
    return (flat[begin : begin + _BLOCK] for begin in range(0, flat.size, _BLOCK))


def _from_os(kind: str, count: int) -> NDArray[np.float32]:
    bits, drawn = np.frombuffer(bytearray(os.urandom(8 * count)), np.uint64), np.empty(count, np.float32)
    draws.quantiles(_LAWS[kind], bits, drawn)
    return drawn


def places(update: Update, name: str) -> tuple[Tensor, Tensor]:
    """The position and the row that the numbers of a component are drawn for, i64[n] each."""
    if name in update.rows:
        return update.owner, update.item
    position = torch.arange(update.n_clients, device=update.client.device)
    return position, torch.zeros_like(position)


def _shape(update: Update, name: str) -> tuple[int, ...]:
    """Of one row of a component."""
    return tuple((update.rows[name] if name in update.rows else update.values[name]).shape[1:])


def _numpy(numbers: ArrayLike | Tensor) -> NDArray[np.int64]:
    return np.asarray(numbers.cpu() if isinstance(numbers, Tensor) else numbers, np.int64)
