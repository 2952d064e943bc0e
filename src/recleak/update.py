"""What a cohort of clients changed: the difference between their parameters and those they received.

The leading axis is the client. Values of `dense` and `per_user` components are tensors [C, *shape]. A `per_item`
component is ragged: a client holds only the rows of the items it touched, so the rows of all clients lie in one flat
table [N, *shape], client after client, with offsets. Which items they are is part of the update, because a receiver
sees which rows changed. A real device has C = 1. What clients keep between visits has the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor


class NodeParams(dict[str, Tensor]):
    """The parameters of U nodes, each its own: f32[U, *shape], f32[U, I, *shape], or a user table f32[U, U, *shape].

    A plain mapping has the same for all: f32[*shape], f32[I, *shape] or f32[U, *shape]. Nodes may be in half precision.
    """


def values_of(
    received: Mapping[str, Tensor], name: str, client: Tensor, *, per_user: bool, node: Tensor | None = None
) -> Tensor:
    """What clients i64[C] begin with of a dense or per_user component: f32[C, *shape], or f32[*shape] for all.

    Of nodes, each client has its own, or that of the given node, i64[C].
    """
    whole = received[name]
    if isinstance(received, NodeParams):
        of = client if node is None else node
        return (whole[of, client] if per_user else whole[of]).float()
    return whole.index_select(0, client) if per_user else whole


def rows_of(received: Mapping[str, Tensor], name: str, client: Tensor, item: Tensor) -> Tensor:
    """What clients i64[N] begin with of the rows of items i64[N], f32[N, *shape]."""
    whole = received[name]
    return whole[client, item].float() if isinstance(received, NodeParams) else whole.index_select(0, item)


@dataclass(frozen=True, eq=False)
class Update:
    """The changes of C clients, by the names of components."""

    client: Tensor  # i64[C], ascending: who they are, as the receiver knows them
    values: dict[str, Tensor]  # dense and per_user components: f32[C, *shape]
    rows: dict[str, Tensor]  # per_item components: f32[N, *shape]
    item: Tensor  # i64[N], ascending within a client: the item of each row
    offset: Tensor  # i64[C + 1]: client c holds rows offset[c] to offset[c + 1]
    n_items: int  # I: how many rows the whole table has
    received: Mapping[str, Tensor] = field(default_factory=dict)
    """The shared components that the changes are from, whole: f32[*shape], f32[I, *shape] or f32[U, *shape], or of each
    node its own. Hooks of a defense find them here (`defenses.base.received`); they are not sent."""

    @property
    def n_clients(self) -> int:
        """How many clients there are, C."""
        return len(self.client)

    @cached_property
    def owner(self) -> Tensor:
        """The position of the client of each row, i64[N]."""
        return torch.repeat_interleave(torch.arange(self.n_clients, device=self.item.device), self.offset.diff())

    def names(self) -> Iterator[str]:
        """The names of all components in it."""
        yield from self.values
        yield from self.rows

    def map(self, change: Callable[[str, Tensor, Tensor | None], Tensor]) -> Update:
        """Another update from `change(name, tensor, owner)`; `owner` is None for tensors with a client axis."""
        return replace(
            self,
            values={name: change(name, value, None) for name, value in self.values.items()},
            rows={name: change(name, value, self.owner) for name, value in self.rows.items()},
        )

    def only(self, names: set[str]) -> Update:
        """The components with these names; without a per_item component no item is named either."""
        rows = {name: value for name, value in self.rows.items() if name in names}
        kept = replace(self, values={name: value for name, value in self.values.items() if name in names}, rows=rows)
        if rows or not self.rows:
            return kept
        return replace(kept, item=self.item[:0], offset=torch.zeros_like(self.offset))

    def squared_norms(self) -> dict[str, Tensor]:
        """Each client's squared l2 norm by component, f32[C]."""
        norms = {name: value.square().unsqueeze(-1).flatten(1).sum(1) for name, value in self.values.items()}
        for name, value in self.rows.items():
            per_row = value.square().unsqueeze(-1).flatten(1).sum(1)
            norms[name] = per_row.new_zeros(self.n_clients).index_add_(0, self.owner, per_row)
        return norms

    def norms(self) -> Tensor:
        """Each client's l2 norm over all components, f32[C]."""
        total = torch.zeros(self.n_clients, device=self.client.device)
        for squared in self.squared_norms().values():
            total = total + squared
        return total.sqrt()

    def select(self, positions: Tensor) -> Update:
        """The clients at these positions (i64), in this order."""
        count = self.offset.diff()[positions]
        offset = torch.cat([count.new_zeros(1), count.cumsum(0)])
        start = torch.repeat_interleave(self.offset[positions] - offset[:-1], count)
        row = start + torch.arange(int(offset[-1]), device=start.device)
        return Update(
            self.client[positions],
            {name: value[positions] for name, value in self.values.items()},
            {name: value[row] for name, value in self.rows.items()},
            self.item[row],
            offset,
            self.n_items,
            self.received,
        )

    def to(self, device: torch.device | str) -> Update:
        """The same on another device."""
        moved = self.map(lambda _, tensor, __: tensor.to(device))
        return replace(moved, client=self.client.to(device), item=self.item.to(device), offset=self.offset.to(device))

    def with_all_rows(self) -> Update:
        """The same update with a row for every item, zero where the client changed nothing: N = C * I."""
        clients, n_items = self.n_clients, self.n_items
        place = self.owner * n_items + self.item
        rows = {
            name: value.new_zeros(clients * n_items, *value.shape[1:]).index_copy_(0, place, value)
            for name, value in self.rows.items()
        }
        item = torch.arange(n_items, device=self.item.device).repeat(clients)
        return replace(self, rows=rows, item=item, offset=torch.arange(clients + 1, device=item.device) * n_items)


def merge(updates: list[Update]) -> Update:
    """One update of the clients of several, ascending; they have the same components."""
    first = updates[0]
    if len(updates) == 1 and bool((first.client.diff() > 0).all()):
        return replace(first, received={})
    client = torch.cat([update.client for update in updates])
    order = client.argsort()
    counts = [update.offset.diff().tolist() for update in updates]
    count = torch.tensor([each for part in counts for each in part], dtype=torch.int64, device=client.device)[order]

    def gathered(tables: list[Tensor]) -> Tensor:
        pieces = [piece for table, sizes in zip(tables, counts, strict=True) for piece in torch.split(table, sizes)]
        return torch.cat([pieces[place] for place in order.tolist()])

    return Update(
        client[order],
        {name: torch.cat([update.values[name] for update in updates])[order] for name in first.values},
        {name: gathered([update.rows[name] for update in updates]) for name in first.rows},
        gathered([update.item for update in updates]),
        torch.cat([count.new_zeros(1), count.cumsum(0)]),
        first.n_items,
    )
