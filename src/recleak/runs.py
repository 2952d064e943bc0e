"""A run directory: an experiment, its cells, what they add up to, and the report.

    experiment.json     what was asked for, options included
    cells/, baselines/  what was measured (`cells`), never measured again
    findings.json       what it adds up to, for machines; findings/*.parquet: the same as tables, and every user
    report.html         the same for people
    log.json            seconds of each job, the machine: what may differ from run to run

One process at a time works in a directory. Killed or interrupted, the same call continues, and the findings are the
same to the byte.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from recleak import __version__, objects
from recleak.attacks.base import WhichAttribute, WhoBelongs
from recleak.audited import Audited, stored
from recleak.cells import (
    ATTRIBUTE_NULLS,
    GIVEN,
    HISTORY,
    MEMBERSHIP,
    NULLS,
    RECORDED,
    REFERENCE,
    Ask,
    Baselines,
    Cell,
    community_nulls,
    is_published,
    loaded,
    split_of,
)
from recleak.data.features import classes_of
from recleak.data.sampling import evaluation_candidates
from recleak.errors import ConfigError, RecleakError
from recleak.experiment import Data, Experiment, System, canonical
from recleak.files import read_bytes, read_json, replace_text
from recleak.findings import Findings
from recleak.jobs import Cluster, Outcome, do_all
from recleak.machine import cores
from recleak.measuring import measure, needed_bytes
from recleak.models.base import Model
from recleak.models.central import CentralModel
from recleak.summary import tables
from recleak.training.state import locked
from recleak.wire import Audience, Server

_SHARED_ROLES = ("user", "item", "head")
_GIVEN = {"published": "lists that exist already", "vectors": "vectors that exist already", RECORDED: "a recording"}
_PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "polars", "dp-accounting")


class RunError(RecleakError):
    """A run in which something went wrong; what was measured is stored."""


def audit_run(
    experiment: Experiment, folder: Path, *, workers: int = 1, command: str = "", cluster: Cluster | None = None
) -> Findings:
    """Measure what is missing, here or on a cluster, then write findings into the folder."""
    if cluster is not None and (given := [system for system in experiment.systems if is_published(system)]):
        what = _GIVEN[given[0].settings["protocol"]["use"]]
        raise ConfigError(
            f"Got {what} and a cluster, expected one of them: nothing is trained, and the files are here.\n"
            "  Leave the executor out."
        )
    loaded.cache_clear()  # data may have changed since
    with locked(folder):
        _begin(experiment, folder)
        plan = _Plan(experiment, folder)
        jobs = plan.missing()
        outcomes = do_all(jobs, work, workers=workers, what="cell", cluster=cluster, needs=_needs(jobs))
        _log(folder, [(job.label, outcomes[place]) for place, job in enumerate(jobs) if place in outcomes])
        findings = plan.findings(command)
        findings.write(folder)
        failed = [jobs[place].label for place, outcome in sorted(outcomes.items()) if outcome.problems]
    if failed:
        raise RunError(
            f"{len(failed)} of {len(jobs)} cells failed ({failed[0]}{', ...' if len(failed) > 1 else ''}); the others "
            f"are stored in {folder}.\n  Mend what the errors above say, then run the same command again."
        )
    return findings


def _needs(jobs: Sequence[Cell | Baselines]) -> list[int]:
    """The bytes that each is known to take; the seeds of a system take the same."""
    systems = {canonical(job.system.settings): job for job in jobs if isinstance(job, Cell)}
    known = {name: needed_bytes(cell) for name, cell in systems.items()}
    return [known[canonical(job.system.settings)] if isinstance(job, Cell) else 0 for job in jobs]


def work(job: Cell | Baselines, threads: int) -> None:
    """One job, in whatever process."""
    if isinstance(job, Cell):
        measure(job, threads)
    else:
        job.measure()


class _Plan:
    """The cells of an experiment in a folder."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self.experiment = experiment
        self.fingerprints: dict[Data, str] = {}
        for system in experiment.systems:
            if system.data not in self.fingerprints:
                self.fingerprints[system.data] = loaded(system.data).fingerprint
                for attribute in experiment.attributes:
                    classes_of(loaded(system.data), attribute)  # an error comes here, before anything is run
                for mark in experiment.marks:
                    mark.items(loaded(system.data))
        self.asks = _asks(experiment)
        self.audits = [self._audited(system, folder) for system in experiment.systems]

    def _audited(self, system: System, folder: Path) -> Audited:
        seeds, print_ = self.experiment.seed_list, self.fingerprints[system.data]
        rest = tuple(ask for ask in self.asks if ask.kind != "component")  # parts of uploads: on the first seed only
        asks = [(*self.asks, *_by_layer(self.asks, system)), *[rest] * (len(seeds) - 1)]
        cells = [Cell(system, seed, print_, some, folder / "cells") for seed, some in zip(seeds, asks, strict=True)]
        canaries: list[Cell] = []
        first = tuple(replace(ask, kind="canary") for ask in _first_by_vantage(self.asks))
        if first and self.experiment.canaries and not self.experiment.shuffle_labels:
            canaries = [Cell(system, seeds[0], print_, first, folder / "cells", canaries=True)]
        baselines = [Baselines(system.data, seed, print_, folder / "baselines") for seed in seeds]
        baselines = [] if is_published(system) else baselines
        return Audited(system, cells, canaries, baselines, self.experiment.level)

    def missing(self) -> list[Cell | Baselines]:
        """What is not stored yet: the first seed of everything before the second, cells before canaries."""
        baselines = {each.path: each for audited in self.audits for each in audited.baselines}
        cells = [each for turn in zip(*(audited.cells for audited in self.audits), strict=True) for each in turn]
        cells += [each for audited in self.audits for each in audited.canaries]
        different = {each.path: each for each in cells}  # two labels may name one system
        found = [(each, each.missing()) for each in (*baselines.values(), *different.values())]
        for each, left in found:
            for work in each.path.glob("work-*") if left is None else ():  # of a process that was killed at its end
                shutil.rmtree(work, ignore_errors=True)
        return [left for _, left in found if left is not None]

    def findings(self, command: str) -> Findings:
        """What is stored, summed up."""
        rows = tables(self.audits, self._references())
        return Findings.of(self._about(command), rows)

    def _references(self) -> dict[int, int]:
        """For each system the first one that differs in the defense only."""
        first: dict[tuple[str, ...], int] = {}
        found = {}
        for place, audited in enumerate(self.audits):
            labels = audited.system.labels
            key = (labels["data"], labels["model"], labels["protocol"])
            found[place] = first.setdefault(key, place)
        return found

    def _about(self, command: str) -> dict[str, Any]:
        experiment = self.experiment
        published = {audited.system.data for audited in self.audits if is_published(audited.system)}
        seed = experiment.seed_list[0]
        notes = [note for data in self.fingerprints for note in _notes(data, seed, held=data not in published)]
        notes += [note for audited in self.audits for note in _endings(audited)]
        attacks: dict[str, dict[str, Any]] = {}
        for audited in self.audits:
            for each in audited.of_kind("attack", "null", "reference"):
                if each.ask.key not in attacks or not attacks[each.ask.key]["knowledge"]:
                    attacks[each.ask.key] = _attack_about(each.ask, each.facts)
        return {
            "recleak": __version__,
            "title": experiment.title,
            "experiment": json.loads(experiment.model_dump_json()),
            "systems": [{**audited.system.labels, "text": _words(audited.system)} for audited in self.audits],
            "attacks": list(attacks.values()),
            "fingerprints": {
                audited.system.data_label: self.fingerprints[audited.system.data] for audited in self.audits
            },
            "notes": notes,
            "level": experiment.level,
            "validation": experiment.validation,
            "self_test": experiment.shuffle_labels,
            "environment": environment(),
            "command": command,
        }


def _notes(data: Data, seed: int, *, held: bool) -> list[str]:
    """What the reader dropped, and where something is held out, what split and candidates had to decide."""
    found = [str(note) for note in loaded(data).notes]
    if not held:
        return found
    split = split_of(data, seed)
    found += [f"{data.name}: {count:,} {what}" for what, count in split.decisions.items()]
    if data.candidates is not None:
        short = evaluation_candidates(split, data.candidates, seed=seed).short
        found += [f"{data.name}: {short:,} users have fewer than {data.candidates} candidates"] if short else []
    return found


def _endings(audited: Audited) -> list[str]:
    """After how many rounds a rule ended training, by seed."""
    files = [cell.path / "facts.json" for cell in audited.cells]
    facts = [stored(file) for file in files if file.exists()]
    rounds = [each["ended"] for each in facts if "ended" in each]
    if not rounds:
        return []
    label, planned = " · ".join(audited.system.labels.values()), facts[0].get("planned")
    return [f"{label}: training ended after {', '.join(map(str, rounds))} of at most {planned} rounds"]


def _asks(experiment: Experiment) -> tuple[Ask, ...]:
    """The attacks, the nulls of their vantage points, and the attacks on parts of uploads."""
    common: dict[str, Any] = {"shuffle": experiment.shuffle_labels, "validation": experiment.validation}
    attacks: list[Ask] = []
    for each in experiment.attack_choices:
        ask = Ask(each.label, each.settings, **common)
        if (question := _question(ask)) is WhoBelongs:
            if experiment.communities:
                attacks.append(replace(ask, community=experiment.communities))
            attacks += [replace(ask, mark=mark) for mark in experiment.marks]
            continue
        if question is not WhichAttribute:
            attacks.append(ask)
            continue
        if not experiment.attributes:
            raise ConfigError(
                f'{each.label} infers attributes, but none is named.\n  Say which, such as attributes = ["gender"].'
            )
        attacks += [replace(ask, attribute=name, known=experiment.known) for name in experiment.attributes]
    vantages = dict.fromkeys(_vantage(ask) for ask in attacks if ask.question == MEMBERSHIP)
    names = [name for vantage in vantages for name in NULLS.get(vantage, ())]
    nulls = [Ask(name, {"use": name}, "null", **common) for name in names]
    for attribute, vantage in dict.fromkeys((ask.attribute, _vantage(ask)) for ask in attacks if ask.attribute):
        about = {**common, "attribute": attribute, "known": experiment.known}
        reads = any(_reads_history(ask) for ask in attacks if ask.attribute == attribute)
        names = [*([HISTORY] if reads and vantage is Audience else []), *ATTRIBUTE_NULLS.get(vantage, ())]
        nulls += [Ask(name, {"use": name}, "null", **about) for name in names]
        nulls += [Ask(*REFERENCE, "reference", **about)] if vantage is Server else []
    for vantage, aside in dict.fromkeys((_vantage(ask), ask.aside) for ask in attacks if ask.community):
        about = {**common, "community": experiment.communities}
        nulls += [Ask(*guess, "null", **about) for guess in community_nulls(vantage, aside)]
    for mark, vantage in dict.fromkeys((ask.mark, _vantage(ask)) for ask in attacks if ask.mark is not None):
        nulls += [Ask(*guess, "null", **common, mark=mark) for guess in community_nulls(vantage)]
    parts = [
        replace(ask, kind="component", role=role)
        for ask in attacks
        if ask.name in experiment.by_component and not ask.community and ask.mark is None
        for role in _SHARED_ROLES
    ]
    return (*attacks, *nulls, *parts)


def _by_layer(asks: Sequence[Ask], system: System) -> list[Ask]:
    """The attacks on the head of uploads, on each layer of the system's model alone: what noise by layer goes by."""
    whole = [ask for ask in asks if ask.role == "head"]
    layers = layers_of(system.settings["model"]) if whole else []
    return [replace(ask, role=layer) for ask in whole for layer in layers]


def layers_of(settings: Mapping[str, Any]) -> list[str]:
    """The layers of a model's head, from the first: head.1, head.2; none if there are no two to be told apart."""
    kind = objects.find("model", settings["use"])
    if not (isinstance(kind, type) and issubclass(kind, Model)) or issubclass(kind, CentralModel):
        return []  # nothing of it is uploaded
    some = {"n_features": 1} if kind.needs_user_features else {}  # how many there are changes no layer
    try:
        parts = objects.build("model", {**some, **settings}).components()
    except ConfigError:
        return []  # whoever measures it says why
    layers = sorted({part.layer for part in parts if part.role == "head" and part.layer is not None})
    return [f"head.{layer}" for layer in layers] if len(layers) > 1 else []


def _question(ask: Ask) -> Any:
    """What kind of question an attack answers; None: which items."""
    return getattr(objects.build("attack", ask.settings), "question", None)


def _reads_history(ask: Ask) -> bool:
    return bool(getattr(objects.build("attack", ask.settings), "history", False))


def _first_by_vantage(asks: Sequence[Ask]) -> list[Ask]:
    """The first attack at each vantage point."""
    found: dict[Any, Ask] = {}
    for ask in asks:
        if ask.kind == "attack" and ask.question == MEMBERSHIP:
            found.setdefault(_vantage(ask), ask)
    return list(found.values())


def _vantage(ask: Ask) -> Any:
    return objects.build("attack", ask.settings).vantage


def _attack_about(ask: Ask, facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    made = objects.build("attack", ask.settings)
    text = (type(made).__doc__ or "").strip().partition("\n")[0]
    known = next((each for each in facts if each.get("knowledge")), {})
    return {
        "attack": ask.name,
        "question": ask.question,
        "role": ask.kind,
        "vantage": made.vantage.__name__,
        "text": text,
        "settings": dict(ask.settings),
        "knowledge": known.get("knowledge"),
    }


def _words(system: System) -> str:
    settings = system.settings
    parts = [canonical(settings[kind]) for kind in ("model", "protocol", "defense")]
    preset = f", preset {system.data.preset}" if system.data.preset else ""
    return f"{system.data.name}{preset}; {'; '.join(parts)}"


def environment() -> dict[str, str]:
    """What results may depend on."""
    found = {"recleak": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _begin(experiment: Experiment, folder: Path) -> None:
    """A folder of something else is refused; that of another experiment is reused, cell by cell."""
    for place in (folder, folder / "findings", folder / "baselines", *(folder / "cells").glob("*")):
        for left in place.glob("*.partial"):
            if left.is_file() and left.name.split(".")[-2].isdecimal():  # of a process that was killed while it wrote
                left.unlink()
    others = [each.name for each in folder.iterdir() if each.name not in (".lock", GIVEN)]
    if others and not _is_run(folder):
        raise ConfigError(
            f"{folder} holds other things ({', '.join(sorted(others)[:3])}), expected a run or an empty folder.\n"
            "  Nothing is overwritten: give another folder with --out."
        )
    replace_text(folder / "experiment.json", experiment.model_dump_json(indent=2) + "\n")


def _is_run(folder: Path) -> bool:
    try:
        Experiment.model_validate_json(read_bytes(folder / "experiment.json", 1 << 30))
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _log(folder: Path, done: Sequence[tuple[str, Outcome]]) -> None:
    file = folder / "log.json"
    try:
        before = read_json(file) if file.exists() else []
    except (OSError, ValueError):
        before = []  # it only says how long things took
    here = {"machine": platform.machine(), "cores": cores()}
    new = [{"job": label, "seconds": round(outcome.seconds, 2), **here} for label, outcome in done]
    if new:
        replace_text(file, json.dumps([*(before if isinstance(before, list) else []), *new], indent=1) + "\n")
