"""What adversaries look for who look for communities, and which nodes side with them.

Axis letters: A adversaries, U users, I items, m models, t targets, T targets of all adversaries.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from recleak import random
from recleak.attacks.base import Knowledge
from recleak.errors import ConfigError
from recleak.kernels_gmf import sum_targets

_DENSE = 0.01  # the share of targets among all items above which a matrix product is faster
_FOUND = WeakIdKeyDictionary()  # the places of targets, as long as these are in use


def targets_of(knowledge: Knowledge) -> Tensor:
    """What marks the community of each adversary, f32[A, I]."""
    if "targets" not in knowledge.public:
        raise ConfigError(
            "The attack needs target items, got none: give public={'targets': f32[A, I]}, 1 for a target."
        )
    return knowledge.public["targets"]


def apart_of(knowledge: Knowledge, sender: Tensor) -> Tensor | None:
    """The targets that do not count for the models of senders, i64[m] -> f32[m, I]; None if all do."""
    excluded = knowledge.public.get("excluded")
    if excluded is not None and excluded.shape != (knowledge.n_users, knowledge.n_items):
        raise ConfigError(
            f"Got excluded {list(excluded.shape)}, expected [{knowledge.n_users}, {knowledge.n_items}]: a row for each "
            "sender, 1 for a target that does not count."
        )
    return None if excluded is None else excluded[sender]


def groups_of(knowledge: Knowledge) -> Tensor:
    """Who is in each adversary or sides with it, bool[A, U]."""
    if "groups" not in knowledge.public:
        raise ConfigError("The attack needs to know who is in it, got no groups: give public={'groups': bool[A, U]}.")
    groups, targets = knowledge.public["groups"], knowledge.public.get("targets")
    if targets is not None and len(groups) != len(targets):
        raise ConfigError(f"Got {len(groups)} groups and targets for {len(targets)}, expected as many.")
    return groups


def colluding(n_users: int, share: float, seed: int, leader: Tensor | None = None) -> Tensor:
    """Every node as an adversary, or the given ones, i64[A], with a random share of all nodes beside it, bool[A, U]."""
    leader = torch.arange(n_users) if leader is None else leader
    groups = torch.zeros(len(leader), n_users, dtype=torch.bool)
    groups[torch.arange(len(leader)), leader] = True
    count = round(share * n_users)
    if count:
        lot = random.bits(seed, "colluders", leader.numpy()[:, None], np.arange(n_users)).argsort(1)
        groups.scatter_(1, torch.from_numpy(lot[:, :count].copy()), True)
    return groups


def mean_items(knowledge: Knowledge) -> int:
    """How many items clients have on average."""
    if "popularity" not in knowledge.public:
        raise ConfigError("The attack needs to know how many items clients have on average: make popularity public.")
    return max(1, round(float(knowledge.public["popularity"].sum()) / knowledge.n_users))


def places_of(targets: Tensor) -> tuple[Tensor, Tensor]:
    """The targets of each adversary as items one after another, i64[T] and i64[A + 1]; found once for each tensor."""
    if targets not in _FOUND:
        owner, item = targets.nonzero(as_tuple=True)
        _FOUND[targets] = item.contiguous(), torch.searchsorted(owner, torch.arange(len(targets) + 1))
    places: tuple[Tensor, Tensor] = _FOUND[targets]
    return places


def totals(targets: Tensor, value: Tensor) -> Tensor:
    """The sum over an adversary's targets of what a model gives items, f32[A, I], f32[m, I] -> f32[A, m].

    Of a large catalog hardly any item is a target: then only these are read.
    """
    item, offset = places_of(targets)
    if len(item) > _DENSE * targets.numel():
        return targets @ value.T
    out = torch.empty(len(targets), len(value))
    sum_targets(*(each.contiguous().numpy() for each in (value, item, offset, out)))
    return out


def jaccard(targets: Tensor, claims: Tensor, size: Tensor) -> Tensor:
    """f32[A, I], f32[m, I], f32[A, 1 or m] (how many targets) -> f32[A, m]."""
    both = totals(targets, claims)
    return both / (size + claims.sum(1) - both)


def padded(targets: Tensor) -> tuple[Tensor, Tensor]:
    """The targets of each adversary as items, i64[A, t], and which of them are there, bool[A, t]."""
    count = targets.sum(1).long()
    order = targets.argsort(dim=1, descending=True, stable=True)[:, : max(1, int(count.max()))]
    return order, torch.arange(order.shape[1]) < count.unsqueeze(1)
