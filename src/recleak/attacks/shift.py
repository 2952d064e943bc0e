"""What the defense in force does to every upload, trained or not: public, so readers of changes take it away first.

A mechanism that clips values, not changes, moves all numbers that lie beyond its bound: the largest movement of a first
round is the same for everybody and tells nothing of anybody (`Defense.shift`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from recleak.attacks.base import Knowledge
from recleak.update import Update


def shifts(knowledge: Knowledge, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By component of a broadcast, f32[*shape], f32[I, *shape] or f32[U, *shape]; without those that have none."""
    found = {name: knowledge.defense.shift(name, value) for name, value in received.items()}
    return {name: value for name, value in found.items() if value is not None}


def without_shift(knowledge: Knowledge, shift: Mapping[str, Tensor], update: Update) -> Update:
    """What clients changed by themselves, and noise; `shift` as `shifts` gives it. Rows that were not sent stay so."""
    if not shift:
        return update
    tables = {part.name for part in knowledge.components if part.storage == "per_user"}

    def own(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
        if name not in shift:
            return tensor
        if owner is None and name not in tables:
            return tensor - shift[name]
        taken = shift[name].index_select(0, update.item if owner is not None else update.client)
        return torch.sub(tensor, taken, out=taken)

    return update.map(own)


def without_shift_of_rows(knowledge: Knowledge, received: Mapping[str, Tensor], update: Update) -> Update:
    """The same of item rows alone: the rest is as it was uploaded, for who reads not changes of it but values."""
    shift = shifts(knowledge, {name: received[name] for name in update.rows if name in received})
    return replace(update, rows=without_shift(knowledge, shift, update).rows)
