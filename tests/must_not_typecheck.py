"""The threat model as types: mypy must refuse every line marked `# error`, and no other line.

`tests/test_threat_model.py` runs mypy on this file; nothing in it is ever called.
"""
# ruff: noqa: B018

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recleak.attacks.base import Attack, Knowledge, State, WhichAttribute, WhichItems
from recleak.recording import Listening
from recleak.wire import (
    Aggregate,
    Aggregator,
    AggregatorMessage,
    Audience,
    Broadcast,
    Peers,
    Push,
    Recommendations,
    Server,
    ServerMessage,
    Upload,
)


@dataclass(frozen=True)
class AtTheServer:
    """Reads uploads."""

    vantage = Server

    def init(self, knowledge: Knowledge) -> State:
        return {"total": torch.zeros(knowledge.n_items)}

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        if isinstance(message, Upload):
            return {"total": state["total"] + message.update.norms().sum()}
        return state

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        return state["total"][question.item]


@dataclass(frozen=True)
class AtTheAggregator:
    """Reads sums."""

    vantage = Aggregator

    def init(self, knowledge: Knowledge) -> State:
        return {}

    def fold(self, knowledge: Knowledge, state: State, message: AggregatorMessage) -> State:
        if isinstance(message, Aggregate):
            return message.total
        return state

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        return state["item"][question.item]


@dataclass(frozen=True)
class WantsTooMuch:
    """Says that it stands behind secure aggregation, and wants uploads only."""

    vantage = Aggregator

    def init(self, knowledge: Knowledge) -> State:
        return {}

    def fold(self, knowledge: Knowledge, state: State, message: Upload) -> State:
        return message.update.rows

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        return state["item"]


def allowed(knowledge: Knowledge, question: WhichItems) -> None:
    Listening(Server(), AtTheServer(), knowledge).answer(question)
    Listening(Aggregator(), AtTheAggregator(), knowledge).answer(question)


def an_attack_runs_at_its_own_vantage_point_only(knowledge: Knowledge) -> None:
    Listening(Aggregator(), AtTheServer(), knowledge)  # error
    Listening(Server(), AtTheAggregator(), knowledge)  # error
    Listening(Audience(), AtTheServer(), knowledge)  # error
    Listening(Peers(torch.eye(2, dtype=torch.bool)), AtTheServer(), knowledge)  # error
    Listening(Aggregator(), WantsTooMuch(), knowledge)  # error


def folding_by_hand_is_no_way_around(
    knowledge: Knowledge, upload: Upload, push: Push, shown: Recommendations, sums: Aggregate
) -> None:
    AtTheServer().fold(knowledge, {}, sums)
    AtTheAggregator().fold(knowledge, {}, upload)  # error
    AtTheAggregator().fold(knowledge, {}, push)  # error
    AtTheServer().fold(knowledge, {}, shown)  # error


def what_a_vantage_point_delivers(message: Upload) -> None:
    seen = Aggregator().sees(message)
    if isinstance(seen, (Broadcast, Aggregate)):
        seen.update  # error
    server = Server().sees(message)
    if isinstance(server, Upload):
        server.update.norms()
    if server is not None:
        server.params  # error


def sums_hold_no_upload(sums: Aggregate) -> None:
    sums.update  # error


def a_question_has_no_answer(knowledge: Knowledge, question: WhichItems, other: WhichAttribute) -> None:
    question.truth  # error
    question.label  # error
    WhichItems(question.client, question.item, torch.ones(1))  # error
    Listening(Server(), AtTheServer(), knowledge).answer(other)  # error


def knowledge_has_no_truth(knowledge: Knowledge) -> None:
    knowledge.truth  # error
    knowledge.interactions  # error
    knowledge.n_users = 3  # error


SERVER: Attack[ServerMessage, WhichItems] = AtTheServer()
SUMS: Attack[AggregatorMessage, WhichItems] = AtTheServer()  # error
