"""Local optimizers over cohorts: SGD and Adam, for tensors with a client axis and for flat tables of item rows.

A row that is not in a batch has no gradient, yet Adam moves it on: its moments fade, but they are not zero. To step
all rows of a client at every step costs ten times what the batch needs, so on the CPU the idle steps of a row are made
up for when it is next read (`IdleMoves`). With weight decay, momentum, moments that outlive a visit, summed gradients,
or a gradient on every row, all rows of the active clients are stepped at every step.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, log, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import kernels_adam
from recleak.errors import ConfigError
from recleak.models.base import Params
from recleak.models.components import require_names


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
    """Adam (Kingma and Ba 2015, Algorithm 1), weight decay as L2 in the gradient (as `torch.optim.Adam`).

    `accumulate` repeats a common bug of training code, a forgotten `optimizer.zero_grad()`: step s uses the sum of the
    gradients of steps 1 to s of the visit, after the hooks, for every parameter. A proximal term is part of them,
    weight decay is added anew at each step. An item row that was in a batch once is driven by it until the visit ends.
    """

    learning_rate: float = 0.001
    learning_rates: Mapping[str, float] = field(default_factory=dict)  # by component, where it differs
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    keep: bool = False  # moments and step count outlive the visit; else each visit starts afresh
    accumulate: bool = False  # gradients are summed over the steps of a visit; only to repeat code that does so

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
    if isinstance(optimizer, Adam) and optimizer.accumulate and optimizer.keep:
        raise ConfigError(
            "accumulate is True with keep=True, expected one of them: summed gradients do not outlive a visit."
        )


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

    def step(self, gradients: Params, time: int | Tensor, names: Container[str] | None = None) -> None:
        """One step; `time` counts steps from 1, for all or for each entry of the leading axis; of `names` only."""
        optimizer = self._optimizer
        for name, value in self._values.items():
            if names is not None and name not in names:
                continue
            rate = self._rates[name]
            if name in self._flat and isinstance(optimizer, Adam) and isinstance(time, int):
                kernels_adam.adam_numbers(
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


@dataclass(frozen=True, eq=False)
class IdleMoves:
    """How far Adam moves a row in steps without a gradient, as a closed form.

    A row has moments m and v after its last step s. In the idle step s + k Adam moves it by

        lr b1^k m / (1 - b1^(s+k)) / (sqrt(b2^k v / (1 - b2^(s+k))) + eps)  =  c_k m / (sqrt(v) + e_k)

    with c_k = lr (b1 / sqrt(b2))^k sqrt(1 - b2^(s+k)) / (1 - b1^(s+k)) and e_k = eps sqrt(1 - b2^(s+k)) / b2^(k/2).
    Over all idle steps that is, with e the mean of e_k weighted by c_k and q = 1 / (sqrt(v) + e), to second order

        m q (sum c_k + q^2 sum c_k (e_k - e)^2).

    Numbers with a second moment so small that the third order could matter (1e-4 of the move) are stepped one by one.
    After W idle steps c_k has vanished and nothing moves any more.
    """

    moves: NDArray[np.float32]  # f32[S + 1, W, 4]: sum c_k, e, sum c_k (e_k - e)^2, floor of v; by s and idle steps - 1
    decay: NDArray[np.float32]  # f32[2, S + 1]: powers of b1 and b2
    sizes: NDArray[np.float32]  # f32[2, S + 1]: lr / (1 - b1^t) and 1 / sqrt(1 - b2^t); by t, from 1


_FLOOR = 8.0  # sqrt(v) is at least this many times the spread of e_k: a relative error below (1 / 16)^3
_VANISHED = 1e-10  # c_k below this share of c_0 moves no float32 any more


def reach(optimizer: Adam, steps: int) -> int:
    """W: after how many idle steps a row has come to rest; at most the steps of the visit."""
    ratio = optimizer.beta1 / sqrt(optimizer.beta2)
    if ratio >= 1:
        return steps
    return max(1, min(steps, 1 if ratio == 0 else ceil(log(_VANISHED) / log(ratio))))


def idle_moves(optimizer: Adam, rate: float, steps: int) -> IdleMoves:
    """The table for a visit of up to `steps` steps; the same for all clients, so it is made once."""
    rounded = 1 << max(5, (steps - 1).bit_length())
    return _idle_moves(optimizer.beta1, optimizer.beta2, optimizer.epsilon, rate, rounded, reach(optimizer, rounded))


@lru_cache(maxsize=4)
def _idle_moves(beta1: float, beta2: float, epsilon: float, rate: float, steps: int, width: int) -> IdleMoves:
    time = np.arange(steps + 1, dtype=np.float64)
    root = np.sqrt(1 - beta2**time)
    size = np.zeros(steps + 1)
    size[1:] = rate / (1 - beta1 ** time[1:])
    k = np.arange(1, width + 1)
    moves = np.empty((steps + 1, width, 4), np.float32)
    for low in range(0, steps + 1, 256):  # blocks of s, to bound the working memory
        later = np.minimum(np.arange(low, min(low + 256, steps + 1))[:, None] + k, steps)  # i64[256, W]: s + k
        c = size[later] * root[later] * (beta1 / sqrt(beta2)) ** k
        e = epsilon * root[later] * beta2 ** (-k / 2)
        total, shifted, squared = (np.cumsum(c * e**power, axis=1) for power in range(3))
        mean = np.divide(shifted, total, out=e.copy(), where=total > 0)
        spread = np.maximum.accumulate(e, axis=1) - np.minimum.accumulate(e, axis=1)
        block = (total, mean, squared - mean * shifted, np.square(_FLOOR * spread))
        moves[low : low + 256] = np.minimum(np.stack(block, axis=2), np.finfo(np.float32).max)
    decay, sizes = np.stack([beta1**time, beta2**time]), np.stack([size, np.append(0, 1 / root[1:])])
    return IdleMoves(moves, decay.astype(np.float32), sizes.astype(np.float32))


class DirectRows:
    """A flat table of item rows under plain SGD, which moves only rows that have a gradient."""

    def __init__(self, value: Tensor, rate: float) -> None:
        """`value` is f32[N, *shape] and is changed in place."""
        self.value, self._rate = value, rate

    def read(self, row: NDArray[np.int64], step: int) -> Tensor:
        """Rows as they are, i64[A, B] -> f32[A, B, *shape]."""
        flat = torch.from_numpy(row.reshape(-1)).to(self.value.device)
        return self.value.index_select(0, flat).view(*row.shape, *self.value.shape[1:])

    def step(self, row: NDArray[np.int64], gradient: Tensor, step: int) -> None:
        """One step, i64[A, B] and f32[A, B, *shape]; the gradients of a row that occurs twice add."""
        flat = torch.from_numpy(row.reshape(-1)).to(self.value.device)
        self.value.index_add_(0, flat, gradient.reshape(len(flat), *self.value.shape[1:]), alpha=-self._rate)

    def settle(self, rows: slice, step: int) -> None:
        """There is nothing to make up for."""


class LazyRows:
    """A flat table of item rows under a fresh Adam without decay, on the CPU; rows are brought up to date when read."""

    def __init__(self, value: Tensor, optimizer: Adam, rate: float, moves: IdleMoves) -> None:
        """Starts from a copy of `value`, f32[N, *shape]."""
        self._shape = value.shape[1:]
        table = torch.empty(len(value), 3, max(1, value[:1].numel()))  # a row and its moments lie side by side
        self.value = table[:, 0].view(value.shape)
        self.value.copy_(value)
        self.table = table.numpy()
        self.last = np.full(len(value), -1)  # never read: the moments are zero, and are written when it is
        self.first = np.zeros(len(value), np.int64)
        self.optimizer, self.rate, self.moves = optimizer, rate, moves

    def read(self, row: NDArray[np.int64], step: int) -> Tensor:
        """Rows as they are after `step` steps, i64[A, B] -> f32[A, B, *shape]."""
        out = torch.empty(*row.shape, *self._shape)  # torch's memory is aligned: products depend on it in the last bits
        kernels_adam.settle_and_read(
            self.table,
            self.last,
            row.reshape(-1),
            step,
            self.moves.moves,
            self.moves.decay,
            self.moves.sizes,
            self.optimizer.epsilon,
            out.view(row.size, -1).numpy(),
        )
        return out

    def step(self, row: NDArray[np.int64], gradient: Tensor, step: int) -> None:
        """Step number `step`, from 1, of rows that were just read; gradients of a row that occurs twice add."""
        kernels_adam.adam_rows(
            self.table,
            self.last,
            self.first,
            row.reshape(-1),
            gradient.reshape(row.size, -1).clone(memory_format=torch.contiguous_format).numpy(),  # it is changed
            step,
            _step_sizes(self.optimizer, self.rate, step),
            self.optimizer.beta1,
            self.optimizer.beta2,
        )

    def settle(self, rows: slice, step: int) -> None:
        """Bring a stretch of rows up to date; their client is done."""
        if rows.stop > rows.start:
            self.read(np.arange(rows.start, rows.stop)[:, None], step)
