"""Matrix factorization: a vector per user, a vector per item, and their product."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from recleak.models.base import Batch, Model, Params
from recleak.models.components import Component, Constant, FanIn, Init, Normal
from recleak.models.mlp import dot, head_components


@dataclass(frozen=True)
class MF(Model):
    """s_ui = <p_u, q_i>, or b + b_u + b_i + <p_u, q_i> with biases (Koren, Bell and Volinsky 2009, eq. 1 and 4)."""

    factors: int = 64
    biases: bool = False
    init: Init = field(default=Normal(0.1))

    def components(self) -> tuple[Component, ...]:
        """`user` (kept) and `item`; with biases also `user.bias` (kept), `item.bias` and the overall `bias`."""
        tables = (
            Component("user", "per_user", "user", (self.factors,), self.init, shared=False),
            Component("item", "per_item", "item", (self.factors,), self.init),
        )
        biases = (
            Component("user.bias", "per_user", "user", (), Constant(), shared=False),
            Component("item.bias", "per_item", "item", (), Constant()),
            Component("bias", "dense", "head", (), Constant(), layer=1),
        )
        return tables + biases if self.biases else tables

    def logits(self, params: Params, batch: Batch) -> Tensor:
        """Inner products and biases."""
        score = dot(params["user"], params["item"])  # f32[C, B]
        if not self.biases:
            return score
        client = params["bias"] + params["user.bias"]  # f32[C]
        return score + params["item.bias"] + client.unsqueeze(1)

    def product(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """The user's vector; with biases, rows of two tables count."""
        user = params["user"]
        return None if self.biases else (user, user.new_zeros(len(user)))


@dataclass(frozen=True)
class GMF(Model):
    """Generalized matrix factorization: s_ui = <h, e_u ∘ e_i> + b (He et al. 2017, eq. 9; CDA, eq. 1, without b).

    The defaults are CDA's: Table 3 for the embeddings; its code starts h as LeCun uniform and has a bias, from zero.
    The text shares everything (the full model) or all but `user` (share-less); here `user` is kept unless a sharing
    policy says otherwise.
    """

    factors: int = 8
    bias: bool = True
    init: Init = field(default=Normal(0.01))
    head_init: Init = field(default=FanIn(3.0))

    def components(self) -> tuple[Component, ...]:
        """`user` (kept), `item`, `head.1.weight` and maybe `head.1.bias`."""
        weight, bias = head_components((self.factors,), self.head_init, Constant())
        return (
            Component("user", "per_user", "user", (self.factors,), self.init, shared=False),
            Component("item", "per_item", "item", (self.factors,), self.init),
            weight,
            *([bias] if self.bias else []),
        )

    def logits(self, params: Params, batch: Batch) -> Tensor:
        """The user's vector takes the weights first: <h, e_u ∘ e_i> = <h ∘ e_u, e_i>."""
        score = dot(params["head.1.weight"].squeeze(-1) * params["user"], params["item"])  # f32[C, B]
        return score + params["head.1.bias"] if self.bias else score

    def product(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """h ∘ e_u and b."""
        user = params["head.1.weight"].squeeze(-1) * params["user"]
        return user, params["head.1.bias"].squeeze(-1) if self.bias else user.new_zeros(len(user))
