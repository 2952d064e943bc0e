"""Components: the named parts of a model's parameters. Sharing, noise, attacks and reports all speak of these names.

storage `per_user`: a table whose row belongs to one client; `per_item`: a table with a row per item; `dense`: the rest.
role `user`, `item` or `head` (with a layer, counted from 1). A **shared** component is sent, averaged and broadcast; a
**kept** one is the client's own copy and stays with it. A shared `per_user` table that is not **averaged** is sent too,
but its client goes on with its own row: who receives a row sees it, and does nothing with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from recleak import random
from recleak.errors import ConfigError, unknown_name

Storage = Literal["per_user", "per_item", "dense"]
Role = Literal["user", "item", "head"]


class Init(Protocol):
    """How a component starts: a function of the seed, its name, the row and the place in the row."""

    def draw(
        self, seed: int, name: str, rows: NDArray[np.int64], shape: tuple[int, ...], fans: tuple[int, int]
    ) -> Tensor:
        """f32[R, *shape] for the given rows (users or items; a dense component has the single row 0).

        `fans` are the (incoming, outgoing) connections of one unit, for initializers that scale by them.
        """
        ...


@dataclass(frozen=True)
class Normal:
    """N(mean, std^2)."""

    std: float = 1.0
    mean: float = 0.0

    def draw(
        self, seed: int, name: str, rows: NDArray[np.int64], shape: tuple[int, ...], fans: tuple[int, int]
    ) -> Tensor:
        """Independent draws."""
        values = self.mean + self.std * random.normal(seed, f"init {name}", rows[:, None], _places(shape))
        return _tensor(values, shape)


@dataclass(frozen=True)
class Uniform:
    """U(-bound, bound)."""

    bound: float = 0.05

    def draw(
        self, seed: int, name: str, rows: NDArray[np.int64], shape: tuple[int, ...], fans: tuple[int, int]
    ) -> Tensor:
        """Independent draws."""
        values = self.bound * (2 * random.uniform(seed, f"init {name}", rows[:, None], _places(shape)) - 1)
        return _tensor(values, shape)


@dataclass(frozen=True)
class Constant:
    """The same number everywhere."""

    value: float = 0.0

    def draw(
        self, seed: int, name: str, rows: NDArray[np.int64], shape: tuple[int, ...], fans: tuple[int, int]
    ) -> Tensor:
        """Nothing is drawn."""
        return torch.full((len(rows), *shape), self.value)


@dataclass(frozen=True)
class Xavier:
    """Variance 2 / (fan in + fan out), normal or uniform (Glorot and Bengio 2010)."""

    kind: Literal["normal", "uniform"] = "normal"

    def draw(
        self, seed: int, name: str, rows: NDArray[np.int64], shape: tuple[int, ...], fans: tuple[int, int]
    ) -> Tensor:
        """Independent draws."""
        std = sqrt(2 / sum(fans))
        init = Normal(std) if self.kind == "normal" else Uniform(sqrt(3) * std)
        return init.draw(seed, name, rows, shape, fans)


@dataclass(frozen=True)
class FanIn:
    """U(-s, s) with s = sqrt(gain / fan in): torch's `nn.Linear` has gain 1, LeCun uniform has gain 3."""

    gain: float = 1.0

    def draw(
        self, seed: int, name: str, rows: NDArray[np.int64], shape: tuple[int, ...], fans: tuple[int, int]
    ) -> Tensor:
        """Independent draws."""
        return Uniform(sqrt(self.gain / fans[0])).draw(seed, name, rows, shape, fans)


@dataclass(frozen=True, eq=False)
class Given:
    """Values that exist already, f32[R, *shape]: row r starts as a copy of `values[r]`."""

    values: Tensor

    def draw(
        self, seed: int, name: str, rows: NDArray[np.int64], shape: tuple[int, ...], fans: tuple[int, int]
    ) -> Tensor:
        """Copies of the rows."""
        return self.values[torch.from_numpy(rows)].clone()


@dataclass(frozen=True)
class Component:
    """One named part of a model's parameters."""

    name: str
    storage: Storage
    role: Role
    shape: tuple[int, ...]  # of one row (per_user, per_item) or of the whole (dense)
    init: Init = Normal()
    layer: int | None = None  # of a head, counted from 1
    shared: bool = True
    fans: tuple[int, int] | None = None  # None: from the shape
    averaged: bool = True  # if shared; only the row of a user is sent without being averaged

    @property
    def stays(self) -> bool:
        """Whether the client's own copy is what counts for it: of what it keeps, and of what is sent but not averaged.

        What noise an upload gets is in what others have of it, not in what the client goes on with.
        """
        return not (self.shared and self.averaged)

    @property
    def size(self) -> int:
        """How many numbers one row holds."""
        return prod(self.shape)

    def draw(self, seed: int, rows: ArrayLike = 0) -> Tensor:
        """The first values of some rows, f32[R, *shape]: a function of (seed, name, row) only."""
        fan_out = self.shape[-1] if self.shape else 1
        fans = self.fans or (prod(self.shape[:-1]) if len(self.shape) > 1 else fan_out, fan_out)
        return self.init.draw(seed, self.name, np.atleast_1d(np.asarray(rows, np.int64)), self.shape, fans)


def by_name(components: Iterable[Component]) -> dict[str, Component]:
    """A dictionary of components; names must differ."""
    named: dict[str, Component] = {}
    for component in components:
        if "/" in component.name:
            raise ConfigError(f"A component is called {component.name!r}, expected a name without '/'.")
        if min(component.shape, default=1) < 1:
            raise ConfigError(f"The component {component.name!r} has shape {component.shape}, expected positive sizes.")
        if not component.averaged and component.storage != "per_user":
            raise ConfigError(
                f"The component {component.name!r} is {component.storage} and not averaged, expected per_user: a row "
                "that belongs to one client.\n  What all clients train must be averaged, or kept."
            )
        if component.name in named:
            raise ConfigError(f"Got two components called {component.name!r}, expected different names.")
        named[component.name] = component
    return named


def sharing(components: Iterable[Component], shared: Mapping[str, bool]) -> tuple[Component, ...]:
    """The same components with another sharing policy for those named; an unknown name is an error."""
    components = tuple(components)
    require_names("component", shared, by_name(components))
    return tuple(replace(part, shared=shared.get(part.name, part.shared)) for part in components)


def public_part(component: Component) -> Component:
    """The component as others know it: of a table of users that exists already, how far it spreads, and no row."""
    if component.storage != "per_user" or not isinstance(component.init, Given):
        return component
    spread = component.init.values.double()
    return replace(component, init=Normal(float(spread.std(correction=0)), float(spread.mean())))


def require_names(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """An error for the first name that is not known."""
    known = set(known)
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)


def _places(shape: tuple[int, ...]) -> NDArray[np.int64]:
    return np.arange(prod(shape))


def _tensor(values: NDArray[np.float64], shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).reshape(len(values), *shape)
