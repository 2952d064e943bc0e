"""What a defense is: hooks on a client's life, each of which does nothing by default.

A defense is a frozen dataclass of public configuration; secrets (data, updates, random streams) are arguments. Every
hook works on C clients at once and treats each by itself, so the object that defends ten thousand simulated clients
defends one real device: C = 1 with `Streams.from_os()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import hypot

from torch import Tensor

from recleak.defenses.spending import NoGuarantee, Spending
from recleak.errors import ConfigError
from recleak.models.base import Batch, Params
from recleak.models.components import Component, by_name, require_names
from recleak.streams import Streams
from recleak.training.local import LocalData
from recleak.update import NodeParams, Update, rows_of, values_of


@dataclass(frozen=True, eq=False)
class Scene:
    """What C clients have before them at a step of local training, beside the parameters that they train."""

    round: int
    batch: Batch  # which of the scored items are a client's own, how many it has
    own: Params  # the components of the defense itself, f32[C, *shape]
    attributes: Mapping[str, Tensor] = field(default_factory=dict)  # each client's own: i64[C], -1 unknown; or f32[C]
    protects: Mapping[str, Tensor] = field(default_factory=dict)  # bool[C]: who wants an attribute protected, if said
    insensitive: Tensor | None = None  # bool[C]: who tells everybody
    public: Mapping[str, Tensor] = field(default_factory=dict)  # what insensitive users told (`training.attributes`)

    def select(self, position: Tensor) -> Scene:
        """The clients at these positions, i64[n]."""
        batch = replace(
            self.batch,
            own=self.batch.own[position],
            degree=self.batch.degree[position],
            neighbors={name: value[position] for name, value in self.batch.neighbors.items()},
        )

        def mine(tables: Mapping[str, Tensor]) -> Params:
            return {name: value[position] for name, value in tables.items()}

        insensitive = None if self.insensitive is None else self.insensitive[position]
        own, attributes, protects = mine(self.own), mine(self.attributes), mine(self.protects)
        return Scene(self.round, batch, own, attributes, protects, insensitive, self.public)


@dataclass(frozen=True, eq=False)
class Lists:
    """What a recommender would show to B users."""

    user: Tensor  # i64[B]
    item: Tensor  # i64[B, K], best first; a shorter list ends with -1
    allowed: Tensor  # bool[B, I]: what the user may be shown: neither its own nor shown before
    popularity: Tensor  # f32[I]: how many users have an item


class Defense:
    """A defense that does nothing. Subclasses override the hooks that they need, and never change an argument.

    Equal streams give equal draws: whoever calls a hook more than once, or two hooks, hands it streams that differ
    (`at` an epoch or a step, `within` a name).
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def sharing(self, components: tuple[Component, ...]) -> tuple[Component, ...]:
        """Which components leave the device at all."""
        return components

    def own_components(self) -> tuple[Component, ...]:
        """Components of its own, beside the model's: kept by each client, or shared as the model's are.

        The optimizer of the model does not touch them; the hook `alternate` does.
        """
        return ()

    def data(self, data: LocalData, streams: Streams) -> LocalData:
        """The interactions that clients train on, before training."""
        return data

    def features(self, features: Tensor, streams: Streams) -> Tensor:
        """The user features that clients train with, f32[C, F], before training."""
        return features

    def penalty(self, moved: Update, streams: Streams) -> Tensor | None:
        """A term of the loss at every step, f32[C], or None.

        `moved` is the parameters now minus those received, with the graph for automatic differentiation. What was
        received is in `moved.received`, here and in the hooks below, except for the gradient.
        """
        return None

    def alternate(self, params: Params, scene: Scene, streams: Streams) -> Params:
        """Its own components after a step of their own, before each local epoch: those that changed, f32[C, *shape].

        `params` are the model's, as `Model.logits` gets them with the first batch of the epoch.
        """
        return {}

    def objective(self, params: Params, scene: Scene, streams: Streams) -> Tensor | None:
        """A term of the loss at every step, of the parameters that a step reads, f32[C], or None.

        `params` are the model's, with the graph for automatic differentiation; nothing flows into `scene`.
        """
        return None

    @property
    def needs_attributes(self) -> tuple[str, ...]:
        """The attributes of users that it protects: a client must know its own."""
        return ()

    @property
    def insensitive(self) -> float:
        """The share of users who tell theirs, for who has to draw them (an audit)."""
        return 0.0

    def for_attributes(self, classes: Mapping[str, int]) -> Defense:
        """The same for the attributes of the data at hand, with so many classes each, if it names none."""
        return self

    @property
    def disclosed(self) -> tuple[str, ...]:
        """The components that insensitive users tell to everybody after they trained, with their attributes.

        Of a table of items they tell rows of some of their own items, and the mean over all of them.
        """
        return ()

    def batch_sum(self, total: Update, streams: Streams) -> Update:
        """The sum of the gradients of a batch's examples, each clipped to `example_bound`; only asked if there is one.

        It is divided by the size of the batch afterwards, and goes through the hooks below. What enlarges it must not
        come before the noise that hides it.
        """
        return total

    def gradient(self, gradient: Update, streams: Streams) -> Update:
        """The gradient of every local step."""
        return gradient

    def epoch(self, moved: Update, streams: Streams) -> Update:
        """The parameters minus those received, after each local epoch."""
        return moved

    def upload(self, update: Update, streams: Streams) -> Update:
        """What leaves the device, after local training."""
        return update

    def release(self, lists: Lists, streams: Streams) -> Tensor:
        """The lists that users are shown in place of these, i64[B, K]; of a recommender that shows lists."""
        return lists.item

    @property
    def secure_aggregation(self) -> bool:
        """Whether the receiver gets the sum of the uploads only."""
        return False

    @property
    def every_row(self) -> bool:
        """Whether its epoch hook acts on the rows of all items; those that a client does not hold come apart."""
        return False

    @property
    def example_bound(self) -> float | None:
        """The l2 norm that the gradient of each single example is clipped to, over all that is trained, or None."""
        return None

    @property
    def holds_every_row(self) -> bool:
        """Whether clients hold the rows of all items while they train, so that hooks on gradients act on all."""
        return False

    @property
    def idle(self) -> frozenset[str]:
        """Hooks that its class has, but that do nothing at its setting: they cost nothing then."""
        return frozenset()

    @property
    def fakes(self) -> float:
        """Items trained as the client's own for each real one. Not a hook: a fact that an adversary may know."""
        return 0.0

    @property
    def flips(self) -> float:
        """The chance that a label is flipped. Not a hook: a fact that an adversary may know."""
        return 0.0

    def noise(self, component: str) -> float:
        """The standard deviation of what is added to each number of a component in an upload.

        Not a hook: a fact that an adversary may know.
        """
        return 0.0

    def shift(self, component: str, received: Tensor) -> Tensor | None:
        """What an upload says, but for noise, of numbers of a component that its client did not change; None: zero.

        `received` is what clients got of them, of any shape, and so is the answer. Not a hook: broadcast and mechanism
        are public, so an adversary may know it, and take it away from what it reads.
        """
        return None

    def component_names(self) -> Iterable[str]:
        """The components that its configuration names; `check` looks them up in a model."""
        return ()

    def check_components(self, components: tuple[Component, ...]) -> None:
        """An error if its configuration does not fit a model's components; for names, `component_names` is enough."""

    def spends(self) -> tuple[Spending, ...]:
        """What it spends of a client's privacy at each use; who states nothing is counted as no guarantee."""
        if not (used := hooks(self)) and type(self) is Defense:
            return ()
        why = "It does not state what it spends, so nothing can be promised on its account."
        return (NoGuarantee(repr(self), why, keeps="upload" not in used),)


HOOKS = (
    "sharing",
    "data",
    "features",
    "alternate",
    "objective",
    "penalty",
    "batch_sum",
    "gradient",
    "epoch",
    "upload",
    "release",
)


@dataclass(frozen=True)
class Chain(Defense):
    """Several defenses, one after the other; an empty chain does nothing.

    Each draws its random numbers within its position in the chain, so two equal mechanisms draw independently.
    """

    defenses: tuple[Defense, ...] = ()

    def sharing(self, components: tuple[Component, ...]) -> tuple[Component, ...]:
        """The last policy that names a component decides."""
        for defense in self.defenses:
            components = defense.sharing(components)
        return components

    def own_components(self) -> tuple[Component, ...]:
        """Those of all."""
        return tuple(part for defense in self.defenses for part in defense.own_components())

    def data(self, data: LocalData, streams: Streams) -> LocalData:
        """All in order."""
        for position, defense in enumerate(self.defenses):
            data = defense.data(data, streams.within(str(position)))
        return data

    def features(self, features: Tensor, streams: Streams) -> Tensor:
        """All in order."""
        for position, defense in enumerate(self.defenses):
            features = defense.features(features, streams.within(str(position)))
        return features

    def penalty(self, moved: Update, streams: Streams) -> Tensor | None:
        """The sum of the terms."""
        total: Tensor | None = None
        for position, defense in enumerate(self.defenses):
            term = defense.penalty(moved, streams.within(str(position)))
            if term is not None:
                total = term if total is None else total + term
        return total

    def alternate(self, params: Params, scene: Scene, streams: Streams) -> Params:
        """Each its own."""
        changed: Params = {}
        for position, defense in enumerate(self.defenses):
            changed |= defense.alternate(params, scene, streams.within(str(position)))
        return changed

    def objective(self, params: Params, scene: Scene, streams: Streams) -> Tensor | None:
        """The sum of the terms."""
        total: Tensor | None = None
        for position, defense in enumerate(self.defenses):
            term = defense.objective(params, scene, streams.within(str(position)))
            if term is not None:
                total = term if total is None else total + term
        return total

    @property
    def insensitive(self) -> float:
        """The largest of all."""
        return max((defense.insensitive for defense in self.defenses), default=0.0)

    def for_attributes(self, classes: Mapping[str, int]) -> Defense:
        """Each for itself."""
        return replace(self, defenses=tuple(defense.for_attributes(classes) for defense in self.defenses))

    @property
    def needs_attributes(self) -> tuple[str, ...]:
        """Those of all, each once."""
        return tuple(dict.fromkeys(name for defense in self.defenses for name in defense.needs_attributes))

    @property
    def disclosed(self) -> tuple[str, ...]:
        """Those of all, each once."""
        return tuple(dict.fromkeys(name for defense in self.defenses for name in defense.disclosed))

    def batch_sum(self, total: Update, streams: Streams) -> Update:
        """All in order."""
        for position, defense in enumerate(self.defenses):
            total = defense.batch_sum(total, streams.within(str(position)))
        return total

    def gradient(self, gradient: Update, streams: Streams) -> Update:
        """All in order."""
        for position, defense in enumerate(self.defenses):
            gradient = defense.gradient(gradient, streams.within(str(position)))
        return gradient

    def epoch(self, moved: Update, streams: Streams) -> Update:
        """All in order."""
        for position, defense in enumerate(self.defenses):
            moved = defense.epoch(moved, streams.within(str(position)))
        return moved

    def upload(self, update: Update, streams: Streams) -> Update:
        """All in order."""
        for position, defense in enumerate(self.defenses):
            update = defense.upload(update, streams.within(str(position)))
        return update

    def release(self, lists: Lists, streams: Streams) -> Tensor:
        """All in order."""
        for position, defense in enumerate(self.defenses):
            lists = replace(lists, item=defense.release(lists, streams.within(str(position))))
        return lists.item

    @property
    def secure_aggregation(self) -> bool:
        """Whether one of them asks for it."""
        return any(defense.secure_aggregation for defense in self.defenses)

    @property
    def every_row(self) -> bool:
        """Whether the epoch hook of one of them does: then all of them see these rows."""
        return any(defense.every_row for defense in self.defenses)

    @property
    def example_bound(self) -> float | None:
        """The tightest of all."""
        return min((each.example_bound for each in self.defenses if each.example_bound is not None), default=None)

    @property
    def holds_every_row(self) -> bool:
        """Whether one of them asks for it."""
        return any(defense.holds_every_row for defense in self.defenses)

    @property
    def fakes(self) -> float:
        """(1 + k_1) (1 + k_2) ... - 1: a later part adds its own for the fakes of earlier ones too."""
        total = 0.0
        for defense in self.defenses:
            total = total + defense.fakes + total * defense.fakes
        return total

    @property
    def flips(self) -> float:
        """The chance of an odd number of independent flips."""
        total = 0.0
        for defense in self.defenses:
            total = total * (1 - defense.flips) + defense.flips * (1 - total)
        return total

    def noise(self, component: str) -> float:
        """That of all together; what clips in between is not counted."""
        return hypot(*(defense.noise(component) for defense in self.defenses))

    def shift(self, component: str, received: Tensor) -> Tensor | None:
        """Each goes on from what those before it made; what only scales changes in between is not counted."""
        total: Tensor | None = None
        for defense in self.defenses:
            own = defense.shift(component, received if total is None else received + total)
            if own is not None:
                total = own if total is None else total + own
        return total

    def component_names(self) -> Iterable[str]:
        """The names of all."""
        for defense in self.defenses:
            yield from defense.component_names()

    def check_components(self, components: tuple[Component, ...]) -> None:
        """All in order."""
        for defense in self.defenses:
            defense.check_components(components)

    def spends(self) -> tuple[Spending, ...]:
        """The statements of all, in order."""
        return tuple(statement for defense in self.defenses for statement in defense.spends())


def all_components(components: tuple[Component, ...], defense: Defense) -> tuple[Component, ...]:
    """A model's components and those of a defense, with the sharing policy of the defense."""
    return defense.sharing((*components, *defense.own_components()))


def hooks(defense: Defense) -> frozenset[str]:
    """The names of the hooks that a defense overrides, for a chain those of its parts; the others do nothing.

    Where examples are clipped, gradients are not those of the loss: that counts as a hook on gradients.
    """
    if type(defense) is Chain:
        return frozenset().union(*(hooks(part) for part in defense.defenses))
    own = (name for name in HOOKS if getattr(getattr(defense, name), "__func__", None) is not getattr(Defense, name))
    return frozenset(own) - defense.idle | frozenset(() if defense.example_bound is None else ("gradient",))


def received(update: Update, name: str, rows: slice = slice(None)) -> Tensor:
    """What the clients of an update received of a component: for each row or client, or once for all (f32[*shape]).

    `rows`: of a table of items, these alone.
    """
    if name not in update.received:
        raise ConfigError(
            f"Got an update that does not say what was received of {name!r}, expected it in `Update.received`.\n"
            "  A mechanism on values, not on changes, needs it; what a client keeps is never received."
        )
    if name in update.rows:
        return rows_of(update.received, name, update.client[update.owner[rows]], update.item[rows])
    nodes = isinstance(update.received, NodeParams)
    per_user = update.received[name].dim() == update.values[name].dim() + nodes
    return values_of(update.received, name, update.client, per_user=per_user)


def without_data_hooks(defense: Defense) -> Defense:
    """The same defense for a client whose data and features have been changed already; nested chains become one."""
    rest = tuple(part for part in parts_of(defense) if not hooks(part) <= {"data", "features"})
    for part in rest:
        if hooks(part) & {"data", "features"}:
            raise ConfigError(f"{part!r} changes data and more, expected one hook or the other: a chain of two parts.")
    if not rest:
        return Defense()
    return Chain(rest) if len(rest) > 1 else rest[0]


def parts_of(defense: Defense) -> Iterator[Defense]:
    """The parts of a chain, and of the chains in it, in order."""
    if type(defense) is Chain:
        for part in defense.defenses:
            yield from parts_of(part)
    else:
        yield defense


def parts_with_streams(defense: Defense, streams: Streams) -> Iterator[tuple[Defense, Streams]]:
    """The same, each part with the streams that it gets if the whole gets `streams`."""
    if type(defense) is Chain:
        for position, part in enumerate(defense.defenses):
            yield from parts_with_streams(part, streams.within(str(position)))
    else:
        yield defense, streams


def check(defense: Defense, components: tuple[Component, ...]) -> None:
    """An error if a defense names a component that the model does not have, or one that stays where it is anyway.

    `components` are the model's with the sharing policy of the defense.
    """
    named = by_name(components)
    defense.check_components(components)
    for part in defense.defenses if isinstance(defense, Chain) else (defense,):
        names = tuple(part.component_names())
        require_names("component", names, named)
        kept = [name for name in names if not named[name].shared]
        if kept and hooks(part) & {"upload", "epoch"}:
            raise ConfigError(
                f"{part!r} acts on what leaves, but {kept[0]!r} is kept: nothing of it is sent.\n"
                f"  Leave it out, or share it: Share(({kept[0]!r},))."
            )
