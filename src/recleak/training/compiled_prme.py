"""PRME-G under SGD, one example at a step, a chunk of clients in one compiled loop; and its scores in context.

There is no other way to train this model, so what the loop does not know is refused when a task is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.data.sequences import Transitions
from recleak.defenses.base import hooks
from recleak.errors import ConfigError
from recleak.geometry import EARTH
from recleak.kernels_prme import prme_visits, scores_after
from recleak.models.base import Params
from recleak.models.components import Component
from recleak.models.prme import PRMEG
from recleak.training.local import shuffles
from recleak.training.optimizers import SGD, learning_rate
from recleak.training.transitions import LocalTransitions
from recleak.update import NodeParams, Update, rows_of, values_of

if TYPE_CHECKING:
    from recleak.training.cohort import Task
    from recleak.training.state import ClientStore

_Rows: TypeAlias = tuple[NDArray[np.int64], ...]  # i64[E] each: where before, item and against of examples are
_USER, _TABLES = "user", ("item.preference", "item.sequence")
_REFUSED = {"data", "features", "alternate", "objective", "penalty", "batch_sum", "gradient", "epoch"}


def check(task: Task) -> None:
    """An error if a task that learns from transitions asks for something that the loop does not do."""
    model, training, sgd = task.model, task.training, task.training.optimizer
    if type(model) is not PRMEG:
        raise ConfigError(f"Got {type(model).__name__}, which needs transitions, expected PRMEG: it has the only loop.")
    plain = isinstance(sgd, SGD) and not sgd.momentum and not sgd.keep
    if not plain or training.batch_size != 1 or training.loss != "bpr" or training.decay_rows != "active":
        raise ConfigError(
            f"PRMEG got {sgd}, batch_size {training.batch_size}, loss {training.loss!r} and decay_rows "
            f"{training.decay_rows!r}, expected plain SGD, an example at a step.\n"
            '  Use LocalTraining(batch_size=1, optimizer=SGD(0.005, weight_decay=0.06), loss="bpr", negatives=1).'
        )
    if used := hooks(task.defense) & _REFUSED:
        raise ConfigError(
            f"{task.defense!r} acts on {', '.join(sorted(used))} of local training, which PRMEG goes through in one "
            "compiled loop.\n  Use a defense that acts on sharing or uploads, or another model."
        )
    if kept := [part.name for part in task.components if part.name in _TABLES and not part.shared]:
        raise ConfigError(f"{', '.join(kept)} of PRMEG is kept, expected item tables to be shared; `user` may be kept.")


# --- training ---------------------------------------------------------------------------------------------------------


def train_prme(
    task: Task, received: Params, kept: Update, data: LocalTransitions, round: int
) -> tuple[Update, Update, Tensor]:
    """What clients changed of what they share, what they keep, and the mean loss of each, f32[C]."""
    if kept.client.device.type != "cpu":
        raise ConfigError(f"Got PRMEG on {kept.client.device}, expected cpu: its loop is compiled for nothing else.")
    item, offset, rows = _held(data)
    owner = kept.client.repeat_interleave(offset.diff())
    before = {name: rows_of(received, name, owner, item) for name in _TABLES}
    tables = {name: value.clone(memory_format=torch.contiguous_format) for name, value in before.items()}
    part = _user(task)
    user = _users(task, received, kept).clone()
    loss = _walk(task, tables, rows, user, data, round)
    values = {_USER: user - values_of(received, _USER, kept.client, per_user=True)} if part.shared else {}
    changes = {name: value.sub_(before[name]) for name, value in tables.items()}
    update = Update(kept.client, values, changes, item, offset, data.n_items, received)
    return update, _values(kept, {_USER: user} if part.stays else {}), loss


def train_nodes(task: Task, params: NodeParams, store: ClientStore, data: LocalTransitions, round: int) -> Tensor:
    """The same for nodes that have whole tables of their own, in the place where they are; the mean loss of each.

    Tables in half precision give out the rows that are read, and take them back when all steps are made.
    """
    client = torch.from_numpy(data.client)
    user = _users(task, params, store.read_values(data.client)).clone()
    whole = {name: params[name].view(-1, params[name].shape[-1]) for name in _TABLES}  # [U I, d] each
    if whole[_TABLES[0]].dtype == torch.float32:
        start = np.repeat(data.client * data.n_items, data.count)
        rows: _Rows = (start + data.before, start + data.item, start + data.against)
        loss = _walk(task, whole, rows, user, data, round)
    else:
        item, offset, rows = _held(data)
        place = client.repeat_interleave(offset.diff()) * data.n_items + item
        tables = {name: value.index_select(0, place).float() for name, value in whole.items()}
        loss = _walk(task, tables, rows, user, data, round)
        for name, value in tables.items():
            whole[name].index_copy_(0, place, value.to(whole[name].dtype))
    if _user(task).shared:
        params[_USER][client, client] = user.to(params[_USER].dtype)
    else:
        store.write_values(data.client, {_USER: user})
    return loss


def direct(task: Task) -> bool:
    """Whether nodes can train in place: the model is this one, and nothing acts on what they change."""
    return type(task.model) is PRMEG and "upload" not in hooks(task.defense)


def _walk(
    task: Task,
    tables: Params,
    rows: _Rows,
    user: Tensor,
    data: LocalTransitions,
    round: int,
) -> Tensor:
    """All steps, in place."""
    model, training = _model(task), task.training
    near = model.is_near(torch.from_numpy(data.gap)).numpy()
    weights = ((1 + each) ** np.float32(model.distance_exponent) for each in (data.distance, data.distance_against))
    orders = shuffles(
        data.client, data.count, epochs=training.epochs, seed=task.seed, round=round, shuffle=training.shuffle
    )
    order = np.concatenate([each.ravel() + start for each, start in zip(orders, data.offset, strict=False)])
    rates = np.array([learning_rate(training.optimizer, name) for name in (_USER, *_TABLES)], np.float32)
    loss = torch.empty(len(data.client))
    prme_visits(
        order, training.epochs * data.offset, *rows, near, *weights, *(tables[name].numpy() for name in _TABLES),
        user.numpy(), model.component_weight, rates, training.optimizer.weight_decay, loss.numpy(),
    )  # fmt: skip
    return loss


def _held(data: LocalTransitions) -> tuple[Tensor, Tensor, _Rows]:
    """The items that clients hold, i64[N] ascending within a client, their offsets, and the rows of the examples."""
    start = data.owner * data.n_items
    keys = (start + data.before, start + data.item, start + data.against)
    held = np.sort(np.concatenate(keys))
    held = held[np.diff(held, prepend=-1) > 0]
    offset = np.searchsorted(held, np.arange(len(data.client) + 1) * data.n_items)
    rows = tuple(np.searchsorted(held, key) for key in keys)
    return torch.from_numpy(held % data.n_items), torch.from_numpy(offset), rows


def _users(task: Task, received: Params, kept: Update, node: Tensor | None = None) -> Tensor:
    """The vectors that clients begin with, f32[C, d]: their own, or those of the given nodes if vectors are shared."""
    if _USER in kept.values:
        return kept.values[_USER]
    return values_of(received, _USER, kept.client, per_user=True, node=node)


def _user(task: Task) -> Component:
    return next(part for part in task.components if part.name == _USER)


def _values(kept: Update, values: Params) -> Update:
    """What clients keep: no rows."""
    none, nowhere = torch.zeros(0, dtype=torch.int64), torch.zeros(kept.n_clients + 1, dtype=torch.int64)
    return Update(kept.client, values, {}, none, nowhere, kept.n_items)


def _model(task: Task) -> PRMEG:
    if not isinstance(task.model, PRMEG):
        raise AssertionError("see `check`")
    return task.model


# --- scores -----------------------------------------------------------------------------------------------------------


def next_scores(
    task: Task, params: Params, kept: Update, starts: Transitions, items: NDArray[np.int64], node: Tensor | None = None
) -> NDArray[np.float32]:
    """-D of items i64[T, K] for each of T transitions as if it were still to come, f32[T, K].

    `kept` is what their users keep, transition by transition. Of nodes (`NodeParams`) each user asks its own model, or
    that of the given node, i64[T]. Tables in half precision are read for the items in question: 8 d bytes for each.
    """
    model = _model(task)
    user = _users(task, params, kept, node).contiguous().numpy()
    row, row_before = items, starts.before
    tables = [params[name] for name in _TABLES]
    if isinstance(params, NodeParams):
        whose = (kept.client if node is None else node).numpy() * kept.n_items
        row, row_before = whose[:, None] + row, whose + row_before
        tables = [table.view(-1, table.shape[-1]) for table in tables]
    if tables[0].dtype != torch.float32:
        held, place = np.unique(np.column_stack([row_before, row]), return_inverse=True)
        tables = [table.index_select(0, torch.from_numpy(held)).float() for table in tables]
        place = place.reshape(len(row), 1 + row.shape[1])
        row_before, row = place[:, 0].copy(), place[:, 1:].copy()
    out = np.empty(items.shape, np.float32)
    scores_after(
        *(table.numpy() for table in tables), row, row_before, items, starts.before, user,
        model.is_near(torch.from_numpy(starts.gap)).numpy(), starts.place, 2 * EARTH, model.component_weight,
        model.distance_exponent, out,
    )  # fmt: skip
    return out


def scores_in_context(task: Task, params: Params, store: ClientStore, starts: Transitions, items: Tensor) -> Tensor:
    """The same for users who each ask their own model with what they keep: i64[T, K] -> f32[T, K]."""
    if not task.model.needs_transitions:
        raise ConfigError(
            f"Got {type(task.model).__name__}, expected PRMEG: other models score items whatever came before.\n"
            "  Rank its items with recleak.metrics.ranking.rank."
        )
    people, place = np.unique(starts.user, return_inverse=True)
    kept = store.read_values(people).select(torch.from_numpy(place))
    return torch.from_numpy(next_scores(task, params, kept, starts, items.contiguous().numpy()))
