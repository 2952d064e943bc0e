"""Perceptrons whose examples are clipped (DP-SGD): sums in a compiled loop, and whole visits where all else is noise.

Anything that a loop does not know leaves the sum, or the visit, to the general way, as in `compiled`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from recleak import kernels_clipped
from recleak.defenses.dp_sgd import noise_keys, noise_terms
from recleak.training.optimizers import Adam
from recleak.training.perceptron import Perceptron, perceptron_of
from recleak.update import Update

if TYPE_CHECKING:
    from recleak.training.batches import Step
    from recleak.training.visit import Visit


def walk_clipped(visit: Visit) -> Tensor | None:
    """All steps of all clients under Adam, with noise on the sums, and the mean loss, f32[C]; None if something else
    happens to gradients.
    """
    adam, bound, head = visit.optimizer, visit.example_bound, _head(visit, visit.values, visit.rows)
    terms = noise_terms(visit.task.defense, visit.streams.within("batch_sum"))
    if head is None or bound is None or terms is None or not isinstance(adam, Adam) or adam.accumulate:
        return None
    if visit.used & {"penalty", "epoch"}:
        return None
    if terms and visit.streams.key is None:  # noise is drawn by the operating system
        return None
    clients, steps = len(visit.client), len(visit.plan.active)
    flat = [head.flat(visit.values)]
    flat += [head.flat({name: visit.moments[name][n] for name in head.names}) for n in range(len(adam.moments))]
    loss = torch.empty(clients)
    kernels_clipped.noisy_visits(
        visit.batches.row,
        visit.batches.label.numpy(),
        visit.plan.weight,
        visit.plan.steps,
        np.zeros(clients, np.int64) if visit.age is None else visit.age.numpy(),
        visit.held.offset,
        visit.held.item,
        *(each.numpy() for each in (visit.rows[head.item], *visit.moments[head.item])),
        visit.rates[head.item],
        *(each.numpy() for each in flat),
        head.widths,
        head.rates(visit.rates),
        adam.beta1,
        adam.beta2,
        adam.epsilon,
        adam.weight_decay,
        bound,
        *noise_keys(terms, visit.streams, (*head.names, head.item), steps),
        loss.numpy(),
    )
    values, *moments = (head.parts(each, visit.values) for each in flat)
    visit.values.update(values)
    visit.moments.update({name: [each[name] for each in moments] for name in head.names})
    return loss


def sum_of_clipped(visit: Visit, whole: Update, batch: Step, loss: Tensor) -> Update | None:
    """The sum of the clipped gradients of each client's examples, as `per_example.clipped_sum` has it; None if the loop
    does not know the model.
    """
    head = _head(visit, whole.values, whole.rows)
    if head is None or visit.example_bound is None:
        return None
    params = head.flat(whole.values)  # f32[A, P]
    of_params, of_rows = torch.empty_like(params), torch.zeros_like(whole.rows[head.item])
    kernels_clipped.clipped_sums(
        batch.row,
        batch.label.numpy(),
        batch.weight.numpy(),
        whole.rows[head.item].numpy(),
        params.numpy(),
        head.widths,
        visit.example_bound,
        of_rows.numpy(),
        of_params.numpy(),
        loss.numpy(),
    )
    parts = head.parts(of_params, whole.values)
    values = {name: parts[name].contiguous() for name in whole.values}
    return replace(whole, values=values, rows={head.item: of_rows})


def _head(visit: Visit, values: dict[str, Tensor], rows: dict[str, Tensor]) -> Perceptron | None:
    """The perceptron that the clients train, on plain rows and under cross-entropy."""
    model, training = visit.task.model, visit.task.training
    if training.loss != "bce" or visit.device.type != "cpu" or model.star is not None:
        return None
    return perceptron_of(model, values, rows)
