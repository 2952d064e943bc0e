"""Taps hear everything, in order, beside the training."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from recleak.protocols.taps import feeding
from recleak.wire import Broadcast, Message


class Slow:
    """Hears only when it is allowed to; may fail."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.heard: list[int] = []
        self.allowed, self.fails_at = threading.Event(), fails_at
        self.thread: int | None = None

    def receive(self, message: Message) -> None:
        assert isinstance(message, Broadcast)
        self.allowed.wait(10)
        if message.round == self.fails_at:
            raise ValueError(f"round {message.round}")
        self.heard.append(message.round)
        self.thread = threading.get_ident()

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        pass

    def close(self) -> None:
        pass


def message(round: int) -> Broadcast:
    return Broadcast(round, {"item": torch.zeros(2, 2)})


def send(tap: Slow, count: int, *, fails: bool = False) -> None:
    with feeding([tap]) as feed:
        for round in range(count):
            feed.send(message(round))
        if fails:
            raise RuntimeError("sender")


def test_everything_is_heard_in_order_while_the_sender_goes_on() -> None:
    taps = [Slow(), Slow()]
    with feeding(taps) as feed:
        feed.send(message(0))
        feed.send(message(1))  # the sender is here, and nothing was heard yet
        assert taps[0].heard == []
        for tap in taps:
            tap.allowed.set()
        for round in range(2, 50):
            feed.send(message(round))
        feed.wait()
        assert [tap.heard for tap in taps] == [list(range(50))] * 2
        feed.send(message(50))
    assert [tap.heard[-1] for tap in taps] == [50, 50], "the end waits too"
    assert taps[0].thread == taps[1].thread != threading.get_ident()


def test_an_error_of_a_tap_reaches_the_sender_and_nothing_is_heard_after_it() -> None:
    tap = Slow(fails_at=1)
    tap.allowed.set()
    with pytest.raises(ValueError, match="round 1"):
        send(tap, 10)
    assert tap.heard == [0]


def test_after_an_error_of_the_sender_what_waits_is_not_heard() -> None:
    tap = Slow()
    threading.Timer(0.5, tap.allowed.set).start()
    with pytest.raises(RuntimeError, match="sender"):
        send(tap, 2, fails=True)
    assert tap.heard == [0], "what was begun is heard to its end"


def test_several_messages_are_made_where_they_are_heard() -> None:
    tap, made = Slow(), list[int]()
    tap.allowed.set()

    def messages() -> Iterator[Broadcast]:
        for round in range(3):
            made.append(threading.get_ident())
            assert tap.heard == list(range(round)), "one by one"
            yield message(round)

    with feeding([tap]) as feed:
        feed.send_all(messages())
    assert tap.heard == [0, 1, 2]
    assert set(made) == {tap.thread}
