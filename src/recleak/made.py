"""The objects that a cell's settings name: data, model, protocol and defense, and what an adversary of them knows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import objects, random
from recleak.attacks.audience import ShadowLists
from recleak.attacks.base import Knowledge
from recleak.canaries import Canaries
from recleak.cells import Ask, Cell
from recleak.central import seen_history, shadow_lists
from recleak.data.features import UserFeatures, classes_of, user_features
from recleak.data.interactions import Interactions
from recleak.data.split import Split
from recleak.defenses.base import Chain, Defense, all_components
from recleak.defenses.blurme import fitted_to, unfitted
from recleak.defenses.estimators import CONTINUOUS
from recleak.defenses.feature_noise import with_categories
from recleak.errors import ConfigError, unknown_name
from recleak.grading import target_transitions
from recleak.metrics.comparison import is_known
from recleak.models.base import Model
from recleak.models.components import Component, require_names
from recleak.protocols.centralized import Centralized
from recleak.protocols.federated import Federated
from recleak.protocols.gossip import Gossip
from recleak.protocols.published import Published
from recleak.protocols.recorded import Recorded
from recleak.protocols.vectors import Vectors
from recleak.training.attributes import PrivateAttributes, attributes_of

_YES, _NO = {"yes", "true", "1", "1.0"}, {"no", "false", "0", "0.0"}
_FEATURES = ("gender", "age", "occupation")  # what models with user features read, where the data have it


@dataclass(frozen=True, eq=False)
class Made:
    """The objects that a cell's settings name."""

    split: Split
    train: Interactions  # with canaries, if any
    model: Model
    protocol: Federated | Gossip | Centralized | Published | Vectors | Recorded
    defense: Defense
    features: UserFeatures | None
    seed: int
    attributes: PrivateAttributes | None = None  # of users, for a defense that protects them

    @property
    def components(self) -> tuple[Component, ...]:
        """With the sharing policy in force; of a recording they must be its own."""
        found = all_components(self.model.components(), self.defense)
        return self.protocol.components(found) if isinstance(self.protocol, Recorded) else found

    def knowledge(self, ask: Ask | None = None) -> Knowledge:
        """What an adversary knows: the model, how clients train, the defense, and how popular items are.

        Who is asked about an attribute knows that of some users, and which columns of the users' features encode it.
        """
        public = {} if self.popularity is None else {"popularity": self.popularity}
        if ask is not None and ask.community:
            public["targets"] = self.targets
            public |= target_transitions(self.split.train) if self.model.needs_transitions else {}
        if ask is not None and ask.attribute:
            label, _ = self.classes(ask)
            known = is_known(np.arange(len(label)), ask.known)
            public[f"labels of {ask.attribute}"] = torch.from_numpy(np.where(known, label, -1))
            if ask.kind == "reference":  # no adversary: what there is to find
                own = np.stack([self.train.user, self.train.item], axis=1).astype(np.int64)
                public["own items"] = torch.from_numpy(own)
            if isinstance(self.protocol, Published | Vectors):
                public |= {"history": self.history} if self.protocol.history else {}
            elif isinstance(self.protocol, Centralized):
                public |= {"history": self.history, **self._shadow(ask)}
            elif self.features is not None and ask.attribute in self.features.groups:
                columns = torch.arange(self.features.values.shape[1])[self.features.groups[ask.attribute]]
                public[f"columns of {ask.attribute}"] = columns
        return Knowledge(
            self.model,
            self.train.n_users,
            self.train.n_items,
            self.components,
            self.protocol.local,
            unfitted(self.defense),
            public,
        )

    @cached_property
    def popularity(self) -> Tensor | None:
        """How often each item was chosen, f32[I]. Of a recording, by users who are not in it, as if all users were like
        them: of the few who are, it would be nearly the answer; None if there are no others.
        """
        train = self.split.train
        if not isinstance(self.protocol, Recorded):
            return torch.from_numpy(train.popularity.astype(np.float32))
        other = (self.protocol.first_rounds(train.n_users) < 0)[train.user]
        if not other.any():
            return None
        counts = np.bincount(train.item[other], minlength=train.n_items)
        each = train.n_users / len(np.unique(train.user[other]))  # users for each who was counted
        return torch.from_numpy((counts * each).astype(np.float32))

    @cached_property
    def history(self) -> Tensor:
        """What an outsider sees of what users did before lists are shown, f32[U, I]."""
        return seen_history(self.defense, self.split, self.seed)

    def _shadow(self, ask: Ask) -> dict[str, Tensor]:
        """Lists of the adversary's own copy of the system, for an attack that reads them."""
        if not issubclass(objects.find("attack", ask.settings["use"]), ShadowLists):  # type: ignore[arg-type]
            return {}
        known = is_known(np.arange(self.train.n_users), ask.known)
        if ask.known not in self._copies:
            self._copies[ask.known] = shadow_lists(self, known)
        return self._copies[ask.known]

    @cached_property
    def _copies(self) -> dict[float, dict[str, Tensor]]:
        return {}

    @property
    def targets(self) -> Tensor:
        """Every user as an adversary that looks for who is similar to it, f32[U, I]."""
        return torch.from_numpy((self.split.train.matrix().toarray() > 0).astype(np.float32))

    def classes(self, ask: Ask) -> tuple[NDArray[np.int64], list[str]]:
        """Each user's class of the attribute, i64[U]; in the audit's test of itself, in a random order."""
        label, names = classes_of(self.split.train, ask.attribute)
        if ask.shuffle:
            have = np.flatnonzero(label >= 0)
            mixed = have[random.bits(self.seed, "shuffled attribute", have).argsort()]
            label = label.copy()
            label[have] = label[mixed]
        return label, names


def made_of(cell: Cell, split: Split, canaries: Canaries | None) -> Made:
    """The objects; a model that reads user features gets those of the data, and learns how many there are."""
    train, settings = split.train if canaries is None else canaries.train, dict(cell.system.settings)
    features = None
    if getattr(objects.find("model", settings["model"]["use"]), "needs_user_features", False):
        rated = "rating" in split.train.rows.columns and not split.train.rows["rating"].null_count()
        levels = sorted(split.train.rows["rating"].unique().to_list()) if rated else ()
        attributes = [name for name in _FEATURES if name in split.train.attributes]
        features = user_features(split.train, attributes=attributes, levels=levels if len(levels) > 1 else ())
        settings["model"] = {"n_features": features.values.shape[1], **settings["model"]}
    kind = objects.find("model", settings["model"]["use"])
    if getattr(kind, "needs_labels", False):
        protected = settings["model"].get("attributes", [name for name in _FEATURES if name in train.attributes])
        classes = [len(classes_of(split.train, name)[1]) for name in protected]
        settings["model"] = {"attributes": protected, "classes": classes, **settings["model"]}
    model, protocol, defense = (objects.build(kind, settings[kind]) for kind in ("model", "protocol", "defense"))
    if features is not None:
        defense = with_categories(defense, [(each.start, each.stop) for each in features.groups.values()])
    defense = fitted_to(defense.for_attributes(_sizes(split.train)), split.train)
    private = private_attributes(defense, split.train, cell.seed) if defense.needs_attributes else None
    return Made(split, train, model, protocol, defense, features, cell.seed, private)


def _sizes(data: Interactions) -> dict[str, int]:
    """What is protected if nothing is named: the usual attributes, or all if there are none of these; their classes."""
    names = [name for name in _FEATURES if name in data.attributes] or list(data.attributes)
    return {name: len(classes_of(data, name)[1]) for name in names}


def private_attributes(defense: Defense, data: Interactions, seed: int) -> PrivateAttributes:
    """What users of an audit keep to themselves about themselves, who tells it all the same, who wants it protected.

    Numbers are in standard deviations from the mean of those who tell.
    """
    parts = defense.defenses if isinstance(defense, Chain) else (defense,)
    given: dict[str, int] = {}
    wishes: dict[str, float | str] = {}
    for part in parts:
        given |= getattr(part, "attributes", {}) if part.needs_attributes else {}
        wishes |= getattr(part, "protected", {})
    for name, classes in given.items():
        _check_classes(data, name, classes)
    public = torch.from_numpy(is_known(np.arange(data.n_users), defense.insensitive))
    require_names("attribute", wishes, given)
    said = {name: _wanted(data, wish) for name, wish in wishes.items() if isinstance(wish, str)}
    for wanted in said.values():
        public &= ~wanted  # who wants something protected tells nothing
    for name, wish in wishes.items():
        if not isinstance(wish, str):
            lot = random.uniform(seed, f"who protects {name}", np.arange(data.n_users))
            said[name] = torch.from_numpy(lot < wish) & ~public
    made = attributes_of(
        data, given, public, numbers=[name for name, classes in given.items() if classes == CONTINUOUS]
    )
    labels = {name: _in_deviations(label, public) for name, label in made.labels.items()}
    return PrivateAttributes(labels, public, said)


def _check_classes(data: Interactions, name: str, classes: int) -> None:
    """The data have the attribute, of no more classes than are protected, or as a number."""
    found = len(classes_of(data, name)[1])
    if classes == CONTINUOUS and data.attributes[name] != "continuous":
        raise ConfigError(f"attributes: got {name} = {CONTINUOUS}, a number, expected {found}: it has classes.")
    if CONTINUOUS < classes < found:
        raise ConfigError(f"attributes: got {classes} classes of {name}, expected {found}.")


def _wanted(data: Interactions, column: str) -> Tensor:
    """Who wants something protected, by a column of the users, bool[U]: who says no does not, who says nothing does."""
    if column not in data.attributes:
        raise unknown_name("column", column, data.attributes)
    words = data.users[column].cast(pl.String).str.to_lowercase().fill_null("yes")
    if unknown := sorted(set(words) - _YES - _NO):
        raise ConfigError(f"protected: got {unknown[0]!r} in {column}, expected yes or no (true, false, 1, 0).")
    return torch.from_numpy(words.is_in(_YES).to_numpy().copy())


def _in_deviations(label: Tensor, public: Tensor) -> Tensor:
    """A number in standard deviations from the mean of those who tell; a class as it is."""
    if not label.is_floating_point():
        return label
    told = label[public & ~label.isnan()].double()
    if len(told) < 2 or float(told.std()) == 0:
        return label - (told.mean().float() if len(told) else 0.0)
    return ((label.double() - told.mean()) / told.std(correction=0)).float()
