"""Early-stop: training ends as soon as a certain utility is there. A rival of PARD's (Zhao et al., section IV-A4).

What a user's vector tells grows while a system trains, so who trains less tells less. Whoever runs the training knows
the defense (`protocols.stopping.Reached`, or an audit); on a device nothing is done. That utility is of items that
users hold out: private data decide when training ends, which no ledger accounts for.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from recleak.defenses.base import Chain, Defense
from recleak.defenses.spending import NoGuarantee, Spending
from recleak.errors import ConfigError
from recleak.protocols.stopping import Reached


@dataclass(frozen=True)
class EarlyStop(Defense):
    """Training ends at the first look at validation items, every so many rounds, that shows at least this utility."""

    level: float  # Hit@10, in an audit
    every: int = 5

    def __post_init__(self) -> None:
        if not isfinite(self.level):
            raise ConfigError(f"level is {self.level}, expected a finite number, such as a Hit@10 of 0.4.")
        if self.every < 1:
            raise ConfigError(f"every is {self.every}, expected at least 1 round between checks.")

    @property
    def rule(self) -> Reached:
        """When training ends."""
        return Reached(self.level, self.every)

    def spends(self) -> tuple[Spending, ...]:
        """No guarantee; what others promise for each use stands, but for what is tuned on validation items."""
        why = (
            "Training ends early, and what was sent until then is sent as it is: nothing is bounded or random. When it "
            "ends is decided on users' private validation items, which no guarantee of another mechanism accounts for."
        )
        return (NoGuarantee(repr(self), why, keeps=True),)


def early_stop_of(defense: Defense) -> EarlyStop | None:
    """The first one, also in a chain."""
    if isinstance(defense, Chain):
        return next((found for each in defense.defenses if (found := early_stop_of(each)) is not None), None)
    return defense if isinstance(defense, EarlyStop) else None
