"""Local training of many clients as one tensor program.

A client is a position on the leading axis. It gathers the item rows that it touches and trains on those; the rows of
all clients lie in one flat table with offsets. Clients are sorted by their number of steps, so those still active at a
step are a prefix, and nothing is padded but the last batch of an epoch.

The result of a client does not depend on the others: chunks may be cut anywhere and run anywhere. Axis letters:
C clients, A active ones, B items in a batch, N item rows of all clients, I items, d factors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import nan
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.defenses.base import Defense, hooks
from recleak.errors import ConfigError, RecleakError
from recleak.models.base import Model, Params
from recleak.models.components import Component
from recleak.streams import Streams
from recleak.training import compiled_prme
from recleak.training.attributes import PrivateAttributes
from recleak.training.compiled_gmf import fits, train_gmf
from recleak.training.local import LocalData, Loss, padded, positives_of, steps_per_epoch
from recleak.training.optimizers import (
    Adam,
    Optimizer,
)
from recleak.training.transitions import LocalTransitions
from recleak.training.visit import Visit, after_epoch
from recleak.update import NodeParams, Update, merge

_TOGETHER = 16  # clients whose other rows are in memory at a time


class DivergedError(RecleakError):
    """The loss is not a number any more."""


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains between a broadcast and its upload."""

    epochs: int = 1
    batch_size: int | None = 64  # None: full batch
    optimizer: Optimizer = field(default_factory=Adam)
    loss: Loss = "bce"
    negatives: int = 4  # per positive
    resample: bool = False  # negatives are drawn anew in each round; else once for all
    shuffle: bool = True
    decay_rows: Literal["active", "all"] = "active"  # weight decay on the rows the client works with, or on all items
    turns: tuple[tuple[str, ...], ...] = ()  # components that are stepped one after the other with every batch, by the
    # beginnings of their names, each with a gradient of its own: (("head",), ("item",)); none: all at once

    def check(self) -> None:
        """An error for a setting that cannot be."""
        for name in ("epochs", "negatives", "batch_size"):
            value = getattr(self, name)
            full = name == "batch_size" and value is None
            if not full and (not isinstance(value, int) or value < 1):
                hint = " None means a full batch." if name == "batch_size" else ""
                raise ConfigError(f"{name} is {value!r}, expected a whole number of at least 1.{hint}")
        if self.loss not in get_args(Loss):
            raise ConfigError(f"loss is {self.loss!r}, expected 'bce' or 'bpr', or 'taylor' (bce to second order).")
        for turn in self.turns:
            if not turn:
                raise ConfigError("turns has an empty part, expected names of components in each.")
        if self.decay_rows not in ("active", "all"):
            raise ConfigError(f"decay_rows is {self.decay_rows!r}, expected 'active' or 'all'.")


@dataclass(frozen=True, eq=False)
class Task:
    """What is the same for all chunks of a run: it travels to workers once."""

    model: Model
    components: tuple[Component, ...]  # with the sharing policy of the defenses
    training: LocalTraining
    defense: Defense = field(default_factory=Defense)
    seed: int = 0
    item_features: Tensor | None = None  # f32[I, G], constant and public
    user_features: Tensor | None = None  # f32[U, F]
    attributes: PrivateAttributes | None = None
    on_device: bool = False  # a real one: defenses draw from the operating system, and `seed` is the device's secret

    def streams(self, round: int, client: NDArray[np.int64] | Tensor) -> Streams:
        """The draws of defenses in a round, for clients i64[C]; what has to last is of the seed in any case."""
        made = Streams.simulated(self.seed, round, client)
        return replace(made, key=None) if self.on_device else made

    def without_own(self) -> Task:
        """The same without what clients keep for a defense only: what scores are made of."""
        own = {part.name for part in self.defense.own_components()}
        return replace(self, components=tuple(part for part in self.components if part.name not in own))

    def __post_init__(self) -> None:
        if self.defense.example_bound is not None and (self.model.reads_neighbors or self.item_features is not None):
            raise ConfigError(
                f"{type(self.model).__name__} reads all items of a client for each of its scores, so that one of them "
                f"is in the gradient of every example, and {self.defense!r} bounds the gradients of single examples.\n"
                "  Use a model that scores an item by its row and the client's parameters alone, or noise on uploads."
            )
        if self.defense.example_bound is not None and "objective" in hooks(self.defense):
            raise ConfigError(
                f"{self.defense!r} clips gradients of single examples and adds a term to the loss of a batch, expected "
                "one of them: nobody would clip that term."
            )
        if self.model.needs_transitions:
            compiled_prme.check(self)


@dataclass(frozen=True, eq=False)
class Trained:
    """What C clients have after local training."""

    update: Update  # of the shared components: now minus received, after the defenses
    kept: Update  # values (not differences) of what the clients keep, for their next visit
    loss: Tensor  # f32[C]: mean over steps; NaN of a node of a gossip that could not be trained, and changed nothing
    positives: Tensor  # f32[C]: how many own items a client trained on, after the defenses
    steps: int  # client-steps made


def train(task: Task, received: Params, kept: Update, data: LocalData | LocalTransitions, round: int) -> Trained:
    """Train the clients of `data` from what they received and kept; the result has them in the same order.

    `kept` holds the values of components that are not shared, and `<component>/<moment>` of a kept optimizer.
    """
    if isinstance(data, LocalTransitions):
        update, rest, loss = compiled_prme.train_prme(task, received, kept, data, round)
        streams, steps = task.streams(round, data.client), task.training.epochs * int(data.offset[-1])
        return _finished(task, update, rest, loss, torch.from_numpy(data.positives), steps, streams, round)
    if task.model.needs_transitions:
        raise ConfigError(
            f"{type(task.model).__name__} learns from transitions, got items without an order.\n"
            "  Draw examples with training.transitions.TransitionExamples; attacks with shadow clients do not know it."
        )
    if "data" in hooks(task.defense):
        data = defended_data(task, data)
    if fits(task, kept.client.device):
        streams = task.streams(round, data.client)
        update, rest, loss = train_gmf(task, received, kept, data, streams)
        return _finished(task, update, rest, loss, positives_of(data), task.training.epochs * len(loss), streams, round)
    width = widths(task, data.count, kept.client.device)
    places = [np.flatnonzero(width == each) for each in np.unique(width)]
    if len(places) == 1:
        return _train_alike(task, received, kept, data, round)
    parts = []  # full batches of different lengths: a client's padding must not depend on its chunk
    for place in places:
        mine = kept.select(torch.from_numpy(place).to(kept.client.device))
        parts.append(_train_alike(task, received, mine, data.select(place), round))
    back = torch.from_numpy(data.client.argsort().argsort()).to(kept.client.device)  # `join` sorts by client
    whole = join(parts)
    update, rest = whole.update.select(back), whole.kept.select(back)
    return Trained(update, rest, whole.loss[back], whole.positives[back], whole.steps)


def widths(task: Task, count: NDArray[np.int64], device: torch.device) -> NDArray[np.int64]:
    """The padded width of the batches of clients with so many examples, i64[C]; those with the same train together."""
    alike = task.model.needs_transitions or fits(task, device)
    return np.zeros_like(count) if alike else padded(task.training.batch_size, count)


def join(parts: list[Trained]) -> Trained:
    """The clients of several results, ascending."""
    order = torch.cat([part.update.client for part in parts]).argsort()
    return Trained(
        merge([part.update for part in parts]),
        merge([part.kept for part in parts]),
        torch.cat([part.loss for part in parts])[order],
        torch.cat([part.positives for part in parts])[order],
        sum(part.steps for part in parts),
    )


def defended_data(task: Task, data: LocalData) -> LocalData:
    """The examples after the defense, which changes them in the same way in every round: what is drawn anew each time
    falls out of what two uploads have in common.
    """
    changed = task.defense.data(data, Streams.simulated(task.seed, 0, data.client).within("data"))
    if not changed.count.all():
        raise ConfigError(
            f"The data hook of {task.defense!r} left {int((changed.count == 0).sum()):,} of {len(data.client):,} "
            "clients without an example, expected at least one each."
        )
    return changed


def _train_alike(task: Task, received: Params, kept: Update, data: LocalData, round: int) -> Trained:
    """Clients whose batches have the same padded width."""
    order = np.lexsort((-data.count, -steps_per_epoch(task.training.batch_size, data.count)))
    place = torch.from_numpy(order).to(kept.client.device)
    back = place.argsort()
    streams = task.streams(round, data.client)
    visit = Visit(task, received, kept.select(place), data.select(order), round, streams.select(order))
    loss = visit.walk()[back]
    update = visit.moved().only({part.name for part in task.components if part.shared}).select(back)
    steps = int(visit.plan.steps.sum())
    return _finished(task, update, visit.kept().select(back), loss, visit.batches.degree[back], steps, streams, round)


def _finished(
    task: Task,
    update: Update,
    kept: Update,
    loss: Tensor,
    positives: Tensor,
    steps: int,
    streams: Streams,
    round: int,
) -> Trained:
    """What clients answer after their last step: what was not trained, what the defense makes of it."""
    if task.defense.every_row:
        update = _with_every_row(task, update, streams)
    if not all(bool(torch.isfinite(tensor.sum())) for tensor in (loss, *update.values.values(), *update.rows.values())):
        finite = torch.isfinite(loss) & torch.isfinite(update.norms())
        if not isinstance(update.received, NodeParams):
            raise DivergedError(
                f"Round {round}: loss or update of {int((~finite).sum()):,} of {len(loss):,} clients of a chunk is not "
                f"finite.\n  Lower the learning rate ({task.training.optimizer.learning_rate}); with aggregation 'sum' "
                "every step is multiplied by the number of clients: use 'mean'."
            )
        update, loss = _without(update, ~finite), loss.where(finite, nan)  # each node began elsewhere
    if "upload" in hooks(task.defense):
        update = task.defense.upload(update, streams.within("upload"))
    update = replace(update, received={})  # it is sent, or goes on to the next process
    return Trained(update, kept, loss, positives, steps)


def _without(update: Update, bad: Tensor) -> Update:
    """The update without what some clients changed, bool[C]."""

    def still(_: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
        lost = bad if owner is None else bad[owner]
        return tensor.masked_fill(lost.reshape(-1, *[1] * (tensor.dim() - 1)), 0)

    return update.map(still)


def _with_every_row(task: Task, update: Update, streams: Streams) -> Update:
    """The update with a row for every item: those that a client does not hold went through its epochs too.

    Nothing trained them and nothing read them, so their epochs may come after all others, a few clients at a time.
    """
    if not update.rows:
        return update
    whole = update.with_all_rows()
    held = torch.zeros(update.n_clients, update.n_items, dtype=torch.bool, device=update.item.device)
    held[update.owner, update.item] = True
    for position in torch.split(torch.arange(update.n_clients, device=held.device), _TOGETHER):
        owner, item = (~held[position]).nonzero(as_tuple=True)  # i64[n]: rows that nobody of these clients holds
        if not len(item):
            continue
        count = torch.bincount(owner, minlength=len(position))
        rest = Update(
            update.client[position],
            {},
            {name: value.new_zeros(len(item), *value.shape[1:]) for name, value in update.rows.items()},
            item,
            torch.cat([count.new_zeros(1), count.cumsum(0)]),
            update.n_items,
            update.received,
        )
        mine = streams.select(position)
        for epoch in range(1, task.training.epochs + 1):
            rest = after_epoch(task.defense, rest, mine.at(epoch))
        place = position[owner] * update.n_items + item
        for name, value in rest.rows.items():
            whole.rows[name].index_copy_(0, place, value)
    return whole
