"""Measuring a cell: train its system once with all attacks at the wire, grade each, store what there is.

What is wrong for good is stored as the reason. A cell that was killed continues from the last checkpoint of its
training (`work-...`) and ends with the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recleak import objects, random
from recleak.accounting import averaging, ledger, participations
from recleak.attacks.base import WhichItems
from recleak.canaries import Canaries, plant
from recleak.cells import MEMBERSHIP, Cell, loaded, metrics_of, next_ranks_of, ranks_of, split_of, whole_of
from recleak.central import central_ledger, train_central
from recleak.data.sequences import leave_last_out
from recleak.data.split import Split
from recleak.ending import ended, rule_of, within
from recleak.errors import ConfigError, NotFoundError, RecleakError
from recleak.experiment import digest
from recleak.files import replace_table, replace_text
from recleak.grading import pairs_seen
from recleak.made import Made, made_of
from recleak.protocols.centralized import Centralized, CentralizedModel, as_shown
from recleak.protocols.federated import Federated, FederatedModel, train_federated
from recleak.protocols.gossip import Gossip, GossipModel, train_gossip
from recleak.protocols.published import Published
from recleak.protocols.recorded import Recorded
from recleak.protocols.vectors import Vectors
from recleak.recording import Tap
from recleak.storing import (
    DELTA,
    store,
    store_attribute,
    store_bound,
    store_community,
    store_grades,
    store_mark,
    store_reason,
)
from recleak.training.cohort import DivergedError
from recleak.training.executor import InProcess
from recleak.utility import union
from recleak.wire import Aggregator, Peers, Server, Vantage
from recleak.wiretap import Hearing, Wiretap, listening_for, no_sense, seeded

_ASKED = 2_000  # users that are asked about where nothing narrows the question down, and others' items of each
_SCOUTS: Mapping[type[Vantage[Any]], str] = {Server: "random", Aggregator: "popularity-of-sums"}  # what pairs are asked


def measure(cell: Cell, threads: int) -> None:
    """Train, attack, grade, store. What is wrong for good is stored as the reason; other errors are raised."""
    replace_text(cell.path / "system.json", json.dumps(cell.description, indent=2) + "\n")
    split = whole_of(cell.system.data) if cell.published else _split(cell)
    canaries = plant(split.train, spare=(split.valid, split.test), seed=cell.seed) if cell.canaries else None
    try:
        _measure(cell, made_of(cell, split, canaries), threads, canaries)
    except (ConfigError, DivergedError, NotFoundError) as error:  # the last: a component that the model does not have
        for ask in cell.asks:
            store_reason(cell, ask, str(error))
        if not (cell.path / "facts.json").exists():
            store(cell, "facts", {"reason": str(error), "ledger": []})
    for left in cell.path.glob("work-*"):
        shutil.rmtree(left, ignore_errors=True)


def needed_bytes(cell: Cell) -> int:
    """What the nodes of a gossip hold in it; 0 of another protocol, or where measuring will say what is wrong."""
    try:
        if cell.published or objects.find("protocol", cell.system.settings["protocol"]["use"]) is not Gossip:
            return 0
        made = made_of(cell, _split(cell), None)
        users, items = made.train.n_users, made.train.n_items
        return made.protocol.needed_bytes(made.components, users, items) if isinstance(made.protocol, Gossip) else 0
    except RecleakError:
        return 0


def _split(cell: Cell) -> Split:
    """What is held out: an item; or of a model of what comes next, the last check-in, wherever the user was before."""
    kind = objects.find("model", cell.system.settings["model"]["use"])
    if getattr(kind, "needs_transitions", False):
        return leave_last_out(loaded(cell.system.data))
    return split_of(cell.system.data, cell.seed)


def _measure(cell: Cell, made: Made, threads: int, canaries: Canaries | None) -> None:
    taps: dict[str, Wiretap] = {}
    before, made = made, ended(cell, made, threads)
    for ask in cell.asks:
        attack = seeded(objects.build("attack", ask.settings), ask.settings, cell.seed)
        if made.protocol.rounds < before.protocol.rounds:
            attack = within(attack, made.protocol.rounds)
        reason = no_sense(attack, made, ask)
        if reason is None:
            try:
                taps[ask.key] = Wiretap(attack, made, ask)
            except RecleakError as error:
                reason = str(error)
        if reason is not None:
            store_reason(cell, ask, reason)
    seen = {taps[ask.key].attack.vantage for ask in cell.asks if ask.key in taps and ask.question == MEMBERSHIP}
    scouts = {
        vantage: Wiretap(objects.build("attack", {"use": name}), made)
        for vantage, name in _SCOUTS.items()
        if vantage in seen
    }
    ears = _ears(cell, taps)
    heard_by = listening_for(taps)
    listening = {key: taps[key] for key in heard_by.values()}
    trained = _train(cell, made, listening, [*scouts.values(), *ears.values()], threads)
    for key, heard in heard_by.items():
        taps[key].take(taps[heard])
    everybody = _first_rounds(made)
    for ask in cell.asks:
        if (tap := taps.get(ask.key)) is None:
            continue
        rounds = ears[ask.key].first.numpy() if ask.key in ears else everybody
        if tap.failed is not None:
            store_reason(cell, ask, tap.failed)
        elif ask.key in ears and not (rounds >= 0).any():
            store_reason(cell, ask, "Nobody sent it a model, expected some.\n  Run more ticks, or let nodes collude.")
        elif ask.attribute:
            store_attribute(cell, ask, tap, made, rounds)
        elif ask.community:
            store_community(cell, ask, tap, made, rounds)
        elif ask.mark is not None:
            store_mark(cell, ask, tap, made, rounds)
        elif canaries is None:
            scout = scouts.get(tap.attack.vantage)
            asked = _any_pairs(made, rounds) if scout is None else pairs_seen(scout.state(), made.train.n_items)
            store_grades(cell, ask, tap, asked, made, rounds)
        else:
            store_bound(cell, ask, tap, canaries.of(np.flatnonzero(rounds >= 0)))
    if canaries is None and trained is not None:
        data, seed = cell.system.data, cell.seed
        if isinstance(made.protocol, Centralized) and isinstance(trained, CentralizedModel):
            past = union(made.split.train, made.split.valid)
            ranks = ranks_of(made.split, as_shown(made.protocol, trained, past, made.defense, made.seed), data, seed)
        elif made.model.needs_transitions and not isinstance(trained, CentralizedModel):
            ranks = next_ranks_of(made.split, trained, data, seed)
        else:
            ranks = ranks_of(made.split, trained, data, seed)
        replace_table(cell.path / "utility.parquet", metrics_of(ranks))
    entries = []
    if isinstance(made.protocol, Centralized) and isinstance(trained, CentralizedModel):
        entries = central_ledger(made.protocol, made.defense, trained, delta=DELTA)
    elif isinstance(trained, FederatedModel | GossipModel) and isinstance(made.protocol, Federated | Gossip):
        entries = ledger(
            made.defense,
            components=made.model.components(),
            n_items=made.train.n_items,
            participations=_participations(made, trained),
            training=made.protocol.local,
            aggregation=averaging(made.protocol),
            delta=DELTA,
        )
    early = {"ended": made.protocol.rounds, "planned": before.protocol.rounds} if rule_of(before) is not None else {}
    store(cell, "facts", {"reason": None, "ledger": [asdict(entry) for entry in entries], **early})


def _ears(cell: Cell, taps: Mapping[str, Wiretap]) -> dict[str, Hearing]:
    """By attack of one group of nodes, whom the group hears of. Who guesses is asked about everybody."""
    of_groups = {ask.key for ask in cell.asks if ask.community or ask.mark is not None}
    return {
        key: Hearing(tap.vantage)
        for key, tap in taps.items()
        if isinstance(tap.vantage, Peers) and hasattr(tap.attack, "colluders") and key not in of_groups
    }


def _train(
    cell: Cell, made: Made, taps: Mapping[str, Wiretap], scouts: Sequence[Tap], threads: int
) -> FederatedModel | GossipModel | CentralizedModel | None:
    """By the system's protocol, with all taps; users tell what they keep if an adversary plays one of them."""
    listening = [*taps.values(), *scouts]
    if isinstance(made.protocol, Published | Vectors):
        made.protocol.send(made.train, listening)
        return None
    if isinstance(made.protocol, Recorded):
        made.protocol.send(listening)
        return None
    if isinstance(made.protocol, Centralized):
        return train_central(made, made.split, listening, made.seed, cell.path / f"work-{digest(sorted(taps))}")
    plays = any(getattr(tap.attack, "vector", "") in ("told", "mean") for tap in taps.values())
    confidants = range(made.train.n_users) if plays else ()
    features = None if made.features is None else made.features.values
    work = cell.path / f"work-{digest(sorted(taps))}"
    if isinstance(made.protocol, Gossip):
        return train_gossip(
            made.protocol,
            made.model,
            made.train,
            valid=made.split.valid,
            defense=made.defense,
            taps=listening,
            threads=threads,
            user_features=features,
            confidants=confidants,
            seed=cell.seed,
            directory=work,
            show_progress=False,
        )
    return train_federated(
        made.protocol,
        made.model,
        made.train,
        defense=made.defense,
        taps=listening,
        executor=InProcess(threads),
        user_features=features,
        attributes=made.attributes,
        confidants=confidants,
        seed=cell.seed,
        directory=work,
        show_progress=False,
    )


def _participations(made: Made, trained: FederatedModel | GossipModel) -> NDArray[np.int64]:
    """How often each user trained and told of it, i64[n]."""
    if isinstance(made.protocol, Federated):
        return participations(made.protocol, made.train, seed=made.seed)
    if isinstance(trained, GossipModel):
        return np.array([times for times in trained.trainings if times], np.int64)
    raise AssertionError("a gossip gives its own result")


def _first_rounds(made: Made) -> NDArray[np.int64]:
    """The round in which each user took part first, i64[U]; -1: in none."""
    if isinstance(made.protocol, Recorded):
        return made.protocol.first_rounds(made.train.n_users)
    first = np.full(made.train.n_users, -1, np.int64)
    eligible = np.flatnonzero(made.train.activity).astype(np.int64)
    if isinstance(made.protocol, Published | Vectors):
        first[made.protocol.users(made.train)] = 0
        return first
    if not isinstance(made.protocol, Federated):
        first[eligible] = 0  # everybody sends from the first tick on, or is shown lists in the first session
        return first
    for round in reversed(range(made.protocol.rounds)):
        first[made.protocol.participants(eligible, round, made.seed)] = round
    return first


def _any_pairs(made: Made, rounds: NDArray[np.int64]) -> WhichItems:
    """Which items are a user's own, of all, where no message narrows them down: own items and others.

    Of at most so many users who took part (`rounds`, i64[U], is not -1) and have items; of each its own items, and at
    most so many others, both drawn.
    """
    matrix, users = made.train.matrix(), np.flatnonzero((rounds >= 0) & (made.train.activity > 0))
    if not len(users):
        raise ConfigError(
            "No user with a vector has an item, expected some.\n  Check that vectors and items use the same ids."
        )
    users = np.sort(users[random.bits(0, "asked users", users).argsort()[:_ASKED]])
    client, item = [], []
    for user in users.tolist():
        own = matrix.indices[matrix.indptr[user] : matrix.indptr[user + 1]].astype(np.int64)
        others = np.setdiff1d(np.arange(made.train.n_items), own, assume_unique=True)
        if len(others) > _ASKED:
            others = others[random.bits(0, "asked items", user, others).argsort()[:_ASKED]]
        item.append(np.sort(np.concatenate([own, others])))
        client.append(np.full(len(item[-1]), user))
    return WhichItems(torch.from_numpy(np.concatenate(client)), torch.from_numpy(np.concatenate(item)))
