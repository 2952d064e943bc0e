"""Noise on the features that a client trains with: the first stage of GERAI.

Zhang et al., "Graph Embedding for Recommendation against Attribute Inference Attacks", WWW 2021, section 4.1.
Axis letters: C clients, F columns of features, G features, of which a categorical one has several columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import exp, expm1, inf

import torch
from torch import Tensor

from recleak.defenses.base import Chain, Defense
from recleak.defenses.spending import NoisyFeatures, Spending
from recleak.errors import ConfigError
from recleak.streams import Streams

PER_FEATURE = 2.5  # the epsilon at which a feature is worth keeping (Wang et al. 2019; GERAI, eq. 16)


@dataclass(frozen=True)
class PerturbedFeatures(Defense):
    """Keep a few features of each client, drawn by lot, and randomize these; all others become 0 (Algorithm 2).

    Of G features, max(1, min(G, floor(epsilon / 2.5))) are kept (eq. 16), or `sampled`, each with an equal share of
    epsilon. A numeric one, in [-1, 1], goes through the piecewise mechanism and is multiplied by G over the number
    kept, so that its mean stays what it was. A categorical one is one-hot in columns start to stop (`categorical`, as
    in `UserFeatures.groups`), or all zeros where it is missing; its bits are randomized one by one. Columns in no range
    are numeric. `epsilon=inf` changes nothing.

    The features are drawn once for all rounds; a real device calls the hook once and keeps the result.

    **The guarantee.** All features of a client together are epsilon-differentially private against whoever sees all
    its uploads, given its interactions: which features are kept does not depend on them, the kept ones spend epsilon in
    equal shares, and training reads nothing but the draw. **What it does not cover**: interactions, which training
    reads as they are, and what they tell of an attribute; features that follow from them are no secret either.
    """

    epsilon: float
    categorical: tuple[tuple[int, int], ...] = ()
    sampled: int | None = None  # how many features are kept; None: eq. 16

    def __post_init__(self) -> None:
        if not self.epsilon > 0:  # NaN too
            raise ValueError(f"Got epsilon={self.epsilon}, expected a number above 0, or inf to change nothing.")
        ends = [0, *(end for group in sorted(self.categorical) for end in group)]
        if ends != sorted(ends) or any(start == stop for start, stop in self.categorical):
            raise ValueError(
                f"Got categorical={self.categorical}, expected ranges of columns (start, stop) that do not overlap."
            )
        if self.sampled is not None and self.sampled < 1:
            raise ValueError(f"Got sampled={self.sampled}, expected at least 1, or None for eq. 16.")

    def kept(self, n_features: int) -> int:
        """How many of so many features are kept (eq. 16)."""
        if self.sampled is not None:
            return min(self.sampled, n_features)
        return max(1, min(n_features, int(min(self.epsilon, PER_FEATURE * n_features) // PER_FEATURE)))

    def features(self, features: Tensor, streams: Streams) -> Tensor:
        """Algorithm 2, f32[C, F] -> f32[C, F]."""
        if self.epsilon == inf:
            return features
        group = self._groups(features)  # i64[F]
        bits = torch.zeros(features.shape[1], dtype=torch.bool)
        for start, stop in self.categorical:
            bits[start:stop] = True
        self._require_domain(features, bits)
        n_features = int(group.max()) + 1
        kept = self.kept(n_features)
        share = self.epsilon / kept
        position = torch.arange(len(features))

        def lots(purpose: str, width: int) -> Tensor:
            return streams.uniform(purpose, position, torch.zeros_like(position), (width,))

        rank = lots("kept", n_features).argsort(dim=1, stable=True).argsort(1)  # i64[C, G]: a permutation
        one, other = lots("first", len(group)), lots("second", len(group))
        values = features.cpu()
        numbers = piecewise(values.clamp(-1, 1), share, one, other) * (n_features / kept)
        drawn = torch.where(bits, randomized_bits(values, share, one), numbers)
        return torch.where((rank < kept)[:, group], drawn, 0.0).to(features)

    def spends(self) -> tuple[Spending, ...]:
        """Epsilon, once for all rounds."""
        return (NoisyFeatures(repr(self), self.epsilon),)

    def _groups(self, features: Tensor) -> Tensor:
        """The feature that each column belongs to, i64[F]."""
        width = features.shape[1]
        if any(stop > width for _, stop in self.categorical):
            raise ConfigError(f"Got {width} columns of features, expected enough for categorical={self.categorical}.")
        first = torch.ones(width, dtype=torch.int64)
        for start, stop in self.categorical:
            first[start + 1 : stop] = 0
        return first.cumsum(0) - 1

    def _require_domain(self, features: Tensor, bits: Tensor) -> None:
        """An error for what the guarantee does not hold for."""
        numeric = features[:, ~bits]
        if not bool((numeric.abs() <= 1).all()):
            raise ConfigError(
                f"Got numeric features from {float(numeric.min()):g} to {float(numeric.max()):g}, expected numbers "
                "from -1 to 1.\n  `data.features.user_features` scales them so; `categorical` says which are bits."
            )
        for start, stop in self.categorical:
            block = features[:, start:stop]
            if not bool(((block == 0) | (block == 1)).all()) or bool((block.sum(1) > 1).any()):
                raise ConfigError(
                    f"Columns {start} to {stop} are not one-hot, expected at most a single 1 in each row, else 0.\n"
                    "  Correct `categorical`, whose ranges are those of `UserFeatures.groups`."
                )


def piecewise_ends(epsilon: float) -> tuple[float, float]:
    """C, the largest output of the piecewise mechanism (eq. 12), and the chance of an output near the input.

    C = (e^(epsilon / 2) + 1) / (e^(epsilon / 2) - 1); the chance is e^(epsilon / 2) / (e^(epsilon / 2) + 1).
    """
    away = exp(-epsilon / 2)
    return (1 + away) / -expm1(-epsilon / 2), 1 / (1 + away)


def piecewise(value: Tensor, epsilon: float, choice: Tensor, place: Tensor) -> Tensor:
    """The piecewise mechanism on numbers in [-1, 1]: epsilon-private, and right on average.

    Wang et al. 2019, "Collecting and analyzing multidimensional data with local differential privacy", algorithm 2;
    GERAI, Algorithm 1 and eq. 12 to 14. With a chance of e^(epsilon/2) / (e^(epsilon/2) + 1) the output is uniform in
    [l, r], where l = (C + 1) / 2 value - (C - 1) / 2 and r = l + C - 1, else in the rest of [-C, C]. `choice` and
    `place` are independent uniform numbers in (0, 1], one for each value.
    """
    c, near = piecewise_ends(epsilon)
    low = (c + 1) / 2 * value - (c - 1) / 2
    inside = low + (c - 1) * place
    outside = (c + 1) * place - c  # along [-C, l) and (r, C], laid end to end
    outside = torch.where(outside < low, outside, outside + (c - 1))
    return torch.where(choice <= 1 - near, outside, inside).clamp(-c, c)


def randomized_bits(bits: Tensor, epsilon: float, lot: Tensor) -> Tensor:
    """Bits of one-hot rows, 0.0 or 1.0: a 1 stays with chance 1/2, a 0 becomes 1 with chance 1 / (e^epsilon + 1).

    Optimized unary encoding (Wang et al. 2017, "Locally differentially private protocols for frequency estimation"),
    as GERAI's Algorithm 2 has it. Two rows with their 1 in different places differ in two bits, and a result is at most
    (e^epsilon + 1) / 2 times 2 e^epsilon / (e^epsilon + 1) = e^epsilon times as likely under one as under the other.
    `lot` is a uniform number in (0, 1] for each bit.
    """
    chance = torch.where(bits > 0, 0.5, 1 / (exp(min(epsilon, 700.0)) + 1))
    return (lot <= chance).to(bits.dtype)


def with_categories(defense: Defense, categorical: Iterable[tuple[int, int]]) -> Defense:
    """The same defense, or chain, with these categorical columns where none are given: those of the data at hand."""
    if isinstance(defense, Chain):
        ranges = tuple(categorical)
        return replace(defense, defenses=tuple(with_categories(part, ranges) for part in defense.defenses))
    if isinstance(defense, PerturbedFeatures) and not defense.categorical:
        return replace(defense, categorical=tuple(categorical))
    return defense
