"""What an attack is: a fold over the messages of one vantage point, and an answer to a question.

An attack has no way to the trainer, to the data or to the truth. It is handed messages and its knowledge, nothing else,
and its state is tensors, so that it is saved with a round and survives a kill. `tests/test_threat_model.py` reads the
imports of this package; `tests/must_not_typecheck.py` holds what the type checker must refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from recleak.defenses.base import Defense
from recleak.models.base import Model
from recleak.models.components import Component, public_part
from recleak.training.cohort import LocalTraining
from recleak.wire import M, Vantage

State = dict[str, Tensor]

# --- knowledge --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What an adversary knows beside messages. The audit builds it for a threat model and prints it with a finding.

    Of a model that comes with values, such as a `TorchModel`, an adversary gets no row of a user.
    """

    model: Model  # the architecture is public
    n_users: int
    n_items: int
    components: tuple[Component, ...]  # with the sharing policy in force, the components of defenses too
    training: LocalTraining | None = None  # how clients train: a server tells them, so it knows
    defense: Defense = field(default_factory=Defense)  # the mechanism in force, never its draws: an adversary adapts
    public: Mapping[str, Tensor] = field(default_factory=dict)  # e.g. `popularity` f32[I], or a peer's own `groups`

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", self.model.public())
        object.__setattr__(self, "components", tuple(public_part(part) for part in self.components))

    def __str__(self) -> str:
        lines = [f"model: {self.model}", f"users: {self.n_users:,}", f"items: {self.n_items:,}"]
        lines += [f"component {part.name}: {_described(part)}" for part in self.components]
        if self.training is not None:
            lines.append(f"training: {self.training}")
        if type(self.defense) is not Defense:
            lines.append(f"defense: {self.defense}")
        lines += [f"public {name}: {value.dtype}{list(value.shape)}" for name, value in self.public.items()]
        return "\n".join(lines)


def _described(part: Component) -> str:
    return f"{part.storage}, {part.role}, {'shared' if part.shared else 'kept'}, {list(part.shape)}"


# --- questions: none carries its answer -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class WhichItems:
    """Is this item one of the client's own? The answer is the probability in the adversary's eyes, f64[n].

    A probability of exactly 0 says that nothing was seen of the pair. Who grades lets the adversary claim as many items
    of a client as its probabilities add up to, the most probable ones first.
    """

    client: Tensor  # i64[n]
    item: Tensor  # i64[n]


@dataclass(frozen=True, eq=False)
class WhichAttribute:
    """Which class of an attribute does each client have? The answer is f32[n, classes], higher = more likely."""

    client: Tensor  # i64[n]
    attribute: str
    classes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class WhoBelongs:
    """Who belongs to the community that the target items of an adversary mark? The answer is f32[a, n], higher = more
    likely; minus infinity says that nothing was seen of a client. The targets are public knowledge.
    """

    adversary: Tensor  # i64[a]
    client: Tensor  # i64[n]


Question = WhichItems | WhichAttribute | WhoBelongs
Q = TypeVar("Q", contravariant=True)

# --- attacks ----------------------------------------------------------------------------------------------------------


class Attack(Protocol[M, Q]):
    """A frozen dataclass of public settings. M are the messages it folds over, Q is the question it answers.

    Where it differs from others only in what it makes of what it kept, it may have a method `listener` (`listener_of`).
    """

    @property
    def vantage(self) -> type[Vantage[M]]:
        """The vantage point it is made for: an attack on uploads that is run where there are none finds nothing."""
        ...

    def init(self, knowledge: Knowledge) -> State:
        """The state before the first message."""
        ...

    def fold(self, knowledge: Knowledge, state: State, message: M) -> State:
        """The state after a message: a pure function, the tensors it is given stay as they are."""
        ...

    def answer(self, knowledge: Knowledge, state: State, question: Q) -> Tensor:
        """Its answer, in the form that the question says."""
        ...


def listener_of(attack: object) -> object | None:
    """What decides which state an attack keeps, such as the attack without its learner; None if it does not say.

    Attacks with equal listeners keep the same state of the same messages, whatever they know of an attribute (labels of
    users, columns of features); so one of them listens for all. It may be the attack that a chain begins with.
    """
    says = getattr(attack, "listener", None)
    return None if says is None else says()
