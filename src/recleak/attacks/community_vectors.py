"""The vector that a received model lacks if users keep theirs: whose else an adversary takes.

Axis letters: A adversaries, I items, m models, t targets that a vector is fitted to.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from recleak import random
from recleak.attacks.base import Knowledge, State
from recleak.attacks.community_targets import groups_of, padded, targets_of
from recleak.attacks.transitions import fitted as fitted_to_transitions
from recleak.errors import ConfigError
from recleak.models.base import Batch, Params
from recleak.models.components import Component

Vector = Literal["sent", "told", "mean", "fitted"]

TOLD, FITTED = "told/", "fitted/"  # before the names of components in the state
_STEPS, _AGAIN, _RATE = 60, 10, 0.1  # of fitting a vector: the first time, and from round to round
_FEW = 100  # targets that it is fitted to
_FITS = WeakIdKeyDictionary()  # of targets and a seed: what vectors are fitted to


def kept_parts(knowledge: Knowledge) -> list[Component]:
    """What models lack: what is not shared, beside rows of items."""
    return [part for part in knowledge.components if not part.shared and part.storage != "per_item"]


def vectors_for(how: Vector, knowledge: Knowledge, state: State, own: Params) -> Params | None:
    """What a model lacks, by component: what was sent with m models, or one for each of A adversaries; None if nothing
    was told yet.
    """
    kept = kept_parts(knowledge)
    if how == "sent":
        if kept:
            raise ConfigError(
                f"The attack uses what is sent, but {', '.join(part.name for part in kept)} is kept.\n"
                "  Choose another vector: 'told', 'mean' or 'fitted'."
            )
        return own
    prefix = FITTED if how == "fitted" else TOLD
    found = {part.name: state[prefix + part.name] for part in kept if prefix + part.name in state}
    if len(found) < len(kept):
        return None
    if how == "mean":
        return {name: _means(value, groups_of(knowledge)) for name, value in found.items()}
    if how == "fitted":
        return found
    leader = knowledge.public.get("leaders", torch.arange(len(targets_of(knowledge))))
    return {name: value[leader].nan_to_num() for name, value in found.items()}


def _means(told: Tensor, groups: Tensor) -> Tensor:
    """The mean of what the members of each group told, f32[U, *shape] (NaN: nothing), bool[A, U] -> f32[A, *shape]."""
    flat = told.flatten(1)
    counts = (groups & ~flat.isnan().any(1)).float()
    mean = counts @ flat.nan_to_num() / counts.sum(1, keepdim=True).clamp(min=1)
    return mean.reshape(len(groups), *told.shape[1:])


def fitted(knowledge: Knowledge, params: Params, seed: int, before: Params | None = None) -> Params:
    """Of each adversary the values of what is kept that fit its targets best, against random items, with the parameters
    that were broadcast: f32[A, *shape]. At most `_FEW` targets count, drawn at random; `before` is where it starts.
    """
    if knowledge.model.needs_transitions:
        return fitted_to_transitions(knowledge, params, seed)
    what, label, weight = _examples(targets_of(knowledge), seed)
    adversary = np.arange(len(what))
    own = {
        part.name: (before[part.name] if before else _drawn(part, adversary, seed)).clone().requires_grad_()
        for part in kept_parts(knowledge)
    }
    fixed = {
        part.name: params[part.name][what]
        if part.storage == "per_item"
        else params[part.name].expand(len(what), *part.shape)
        for part in knowledge.components
        if part.shared
    }
    optimizer = torch.optim.Adam(list(own.values()), lr=_RATE)
    for _ in range(_AGAIN if before else _STEPS):
        optimizer.zero_grad()
        logits = knowledge.model.logits({**fixed, **own}, nothing_known(*what.shape))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, label, weight, reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.detach() for name, value in own.items()}


def _examples(targets: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the vector of each adversary is fitted to: some targets and as many random items, i64[A, 2t], f32[A, 2t]
    their labels and f32[A, 2t] how much each counts. The same in all rounds, so found once for each tensor and seed.
    """
    if targets not in _FITS:
        _FITS[targets] = {}
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = _FITS[targets]
    if seed not in found:
        item, inside = padded(_some(targets, seed))
        place = np.arange(len(item))[:, None], np.arange(item.shape[1])
        lot = random.below(targets.shape[1], seed, "random items", *place)
        what = torch.cat([item, torch.from_numpy(lot)], 1)
        label = torch.cat([inside, torch.zeros_like(inside)], 1).float()
        found[seed] = what, label, torch.cat([inside, inside], 1) / inside.sum(1, keepdim=True).clamp(min=1)
    return found[seed]


def _some(targets: Tensor, seed: int) -> Tensor:
    """At most so many targets of each adversary, f32[A, I]."""
    lot = random.uniform(seed, "some targets", np.arange(len(targets))[:, None], np.arange(targets.shape[1]))
    order = (torch.from_numpy(lot) * targets).topk(min(_FEW, targets.shape[1]), dim=1).indices
    return torch.zeros_like(targets).scatter_(1, order, 1.0) * targets


def _drawn(part: Component, row: NDArray[np.int64], seed: int) -> Tensor:
    """The first values of something that is kept, f32[A, *shape]: the adversary's own draws. With the seed of the run
    as it is they would be those of its users.
    """
    own = int(random.bits(seed, "fitted user") >> np.uint64(1))
    return part.draw(own, row) if part.storage == "per_user" else part.draw(own).expand(len(row), *part.shape)


def nothing_known(clients: int, items: int) -> Batch:
    """Of the senders' own items the adversary knows nothing."""
    return Batch(own=torch.zeros(clients, items, dtype=torch.bool), degree=torch.ones(clients))
