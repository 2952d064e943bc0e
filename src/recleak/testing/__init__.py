"""Contract suites that the tests of a plug-in inherit. They need pytest and hypothesis."""

from recleak.testing.attacks import AttackContract, Case, planted_items, unrelated_items
from recleak.testing.defenses import DefenseContract, NoiseLaw, example_update, failures
from recleak.testing.models import ModelContract, assert_equals_loop, checkerboard
from recleak.testing.oracle import oracle

__all__ = [
    "AttackContract",
    "Case",
    "DefenseContract",
    "ModelContract",
    "NoiseLaw",
    "assert_equals_loop",
    "checkerboard",
    "example_update",
    "failures",
    "oracle",
    "planted_items",
    "unrelated_items",
]
