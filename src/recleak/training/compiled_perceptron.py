"""Visits under a fresh Adam that have a compiled loop: perceptrons (NCF, LightGCN).

Anything that the loop does not know leaves the visit to the general way, as in `compiled`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recleak import kernels_perceptron
from recleak.defenses.proximal import Norm
from recleak.training.optimizers import Adam, DirectRows, LazyRows
from recleak.training.perceptron import perceptron_of

if TYPE_CHECKING:
    from recleak.training.visit import Visit


def walk_perceptron(visit: Visit, rows: dict[str, LazyRows | DirectRows]) -> Tensor | None:
    """All steps of all clients, and the mean loss, f32[C]; None if the loop does not know the model, or something that
    happens to a client beside it. `rows` are how item rows are stepped.
    """
    head, adam = perceptron_of(visit.task.model, visit.values, visit.rows), visit.optimizer
    if head is None or not _fits(visit, head.item) or not isinstance(adam, Adam):
        return None
    params = head.flat(visit.values)  # f32[C, P]
    loss = torch.empty(len(visit.client))
    widths, rates = head.widths, head.rates(visit.rates)
    batches = (
        visit.batches.row,
        visit.batches.label.numpy(),
        visit.plan.weight,
        visit.plan.steps,
        visit.held.offset,
    )
    lazy = rows[head.item]
    if isinstance(lazy, LazyRows):
        kernels_perceptron.perceptron_visits(
            *batches,
            lazy.table,
            lazy.last,
            lazy.first,
            lazy.moves.moves,
            lazy.moves.decay,
            lazy.moves.sizes,
            lazy.rate,
            params.numpy(),
            widths,
            rates,
            adam.beta1,
            adam.beta2,
            adam.epsilon,
            loss.numpy(),
        )
    else:
        table = visit.rows[head.item]
        kernels_perceptron.perceptron_visits_of_all_rows(
            *batches,
            visit.batches.is_own.numpy(),
            visit.held.own,
            visit.held.own_offset,
            _star(visit).numpy(),
            table.numpy(),
            (table if visit.start is None else visit.start.rows[head.item]).numpy(),
            _strength(visit, "plain"),
            _strength(visit, "squared"),
            visit.rates[head.item],
            params.numpy(),
            widths,
            rates,
            adam.beta1,
            adam.beta2,
            adam.epsilon,
            adam.weight_decay,
            adam.accumulate,
            loss.numpy(),
        )
    visit.values.update(head.parts(params, visit.values))
    return loss


def _fits(visit: Visit, item: str) -> bool:
    """Whether the loops know all that happens to a client beside its model, which has these item rows."""
    return (
        visit.task.training.loss == "bce"
        and visit.device.type == "cpu"
        and not visit.optimizer.keep
        and not visit.used & {"gradient", "epoch"}
        and (visit.task.model.star is not None or not visit.task.model.reads_neighbors)
        and visit.terms is not None
        and all(term.components == (item,) for term in visit.terms)
    )


def _star(visit: Visit) -> Tensor:
    """How the model propagates vectors, f32[C, 5]."""
    if visit.task.model.star is None:
        return torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]).repeat(len(visit.client), 1)
    return visit.task.model.star(visit.batches.degree)


def _strength(visit: Visit, norm: Norm) -> float:
    """Of the proximal terms with this norm, together."""
    return float(sum(term.strength for term in visit.terms or () if term.norm == norm))
