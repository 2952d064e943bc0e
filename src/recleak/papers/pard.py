"""How the cells of PARD are measured (Zhao et al.): its recommenders, its rivals, attribute inference on vectors.

Two variants. `as-written` follows the text. `as-published-code` follows the public code where it differs: vectors are
added, not concatenated, a head of one hidden layer, N(0, 1) vectors, its learning rates (of estimators 0.1, on other
data than ML-100K 0.01), negatives drawn once, no terms in the first four rounds, one step of each estimator in a round
on 8 % of the public users, and from the second attribute on a part of the public users under the client's own label, a
look at validation items after every round and the end after 20 that are no better, an attacker that is told everybody's
items and whose best epoch for the graded users is reported. What else the code does is not repeated: estimators of
three and four layers with dropout and clipped gradients, trained for one to three epochs, a larger part of the public
users (up to 20 %) on some data, a squared distance to the mean of three attribute vectors in the place of eq. 33,
dropout of neighbors in FedGCN, a first vector that all users have in common, lambda_ir 0.1 beside lambda_re 0.5 (its
file of a grid search; here both are 0.5, as in the other variant).

What the paper leaves open, and what is taken here, the same for all methods unless it says otherwise:

    learning rates      0.5 for the mean over a batch, as the text has it, for vectors of users and heads. That moves no
                        item: a row has a share of 1/256 in a batch, and the mean is over all clients. (The code has lr
                        * |I|: with its lr of 0.1, 168.2 here.) Items have 3,000 or 1,000 (LOWER), chosen on validation
                        items: ML-100K, seed 0, the best Recall@10 + Recall@20 in 100 rounds, looked at every 10
                        (benchmarks/pard_rates.py). With 300, 1,000, 3,000: FedNCF under FedAvg 1.177, 1.328, 1.365 (and
                        1.338 with 10,000); PFedRec 1.256, 1.281, 1.303; PARD 1.426, 1.445, 1.436; PARD on FedGCN 1.419
                        with 1,000 (with 3,000 it diverges), FedAvg there 1.300 with 1,000 and 1.332 with 3,000, PFedRec
                        there 1.280 with 1,000 and 1.291 with 3,000, with which it diverges later (these two before its
                        batches had two passes). So the best rate of PFedRec, and of FedAvg on FedGCN, is the largest
                        that was compared, and FedAvg still learns after 100 rounds: a better rate than these may be
                        there
    lambda_ir and _re   0.5 and 0.5. The paper selects them from {0.1, ..., 0.9} (section IV-A5) and does not say which
                        it took, nor by what; here nothing was selected. Table `grid` has what one would select by:
                        validation items, and the attack on users whose attribute is known
    negatives           5 for each own item, as the code has it, drawn anew in each round
    participants        all clients in every round
    estimators          32 and 16 units; 10 steps before each epoch, with momentum 0.9, each on 16 public users and the
                        client itself: about one pass over the public data (eq. 37 has the minimum)
    rounds              until Recall@10 + Recall@20 of validation items, looked at every EVERY rounds, has not grown for
                        PATIENCE looks (the code's criterion, which looks at every round and waits for 20); ROUNDS is
                        there for runs that do not end. From the 10th to the 40th round it hardly grows: first a model
                        learns what is popular. Utility and attacks are of the round with the best look (`rounds`); a
                        run ends later (`trained`), and says if it was ROUNDS that ended it (`capped`)
    Early-stop          FedAvg until its validation utility is that of APM after its own training, or its own plateau
    PFedRec, UC-FedRec  stop where the validation utility is that of FedAvg, or on their own plateau: FedAvg's utility
                        is where they stop at the latest, and nothing brings them there if their own plateau is lower
    PFedRec             with FedNCF its own linear score function; with FedGCN the star graph with a head that stays. A
                        batch first moves what stays, then items; users score with item rows that they have tuned
    APM                 the noise of its section 5.7: Laplace of scale 0.017 and 0.033, clipped to 0.5, before an upload
    what leaves         as the table in docs/reproduction/pard.md has it: vectors of users are sent and not averaged;
                        PFedRec has none; `vector = "kept"` is FedNCF without the row of the user on the wire
    the attack          on that round: the vector where one is sent, and the mean of the rows that the server takes for
                        own items; labels are those of the public users (eta of all), all others are graded. Where no
                        user tells anything (FedAvg, APM), another eta only changes who is known to the server: those
                        who would be public with it, so that all methods are graded on the same users
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recleak.metrics.ranking import Scorer, rank
from recleak.models.base import Params
from recleak.models.baselines import MostPop
from recleak.papers.pard_attacks import OncePerUpload, attack_of, graded, listener
from recleak.papers.pard_settings import Scalar, Setting, setting
from recleak.papers.reproduce import Measured
from recleak.papers.store import USERS
from recleak.protocols.federated import BLOCK, Federated, FederatedModel, train_federated
from recleak.protocols.stopping import Either, Reached, Rule, Stopping
from recleak.recording import Listening, Tap
from recleak.training.chunks import one_thread
from recleak.training.executor import InProcess
from recleak.training.state import ClientStore
from recleak.utility import union
from recleak.wire import Broadcast, Message, Server, Upload, decode, encode

VERSION = 3
_SHARED = ("data", "preset", "model", "rounds", "thin")  # what runs that are compared have in common
_RIVAL = {"early-stop": "apm", "pfedrec": "fedavg", "uc-fedrec": "fedavg"}  # whose utility a method is stopped at
_LEVELS: dict[tuple[Scalar, ...], float] = {}  # what runs ended with
_STORED = 1e-5  # how well a stored curve is known; two utilities that differ do so by more, 1 / U


def needs(run: Mapping[str, Scalar]) -> list[tuple[dict[str, Scalar], dict[str, Scalar]]]:
    """What is measured before a run, if it is not there yet: the utility of who it is compared with."""
    rival = _RIVAL.get(str(run["method"]))
    return [] if rival is None else [(_of(rival, run), {"measure": "utility"})]


def hear(
    run: Mapping[str, Scalar], variant: str, seed: int, series: Mapping[str, Sequence[tuple[float, float]]]
) -> None:
    """What `needs` asked for, measured before, perhaps by another process."""
    if curve := series.get("validation"):
        _LEVELS.setdefault(_level_of(run, variant, seed), max(value for _, value in curve) - _STORED)


def _of(method: str, run: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Another method in the same setting."""
    return {**{name: run[name] for name in _SHARED if name in run}, "method": method}


def _level(run: Mapping[str, Scalar], made: Setting, threads: int) -> float:
    """The validation utility that the rival ends with; it is trained, if nobody has done so before."""
    other = _of(_RIVAL[made.method], run)
    key = _level_of(other, made.variant, made.seed)
    if key not in _LEVELS:
        rival = setting(other, made.variant, made.seed)
        _remember(other, rival, _train(rival, rival.plateau, [], threads))
    return _LEVELS[key]


def _level_of(run: Mapping[str, Scalar], variant: str, seed: int) -> tuple[Scalar, ...]:
    return (variant, seed, *(run.get(name, "") for name in (*_SHARED, "method")))


def _remember(run: Mapping[str, Scalar], made: Setting, trained: FederatedModel) -> None:
    """For who is compared with a run; that of other settings than a method's usual ones does not count."""
    if set(run) <= {*_SHARED, "method"}:
        level = max(trained.curve) if trained.curve else made.recall(trained)
        _LEVELS[_level_of(run, made.variant, made.seed)] = level


def _rule(made: Setting, run: Mapping[str, Scalar], threads: int) -> Rule:
    """When training ends."""
    if made.method in _RIVAL:
        return Either(made.plateau, Reached(_level(run, made, threads), made.every))
    return made.plateau


def _train(
    made: Setting,
    rule: Rule,
    taps: Sequence[Tap],
    threads: int,
    look: Callable[[FederatedModel, float], None] | None = None,
) -> FederatedModel:
    """Until the rule says so; `look` is shown what the rule looks at."""

    def score(model: FederatedModel) -> float:
        value = made.recall(model)
        if look is not None:
            look(model, value)
        return value

    return train_federated(
        Federated(rounds=made.rounds, local=made.local),
        made.model,
        made.train,
        defense=made.defense,
        attributes=made.attributes,
        stopping=Stopping(rule, score),
        taps=taps,
        executor=InProcess(threads),
        chunk=BLOCK,
        seed=made.seed,
        show_progress=False,
    )


# --- measuring --------------------------------------------------------------------------------------------------------


class BestRound:
    """A tap and a look: what was on the wire in the round after which validation items were ranked best, and the model
    of then. A run ends some rounds after it, when that is known; what is measured of it is measured once, at the end.

    A round is on disk: two rounds of uploads of MovieLens-1M in memory made it 7.6 GB, where it is 5.2 GB so.
    """

    def __init__(self, made: Setting, folder: Path, every: int = 1) -> None:
        self.made, self.folder, self.every = made, folder, every
        self.value = -np.inf
        self.round = -1  # the first is 0
        self.utility: dict[str, NDArray[np.float64]] = {}
        self.kept: Params = {}
        self._model: FederatedModel | None = None
        self._files: dict[int, list[Path]] = {}  # by round

    def look(self, model: FederatedModel, value: float) -> None:
        """Before anybody hears of the next round, so that its broadcast finds out which one is to stay."""
        if value > self.value:
            self.value, self.round = value, len(model.loss) - 1
            self._model = _as_it_is(model, self.made.everybody)

    def end(self, model: FederatedModel, rule: Rule) -> None:
        """After training: what is measured of the model of that round, or of the last, if nobody has looked."""
        if self._model is None:
            self.round = len(model.loss) - 1
        best, made = self._model or model, self.made
        self.utility = {
            **_utility(made, replace(best, tuned=made.tuned), self.round + 1),
            "trained": np.array([float(len(model.loss))]),
            "capped": np.array([float(not rule.ended(model.curve))]),
            "validation": np.array([self.value if self._model else made.recall(model)]),
        }
        kept = best.store.read(made.everybody).values
        self.kept = {
            part.name: kept[part.name]
            for part in best.task.components
            if part.storage == "per_user" and part.role == "user" and not part.shared and part.name in kept
        }
        self._model = None

    @property
    def messages(self) -> Iterator[Message]:
        """Of the round, in order."""
        return (decode(file.read_bytes()) for file in self._files[self.round])

    def receive(self, message: Message) -> None:
        """A broadcast begins a round. Rounds that nobody looks at afterwards are not kept, but for the last."""
        if isinstance(message, Broadcast):
            for round in [each for each in self._files if each != self.round]:
                for file in self._files.pop(round):
                    file.unlink()
        if isinstance(message, Broadcast | Upload) and self._may_count(message.round):
            files = self._files.setdefault(message.round, [])
            files.append(self.folder / f"{message.round}-{len(files)}.safetensors")
            files[-1].write_bytes(encode(message))

    def _may_count(self, round: int) -> bool:
        return (round + 1) % self.every == 0 or round + 1 == self.made.rounds

    def state(self) -> dict[str, Tensor]:
        """A run of a reproduction is not continued."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """There is nothing to put back."""

    def close(self) -> None:
        """There is nothing to close."""


def _as_it_is(model: FederatedModel, clients: NDArray[np.int64]) -> FederatedModel:
    """A model that stays as it is while its run goes on; without what clients keep for a defense only."""
    task = model.task.without_own()
    parts, names = task.components, {part.name for part in task.components}
    store = ClientStore(parts, task.training.optimizer, model.train.n_users, model.train.n_items, task.seed)
    for start in range(0, len(clients), BLOCK):
        store.write(model.store.read(clients[start : start + BLOCK], names))
    return replace(model, task=task, store=store, version=store.version)


def measure(
    run: Mapping[str, Scalar], asks: Sequence[Mapping[str, Scalar]], *, variant: str, seed: int, threads: int
) -> Iterator[Measured]:
    """One training run with all that is asked for at its wire; then the results in the order of the asks."""
    with TemporaryDirectory(prefix="recleak-") as folder:
        yield from _measure(run, asks, setting(run, variant, seed), threads, Path(folder))


def _measure(
    run: Mapping[str, Scalar], asks: Sequence[Mapping[str, Scalar]], made: Setting, threads: int, folder: Path
) -> Iterator[Measured]:
    listening: dict[str, Listening[Any, Any]] = {}
    inferred: dict[str, OncePerUpload] = {}
    for ask in asks:
        if (attack := attack_of(made, ask, inferred)) is not None and ask.get("uploads") == "all":
            listening.setdefault(listener(ask), Listening(Server(), attack, made.knowledge(ask)))
    rule = _rule(made, run, threads)
    best = BestRound(made, folder, rule.every)
    start = perf_counter()
    trained = _train(made, rule, [best, *listening.values()], threads, best.look)
    seconds = perf_counter() - start
    best.end(trained, rule)
    _remember(run, made, trained)
    for ask in asks:
        if ask.get("measure") == "popularity":
            none = {name: np.zeros(1) for name in ("trained", "capped")}
            yield Measured({**_utility(made, MostPop().fit(made.train), 0), **none})
            continue
        if "measure" in ask:
            yield Measured(best.utility, {"validation": _curve(rule, trained)}, seconds)
            continue
        begin = perf_counter()
        attack = attack_of(made, ask, inferred)
        if attack is not None and listener(ask) not in listening:
            listening[listener(ask)] = tap = Listening(Server(), attack, made.knowledge(ask))
            with one_thread():
                for message in best.messages:
                    tap.receive(message)
        with one_thread():
            metrics = graded(made, ask, listening.get(listener(ask)), best.kept)
        yield Measured(metrics, seconds=perf_counter() - begin)


def _curve(rule: Rule, trained: FederatedModel) -> list[tuple[int, float]]:
    return [(rule.every * (place + 1), value) for place, value in enumerate(trained.curve)]


def _utility(made: Setting, model: Scorer, rounds: int) -> dict[str, NDArray[np.float64]]:
    """Of every user's test item, against sampled items (99 or 999) and among all, after so many rounds; and who these
    users are.
    """
    seen = union(made.train, made.split.valid)
    ranks, full = rank(model, seen, made.split.test, made.candidates), rank(model, seen, made.split.test)
    return {
        "recall@10": ranks.recall(10),
        "ndcg@10": ranks.ndcg(10),
        "recall@10-full": full.recall(10),
        "ndcg@10-full": full.ndcg(10),
        USERS: ranks.users.astype(np.float64),
        "rounds": np.array([float(rounds)]),
    }
