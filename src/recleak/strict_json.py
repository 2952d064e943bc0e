"""JSON of strangers: plain, not too deep, no key twice. Nothing here opens a file."""

from __future__ import annotations

import json
from typing import Any

_DEEPEST = 100  # levels of nesting


def parse_json(text: str | bytes, *, constants: bool = False) -> Any:
    """JSON of a stranger: a ValueError for whatever is no plain JSON.

    That is also what JSON has no word for (NaN and Infinity, unless `constants`), a key that stands twice in an object,
    and nesting too deep to be meant.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=None if constants else _no_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    _check_depth(value, _DEEPEST)
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name[:80]!r} stands twice in an object")
        found[name] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _check_depth(value: Any, left: int) -> None:
    if left == 0:
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(each, dict | list):
            _check_depth(each, left - 1)
