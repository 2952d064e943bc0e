"""From stored cells to findings: what the seeds and users of every system add up to, with intervals and nulls.

Every number is of the users on whom the attacker was not chosen (`audited`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from recleak.audited import (
    VANTAGES,
    Attacked,
    Audited,
    BySeed,
    Contest,
    both_ways_of,
    columns,
    common,
    has_utility,
    nothing,
    per_user,
    ranked,
    stored,
)
from recleak.cells import COMMUNITY, MEMBERSHIP, loaded
from recleak.findings import TABLES
from recleak.metrics.comparison import (
    Counts,
    Difference,
    bootstrap_rate,
    bootstrap_rate_difference,
    holm,
    paired,
)
from recleak.metrics.inference import PerUser
from recleak.metrics.intervals import quantile

Rows = list[dict[str, Any]]
_GROUPS = 5  # of users, by activity and by round
_FEW = 5  # users: a group of fewer is not shown
_SMALL = 0.05  # of AUC: a lead over the null that may be larger is not called "not found"
_ADD = {
    "leaks": "The {what} add to that.",
    "not found": "The {what} add little to that, or nothing.",
    "cannot tell": "Whether the {what} add to that is uncertain: more users or seeds would tell.",
}
_SEEN = {"Audience": "lists", "Holder": "vectors", "Peers": "models"}
_WHAT = {MEMBERSHIP: "a user's own items from the others", COMMUNITY: "who is in a user's community from who is not"}
_PERCENTILES = {"10%": 0.1, "50%": 0.5, "90%": 0.9}  # of adversaries
_TOO_FEW = "Too few pairs that are not own items to tell."
_NULLS = {
    "popularity": "who only knows which items are popular",
    "popularity-of-sums": "who only knows which items are popular",
    "random": "who guesses at random",
    "all-positive": "who takes all touched items for own ones",
    "majority": "who always says the most frequent class",
    "proportional": "who guesses by how frequent the classes are",
    "majority-of-audience": "who always says the most frequent class",
    "proportional-of-audience": "who guesses by how frequent the classes are",
    "majority-of-holder": "who always says the most frequent class",
    "proportional-of-holder": "who guesses by how frequent the classes are",
    "majority-of-peers": "who always says the most frequent class",
    "proportional-of-peers": "who guesses by how frequent the classes are",
    "popularity-of-peers": "who only knows which items are popular",
    "random-of-peers": "who guesses at random",
    "all-positive-of-peers": "who takes all items for own ones",
    "popular-items": "who only knows which items are popular",
    "from-history": "who reads what users did and no list",
    "random users": "who guesses at random",
    "random users of sums": "who guesses at random",
    "activity": "who only sees how many item rows each client sends",
    "random peers": "who guesses at random among those it heard of",
}


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(audits: Sequence[Audited], references: Mapping[int, int]) -> dict[str, Rows | pl.DataFrame]:
    """All tables; `references` gives for each system the place of the one that it is compared with."""
    rows: dict[str, Rows] = {name: [] for name in TABLES if name != "risk"}
    for place, audited in enumerate(audits):
        labels = audited.system.labels
        for name, make in _MAKERS.items():
            rows[name] += [{**labels, **row} for row in make(audited)]
        if references[place] != place:
            rows["comparisons"] += [{**labels, **row} for row in _comparisons(audited, audits[references[place]])]
    _correct(rows["comparisons"])
    users = [part for audited in audits for part in _risk(audited)]
    return {**rows, "risk": pl.concat(users) if users else []}


def _scores(audited: Audited) -> Rows:
    found: Rows = []
    for each in audited.of_kind("attack", "null", "reference"):
        rows = _scores_of(audited, each)
        if (other := _same_as(audited, each)) is not None:
            rows[0]["reason"] = f"The same as {other!r}: it answers alike here, about every user."
        found += rows
    return found


def _same_as(audited: Audited, each: Attacked) -> str | None:
    """An attack before it with the same grades of every user in every seed: one that falls back to what it does."""
    if not each.users or each.ask.kind != "attack" or all(frame["auc"].n_unique() < 2 for frame in each.users):
        return None
    for other in audited.of_kind("attack"):
        if other.ask.name == each.ask.name:
            return None
        alike = other.ask.question == each.ask.question and other.seeds == each.seeds
        if alike and all(one.equals(two) for one, two in zip(each.users, other.users, strict=True)):
            return other.ask.name
    return None


def _scores_of(audited: Audited, each: Attacked) -> Rows:
    role = each.ask.kind if each.ask.kind in ("null", "reference") else "attack"
    key = {"question": each.ask.question, "attack": each.ask.name, "role": role, "vantage": each.vantage}
    if each.reason is not None:
        return [{**key, "metric": "auc", **nothing(), "reason": each.reason}]
    if each.ask.question != MEMBERSHIP:
        names = {"auc": "auc", "accuracy": "accuracy"} | ({"f1": "macro-f1"} if each.ask.attribute else {})
        graded = {metric: audited.estimate(each.graded(name)) for name, metric in names.items()}
        graded |= _of_communities(audited, each) if each.ask.community else {}
        return [{**key, "metric": metric, **value, "reason": None} for metric, value in graded.items()]
    found = {name: audited.estimate(each.values(name, valid=False)) for name in ("auc", "f1", "exposed")}
    reasons: dict[str, str | None] = {} if found["exposed"]["users"] else {"exposed": _TOO_FEW}
    seeds, level = len(each.users), audited.level
    hits, alarms = each.counts("hits", "positives"), each.counts("alarms", "negatives")
    if _some(hits) and _some(alarms):
        found["advantage"] = columns(bootstrap_rate_difference(hits, alarms, seed=0, level=level), seeds)
    for at in ("1%", "0.1%"):
        name, hits = f"tpr@{at}", each.counts(f"hits@{at}", "positives")
        if _some(hits) and all(one["thresholds"][at] is not None for one in each.facts):
            alarms, slopes = each.counts(f"alarms@{at}", "negatives"), [one["slopes"][at] for one in each.facts]
            rate = bootstrap_rate(hits, seed=0, level=level, alarms=alarms, slopes=slopes)
            found[name] = columns(rate, seeds)
        else:
            found[name], reasons[name] = nothing(), _TOO_FEW
    return [{**key, "metric": name, **value, "reason": reasons.get(name)} for name, value in found.items()]


def _of_communities(audited: Audited, each: Attacked) -> dict[str, dict[str, Any]]:
    """What could be found of communities, what would be in the best round, and how adversaries differ.

    bound: the share that was seen. accuracy@best: in the round in which it is highest, which only the truth tells (as
    papers give it); accuracy@chosen: in the round in which those claimed stand out most, which an adversary sees.
    accuracy@10% and so on: after the last round, of adversaries, each over its seeds.
    """
    best, chosen = [], []
    for facts, frame in zip(each.facts, each.users, strict=True):
        curve = [_after(facts, frame, at) for at in range(len(facts["rounds"]))]
        known = [at for at, one in enumerate(curve) if len(one.user)]
        if known:
            best.append(curve[max(known, key=lambda at: (round(float(curve[at].value.mean()), 12), -at))])
            chosen.append(curve[max(known, key=lambda at: (facts["separation"][at] or 0.0, -at))])
    found = {"bound": audited.estimate(each.graded("bound"))}
    found |= {"accuracy@best": audited.estimate(best), "accuracy@chosen": audited.estimate(chosen)}
    rows = [frame.filter(~pl.col("valid") & pl.col("accuracy").is_not_null()) for frame in each.users]
    mean = pl.concat(rows).group_by("user").agg(pl.col("accuracy").mean())["accuracy"].to_numpy()
    for name, share in _PERCENTILES.items():
        here = quantile(mean, share, level=audited.level) if len(mean) else None
        found[f"accuracy@{name}"] = nothing() if here is None else columns(here, len(rows))
    return found


def _after(facts: Mapping[str, Any], frame: pl.DataFrame, at: int) -> PerUser:
    """Accuracy after a round: of a community by user as an adversary and as a victim, of a mark by user."""
    curve = pl.Series("curve", facts["curve"][at], pl.Float64)
    if "curve_as_victim" not in facts:
        part = frame.with_columns(curve).filter(~pl.col("valid") & pl.col("curve").is_not_null())
        return per_user(part, "curve")
    column = pl.Series("column", facts["curve_as_victim"][at], pl.Float64)
    return both_ways_of(frame.with_columns(curve, column), "curve", "column")


def _some(counts: Sequence[Counts]) -> bool:
    return bool(counts) and all(each.trials.sum() > 0 and len(each.user) > 1 for each in counts)


def _verdicts(audited: Audited) -> Rows:
    return [_verdict(audited, contest) for contest in audited.contests]


def _verdict(audited: Audited, contest: Contest) -> dict[str, Any]:
    blank = dict.fromkeys(name for name in TABLES["verdicts"] if name not in audited.system.labels)
    candidates = sum(bool(each.users) for each in contest.attacks)
    if contest.chosen is None:
        reasons = dict.fromkeys(each.reason for each in contest.attacks if each.reason)
        few = "Too few users were attacked to choose an attack on some of them and to grade it on others."
        words = f"Not measured. {' '.join(map(str, reasons)) or few}"
        key = {"question": contest.question, "candidates": 0, "verdict": "not measured"}
        return {**blank, **nothing(), **key, "words": words}
    attack = contest.chosen
    value = audited.estimate([*attack.auc.values()])
    found = {
        **blank,
        **value,
        "question": contest.question,
        "attack": attack.ask.name,
        "direction": _direction(attack),
        "candidates": candidates,
        "verdict": "cannot tell",
    }
    who = VANTAGES.get(attack.vantage, attack.vantage)
    what = _WHAT.get(contest.question, f"a user's {contest.question}")
    if (mark := attack.ask.mark) is not None:
        what = f"who has {mark.least} or more items of the kind {mark.name!r} from who has not"
    words = f"{who} tells {what} with AUC {_range(value)} ({attack.ask.name})"
    if contest.null is not None:
        null = contest.null
        beside = audited.estimate([*null.auc.values()])
        excess = _difference(attack.auc, null.auc, audited.level)
        found |= {"null": null.ask.name, "null_value": beside["value"], "null_low": beside["low"]}
        found |= {"null_high": beside["high"], "excess": excess.value}
        found |= {"excess_low": excess.low, "excess_high": excess.high}
        found["verdict"] = "leaks" if excess.low > 0 else "not found" if excess.high <= _SMALL else "cannot tell"
        add = _ADD[found["verdict"]].format(what=_SEEN.get(attack.vantage, "uploads"))
        words += f"; somebody {_NULLS.get(null.ask.name.split(', ')[0], null.ask.name)}, with {_range(beside)}. {add}"
    return {**found, "words": words}


def _direction(attack: Attacked) -> int:
    """-1 or 1: how its scores were read in most seeds; 0 if in half of them."""
    return int(np.sign(sum(facts["direction"] for facts in attack.facts)))


def _range(value: Mapping[str, Any]) -> str:
    return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _utility(audited: Audited) -> Rows:
    found: Rows = []
    given = [ranked(each.path, by="recommender") for each in audited.baselines if each.path.exists()]
    names = [name for name in (given[0].columns if given else []) if name not in ("user", "recommender")]
    for name in given[0]["recommender"].unique(maintain_order=True) if given else []:
        some = [table.filter(pl.col("recommender") == name) for table in given]
        for metric in names:
            values = [per_user(table, metric) for table in some]
            found.append({"recommender": name, "metric": metric, **audited.estimate(values)})
    if any(has_utility(cell) for cell in audited.cells):
        label = audited.system.model.label
        for metric in names or ("hit@10", "ndcg@10"):
            found.append(
                {"recommender": label, "metric": metric, **audited.estimate([*audited.utility(metric).values()])}
            )
    return found


def _comparisons(audited: Audited, reference: Audited) -> Rows:
    found: Rows = []
    against = reference.system.defense.label
    pairs: list[tuple[str, str | None, str, BySeed, BySeed]] = []
    for one, other in zip(audited.contests, reference.contests, strict=True):
        mine, theirs = one.chosen, other.chosen
        if mine is None or theirs is None:
            continue
        if mine.vantage == theirs.vantage and mine.ask.aside == theirs.ask.aside:
            pairs.append((one.question, mine.ask.name, "auc", mine.auc, theirs.auc))
        else:  # asked about other pairs: what is easy there is no leak, so each is taken beyond its own null
            pairs.append((one.question, mine.ask.name, "excess", one.excess, other.excess))
    for metric in ("hit@10", "ndcg@10"):
        pairs.append(("utility", None, metric, audited.utility(metric), reference.utility(metric)))
    for question, attack, metric, first, second in pairs:
        if common(first, second):
            difference = _difference(first, second, audited.level)
            key = {"reference": against, "question": question, "attack": attack, "metric": metric}
            found.append({**key, **columns(difference, difference.seeds), "p": difference.p, "p_holm": None})
    return found


def _difference(first: BySeed, second: BySeed, level: float) -> Difference:
    seeds = common(first, second)
    found = paired([first[seed] for seed in seeds], [second[seed] for seed in seeds], seed=0, level=level)
    return replace(found, low=max(-1.0, found.low), high=min(1.0, found.high))


def _correct(rows: Rows) -> None:
    """Holm's correction, over the defenses that are compared in the same question and metric."""
    families: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        key = tuple(row[name] for name in ("data", "model", "protocol", "question", "metric"))
        families.setdefault(key, []).append(row)
    for family in families.values():
        for row, adjusted in zip(family, holm(np.array([row["p"] for row in family])).tolist(), strict=True):
            row["p_holm"] = adjusted


def _ledger(audited: Audited) -> Rows:
    files = [cell.path / "facts.json" for cell in audited.cells]
    spent = [stored(file, "ledger")["ledger"] for file in files if file.exists()]
    entries = [max(same, key=_spent) for same in zip(*filter(None, spent), strict=True)]  # of the costliest seed
    bounds = []
    for cell in audited.canaries:
        for ask in cell.asks:
            file = cell.path / f"{ask.key}.json"
            if file.exists() and (bound := stored(file).get("bound")):
                bounds.append(bound)
    shown = {"canaries": None, "at_least": None, "level": None}
    if bounds:
        best = bounds[0]  # the first attack's that could be run: chosen before anything was seen
        shown = {"canaries": best["canaries"], "at_least": best["epsilon"], "level": best["level"]}
    columns = [name for name in TABLES["ledger"] if name not in (*audited.system.labels, *shown)]
    return [{**{name: entry.get(name) for name in columns}, **shown} for entry in entries]


def _spent(entry: Mapping[str, Any]) -> float:
    return float(entry["composed"] or 0)


def _roc(audited: Audited) -> Rows:
    return [
        {"question": each.ask.question, "attack": each.ask.name, "role": each.ask.kind, "seed": each.seeds[0]}
        | {"fpr": fpr, "tpr": tpr}
        for each in audited.of_kind("attack", "null")
        if each.users
        for fpr, tpr in each.facts[0]["roc"]
    ]


def _parts(audited: Audited) -> Rows:
    found: Rows = []
    for each in audited.of_kind("component"):
        key = {"question": each.ask.question, "attack": each.ask.name, "part": each.ask.role, "x": None}
        key["kind"] = "component"
        value = audited.estimate(each.values("auc", valid=False)) if each.users else nothing()
        found.append({**key, **value, "reason": each.reason})
    for contest in audited.contests:
        if contest.question == MEMBERSHIP and contest.chosen is not None:
            found += _groups_of(audited, contest.chosen)
        if contest.question == COMMUNITY or any(each.ask.mark is not None for each in contest.attacks):
            found += [row for each in contest.attacks for row in _curve_of(audited, each)]
    return found


def _curve_of(audited: Audited, attack: Attacked) -> Rows:
    """Accuracy after each round, of the adversaries on whom the attacker was not chosen."""
    key = {"question": attack.ask.question, "attack": attack.ask.name, "kind": "accuracy", "reason": None}
    found: Rows = []
    for at, round in enumerate(attack.facts[0]["rounds"] if attack.facts else ()):
        values = [_after(*one, at) for one in zip(attack.facts, attack.users, strict=True) if at < len(one[0]["curve"])]
        found.append({**key, "part": f"{round + 1:,}", "x": float(round + 1), **audited.estimate(values)})
    return found


def _groups_of(audited: Audited, attack: Attacked) -> Rows:
    """AUC by round, activity and attributes of the users; not of attributes, whose AUC is no mean over users."""
    found: Rows = []
    key = {"question": attack.ask.question, "attack": attack.ask.name, "reason": None}
    people = loaded(audited.system.data).users
    attributes = [name for name in people.columns[1:] if people.schema[name] == pl.String]
    about = people.select(attributes).with_row_index("user").with_columns(pl.col("user").cast(pl.Int64))
    graded = [frame.filter(~pl.col("valid") & pl.col("auc").is_not_null()) for frame in attack.users]
    frames = [frame.join(about, on="user", how="left", maintain_order="left") for frame in graded]
    for kind in ("round", "activity", *attributes):
        for part, x, some in _groups(frames, kind):
            if min(map(len, some)) >= _FEW:
                values = audited.estimate([per_user(frame, "auc") for frame in some])
                found.append({**key, "kind": kind, "part": part, "x": x, **values})
    return found


def _groups(frames: Sequence[pl.DataFrame], kind: str) -> Iterable[tuple[str, float | None, list[pl.DataFrame]]]:
    """Users by what they have in common: a label, a place on an axis, and those of each seed."""
    if not len(frames) or not all(len(frame) for frame in frames):
        return
    every = pl.concat([frame.select(kind) for frame in frames])[kind].drop_nulls()
    if every.dtype == pl.String:
        for name in sorted(every.unique().to_list()):
            yield name, None, [frame.filter(pl.col(kind) == name) for frame in frames]
        return
    ends = np.unique(np.quantile(every.to_numpy(), np.linspace(0, 1, _GROUPS + 1), method="nearest"))
    for low, high in pairwise(ends):
        last = high == ends[-1]
        part = [frame.filter(pl.col(kind).is_between(low, high, closed="both" if last else "left")) for frame in frames]
        top = int(high) if last else int(high) - 1
        yield f"{int(low):,} to {top:,}" if top > low else f"{int(low):,}", (float(low) + top) / 2, part


def _risk(audited: Audited) -> list[pl.DataFrame]:
    people = loaded(audited.system.data).users["id"]
    found = []
    for each in audited.of_kind("attack"):
        for seed, frame in zip(each.seeds, each.users, strict=True):
            ordered = frame.filter(pl.col("round") >= 0).sort(
                ["exposed", "auc", "user"], descending=[True, True, False], nulls_last=True
            )
            labels = {**audited.system.labels, "question": each.ask.question, "attack": each.ask.name}
            own = each.ask.question == MEMBERSHIP
            auc = pl.col("auc") if own else pl.lit(None, pl.Float64).alias("auc")
            made = ordered.select(
                *(pl.lit(value).alias(name) for name, value in labels.items()),
                pl.lit(seed).alias("seed"),
                pl.Series("user", people.gather(ordered["user"])),
                "activity",
                auc,
                "exposed",
                pl.int_range(1, pl.len() + 1).alias("rank"),
            )
            found.append(made)
    return found


_MAKERS: Mapping[str, Callable[[Audited], Rows]] = {
    "scores": _scores,
    "verdicts": _verdicts,
    "utility": _utility,
    "ledger": _ledger,
    "roc": _roc,
    "parts": _parts,
}
