"""A run in a directory: saved all or nothing, continued by the same call.

run.json                 what the run is: all that decides its result
checkpoint.safetensors   what it has learned and what its taps know, after a number of rounds
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from recleak.data.interactions import Interactions
from recleak.files import read_bytes, replace_text
from recleak.recording import Tap
from recleak.strict_json import parse_json
from recleak.training.cohort import Task
from recleak.training.state import CheckpointError, differences, identify, read_file, replace_file


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """What was saved of a run: tensors and facts by name. Whoever asks says what must be there."""

    file: Path
    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """A tensor of the type and shape of another."""
        found = self.tensors.get(name)
        if found is None or found.shape != like.shape or found.dtype != like.dtype:
            got = "nothing" if found is None else f"{found.dtype}{list(found.shape)}"
            raise self.unfit(f"{name!r} is {got}, expected {like.dtype}{list(like.shape)}")
        return found

    def count(self, name: str) -> int:
        """A whole number from 0."""
        found = self.about.get(name)
        if type(found) is not int or found < 0:
            raise self.unfit(f"{name!r} is {found!r:.40}, expected a whole number from 0")
        return found

    def numbers(self, name: str) -> list[Any]:
        """A list of numbers."""
        found = self.about.get(name)
        if not isinstance(found, list) or any(type(each) not in (int, float) for each in found):
            raise self.unfit(f"{name!r} is {found!r:.40}, expected a list of numbers")
        return found

    def under(self, mark: str) -> dict[str, Tensor]:
        """The tensors whose names begin with a mark, without it."""
        return {name.removeprefix(mark): value for name, value in self.tensors.items() if name.startswith(mark)}

    def unfit(self, problem: str) -> CheckpointError:
        """What to raise."""
        return CheckpointError(f"{self.file}: {problem}.\n  It is damaged, or of another run; use another directory.")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; says what is saved and how to continue."""


class Checkpoint:
    """The state of a run on disk; without a directory nothing is."""

    def __init__(self, directory: Path | None, config: Mapping[str, Any]) -> None:
        self.directory = directory
        self.saved: int | None = None
        "The rounds in it."
        self._text = json.dumps(config, indent=2)
        self._run = hashlib.sha256(self._text.encode()).hexdigest()
        self._format = str(config["format"])

    def read(self, rounds: int, taps: Sequence[Tap]) -> Saved | None:
        """What was saved of this very run, if anything; taps are as they were then."""
        if self.directory is None:
            return None
        before = _earlier(self.directory, self._format)
        file = self.directory / "checkpoint.safetensors"
        if not file.exists():  # nothing was sent yet
            _begin(self.directory, self._text)
            return None
        tensors, about = read_file(file)
        saved = Saved(file, {name: value for name, value in tensors.items() if not name.startswith("tap ")}, about)
        if about.get("run") != self._run:
            changed = "; ".join(islice(differences(before, json.loads(self._text)), 4)) or "its run.json was changed"
            raise CheckpointError(
                f"{self.directory} holds a run of something else: {changed}.\n"
                "  Give the same settings to continue it, or another directory."
            )
        if (round := saved.count("round")) > rounds:
            raise CheckpointError(
                f"{self.directory} holds {round:,} rounds, expected at most the {rounds:,} asked for.\n"
                "  Ask for as many rounds or more, or give another directory."
            )
        for position, tap in enumerate(taps):
            try:
                tap.restore(Saved(file, tensors, about).under(f"tap {position} "))
            except (LookupError, ValueError, TypeError, RuntimeError) as error:
                raise saved.unfit(f"what tap {position} knew cannot be used ({error!s:.200})") from error
        self.saved = round
        return saved

    def write(self, round: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any], taps: Sequence[Tap]) -> None:
        """Save the run as it is after so many rounds; a kill at any moment leaves this or what was saved before."""
        if self.directory is None:
            return
        heard = {
            f"tap {position} {name}": value.clone()
            for position, tap in enumerate(taps)
            for name, value in tap.state().items()
        }
        facts = {"run": self._run, "round": round, **about}
        replace_file(self.directory / "checkpoint.safetensors", {**tensors, **heard}, facts)
        self.saved = round

    def after_interrupt(self, round: int, rounds: int) -> str:
        """What to say after Ctrl-C."""
        where = f"Interrupted after {round:,} of {rounds:,} rounds"
        if self.directory is None:
            return f"{where}; nothing is kept.\n  Give the run a directory, and it can be continued."
        return (
            f"{where}; {self.saved or 0:,} rounds are saved in {self.directory}.\n"
            "  Run it again with the same settings to continue."
        )


def describe(
    form: str,
    protocol: Any,
    task: Task,
    train: Interactions,
    taps: Sequence[Tap],
    **others: Any,
) -> dict[str, Any]:
    """All that decides the result of a run, but for the number of rounds: a finished run may be prolonged."""
    settings = {each.name: getattr(protocol, each.name) for each in dataclasses.fields(protocol)}
    del settings["rounds"]
    parts = {
        "format": form,
        "protocol": settings,
        "model": task.model,
        "components": {part.name: part for part in task.components},
        "defense": task.defense,
        "seed": task.seed,
        "train": train,
        "user_features": task.user_features,
        **({} if task.attributes is None else {"attributes": task.attributes}),
        "taps": [
            {"class": type(tap), "attack": getattr(tap, "attack", None), "vantage": getattr(tap, "vantage", None)}
            for tap in taps
        ],
        **others,
    }
    return {name: identify(part) for name, part in parts.items()}


def _earlier(directory: Path, form: str) -> dict[str, Any]:
    """What run.json says of a run in the directory; empty if there is none. A directory of other things is refused."""
    file = directory / "run.json"
    others = [each.name for each in directory.iterdir() if each.name != ".lock" and not _cut_off(each)]
    if not others:
        return {}
    try:
        before = parse_json(read_bytes(file), constants=True)
    except (OSError, ValueError):
        before = None
    if not isinstance(before, dict) or before.get("format") != form:
        raise CheckpointError(
            f"{directory} holds other things ({', '.join(sorted(others)[:3])}), expected a run or an empty directory.\n"
            "  Nothing is overwritten: give another directory."
        )
    return before


def _cut_off(file: Path) -> bool:
    """Whether it is what a process left that was killed while it wrote run.json."""
    return file.name.startswith("run.json.") and file.suffix == ".partial"


def _begin(directory: Path, config: str) -> None:
    """A directory for a new run; what a run left that was killed before its first checkpoint goes."""
    shutil.rmtree(directory / "clients", ignore_errors=True)
    replace_text(directory / "run.json", config + "\n")
