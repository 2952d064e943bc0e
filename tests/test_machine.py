"""Ctrl-C reaches us wherever it comes."""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from recleak.machine import interrupts_arrive


class Clearing:
    """Ctrl-C comes while Python clears this away: what is raised there, Python only prints."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def clear_away() -> None:
    Clearing()
    gc.collect()
    for _ in range(500):
        time.sleep(0.01)


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C is heard as in any process, whoever started this one or ran in it before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_an_interrupt_while_python_clears_away_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_arrive():
        clear_away()
    assert "Exception ignored" not in capsys.readouterr().err


class Broken:
    """Clearing this away fails."""

    def __del__(self) -> None:
        raise ValueError("shown")


def test_other_errors_while_clearing_are_shown_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: shown.append(lost.exc_type))
    before = sys.unraisablehook
    with interrupts_arrive():
        Broken()
        gc.collect()
    assert shown == [ValueError]
    assert sys.unraisablehook is before
