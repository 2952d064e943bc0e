"""Generalized matrix factorization under Adam and full batches, a chunk of clients in one compiled loop.

These models are so small (8 factors, one or two steps a visit) that the general way spends its time between operations,
not in them. What is computed is the same: tests hold the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.defenses.base import hooks
from recleak.kernels_gmf import count_rows, gmf_visits, judge_models, place_rows
from recleak.models.base import Params
from recleak.models.mf import GMF
from recleak.training.local import LocalData
from recleak.training.optimizers import Adam, learning_rate
from recleak.training.visit import AGE
from recleak.update import NodeParams, Update, rows_of, values_of

if TYPE_CHECKING:
    from recleak.training.cohort import Task
    from recleak.training.state import ClientStore

_WEIGHT, _BIAS = "head.1.weight", "head.1.bias"
_PARTS = ("user", _WEIGHT, _BIAS)


def fits(task: Task, device: torch.device) -> bool:
    """Whether this loop knows all that happens to a client between a broadcast and its upload hook."""
    training, adam = task.training, task.training.optimizer
    return (
        type(task.model) is GMF
        and isinstance(adam, Adam)
        and not adam.weight_decay
        and not adam.accumulate
        and training.batch_size is None
        and training.loss == "bce"
        and not hooks(task.defense) & {"penalty", "gradient", "epoch", "features"}
        and all(part.shared for part in task.components if part.storage == "per_item")
        and device.type == "cpu"
    )


def train_gmf(task: Task, received: Params, kept: Update, data: LocalData) -> tuple[Update, Update, Tensor]:
    """What clients changed of what they share, what they keep, and the mean loss of each, f32[C]."""
    adam, client = _adam(task), kept.client
    item, offset, row, kept_row = _held(kept, data)
    table = rows_of(received, "item", client.repeat_interleave(offset.diff()), item).contiguous()
    moments = [torch.zeros_like(table), torch.zeros_like(table)]
    if adam.keep:
        for name, moment in zip(adam.moments, moments, strict=True):
            moment[kept_row] = kept.rows[f"item/{name}"]
    small = _Small.of(task, received, kept)
    before, begin = table.clone(), {name: value.clone() for name, value in small.values.items()}
    rows = [each.numpy() for each in (table, *moments)]
    loss = _walk(task, small, rows, row, (offset[:-1].numpy(), offset[1:].numpy()), data)
    changed = {name: small.values[name] - begin[name] for name in small.shared}
    update = Update(client, changed, {"item": table - before}, item, offset, data.n_items, received)
    if not adam.keep:
        none = torch.zeros(0, dtype=torch.int64)
        nowhere = torch.zeros(len(client) + 1, dtype=torch.int64)
        return update, Update(client, small.kept(), {}, none, nowhere, data.n_items), loss
    of_rows = {f"item/{m}": each for m, each in zip(adam.moments, moments, strict=True)}
    return update, Update(client, small.kept(), of_rows, item, offset, data.n_items), loss


def train_nodes(task: Task, params: NodeParams, store: ClientStore, data: LocalData) -> Tensor:
    """The same for nodes that have whole tables of their own, in the place where they are; the mean loss of each.

    Their moments are in a store that has a row for every item (`ClientStore.fill`).
    """
    adam, client = _adam(task), torch.from_numpy(data.client)
    small = _Small.of(task, params, store.read_values(data.client))
    items = np.int64(data.n_items)
    rows = [params["item"].numpy(), *(store.whole(f"item/{name}") for name in adam.moments)]
    flat = [each.reshape(-1, each.shape[-1]) for each in rows]
    row = np.repeat(data.client * items, data.count) + data.item
    loss = _walk(task, small, flat, row, (data.client * items, (data.client + 1) * items), data)
    for name in small.shared:
        if name == "user":
            params[name][client, client] = small.values[name]
        else:
            params[name][client] = small.values[name]
    store.write_values(data.client, small.kept())
    return loss


def judge_nodes(
    params: NodeParams,
    kept: Update,
    node: NDArray[np.int64],
    panel: tuple[NDArray[np.int64], NDArray[np.int64]],
    cutoff: int,
) -> NDArray[np.float32]:
    """How good what a node has is for each judge of `kept`, f32[n]; panel: items, i64[V, K], and offsets by user."""
    of = torch.from_numpy(node)
    user = values_of(params, "user", kept.client, per_user=True, node=of) if "user" in params else kept.values["user"]
    head = params[_WEIGHT][of].squeeze(-1) if _WEIGHT in params else kept.values[_WEIGHT].squeeze(-1)
    out = np.empty(len(node), np.float32)
    turned = (user * head).contiguous().numpy()
    judge_models(params["item"].numpy(), node, turned, kept.client.numpy(), *panel, cutoff, out)
    return out


def direct(task: Task, precision: torch.dtype) -> bool:
    """Whether nodes can train in place: nothing acts on what they change, and tables are as the loop needs them."""
    adam = task.training.optimizer
    plain = fits(task, torch.device("cpu")) and not hooks(task.defense) & {"upload", "data"}
    return plain and adam.keep and precision == torch.float32


def _adam(task: Task) -> Adam:
    if not isinstance(task.training.optimizer, Adam):
        raise AssertionError("see `fits`")
    return task.training.optimizer


@dataclass(frozen=True, eq=False)
class _Small:
    """What is not an item row of C clients: values f32[C, *shape] by component, their moments, and steps made."""

    values: Params
    moments: dict[str, list[Tensor]]
    names: tuple[str, ...]  # of the moments
    shared: tuple[str, ...]
    steps: Tensor  # i64[C]
    epochs: int
    keep: bool

    @classmethod
    def of(cls, task: Task, received: Params, kept: Update) -> _Small:
        adam, clients = _adam(task), kept.n_clients
        parts = {part.name: part for part in task.components}
        values: Params = {}
        for name in _PARTS:
            if name not in parts:
                continue
            if parts[name].shared:
                first = values_of(received, name, kept.client, per_user=name == "user")
                values[name] = first.expand(clients, *parts[name].shape).clone(memory_format=torch.contiguous_format)
            else:
                values[name] = kept.values[name].clone()
        moments = {
            name: [kept.values[f"{name}/{m}"].clone() if adam.keep else torch.zeros_like(value) for m in adam.moments]
            for name, value in values.items()
        }
        steps = kept.values[AGE] if adam.keep else torch.zeros(clients, dtype=torch.int64)
        shared = tuple(name for name in values if parts[name].shared)
        return cls(values, moments, adam.moments, shared, steps, task.training.epochs, adam.keep)

    def flat(self, name: str) -> list[NDArray[np.float32]]:
        """Values and moments, f32[C, d] each; zeros for a component that the model does not have."""
        if name not in self.values:
            return [np.zeros((len(self.steps), 1), np.float32)] * 3
        return [each.numpy().reshape(len(each), -1) for each in (self.values[name], *self.moments[name])]

    def kept(self) -> Params:
        """What clients keep of it until their next visit."""
        own = {name: value for name, value in self.values.items() if name not in self.shared}
        if self.keep:
            for name, moments in self.moments.items():
                own |= {f"{name}/{m}": each for m, each in zip(self.names, moments, strict=True)}
            own[AGE] = self.steps + self.epochs
        return own


def _walk(
    task: Task,
    small: _Small,
    table: list[NDArray[np.float32]],
    row: NDArray[np.int64],
    bounds: tuple[NDArray[np.int64], NDArray[np.int64]],
    data: LocalData,
) -> Tensor:
    """All steps, in place; `table` and its moments are f32[N, d], `row` says where the items of examples are."""
    adam = _adam(task)
    loss = torch.empty(len(data.client))
    bias = [each[:, 0] for each in small.flat(_BIAS)]
    rates = np.array([learning_rate(adam, name) for name in ("item", *_PARTS)], np.float32)
    gmf_visits(
        row, data.label, data.offset, *table, *bounds, *small.flat("user"), *small.flat(_WEIGHT), *bias,
        _BIAS in small.values, small.steps.numpy(), small.epochs, rates, adam.beta1, adam.beta2, adam.epsilon,
        loss.numpy(),
    )  # fmt: skip
    return loss


def _held(kept: Update, data: LocalData) -> tuple[Tensor, Tensor, NDArray[np.int64], Tensor]:
    """The items that clients hold, i64[N], their offsets, and the rows of examples, i64[E], and of what was kept."""
    clients = len(data.client)
    before = kept.item.numpy(), kept.offset.numpy()
    count = np.empty(clients, np.int64)
    count_rows(data.item, data.offset, *before, data.n_items, count)
    offset = np.concatenate([[0], np.cumsum(count)])
    item, row, kept_row = np.empty(offset[-1], np.int64), np.empty_like(data.item), np.empty(len(kept.item), np.int64)
    place_rows(data.item, data.offset, *before, offset, data.n_items, item, row, kept_row)
    return torch.from_numpy(item), torch.from_numpy(offset), row, torch.from_numpy(kept_row)
