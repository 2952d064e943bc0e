"""The oracle: local training as a careful person writes it, one client after the other.

A client copies the whole item table, builds batches from its plan, and lets `torch.optim` step on what autograd says.
Nothing of the cohort's stepping is used, only the model's `logits` with C = 1, the plan (who sees which example when)
and the hooks of the defense. It is slow, in double precision by default, and what the cohort is held against.
"""
# ruff: noqa: S101  (it checks itself)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log

import numpy as np
import torch
from torch import Tensor, nn

from recleak.defenses.base import Scene
from recleak.models.base import Batch, Params
from recleak.streams import Streams
from recleak.training.attributes import public_of
from recleak.training.cohort import Task, Trained
from recleak.training.local import LocalData, plan
from recleak.training.optimizers import Adam
from recleak.training.visit import AGE
from recleak.update import Update, merge

_STATE = {"mean": "exp_avg", "square": "exp_avg_sq", "momentum": "momentum_buffer"}  # what torch calls the moments


def oracle(
    task: Task, received: Params, kept: Update, data: LocalData, round: int, *, dtype: torch.dtype = torch.float64
) -> Trained:
    """The same as `recleak.training.cohort.train`, to float tolerance; the result has the given dtype."""
    results = []
    for position in range(len(data.client)):
        mine = kept.select(torch.tensor([position]))
        results.append(_Client(task, received, mine, data.select(np.array([position])), round, dtype).train())
    place = torch.from_numpy(data.client).argsort().argsort()  # `merge` sorts them
    return Trained(
        merge([result.update for result in results]).select(place),
        merge([result.kept for result in results]).select(place),
        torch.cat([result.loss for result in results]),
        torch.cat([result.positives for result in results]),
        sum(result.steps for result in results),
    )


class _Client:
    """One client, from what it received to what it sends. Parameters have no client axis here."""

    def __init__(
        self, task: Task, received: Params, kept: Update, data: LocalData, round: int, dtype: torch.dtype
    ) -> None:
        self.task, self.kept, self.round, self.dtype = task, kept, round, dtype
        self.streams = Streams.simulated(task.seed, round, data.client)
        self.data = task.defense.data(data, Streams.simulated(task.seed, 0, data.client).within("data"))
        self.who, n_items = int(data.client[0]), data.n_items
        self.tables = {part.name for part in task.components if part.storage == "per_item"}
        self.shared = {part.name for part in task.components if part.shared}
        self.params: dict[str, nn.Parameter] = {}
        for part in task.components:
            if part.storage == "per_item":
                whole = received[part.name] if part.shared else part.draw(task.seed, np.arange(n_items))
                value = whole if part.shared else self._with_kept_rows(part.name, whole)
            elif part.name in kept.values:
                value = kept.values[part.name][0]
            else:
                value = received[part.name][self.who] if part.storage == "per_user" else received[part.name]
            self.params[part.name] = nn.Parameter(value.to(dtype, copy=True))
        self.start = {name: value.detach().clone() for name, value in self.params.items()}
        for part in task.components:
            if part.shared and part.stays:  # a row of a user: others know what was sent last
                self.start[part.name] = received[part.name][self.who].to(dtype, copy=True)
        self.received = {
            name: value.to(dtype) if value.is_floating_point() else value for name, value in received.items()
        }
        self.own = torch.from_numpy(np.unique(self.data.item[self.data.label > 0]))  # i64[n]
        self.active = self._active_rows()  # i64[K], ascending
        self.features = None
        if task.user_features is not None:
            mine = task.user_features[self.who : self.who + 1]
            always = Streams.simulated(task.seed, 0, data.client)
            self.features = task.defense.features(mine, always.within("features")).to(dtype)
        self.own_names = {part.name for part in task.defense.own_components()}
        self.optimizer = self._optimizer()
        self.sums: Params = {name: torch.zeros_like(value) for name, value in self.params.items()}  # of gradients

    # What it begins with.

    def _with_kept_rows(self, name: str, table: Tensor) -> Tensor:
        table = table.clone()
        if name in self.kept.rows:
            table[self.kept.item] = self.kept.rows[name].to(table.dtype)
        return table

    def _active_rows(self) -> Tensor:
        """The rows it works with: those of its examples, those with optimizer state, or all (decay, a defense)."""
        training, optimizer = self.task.training, self.task.training.optimizer
        decays = optimizer.weight_decay and training.decay_rows == "all"
        if decays or self.task.defense.holds_every_row:
            return torch.arange(self.data.n_items)
        items = [self.data.item] if self.data.against is None else [self.data.item, self.data.against]
        if optimizer.keep and optimizer.moments:
            items.append(self.kept.item.numpy())
        return torch.from_numpy(np.unique(np.concatenate(items)))

    def _optimizer(self) -> torch.optim.Optimizer:
        """torch's own, with one parameter group per component, and the state of the last visit if it is kept."""
        settings = self.task.training.optimizer
        groups = []
        for name, value in self.params.items():
            if name in self.own_names:  # the defense steps them itself
                continue
            by_hand = name in self.tables and self.task.training.decay_rows == "active"
            rate = settings.learning_rates.get(name, settings.learning_rate)
            groups.append({"params": [value], "lr": rate, "weight_decay": 0.0 if by_hand else settings.weight_decay})
        made: torch.optim.Optimizer
        if isinstance(settings, Adam):
            betas = (settings.beta1, settings.beta2)
            made = torch.optim.Adam(groups, lr=0.0, betas=betas, eps=settings.epsilon, foreach=False)
        else:
            made = torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum, foreach=False)
        if settings.keep:
            for name, value in self.params.items():
                state: dict[str, Tensor] = {}
                for moment in settings.moments:
                    if name in self.tables:
                        past = self._with_kept_rows(f"{name}/{moment}", torch.zeros_like(value.detach()))
                    else:
                        past = self.kept.values[f"{name}/{moment}"][0].to(self.dtype, copy=True)
                    state[_STATE[moment]] = past
                if isinstance(settings, Adam):
                    state["step"] = self.kept.values[AGE][0].float()
                made.state[value] = state
        return made

    # The steps.

    def train(self) -> Trained:
        """All epochs."""
        training, defense = self.task.training, self.task.defense
        walk = plan(
            self.data,
            epochs=training.epochs,
            batch_size=training.batch_size,
            seed=self.task.seed,
            round=self.round,
            shuffle=training.shuffle,
        )
        losses = []
        for step, (examples, weights) in enumerate(zip(walk.example[:, 0], walk.weight[:, 0], strict=True)):
            chosen = torch.from_numpy(examples[weights > 0])
            if step % int(walk.per_epoch[0]) == 0:
                self._alternate(step, chosen)
            turns = training.turns or (tuple(self.params),)
            each = [self._step(step, chosen, turn) for turn in turns]
            losses.append(torch.stack(each).mean())
            if (step + 1) % int(walk.per_epoch[0]) == 0:
                epoch = (step + 1) // int(walk.per_epoch[0])
                changed = defense.epoch(self._moved().only(self.shared), self.streams.at(epoch).within("epoch"))
                self._move_to(changed)
                if defense.every_row:
                    rest = self._moved(self._outside()).only(self.shared & self.tables)
                    self._move_to(defense.epoch(rest, self.streams.at(epoch).within("epoch")))
        outside = self._outside()
        for name in self.tables - (self.shared if defense.every_row else set()):
            still = torch.equal(self.params[name].detach()[outside], self.start[name][outside])
            assert still, f"{name}: a row moved that is not among the active ones"
        moved = self._moved(torch.arange(self.data.n_items) if defense.every_row else None)
        update = defense.upload(moved.only(self.shared), self.streams.within("upload"))
        return Trained(
            update,
            self._kept(len(losses)),
            torch.stack(losses).mean().reshape(1),
            torch.tensor([float(len(self.own))]),
            len(losses),
        )

    def _step(self, step: int, examples: Tensor, turn: tuple[str, ...]) -> Tensor:
        """One batch; its loss. Components outside the turn stay where they are."""
        training, defense = self.task.training, self.task.defense
        self.optimizer.zero_grad()
        loss = self._loss(examples)
        total = loss if defense.example_bound is None else torch.zeros((), dtype=self.dtype)
        penalty = defense.penalty(self._moved(graph=True), self.streams.at(step).within("penalty"))
        if penalty is not None:
            total = total + penalty.sum()
        params, scene = self._scene(torch.from_numpy(self.data.item)[examples])
        term = defense.objective(params, scene, self.streams.at(step).within("objective"))
        if term is not None:
            total = total + term.sum()
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
        if defense.example_bound is not None:
            self._add_clipped(step, examples, defense.example_bound)
        self._hook_gradient(step)
        if isinstance(training.optimizer, Adam) and training.optimizer.accumulate:
            for name, parameter in self.params.items():
                assert parameter.grad is not None
                self.sums[name] = self.sums[name] + parameter.grad
                parameter.grad = self.sums[name].clone()  # decay is added to the copy
        if training.decay_rows == "active":  # else torch does it, for all rows
            for name in self.tables:
                gradient, value = self.params[name].grad, self.params[name].detach()
                assert gradient is not None
                gradient[self.active] += training.optimizer.weight_decay * value[self.active]
        for name, parameter in self.params.items():
            if not any(f"{name}.".startswith(f"{prefix}.") for prefix in turn):
                parameter.grad = None
        self.optimizer.step()
        return loss.detach()

    def _alternate(self, step: int, examples: Tensor) -> None:
        """The defense's own components make their step."""
        params, scene = self._scene(torch.from_numpy(self.data.item)[examples])
        changed = self.task.defense.alternate(params, scene, self.streams.at(step).within("alternate"))
        with torch.no_grad():
            for name, value in changed.items():
                self.params[name].copy_(value[0])

    def _scene(self, item: Tensor) -> tuple[Params, Scene]:
        """What the hooks on losses get: the model's parameters with the rows of some items, and all else."""
        params, batch = self._inputs(item)
        own = {name: params.pop(name).detach() for name in self.own_names}
        if (known := self.task.attributes) is None:
            return params, Scene(self.round, batch, own)

        def mine(tables: Mapping[str, Tensor]) -> Params:
            return {name: value[self.who].reshape(1) for name, value in tables.items()}

        insensitive, public = known.public[self.who].reshape(1), public_of(self.received)
        return params, Scene(self.round, batch, own, mine(known.labels), mine(known.protected), insensitive, public)

    def _loss(self, examples: Tensor) -> Tensor:
        """The mean loss of some examples."""
        score = self._scores(torch.from_numpy(self.data.item)[examples])
        if self.task.training.loss == "taylor":
            label = torch.from_numpy(self.data.label)[examples].to(self.dtype)
            return (log(2) + (0.5 - label) * score + score**2 / 8).mean()
        if self.data.against is None:
            label = torch.from_numpy(self.data.label)[examples].to(self.dtype)
            # -y log sigmoid(s) - (1 - y) log sigmoid(-s), as one expression that does not overflow
            return (torch.logaddexp(score, torch.zeros_like(score)) - label * score).mean()
        margin = score - self._scores(torch.from_numpy(self.data.against)[examples])
        return torch.logaddexp(-margin, torch.zeros_like(margin)).mean()  # -log sigmoid(margin)

    def _add_clipped(self, step: int, examples: Tensor, bound: float) -> None:
        """Add the gradients of examples to those at hand, one after the other, each with a norm of `bound` at most."""
        params = list(self.params.values())
        total = {name: torch.zeros_like(value) for name, value in self.params.items()}
        for example in examples:
            loss = self._loss(example.reshape(1))
            gradients = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
            norm = float(torch.cat([each.flatten() for each in gradients]).norm())
            for name, each in zip(self.params, gradients, strict=True):
                total[name] += each * min(1.0, bound / max(norm, 1e-30))
        noisy = self.task.defense.batch_sum(self._update(total), self.streams.at(step).within("batch_sum"))
        for name, value in self.params.items():
            mean = torch.zeros_like(value)
            if name in self.tables:
                mean[self.active] = noisy.rows[name] / len(examples)
            else:
                mean += noisy.values[name][0] / len(examples)
            value.grad = mean if value.grad is None else value.grad + mean

    def _hook_gradient(self, step: int) -> None:
        """The defense may change the gradient of the loss; a parameter that the loss does not read has zeros."""
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.params.items()}
        changed = self.task.defense.gradient(self._update(gradients), self.streams.at(step).within("gradient"))
        for name, value in self.params.items():
            if name in self.tables:
                value.grad = torch.zeros_like(value)
                value.grad[self.active] = changed.rows[name]
            else:
                value.grad = changed.values[name][0].clone()

    def _scores(self, item: Tensor) -> Tensor:
        """The model's scores of some items, [B]."""
        return self.task.model.logits(*self._inputs(item)).squeeze(0)

    def _inputs(self, item: Tensor) -> tuple[Params, Batch]:
        """What the model reads to score some items."""
        params = {
            name: (value[item] if name in self.tables else value).unsqueeze(0) for name, value in self.params.items()
        }
        features = None if self.task.item_features is None else self.task.item_features.to(self.dtype)
        reads = self.task.model.reads_neighbors
        batch = Batch(
            own=torch.isin(item, self.own).unsqueeze(0),
            degree=torch.tensor([float(len(self.own))], dtype=self.dtype),
            neighbors={name: self.params[name][self.own].sum(0, keepdim=True) for name in self.tables} if reads else {},
            user_features=self.features,
            item_features=None if features is None else features[item].unsqueeze(0),
            neighbor_features=None if features is None else features[self.own].sum(0, keepdim=True),
        )
        return params, batch

    # What it ends with.

    def _outside(self) -> Tensor:
        """The rows it does not work with."""
        outside = torch.ones(self.data.n_items, dtype=torch.bool)
        outside[self.active] = False
        return outside.nonzero().squeeze(1)

    def _update(self, tensors: Params, items: Tensor | None = None) -> Update:
        """Tensors by component, or by `<component>/<moment>`, as an update of one client with its active rows.

        `items`: with these rows in their place.
        """
        items = self.active if items is None else items
        of = {name: name if name in self.params else name.rpartition("/")[0] for name in tensors}
        rows = {name: value[items] for name, value in tensors.items() if of[name] in self.tables}
        item = items if rows else items[:0]  # without a row, no item is named either
        return Update(
            torch.tensor([self.who]),
            {name: value.unsqueeze(0) for name, value in tensors.items() if name not in rows},
            rows,
            item,
            torch.tensor([0, len(item)]),
            self.data.n_items,
        )

    def _moved(self, items: Tensor | None = None, *, graph: bool = False) -> Update:
        now = self.params if graph else {name: value.detach() for name, value in self.params.items()}
        moved = self._update({name: value - self.start[name] for name, value in now.items()}, items)
        return replace(moved, received=self.received)

    def _move_to(self, moved: Update) -> None:
        with torch.no_grad():
            for name, value in moved.values.items():
                self.params[name].copy_(self.start[name] + value[0])
            for name, rows in moved.rows.items():
                self.params[name][moved.item] = self.start[name][moved.item] + rows

    def _kept(self, steps: int) -> Update:
        settings = self.task.training.optimizer
        own = {part.name for part in self.task.components if part.stays}
        tensors = {name: value.detach() for name, value in self.params.items() if name in own}
        if not settings.keep:
            return self._update(tensors)
        for name, value in self.params.items():
            for moment in settings.moments:
                tensors[f"{name}/{moment}"] = self.optimizer.state[value][_STATE[moment]]
        kept = self._update(tensors)
        return replace(kept, values={**kept.values, AGE: self.kept.values[AGE] + steps})
