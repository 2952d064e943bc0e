"""The audit: the only place that holds the truth. It asks an attack about pairs of clients and items, and grades it.

A score never stands alone: beside it stand what guessing achieves on the same pairs (`attacks.membership`).
Axis letters: n pairs, U users.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.attacks.base import WhichItems
from recleak.data.interactions import Interactions
from recleak.errors import ConfigError
from recleak.metrics.inference import PerUser, advantage, auc, auc_by_user, f1_by_user, recall_by_user, tpr_at_fpr


@dataclass(frozen=True, eq=False)
class GradedItems:
    """An answer to `WhichItems`, graded."""

    f1: PerUser  # of the items claimed, positive class
    auc: PerUser  # within each user
    exposed: PerUser  # share of a user's own items that are claimed at 1 % false positives over all users
    pooled_auc: float
    advantage: float
    tpr: dict[str, float | None]  # at 1 % and 0.1 % false positives over all pairs; None: too few negatives to tell


def pairs_seen(state: dict[str, Tensor], n_items: int) -> WhichItems:
    """The question about all pairs that an attack on uploads has evidence on (`attacks.membership.FromUploads`)."""
    pair: Tensor = torch.unique(state["pair"])
    if not len(pair):
        raise ConfigError(
            "The attack has seen no upload, expected at least one.\n  Behind secure aggregation there are only sums: "
            "use an attack on sums (AlignmentOfSums). Otherwise check the rounds and which of them count."
        )
    return WhichItems(pair // n_items, pair % n_items)


def truth_of(question: WhichItems, train: Interactions) -> NDArray[np.bool_]:
    """Whether each pair is an interaction, bool[n]."""
    matrix = train.matrix()
    owned = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)) * matrix.shape[1] + matrix.indices
    asked = (question.client * train.n_items + question.item).numpy()
    own: NDArray[np.bool_] = np.isin(asked, owned)
    return own


def claims(question: WhichItems, probability: NDArray[np.float64]) -> NDArray[np.bool_]:
    """The items that an adversary claims, bool[n]: of each user as many as its probabilities add up to, rounded.

    The most probable come first, and one without any chance never. Equal ones come in a random order of their own, so
    that a constant answer gets what chance gets. (The number claimed is not what maximizes F1 where little is known:
    there, claiming everything is better. `AllPositive` stands beside.)
    """
    user = question.client.numpy()
    order = np.lexsort((random.bits(0, "tie", user, question.item.numpy()), -probability, user))
    who, place = np.unique(user, return_inverse=True)
    count = np.floor(np.bincount(place, probability, len(who)) + 0.5)
    start = np.searchsorted(user[order], who)
    rank = np.empty(len(user), np.int64)
    rank[order] = np.arange(len(user)) - start[place[order]]
    chosen: NDArray[np.bool_] = (rank < count[place]) & (probability > 0)
    return chosen


def grade_items(question: WhichItems, answer: Tensor, truth: NDArray[np.bool_]) -> GradedItems:
    """The answer beside the truth, bool[n]."""
    if answer.shape != question.item.shape:
        raise ValueError(f"Got an answer of shape {tuple(answer.shape)}, expected {tuple(question.item.shape)}.")
    score, user = answer.double().numpy(), question.client.numpy()
    negatives = np.sort(score[~truth])
    limit = negatives[-(int(0.01 * len(negatives)) + 1)] if len(negatives) else -np.inf
    return GradedItems(
        f1=f1_by_user(claims(question, score), truth, user),
        auc=auc_by_user(score, truth, user),
        exposed=recall_by_user(score > limit, truth, user),
        pooled_auc=auc(score, truth),
        advantage=advantage(score, truth),
        tpr={"1%": tpr_at_fpr(score, truth, 0.01), "0.1%": tpr_at_fpr(score, truth, 0.001)},
    )


def own_items(train: Interactions) -> Tensor:
    """All interactions as (client, item), i64[n, 2]: the truth, for published attacks that were given it."""
    matrix = train.matrix()
    user = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    return torch.from_numpy(np.stack([user, matrix.indices.astype(np.int64)], axis=1))


def claimed_interactions(question: WhichItems, answer: Tensor, train: Interactions) -> Interactions:
    """What the adversary claims, as interactions of the users it was asked about: input for the next attack in a chain.

    Users and items keep their numbers and attributes.
    """
    claim = claims(question, answer.double().numpy())
    rows = pl.DataFrame(
        {"user": question.client.numpy()[claim].astype(np.int32), "item": question.item.numpy()[claim].astype(np.int32)}
    )
    return Interactions(rows.sort("user", maintain_order=True), train.users, train.items)
