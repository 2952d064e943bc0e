"""Neural collaborative filtering: a perceptron on a user's and an item's vector."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from recleak.models.base import Batch, Model, Params
from recleak.models.components import Component, FanIn, Init, Normal
from recleak.models.mlp import head_components, mlp


@dataclass(frozen=True)
class NCF(Model):
    """s_ui = h' FFN([u, v_i]) (He et al. 2017; IMIA, eq. 2).

    The defaults are those of IMIA's code: layers 128 -> 64 -> 32 -> 1 with biases, embeddings from N(0, 1), the head as
    torch starts it. User vectors are kept. `bounded`: the last layer reads numbers in [0, 1] and has no bias (`mlp`).
    """

    perceptron = ("user", "item")
    factors: int = 64
    hidden: tuple[int, ...] = (64, 32)
    init: Init = field(default=Normal(1.0))
    head_init: Init = field(default=FanIn())
    bounded: bool = False  # stepwise then: compiled loops are for heads whose layers all have a bias

    def components(self) -> tuple[Component, ...]:
        """`user` (kept), `item` and a head of `len(hidden) + 1` layers."""
        return (
            Component("user", "per_user", "user", (self.factors,), self.init, shared=False),
            Component("item", "per_item", "item", (self.factors,), self.init),
            *head_components((2 * self.factors, *self.hidden), self.head_init, bounded=self.bounded),
        )

    def head_user(self, params: Params, batch: Batch) -> Tensor | None:
        """The user's vector."""
        return None if self.bounded else params["user"]

    def logits(self, params: Params, batch: Batch) -> Tensor:
        """The head on [user, item]."""
        return mlp(params, params["user"], params["item"], bounded=self.bounded)
