"""Lies in the examples: what a client trains on is not quite what it did.

Both change the examples before training, in the same way in every round: lies that are told anew each time average out.
A simulation gets that from the streams of the `data` hook; a real device (`Streams.from_os`) calls the hook once and
keeps the result. Both are for losses on single examples (bce).

Examples are shuffled before training unless `LocalTraining.shuffle` is off. Then their order gives true items away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, inf, isfinite

import numpy as np
import torch
from numpy.typing import NDArray

from recleak.defenses.base import Defense
from recleak.defenses.spending import FlippedLabels, NoGuarantee, Spending
from recleak.errors import ConfigError
from recleak.streams import Streams
from recleak.training.local import LocalData

_BLOCK = 1 << 20  # lots held at a time, or those of one client


@dataclass(frozen=True)
class RandomizedLabels(Defense):
    """Flip the label of each item that a client trains on with probability 1 / (1 + e^epsilon), once for all rounds.

    Randomized response (Warner 1965), permanent as in RAPPOR (Erlingsson et al. 2014). An item that occurs more than
    once is flipped in all places or in none. A client may be left without a positive. `epsilon=inf` changes nothing.

    **The guarantee.** Given which items a client trains on and how often each occurs in every round, its label of any
    one item is epsilon-differentially private against whoever sees all its uploads of all rounds: no upload is more
    than e^epsilon times as likely under one label of the item as under the other. For k items at once it is k epsilon.
    So epsilon is for one label while all others stay as they are. But the number of examples tells how many items of
    its own a client has, and what it may have had instead differs by a swap of two labels: there the ratio is at most
    e^(2 epsilon).

    **What it does not cover.** The items themselves: they stay visible, and they are not independent of the labels. All
    positives are among them, an item that occurs twice is a negative, and with `LocalTraining.resample` the items that
    come back in every round are the positives: then there is nothing left to protect. The guarantee also needs that
    labels enter an upload through the randomized ones only. That is so in training: user vectors, optimizer moments,
    the client's weight in a mean and the star graph of graph models (`own` items are those labelled positive, degree
    and neighbors follow) are made from what this hook returns. It is not so for user features that were computed from
    interactions (`data.features`). Nor for what a client sends after scoring: personal scores of graph models read its
    true history (`training.personal`), another graph than the one that was trained on. Recommendations of such models
    are not private; those of models that read no neighbors are, as far as true items are not filtered out of them.

    Draws have 52 bits: above an epsilon of about 36 no label is ever flipped.
    """

    epsilon: float

    def __post_init__(self) -> None:
        if not self.epsilon > 0:  # NaN too
            raise ValueError(f"Got epsilon={self.epsilon}, expected a number above 0, or inf to change nothing.")

    @property
    def flips(self) -> float:
        """1 / (1 + e^epsilon)."""
        return exp(-self.epsilon) / (1 + exp(-self.epsilon))

    def spends(self) -> tuple[Spending, ...]:
        """Randomized response of labels, drawn once."""
        return (FlippedLabels(repr(self), self.epsilon),)

    def data(self, data: LocalData, streams: Streams) -> LocalData:
        """The same examples with randomized labels."""
        if self.epsilon == inf:
            return data
        _check_single(self, data)
        wrong = (data.label != 0) & (data.label != 1)
        if wrong.any():
            raise ConfigError(f"Got label {data.label[wrong][0]} for {self!r}, expected 0 or 1.")
        pair, place = np.unique(data.owner * data.n_items + data.item, return_inverse=True)
        position, item = np.divmod(pair, data.n_items)
        lot = streams.uniform("flip", torch.from_numpy(position), torch.from_numpy(item)).numpy()  # f32[pairs]
        flip = (lot.astype(np.float64) <= self.flips)[place]
        return replace(data, label=np.where(flip, 1 - data.label, data.label))


@dataclass(frozen=True)
class FakeItems(Defense):
    """Add positives that a client never had: `per_positive` times as many as it has, uniformly among all other items.

    Others are those not among its examples; a client with too few of them gets all. Numbers are rounded, halves up;
    `per_positive=0` changes nothing. FR-FMSS (Lin et al. 2021) sends such items so that a server cannot tell which ones
    a client interacted with; BlurMe (Weinsberg et al. 2012) adds them to hide an attribute.

    **There is no guarantee**: an adversary who knows which items are popular, or which go together, tells uniform fakes
    from tastes. Fakes are the same in every round as long as the other examples are. With `LocalTraining.resample`, a
    fake that is drawn as a negative of a round is not added in that round, so over many rounds it can be told apart.
    In training, graph models take fakes for neighbors; personal scores read the true history (`training.personal`).

    Each call draws a lot for every client and item, C * I; an item keeps its lot whatever the other examples are.
    """

    per_positive: float

    def __post_init__(self) -> None:
        if not (isfinite(self.per_positive) and self.per_positive >= 0):
            raise ValueError(
                f"Got per_positive={self.per_positive}, expected a finite number of at least 0 (0: no fake item)."
            )

    @property
    def fakes(self) -> float:
        """`per_positive`: fewer for a client that runs out of other items."""
        return self.per_positive

    def spends(self) -> tuple[Spending, ...]:
        """No guarantee: what is real is sent as before."""
        why = (
            "Fake items stand beside the real ones, and every real one is still there: an item that a client does not "
            "touch is certainly not its own, and who knows tastes or popularity tells fakes from the rest."
        )
        return (NoGuarantee(repr(self), why),)

    def data(self, data: LocalData, streams: Streams) -> LocalData:
        """The examples, and after those of each client its fakes."""
        if self.per_positive == 0:
            return data
        _check_single(self, data)
        pair = data.owner * data.n_items + data.item
        positives = np.bincount(np.unique(pair[data.label > 0]) // data.n_items, minlength=len(data.client))
        wanted = np.floor(self.per_positive * positives + 0.5)  # f64[C]
        step = max(1, _BLOCK // data.n_items)
        parts = [
            _others(data, np.arange(start, min(start + step, len(wanted))), wanted[start : start + step], streams)
            for start in range(0, len(wanted), step)
        ]
        fake = np.concatenate([np.empty(0, np.int64), *parts])  # i64[F]: position * I + item, ascending
        owner, item = np.divmod(fake, data.n_items)
        place = data.offset[owner + 1]
        return replace(
            data,
            item=np.insert(data.item, place, item),
            label=np.insert(data.label, place, np.float32(1)),
            offset=data.offset + np.searchsorted(owner, np.arange(len(data.offset))),
        )


def _others(
    data: LocalData, position: NDArray[np.int64], wanted: NDArray[np.float64], streams: Streams
) -> NDArray[np.int64]:
    """For each of a range of clients, the `wanted` items outside its examples with the smallest lots, as keys."""
    shape = len(position), data.n_items
    who, item = (
        torch.from_numpy(each.reshape(-1)) for each in np.broadcast_arrays(position[:, None], _range(shape[1]))
    )
    lot = streams.uniform("fake", who, item).numpy().reshape(shape)
    examples = slice(data.offset[position[0]], data.offset[position[-1] + 1])
    lot[data.owner[examples] - position[0], data.item[examples]] = np.inf
    number = np.minimum(wanted, (lot < np.inf).sum(axis=1)).astype(np.int64)  # i64[b]
    first = np.argsort(lot, axis=1, kind="stable")[:, : number.max()]
    row, column = np.nonzero(_range(first.shape[1]) < number[:, None])
    return np.sort(position[row] * data.n_items + first[row, column])


def _range(stop: int) -> NDArray[np.int64]:
    return np.arange(stop, dtype=np.int64)


def _check_single(defense: Defense, data: LocalData) -> None:
    if data.against is not None:
        raise ConfigError(
            f"Got pairs of items (a pairwise loss) for {defense!r}, expected single examples with labels.\n"
            "  Train with loss='bce'."
        )
