"""What this machine lets us use, and processes beside this one."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from _thread import interrupt_main
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path

from recleak.errors import ConfigError

_most: int | None = None  # cores that this process uses, whatever it may


def cores() -> int:
    """How many cores this process may use."""
    return len(_allowed())


def use_at_most(cores: int) -> None:
    """From now on: the others of this machine are somebody else's."""
    global _most
    _most = cores


def shares(processes: int) -> list[list[int]]:
    """The cores for each of some processes side by side: no core twice; if there are too few, one each, in turn."""
    allowed = _allowed()
    if len(allowed) < processes:
        return [[allowed[place % len(allowed)]] for place in range(processes)]
    ends = [len(allowed) * place // processes for place in range(processes + 1)]
    return [allowed[begin:end] for begin, end in pairwise(ends)]


@contextmanager
def kept_to(share: Collection[int]) -> Iterator[None]:
    """This thread keeps to some cores, and so does, as long as it lives, a process that it starts here; where possible.

    A process that chose its cores itself would be late: libraries count them, and start threads, when imported.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, share)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _allowed() -> list[int]:
    found = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return list(found)[:_most]


def free_memory() -> int | None:
    """Bytes that programs can still get, swap included; None where the system does not tell. A container may allow less
    than the machine has.
    """
    system = _told(Path("/proc/meminfo"))
    if "MemAvailable" not in system:
        return None
    free = 1024 * (system["MemAvailable"] + system.get("SwapFree", 0))
    group = Path("/sys/fs/cgroup")
    try:
        most, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such group, or its limit is the word "max"
        return free
    return max(0, min(free, most - used + _told(group / "memory.stat").get("inactive_file", 0)))


def _told(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        lines = [line.replace(":", " ").split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def memory_line(needs: Sequence[int], workers: int = 1) -> str:
    """What runs that hold so many bytes take, so many of them side by side; an error if that is more than is free."""
    together = sum(sorted(needs, reverse=True)[:workers])
    side = f"{min(workers, len(needs))} side by side" if workers > 1 and len(needs) > 1 else "the largest"
    what = f"{side} of {len(needs):,} runs" if len(needs) > 1 else "the run"
    free = free_memory()
    if free is not None and together > free:
        raise ConfigError(
            f"The nodes of {what} take {together / 1e9:.1f} GB, expected at most the {free / 1e9:.1f} GB that are free."
            '\n  Use fewer workers, or precision="float16" for half of it, or fewer users or items.'
        )
    known = "" if free is None else f"; {free / 1e9:.1f} GB are free"
    return f"The nodes of {what} take {together / 1e9:.1f} GB, beside working memory{known}."


def give_back() -> None:
    """Free memory goes back to the system, where the C library can do that (glibc).

    It keeps what lies between small things that stay, and large tensors come and go by the thousand: without this, a
    gossip of 1,083 nodes with 2.6 GB of parameters held 3 GB of such holes after 190 ticks.
    """
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another system, or another C library
        return None
    return found


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C is delivered after the block; processes started in it never get it, as it is their parent's business."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interrupts_arrive() -> Iterator[None]:
    """Ctrl-C always ends the block: one that comes while Python clears an object away, it would print and forget."""
    before = sys.unraisablehook

    def again(lost: sys.UnraisableHookArgs, /) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            threading.Timer(0.01, interrupt_main).start()  # once more, when the clearing is over
        else:
            before(lost)

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


def end_with_parent() -> None:
    """For a thread of a child process: a killed parent cannot say that it is gone."""
    if (parent := multiprocessing.parent_process()) is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
