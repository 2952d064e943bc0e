"""Privacy estimators: small perceptrons that predict an attribute from a representation, or the other way round.

They are components of a defense, one of each client (or one of all), and work on all clients at once.
Axis letters: C clients, n inputs of each, i and o the inputs and outputs of a layer, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from recleak.models.base import Params
from recleak.models.components import Component, FanIn
from recleak.models.mlp import linear
from recleak.training.attributes import has_label

CONTINUOUS = 1  # "classes" of an attribute that is a number


def estimator_components(name: str, widths: tuple[int, ...], *, shared: bool = False) -> Iterator[Component]:
    """The layers of one estimator; `widths` are inputs, hidden layers, outputs. They start as torch's `nn.Linear`."""
    for layer, fans in enumerate(pairwise(widths), start=1):
        for kind, shape in (("weight", fans), ("bias", fans[1:])):
            yield Component(f"{name}.{layer}.{kind}", "dense", "head", shape, FanIn(), layer, shared, fans=fans)


def estimate(own: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    """The outputs of an estimator with ReLU between layers, f32[C, n, i] -> f32[C, n, o]."""
    layer, hidden = 1, inputs
    while f"{name}.{layer}.weight" in own:
        hidden = hidden if layer == 1 else hidden.relu()
        hidden = linear(hidden, own[f"{name}.{layer}.weight"], own[f"{name}.{layer}.bias"].unsqueeze(1))
        layer += 1
    return hidden


def log_chance(output: Tensor, label: Tensor) -> Tensor:
    """The log probability that an estimator gives labels, f32[C, n, K], [C, n] -> f32[C, n]; 0 where there is no label.

    Of a number, the output is the mean of a normal law of variance 1, and the constant is left out.
    """
    known = has_label(label)
    if label.is_floating_point():
        return torch.where(known, -(output.squeeze(-1) - label.nan_to_num()).square() / 2, 0.0)
    chosen = functional.log_softmax(output, dim=-1).gather(-1, label.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(known, chosen, 0.0)


def encoded(label: Tensor, classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Labels as inputs of an estimator: one-hot, or zeros; or the number itself; [C, n] -> f32[C, n, K]."""
    if label.is_floating_point():
        return label.nan_to_num().unsqueeze(-1).to(dtype)
    return functional.one_hot(label.clamp(min=0), classes).to(dtype) * has_label(label).unsqueeze(-1)


def descended(
    own: Params, loss: Callable[[Params, int], Tensor], *, rate: float, momentum: float = 0.0, steps: int = 1
) -> Params:
    """Estimators after some steps of SGD on the loss of each client at a step, f32[C]; the momentum starts at 0."""
    now = {name: value.detach() for name, value in own.items()}
    speed = {name: torch.zeros_like(value) for name, value in now.items()} if momentum else {}
    for step in range(steps):
        leaves = {name: value.requires_grad_() for name, value in now.items()}
        found = torch.autograd.grad(
            loss(leaves, step).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        slopes = dict(zip(leaves, found, strict=True))
        if momentum:
            slopes = speed = {name: momentum * speed[name] + slope for name, slope in slopes.items()}
        with torch.no_grad():
            now = {name: value - rate * slopes[name] for name, value in now.items()}
    return now


def mean_of_known(values: Tensor, known: Tensor) -> Tensor:
    """The mean over those that count, f32[C, n], bool[C, n] -> f32[C]; 0 where none does."""
    weight = known.to(values.dtype)
    return (values * weight).sum(1) / weight.sum(1).clamp(min=1)
