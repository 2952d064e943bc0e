"""HTML that cannot be injected into: what is not `Html` is text, and is escaped where it enters a tag."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeGuard

_VOID = frozenset({"meta", "link", "br", "hr", "col", "line", "circle", "rect", "path", "wbr"})
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # not allowed in a page
MINUS, DASH, NBSP = "\u2212", "\u2013", "\u00a0"


class Html(str):
    """Markup, made here."""

    __slots__ = ()


Content = Html | str | int | None


def text(value: Content) -> Html:
    """Anything as part of a page: markup stays, words are escaped, None is nothing."""
    if isinstance(value, Html):
        return value
    return Html("" if value is None else html.escape(_CONTROL.sub("\ufffd", str(value))))


def tag(element: str, /, *content: Content, **attributes: str | int | float | bool | None) -> Html:
    """An element. `class_` and `for_` lose their underscore, others become dashes; None and False leave one out.

    >>> tag("a", "<b>", href="#x", class_="y")
    '<a href="#x" class="y">&lt;b&gt;</a>'
    """
    given = [
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    ]
    opened = f"<{element}{''.join(given)}>"
    return Html(opened if element in _VOID else f"{opened}{join(content)}</{element}>")


def join(content: Iterable[Content], between: Content = "") -> Html:
    """Several as one."""
    return Html(text(between).join(text(each) for each in content))


def breakable(words: str | None) -> Html:
    """A name that may break where a new word begins.

    >>> breakable("GradientAlignment")
    'Gradient<wbr>Alignment'
    """
    return join(re.split(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[_/.])", words or "?"), Html("<wbr>"))


def script_json(value: Any) -> Html:
    """JSON that can stand inside a script element: no `</script>`, no `<!--`, ASCII only."""
    packed = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Html(packed.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


# --- numbers ----------------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 2, *, sign: bool = False) -> str:
    """A number with so many decimals; a dash if it is unknown.

    >>> number(0.4567), number(None), number(-0.21, sign=True), number(-0.001)
    ('0.46', '–', '−0.21', '0.00')
    """
    if value is None or value != value:
        return DASH
    if not isfinite(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    shown = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    if float(shown) == 0:
        shown = shown.lstrip("+-")
    return shown.replace("-", MINUS)


def interval(low: float | None, high: float | None, digits: int = 2, *, sign: bool = False) -> str:
    """[low, high]; nothing if one of them is unknown."""
    if not known(low) or not known(high):
        return ""
    return f"[{number(low, digits, sign=sign)},{NBSP}{number(high, digits, sign=sign)}]"


def estimate(row: Mapping[str, Any], digits: int = 2, *, sign: bool = False, prefix: str = "") -> str:
    """A value with its interval: the columns `value`, `low` and `high`, or those with a prefix.

    >>> estimate({"value": 0.5, "low": 0.4, "high": 0.6}).replace(NBSP, " ")
    '0.50 [0.40, 0.60]'
    """
    shown = number(row[prefix or "value"], digits, sign=sign)
    lead = f"{prefix.removesuffix('_value')}_" if prefix else ""
    ends = interval(row[f"{lead}low"], row[f"{lead}high"], digits, sign=sign)
    return f"{shown} {ends}" if ends and shown != DASH else shown


def significant(value: float | None, digits: int = 3) -> str:
    """So many significant digits.

    >>> significant(1234.5), significant(0.04), significant(1e-6)
    ('1,230', '0.04', '1e−06')
    """
    if not known(value):
        return number(value)
    rounded = float(f"{value:.{digits}g}")
    shown = f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:g}"
    return shown.replace("-", MINUS)


def probability(p: float | None) -> str:
    """A p-value in words.

    >>> probability(0.00001), probability(0.2), probability(None)
    ('p < 0.001', 'p = 0.200', 'p unknown')
    """
    if not known(p):
        return "p unknown"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def percent(share: float | None, digits: int = 0) -> str:
    """A share of a hundred.

    >>> percent(0.95).replace(NBSP, " "), percent(None)
    ('95 %', '–')
    """
    return f"{100 * share:.{digits}f}{NBSP}%" if known(share) else DASH


def known(value: float | None) -> TypeGuard[float]:
    """Whether it is a number that ends."""
    return value is not None and isfinite(value)


def counted(count: int, one: str, many: str | None = None) -> str:
    """A number of things.

    >>> counted(1, "seed"), counted(2000, "user"), counted(2, "copy", "copies")
    ('1 seed', '2,000 users', '2 copies')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listed(names: Sequence[str], final: str = "and") -> str:
    """Names in a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return f" {final} ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


# --- parts of a page --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A cell of a table with more than words: a class, a tooltip."""

    content: Content
    class_: str | None = None
    hint: str | None = None


def table(
    caption: Content,
    header: Sequence[Content | Cell],
    rows: Iterable[Sequence[Content | Cell]],
    *,
    numbers: int = 0,
    after: int = 0,
    class_: str | None = None,
    above: Html | None = None,
) -> Html:
    """A table in a box that scrolls by itself; the first column names the row, the last `numbers` columns are numbers.

    `after`: so many columns of words follow the numbers. `above`: a row of headers over the header.
    """
    last = len(header) - after
    of_numbers = range(last - numbers, last)

    def cell(element: str, place: int, given: Content | Cell, **attributes: str) -> Html:
        each = given if isinstance(given, Cell) else Cell(given)
        classes = " ".join(filter(None, ["number" if place in of_numbers else None, each.class_]))
        return tag(element, each.content, class_=classes or None, title=each.hint, **attributes)

    top = tag("tr", *(cell("th", place, each, scope="col") for place, each in enumerate(header)))
    body = [
        tag(
            "tr",
            *(
                cell("td", place, each) if place else cell("th", place, each, scope="row")
                for place, each in enumerate(row)
            ),
        )
        for row in rows
    ]
    grid = tag("table", tag("caption", caption), tag("thead", above, top), tag("tbody", *body), class_=class_)
    label = re.sub("<[^>]*>", "", caption or "") if isinstance(caption, Html) else str(caption or "")
    return tag("div", grid, class_="scroll", tabindex=0, role="region", aria_label=html.unescape(label))


def details(summary: Content, *content: Content, class_: str | None = None) -> Html:
    """What is shown on demand."""
    return tag("details", tag("summary", summary), *content, class_=class_)


def paragraph(*content: Content, class_: str | None = None) -> Html:
    """A paragraph."""
    return tag("p", *content, class_=class_)


def bullets(items: Iterable[Content], class_: str | None = None) -> Html:
    """A list."""
    return tag("ul", *(tag("li", item) for item in items), class_=class_)


def section(place: str, title: str, *content: Content) -> Html:
    """A part of the page that the contents link to."""
    return tag("section", tag("h2", title, id=place), *content, aria_labelledby=place)
