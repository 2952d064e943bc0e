"""BlurMe: add items that users of another class have, so that a history speaks less clearly of its user's class.

Weinsberg et al. 2012, "BlurMe: Inferring and Obfuscating User Gender Based on Ratings".
Axis letters: C clients, U users, I items, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from recleak.data.features import classes_of
from recleak.data.interactions import Interactions
from recleak.defenses.base import Chain, Defense
from recleak.defenses.spending import NoGuarantee, Spending
from recleak.errors import ConfigError
from recleak.streams import Streams
from recleak.training.local import LocalData

Strategy = Literal["sampled", "greedy"]


@dataclass(frozen=True, eq=False)
class BlurMe(Defense):
    """Add `extra` times as many items as a user has, taken from those that speak for another class than its own.

    Which items speak for a class is read off a logistic regression on everybody's histories; of more than two classes
    each user gets one of the others by lot. "sampled": items are drawn with chances in proportion to their weight;
    "greedy": those with the largest weight. Users whose class is not known stay as they are. It needs to know weights
    and each user's class: `fitted` computes both from data, and an audit calls it.

    **No guarantee**: every real item is still there, and who knows the strategy knows which items were added to whom.
    """

    attribute: str = "gender"
    extra: float = 0.1
    strategy: Strategy = "sampled"
    weight: Tensor | None = None  # f32[K, I]: how far an item speaks for a class
    label: Tensor | None = None  # i64[U], -1: unknown

    def __post_init__(self) -> None:
        if not (isfinite(self.extra) and self.extra >= 0):
            raise ValueError(f"Got extra={self.extra}, expected a finite number of at least 0 (0: nothing is added).")
        if self.strategy not in get_args(Strategy):
            raise ValueError(f"Got strategy={self.strategy!r}, expected one of {', '.join(get_args(Strategy))}.")

    def __repr__(self) -> str:
        return f"BlurMe(attribute={self.attribute!r}, extra={self.extra:g}, strategy={self.strategy!r})"

    @property
    def fakes(self) -> float:
        """`extra`."""
        return self.extra

    @property
    def idle(self) -> frozenset[str]:
        """All, if nothing is added."""
        return frozenset(() if self.extra else ("data",))

    def fitted(self, train: Interactions) -> BlurMe:
        """The same with the weights and classes of these data."""
        label, names = classes_of(train, self.attribute)
        known = np.flatnonzero((label >= 0) & (train.activity > 0))
        if len(np.unique(label[known])) < 2:
            raise ConfigError(f"Got users of one class of {self.attribute} only, expected at least two to blur.")
        fit = LogisticRegression(C=1.0, max_iter=200).fit(train.matrix()[known], label[known])
        weight = np.zeros((len(names), train.n_items), np.float32)
        weight[fit.classes_] = np.concatenate([-fit.coef_, fit.coef_]) if len(fit.coef_) == 1 else fit.coef_
        return replace(self, weight=torch.from_numpy(weight), label=torch.tensor(label))

    def data(self, data: LocalData, streams: Streams) -> LocalData:
        """The examples, and after those of each client the added ones."""
        if self.extra == 0:
            return data
        if self.weight is None or self.label is None:
            raise ConfigError(f"{self!r} does not know the data, expected weights and classes: `fitted(train)`.")
        if data.against is not None:
            raise ConfigError(f"Got pairs of items for {self!r}, expected single examples with labels.")
        owner, item = self._added(data, streams)
        place = data.offset[owner + 1]
        return replace(
            data,
            item=np.insert(data.item, place, item),
            label=np.insert(data.label, place, np.float32(1)),
            offset=data.offset + np.searchsorted(owner, np.arange(len(data.offset))),
        )

    def _added(self, data: LocalData, streams: Streams) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The position of the client and the item of each addition, ascending by client."""
        weight, label = self.weight, self.label
        if weight is None or label is None:
            raise AssertionError("checked before")
        own = label[torch.from_numpy(data.client)]  # i64[C]
        position = torch.arange(len(own))
        lot = streams.uniform("class", position, torch.zeros_like(position)).numpy()
        classes = len(weight)
        other = np.minimum((lot * (classes - 1)).astype(np.int64), classes - 2)
        target = other + (other >= own.numpy())
        pull = weight[torch.from_numpy(target)].numpy().copy()  # f32[C, I]
        pull[own.numpy() < 0] = 0
        pull[data.owner, data.item] = 0
        if self.strategy == "sampled":  # the largest u^(1 / w): Efraimidis and Spirakis 2006
            who, item = (torch.from_numpy(each.reshape(-1)) for each in np.indices(pull.shape))
            uniform = streams.uniform("item", who, item).numpy().reshape(pull.shape).astype(np.float64)
            rank = np.where(pull > 0, np.log(np.maximum(uniform, 1e-300)) / np.maximum(pull, 1e-12), -np.inf)
        else:
            rank = np.where(pull > 0, pull, -np.inf)
        positives = np.bincount(data.owner[data.label > 0], minlength=len(own))
        wanted = np.minimum(np.floor(self.extra * positives + 0.5), np.isfinite(rank).sum(1)).astype(np.int64)
        first = np.argsort(-rank, axis=1, kind="stable")[:, : max(int(wanted.max(initial=0)), 1)]
        row, column = np.nonzero(np.arange(first.shape[1]) < wanted[:, None])
        return row.astype(np.int64), first[row, column].astype(np.int64)

    def spends(self) -> tuple[Spending, ...]:
        """No guarantee."""
        why = (
            f"Items are added that speak for another {self.attribute}, and every real one is still there. Who knows "
            "how items were chosen can discount them."
        )
        return (NoGuarantee(repr(self), why),)


def unfitted(defense: Defense) -> Defense:
    """The same defense, or chain, without what its parts learned of users: what an adversary may know of it."""
    if isinstance(defense, Chain):
        return replace(defense, defenses=tuple(unfitted(part) for part in defense.defenses))
    return replace(defense, weight=None, label=None) if isinstance(defense, BlurMe) else defense


def fitted_to(defense: Defense, train: Interactions) -> Defense:
    """The same defense, or chain, with what its parts have to know of the data at hand."""
    if isinstance(defense, Chain):
        return replace(defense, defenses=tuple(fitted_to(part, train) for part in defense.defenses))
    return defense.fitted(train) if isinstance(defense, BlurMe) and defense.weight is None else defense
