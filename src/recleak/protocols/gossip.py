"""Gossip learning: every node has a model of its own, sends it to a few others, merges what arrives, and trains.

Time goes in ticks. In a tick every node that is awake sends its shared parameters, as they are when the tick begins, to
the peers in its view. What arrives at a node is merged into its parameters, one message after the other, each merge
followed by local training (Belal et al. 2023, eqs. 8 and 9): the first message of every node is the first wave, the
second the next wave. A wave is one batched program: a merge is a gather and a weighted sum, and no node's result
depends on which others are in its wave or chunk.

    Rand-Gossip    peers="random": all peers are replaced by random ones, periodically
    Pers-Gossip    peers="personal": of those who sent to a node since its view last changed, the `stay` best are in its
                   next view, by how well what they sent did on its own validation items; the rest is random. Merges
                   are weighted by that too (PEPPER, Belal et al. 2022)

What a node sends, it also has: defenses act on the changes of its training before they enter its shared parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.data.interactions import Interactions
from recleak.data.sequences import Transitions
from recleak.defenses.base import Defense
from recleak.errors import ConfigError, unknown_name
from recleak.machine import interrupts_arrive
from recleak.models.base import Model
from recleak.models.components import Component
from recleak.protocols.merging import Merging
from recleak.protocols.nodes import Precision, fitting
from recleak.protocols.saving import Interrupted
from recleak.protocols.ticks import Run, Tamper
from recleak.recording import Tap
from recleak.training import compiled_prme
from recleak.training.cohort import LocalTraining, Task
from recleak.training.executor import InProcess
from recleak.training.personal import personal_scores
from recleak.training.state import ClientStore, locked
from recleak.update import NodeParams

Peering = Literal["random", "personal"]
Weights = Literal["data", "equal"]


@dataclass(frozen=True)
class Gossip:
    """How nodes find each other, what may go wrong on the way, and what they do with what arrives.

    merging "pairwise": message after message, as they arrive; "together": all that arrived in a tick, then one
    training.
    weights of a merge "data": numbers of positives, or with personal peers the performance on the node's own validation
    items, of its own and of the received parameters; "equal": all count alike, and nobody tells how many items it has.
    delay: a message is so many ticks late at most, drawn uniformly. loss: the chance that it never arrives. churn: the
    chance that a node sleeps through a tick: it neither sends nor hears.
    precision: in which nodes hold what they share; they train in float32.
    """

    rounds: int = 100  # ticks
    degree: int = 3  # peers that a node sends to
    refresh: int = 10  # ticks after which views change
    peers: Peering = "random"
    stay: int = 2  # of personal peers: of those heard, not of those sent to
    merging: Merging = "pairwise"
    weights: Weights = "data"
    delay: int = 0
    loss: float = 0.0
    churn: float = 0.0
    precision: Precision = "float32"
    local: LocalTraining = field(default_factory=LocalTraining)

    def check(self) -> None:
        """An error for a setting that cannot be."""
        for name, least in (("rounds", 0), ("degree", 1), ("refresh", 1), ("stay", 0), ("delay", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least {least}.")
        for name, kind in (("peers", Peering), ("merging", Merging), ("weights", Weights), ("precision", Precision)):
            if getattr(self, name) not in get_args(kind):
                raise unknown_name(name, getattr(self, name), get_args(kind))
        for name in ("loss", "churn"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 0 and less than 1.")
        if self.peers == "personal" and self.stay > self.degree:
            raise ConfigError(f"stay is {self.stay}, expected at most the {self.degree} peers of a view.")
        self.local.check()

    def awake(self, nodes: NDArray[np.int64], tick: int, seed: int) -> NDArray[np.bool_]:
        """Who takes part in a tick."""
        return np.asarray(random.uniform(seed, "awake", tick, nodes) >= self.churn)

    def state_bytes(self, components: Sequence[Component], n_users: int, n_items: int) -> int:
        """What all nodes hold of what they share, once."""
        rows = {"per_item": n_items, "per_user": n_users, "dense": 1}
        numbers = sum(part.size * rows[part.storage] for part in components if part.shared)
        return n_users * numbers * (4 if self.precision == "float32" else 2)

    def needed_bytes(self, components: Sequence[Component], n_users: int, n_items: int) -> int:
        """What a run takes beside its working memory: the nodes' parameters, and all that is under way."""
        return (2 + self.delay) * self.state_bytes(components, n_users, n_items)


@dataclass(frozen=True, eq=False)
class GossipModel:
    """The result: what every node has. It scores each user with the user's own model."""

    task: Task
    params: NodeParams
    store: ClientStore
    train: Interactions
    loss: tuple[float, ...]  # mean over the visits of each tick; NaN where nothing arrived
    visits: tuple[int, ...]  # local trainings in each tick
    rejected: tuple[int, ...] = ()  # nodes that sent something that a receiver could not use
    trainings: tuple[int, ...] = ()  # of each user: after how many merges it trained

    def scores(self, users: Tensor) -> Tensor:
        """Every item for each of the given users: i64[B] -> f32[B, I]."""
        order, back = torch.unique(users.cpu(), return_inverse=True)
        step = fitting(self.task.components, self.train.n_users, self.train.n_items)
        parts = [
            personal_scores(self.task, self.params, self.store.read(some.numpy()), self._own[some.numpy()])
            for some in torch.split(order, step)
        ]
        return torch.cat(parts)[back]

    def scores_after(self, starts: Transitions, items: Tensor) -> Tensor:
        """Some items for the user of each transition, as if it were still to come: T, i64[T, K] -> f32[T, K]."""
        return compiled_prme.scores_in_context(self.task, self.params, self.store, starts, items)

    @cached_property
    def _own(self) -> sp.csr_array:
        return self.train.matrix()


def train_gossip(
    protocol: Gossip,
    model: Model,
    train: Interactions,
    *,
    valid: Interactions | None = None,
    defense: Defense | None = None,
    taps: Sequence[Tap] = (),
    threads: int | None = None,
    chunk: int = 128,
    seed: int = 0,
    spare: tuple[Interactions, ...] = (),
    user_features: Tensor | None = None,
    directory: Path | None = None,
    checkpoint_seconds: float = 60.0,
    faulty: Mapping[int, Tamper] | None = None,
    confidants: Sequence[int] = (),
    show_progress: bool = True,
) -> GossipModel:
    """Train `model` on the interactions of each user as one node of a network.

    `valid` are the items on which nodes compare their peers; personal peers need it. `taps` receive every message that
    arrives, but for what its receiver refuses: what cannot be a model (`protocols.nodes`). `faulty` nodes send
    something else than what they have. Whose message was refused, or made its receiver's parameters unusable, is named
    in the log; the receiver has what it had before. `confidants` are users who side with an adversary: in every tick
    they tell what they keep (`Disclosure`). With a `directory` the run is saved and continued as that of a federation;
    all that nodes have goes to disk, so a save may take no more than a tenth of the time.
    """
    with interrupts_arrive(), nullcontext() if directory is None else locked(directory):
        given = (protocol, model, train, valid, defense or Defense(), tuple(taps), chunk, seed, spare, user_features)
        run = Run(*given, directory)
        run.faulty, run.confidants = dict(faulty or {}), np.unique(np.asarray(confidants, np.int64))
        try:
            run.walk(InProcess(threads), checkpoint_seconds, show_progress)
            for tap in taps:
                tap.close()
        except KeyboardInterrupt as interrupt:
            raise Interrupted(run.checkpoint.after_interrupt(run.tick, protocol.rounds)) from interrupt
    rejected, trainings = tuple(sorted(run.rejected)), tuple(run.trainings.tolist())
    loss, visits = tuple(run.loss), tuple(run.visits)
    return GossipModel(run.task, run.params, run.store, run.train, loss, visits, rejected, trainings)
