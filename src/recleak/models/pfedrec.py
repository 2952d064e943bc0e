"""PFedRec: everybody scores the same items in a way of their own."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from recleak.models.base import Batch, Model, Params
from recleak.models.components import Component, FanIn, Init, Normal
from recleak.models.mlp import dot, head_components


@dataclass(frozen=True)
class PFedRec(Model):
    """s_ui = <w_u, v_i> + b_u: a shared item table, and a linear score function that each client keeps.

    Zhang et al., "Dual Personalization on Federated Recommendation", IJCAI 2023; the defaults are those of its code.
    There is no user vector. A client's score function is a `dense` component that is kept, so all clients start from
    the same one. That the two parts take turns in an optimizer step is a matter of training, not of the model.
    """

    factors: int = 32
    init: Init = field(default=Normal(1.0))
    head_init: Init = field(default=FanIn())

    def components(self) -> tuple[Component, ...]:
        """`item`, and the kept `head.1.weight` and `head.1.bias`."""
        return (
            Component("item", "per_item", "item", (self.factors,), self.init),
            *head_components((self.factors,), self.head_init, shared=False),
        )

    def logits(self, params: Params, batch: Batch) -> Tensor:
        """Each client's own linear function of item rows."""
        return dot(params["head.1.weight"].squeeze(-1), params["item"]) + params["head.1.bias"]

    def product(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """w_u and b_u."""
        return params["head.1.weight"].squeeze(-1), params["head.1.bias"].squeeze(-1)
