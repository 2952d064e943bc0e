"""What a defense spends of a client's privacy: facts about its mechanism, stated by the mechanism itself.

`Defense.spends` returns such statements, a chain those of its parts in order. They hold no epsilon of a run: that
depends on what stands before, on what is shared and on how often a client takes part. `recleak.accounting` puts them
together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Bound:
    """Nothing is random, but what leaves is at most so large in the l2 norm, whatever the client's data is.

    per "client": all its components together; "component": each; "row": each item row, and each other component;
    "unit": as `ClipByNorm` says; "number": each number.
    """

    mechanism: str
    limit: float
    per: Literal["client", "component", "row", "unit", "number"]
    components: tuple[str, ...] | None = None  # None: all
    keeps: bool = True  # bounds that held before hold after it


@dataclass(frozen=True)
class Noise:
    """Independent noise on every number of what leaves."""

    mechanism: str
    law: Literal["gaussian", "laplace"]
    scale: float | Mapping[str, float]  # by component; those not named get none
    every_row: bool  # of item tables; else on the rows that are sent anyway

    def of(self, component: str) -> float:
        """The scale for a component; 0: no noise."""
        return self.scale.get(component, 0.0) if isinstance(self.scale, Mapping) else self.scale


@dataclass(frozen=True)
class NoisyValues:
    """Every number that a client would have, not that it changed, is clipped to [-limit, limit] and gets noise."""

    mechanism: str
    law: Literal["gaussian", "laplace"]
    limit: float
    scale: Callable[[str], float]  # by component
    every_row: bool  # of item tables; else the rows that are sent anyway
    each_epoch: bool  # after each local epoch, and the last of them is sent; else once, before sending


@dataclass(frozen=True)
class NoisyFeatures:
    """A client's user features are replaced, once and for all, by a draw that is epsilon-private whatever they are."""

    mechanism: str
    epsilon: float


@dataclass(frozen=True)
class FlippedLabels:
    """The label of each item that a client trains on is flipped with chance 1 / (1 + e^epsilon), once and for all."""

    mechanism: str
    epsilon: float


@dataclass(frozen=True)
class NoisyGradients:
    """At every step the gradient of each example is clipped to an l2 norm of `clip`, over all that is trained, and the
    sum over the batch gets Gaussian noise of standard deviation `noise_multiplier` times `clip` on every number, the
    rows of all items included. What a client sends and keeps is computed from these sums and nothing else of its data,
    but for how many examples there are.
    """

    mechanism: str
    clip: float
    noise_multiplier: float


@dataclass(frozen=True)
class NoGuarantee:
    """No differential privacy follows from the mechanism, and why, in words that need no formula."""

    mechanism: str
    why: str
    keeps: bool = True  # bounds on what leaves that held before hold after it


Spending = Bound | Noise | NoisyValues | NoisyGradients | NoisyFeatures | FlippedLabels | NoGuarantee
