"""Whether what clients train is a perceptron on [user, item] and no more, as compiled loops need it.

Axis letters: C clients, L layers, P numbers of a client beside its item rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.models.base import Model, Params, declared


@dataclass(frozen=True, eq=False)
class Perceptron:
    """Where the numbers of a head with at least one hidden layer, all layers with a bias, are found."""

    names: tuple[str, ...]  # the components beside item rows: user, weight and bias of each layer
    item: str  # that of item rows
    widths: NDArray[np.int64]  # i64[L + 1]: 2 d, the widths of the hidden layers, 1

    def rates(self, rates: Mapping[str, float]) -> NDArray[np.float64]:
        """The learning rates of `names`."""
        return np.array([rates[name] for name in self.names])

    def flat(self, values: Params) -> Tensor:
        """The numbers of each client side by side, f32[C, P]: a copy."""
        return torch.cat([values[name].flatten(1) for name in self.names], dim=1)

    def parts(self, flat: Tensor, values: Params) -> Params:
        """The same numbers by component, views of f32[C, P] in the shapes of `values`."""
        parts, at = {}, 0
        for name in self.names:
            size = values[name][0].numel()
            parts[name] = flat[:, at : at + size].view(len(flat), *values[name].shape[1:])
            at += size
        return parts


def perceptron_of(model: Model, values: Params, rows: Params) -> Perceptron | None:
    """The perceptron that a model says it is, if clients have its parameters and no others."""
    declares = declared(model, "perceptron")
    layers = [value for name, value in values.items() if name.endswith(".weight")]
    if declares is None or len(layers) < 2:
        return None
    user, item = declares
    heads = (f"head.{n}.{kind}" for n in range(1, len(layers) + 1) for kind in ("weight", "bias"))
    names = (user, *heads)
    if set(names) != set(values) or list(rows) != [item]:
        return None
    return Perceptron(names, item, np.array([*(layer.shape[1] for layer in layers), 1]))
