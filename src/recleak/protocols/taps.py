"""Taps are fed in a thread of their own while training goes on: in the order of sending, one message after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from recleak.recording import Tap
from recleak.wire import Message

_AHEAD = 2  # what waits to be heard; what it holds must not change before


class Feed:
    """What a protocol sends goes here."""

    def __init__(self, taps: Sequence[Tap], thread: ThreadPoolExecutor) -> None:
        self._taps, self._thread = taps, thread
        self._pending = deque[Future[None]]()
        self._stopped = False

    def send(self, message: Message) -> None:
        """Hand a message to all taps, soon; an error of a tap for an earlier message is raised here."""
        self.send_all((message,))

    def send_all(self, messages: Iterable[Message]) -> None:
        """The same for several, which are made one by one when they are to be heard."""
        if self._taps:
            self._wait(_AHEAD - 1)
            self._pending.append(self._thread.submit(self._hear, messages))

    def wait(self) -> None:
        """Until all that was sent has been heard."""
        self._wait(0)

    def stop(self) -> None:
        """What has not been heard yet will not be."""
        self._stopped = True

    def _hear(self, messages: Iterable[Message]) -> None:
        try:
            for message in messages:
                for tap in self._taps:
                    if self._stopped:
                        return
                    tap.receive(message)
        except BaseException:
            self._stopped = True  # what comes after a message that was not heard would mean something else
            raise

    def _wait(self, left: int) -> None:
        while len(self._pending) > left:
            self._pending.popleft().result()


@contextmanager
def feeding(taps: Sequence[Tap]) -> Iterator[Feed]:
    """Feed taps; at the end all that was sent has been heard, unless something failed."""
    with ThreadPoolExecutor(1, thread_name_prefix="recleak-taps") as thread:
        feed = Feed(taps, thread)
        try:
            yield feed
            feed.wait()
        finally:
            feed.stop()
