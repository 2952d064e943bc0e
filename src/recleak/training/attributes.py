"""What users keep to themselves about themselves, who does not mind telling, and the public data that comes of it.

PARD (Zhao et al., eq. 6) and UC-FedRec (Hu and Song 2024) assume some privacy-insensitive users, who tell their
attributes and parameters to everybody. What they told last is `PublicData`: a `Disclosure` on the wire, and tables that
every client gets with a broadcast, under names that begin with `public/`. Axis letters: U users, C clients of an
update, P insensitive users, k of their own items, d factors.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import polars as pl
import scipy.sparse as sp
import torch
from torch import Tensor

from recleak import random
from recleak.data.features import classes_of
from recleak.data.interactions import Interactions
from recleak.errors import ConfigError
from recleak.models.base import Params
from recleak.models.components import Component, by_name, require_names
from recleak.update import Update, rows_of
from recleak.wire import Disclosure

PREFIX = "public/"  # before the names of public tables among what clients receive
MEAN = " mean"  # after the name of a table of items: the mean over all own items
LABEL = "label of "  # before the name of an attribute
CLIENT = "client"
ITEMS = 8  # own items whose rows an insensitive user tells each time


@dataclass(frozen=True, eq=False)
class PrivateAttributes:
    """Attributes of U users. A client knows its own and nobody else's, but for what insensitive users tell."""

    labels: Mapping[str, Tensor]  # i64[U]: a class, -1 if there is none; or f32[U]: a number, NaN if there is none
    public: Tensor  # bool[U]: insensitive users
    protected: Mapping[str, Tensor] = field(default_factory=dict)  # bool[U]: who wants an attribute protected, if said

    def check(self, n_users: int) -> None:
        """An error if something does not fit together."""
        require_names("attribute", self.protected, self.labels)
        tables = {"public": (self.public, torch.bool)} | {
            f"protected {name}": (value, torch.bool) for name, value in self.protected.items()
        }
        for name, value in self.labels.items():
            tables[name] = (value, torch.float32 if value.is_floating_point() else torch.int64)
        for name, (value, dtype) in tables.items():
            if value.shape != (n_users,) or value.dtype != dtype:
                raise ConfigError(
                    f"{name} is {value.dtype}{list(value.shape)}, expected {dtype}[{n_users}]: one entry for each user."
                )


def attributes_of(
    data: Interactions, names: Iterable[str], public: Tensor, *, numbers: Container[str] = ()
) -> PrivateAttributes:
    """Attributes of a data set's users as classes (`data.features.classes_of`), those in `numbers` as they are.

    `public` says who is insensitive, bool[U].
    """
    labels = {}
    for name in names:
        if name in numbers:
            column = data.users[name].cast(pl.Float32).fill_null(float("nan"))
            labels[name] = torch.from_numpy(column.to_numpy().copy())
        else:
            labels[name] = torch.from_numpy(classes_of(data, name)[0].copy())
    return PrivateAttributes(labels, public)


def has_label(label: Tensor) -> Tensor:
    """Whether users have an attribute at all, bool[n]."""
    return ~label.isnan() if label.is_floating_point() else label >= 0


def insensitive(n_users: int, share: float, seed: int) -> Tensor:
    """A draw of about `share` of the users, bool[U]; fewer are among more."""
    return torch.from_numpy(random.uniform(seed, "insensitive users", np.arange(n_users)) < share)


class PublicData:
    """What insensitive users told last."""

    def __init__(
        self,
        components: tuple[Component, ...],
        disclosed: tuple[str, ...],
        attributes: PrivateAttributes,
        history: sp.csr_array,
        seed: int,
    ) -> None:
        """`history` is the users' own items, f32[U, I]."""
        named = by_name(components)
        require_names("component", disclosed, named)
        self._parts, self._seed = [named[name] for name in disclosed], seed
        has_items = torch.from_numpy(np.diff(history.indptr) > 0)
        self._who = (attributes.public & has_items).nonzero().squeeze(1)  # i64[P], ascending
        owner = np.repeat(np.arange(history.shape[0]), np.diff(history.indptr))
        self._owned = np.append(owner * history.shape[1] + history.indices, -1)  # i64[N + 1]: ascending pairs, and none
        self._labels = {name: label[self._who] for name, label in attributes.labels.items()}
        users = len(self._who)
        self.state: Params = {"told": torch.zeros(users, dtype=torch.int64)}
        for part in self._parts:
            if part.storage == "per_item":
                self.state[part.name] = torch.zeros(users, ITEMS, *part.shape)
                self.state[part.name + MEAN] = torch.zeros(users, *part.shape)
            else:
                self.state[part.name] = torch.zeros(users, *part.shape)

    def add(self, received: Params, update: Update, kept: Update, round: int) -> None:
        """What insensitive users among the clients of an update have after training; `kept` is of the same clients."""
        place = torch.searchsorted(self._who, update.client)
        mine = (torch.cat([self._who, self._who.new_tensor([-1])])[place] == update.client).nonzero().squeeze(1)
        if not len(mine):
            return
        place, some, own = place[mine], update.select(mine), kept.select(mine)
        for part in self._parts:
            if part.storage == "per_item":
                rows = some.rows[part.name] + rows_of(received, part.name, some.client[some.owner], some.item)
                self._add_rows(part.name, place, some, rows, round)
            elif part.stays:
                self.state[part.name][place] = own.values[part.name]
            else:
                base = received[part.name]
                now = some.values[part.name] + (base[some.client] if part.storage == "per_user" else base)
                self.state[part.name][place] = now
        self.state["told"][place] = 1

    def _add_rows(self, name: str, place: Tensor, update: Update, rows: Tensor, round: int) -> None:
        """The mean of the rows of own items, and some of them, drawn anew."""
        client, item = update.client[update.owner].numpy(), update.item.numpy()
        pair = client * update.n_items + item
        is_own = torch.from_numpy(self._owned[np.searchsorted(self._owned[:-1], pair)] == pair)
        owner, mine = update.owner[is_own], rows[is_own]
        count = torch.bincount(owner, minlength=update.n_clients)
        mean = mine.new_zeros(update.n_clients, *mine.shape[1:]).index_add_(0, owner, mine)
        self.state[name + MEAN][place] = mean / count.clamp(min=1).reshape(-1, *[1] * (mean.dim() - 1))
        lot = random.uniform(self._seed, "told items", round, client[is_own.numpy()], item[is_own.numpy()])
        order = torch.from_numpy(np.lexsort((lot, owner.numpy())))
        start = torch.cat([count.new_zeros(1), count.cumsum(0)[:-1]]).unsqueeze(1)  # i64[C, 1]
        turn = torch.arange(ITEMS) % count.clamp(min=1).unsqueeze(1)  # i64[C, k]: who has fewer tells some again
        self.state[name][place] = mine[order[start + turn]]

    def tables(self) -> Params:
        """What clients get: of those who have told, f32[P, ...], and their labels."""
        told = self.state["told"].bool()
        if not bool(told.any()):
            return {}
        tables = {PREFIX + name: value[told] for name, value in self.state.items() if name != "told"}
        tables |= {f"{PREFIX}{LABEL}{name}": label[told] for name, label in self._labels.items()}
        return {**tables, PREFIX + CLIENT: self._who[told]}

    def message(self) -> Disclosure | None:
        """The same on the wire; None as long as nobody has told anything. Numbers are values, classes are labels."""
        told = self.state["told"].bool()
        if not bool(told.any()):
            return None
        values = {name: value[told] for name, value in self.state.items() if name != "told"}
        labels = {name: label[told] for name, label in self._labels.items()}
        values |= {f"{LABEL}{name}": label for name, label in labels.items() if label.is_floating_point()}
        classes = {name: label for name, label in labels.items() if not label.is_floating_point()}
        return Disclosure(self._who[told], values, classes)


def public_of(received: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The public tables among what clients received, by their names."""
    return {name.removeprefix(PREFIX): value for name, value in received.items() if name.startswith(PREFIX)}
