"""The batches of a chunk of clients at each of their steps, with what models read beside items.

Axis letters: C clients, A active ones, B items in a batch, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.defenses.base import hooks
from recleak.models.base import Batch
from recleak.streams import Streams

if TYPE_CHECKING:
    from recleak.training.cohort import Task
    from recleak.training.visit import Visit


@dataclass(frozen=True, eq=False)
class Step:
    """The batches of the active clients at one step; with a pairwise loss the preferred items come first."""

    row: NDArray[np.int64]  # i64[A, B]: places in the flat table
    label: Tensor  # f32[A, B]
    weight: Tensor  # f32[A, B]; with a pairwise loss f32[A, B / 2]
    inputs: Batch


class Batches:
    """Hands out the batches of a visit."""

    def __init__(self, visit: Visit) -> None:
        self.visit, held, task, device = visit, visit.held, visit.task, visit.device
        clients = len(visit.client)
        example = visit.plan.example  # i64[S, C, B]
        label = visit.data.label[example]
        self.row = held.of_item[example]
        if held.of_against is not None:
            self.row = np.concatenate([self.row, held.of_against[example]], axis=2)
            label = np.concatenate([label, np.zeros_like(label)], axis=2)
        self.label = torch.from_numpy(label).to(device)
        self._weight = torch.from_numpy(visit.plan.weight).to(device)
        is_own = np.zeros(len(held.item), bool)
        is_own[held.own] = True
        self.is_own = torch.from_numpy(is_own[self.row]).to(device)
        self.degree = torch.from_numpy(np.diff(held.own_offset).astype(np.float32)).to(device)
        self._own = visit._put(held.own)
        self._own_owner = torch.repeat_interleave(torch.arange(clients, device=device), self.degree.long())
        self.features = features_of(task, visit.client)
        self.item_features = None if task.item_features is None else task.item_features.to(device)[visit.item]
        self.neighbor_features = None if self.item_features is None else self._sum(self.item_features, clients)

    def own(self, now: int) -> tuple[Tensor, Tensor]:
        """The rows of the first clients' own items, and the position of their client."""
        n = int(self.visit.held.own_offset[now])
        return self._own[:n], self._own_owner[:n]

    def _sum(self, rows: Tensor, now: int) -> Tensor:
        own, owner = self.own(now)
        return rows.new_zeros(now, *rows.shape[1:]).index_add_(0, owner, rows.index_select(0, own))

    def at(self, step: int, now: int) -> Step:
        """The batches of the first `now` clients."""
        visit = self.visit
        row, label, weight = self.row[step, :now], self.label[step, :now], self._weight[step, :now]
        own, reads, features = self.is_own[step, :now], visit.task.model.reads_neighbors, self.item_features
        if not reads and features is None and self.features is None:
            return Step(row, label, weight, Batch(own, self.degree[:now]))
        inputs = Batch(
            own=own,
            degree=self.degree[:now],
            neighbors={name: self._sum(value, now) for name, value in visit.rows.items()} if reads else {},
            user_features=None if self.features is None else self.features[:now],
            item_features=None
            if features is None
            else features.index_select(0, visit._put(row.reshape(-1))).view(now, -1, features.shape[1]),
            neighbor_features=None if self.neighbor_features is None else self.neighbor_features[:now],
        )
        return Step(row, label, weight, inputs)


def features_of(task: Task, client: Tensor) -> Tensor | None:
    """The user features that clients work with, f32[C, F]: a defense changes them once, and not anew in each round."""
    if task.user_features is None:
        return None
    features = task.user_features.to(client.device)[client]
    if "features" in hooks(task.defense):
        features = task.defense.features(features, Streams.simulated(task.seed, 0, client).within("features"))
    return features
