"""Uploads that say less about each number."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from recleak.defenses.base import Defense
from recleak.defenses.spending import Bound, NoGuarantee, Spending
from recleak.streams import Streams
from recleak.update import Update

_PIECE = 1 << 14  # torch splits longer sums over threads if the result is one number, and then C = 1 sums otherwise


@dataclass(frozen=True)
class SignOnly(Defense):
    """Send the sign of each number only, times one size per component; zeros stay zero.

    The size is `step`, the same for all clients (signSGD, Bernstein et al. 2018). With None it is the mean absolute
    value over a client's coordinates of the component, for item tables over the rows it sends: one more number per
    component leaves the device (Karimireddy et al. 2019).

    It hides how far a row moved, **and guarantees nothing**: which rows are sent stays visible, and so does the
    direction in which each moved, which is what tells a positive from a negative. Not finite numbers stay so.
    """

    step: float | None = None

    def __post_init__(self) -> None:
        if self.step is not None and not (isfinite(self.step) and self.step > 0):
            raise ValueError(
                f"Got step={self.step}, expected a finite number above 0, or None for the mean absolute value."
            )

    def spends(self) -> tuple[Spending, ...]:
        """No guarantee. A given step bounds each number; the mean absolute value never lifts a component's l2 norm."""
        if self.step is not None:
            return (Bound(repr(self), self.step, "number", keeps=False),)
        why = (
            "How far a number moved is hidden, but nothing is random: which items are touched shows, and so does the "
            "direction in which each moved, which tells own items from others."
        )
        return (NoGuarantee(repr(self), why),)

    def upload(self, update: Update, streams: Streams) -> Update:
        """Signs times sizes."""

        def sign(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
            if self.step is not None:
                return tensor.sign() * self.step
            flat = tensor.unsqueeze(-1).flatten(1)  # [n, size]
            total = flat.new_zeros(len(flat), dtype=torch.float64)
            for piece in torch.split(flat, _PIECE, dim=1):
                total = total + piece.double().abs().sum(1)
            if owner is None:
                mean = total / flat.shape[1]  # f64[C]
            else:
                whole = total.new_zeros(update.n_clients).index_add_(0, owner, total)
                mean = (whole / (update.offset.diff() * flat.shape[1]))[owner]  # f64[N]; who has no row is not asked
            return tensor.sign() * mean.to(tensor.dtype).reshape(-1, *[1] * (tensor.dim() - 1))

        return update.map(sign)
