"""How the cells of APM are measured (Zhang, Yuan, Yin): its FedRec, attribute inference on uploads, noise by component.

Two variants, because the paper says it twice. `as-written` follows equation 11 and Algorithm 2: privacy parameters 30,
40, 50 and 60 for user, item, first and second layer, clip and noise after each local epoch. `section-5.7` follows that
section: 30, 60, 40 and 50, clip and noise once, before the upload.

What the paper leaves open, and what is taken here, the same for all methods:

    rounds                  ML-100K: 140, where Hit@20 of validation items stopped growing, undefended (FedRec, one
                            seed: 0.121 after 100 rounds, 0.127 after 140 and 160). ML-1M: 200 (0.090 after 100 rounds,
                            0.094 after 140, 0.100 after 200, 0.096 to 0.099 from then to 300). Not tried and taken to
                            be the same: other recommenders, each defense by itself
    negatives               4 for each own item, drawn once
    the loss                its sum over a batch (eq. 8): a rate of 0.001 is one of 0.032 for the mean over 32. The last
                            batch of an epoch has up to 32 examples, and its mean is taken 32 times too: it counts up
                            to 32 times as much as its sum would
    initial parameters      N(0, 1) for E_U and the items' vectors; W1, W2, b and the MLP by fan-in. With N(0, 1) there
                            too, as the text says of all, training diverges in the first round (and with the mean in
                            place of the sum, Hit@20 is that of chance, 0.01 to 0.03, after 160 rounds)
    aggregation             the mean of the clients' models (eq. 9 has a sum, which would grow without bound)
    item features           one-hot: an item has a vector of its own
    the attacked round      the last one; its participants are known (zeta of them) or graded (the others). Which one
                            an attacker would take by the users it knows is in table `rounds`
    F1                      macro-F1; micro-F1 and AUC stand beside
    the attackers           the paper's read uploads as they are; the careful one, and those of several rounds where
                            values are clipped, first take away what the clip does by itself (ask `shift`)
    noise of FedNews        the same everywhere, Laplace of scale 0.025 (epsilon 40), clipped as APM's
    noise of FedRec-GN      Gaussian of the same variance
    F-GERAI                 epsilon 20 on features, 0.4 in the loss, as its own paper has, with its number of examples:
                            all interactions of the data set. With those of a client in its place the noise is some
                            190 times as large, and training diverges in the first round. F-GERAI-NL: the loss only
    F-DPMF                  epsilon 0.4 in the objective, the number of examples as for F-GERAI
    learning rates          of FedRec the paper's. FedMF: 1 for the mean over a batch, where Hit@20 of validation items
                            after 140 rounds was 0.139 (0.122, 0.097 and 0.055 with 0.32, 0.1 and 0.032; one seed).
                            FedLightGCN: 1 (0.123; 0.117 with 0.32, 0.097 with 0.1). FedNCF: 0.32 (0.145; 0.118 with
                            0.1, and with 1 it stays at 0.013). These are of ML-100K and taken for ML-1M too, but for
                            FedNCF, which diverges there with 0.32, in round 93: 0.1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.accounting import ledger, participations
from recleak.attacks.attribute import (
    FromUpdates,
    KnownColumns,
    MajorityClass,
    Proportional,
    ThroughItems,
    by_learner,
    learner_of_items,
)
from recleak.attacks.base import Knowledge, WhichAttribute
from recleak.attacks.careful import Careful, turned
from recleak.attacks.learners import (
    Boosting,
    Learner,
    Logistic,
    Neighbors,
    Network,
    Prepared,
    Svc,
    Tree,
    cross_validated,
)
from recleak.attacks.preparation import Parts, Preparation
from recleak.data.features import UserFeatures, classes_of, user_features
from recleak.data.interactions import Interactions
from recleak.data.source import open_data
from recleak.data.split import Split, leave_one_out
from recleak.defenses.adaptive_noise import LEVELS, AdaptiveNoise, BoundedGaussian, levels_from
from recleak.defenses.base import Chain, Defense
from recleak.defenses.feature_noise import PerturbedFeatures
from recleak.defenses.functional_mechanism import FunctionalMechanism
from recleak.defenses.objective_perturbation import ObjectivePerturbation
from recleak.errors import ConfigError, unknown_name
from recleak.metrics.inference import most_probable
from recleak.metrics.linearized import auc_values, macro_f1_values
from recleak.metrics.ranking import Ranks, rank
from recleak.models.base import Model
from recleak.models.components import FanIn, Normal
from recleak.models.feature_gcn import FeatureGCN
from recleak.models.lightgcn import LightGCN
from recleak.models.mf import MF
from recleak.models.ncf import NCF
from recleak.papers.reproduce import Measured
from recleak.papers.store import USERS
from recleak.protocols.federated import Federated, FederatedModel, train_federated
from recleak.recording import Listening
from recleak.resistance import measured_leak
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining
from recleak.training.executor import InProcess
from recleak.training.optimizers import SGD
from recleak.utility import union

VERSION = 4
NEGATIVES = 4
ROUNDS = {"ml-100k": 140, "ml-1m": 200}
SHARE = {"ml-100k": 0.5, "ml-1m": 0.1}  # of the clients in a round (section 5.4)
BATCH = 32
RATES = {"feature-gcn": 0.001 * BATCH, "mf": 1.0, "ncf": 0.32, "lightgcn": 1.0}  # for the mean over a batch
OTHER_RATES = {("ml-1m", "ncf"): 0.1}
NOISE = 0.025  # the scale of FedNews
MEASURED = "apm-measured"  # APM whose levels are measured in an undefended training, on 30 % of the attacked users
_SKETCH = 4096  # columns that item rows are folded into where uploads of many rounds are kept
_LOSS, _FEATURES = 0.4, 20.0  # GERAI's privacy parameters
Scalar = str | int | float | bool

_LEARNERS: dict[str, type[Prepared]] = {
    "aia": Network,
    "dt": Tree,
    "svc": Svc,
    "knn": Neighbors,
    "gbt": Boosting,
}
CAREFUL = "careful"  # chooses part, scale and learner on the known users
_OPTIONS = (("part", "full"), ("uploads", "one"), ("round", "last"), ("shift", "ignored"))  # of a reader of uploads
CEILING = "true-items"  # a reader of the true interactions
REDUCED = "interactions"  # another one, on their 50 principal directions
_BLIND = ("random", "proportional", "majority", CEILING, REDUCED)  # need no upload
_FREE = ("ledger",)  # measures that need no training


@dataclass(frozen=True, eq=False)
class Setting:
    """One training run."""

    split: Split
    model: Model
    defense: Defense
    protocol: Federated
    features: UserFeatures | None
    seed: int
    round: int  # the attacked one

    @property
    def train(self) -> Interactions:
        """What clients train on."""
        return self.split.train

    @cached_property
    def attacked(self) -> NDArray[np.int64]:
        """The participants of the attacked round, ascending."""
        eligible = np.flatnonzero(self.train.activity).astype(np.int64)
        return np.sort(self.protocol.participants(eligible, self.round, self.seed))

    def knowledge(self, attribute: str | None = None, zeta: float = 0.1) -> Knowledge:
        """What the curious server knows (section 3.3): of zeta of the attacked users also the attribute."""
        public = {"popularity": torch.from_numpy(self.train.popularity.astype(np.float32))}
        if attribute is not None:
            label, _ = classes_of(self.train, attribute)
            known = self.known(zeta)
            shown = np.full(len(label), -1)
            shown[known] = label[known]
            public[f"labels of {attribute}"] = torch.from_numpy(shown)
            if self.features is not None:
                columns = torch.arange(self.features.values.shape[1])[self.features.groups[attribute]]
                public[f"columns of {attribute}"] = columns
        parts = self.defense.sharing(self.model.components())
        local = self.protocol.local
        return Knowledge(self.model, self.train.n_users, self.train.n_items, parts, local, self.defense, public)

    def known(self, zeta: float) -> NDArray[np.int64]:
        """The users who side with the server; fewer are among more."""
        order = random.bits(self.seed, "known users", self.attacked).argsort()
        return self.attacked[order[: max(1, round(zeta * len(order)))]]


def setting(run: Mapping[str, Scalar], variant: str, seed: int) -> Setting:
    """The objects that a cell's `run` names."""
    name, factors = str(run["data"]), int(run["factors"])
    split = leave_one_out(open_data(name, str(run["preset"])), by="time", seed=seed)
    defense = str(run["defense"])
    polynomial = defense.startswith("f-gerai")  # its loss, of a bounded input
    literal = run.get("initial") == "normal"  # N(0, 1) for all; the mean over a batch, since the sum diverges
    model, features = _model(str(run["model"]), factors, split.train, bounded=polynomial)
    if literal and isinstance(model, FeatureGCN):
        model = replace(model, dense_init=Normal(1.0))
    everybody = int(np.count_nonzero(split.train.activity))
    negatives, rounds = int(run.get("negatives", NEGATIVES)), int(run.get("rounds", ROUNDS[name]))
    local = LocalTraining(
        epochs=5,
        batch_size=BATCH,
        optimizer=SGD(0.001 if literal else _rate(name, str(run["model"]))),
        negatives=negatives,
        loss="taylor" if polynomial else "bce",
    )
    protocol = Federated(rounds=rounds, clients_per_round=round(SHARE[name] * everybody), local=local)
    guard = _defense(defense, variant, len(split.train), features)
    return Setting(split, model, guard, protocol, features, seed, rounds - 1)


def _rate(data: str, model: str) -> float:
    return OTHER_RATES.get((data, model), RATES[model])


def _model(name: str, factors: int, train: Interactions, *, bounded: bool) -> tuple[Model, UserFeatures | None]:
    if name == "feature-gcn":
        features = user_features(train)
        width = features.values.shape[1]
        return FeatureGCN(width, factors=factors, hidden=(factors,), dense_init=FanIn(), bounded=bounded), features
    models: dict[str, Callable[[], Model]] = {
        "mf": lambda: MF(factors),
        "ncf": lambda: NCF(factors),
        "lightgcn": lambda: LightGCN(factors),
    }
    if name not in models:
        raise unknown_name("model", name, ["feature-gcn", *models])
    return models[name](), None


def _defense(name: str, variant: str, interactions: int, features: UserFeatures | None) -> Defense:
    moment: Any = "upload" if variant == "section-5.7" else "epoch"
    levels: Any = "section" if variant == "section-5.7" else "equation"

    def uniform(epsilon: float) -> Defense:
        return AdaptiveNoise(levels, epsilon_min=epsilon, epsilon_max=epsilon, moment=moment)

    groups = () if features is None else tuple((each.start, each.stop) for each in features.groups.values())
    makers: dict[str, Callable[[], Defense]] = {
        "none": Defense,
        "apm": lambda: AdaptiveNoise(levels, moment=moment),
        MEASURED: lambda: AdaptiveNoise(levels, moment=moment),  # levels are put in when they are measured
        "fixrec-max": lambda: uniform(30.0),
        "fixrec-min": lambda: uniform(60.0),
        "fednews": lambda: uniform(1 / NOISE),
        "gaussian": lambda: BoundedGaussian(std=sqrt(2) * NOISE, moment=moment),
        "f-gerai": lambda: Chain((PerturbedFeatures(_FEATURES, groups), FunctionalMechanism(_LOSS, interactions))),
        "f-gerai-nl": lambda: FunctionalMechanism(_LOSS, interactions),
        "f-dpmf": lambda: ObjectivePerturbation(_LOSS, interactions),
    }
    if name.startswith("uniform-"):
        return uniform(float(name.removeprefix("uniform-")))
    if name not in makers:
        raise unknown_name("defense", name, makers)
    return makers[name]()


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(
    run: Mapping[str, Scalar], asks: Sequence[Mapping[str, Scalar]], *, variant: str, seed: int, threads: int
) -> Iterator[Measured]:
    """One training run with all that is asked for at its wire; then the results in the order of the asks."""
    made = setting(run, variant, seed)
    if all(ask.get("measure") in _FREE or ask.get("attack") in _BLIND for ask in asks):  # nothing has to be trained
        for ask in asks:
            yield Measured(_spent(made)) if "measure" in ask else _graded(_at(made, ask), ask, {}, {})
        return
    levels: dict[str, float] = {}
    if run["defense"] == MEASURED and isinstance(made.defense, AdaptiveNoise):
        levels = _measured_levels({**run, "defense": "none"}, variant, seed, threads)
        made = replace(made, defense=replace(made.defense, levels=levels))
    attacks = {key: attack for ask in asks for key, attack in _evidence(made, ask)}
    taps: dict[str, Listening[Any, Any]] = {
        key: Listening(attack.vantage(), attack, made.knowledge()) for key, attack in attacks.items()
    }
    start = perf_counter()
    trained = _train(made, taps.values(), threads)
    seconds = perf_counter() - start
    prepared: dict[str, _Read] = {}
    for ask in asks:
        if ask.get("measure") == "utility":
            past = union(made.train, made.split.valid)
            yield Measured(_hit(rank(trained, past, made.split.test)), seconds=seconds)
        elif ask.get("measure") == "validation":
            yield Measured(_hit(rank(trained, made.train, made.split.valid)), seconds=seconds)
        elif ask.get("measure") == "ledger":
            yield Measured(_spent(made), seconds=0.0)
        elif ask.get("measure") == "levels":
            yield Measured({part: np.array([level]) for part, level in levels.items()}, seconds=0.0)
        else:
            yield _graded(_at(made, ask), ask, taps, prepared)


def _train(made: Setting, taps: Iterable[Listening[Any, Any]], threads: int) -> FederatedModel:
    return train_federated(
        made.protocol,
        made.model,
        made.train,
        defense=made.defense,
        user_features=None if made.features is None else made.features.values,
        taps=list(taps),
        executor=InProcess(threads),
        seed=made.seed,
        show_progress=False,
    )


def _measured_levels(run: Mapping[str, Scalar], variant: str, seed: int, threads: int) -> dict[str, float]:
    """Levels by what each part of an undefended upload tells the attacker about known users, mean of age and gender."""
    made = setting(run, variant, seed)
    taps: dict[str, Listening[Any, Any]] = {}
    for part in LEVELS["equation"]:
        attack = FromUpdates(parts=(part,), rounds=made.round)
        taps[part] = Listening(attack.vantage(), attack, made.knowledge())
    _train(made, taps.values(), threads)
    known = np.sort(made.known(0.3))
    rows = {part: _read(tap, known) for part, tap in taps.items()}
    leaks = []
    for attribute in ("age", "gender"):
        label, names = classes_of(made.train, attribute)
        told = label[known] >= 0
        parts = {part: each[told] for part, each in rows.items()}
        leaks.append(measured_leak(parts, label[known][told], len(names), seed=seed))
    return levels_from({part: float(np.mean([leak[part] for leak in leaks])) for part in rows})


def _read(tap: Listening[Any, Any], user: NDArray[np.int64]) -> NDArray[np.float32]:
    """What a tap has of some users, all of whom it saw, f32[n, p]."""
    attack: Any = tap.attack
    client, rows = attack.read(tap.state())
    return np.asarray(rows[torch.searchsorted(client, torch.from_numpy(user))])


def _evidence(made: Setting, ask: Mapping[str, Scalar]) -> Iterator[tuple[str, Any]]:
    """What has to listen for an ask; learners that read the same share it."""
    if ask.get("measure") in ("utility", "validation", "ledger", "levels"):
        return
    name, every, attacked = str(ask.get("attack")), ask.get("uploads") == "all", _at(made, ask).round
    shift: Any = ask.get("shift", "ignored")
    listens: dict[str, Any] = {"rounds": "all" if every else attacked, "shift": shift}
    if name in (*_LEARNERS, CAREFUL):
        part = str(ask.get("part", "full"))
        parts = () if part == "full" else (part,)
        yield _key(ask), FromUpdates(parts=parts, sketch=_SKETCH if every else None, **listens)
    elif name == "exact":
        yield _key(ask), KnownColumns(**listens)
    elif name == "chain":
        yield _key(ask), ThroughItems()
    elif name not in _BLIND:
        raise ConfigError(f"A cell asks for {dict(ask)}, expected a measure or an attack that is known.")


def _at(made: Setting, ask: Mapping[str, Scalar]) -> Setting:
    """With the round that an ask attacks: the last, unless it says otherwise."""
    rounds = {"first": 0, "middle": made.protocol.rounds // 2}
    return replace(made, round=rounds[str(ask["round"])]) if "round" in ask else made


def _key(ask: Mapping[str, Scalar]) -> str:
    name = str(ask["attack"])
    words = [str(ask.get(*option)) for option in _OPTIONS]
    return " ".join(["update" if name in (*_LEARNERS, CAREFUL) else name, *words])


@dataclass(frozen=True, eq=False)
class _Read:
    """What a learner reads of the clients that a tap saw."""

    client: Tensor  # i64[n]
    rows: Tensor  # f32[n, q]
    parts: Parts  # of the rows


def _graded(
    made: Setting,
    ask: Mapping[str, Scalar],
    taps: Mapping[str, Listening[Any, Any]],
    prepared: dict[str, _Read],
) -> Measured:
    """The answer about the attacked users whose attribute is not known to the server, as values by user.

    What learners read is scaled and reduced once for all of them: that needs no label. It is kept in `prepared`.
    Where `graded` is "known", it is about those who are known, each guessed from the others (cross-validation): what
    the server can see for itself.
    """
    attribute, name, zeta = str(ask["attribute"]), str(ask["attack"]), float(ask["zeta"])
    label, names = classes_of(made.train, attribute)
    user = np.setdiff1d(made.attacked[label[made.attacked] >= 0], made.known(zeta))
    question = WhichAttribute(torch.from_numpy(user), attribute, tuple(names))
    start = perf_counter()
    knowledge, tap = made.knowledge(attribute, zeta), taps.get(_key(ask))
    if tap is not None and name in (*_LEARNERS, CAREFUL):
        noise: Any = ask.get("noise", "ignored")
        if (key := f"{_key(ask)} {noise} {name == CAREFUL}") not in prepared:
            prepared[key] = _prepared(tap, noise, made.seed, careful=name == CAREFUL)
        found = prepared[key]
        plain = Preparation("none", "none")
        learner: Learner = Careful(parts=found.parts) if name == CAREFUL else _LEARNERS[name](prepare=plain)
        if ask.get("graded") == "known":
            known = np.sort(made.known(zeta))
            user = known[label[known] >= 0]
            rows = found.rows[torch.searchsorted(found.client, torch.from_numpy(user))].numpy()
            answer = cross_validated(learner, rows, label[user], len(names), made.seed)
        else:
            told = by_learner(knowledge, question, found.client, found.rows, learner, made.seed)
            answer = np.asarray(told.double())
    else:
        answer = _answer(made, name, knowledge, question, tap)
    seconds = perf_counter() - start
    own, guess = label[user], most_probable(answer, user, made.seed)
    metrics = {
        "macro-f1": macro_f1_values(guess, own, len(names)),
        "micro-f1": (guess == own).astype(np.float64),
        "auc": auc_values(answer, own),
        USERS: user.astype(np.float64),
    }
    return Measured(metrics, seconds=seconds)


def _prepared(tap: Listening[Any, Any], noise: Literal["ignored", "known"], seed: int, *, careful: bool) -> _Read:
    """What learners read of the clients that a tap saw: scaled and reduced; for the careful one only turned."""
    heard: Any = tap.attack
    attack: FromUpdates = replace(heard, noise=noise)
    client, rows = attack.read(tap.state())
    weighed, parts = attack.weighed(tap.knowledge, rows).numpy(), attack.columns(tap.knowledge)
    with one_thread():
        if careful:
            found, parts = turned(weighed, parts)
        else:
            found = Preparation().together(weighed, seed)
    return _Read(client, torch.from_numpy(found), parts)


def _answer(
    made: Setting, name: str, knowledge: Knowledge, question: WhichAttribute, tap: Listening[Any, Any] | None
) -> NDArray[np.float64]:
    """Probabilities, f64[n, K]."""
    if tap is not None:
        return np.asarray(tap.attack.answer(knowledge, tap.state(), question).double())
    if name == "random":
        lot = random.below(len(question.classes), made.seed, "random class", question.client.numpy())
        return np.eye(len(question.classes))[lot]
    if name in (CEILING, REDUCED):
        return _from_true_items(made, knowledge, question, reduced=name == REDUCED)
    guesser = MajorityClass() if name == "majority" else Proportional(seed=made.seed)
    return np.asarray(guesser.answer(knowledge, {}, question).double())


def _from_true_items(
    made: Setting, knowledge: Knowledge, question: WhichAttribute, *, reduced: bool
) -> NDArray[np.float64]:
    """What the true interactions tell to a reader who knows as many users: a reference, not a bound.

    The reader is that of the chain, so that what the chain lacks to it is what the uploads hide; `reduced` is another
    one, on 50 principal directions of known and graded users.
    """
    matrix = made.train.matrix().astype(np.float32)
    if reduced:
        label = knowledge.public[f"labels of {question.attribute}"].numpy()
        known, others = np.flatnonzero(label >= 0), question.client.numpy()
        learner, classes = Logistic(C=10.0, prepare=Preparation(scale="unit")), len(question.classes)
        return learner.fit_predict(matrix[known].toarray(), label[known], classes, matrix[others].toarray(), made.seed)
    client = torch.from_numpy(np.flatnonzero(made.train.activity).astype(np.int64))
    rows = torch.from_numpy(matrix[client.numpy()].toarray())
    return np.asarray(by_learner(knowledge, question, client, rows, learner_of_items(), made.seed).double())


def _spent(made: Setting) -> dict[str, NDArray[np.float64]]:
    """What the claimed epsilon composes to: of one number and of all that a client uploads, once and in all rounds."""
    entries = ledger(
        made.defense,
        components=made.model.components(),
        n_items=made.train.n_items,
        participations=participations(made.protocol, made.train, seed=made.seed),
        training=made.protocol.local,
    )
    found = [epsilon for entry in entries for epsilon in (entry.claimed, entry.composed, entry.typical)]
    names = ("number", "number-busiest", "number-half", "upload", "upload-busiest", "upload-half")
    return {name: np.array([value]) for name, value in zip(names, found, strict=True) if value is not None}


def _hit(ranks: Ranks) -> dict[str, NDArray[np.float64]]:
    """Hit@20 of every user's held-out item among all items that it does not have, f64[U]; and who these users are."""
    return {"hit@20": ranks.hit(20), USERS: ranks.users.astype(np.float64)}
