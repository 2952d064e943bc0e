"""Local optimizers over cohorts: SGD and Adam, for tensors with a client axis and for flat tables of item rows.

A row that is not in a batch has no gradient, yet Adam moves it on: its moments fade, but they are not zero. To step
all rows of a client at every step costs ten times what the batch needs, so on the CPU the idle steps of a row are made
up for when it is next read (`IdleMoves`). With weight decay, momentum, moments that outlive a visit, or a gradient on
every row, all rows of the active clients are stepped at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import kernels
from recleak.errors import RecleakError
from recleak.models.base import Params
from recleak.models.components import require_names


class ConfigError(RecleakError):
    """A setting that cannot be."""


@dataclass(frozen=True)
class SGD:
    """p <- p - lr (g + decay p), with heavy-ball momentum if asked for (as `torch.optim.SGD`)."""

    learning_rate: float = 0.01
    learning_rates: Mapping[str, float] = field(default_factory=dict)  # by component, where it differs
    momentum: float = 0.0
    weight_decay: float = 0.0
    keep: bool = False  # the momentum outlives the visit

    @property
    def moments(self) -> tuple[str, ...]:
        """What it remembers per parameter."""
        return ("momentum",) if self.momentum else ()


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015, Algorithm 1), weight decay as L2 in the gradient (as `torch.optim.Adam`)."""

    learning_rate: float = 0.001
    learning_rates: Mapping[str, float] = field(default_factory=dict)  # by component, where it differs
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    keep: bool = False  # moments and step count outlive the visit; else each visit starts afresh

    @property
    def moments(self) -> tuple[str, ...]:
        """What it remembers per parameter."""
        return ("mean", "square")


Optimizer = SGD | Adam


def check(optimizer: Optimizer, components: set[str]) -> None:
    """An error for a setting that cannot be, or for a rate of a component that is not there."""
    require_names("component with a learning rate", optimizer.learning_rates, components)
    for name, rate in {"learning_rate": optimizer.learning_rate, **optimizer.learning_rates}.items():
        if not 0 <= rate < float("inf"):
            raise ConfigError(f"The learning rate {name} is {rate}, expected a finite number of at least 0.")
    if not 0 <= optimizer.weight_decay < float("inf"):
        raise ConfigError(f"weight_decay is {optimizer.weight_decay}, expected a finite number of at least 0.")
    fractions = (
        {"momentum": optimizer.momentum}
        if isinstance(optimizer, SGD)
        else {"beta1": optimizer.beta1, "beta2": optimizer.beta2}
    )
    for name, value in fractions.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name} is {value}, expected at least 0 and less than 1.")
    if isinstance(optimizer, Adam) and not optimizer.epsilon > 0:
        raise ConfigError(f"epsilon is {optimizer.epsilon}, expected a positive number.")


def learning_rate(optimizer: Optimizer, component: str) -> float:
    """The rate of one component."""
    return optimizer.learning_rates.get(component, optimizer.learning_rate)


class Stepper:
    """An optimizer at work on some tensors with a leading axis, in place. Moments are given and changed in place too.

    Each number is treated by itself. (torch's fused Adam gives the last numbers of a tensor, those that do not fill a
    register, other last bits than the rest, and which those are would depend on the chunk.)
    """

    def __init__(
        self, optimizer: Optimizer, rates: Mapping[str, float], values: Params, moments: Mapping[str, list[Tensor]]
    ) -> None:
        """Tensors and their moments by component."""
        self._optimizer, self._rates, self._values, self._moments = optimizer, rates, values, moments
        self._flat = {
            name: [tensor.view(-1).numpy() for tensor in (value, *moments[name])]
            for name, value in values.items()
            if value.device.type == "cpu" and isinstance(optimizer, Adam)
        }

    def step(self, gradients: Params, time: int | Tensor) -> None:
        """One step; `time` counts steps from 1, for all or for each entry of the leading axis."""
        optimizer = self._optimizer
        for name, value in self._values.items():
            rate = self._rates[name]
            if name in self._flat and isinstance(optimizer, Adam) and isinstance(time, int):
                kernels.adam_numbers(
                    *self._flat[name],
                    gradients[name].reshape(-1).numpy(),
                    _step_sizes(optimizer, rate, time),
                    optimizer.beta1,
                    optimizer.beta2,
                    optimizer.weight_decay,
                )
            else:
                _step(optimizer, rate, value, gradients[name], self._moments[name], time)


def _step(
    optimizer: Optimizer, rate: float, value: Tensor, gradient: Tensor, moments: list[Tensor], time: int | Tensor
) -> None:
    """The same with torch operations, on any device."""
    if optimizer.weight_decay:
        gradient = gradient + optimizer.weight_decay * value
    if isinstance(optimizer, SGD):
        if optimizer.momentum:
            gradient = moments[0].mul_(optimizer.momentum).add_(gradient)
        value.sub_(rate * gradient)
        return
    age = torch.as_tensor(time, dtype=torch.float64, device=value.device)
    age = age.reshape(-1, *[1] * (value.dim() - 1))  # f64[L, 1, ...]
    size = (rate / (1 - optimizer.beta1**age)).float()
    root = (1 - optimizer.beta2**age).sqrt().float()
    mean = moments[0].mul_(optimizer.beta1).add_(gradient, alpha=1 - optimizer.beta1)
    square = moments[1].mul_(optimizer.beta2).addcmul_(gradient, gradient, value=1 - optimizer.beta2)
    value.sub_(size * mean / (square.sqrt() / root + optimizer.epsilon))


def _step_sizes(optimizer: Adam, rate: float, time: int) -> NDArray[np.float32]:
    """lr / (1 - b1^t), 1 / sqrt(1 - b2^t), epsilon."""
    first, second = 1 - optimizer.beta1**time, 1 - optimizer.beta2**time
    return np.array([rate / first, 1 / sqrt(second), optimizer.epsilon], np.float32)


class IdleMoves:
    """How far Adam moves a row in steps without a gradient, as a closed form.

    A row has moments m and v after its last step s. In the idle step s + k Adam moves it by

        lr b1^k m / (1 - b1^(s+k)) / (sqrt(b2^k v / (1 - b2^(s+k))) + eps)  =  c_k m / (sqrt(v) + e_k)

    with c_k = lr (b1 / sqrt(b2))^k sqrt(1 - b2^(s+k)) / (1 - b1^(s+k)) and e_k = eps sqrt(1 - b2^(s+k)) / b2^(k/2).
    Over all idle steps that is, with e the mean of e_k weighted by c_k and q = 1 / (sqrt(v) + e), to second order

        m q (sum c_k + q^2 sum c_k (e_k - e)^2).

    Numbers with a second moment so small that the third order could matter (1e-4 of the move) are stepped one by one.
    """

    _FLOOR = 16.0  # sqrt(v) is at least this many times the spread of e_k: a relative error below (1 / 16)^3 / 2

    def __init__(self, optimizer: Adam, rate: float, steps: int) -> None:
        """Tables for up to `steps` steps of a visit."""
        self.optimizer, self.rate, self.step = optimizer, rate, 0
        time = np.arange(steps + 1, dtype=np.float64)
        self._root = np.sqrt(1 - optimizer.beta2**time)
        with np.errstate(divide="ignore", invalid="ignore"):
            self._size = rate / (1 - optimizer.beta1**time)
        ratio = optimizer.beta1 / sqrt(optimizer.beta2) if optimizer.beta2 else 0.0
        self._ratio = ratio**time
        self._reach = steps if ratio >= 1 else int(np.count_nonzero(self._ratio > 1e-12)) + 1  # then c_k has vanished
        with np.errstate(divide="ignore"):
            self._fade = optimizer.epsilon * np.float64(optimizer.beta2) ** (-time / 2)
        self.decay = np.stack([optimizer.beta1**time, optimizer.beta2**time]).astype(np.float32)
        self.step_sizes = np.stack([self._size, self._root]).astype(np.float32)
        self._sums = np.zeros((5, steps + 1))  # by s: of c_k, c_k e_k, c_k e_k^2; the smallest and the largest e_k
        self._sums[3] = np.inf
        self.moves = np.zeros((4, steps + 1), np.float32)  # by s: sum c_k, e, sum c_k (e_k - e)^2, floor of v

    def advance(self) -> None:
        """One more step is over."""
        self.step += 1
        kernels.idle_moves(
            self.step,
            self._reach,
            self._size,
            self._root,
            self._ratio,
            self._fade,
            self._FLOOR,
            self._sums,
            self.moves,
        )


class DirectRows:
    """A flat table of item rows under plain SGD, which moves only rows that have a gradient."""

    def __init__(self, value: Tensor, rate: float) -> None:
        """`value` is f32[N, *shape] and is changed in place."""
        self.value, self._rate = value, rate

    def read(self, row: NDArray[np.int64]) -> Tensor:
        """Rows as they are, i64[A, B] -> f32[A, B, *shape]."""
        flat = torch.from_numpy(row.reshape(-1)).to(self.value.device)
        return self.value.index_select(0, flat).view(*row.shape, *self.value.shape[1:])

    def step(self, row: NDArray[np.int64], gradient: Tensor) -> None:
        """One step, i64[A, B] and f32[A, B, *shape]; the gradients of a row that occurs twice add."""
        flat = torch.from_numpy(row.reshape(-1)).to(self.value.device)
        self.value.index_add_(0, flat, gradient.reshape(len(flat), *self.value.shape[1:]), alpha=-self._rate)

    def settle(self, rows: slice) -> None:
        """There is nothing to make up for."""


class LazyRows:
    """A flat table of item rows under a fresh Adam without decay, on the CPU; rows are brought up to date when read."""

    def __init__(self, value: Tensor, moves: IdleMoves) -> None:
        """Starts from a copy of `value`, f32[N, *shape]."""
        self._shape = value.shape[1:]
        table = torch.zeros(len(value), 3, max(1, value[:1].numel()))  # a row and its moments lie side by side
        self.value = table[:, 0].view(value.shape)
        self.value.copy_(value)
        self._table = table.numpy()
        self._last = np.zeros(len(value), np.int64)
        self._first = np.zeros(len(value), np.int64)
        self._moves = moves
        self._out = torch.empty(0)

    def read(self, row: NDArray[np.int64]) -> Tensor:
        """Rows as they are after the steps so far, i64[A, B] -> f32[A, B, *shape]; valid until the next call."""
        if self._out.shape[:2] != row.shape:  # torch's memory is aligned: products depend on it in their last bits
            self._out = torch.empty(*row.shape, *self._shape)
            self._out_rows = self._out.view(row.size, -1).numpy()
        moves = self._moves
        kernels.settle_and_read(
            self._table,
            self._last,
            row.reshape(-1),
            moves.step,
            moves.moves,
            moves.decay,
            moves.step_sizes,
            moves.optimizer.epsilon,
            self._out_rows,
        )
        return self._out

    def step(self, row: NDArray[np.int64], gradient: Tensor) -> None:
        """One step of rows that were just read, before `advance`; gradients of a row that occurs twice add, in place."""
        moves, optimizer = self._moves, self._moves.optimizer
        now = moves.step + 1
        kernels.adam_rows(
            self._table,
            self._last,
            self._first,
            row.reshape(-1),
            gradient.reshape(row.size, -1).numpy(),
            now,
            _step_sizes(optimizer, moves.rate, now),
            optimizer.beta1,
            optimizer.beta2,
        )

    def settle(self, rows: slice) -> None:
        """Bring a stretch of rows up to date; their client is done."""
        if rows.stop > rows.start:
            self.read(np.arange(rows.start, rows.stop)[:, None])
