"""Generalized matrix factorization under Adam and full batches, a chunk of clients in one compiled loop.

These models are so small (8 factors, one or two steps a visit) that the general way spends its time between operations,
not in them. What is computed is the same: tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.defenses.base import Defense, hooks
from recleak.defenses.dp_sgd import noise_keys, noise_terms
from recleak.kernels_gmf import (
    adam_step,
    clipped_sums,
    count_rows,
    gmf_visits,
    judge_models,
    noisy_visits,
    place_rows,
)
from recleak.models.base import Params
from recleak.models.mf import GMF
from recleak.streams import Streams
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
        and not training.turns
        and _knows(task.defense)
        and all(part.shared for part in task.components if part.storage == "per_item")
        and device.type == "cpu"
    )


def _knows(defense: Defense) -> bool:
    """Whether nothing of a defense acts between the steps but on gradients, of examples, their sum or their mean."""
    return not hooks(defense) & {"alternate", "objective", "penalty", "epoch", "features"}


def train_gmf(
    task: Task, received: Params, kept: Update, data: LocalData, streams: Streams
) -> tuple[Update, Update, Tensor]:
    """What clients changed of what they share, what they keep, and the mean loss of each, f32[C]."""
    adam, client = _adam(task), kept.client
    item, offset, row, kept_row = _held(kept, data, every=task.defense.holds_every_row)
    table = rows_of(received, "item", client.repeat_interleave(offset.diff()), item).contiguous()
    moments = [torch.zeros_like(table), torch.zeros_like(table)]
    if adam.keep:
        for name, moment in zip(adam.moments, moments, strict=True):
            moment[kept_row] = kept.rows[f"item/{name}"]
    small = _Small.of(task, received, kept)
    before, begin = table.clone(), {name: value.clone() for name, value in small.values.items()}
    if "user" in small.shared and "user" in small.stays:  # its row is sent: others know what was sent last
        begin["user"] = values_of(received, "user", client, per_user=True)
    rows = [each.numpy() for each in (table, *moments)]
    bounds = offset[:-1].numpy(), offset[1:].numpy()
    if "gradient" not in hooks(task.defense):
        loss = _walk(task, small, rows, row, bounds, data)
    else:
        whole = Update(client, small.values, {"item": table}, item, offset, data.n_items, received)
        noisy = _walk_noisy(task, small, whole, moments, row, data, streams)
        loss = _walk_hooked(task, small, whole, moments, row, data, streams) if noisy is None else noisy
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
    acts = hooks(task.defense) & {"upload", "data", "gradient"}
    plain = fits(task, torch.device("cpu")) and not acts
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
    stays: tuple[str, ...]
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
            if name in kept.values:
                values[name] = kept.values[name].clone()
            else:
                first = values_of(received, name, kept.client, per_user=name == "user")
                values[name] = first.expand(clients, *parts[name].shape).clone(memory_format=torch.contiguous_format)
        moments = {
            name: [kept.values[f"{name}/{m}"].clone() if adam.keep else torch.zeros_like(value) for m in adam.moments]
            for name, value in values.items()
        }
        steps = kept.values[AGE] if adam.keep else torch.zeros(clients, dtype=torch.int64)
        shared = tuple(name for name in values if parts[name].shared)
        stays = tuple(name for name in values if parts[name].stays)
        return cls(values, moments, adam.moments, shared, stays, steps, task.training.epochs, adam.keep)

    def flat(self, name: str) -> list[NDArray[np.float32]]:
        """Values and moments, f32[C, d] each; zeros for a component that the model does not have."""
        if name not in self.values:
            return [np.zeros((len(self.steps), 1), np.float32)] * 3
        return [each.numpy().reshape(len(each), -1) for each in (self.values[name], *self.moments[name])]

    def kept(self) -> Params:
        """What clients keep of it until their next visit."""
        own = {name: self.values[name] for name in self.stays}
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


def _walk_noisy(
    task: Task,
    small: _Small,
    whole: Update,
    moments: list[Tensor],
    row: NDArray[np.int64],
    data: LocalData,
    streams: Streams,
) -> Tensor | None:
    """All steps with clipped examples and noise on their sums, in place, a client at a time; None if a defense does
    something else to gradients, or draws from the operating system.
    """
    adam, bound = _adam(task), task.defense.example_bound
    terms = noise_terms(task.defense, streams.within("batch_sum"))
    if bound is None or terms is None or (terms and streams.key is None):
        return None
    clients, names = len(data.client), ("item", *_PARTS)
    loss = torch.empty(clients)
    ends = whole.offset.numpy()
    noisy_visits(
        row, data.label, data.offset, whole.item.numpy(), *(each.numpy() for each in (whole.rows["item"], *moments)),
        ends[:-1], ends[1:], *small.flat("user"), *small.flat(_WEIGHT), *small.flat(_BIAS),
        _BIAS in small.values, small.steps.numpy(), small.epochs,
        np.array([learning_rate(adam, name) for name in names], np.float32),
        adam.beta1, adam.beta2, adam.epsilon, bound,
        *noise_keys(terms, streams, names, small.epochs), loss.numpy(),
    )  # fmt: skip
    return loss


def _walk_hooked(
    task: Task,
    small: _Small,
    whole: Update,
    moments: list[Tensor],
    row: NDArray[np.int64],
    data: LocalData,
    streams: Streams,
) -> Tensor:
    """All steps with clipped examples, where they are, and the hooks on their sum and their mean; `whole` is what
    clients have, changed in place.
    """
    adam, defense = _adam(task), task.defense
    clip = inf if defense.example_bound is None else defense.example_bound
    clients, size = len(data.client), torch.from_numpy(data.count)
    loss, noisy = torch.zeros(clients), defense.example_bound is not None and "batch_sum" in hooks(defense)

    def divided(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
        return tensor / (size if owner is None else size[owner]).reshape(-1, *[1] * (tensor.dim() - 1))

    for step in range(small.epochs):
        total = whole.map(lambda name, tensor, owner: torch.zeros_like(tensor))
        user, head, bias = (_flat_value(whole.values.get(name), clients) for name in _PARTS)
        of_user, of_head, of_bias = (_flat_value(total.values.get(name), clients) for name in _PARTS)
        clipped_sums(
            row, data.label, data.offset, whole.rows["item"].numpy(), user, head, bias[:, 0], _BIAS in whole.values,
            clip, total.rows["item"].numpy(), of_user, of_head, of_bias[:, 0], loss.numpy(),
        )  # fmt: skip
        if noisy:
            total = defense.batch_sum(total, streams.at(step).within("batch_sum"))
        mean = defense.gradient(total.map(divided), streams.at(step).within("gradient"))
        _step_all(adam, whole, {**small.moments, "item": moments}, mean, small.steps + step + 1)
    return loss / small.epochs


def _step_all(adam: Adam, whole: Update, moments: Mapping[str, list[Tensor]], gradient: Update, time: Tensor) -> None:
    """One step of Adam on all that clients have, in place; `time` i64[C] counts the steps of each from 1."""
    one_each = torch.arange(whole.n_clients + 1)

    def stepped(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
        slope = (gradient.values if owner is None else gradient.rows)[name].contiguous()
        ends = (one_each if owner is None else whole.offset).numpy()
        flat = (each.numpy().reshape(len(tensor), -1) for each in (tensor, *moments[name], slope))
        rate = learning_rate(adam, name)
        adam_step(*flat, ends[:-1], ends[1:], time.numpy(), rate, adam.beta1, adam.beta2, adam.epsilon)
        return tensor

    whole.map(stepped)


def _flat_value(value: Tensor | None, clients: int) -> NDArray[np.float32]:
    """f32[C, d]; zeros for a component that the model does not have."""
    return np.zeros((clients, 1), np.float32) if value is None else value.numpy().reshape(clients, -1)


def _held(kept: Update, data: LocalData, *, every: bool) -> tuple[Tensor, Tensor, NDArray[np.int64], Tensor]:
    """The items that clients hold, i64[N], their offsets, and the rows of examples, i64[E], and of what was kept."""
    clients, n_items = len(data.client), data.n_items
    before = kept.item.numpy(), kept.offset.numpy()
    if every:
        all_rows = np.tile(np.arange(n_items), clients)
        own = kept.client.new_tensor(np.repeat(np.arange(clients), np.diff(before[1])) * n_items) + kept.item
        row = np.repeat(np.arange(clients) * n_items, data.count) + data.item
        return torch.from_numpy(all_rows), torch.arange(clients + 1) * n_items, row, own
    count = np.empty(clients, np.int64)
    count_rows(data.item, data.offset, *before, data.n_items, count)
    offset = np.concatenate([[0], np.cumsum(count)])
    item, row, kept_row = np.empty(offset[-1], np.int64), np.empty_like(data.item), np.empty(len(kept.item), np.int64)
    place_rows(data.item, data.offset, *before, offset, data.n_items, item, row, kept_row)
    return torch.from_numpy(item), torch.from_numpy(offset), row, torch.from_numpy(kept_row)
