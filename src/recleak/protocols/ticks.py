"""A gossip as it runs, tick by tick: nodes send, refuse, merge and train; saved between two ticks, and continued."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.data.interactions import Interactions
from recleak.defenses.base import Defense, hooks
from recleak.defenses.base import check as check_defense
from recleak.errors import ConfigError
from recleak.machine import give_back, memory_line
from recleak.models.base import Model
from recleak.models.components import by_name
from recleak.progress import Progress
from recleak.protocols.checks import check_clients, check_features, check_tables
from recleak.protocols.judging import Judge
from recleak.protocols.mail import Mail, best_heard, random_views
from recleak.protocols.merging import merge_wave, shares, waves
from recleak.protocols.nodes import (
    DTYPE,
    LARGEST,
    PIECE,
    add,
    first_nodes,
    fitting,
    misfit,
    of_nodes,
    refused,
    sizes,
    sound,
)
from recleak.protocols.panel import Panel
from recleak.protocols.saving import Checkpoint, Saved, describe
from recleak.protocols.taps import feeding
from recleak.recording import Tap
from recleak.training import compiled_prme
from recleak.training.chunks import cores
from recleak.training.cohort import DivergedError, Task
from recleak.training.compiled_gmf import direct, train_nodes
from recleak.training.executor import Assignment, InProcess, Session, Work
from recleak.training.optimizers import check as check_optimizer
from recleak.training.state import ClientStore
from recleak.training.transitions import LocalTransitions, examples_of
from recleak.update import NodeParams
from recleak.wire import Push

if TYPE_CHECKING:
    from recleak.protocols.gossip import Gossip

Tamper: TypeAlias = Callable[[dict[str, Tensor]], Any]  # from what a node has to what it sends, whatever that is
_Good: TypeAlias = tuple[NDArray[np.float32], NDArray[np.float32]]  # f32[U] of nodes' own, f32[n] of what they receive
_WAVES = 1 << 20  # numbers of visits in one tick: more than anybody gets messages
_ARRAYS = ("known", "view", "trainings")  # of a run, saved as they are
_FORMAT = "recleak gossip run 1"
_log = logging.getLogger("recleak.gossip")


class Run:
    """A gossip between two ticks."""

    def __init__(
        self,
        protocol: Gossip,
        model: Model,
        train: Interactions,
        valid: Interactions | None,
        defense: Defense,
        taps: tuple[Tap, ...],
        chunk: int,
        seed: int,
        spare: tuple[Interactions, ...],
        user_features: Tensor | None,
        directory: Path | None,
    ) -> None:
        protocol.check()
        if defense.secure_aggregation:
            raise ConfigError(
                "Got secure aggregation in a gossip, expected a federation: nodes receive models one by one."
            )
        if used := hooks(defense) & {"alternate", "objective"}:
            raise ConfigError(
                f"{defense!r} has the hook {min(used)}, expected a federation: in a gossip nobody tells all others."
            )
        components = defense.sharing(model.components())
        if alone := [part.name for part in components if part.shared and part.stays]:
            raise ConfigError(
                f"{alone[0]} is sent and not averaged, expected a federation: nodes of a gossip merge all that they "
                "receive.\n  Keep it (share-less), or share it with averaged=True."
            )
        by_name(components)
        check_defense(defense, components)
        check_optimizer(protocol.local.optimizer, set(by_name(components)))
        check_tables(components, train)
        check_features(model, user_features, train)
        self.protocol, self.taps, self.chunk, self.seed = protocol, taps, chunk, seed
        self.train = train if model.needs_transitions else train.distinct()  # who comes again does so in a sequence
        _log.info(memory_line([protocol.needed_bytes(components, train.n_users, train.n_items)]))
        local = protocol.local
        examples = examples_of(model, self.train, local, spare, seed)
        self.nodes = np.flatnonzero(examples.count).astype(np.int64)
        check_clients(None, self.nodes, examples)
        self.task = Task(model, components, local, defense, seed, model.item_features(train.n_items), user_features)
        self.assignment = Assignment(self.task, examples)
        config = describe(_FORMAT, protocol, self.task, self.train, taps, valid=valid, spare=spare)
        self.checkpoint = Checkpoint(directory, config)
        found = self.checkpoint.read(protocol.rounds, taps)
        if found is None:
            self.params = first_nodes(components, train.n_users, train.n_items, seed, protocol.precision)
        self.store = ClientStore(components, local.optimizer, train.n_users, train.n_items, seed)
        self.direct = compiled_prme.direct(self.task) or direct(self.task, DTYPE[protocol.precision])
        if self.direct:
            self.store.fill(self.nodes)
        self.positives = torch.from_numpy(examples.positives.astype(np.float32))
        sequential = model.needs_transitions
        panel = Panel.of(self.train, valid, spare, seed, sequential) if protocol.peers == "personal" else None
        self.judge = None if panel is None else Judge(self.task, self.store, panel, self.direct)
        self.known = np.full((train.n_users, train.n_users) if self.judge else (0, 0), -1.0, np.float32)
        self.view = np.zeros((len(self.nodes), protocol.degree), np.int64)
        self.due: dict[int, list[Mail]] = {}  # by the tick in which they arrive
        self.faulty: dict[int, Tamper] = {}
        self.confidants = np.zeros(0, np.int64)
        self.trainings = np.zeros(train.n_users, np.int64)
        self.snapshots: dict[int, NodeParams] = {}  # by tick: what was sent in it
        self.unfit: dict[tuple[int, int], str] = {}  # by tick and sender: what is wrong with the form of what was sent
        self.tick, self.loss, self.visits, self.rejected = 0, list[float](), list[int](), set[int]()
        if found is not None:
            self._continue(found)
        else:
            self.save()  # now: taps that have heard a part of the first tick can go back to their beginning
        self.size, self.kept = sizes(self.params), self.store.read_values(self.nodes)  # when a tick begins
        self.sent_size = {sent: sizes(params) for sent, params in self.snapshots.items()}

    def walk(self, executor: InProcess, checkpoint_seconds: float, show_progress: bool) -> None:
        """All ticks that are left."""
        if self.tick == self.protocol.rounds:
            return
        width = cores() if executor.threads is None else executor.threads
        with (
            executor.open(self.assignment) as session,
            ThreadPoolExecutor(width) as self.pool,
            feeding(self.taps) as self.feed,
            Progress(self.protocol.rounds, self.tick, shown=show_progress) as bar,
        ):
            saved, rest = time.monotonic(), checkpoint_seconds
            while self.tick < self.protocol.rounds:
                self.step(session)
                give_back()
                bar.round(self.tick, self.loss[-1], self.visits[-1])
                if self.tick == self.protocol.rounds or time.monotonic() - saved >= rest:
                    begun = time.monotonic()
                    self.save()
                    saved = time.monotonic()
                    rest = max(checkpoint_seconds, 9 * (saved - begun))

    def step(self, session: Session) -> None:
        """One tick: send, receive, merge and train."""
        protocol, tick = self.protocol, self.tick
        awake = np.zeros(self.train.n_users, bool)
        awake[self.nodes] = protocol.awake(self.nodes, tick, self.seed)
        if tick % protocol.refresh == 0:
            self.view = self._views(tick // protocol.refresh)
        self._send(awake)
        arrivals = self._arrivals(awake)
        if len(self.confidants):
            self.feed.send(self.store.disclosed(self.confidants))
        self.feed.send_all(self._pushes(arrivals))
        self.failed = np.zeros(self.train.n_users, bool)
        losses = [self._wave(session, wave, number) for number, wave in enumerate(waves(arrivals, protocol.merging))]
        told = torch.cat([torch.zeros(0), *losses])
        self.visits.append(len(told))
        self.loss.append(float(told[told.isfinite()].mean(dtype=torch.float64)))
        self.feed.wait()  # it reads what was sent in this tick
        self._take_back(arrivals)
        self.tick += 1

    # Saving.

    def save(self) -> None:
        """All that the next tick needs."""
        if self.checkpoint.directory is None:
            return
        tensors = {f"node {name}": value for name, value in self.params.items()}
        tensors |= {f"kept {name}": value for name, value in self.store.contents().items()}
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        for tick, mail in self.due.items():
            arrays |= {f"due {tick} {name}": value for name, value in vars(Mail.join(mail)).items()}
        tensors |= {name: torch.from_numpy(value) for name, value in arrays.items()}
        for sent in {int(sent) for mail in self.due.values() for each in mail for sent in each.sent}:
            tensors |= {f"sent {sent} {name}": value for name, value in self.snapshots[sent].items()}
        about = {"loss": self.loss, "visits": self.visits, "rejected": sorted(self.rejected)}
        about["unfit"] = [[*key, words] for key, words in sorted(self.unfit.items())]
        self.checkpoint.write(self.tick, tensors, about, self.taps)

    def _continue(self, saved: Saved) -> None:
        """Go on from there."""
        self.tick, self.loss, self.visits = saved.count("round"), saved.numbers("loss"), saved.numbers("visits")
        self.rejected = set(saved.numbers("rejected"))
        self.params = self._nodes(saved, "node ")
        self.store.restore({n: saved.tensor(f"kept {n}", value) for n, value in self.store.contents().items()})
        self.unfit = _words(saved, "unfit")
        for name in _ARRAYS:
            setattr(self, name, saved.tensor(name, torch.from_numpy(getattr(self, name))).numpy())
        for sent in _ticks(saved, "sent "):
            self.snapshots[sent] = self._nodes(saved, f"sent {sent} ")
        for tick in _ticks(saved, "due "):
            self.due[tick] = [self._mail(saved, tick)]
        if len(self.view) and not (self.view.min() >= 0 and self.view.max() < self.train.n_users):
            raise saved.unfit("a node has peers that are none")

    def _nodes(self, saved: Saved, mark: str) -> NodeParams:
        """Parameters of nodes, of the types and shapes that they have here."""
        nodes, dtype = self.train.n_users, DTYPE[self.protocol.precision]
        rows = {"per_item": (self.train.n_items,), "per_user": (nodes,), "dense": ()}
        found = NodeParams()
        for part in self.task.components:
            if part.shared:
                like = torch.empty((), dtype=dtype).expand(nodes, *rows[part.storage], *part.shape)
                found[part.name] = saved.tensor(f"{mark}{part.name}", like)
        return found

    def _mail(self, saved: Saved, tick: int) -> Mail:
        """What is on its way, between nodes that there are, with parameters that are there."""
        found = {name: value.numpy() for name, value in saved.under(f"due {tick} ").items()}
        try:
            mail = Mail(**found)
            same = len({each.shape for each in found.values()}) == 1 and mail.sent.ndim == 1
            ends = np.concatenate([mail.sender, mail.receiver])
            if (
                not same
                or not set(mail.sent.tolist()) <= set(self.snapshots)
                or any(each.dtype != np.int64 for each in found.values())
            ):
                raise ValueError("what was sent is not there")
            if len(ends) and not (ends.min() >= 0 and ends.max() < self.train.n_users):
                raise ValueError("a node is none")
        except (TypeError, ValueError) as error:
            raise saved.unfit(f"the mail of tick {tick} cannot be used ({error})") from error
        return mail

    # Sending.

    def _views(self, epoch: int) -> NDArray[np.int64]:
        """New peers; the best whom a node has heard since the last ones are among its personal peers."""
        protocol = self.protocol
        if self.judge is None or epoch == 0:
            return random_views(self.nodes, protocol.degree, self.seed, epoch)
        best = best_heard(self.known[self.nodes], self.nodes, protocol.stay, self.seed, epoch)
        self.known.fill(-1.0)
        return random_views(self.nodes, protocol.degree, self.seed, epoch, best)

    def _send(self, awake: NDArray[np.bool_]) -> None:
        protocol, tick = self.protocol, self.tick
        sender, receiver = np.repeat(self.nodes, protocol.degree), self.view.ravel()
        arrives = awake[sender] & (random.uniform(self.seed, "lost", tick, sender, receiver) >= protocol.loss)
        self._snapshot()
        late = random.below(protocol.delay + 1, self.seed, "delay", tick, sender, receiver)
        lot = random.bits(self.seed, "order", tick, sender, receiver)
        for delay in range(protocol.delay + 1):
            now = np.flatnonzero(arrives & (late == delay))
            now = now[lot[now].argsort()]
            mail = Mail(np.full(len(now), tick), sender[now], receiver[now])
            self.due.setdefault(tick + delay, []).append(mail)

    def _snapshot(self) -> None:
        """Put aside what is sent in this tick. Where that has not the form of a model, its place is filled with NaN."""
        sent, size = self._copy(), self.size.copy()
        self.own = {node: {name: value[node].clone() for name, value in self.params.items()} for node in self.faulty}
        for node, tamper in self.faulty.items():
            instead = tamper({name: value.clone() for name, value in self.own[node].items()})
            if problem := misfit(instead, self.own[node]):
                self.unfit[self.tick, node] = problem
            for name, value in sent.items():
                value[node] = float("nan") if problem else instead[name].detach()
            size[node] = sizes({name: value[node : node + 1] for name, value in sent.items()})[0]
        self.snapshots[self.tick], self.sent_size[self.tick] = sent, size

    def _copy(self) -> NodeParams:
        """All parameters once more, in the memory of what nobody waits for any longer."""
        past = [sent for sent in self.snapshots if sent < self.tick - self.protocol.delay]
        if not past:
            return NodeParams({name: value.clone() for name, value in self.params.items()})
        copy = self.snapshots.pop(past[0])
        del self.sent_size[past[0]]
        self.unfit = {key: words for key, words in self.unfit.items() if key[0] in self.snapshots}
        for name, value in self.params.items():
            copy[name].copy_(value)
        return copy

    def _arrivals(self, awake: NDArray[np.bool_]) -> Mail:
        """What arrives now at nodes that are awake, but for what they refuse."""
        mail = Mail.join(self.due.pop(self.tick, []))
        mail = mail.select(awake[mail.receiver])
        bad = refused(self._size_of(mail), self.size[mail.receiver])
        for sent, sender, receiver in zip(*(each[bad].tolist() for each in vars(mail).values()), strict=True):
            size = float(self.sent_size[sent][sender])
            usual = f"a number of {size:.3g}, its receiver has none above {self.size[receiver]:.3g}"
            words = self.unfit.get((sent, sender), usual if np.isfinite(size) else "numbers that are not finite")
            self._name(sender, f"node {sender} sent {words}; node {receiver} does not use it.")
        return mail.select(~bad)

    def _size_of(self, mail: Mail) -> NDArray[np.float32]:
        """The largest magnitude in each message, f32[n]."""
        size = np.zeros(len(mail.sent), np.float32)
        for sent, mine in mail.by_tick():
            size[mine] = self.sent_size[sent][mail.sender[mine]]
        return size

    def _name(self, node: int, what: str) -> None:
        """Tell of it in the log, once."""
        if node not in self.rejected:
            _log.warning("Tick %d: %s", self.tick, what)
            self.rejected.add(node)

    def _pushes(self, arrivals: Mail) -> Iterator[Push]:
        """What arrives as messages, of so many senders at a time that memory is bounded."""
        step = fitting(self.task.components, self.train.n_users, self.train.n_items, PIECE)
        for sent, place in arrivals.by_tick():
            batch = arrivals.select(place)
            senders = np.unique(batch.sender)
            for start in range(0, len(senders), step):
                some = senders[start : start + step]
                mine = np.isin(batch.sender, some)
                row = torch.from_numpy(np.searchsorted(some, batch.sender[mine]))
                params = of_nodes(self.snapshots[sent], some)
                sender, receiver = torch.from_numpy(batch.sender[mine]), torch.from_numpy(batch.receiver[mine])
                yield Push(self.tick, sender, receiver, params, row)

    # Receiving.

    def _wave(self, session: Session, wave: Mail, number: int) -> Tensor:
        """Merge and train, each receiver once; the losses of the n nodes that did, f32[n]."""
        nodes = np.unique(wave.receiver)
        self.trainings[nodes] += 1
        good = self._performance(wave, nodes)
        chunks = [nodes[start : start + self.chunk] for start in range(0, len(nodes), self.chunk)]
        visit = self._in_place if self.direct else self._through
        loss = torch.cat(list(visit(session, wave, chunks, good, self.tick * _WAVES + number)))
        self.failed[nodes] |= ~loss.isfinite().numpy()
        return loss

    def _through(
        self, session: Session, wave: Mail, chunks: Sequence[NDArray[np.int64]], good: _Good, when: int
    ) -> Iterator[Tensor]:
        """Merge, train and add what that changed, chunk by chunk; the losses of each."""

        def works() -> Iterator[Work]:
            for chunk in chunks:
                self._merge(wave, chunk, good)
                yield Work(when, self.store.read(chunk))

        for trained in session.map(self.params, works()):
            self.store.write(trained.kept.select(trained.loss.isfinite().nonzero()[:, 0]))
            add(self.params, trained.update)
            yield trained.loss

    def _in_place(
        self, session: Session, wave: Mail, chunks: Sequence[NDArray[np.int64]], good: _Good, when: int
    ) -> Iterator[Tensor]:
        """The same where a node's parameters can be trained where they are."""

        def visit(chunk: NDArray[np.int64]) -> Tensor:
            self._merge(wave, chunk, good)
            data = self.assignment.examples.draw(chunk, when)
            if isinstance(data, LocalTransitions):
                return compiled_prme.train_nodes(self.task, self.params, self.store, data, when)
            return train_nodes(self.task, self.params, self.store, data)

        return self.pool.map(visit, chunks)

    def _take_back(self, arrivals: Mail) -> None:
        """Who ends a tick with what cannot be a model has again what it had before, and who caused it is named."""
        before, self.size = self.size, sizes(self.params)
        last, self.kept = self.kept, self.store.read_values(self.nodes)
        fine = (self.size[self.nodes] <= LARGEST) & sound(self.kept) & ~self.failed[self.nodes]
        if fine.all():
            return
        bad, place = self.nodes[~fine], torch.from_numpy(np.flatnonzero(~fine))
        for name, value in self.params.items():
            value[bad] = self.snapshots[self.tick][name][bad]
            for node in self.own.keys() & set(bad.tolist()):  # what it sent was something else
                value[node] = self.own[node][name]
        self.size[bad] = before[bad]
        self.store.write_values(bad, last.select(place).values)
        optimizer = self.protocol.local.optimizer
        for part in self.task.components if optimizer.keep else ():
            for moment in optimizer.moments if part.storage == "per_item" else ():
                self.store.whole(f"{part.name}/{moment}")[bad] = 0  # there is no copy of what was there before
        self.kept = self.store.read_values(self.nodes)
        alone = self._blame(arrivals.select(np.isin(arrivals.receiver, bad)))
        what = "ended with what cannot be a model, after merging and training: they have again what they had before"
        _log.warning("Tick %d: %d nodes (first node %d) %s.", self.tick, len(bad), bad[0], what)
        if alone > len(np.unique(arrivals.receiver)) / 2:
            raise DivergedError(
                f"Tick {self.tick}: {alone:,} nodes {what.partition(':')[0]}, and nobody had sent them large numbers.\n"
                f"  Lower the learning rate ({optimizer.learning_rate:g})."
            )

    def _blame(self, arrivals: Mail) -> int:
        """Name who sent each receiver its largest numbers, if its own were smaller; how many had nothing like that."""
        size = self._size_of(arrivals)
        order = np.lexsort((size, arrivals.receiver))
        worst = order[np.diff(arrivals.receiver[order], append=-1) != 0]
        caused = worst[size[worst] > 2 * np.maximum(1, self.size[arrivals.receiver[worst]])]
        for sender, receiver in zip(arrivals.sender[caused].tolist(), arrivals.receiver[caused].tolist(), strict=True):
            self._name(sender, f"node {sender} sent what made the parameters of node {receiver} unusable.")
        return len(worst) - len(caused)

    def _performance(self, wave: Mail, nodes: NDArray[np.int64]) -> _Good:
        """How good the nodes' own parameters are for them, f32[U], and what they receive, f32[n]; that is `known` then.

        Who has no validation items cannot tell: of what it hears nothing is known.
        """
        own, theirs = np.zeros(self.train.n_users, np.float32), np.zeros(len(wave.sender), np.float32)
        if self.judge is None:
            return own, theirs
        own[nodes] = self.judge.performance(self.params, nodes, nodes, self.pool)
        able = np.diff(self.judge.panel.offset) > 0
        for sent, mine in wave.by_tick():
            sender, receiver = wave.sender[mine], wave.receiver[mine]
            theirs[mine] = self.judge.performance(self.snapshots[sent], sender, receiver, self.pool)
            self.known[receiver, sender] = np.where(able[receiver], theirs[mine], -1.0)
        return own, theirs

    def _merge(self, wave: Mail, nodes: NDArray[np.int64], good: _Good) -> None:
        """Put the weighted mean of its own and the received parameters in the place of each node's (eq. 8)."""
        here = np.isin(wave.receiver, nodes)
        wave = wave.select(here)
        if self.protocol.weights == "equal":
            message, own = torch.ones(len(wave.sender)), torch.ones(len(nodes))
        elif self.judge is None:
            message, own = self.positives[wave.sender], self.positives[nodes]
        else:
            message, own = torch.from_numpy(good[1][here]), torch.from_numpy(good[0][nodes])
        merge_wave(self.params, self.snapshots, wave, nodes, *shares(wave, nodes, message, own))


def _ticks(saved: Saved, mark: str) -> set[int]:
    """The ticks that tensors' names tell after a mark."""
    words = {name.split(" ")[0] for name in saved.under(mark)}
    if any(not each.isdecimal() or len(each) > 18 for each in words):
        raise saved.unfit(f"a tensor is called {mark}{min(words)[:40]}, expected the number of a tick")
    return {int(each) for each in words}


def _words(saved: Saved, name: str) -> dict[tuple[int, int], str]:
    """What is told of a tick and a node."""
    found = saved.about.get(name)
    if not isinstance(found, list) or any(
        not isinstance(each, list) or [type(one) for one in each] != [int, int, str] for each in found
    ):
        raise saved.unfit(f"{name!r} is {found!r:.40}, expected lists of a tick, a node and words")
    return {(tick, node): words for tick, node, words in found}
