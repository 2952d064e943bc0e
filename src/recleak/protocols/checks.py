"""What must fit together before a run starts; each error says what was got, what was expected and what to do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recleak.data.interactions import Interactions
from recleak.defenses.base import Defense
from recleak.errors import ConfigError, DataError
from recleak.models.base import Model
from recleak.models.components import Component, Given
from recleak.training.attributes import PrivateAttributes
from recleak.training.local import Examples
from recleak.training.transitions import TransitionExamples


def check_tables(components: tuple[Component, ...], train: Interactions) -> None:
    """Values that exist already are as many as users or items."""
    expected = {"per_user": train.n_users, "per_item": train.n_items, "dense": 1}
    for part in components:
        if isinstance(part.init, Given) and len(part.init.values) != expected[part.storage]:
            raise ConfigError(
                f"Got {len(part.init.values):,} rows of {part.name!r}, expected {expected[part.storage]:,}: one for "
                f"each of the data's {'users' if part.storage == 'per_user' else 'items'}."
            )


def check_features(model: Model, features: Tensor | None, train: Interactions) -> None:
    """User features are there if the model needs them, one row per user."""
    if features is None:
        if model.needs_user_features:
            raise ConfigError(f"{type(model).__name__} needs user features; see recleak.data.features.user_features.")
        return
    width = getattr(model, "n_features", None)
    if features.dim() != 2 or len(features) != train.n_users or (width is not None and features.shape[1] != width):
        raise ConfigError(
            f"Got user features of shape {tuple(features.shape)}, expected ({train.n_users}, {width or 'any'}): a row "
            "for every user of the data, and as many columns as the model's n_features."
        )


def check_attributes(defense: Defense, attributes: PrivateAttributes | None, n_users: int) -> None:
    """Attributes fit the users; who protects some has them."""
    labels = {} if attributes is None else attributes.labels
    if attributes is not None:
        attributes.check(n_users)
    for name in defense.needs_attributes:
        if name not in labels:
            raise ConfigError(
                f"{defense!r} protects {name!r}, got users with {', '.join(labels) or 'no attributes'}.\n"
                "  Give train_federated(..., attributes=...), see training.attributes.attributes_of."
            )


def check_clients(
    clients_per_round: int | None, eligible: NDArray[np.int64], examples: Examples | TransitionExamples
) -> None:
    """There are clients, as many as asked for, and each has something to train on."""
    if not len(eligible):
        raise DataError("No user has an interaction to train on", remedy="Check the data and the split.")
    if clients_per_round is not None and clients_per_round > len(eligible):
        raise ConfigError(
            f"clients_per_round is {clients_per_round:,}, expected at most {len(eligible):,}: so many users "
            "have interactions to train on.\n  Leave it out to take all of them in every round."
        )
    if len(full := eligible[examples.free.size[eligible] == 0]):
        raise DataError(
            f"{len(full):,} users have every item, hence no negative (first: user {full[0]})",
            remedy="Leave them out of the data, or give less in `spare`.",
        )
