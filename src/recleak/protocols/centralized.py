"""Centralized training: one trusted party has all the data, trains, and shows lists to users; an outsider sees lists.

Everything is trained in minibatches over all users until the validation metric has not grown for some epochs; the best
parameters count. Then every user is shown lists, which are the only messages on the wire: `Recommendations`, one for
each session and block of users. In a later session a user is not shown again what an earlier one showed. Items that a
defense added to a history are the user's own to the party: it trains on them, and never shows them to that user.

A run with a directory is saved there after epochs, every few seconds (`protocols.saving`): parameters, moments and the
best parameters so far.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from recleak.data.interactions import Interactions
from recleak.defenses.base import Defense, Lists, hooks
from recleak.errors import ConfigError, DataError
from recleak.machine import interrupts_arrive
from recleak.metrics.ranking import rank
from recleak.models.base import Model, Params
from recleak.models.central import Archive, CentralModel, check_central, scores_for_lists
from recleak.models.components import by_name
from recleak.progress import Progress
from recleak.protocols.checks import check_features, check_tables
from recleak.protocols.saving import Checkpoint, Interrupted, Saved
from recleak.protocols.taps import feeding
from recleak.recording import Tap
from recleak.streams import Streams
from recleak.training.central import CentralLoss, Trainer, check_loss
from recleak.training.chunks import one_thread
from recleak.training.local import LocalData
from recleak.training.optimizers import Adam, Optimizer
from recleak.training.optimizers import check as check_optimizer
from recleak.training.personal import first_params
from recleak.training.state import identify, locked
from recleak.utility import union
from recleak.wire import Recommendations

BLOCK = 1024  # users in one message
_FORMAT = "recleak centralized run 2"
_DEPTH = 10  # of the validation metric, NDCG among all items


@dataclass(frozen=True)
class Centralized:
    """How the party trains, when it stops, and what it shows.

    With an `MF`, the loss bpr, plain SGD and batches of 1 this is LearnBPR (Rendle et al. 2009), in a compiled loop:
    decay then acts on the rows of a triple only, else on everything at every step.

    `patience` epochs without a better NDCG@10 of validation items end it; without validation items, or with
    `patience=0`, all epochs are made and the last parameters count.
    """

    epochs: int = 200
    batch_size: int = 64
    optimizer: Optimizer = field(default_factory=lambda: Adam(0.005))
    loss: CentralLoss = "bpr"
    negatives: int = 1  # for each positive, drawn anew in every epoch
    patience: int = 5
    top: int = 30  # the length of a list
    sessions: int = 1

    @property
    def rounds(self) -> int:
        """What attacks count: sessions."""
        return self.sessions

    @property
    def local(self) -> None:
        """No client trains."""
        return None

    def check(self) -> None:
        """An error for a setting that cannot be."""
        for name in ("batch_size", "negatives", "top", "sessions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1.")
        for name in ("epochs", "patience"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 0.")
        check_loss(self.loss)


@dataclass(frozen=True, eq=False)
class CentralizedModel:
    """The result: it scores users, and says how training went."""

    model: Model
    params: Params
    archive: Archive
    loss: tuple[float, ...]  # mean over the examples of each epoch
    valid: tuple[float, ...]  # NDCG@10 of validation items after each epoch; empty without any
    best: int  # epochs behind the parameters
    steps: int
    continued: int = 0  # epochs that an earlier call had made

    def scores(self, users: Tensor) -> Tensor:
        """Every item for each of the given users: i64[B] -> f32[B, I]; -inf for what a defense added to a history."""
        with torch.no_grad(), one_thread():
            return scores_for_lists(self.model, self.params, self.archive, users.cpu())


def train_centralized(
    protocol: Centralized,
    model: Model,
    train: Interactions,
    *,
    valid: Interactions | None = None,
    defense: Defense | None = None,
    taps: Sequence[Tap] = (),
    user_features: Tensor | None = None,
    labels: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    directory: Path | None = None,
    checkpoint_seconds: float = 5.0,
    show_progress: bool = True,
) -> CentralizedModel:
    """Train `model` on everybody's interactions, then show lists of items that a user has in neither part.

    `labels`, i64[U] by attribute and -1 where unknown, are for models that train against an attacker. With a
    `directory` the run is checkpointed: calling again with the same arguments continues it, with the same result to the
    bit. `taps` receive the lists; they are closed at the end.
    """
    with interrupts_arrive(), nullcontext() if directory is None else locked(directory):
        run = _Run(protocol, model, train, valid, defense or Defense(), user_features, labels or {}, seed, directory)
        try:
            with one_thread():
                run.walk(checkpoint_seconds, show_progress)
            result = run.result()
            show(protocol, result, train if valid is None else union(train, valid), defense or Defense(), taps, seed)
            for tap in taps:
                tap.close()
        except KeyboardInterrupt as interrupt:
            raise Interrupted(run.checkpoint.after_interrupt(run.epoch, run.epochs)) from interrupt
    return result


def show(
    protocol: Centralized,
    trained: CentralizedModel,
    history: Interactions,
    defense: Defense,
    taps: Sequence[Tap],
    seed: int,
) -> None:
    """Put the lists of all sessions on the wire."""
    shown = torch.zeros(history.n_users, 0, dtype=torch.int64)
    with feeding(taps) as feed:
        for session in range(protocol.sessions):
            parts = []
            for users in torch.split(torch.arange(history.n_users), BLOCK):
                item = lists(trained, history, users, protocol.top, defense, seed, session, shown[users])
                feed.send(Recommendations(session, users, item))
                parts.append(item)
            shown = torch.cat([shown, torch.cat(parts)], 1)


def lists(
    trained: CentralizedModel,
    history: Interactions,
    users: Tensor,
    top: int,
    defense: Defense | None = None,
    seed: int = 0,
    session: int = 0,
    shown: Tensor | None = None,
) -> Tensor:
    """The best items for users, i64[B] -> i64[B, top], best first, -1 at the end of a shorter one.

    Items of the history, and of `shown` i64[B, n], are left out; `defense` changes the lists before they are shown.
    """
    allowed = torch.ones(len(users), history.n_items, dtype=torch.bool)
    own = history.matrix()[users.numpy()].tocoo()
    allowed[torch.from_numpy(own.row.astype(np.int64)), torch.from_numpy(own.col.astype(np.int64))] = False
    if shown is not None and shown.shape[1]:
        place = torch.arange(len(users)).unsqueeze(1).expand_as(shown)
        allowed[place[shown >= 0], shown[shown >= 0]] = False
    score = trained.scores(users).masked_fill(~allowed, float("-inf"))
    allowed = score > float("-inf")
    best = score.topk(min(top, score.shape[1]), dim=1)
    item = torch.where(best.values > float("-inf"), best.indices, -1)
    if defense is None or "release" not in hooks(defense):
        return item
    streams = Streams.simulated(seed, session, users).within("release")
    popularity = torch.from_numpy(history.popularity.astype(np.float32))
    return defense.release(Lists(users, item, allowed, popularity), streams)


@dataclass(frozen=True, eq=False)
class Shown:
    """A party's scores with what its lists show on top, in their order: what users get under a defense of lists."""

    trained: CentralizedModel
    history: Interactions
    top: int
    defense: Defense
    seed: int

    def scores(self, users: Tensor) -> Tensor:
        """i64[B] -> f64[B, I]: above 0 in the list, the party's own order below; -inf as there."""
        score = self.trained.scores(users).double()
        item = lists(self.trained, self.history, users, self.top, self.defense, self.seed)
        there = score > float("-inf")
        low, high = (score.masked_fill(~there, edge) for edge in (float("inf"), float("-inf")))
        low, high = low.amin(1, keepdim=True), high.amax(1, keepdim=True)
        score = torch.where(there, (score - high) / (high - low).clamp(min=1e-300), score)  # in [-1, 0]
        place = torch.arange(item.shape[1], 0, -1, dtype=torch.float64).expand(item.shape)
        row = torch.arange(len(users)).unsqueeze(1).expand_as(item)
        return score.index_put((row[item >= 0], item[item >= 0]), place[item >= 0])


def as_shown(
    protocol: Centralized, trained: CentralizedModel, history: Interactions, defense: Defense, seed: int
) -> CentralizedModel | Shown:
    """What has to be graded for users: the lists of the first session where a defense changes lists, else scores."""
    return Shown(trained, history, protocol.top, defense, seed) if "release" in hooks(defense) else trained


def defended_history(defense: Defense, train: Interactions, seed: int) -> Interactions:
    """What a defense's hook on data makes of everybody's own items; users and items keep their numbers."""
    if "data" not in hooks(defense):
        return train
    matrix = train.matrix()
    client = np.flatnonzero(np.diff(matrix.indptr)).astype(np.int64)
    count = np.diff(matrix.indptr)[client]
    own = LocalData(
        client,
        matrix.indices.astype(np.int64),
        np.ones(matrix.nnz, np.float32),
        None,
        np.concatenate([[0], np.cumsum(count)]),
        train.n_items,
    )
    changed = defense.data(own, Streams.simulated(seed, 0, client).within("data"))
    kept = changed.label > 0.5
    rows = pl.DataFrame(
        {
            "user": changed.client[changed.owner][kept].astype(np.int32),
            "item": changed.item[kept].astype(np.int32),
        }
    )
    return Interactions(rows.unique().sort("user", "item"), train.users, train.items)


def _added(changed: Interactions, train: Interactions) -> Interactions:
    """The rows that nobody did."""
    return changed.take(np.asarray(train.matrix()[changed.user, changed.item]).ravel() == 0)


class _Run:
    """A run between two epochs."""

    def __init__(
        self,
        protocol: Centralized,
        model: Model,
        train: Interactions,
        valid: Interactions | None,
        defense: Defense,
        user_features: Tensor | None,
        labels: Mapping[str, Tensor],
        seed: int,
        directory: Path | None,
    ) -> None:
        protocol.check()
        check_central(model)
        components = model.components()
        by_name(components)
        check_optimizer(protocol.optimizer, set(by_name(components)))
        check_tables(components, train)
        check_features(model, user_features, train)
        _check_defense(model, defense)
        _check_labels(model, labels, train)
        if not len(train):
            raise DataError("No user has an interaction to train on", remedy="Check the data and the split.")
        self.protocol, self.model, self.seed = protocol, model, seed
        self.given, self.valid = train, valid if valid is not None and len(valid) else None
        if user_features is not None and "features" in hooks(defense):
            users = np.arange(train.n_users)
            user_features = defense.features(user_features, Streams.simulated(seed, 0, users).within("features"))
        past = defended_history(defense, train.distinct(), seed)
        archive = Archive(past, user_features, labels, seed, _added(past, train) if "data" in hooks(defense) else None)
        solved = model if isinstance(model, CentralModel) and model.examples == "solved" else None
        shared = tuple(replace(part, shared=True) for part in components)
        params = solved.solve(archive, seed) if solved else first_params(shared, train.n_users, train.n_items, seed)
        config = _described(protocol, model, defense, train, valid, user_features, labels, seed)
        self.checkpoint = Checkpoint(directory, config)
        self.epochs = protocol.epochs if solved is None else 0
        self.archive, self.epoch, self.continued = archive, 0, 0
        self.loss, self.scores = list[float](), list[float]()
        self.best, self.best_epoch = {name: value.clone() for name, value in params.items()}, 0
        if solved is not None:
            self.best = params
            return
        self.trainer = Trainer(
            model,
            archive,
            defense,
            optimizer=protocol.optimizer,
            loss=protocol.loss,
            negatives=protocol.negatives,
            batch_size=protocol.batch_size,
            params=params,
            seed=seed,
        )
        if found := self.checkpoint.read(self.epochs, ()):
            self._continue(found)

    def done(self) -> bool:
        """All epochs, or the plateau."""
        waited = self.epoch - self.best_epoch
        return self.epoch >= self.epochs or bool(self._stops and waited >= self.protocol.patience)

    @property
    def _stops(self) -> bool:
        return self.valid is not None and self.protocol.patience > 0

    def walk(self, checkpoint_seconds: float, show_progress: bool) -> None:
        """All epochs that are left."""
        if self.done():
            return
        saved = time.monotonic()
        with Progress(self.epochs, self.epoch, shown=show_progress) as progress:
            while not self.done():
                self.loss.append(self.trainer.epoch(self.epoch))
                self.epoch += 1
                self._judge()
                progress.round(self.epoch, self.loss[-1], self.given.n_users)
                if self.done() or time.monotonic() - saved >= checkpoint_seconds:
                    self.save()
                    saved = time.monotonic()

    def _judge(self) -> None:
        """Whether these parameters are the best so far."""
        if self._stops:
            value = _validated(self.model, self.trainer.params, self.archive, self.given, self.valid)
            best = max(self.scores, default=-1.0)
            self.scores.append(value if isfinite(value) else -1.0)
            if self.scores[-1] <= best:
                return
        self.best = {name: value.clone() for name, value in self.trainer.params.items()}
        self.best_epoch = self.epoch

    def result(self) -> CentralizedModel:
        """What was learned."""
        steps = self.best_epoch * self.trainer.steps_per_epoch if self.epochs else 0
        return CentralizedModel(
            self.model,
            self.best,
            self.archive,
            tuple(self.loss),
            tuple(self.scores),
            self.best_epoch,
            steps,
            self.continued,
        )

    def save(self) -> None:
        """Put the run on disk as it is after this epoch; a kill at any moment leaves this or the one before."""
        tensors = {f"params {name}": value for name, value in self.trainer.params.items()}
        tensors |= {f"best {name}": value for name, value in self.best.items()}
        for name, moments in self.trainer.moments.items():
            tensors |= {f"moment {place} {name}": value for place, value in enumerate(moments)}
        about = {"step": self.trainer.step, "best": self.best_epoch, "loss": self.loss, "valid": self.scores}
        self.checkpoint.write(self.epoch, tensors, about, ())

    def _continue(self, saved: Saved) -> None:
        """Go on from there."""
        self.epoch = self.continued = saved.count("round")
        self.best_epoch, self.loss, self.scores = saved.count("best"), saved.numbers("loss"), saved.numbers("valid")
        self.trainer.step = saved.count("step")
        for name, value in self.trainer.params.items():
            value.copy_(saved.tensor(f"params {name}", value))
            self.best[name] = saved.tensor(f"best {name}", value)
            for place, moment in enumerate(self.trainer.moments[name]):
                moment.copy_(saved.tensor(f"moment {place} {name}", moment))


@dataclass(frozen=True, eq=False)
class _Now:
    """Parameters as they are, as a scorer."""

    model: Model
    params: Params
    archive: Archive

    def scores(self, users: Tensor) -> Tensor:
        return scores_for_lists(self.model, self.params, self.archive, users)


def _validated(
    model: Model, params: Params, archive: Archive, train: Interactions, valid: Interactions | None
) -> float:
    """NDCG@10 of validation items among all that a user does not have in train."""
    if valid is None:
        raise AssertionError("only asked with validation items")
    with torch.no_grad():
        return float(rank(_Now(model, params, archive), train, valid).ndcg(_DEPTH).mean())


def _described(protocol: Centralized, model: Model, *rest: Any) -> dict[str, Any]:
    """All that decides the result of training, but for the number of epochs and for what is shown."""
    settings = {each.name: getattr(protocol, each.name) for each in dataclasses.fields(protocol)}
    for name in ("epochs", "top", "sessions"):
        del settings[name]
    names = ("defense", "train", "valid", "user_features", "labels", "seed")
    parts = {"format": _FORMAT, "protocol": settings, "model": model, **dict(zip(names, rest, strict=True))}
    return {name: identify(part) for name, part in parts.items()}


def _check_defense(model: Model, defense: Defense) -> None:
    """An error for a defense that acts on uploads, or on single examples of a model that has no gradients of them."""
    used = hooks(defense)
    if used & {"epoch", "upload", "sharing"} or defense.secure_aggregation:
        raise ConfigError(
            f"{defense!r} acts on what clients send, and here no client sends anything.\n"
            "  Use a defense on data, features, the loss, gradients or lists; or the protocol `federated`."
        )
    if defense.example_bound is not None and getattr(model, "examples", "pairs") != "users":
        raise ConfigError(
            f"{defense!r} clips single examples, expected a model whose examples are users: the autoencoder."
        )
    if getattr(model, "examples", "pairs") == "solved" and used & {"penalty", "gradient", "batch_sum"}:
        raise ConfigError(f"{type(model).__name__} is solved, not trained in steps, so {defense!r} has no say in it.")
    defense.check_components(tuple(replace(part, shared=True) for part in model.components()))


def _check_labels(model: Model, labels: Mapping[str, Tensor], train: Interactions) -> None:
    if getattr(model, "needs_labels", False) and not labels:
        raise ConfigError(
            f"{type(model).__name__} trains against an attacker on attributes, and got no labels.\n"
            "  Give labels={'gender': i64[U], ...}, -1 where unknown."
        )
    for name, label in labels.items():
        if label.shape != (train.n_users,):
            raise ConfigError(f"Got labels of {name} of shape {tuple(label.shape)}, expected ({train.n_users},).")
