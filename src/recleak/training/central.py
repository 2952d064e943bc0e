"""The steps of a central trainer: minibatches over everybody's examples, with the hooks of a defense.

To a defense the trainer is one client with all the data (C = 1): a penalty sees what it moved, gradients have a row for
every item. Axis letters: P positives of all users, B examples of a batch, k scored items, I items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import softplus

from recleak import random
from recleak.data.interactions import Interactions
from recleak.data.sampling import Complement, negatives_at
from recleak.defenses.base import Defense, hooks
from recleak.errors import unknown_name
from recleak.kernels_bpr import learn_bpr
from recleak.models.base import Model, Params
from recleak.models.central import Archive, CentralModel, pair_logits
from recleak.models.components import Component
from recleak.models.mf import MF
from recleak.streams import Streams
from recleak.training.cohort import DivergedError
from recleak.training.optimizers import SGD, Optimizer, Stepper, learning_rate
from recleak.update import Update

CentralLoss = Literal["bpr", "bce", "bpr-taylor", "taylor"]
PAIRWISE = ("bpr", "bpr-taylor")


def example_losses(loss: CentralLoss, score: Tensor, label: Tensor | None) -> Tensor:
    """The loss of each example, f32[B].

    Pairwise losses get f32[B, 2], the preferred item first, and look at x = s_uv - s_uv': bpr is -log sigmoid(x)
    (Rendle et al. 2009; GERAI eq. 11), bpr-taylor the same to second order, log 2 - x / 2 + x^2 / 8 (eq. 17), which is
    smallest at x = 2. The others get f32[B, 1] and labels: cross-entropy, and the same to second order.
    """
    if loss in PAIRWISE:
        gap = score[:, 0] - score[:, 1]
        return softplus(-gap) if loss == "bpr" else log(2) - gap / 2 + gap.square() / 8
    if label is None:
        raise ValueError("Got no labels, expected f32[B] for a loss of single items.")
    score = score[:, 0]
    return softplus(score) - label * score if loss == "bce" else log(2) + (0.5 - label) * score + score.square() / 8


@dataclass(frozen=True, eq=False)
class CentralExamples:
    """Everybody's examples of an epoch, in a random order: functions of (seed, epoch)."""

    train: Interactions
    loss: CentralLoss
    negatives: int
    seed: int

    @cached_property
    def _free(self) -> Complement:
        return Complement.of(self.train)

    @cached_property
    def _positives(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """User, place among its items, and item of every positive whose user has a negative, i64[P] each."""
        user = self.train.user.astype(np.int64)
        able = self._free.size[user] > 0
        place = np.arange(len(user)) - self.train.indptr[user]
        return user[able], place[able], self.train.item.astype(np.int64)[able]

    @property
    def count(self) -> int:
        """How many examples an epoch has."""
        return len(self._positives[0]) * (self.negatives + (self.loss not in PAIRWISE))

    def epoch(self, epoch: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Batches: user i64[B], item i64[B, k], and labels f32[B] where the loss needs them."""
        user, place, item = self._positives
        other = negatives_at(self._free, user, place, self.negatives, seed=self.seed, round=epoch).astype(np.int64)
        label = None
        if self.loss in PAIRWISE:
            who = np.repeat(user, self.negatives)
            items = np.stack([np.repeat(item, self.negatives), other.reshape(-1)], axis=1)
        else:
            who = np.repeat(user, 1 + self.negatives)
            items = np.concatenate([item[:, None], other], axis=1).reshape(-1, 1)
            label = torch.from_numpy(np.tile(np.r_[1, np.zeros(self.negatives)].astype(np.float32), len(user)))
        order = random.bits(self.seed, "order of examples", epoch, np.arange(len(who))).argsort()
        users, rows = torch.from_numpy(who), torch.from_numpy(items)
        for batch in torch.split(torch.from_numpy(order), batch_size):
            yield users[batch], rows[batch], None if label is None else label[batch]


class Trainer:
    """Parameters between two epochs, and what moves them."""

    def __init__(
        self,
        model: Model,
        archive: Archive,
        defense: Defense,
        *,
        optimizer: Optimizer,
        loss: CentralLoss,
        negatives: int,
        batch_size: int,
        params: Params,
        seed: int,
    ) -> None:
        self.model, self.archive, self.defense, self.seed = model, archive, defense, seed
        self.loss, self.batch_size, self._optimizer = loss, batch_size, optimizer
        self.parts = {part.name: part for part in model.components()}
        self.params = {name: value.clone() for name, value in params.items()}
        self.first = {name: value.clone() for name, value in params.items()}  # what a penalty measures movement from
        self.moments = {name: [torch.zeros_like(value) for _ in optimizer.moments] for name, value in params.items()}
        rates = {name: learning_rate(optimizer, name) for name in params}
        self._stepper = Stepper(optimizer, rates, self.params, self.moments)
        self._leaves = {name: value.detach().requires_grad_() for name, value in self.params.items()}
        self.examples = CentralExamples(archive.train, loss, negatives, seed)
        self._hooks = hooks(defense)
        self._streams = Streams.simulated(seed, 0, np.zeros(1, np.int64)).within("central")
        self.step = 0

    @property
    def steps_per_epoch(self) -> int:
        """How many."""
        count = len(self._users) if self._of_users else self.examples.count
        return -(-count // self.batch_size)

    @property
    def _of_users(self) -> bool:
        return isinstance(self.model, CentralModel) and self.model.examples == "users"

    @cached_property
    def _users(self) -> Tensor:
        return torch.from_numpy(np.flatnonzero(self.archive.train.activity).astype(np.int64))

    def epoch(self, epoch: int) -> float:
        """All examples once; the mean loss."""
        total, count = 0.0, 0
        if self._one_by_one:
            total, count = self._learn_bpr(epoch), self.examples.count
        elif self._of_users:
            lot = random.bits(self.seed, "order of users", epoch, self._users.numpy()).argsort()
            for user in torch.split(self._users[torch.from_numpy(lot)], self.batch_size):
                total, count = total + len(user) * self._user_step(user), count + len(user)
        else:
            for user, item, label in self.examples.epoch(epoch, self.batch_size):
                total, count = total + len(user) * self._pair_step(user, item, label), count + len(user)
        mean = total / max(count, 1)
        if not np.isfinite(mean):
            raise DivergedError(
                f"The loss of epoch {epoch + 1} is {mean}, expected a number.\n  Lower the learning rate, or the noise."
            )
        return mean

    @property
    def _one_by_one(self) -> bool:
        """Whether this is LearnBPR, which has a compiled loop: plain products, plain SGD, triples one by one."""
        plain = type(self.model) is MF and not self.model.biases
        simple = isinstance(self._optimizer, SGD) and not self._optimizer.momentum
        idle = not self._hooks & {"penalty", "gradient", "batch_sum"} and self.defense.example_bound is None
        return plain and simple and idle and self.batch_size == 1 and self.loss == "bpr"

    def _learn_bpr(self, epoch: int) -> float:
        """All triples, one after another; decay acts on the three rows of a triple."""
        ((user, item, _),) = self.examples.epoch(epoch, self.examples.count)
        tables = [self.params[name].numpy() for name in ("user", "item")]
        rates = [learning_rate(self._optimizer, name) for name in ("user", "item")]
        self.step += len(user)
        return float(learn_bpr(user.numpy(), item.numpy(), *tables, *rates, self._optimizer.weight_decay))

    def _pair_step(self, user: Tensor, item: Tensor, label: Tensor | None) -> float:
        def objective() -> tuple[Tensor, Tensor]:
            score = pair_logits(self.model, self._leaves, self.archive, user, item, self.step)
            loss = example_losses(self.loss, score, label).mean()
            side = None
            if isinstance(self.model, CentralModel):
                side = self.model.side_loss(self._leaves, self.archive, user, self.step)
            return loss, loss if side is None else loss + side

        return self._step_on(objective)

    def _user_step(self, user: Tensor) -> float:
        model = self.model
        assert isinstance(model, CentralModel)  # noqa: S101 - for the type checker
        bound = self.defense.example_bound
        if bound is None:

            def objective() -> tuple[Tensor, Tensor]:
                loss = model.losses(self._leaves, self.archive, user).mean()
                return loss, loss

            return self._step_on(objective)
        total, losses = model.clipped_gradient(self.params, self.archive, user, bound)
        noisy = self.defense.batch_sum(self._as_update(total), self._streams.at(self.step).within("sum"))
        gradients = {name: value / len(user) for name, value in self._as_params(noisy).items()}
        self._move(gradients)
        return float(losses.mean())

    def _step_on(self, objective: Callable[[], tuple[Tensor, Tensor]]) -> float:
        loss, whole = objective()
        if "penalty" in self._hooks:
            moved = {name: leaf - self.first[name] for name, leaf in self._leaves.items()}
            term = self.defense.penalty(
                self._as_update(moved, received=self.first), self._streams.at(self.step).within("penalty")
            )
            whole = whole if term is None else whole + term.sum()
        names = list(self._leaves)
        found = torch.autograd.grad(
            whole, [self._leaves[name] for name in names], materialize_grads=True, allow_unused=True
        )
        self._move(dict(zip(names, found, strict=True)))
        return float(loss.detach())

    def _move(self, gradients: Params) -> None:
        if "gradient" in self._hooks and self.defense.example_bound is None:
            changed = self.defense.gradient(self._as_update(gradients), self._streams.at(self.step).within("gradient"))
            gradients = self._as_params(changed)
        self.step += 1
        self._stepper.step({name: value.contiguous() for name, value in gradients.items()}, self.step)

    def _as_update(self, values: Params, received: Mapping[str, Tensor] | None = None) -> Update:
        """Parameters as what one client has: a row for every item, tables of users left as they are."""
        items = self.archive.train.n_items
        return Update(
            torch.zeros(1, dtype=torch.int64),
            {name: value.unsqueeze(0) for name, value in values.items() if not _per_item(self.parts[name])},
            {name: value for name, value in values.items() if _per_item(self.parts[name])},
            torch.arange(items),
            torch.tensor([0, items]),
            items,
            {} if received is None else received,
        )

    @staticmethod
    def _as_params(update: Update) -> Params:
        return {**{name: value.squeeze(0) for name, value in update.values.items()}, **update.rows}


def _per_item(part: Component) -> bool:
    return part.storage == "per_item"


def check_loss(loss: str) -> None:
    """An error for a loss that there is not."""
    if loss not in get_args(CentralLoss):
        raise unknown_name("loss", loss, get_args(CentralLoss))
