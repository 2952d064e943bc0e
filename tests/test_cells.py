"""Names of questions: no attribute takes that of another question."""

from __future__ import annotations

import pytest

from recleak import cells
from recleak.cells import COMMUNITY, MEMBERSHIP, Ask


@pytest.mark.parametrize("name", [MEMBERSHIP, COMMUNITY])
def test_a_column_called_as_a_question_is_another_question(name: str) -> None:
    asked = Ask("lists", {"use": "from-lists"}, attribute=name).question
    assert asked not in (MEMBERSHIP, COMMUNITY)
    assert name in asked
    assert Ask("lists", {"use": "from-lists"}, attribute="gender").question == "gender"


def test_what_was_graded_otherwise_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of attributes; which items are own is graded as it was."""
    gender, items = Ask("lists", {"use": "from-lists"}, attribute="gender"), Ask("lists", {"use": "from-lists"})
    before = gender.key, items.key
    monkeypatch.setattr(cells, "_GUESSED", cells._GUESSED - 1)
    assert gender.key != before[0]
    assert items.key == before[1]
