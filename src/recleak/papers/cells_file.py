"""The cells of a reproduction as JSON: to publish them, and to go on from what was published."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recleak.errors import NotFoundError
from recleak.files import read_json
from recleak.papers.base import Paper
from recleak.papers.store import Ours, StoreError

if TYPE_CHECKING:
    from recleak.papers.render import Report


def as_json(report: Report) -> list[dict[str, Any]]:
    """One object per cell; null where nothing is known, and for an end of an interval that is not bounded."""
    rows = []
    for table, cells in report.tables():
        for cell, ours in cells.values():
            rows.append(
                {
                    "table": table.id,
                    "cell": table.full(cell),
                    "row": cell.row,
                    "column": cell.column,
                    "metric": cell.metric or cell.series or "ratio",
                    "variant": report.results.variant,
                    "code": report.results.code,
                    "published": cell.published,
                    "ours": _finite(ours.value),
                    "low": _finite(ours.low),
                    "high": _finite(ours.high),
                    "users": ours.users,
                    "seeds": ours.seeds,
                    "seconds": round(ours.seconds, 2),
                    **({"series": ours.curve} if cell.series is not None else {}),
                }
            )
    return rows


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def from_json(path: Path, paper: Paper, code: int, variant: str) -> dict[str, Ours]:
    """The measured cells of a variant by their full id; what another version of the runner measured does not count."""
    try:
        if not path.exists():
            raise NotFoundError(f"{path}: no such file, expected cells as `recleak reproduce --json` writes.")
        rows = read_json(path)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: no JSON ({error}), expected cells as `recleak reproduce --json` writes.") from error
    try:
        found = {}
        for row in rows:
            cell = paper.cells.get(row["cell"]) if row["code"] == code and row["seeds"] else None
            if cell is not None and row["variant"] in (variant, paper.measured_as(cell.run, variant)):
                found[row["cell"]] = _ours(row)
        return found
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StoreError(
            f"{path}: a cell cannot be read ({error!r:.200}), expected cells as `recleak reproduce --json` writes."
        ) from error


def _ours(row: dict[str, Any]) -> Ours:
    value, low, high = (None if row[name] is None else _number(row[name]) for name in ("ours", "low", "high"))
    curve = [(_number(x), _number(y)) for x, y in row.get("series", ())]
    return Ours(value, low, high, _count(row["users"]), _count(row["seeds"]), _number(row["seconds"]), curve)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not isfinite(number := float(value)):
        raise ValueError(f"got {value!r:.40}, expected a number")
    return number


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(f"got {value!r:.40}, expected a whole number")
    return value
