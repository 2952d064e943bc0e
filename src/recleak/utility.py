"""Utility: what recommenders achieve on a split, beside chance. The other side of every privacy trade-off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from recleak import __version__
from recleak.data.interactions import Interactions
from recleak.data.sampling import evaluation_candidates
from recleak.data.split import Split
from recleak.metrics.intervals import Estimate
from recleak.metrics.ranking import Ranks, Scorer, rank, summarize
from recleak.models.baselines import ItemKNN, MostPop

Fit = Callable[[Interactions], Scorer]
BASELINES: Mapping[str, Fit] = {"MostPop": MostPop().fit, "ItemKNN": ItemKNN().fit}


@dataclass(frozen=True)
class Utility:
    """One recommender's row: metrics with 95 % intervals over users, and how long it took to fit and to rank."""

    model: str
    metrics: dict[str, Estimate]
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """Recommenders on the same split and candidates; the first row is chance (a constant score), exactly."""

    rows: list[Utility]
    users: int
    candidates: str
    short_users: int  # graded users that have fewer negatives than were asked for


def compare(
    split: Split,
    models: Mapping[str, Fit] = BASELINES,
    *,
    negatives: int | None = None,
    ks: Sequence[int] = (10, 20),
    seed: int = 0,
) -> Comparison:
    """Fit each model on train and rank the test items, against all other items or `negatives` sampled ones.

    In full ranking a user's training and validation items do not compete.
    """
    known = split.train if len(split.valid) == 0 else union(split.train, split.valid)
    sampled = None if negatives is None else evaluation_candidates(split, negatives, seed=seed)
    rows: list[Utility] = []
    ranks: Ranks | None = None
    for name, fit in models.items():
        start = perf_counter()
        ranks = rank(fit(split.train), known, split.test, None if sampled is None else sampled.items)
        rows.append(Utility(name, summarize(ranks, ks, seed=seed), perf_counter() - start))
    if ranks is None:
        raise ValueError("Got no model, expected at least one.")
    chance = Utility("chance", summarize(ranks.constant(), ks, seed=seed), 0.0)
    recipe = "full ranking" if sampled is None else sampled.recipe
    return Comparison([chance, *rows], len(ranks.users), recipe, 0 if sampled is None else sampled.short)


def union(first: Interactions, second: Interactions) -> Interactions:
    """Two parts of one split as one part."""
    rows = first.rows.vstack(second.rows).sort("user", maintain_order=True).rechunk()
    return Interactions(rows, first.users, first.items)


def facts(name: str, preset: str | None, data: Interactions, split: Split, comparison: Comparison) -> dict[str, object]:
    """What a result says of itself: version, data and their fingerprint, split, candidates, and what was dropped."""
    return {
        "recleak": __version__,
        "data": name,
        "preset": preset,
        "fingerprint": data.fingerprint,
        "split": split.recipe,
        "decisions": split.decisions,
        "candidates": comparison.candidates,
        "users": comparison.users,
        "users_with_fewer_candidates": comparison.short_users,
        "notes": [str(note) for note in data.notes],
    }
