"""Ctrl-C reaches us wherever it comes; memory that nobody needs goes back."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recleak import doctor, machine
from recleak.errors import ConfigError
from recleak.jobs import Outcome, Work, do_all
from recleak.machine import _trim, free_memory, interrupts_arrive, memory_line


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


# --- free memory --------------------------------------------------------------------------------------------------


def test_free_memory_is_what_the_system_tells() -> None:
    free, facts = free_memory(), doctor.examine()
    if free is None:
        assert facts["memory_free_gib"] is None
        return
    assert free > 0
    assert facts["memory_free_gib"] > 0


@pytest.mark.parametrize(
    ("told", "limits", "free"),
    [
        ({"MemAvailable": 1000, "MemFree": 10}, {}, 1_024_000),
        ({"MemAvailable": 1000, "SwapFree": 500}, {}, 1_536_000),
        ({"MemAvailable": 1000}, {"memory.max": "max\n", "memory.current": "5\n"}, 1_024_000),
        ({"MemAvailable": 1000}, {"memory.max": "9000\n", "memory.current": "5000\n"}, 4_300),
        ({"MemAvailable": 1000}, {"memory.max": "9000\n", "memory.current": "9900\n"}, 0),
        ({}, {}, None),
    ],
)
def test_a_container_may_allow_less_than_the_machine_has(
    told: dict[str, int], limits: dict[str, str], free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("".join(f"{name}:   {number} kB\n" for name, number in told.items()))
    for name, text in ({"memory.stat": "anon 7\ninactive_file 300\n"} | limits).items():
        (tmp_path / name).write_text(text)
    places = {"/proc/meminfo": tmp_path / "meminfo", "/sys/fs/cgroup": tmp_path}
    monkeypatch.setattr(machine, "Path", lambda name: places[name])
    assert free_memory() == free


def work(job: object, threads: int) -> None:
    """Nothing."""


class Elsewhere:
    """Other machines: the last job is done first."""

    def outcomes(self, jobs: Sequence[Any], work: Work[Any]) -> Iterator[tuple[int, Outcome]]:
        return ((place, Outcome(0.0)) for place in reversed(range(len(jobs))))


def test_a_cluster_does_no_jobs_that_wait_for_others() -> None:
    jobs = [SimpleNamespace(label=str(each)) for each in range(3)]
    with pytest.raises(ConfigError, match=r"(?s)jobs that wait for others, and a cluster.*without a cluster"):
        do_all(jobs, work, cluster=Elsewhere(), after=[(), {0}, ()])
    assert list(do_all(jobs, work, cluster=Elsewhere(), after=[(), (), ()])) == [2, 1, 0]
    assert list(do_all(jobs, work, after=[(), {0}, ()])) == [0, 1, 2]


def test_what_runs_take_side_by_side_is_told_and_refused_if_it_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 6 * 10**9)
    needs = [2 * 10**9, 0, 3 * 10**9, 3 * 10**9]
    jobs = [SimpleNamespace(label=str(each)) for each in needs]
    assert len(do_all(jobs, work, workers=1, needs=needs)) == 4
    assert "The nodes of the largest of 3 runs take 3.0 GB, beside working memory; 6.0 GB are free." in " ".join(
        capsys.readouterr().err.split()
    )
    assert memory_line(needs[2:], 2).startswith("The nodes of 2 side by side of 2 runs take 6.0 GB")
    with pytest.raises(
        ConfigError, match=r"3 side by side of 3 runs take 8.0 GB, expected at most the 6.0 GB .*\n  Use f"
    ):
        do_all(jobs, work, workers=3, needs=needs)
    do_all(jobs, work, needs=[0, 0, 0, 0])
    assert "nodes" not in capsys.readouterr().err
    monkeypatch.setattr(machine, "free_memory", lambda: None)
    assert memory_line([9 * 10**12]) == "The nodes of the run take 9000.0 GB, beside working memory."
