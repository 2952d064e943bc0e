"""A centralized system in an audit: trained for its lists, copied by an adversary that adapts, and in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, sqrt
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.accounting import Entry
from recleak.data.features import UserFeatures, classes_of
from recleak.data.split import Split
from recleak.defenses.base import Defense, parts_of
from recleak.defenses.blurme import fitted_to, unfitted
from recleak.defenses.functional_mechanism import FunctionalMechanism
from recleak.defenses.spending import NoGuarantee, NoisyFeatures, NoisyGradients
from recleak.epsilon import gaussian_epsilon
from recleak.errors import ConfigError
from recleak.models.base import Model
from recleak.models.factorization import RatingFactorization, WalkFactorization
from recleak.protocols.centralized import Centralized, CentralizedModel, defended_history, lists, train_centralized
from recleak.recording import Tap
from recleak.utility import union

_NOTHING = "nothing"
_FEATURES = "the user features of one user, while interactions stay as they are"
_OTHERS = "all its features replaced by any others"
_USER = "all that one user did, against who sees the lists of all others"
_LEFT_OUT = "left out, its place in each batch stays empty"


class System(Protocol):
    """What is trained."""

    @property
    def split(self) -> Split: ...  # noqa: D102
    @property
    def model(self) -> Model: ...  # noqa: D102
    @property
    def protocol(self) -> Any: ...  # noqa: D102
    @property
    def defense(self) -> Defense: ...  # noqa: D102
    @property
    def features(self) -> UserFeatures | None: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102


def labels_of(model: Model, split: Split) -> dict[str, Tensor]:
    """What a model that trains against an attacker is told of users, i64[U] by attribute."""
    if not getattr(model, "needs_labels", False):
        return {}
    names: Sequence[str] = getattr(model, "attributes", ())
    return {name: torch.tensor(classes_of(split.train, name)[0]) for name in names}


def train_central(
    made: System,
    split: Split,
    taps: Sequence[Tap],
    seed: int,
    directory: Path | None = None,
    defense: Defense | None = None,
) -> CentralizedModel:
    """Train on a split, show lists to taps; with another defense than the system's, if one is given."""
    return train_centralized(
        made.protocol,
        made.model,
        split.train,
        valid=split.valid,
        defense=made.defense if defense is None else defense,
        taps=taps,
        user_features=None if made.features is None else made.features.values,
        labels=labels_of(made.model, split),
        seed=seed,
        directory=directory,
        show_progress=False,
    )


def seen_history(defense: Defense, split: Split, seed: int) -> Tensor:
    """What is public of what users did before lists are shown, f32[U, I].

    If a defense changes histories, it is what the party trains on, and the validation part.
    """
    seen = defended_history(defense, split.train.distinct(), seed).matrix() + split.valid.matrix()
    return torch.from_numpy((seen.toarray() > 0).astype(np.float32))


def shadow_lists(made: System, known: NDArray[np.bool_]) -> dict[str, Tensor]:
    """Lists that a copy of the defended system, trained on known users (bool[U]) alone, shows to them.

    What a defense has to know of users, the copy learns from these.
    """
    train, valid = (part.take(known[part.user]) for part in (made.split.train, made.split.valid))
    if not len(train):
        raise ConfigError("The adversary knows no user with an interaction, expected some to copy the system for.")
    seed = made.seed + 10_000  # another draw of everything
    defense = fitted_to(unfitted(made.defense), train)
    copy = train_central(made, replace(made.split, train=train, valid=valid), (), seed, defense=defense)
    users = torch.from_numpy(np.flatnonzero(known & (train.activity > 0)))
    shown = lists(copy, union(train, valid), users, made.protocol.top, defense, seed)
    return {"shadow users": users, "shadow lists": shown}


def central_ledger(protocol: Centralized, defense: Defense, trained: CentralizedModel, *, delta: float) -> list[Entry]:
    """What is promised to users of a centralized system against who sees lists: a row for each mechanism."""
    entries: list[Entry] = []
    if isinstance(trained.model, RatingFactorization | WalkFactorization) and trained.model.epsilon < inf:
        entries.append(_none(repr(trained.model), trained.model.covers()))
    for part in parts_of(defense):
        for statement in part.spends():
            match statement:
                case NoisyFeatures() if statement.epsilon < inf:
                    entries.append(_features(statement))
                case NoisyGradients() if statement.noise_multiplier > 0:
                    entries.append(_gradients(statement, len(trained.loss), delta))
                case NoGuarantee():
                    more = ""
                    if isinstance(part, FunctionalMechanism) and part.epsilon < inf:
                        more = " " + part.composed(max(1, trained.steps), protocol.batch_size)
                    entries.append(_none(statement.mechanism, statement.why + more))
                case _:
                    entries.append(_none(statement.mechanism, "It adds no noise at this setting."))
    return entries or [_none("none", "There is no defense: a list is what the recommender finds best for its user.")]


def _features(statement: NoisyFeatures) -> Entry:
    words = (
        "Features are drawn once, before training, and lists are computed from the draw. Not covered: interactions, "
        "which are read as they are, and what they tell of an attribute."
    )
    once = statement.epsilon
    return Entry(statement.mechanism, _FEATURES, _OTHERS, once, once, 0.0, 1, words, once)


def _gradients(statement: NoisyGradients, epochs: int, delta: float) -> Entry:
    """A user is in one batch of each epoch, so an epoch is one use of the noise, of sensitivity `clip`."""
    once, composed = (gaussian_epsilon(sqrt(times) / statement.noise_multiplier, delta) for times in (1, epochs))
    words = (
        f"Gaussian noise of {statement.noise_multiplier:.3g} clips on the sum of a batch, in each of {epochs} epochs. "
        "It hides a user from the lists of others. A user's own list is computed from its own history without noise, "
        "so nothing is promised for what that list tells."
    )
    return Entry(statement.mechanism, _USER, _LEFT_OUT, once, composed, delta, epochs, words, composed)


def _none(mechanism: str, why: str) -> Entry:
    return Entry(mechanism, _NOTHING, _NOTHING, None, None, None, None, f"No guarantee. {why}")
