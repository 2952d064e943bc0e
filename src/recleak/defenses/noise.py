"""Noise on uploads: the mechanisms of local differential privacy.

Noise alone guarantees nothing: the change of an upload must be bounded first (`ClipByNorm` before it in a chain). Nor
does noise in floating-point numbers meet the theorem to the letter: the gaps between representable sums betray the
noiseless value to an adversary who sees every bit (Mironov 2012, "On significance of the least significant bits for
differential privacy"). These mechanisms measure the effect of noise; they do not round it to a safe grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import ClassVar, Literal, get_args

from torch import Tensor

from recleak.defenses.base import Defense
from recleak.defenses.spending import Noise, Spending
from recleak.streams import Streams
from recleak.update import Update

Rows = Literal["touched", "all"]
Scale = float | Mapping[str, float]  # one for all components, or by component; those not named get no noise


class _AdditiveNoise(Defense):
    """Independent noise on every coordinate of an upload; subclasses say how much and of which law."""

    rows: Rows
    spread: ClassVar[float] = 1.0  # the standard deviation at scale 1

    def upload(self, update: Update, streams: Streams) -> Update:
        """The upload plus noise."""
        if self.rows == "all" and any(_of(self._scale(), name) > 0 for name in update.rows):
            update = update.with_all_rows()

        def add(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
            scale = _of(self._scale(), name)
            return tensor + scale * self._draw(update, name, streams).to(tensor.dtype) if scale > 0 else tensor

        return update.map(add)

    def noise(self, component: str) -> float:
        """As its law has it."""
        return self.spread * _of(self._scale(), component)

    def component_names(self) -> Iterable[str]:
        """The components that it adds noise to, if only some."""
        scale = self._scale()
        return tuple(scale) if isinstance(scale, Mapping) else ()

    def __post_init__(self) -> None:
        if self.rows not in get_args(Rows):
            raise ValueError(f"Got rows={self.rows!r}, expected one of {', '.join(get_args(Rows))}.")
        scale = self._scale()
        for name, value in scale.items() if isinstance(scale, Mapping) else [("all components", scale)]:
            if not (isfinite(value) and value >= 0):
                raise ValueError(
                    f"Got a noise scale of {value} for {name}, expected a finite number of at least 0 (0: no noise)."
                )

    def _scale(self) -> Scale:
        raise NotImplementedError

    def _draw(self, update: Update, name: str, streams: Streams) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class GaussianNoise(_AdditiveNoise):
    """Add N(0, std^2) to every coordinate of an upload; std 0 leaves it unchanged.

    `std` is a number for all components or a mapping from component names; components that are not named get none.

    rows "touched": noise on the rows that are sent anyway, as published codes of local differential privacy do.
    **This gives no guarantee**: which rows are sent tells which items the client trained on, whatever the noise.
    rows "all": noise on every row of the item table, so all clients send the same rows; needs memory [C, I, d].
    An item's row gets the same noise in both.
    """

    std: Scale
    rows: Rows = "touched"

    def _scale(self) -> Scale:
        return self.std

    def spends(self) -> tuple[Spending, ...]:
        """Gaussian noise; what that is worth depends on the bound before it."""
        return (Noise(repr(self), "gaussian", self.std, self.rows == "all"),)

    def _draw(self, update: Update, name: str, streams: Streams) -> Tensor:
        return streams.normal_like(update, name)


@dataclass(frozen=True)
class LaplaceNoise(_AdditiveNoise):
    """Add Laplace(0, scale), whose standard deviation is sqrt(2) scale, to every coordinate of an upload.

    `scale` and `rows` are as in `GaussianNoise`; noise on touched rows only gives no guarantee here either. The
    guarantee of Laplace noise is for updates bounded in the l1 norm; an l2 bound B bounds it by sqrt(size) B only.
    """

    scale: Scale
    rows: Rows = "touched"

    spread: ClassVar[float] = sqrt(2)

    def _scale(self) -> Scale:
        return self.scale

    def spends(self) -> tuple[Spending, ...]:
        """Laplace noise; what that is worth depends on the bound before it."""
        return (Noise(repr(self), "laplace", self.scale, self.rows == "all"),)

    def _draw(self, update: Update, name: str, streams: Streams) -> Tensor:
        return streams.laplace_like(update, name)


def _of(scale: Scale, name: str) -> float:
    return scale.get(name, 0.0) if isinstance(scale, Mapping) else scale
