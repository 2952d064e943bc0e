"""The proximal term: a loss that grows with the distance from what was received."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from math import isfinite
from typing import Literal, get_args

import torch
from torch import Tensor

from recleak.defenses.base import Chain, Defense, hooks
from recleak.defenses.spending import NoGuarantee, Spending
from recleak.streams import Streams
from recleak.update import Update

Norm = Literal["plain", "squared"]


@dataclass(frozen=True)
class Proximal(Defense):
    """Add mu ||V - V_t|| to the loss of every local step; V_t is what the client received (IMIA's regularizer).

    Yuan et al. 2023, "Interaction-level Membership Inference Attack Against Federated Recommender Systems", eq. 8.
    norm "plain": mu times the l2 norm of the client's whole item matrix, as the paper writes it. Its gradient has the
    length mu wherever the client is; at V = V_t, where the norm has none, it is 0. norm "squared": mu times the sum of
    (V - V_t)^2, as the published code has it. Rows that no example touches do not move, so the norm of the touched rows
    is that of the whole matrix. With several components, each has a term of its own. Strength 0 changes nothing.

    **This gives no guarantee**: it makes movements small but bounds none of them, and which rows moved shows as before.
    Nor does it make them vanish under Adam, whose step does not depend on the size of the gradient: however strong the
    term, touched rows go about one learning rate away from V_t and back.
    """

    strength: float
    norm: Norm = "plain"
    components: tuple[str, ...] = ("item",)

    def __post_init__(self) -> None:
        if not (isfinite(self.strength) and self.strength >= 0):
            raise ValueError(
                f"Got strength={self.strength}, expected a finite number of at least 0 (0: no proximal term)."
            )
        if self.norm not in get_args(Norm):
            raise ValueError(f"Got norm={self.norm!r}, expected one of {', '.join(get_args(Norm))}.")

    def penalty(self, moved: Update, streams: Streams) -> Tensor | None:
        """strength * ||moved||, or its square, f32[C]."""
        squared = moved.only(set(self.components)).squared_norms()  # f32[C] each
        if not self.strength or not squared:
            return None
        return self.strength * reduce(torch.add, (self._size(each) for each in squared.values()))

    def component_names(self) -> Iterable[str]:
        """The components that are held back."""
        return self.components

    def spends(self) -> tuple[Spending, ...]:
        """No guarantee: nothing is bounded, nothing is random."""
        why = (
            "It makes changes smaller, but none is bounded and nothing is random: a smaller change in the same "
            "direction tells the same, and which items are touched shows as before."
        )
        return (NoGuarantee(repr(self), why),)

    def _size(self, squared: Tensor) -> Tensor:
        """The norm, or its square, for squared norms."""
        if self.norm == "squared":
            return squared
        still = squared == 0  # there the root has no gradient
        return torch.where(still, squared, torch.where(still, 1.0, squared).sqrt())


def proximal_terms(defense: Defense) -> tuple[Proximal, ...] | None:
    """The terms that a defense's penalty consists of, without those of strength 0; None if it has one of another kind.

    A subclass may compute something else, so it is of another kind.
    """
    if type(defense) is Chain:
        terms: tuple[Proximal, ...] = ()
        for part in defense.defenses:
            more = proximal_terms(part)
            if more is None:
                return None
            terms += more
        return terms
    if type(defense) is Proximal:
        return (defense,) if defense.strength else ()
    return None if "penalty" in hooks(defense) else ()
