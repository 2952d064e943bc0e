"""How the cells of GERAI are measured (Zhang et al., WWW 2021): lists of eight recommenders, and who reads them.

What the paper leaves open or says twice, and what is taken here, the same for all methods:

    split                   80/20 of each user's items at random; an eighth of the 80 is the validation part, on which
                            training stops (NDCG@10 has not grown for ten epochs: with five, GCN stopped in its noise)
    optimizer               Adam. GCN and GERAI: batches of 64 as printed; BPR, BlurMe and RAP: 512
    gamma                   0.01 beside the sum over D (eq. 11), hence 0.02 / |D| as decay beside the mean
    initial parameters      a deviation of 0.1 for E_U and the items' vectors in place of 1 (see below); weights by
                            their fan-in (He et al. 2015): with N(0, 1) the sigmoids saturate
    GCN                     GERAI's own recommender without either stage; the paper cites another (PinSage)
    neighbors               10 of each node, drawn anew at every step; all of them for lists
    q in (0, 1)             clipped, as the footnote proposes, in all variants with the noisy loss
    noise in the loss       redrawn at every step, on the mean: the prose ("in each iteration"), eq. 17, and the printed
                            scales. `noise = "fixed"`: one draw with a ridge that keeps the loss bounded below;
                            `noise = "sum"`: Algorithm 3 to the letter, |D| times smaller
    GERAI-NF                "epsilon = 0" must mean no noise: the plain BPR loss
    Hit@K, NDCG@K           of every test item among itself and 99 sampled others, the mean over users: the printed
                            numbers cannot be of a full ranking. Among all items stands beside (`-full`)
    F1                      accuracy: 60 of 64 printed F1 of Table 5 are whole numbers of 189 users, which neither macro
                            nor binary F1 would be. Macro-F1 and AUC stand beside
    history                 train and validation items; of BlurMe the blurred ones, which are what is public there
    epsilon of rivals       GERAI's, 0.4, wherever a guarantee follows from it: DPAE for all that one user did (delta
                            0.1 / users), DPMF for the value of one rating, DPNE for one entry of its matrix
    BlurMe                  10 % added items that speak for another gender, drawn by weight
    attacker                one hidden layer of 100, 30 epochs of Adam, on the plain codes; trees, naive Bayes and
                            nearest neighbors on the same, a Gaussian process with the median distance as its length

What was chosen on the validation part of seed 0: NDCG@10 of its items among all, where chance has 0.008 and what is
popular 0.110. Nobody was told of a test item or of an attacker. (Looking at validation items spends privacy that no
ledger of a rival counts.) Best of so many epochs, * where it was still growing:

    BPR         rate 0.0005 .203, 0.001 .201, 0.002 .202, 0.005 .196 with a decay of 1e-5;
                decay 0 .190, 1e-6 .192, 1e-4 .177, 1e-3 .099 with a rate of 0.001
    BlurMe      rate 0.001, decay 1e-5 .199; 0.005, 1e-5 .187; 0.005, 1e-4 .178
    RAP         rate 0.00025 .148, 0.0005 .145, 0.001 .144, 0.002 .136, 0.005 .115 with a decay of 1e-5;
                lower rates were not tried
    GCN         rate 0.001: vectors from N(0, 1) .164 (14 epochs*); of 0.1 .175 (best of 40)
    GERAI-NF    vectors from N(0, 1): rate 0.001 .104 (5), 0.005 .105 (6); from a deviation of 0.1: 0.001 .149 (6*)
    GERAI       rate 0.001: vectors from N(0, 1) .081 (10); of 0.1 .154 (best of 21)
    DPNE        ridge 0.01 .0063, 1 .0063, 100 .0072, 1000 .0073; with epsilon 40: 1 .075, 100 .083, 1000 .083
    DPMF        ridge 0.01 .0010, 1 .0008, 100 .0075, 1000 .0076; with epsilon 40: 1 .025, 100 .094, 1000 .008
    DPAE        clip 0.005: rate 0.002 .0102, 0.02 .0129; clip 0.05: .0087, .0120

So with an epsilon of 0.4 the three rivals show lists by lot.

Why GERAI was below what is popular at first. Not its noise: the best of six epochs is .089 without and .080 with it.
Not a bug in the neighbors or the loss: on raw features, with vectors from N(0, 1) and 5 epochs, the polynomial without
clipping had .150, clipping with the plain loss .140, the polynomial with a sigmoid in place of clipping .145. It is the
perturbed features (GERAI-NF: .104) with long first vectors. Algorithm 2 scales what it keeps by 21 / 8, so that with
N(0, 1) a user's vector is 7.2 times as long as an item's (3.5 times with raw features), and of an item's own message
little is left among those of ten drawn users. From shorter ones training stays at what is popular for four or five
epochs, and then leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.attacks.attribute import MajorityClass, Proportional
from recleak.attacks.audience import FromHistory, FromLists, ShadowLists, gerai_network
from recleak.attacks.base import Knowledge, WhichAttribute
from recleak.attacks.learners import Bayes, GaussianProcess, Learner, Neighbors, Tree
from recleak.attacks.preparation import Preparation
from recleak.central import seen_history, shadow_lists, train_central
from recleak.data.features import UserFeatures, classes_of, user_features
from recleak.data.interactions import Interactions
from recleak.data.sampling import evaluation_candidates
from recleak.data.source import open_data
from recleak.data.split import Split, ratio
from recleak.defenses.base import Chain, Defense
from recleak.defenses.blurme import BlurMe, unfitted
from recleak.defenses.dp_sgd import DPSGD
from recleak.defenses.feature_noise import PerturbedFeatures
from recleak.defenses.functional_mechanism import FunctionalMechanism
from recleak.defenses.release import PopularLists
from recleak.epsilon import noise_multiplier_for
from recleak.errors import ConfigError, unknown_name
from recleak.metrics.inference import most_probable
from recleak.metrics.linearized import auc_values, macro_f1_values
from recleak.metrics.ranking import rank
from recleak.models.attention_gcn import AttentionGCN, Bounding
from recleak.models.autoencoder import Autoencoder
from recleak.models.base import Model
from recleak.models.factorization import RatingFactorization, WalkFactorization
from recleak.models.mf import MF
from recleak.models.rap import RAP
from recleak.papers.reproduce import Measured
from recleak.protocols.centralized import Centralized, CentralizedModel, as_shown
from recleak.recording import Listening
from recleak.training.optimizers import Adam
from recleak.utility import union

VERSION = 3
ATTRIBUTES = ("gender", "age", "occupation")
KS = (5, 10, 15, 20, 25, 30)
KNOWN = 0.8  # share of the users whose attribute the attacker knows
PATIENCE = 10  # epochs without a better validation part; with five, GCN stopped in its noise
GAMMA, BATCH = 0.01, 64
RATE = 0.001  # of the graph model
WIDE, WIDE_RATE, DECAY = 512, 0.001, 1e-5  # of models without neighbors
RIDGE = 100.0  # of what is solved
DPAE_RATE, DPAE_CLIP = 0.02, 0.005
RAP_RATE = 0.00025
DPAE_EPOCHS = 30  # fixed: where noise is calibrated to a number of epochs, they cannot be chosen by looking
Scalar = str | int | float | bool


@dataclass(frozen=True, eq=False)
class Setting:
    """One training run."""

    split: Split
    model: Model
    defense: Defense
    protocol: Centralized
    features: UserFeatures | None
    seed: int

    @property
    def train(self) -> Interactions:
        """What the recommender trains on."""
        return self.split.train

    @cached_property
    def past(self) -> Interactions:
        """What users did before lists are shown."""
        return union(self.split.train, self.split.valid)

    @cached_property
    def known(self) -> NDArray[np.int64]:
        """The users whose attribute the attacker knows, ascending."""
        lot = random.bits(self.seed, "known users", np.arange(self.train.n_users)).argsort()
        return np.sort(lot[: round(KNOWN * len(lot))])

    @cached_property
    def history(self) -> Tensor:
        """What the outsider sees of the past, f32[U, I]."""
        return seen_history(self.defense, self.split, self.seed)

    def knowledge(self, attribute: str | None = None) -> Knowledge:
        """What the outsider knows: histories, and the attribute of some users."""
        public = {"history": self.history}
        if attribute is not None:
            shown = torch.full((self.train.n_users,), -1)
            shown[self.known] = torch.tensor(classes_of(self.train, attribute)[0])[self.known]
            public[f"labels of {attribute}"] = shown
        parts = self.model.components()
        known = unfitted(self.defense)
        return Knowledge(self.model, self.train.n_users, self.train.n_items, parts, None, known, public)


def setting(run: Mapping[str, Scalar], variant: str, seed: int) -> Setting:
    """The objects that a cell's `run` names."""
    split = ratio(open_data(str(run["data"]), str(run["preset"])), (0.7, 0.1, 0.2), seed=seed)
    method, factors = str(run["model"]), int(run.get("factors", 60))
    epsilon = float(run.get("epsilon", 0.4))
    decay = 2 * GAMMA / len(split.train)
    graph = Centralized(batch_size=BATCH, optimizer=Adam(RATE, weight_decay=decay), patience=PATIENCE)
    plain = Centralized(batch_size=WIDE, optimizer=Adam(WIDE_RATE, weight_decay=DECAY), patience=PATIENCE)
    if method in ("gcn", "gerai", "gerai-nl", "gerai-nf"):
        features = user_features(split.train)
        groups = tuple((each.start, each.stop) for each in features.groups.values())
        parts: list[Defense] = []
        if method in ("gerai", "gerai-nf"):
            parts.append(PerturbedFeatures(float(run.get("local", 20.0)), groups))
        noisy = method in ("gerai", "gerai-nl")
        if noisy:
            parts.append(_loss_noise(str(run.get("noise", "redrawn")), epsilon, len(split.train)))
        bounding: Bounding = "clip" if noisy else "none"
        model = AttentionGCN(features.values.shape[1], factors=factors, bounding=bounding)
        protocol = replace(graph, loss="bpr-taylor") if noisy else graph
        return Setting(split, model, Chain(tuple(parts)) if parts else Defense(), protocol, features, seed)
    if method == "dpae":
        uses, delta = DPAE_EPOCHS, 0.1 / split.train.n_users
        multiplier = 0.0 if epsilon == inf else noise_multiplier_for(epsilon, delta, uses)
        fixed = Centralized(epochs=DPAE_EPOCHS, batch_size=256, patience=0, optimizer=Adam(DPAE_RATE))
        return Setting(split, Autoencoder(), DPSGD(multiplier, clip=DPAE_CLIP), fixed, None, seed)
    classes = tuple(len(classes_of(split.train, name)[1]) for name in ATTRIBUTES)
    makers: dict[str, tuple[Model, Defense]] = {
        "bpr": (MF(factors), Defense()),
        "blurm": (MF(factors), BlurMe(extra=float(run.get("extra", 0.1)))),
        "popular": (MF(factors), PopularLists(float(run.get("chance", 0.5)))),
        "dpne": (WalkFactorization(factors, epsilon, RIDGE), Defense()),
        "dpmf": (RatingFactorization(factors, epsilon, RIDGE), Defense()),
        "rap": (RAP(factors, attributes=ATTRIBUTES, classes=classes), Defense()),
    }
    if method not in makers:
        raise unknown_name("method", method, [*makers, "gcn", "dpae", "gerai", "gerai-nl", "gerai-nf"])
    made, defense = makers[method]
    if isinstance(defense, BlurMe):
        defense = defense.fitted(split.train)
    if method == "rap":
        plain = replace(plain, optimizer=Adam(RAP_RATE, weight_decay=DECAY))
    return Setting(split, made, defense, plain, None, seed)


def _loss_noise(kind: str, epsilon: float, examples: int) -> FunctionalMechanism:
    if kind == "redrawn":
        return FunctionalMechanism(epsilon, examples, "step")
    if kind == "fixed":
        return FunctionalMechanism(epsilon, examples, "never", repair="ridge")
    if kind == "sum":
        return FunctionalMechanism(epsilon, examples, "never", on="sum", repair="ridge")
    raise unknown_name("noise in the loss", kind, ["redrawn", "fixed", "sum"])


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(
    run: Mapping[str, Scalar], asks: Sequence[Mapping[str, Scalar]], *, variant: str, seed: int, threads: int
) -> Iterator[Measured]:
    """One training run with all that is asked for at its wire; then the results in the order of the asks."""
    made = setting(run, variant, seed)
    taps: dict[str, Listening[Any, Any]] = {}
    for ask in asks:
        if "attack" in ask and _key(ask) not in taps and (attack := _evidence(ask)) is not None:
            taps[_key(ask)] = Listening(attack.vantage(), attack, made.knowledge())
    start = perf_counter()
    trained = train_central(made, made.split, list(taps.values()), seed)
    seconds = perf_counter() - start
    shadow: dict[str, Tensor] = {}
    for ask in asks:
        if ask.get("measure") == "utility":
            yield Measured(_utility(made, trained), seconds=seconds)
        elif ask.get("measure") == "training":
            yield Measured(
                {"epochs": np.array([float(len(trained.loss))]), "best": np.array([float(trained.best)])},
                {"valid": [(place + 1, value) for place, value in enumerate(trained.valid)]},
                seconds=seconds,
            )
        else:
            if ask.get("input") == "shadow" and not shadow:
                shadow = _shadow(made)
            yield _graded(made, ask, taps.get(_key(ask)), shadow)


def _shadow(made: Setting) -> dict[str, Tensor]:
    """Lists of a copy of the system that was trained on the known users."""
    mine = np.zeros(made.train.n_users, bool)
    mine[made.known] = True
    return shadow_lists(made, mine)


def _key(ask: Mapping[str, Scalar]) -> str:
    return f"{ask.get('input', 'both')} {ask.get('top', 5)}"


def _evidence(ask: Mapping[str, Scalar]) -> FromLists | None:
    """What has to listen for an ask; learners that read the same share it."""
    kind, top = str(ask.get("input", "both")), int(ask.get("top", 5))
    if kind == "history" or ask["attack"] in ("majority", "proportional"):
        return None
    if kind not in ("both", "lists", "shadow"):
        raise ConfigError(f"A cell asks for the input {kind!r}, expected both, lists, history or shadow.")
    return (ShadowLists if kind == "shadow" else FromLists)(top=top, history=kind == "both")


def _learner(name: str) -> Learner:
    plain = Preparation("none", "none")
    learners: dict[str, Learner] = {
        "dnn": gerai_network(),
        "dt": Tree(leaf=1, prepare=plain),
        "nb": Bayes(),
        "knn": Neighbors(count=5, prepare=plain),
        "gp": GaussianProcess(prepare=plain),
    }
    if name not in learners:
        raise unknown_name("attack", name, [*learners, "majority", "proportional"])
    return learners[name]


def _graded(
    made: Setting, ask: Mapping[str, Scalar], tap: Listening[Any, Any] | None, shadow: Mapping[str, Tensor]
) -> Measured:
    """The answer about the users whose attribute is not known, as values by user."""
    attribute, name = str(ask["attribute"]), str(ask["attack"])
    label, names = classes_of(made.train, attribute)
    everybody = np.arange(len(label))
    user = np.setdiff1d(everybody[label >= 0], made.known)
    question = WhichAttribute(torch.from_numpy(user), attribute, tuple(names))
    knowledge = made.knowledge(attribute)
    start = perf_counter()
    if name == "majority":
        answer = MajorityClass().answer(knowledge, {}, question)
    elif name == "proportional":
        answer = Proportional(seed=made.seed).answer(knowledge, {}, question)
    elif tap is None:
        answer = FromHistory(learner=_learner(name), seed=made.seed).answer(knowledge, {}, question)
    else:
        knowledge = replace(knowledge, public={**knowledge.public, **shadow})
        reader: Any = tap.attack
        attack = replace(reader, learner=_learner(name), seed=made.seed)
        answer = attack.answer(knowledge, tap.state(), question)
    seconds = perf_counter() - start
    own, chance = label[user], answer.double().numpy()
    guess = most_probable(chance, user, made.seed)
    metrics = {
        "f1": (guess == own).astype(np.float64),
        "macro-f1": macro_f1_values(guess, own, len(names)),
        "auc": auc_values(chance, own),
    }
    return Measured(metrics, seconds=seconds)


def _utility(made: Setting, trained: CentralizedModel) -> dict[str, NDArray[np.float64]]:
    """Hit and NDCG of every test item among 99 others, the mean by user; and of all items, f64[users] each."""
    test = made.split.test
    sampled = evaluation_candidates(made.split, 99, seed=made.seed).items
    users = np.flatnonzero(test.activity).astype(np.int64)
    shown = as_shown(made.protocol, trained, made.past, made.defense, made.seed)
    score = shown.scores(torch.from_numpy(users)).double().numpy()
    row = np.searchsorted(users, test.user)
    target = score[row, test.item]  # f64[T]
    drawn = sampled[users][row]  # i64[T, 99]
    others = np.where(drawn >= 0, score[row[:, None], drawn.clip(0)], -np.inf)
    above, tied = (others > target[:, None]).sum(1), (others == target[:, None]).sum(1)
    found: dict[str, NDArray[np.float64]] = {}
    for k in KS:
        place = np.arange(k)
        within = (place >= above[:, None]) & (place <= (above + tied)[:, None])  # each place of a tie alike
        share = within / (tied + 1)[:, None]
        hit, gain = share.sum(1), (share / np.log2(place + 2)).sum(1)
        found |= {f"hit@{k}": _by_user(hit, row, len(users)), f"ndcg@{k}": _by_user(gain, row, len(users))}
    ranks = rank(shown, made.past, test)
    for k in (5, 10):
        found |= {f"hit@{k}-full": ranks.hit(k), f"ndcg@{k}-full": ranks.ndcg(k), f"recall@{k}-full": ranks.recall(k)}
    return found


def _by_user(value: NDArray[np.float64], row: NDArray[np.int64], users: int) -> NDArray[np.float64]:
    count = np.bincount(row, minlength=users)
    mean: NDArray[np.float64] = np.bincount(row, value, users) / np.maximum(count, 1)
    return mean
