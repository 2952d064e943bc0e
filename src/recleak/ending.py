"""When a federation of an audit ends, if a rule says so: it is trained once with nobody listening.

What attacks are asked depends on how many rounds there were, and some read the last one only. Training is the same to
the bit whoever listens, so the second time it has as many rounds as the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from recleak.attacks.membership import Evidence
from recleak.attacks.rows import KeepsRows
from recleak.cells import Cell, valid_ranks_of
from recleak.defenses.early_stop import early_stop_of
from recleak.errors import ConfigError
from recleak.made import Made
from recleak.protocols.federated import Federated, FederatedModel, train_federated
from recleak.protocols.stopping import Either, Plateau, Rule, Stopping
from recleak.protocols.until import FederatedUntil
from recleak.training.executor import InProcess


def ended(cell: Cell, made: Made, threads: int) -> Made:
    """The same with a protocol of as many rounds as there are until its rule, or the defense, ends training."""
    protocol, rule = made.protocol, rule_of(made)
    if rule is None:
        return replace(made, protocol=protocol.plain()) if isinstance(protocol, FederatedUntil) else made
    if not isinstance(protocol, Federated):
        raise ConfigError("Early-stop: got another protocol, expected 'federated'.\n  Leave the defense out.")
    plain = protocol.plain() if isinstance(protocol, FederatedUntil) else protocol
    trained = train_federated(
        plain,
        made.model,
        made.train,
        defense=made.defense,
        executor=InProcess(threads),
        user_features=None if made.features is None else made.features.values,
        attributes=made.attributes,
        stopping=Stopping(rule, _utility(cell, made)),
        seed=cell.seed,
        directory=cell.path / "work-ending",
        show_progress=False,
    )
    return replace(made, protocol=replace(plain, rounds=len(trained.loss)))


def rule_of(made: Made) -> Rule | None:
    """That of the protocol, that of the defense, or whichever ends training first."""
    own = made.protocol.stopping if isinstance(made.protocol, FederatedUntil) else None
    early = early_stop_of(made.defense)
    if early is None:
        return own
    if own is None:
        return early.rule
    if not isinstance(own, Plateau):
        raise ConfigError(f"Got the rule {own!r} and the defense {early!r}, expected one level of utility.")
    return Either(own, early.rule)


def _utility(cell: Cell, made: Made) -> Callable[[FederatedModel], float]:
    """Hit@10 of validation items."""
    if made.model.needs_transitions or not len(made.split.valid):
        raise ConfigError(
            "Got a rule when training ends, and no validation items, expected some.\n"
            "  Give a number of rounds without a rule, or other data."
        )
    return lambda model: float(valid_ranks_of(made.split, model, cell.system.data, cell.seed).hit(10).mean())


def within(attack: Any, rounds: int) -> Any:
    """An attack that reads a round after the last one reads the last one; also one that infers items first."""
    changes: dict[str, Any] = {}
    if isinstance(attack, Evidence) and attack.round is not None and attack.round >= rounds:
        changes["round"] = rounds - 1
    if isinstance(attack, KeepsRows) and isinstance(attack.rounds, int) and attack.rounds >= rounds:
        changes["rounds"] = rounds - 1
    inner = getattr(attack, "membership", None)
    if isinstance(inner, Evidence):
        changes["membership"] = within(inner, rounds)
    return replace(attack, **changes) if changes else attack
