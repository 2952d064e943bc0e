"""Items that mark a person: those of some categories, or with some titles. Who has any of them?

A mark has a name, for tables and conditions. Whoever has at least `least` of its items in the training data holds it.
Axis letters: U users, I items.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recleak.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from recleak.data.interactions import Interactions

_NAME = re.compile(r"[A-Za-z][A-Za-z-]*")


@dataclass(frozen=True)
class Mark:
    """Items by category (its whole name) or by title (a part of it, whatever the case)."""

    name: str
    categories: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()
    least: int = 1  # so many of them make a holder

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"The mark is named {self.name!r}, expected letters and hyphens, such as 'health'.")
        if not (self.categories or self.titles):
            raise ConfigError(f"The mark {self.name!r} names neither categories nor titles, expected some.")
        if self.least < 1:
            raise ConfigError(f"The mark {self.name!r} has least = {self.least}, expected at least 1 item.")

    @classmethod
    def of(cls, category: str) -> Mark:
        """One category, whose name is that of the mark, as far as it is letters."""
        return cls("-".join(re.findall("[a-z]+", category.lower())), (category,))

    def items(self, data: Interactions) -> NDArray[np.bool_]:
        """Which items it is about, bool[I]; a category or a title that no item has is an error."""
        inside = np.zeros(data.n_items, bool)
        if self.categories:
            of_item = self._column(data, "categories")
            for name in self.categories:
                found = np.array([name in (each or ()) for each in of_item], np.bool_)
                if not found.any():
                    raise unknown_name("category", name, {one for each in of_item for one in each or ()})
                inside |= found
        if self.titles:
            known = [str(each or "").lower() for each in self._column(data, "title")]
            for title in self.titles:
                found = np.array([title.lower() in each for each in known], np.bool_)
                if not found.any():
                    raise ConfigError(f"The mark {self.name!r}: no title has {title!r} in it.")
                inside |= found
        return inside

    def holders(self, train: Interactions, inside: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
        """Who has at least so many of the items, bool[U]."""
        which = self.items(train) if inside is None else inside
        own: NDArray[np.int64] = (train.matrix() > 0).astype(np.int64) @ which.astype(np.int64)
        found: NDArray[np.bool_] = own >= self.least
        return found

    def _column(self, data: Interactions, name: str) -> list[Any]:
        if name not in data.items.columns:
            raise ConfigError(f"The mark {self.name!r} needs the {name} of items, but the data have none.")
        return list(data.items[name].to_list())
