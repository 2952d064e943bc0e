"""Broken files for every reader: `python benchmarks/fuzz.py` tries 100,000 and prints what came of them.

A reader may read or refuse. Another error, no end within 20 seconds, or 512 MB of memory more is a failure; it is one
too if a reader makes a refusal of the alarm or of a lack of memory.

An input is a function of (seed, reader, number): `python benchmarks/fuzz.py --only npz --number 17` makes one again.
"""

from __future__ import annotations

import argparse
import faulthandler
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType

from recleak.errors import RecleakError
from recleak.papers.base import load
from recleak.testing.breaking import broken
from recleak.testing.hostile import Late, Reader, excused, readers

PATIENCE = 20  # seconds of CPU for one input, so that a busy machine is no failure
MEMORY = 4 << 30  # bytes of addresses beyond what is there at the beginning
RESIDENT = 512 << 20  # bytes of memory that one input may take


def attempt(reader: Reader, files: dict[str, bytes], folder: Path) -> str:
    """What came of it: read, refused, or the name of another error."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    before = _memory(reset=True)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    faulthandler.dump_traceback_later(30 * PATIENCE, exit=True)  # of what never comes back to Python
    try:
        reader.read(folder)
        result = "read"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        refused = isinstance(error, RecleakError) and not excused(error)
        result = "refused" if refused else "".join(traceback.format_exception(error)[-4:])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(folder)
    taken = _memory() - before
    return result if taken < RESIDENT else f"{result}, with {taken / (1 << 20):,.0f} MB of memory"


def _memory(*, reset: bool = False) -> int:
    """The most memory that this process had, in bytes; `reset`: from now on. 0 where the system does not tell."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0


def main() -> None:
    """All readers, or one of them, or one input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a reader")
    parser.add_argument("--number", type=int, help="one input of it")
    given = parser.parse_args()
    faulthandler.enable()
    signal.signal(signal.SIGPROF, _late)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 1 << 24
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    warnings.simplefilter("ignore")
    unexpected = 0
    with tempfile.TemporaryDirectory() as place:
        made = readers(Path(place), load("imia"))
        whole = sum(each.share for each in made.values())
        total: Counter[str] = Counter()
        for name, reader in made.items():
            if given.only not in (None, name):
                continue
            count = -(-given.inputs * reader.share // whole)
            numbers = range(count) if given.number is None else [given.number]
            found: Counter[str] = Counter()
            begun = time.process_time()
            for number in numbers:
                (Path(place) / "now").write_text(f"{name} {number}")
                result = attempt(reader, broken(reader, name, number, given.seed), Path(place) / "input")
                kind = result if result in ("read", "refused") else "other"
                found[kind] += 1
                if kind == "other":
                    unexpected += 1
                    if found[kind] <= 3:
                        print(f"{name} {number}: {result}", file=sys.stderr)
            total.update(found)
            print(f"{_line(name, found)}, {time.process_time() - begun:.1f} s", flush=True)
        print(_line("all", total))
    sys.exit(1 if unexpected else 0)


def _line(name: str, found: Counter[str]) -> str:
    what = f"{found['read']:7,} read, {found['refused']:7,} refused, {found['other']} other errors"
    return f"{name:20} {sum(found.values()):7,} inputs: {what}"


def _late(signal: int, frame: FrameType | None) -> None:
    raise Late(f"not done after {PATIENCE} s of CPU")


if __name__ == "__main__":
    main()
