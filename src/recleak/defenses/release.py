"""Defenses that change lists on their way to users."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recleak.defenses.base import Defense, Lists
from recleak.defenses.spending import NoGuarantee, Spending
from recleak.streams import Streams


@dataclass(frozen=True)
class PopularLists(Defense):
    """Each place of a list gets, with a `chance`, a popular item in place of the user's own.

    The item is drawn among those that the user may be shown and that are not in the list, in proportion to popularity
    to the power of `power`. Draws are anew in each session. `chance=0` changes nothing, `chance=1` shows popular items
    only: then a list depends on its user through what it must not show.

    **No guarantee**: an item that stays is the recommender's own choice, and over sessions draws average out.
    """

    chance: float
    power: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.chance <= 1:
            raise ValueError(f"Got chance={self.chance}, expected a number from 0 to 1.")
        if not 0 <= self.power < float("inf"):
            raise ValueError(f"Got power={self.power}, expected a finite number of at least 0 (0: all items alike).")

    @property
    def idle(self) -> frozenset[str]:
        """All, if nothing is replaced."""
        return frozenset(() if self.chance else ("release",))

    def release(self, lists: Lists, streams: Streams) -> Tensor:
        """The lists with replaced places, i64[B, K]."""
        item, length = lists.item, lists.item.shape[1]
        position = torch.arange(len(item))
        start = torch.zeros_like(position)
        replaced = (streams.uniform("place", position, start, (length,)) <= self.chance) & (item >= 0)  # bool[B, K]
        free = lists.allowed.clone()
        place = position.unsqueeze(1).expand_as(item)
        free[place[item >= 0], item[item >= 0]] = False
        weight = lists.popularity.clamp(min=1).double() ** self.power
        lot = streams.uniform("item", position, start, (len(weight),)).double()
        race = torch.where(free, -lot.clamp(max=1 - 1e-12).log() / weight, float("inf"))  # smallest first: exponentials
        drawn = race.topk(min(length, race.shape[1]), dim=1, largest=False)
        fresh = torch.where(torch.isfinite(drawn.values), drawn.indices, -1)
        if fresh.shape[1] < length:
            fresh = torch.cat([fresh, fresh.new_full((len(fresh), length - fresh.shape[1]), -1)], 1)
        return torch.where(replaced & (fresh >= 0), fresh, item)

    def spends(self) -> tuple[Spending, ...]:
        """No guarantee."""
        why = (
            f"Each place of a list still shows the recommender's own choice with a chance of {1 - self.chance:g}, and "
            "items of a user's history are never shown, whatever is drawn."
        )
        return (NoGuarantee(repr(self), why),)
