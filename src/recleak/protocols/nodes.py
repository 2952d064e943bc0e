"""What the nodes of a gossip hold, each its own parameters: the first ones, changes, what nobody can use.

What cannot be a model, whoever sent it: what has not the form of one, a number that is not finite, one above `LARGEST`,
and one more than `TIMES` times as large as the largest of the receiver, or as 1 if that is larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.kernels_nodes import largest_bits
from recleak.models.components import Component
from recleak.training.chunks import cores
from recleak.update import NodeParams, Update

Precision = Literal["float32", "float16"]
DTYPE = {"float32": torch.float32, "float16": torch.float16}
LARGEST = 65504.0  # of all numbers in half precision, in which nodes may hold models
TIMES = 100.0  # nodes that train alike have models of one scale, whatever their defense
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


def misfit(got: Any, expected: Mapping[str, Tensor]) -> str | None:
    """What is wrong with the form of parameters, in words; None: nothing."""
    if not isinstance(got, Mapping):
        return f"{type(got).__name__}, expected components by name"
    if set(got) != set(expected):
        return f"the components {', '.join(sorted(map(str, got))) or 'none'}, expected {', '.join(sorted(expected))}"
    for name, value in expected.items():
        found = got[name]
        if not isinstance(found, Tensor):
            return f"{name} as {type(found).__name__}, expected a tensor"
        if (found.dtype, found.layout, found.device) != (value.dtype, value.layout, value.device):
            kind, wanted = (f"{each.dtype}, {each.layout}, {each.device}" for each in (found, value))
            return f"{name} of type {kind}, expected {wanted}"
        if found.shape != value.shape:
            return f"{name} of shape {list(found.shape)}, expected {list(value.shape)}"
    return None


def sizes(params: Mapping[str, Tensor]) -> NDArray[np.float32]:
    """The largest magnitude in all that each of U nodes has, f32[U]; infinite if something is not finite."""
    found = np.zeros(len(next(iter(params.values()))), np.float32)
    for value in params.values():
        half = value.dtype == torch.float16
        bits = value.numpy().reshape(len(value), -1).view(np.uint16 if half else np.uint32)
        most = np.empty(len(bits), bits.dtype)
        largest_bits(bits, most.dtype.type(0x7FFF if half else 0x7FFFFFFF), most)
        size = most.view(np.float16 if half else np.float32).astype(np.float32)
        np.maximum(found, np.where(np.isnan(size), np.inf, size), out=found)
    return found


def sound(kept: Update) -> NDArray[np.bool_]:
    """Whether what each client keeps beside rows is finite and, if it is of the model, not above `LARGEST`, bool[C]."""
    found = np.ones(kept.n_clients, bool)
    for name, value in kept.values.items():
        if value.is_floating_point():
            size = sizes({name: value})
            found &= np.isfinite(size) if "/" in name else size <= LARGEST  # moments may be larger
    return found


def refused(sent: NDArray[np.float32], own: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Whether receivers with largest numbers f32[n] refuse what has these, f32[n]."""
    return np.asarray(~(sent <= np.minimum(LARGEST, TIMES * np.maximum(own, 1))))


def fitting(components: Sequence[Component], n_users: int, n_items: int, memory: int = TABLE) -> int:
    """How many models fit into so many bytes of working memory."""
    rows = {"per_item": n_items, "per_user": n_users, "dense": 1}
    numbers = sum(part.size * rows[part.storage] for part in components)
    return max(1, memory // (4 * numbers))
