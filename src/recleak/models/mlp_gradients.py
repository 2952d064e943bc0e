"""The shorter way through the MLP head: cross-entropy gradients without a graph, for the CPU (`kernels.perceptron`).

Tests compare the result with automatic differentiation of `mlp`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from recleak import kernels
from recleak.models.base import LogisticStep, Params, Scratch


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of the kernel that was prepared for certain tensors: to wrap them anew takes longer than to compute."""

    user: Tensor
    item: Tensor
    result: LogisticStep
    run: Callable[[Tensor, Tensor], None]


def logistic_gradients(
    params: Params, user_name: str, item_name: str, label: Tensor, weight: Tensor, scratch: Scratch
) -> LogisticStep | None:
    """Gradients of the weighted cross-entropy of `mlp(params, user, item)`; None where there is no shorter way.

    The tensors of `params` may be changed in place between calls; if another user or item tensor comes, all are new.
    """
    call: _Call | None = scratch.memo.get("perceptron")
    if call is None or call.user is not params[user_name] or call.item is not params[item_name]:
        call = _prepare(params, user_name, item_name, scratch)
        if call is None:
            return None
        scratch.memo["perceptron"] = call
    call.run(label, weight)
    return call.result


def _prepare(params: Params, user_name: str, item_name: str, scratch: Scratch) -> _Call | None:
    user, item = params[user_name], params[item_name]  # f32[C, d], f32[C, B, d]
    layers = 1
    while f"head.{layers + 1}.weight" in params:
        layers += 1
    clients, batch, width = item.shape
    if item.device.type != "cpu" or layers < 2 or user.shape[1] != width:
        return None
    names = [f"head.{layer}.{kind}" for kind in ("weight", "bias") for layer in range(1, layers + 1)]
    gradients = {name: scratch.take(name, *params[name].shape) for name in (*names, user_name, item_name)}
    outputs = [params[name].shape[1] for name in names[layers : 2 * layers - 1]]
    loss = scratch.take("loss", clients)
    inputs = (
        _halves(params[names[0]], width).numpy(),
        tuple(params[name].numpy() for name in names[1:layers]),
        tuple(params[name].numpy() for name in names[layers:]),
        tuple(scratch.take(f"hidden {layer}", batch, n).numpy() for layer, n in enumerate(outputs)),
        tuple(scratch.take(f"back {layer}", batch, n).numpy() for layer, n in enumerate(outputs)),
        gradients[user_name].numpy(),
        gradients[item_name].numpy(),
        _halves(gradients[names[0]], width).numpy(),
        tuple(gradients[name].numpy() for name in names[1:layers]),
        tuple(gradients[name].numpy() for name in names[layers:]),
        loss.numpy(),
    )
    users, items = user.numpy(), item.numpy()

    def run(label: Tensor, weight: Tensor) -> None:
        kernels.perceptron(users, items, label.numpy(), weight.numpy(), *inputs)

    return _Call(user, item, LogisticStep(loss, gradients), run)


def _halves(first: Tensor, width: int) -> Tensor:
    """The first layer with its user half and its item half apart: f32[C, 2 d, n] -> f32[C, 2, d, n]."""
    return first.view(len(first), 2, width, first.shape[2])
