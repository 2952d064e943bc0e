"""An attack that is graded after every round: how its success comes and goes while a system trains.

What is told after each round is kept with the attack's state, so that a killed run continues with the whole curve.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from recleak.attacks.base import Attack, Knowledge
from recleak.recording import Listening
from recleak.wire import M, Message, Vantage

Q = TypeVar("Q")
_CURVE, _ROUND = "curve/", "curve rounds"
_FIRST = 10  # rounds that are all shown
Grade = Callable[[Tensor], Mapping[str, Tensor]]


class Watching(Listening[M, Q], Generic[M, Q]):
    """`Listening` with a question that is asked after every round; `grade` makes named numbers of the answer. Without
    one, nothing is asked.
    """

    def __init__(
        self,
        vantage: Vantage[M],
        attack: Attack[M, Q],
        knowledge: Knowledge,
        question: Q | None = None,
        grade: Grade | None = None,
        rounds: Collection[int] | None = None,
    ) -> None:
        """It is asked after all `rounds`, or after those given and the last one."""
        super().__init__(vantage, attack, knowledge)
        self._question, self._grade, self._asked = question, grade, rounds
        self._now: int | None = None
        self._rounds: list[int] = []
        self._told: dict[str, list[Tensor]] = {}

    def receive(self, message: Message) -> None:
        """With the first message of another round, the last one is over."""
        round = getattr(message, "round", None)
        if round is not None and round != self._now:
            self._end_round(last=False)
            self._now = round
        super().receive(message)

    def close(self) -> None:
        """The last round is over too."""
        self._end_round(last=True)
        self._now = None

    def _end_round(self, *, last: bool) -> None:
        if self._now is None or self._question is None or self._grade is None:
            return
        if not last and self._asked is not None and self._now not in self._asked:
            return
        self._rounds.append(self._now)
        for name, value in self._grade(self.answer(self._question)).items():
            self._told.setdefault(name, []).append(value.clone())  # made among large tensors, it keeps their memory

    @property
    def rounds(self) -> Tensor:
        """The rounds after which it was asked, i64[r]."""
        return torch.tensor(self._rounds, dtype=torch.int64)

    def curve(self, name: str) -> Tensor:
        """What was told after each of them, f32[r, ...]."""
        return torch.stack(self._told[name])

    def state(self) -> dict[str, Tensor]:
        """The attack's, and what was told so far; a protocol saves it between rounds."""
        if self._question is None:
            return super().state()
        told = {_CURVE + name: self.curve(name) for name in self._told}
        now = torch.tensor([*self._rounds, -1 if self._now is None else self._now])
        return {**super().state(), **told, _ROUND: now}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Goes back to a saved state."""
        if _ROUND not in state:
            super().restore(state)
            return
        *rounds, now = state[_ROUND].tolist()
        self._rounds, self._now = [int(each) for each in rounds], None if now < 0 else int(now)
        self._told = {
            name.removeprefix(_CURVE): list(value.unbind(0)) for name, value in state.items() if name.startswith(_CURVE)
        }
        super().restore({n: v for n, v in state.items() if not n.startswith(_CURVE) and n != _ROUND})


def spread(rounds: int, count: int = 30) -> set[int]:
    """Rounds for a curve of about so many points: the first ones, and then evenly."""
    step = max(1, (rounds - _FIRST) // max(1, count - _FIRST))
    return {*range(min(_FIRST, rounds)), *range(_FIRST - 1, rounds, step)}
