"""PARD's recommender: a user has one vector that may leave and one that stays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from recleak.models.base import Batch, Model, Params
from recleak.models.components import Component, FanIn, Init, Normal, Storage, require_names
from recleak.models.mlp import head_components, mlp

Combine = Literal["concat", "sum"]
Leaves = Literal["sent", "averaged", "one", "kept"]


@dataclass(frozen=True)
class Decoupled(Model):
    """s_ui = h_u([z_u^ir, z_u^re, z_i]) (Zhao et al., PARD, eq. 35), with a head of its own for every client.

    `user` is the privacy-irrelevant vector z_u^ir, `user.private` the privacy-relevant z_u^re, which is kept, as the
    head is. What makes them so is the defense (`defenses.decoupling.Decoupling`); without it this is the base of the
    paper's ablation. combine "sum": h_u([z_u^ir + z_u^re, z_i]), as the published code has it. user: "sent": the server
    sees the vector and does nothing with it. "one": as the text has it (eq. 5, Algorithm 1), and a version of the
    published code: z^ir is averaged over clients as all else is, so that everybody begins a round with the same vector.
    "averaged": a row for each user in a table that is averaged, which divides a user's step by the number of clients.
    "kept": as in the latest published code. graph: PARD's FedGCN, one layer on the client's star graph: as in the
    published code both vectors z become (z + mean of own rows) / 2, and items stay as they are.
    """

    factors: int = 64
    hidden: tuple[int, ...] = (64, 32)
    combine: Combine = "concat"
    graph: bool = False
    user: Leaves = "sent"
    init: Init = field(default=Normal(0.1))
    head_init: Init = field(default=FanIn())

    def __post_init__(self) -> None:
        require_names("combine", [self.combine], get_args(Combine))
        require_names("user", [self.user], get_args(Leaves))

    @property
    def reads_neighbors(self) -> bool:
        """Whether own rows are part of the user's vector."""
        return self.graph

    def components(self) -> tuple[Component, ...]:
        """`user`, `user.private` (kept), `item`, and a kept head."""
        width = (3 if self.combine == "concat" else 2) * self.factors
        shared, averaged = self.user != "kept", self.user != "sent"
        storage: Storage = "dense" if self.user == "one" else "per_user"
        return (
            Component("user", storage, "user", (self.factors,), self.init, shared=shared, averaged=averaged),
            Component("user.private", "per_user", "user", (self.factors,), self.init, shared=False),
            Component("item", "per_item", "item", (self.factors,), self.init),
            *head_components((width, *self.hidden), self.head_init, shared=False),
        )

    def logits(self, params: Params, batch: Batch) -> Tensor:
        """The head on both vectors of the user and the item's row."""
        return mlp(params, self.head_user(params, batch), params["item"])

    def head_user(self, params: Params, batch: Batch) -> Tensor:
        """Both vectors of the user."""
        user, private = params["user"], params["user.private"]
        if self.graph:
            mean = batch.neighbors["item"] / batch.degree.clamp(min=1).unsqueeze(1)  # f32[C, d]
            user, private = (user + mean) / 2, (private + mean) / 2
        return torch.cat([user, private], dim=1) if self.combine == "concat" else user + private
