"""Objective perturbation: a random linear term of the loss for every item. DPMF on the clients of a federation.

Hua, Xia and Zhong, "Differentially Private Matrix Factorization", IJCAI 2015, after Chaudhuri, Monteleoni and Sarwate
2011, "Differentially Private Empirical Risk Minimization". APM compares itself with it as F-DPMF.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, isfinite

import numpy as np
import torch
from scipy import special
from torch import Tensor

from recleak.defenses.base import Defense, hooks, parts_with_streams
from recleak.defenses.spending import NoGuarantee, Spending
from recleak.streams import Streams
from recleak.update import Update


@dataclass(frozen=True)
class ObjectivePerturbation(Defense):
    """Add eta_j . v_j to the sum of a client's losses for every item j that it holds, with eta_j drawn once for all.

    The density of eta_j is proportional to exp(-epsilon ||eta_j|| / Delta): a direction drawn uniformly, and a length
    from Gamma(d, Delta / epsilon). A client's loss is the mean over n examples, so the gradient of its row v_j gets
    eta_j / n, the same at every step of every round; a real device has to keep what it drew. A hook does not see how
    many examples a client has: `examples` is n, one public number that all clients use.

    **Delta.** An example with label r and score s = u . v_j adds (sigmoid(s) - r) u to the gradient of v_j. With
    |sigmoid(s) - r| <= `residual` (1 for cross-entropy and labels 0 and 1) and ||u|| <= `user_norm`, an example that is
    added, taken away or has the other label moves the gradient, at the same u and v_j, by at most
    Delta = residual * user_norm. So the unit is one example: one interaction brings as many more as it has negatives.

    **This gives no guarantee here.** The theorem is for item vectors that minimize the perturbed objective exactly, for
    fixed user vectors with bounded norms, a strongly convex loss, and one release. Here a few steps are made from what
    was received, user vectors are trained and nothing bounds them (`user_norm` is taken on trust), every round is one
    more release, and an item that a client does not hold has no term, so that its held items show. Nor is a step under
    Adam the larger the larger a gradient is. `epsilon=inf` adds nothing.
    """

    epsilon: float
    examples: int
    residual: float = 1.0
    user_norm: float = 1.0
    components: tuple[str, ...] = ("item",)

    def __post_init__(self) -> None:
        if not self.epsilon > 0:  # NaN too
            raise ValueError(f"Got epsilon={self.epsilon}, expected a number above 0, or inf to add nothing.")
        if self.examples < 1:
            raise ValueError(f"Got examples={self.examples}, expected how many examples a client has, at least 1.")
        for name in ("residual", "user_norm"):
            if not (isfinite(value := getattr(self, name)) and value > 0):
                raise ValueError(f"Got {name}={value}, expected a finite number above 0.")

    @property
    def idle(self) -> frozenset[str]:
        """All, if nothing is added."""
        return frozenset({"gradient"} if self.epsilon == inf else ())

    @property
    def scale(self) -> float:
        """Delta / (epsilon n): the scale of the noise on a gradient."""
        return self.residual * self.user_norm / (self.epsilon * self.examples)

    def gradient(self, gradient: Update, streams: Streams) -> Update:
        """The gradient plus eta_j / n in the row of every item j."""
        if self.epsilon == inf:
            return gradient
        noisy = {
            name: rows + self.vectors(gradient, name, streams)
            for name, rows in gradient.rows.items()
            if name in self.components
        }
        return replace(gradient, rows={**gradient.rows, **noisy})

    def vectors(self, update: Update, name: str, streams: Streams) -> Tensor:
        """eta_j / n for each row of an item table, f32[N, *shape]; `streams` are those that the hook gets."""
        return self.scale * _remembered(update, name, streams.lasting()).to(update.rows[name])

    def component_names(self) -> Iterable[str]:
        """The item tables."""
        return self.components

    def spends(self) -> tuple[Spending, ...]:
        """No guarantee."""
        why = (
            f"An epsilon of {self.epsilon:g} is claimed, for one example, if item vectors minimized the perturbed loss "
            f"exactly, once, with user vectors fixed and no longer than {self.user_norm:g}. Here a few steps are made, "
            "user vectors are trained and may be longer, every round tells more, and which items are touched shows."
        )
        return (NoGuarantee(repr(self), why),)


def linear_terms(defense: Defense, streams: Streams) -> tuple[tuple[ObjectivePerturbation, Streams], ...] | None:
    """The mechanisms that a defense's gradient hook consists of, each with its streams, without those that add nothing;
    None if it has one of another kind.

    `streams` are those that the hook gets. A subclass may compute something else, so it is of another kind.
    """
    terms: list[tuple[ObjectivePerturbation, Streams]] = []
    for part, own in parts_with_streams(defense, streams):
        if type(part) is ObjectivePerturbation:
            terms += [(part, own)] if part.epsilon < inf else []
        elif "gradient" in hooks(part):
            return None
    return tuple(terms)


def radial(update: Update, name: str, streams: Streams) -> Tensor:
    """A vector for each row of an item table, f32[N, *shape], with density proportional to exp(-||vector||).

    The length is the Gamma(d) quantile of a uniform number, taken as the distribution function of a normal one: that
    one is fine in both tails. For d = 1 this is the Laplace distribution.
    """
    shape = update.rows[name].shape
    toward = streams.normal(f"{name} direction", update.owner, update.item, tuple(shape[1:])).unsqueeze(-1).flatten(1)
    lot = streams.normal(f"{name} length", update.owner, update.item)
    length = torch.from_numpy(special.gammaincinv(toward.shape[1], special.ndtr(lot.double().cpu().numpy())))
    norm = toward.double().square().sum(1).sqrt()
    return (toward * (length.to(norm.device) / norm).float().unsqueeze(1)).reshape(shape)


def _remembered(update: Update, name: str, lasting: Streams) -> Tensor:
    """What `radial` draws, client by client: the same at every step of a visit, so that it is drawn once."""
    if lasting.key is None:  # of the operating system: nothing to look it up by
        return radial(update, name, lasting)
    item, offset, shape = update.item.cpu().numpy(), update.offset.tolist(), tuple(update.rows[name].shape[1:])
    parts = [
        _of_client(int(key), lasting.path, name, item[start:stop].tobytes(), shape)
        for key, start, stop in zip(lasting.key, offset[:-1], offset[1:], strict=True)
    ]
    return torch.cat(parts) if parts else torch.zeros_like(update.rows[name])


@lru_cache(maxsize=256)  # clients: more than train side by side
def _of_client(key: int, path: tuple[str, ...], name: str, items: bytes, shape: tuple[int, ...]) -> Tensor:
    """The vectors of one client for its items, f32[K, *shape]."""
    item = torch.from_numpy(np.frombuffer(items, np.int64).copy())
    rows = {name: torch.zeros(len(item), *shape)}
    client = Update(torch.zeros(1, dtype=torch.int64), {}, rows, item, torch.tensor([0, len(item)]), 0)
    return radial(client, name, Streams(1, np.array([key], np.uint64), path))
