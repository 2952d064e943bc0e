"""How the cells of PARD are measured (Zhao et al.): its recommenders, its rivals, attribute inference on vectors.

Two variants. `as-written` follows the text. `as-published-code` follows the public code where it differs: vectors are
added, not concatenated, a head of one hidden layer, N(0, 1) vectors, its learning rates, negatives drawn once, no terms
in the first three rounds, estimators that see public users under the client's own label from the second attribute on,
an attacker that is told everybody's items and whose best epoch for the graded users is reported.

What the paper leaves open, and what is taken here, the same for all methods unless it says otherwise:

    learning rates      0.5 for the mean over a batch, as the text has it, for vectors of users and heads. That moves no
                        item: a row has a share of 1/256 in a batch, and the mean is over all clients. Items have 1,000
                        (chosen with FedNCF and one seed by how Recall@10 grew over the first 100 rounds: faster than
                        with 500; with 50 for users in the place of 0.5 training diverges)
    negatives           5 for each own item, as the code has it, drawn anew in each round
    participants        all clients in every round
    estimators          32 and 16 units; 10 steps before each epoch, with momentum 0.9, each on 16 public users and the
                        client itself: about one pass over the public data (eq. 37 has the minimum)
    rounds              until Recall@10 + Recall@20 of validation items, looked at every EVERY rounds, has not grown for
                        PATIENCE looks (the code's criterion); at most ROUNDS
    Early-stop          FedAvg until its validation utility is that of APM after its own training
    PFedRec, UC-FedRec  stop where the validation utility is that of FedAvg, or on their own plateau
    PFedRec             with FedNCF its own linear score function; with FedGCN the star graph with a head that stays. A
                        batch first moves what stays, then items; users score with item rows that they have tuned
    APM                 the noise of its section 5.7: Laplace of scale 0.017 and 0.033, clipped to 0.5, before an upload
    what leaves         as the table in docs/reproduction/pard.md has it: vectors of users are sent and not averaged;
                        PFedRec has none; `vector = "kept"` is FedNCF without the row of the user on the wire
    the attack          on the last round: the vector where one is sent, and the mean of the rows that the server takes
                        for own items; labels are those of the public users (eta of all), all others are graded
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.attacks.alignment import GradientAlignment
from recleak.attacks.attribute import MajorityClass, Proportional, ThroughItems, by_learner
from recleak.attacks.base import Knowledge, WhichAttribute, WhoBelongs
from recleak.attacks.community_items import CommunityThroughItems
from recleak.attacks.learners import (
    Boosting,
    ChosenEpoch,
    Learner,
    Logistic,
    Neighbors,
    Network,
    Preparation,
    Svc,
    Tree,
)
from recleak.attacks.membership import FarthestRows, FromUploads, Participation
from recleak.attacks.representation import OWN, FromRepresentations, Reads
from recleak.attacks.shadow import ShadowClients
from recleak.data.features import classes_of
from recleak.data.interactions import Interactions
from recleak.data.sampling import evaluation_candidates
from recleak.data.source import open_data
from recleak.data.split import Split, leave_one_out
from recleak.defenses.adaptive_noise import AdaptiveNoise
from recleak.defenses.base import Chain, Defense, all_components
from recleak.defenses.consent import UserConsent
from recleak.defenses.decoupling import Decoupling
from recleak.defenses.sharing import Share, ShareLess
from recleak.errors import ConfigError, unknown_name
from recleak.grading import communities, grade_communities, grade_items, own_items, pairs_seen, truth_of
from recleak.metrics.linearized import auc_values, macro_f1_values
from recleak.metrics.ranking import rank
from recleak.models.base import Model
from recleak.models.components import Normal
from recleak.models.decoupled import Decoupled
from recleak.models.lightgcn import LightGCN
from recleak.models.ncf import NCF
from recleak.models.pfedrec import PFedRec
from recleak.papers.reproduce import Measured
from recleak.protocols.federated import BLOCK, Federated, FederatedModel, train_federated
from recleak.protocols.stopping import Either, Plateau, Reached, Rule, Stopping
from recleak.recording import Listening, Tap
from recleak.training.attributes import PrivateAttributes, attributes_of, insensitive
from recleak.training.cohort import LocalTraining
from recleak.training.executor import InProcess
from recleak.training.optimizers import SGD
from recleak.utility import union
from recleak.wire import Broadcast, Message, Server, Upload, copied

VERSION = 1
CODE = "as-published-code"
FACTORS, BATCH, NEGATIVES, HEAD_RATE = 64, 256, 5, 0.5
ROUNDS, EVERY, PATIENCE = 300, 10, 3
CANDIDATES = {"ml-100k": 99, "ml-1m": 999, "taobao": 999}
ATTRIBUTES = {"ml-100k": ("age", "gender", "occupation"), "ml-1m": ("age", "gender", "occupation")}
RATES = {"user": 0.5, "item": 1000.0}  # for the mean over a batch of 256
SPREAD = 0.1  # of vectors at the start
COMMUNITY = 50
THIN = 15  # interactions that a user keeps where data are thinned: as sparse as Taobao
Scalar = str | int | float | bool

_PLAIN = Preparation("standard", "none")
LEARNERS: Mapping[str, Learner] = {
    "mlp": ChosenEpoch(),
    "network": Network(prepare=_PLAIN),
    "logistic": Logistic(prepare=_PLAIN),
    "gbt": Boosting(prepare=_PLAIN),
    "tree": Tree(prepare=_PLAIN),
    "knn": Neighbors(prepare=_PLAIN),
    "svc": Svc(prepare=_PLAIN),
}
READS: Mapping[str, Reads] = {"all": "all", "user": "users", "items": "items"}
_GUESSES = ("random", "uniform", "majority")


@dataclass(frozen=True, eq=False)
class Setting:
    """One training run."""

    split: Split
    model: Model
    defense: Defense
    local: LocalTraining
    attributes: PrivateAttributes
    data: str
    method: str
    variant: str
    seed: int
    rounds: int
    tuned: bool = False

    @property
    def train(self) -> Interactions:
        """What clients train on."""
        return self.split.train

    def known(self, ask: Mapping[str, Scalar]) -> NDArray[np.bool_]:
        """Whose attributes the server knows, bool[U]: those of public users; `labels` "others": of as many others;
        a number: of so large a share of all users, public ones first.
        """
        public = self.attributes.public.numpy()
        wanted = ask.get("labels", "public")
        if wanted == "public":
            return public
        lot = random.uniform(self.seed, "labelled users", np.arange(len(public)))
        if wanted == "others":
            rest = np.flatnonzero(~public)
            chosen = np.zeros(len(public), bool)
            chosen[rest[lot[rest].argsort()[: int(public.sum())]]] = True
            return chosen
        more = np.argsort(np.where(public, -1.0, lot), kind="stable")[: round(float(wanted) * len(public))]
        known: NDArray[np.bool_] = np.isin(np.arange(len(public)), more)
        return known

    def knowledge(self, ask: Mapping[str, Scalar] | None = None) -> Knowledge:
        """What the curious server knows (section II-B); an oracle is told everybody's items."""
        public = {"popularity": torch.from_numpy(self.train.popularity.astype(np.float32))}
        if ask is not None and "attribute" in ask:
            label, _ = classes_of(self.train, str(ask["attribute"]))
            public[f"labels of {ask['attribute']}"] = torch.from_numpy(np.where(self.known(ask), label, -1))
        if ask is not None and self.oracle(ask):
            public[OWN] = own_items(self.train)
        if ask is not None and ask.get("attack") == "community":
            public["targets"] = self.targets
        parts = all_components(self.model.components(), self.defense)
        return Knowledge(self.model, self.train.n_users, self.train.n_items, parts, self.local, self.defense, public)

    @property
    def targets(self) -> Tensor:
        """Every user as an adversary that looks for who is similar to it, f32[U, I]."""
        return torch.from_numpy((self.train.matrix().toarray() > 0).astype(np.float32))

    def oracle(self, ask: Mapping[str, Scalar]) -> bool:
        """Whether the attacker is told which items are whose."""
        return bool(ask.get("oracle", self.variant == CODE))

    def recall(self, model: FederatedModel) -> float:
        """Recall@10 + Recall@20 of validation items, against sampled ones."""
        sampled = evaluation_candidates(self.split, CANDIDATES[self.data], seed=self.seed).items
        ranks = rank(replace(model, tuned=self.tuned), self.train, self.split.valid, sampled)
        return float(ranks.recall(10).mean() + ranks.recall(20).mean())


# --- what is trained --------------------------------------------------------------------------------------------------


def setting(run: Mapping[str, Scalar], variant: str, seed: int) -> Setting:
    """The objects that a cell's `run` names."""
    name, base, method = str(run["data"]), str(run["model"]), str(run["method"])
    data = open_data(name, str(run["preset"]))
    if run.get("thin"):
        data = thinned(data, int(run["thin"]), seed)
    split = leave_one_out(data, by="time", seed=seed)
    names = [each for each in ATTRIBUTES.get(name, ("age", "gender")) if each in data.attributes]
    public = insensitive(data.n_users, float(run.get("eta", 0.2)), seed)
    attributes = attributes_of(split.train, names, public)
    classes = {each: len(classes_of(split.train, each)[1]) for each in names}
    code = variant == CODE
    model = _model(base, method, code)
    defense = _defense(run, base, method, classes, code)
    local = _local(model, split.train.n_items, name, code)
    rounds = int(run.get("rounds", ROUNDS))
    tuned = method == "pfedrec"
    return Setting(split, model, defense, local, attributes, name, method, variant, seed, rounds, tuned)


def thinned(data: Interactions, count: int, seed: int) -> Interactions:
    """Every user with so many of its interactions at random."""
    lot = random.uniform(seed, "thinned", data.user, data.item)
    order = np.lexsort((lot, data.user))
    rank_in_user = np.empty(len(order), np.int64)
    rank_in_user[order] = np.arange(len(order)) - data.indptr[data.user[order]]
    return data.restrict(rank_in_user < count, f"{count} interactions of each user")


def _model(base: str, method: str, code: bool) -> Model:
    start, hidden = Normal(1.0 if code else SPREAD), (32,) if code else (64, 32)
    if base not in ("fedncf", "fedgcn"):
        raise unknown_name("model", base, ("fedncf", "fedgcn"))
    if method == "pard":
        combine: Any = "sum" if code else "concat"
        return Decoupled(FACTORS, hidden, combine, graph=base == "fedgcn", init=start)
    if base == "fedncf":
        return PFedRec(FACTORS, start) if method == "pfedrec" else NCF(FACTORS, hidden, start)
    return LightGCN(FACTORS, score="mlp", hidden=hidden, normalization="mean", propagate_items=False, init=start)


def _defense(run: Mapping[str, Scalar], base: str, method: str, classes: Mapping[str, int], code: bool) -> Defense:
    sent = Share(("user",), averaged=False)
    read: dict[str, Any] = {"bound": "plain", "reads": "items"}  # eq. 16, eq. 11 and 21
    if code:
        read |= {"reads": "mixed", "relabels": True, "inverse": "own", "warm_up": 3}
    options = {name: run[name] for name in ("bound", "reads", "steps", "momentum") if name in run}
    makers: dict[str, Callable[[], Defense]] = {
        "fedavg": lambda: ShareLess(("user",)) if run.get("vector") == "kept" else sent,
        "early-stop": lambda: sent,
        "pfedrec": Defense if base == "fedncf" else lambda: ShareLess(("user", *_heads(code))),
        "apm": lambda: Chain((sent, AdaptiveNoise(_levels(code), moment="upload"))),
        "uc-fedrec": lambda: Chain((sent, UserConsent(classes, float(run.get("strength", 0.5)), factors=FACTORS))),
        "pard": lambda: Decoupling(
            classes,
            irrelevant=float(run.get("ir", 0.5)),
            relevant=float(run.get("re", 0.5)),
            factors=FACTORS,
            **{**read, **options},
        ),
    }
    if method not in makers:
        raise unknown_name("method", method, makers)
    return makers[method]()


def _levels(code: bool) -> dict[str, float]:
    """How APM's levels are given out in the published code of PARD: user, item, hidden layers, last layer."""
    return {"user": 0, "item": 1, "head": 2, f"head.{2 if code else 3}": 3}


def _heads(code: bool) -> list[str]:
    return [f"head.{layer}.{kind}" for layer in range(1, 3 if code else 4) for kind in ("weight", "bias")]


def _local(model: Model, n_items: int, data: str, code: bool) -> LocalTraining:
    """How clients train; rates of users and items are their own."""
    names = {part.name for part in model.components()}
    rates = {"user": RATES["user"], "user.private": RATES["user"], "item": RATES["item"]}
    head = HEAD_RATE
    if code:
        head, scale = 0.1, 1.0 if data == "ml-100k" else 80.0
        rates = {"user": head * scale, "user.private": head * scale, "item": head * n_items * scale}
    turns: tuple[tuple[str, ...], ...] = ()
    if isinstance(model, PFedRec):
        turns = (("head",), ("item",))
    sgd = SGD(head, {name: rate for name, rate in rates.items() if name in names})
    return LocalTraining(1, BATCH, sgd, negatives=NEGATIVES, resample=not code, turns=turns)


@lru_cache(maxsize=16)
def _level(of: str, run: tuple[tuple[str, Scalar], ...], variant: str, seed: int, threads: int) -> float:
    """The validation utility that another method ends with."""
    made = setting({**dict(run), "method": of}, variant, seed)
    return made.recall(_train(made, Plateau(EVERY, PATIENCE), [], threads))


def _rule(made: Setting, run: Mapping[str, Scalar], threads: int) -> Rule:
    """When training ends."""
    plateau = Plateau(EVERY, PATIENCE)
    shared = tuple(sorted((name, run[name]) for name in ("data", "preset", "model", "rounds", "thin") if name in run))
    if made.method == "early-stop":
        return Reached(_level("apm", shared, made.variant, made.seed, threads))
    if made.method in ("pfedrec", "uc-fedrec"):
        return Either(plateau, Reached(_level("fedavg", shared, made.variant, made.seed, threads), EVERY))
    return plateau


def _train(made: Setting, rule: Rule, taps: Sequence[Tap], threads: int) -> FederatedModel:
    return train_federated(
        Federated(rounds=made.rounds, local=made.local),
        made.model,
        made.train,
        defense=made.defense,
        attributes=made.attributes,
        stopping=Stopping(rule, made.recall),
        taps=taps,
        executor=InProcess(threads),
        chunk=BLOCK // 2,
        seed=made.seed,
        show_progress=False,
    )


# --- measuring --------------------------------------------------------------------------------------------------------


class LastRound:
    """A tap that keeps the messages of the last round: which round that is, nobody knows before."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def receive(self, message: Message) -> None:
        """A broadcast begins a round."""
        if isinstance(message, Broadcast):
            self.messages = []
        if isinstance(message, Broadcast | Upload):
            self.messages.append(copied(message))

    def state(self) -> dict[str, Tensor]:
        """A run of a reproduction is not continued."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """There is nothing to put back."""

    def close(self) -> None:
        """There is nothing to close."""


def measure(
    run: Mapping[str, Scalar], asks: Sequence[Mapping[str, Scalar]], *, variant: str, seed: int, threads: int
) -> Iterator[Measured]:
    """One training run with all that is asked for at its wire; then the results in the order of the asks."""
    made = setting(run, variant, seed)
    last = LastRound()
    listening: dict[str, Listening[Any, Any]] = {}
    for ask in asks:
        if (attack := _attack(made, ask)) is not None and ask.get("uploads") == "all":
            listening.setdefault(_key(ask), Listening(Server(), attack, made.knowledge(ask)))
    rule = _rule(made, run, threads)
    start = perf_counter()
    trained = _train(made, rule, [last, *listening.values()], threads)
    seconds = perf_counter() - start
    for ask in asks:
        if "measure" in ask:
            yield Measured(_utility(made, trained), {"validation": _curve(rule, trained)}, seconds)
            continue
        begin = perf_counter()
        attack = _attack(made, ask)
        if attack is not None and _key(ask) not in listening:
            listening[_key(ask)] = tap = Listening(Server(), attack, made.knowledge(ask))
            for message in last.messages:
                tap.receive(message)
        metrics = _graded(made, ask, listening.get(_key(ask)), trained)
        yield Measured(metrics, seconds=perf_counter() - begin)


def _curve(rule: Rule, trained: FederatedModel) -> list[tuple[int, float]]:
    return [(rule.every * (place + 1), value) for place, value in enumerate(trained.curve)]


def _key(ask: Mapping[str, Scalar]) -> str:
    """What has to listen for an ask: the same for all attributes, learners and labels."""
    return " ".join(
        f"{name}={ask[name]}" for name in ("attack", "reads", "uploads", "oracle", "watch", "by") if name in ask
    )


def _attack(made: Setting, ask: Mapping[str, Scalar]) -> Any:
    """Who listens to uploads for an ask, if anybody does."""
    name, every = str(ask.get("attack", "")), ask.get("uploads") == "all"
    if name == "aia" and ask.get("reads") != "private":
        watch: Any = ask.get("watch", "rows")
        rounds: Any = "all" if every else "last"
        reads = READS[str(ask.get("reads", "all"))]
        return FromRepresentations(
            reads=reads, rounds=rounds, watch=watch, oracle=made.oracle(ask), membership=_membership(ask)
        )
    attacks: dict[str, Callable[[], Any]] = {
        "chain": lambda: ThroughItems(membership=_membership(ask)),
        "membership": lambda: _membership(ask),
        "imia": lambda: ShadowClients(participation=_membership(ask).participation, seed=made.seed),
        "community": lambda: CommunityThroughItems(membership=_membership(ask)),
    }
    if name in attacks:
        return attacks[name]()
    if name not in ("aia", "interactions", "random-community", *_GUESSES) and "measure" not in ask:
        raise ConfigError(f"A cell asks for {dict(ask)}, expected a measure or an attack that is known.")
    return None


def _membership(ask: Mapping[str, Scalar]) -> FromUploads:
    """How the server tells own items: along the gradient of their score, or by how far rows moved."""
    participation: Participation = "all" if ask.get("uploads") == "all" else "last"
    if ask.get("by") == "distance":
        return FarthestRows(participation=participation)
    return GradientAlignment(shadow_rows=0, participation=participation)


def _graded(
    made: Setting, ask: Mapping[str, Scalar], tap: Listening[Any, Any] | None, trained: FederatedModel
) -> dict[str, NDArray[np.float64]]:
    name = str(ask["attack"])
    if name in ("membership", "imia"):
        return _graded_items(made, tap)
    if name in ("community", "random-community"):
        return _graded_communities(made, tap)
    attribute = str(ask["attribute"])
    label, names = classes_of(made.train, attribute)
    everybody = made.train.activity > 0
    graded = np.flatnonzero(everybody & (label >= 0) & ~made.known(ask) & ~made.attributes.public.numpy())
    question = WhichAttribute(torch.from_numpy(graded), attribute, tuple(names))
    answer = _answer(made, ask, tap, trained, question)
    own, guess = label[graded], answer.argmax(axis=1)
    return {
        "micro-f1": (guess == own).astype(np.float64),
        "macro-f1": macro_f1_values(guess, own, len(names)),
        "auc": auc_values(answer, own),
    }


def _answer(
    made: Setting,
    ask: Mapping[str, Scalar],
    tap: Listening[Any, Any] | None,
    trained: FederatedModel,
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
    client, rows = _rows(made, ask, tap, trained)
    learner = LEARNERS[str(ask.get("learner", "logistic" if name == "interactions" else "mlp"))]
    if isinstance(learner, ChosenEpoch) and ask.get("select", "test" if made.variant == CODE else "valid") == "test":
        return _best_epoch(knowledge, question, client, rows, learner, made)
    return np.asarray(by_learner(knowledge, question, client, rows, learner, made.seed).double())


def _rows(
    made: Setting, ask: Mapping[str, Scalar], tap: Listening[Any, Any] | None, trained: FederatedModel
) -> tuple[Tensor, Tensor]:
    """What a learner reads, f32[n, p], and of whom. Vectors that are kept are read for the sake of analysis (Figure 7);
    true interactions are the ceiling.
    """
    everybody = np.flatnonzero(made.train.activity).astype(np.int64)
    if ask["attack"] == "interactions":
        return torch.from_numpy(everybody), made.targets[everybody]
    if tap is not None:
        attack: Any = tap.attack
        found: tuple[Tensor, Tensor] = attack.read(tap.state())
        return found
    kept = trained.store.read(everybody).values
    vector = kept.get("user.private", kept.get("user"))
    if vector is None:
        raise ConfigError(f"{made.method} keeps no vector of users, expected PARD, or FedAvg with vector = 'kept'.")
    return torch.from_numpy(everybody), vector


def _best_epoch(
    knowledge: Knowledge, question: WhichAttribute, client: Tensor, rows: Tensor, learner: ChosenEpoch, made: Setting
) -> NDArray[np.float64]:
    """The epoch that is best for the graded users, as the published code has it: no adversary could choose it."""
    label = knowledge.public[f"labels of {question.attribute}"][client]
    truth = classes_of(made.train, question.attribute)[0][question.client.numpy()]
    place = torch.searchsorted(client, question.client)
    path = learner.path(
        rows[label >= 0].numpy(), label[label >= 0].numpy(), len(question.classes), rows[place].numpy(), made.seed
    )
    score = [
        float(auc_values(each, truth).mean()) if each.shape[1] == 2 else float((each.argmax(1) == truth).mean())
        for each in path
    ]
    best: NDArray[np.float64] = path[int(np.argmax(score))]
    return best


def _graded_items(made: Setting, tap: Listening[Any, Any] | None) -> dict[str, NDArray[np.float64]]:
    if tap is None:
        raise AssertionError("a membership attack listens")
    question = pairs_seen(tap.state(), made.train.n_items)
    graded = grade_items(question, tap.answer(question), truth_of(question, made.train))
    return {"f1": graded.f1.value, "auc": graded.auc.value}


def _graded_communities(made: Setting, tap: Listening[Any, Any] | None) -> dict[str, NDArray[np.float64]]:
    users = torch.arange(made.train.n_users)
    truth = communities(made.targets, made.train, COMMUNITY, users)
    if tap is None:
        lot = random.uniform(made.seed, "random community", users.numpy()[:, None], users.numpy())
        answer = torch.from_numpy(lot).float()
    else:
        answer = tap.answer(WhoBelongs(users, users))
    return {"accuracy": grade_communities(answer, truth, COMMUNITY, users)["accuracy"].double().numpy()}


def _utility(made: Setting, trained: FederatedModel) -> dict[str, NDArray[np.float64]]:
    """Of every user's test item, against sampled items (99 or 999) and among all; and how long training took."""
    model, seen = replace(trained, tuned=made.tuned), union(made.train, made.split.valid)
    sampled = evaluation_candidates(made.split, CANDIDATES[made.data], seed=made.seed).items
    ranks, full = rank(model, seen, made.split.test, sampled), rank(model, seen, made.split.test)
    return {
        "recall@10": ranks.recall(10),
        "ndcg@10": ranks.ndcg(10),
        "recall@10-full": full.recall(10),
        "ndcg@10-full": full.ndcg(10),
        "rounds": np.array([float(len(trained.loss))]),
    }
