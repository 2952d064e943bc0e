"""What a cell stores of each attack: its grades user by user, what it knew, its curves; or why there is nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.attacks.base import Knowledge, WhichAttribute, WhichItems, WhoBelongs
from recleak.attacks.community_targets import groups_of
from recleak.canaries import Canaries, bound
from recleak.cells import Ask, Cell
from recleak.errors import ConfigError
from recleak.files import replace_table, replace_text
from recleak.grading import (
    as_victims,
    communities,
    grade_communities,
    grade_holders,
    grade_users,
    shuffled,
    truth_of,
)
from recleak.metrics.comparison import is_known, is_validation
from recleak.metrics.inference import most_probable
from recleak.metrics.linearized import auc_both_ways, auc_values, macro_f1_values
from recleak.recording import Listening
from recleak.watching import Watching
from recleak.wire import Aggregator, Server

if TYPE_CHECKING:
    from recleak.made import Made

REVERSED = " reversed"  # after the name of a grade: of the same scores, read the other way round
_LOOKOUTS = 50  # users who play the adversary that looks for holders of a mark
DELTA = 1e-6  # of ledger and canaries; times the canaries it must be far below 1 - their level


def store(cell: Cell, name: str, content: Mapping[str, Any]) -> None:
    """A file of a cell."""
    replace_text(cell.path / f"{name}.json", json.dumps(content, indent=1, allow_nan=False) + "\n")


def _about(ask: Ask) -> dict[str, Any]:
    about = {"attack": ask.name, "question": ask.question, "kind": ask.kind, "role": ask.role}
    return {**about, "settings": dict(ask.settings)}


def store_reason(cell: Cell, ask: Ask, reason: str) -> None:
    """Why there is nothing of an attack."""
    store(cell, ask.key, {**_about(ask), "reason": reason})


def store_grades(
    cell: Cell,
    ask: Ask,
    tap: Listening[Any, WhichItems],
    question: WhichItems,
    made: Made,
    rounds: NDArray[np.int64],
) -> None:
    """Which items are a user's own."""
    truth = truth_of(question, made.train)
    if ask.shuffle:
        truth = shuffled(question, truth, cell.seed)
    valid = is_validation(question.client.numpy(), ask.validation)
    graded = grade_users(question, tap.answer(question), truth, valid)
    who = graded.users["user"].to_numpy()
    users = graded.users.with_columns(
        pl.Series("round", rounds[who]), pl.Series("activity", made.train.activity[who].astype(np.int64))
    )
    replace_table(cell.path / f"{ask.key}.parquet", users)
    facts = {
        "reason": None,
        "vantage": type(tap.vantage).__name__,
        "knowledge": str(tap.knowledge),
        "direction": graded.direction,
        "thresholds": {name: None if value is None else repr(value) for name, value in graded.thresholds.items()},
        "slopes": graded.slopes,
        "roc": graded.roc,
    }
    store(cell, ask.key, {**_about(ask), **facts})


def store_attribute(
    cell: Cell, ask: Ask, tap: Listening[Any, WhichAttribute], made: Made, rounds: NDArray[np.int64]
) -> None:
    """Graded on the users who took part and whose attribute the adversary does not know.

    AUC and macro F1 are of all validation users, and of all others, as values by user (`metrics.linearized`).
    """
    label, names = made.classes(ask)
    user = np.arange(len(label))
    asked = user[(rounds >= 0) & (label >= 0) & ~is_known(user, ask.known)]
    answer = tap.answer(WhichAttribute(torch.from_numpy(asked), ask.attribute, tuple(names))).double().numpy()
    valid, own = is_validation(asked, ask.validation), label[asked]
    direction = 1
    if len(names) == 2 and len(np.unique(own[valid])) > 1 and auc_values(answer[valid], own[valid]).mean() < 0.5:
        answer, direction = answer[:, ::-1], -1  # that is a leak too: read the other way round
    guess = most_probable(answer, asked, cell.seed)
    auc, f1 = np.full(len(asked), np.nan), np.full(len(asked), np.nan)
    for part in (valid, ~valid):
        if len(np.unique(own[part])) > 1:
            auc[part] = auc_values(answer[part], own[part])
            f1[part] = macro_f1_values(guess[part], own[part], len(names))
    frame = pl.DataFrame(
        {
            "user": asked,
            "valid": valid,
            "label": own,
            "guess": guess,
            "auc": auc,
            "f1": f1,
            "accuracy": (guess == own).astype(np.float64),
            "exposed": answer[np.arange(len(own)), own] / np.maximum(answer.sum(axis=1), 1e-12),
            "round": rounds[asked],
            "activity": made.train.activity[asked].astype(np.int64),
        }
    ).with_columns(pl.col("auc", "f1").fill_nan(None))
    replace_table(cell.path / f"{ask.key}.parquet", frame)
    facts = {
        "reason": None,
        "vantage": type(tap.vantage).__name__,
        "knowledge": str(tap.knowledge),
        "classes": names,
        "history": bool(getattr(tap.attack, "history", False)),
        "direction": direction,
        "roc": [],
    }
    store(cell, ask.key, {**_about(ask), **facts})


def store_bound(cell: Cell, ask: Ask, tap: Listening[Any, WhichItems], canaries: Canaries) -> None:
    """What canaries show at least."""
    found = bound(canaries, tap.answer(canaries.question).double().numpy(), delta=DELTA)
    store(cell, ask.key, {**_about(ask), "reason": None, "bound": asdict(found)})


def truth_of_communities(made: Made, ask: Ask, aside: Tensor | None = None) -> Tensor:
    """Who is similar to each user and not `aside` (bool[U, U]), bool[U, U]; in the audit's test of itself, some other
    users.
    """
    users = torch.arange(made.train.n_users)
    truth = communities(made.targets, made.split.train, ask.community, users, aside)
    if ask.shuffle:
        lot = torch.from_numpy(random.uniform(made.seed, "shuffled communities", users.numpy()[:, None], users.numpy()))
        lot.fill_diagonal_(2)
        if aside is not None:
            lot[aside] = 2  # after all others: a community stays as large as it was
        truth = lot.argsort(1).argsort(1) < truth.sum(1, keepdim=True)
    return truth


def set_aside(attack: Any, knowledge: Knowledge) -> Tensor | None:
    """Who is not looked for as it tells an adversary its vector, for the mean of those who side with it, bool[U, U]."""
    return groups_of(knowledge) if getattr(attack, "vector", "sent") == "mean" else None


def graded_both_ways(answer: Tensor, grade: Callable[[Tensor], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The grades of an answer after a round, and of the same read the other way round: which one counts shows at the
    end. Who was not heard of stays the last.
    """
    other = _turned(answer)
    return {**grade(answer), **{name + REVERSED: value for name, value in grade(other).items()}}


def _turned(answer: Tensor) -> Tensor:
    return torch.where(torch.isfinite(answer), -answer, answer)


def store_community(
    cell: Cell, ask: Ask, tap: Watching[Any, WhoBelongs], made: Made, rounds: NDArray[np.int64]
) -> None:
    """Every user plays the adversary, with its own items as the targets, and is a victim of the others.

    Grades as an adversary are of those who took part. auc: how well its scores tell its community from the others,
    those it never heard of last; of validation users among validation users, of the others among the others, so that no
    victim on whom the attacker was chosen grades it. exposed: of the user as a victim. `*_as_victim` is what a user
    adds to the mean of all adversaries by being there for them (`metrics.intervals.both_ways`).
    """
    everybody = torch.arange(made.train.n_users)
    aside = set_aside(tap.attack, tap.knowledge)
    truth, answer = truth_of_communities(made, ask, aside), tap.answer(WhoBelongs(everybody, everybody)).double()
    answer = torch.where(torch.isfinite(answer), answer, float("-inf"))
    valid, took_part = is_validation(everybody.numpy(), ask.validation), rounds >= 0
    direction, auc, auc_as_victim = 1, *_auc_by_part(answer, truth, valid, aside)
    chosen = auc[valid & took_part]
    if _known(chosen) and round(float(np.nanmean(chosen)), 12) < 0.5:
        answer, direction = _turned(answer), -1  # that is a leak too: read the other way round
        auc, auc_as_victim = _auc_by_part(answer, truth, valid, aside)
    graded = grade_communities(answer, truth, ask.community, everybody, aside)
    frame = pl.DataFrame(
        {
            "user": everybody.numpy(),
            "valid": valid,
            "auc": np.where(took_part, auc, np.nan),
            "accuracy": np.where(took_part, graded["accuracy"].double().numpy(), np.nan),
            "bound": np.where(took_part, graded["bound"].double().numpy(), np.nan),
            "exposed": np.where(took_part, graded["exposed"].double().numpy(), np.nan),
            "auc_as_victim": np.where(valid, np.nan, auc_as_victim),
            "accuracy_as_victim": as_victims(graded["accuracy"], graded["exposed"], truth),
            "bound_as_victim": as_victims(graded["bound"], graded["heard"], truth),
            "round": rounds,
            "activity": made.train.activity.astype(np.int64),
        }
    ).with_columns(pl.selectors.float().fill_nan(None))
    replace_table(cell.path / f"{ask.key}.parquet", frame)
    way = "" if direction > 0 else REVERSED
    accuracy, exposed = tap.curve("accuracy" + way), tap.curve("exposed" + way)
    by_victim = [as_victims(own, each, truth) for own, each in zip(accuracy, exposed, strict=True)]
    facts = {
        "reason": None,
        "vantage": type(tap.vantage).__name__,
        "knowledge": str(tap.knowledge),
        "direction": direction,
        "rounds": tap.rounds.tolist(),
        "curve": [_listed(np.where(took_part, row, np.nan)) for row in accuracy.double().numpy()],
        "curve_as_victim": [_listed(row) for row in by_victim],
        "separation": _listed(tap.curve("separation" + way).double().numpy()),
        "roc": [],
    }
    store(cell, ask.key, {**_about(ask), **facts})


def _auc_by_part(
    answer: Tensor, truth: Tensor, valid: NDArray[np.bool_], aside: Tensor | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """AUC of each adversary, and what each adds as a victim, f64[U] twice: among validation users, and the others. Who
    stands `aside`, bool[U, U], is no victim.
    """
    score = answer.numpy()
    score = np.where(np.isfinite(score), score, np.min(score, where=np.isfinite(score), initial=0.0) - 1)
    auc, column = np.full(len(score), np.nan), np.zeros(len(score))
    for part in (np.flatnonzero(valid), np.flatnonzero(~valid)):
        inside = np.ix_(part, part)
        off = None if aside is None else aside.numpy()[inside]
        auc[part], column[part] = auc_both_ways(score[inside], truth.numpy()[inside], off)
    return auc, column


def _listed(values: NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(each) else round(each, 6) for each in values.tolist()]


def lookouts_of(made: Made, attack: Any) -> Tensor | None:
    """Users who play an adversary that looks for holders of a mark, i64[A]; None: it is the server, without any."""
    if attack.vantage in (Server, Aggregator) and getattr(attack, "vector", "sent") not in ("told", "mean"):
        return None
    users = np.arange(made.train.n_users)
    return torch.from_numpy(random.bits(made.seed, "lookouts", users).argsort()[:_LOOKOUTS])


def node_of(made: Made) -> Tensor:
    """The user who plays the adversary at nodes where one does: of those with items, drawn, i64[1]."""
    users = np.flatnonzero(made.train.activity)
    return torch.from_numpy(users[random.bits(made.seed, "node", users).argsort()[:1]])


def truth_of_mark(made: Made, ask: Ask) -> Tensor:
    """Who holds the mark, bool[U]; in the audit's test of itself, some other users."""
    if ask.mark is None:
        raise AssertionError("only asked of marks")
    truth = ask.mark.holders(made.split.train)
    if ask.shuffle:
        truth = truth[random.bits(made.seed, "shuffled holders", np.arange(len(truth))).argsort()]
    if truth.all() or not truth.any():
        few = "everybody" if truth.all() else "nobody"
        raise ConfigError(
            f"Of the mark {ask.mark.name!r}, {few} has {ask.mark.least} or more items, expected some.\n  "
            "Change its categories, titles or least."
        )
    return torch.from_numpy(truth)


def store_mark(cell: Cell, ask: Ask, tap: Watching[Any, WhoBelongs], made: Made, rounds: NDArray[np.int64]) -> None:
    """Who has items of a kind; every user who took part is a row.

    auc is of all validation users, and of all others, as values by user. accuracy and exposed: of a holder, the share
    of the adversaries that claim it, each as many users as there are holders.
    """
    users, truth = np.flatnonzero(rounds >= 0), truth_of_mark(made, ask)
    leader = lookouts_of(made, tap.attack)
    adversaries = torch.arange(1 if leader is None else len(leader))
    answer = tap.answer(WhoBelongs(adversaries, torch.arange(made.train.n_users)))
    valid = is_validation(users, ask.validation)
    graded, direction = _by_part(answer, truth, leader, users, valid), 1
    if round(float(np.nanmean(graded["auc"][valid])), 12) < 0.5 if _known(graded["auc"][valid]) else False:
        answer, direction = _turned(answer), -1
        graded = _by_part(answer, truth, leader, users, valid)
    frame = pl.DataFrame(
        {
            "user": users,
            "valid": valid,
            "auc": graded["auc"],
            "accuracy": graded["accuracy"],
            "exposed": graded["accuracy"],
            "round": rounds[users],
            "activity": made.train.activity[users].astype(np.int64),
        }
    ).with_columns(pl.col("auc", "accuracy", "exposed").fill_nan(None))
    replace_table(cell.path / f"{ask.key}.parquet", frame)
    curve = tap.curve("accuracy" + ("" if direction > 0 else REVERSED)).numpy()[:, users]
    facts = {
        "reason": None,
        "vantage": type(tap.vantage).__name__,
        "knowledge": str(tap.knowledge),
        "direction": direction,
        "rounds": tap.rounds.tolist(),
        "curve": [_listed(row) for row in curve],
        "share": round(float(truth.double().mean()), 6),
        "roc": [],
    }
    store(cell, ask.key, {**_about(ask), **facts})


def _by_part(
    answer: Tensor, truth: Tensor, leader: Tensor | None, users: NDArray[np.int64], valid: NDArray[np.bool_]
) -> dict[str, NDArray[np.float64]]:
    """Grades of users: claims among all, AUC among validation users, and among the others."""
    claims = grade_holders(answer, truth, leader)["accuracy"].numpy()[users]
    auc = np.full(len(users), np.nan)
    for part in (valid, ~valid):
        inside = users[part]
        place = {int(user): at for at, user in enumerate(inside)}  # -1: somebody of the other part
        own = None if leader is None else torch.tensor([place.get(int(each), -1) for each in leader])
        auc[part] = grade_holders(answer[:, inside], truth[inside], own)["auc"].numpy()
    return {"auc": auc, "accuracy": claims}


def _known(values: NDArray[np.float64]) -> bool:
    return bool((~np.isnan(values)).any())
