"""Sharing policies: which components leave the device at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from recleak.defenses.base import Defense
from recleak.defenses.spending import NoGuarantee, Spending
from recleak.models import components as parts
from recleak.models.components import Component


@dataclass(frozen=True)
class ShareLess(Defense):
    """Keep components on the device: by default every table with a row per user, as share-less training does."""

    components: tuple[str, ...] | None = None  # None: every per_user component

    def sharing(self, components: tuple[Component, ...]) -> tuple[Component, ...]:
        """The same components, these ones kept."""
        own = [part.name for part in components if part.storage == "per_user"]
        return parts.sharing(components, dict.fromkeys(own if self.components is None else self.components, False))

    def component_names(self) -> Iterable[str]:
        """The components that it keeps, if it names them."""
        return self.components or ()

    def spends(self) -> tuple[Spending, ...]:
        """No guarantee: what is sent is exact."""
        why = "Less is sent, but what is sent is exact: which items a client touched, and how they moved."
        return (NoGuarantee(repr(self), why),)


@dataclass(frozen=True)
class Share(Defense):
    """Send components: by default all, the user table too, as the full model of community detection attacks.

    The opposite of a defense; it states a system's policy in the same words, and what it costs can be compared.
    averaged=False: rows of users are sent, and each client goes on with its own; it does not change how anything is
    trained, also if noise is added to what is sent.
    """

    components: tuple[str, ...] | None = None  # None: every component
    averaged: bool = True

    def sharing(self, components: tuple[Component, ...]) -> tuple[Component, ...]:
        """The same components, these ones shared."""
        chosen = [part.name for part in components] if self.components is None else self.components
        shared = parts.sharing(components, dict.fromkeys(chosen, True))
        if self.averaged:
            return shared
        return tuple(
            replace(part, averaged=False) if part.name in chosen and part.storage == "per_user" else part
            for part in shared
        )

    def component_names(self) -> Iterable[str]:
        """The components that it sends, if it names them."""
        return self.components or ()

    def spends(self) -> tuple[Spending, ...]:
        """No guarantee: it sends more, not less."""
        return (NoGuarantee(repr(self), "It states what is sent, exactly as it is. It protects nothing."),)
