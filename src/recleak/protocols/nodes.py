"""What the nodes of a gossip hold, each its own parameters: the first ones, merges, changes, what nobody can use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.kernels_gmf import merge_models
from recleak.models.components import Component
from recleak.training.chunks import cores
from recleak.update import NodeParams, Update

Precision = Literal["float32", "float16"]
DTYPE = {"float32": torch.float32, "float16": torch.float16}
TABLE = 1 << 26  # bytes of gathered parameters at a time
PIECE = 1 << 23  # bytes of what is copied and soon forgotten: less than this much memory is used again at once


def first_nodes(
    components: Sequence[Component], n_users: int, n_items: int, seed: int, precision: Precision
) -> NodeParams:
    """What nodes share before the first tick: each has drawn its own."""
    dtype = DTYPE[precision]
    rows = {"per_item": n_items, "per_user": n_users, "dense": 1}
    shared = [part for part in components if part.shared]
    first = NodeParams()
    for part in shared:
        shape = part.shape if part.storage == "dense" else (rows[part.storage], *part.shape)
        first[part.name] = torch.empty(n_users, *shape, dtype=dtype)

    def fill(node: int) -> None:
        own = int(random.bits(seed, "node", node) >> np.uint64(1))
        for part in shared:
            drawn = part.draw(own) if part.storage == "dense" else part.draw(own, np.arange(rows[part.storage]))
            first[part.name][node] = drawn[0] if part.storage == "dense" else drawn

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(fill, range(n_users)))
    return first


def merge(
    value: Tensor,
    sent: Tensor,
    node: NDArray[np.int64],
    offset: NDArray[np.int64],
    sender: NDArray[np.int64],
    rest: Tensor,
    share: Tensor,
) -> None:
    """Of the given nodes value = rest value + the sum over their messages of share sent[sender], in place."""
    own, theirs = (each.numpy().reshape(len(value), -1) for each in (value, sent))
    merge_models(own, theirs, node, offset, sender, rest.numpy(), share.numpy())


def add(params: NodeParams, update: Update) -> None:
    """Add what nodes changed to what they have, in place."""
    for name, value in update.values.items():
        whole = params[name]
        if whole.dim() > value.dim():  # a user table: a node changes its own row
            whole[update.client, update.client] += value.to(whole.dtype)
        else:
            whole[update.client] += value.to(whole.dtype)
    node = update.client[update.owner]
    place = node * update.n_items + update.item
    for name, rows in update.rows.items():
        table = params[name].view(-1, *rows.shape[1:])
        table.index_add_(0, place, rows.to(table.dtype))


def of_nodes(params: NodeParams, node: NDArray[np.int64]) -> dict[str, Tensor]:
    """A copy of what some nodes have in single precision, f32[n, ...] each; one pass, whatever they hold it in."""
    found = {name: torch.empty(len(node), *value.shape[1:]) for name, value in params.items()}
    for name, value in params.items():
        for place, number in enumerate(node.tolist()):
            found[name][place] = value[number]
    return found


def misfit(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """What is wrong with the form of parameters, in words; None: nothing."""
    if set(got) != set(expected):
        return f"the components {', '.join(sorted(got)) or 'none'}, expected {', '.join(sorted(expected))}"
    for name, value in expected.items():
        if got[name].shape != value.shape:
            return f"{name} of shape {list(got[name].shape)}, expected {list(value.shape)}"
    return None


def finite(params: NodeParams, node: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether all that each of the nodes has is finite, bool[n]."""
    sound = torch.ones(len(next(iter(params.values()))), dtype=torch.bool)
    for value in params.values():
        for start in range(0, len(value), step := max(1, PIECE // max(1, 4 * value[0].numel()))):
            sound[start : start + step] &= torch.isfinite(value[start : start + step].float().flatten(1).sum(1))
    return sound.numpy()[node]


def fitting(components: Sequence[Component], n_users: int, n_items: int, memory: int = TABLE) -> int:
    """How many models fit into so many bytes of working memory."""
    rows = {"per_item": n_items, "per_user": n_users, "dense": 1}
    numbers = sum(part.size * rows[part.storage] for part in components)
    return max(1, memory // (4 * numbers))
