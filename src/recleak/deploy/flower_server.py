"""A Flower strategy that does with the answers of `client_app` what the server of a simulation does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from flwr.app import ArrayRecord, ConfigRecord, MessageType, MetricRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from recleak import random
from recleak.defenses.base import Defense
from recleak.deploy.flower_client import deployable
from recleak.deploy.flower_records import ARRAYS, CONFIG, ROUND, arrays_of, opened, params_of
from recleak.errors import ConfigError, RecleakError
from recleak.models.base import Model, Params
from recleak.models.components import Component
from recleak.protocols.federated import BLOCK, Federated, round_half_up
from recleak.training.aggregate import Summation, apply, unaveraged
from recleak.training.personal import first_params
from recleak.update import merge
from recleak.wire import Aggregate, Aggregator, Message, MessageError, Server, Upload

logger = logging.getLogger("flwr")  # Flower's own, so that its settings hold


class Federation(Strategy):
    """The server of a federation whose SuperNodes run `client_app` with the same model, protocol and defense.

    `fraction` and `clients_per_round` of the protocol are of SuperNodes: with a cohort behind one, all its users take
    part or none. A round begins when `min_nodes` are connected. An answer that does not fit is left out, and said so in
    the log. `seed` is of the first parameters and of who is sampled.

        federation = Federation(model, protocol, n_users=943, n_items=1682)
        federation.start(grid, federation.first_arrays(), num_rounds=protocol.rounds)
    """

    def __init__(
        self,
        model: Model,
        protocol: Federated,
        *,
        n_users: int,
        n_items: int,
        defense: Defense | None = None,
        seed: int = 0,
        min_nodes: int = 1,
        patience: float = 600.0,  # seconds until so many nodes must be there
    ) -> None:
        self.defense = defense or Defense()
        self.components: tuple[Component, ...] = deployable(model, protocol, self.defense)
        self.protocol, self.n_users, self.n_items = protocol, n_users, n_items
        self.seed, self.min_nodes, self.patience = seed, min_nodes, patience
        self._params: Params = {}

    @property
    def vantage(self) -> Server | Aggregator:
        """Where it stands: it gets uploads, or only sums of cohorts."""
        return Aggregator() if self.defense.secure_aggregation else Server()

    def first_arrays(self) -> ArrayRecord:
        """The shared components before the first round."""
        return arrays_of(first_params(self.components, self.n_users, self.n_items, self.seed))

    def params(self, arrays: ArrayRecord) -> Params:
        """The shared components in an array record, such as that of a result."""
        return params_of(arrays, self.components, self.n_users, self.n_items)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[FlowerMessage]:
        """A broadcast to the nodes of a round."""
        self._params = self.params(arrays)
        content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({**config, ROUND: server_round})})
        return [FlowerMessage(content, node, MessageType.TRAIN) for node in self._nodes(grid, server_round - 1)]

    def aggregate_train(
        self, server_round: int, replies: Iterable[FlowerMessage]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next parameters; None if nobody answered."""
        answers = self._answers(server_round - 1, replies)
        if not answers:
            return None, None
        total = self._total(server_round - 1, answers)
        protocol, plain = self.protocol, unaveraged(self.components)
        self._params = apply(self._params, total, protocol.aggregation, protocol.server_learning_rate, plain)
        if broken := [name for name, value in self._params.items() if not bool(torch.isfinite(value.sum()))]:
            raise RecleakError(
                f"Round {server_round}: {', '.join(broken)} is not finite after {len(total.client):,} clients.\n"
                f"  Lower the learning rate ({protocol.local.optimizer.learning_rate})."
            )
        return arrays_of(self._params), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[FlowerMessage]:
        """Nobody evaluates: metrics of clients would be one more thing that leaves them."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[FlowerMessage]) -> MetricRecord | None:
        """Nothing."""
        return None

    def summary(self) -> None:
        """A line in the log."""
        sent = "sums of cohorts" if self.defense.secure_aggregation else "the upload of each user"
        logger.info("\t└──> recleak: %s, %s; the server gets %s", self.protocol, self.defense, sent)

    # One round.

    def _nodes(self, grid: Grid, round: int) -> list[int]:
        """Who is asked: a sample of the nodes that are there."""
        wanted = max(self.min_nodes, self.protocol.clients_per_round or 1)
        until = time.monotonic() + self.patience
        while len(nodes := sorted(grid.get_node_ids())) < wanted:
            if time.monotonic() > until:
                raise ConfigError(
                    f"Got {len(nodes)} SuperNodes after {self.patience:.0f} seconds, expected {wanted}.\n"
                    "  Start more of them, or lower min_nodes."
                )
            time.sleep(0.2)
        count = self.protocol.clients_per_round or round_half_up(self.protocol.fraction * len(nodes))
        lot = {node: int(random.bits(self.seed, "nodes", round, node)) for node in nodes}
        return sorted(nodes, key=lambda node: lot[node])[: max(count, 1)]

    def _answers(self, round: int, replies: Iterable[FlowerMessage]) -> list[Upload] | list[Aggregate]:
        """What nodes sent, each client once; what does not fit is left out."""
        uploads: list[Upload] = []
        sums: list[Aggregate] = []
        for message in heard(round, replies, lambda reply: self.check(opened(reply.content), round), "left out"):
            if isinstance(message, Aggregate):
                sums.append(message)
            else:
                even = self.protocol.aggregation != "weighted"
                uploads.append(replace(message, weight=torch.ones_like(message.weight)) if even else message)
        return sums if self.defense.secure_aggregation else uploads

    def check(self, message: Message, round: int) -> Upload | Aggregate:
        """The message, if it is an answer to the last broadcast; an error says why it is none."""
        kind = Aggregate if self.defense.secure_aggregation else Upload
        if not isinstance(message, Upload | Aggregate) or not isinstance(message, kind):
            raise MessageError(f"got {type(message).__name__}, expected {kind.__name__}.")
        if message.round != round:
            raise MessageError(f"got an answer to round {message.round}, expected {round}.")
        who = clients_of(message)
        if not who or max(who) >= self.n_users:
            raise MessageError(f"got the clients {who!s:.80}, expected some below {self.n_users}.")
        if isinstance(message, Upload):
            self._check_upload(message)
        else:
            self._check_sum(message)
        return message

    def _check_upload(self, message: Upload) -> None:
        update = message.update
        sides = {"per_item": update.rows, "per_user": update.values, "dense": update.values}
        expected = {part.name: sides[part.storage] for part in self.components if part.shared}
        if set(update.names()) != set(expected) or any(name not in side for name, side in expected.items()):
            got = ", ".join(sorted(update.names()))
            raise MessageError(f"got the components {got:.200}, expected {', '.join(sorted(expected))}.")
        for part in self.components:
            if part.shared and (got_shape := tuple(expected[part.name][part.name].shape[1:])) != part.shape:
                raise MessageError(f"got {part.name!r} of shape {got_shape}, expected {part.shape}.")
        if update.n_items != self.n_items:
            raise MessageError(f"got {update.n_items} items, expected {self.n_items}.")
        if not bool((torch.isfinite(message.weight) & (message.weight >= 0)).all()):
            raise MessageError("got weights that are no numbers from 0 on, expected such.")
        check_finite(message)

    def _check_sum(self, message: Aggregate) -> None:
        expected = {name: tuple(value.shape) for name, value in self._params.items()}
        got = {name: tuple(value.shape) for name, value in message.total.items()}
        if got != expected:
            raise MessageError(f"got a sum of {got!s:.200}, expected {expected!s:.200}.")
        tables = {part.name for part in self.components if part.shared and part.storage == "per_item"}
        counted = tables if self.protocol.aggregation == "touched-mean" else set()
        if set(message.touched) != counted:
            raise MessageError(f"got counts of rows of {sorted(message.touched)}, expected {sorted(counted)}.")
        _check_finite({**message.total, **{f"rows of {name}": value for name, value in message.touched.items()}})
        if any(bool((value < 0).any()) for value in message.touched.values()):
            raise MessageError("got counts of rows below 0, expected numbers from 0 on.")
        if not message.weight > 0:
            raise MessageError(f"got a sum of weight {message.weight}, expected more than 0.")

    def _total(self, round: int, answers: list[Upload] | list[Aggregate]) -> Aggregate:
        """The sum; of uploads in blocks of ascending clients, as a simulation adds them."""
        uploads = [each for each in answers if isinstance(each, Upload)]
        if uploads:
            total = Summation(self._params, self.components, count_rows=self.protocol.aggregation == "touched-mean")
            for block in blocks(uploads):
                total.add(block.update, block.weight)
            return total.result(round)
        sums = [each for each in answers if isinstance(each, Aggregate)]
        return Aggregate(
            round,
            torch.cat([each.client for each in sums]),
            {name: torch.stack([each.total[name] for each in sums]).sum(0) for name in self._params},
            {name: torch.stack([each.touched[name] for each in sums]).sum(0) for name in sums[0].touched},
            sum(each.weight for each in sums),
        )


def clients_of(message: Upload | Aggregate) -> list[int]:
    """Whose it is."""
    client = message.update.client if isinstance(message, Upload) else message.client
    found: list[int] = client.tolist()
    return found


def check_finite(upload: Upload) -> None:
    """An error unless the update is finite, and also times its weight, as sums take it."""
    update, most = upload.update, upload.weight.max()
    sent = {**update.values, **update.rows}
    _check_finite(sent)
    _check_finite({f"{name} times its weight": value * most for name, value in sent.items()})


def _check_finite(tensors: Params) -> None:
    for name, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise MessageError(f"got {name!r} with numbers that are not finite, expected finite ones.")


def heard(
    round: int,
    replies: Iterable[FlowerMessage],
    read: Callable[[FlowerMessage], Upload | Aggregate],
    fate: str,
) -> Iterator[Upload | Aggregate]:
    """What nodes sent, in their order and each client once; what does not fit is told in the log, with its fate."""
    seen: set[int] = set()
    for reply in sorted(replies, key=lambda each: each.metadata.src_node_id):
        node = reply.metadata.src_node_id
        if reply.has_error():
            logger.warning("Round %d: node %d failed: %s", round + 1, node, reply.error.reason)
            continue
        try:
            message = read(reply)
            client = set(clients_of(message))
            if client & seen:
                raise MessageError(f"got the clients {sorted(client & seen)!s:.80} again, expected each once.")
        except RecleakError as error:
            logger.warning("Round %d: the answer of node %d is %s. %s", round + 1, node, fate, error)
            continue
        seen |= client
        yield message


def blocks(uploads: list[Upload]) -> Iterable[Upload]:
    """The clients of several uploads, ascending, so many in a message as a simulation has."""
    update = merge([each.update for each in uploads])
    order = torch.cat([each.update.client for each in uploads]).argsort()
    weight = torch.cat([each.weight for each in uploads])[order]
    for start in range(0, update.n_clients, BLOCK):
        place = torch.arange(start, min(start + BLOCK, update.n_clients))
        yield Upload(uploads[0].round, update.select(place), weight[place])
