"""The two consoles: results go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.markup import escape

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def say(line: str, *, to: Console = out, style: str | None = None) -> None:
    """One line as it is: no markup, not wrapped, so that paths can be copied."""
    to.print(escape(line), style=style, soft_wrap=True)


def say_json(value: object) -> None:
    """For machines: JSON on standard output, without colors or wrapping."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
