"""Federated training: a server broadcasts, some clients train and answer, the server aggregates.

A round is cut into blocks of clients, a block into chunks. Chunks are what an executor trains; a block is what goes
over the wire as one message and into the sum, always in the order of clients. Blocks do not depend on the executor or
the chunk, so neither does any bit of the result, and memory is bounded by the block.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.data.interactions import Interactions
from recleak.defenses.base import Defense
from recleak.defenses.base import check as check_defense
from recleak.errors import DataError, unknown_name
from recleak.models.base import Batch, Model, Params
from recleak.models.components import Component, by_name
from recleak.progress import Progress
from recleak.recording import Tap
from recleak.training.aggregate import Aggregation, Summation, apply
from recleak.training.cohort import LocalTraining, Task, Trained
from recleak.training.executor import Assignment, Executor, InProcess, Session, Work
from recleak.training.local import Examples, padded, steps_per_epoch
from recleak.training.optimizers import ConfigError
from recleak.training.optimizers import check as check_optimizer
from recleak.training.state import CheckpointError, ClientStore, read_file, replace_file
from recleak.update import Update, concatenate
from recleak.wire import Broadcast, Message, Upload

BLOCK = 256  # clients in one message; part of the last bits of a result, so not an option


@dataclass(frozen=True)
class Federated:
    """Who takes part in a round, how clients train, and what the server does with their answers."""

    rounds: int = 100
    fraction: float = 1.0  # of all clients, sampled anew for each round
    clients_per_round: int | None = None  # a number of clients instead
    dropout: float = 0.0  # the chance that a sampled client never answers (it keeps what it had)
    aggregation: Aggregation = "mean"
    server_learning_rate: float = 1.0
    local: LocalTraining = field(default_factory=LocalTraining)

    def check(self) -> None:
        """An error for a setting that cannot be."""
        if self.rounds < 0:
            raise ConfigError(f"rounds is {self.rounds}, expected at least 0.")
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction is {self.fraction}, expected more than 0 and at most 1.")
        if self.clients_per_round is not None and self.clients_per_round < 1:
            raise ConfigError(f"clients_per_round is {self.clients_per_round}, expected at least 1.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}, expected at least 0 and less than 1.")
        if self.aggregation not in get_args(Aggregation):
            raise unknown_name("aggregation", self.aggregation, get_args(Aggregation))
        self.local.check()

    def participants(self, eligible: NDArray[np.int64], round: int, seed: int) -> NDArray[np.int64]:
        """The clients that answer in a round, ascending: a uniform sample without replacement, less the dropouts."""
        n = (
            self.clients_per_round
            if self.clients_per_round is not None
            else round_half_up(self.fraction * len(eligible))
        )
        n = min(max(n, 1), len(eligible))
        lot = random.bits(seed, "participants", round, eligible)
        chosen = np.sort(eligible[np.argsort(lot, kind="stable")[:n]])
        return chosen[random.uniform(seed, "dropout", round, chosen) >= self.dropout]


def round_half_up(number: float) -> int:
    """The nearest whole number."""
    return int(number + 0.5)


@dataclass(frozen=True, eq=False)
class FederatedModel:
    """The result: global parameters, what clients keep, and how training went. It scores each user with its own state."""

    task: Task
    params: Params
    store: ClientStore
    train: Interactions
    loss: tuple[float, ...]  # mean over the clients of each round; NaN where nobody answered
    clients: tuple[int, ...]  # that answered in each round

    def scores(self, users: Tensor) -> Tensor:
        """Every item for each of the given users: i64[B] -> f32[B, I]."""
        order, back = torch.unique(users.cpu(), return_inverse=True)
        return personal_scores(self.task, self.params, self.store.read(order.numpy()), self.train)[back]


def personal_scores(task: Task, params: Params, kept: Update, train: Interactions) -> Tensor:
    """The scores that C clients give all items with the global parameters and what they keep, f32[C, I]."""
    device = next(iter(params.values())).device
    client, clients, n_items = kept.client.to(device), kept.n_clients, kept.n_items
    own = torch.from_numpy(train.matrix()[kept.client.numpy()].toarray() > 0).to(device)  # bool[C, I]
    mine: Params = {}
    for part in task.components:
        if part.storage == "per_item":
            table = params[part.name] if part.shared else part.draw(task.seed, np.arange(n_items)).to(device)
            mine[part.name] = table.expand(clients, *table.shape)
            if not part.shared and len(kept.item):
                mine[part.name] = mine[part.name].clone()
                mine[part.name][kept.owner.to(device), kept.item.to(device)] = kept.rows[part.name].to(device)
        elif not part.shared:
            mine[part.name] = kept.values[part.name].to(device)
        elif part.storage == "per_user":
            mine[part.name] = params[part.name][client]
        else:
            mine[part.name] = params[part.name].expand(clients, *params[part.name].shape)
    features = None if task.item_features is None else task.item_features.to(device)
    each = own.float()
    with torch.no_grad():
        batch = Batch(
            own=own,
            degree=each.sum(1),
            neighbors={
                part.name: torch.einsum("ci,ci...->c...", each, mine[part.name])
                for part in task.components
                if part.storage == "per_item" and task.model.reads_neighbors
            },
            user_features=None if task.user_features is None else task.user_features.to(device)[client],
            item_features=None if features is None else features.expand(clients, *features.shape),
            neighbor_features=None if features is None else each @ features,
        )
        return task.model.logits(mine, batch)


def train_federated(
    protocol: Federated,
    model: Model,
    train: Interactions,
    *,
    defense: Defense | None = None,
    taps: Sequence[Tap] = (),
    executor: Executor | None = None,
    chunk: int = 32,
    seed: int = 0,
    spare: tuple[Interactions, ...] = (),
    user_features: Tensor | None = None,
    directory: Path | None = None,
    checkpoint_seconds: float = 5.0,
    device: torch.device | str = "cpu",
    show_progress: bool = True,
) -> FederatedModel:
    """Train `model` on the interactions of each user as one client.

    `taps` receive every message of the wire. With a `directory` the run is checkpointed, and calling again with the
    same arguments continues it, with the same result to the bit. Items of `spare` (for instance the test part) are never
    drawn as negatives, as some published codes do.
    """
    run = _Run(
        protocol, model, train, defense or Defense(), tuple(taps), chunk, seed, spare, user_features, directory, device
    )
    try:
        with (
            (executor or InProcess()).open(run.assignment) as session,
            Progress(protocol.rounds, run.round, shown=show_progress) as progress,
        ):
            saved = time.monotonic()
            while run.round < protocol.rounds:
                progress.round(run.step(session), run.loss[-1], run.clients[-1])
                if time.monotonic() - saved >= checkpoint_seconds:
                    run.save()
                    saved = time.monotonic()
        run.save()
    finally:
        for tap in taps:
            tap.close()
    return FederatedModel(run.task, run.params, run.store, run.train, tuple(run.loss), tuple(run.clients))


class _Run:
    """A run between two rounds."""

    def __init__(
        self,
        protocol: Federated,
        model: Model,
        train: Interactions,
        defense: Defense,
        taps: tuple[Tap, ...],
        chunk: int,
        seed: int,
        spare: tuple[Interactions, ...],
        user_features: Tensor | None,
        directory: Path | None,
        device: torch.device | str,
    ) -> None:
        protocol.check()
        if chunk < 1:
            raise ConfigError(f"chunk is {chunk}, expected at least 1 client.")
        components = defense.sharing(model.components())
        by_name(components)
        check_defense(defense, components)
        check_optimizer(protocol.local.optimizer, set(by_name(components)))
        if user_features is None and model.needs_user_features:
            raise ConfigError(f"{type(model).__name__} needs user features; see recleak.data.features.user_features.")
        if user_features is not None and len(user_features) != train.n_users:
            raise ConfigError(f"Got features of {len(user_features):,} users, expected {train.n_users:,}.")
        self.protocol, self.taps, self.chunk, self.seed = protocol, taps, chunk, seed
        self.directory, self.device, self.train = directory, device, train.distinct()
        self.eligible = np.flatnonzero(self.train.activity).astype(np.int64)
        if not len(self.eligible):
            raise DataError("No user has an interaction to train on", remedy="Check the data and the split.")
        local = protocol.local
        examples = Examples.of(
            self.train, negatives=local.negatives, loss=local.loss, resample=local.resample, spare=spare, seed=seed
        )
        self.task = Task(model, components, local, defense, seed, model.item_features(train.n_items), user_features)
        self.assignment = Assignment(self.task, examples)
        self.round, self.loss, self.clients = 0, list[float](), list[int]()
        self.params = first_params(components, train.n_users, train.n_items, seed, device)
        self._load(spare)
        self.store = ClientStore(
            components, local.optimizer, train.n_users, train.n_items, seed, directory, committed=self.round
        )

    # One round.

    def step(self, session: Session) -> int:
        """Broadcast, train, aggregate; the number of rounds made."""
        protocol, components = self.protocol, self.task.components
        participants = protocol.participants(self.eligible, self.round, self.seed)
        self._send(Broadcast(self.round, self.params))
        total = Summation(self.params, components, count_rows=protocol.aggregation == "touched-mean")
        loss = 0.0
        blocks = [participants[start : start + BLOCK] for start in range(0, len(participants), BLOCK)]
        chunks = [self._chunks(block, session.width) for block in blocks]
        works = (Work(self.round, self.store.read(chunk).to(self.device)) for cut in chunks for chunk in cut)
        results = session.map(self.params, works)
        for cut in chunks:
            block = _in_order([next(results) for _ in cut])
            self.store.write(block.kept.to("cpu"))
            weight = self._weights(block.update.client)
            if not self.task.defense.secure_aggregation:
                self._send(Upload(self.round, block.update, weight))
            total.add(block.update, weight)
            loss += float(block.loss.sum(dtype=torch.float64))
        for _ in results:
            raise AssertionError("as many results as chunks")
        aggregate = total.result(self.round)
        if len(participants):
            self._send(aggregate)
            self.params = apply(self.params, aggregate, protocol.aggregation, protocol.server_learning_rate)
        self.loss.append(loss / len(participants) if len(participants) else float("nan"))
        self.clients.append(len(participants))
        self.round += 1
        return self.round

    def _weights(self, client: Tensor) -> Tensor:
        if self.protocol.aggregation != "weighted":
            return torch.ones(len(client), device=client.device)
        return torch.from_numpy(self.train.activity[client.cpu().numpy()].astype(np.float32)).to(client.device)

    def _chunks(self, block: NDArray[np.int64], width: int) -> list[NDArray[np.int64]]:
        """Clients of similar length together; a small block is dealt out so that all of the executor has work."""
        count, size = self.assignment.examples.count[block], self.protocol.local.batch_size
        breadth = padded(size, count)
        order = np.lexsort((-steps_per_epoch(size, count), -breadth))
        pieces = np.split(order, np.flatnonzero(np.diff(breadth[order])) + 1)  # equal padding, whatever the chunk
        cut: list[NDArray[np.int64]] = []
        for piece in pieces:
            if len(piece) <= self.chunk * width:
                cut += [piece[start::width] for start in range(min(width, len(piece)))]
            else:
                cut += [piece[start : start + self.chunk] for start in range(0, len(piece), self.chunk)]
        return [np.sort(block[piece]) for piece in cut]

    def _send(self, message: Message) -> None:
        for tap in self.taps:
            tap.receive(message)

    # Checkpoints.

    def save(self) -> None:
        """Put the run on disk as it is after this round; a kill at any moment leaves this or the one before."""
        if self.directory is None:
            return
        self.store.flush()
        tensors = {f"params {name}": value.cpu() for name, value in self.params.items()}
        for position, tap in enumerate(self.taps):
            tensors |= {f"tap {position} {name}": value for name, value in tap.state().items()}
        about = {"run": self.fingerprint, "round": self.round, "loss": self.loss, "clients": self.clients}
        replace_file(self.directory / "checkpoint.safetensors", tensors, about)
        self.store.commit(self.round)

    def _load(self, spare: tuple[Interactions, ...]) -> None:
        """Continue from the checkpoint in the directory, if there is one and it is of this very run."""
        if self.directory is None:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        config = describe(self.protocol, self.task, self.train, spare, len(self.taps))
        self.fingerprint = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
        file = self.directory / "checkpoint.safetensors"
        if not file.exists():
            (self.directory / "run.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            return
        tensors, about = read_file(file)
        if about.get("run") != self.fingerprint:
            raise CheckpointError(
                f"{self.directory} holds a run of something else: {_difference(self.directory / 'run.json', config)}.\n"
                "  Give the same settings to continue it, or another directory."
            )
        self.round, self.loss, self.clients = about["round"], about["loss"], about["clients"]
        self.params = {name: tensors[f"params {name}"].to(self.device) for name in self.params}
        for position, tap in enumerate(self.taps):
            mark = f"tap {position} "
            tap.restore({name.removeprefix(mark): value for name, value in tensors.items() if name.startswith(mark)})


def first_params(
    components: tuple[Component, ...], n_users: int, n_items: int, seed: int, device: torch.device | str = "cpu"
) -> Params:
    """The shared components before the first round."""
    rows = {"per_user": np.arange(n_users), "per_item": np.arange(n_items)}
    return {
        part.name: (part.draw(seed)[0] if part.storage == "dense" else part.draw(seed, rows[part.storage])).to(device)
        for part in components
        if part.shared
    }


def _in_order(results: list[Trained]) -> Trained:
    """The clients of several chunks, ascending."""
    update, kept = concatenate([r.update for r in results]), concatenate([r.kept for r in results])
    order = update.client.argsort()
    loss = torch.cat([r.loss for r in results])
    return Trained(update.select(order), kept.select(order), loss[order], sum(r.steps for r in results))


def describe(
    protocol: Federated, task: Task, train: Interactions, spare: tuple[Interactions, ...], taps: int
) -> dict[str, Any]:
    """All that decides the result, but for the number of rounds: a finished run may be prolonged."""
    settings = dataclasses.asdict(protocol)
    del settings["rounds"]
    return {
        "protocol": settings,
        "model": repr(task.model),
        "components": [repr(part) for part in task.components],
        "defense": repr(task.defense),
        "seed": task.seed,
        "train": train.fingerprint,
        "spare": [part.fingerprint for part in spare],
        "taps": taps,
        "features": None
        if task.user_features is None
        else hashlib.sha256(task.user_features.numpy().tobytes()).hexdigest(),
    }


def _difference(file: Path, config: dict[str, Any]) -> str:
    """The settings that differ from those of an earlier run, for an error message."""
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "its run.json cannot be read"
    changed = [key for key in config if before.get(key) != json.loads(json.dumps(config[key]))]
    return "; ".join(f"{key} was {str(before.get(key))[:120]}, now {str(config[key])[:120]}" for key in changed)
