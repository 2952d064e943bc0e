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


def step_(
    optimizer: Optimizer,
    rate: float,
    value: Tensor,
    gradient: Tensor,
    moments: list[Tensor],
    time: int | Tensor,
) -> None:
    """One step in place on a tensor with a leading axis; `time` counts steps from 1, for all or for each entry."""
    if isinstance(optimizer, SGD):
        if optimizer.weight_decay:
            gradient = gradient + optimizer.weight_decay * value
        if optimizer.momentum:
            gradient = moments[0].mul_(optimizer.momentum).add_(gradient)
        value.sub_(rate * gradient)
    elif isinstance(time, int):
        if value.numel():
            _fused_adam(optimizer, rate, [value], [gradient], [moments[0]], [moments[1]], time)
    else:
        if optimizer.weight_decay:
            gradient = gradient + optimizer.weight_decay * value
        age = time.to(torch.float64).reshape(-1, *[1] * (value.dim() - 1))  # f64[L, 1, ...]
        size = (rate / (1 - optimizer.beta1**age)).float()
        root = (1 - optimizer.beta2**age).sqrt().float()
        mean = moments[0].mul_(optimizer.beta1).add_(gradient, alpha=1 - optimizer.beta1)
        square = moments[1].mul_(optimizer.beta2).addcmul_(gradient, gradient, value=1 - optimizer.beta2)
        value.sub_(size * mean / (square.sqrt() / root + optimizer.epsilon))


def adam_all_(
    optimizer: Adam,
    rates: list[float],
    values: list[Tensor],
    gradients: list[Tensor],
    moments: list[list[Tensor]],
    time: int,
) -> None:
    """The same step of Adam on several tensors at once, at equal times; one call per learning rate."""
    for rate in sorted(set(rates)):
        mine = [i for i, r in enumerate(rates) if r == rate]
        _fused_adam(
            optimizer,
            rate,
            [values[i] for i in mine],
            [gradients[i] for i in mine],
            [moments[i][0] for i in mine],
            [moments[i][1] for i in mine],
            time,
        )


def _fused_adam(
    optimizer: Adam,
    rate: float,
    values: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    time: int,
) -> None:
    clock = torch.full((), float(time), device=values[0].device)
    torch._fused_adam_(
        values,
        gradients,
        means,
        squares,
        [],
        [clock] * len(values),
        lr=rate,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        weight_decay=optimizer.weight_decay,
        eps=optimizer.epsilon,
        amsgrad=False,
        maximize=False,
    )


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
        self.optimizer, self.rate, self.steps = optimizer, rate, steps
        time = np.arange(steps + 1, dtype=np.float64)
        self._root = np.sqrt(1 - optimizer.beta2**time)  # sqrt(1 - b2^t)
        with np.errstate(divide="ignore"):
            self._size = rate / (1 - optimizer.beta1**time)
        ratio = optimizer.beta1 / sqrt(optimizer.beta2) if optimizer.beta2 else 0.0
        self._ratio = ratio**time
        self._reach = steps if ratio >= 1 else int(np.count_nonzero(self._ratio > 1e-12)) + 1  # then c_k has vanished
        self._fade = optimizer.beta2 ** (-time / 2)
        self.decay = np.stack([optimizer.beta1**time, optimizer.beta2**time]).astype(np.float32)
        self.step_sizes = np.stack([self._size, self._root]).astype(np.float32)
        self._sum = np.zeros(steps + 1)  # of c_k, by the step s after which the row is up to date
        self._shifted = np.zeros(steps + 1)  # of c_k e_k
        self._squared = np.zeros(steps + 1)  # of c_k e_k^2
        self._low = np.full(steps + 1, np.inf)  # the smallest and the largest e_k
        self._high = np.zeros(steps + 1)
        self.moves = np.zeros((4, steps + 1), np.float32)  # sum c_k, e, sum c_k (e_k - e)^2, floor of v; by s
        self.step = 0

    def advance(self) -> None:
        """One more step is over."""
        self.step += 1
        now = self.step
        since = slice(max(1, now - self._reach), now)
        idle = now - np.arange(since.start, since.stop)
        size = self._size[now] * self._root[now] * self._ratio[idle]
        shift = self.optimizer.epsilon * self._root[now] * self._fade[idle]
        self._sum[since] += size
        self._shifted[since] += size * shift
        self._squared[since] += size * shift * shift
        np.minimum(self._low[since], shift, out=self._low[since])
        np.maximum(self._high[since], shift, out=self._high[since])
        mean = self._shifted[since] / self._sum[since]
        self.moves[0, since] = self._sum[since]
        self.moves[1, since] = mean
        self.moves[2, since] = self._squared[since] - mean * self._shifted[since]
        self.moves[3, since] = np.square(self._FLOOR * (self._high[since] - self._low[since]))


class DirectRows:
    """A flat table of item rows under plain SGD, which moves only rows that have a gradient."""

    def __init__(self, value: Tensor, rate: float) -> None:
        """`value` is f32[N, *shape] and is changed in place."""
        self._value, self._rate = value, rate

    def read(self, row: NDArray[np.int64]) -> Tensor:
        """Rows as they are, f32[n, *shape]."""
        return self._value.index_select(0, torch.from_numpy(row).to(self._value.device))

    def step(self, row: NDArray[np.int64], gradient: Tensor) -> None:
        """One step; the gradients of a row that occurs twice add."""
        self._value.index_add_(0, torch.from_numpy(row).to(self._value.device), gradient, alpha=-self._rate)

    def settle(self, rows: slice) -> None:
        """There is nothing to make up for."""


class LazyRows:
    """A flat table of item rows under a fresh Adam without decay, on the CPU; rows are brought up to date when read."""

    def __init__(self, value: Tensor, moves: IdleMoves) -> None:
        """`value` is f32[N, *shape] and is changed in place."""
        self._shape = value.shape[1:]
        self._value = value.view(len(value), -1).numpy()
        self._mean = np.zeros_like(self._value)
        self._square = np.zeros_like(self._value)
        self._last = np.zeros(len(value), np.int64)
        self._first = np.zeros(len(value), np.int64)
        self._moves = moves

    def read(self, row: NDArray[np.int64]) -> Tensor:
        """Rows as they are after the steps so far, f32[n, *shape]."""
        out = np.empty((len(row), self._value.shape[1]), np.float32)
        moves = self._moves
        kernels.settle_and_read(
            self._value,
            self._mean,
            self._square,
            self._last,
            row,
            moves.step,
            moves.moves,
            moves.decay,
            moves.step_sizes,
            moves.optimizer.epsilon,
            out,
        )
        return torch.from_numpy(out).view(len(row), *self._shape)

    def step(self, row: NDArray[np.int64], gradient: Tensor) -> None:
        """One step of rows that were just read; the gradients of a row that occurs twice add. Before `advance`."""
        moves, optimizer = self._moves, self._moves.optimizer
        now = moves.step + 1
        rate = np.array(
            [moves.rate / (1 - optimizer.beta1**now), 1 / sqrt(1 - optimizer.beta2**now), optimizer.epsilon], np.float32
        )
        kernels.adam_rows(
            self._value,
            self._mean,
            self._square,
            self._last,
            self._first,
            row,
            gradient.view(len(row), -1).numpy(),
            now,
            rate,
            optimizer.beta1,
            optimizer.beta2,
        )

    def settle(self, rows: slice) -> None:
        """Bring a stretch of rows up to date; their client is done."""
        self.read(np.arange(rows.start, rows.stop))
