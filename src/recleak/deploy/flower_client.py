"""A Flower ClientApp that trains with the engine of the simulation: one user, or the users behind one SuperNode."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import torch
from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from numpy.typing import ArrayLike
from torch import Tensor

from recleak.data.interactions import Interactions
from recleak.defenses.base import Defense, all_components
from recleak.defenses.base import check as check_defense
from recleak.deploy.flower_records import (
    only_arrays,
    params_of,
    recall,
    remember,
    round_of,
    sealed,
    secret_of,
    told_here,
)
from recleak.errors import ConfigError
from recleak.models.base import Model, Params
from recleak.models.components import Component
from recleak.protocols.checks import check_clients, check_features
from recleak.protocols.federated import Federated
from recleak.training.aggregate import Summation
from recleak.training.chunks import one_thread, train_in_chunks
from recleak.training.cohort import Task, Trained, join, train
from recleak.training.local import LocalData
from recleak.training.state import ClientStore
from recleak.training.transitions import examples_of
from recleak.update import Update
from recleak.wire import Aggregate, Upload

_SECRET_BYTES = 32  # seeds are whole numbers of any size, of which streams take a hash


@dataclass(frozen=True, eq=False)
class Cohort:
    """The users behind one SuperNode: one on a device, several in a silo.

    `train` has their interactions only, in the numbers of the federation: user 7 is 7 for everybody, and item 3 is row
    3 of every table (`Interactions.take`, or `Cohort.of`).
    """

    train: Interactions
    user_features: Tensor | None = None  # f32[U, F]; only the rows of these users are read

    @classmethod
    def of(cls, items: Mapping[int, ArrayLike], n_users: int, n_items: int) -> Cohort:
        """From the item numbers of each user, by the user's number."""
        pairs = [(user, item) for user, own in items.items() for item in np.unique(np.asarray(own, np.int64)).tolist()]
        rows = pl.DataFrame(pairs, schema={"user": pl.Int32, "item": pl.Int32}, orient="row").sort("user", "item")
        for name, bound in (("user", n_users), ("item", n_items)):
            if rows.height == 0 or not rows[name].is_between(0, bound, closed="left").all():
                got = f"{name}s from {rows[name].min()!r} to {rows[name].max()!r}" if rows.height else "no interaction"
                raise ConfigError(f"Got {got}, expected numbers in [0, {bound}): those of the federation.")
        users, things = (pl.DataFrame({"id": np.arange(count)}) for count in (n_users, n_items))
        return cls(Interactions(rows, users, things))


def client_app(
    model: Model,
    protocol: Federated,
    cohort: Callable[[Context], Cohort],
    *,
    defense: Defense | None = None,
    seed: int | None = None,
) -> ClientApp:
    """A ClientApp whose users train as clients of `train_federated` do; `cohort` says who is behind a SuperNode.

    The server gets an `Upload` with the update of each user. With `SecureAggregation` in the defense it gets the sum of
    the cohort only, an `Aggregate`. Neither a loss nor a number of examples is sent, but for the weights of the
    aggregation "weighted". What users keep lies in Flower's state of the SuperNode, which does not leave it.

    Everything is drawn on the device: defenses draw from the operating system, and what has to last for a run
    (negatives, shuffles, first vectors, fake items, answers that are randomized once) is of a secret that the device
    draws there too, by the streams of the simulation, which are not made for cryptography; another run has another
    secret. With a `seed` it is all reproducible instead, the same as in a simulation. **For tests only**: who knows the
    seed knows the noise.

    Of an error on the device the server is told the type; what it says is in the device's log.
    """
    chain = defense or Defense()
    components = deployable(model, protocol, chain)
    app = ClientApp()

    @app.train()
    def answer(message: FlowerMessage, context: Context) -> FlowerMessage:
        with told_here():
            return trained(message, context)

    def trained(message: FlowerMessage, context: Context) -> FlowerMessage:
        here, round = cohort(context), round_of(message.content)
        data = here.train
        received = params_of(only_arrays(message.content, "the broadcast"), components, data.n_users, data.n_items)
        secret = seed if seed is not None else secret_of(context.state, os.urandom(_SECRET_BYTES))
        task = Task(
            model,
            components,
            protocol.local,
            chain,
            secret,
            model.item_features(data.n_items),
            here.user_features,
            on_device=seed is None,
        )
        made = _trained(task, here, received, recall(context.state, data.n_items), round)
        remember(context.state, made.kept)
        weight = made.positives if protocol.aggregation == "weighted" else torch.ones_like(made.positives)
        return FlowerMessage(sealed(_sent(task, protocol, received, made.update, weight, round)), reply_to=message)

    return app


def deployable(model: Model, protocol: Federated, defense: Defense) -> tuple[Component, ...]:
    """The components with the sharing policy in force; an error for what a federation of Flower does not do."""
    protocol.check()
    components = all_components(model.components(), defense)
    check_defense(defense, components)
    if defense.needs_attributes or defense.disclosed:
        raise ConfigError(
            f"{defense!r} works with attributes that users tell each other, got a Flower federation, where nobody "
            "does.\n  Simulate it (train_federated), or leave it out."
        )
    if protocol.dropout:
        raise ConfigError(f"dropout is {protocol.dropout}, expected 0: real clients drop out by themselves.")
    return components


def _trained(task: Task, here: Cohort, received: Params, kept: Update | None, round: int) -> Trained:
    """One visit of all users behind the SuperNode."""
    train_part = here.train if task.model.needs_transitions else here.train.distinct()
    examples = examples_of(task.model, train_part, task.training, (), task.seed)
    users = np.flatnonzero(examples.count).astype(np.int64)
    check_clients(None, users, examples)
    check_features(task.model, here.user_features, here.train)
    if kept is not None and not np.array_equal(kept.client.numpy(), users):
        raise ConfigError(
            f"Got {len(users)} users behind this SuperNode, expected the {kept.n_clients} of its first round.\n"
            "  Who comes or goes needs a new run, or a SuperNode of its own."
        )
    if kept is None:
        optimizer, data = task.training.optimizer, here.train
        kept = ClientStore(task.components, optimizer, data.n_users, data.n_items, task.seed).read(users)
    data_here = examples.draw(users, round)
    if isinstance(data_here, LocalData):
        return train_in_chunks(task, received, kept, data_here, round)
    with one_thread():
        return join([train(task, received, kept, data_here, round)])


def _sent(
    task: Task, protocol: Federated, received: Params, update: Update, weight: Tensor, round: int
) -> Upload | Aggregate:
    """What leaves the SuperNode."""
    if not task.defense.secure_aggregation:
        return Upload(round, update, weight)
    if update.n_clients < 2:
        raise ConfigError(
            "Got SecureAggregation for one user, expected a cohort of at least two: the sum of one is its upload.\n"
            "  Put more users behind the SuperNode, or leave it out and use noise."
        )
    total = Summation(received, task.components, count_rows=protocol.aggregation == "touched-mean")
    total.add(update, weight)
    return replace(total.result(round), client=update.client)
