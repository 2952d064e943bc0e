"""Ctrl-C reaches us wherever it comes; memory that nobody needs goes back."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from recleak.machine import _trim, interrupts_arrive


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


_HOLES = """
import torch
from recleak.machine import give_back

def resident():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

kept, rooms = [], []
for _ in range(60):
    rooms.append(torch.ones(1_200_000))  # 4.8 MB: with the small ones between them, they are not given back
    kept.append(torch.ones(500))
    if len(rooms) > 30:
        rooms.pop(0)
rooms.clear()
before = resident()
give_back()
print(before, resident(), len(kept))
"""


@pytest.mark.skipif(sys.platform != "linux" or _trim() is None, reason="only glibc can")
def test_memory_between_small_things_goes_back() -> None:
    kept = {  # as it is after some large tensors were freed; and the end of the heap does not go back by itself
        "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    }
    out = subprocess.run(
        [sys.executable, "-c", _HOLES], capture_output=True, text=True, check=True, env={**os.environ, **kept}
    )
    before, after, _ = (int(number) for number in out.stdout.split())
    assert before - after > 50e6
