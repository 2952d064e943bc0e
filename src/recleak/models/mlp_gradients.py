"""The shorter way through the MLP head: its cross-entropy gradients without a graph, for the CPU.

Matrix products go to torch; bias, ReLU, the last layer and the masks are one compiled pass each (`recleak.kernels`).
Tests compare the result with automatic differentiation of `mlp`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recleak import kernels
from recleak.models.base import Params


@dataclass(frozen=True, eq=False)
class HeadStep:
    """Logits and gradients of one batch per client."""

    logits: Tensor  # f32[C, B]
    head: Params  # gradients of head.*
    user: Tensor  # f32[C, du]
    item: Tensor  # f32[C, B, di]


def logistic_gradients(params: Params, user: Tensor, item: Tensor, label: Tensor, weight: Tensor) -> HeadStep | None:
    """Gradients of sum_b weight (cross-entropy of logit b); None where there is no shorter way."""
    layers = 1
    while f"head.{layers + 1}.weight" in params:
        layers += 1
    if item.device.type != "cpu" or layers < 2:
        return None
    clients, batch, width = len(user), item.shape[1], user.shape[1]
    weights = [params[f"head.{layer}.weight"] for layer in range(1, layers + 1)]
    biases = [params[f"head.{layer}.bias"] for layer in range(1, layers + 1)]
    of_user, of_item = weights[0][:, :width], weights[0][:, width:]

    hidden = [item]  # the input of each layer, f32[C, B, *]
    bias = torch.baddbmm(biases[0].unsqueeze(1), user.unsqueeze(1), of_user).squeeze(1)
    for layer in range(layers - 1):
        out = torch.bmm(hidden[-1], of_item if layer == 0 else weights[layer])
        kernels.add_and_rectify(out.numpy(), bias.numpy())
        hidden.append(out)
        bias = biases[layer + 1]

    logits = torch.empty(clients, batch)
    gradients = {name: torch.empty_like(params[name]) for name in _names(layers)}
    back, total = torch.empty_like(hidden[-1]), torch.empty(clients, hidden[-1].shape[2])
    kernels.logistic_output(
        hidden[-1].numpy(),
        weights[-1].squeeze(2).numpy(),
        biases[-1].squeeze(1).numpy(),
        label.numpy(),
        weight.numpy(),
        logits.numpy(),
        gradients[f"head.{layers}.weight"].squeeze(2).numpy(),
        gradients[f"head.{layers}.bias"].squeeze(1).numpy(),
        back.numpy(),
        total.numpy(),
    )
    for layer in range(layers - 1, 1, -1):
        gradients[f"head.{layer}.bias"] = total
        torch.bmm(hidden[layer - 1].transpose(1, 2), back, out=gradients[f"head.{layer}.weight"])
        back = torch.bmm(back, weights[layer - 1].transpose(1, 2))
        total = torch.empty(clients, back.shape[2])
        kernels.mask_and_sum(back.numpy(), hidden[layer - 1].numpy(), total.numpy())
    gradients["head.1.bias"] = total
    first = gradients["head.1.weight"]
    torch.mul(user.unsqueeze(2), total.unsqueeze(1), out=first[:, :width])
    first[:, width:] = torch.bmm(item.transpose(1, 2), back)
    return HeadStep(
        logits=logits,
        head=gradients,
        user=torch.bmm(total.unsqueeze(1), of_user.transpose(1, 2)).squeeze(1),
        item=torch.bmm(back, of_item.transpose(1, 2)),
    )


def _names(layers: int) -> list[str]:
    return [f"head.{layer}.{kind}" for layer in range(1, layers + 1) for kind in ("weight", "bias")]
