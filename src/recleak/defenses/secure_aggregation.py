"""Secure aggregation: the receiver learns a sum, not its terms."""

from __future__ import annotations

from dataclasses import dataclass

from recleak.defenses.base import Defense
from recleak.defenses.spending import NoGuarantee, Spending


@dataclass(frozen=True)
class SecureAggregation(Defense):
    """The receiver gets the sum of a round's uploads, who took part, and with `touched-mean` how many sent each row.

    A simulation of the ideal functionality (Bonawitz et al. 2017): there is **no cryptography here**, no key exchange,
    no dropout of clients and no malicious party; it protects no real deployment. It shows what an adversary still
    learns from the sum when all of that works. A sum over one client is that client's upload; so is a row of the sum
    that one client alone sent: an item nobody else touched, or its own row of a shared user table.
    """

    @property
    def secure_aggregation(self) -> bool:
        """Always."""
        return True

    def spends(self) -> tuple[Spending, ...]:
        """No guarantee: the sum is exact."""
        why = (
            "It hides who sent what, but the sum is exact: how well a client hides in it depends on the others, and "
            "what one client alone touched is in it as it was sent. Noise against the aggregator is not part of it."
        )
        return (NoGuarantee(repr(self), why),)
