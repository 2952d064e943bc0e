"""Beside CDA's own questions, ours: who has items that people would rather keep to themselves?

The targets of an adversary are the items of a category or with some titles; the truth is who has them in the training
data. All marks of a data set are asked at once. A server has one ranking for each; at nodes of a gossip, and where an
adversary uses the vector of a user who sides with it, random users play it, each for itself, and the mean is told. A
model of what comes next is read by the chain only: such items are no transitions.

Metrics, each with the name of a mark behind it: `auc`, `precision` (among as many claims as there are holders),
`tpr` (at 5 % false positives), all in the best graded round, seen with the truth; `last-auc`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.attacks.base import WhoBelongs
from recleak.attacks.community import PeerCommunity, ServerCommunity
from recleak.attacks.community_items import CommunityThroughItems
from recleak.attacks.community_targets import colluding
from recleak.data.marks import Mark
from recleak.errors import ConfigError
from recleak.grading import grade_holders
from recleak.papers.cda_settings import Scalar, Setting
from recleak.papers.reproduce import Measured
from recleak.protocols.gossip import Gossip
from recleak.watching import Watching, spread
from recleak.wire import Peers, Server

LOOKOUTS = 50  # random users who play the adversary
NULL = {"auc": 0.5, "tpr": 0.05}  # of who knows nothing; its precision is the share of holders
_SCHOOLS = ("School", "High School", "Middle School", "Elementary School", "Nursery School")
_RELIGION = ("Church", "Synagogue", "Temple", "Shrine", "Spiritual Center")
MARKS: Mapping[str, tuple[Mark, ...]] = {
    "foursquare-nyc": (
        Mark("health", ("Medical Center",)),
        Mark("religion", _RELIGION),
        Mark("government", ("Government Building",)),
        Mark("schools", _SCHOOLS),
        Mark("homes", ("Home (private)",)),
        Mark("bars", ("Bar",), least=5),
    ),
    "ml-100k": (
        Mark("children", ("Children's",), least=5),
        Mark("horror", ("Horror",), least=5),
        Mark("documentaries", ("Documentary",), least=2),
        Mark("gay-films", titles=("Philadelphia (", "Priscilla", "Beautiful Thing", "Jeffrey (", "Celluloid Closet")),
    ),
}


def marks_of(data: str) -> tuple[Mark, ...]:
    """Those of a data set."""
    if data not in MARKS:
        raise ConfigError(f"Got targets = 'sensitive' for {data}, expected one of {', '.join(MARKS)}.")
    return MARKS[data]


def tap(made: Setting, ask: Mapping[str, Scalar], marks: tuple[Mark, ...]) -> Watching[Any, WhoBelongs]:
    """Who listens for all marks at once, graded in some of the rounds."""
    gossip = isinstance(made.protocol, Gossip)
    if ask["attack"] == "sums":
        raise ConfigError("Got targets = 'sensitive' with attack = 'sums', expected cda, chain or random.")
    if made.model.needs_transitions and ask["attack"] != "chain" and ask.get("scoring") not in ("activity", "random"):
        raise ConfigError(
            f"Got targets = 'sensitive' for CDA on {type(made.model).__name__}, expected attack = 'chain' or scoring = "
            "'activity': it is scored by transitions, and items of a kind have none."
        )
    vector: Any = ask.get("vector", "told" if made.keeps_vectors else "sent")
    alone = not gossip and (ask["attack"] == "chain" or vector not in ("told", "mean"))
    users = made.train.n_users
    who = torch.zeros(1, dtype=torch.int64) if alone else lookouts(users, made.seed)
    inside = [torch.from_numpy(mark.items(made.train)).float() for mark in marks]
    truth = [torch.from_numpy(mark.holders(made.train)) for mark in marks]
    public = {
        "targets": torch.stack(inside).repeat_interleave(len(who), 0),  # f32[marks * lookouts, I]
        "leaders": who.repeat(len(marks)),
    }
    question = WhoBelongs(torch.arange(len(public["targets"])), torch.arange(users))

    def grade(answer: Tensor) -> dict[str, Tensor]:
        return {
            f"{mark.name}/{name}": value
            for mark, own, part in zip(marks, truth, torch.split(answer, len(who)), strict=True)
            for name, value in grade_holders(part, own, None if alone else who).items()
        }

    rounds = spread(made.protocol.rounds)
    if ask["attack"] == "chain" and not gossip:
        chain = CommunityThroughItems(reading="count")
        return Watching(Server(), chain, made.knowledge(**public), question, grade, rounds)
    how: dict[str, Any] = {"scoring": ask.get("scoring", "confidence"), "vector": vector, "seed": made.seed}
    groups = colluding(users, float(ask.get("colluders", 0.0)), made.seed)[public["leaders"]]
    known = made.knowledge(groups=groups, **public)
    if not gossip:
        return Watching(Server(), ServerCommunity(**how), known, question, grade, rounds)
    return Watching(Peers(groups), PeerCommunity(**how), known, question, grade, rounds)


def lookouts(users: int, seed: int) -> Tensor:
    """Random users, i64[L]."""
    return torch.from_numpy(random.bits(seed, "lookouts", np.arange(users)).argsort()[:LOOKOUTS])


def measured(tap: Watching[Any, WhoBelongs], marks: tuple[Mark, ...], seconds: float) -> Measured:
    """By user, so that there are intervals: see `grade_holders`."""
    metrics: dict[str, NDArray[np.float64]] = {}
    series: dict[str, list[tuple[int, float]]] = {}
    rounds = tap.rounds.numpy()
    for mark in marks:
        auc = tap.curve(f"{mark.name}/auc").numpy()  # f64[r, U]
        over_rounds = np.nanmean(auc, axis=1)
        best = int(over_rounds.argmax())
        found = {"auc": auc[best], "last-auc": auc[-1], "auc-round": np.array([float(rounds[best] + 1)])}
        for name, graded in (("precision", "accuracy"), ("tpr", "tpr@5%")):
            found[name] = tap.curve(f"{mark.name}/{graded}").numpy()[best]
        metrics |= {f"{name}-{mark.name}": value[~np.isnan(value)] for name, value in found.items()}
        series[f"auc-{mark.name}"] = [
            (int(at + 1), float(value)) for at, value in zip(rounds, over_rounds, strict=True)
        ]
    return Measured(metrics, series, seconds)


def unknown(made: Setting, marks: tuple[Mark, ...]) -> Measured:
    """What a guess gets."""
    metrics: dict[str, NDArray[np.float64]] = {}
    for mark in marks:
        metrics |= {f"{name}-{mark.name}": np.array([value]) for name, value in NULL.items()}
        metrics[f"precision-{mark.name}"] = mark.holders(made.train).astype(np.float64)
    return Measured(metrics)
