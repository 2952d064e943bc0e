"""Who attacks in the cells of PARD, and how their answers are graded: what a cell's `ask` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.attacks.alignment import GradientAlignment
from recleak.attacks.attribute import MajorityClass, Proportional, ThroughItems, by_learner
from recleak.attacks.base import Knowledge, WhichAttribute, WhoBelongs
from recleak.attacks.community import ServerCommunity
from recleak.attacks.community_items import CommunityThroughItems
from recleak.attacks.learners import Boosting, ChosenEpoch, Learner, Logistic, Neighbors, Network, Svc, Tree
from recleak.attacks.membership import (
    AllPositive,
    FarthestRows,
    FromUploads,
    Participation,
    Popularity,
    RandomGuess,
)
from recleak.attacks.preparation import Preparation
from recleak.attacks.representation import FromRepresentations, Reads
from recleak.attacks.shadow import ShadowClients
from recleak.data.features import classes_of
from recleak.errors import ConfigError, unknown_name
from recleak.grading import communities, grade_communities, grade_items, pairs_seen, truth_of
from recleak.metrics.inference import most_probable
from recleak.metrics.linearized import auc_values, macro_f1_values
from recleak.models.base import Params
from recleak.papers.communities import OF_USERS, draws
from recleak.papers.communities import graded as by_users
from recleak.papers.pard_settings import FOLDS, Scalar, Setting
from recleak.papers.store import USERS
from recleak.recording import Listening
from recleak.update import Update

COMMUNITY = 50
_PLAIN = Preparation("standard", "none")
LEARNERS: Mapping[str, Learner] = {
    "mlp": ChosenEpoch(),
    "network": Network(prepare=_PLAIN),
    "logistic": Logistic(prepare=_PLAIN),
    "chain": ThroughItems().learner,  # of who reads interactions, inferred ones or true ones
    "gbt": Boosting(prepare=_PLAIN),
    "tree": Tree(prepare=_PLAIN),
    "knn": Neighbors(prepare=_PLAIN),
    "svc": Svc(prepare=_PLAIN),
}
READS: Mapping[str, Reads] = {"all": "all", "user": "users", "items": "items"}
_GUESSES = ("random", "uniform", "majority")


@dataclass(frozen=True, kw_only=True)
class OncePerUpload(FromUploads):
    """Another attack's evidence, computed once for each upload: several attacks on one run begin with the same.

    `forgets`: only that of the latest upload is there, for attacks that hear all rounds at the same time.
    """

    inner: FromUploads = field(default_factory=lambda: GradientAlignment(shadow_rows=0))
    forgets: bool = False
    found: dict[tuple[int, bytes], tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def evidence(self, knowledge: Knowledge, received: Params, update: Update, round: int) -> tuple[Tensor, Tensor]:
        """That of the other attack; labels of users, which alone differ between asks, are no part of it."""
        key = (round, update.client.numpy().tobytes())
        if key not in self.found:
            evidence = self.inner.evidence(knowledge, received, update, round)
            if self.forgets:
                self.found.clear()
            self.found[key] = evidence
        return self.found[key]


def listener(ask: Mapping[str, Scalar]) -> str:
    """What has to listen for an ask: the same for all attributes, learners and labels."""
    return " ".join(
        f"{name}={ask[name]}"
        for name in ("attack", "reads", "uploads", "oracle", "watch", "by", "scoring")
        if name in ask
    )


def attack_of(made: Setting, ask: Mapping[str, Scalar], inferred: dict[str, OncePerUpload]) -> Any:
    """Who listens to uploads for an ask, if anybody does. What was inferred from an upload serves all."""
    name, every = str(ask.get("attack", "")), ask.get("uploads") == "all"
    plain = _membership(made, ask)
    once = OncePerUpload(participation=plain.participation, inner=plain, forgets=every)
    membership = inferred.setdefault(repr(plain), once)
    if name == "aia" and ask.get("reads") != "private":
        watch: Any = ask.get("watch", "rows")
        rounds: Any = "all" if every else "last"
        reads = READS[str(ask.get("reads", "all"))]
        return FromRepresentations(
            reads=reads, rounds=rounds, watch=watch, oracle=made.oracle(ask), membership=membership
        )
    scoring: Any = ask.get("scoring", "confidence")  # CDA's eq. 10
    attacks: dict[str, Callable[[], Any]] = {
        "chain": lambda: ThroughItems(membership=membership),
        "membership": lambda: membership,
        "imia": lambda: ShadowClients(participation=membership.participation, seed=made.seed),
        "community": lambda: CommunityThroughItems(membership=membership),
        "cda": lambda: ServerCommunity(scoring=scoring, vector="fitted", seed=made.seed),
    }
    if name in attacks:
        return attacks[name]()
    if name not in ("aia", "interactions", "random-community", *_GUESSES) and "measure" not in ask:
        raise ConfigError(f"A cell asks for {dict(ask)}, expected a measure or an attack that is known.")
    return None


def _membership(made: Setting, ask: Mapping[str, Scalar]) -> FromUploads:
    """How the server tells own items: along the gradient of their score, or by how far rows moved; and what costs
    nothing, of the same rows.
    """
    participation: Participation = "all" if ask.get("uploads") == "all" else "last"
    ways: dict[str, Callable[[], FromUploads]] = {
        "gradient": lambda: GradientAlignment(shadow_rows=0, participation=participation),
        "distance": lambda: FarthestRows(participation=participation),
        "popularity": lambda: Popularity(participation=participation),
        "all-positive": lambda: AllPositive(participation=participation),
        "random": lambda: RandomGuess(participation=participation, seed=made.seed),
    }
    by = str(ask.get("by", "gradient"))
    if by not in ways:
        raise unknown_name("by", by, ways)
    return ways[by]()


def graded(
    made: Setting, ask: Mapping[str, Scalar], tap: Listening[Any, Any] | None, kept: Params
) -> dict[str, NDArray[np.float64]]:
    """An attack's metrics, with a value for each user who is graded; `tap` is who listened, `kept` what users keep."""
    name = str(ask["attack"])
    if name in ("membership", "imia"):
        return _items(made, tap)
    if name in ("community", "cda", "random-community"):
        return _communities(made, ask, tap)
    if ask.get("among") == "known" and "fold" not in ask:
        folds = [graded(made, {**ask, "fold": fold}, tap, kept) for fold in range(FOLDS)]
        return {metric: np.concatenate([each[metric] for each in folds]) for metric in folds[0]}
    attribute = str(ask["attribute"])
    label, names = classes_of(made.train, attribute)
    user = np.flatnonzero(made.among(ask) & (label >= 0))
    question = WhichAttribute(torch.from_numpy(user), attribute, tuple(names))
    answer = _answer(made, ask, tap, kept, question)
    own, guess = label[user], most_probable(answer, user, made.seed)
    return {
        "micro-f1": (guess == own).astype(np.float64),
        "macro-f1": macro_f1_values(guess, own, len(names)),
        "auc": auc_values(answer, own),
        USERS: user.astype(np.float64),
    }


def _answer(
    made: Setting,
    ask: Mapping[str, Scalar],
    tap: Listening[Any, Any] | None,
    kept: Params,
    question: WhichAttribute,
) -> NDArray[np.float64]:
    """Probabilities, f64[n, K]."""
    name, knowledge = str(ask["attack"]), made.knowledge(ask)
    classes = len(question.classes)
    if name == "random":  # section IV-A4: by the distribution of the attribute in public data
        return np.asarray(Proportional(seed=made.seed).answer(knowledge, {}, question).double())
    if name == "uniform":
        lot = random.below(classes, made.seed, "random class", question.client.numpy())
        return np.eye(classes)[lot]
    if name == "majority":
        return np.asarray(MajorityClass().answer(knowledge, {}, question).double())
    if name == "chain" and tap is not None:
        return np.asarray(tap.attack.answer(knowledge, tap.state(), question).double())
    client, rows = _rows(made, ask, tap, kept)
    learner = LEARNERS[str(ask.get("learner", "chain" if name == "interactions" else "mlp"))]
    if isinstance(learner, ChosenEpoch) and ask.get("select", "test" if made.code else "valid") == "test":
        return _best_epoch(knowledge, question, client, rows, learner, made)
    return np.asarray(by_learner(knowledge, question, client, rows, learner, made.seed).double())


def _rows(
    made: Setting, ask: Mapping[str, Scalar], tap: Listening[Any, Any] | None, kept: Params
) -> tuple[Tensor, Tensor]:
    """What a learner reads, f32[n, p], and of whom. Vectors that are kept are read for the sake of analysis (Figure 7);
    true interactions are the ceiling.
    """
    if ask["attack"] == "interactions":
        return torch.from_numpy(made.everybody), made.targets[made.everybody]
    if tap is not None:
        attack: Any = tap.attack
        found: tuple[Tensor, Tensor] = attack.read(tap.state())
        return found
    vector = kept.get("user.private", kept.get("user"))
    if vector is None:
        raise ConfigError(f"{made.method} keeps no vector of users, expected PARD, or FedAvg with vector = 'kept'.")
    return torch.from_numpy(made.everybody), vector


def _best_epoch(
    knowledge: Knowledge, question: WhichAttribute, client: Tensor, rows: Tensor, learner: ChosenEpoch, made: Setting
) -> NDArray[np.float64]:
    """The epoch that is best for the graded users, as the published code has it: no adversary could choose it."""
    label = knowledge.public[f"labels of {question.attribute}"][client]
    user = question.client.numpy()
    truth = classes_of(made.train, question.attribute)[0][user]
    place = torch.searchsorted(client, question.client)
    path = learner.path(
        rows[label >= 0].numpy(), label[label >= 0].numpy(), len(question.classes), rows[place].numpy(), made.seed
    )
    score = [
        float(auc_values(each, truth).mean())
        if each.shape[1] == 2
        else float((most_probable(each, user, made.seed) == truth).mean())
        for each in path
    ]
    best: NDArray[np.float64] = path[int(np.argmax(score))]
    return best


def _items(made: Setting, tap: Listening[Any, Any] | None) -> dict[str, NDArray[np.float64]]:
    """Beside the means over users the median AUC and the share below 0.5: who guesses which side of a line is own is
    right of some users and wrong of others.
    """
    if tap is None:
        raise AssertionError("a membership attack listens")
    question = pairs_seen(tap.state(), made.train.n_items)
    graded = grade_items(question, tap.answer(question), truth_of(question, made.train))
    value = graded.auc.value
    beside = {"auc-median": np.median(value, keepdims=True), "auc-below": (value < 0.5).astype(np.float64)}
    return {"f1": graded.f1.value, "auc": value, **beside}


def _communities(
    made: Setting, ask: Mapping[str, Scalar], tap: Listening[Any, Any] | None
) -> dict[str, NDArray[np.float64]]:
    """Values of all users, whose spread is that of users as adversaries and as victims. Of a random draw, which is
    chance by pair, those of adversaries alone, as CDA's cells have it.
    """
    users, leader = torch.arange(made.train.n_users), made.leaders(ask)
    truth = communities(made.targets[leader], made.train, COMMUNITY, leader)
    if tap is None:
        answer = draws(len(users), made.seed, leader)
        accuracy = grade_communities(answer, truth, COMMUNITY, leader)["accuracy"].double()
        return {"accuracy": accuracy.numpy(), USERS: leader.double().numpy()}
    found = by_users(tap.answer(WhoBelongs(torch.arange(len(leader)), users)), truth, COMMUNITY, leader)
    return {"accuracy": found["accuracy" + OF_USERS].numpy(), USERS: users.double().numpy()}
