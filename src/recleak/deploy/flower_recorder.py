"""A Flower strategy that writes down what the server sees: any strategy, wrapped. The recording can be audited.

What is recorded are broadcasts, uploads and their sum (`recleak.wire`), not metrics, configuration or times. A reply
that cannot be read, or whose change is not finite, is left out of the recording, and said so in the log; so is a sum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.result import Result

from recleak.deploy.flower_records import Parts, RecordError, check_parts, only_arrays, opened, tensors_of, update_of
from recleak.deploy.flower_server import Federation, blocks, check_finite, heard
from recleak.errors import ConfigError
from recleak.files import replace_text
from recleak.models.base import Params
from recleak.protocols.recorded import MOST_CLIENTS
from recleak.recording import Recorder as Tape
from recleak.training.aggregate import Summation
from recleak.wire import Aggregate, Broadcast, Server, Upload

CLIENTS = "clients.csv"  # beside the messages: which node a client number is, where the recorder gave it
_LARGEST = torch.finfo(torch.float32).max  # of weights, which are recorded as f32
logger = logging.getLogger("flwr")


class Recorder(Strategy):
    """A strategy that does what the given one does, and records it.

        parts = {"items.weight": Component("item", "per_item", "item", (16,)), ...}
        strategy = Recorder(FedAvg(), Path("recording"), parts=parts)
        strategy.start(grid, initial_arrays, num_rounds=10)

    `parts` maps each name of the array records to a component; None leaves it out. With a `Federation` it is known.
    `client` tells which client a reply is of, by a number from 0; by default nodes are numbered as they answer, and
    `clients.csv` in the folder says who is who. `weighted_by` is the metric that a reply weighs by, as in FedAvg.
    """

    def __init__(
        self,
        strategy: Strategy,
        directory: Path,
        *,
        parts: Parts | None = None,
        client: Callable[[FlowerMessage], int] | None = None,
        weighted_by: str = "num-examples",
        source: str = "",
    ) -> None:
        if type(strategy).start is not Strategy.start:
            raise ConfigError(
                f"{type(strategy).__name__} has a `start` of its own, which would go around the recorder, expected "
                "Flower's.\n  Record in it: call configure_train, aggregate_train and close of the recorder."
            )
        if parts is None and not isinstance(strategy, Federation):
            raise ConfigError(
                f"Got {type(strategy).__name__} without `parts`, expected a component for each name of its arrays."
            )
        self.strategy, self.parts, self._client, self._weighted_by = strategy, parts, client, weighted_by
        self.vantage = strategy.vantage if isinstance(strategy, Federation) else Server()
        self.components = strategy.components if isinstance(strategy, Federation) else check_parts(parts or {})
        self._tape = Tape(self.vantage, directory, components=self.components, source=source or type(strategy).__name__)
        self._numbers: dict[int, int] = {}  # of nodes
        self._received: Params = {}

    def start(self, *arguments: Any, **named: Any) -> Result:
        """As the given strategy; at the end the recording is complete."""
        result = super().start(*arguments, **named)
        self.close()
        return result

    def close(self) -> None:
        """Nothing more comes."""
        self._tape.close()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[FlowerMessage]:
        """What the given strategy sends, which is written down."""
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        records = {id(each.content): only_arrays(each.content, "a broadcast") for each in messages}
        different = {tuple(sorted((n, a.data) for n, a in record.items())) for record in records.values()}
        if len(different) > 1:
            raise ConfigError(
                f"{type(self.strategy).__name__} sends different parameters to different nodes, expected the same to "
                "all: a recording holds one broadcast for a round."
            )
        if messages:
            self._received = self._params(next(iter(records.values())))
            if not all(bool(torch.isfinite(value).all()) for value in self._received.values()):
                logger.warning("Round %d: the parameters are not finite; an audit will end before it.", server_round)
            self._tape.receive(Broadcast(server_round - 1, self._received))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[FlowerMessage]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """What the given strategy makes of the replies, which are written down first."""
        replies = list(replies)
        self._write(server_round - 1, replies)
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[FlowerMessage]:
        """As the given strategy."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[FlowerMessage]) -> MetricRecord | None:
        """As the given strategy."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """As the given strategy, and where the recording goes."""
        self.strategy.summary()
        logger.info("\t└──> Recorded in %s, as %s", self._tape.directory, type(self.vantage).__name__)

    # What is written.

    def _params(self, record: ArrayRecord) -> Params:
        if isinstance(self.strategy, Federation):
            return self.strategy.params(record)
        return tensors_of(record, self.parts or {}, "the broadcast")

    def _write(self, round: int, replies: list[FlowerMessage]) -> None:
        """The uploads of a round in the order of clients, and their sum; or the sums of cohorts as they came."""
        uploads: list[Upload] = []
        sums: list[Aggregate] = []
        answers = (reply for reply in replies if not reply.has_error())  # the strategy tells of the others
        for message in heard(round, answers, partial(self._heard, round), "not recorded"):
            if isinstance(message, Upload):
                uploads.append(message)
            else:
                sums.append(message)
        if uploads:
            total = Summation(self._received, self.components, count_rows=False)
            for block in blocks(uploads):
                self._tape.receive(block)
                total.add(block.update, block.weight)
            sum_ = total.result(round)
            if sum_.weight > 0 and all(bool(torch.isfinite(value).all()) for value in sum_.total.values()):
                self._tape.receive(sum_)
            else:
                logger.warning("Round %d: the sum is not recorded: it is not finite, or weighs nothing.", round + 1)
        for each in sums:
            self._tape.receive(each)
        if self._numbers:
            lines = [f"{number},{node}\n" for node, number in self._numbers.items()]
            replace_text(self._tape.directory / CLIENTS, "client,node\n" + "".join(lines))

    def _heard(self, round: int, reply: FlowerMessage) -> Upload | Aggregate:
        """A reply as a message of the wire."""
        if isinstance(self.strategy, Federation):
            return self.strategy.check(opened(reply.content), round)
        return self._changed(round, reply)

    def _changed(self, round: int, reply: FlowerMessage) -> Upload:
        """A reply with whole arrays: what it changed."""
        after = tensors_of(only_arrays(reply.content, "the reply"), self.parts or {}, "the reply")
        update = update_of(self._received, after, self.components, self._number(reply))
        upload = Upload(round, update, torch.tensor([self._weight(reply)]))
        check_finite(upload)
        return upload

    def _number(self, reply: FlowerMessage) -> int:
        if self._client is None:
            return self._numbers.setdefault(reply.metadata.src_node_id, len(self._numbers))
        try:
            number = index(self._client(reply))
        except Exception as error:  # it reads what a client sent: whatever goes wrong there is of this reply alone
            raise RecordError(f"Got {error!r:.200} from `client`, expected the number of a client.") from error
        if not 0 <= number < MOST_CLIENTS:
            raise RecordError(f"Got {number} from `client`, expected a number in [0, {MOST_CLIENTS}).")
        return number

    def _weight(self, reply: FlowerMessage) -> float:
        for record in reply.content.metric_records.values():
            if isinstance(value := record.get(self._weighted_by), int | float):
                if not 0 <= value <= _LARGEST:
                    raise RecordError(f"Got {self._weighted_by} = {value}, expected a number in [0, {_LARGEST:.3g}].")
                return float(value)
        return 1.0
