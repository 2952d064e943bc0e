"""When a federation stops before its last round: a rule on how utility grows.

The curve is what a model scores on validation items after every few rounds. `Plateau` is how models are trained to
their best; `Reached` is the defense that PARD calls Early-stop: training ends as soon as a certain utility is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recleak.errors import ConfigError

if TYPE_CHECKING:
    from recleak.protocols.federated import FederatedModel


@dataclass(frozen=True)
class Plateau:
    """Stop when the best of the last `patience` checks is no better than what was there before them, by `least`."""

    every: int = 10  # rounds between checks
    patience: int = 3
    least: float = 0.0

    def ended(self, curve: Sequence[float]) -> bool:
        """Whether training is over, given all checks so far."""
        recent, before = curve[-self.patience :], curve[: -self.patience]
        return bool(before) and max(recent) <= max(before) + self.least


@dataclass(frozen=True)
class Reached:
    """Stop at the first check that shows at least this utility."""

    level: float
    every: int = 5

    def ended(self, curve: Sequence[float]) -> bool:
        """Whether training is over, given all checks so far."""
        return bool(curve) and curve[-1] >= self.level


@dataclass(frozen=True)
class Either:
    """Stop when one of two rules says so; checks are those of the first."""

    first: Plateau
    second: Reached

    @property
    def every(self) -> int:
        """Rounds between checks."""
        return self.first.every

    def ended(self, curve: Sequence[float]) -> bool:
        """Whether training is over, given all checks so far."""
        return self.first.ended(curve) or self.second.ended(curve)


Rule = Plateau | Reached | Either


@dataclass(frozen=True, eq=False)
class Stopping:
    """A rule, and what it looks at."""

    rule: Rule
    score: Callable[[FederatedModel], float]

    def __post_init__(self) -> None:
        if self.rule.every < 1:
            raise ConfigError(f"every is {self.rule.every}, expected at least 1 round between checks.")

    def due(self, round: int) -> bool:
        """Whether utility is looked at after so many rounds."""
        return round % self.rule.every == 0
