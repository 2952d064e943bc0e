"""The head that several models share: a perceptron on [user, item], one score per item.

Products with a single output are elementwise products and sums, not matrix products: the matrix kernels give a client
other last bits when it is alone than when it is one of many.
Axis letters: C clients, B scored items per client, i and o the inputs and outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from recleak.models.base import Params
from recleak.models.components import Component, Init


def head_components(
    widths: tuple[int, ...],
    init: Init,
    bias_init: Init | None = None,
    *,
    shared: bool = True,
    bounded: bool = False,
) -> tuple[Component, ...]:
    """Weights and biases of a head: `widths` are the inputs of its layers, and the last layer has one output.

    `FanIn()` starts both as torch's `nn.Linear` does; without `bias_init`, biases start like weights. A `bounded` head
    has no bias in its last layer: a score is h . q with q in [0, 1], and the weights h are all that a mechanism on this
    product (`defenses.functional_mechanism`) has to know; a bias would be one more weight, of an input that is 1.
    """
    parts = tuple(_components(widths, init, bias_init or init, shared))
    return parts[:-1] if bounded else parts


def _components(widths: tuple[int, ...], init: Init, bias_init: Init, shared: bool) -> Iterator[Component]:
    for layer, fans in enumerate(zip(widths, (*widths[1:], 1), strict=True), start=1):
        name = f"head.{layer}"
        yield Component(f"{name}.weight", "dense", "head", fans, init, layer, shared, fans)
        yield Component(f"{name}.bias", "dense", "head", fans[1:], bias_init, layer, shared, fans)


def mlp(params: Params, user: Tensor, item: Tensor, *, bounded: bool = False) -> Tensor:
    """The head with ReLU between layers, applied to [user, item]; f32[C, du] and f32[C, B, di] -> f32[C, B].

    The concatenation is never made: W [user, item] = W_user user + W_item item, and the first term is computed once
    per client. `bounded`: the input of the last layer is clamped to [0, 1], and that layer has no bias.
    """
    if bounded and "head.2.weight" not in params:
        user, item = user.clamp(0, 1), item.clamp(0, 1)
    width = user.shape[-1]
    weight, bias = _layer(params, 1)
    client = linear(user.unsqueeze(1), weight[:, :width], bias)  # f32[C, 1, o]
    hidden = linear(item, weight[:, width:], client)  # f32[C, B, o]
    layer = 2
    while f"head.{layer}.weight" in params:
        last = f"head.{layer + 1}.weight" not in params
        hidden = linear(hidden.clamp(0, 1) if bounded and last else hidden.relu(), *_layer(params, layer))
        layer += 1
    return hidden.squeeze(-1)


def dot(user: Tensor, item: Tensor) -> Tensor:
    """The inner product of a client's vector with each of its item rows; f32[C, d] and f32[C, B, d] -> f32[C, B]."""
    product: Tensor = torch.linalg.vecdot(item, user.unsqueeze(1))
    return product


def _layer(params: Params, layer: int) -> tuple[Tensor, Tensor]:
    """A layer's weight, f32[C, i, o], and its bias, f32[C, 1, o], zeros if it has none."""
    weight, bias = params[f"head.{layer}.weight"], params.get(f"head.{layer}.bias")
    return weight, weight.new_zeros(len(weight), 1, weight.shape[-1]) if bias is None else bias.unsqueeze(1)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A layer, f32[C, B, i] and f32[C, i, o] -> f32[C, B, o]; the bias f32[C, 1 or B, o] may differ by item."""
    if weight.shape[-1] == 1:
        return dot(weight.squeeze(-1), inputs).unsqueeze(-1) + bias
    return torch.baddbmm(bias, inputs, weight)
