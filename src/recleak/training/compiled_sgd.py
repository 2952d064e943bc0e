"""Visits under plain SGD that have a compiled loop: products (MF, LightGCN) and perceptrons (NCF, LightGCN).

Anything that the loop does not know leaves the visit to the general way, as in `compiled`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from recleak import kernels_sgd
from recleak.defenses.objective_perturbation import linear_terms
from recleak.models.lightgcn import LightGCN
from recleak.models.mf import MF
from recleak.training.optimizers import SGD
from recleak.training.perceptron import perceptron_of

if TYPE_CHECKING:
    from recleak.training.visit import Visit


def walk_sgd(visit: Visit) -> Tensor | None:
    """All epochs of all clients with the epoch hook after each, and the mean loss, f32[C]; None if the loop does not
    know the model, or something that happens to a client beside it.
    """
    parts = _parts(visit) if _fits(visit) else None
    if parts is None:
        return None
    names, (item, *item_bias), hidden = parts
    extra = _extra(visit, item)
    if extra is None:
        return None
    training, model, clients, table = visit.task.training, visit.task.model, len(visit.client), visit.rows[item]
    params = torch.cat([visit.values[name].reshape(clients, -1) for name in names], dim=1)  # f32[C, P]
    starts = np.cumsum([0, *(visit.values[name][0].numel() for name in names)])
    for name, low, high in zip(names, starts, starts[1:], strict=False):
        visit.values[name] = params[:, low:high].view(visit.values[name].shape)  # the hook changes `params` through it
    rates = np.array([visit.rates[name] for name in names])
    if hidden:  # between the user and the head `kernels_gcn` has three parts more
        starts, rates = np.insert(starts, [1] * 3, starts[1]), np.insert(rates, [1] * 3, 0.0)
    bias = visit.rows[item_bias[0]] if item_bias else torch.empty(0)
    star = torch.empty(0, 5) if model.star is None else model.star(visit.batches.degree)
    loss = np.zeros(clients)
    hooked = "epoch" in visit.used
    for epoch in range(training.epochs if hooked else 1):
        kernels_sgd.sgd_epochs(
            visit.batches.row,
            visit.batches.label.numpy(),
            visit.plan.weight,
            visit.batches.is_own.numpy(),
            visit.plan.per_epoch,
            epoch,
            epoch + 1 if hooked else training.epochs,
            visit.held.offset,
            visit.held.own,
            visit.held.own_offset,
            star.numpy(),
            table.numpy(),
            visit.rates[item],
            extra.numpy(),
            bias.numpy(),
            visit.rates[item_bias[0]] if item_bias else 0.0,
            params.numpy(),
            starts,
            rates,
            np.array([2 * table.shape[1], *hidden, 1]),
            loss,
        )
        if hooked:
            visit.end_epoch(np.arange(clients), np.full(clients, epoch + 1))
    return torch.from_numpy((loss / visit.plan.steps).astype(np.float32))


def _fits(visit: Visit) -> bool:
    """Whether the loop knows how a client trains; gradient hooks are looked at by `_extra`."""
    optimizer = visit.optimizer
    return (
        isinstance(optimizer, SGD)
        and not optimizer.momentum
        and not optimizer.weight_decay
        and not optimizer.keep
        and visit.task.training.loss == "bce"
        and visit.device.type == "cpu"
        and "penalty" not in visit.used
    )


def _parts(visit: Visit) -> tuple[list[str], list[str], list[int]] | None:
    """The parts of a client's parameters, its item tables, and the widths of hidden layers, without which the score is
    a product; None if the model computes something else, as a subclass may.
    """
    model, hidden = visit.task.model, []
    if type(model) is MF:
        names = ["user", "user.bias", "bias"] if model.biases else ["user"]
        tables = ["item", "item.bias"] if model.biases else ["item"]
    elif type(model) is LightGCN and model.score == "dot":
        names, tables = ["user"], ["item"]
    else:
        head = perceptron_of(model, visit.values, visit.rows)
        if head is None or (model.reads_neighbors and model.star is None):
            return None
        names, tables, hidden = list(head.names), [head.item], head.widths[1:-1].tolist()
    return (names, tables, hidden) if set(names) == set(visit.values) and set(tables) == set(visit.rows) else None


def _extra(visit: Visit, item: str) -> Tensor | None:
    """The gradient that the hooks add to every row at every step, f32[N, d], or f32[0, d]; None if they do more."""
    terms = linear_terms(visit.task.defense, visit.streams.within("gradient"))
    if terms is None or any(mechanism.components != (item,) for mechanism, _ in terms):
        return None
    if terms and visit.streams.every is None:  # of the operating system: another one at every step
        return None
    whole = visit._now()
    extra = visit.rows[item][:0]
    for mechanism, streams in terms:
        each = mechanism.vectors(whole, item, streams)
        extra = extra + each if len(extra) else each
    return extra
