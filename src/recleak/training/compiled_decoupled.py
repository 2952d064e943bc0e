"""Visits of PARD's recommender under plain SGD, one epoch each, that have a compiled loop.

Estimators make their steps before it (`defenses.decoupling.Decoupling.alternate`). Anything that the loop does not know
leaves the visit to the general way, as in `compiled`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from recleak import kernels_decoupled
from recleak.defenses.decoupling import Decoupling, Terms, decoupling_of
from recleak.kernels import F32, I64
from recleak.models.decoupled import Decoupled
from recleak.training.optimizers import SGD

if TYPE_CHECKING:
    from recleak.training.visit import Visit

_BOUND = {"plain": kernels_decoupled.PLAIN, "clamped": kernels_decoupled.CLAMPED, "club": kernels_decoupled.CLUB}


def walk_decoupled(visit: Visit) -> Tensor | None:
    """All steps of all clients, and the mean loss, f32[C]; None if the loop does not know something about them."""
    model, defense = visit.task.model, decoupling_of(visit.task.defense)
    if type(model) is not Decoupled or defense is None or not _fits(visit, model):
        return None
    clients, d = len(visit.client), model.factors
    if "alternate" in visit.used:
        visit.alternate_all()
    names = [name for name in visit.values if name.startswith("head.")]
    weights = [visit.values[name] for name in names if name.endswith(".weight")]
    parts = ["user", "user.private", *names]
    params = torch.cat([visit.values[name].reshape(clients, -1) for name in parts], dim=1)  # f32[C, P]
    ends = np.cumsum([0, *(visit.values[name][0].numel() for name in parts)])
    for name, low, high in zip(parts, ends, ends[1:], strict=False):
        visit.values[name] = params[:, low:high].view(visit.values[name].shape)
    rates = [0.0] * 4 + [visit.rates[name] for name in names]
    starts = np.concatenate([np.zeros(4, np.int64), ends[2:]])  # four parts that this model does not have
    terms = _terms(visit, defense)
    loss = np.zeros(clients)
    kernels_decoupled.decoupled_visits(
        visit.batches.row,
        visit.batches.label.numpy(),
        visit.plan.weight,
        visit.batches.is_own.numpy(),
        visit.plan.steps,
        visit.held.own,
        visit.held.own_offset,
        model.graph,
        model.combine == "sum",
        visit.rows["item"].numpy(),
        visit.rates["item"],
        params.numpy(),
        starts,
        np.array(rates),
        np.array([visit.rates["user"], visit.rates["user.private"]]),
        np.array([*(weight.shape[1] for weight in weights), 1]),
        *_estimators(visit, defense, terms, d),
        terms.mu.contiguous().numpy(),
        np.array(terms.is_number, bool),
        terms.prior.contiguous().numpy(),
        terms.share.contiguous().numpy(),
        terms.guess.contiguous().numpy(),
        _BOUND[defense.bound],
        defense.reads == "mean",
        defense.pairs,
        defense.irrelevant if terms.names else 0.0,
        defense.relevant if terms.names else 0.0,
        loss,
    )
    return torch.from_numpy((loss / visit.plan.steps).astype(np.float32))


def _fits(visit: Visit, model: Decoupled) -> bool:
    """Whether the loop knows how a client trains."""
    optimizer, training = visit.optimizer, visit.task.training
    return (
        isinstance(optimizer, SGD)
        and not optimizer.momentum
        and not optimizer.weight_decay
        and not optimizer.keep
        and training.loss == "bce"
        and training.epochs == 1
        and not training.turns
        and len(model.hidden) > 0
        and visit.device.type == "cpu"
        and set(visit.rows) == {"item"}
        and not visit.used & {"penalty", "gradient", "epoch", "batch_sum"}
    )


def _terms(visit: Visit, defense: Decoupling) -> Terms:
    """What the terms of the loss need beside the estimators."""
    now = len(visit.client)
    return defense.terms(visit.scene(visit.batches.at(0, now), now), visit.values["user.private"])


def _estimators(visit: Visit, defense: Decoupling, terms: Terms, d: int) -> tuple[F32, I64, I64]:
    """All numbers of the estimators that are read at a step, f32[C, Q], where each begins, and how it lies."""
    layers = len(defense.hidden) + 1
    firsts = np.zeros((len(terms.names), 2), np.int64)
    layouts = np.zeros((len(terms.names), 2, 3, layers + 1), np.int64)
    flat: list[Tensor] = [torch.empty(len(visit.client), 0)]
    at = 0
    for place, (attribute, classes) in enumerate(terms.names.items()):
        for which, (kind, inputs, rows) in enumerate((("irrelevant", 2 * d, defense.pairs), ("forward", d, 1))):
            widths = np.array([inputs, *defense.hidden, classes])
            layout = layouts[place, which]
            layout[0] = widths
            layout[1, 1:] = np.cumsum((widths[:-1] + 1) * widths[1:])
            layout[2, 1:] = np.cumsum(rows * widths[1:])
            firsts[place, which] = at
            if kind not in defense.kinds:
                continue
            prefix = f"estimator.{kind}.{attribute}."
            flat += [value.flatten(1) for name, value in visit.values.items() if name.startswith(prefix)]
            at += layout[1, -1]
    return torch.cat(flat, dim=1).numpy(), firsts, layouts
