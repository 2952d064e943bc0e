"""A federation whose last round is not known before: the protocol `federated` of experiments."""

from __future__ import annotations

from dataclasses import dataclass, fields

from recleak.errors import ConfigError
from recleak.protocols.federated import Federated
from recleak.protocols.stopping import Either, Plateau, Reached, Rule


@dataclass(frozen=True)
class FederatedUntil(Federated):
    """With a rule, training may end before the last round: it looks at utility on validation items (an audit, at
    Hit@10 as utility is measured there).
    """

    stopping: Rule | None = None

    def __post_init__(self) -> None:
        rule = self.stopping
        if rule is not None and not isinstance(rule, Plateau | Reached | Either):
            raise ConfigError(f"stopping is {rule!r:.80}, expected a rule: use = 'plateau' or 'reached'.")
        if rule is not None and rule.every < 1:
            raise ConfigError(f"every is {rule.every}, expected at least 1 round between checks.")
        if isinstance(rule, Plateau) and rule.patience < 1:
            raise ConfigError(f"patience is {rule.patience}, expected at least 1 check.")

    def plain(self, rounds: int | None = None) -> Federated:
        """The same without a rule, of so many rounds (None: all)."""
        own = {each.name: getattr(self, each.name) for each in fields(Federated)}
        return Federated(**{**own, "rounds": self.rounds if rounds is None else rounds})
