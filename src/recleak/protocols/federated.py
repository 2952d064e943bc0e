"""Federated training: a server broadcasts, some clients train and answer, the server aggregates.

A round is cut into blocks of clients, a block into chunks. Chunks are what an executor trains; a block is what goes
over the wire as one message and into the sum, always in the order of clients. Blocks do not depend on the executor or
the chunk, so neither does any bit of the result, and memory is bounded by the block.

A run with a directory is saved there before its first round and every few seconds after a round:

    run.json, checkpoint.safetensors   `protocols.saving`: the shared parameters and the taps' state
    clients/                           what clients keep (`training.state`)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import get_args

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.data.interactions import Interactions
from recleak.data.sequences import Transitions
from recleak.defenses.base import Defense, all_components
from recleak.defenses.base import check as check_defense
from recleak.errors import ConfigError, unknown_name
from recleak.machine import give_back, interrupts_arrive
from recleak.models.base import Model, Params
from recleak.models.components import by_name
from recleak.progress import Progress
from recleak.protocols.checks import check_attributes, check_clients, check_features, check_tables
from recleak.protocols.saving import Checkpoint, Interrupted, describe
from recleak.protocols.stopping import Stopping
from recleak.protocols.taps import feeding
from recleak.recording import Tap
from recleak.training.aggregate import Aggregation, Summation, apply, unaveraged
from recleak.training.attributes import PrivateAttributes, PublicData
from recleak.training.cohort import DivergedError, LocalTraining, Task, train, widths
from recleak.training.compiled_prme import scores_in_context
from recleak.training.executor import Assignment, Executor, InProcess, Session, Work
from recleak.training.local import Examples, steps_per_epoch
from recleak.training.optimizers import check as check_optimizer
from recleak.training.personal import first_params, personal_scores
from recleak.training.state import (
    CheckpointError,
    ClientStore,
    locked,
)
from recleak.training.transitions import TransitionExamples, examples_of
from recleak.update import merge
from recleak.wire import Broadcast, Upload

BLOCK = 64  # clients in one message; part of the last bits of a result, so not an option
TIDY_SECONDS = 5.0  # after so much time, memory that is no longer needed goes back; it takes some 50 ms
_FORMAT = "recleak federated run 2"
_SCORED = 1 << 26  # bytes of gathered item rows at a time when users are scored


@dataclass(frozen=True)
class Federated:
    """Who takes part in a round, how clients train, and what the server does with their answers.

    Users without an interaction are no clients: they are never sampled, and `fraction` is a share of the others.
    """

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
        if self.clients_per_round is not None and self.fraction != 1:
            raise ConfigError(
                f"Got fraction {self.fraction} and clients_per_round {self.clients_per_round}, expected one of them.\n"
                "  Leave the other one out."
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}, expected at least 0 and less than 1.")
        if self.aggregation not in get_args(Aggregation):
            raise unknown_name("aggregation", self.aggregation, get_args(Aggregation))
        if not (isfinite(self.server_learning_rate) and self.server_learning_rate > 0):
            raise ConfigError(f"server_learning_rate is {self.server_learning_rate}, expected a number above 0.")
        self.local.check()

    def participants(self, eligible: NDArray[np.int64], round: int, seed: int) -> NDArray[np.int64]:
        """The clients that answer in a round, ascending: a uniform sample without replacement, less the dropouts."""
        n = (
            self.clients_per_round
            if self.clients_per_round is not None
            else round_half_up(self.fraction * len(eligible))
        )
        lot = random.bits(seed, "participants", round, eligible)
        chosen = np.sort(eligible[np.argsort(lot, kind="stable")[: max(n, 1)]])
        return chosen[random.uniform(seed, "dropout", round, chosen) >= self.dropout]


def round_half_up(number: float) -> int:
    """The nearest whole number."""
    return int(number + 0.5)


@dataclass(frozen=True, eq=False)
class FederatedModel:
    """The result: global parameters, what clients keep, how training went. It scores each user with its own state."""

    task: Task
    params: Params
    store: ClientStore
    train: Interactions
    loss: tuple[float, ...]  # mean over the clients of each round; NaN where nobody answered
    clients: tuple[int, ...]  # that answered in each round
    version: int  # of the store
    continued: int = 0  # rounds that an earlier call had made
    curve: tuple[float, ...] = ()  # what a stopping rule saw
    examples: Examples | TransitionExamples | None = None
    tuned: bool = False  # users score after one more local training, each with tables of its own, as PFedRec has it

    def scores(self, users: Tensor) -> Tensor:
        """Every item for each of the given users: i64[B] -> f32[B, I]; memory beside the result is bounded."""
        widest = max([part.size for part in self.task.components if part.storage == "per_item"], default=1)
        return self._scored(users, None, self.train.n_items * widest)

    def scores_of(self, users: Tensor, items: Tensor) -> Tensor:
        """Some items for each of the given users, none of whom occurs twice: i64[B], i64[B, K] -> f32[B, K]."""
        widest = max([part.size for part in self.task.components if part.storage == "per_item"], default=1)
        return self._scored(users, items, max(self.train.n_items, items.shape[1] * widest))

    def scores_after(self, starts: Transitions, items: Tensor) -> Tensor:
        """Some items for the user of each transition, as if it were still to come: T, i64[T, K] -> f32[T, K]."""
        self._require_its_clients()
        return scores_in_context(self.task, self.params, self.store, starts, items)

    def _scored(self, users: Tensor, items: Tensor | None, numbers: int) -> Tensor:
        """Scores, so many users at a time that working memory is bounded; one takes about so many numbers."""
        self._require_its_clients()
        order, back = torch.unique(users.cpu(), return_inverse=True)
        asked = None if items is None else items[back.argsort()]
        parts, step = [], max(1, _SCORED // (4 * numbers))
        tuned = self.tuned and self.examples is not None
        task = self.task if tuned else self.task.without_own()
        names = None if tuned else {part.name for part in task.components}
        for start in range(0, len(order), step):
            some = order[start : start + step].numpy()
            here = None if asked is None else asked[start : start + step]
            kept, moved = self.store.read(some, names), None
            if self.tuned and self.examples is not None:
                data = self.examples.draw(some, len(self.loss))
                with torch.enable_grad():  # also for who scores without
                    trained = train(self.task, self.params, kept, data, len(self.loss))
                kept, moved = trained.kept, trained.update
            parts.append(personal_scores(task, self.params, kept, self._own[some], here, moved=moved))
        return torch.cat(parts)[back.to(parts[0].device)]

    def _require_its_clients(self) -> None:
        if self.store.version != self.version:
            raise CheckpointError(
                f"Got a model of {len(self.loss)} rounds whose run has gone on in the same directory since, expected "
                "its clients as they were.\n  Score before you prolong a run, or copy its directory."
            )

    @cached_property
    def _own(self) -> sp.csr_array:
        return self.train.matrix()


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
    attributes: PrivateAttributes | None = None,
    stopping: Stopping | None = None,
    directory: Path | None = None,
    checkpoint_seconds: float = 5.0,
    device: torch.device | str = "cpu",
    confidants: Sequence[int] = (),
    show_progress: bool = True,
) -> FederatedModel:
    """Train `model` on the interactions of each user as one client.

    `taps` receive every message of the wire in order; they are closed after the last round, and not if a run fails.
    With a `directory` the run is checkpointed. Calling again with the same arguments continues it, whenever it was
    killed or interrupted, with the same result to the bit; with more rounds it prolongs a finished run. Without one, an
    interrupted run leaves nothing, and its taps cannot be used again. Items of `spare` (for instance the test part) are
    never drawn as negatives, as some published codes do. `confidants` are users who side with an adversary: in every
    round they tell what they keep (`Disclosure`). `attributes` are what users keep to themselves about themselves, for
    defenses that protect it. With `stopping`, a run may end before its last round.
    """
    with interrupts_arrive(), nullcontext() if directory is None else locked(directory):
        run = _Run(
            protocol,
            model,
            train,
            defense or Defense(),
            tuple(taps),
            chunk,
            seed,
            spare,
            user_features,
            attributes,
            directory,
            device,
        )
        run.stopping = stopping
        run.confidants = np.unique(np.asarray(confidants, np.int64))
        try:
            run.walk(executor or InProcess(), checkpoint_seconds, show_progress)
            for tap in taps:
                tap.close()
        except KeyboardInterrupt as interrupt:
            raise Interrupted(run.checkpoint.after_interrupt(run.round, protocol.rounds)) from interrupt
    return run.model()


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
        attributes: PrivateAttributes | None,
        directory: Path | None,
        device: torch.device | str,
    ) -> None:
        protocol.check()
        if chunk < 1:
            raise ConfigError(f"chunk is {chunk}, expected at least 1 client.")
        components = all_components(model.components(), defense)
        by_name(components)
        check_defense(defense, components)
        check_optimizer(protocol.local.optimizer, set(by_name(components)))
        check_tables(components, train)
        check_features(model, user_features, train)
        self.protocol, self.taps, self.chunk, self.seed = protocol, taps, chunk, seed
        self.device = device
        self.train = train if model.needs_transitions else train.distinct()  # who comes again does so in a sequence
        local = protocol.local
        examples = examples_of(model, self.train, local, spare, seed)
        self.eligible = np.flatnonzero(examples.count).astype(np.int64)
        check_clients(protocol.clients_per_round, self.eligible, examples)
        self.task = Task(
            model, components, local, defense, seed, model.item_features(train.n_items), user_features, attributes
        )
        check_attributes(defense, attributes, train.n_users)
        self.public = None
        if attributes is not None and defense.disclosed:
            self.public = PublicData(components, defense.disclosed, attributes, self.train.matrix(), seed)
        self.stopping: Stopping | None = None
        self.curve: list[float] = []
        self.assignment = Assignment(self.task, examples)
        self.round, self.loss, self.clients = 0, list[float](), list[int]()
        self.confidants = np.zeros(0, np.int64)
        self.params = first_params(components, train.n_users, train.n_items, seed, device)
        config = describe(_FORMAT, protocol, self.task, self.train, taps, spare=spare, block=BLOCK)
        self.checkpoint = Checkpoint(directory, config)
        if found := self.checkpoint.read(protocol.rounds, taps):
            self.round, self.loss, self.clients = (
                found.count("round"),
                found.numbers("loss"),
                found.numbers("clients"),
            )
            self.params = {n: found.tensor(f"params {n}", value).to(device) for n, value in self.params.items()}
            self.curve = found.numbers("curve")
            if self.public is not None:
                public = self.public.state
                self.public.state = {name: found.tensor(f"public {name}", value) for name, value in public.items()}
        self.store = ClientStore(
            components, local.optimizer, train.n_users, train.n_items, seed, directory, committed=self.round
        )
        self.continued = self.round
        if self.checkpoint.saved is None:
            self.save()  # now: taps that have heard a part of the first round can go back to their beginning

    def walk(self, executor: Executor, checkpoint_seconds: float, show_progress: bool) -> None:
        """All rounds that are left."""
        rounds = self.protocol.rounds
        if self.round == rounds or self._ended():
            return
        with (
            executor.open(self.assignment) as session,
            feeding(self.taps) as self.feed,
            Progress(rounds, self.round, shown=show_progress) as progress,
        ):
            saved, rest = time.monotonic(), checkpoint_seconds
            tidied = saved
            while self.round < rounds:
                progress.round(self.step(session), self.loss[-1], self.clients[-1])
                if time.monotonic() - tidied >= TIDY_SECONDS:
                    give_back()
                    tidied = time.monotonic()
                if self.stopping is not None and self.stopping.due(self.round):
                    self.curve.append(self.stopping.score(self.model()))
                ended = self.round == rounds or self._ended()
                if ended or time.monotonic() - saved >= rest:
                    self.feed.wait()
                    begun = time.monotonic()
                    self.save()
                    saved = time.monotonic()
                    rest = max(checkpoint_seconds, 9 * (saved - begun))  # a tenth of the time at most
                if ended:
                    return

    def _ended(self) -> bool:
        return self.stopping is not None and self.stopping.rule.ended(self.curve)

    def model(self) -> FederatedModel:
        """As it is after this round."""
        loss, clients, curve = tuple(self.loss), tuple(self.clients), tuple(self.curve)
        version = self.store.version
        examples, continued = self.assignment.examples, self.continued
        return FederatedModel(
            self.task, self.params, self.store, self.train, loss, clients, version, continued, curve, examples
        )

    # One round.

    def step(self, session: Session) -> int:
        """Broadcast, train, aggregate; the number of rounds made."""
        protocol, components = self.protocol, self.task.components
        participants = protocol.participants(self.eligible, self.round, self.seed)
        self.feed.send(Broadcast(self.round, self.params))
        if len(self.confidants):
            self.feed.send(self.store.disclosed(self.confidants))
        received = self.params
        if self.public is not None and (disclosure := self.public.message()) is not None:
            self.feed.send(disclosure)
            received = {**self.params, **self.public.tables()}
        total = Summation(self.params, components, count_rows=protocol.aggregation == "touched-mean")
        loss = 0.0
        blocks = [participants[start : start + BLOCK] for start in range(0, len(participants), BLOCK)]
        width = session.width if len(blocks) < session.width else 1  # or whole blocks are enough work for everybody
        chunks = [self._chunks(block, width) for block in blocks]
        works = (Work(self.round, self.store.read(chunk).to(self.device)) for cut in chunks for chunk in cut)
        with closing(session.map(received, works)) as results:
            for cut in chunks:
                parts = list(islice(results, len(cut)))
                for part in parts:
                    self.store.write(part.kept.to("cpu"))
                update = merge([part.update for part in parts])
                if self.public is not None:
                    told = set(self.task.defense.disclosed)
                    kept = merge([part.kept.only(told) for part in parts])
                    self.public.add(self.params, update, kept, self.round)
                order = torch.cat([part.update.client for part in parts]).argsort()
                positives, losses = (
                    torch.cat([getattr(part, of) for part in parts])[order] for of in ("positives", "loss")
                )
                weight = positives if protocol.aggregation == "weighted" else torch.ones_like(positives)
                if not self.task.defense.secure_aggregation:
                    self.feed.send(Upload(self.round, update, weight))
                total.add(update, weight)
                loss += float(losses.sum(dtype=torch.float64))
        if len(participants):
            aggregate = total.result(self.round)
            self.feed.send(aggregate)
            plain = unaveraged(components)
            self.params = apply(self.params, aggregate, protocol.aggregation, protocol.server_learning_rate, plain)
            self._require_finite(len(participants))
        self.loss.append(loss / len(participants) if len(participants) else float("nan"))
        self.clients.append(len(participants))
        self.round += 1
        return self.round

    def _require_finite(self, clients: int) -> None:
        broken = [name for name, value in self.params.items() if not bool(torch.isfinite(value.sum()))]
        if broken:
            raise DivergedError(
                f"Round {self.round}: {', '.join(broken)} is not finite after the updates of {clients:,} clients.\n"
                f"  Lower the learning rate ({self.protocol.local.optimizer.learning_rate}), or use aggregation "
                "'mean': 'sum' multiplies every step by the number of clients."
            )

    def _chunks(self, block: NDArray[np.int64], width: int) -> list[NDArray[np.int64]]:
        """Clients of similar length together; a small block is dealt out so that all of the executor has work."""
        count, size = self.assignment.examples.count[block], self.protocol.local.batch_size
        breadth = widths(self.assignment.task, count, torch.device(self.device))
        order = np.lexsort((-steps_per_epoch(size, count), -breadth))
        pieces = np.split(order, np.flatnonzero(np.diff(breadth[order])) + 1)  # equal padding, whatever the chunk
        cut: list[NDArray[np.int64]] = []
        for piece in pieces:
            if len(piece) <= self.chunk * width:
                cut += [piece[start::width] for start in range(min(width, len(piece)))]
            else:
                cut += [piece[start : start + self.chunk] for start in range(0, len(piece), self.chunk)]
        return [np.sort(block[piece]) for piece in cut]

    def save(self) -> None:
        """Put the run on disk as it is after this round; a kill at any moment leaves this or the one before."""
        if self.checkpoint.directory is None:
            return
        self.store.flush()
        tensors = {f"params {name}": value.cpu() for name, value in self.params.items()}
        if self.public is not None:
            tensors |= {f"public {name}": value.clone() for name, value in self.public.state.items()}
        about = {"loss": self.loss, "clients": self.clients, "curve": self.curve}
        self.checkpoint.write(self.round, tensors, about, self.taps)
        self.store.commit(self.round)
