"""Noise on the parameters themselves, clipped number by number: APM, and the uniform noise it is compared with.

Zhang et al., "Comprehensive Privacy Analysis on Federated Recommender System against Attribute Inference Attacks",
section 4. Other mechanisms here act on what a client changed; these act on what it would have after the change, which
the receiver learns by adding what it sent out.

What is said in `defenses.noise` of floating-point numbers holds here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from types import MappingProxyType
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from recleak import kernels
from recleak.defenses.base import Defense, received
from recleak.defenses.noise import Rows
from recleak.defenses.spending import NoisyValues, Spending
from recleak.errors import ConfigError
from recleak.models.components import Component, require_names
from recleak.streams import Streams, places
from recleak.update import NodeParams, Update

Moment = Literal["epoch", "upload"]
Levels = Literal["equation", "section"]

_NUMBERS = 1 << 17  # of item rows at a time: they stay in the cache from the clip to the noise
TOP = 3.0  # the level of what resists most: there epsilon is epsilon_max
LEVELS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "equation": {"user": 0, "item": 1, "head.1": 2, "head.2": 3},  # eq. 11
        "section": {"user": 0, "head.1": 1, "head.2": 2, "item": 3},  # section 5.7
    }
)


class _NoisyValues(Defense):
    """Clip every number that a client has to [-bound, bound], then add noise; subclasses say how much of which law.

    moment "epoch": after each local epoch, so that the next one goes on from noisy parameters; "upload": once, before
    sending. rows "touched": the item rows that the client works with; "all": of every item, and all of them are sent.
    """

    bound: float
    moment: Moment
    rows: Rows
    spread: ClassVar[float] = 1.0  # the standard deviation at scale 1

    def __post_init__(self) -> None:
        if not (isfinite(self.bound) and self.bound > 0):
            raise ValueError(f"Got bound={self.bound}, expected a finite number above 0.")
        if self.moment not in get_args(Moment):
            raise ValueError(f"Got moment={self.moment!r}, expected one of {', '.join(get_args(Moment))}.")
        if self.rows not in get_args(Rows):
            raise ValueError(f"Got rows={self.rows!r}, expected one of {', '.join(get_args(Rows))}.")

    @property
    def every_row(self) -> bool:
        """Rows that nothing trains are clipped and get noise after each epoch too."""
        return self.moment == "epoch" and self.rows == "all"

    @property
    def idle(self) -> frozenset[str]:
        """It acts at one moment only."""
        return frozenset({"epoch", "upload"} - {self.moment})

    def epoch(self, moved: Update, streams: Streams) -> Update:
        """Clipped and noisy, if that is its moment."""
        return self._perturbed(moved, streams) if self.moment == "epoch" else moved

    def upload(self, update: Update, streams: Streams) -> Update:
        """Clipped and noisy, if that is its moment."""
        if self.moment != "upload":
            return update
        return self._perturbed(update.with_all_rows() if self.rows == "all" else update, streams)

    def scale(self, component: str) -> float:
        """The scale of the noise on a component."""
        raise NotImplementedError

    def noise(self, component: str) -> float:
        """Of the last time, which alone is never clipped."""
        return self.spread * self.scale(component)

    def shift(self, component: str, received: Tensor) -> Tensor:
        """clip(received) - received: a number beyond the bound moves to it, whether a client trained on it or not."""
        return received.clamp(-self.bound, self.bound).sub_(received)

    def _add_noise(self, value: Tensor, name: str, streams: Streams, position: Tensor, row: Tensor) -> None:
        """In place, to the rows of a component: `position` and `row` as in `Streams.uniform`."""
        raise NotImplementedError

    def _perturbed(self, moved: Update, streams: Streams) -> Update:
        """clip(received + moved) + noise - received. A NaN stays one, so that training that diverged is noticed."""

        def perturb(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
            noisy, (position, row) = torch.empty_like(tensor), places(moved, name)
            together = len(tensor) if owner is None else _NUMBERS // max(1, tensor[:1].numel())
            for first in range(0, len(tensor), max(1, together)):
                some = slice(first, first + max(1, together))
                self._clip(moved, name, tensor[some], some, noisy[some])
                self._add_noise(noisy[some], name, streams, position[some], row[some])
            return noisy

        return moved.map(perturb)

    def _clip(self, moved: Update, name: str, tensor: Tensor, some: slice, out: Tensor) -> None:
        """clip(received + moved) - received, of some rows of a table of items or of all that a component has."""
        if name in moved.rows and name in moved.received and not isinstance(moved.received, NodeParams):
            tables = (moved.received[name], tensor, out)
            if all(each.is_contiguous() and each.device.type == "cpu" for each in tables):
                start, change, clipped = (each.detach().numpy().reshape(len(each), -1) for each in tables)
                kernels.clip_rows(start, change, clipped, moved.item[some].numpy(), self.bound)
                return
        first = received(moved, name, some)
        torch.add(tensor, first, out=out).clamp_(-self.bound, self.bound).sub_(first)


@dataclass(frozen=True)
class AdaptiveNoise(_NoisyValues):
    """APM (Algorithm 2): clip to [-bound, bound], then add Laplace noise of scale 2 bound / epsilon_i, where

        epsilon_i = epsilon_min + (epsilon_max - epsilon_min) / 3 * level of the part.

    `levels` says how well each part of the model resists (0: badly, it gets the most noise; 3: well). "equation": as
    eq. 11 has it, user 0, item 1, first layer of the head 2, second 3. "section": as section 5.7 has it, user 0, first
    layer 1, second 2, item 3. Or a mapping, such as that of `levels_from`: a part is a component's name or the
    beginning of it up to a dot, and the longest that fits counts. Layers of a head beyond the last that is named
    (`head.1`, `head.2`, ...) have the level of that. A component that is sent and that no part fits is an error.

    Algorithm 2 acts after each local epoch (moment "epoch"); the text says that noise is added before parameters are
    sent ("upload"). With `epsilon_min == epsilon_max` the noise is uniform: FixRec-max (30), FixRec-min (60), FedNews.

    **The guarantee.** With rows "all", one number of one upload is epsilon_i-differentially private, whatever the
    client's data is: two values within the bound differ by 2 bound at most. That is the paper's claim, and all of it.
    What protects a person is the sum over all numbers of all its uploads, which the ledger has: with thousands of
    numbers at 30 to 60 each it promises nothing. Noise of earlier epochs never leaves the device and is not counted.
    With rows "touched" there is **no guarantee**: which rows are sent tells which items the client trained on.
    """

    levels: Levels | Mapping[str, float] = "equation"
    epsilon_min: float = 30.0
    epsilon_max: float = 60.0
    bound: float = 0.5
    moment: Moment = "epoch"
    rows: Rows = "all"

    spread: ClassVar[float] = sqrt(2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.epsilon_min <= self.epsilon_max or not isfinite(self.epsilon_max):
            raise ValueError(
                f"Got epsilon_min={self.epsilon_min} and epsilon_max={self.epsilon_max}, expected finite numbers "
                "above 0, the first at most the second (equal: the same noise everywhere)."
            )
        if isinstance(self.levels, str):
            require_names("levels", [self.levels], LEVELS)
        for part, level in self._levels.items():
            if not 0 <= level <= TOP:
                raise ValueError(f"Got level {level} for {part!r}, expected a number from 0 (most noise) to {TOP:g}.")

    @property
    def _levels(self) -> Mapping[str, float]:
        return LEVELS[self.levels] if isinstance(self.levels, str) else self.levels

    def level(self, component: str) -> float:
        """How well a component resists, by the longest part that fits."""
        fitting = [part for part in self._levels if _is_part(part, component)]
        if not fitting and (last := self._last_layer()) is not None and _layer(component) > _layer(last):
            fitting = [last]
        if not fitting:
            raise ConfigError(
                f"No part of {', '.join(map(repr, self._levels))} fits the component {component!r}, which is sent.\n"
                f"  Give `levels` as a mapping with a level for it, or for what it begins with."
            )
        return self._levels[max(fitting, key=len)]

    def epsilon(self, component: str) -> float:
        """What the paper claims for each number of a component."""
        return self.epsilon_min + (self.epsilon_max - self.epsilon_min) / TOP * self.level(component)

    def scale(self, component: str) -> float:
        """2 bound / epsilon (Algorithm 2)."""
        return 2 * self.bound / self.epsilon(component)

    def check_components(self, components: tuple[Component, ...]) -> None:
        """Every component that is sent has a level, and every part of a mapping is one of the model's."""
        for component in components:
            if component.shared:
                self.level(component.name)
        if not isinstance(self.levels, str):
            names = [component.name for component in components]
            known = {".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 2)}
            require_names("part of a model", self.levels, known)

    def spends(self) -> tuple[Spending, ...]:
        """Laplace noise on clipped values."""
        return (NoisyValues(repr(self), "laplace", self.bound, self.scale, self.rows == "all", self.moment == "epoch"),)

    def _add_noise(self, value: Tensor, name: str, streams: Streams, position: Tensor, row: Tensor) -> None:
        streams.add_laplace(value, self.scale(name), name, position, row)

    def _last_layer(self) -> str | None:
        """The part that is the last layer of a head, if parts have layers."""
        layers = [part for part in self._levels if part.startswith("head.") and _layer(part)]
        return max(layers, key=_layer, default=None)


@dataclass(frozen=True)
class BoundedGaussian(_NoisyValues):
    """Clip to [-bound, bound], then add N(0, std^2): FedRec-GN, the Gaussian baseline of APM; std 0 only clips.

    Moments, rows and the guarantee are as in `AdaptiveNoise`, with the l2 norm in place of a sum: n numbers of two
    clients are 2 bound sqrt(n) apart at most.
    """

    std: float
    bound: float = 0.5
    moment: Moment = "epoch"
    rows: Rows = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isfinite(self.std) and self.std >= 0):
            raise ValueError(f"Got std={self.std}, expected a finite number of at least 0 (0: no noise).")

    def scale(self, component: str) -> float:
        """The same everywhere."""
        return self.std

    def spends(self) -> tuple[Spending, ...]:
        """Gaussian noise on clipped values."""
        return (
            NoisyValues(repr(self), "gaussian", self.bound, self.scale, self.rows == "all", self.moment == "epoch"),
        )

    def _add_noise(self, value: Tensor, name: str, streams: Streams, position: Tensor, row: Tensor) -> None:
        streams.add_normal(value, self.scale(name), name, position, row)


def levels_from(leak: Mapping[str, float]) -> dict[str, float]:
    """Levels for `AdaptiveNoise` from what each part was measured to leak, such as an attack's AUC minus 0.5.

    APM sets its resistance function by hand (eq. 11); this is the same by measurement. The part that leaks most has
    level 0, the one that leaks least has level 3, and in between the level is linear in the leak:

        level = 3 (most - leak) / (most - least).

    A leak below 0 counts as 0. Where all leak alike, all have level 0. Measure it on users who are not protected by
    it: levels chosen by looking at private data tell of these data, and no ledger counts that.
    """
    wrong = {part: value for part, value in leak.items() if not isfinite(value)}
    if wrong:
        raise ValueError(f"Got a leak of {wrong}, expected finite numbers.")
    clipped = {part: max(0.0, value) for part, value in leak.items()}
    most, least = max(clipped.values(), default=0.0), min(clipped.values(), default=0.0)
    if most == least:
        return dict.fromkeys(leak, 0.0)
    return {part: TOP * ((most - value) / (most - least)) for part, value in clipped.items()}


def _is_part(part: str, component: str) -> bool:
    return component == part or component.startswith(f"{part}.")


def _layer(name: str) -> int:
    """The layer of `head.3.weight` is 3; of what is no layer, 0."""
    words = name.split(".")
    return int(words[1]) if words[0] == "head" and len(words) > 1 and words[1].isdecimal() else 0
