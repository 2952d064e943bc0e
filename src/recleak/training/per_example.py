"""The gradients of single examples, clipped and summed: a step of DP-SGD for a chunk of clients.

Every pair of a client and an example of its batch is a client with this one example, for the model as for automatic
differentiation. Axis letters: A active clients, B examples in a batch, P pairs, W items of an example (two with a
pairwise loss).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recleak.defenses.clipping import scaled, shrinkage, squared_norms
from recleak.models.base import Batch, Params
from recleak.training.compiled_clipped import sum_of_clipped
from recleak.update import Update

if TYPE_CHECKING:
    from recleak.training.batches import Step
    from recleak.training.visit import Visit

_NUMBERS = 1 << 22  # parameters of pairs in memory at a time, and as many gradients
_LANES = 32  # pairs at a time are a multiple: what does not fill a register has other last bits


def mean_of_clipped(visit: Visit, step: int, whole: Update, batch: Step, loss: Tensor) -> Update:
    """The sum of each client's clipped gradients after the hook, divided by the size of its batch.

    `whole` are the parameters of the active clients; their mean loss is added to `loss`, f32[A].
    """
    total = clipped_sum(visit, whole, batch, loss)
    if "batch_sum" in visit.used:
        total = visit.task.defense.batch_sum(total, visit.streams_at(step, whole.n_clients).within("batch_sum"))
    size = (batch.weight > 0).sum(1)  # i64[A]

    def divided(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
        by = size if owner is None else size[owner]
        return tensor / by.reshape(-1, *[1] * (tensor.dim() - 1))

    return total.map(divided)


def clipped_sum(visit: Visit, whole: Update, batch: Step, loss: Tensor) -> Update:
    """The sum over each client's batch of its examples' gradients, each clipped to the bound of the defense.

    The norm of an example is over all that is trained, shared or kept.
    """
    if visit.example_bound is None:
        raise AssertionError("only asked where examples are clipped")
    if (known := sum_of_clipped(visit, whole, batch, loss)) is not None:
        return known
    total = whole.map(lambda name, tensor, owner: torch.zeros_like(tensor))
    for pairs in _Pairs.of(batch).split(whole):
        each = torch.zeros(len(pairs.client), device=loss.device)
        gradients = _joined(visit.gradients(pairs.params(whole), pairs.alone(batch), each), total, pairs.row)
        factor = shrinkage(reduce(torch.add, map(squared_norms, gradients.values())), visit.example_bound)  # f64[P]
        n = pairs.real
        for name, value in total.values.items():
            value.index_add_(0, pairs.client[:n], scaled(gradients[name], factor)[:n])
        for name, value in total.rows.items():
            value.index_add_(0, pairs.row[:n].flatten(), scaled(gradients[name], factor)[:n].flatten(0, 1))
        loss.index_add_(0, pairs.client[:n], (each * pairs.weight)[:n])
    return total


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Clients with one example each, client after client."""

    client: Tensor  # i64[P]: the position of the client
    row: Tensor  # i64[P, W]: places in the flat table of item rows
    label: Tensor  # f32[P, W]
    weight: Tensor  # f32[P]: of the example in the mean loss of its batch
    real: int  # so many of them; the rest repeats the last one, to fill a register

    @classmethod
    def of(cls, batch: Step) -> _Pairs:
        """All pairs of a step; the padding of batches is left out."""
        client, slot = (batch.weight > 0).nonzero(as_tuple=True)
        clients, width = batch.weight.shape
        row = torch.from_numpy(batch.row).to(client.device).reshape(clients, -1, width)
        label = batch.label.reshape(clients, -1, width)
        weight = batch.weight[client, slot]
        return cls(client, row[client, :, slot], label[client, :, slot], weight, len(client))

    def split(self, whole: Update) -> Iterator[_Pairs]:
        """So many at a time that their parameters fit into the working memory."""
        numbers = sum(value[0].numel() for value in whole.values.values())
        numbers += self.row.shape[1] * sum(value[:1].numel() for value in whole.rows.values())
        together = max(1, _NUMBERS // max(1, numbers) // _LANES) * _LANES
        for start in range(0, self.real, together):
            real = min(together, self.real - start)
            place = torch.arange(-(-real // _LANES) * _LANES, device=self.client.device).clamp(max=real - 1) + start
            yield _Pairs(self.client[place], self.row[place], self.label[place], self.weight[place], real)

    def params(self, whole: Update) -> Params:
        """The parameters of each pair: its client's, f32[P, *shape], and the rows of its items, f32[P, W, *shape]."""
        params = {name: value.index_select(0, self.client) for name, value in whole.values.items()}
        for name, value in whole.rows.items():
            params[name] = value.index_select(0, self.row.flatten()).view(*self.row.shape, *value.shape[1:])
        return params

    def alone(self, batch: Step) -> Step:
        """The batches of clients that have this example and no other."""
        own, features = self.label > 0, batch.inputs.user_features
        features = None if features is None else features.index_select(0, self.client)
        weight = torch.ones(len(self.client), 1, device=self.client.device)
        inputs = Batch(own, own.sum(1).float(), user_features=features)
        return replace(batch, row=self.row.cpu().numpy(), label=self.label, weight=weight, inputs=inputs)


def _joined(gradients: Params, total: Update, row: Tensor) -> Params:
    """The gradients where an example that has the same item twice has one gradient for its row: the sum of both."""
    twice = row[:, 0] == row[:, -1]
    if row.shape[1] == 1 or not bool(twice.any()):
        return gradients
    joined = dict(gradients)
    for name in total.rows:
        rows = joined[name].clone()
        rows[twice, 0], rows[twice, 1] = rows[twice].sum(1), torch.zeros_like(rows[twice, 1])
        joined[name] = rows
    return joined
