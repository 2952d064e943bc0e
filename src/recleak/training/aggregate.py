"""What a server makes of a round's updates: sums first, and only then means, divided by public constants."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from recleak.models.base import Params
from recleak.models.components import Component
from recleak.update import Update
from recleak.wire import Aggregate

Aggregation = Literal["mean", "touched-mean", "weighted", "sum"]


class Summation:
    """The weighted sum of updates, block by block. The order of blocks is part of the result's last bits."""

    def __init__(self, params: Params, components: tuple[Component, ...], *, count_rows: bool) -> None:
        """`params` are the shared components, only for their shapes; `count_rows` also sums who sent each row."""
        self._storage = {part.name: part.storage for part in components if part.shared}
        self._plain = unaveraged(components)
        self._total = {name: torch.zeros_like(params[name]) for name in self._storage}
        items = [name for name, storage in self._storage.items() if storage == "per_item"]
        self._touched = {name: params[name].new_zeros(len(params[name])) for name in items if count_rows}
        self._clients: list[Tensor] = []
        self._weight = 0.0

    def add(self, update: Update, weight: Tensor) -> None:
        """Add w_c times the update of each client; `weight` is f32[C]."""
        for name, value in update.values.items():
            weighted = value if name in self._plain else value * weight.reshape(-1, *[1] * (value.dim() - 1))
            if self._storage[name] == "per_user":
                self._total[name].index_add_(0, update.client, weighted)
            else:
                self._total[name] += weighted.sum(0)
        of_row = weight.index_select(0, update.owner)  # f32[N]
        plain = bool((weight == 1).all())
        for name, value in update.rows.items():
            weighted = value if plain else value * of_row.reshape(-1, *[1] * (value.dim() - 1))
            self._total[name].index_add_(0, update.item, weighted)
            if name in self._touched:
                self._touched[name].index_add_(0, update.item, of_row)
        self._clients.append(update.client)
        self._weight += float(weight.sum(dtype=torch.float64))

    def result(self, round: int) -> Aggregate:
        """What an aggregator behind secure aggregation sees."""
        client = torch.cat(self._clients) if self._clients else torch.zeros(0, dtype=torch.int64)
        return Aggregate(round, client, self._total, self._touched, self._weight)


def unaveraged(components: tuple[Component, ...]) -> frozenset[str]:
    """The shared components whose rows stay as their clients made them."""
    return frozenset(part.name for part in components if part.shared and not part.averaged)


def apply(
    params: Params,
    aggregate: Aggregate,
    how: Aggregation,
    server_learning_rate: float = 1.0,
    plain: frozenset[str] = frozenset(),
) -> Params:
    """The next global parameters; components in `plain` are not averaged.

    `mean` divides by all participants, also those that never touched an item's row (as most published codes do);
    `weighted` is the same with each client's weight, its number of positives (McMahan et al. 2017);
    `touched-mean` divides each item row by the clients that sent it (and all else by all participants);
    `sum` does not divide: the step grows with the number of clients, and training diverges for all but tiny cohorts.
    (APM, Eq. 9, and IMIA, Eq. 6, write the sum of the models, which would multiply the weights themselves too.)
    """
    if not aggregate.weight > 0:
        return params
    changed = {}
    for name, value in params.items():
        total, scale = aggregate.total[name], server_learning_rate
        if name in plain:
            scale = 1.0
        elif how == "touched-mean" and name in aggregate.touched:
            share = aggregate.touched[name].reshape(-1, *[1] * (value.dim() - 1))
            total = torch.where(share > 0, total / share.clamp(min=torch.finfo(total.dtype).tiny), 0.0)
        elif how != "sum":
            scale = server_learning_rate / aggregate.weight
        changed[name] = torch.add(value, total, alpha=scale)
    return changed
