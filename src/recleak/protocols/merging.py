"""Merges of what nodes of a gossip receive, many nodes at once: a gather and a weighted sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.kernels_gmf import merge_models
from recleak.protocols.mail import Mail
from recleak.update import NodeParams

Merging = Literal["pairwise", "together"]


def waves(arrivals: Mail, merging: Merging) -> Iterator[Mail]:
    """Messages that are merged at once: the first of each receiver, then the second; or all of them."""
    order = np.argsort(arrivals.receiver, kind="stable")
    sorted_ = arrivals.select(order)
    if merging == "together":
        if len(order):
            yield sorted_
        return
    _, first, count = np.unique(sorted_.receiver, return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(first, count)
    for number in range(int(count.max(initial=0))):
        yield sorted_.select(rank == number)


def shares(wave: Mail, nodes: NDArray[np.int64], message: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """What part of each sum a message is, and the node's own parameters, from their weights (eq. 8).

    f32[n], f32[C] -> f32[n], f32[C]. Where no weight is above 0, all count alike.
    """
    place = torch.from_numpy(np.searchsorted(nodes, wave.receiver))
    total = own.clone().index_add_(0, place, message)
    equal = total <= 0  # nothing is good for anything yet
    message, own = torch.where(equal[place], 1.0, message), torch.where(equal, 1.0, own)
    total = own.clone().index_add_(0, place, message)
    return message / total[place], own / total


def merge_wave(
    params: NodeParams,
    sent: Mapping[int, NodeParams],
    wave: Mail,
    nodes: NDArray[np.int64],
    share: Tensor,
    rest: Tensor,
) -> None:
    """Of nodes in ascending order value = rest value + the sum over their messages of share times what was sent.

    In place; the wave is in the order of its receivers, and `sent` has by tick what all nodes sent in it.
    """
    if next(iter(params.values())).dtype == torch.float16:
        _merge_halves(params, sent, wave, nodes, share, rest)
        return
    n_users = len(next(iter(params.values())))
    for tick, mine in wave.by_tick():
        messages = wave.select(mine)
        offset = np.searchsorted(messages.receiver, np.append(nodes, n_users))
        for name, value in params.items():
            own, theirs = (each.numpy().reshape(n_users, -1) for each in (value, sent[tick][name]))
            merge_models(own, theirs, nodes, offset, messages.sender, rest.numpy(), share[mine].numpy())
        rest = torch.ones_like(rest)  # its own part is counted once


def _merge_halves(
    params: NodeParams,
    sent: Mapping[int, NodeParams],
    wave: Mail,
    nodes: NDArray[np.int64],
    share: Tensor,
    rest: Tensor,
) -> None:
    """The same in half precision, message by message in place: a running mean, rounded after each.

    Nothing is copied to float32, which would take three times the memory of a node's parameters.
    """
    weight = dict(zip(nodes.tolist(), rest.tolist(), strict=True))  # of what is in a mean so far
    mail = (each.tolist() for each in (wave.sent, wave.sender, wave.receiver))
    for tick, sender, receiver, part in zip(*mail, share.tolist(), strict=True):
        if not part:
            continue
        weight[receiver] += part
        for name, value in params.items():
            value[receiver].lerp_(sent[tick][name][sender], part / weight[receiver])
