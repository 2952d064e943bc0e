"""Clipping: a bound on how much one client can say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from math import isfinite
from typing import Literal, get_args

import torch
from torch import Tensor

from recleak.defenses.base import Defense
from recleak.defenses.spending import Bound, Spending
from recleak.streams import Streams
from recleak.update import Update

Per = Literal["client", "component", "row", "unit"]

_SLACK = 1 - 2.0**-22  # two roundings to float32 never lift a clipped norm above the bound
_PIECE = 1 << 14  # torch splits longer sums over threads if the result is one number, and then C = 1 sums otherwise


@dataclass(frozen=True)
class ClipByNorm(Defense):
    """Scale each client's upload to an l2 norm of at most `bound`.

    per "client": one norm over all components; "component": each component by its own; "row": each item row by its
    own, and each other component by its own; "unit": each item row by its own, and each output unit of the others by
    its own, as the published code of IMIA's local differential privacy does with every row of every weight matrix.

    **What a unit is** follows from the shape and the name. f32[C, ..., o] with three axes or more has one norm per
    client and output, over all axes between: weights are [inputs, outputs] here. (Those of a `TorchModel` are the other
    way round, so there it is one norm per input.) With two axes, a bias (`bias`, or a name that ends with `.bias`) is
    clipped number by number, anything else, such as a client's own row of a table, is one unit. f32[C] is one number.

    An upload within the bound is unchanged bit for bit, a zero upload stays zero. What is not finite cannot be scaled:
    a client (component, row, unit) with a NaN or an infinite number sends zeros. The bound holds exactly, not only up
    to rounding, for bounds above 1e-30. Parameters without an axis (a global bias) are clipped like all others.
    """

    bound: float
    components: tuple[str, ...] | None = None  # None: all
    per: Per = "client"

    def __post_init__(self) -> None:
        if not (isfinite(self.bound) and self.bound > 0):
            raise ValueError(
                f"Got bound={self.bound}, expected a finite number above 0. To clip nothing, leave it out."
            )
        if self.per not in get_args(Per):
            raise ValueError(f"Got per={self.per!r}, expected one of {', '.join(get_args(Per))}.")

    def upload(self, update: Update, streams: Streams) -> Update:
        """The clipped upload."""
        clipped = set(update.names()) if self.components is None else set(self.components)
        norms = _squared_unit_norms if self.per == "unit" else lambda _, value: squared_norms(value)
        by_row = self.per in ("row", "unit")
        squared = {name: norms(name, value) for name, value in update.values.items() if name in clipped}  # f64[C, ...]
        for name, rows in update.rows.items():
            if name in clipped:
                each = squared_norms(rows)  # f64[N]
                whole = each.new_zeros(update.n_clients).index_add_(0, update.owner, each)  # f64[C]
                squared[name] = each if by_row else whole
        if self.per == "client" and squared:
            squared = dict.fromkeys(squared, reduce(torch.add, squared.values()))
        factor = {name: shrinkage(value, self.bound) for name, value in squared.items()}

        def shrink(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
            if name not in factor:
                return tensor
            return scaled(tensor, factor[name] if owner is None or by_row else factor[name][owner])

        return update.map(shrink)

    def component_names(self) -> Iterable[str]:
        """The components that it clips, if only some."""
        return self.components or ()

    def spends(self) -> tuple[Spending, ...]:
        """A bound for noise that comes after it."""
        return (Bound(repr(self), self.bound, self.per, self.components),)


def shrinkage(squared: Tensor, bound: float) -> Tensor:
    """What to multiply with, f64, for squared norms: 1 within the bound, 0 if they are not finite."""
    norm = squared.sqrt()
    factor = torch.where(norm <= bound, 1.0, bound / norm.clamp(min=bound) * _SLACK)
    return torch.where(norm.isfinite(), factor, 0.0)


def scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    """A tensor times a factor for each of its first axes; 0 where the factor is, whatever was there."""
    scale = factor.to(tensor.dtype).reshape(*factor.shape, *[1] * (tensor.dim() - factor.dim()))
    return torch.where(scale == 0, torch.zeros_like(tensor), tensor * scale)


def squared_norms(rows: Tensor) -> Tensor:
    """The squared norm of each row of [n, *shape], f64[n]: the same bits whatever the other rows are."""
    flat = rows.unsqueeze(-1).flatten(1)  # [n, size]
    total = flat.new_zeros(len(flat), dtype=torch.float64)
    for piece in torch.split(flat, _PIECE, dim=1):
        total = total + piece.double().square().sum(1)
    return total


def _squared_unit_norms(name: str, value: Tensor) -> Tensor:
    """The squared norm of each unit of [C, *shape], f64[C], or with the axes of the value, f64[C, 1, ..., o]."""
    if value.dim() > 2:
        units = value.movedim(-1, 1).flatten(0, 1).contiguous()  # [C * o, ...]; a view, for C = 1, would sum otherwise
        return squared_norms(units).reshape(len(value), *[1] * (value.dim() - 2), value.shape[-1])
    if value.dim() == 2 and name.rpartition(".")[2] == "bias":
        return value.double().square()
    return squared_norms(value)
