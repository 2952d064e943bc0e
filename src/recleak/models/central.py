"""Recommenders that one party trains on everybody's data: the whole graph, all features, all labels are at hand.

Any `Model` can be trained so (`pair_logits` scores it as a cohort of one-row clients). A `CentralModel` reads more than
rows: neighbors on both sides of the graph, or a user's whole history.
Axis letters: U users, I items, B users or examples of a batch, k scored items of an example, F features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.data.interactions import Interactions
from recleak.errors import ConfigError
from recleak.models.base import Batch, Model, Params
from recleak.models.components import Component
from recleak.models.mf import MF

Examples = Literal["pairs", "users", "solved"]
_SCORED = 1 << 26  # bytes of gathered item rows at a time


@dataclass(frozen=True, eq=False)
class Archive:
    """What a central trainer holds beside parameters; constant during training."""

    train: Interactions  # one row per pair
    user_features: Tensor | None = None  # f32[U, F]
    labels: Mapping[str, Tensor] = field(default_factory=dict)  # i64[U] by attribute, -1: unknown
    seed: int = 0
    added: Interactions | None = None  # the part of `train` that a defense added, which no user did

    @cached_property
    def items_of(self) -> Neighbors:
        """The items of each user."""
        matrix = self.train.matrix()
        return Neighbors(matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64))

    @cached_property
    def users_of(self) -> Neighbors:
        """The users of each item."""
        matrix = self.train.matrix().T.tocsr()
        matrix.sort_indices()
        return Neighbors(matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64))

    def rows(self, users: Tensor) -> Tensor:
        """Which items some users have, i64[B] -> f32[B, I]."""
        return self._dense[users]

    @cached_property
    def _dense(self) -> Tensor:
        return torch.from_numpy(self.train.matrix().toarray().astype(np.float32))


@dataclass(frozen=True, eq=False)
class Neighbors:
    """One side of a bipartite graph: node n has `node[indptr[n] : indptr[n + 1]]`, ascending."""

    indptr: NDArray[np.int64]
    node: NDArray[np.int64]

    @cached_property
    def degree(self) -> NDArray[np.int64]:
        """How many neighbors each node has."""
        return np.diff(self.indptr)

    @cached_property
    def _edges(self) -> NDArray[np.int64]:
        """Every edge as one number, ascending: node * width + neighbor."""
        return np.repeat(np.arange(len(self.degree)), self.degree) * self._width + self.node

    @cached_property
    def _width(self) -> int:
        return int(self.node.max(initial=0)) + 1

    def sample(
        self, nodes: Tensor, without: Tensor, count: int, seed: int, purpose: str, step: int
    ) -> tuple[Tensor, Tensor]:
        """Neighbors drawn with replacement, i64[n] -> i64[n, count], and whether there is one, bool[n].

        `without` i64[n] are neighbors that are not drawn. To draw them and leave them out would tell who they were: a
        node that has fewer draws than others would be one whose edge is asked about.
        """
        wanted, gone = nodes.numpy(), without.numpy()
        place = np.minimum(np.searchsorted(self._edges, wanted * self._width + gone), len(self.node) - 1)
        is_edge = (gone >= 0) & (gone < self._width) & (self._edges[place] == wanted * self._width + gone)
        left = self.degree[wanted] - is_edge
        lot = random.below(
            np.maximum(left, 1)[:, None], seed, purpose, step, np.arange(len(wanted))[:, None], np.arange(count)
        )
        start = self.indptr[wanted]
        lot += is_edge[:, None] & (lot >= (place - start)[:, None])
        drawn = self.node[np.minimum(start[:, None] + lot, len(self.node) - 1)]
        return torch.from_numpy(drawn), torch.from_numpy(left > 0)


class CentralModel(Model):
    """A recommender that only a central trainer can train.

    examples "pairs": it scores items of users (`pair_scores`), the protocol puts a loss on the scores. "users": an
    example is a user with its whole history (`losses`). "solved": there are no steps (`solve`).
    """

    examples: ClassVar[Examples] = "pairs"
    needs_labels: ClassVar[bool] = False
    needs_ratings: ClassVar[bool] = False

    def pair_scores(self, params: Params, archive: Archive, user: Tensor, item: Tensor, step: int) -> Tensor:
        """Scores of some items for some users while training, i64[B], i64[B, k] -> f32[B, k]."""
        raise NotImplementedError

    def losses(self, params: Params, archive: Archive, user: Tensor) -> Tensor:
        """The loss of some users, i64[B] -> f32[B]; for examples "users"."""
        raise NotImplementedError

    def clipped_gradient(self, params: Params, archive: Archive, user: Tensor, bound: float) -> tuple[Params, Tensor]:
        """The sum of the users' gradients, each scaled to an l2 norm of at most `bound`, and their losses, f32[B]."""
        raise ConfigError(
            f"{type(self).__name__} has no gradients of single examples, which DP-SGD needs.\n"
            "  Use the autoencoder, or a defense on the objective."
        )

    def side_loss(self, params: Params, archive: Archive, user: Tensor, step: int) -> Tensor | None:
        """A term of its own at every step, f32[], or None."""
        return None

    def solve(self, archive: Archive, seed: int) -> Params:
        """The parameters, without steps; for examples "solved"."""
        raise NotImplementedError

    def all_scores(self, params: Params, archive: Archive, users: Tensor) -> Tensor:
        """Scores of all items for some users, i64[B] -> f32[B, I]; not while training."""
        raise NotImplementedError

    def logits(self, params: Params, batch: Batch) -> Tensor:
        """A client alone cannot compute them."""
        raise ConfigError(
            f"{type(self).__name__} needs everybody's data, so that no client can train it.\n"
            "  Train it with the protocol `centralized`."
        )


class UnknownModel(Model):
    """A recommender of which only its outputs are known; `sends`: how many numbers each user uploads, if any."""

    def __init__(self, sends: int = 0) -> None:
        self.sends = sends

    def components(self) -> tuple[Component, ...]:
        """None that are known, but for what is uploaded."""
        return (Component("upload", "dense", "head", (self.sends,)),) if self.sends else ()

    def __repr__(self) -> str:
        return f"UnknownModel(sends={self.sends})" if self.sends else "UnknownModel()"


def pair_logits(model: Model, params: Params, archive: Archive, user: Tensor, item: Tensor, step: int) -> Tensor:
    """The scores that a central trainer's loss is of, i64[B], i64[B, k] -> f32[B, k]."""
    if isinstance(model, CentralModel):
        return model.pair_scores(params, archive, user, item, step)
    return model.logits(_gathered(model, params, user, item), _batch(archive, user, item))


def scores_of_all(model: Model, params: Params, archive: Archive, users: Tensor) -> Tensor:
    """Scores of all items for some users, i64[B] -> f32[B, I]; memory beside the result is bounded."""
    if isinstance(model, CentralModel):
        return model.all_scores(params, archive, users)
    if type(model) is MF:  # a product of two tables
        biases = params["bias"] + params["user.bias"][users].unsqueeze(1) + params["item.bias"] if model.biases else 0.0
        return params["user"][users] @ params["item"].T + biases
    every = torch.arange(archive.train.n_items)
    widest = max([part.size for part in model.components() if part.storage == "per_item"], default=1)
    step = max(1, _SCORED // (4 * widest * len(every)))
    parts = []
    for some in torch.split(users, step):
        item = every.expand(len(some), -1)
        parts.append(model.logits(_gathered(model, params, some, item), _batch(archive, some, item)))
    return torch.cat(parts)


def scores_for_lists(model: Model, params: Params, archive: Archive, users: Tensor) -> Tensor:
    """The same with -inf for items that a defense added to a user's history: to the party they are the user's own."""
    score = scores_of_all(model, params, archive, users)
    if archive.added is None:
        return score
    own = archive.added.matrix()[users.numpy()].tocoo()
    place = torch.from_numpy(own.row.astype(np.int64)), torch.from_numpy(own.col.astype(np.int64))
    return score.index_put(place, torch.tensor(float("-inf")))


def check_central(model: Model) -> None:
    """An error for a model that reads what only a client's visit has."""
    if (
        model.needs_transitions
        or model.reads_neighbors
        or (not isinstance(model, CentralModel) and model.needs_user_features)
    ):
        raise ConfigError(
            f"{type(model).__name__} reads a client's own star graph, features or sequence, expected a model of rows "
            "(mf, gmf, ncf, pfedrec) or one for a central trainer (attention-gcn, ...)."
        )


def _gathered(model: Model, params: Params, user: Tensor, item: Tensor) -> Params:
    """Each example as a client of its own: rows of its user and its items, the same dense parameters for all."""
    found = {}
    for part in model.components():
        value = params[part.name]
        if part.storage == "per_user":
            found[part.name] = value.index_select(0, user)
        elif part.storage == "per_item":
            found[part.name] = value.index_select(0, item.reshape(-1)).view(*item.shape, *value.shape[1:])
        else:
            found[part.name] = value.expand(len(user), *value.shape)
    return found


def _batch(archive: Archive, user: Tensor, item: Tensor) -> Batch:
    degree = torch.from_numpy(archive.items_of.degree[user.numpy()].astype(np.float32))
    return Batch(own=torch.zeros(item.shape, dtype=torch.bool), degree=degree)
