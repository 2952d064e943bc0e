"""Noise on the gradients of local training: DP-SGD, and what published code has in its place."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recleak.defenses.base import Defense, hooks, parts_with_streams
from recleak.defenses.noise import Rows
from recleak.defenses.spending import NoGuarantee, NoisyGradients, Spending
from recleak.epsilon import noise_multiplier_for
from recleak.streams import Streams, places
from recleak.update import Update


@dataclass(frozen=True)
class DPSGD(Defense):
    """Clip the gradient of every example, and add Gaussian noise to their sum (Abadi et al. 2016, algorithm 1).

    At each step of a client the gradient g_e of each example e of its batch is scaled to an l2 norm of at most `clip`,

        g = (sum over e of g_e min(1, clip / ||g_e||) + N(0, (noise_multiplier clip)^2)) / size of the batch,

    and g goes to the optimizer. It is done on the device, so the guarantee holds against whoever sees its uploads.

    **What is covered.** The norm is over all components that are trained, and all of them get noise: those that are
    kept too, because what a client keeps enters its next uploads. Every number of an item table gets noise, also the
    rows of items that the client never had: clients hold all rows while they train (memory [C, I, d]), and send all.
    Moments of an optimizer, weight decay, penalties and later hooks work on noisy numbers and public ones.

    **The unit is one example**: an item with its label, or with a pairwise loss an item and the one it is preferred to.
    An interaction brings 1 + negatives of them (pairwise: negatives); the ledger has a row for it. How many examples a
    client has is not hidden: it divides by the size of its batch. What a model reads beside examples, such as user
    features, is not covered; a model that reads all items of a client for each score (a graph) is refused.

    **Batches** are those of shuffled epochs, not drawn by lot: an example is in one batch of each epoch, so that an
    epoch is one use of the noise, and nothing is gained from small batches.

    `noise_multiplier=0` clips only. `DPSGD.calibrated` finds it for an epsilon.
    """

    noise_multiplier: float
    clip: float = 2.0

    def __post_init__(self) -> None:
        _require("clip", self.clip, above=True)
        _require("noise_multiplier", self.noise_multiplier)

    @classmethod
    def calibrated(
        cls, epsilon: float, delta: float, *, uploads: int, epochs: int = 1, examples: int = 1, clip: float = 2.0
    ) -> DPSGD:
        """With the least noise for (epsilon, delta) over all uploads of a client, each after so many local epochs.

        `examples`: how many are hidden together; an interaction brings 1 + negatives.
        """
        return cls(examples * noise_multiplier_for(epsilon, delta, uploads * epochs), clip)

    @property
    def example_bound(self) -> float:
        """The clip."""
        return self.clip

    @property
    def holds_every_row(self) -> bool:
        """Always: which rows move would tell the items."""
        return True

    @property
    def idle(self) -> frozenset[str]:
        """Without noise, all but the clipping."""
        return frozenset(() if self.noise_multiplier else ("batch_sum",))

    def batch_sum(self, total: Update, streams: Streams) -> Update:
        """The sum plus noise on every number."""
        return _with_noise(total, self.noise_multiplier * self.clip, streams)

    def spends(self) -> tuple[Spending, ...]:
        """Gaussian noise on sums of clipped gradients."""
        return (NoisyGradients(repr(self), self.clip, self.noise_multiplier),)


@dataclass(frozen=True)
class ClippedMeanNoise(Defense):
    """Clamp every number of a batch's mean gradient to [-limit, limit], and add N(0, std^2): what CDA's code runs.

    The paper (Belal et al. 2023) describes DP-SGD with a clip of 2; its published training step has these defaults, and
    its optimizer then works on noise on the whole table (rows "all"). rows "touched": on the rows of the client's
    examples only. **This gives no guarantee**: see `spends`.
    """

    limit: float = 1.0
    std: float = 4.84
    rows: Rows = "all"

    def __post_init__(self) -> None:
        _require("limit", self.limit, above=True)
        _require("std", self.std)
        if self.rows not in get_args(Rows):
            raise ValueError(f"Got rows={self.rows!r}, expected one of {', '.join(get_args(Rows))}.")

    @property
    def holds_every_row(self) -> bool:
        """If all rows get noise."""
        return self.rows == "all" and self.std > 0

    def gradient(self, gradient: Update, streams: Streams) -> Update:
        """The clamped gradient plus noise."""
        clamped = gradient.map(lambda name, tensor, owner: tensor.clamp(-self.limit, self.limit))
        return _with_noise(clamped, self.std, streams)

    def spends(self) -> tuple[Spending, ...]:
        """No guarantee."""
        why = (
            "It clamps the mean gradient of a batch number by number, not the gradients of single examples by their "
            "norm. What one example changes is bounded for each number alone, so it grows with how many numbers there "
            f"are, while the noise of {self.std:g} is chosen as for one: the epsilon of DP-SGD does not follow."
        )
        return (NoGuarantee(repr(self), why),)


def noise_terms(defense: Defense, streams: Streams) -> tuple[tuple[float, Streams], ...] | None:
    """The standard deviations of the normal noise that a defense adds to every number of a sum of clipped gradients,
    each with its streams; None if it does something else to a sum or a gradient.

    `streams` are those that the hook `batch_sum` gets. A subclass may compute something else, so it is another kind.
    """
    terms: list[tuple[float, Streams]] = []
    for part, own in parts_with_streams(defense, streams):
        if type(part) is DPSGD:
            terms += [(part.noise_multiplier * part.clip, own)] if part.noise_multiplier else []
        elif hooks(part) & {"batch_sum", "gradient"}:
            return None
    return tuple(terms)


def noise_keys(
    terms: tuple[tuple[float, Streams], ...], streams: Streams, names: tuple[str, ...], steps: int
) -> tuple[NDArray[np.float32], NDArray[np.uint64], NDArray[np.uint64]]:
    """For compiled loops that draw the noise of `noise_terms` as the hook does: the standard deviations, f32[T]; what
    draws for each component begin with, u64[T, components]; and the keys of clients at each step, u64[steps, C].
    """
    scale = np.array([std for std, _ in terms], np.float32)
    state = np.array([[each.state("normal", name) for name in names] for _, each in terms], np.uint64)
    keys = [streams.at(step).key for step in range(steps)] if terms else np.zeros((steps, streams.n_clients))
    return scale, state.reshape(len(terms), len(names)), np.array(keys, np.uint64)


def _with_noise(update: Update, std: float, streams: Streams) -> Update:
    """An update plus N(0, std^2) on every number."""

    def add(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
        noisy = tensor.clone()
        streams.add_normal(noisy, std, name, *places(update, name))
        return noisy

    return update.map(add) if std > 0 else update


def _require(name: str, value: float, *, above: bool = False) -> None:
    """An error unless a number is finite and at least 0, or above 0."""
    if not isfinite(value) or value < 0 or (above and value == 0):
        raise ValueError(f"Got {name}={value}, expected a finite number {'above' if above else 'of at least'} 0.")
