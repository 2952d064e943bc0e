"""The steps of a chunk of clients: what they begin with, how they walk through their batches, what they end with.

Clients are sorted by their number of steps, so those still active at a step are a prefix. Axis letters: C clients,
A active ones, B items in a batch, N item rows of all clients, I items, d factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.defenses.base import Defense, Scene, hooks
from recleak.defenses.proximal import proximal_terms
from recleak.errors import ConfigError
from recleak.models.base import Params
from recleak.models.components import Component
from recleak.streams import Streams
from recleak.training.attributes import public_of
from recleak.training.batches import Batches, Step
from recleak.training.compiled import walk_epochs
from recleak.training.compiled_clipped import walk_clipped
from recleak.training.compiled_decoupled import walk_decoupled
from recleak.training.compiled_perceptron import walk_perceptron
from recleak.training.compiled_sgd import walk_sgd
from recleak.training.local import LocalData, held_rows, plan
from recleak.training.losses import cross_entropy, pairwise, second_order
from recleak.training.optimizers import (
    SGD,
    Adam,
    DirectRows,
    LazyRows,
    Stepper,
    idle_moves,
    learning_rate,
    reach,
)
from recleak.training.per_example import mean_of_clipped
from recleak.update import Update, rows_of, values_of

if TYPE_CHECKING:
    from recleak.training.cohort import Task

_LARGEST = 1 << 23  # entries of the table of idle moves; with a larger one (slow betas, long visits) it does not pay
_SUM = " summed over own items"  # marks the gradient that flows through a sum over all own rows
AGE = "optimizer/age"  # the name under which a client keeps how many steps its optimizer has made


class Visit:
    """The working state of one chunk of clients. It is changed in place, and nothing of it outlives the visit."""

    def __init__(
        self, task: Task, received: Params, kept: Update, data: LocalData, round: int, streams: Streams
    ) -> None:
        training, optimizer = task.training, task.training.optimizer
        self.task, self.received, self.data, self.streams, self.optimizer = task, received, data, streams, optimizer
        self.terms = proximal_terms(task.defense)
        self.used = hooks(task.defense) - ({"penalty"} if self.terms == () else set())
        self.example_bound = task.defense.example_bound
        self.round = round
        self.own_names = {part.name for part in task.defense.own_components()}
        self.device = kept.client.device
        self.rates = {part.name: learning_rate(optimizer, part.name) for part in task.components}
        self.plan = plan(
            data,
            epochs=training.epochs,
            batch_size=training.batch_size,
            seed=task.seed,
            round=round,
            shuffle=training.shuffle,
        )
        self.held = held_rows(data, self._rows_beside(kept))
        self.client = self._put(data.client)
        self.item, self.offset = self._put(self.held.item), self._put(self.held.offset)
        self._owner = torch.repeat_interleave(torch.arange(len(self.client), device=self.device), self.offset.diff())
        self.values = {p.name: self._first_values(p, kept) for p in task.components if p.storage != "per_item"}
        self.rows = {p.name: self._first_rows(p, kept) for p in task.components if p.storage == "per_item"}
        self.start = self._where_they_began() if self._compares else None
        self.age = kept.values[AGE].clone() if optimizer.keep else None
        self.moments = self._first_moments(kept)
        self.batches = Batches(self)
        self.turns = self._turns()

    def _turns(self) -> tuple[frozenset[str], ...]:
        """The components that each gradient of a step is for; without turns, all of the model's at once."""
        names = [part.name for part in self.task.components if part.name not in self.own_names]
        if not self.task.training.turns:
            return (frozenset(names),)
        turns = tuple(
            frozenset(name for name in names if any(f"{name}.".startswith(f"{prefix}.") for prefix in turn))
            for turn in self.task.training.turns
        )
        if sum(len(turn) for turn in turns) != len(names) or frozenset().union(*turns) != frozenset(names):
            raise ConfigError(
                f"turns is {self.task.training.turns}, expected each of the components {', '.join(names)} in one part."
            )
        return turns

    @property
    def _compares(self) -> bool:
        """A hook needs to know how far the clients have moved."""
        return bool(self.used & {"penalty", "epoch"})

    @property
    def _every_row(self) -> bool:
        """Rows outside the batch have a gradient, or must be up to date at every step."""
        return self._compares or self._accumulates or self.task.model.reads_neighbors or "gradient" in self.used

    @property
    def _accumulates(self) -> bool:
        """Gradients are summed over the steps."""
        return isinstance(self.optimizer, Adam) and self.optimizer.accumulate

    def _put(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    # What the clients begin with.

    def _rows_beside(self, kept: Update) -> NDArray[np.int64] | None:
        """Keys (position * I + item) of rows that move although no example touches them."""
        decays = self.task.training.decay_rows == "all" and self.optimizer.weight_decay
        if decays or self.task.defense.holds_every_row:
            return np.arange(len(self.data.client) * self.data.n_items)
        if self.optimizer.keep and self.optimizer.moments:
            return _keys(kept)
        return None

    def _first_values(self, part: Component, kept: Update) -> Tensor:
        if part.name in kept.values:
            return kept.values[part.name].clone()
        return self._received_values(part)

    def _received_values(self, part: Component) -> Tensor:
        mine = values_of(self.received, part.name, self.client, per_user=part.storage == "per_user")
        return mine.expand(len(self.client), *part.shape).clone()

    def _where_they_began(self) -> Update:
        """As others know it: of what is sent but not averaged, that is what was sent last, noise and all."""
        start = self._now().map(lambda _, tensor, __: tensor.clone())
        known = {p.name: self._received_values(p) for p in self.task.components if p.shared and p.stays}
        return replace(start, values={**start.values, **known})

    def _first_rows(self, part: Component, kept: Update) -> Tensor:
        if part.shared:
            return rows_of(self.received, part.name, self.client[self._owner], self.item)
        return self._recall(part.name, part.draw(self.task.seed, self.held.item).to(self.device), kept)

    def _first_moments(self, kept: Update) -> dict[str, list[Tensor]]:
        moments: dict[str, list[Tensor]] = {}
        for name, value in self.values.items():
            moments[name] = [
                kept.values[f"{name}/{moment}"].clone() if self.optimizer.keep else torch.zeros_like(value)
                for moment in self.optimizer.moments
            ]
        for name, value in self.rows.items():
            moments[name] = [
                self._recall(f"{name}/{moment}", torch.zeros_like(value), kept)
                if self.optimizer.keep
                else torch.zeros_like(value)
                for moment in (self.optimizer.moments if self._strategy == "table" else ())
            ]
        return moments

    def _recall(self, name: str, rows: Tensor, kept: Update) -> Tensor:
        """`rows`, overwritten by those that the clients kept."""
        if len(kept.item):
            mine = np.repeat(np.arange(len(self.data.client)), np.diff(self.held.offset)) * self.data.n_items
            place = np.searchsorted(_keys(kept), mine + self.held.item)
            found = np.flatnonzero(np.append(_keys(kept), -1)[place] == mine + self.held.item)
            rows[self._put(found)] = kept.rows[name][self._put(place[found])]
        return rows

    # The steps.

    @property
    def _strategy(self) -> Literal["lazy", "direct", "table"]:
        """How item rows are stepped; see `optimizers`."""
        if self._every_row or self.optimizer.weight_decay:
            return "table"
        if isinstance(self.optimizer, SGD):
            return "table" if self.optimizer.momentum else "direct"
        if self.device.type != "cpu" or self.optimizer.keep or not self.optimizer.beta2:
            return "table"
        steps = len(self.plan.active)
        return "lazy" if steps * reach(self.optimizer, steps) <= _LARGEST else "table"

    def walk(self) -> Tensor:
        """All steps of all clients; the mean loss of each, f32[C]."""
        strategy = self._strategy
        rows: dict[str, LazyRows | DirectRows] = {}
        for name, value in self.rows.items():
            rate = self.rates[name]
            if strategy == "lazy" and isinstance(self.optimizer, Adam):
                moves = idle_moves(self.optimizer, rate, len(self.plan.active))
                rows[name] = LazyRows(value, self.optimizer, rate, moves)
                self.rows[name] = rows[name].value
            else:
                rows[name] = DirectRows(value, rate)
        loss = walk_decoupled(self)
        stepwise = len(self.turns) > 1 or self.used & {"alternate", "objective"}
        if loss is None and not stepwise:
            loss = walk_perceptron(self, rows)
        if loss is None and not stepwise:
            loss = walk_epochs(self)
        if loss is None and not stepwise:
            loss = walk_sgd(self)
        if loss is None and not stepwise:
            loss = walk_clipped(self)
        return self._walk(rows, strategy) if loss is None else loss

    def _walk(self, rows: dict[str, LazyRows | DirectRows], strategy: str) -> Tensor:
        """Step by step for all clients."""
        active = [*self.plan.active.tolist(), 0]
        loss = torch.zeros(len(self.client), device=self.device)
        sums = {n: torch.zeros_like(t) for n, t in {**self.values, **self.rows}.items()} if self._accumulates else {}
        for step, now in enumerate(active[:-1]):
            if step == 0 or now < active[step - 1]:
                whole = self._of_model(self._now(now))
                steppers = [(self._stepper(whole.values, now), None if self.age is None else self.age[:now])]
                if strategy == "table":
                    age = None if self.age is None else self.age[whole.owner]
                    steppers.append((self._stepper(whole.rows, len(whole.item)), age))
            batch = self.batches.at(step, now)
            if "alternate" in self.used:
                self._alternate(step, whole, rows, batch)
            for turn in self.turns:
                if self.example_bound is not None:
                    gradients = self._hooked(step, mean_of_clipped(self, step, whole, batch, loss[:now]))
                else:
                    params = self._read(whole, rows, batch, step)
                    gradients = self.gradients(params, batch, loss[:now], step, now)
                    if strategy == "table":
                        gradients = self._hooked(step, self._of_all_rows(whole, batch, gradients))
                    else:
                        for name in rows.keys() & turn:
                            rows[name].step(batch.row, gradients[name], step + 1)
                if self._accumulates:
                    gradients = {name: sums[name][: len(each)].add_(each) for name, each in gradients.items()}
                for stepper, age in steppers:
                    stepper.step(gradients, step + 1 if age is None else age + step + 1, turn)
                if len(self.turns) > 1 and self.task.model.reads_neighbors:
                    batch = self.batches.at(step, now)  # own rows have moved
            if active[step + 1] < now:  # these clients are done
                done = slice(int(self.held.offset[active[step + 1]]), int(self.held.offset[now]))
                for reader in rows.values():
                    reader.settle(done, step + 1)
            if "epoch" in self.used:
                self._end_epoch(step, now)
        return loss / self._put(self.plan.steps) / len(self.turns)

    def _of_model(self, update: Update) -> Update:
        """Without the components of the defense."""
        values = {name: value for name, value in update.values.items() if name not in self.own_names}
        return replace(update, values=values)

    def _read(self, whole: Update, rows: dict[str, LazyRows | DirectRows], batch: Step, step: int) -> Params:
        """What the model reads at a step: values, and the rows of the batch."""
        return {**whole.values, **{name: reader.read(batch.row, step) for name, reader in rows.items()}}

    def scene(self, batch: Step, now: int) -> Scene:
        """What a defense sees of a step beside the parameters."""
        own = {name: value[:now] for name, value in self.values.items() if name in self.own_names}
        real = batch.weight > 0  # padding is a client's first example once more
        if real.shape != batch.inputs.own.shape:  # pairs
            real = torch.cat([real, real], dim=1)
        inputs = replace(batch.inputs, own=batch.inputs.own & real)
        if (known := self.task.attributes) is None:
            return Scene(self.round, inputs, own)
        client = self.client[:now].cpu()

        def mine(tables: Mapping[str, Tensor]) -> Params:
            return {name: value[client].to(self.device) for name, value in tables.items()}

        insensitive = known.public[client].to(self.device)
        told = public_of(self.received)
        return Scene(self.round, inputs, own, mine(known.labels), mine(known.protected), insensitive, told)

    def alternate_all(self) -> None:
        """The steps of the defense's own components before the first epoch."""
        now = len(self.client)
        rows: dict[str, LazyRows | DirectRows] = {
            name: DirectRows(value, self.rates[name]) for name, value in self.rows.items()
        }
        self._alternate(0, self._of_model(self._now()), rows, self.batches.at(0, now))

    def _alternate(self, step: int, whole: Update, rows: dict[str, LazyRows | DirectRows], batch: Step) -> None:
        """The step of the defense's own components, of those clients who begin an epoch."""
        now = whole.n_clients
        begun = np.flatnonzero(step % self.plan.per_epoch[:now] == 0)
        if not len(begun):
            return
        params, scene, streams = (
            self._read(whole, rows, batch, step),
            self.scene(batch, now),
            self.streams_at(step, now),
        )
        position: Tensor | slice = slice(now)
        if len(begun) < now:  # else nothing is copied: estimators are most of what a client keeps
            position = self._put(begun)
            params = {name: value[position] for name, value in params.items()}
            scene, streams = scene.select(position), streams.select(begun)
        for name, value in self.task.defense.alternate(params, scene, streams.within("alternate")).items():
            self.values[name][position] = value.detach()

    def gradients(
        self, params: Params, batch: Step, loss: Tensor, step: int | None = None, now: int | None = None
    ) -> Params:
        """Of each client's loss with respect to its parameters; the loss itself is added to `loss`, f32[A].

        With a step and the number of its clients, the term that a defense adds is part of the loss.
        """
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        sums = {name: value.detach().requires_grad_() for name, value in batch.inputs.neighbors.items()}
        logits = self.task.model.logits(leaves, replace(batch.inputs, neighbors=sums))
        match self.task.training.loss:
            case "bce":
                each = cross_entropy(logits, batch.label, batch.weight)
            case "bpr":
                each = pairwise(logits, batch.weight)
            case "taylor":
                each = second_order(logits, batch.label, batch.weight)
        loss += each.detach()
        if "objective" in self.used and step is not None and now is not None:
            term = self.task.defense.objective(
                leaves, self.scene(batch, now), self.streams_at(step, now).within("objective")
            )
            each = each if term is None else each + term
        inputs = {**leaves, **{f"{name}{_SUM}": value for name, value in sums.items()}}
        gradients = torch.autograd.grad(each.sum(), list(inputs.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(inputs, gradients, strict=True))

    def _stepper(self, tensors: Params, length: int) -> Stepper:
        moments = {name: [moment[:length] for moment in self.moments[name]] for name in tensors}
        return Stepper(self.optimizer, self.rates, tensors, moments)

    def _of_all_rows(self, whole: Update, batch: Step, gradients: Params) -> Update:
        """The gradients with respect to all rows that the active clients hold."""
        now = whole.n_clients
        row = self._put(batch.row.reshape(-1))
        own, owner = self.batches.own(now)
        rows = {}
        for name, value in whole.rows.items():
            rows[name] = torch.zeros_like(value).index_add_(0, row, gradients[name].reshape(len(row), *value.shape[1:]))
            if (through := gradients.get(f"{name}{_SUM}")) is not None:
                rows[name].index_add_(0, own, through.index_select(0, owner))
        return replace(whole, values={name: gradients[name] for name in whole.values}, rows=rows)

    def _hooked(self, step: int, gradient: Update) -> Params:
        """The gradients after the hooks."""
        streams = self.streams_at(step, gradient.n_clients)
        if "penalty" in self.used:
            gradient = self._with_penalty(gradient, streams.within("penalty"))
        if "gradient" in self.used:
            gradient = self.task.defense.gradient(gradient, streams.within("gradient"))
        return {**gradient.values, **gradient.rows}

    def streams_at(self, step: int, now: int) -> Streams:
        """The random numbers of the first clients at a step."""
        return self.streams.select(torch.arange(now)).at(step)

    def _with_penalty(self, gradient: Update, streams: Streams) -> Update:
        moved = self.moved(gradient.n_clients).map(lambda _, tensor, __: tensor.detach().requires_grad_())
        penalty = self.task.defense.penalty(moved, streams)
        if penalty is None:
            return gradient
        tensors = [*moved.values.values(), *moved.rows.values()]
        extra = torch.autograd.grad(penalty.sum(), tensors, allow_unused=True, materialize_grads=True)
        by_name = dict(zip(moved.names(), extra, strict=True))
        return gradient.map(lambda name, tensor, _: tensor + by_name[name])

    def _end_epoch(self, step: int, now: int) -> None:
        """The hook for clients that have just finished an epoch."""
        ended = np.flatnonzero((step + 1) % self.plan.per_epoch[:now] == 0)
        if len(ended):
            self.end_epoch(ended, (step + 1) // self.plan.per_epoch[ended])

    def end_epoch(self, ended: NDArray[np.int64], number: NDArray[np.int64]) -> None:
        """The hook for clients at some positions after the epoch of this number, from 1: it sees and changes what they
        would share.
        """
        position, epoch = self._put(ended), self._put(number)
        shared = {part.name for part in self.task.components if part.shared}
        moved, everyone = self.moved().only(shared), len(ended) == len(self.client)
        if not everyone:
            moved = moved.select(position)
        changed = after_epoch(self.task.defense, moved, self.streams.select(position).at(epoch))
        if self.start is None:
            raise AssertionError("the start is kept when a defense has an epoch hook")
        if everyone:
            for name, value in changed.values.items():
                torch.add(self.start.values[name], value, out=self.values[name])
            for name, value in changed.rows.items():
                torch.add(self.start.rows[name], value, out=self.rows[name])
            return
        for name, value in changed.values.items():
            self.values[name][position] = self.start.values[name][position] + value
        mine = torch.isin(self._now().owner, position)
        for name, value in changed.rows.items():
            self.rows[name][mine] = self.start.rows[name][mine] + value

    # What the clients end with.

    def _now(self, clients: int | None = None) -> Update:
        """The parameters of the first clients, in place."""
        now = len(self.client) if clients is None else clients
        n = int(self.held.offset[now])
        return Update(
            self.client[:now],
            {name: value[:now] for name, value in self.values.items()},
            {name: value[:n] for name, value in self.rows.items()},
            self.item[:n],
            self.offset[: now + 1],
            self.data.n_items,
        )

    def moved(self, clients: int | None = None) -> Update:
        """How far the first clients are from where they began."""
        now = replace(self._now(clients), received=self.received)
        start = self.start
        if start is not None:
            return now.map(
                lambda name, tensor, owner: (
                    tensor - (start.values if owner is None else start.rows)[name][: len(tensor)]
                )
            )
        shared = now.only({part.name for part in self.task.components if part.shared})
        of = {part.name: part.storage for part in self.task.components}

        def difference(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
            if owner is not None:
                return tensor - rows_of(self.received, name, shared.client[owner], shared.item)
            return tensor - values_of(self.received, name, shared.client, per_user=of[name] == "per_user")

        return shared.map(difference)

    def kept(self) -> Update:
        """The values that the clients keep until their next visit."""
        kept = self._now().only({part.name for part in self.task.components if part.stays})
        if self.age is None:
            return kept
        now = self._now()
        values = {
            f"{n}/{m}": t for n in self.values for m, t in zip(self.optimizer.moments, self.moments[n], strict=True)
        }
        rows = {f"{n}/{m}": t for n in self.rows for m, t in zip(self.optimizer.moments, self.moments[n], strict=True)}
        age = self.age + self._put(self.plan.steps)
        return replace(now, values={**kept.values, **values, AGE: age}, rows={**kept.rows, **rows})


def after_epoch(defense: Defense, moved: Update, streams: Streams) -> Update:
    """The epoch hook of a defense; `streams` are those at the epoch."""
    changed = defense.epoch(moved, streams.within("epoch"))
    if len(changed.item) != len(moved.item):
        raise ConfigError(
            f"The epoch hook of {defense!r} returned {len(changed.item):,} item rows, expected the "
            f"{len(moved.item):,} it got.\n  Rows can be added in the upload hook."
        )
    return changed


def _keys(kept: Update) -> NDArray[np.int64]:
    """position * I + item of each row, ascending."""
    keys: NDArray[np.int64] = (kept.owner * kept.n_items + kept.item).cpu().numpy()
    return keys
