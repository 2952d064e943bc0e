"""Contract suites that the tests of a plug-in inherit. They need pytest and hypothesis."""

from recleak.testing.attacks import AttackContract, Case, planted_items, unrelated_items
from recleak.testing.defenses import DefenseContract, NoiseLaw, example_update, failures

__all__ = [
    "AttackContract",
    "Case",
    "DefenseContract",
    "NoiseLaw",
    "example_update",
    "failures",
    "planted_items",
    "unrelated_items",
]
