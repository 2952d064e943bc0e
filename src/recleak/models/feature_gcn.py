"""APM's FedRec: a user is what its features and its items say, an item is a vector, a perceptron scores both.

Zhang et al., "Comprehensive Privacy Analysis on Federated Recommender System against Attribute Inference Attacks",
section 3.1. Its three parts are the user component {E_U, W1, W2, b}, the item component {E_V} and the MLP by layer;
roles and layers here are these parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from recleak import random
from recleak.errors import ConfigError
from recleak.models.base import Batch, Model, Params
from recleak.models.components import Component, Init, Normal, require_names
from recleak.models.mlp import head_components, mlp

ItemSide = Literal["table", "features"]


@dataclass(frozen=True)
class FeatureGCN(Model):
    """z_u = E_U x_u, z_v = E_V x_v (eq. 4), then with the mean over the user's items v (eq. 5 to 7)

        z_u* = ReLU(W2 (z_u + mean of W1 z_v) + b),    s_uv = MLP([z_u*, z_v]).

    `n_features` is the length of x_u. Everything starts from N(0, 1), as the paper says, unless `dense_init` tells
    W1, W2, b and the MLP otherwise. The paper draws x_v at random and names no length: with `item_side="features"` the
    x_v are public and fixed, with independent entries from N(0, 1/G), G = `item_feature_dim`, a function of
    `item_seed`; z_v then starts with the variance of E_V. With `item_side="table"` every item has a vector z_v that is
    trained, as for one-hot x_v. `bounded`: the MLP's last layer reads numbers in [0, 1] and has no bias (`mlp`).
    """

    n_features: int = 0  # 0: not known yet; an audit fills it in
    factors: int = 64
    hidden: tuple[int, ...] = (64,)
    item_side: ItemSide = "table"
    item_feature_dim: int = 64
    item_seed: int = 0
    init: Init = field(default=Normal(1.0))
    dense_init: Init = field(default=Normal(1.0))
    bounded: bool = False

    needs_user_features: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_names("item_side", [self.item_side], get_args(ItemSide))

    @property
    def reads_neighbors(self) -> bool:
        """Only of a table: features of own items do not change."""
        return self.item_side == "table"

    def components(self) -> tuple[Component, ...]:
        """E_U, W1, W2 and b with role user, the item table or E_V with role item, and the head."""
        if self.n_features < 1:
            raise ConfigError(f"n_features is {self.n_features}, expected how many features a user has.")
        d = self.factors
        table = Component("item", "per_item", "item", (d,), self.init)
        encoder = Component("item.encoder", "dense", "item", (self.item_feature_dim, d), self.init)
        return (
            Component("user.encoder", "dense", "user", (self.n_features, d), self.init),  # E_U
            Component("user.neighbors.weight", "dense", "user", (d, d), self.dense_init),  # W1
            Component("user.output.weight", "dense", "user", (d, d), self.dense_init),  # W2
            Component("user.output.bias", "dense", "user", (d,), self.dense_init, fans=(d, d)),  # b
            table if self.item_side == "table" else encoder,
            *head_components((2 * d, *self.hidden), self.dense_init, bounded=self.bounded),
        )

    def item_features(self, n_items: int) -> Tensor | None:
        """x_v for all items, f32[I, G]; the row of an item does not depend on how many items there are."""
        if self.item_side == "table":
            return None
        item, place = np.arange(n_items)[:, None], np.arange(self.item_feature_dim)
        drawn = random.normal(self.item_seed, "item features", item, place) / np.sqrt(self.item_feature_dim)
        return torch.from_numpy(drawn.astype(np.float32))

    def logits(self, params: Params, batch: Batch) -> Tensor:
        """The head on [z_u*, z_v]."""
        if batch.user_features is None:
            raise ValueError("Got a batch without user_features, expected f32[C, F]: give the clients' features.")
        item, total = self._items(params, batch)
        return mlp(params, self._user(params, batch.user_features, total, batch.degree), item, bounded=self.bounded)

    def head_user(self, params: Params, batch: Batch) -> Tensor | None:
        """z_u*, where items are rows of a table."""
        if self.item_side != "table" or self.bounded or batch.user_features is None:
            return None
        return self._user(params, batch.user_features, batch.neighbors["item"], batch.degree)

    def _user(self, params: Params, features: Tensor, total: Tensor, degree: Tensor) -> Tensor:
        """z_u*, f32[C, d]; W1 is applied to the mean of the z_v, which is the mean of the W1 z_v."""
        mean = (total / degree.clamp(min=1).unsqueeze(1)).unsqueeze(1)  # f32[C, 1, d]
        z_u = torch.bmm(features.unsqueeze(1), params["user.encoder"])  # f32[C, 1, d]
        joined = torch.baddbmm(z_u, mean, params["user.neighbors.weight"])
        output = torch.baddbmm(params["user.output.bias"].unsqueeze(1), joined, params["user.output.weight"])
        return output.relu().squeeze(1)

    def _items(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """z_v of the scored items, f32[C, B, d], and the sum of z_v over the own items, f32[C, d]."""
        if self.item_side == "table":
            return params["item"], batch.neighbors["item"]
        if batch.item_features is None or batch.neighbor_features is None:
            raise ValueError(
                "Got a batch without item_features and neighbor_features, expected both for item_side='features': "
                "gather them from `item_features(n_items)`."
            )
        encoder = params["item.encoder"]  # f32[C, G, d]
        own = torch.bmm(batch.neighbor_features.unsqueeze(1), encoder).squeeze(1)
        return torch.bmm(batch.item_features, encoder), own
