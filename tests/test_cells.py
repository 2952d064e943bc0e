"""Names of questions: no attribute takes that of another question."""

from __future__ import annotations

import pytest

from recleak.cells import COMMUNITY, MEMBERSHIP, Ask


@pytest.mark.parametrize("name", [MEMBERSHIP, COMMUNITY])
def test_a_column_called_as_a_question_is_another_question(name: str) -> None:
    asked = Ask("lists", {"use": "from-lists"}, attribute=name).question
    assert asked not in (MEMBERSHIP, COMMUNITY)
    assert name in asked
    assert Ask("lists", {"use": "from-lists"}, attribute="gender").question == "gender"
