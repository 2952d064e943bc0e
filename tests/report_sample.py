"""Rich findings for the report's tests: made up, from a fixed seed, with names that want to be markup."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from scipy.stats import norm

from recleak.findings import Findings

SCRIPT = "<script>alert(1)</script>"
IMAGE = '"><img src=x onerror=alert(2)>'
COMMENT = "<!-- </script> & 'quoted' </title>"
DATA = f"ML-100K {SCRIPT}"
DEFENSES = ("none", "noise 0.1", f"proximal {IMAGE}", "secure aggregation")
MODELS = ("Fed-NCF", "Fed-LightGCN")
ATTACKS = ("GradientAlignment", "ShadowClients", "KMeans", "AlignmentOfSums")
NULLS = ("Popularity", "RandomGuess", "AllPositive")
QUESTION, GENDER = "membership", "gender"
_STRENGTH = {"none": 0.985, "noise 0.1": 0.93, DEFENSES[2]: 0.88, "secure aggregation": 0.54}
_UTILITY = {"none": 0.402, "noise 0.1": 0.391, DEFENSES[2]: 0.335, "secure aggregation": 0.398}
_SKILL = {"GradientAlignment": 1.0, "ShadowClients": 0.72, "KMeans": 0.45, "AlignmentOfSums": 0.2}
_GUESS = {"Popularity": 0.857, "RandomGuess": 0.5, "AllPositive": 0.5}
Rows = list[dict[str, Any]]


def sample(*, self_test: bool = False, users: int = 120, points: int = 120) -> Findings:
    """Two models, three defenses and none, four attacks and three nulls, two questions, two seeds."""
    rng = np.random.default_rng(7)
    rows: dict[str, Rows] = {
        name: [] for name in ("scores", "verdicts", "comparisons", "utility", "ledger", "roc", "parts", "risk")
    }
    for model, defense in product(MODELS, DEFENSES):
        system = {"data": DATA, "model": model, "protocol": "federated", "defense": defense}
        shift = 0.0 if model == MODELS[0] else -0.03
        summed = defense == "secure aggregation"
        chosen = "AlignmentOfSums" if summed else "GradientAlignment"
        for name in (*ATTACKS, *NULLS):
            role = "null" if name in NULLS else "attack"
            reason = _reason(name, summed)
            top = _GUESS[name] if role == "null" else 0.5 + (_STRENGTH[defense] - 0.5) * (1 if summed else _SKILL[name])
            rows["scores"] += _scores(rng, system, name, role, None if reason else top + shift * (top > 0.5), reason)
            if reason is None:
                rows["roc"] += _roc(system, name, role, top, points)
            if reason is None and role == "attack":
                rows["risk"] += _risk(rng, system, name, top + shift, users)
        rows["verdicts"] += _verdicts(system, chosen, _STRENGTH[defense] + shift, summed)
        rows["utility"] += _utility(system, _UTILITY[defense] + shift)
        rows["parts"] += _parts(rng, system, chosen, _STRENGTH[defense] + shift, summed)
        rows["ledger"] += _ledger(system)
        if defense != "none":
            rows["comparisons"] += _comparisons(system, chosen)
    return Findings.of(_about(self_test), rows)


def big(systems: int = 20, attacks: int = 8, risk: int = 50_000, points: int = 400) -> Findings:
    """Many systems and attacks, and as many rows of users as asked for."""
    rng = np.random.default_rng(8)
    rows: dict[str, Rows] = {
        name: [] for name in ("scores", "verdicts", "comparisons", "utility", "roc", "parts", "risk")
    }
    each = risk // (systems * attacks)
    for number in range(systems):
        system = {
            "data": f"data {number % 2}",
            "model": "NCF",
            "protocol": "federated",
            "defense": f"defense {number // 2}",
        }
        top = 0.95 - 0.02 * number
        for place in range(attacks + 3):
            name, role = (f"attack {place}", "attack") if place < attacks else (f"guesser {place - attacks}", "null")
            level = 0.5 + (top - 0.5) / (1 + place)
            rows["scores"] += _scores(rng, system, name, role, level, None)
            rows["roc"] += _roc(system, name, role, level, points)
            rows["risk"] += _risk(rng, system, name, level, each, seeds=1) if role == "attack" else []
        rows["verdicts"].append(_verdict(system, QUESTION, "attack 0", top, "guesser 0", 0.6, attacks))
        rows["utility"] += _utility(system, 0.4 - 0.01 * number)
        rows["parts"] += _parts(rng, system, "attack 0", top, False, rounds=200)
        rows["comparisons"] += _comparisons(system, "attack 0") if number > 1 else []
    return Findings.of({**_about(False), "title": "Many systems", "systems": []}, rows)


def empty(**about: Any) -> Findings:
    """Nothing at all."""
    return Findings.of(about, {})


def _reason(attack: str, summed: bool) -> str | None:
    if summed and attack in ("GradientAlignment", "ShadowClients", "KMeans"):
        return "behind secure aggregation there are only sums: no upload of one client to read"
    return "this attack reads sums; here every upload is seen" if not summed and attack == "AlignmentOfSums" else None


def _value(value: float | None, half: float, users: int = 188, seeds: int = 2) -> dict[str, Any]:
    if value is None:
        return {"value": None, "low": None, "high": None, "users": None, "seeds": None}
    return {
        "value": value,
        "low": max(0.0, value - half),
        "high": min(1.0, value + half),
        "users": users,
        "seeds": seeds,
    }


def _scores(
    rng: np.random.Generator, system: dict[str, str], name: str, role: str, top: float | None, reason: str | None
) -> Rows:
    key = {**system, "question": QUESTION, "attack": name, "role": role, "reason": reason}
    vantage = "Aggregator" if "Sums" in name else "Server"
    made = []
    for metric, factor in (("auc", 1.0), ("f1", 0.8), ("tpr@1%", 0.5), ("tpr@0.1%", 0.2), ("advantage", 0.7)):
        value = None if top is None or (metric == "tpr@0.1%" and role == "null") else top * factor
        made.append({**key, "vantage": vantage, "metric": metric, **_value(value, float(rng.uniform(0.005, 0.015)))})
    return made


def _verdict(
    system: dict[str, str], question: str, attack: str, value: float, null: str, guess: float, candidates: int
) -> dict[str, Any]:
    leaks = value - 0.01 > guess + 0.01
    who = "The server that receives sums" if "Sums" in attack else "The server that receives uploads"
    learns = "tells a user’s own items from others" if question == QUESTION else "tells the gender of a user"
    words = (
        f"{who} {learns} with AUC {value:.2f} [{value - 0.01:.2f}, {min(1, value + 0.01):.2f}]; "
        f"a guesser who knows only what is popular: {guess:.2f}."
    )
    return {
        **system,
        "question": question,
        "attack": attack,
        "direction": 1,
        "candidates": candidates,
        **_value(value, 0.01),
        "null": null,
        "null_value": guess,
        "null_low": guess - 0.012,
        "null_high": guess + 0.012,
        "excess": value - guess,
        "excess_low": value - guess - 0.015,
        "excess_high": value - guess + 0.015,
        "verdict": "leaks" if leaks else "not found",
        "words": words if leaks else f"{words} That is no more than a guess.",
    }


def _verdicts(system: dict[str, str], chosen: str, value: float, summed: bool) -> Rows:
    made = [_verdict(system, QUESTION, chosen, value, "Popularity", 0.857 if not summed else 0.55, 1 if summed else 3)]
    if system["model"] == MODELS[0]:
        blank = dict.fromkeys(made[0])
        unmeasured = {**blank, **system, "question": GENDER, "verdict": "not measured"}
        words = "Nothing was measured: behind secure aggregation no attack on attributes applies."
        other = _verdict(system, GENDER, "FromItems", 0.62 + value / 20, "Majority", 0.5, 2)
        made.append({**unmeasured, "words": words} if summed else other)
    return made


def _utility(system: dict[str, str], value: float) -> Rows:
    made = []
    for name, level in (("chance", 0.1), ("MostPop", 0.262), ("ItemKNN", 0.423), (system["model"], value)):
        for metric, factor in (("hit@10", 1.0), ("ndcg@10", 0.55)):
            half = 0.0 if name == "chance" else 0.018
            made.append({**system, "recommender": name, "metric": metric, **_value(level * factor, half, 943)})
    return made


def _roc(system: dict[str, str], name: str, role: str, top: float, points: int) -> Rows:
    """Binormal curves of an area: TPR = Phi(a + Phi^-1(FPR)) with AUC = Phi(a / sqrt(2))."""
    fpr = np.concatenate([[0.0], np.geomspace(1e-5, 1, points - 1)])
    made: Rows = []
    for seed in range(2):
        tpr = norm.cdf(np.sqrt(2) * norm.ppf(min(0.999, top + 0.004 * seed)) + norm.ppf(fpr))
        key = {**system, "question": QUESTION, "attack": name, "role": role, "seed": seed}
        made += [{**key, "fpr": float(x), "tpr": float(y)} for x, y in zip(fpr, tpr, strict=True)]
    return made


def _risk(rng: np.random.Generator, system: dict[str, str], name: str, top: float, users: int, seeds: int = 2) -> Rows:
    made: Rows = []
    for seed in range(seeds):
        auc = np.clip(rng.beta(40 * top, 40 * (1 - top), users), 0, 1)
        auc[0] = 1.0
        rank = np.argsort(np.argsort(-auc)) + 1
        for user in range(users):
            label = f"{user}" if user % 97 else f"{user} {IMAGE}{COMMENT}"
            made.append(
                {**system, "question": QUESTION, "attack": name, "seed": seed, "user": label, "activity": 20 + user}
                | {"auc": float(auc[user]), "exposed": float(auc[user] ** 4), "rank": int(rank[user])}
            )
    return made


def _parts(
    rng: np.random.Generator, system: dict[str, str], attack: str, top: float, summed: bool, rounds: int = 40
) -> Rows:
    key = {**system, "question": QUESTION, "attack": attack, "x": None, "reason": None}
    made: Rows = []
    for x in range(1, rounds + 1):
        value = 0.5 + (top - 0.5) * (1 - np.exp(-x / 12)) + rng.normal(0, 0.004)
        made.append({**key, "kind": "round", "part": str(x), "x": float(x), **_value(float(value), 0.02)})
    for name, factor in (("item", 1.0), ("head", 0.55)):
        made.append(
            {**key, "attack": "KMeans", "kind": "component", "part": name, **_value(0.5 + (top - 0.5) * factor, 0.012)}
        )
    why = "not sent: the client keeps it"
    made.append({**key, "attack": "KMeans", "kind": "component", "part": "user", **_value(None, 0), "reason": why})
    groups = [("activity", ("20 to 40", "41 to 110", "111 and more")), ("gender", ("F", "M", f"{SCRIPT}"))]
    for kind, names in groups:
        for place, part in enumerate(names):
            made.append({**key, "kind": kind, "part": part, **_value(top - 0.02 * place, 0.015, 60)})
    return made[: rounds + 3] if summed else made


def _ledger(system: dict[str, str]) -> Rows:
    blank: dict[str, Any] = dict.fromkeys(("claimed", "composed", "delta", "times", "canaries", "at_least", "level"))
    key = {**system, **blank, "unit": "nothing", "neighbors": "nothing"}
    if system["defense"] == "noise 0.1":
        numbers: dict[str, Any] = {"claimed": 1.04, "composed": 12.3, "delta": 1e-5, "times": 40}
        numbers |= {"canaries": 200, "at_least": 2.31, "level": 0.95}
        if system["model"] != MODELS[0]:
            numbers |= {"composed": float("inf"), "at_least": None}
        unit = {"unit": "everything that a client uploads", "neighbors": "all data of one client replaced by any other"}
        words = "The busiest client sent 40 uploads; half of those who took part sent 9 or fewer."
        return [{**key, **numbers, **unit, "mechanism": "Gaussian noise, σ = 0.1", "words": words}]
    if system["defense"] == "secure aggregation":
        words = "No guarantee. It hides single uploads from the server; the sums themselves are not noised."
        return [{**key, "mechanism": "secure aggregation", "words": words}]
    return [] if system["defense"] != "none" else [{**key, "mechanism": "none", "words": "No guarantee. No defense."}]


def _comparisons(system: dict[str, str], attack: str) -> Rows:
    strength = _STRENGTH.get(system["defense"], 0.8) - _STRENGTH["none"]
    utility = _UTILITY.get(system["defense"], 0.38) - _UTILITY["none"]
    made: Rows = []
    for question, name, metric, value, p in (
        (QUESTION, attack, "auc", strength, 1e-5),
        ("utility", None, "hit@10", utility, 0.0004 if utility < -0.02 else 0.31),
        ("utility", None, "ndcg@10", utility / 2, 0.2),
    ):
        ends = {"value": value, "low": value - 0.012, "high": value + 0.012, "users": 188, "seeds": 2}
        key = {**system, "reference": "none", "question": question, "attack": name, "metric": metric}
        made.append({**key, **ends, "p": p, "p_holm": min(1.0, 3 * p)})
    return made


def _about(self_test: bool) -> dict[str, Any]:
    texts = {
        "none": "Without a defense",
        "noise 0.1": "Gaussian noise of 0.1 on each upload",
        DEFENSES[2]: f"IMIA's regularizer, weight 1 {COMMENT}",
        "secure aggregation": "The server receives sums of nine uploads",
    }
    knowledge = {"hyper-parameters": True, "labelled users": 0, "facts": ["popularity", "which defense is in force"]}
    return {
        "recleak": "0.5.0",
        "title": f"What federated recommenders leak {COMMENT}",
        "experiment": {
            "seeds": [0, 1],
            "data": {"use": "movielens", "name": DATA, "note": COMMENT},
            "models": [{"use": "ncf.NCF", "dim": 64}, {"use": "lightgcn.LightGCN", "dim": 64}],
            "training": {"use": "federated.Federated", "rounds": 40, "clients_per_round": 9},
        },
        "systems": [
            {"data": DATA, "model": model, "protocol": "federated", "defense": defense, "text": texts[defense]}
            for model, defense in product(MODELS, DEFENSES)
        ],
        "attacks": [
            {"attack": name, "question": QUESTION, "vantage": "Server", "role": "null" if name in NULLS else "attack"}
            | {
                "text": f"What {name} does, in a sentence.",
                "settings": f"{name}(seed=0)",
                "knowledge": knowledge if name not in NULLS else "popularity",
            }
            for name in (*ATTACKS, *NULLS)
        ],
        "notes": ["Users with fewer than 20 interactions were left out.", f"A note with {IMAGE}"],
        "level": 0.95,
        "validation": 0.2,
        "self_test": self_test,
        "environment": {"python": "3.11.9", "torch": "2.13.0", "machine": "two cores"},
        "command": f"recleak audit experiment.toml --out run  # {IMAGE}",
    }
