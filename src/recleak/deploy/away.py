"""A cell measured away from its run directory: what goes along with it, and the files that come back.

Who measures it needs neither the run directory nor the data set, only the same code. It works in a folder of its own,
so that a cell that was begun twice, because a machine went away, is still stored once, whole, at home.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

from recleak import __version__
from recleak.cells import Baselines, Cell, loaded, sent
from recleak.data.interactions import Interactions
from recleak.errors import ConfigError
from recleak.experiment import Data
from recleak.files import replace_bytes
from recleak.jobs import Outcome, Work, attempt

Job = Cell | Baselines
_PACKAGES = ("torch", "numpy", "numba", "scipy", "scikit-learn", "polars")


@dataclass(frozen=True)
class Home:
    """Where results are wanted: what must be the same where they are made, and what may be imported."""

    versions: Mapping[str, str]
    path: tuple[str, ...]

    def require_same(self) -> None:
        """An error if results made here would not be those of home; modules that lie at home are found, if here too."""
        for name, mine in versions().items():
            if mine != (expected := self.versions.get(name)):
                raise ConfigError(
                    f"Got {name} {mine} on a worker, expected {expected}, as where it was started: results could "
                    "differ.\n  Install the same versions everywhere."
                )
        sys.path += [each for each in self.path if each not in sys.path and Path(each).exists()]


def home() -> Home:
    """This process."""
    return Home(versions(), tuple(sys.path))


def versions() -> dict[str, str]:
    """Of what decides the bits of a result: Python, packages, and recleak down to its source."""
    packages = {name: version(name) for name in _PACKAGES}
    return {"recleak": __version__, "source of recleak": _source(), "python": platform.python_version(), **packages}


@cache
def _source() -> str:
    """A digest of the package's modules: of one version there may be several on the way to the next."""
    found, root = hashlib.sha256(), Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{content}  {path.relative_to(root).as_posix()}\n".encode())
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class Errand:
    """A job, and what is known of it at home."""

    job: Job
    name: str  # of its folder or file; other code would give it another name
    files: Mapping[str, bytes]  # that a measurement looks for


def data_of(job: Job) -> Data:
    """The data that a job reads."""
    return job.system.data if isinstance(job, Cell) else job.data


def errand(job: Job) -> Errand:
    """What to send."""
    facts = job.path / "facts.json"
    files = {facts.name: facts.read_bytes()} if facts.exists() else {}
    return Errand(job, job.path.name, files)


def run(errand: Errand, data: Interactions, work: Work[Job], threads: int) -> tuple[Outcome, dict[str, bytes]]:
    """Measure it here; how it went, and the files."""
    sent.clear()
    sent[data_of(errand.job)] = data
    loaded.cache_clear()
    with tempfile.TemporaryDirectory(prefix="recleak-") as folder:
        job = replace(errand.job, folder=Path(folder))
        if job.path.name != errand.name:
            raise ConfigError(
                f"Modules of your own that {job.label} uses differ on a worker from those where it was started.\n"
                "  Put the same files on every machine."
            )
        for name, content in errand.files.items():
            replace_bytes(_folder(job) / name, content)
        outcome = attempt(job, work, threads)
        found = {
            path.name: path.read_bytes() for path in _folder(job).glob("*") if path.suffix in (".json", ".parquet")
        }
    return outcome, found


def bring(job: Job, files: Mapping[str, bytes]) -> None:
    """Store what came back; what says that all is there comes last."""
    for name in sorted(files, key=lambda name: name == "facts.json"):
        if Path(name).name != name:
            raise ConfigError(f"Got a file called {name!r} from a worker, expected a plain name.")
        replace_bytes(_folder(job) / name, files[name])


def _folder(job: Job) -> Path:
    return job.path if isinstance(job, Cell) else job.path.parent
