"""LightGCN on the graph that a client can see: a star, the user in the middle and its own items around.

A client has the vector u, n own items with rows q_i, and S = sum of q_i over them. An own item has degree 1 here.
One layer of propagation (He et al. 2020; IMIA, eq. 3) is, with weights a into the user and b into an own item,

    e_u^(k) = a * sum over own i of e_i^(k-1),    e_i^(k) = b * e_u^(k-1) for own items, 0 for all others,

where a = b = 1/sqrt(n) for symmetric normalization, and a = 1/n, b = 1 for the mean. Both have n a b = 1. Therefore
two layers lead the user back to itself, and with e_u^(0) = u, e_i^(0) = q_i all layers are known at once:

    layer           k odd       k even, k >= 2
    e_u^(k)         a S         u
    own e_i^(k)     b u         a b S = S/n
    other e_i^(k)   0           0

Layers 0 to L hold ceil(L/2) odd ones and floor(L/2) even ones beside layer 0, so that

    sum of e_u^(k) = (1 + floor(L/2)) u + ceil(L/2) a S
    sum of e_i^(k) = q_i + [i is own] (ceil(L/2) b u + floor(L/2) S/n).

A client without items has nobody to hear from: all its layers but layer 0 are zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from recleak.models.base import Batch, Model, Params
from recleak.models.components import Component, FanIn, Init, Normal, require_names
from recleak.models.mlp import dot, head_components, mlp

Combine = Literal["mean", "sum"]
Score = Literal["dot", "mlp"]
Normalization = Literal["symmetric", "mean"]


@dataclass(frozen=True)
class LightGCN(Model):
    """Propagated vectors of user and item, all layers combined by their mean or sum, then a product or a perceptron.

    IMIA's code is `LightGCN(score="mlp")`; its eq. 4 has `combine="sum"`. PARD's FedGCN, (u + mean of own rows) / 2, is
    `LightGCN(normalization="mean", propagate_items=False)`: items then stay as they are at every layer, so the user
    hears a S at each of them, and an item's vector is its row.
    """

    factors: int = 64
    layers: int = 1
    combine: Combine = "mean"
    score: Score = "dot"
    hidden: tuple[int, ...] = (64, 32)
    normalization: Normalization = "symmetric"
    propagate_items: bool = True
    init: Init = field(default=Normal(0.1))
    head_init: Init = field(default=FanIn())

    perceptron = ("user", "item")
    reads_neighbors = True

    def __post_init__(self) -> None:
        require_names("combine", [self.combine], get_args(Combine))
        require_names("score", [self.score], get_args(Score))
        require_names("normalization", [self.normalization], get_args(Normalization))
        if self.layers < 1:
            raise ValueError(f"Got layers={self.layers}, expected layers >= 1; without propagation, use MF or NCF.")

    def components(self) -> tuple[Component, ...]:
        """`user` (kept), `item`, and a head if the score is a perceptron."""
        return (
            Component("user", "per_user", "user", (self.factors,), self.init, shared=False),
            Component("item", "per_item", "item", (self.factors,), self.init),
            *(head_components((2 * self.factors, *self.hidden), self.head_init) if self.score == "mlp" else ()),
        )

    def logits(self, params: Params, batch: Batch) -> Tensor:
        """Scores of propagated vectors."""
        user, item = self.propagate(params, batch)
        return mlp(params, user, item) if self.score == "mlp" else dot(user, item)

    def product(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """The user's propagated vector times the share of an item's own row; a perceptron computes something else."""
        if self.score == "mlp":
            return None
        own_part, sum_part, row_part, _, _ = self.star(batch.degree).unsqueeze(2).unbind(1)  # f32[C, 1]
        user = row_part * (own_part * params["user"] + sum_part * batch.neighbors["item"])
        return user, user.new_zeros(len(user))

    def propagate(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """The combined vectors of the user, f32[C, d], and of the scored items, f32[C, B, d]."""
        user, item, total = params["user"], params["item"], batch.neighbors["item"]  # total is S, f32[C, d]
        own_part, sum_part, row_part, from_user, from_sum = self.star(batch.degree).unsqueeze(2).unbind(1)  # f32[C, 1]
        propagated = own_part * user + sum_part * total
        if not self.propagate_items:
            return propagated, item
        heard = from_user * user + from_sum * total  # f32[C, d]: what an own item hears
        own = batch.own.to(item.dtype).unsqueeze(-1)  # f32[C, B, 1]
        return propagated, torch.addcmul(row_part.unsqueeze(2) * item, own, heard.unsqueeze(1))

    def star(self, degree: Tensor) -> Tensor:
        """The weights of u and S in the user's vector, of q_i, u and S in an own item's: f32[C] -> f32[C, 5]."""
        n = degree.clamp(min=1)
        into_user = 1 / n if self.normalization == "mean" else n.rsqrt()
        into_item = 1 / (n * into_user)
        scale = 1 / (1 + self.layers) if self.combine == "mean" else 1.0
        one, none = torch.ones_like(n), torch.zeros_like(n)
        if not self.propagate_items:
            weights = (scale * one, scale * self.layers * into_user, one, none, none)
        else:
            even, odd = self.layers // 2, (self.layers + 1) // 2
            back = even * (degree > 0).to(n.dtype)  # how often the user hears itself
            weights = (
                scale * (1 + back),
                scale * odd * into_user,
                scale * one,
                scale * odd * into_item,
                scale * even / n,
            )
        return torch.stack(weights, dim=1)
