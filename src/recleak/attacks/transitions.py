"""How well received models of what comes next fit target transitions: community detection on PRME-G.

Each adversary has transitions of its own, as clients train on them. They are public knowledge as flat tensors:

    transitions   i64[T, 3]: from which place to which, and after how many seconds; adversary after adversary
    offsets       i64[A + 1]: adversary a has the transitions offsets[a] to offsets[a + 1]
    places        f64[I, 3]: where items are (`geometry.on_sphere`)

A model is scored by -D (`models.prme`): the nearest is the best. (CDA, eq. 4, has the sign of the distance reversed;
its eq. 10 would then choose the models from which the targets are farthest.)

    confidence     CDA, eq. 10: the mean of -D over the targets
    calibrated     that minus the mean over random ways, from any place to any other, as many of them within the window
                   as of the adversary's targets
    standardized   the same difference in standard deviations over the random ways

A federated client changes a few rows of what it received, so that most of a mean is the same for all clients of a
round and is added up once.

Axis letters: A adversaries, T transitions, I items, C clients, m models, k pairs of an adversary and a model, S ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.attacks.base import Knowledge
from recleak.errors import ConfigError
from recleak.geometry import kilometers
from recleak.kernels import F32, I64
from recleak.kernels_prme import F64, fit_changes, fit_pairs, near_places, ways_changes, ways_pairs
from recleak.models.base import Params
from recleak.models.prme import PRMEG
from recleak.update import Update

Scoring = Literal["confidence", "calibrated", "standardized"]
_WAYS = 200  # random ones
_TOGETHER = 64  # clients at a time
_PREFERENCE, _SEQUENCE = "item.preference", "item.sequence"
_TINY = 1e-12


@dataclass(frozen=True, eq=False)
class Targets:
    """The target transitions of all adversaries, as the compiled loops read them, and random ways beside them.

    The distance of a transition by a model is toward |u - p_i|^2 + along |s_b - s_i|^2.
    """

    before: I64  # i64[T]
    item: I64  # i64[T]
    toward: F32  # f32[T]
    along: F32  # f32[T]: 0 beyond the window
    owner: I64  # i64[T]: the adversary of each
    offset: I64  # i64[A + 1]
    within: NDArray[np.float64]  # f64[A]: the share of an adversary's transitions that are within the window
    visits: sp.csr_array  # f32[A, I]: what the preferences for items weigh in all
    touching: I64  # i64[n]: the transitions that start or end at an item, item after item
    first: I64  # i64[I + 1]: where those of each item begin
    origin: I64  # i64[S]: random ways
    end: I64  # i64[S]
    weight: F32  # f32[S]: w of each
    share: float  # of the preference within the window

    @classmethod
    def of(cls, knowledge: Knowledge, seed: int) -> Targets:
        """From what is public; it is made once for each knowledge."""
        known = _KNOWN.setdefault(knowledge, {})
        if seed not in known:
            known[seed] = _targets(knowledge, seed)
        return known[seed]

    @property
    def n_adversaries(self) -> int:
        """A."""
        return len(self.offset) - 1


_KNOWN: WeakKeyDictionary[Knowledge, dict[int, Targets]] = WeakKeyDictionary()


def _targets(knowledge: Knowledge, seed: int) -> Targets:
    model, n_items = knowledge.model, knowledge.n_items
    if not isinstance(model, PRMEG):
        raise ConfigError(
            f"Got {type(model).__name__} and target transitions, expected PRMEG: no other distance is known."
        )
    moves, offset, place = (_public(knowledge, name) for name in ("transitions", "offsets", "places"))
    _check(moves, offset, place, n_items)
    before, item, gap = (each.contiguous() for each in moves.unbind(1))
    near, origin, end = model.is_near(gap).numpy(), before.numpy(), item.numpy()
    weight = _weights(model, place.numpy(), origin, end)
    share, owner = np.float32(model.component_weight), np.repeat(np.arange(len(offset) - 1), offset.diff().numpy())
    toward = np.where(near, share * weight, 1).astype(np.float32)
    ends = np.concatenate([end, np.where(origin == end, n_items, origin)])  # who stays is in the list of its place once
    order = np.argsort(ends, kind="stable")
    ways = random.below(n_items, seed, "random ways", np.arange(_WAYS)[:, None], np.arange(2)).astype(np.int64)
    return Targets(
        origin,
        end,
        toward,
        np.where(near, (1 - share) * weight, 0).astype(np.float32),
        owner,
        offset.numpy(),
        np.bincount(owner, near, len(offset) - 1) / np.maximum(offset.diff().numpy(), 1),
        sp.csr_array((toward, (owner, end)), shape=(len(offset) - 1, n_items)),
        order % len(end) if len(end) else order,
        np.searchsorted(ends[order], np.arange(n_items + 1)),
        ways[:, 0].copy(),
        ways[:, 1].copy(),
        _weights(model, place.numpy(), ways[:, 0], ways[:, 1]),
        model.component_weight,
    )


def _weights(model: PRMEG, place: NDArray[np.float64], one: I64, other: I64) -> F32:
    return ((1 + kilometers(place[one], place[other])) ** model.distance_exponent).astype(np.float32)


def _public(knowledge: Knowledge, name: str) -> Tensor:
    if name not in knowledge.public:
        raise ConfigError(
            f"The attack on {type(knowledge.model).__name__} needs target transitions, got no {name}.\n"
            "  Give public={'transitions': i64[T, 3], 'offsets': i64[A + 1], 'places': f64[I, 3]}: from where, to "
            "where and after how many seconds, adversary after adversary."
        )
    return knowledge.public[name]


def _check(moves: Tensor, offset: Tensor, place: Tensor, n_items: int) -> None:
    wrong = []
    if moves.dtype != torch.int64 or moves.dim() != 2 or moves.shape[1] != 3:
        wrong.append(f"transitions {moves.dtype}{list(moves.shape)}, expected i64[T, 3]")
    elif len(moves) and (int(moves[:, :2].min()) < 0 or int(moves[:, :2].max()) >= n_items):
        wrong.append(f"transitions to or from an item outside [0, {n_items})")
    if offset.dtype != torch.int64 or offset.dim() != 1 or not len(offset) or bool((offset.diff() < 0).any()):
        wrong.append(f"offsets {offset.dtype}{list(offset.shape)}, expected i64[A + 1] that ascend")
    elif int(offset[0]) != 0 or int(offset[-1]) != len(moves):
        wrong.append(f"offsets from {int(offset[0])} to {int(offset[-1])}, expected 0 to {len(moves)}")
    if place.dtype != torch.float64 or place.shape != (n_items, 3):
        wrong.append(f"places {place.dtype}{list(place.shape)}, expected f64[{n_items}, 3]")
    if wrong:
        raise ConfigError(f"Got {'; '.join(wrong)}.\n  Make them from data.sequences.Transitions of each adversary.")


# --- scores -----------------------------------------------------------------------------------------------------------


def of_models(
    knowledge: Knowledge,
    scoring: str,
    models: Params,
    user: Tensor,
    adversary: Tensor,
    model: Tensor,
    *,
    told: bool,
    seed: int,
) -> Tensor:
    """Of pairs of an adversary and a whole model, i64[k] twice -> f32[k].

    `models` are tables f32[m, I, d], or f32[1, I, d] if they differ in vectors only; `user` is a vector for each model,
    f32[m, d], or if `told` one for each adversary.
    """
    targets, scoring = Targets.of(knowledge, seed), _scoring(knowledge, scoring)
    tables = tuple(models[name].contiguous().numpy() for name in (_PREFERENCE, _SEQUENCE))
    who, what, own = adversary.contiguous().numpy(), model.contiguous().numpy(), user.contiguous().numpy()
    distance = np.empty(len(who))
    vector, place = who if told else what, what if len(tables[0]) > 1 else np.zeros_like(what)
    fit_pairs(
        *tables, own, targets.before, targets.item, targets.toward, targets.along, targets.offset, who, place, vector,
        distance,
    )  # fmt: skip
    if scoring == "confidence":
        return torch.from_numpy(-distance).float()
    every = np.arange(len(own))  # without a vector of one's own a model has one answer
    each = (place, who) if told else (every if len(tables[0]) > 1 else np.zeros_like(every), every)
    moments = np.empty((len(each[0]), 4))
    ways_pairs(*tables, own, targets.origin, targets.end, targets.weight, targets.share, *each, moments)
    beside = moments if told else moments[what]
    return torch.from_numpy(_against(scoring, distance, beside, targets.within[who])).float()


def of_changes(
    knowledge: Knowledge, scoring: str, received: Params, update: Update, user: Tensor, *, told: bool, seed: int
) -> Tensor:
    """Of all adversaries and C clients who changed some rows of what they received, f32[A, C].

    `received` are tables f32[I, d]; `user` is a vector for each client, f32[C, d], or if `told` one for each adversary.
    """
    targets, scoring = Targets.of(knowledge, seed), _scoring(knowledge, scoring)
    parts = []
    for some in torch.split(torch.arange(update.n_clients), _TOGETHER):
        changed = update if len(some) == update.n_clients else update.select(some)
        parts.append(_of_some(targets, scoring, received, changed, user if told else user[some], told))
    return torch.cat(parts, 1)


def _of_some(targets: Targets, scoring: Scoring, received: Params, update: Update, user: Tensor, told: bool) -> Tensor:
    tables = tuple(received[name].contiguous().numpy() for name in (_PREFERENCE, _SEQUENCE))
    new = tuple((received[name][update.item] + update.rows[name]).numpy() for name in (_PREFERENCE, _SEQUENCE))
    held = update.item.contiguous().numpy(), update.offset.contiguous().numpy()
    own = user.contiguous().numpy()
    models = (*tables, *held, *new, own, told)
    distance = np.zeros((update.n_clients, targets.n_adversaries))
    if not told:
        near = np.empty((update.n_items, update.n_clients), np.float32)
        near_places(tables[0], *held, new[0], own, near)
        distance += (targets.visits @ near).T
    fit_changes(
        *models, targets.before, targets.item, targets.toward, targets.along, targets.owner, targets.offset,
        targets.touching, targets.first, distance,
    )  # fmt: skip
    if scoring == "confidence":
        return torch.from_numpy(-distance.T).float()
    moments = np.empty((update.n_clients, targets.n_adversaries if told else 1, 4))
    ways_changes(*models, targets.origin, targets.end, targets.weight, targets.share, moments)
    return torch.from_numpy(_against(scoring, distance, moments, targets.within).T).float()


def fitted(knowledge: Knowledge, params: Params, seed: int) -> Params:
    """Of each adversary the vector that is nearest to its targets by what was broadcast, f32[A, d]: the mean of the
    places it goes to, each by what its distance weighs.
    """
    weight = Targets.of(knowledge, seed).visits
    total, count = weight @ params[_PREFERENCE].numpy(), np.asarray(weight.sum(1), np.float32)
    return {"user": torch.from_numpy(total / np.maximum(count, np.float32(_TINY))[:, None])}


def _against(scoring: Scoring, distance: F64, moments: F64, within: NDArray[np.float64]) -> F64:
    """How much nearer targets are than random ways, f64[...] from f64[...], f64[..., 4] and f64[...]."""
    mean, square = (within * moments[..., at] + (1 - within) * moments[..., at + 2] for at in (0, 1))
    if scoring == "calibrated":
        return np.asarray(mean - distance)
    spread = np.sqrt(np.maximum(square - mean * mean, 0) * _WAYS / (_WAYS - 1))
    return np.asarray((mean - distance) / np.maximum(spread, _TINY))


def _scoring(knowledge: Knowledge, scoring: str) -> Scoring:
    for known in get_args(Scoring):
        if scoring == known and "excluded" not in knowledge.public:
            return known  # type: ignore[no-any-return]
    what = f"scoring {scoring!r}" if scoring not in get_args(Scoring) else "items that do not count (`excluded`)"
    raise ConfigError(
        f"Got {what} for {type(knowledge.model).__name__}, expected one of {', '.join(get_args(Scoring))} with all "
        "targets: what comes next is scored by transitions."
    )
