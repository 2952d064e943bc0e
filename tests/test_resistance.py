"""The leak of parts of an upload: found where it is planted, near 0 where there is nothing, not above it by chance."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from recleak.defenses.adaptive_noise import levels_from
from recleak.resistance import measured_leak


def planted(users: int, seed: int) -> tuple[dict[str, NDArray[np.float32]], NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    label = np.arange(users) % 2
    noise = rng.standard_normal((3, users, 40)).astype(np.float32)
    strong, weak, none = (noise[place] + size * label[:, None] for place, size in enumerate((0.6, 0.15, 0.0)))
    return {"user": strong, "item": weak, "head": none}, label


def test_the_planted_order_is_found() -> None:
    parts, label = planted(300, 0)
    leak = measured_leak(parts, label, 2)
    assert leak["user"] > 0.45
    assert leak["user"] > leak["item"] > leak["head"]
    levels = levels_from(leak)
    assert levels["user"] == 0
    assert levels["head"] == 3


def test_a_part_that_tells_by_how_far_it_moves_leaks() -> None:
    """In whatever direction: a line through the cloud would see nothing."""
    _, label = planted(300, 0)
    rows = np.random.default_rng(1).standard_normal((300, 8)).astype(np.float32)
    rows[:, 0] *= np.where(label == 1, 6.0, 0.0)
    rows[:, 1] *= np.where(label == 0, 6.0, 0.0)
    assert measured_leak({"user": rows}, label, 2)["user"] > 0.3


def test_a_part_that_says_nothing_leaks_nothing() -> None:
    """No user is in the fold that guesses it: a learner with 40 columns would know 100 users by heart."""
    found = [measured_leak({"x": planted(100, seed)[0]["head"]}, planted(100, seed)[1], 2)["x"] for seed in range(6)]
    assert abs(float(np.mean(found))) < 0.06
    assert max(found) < 0.25


def test_few_users_are_refused() -> None:
    with pytest.raises(ValueError, match=r"9, 1\] users of each class"):
        measured_leak({"x": np.zeros((10, 3), np.float32)}, np.array([0] * 9 + [1]), 2)
    with pytest.raises(ValueError, match="at least two classes"):
        measured_leak({"x": np.zeros((10, 3), np.float32)}, np.zeros(10, np.int64), 2)
