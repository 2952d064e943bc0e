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
from recleak.attacks.membership import pairs_with_odds
from recleak.data.interactions import Interactions
from recleak.data.sequences import Transitions
from recleak.errors import ConfigError
from recleak.metrics.inference import (
    PerUser,
    advantage,
    auc,
    auc_by_user,
    f1_by_user,
    recall_by_user,
    roc,
    tpr_at_fpr,
)
from recleak.metrics.linearized import auc_values


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
    pair, _ = pairs_with_odds(state, n_items)
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


def claims(question: WhichItems, probability: NDArray[np.float64], *, reverse: bool = False) -> NDArray[np.bool_]:
    """The items that an adversary claims, bool[n]: of each user as many as its probabilities add up to, rounded.

    The most probable come first, and one without any chance never. Equal ones come in a random order of their own, so
    that a constant answer gets what chance gets. (The number claimed is not what maximizes F1 where little is known:
    there, claiming everything is better. `AllPositive` stands beside.) With `reverse`, as many of the least probable.
    """
    user = question.client.numpy()
    first = probability if reverse else -probability
    order = np.lexsort((random.bits(0, "tie", user, question.item.numpy()), first, user))
    who, place = np.unique(user, return_inverse=True)
    count = np.floor(np.bincount(place, probability, len(who)) + 0.5)
    start = np.searchsorted(user[order], who)
    rank = np.empty(len(user), np.int64)
    rank[order] = np.arange(len(user)) - start[place[order]]
    chosen: NDArray[np.bool_] = (rank < count[place]) & (reverse | (probability > 0))
    return chosen


def grade_items(question: WhichItems, answer: Tensor, truth: NDArray[np.bool_]) -> GradedItems:
    """The answer beside the truth, bool[n]."""
    _check_shape(question, answer)
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


_POINTS = 300  # of a stored curve
_LOW = {"1%": 0.01, "0.1%": 0.001}  # false positive rates


@dataclass(frozen=True, eq=False)
class UserGrades:
    """An answer to `WhichItems`, graded user by user, for an audit that chooses on some users and grades on others."""

    users: pl.DataFrame
    """One row per user: user, valid (it serves for choices), positives and negatives (of its pairs); auc, f1, exposed
    (null where there is none); of the thresholds below: hits@1%, alarms@1%, hits@0.1%, alarms@0.1%, hits, alarms (true
    and false positives)"""
    thresholds: dict[str, float | None]
    """1% and 0.1%: of the false positive rate among the other users (None: too few negatives to tell); chosen: of the
    largest advantage among validation users"""
    slopes: dict[str, float]  # of the curve at 1% and 0.1%, where there is a threshold
    roc: list[tuple[float, float]]  # of the other users
    direction: int  # -1: the scores were reversed, because validation users say so


def grade_users(question: WhichItems, answer: Tensor, truth: NDArray[np.bool_], valid: NDArray[np.bool_]) -> UserGrades:
    """The answer beside the truth, bool[n]; `valid` tells which pairs are of validation users, bool[n].

    An AUC below 0.5 among validation users is a leak too: the attacker then reads its scores the other way round, and
    claims as many items as before.
    """
    _check_shape(question, answer)
    score, user = answer.double().numpy(), question.client.numpy()
    test = ~valid
    direction = _direction(auc_by_user(score[valid], truth[valid], user[valid]))
    claimed = claims(question, score, reverse=direction < 0)
    if direction < 0:
        score = _reversed(score, user)
    thresholds: dict[str, float | None] = {
        name: _threshold(score[test], truth[test], rate) for name, rate in _LOW.items()
    }
    thresholds["chosen"] = _best_threshold(score[valid], truth[valid])
    per_user = {"auc": auc_by_user(score, truth, user), "f1": f1_by_user(claimed, truth, user)}
    if thresholds["1%"] is not None:
        per_user["exposed"] = recall_by_user(_claimed(score, thresholds["1%"]), truth, user)
    who, place = np.unique(user, return_inverse=True)
    counted: dict[str, NDArray[np.bool_]] = {"positives": truth, "negatives": ~truth}
    for name, suffix in (*((name, f"@{name}") for name in _LOW), ("chosen", "")):
        claimed = _claimed(score, thresholds[name])
        counted |= {f"hits{suffix}": claimed & truth, f"alarms{suffix}": claimed & ~truth}
    frame = pl.DataFrame(
        {
            "user": who,
            "valid": np.bincount(place, valid, len(who)) > 0,
            **{name: np.bincount(place[which], minlength=len(who)) for name, which in counted.items()},
        }
    )
    for name, each in per_user.items():
        values = pl.DataFrame({"user": each.user, name: each.value}, schema={"user": pl.Int64, name: pl.Float64})
        frame = frame.join(values, on="user", how="left", maintain_order="left")
    if "exposed" not in per_user:
        frame = frame.with_columns(pl.lit(None, pl.Float64).alias("exposed"))
    both = truth[test].any() and not truth[test].all()
    curve = list(zip(*(each.tolist() for each in roc(score[test], truth[test], _POINTS)), strict=True)) if both else []
    slopes = {
        name: _slope(score[test], truth[test], rate) for name, rate in _LOW.items() if thresholds[name] is not None
    }
    return UserGrades(frame, thresholds, slopes, curve, direction)


def _direction(graded: PerUser) -> int:
    return -1 if len(graded.value) and round(float(graded.value.mean()), 12) < 0.5 else 1


def _reversed(score: NDArray[np.float64], user: NDArray[np.int64]) -> NDArray[np.float64]:
    """The scores the other way round; users of whom nothing was heard, all of whose scores are 0, stay the last."""
    who, place = np.unique(user, return_inverse=True)
    heard = np.bincount(place, score != 0, len(who))[place] > 0
    return np.where(heard, -score, np.nextafter(-score[heard].max(initial=0.0), -np.inf))


def _check_shape(question: WhichItems, answer: Tensor) -> None:
    if answer.shape != question.item.shape:
        raise ValueError(f"Got an answer of shape {tuple(answer.shape)}, expected {tuple(question.item.shape)}.")


def shuffled(question: WhichItems, truth: NDArray[np.bool_], seed: int) -> NDArray[np.bool_]:
    """The truth of each user's pairs in a random order: what nobody can tell. For the audit's test of itself."""
    user, item = question.client.numpy(), question.item.numpy()
    order = np.lexsort((item, user))
    mixed = np.lexsort((random.bits(seed, "shuffled truth", user, item), user))
    other = np.empty_like(truth)
    other[order] = truth[mixed]
    return other


def _claimed(score: NDArray[np.float64], threshold: float | None) -> NDArray[np.bool_]:
    return np.zeros(len(score), bool) if threshold is None else score >= threshold


def _threshold(score: NDArray[np.float64], truth: NDArray[np.bool_], rate: float, *, fewest: int = 10) -> float | None:
    """The lowest score with at most this false positive rate; None if it allows fewer than so many false positives."""
    negatives = np.sort(score[~truth])[::-1]
    allowed = int(rate * len(negatives) + 1e-9)
    if allowed < fewest:
        return None
    return float(np.nextafter(negatives[allowed], np.inf)) if allowed < len(negatives) else -np.inf


def _slope(score: NDArray[np.float64], truth: NDArray[np.bool_], rate: float) -> float:
    """How much the true positive rate gains per false positive rate, from half of this rate to one and a half."""
    low, high = (_threshold(score, truth, share * rate, fewest=1) for share in (0.5, 1.5))
    if low is None or high is None or not truth.any():
        return 0.0
    between = (score >= high) & (score < low)
    false = np.count_nonzero(between & ~truth) / np.count_nonzero(~truth)
    return float(np.count_nonzero(between & truth) / np.count_nonzero(truth) / false) if false else 0.0


def _best_threshold(score: NDArray[np.float64], truth: NDArray[np.bool_]) -> float | None:
    """The score from which on claims have the largest true minus false positive rate; None without both kinds."""
    if truth.all() or not truth.any():
        return None
    values, place = np.unique(score, return_inverse=True)
    true, false = (np.bincount(place[which], minlength=len(values))[::-1].cumsum() for which in (truth, ~truth))
    return float(values[::-1][np.argmax(true / true[-1] - false / false[-1])])


# --- communities ------------------------------------------------------------------------------------------------------


def communities(
    targets: Tensor, train: Interactions, size: int, leader: Tensor | None = None, aside: Tensor | None = None
) -> Tensor:
    """The `size` users whose items are most similar to each adversary's targets, f32[A, I] -> bool[A, U].

    Similar by Jaccard (CDA, eq. 11); ties are drawn. Not in it is the adversary's own user, `leader` i64[A], or who is
    `aside`, bool[A, U]: those who side with it.
    """
    own = torch.from_numpy((train.matrix().toarray() > 0).astype(np.float32))  # f32[U, I]
    both = targets @ own.T
    union = targets.sum(1, keepdim=True) + own.sum(1) - both
    near = (both / union.clamp(min=1)).double()
    tie = random.uniform(0, "tie of users", np.arange(len(targets))[:, None], np.arange(train.n_users))
    near += torch.from_numpy(tie) * 1e-9
    if leader is not None:
        near[torch.arange(len(leader)), leader] = -1
    if aside is not None:
        near[aside] = -1
    chosen = near.topk(min(size, train.n_users - 1), dim=1)
    return torch.zeros(near.shape, dtype=torch.bool).scatter_(1, chosen.indices, chosen.values >= 0)


def grade_communities(
    answer: Tensor, truth: Tensor, size: int, leader: Tensor | None = None, aside: Tensor | None = None
) -> dict[str, Tensor]:
    """Claims against the truth, f32[A, U] and bool[A, U].

    The `size` highest scores are claimed; of equal ones at the limit each counts as much as it would be claimed on
    average, so that a constant answer gets what chance gets. Nobody who was not heard of (no finite score) is claimed,
    and an adversary that heard of fewer claims fewer.

    accuracy f32[A]: the share of the community that is claimed (CDA, eq. 12). bound f32[A]: the share of the community
    that was seen. exposed f32[U]: the share of the adversaries in whose community a user is that claim it (NaN where it
    is in none). separation f32[]: how far the scores of those claimed are above the others, in standard deviations, the
    mean over adversaries: what an adversary can see itself. Nobody looks for its own user, `leader` i64[A], or for who
    is `aside`, bool[A, U].
    """
    seen = torch.isfinite(answer) if aside is None else torch.isfinite(answer) & ~aside
    if leader is not None:
        seen[torch.arange(len(leader)), leader] = False
    claimed = _highest(answer.masked_fill(~seen, float("-inf")), size) * seen  # f32[A, U]
    right, members = claimed * truth, truth.sum(0)
    rest = seen * (1 - claimed)
    plain = answer.masked_fill(~seen, 0.0)
    count = seen.sum(1).clamp(min=1)
    mean = plain.sum(1) / count
    spread = (((plain - mean.unsqueeze(1)) ** 2 * seen).sum(1) / count).sqrt()
    gap = (plain * claimed).sum(1) / claimed.sum(1).clamp(min=1) - (plain * rest).sum(1) / rest.sum(1).clamp(min=1)
    told = (rest > 0).any(1) & (spread > 0)
    return {
        "accuracy": right.sum(1) / size,
        "bound": (truth & seen).sum(1) / size,
        "exposed": torch.where(members > 0, right.sum(0) / members.clamp(min=1), float("nan")),
        "heard": torch.where(members > 0, (truth & seen).sum(0) / members.clamp(min=1), float("nan")),
        "separation": (gap / spread.clamp(min=1e-30))[told].mean().nan_to_num()
        if bool(told.any())
        else torch.zeros(()),
    }


def as_victims(share: Tensor, exposed: Tensor, truth: Tensor) -> NDArray[np.float64]:
    """What each user adds as a victim to the mean over adversaries of the share of a community that is hit, f64[U].

    share f32[A]: of each adversary; exposed f32[U]: the share of the adversaries in whose community a user is that hit
    it; truth bool[A, U]. It is the hits on a user less those that are expected of a member of the communities in which
    it is, 0 on average: for `metrics.intervals.both_ways`, if every adversary is one of the users.
    """
    hits = exposed.double().nan_to_num() * truth.sum(0)
    column = hits - truth.double().T @ share.double()
    weight = truth.shape[1] / truth.shape[0] / truth.sum(1).double().mean().clamp(min=1)
    values: NDArray[np.float64] = ((column - column.mean()) * weight).numpy()
    return values


def _highest(score: Tensor, size: int) -> Tensor:
    """How likely each is among the highest of its row if equal ones are drawn, f32[A, U]: 1, 0, or between at the
    limit.
    """
    limit = score.topk(min(size, score.shape[1]), dim=1).values[:, -1:]
    above, level = score > limit, score == limit
    left = size - above.sum(1, keepdim=True)
    return above + level * (left / level.sum(1, keepdim=True)).clamp(max=1)


def grade_holders(answer: Tensor, truth: Tensor, leader: Tensor | None = None) -> dict[str, Tensor]:
    """Of A adversaries who look for the same people, by user: f32[A, U], bool[U] -> f64[U] each, NaN where unknown.

    auc: values whose mean is the AUC (`metrics.linearized`), the mean over adversaries; who was not heard of comes
    last. accuracy: of a holder, the share of the adversaries among whose highest scores it is, as many as there are
    holders: the mean over holders is the precision, and the recall. tpr@5%: the same among those above a threshold
    that 5 % of the others exceed, at most. Nobody who was not heard of is claimed. An adversary does not look for its
    own user, `leader` i64[A] (-1: it is not among them).
    """
    score, own = answer.double().numpy(), truth.numpy()
    found = {name: np.full(score.shape, np.nan) for name in ("auc", "accuracy", "tpr@5%")}
    for a, mine in enumerate(score):
        asked = np.ones(len(mine), bool)
        if leader is not None and leader[a] >= 0:
            asked[int(leader[a])] = False
        value, holds = mine[asked], own[asked]
        if holds.all() or not holds.any():
            continue
        heard = np.isfinite(value)
        value = np.where(heard, value, value[heard].min(initial=0.0) - 1)
        found["auc"][a, asked] = auc_values(np.stack([-value, value], 1), holds.astype(np.int64))
        tie = random.bits(0, "tie of holders", a, np.flatnonzero(asked))
        top = np.lexsort((tie, -value))[: int(holds.sum())]
        claimed = np.zeros(len(value), bool)
        claimed[top] = True
        others = np.sort(value[~holds])[::-1]
        limits = {"accuracy": claimed, "tpr@5%": value > others[int(0.05 * len(others))]}
        for name, claim in limits.items():
            found[name][a, asked] = np.where(holds, claim & heard, np.nan)
    return {name: torch.from_numpy(_mean_of_known(each)) for name, each in found.items()}


def _mean_of_known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the first axis, NaN where nothing is known."""
    known = ~np.isnan(values)
    total: NDArray[np.float64] = np.where(known, values, 0.0).sum(0)
    count = known.sum(0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def target_transitions(train: Interactions) -> dict[str, Tensor]:
    """Everybody is an adversary, whose targets are its own transitions; see `attacks.transitions`."""
    moves = Transitions.of(train)
    return {
        "transitions": torch.from_numpy(np.stack([moves.before, moves.item, moves.gap], axis=1)),
        "offsets": torch.from_numpy(moves.offset),
        "places": torch.from_numpy(moves.place),
    }


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
