"""What CDA's cells train: the objects that a cell's `run` names, as the head of `cda` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from recleak import random
from recleak.attacks.base import Knowledge
from recleak.attacks.community_targets import colluding
from recleak.data.interactions import Interactions
from recleak.data.sequences import sequence_split
from recleak.data.source import open_data
from recleak.data.split import Split, ratio
from recleak.defenses.base import Chain, Defense, parts_of
from recleak.defenses.dp_sgd import DPSGD, ClippedMeanNoise
from recleak.defenses.sharing import Share, ShareLess
from recleak.errors import ConfigError, unknown_name
from recleak.grading import target_transitions
from recleak.models.components import Normal
from recleak.models.mf import GMF
from recleak.models.prme import PRMEG
from recleak.protocols.federated import Federated
from recleak.protocols.gossip import Gossip
from recleak.protocols.nodes import Precision
from recleak.training.cohort import LocalTraining
from recleak.training.optimizers import SGD, Adam

ROUNDS = 200
CODE = "as-published-code"
SCALE = {CODE: (100, 5)}  # users, size of a community
SIZE = 50
DELTA, CLIP = 1e-6, 2.0  # of Figures 6 and 7
Scalar = str | int | float | bool


@dataclass(frozen=True, eq=False)
class Setting:
    """One training run."""

    split: Split
    model: GMF | PRMEG
    defense: Defense
    protocol: Federated | Gossip
    size: int  # of a community
    variant: str
    seed: int

    @property
    def train(self) -> Interactions:
        """What clients train on."""
        return self.split.train

    @property
    def targets(self) -> Tensor:
        """Everybody is an adversary, whose targets are its own items, f32[U, I]."""
        return torch.from_numpy((self.train.matrix().toarray() > 0).astype(np.float32))

    @property
    def keeps_vectors(self) -> bool:
        """Share less: users' vectors stay with them."""
        return any(isinstance(part, ShareLess) for part in parts_of(self.defense))

    def groups(self, share: float) -> Tensor:
        """Each adversary with its colluders, a random share of all nodes, bool[U, U]."""
        return colluding(self.train.n_users, share, self.seed)

    def knowledge(self, **public: Tensor) -> Knowledge:
        """Models are public; so is how many items people have on average."""
        known = {"targets": self.targets, "popularity": torch.from_numpy(self.train.popularity.astype(np.float32))}
        parts = self.defense.sharing(self.model.components())
        local = self.protocol.local
        users, items = self.train.n_users, self.train.n_items
        known |= target_transitions(self.train) if self.model.needs_transitions else {}
        return Knowledge(self.model, users, items, parts, local, self.defense, {**known, **public})


def setting(run: Mapping[str, Scalar], variant: str, seed: int) -> Setting:
    """The objects that a cell's `run` names."""
    data = open_data(str(run["data"]), str(run["preset"]) if "preset" in run else None)
    code, how = variant == CODE, str(run["protocol"])
    users, size = SCALE.get(variant, (data.n_users, SIZE))
    some = _some_users(data, users, seed)
    gossip = how != "fl"
    split, model, local = _learning(str(run["model"]), some, gossip, code, seed)
    precision: Precision = "float16" if model.needs_transitions else "float32"
    rounds = int(run.get("rounds", ROUNDS))
    protocols: dict[str, Federated | Gossip] = {
        "fl": Federated(rounds=rounds, aggregation="weighted", local=local),
        "rand": Gossip(
            rounds=rounds, refresh=int(run.get("refresh", 10 if code else 1)), precision=precision, local=local
        ),
        "pers": Gossip(
            rounds=rounds,
            refresh=int(run.get("refresh", 10 if code else 1)),
            peers="personal",
            stay=1 if code else 2,
            precision=precision,
            local=local,
        ),
    }
    if how not in protocols:
        raise unknown_name("protocol", how, protocols)
    sharing: dict[str, Defense] = {"full": Share(("user",)), "less": ShareLess()}
    if str(run["sharing"]) not in sharing:
        raise unknown_name("sharing", str(run["sharing"]), sharing)
    made = Setting(split, model, sharing[str(run["sharing"])], protocols[how], size, variant, seed)
    return private(made, run)


def private(made: Setting, run: Mapping[str, Scalar]) -> Setting:
    """The same with noise on gradients, if the run asks for it (section 6.2, Figures 6 and 7).

    `epsilon`: DP-SGD whose noise is the least for this epsilon at a delta of 1e-6 over all trainings of a client, for
    one example (the text: one data point). In a federation there are as many as rounds. A node trains after every
    message, and how many it gets is not known before: the noise is for the mean, ticks times peers, and what the
    busiest node spends is measured (`epsilon-spent`). `dp = "published"`: what the code does instead, which gives no
    guarantee. With both, and with `averaging = "mean"`, all clients count alike: weights would tell their numbers of
    items.
    """
    known = {"averaging": ("mean",), "dp": ("published",)}
    for name, values in known.items():
        if name in run and run[name] not in values:
            raise unknown_name(name, str(run[name]), values)
    if "epsilon" in run and "dp" in run:
        raise ConfigError("Got epsilon and dp = 'published', expected one: the published noise has no epsilon.")
    protocol = made.protocol
    noise: Defense | None = None
    if "epsilon" in run:
        trainings = protocol.rounds * (1 if isinstance(protocol, Federated) else protocol.degree)
        epsilon, epochs = float(run["epsilon"]), protocol.local.epochs
        noise = DPSGD.calibrated(epsilon, DELTA, uploads=trainings, epochs=epochs, clip=CLIP)
    elif "dp" in run:
        noise = ClippedMeanNoise()
    elif "averaging" not in run:
        return made
    alike: Federated | Gossip
    if isinstance(protocol, Federated):
        alike = replace(protocol, aggregation="mean")
    else:
        alike = replace(protocol, weights="equal")
    return replace(made, protocol=alike, defense=made.defense if noise is None else Chain((made.defense, noise)))


def _learning(
    name: str, data: Interactions, gossip: bool, code: bool, seed: int
) -> tuple[Split, GMF | PRMEG, LocalTraining]:
    """A model with its split and how clients train it (Table 3)."""
    epochs = 2 if gossip else 1
    if name == "gmf":
        model = GMF(init=Normal(0.05 if code and not gossip else 0.01))
        adam = Adam(0.01, keep=True)
        local = LocalTraining(epochs=epochs, batch_size=None, optimizer=adam, resample=True)
        return ratio(data, seed=seed), model, local
    if name == "prme":
        sgd = SGD(0.005, weight_decay=0.06)
        local = LocalTraining(epochs=epochs, batch_size=1, optimizer=sgd, loss="bpr", negatives=1, resample=True)
        return sequence_split(data), PRMEG(), local
    raise unknown_name("model", name, ("gmf", "prme"))


def _some_users(data: Interactions, count: int, seed: int) -> Interactions:
    """So many random users with all that they did, and the items that are left."""
    if count >= data.n_users:
        return data
    chosen = random.bits(seed, "some users", np.arange(data.n_users)).argsort()[:count]
    return data.restrict(np.isin(data.user, chosen), f"a draw of {count} users")
