"""A user's whole history in, scores of all items out: what DPAE trains with DP-SGD.

Sedhain et al. 2015, "AutoRec: Autoencoders Meet Collaborative Filtering", over users; Liu et al. 2018, "Differentially
private recommender system with autoencoders" (DPAE), trains it with noisy gradients.
Axis letters: B users, I items, H hidden units.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from recleak.errors import ConfigError
from recleak.models.base import Params
from recleak.models.central import Archive, CentralModel, Examples
from recleak.models.components import Component, Constant, Init, Normal


@dataclass(frozen=True)
class Autoencoder(CentralModel):
    """h = tanh(x W1 / sqrt(|x|) + b1), scores o = h W2 + b2 for a user's binary history x.

    The loss of a user is the mean over all items of the cross-entropy of o and x; items that a user has weigh
    `positive_weight` times. The input is divided by the root of its length, so that heavy users do not saturate the
    units. An example is a user: with DP-SGD all that one user did is clipped and hidden together.
    """

    hidden: int = 64
    positive_weight: float = 10.0
    init: Init = field(default=Normal(0.1))

    examples: ClassVar[Examples] = "users"

    def __post_init__(self) -> None:
        if self.hidden < 1 or not self.positive_weight > 0:
            raise ConfigError(
                f"Got hidden={self.hidden} and positive_weight={self.positive_weight}, expected numbers above 0."
            )

    def components(self) -> tuple[Component, ...]:
        """W1 and W2 with a row for each item, b1, and b2 as an item's own number."""
        return (
            Component("item.encoder", "per_item", "item", (self.hidden,), self.init),
            Component("hidden.bias", "dense", "head", (self.hidden,), Constant(), 1),
            Component("item.decoder", "per_item", "item", (self.hidden,), self.init),
            Component("item.bias", "per_item", "item", (), Constant()),
        )

    def losses(self, params: Params, archive: Archive, user: Tensor) -> Tensor:
        """f32[B]."""
        x = archive.rows(user)
        return self._loss(x, self._output(params, self._hidden(params, _scaled(x))))

    def clipped_gradient(self, params: Params, archive: Archive, user: Tensor, bound: float) -> tuple[Params, Tensor]:
        """In closed form: a user's gradient of a layer is an outer product, whose norm is the product of two norms."""
        x = archive.rows(user)
        inputs = _scaled(x)
        hidden = self._hidden(params, inputs)
        output = self._output(params, hidden)
        chance = output.sigmoid()
        of_output = torch.where(x > 0, self.positive_weight * (chance - 1), chance) / x.shape[1]  # dL / do, f32[B, I]
        of_hidden = (of_output @ params["item.decoder"]) * (1 - hidden.square())  # f32[B, H]
        squared = of_output.square().sum(1) * (hidden.square().sum(1) + 1)
        squared = squared + of_hidden.square().sum(1) * (inputs.square().sum(1) + 1)
        scale = (bound / squared.sqrt().clamp(min=1e-30)).clamp(max=1).unsqueeze(1)  # f32[B, 1]
        of_output, of_hidden = scale * of_output, scale * of_hidden
        total = {
            "item.encoder": inputs.T @ of_hidden,
            "hidden.bias": of_hidden.sum(0),
            "item.decoder": of_output.T @ hidden,
            "item.bias": of_output.sum(0),
        }
        return total, self._loss(x, output)

    def all_scores(self, params: Params, archive: Archive, users: Tensor) -> Tensor:
        """f32[B, I]."""
        return self._output(params, self._hidden(params, _scaled(archive.rows(users))))

    def _hidden(self, params: Params, inputs: Tensor) -> Tensor:
        return (inputs @ params["item.encoder"] + params["hidden.bias"]).tanh()

    def _output(self, params: Params, hidden: Tensor) -> Tensor:
        return hidden @ params["item.decoder"].T + params["item.bias"]

    def _loss(self, x: Tensor, output: Tensor) -> Tensor:
        return torch.where(x > 0, self.positive_weight * softplus(-output), softplus(output)).mean(1)


def _scaled(x: Tensor) -> Tensor:
    return x / x.sum(1, keepdim=True).clamp(min=1).sqrt()
