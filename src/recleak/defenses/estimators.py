"""Privacy estimators: small perceptrons that predict an attribute from a representation, or the other way round.

They are components of a defense, one of each client (or one of all), and work on all clients at once.
Axis letters: C clients, n inputs of each, i and o the inputs and outputs of a layer, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recleak import kernels_estimators
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


@dataclass(frozen=True, eq=False)
class Lesson:
    """What an estimator of C clients is trained on in S steps: n inputs that all have, and one of each client's own.

    It predicts a class or a number, or with targets a vector. Where a label is NaN an input does not count.
    """

    told: Tensor  # f32[S, n, i]
    label: Tensor  # f32[S, n]
    as_mine: Tensor  # bool[S, n]: these count under the client's own label
    mine: Tensor  # f32[C, i]
    own: Tensor  # f32[C]: the client's label
    classes: int = CONTINUOUS
    target: Tensor | None = None  # f32[S, n, o]
    my_target: Tensor | None = None  # f32[C, o]

    def loss(self, own: Params, name: str, step: int) -> Tensor:
        """The mean loss of each client at a step, f32[C]."""
        clients, mine = len(self.mine), self.own.unsqueeze(1)
        inputs = _beside(self.told[step], self.mine)  # f32[C, n + 1, i]
        label = torch.where(self.as_mine[step], mine, self.label[step].expand(clients, -1))
        label = torch.cat([label, mine], dim=1)
        output = estimate(own, name, inputs)
        if self.target is not None and self.my_target is not None:
            each = distance(_beside(self.target[step], self.my_target), output)
        elif self.classes == CONTINUOUS:
            each = -log_chance(output, label)
        else:
            each = -log_chance(output, classes_in(label))
        return mean_of_known(each, has_label(label))


def _beside(told: Tensor, mine: Tensor) -> Tensor:
    """What all have, f32[n, i], and then what is the client's own, f32[C, i] -> f32[C, n + 1, i]."""
    return torch.cat([told.expand(len(mine), *told.shape), mine.unsqueeze(1)], dim=1)


def in_float(label: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Labels as a lesson has them: -1, the class of who has none, becomes NaN."""
    return torch.where(has_label(label), label.to(dtype), torch.nan)


def classes_in(label: Tensor) -> Tensor:
    """The other way round, i64."""
    return label.nan_to_num(-1.0).long()


def distance(one: Tensor, other: Tensor) -> Tensor:
    """The l2 distance, f32[C, n, d] twice -> f32[C, n]; where it is 0 its gradient is too."""
    squared = (one - other).square().sum(2)
    still = squared == 0
    return torch.where(still, squared, torch.where(still, 1.0, squared).sqrt())


def taught(own: Params, name: str, lesson: Lesson, *, rate: float, momentum: float) -> Params:
    """One estimator after its lesson: in a compiled loop, or in double precision and on other devices step by step."""
    mine = {part: value for part, value in own.items() if part.startswith(f"{name}.")}
    first = next(iter(mine.values()))
    steps = len(lesson.label)
    if first.dtype != torch.float32 or first.device.type != "cpu":

        def loss(leaves: Params, step: int) -> Tensor:
            return lesson.loss(leaves, name, step)

        return descended(mine, loss, rate=rate, momentum=momentum, steps=steps)
    weights = [value for part, value in mine.items() if part.endswith(".weight")]
    flat = torch.cat([value.flatten(1) for value in mine.values()], dim=1)  # f32[C, P], memory of its own
    if lesson.own.isnan().all() and (flat == flat[:1]).all():  # nothing of their own to learn: one learns for all
        flat = flat[:1]
    outputs = weights[-1].shape[2]
    kind = kernels_estimators.NUMBER if lesson.classes == CONTINUOUS else kernels_estimators.CLASS
    none = torch.empty(0, 0, outputs), torch.empty(0, outputs)
    targets = (lesson.target, lesson.my_target) if lesson.target is not None and lesson.my_target is not None else none
    kernels_estimators.descend(
        flat.numpy(),
        np.array([weights[0].shape[1], *(weight.shape[2] for weight in weights)]),
        lesson.told.contiguous().numpy(),
        lesson.label.contiguous().numpy(),
        lesson.as_mine.contiguous().numpy(),
        targets[0].contiguous().numpy(),
        lesson.mine.contiguous().numpy(),
        lesson.own.contiguous().numpy(),
        targets[1].contiguous().numpy(),
        kind if lesson.target is None else kernels_estimators.VECTOR,
        rate,
        momentum,
    )
    sizes = [value[0].numel() for value in mine.values()]
    parts = torch.split(flat, sizes, dim=1)
    return {
        part: piece.expand(len(value), -1).reshape(value.shape)
        for (part, value), piece in zip(mine.items(), parts, strict=True)
    }


def mean_of_known(values: Tensor, known: Tensor) -> Tensor:
    """The mean over those that count, f32[C, n], bool[C, n] -> f32[C]; 0 where none does."""
    weight = known.to(values.dtype)
    return (values * weight).sum(1) / weight.sum(1).clamp(min=1)
