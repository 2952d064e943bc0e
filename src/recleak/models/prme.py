"""Personalized ranking metric embedding with geography: the next place is near the user and near the present place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from recleak.errors import ConfigError
from recleak.models.base import Batch, Model, Params
from recleak.models.components import Component, Init, Normal


@dataclass(frozen=True)
class PRMEG(Model):
    """PRME-G (Feng et al. 2015; CDA, eq. 3): a user u who was at place b some time ago goes to the nearest place i by

        D = w_bi (a |u - p_i|^2 + (1 - a) |s_b - s_i|^2)     with w_bi = (1 + km from b to i)^0.25
        D = |u - p_i|^2                                      if that was longer ago than the window.

    Scores are -D. Training prefers the place i that was next to another one k: z = D_k - D_i, and the loss is
    -ln sigma(z) + lambda |theta|^2 over what the two distances read. (CDA, eq. 4, has the sign of z reversed, which
    would push the places of a user away from it.) One example is one step of SGD, whose `weight_decay` is 2 lambda.

    The defaults are CDA's (Table 3), with `LocalTraining(batch_size=1, optimizer=SGD(0.005, weight_decay=0.06),
    loss="bpr", negatives=1, resample=True)`. The user vector is kept unless a sharing policy says otherwise.
    """

    factors: int = 60
    component_weight: float = 0.2  # a
    window_hours: float = 6.0
    distance_exponent: float = 0.25
    init: Init = field(default=Normal(0.01))

    needs_transitions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.component_weight <= 1:
            raise ConfigError(f"component_weight is {self.component_weight}, expected a number from 0 to 1.")
        if not self.window_hours >= 0:
            raise ConfigError(f"window_hours is {self.window_hours}, expected a number of at least 0.")

    def components(self) -> tuple[Component, ...]:
        """`user` (kept), `item.preference` and `item.sequence`."""
        return (
            Component("user", "per_user", "user", (self.factors,), self.init, shared=False),
            Component("item.preference", "per_item", "item", (self.factors,), self.init),
            Component("item.sequence", "per_item", "item", (self.factors,), self.init),
        )

    def logits(self, params: Params, batch: Batch) -> Tensor:
        """-|u - p_i|^2: what is known of a user whose whereabouts are not."""
        return -_squared(params["user"], params["item.preference"])

    def logits_after(self, params: Params, before: Tensor, gap: Tensor, distance: Tensor) -> Tensor:
        """-D of users whose last place is known, f32[C, B].

        `params` as for `logits`; `before` is the row of `item.sequence` of each client's last place, f32[C, d], `gap`
        the seconds since, f32[C], and `distance` the way from there to the scored items, f32[C, B] km.
        """
        preference = _squared(params["user"], params["item.preference"])
        sequence = _squared(before, params["item.sequence"])
        both = self.component_weight * preference + (1 - self.component_weight) * sequence
        return -torch.where(self.is_near(gap).unsqueeze(1), (1 + distance) ** self.distance_exponent * both, preference)

    def is_near(self, gap: Tensor) -> Tensor:
        """Whether so many seconds are within the window, bool[C]."""
        return gap <= 3600 * self.window_hours


def _squared(one: Tensor, many: Tensor) -> Tensor:
    """Squared distances, f32[C, d] and f32[C, B, d] -> f32[C, B]."""
    return (one.unsqueeze(1) - many).square().sum(-1)
