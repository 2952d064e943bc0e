"""How the cells of CDA are measured (Belal et al.): federated and gossip training, and who finds whose community.

Two variants. `as-written` is the text at its scale: all users, communities of 50, a model is scored by its mean
confidence (eq. 10). `as-published-code` is what the published code does: some 100 users, communities of 5, NDCG@20
against 99 sampled items, personal peers of which one stays.

What the paper leaves open, and what is taken here:

    local training        full batches, one step in a federated round, two for each message in gossip; 4 negatives per
                          positive, drawn anew each time; Adam keeps its moments: as the code has it
    the split             80/10/10 at random, of each user's items
    averaging             by the number of positives, of whole models: a user's row, which only that user changes, keeps
                          its share of the change (eq. 5, and the code)
    views                 replaced after every tick as written, after ten in the code. The text has "periodically"; that
                          a single adversary sees 38 to 49 % of its community, as it says, needs one tick with its
                          number of users, or ten with 100
    a node's own vector   where vectors are not shared, an adversary scores with its own, which it knows
    utility               HR@20 of every test item against 99 sampled others (the printed values cannot be of a full
                          ranking); the mean over a user's items, then over users
    DP-SGD                see `cda_settings.private`

PRME-G has no published code, so that both variants score it by its mean confidence. What is taken for it:

    the sign              scores are -D: nearest is best. Eq. 4 has it reversed, and eq. 10 with it
    local training        one example at a step of SGD, a negative for each transition, drawn anew; epochs as for GMF
    the split             80/10/10 of each user's check-ins by time, whatever the seed; the truth is still the Jaccard
                          similarity of the items in train
    targets               the adversary's own training transitions (`attacks.transitions`)
    the chain             at nodes from the items' preferences; at the server from what uploads say of them
    averaging             by the number of transitions; personal peers by what came next in the validation part
    nodes of a gossip     in half precision: in single precision two copies of all nodes' models take 10.4 GB on
                          Foursquare and 12.9 GB on Gowalla. They train in single precision
    utility               HR@20 of every test transition, from where the user was, against 99 sampled places
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.accounting import averaging, ledger
from recleak.attacks.base import WhoBelongs
from recleak.attacks.community import PeerCommunity, Scoring, ServerCommunity
from recleak.attacks.community_items import CommunityThroughItems, PeerCommunityThroughItems
from recleak.attacks.community_sums import AggregatorCommunity
from recleak.data.sampling import evaluation_candidates
from recleak.data.sequences import held_out
from recleak.errors import ConfigError
from recleak.grading import communities, grade_communities
from recleak.metrics.next_item import rank_next
from recleak.metrics.ranking import rank
from recleak.papers import cda_nulls, cda_sensitive
from recleak.papers.cda_settings import CODE, DELTA, Scalar, Setting, setting
from recleak.papers.communities import OF_USERS, draws, graded
from recleak.papers.reproduce import Measured
from recleak.papers.store import USERS
from recleak.protocols.federated import BLOCK, FederatedModel, train_federated
from recleak.protocols.gossip import Gossip, GossipModel, train_gossip
from recleak.training.executor import InProcess
from recleak.watching import Watching
from recleak.wire import Aggregator, Peers, Server

VERSION = 2
SOME, SOME_COLLUDING = 100, 20  # adversaries of the chain at nodes
COLLUDING = 0.1  # of all users side with each adversary that takes the mean of their vectors, unless asked otherwise


def needed_bytes(run: Mapping[str, Scalar], variant: str) -> int:
    """What the nodes of a gossip hold at most: who shares less holds a little less."""
    if run["protocol"] == "fl":
        return 0
    return _held(variant, tuple((name, run[name]) for name in ("data", "preset", "model") if name in run))


@cache
def _held(variant: str, named: tuple[tuple[str, Scalar], ...]) -> int:
    made = setting({**dict(named), "protocol": "rand", "sharing": "full"}, variant, 0)
    if not isinstance(made.protocol, Gossip):
        raise AssertionError("rand is a gossip")
    parts = made.defense.sharing(made.model.components())
    return made.protocol.needed_bytes(parts, made.train.n_users, made.train.n_items)


def measure(
    run: Mapping[str, Scalar], asks: Sequence[Mapping[str, Scalar]], *, variant: str, seed: int, threads: int
) -> Iterator[Measured]:
    """One training run with all that is asked for at its wire; then the results in the order of the asks."""
    made = setting(run, variant, seed)
    if any(ask.get("halves") for ask in asks) and made.model.needs_transitions:
        raise ConfigError("Got halves for PRME-G, expected GMF: its targets are transitions, not items.")
    taps: dict[str, Watching[Any, WhoBelongs]] = {}
    marks = cda_sensitive.marks_of(str(run["data"])) if any("targets" in ask for ask in asks) else ()
    for ask in asks:
        if (key := _key(ask)) is not None and key not in taps:
            if ask["attack"] == "sums" and made.keeps_vectors:
                continue  # no row of a sum is a single user's
            taps[key] = cda_sensitive.tap(made, ask, marks) if "targets" in ask else _tap(made, ask)
    start = perf_counter()
    needed = taps or any(ask.get("measure") == "utility" for ask in asks)  # nulls need no training
    trained = _train(made, list(taps.values()), threads) if needed else None
    seconds = perf_counter() - start
    for ask in asks:
        if ask.get("measure") == "utility" and trained is not None:
            yield Measured({**_utility(made, trained), **_spent(made, trained)}, seconds=seconds)
        elif "targets" in ask:
            key = _key(ask)
            unknown = cda_sensitive.unknown(made, marks)
            yield unknown if key is None else cda_sensitive.measured(taps[key], marks, seconds)
        elif ask.get("attack") in _NULLS:
            yield Measured(_NULLS[str(ask["attack"])](made, ask))
        elif ask.get("attack") == "sums" and made.keeps_vectors:
            yield _nothing(made, ask)
        else:
            key = _key(ask)
            yield _measured(taps[str(key)], seconds)


def _train(made: Setting, taps: list[Watching[Any, WhoBelongs]], threads: int) -> FederatedModel | GossipModel:
    told = range(made.train.n_users) if made.keeps_vectors else ()
    if isinstance(made.protocol, Gossip):
        return train_gossip(
            made.protocol,
            made.model,
            made.train,
            valid=made.split.valid,
            defense=made.defense,
            taps=taps,
            threads=threads,
            confidants=told,
            seed=made.seed,
            show_progress=False,
        )
    return train_federated(
        made.protocol,
        made.model,
        made.train,
        defense=made.defense,
        taps=taps,
        executor=InProcess(threads),
        chunk=BLOCK,  # what clients of this model keep is small: whole blocks need no putting together
        confidants=told,
        seed=made.seed,
        show_progress=False,
    )


def _key(ask: Mapping[str, Scalar]) -> str | None:
    """What has to listen for an ask; asks with the same key share it."""
    if ask.get("attack") not in ("cda", "chain", "sums"):
        return None
    return " ".join(f"{name}={ask[name]}" for name in sorted(ask))


@dataclass(frozen=True, eq=False)
class _Sought:
    """What adversaries rank by, and whom they should find; without who sides with them, if they take their vectors."""

    targets: Tensor  # f32[U, I]
    truth: Tensor  # bool[U, U]
    public: dict[str, Tensor]
    aside: Tensor | None = None  # bool[U, U]

    @classmethod
    def of(cls, made: Setting, ask: Mapping[str, Scalar]) -> _Sought:
        """With `halves`, one random half of each adversary's items are its targets, and the truth is by the other."""
        everybody = torch.arange(made.train.n_users)
        targets, other = _halves(made) if ask.get("halves") else (made.targets, made.targets)
        public = {"targets": targets} | ({"excluded": made.targets} if ask.get("disjoint") else {})
        aside = None
        if ask.get("vector") == "mean":
            usual = 0.0 if isinstance(made.protocol, Gossip) else COLLUDING
            aside = made.groups(float(ask.get("colluders", usual)))
            public["groups"] = aside
        return cls(targets, communities(other, made.train, made.size, everybody, aside), public, aside)


def _halves(made: Setting) -> tuple[Tensor, Tensor]:
    """Each user's items in two random halves, f32[U, I] twice; of an odd number the first has one more."""
    users, items = made.targets.shape
    lot = random.uniform(made.seed, "halves", np.arange(users)[:, None], np.arange(items))
    place = torch.from_numpy(np.where(made.targets.numpy() > 0, lot, 2.0)).argsort(1).argsort(1)  # own items first
    first = (place < ((made.targets.sum(1, keepdim=True) + 1) // 2)).float() * made.targets
    return first, made.targets - first


def _tap(made: Setting, ask: Mapping[str, Scalar]) -> Watching[Any, WhoBelongs]:
    everybody, sought = torch.arange(made.train.n_users), _Sought.of(made, ask)
    question, public = WhoBelongs(everybody, everybody), sought.public

    def grade(answer: Tensor) -> dict[str, Tensor]:
        return graded(answer, sought.truth, made.size, everybody, sought.aside)

    if ask["attack"] == "chain" and isinstance(made.protocol, Gossip):
        return _chain_of_peers(made, ask, sought)
    if ask["attack"] == "chain":
        rounds = {*range(10), *range(9, made.protocol.rounds, 10)}  # it is the same after everybody's first upload
        return Watching(Server(), CommunityThroughItems(), made.knowledge(**public), question, grade, rounds)
    keep: Any = ask.get("keep", "latest")
    if ask["attack"] == "sums":
        if isinstance(made.protocol, Gossip):
            raise ConfigError("Got attack = 'sums' in a gossip, expected a federation: nobody adds up models there.")
        how: dict[str, Any] = {name: ask[name] for name in ("scoring", "reading") if name in ask}
        of_sums = AggregatorCommunity(**how, keep=keep, seed=made.seed)
        return Watching(Aggregator(), of_sums, made.knowledge(**public), question, grade)
    as_coded = made.variant == CODE and not made.model.needs_transitions
    scoring: Any = ask.get("scoring", "ndcg" if as_coded else "confidence")
    vector: Any = ask.get("vector", "told" if made.keeps_vectors else "sent")
    if not isinstance(made.protocol, Gossip):
        attack = ServerCommunity(scoring=scoring, vector=vector, keep=keep, seed=made.seed)
        return Watching(Server(), attack, made.knowledge(**public), question, grade)
    groups = made.groups(float(ask.get("colluders", 0.0)))
    peer = PeerCommunity(scoring=scoring, vector=vector, keep=keep, seed=made.seed)
    return Watching(Peers(groups), peer, made.knowledge(**{**public, "groups": groups}), question, grade)


def _chain_of_peers(made: Setting, ask: Mapping[str, Scalar], sought: _Sought) -> Watching[Any, WhoBelongs]:
    """For some adversaries, as each holds tables and, with colluders, has hundreds of models in a tick."""
    share, users = float(ask.get("colluders", 0.0)), made.train.n_users
    lot = random.bits(made.seed, "some adversaries", np.arange(users)).argsort()
    who = torch.from_numpy(lot[: SOME_COLLUDING if share else SOME].copy())
    groups = made.groups(share)[who]

    def grade(answer: Tensor) -> dict[str, Tensor]:
        return graded(answer, sought.truth[who], made.size, who)

    known = made.knowledge(**{**sought.public, "groups": groups, "targets": sought.targets[who]})
    question = WhoBelongs(torch.arange(len(who)), torch.arange(users))
    return Watching(Peers(groups), PeerCommunityThroughItems(), known, question, grade)


def _nothing(made: Setting, ask: Mapping[str, Scalar]) -> Measured:
    """What an answer that is the same for everybody gets: of sums in which no row is a single user's."""
    users, sought = made.train.n_users, _Sought.of(made, ask)
    found = graded(torch.zeros(users, users), sought.truth, made.size, torch.arange(users), sought.aside)
    return Measured({**_users(made), "max-aac": found["accuracy" + OF_USERS].numpy()})


def _measured(tap: Watching[Any, WhoBelongs], seconds: float) -> Measured:
    """Averages over adversaries at rounds (counted from 1) as values of users, and what is behind them.

    Quantiles are of adversaries.
    """
    rounds = tap.rounds.numpy()
    accuracy, exposed = (tap.curve(name).double().numpy() for name in ("accuracy", "exposed"))
    values, bound = (tap.curve(name + OF_USERS).numpy() for name in ("accuracy", "bound"))
    best, chosen = int(accuracy.mean(1).argmax()), int(tap.curve("separation").argmax())
    metrics: dict[str, NDArray[np.float64]] = {
        USERS: np.arange(values.shape[1], dtype=np.float64),
        "max-aac": values[best],
        "max-round": np.array([float(rounds[best] + 1)]),
        "chosen-aac": values[chosen],
        "chosen-round": np.array([float(rounds[chosen] + 1)]),
        "bound": bound[-1],
        "last-aac": values[-1],
        "exposed": exposed[best][~np.isnan(exposed[best])],
    }
    for at in (10, 200):
        if (place := np.flatnonzero(rounds == at - 1)).size:
            metrics[f"aac@{at}"] = values[place[0]]
    for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)):
        metrics[name] = np.array([np.quantile(accuracy[best], share)])
        metrics[f"exposed-{name}"] = np.array([np.quantile(metrics["exposed"], share)])
    shown = np.unique(
        np.concatenate([np.arange(min(10, len(rounds))), np.arange(0, len(rounds), 5), [len(rounds) - 1]])
    )
    series = {
        "aac": [(int(rounds[r] + 1), float(accuracy[r].mean())) for r in shown],
        "bound": [(int(rounds[r] + 1), float(bound[r].mean())) for r in shown],
    }
    return Measured(metrics, series, seconds)


def _users(made: Setting) -> dict[str, NDArray[np.float64]]:
    """All of them, each with a value: differences of two cells are then of the same users."""
    return {USERS: np.arange(made.train.n_users, dtype=np.float64)}


def _random(made: Setting, ask: Mapping[str, Scalar]) -> dict[str, NDArray[np.float64]]:
    """A draw of as many others, on average size / others; or, with `rounds`, the best of so many rankings.

    Each adversary draws for itself, so that whom it hits is chance by pair: values are of adversaries alone.
    """
    users, sought = made.train.n_users, _Sought.of(made, ask)
    if "rounds" in ask:
        given = (sought.truth, made.size, int(ask["rounds"]))
        best = cda_nulls.best_of_rankings(*given, seed=made.seed, aside=sought.aside)
        return {"accuracy": best, "p95": np.array([np.quantile(best, 0.95)])}
    everybody, others = torch.arange(users), torch.full((users,), users - 1)
    if sought.aside is not None:
        others = users - sought.aside.sum(1)  # an adversary sides with itself
    found = grade_communities(draws(users, made.seed), sought.truth, made.size, everybody, sought.aside)
    times, expected = float(ask.get("times", 1)), (made.size / others.double()).mean(0, keepdim=True).numpy()
    return {**_users(made), "accuracy": found["accuracy"].double().numpy() * times, "expected": expected * times}


def _activity(made: Setting, ask: Mapping[str, Scalar]) -> dict[str, NDArray[np.float64]]:
    """Who has more items comes first, whoever looks."""
    users, sought = made.train.n_users, _Sought.of(made, ask)
    answer = torch.from_numpy(made.train.activity.astype(np.float32)).expand(users, users)
    found = graded(answer, sought.truth, made.size, torch.arange(users), sought.aside)
    return {**_users(made), "accuracy": found["accuracy" + OF_USERS].numpy()}


def _noise(made: Setting, ask: Mapping[str, Scalar]) -> dict[str, NDArray[np.float64]]:
    """Models that give every item a random number, in the best of `rounds`, read as an ask of CDA has it."""
    sought, scoring = _Sought.of(made, ask), cast(Scoring, ask.get("scoring", "confidence"))
    known, everybody = made.knowledge(**sought.public), torch.arange(made.train.n_users)
    best: NDArray[np.float64] | None = None
    for answer in cda_nulls.scores_of_noise(known, scoring, int(ask.get("rounds", 1)), seed=made.seed):
        found = graded(answer, sought.truth, made.size, everybody, sought.aside)["accuracy" + OF_USERS]
        if best is None or found.mean() > best.mean():
            best = found.numpy()
    return {**_users(made), "accuracy": np.empty(0) if best is None else best}


_NULLS = {"random": _random, "activity": _activity, "noise": _noise}


def _utility(made: Setting, trained: FederatedModel | GossipModel) -> dict[str, NDArray[np.float64]]:
    """HR@20 of every user's test items, against 99 sampled items and among all."""
    candidates = evaluation_candidates(made.split, 99, seed=made.seed)
    if made.model.needs_transitions:
        test = held_out(made.split)
        return {
            "hr@20": rank_next(trained, test, candidates.items).recall(20),
            "hr@20-full": rank_next(trained, test).recall(20),
        }
    return {
        "hr@20": rank(trained, made.train, made.split.test, candidates.items).recall(20),
        "hr@20-full": rank(trained, made.train, made.split.test).recall(20),
    }


def _spent(made: Setting, trained: FederatedModel | GossipModel) -> dict[str, NDArray[np.float64]]:
    """What DP-SGD really spends in the run, at most: for one example, and for an interaction with its negatives.

    Of the client that trained most; `-typical` of half of them. Nothing where there is no guarantee.
    """
    if isinstance(trained, GossipModel):
        times = np.array(trained.trainings, np.int64)
    else:
        times = np.where(made.train.activity > 0, made.protocol.rounds, 0)  # all take part in every round
    entries = ledger(
        made.defense,
        components=made.model.components(),
        n_items=made.train.n_items,
        participations=times,
        training=made.protocol.local,
        aggregation=averaging(made.protocol),
        delta=DELTA,
    )
    rows = [entry for entry in entries if entry.composed is not None]
    if len(rows) != 2:
        return {}
    example, interaction = rows
    numbers = {
        "epsilon-spent": example.composed,
        "epsilon-typical": example.typical,
        "epsilon-interaction": interaction.composed,
        "trainings": float(times.max()),
    }
    return {name: np.array([value]) for name, value in numbers.items() if value is not None}
