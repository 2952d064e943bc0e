"""The page itself. Made of findings alone; all that is not made here is text."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import vl_convert

from recleak.files import replace_text
from recleak.findings import Findings
from recleak.report.exposure import exposed, parts
from recleak.report.leakage import curves, matrix, tradeoff
from recleak.report.markup import Content, Html, counted, join, paragraph, tag
from recleak.report.method import ledger, method
from recleak.report.verdict import verdict
from recleak.report.view import View

_NOTHING = "'none'"
_HEADING = re.compile(r'<h2 id="([a-z]+)">(.*?)</h2>')


def render(findings: Findings) -> str:
    """The report as one HTML page."""
    view = View(findings)
    sections = [make(view) for make in (verdict, tradeoff, matrix, curves, parts, exposed, ledger, method)]
    return whole(
        str(view.about.get("title") or "Audit"), "What a recommender leaks about its users", _facts(view), sections
    )


def write(findings: Findings, path: Path) -> Path:
    """The report as a file, whole or not at all; returns the path."""
    replace_text(path, render(findings))
    return path


def _facts(view: View) -> str:
    """How much was looked at."""
    attacks = {(row["question"], row["attack"]) for row in view.scores if row["role"] not in ("null", "reference")}
    nulls = {(row["question"], row["attack"]) for row in view.scores if row["role"] == "null"}
    users = max((row["users"] for row in view.verdicts if row["users"] is not None), default=None)
    seeds = max((row["seeds"] for row in view.verdicts if row["seeds"] is not None), default=None)
    said = [counted(len(view.systems), "system")] if view.systems else []
    said += [counted(len(attacks), "attack")] if attacks else []
    said += [counted(len(nulls), "guesser")] if nulls else []
    said += [f"up to {counted(users, 'graded user')}"] if users is not None else []
    said += [counted(seeds, "seed")] if seeds is not None else []
    said += [f"recleak {view.about['recleak']}"] if view.about.get("recleak") else []
    return " · ".join(said)


def whole(title: str, kicker: str, facts: str, sections: Sequence[Html]) -> str:
    """A page around its sections: contents, looks, scripts, and a policy that lets nothing in or out.

    Scripts run by their hash and nothing may be compiled at run time. Styles are free, because charts set them on
    their marks; without a source from outside they can show nothing that is not in the page.
    """
    body = join(sections)
    scripts = [_library(), _own("page.js")] if 'class="drawn"' in body else []
    allowed = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in scripts
    )
    policy = (
        f"default-src 'none'; script-src {allowed or _NOTHING}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    contents = [tag("li", tag("a", Html(name), href=f"#{place}")) for place, name in _HEADING.findall(body)]
    page = [
        Html("<!doctype html>"),
        Html('<html lang="en">'),
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("link", rel="icon", href="data:,"),
            tag("title", title),
            tag("style", Html(_own("page.css"))),
        ),
        Html("<body>"),
        tag("a", "Skip to the content", href="#main", class_="skip"),
        Html('<div class="page">'),
        tag("header", *_top(title, kicker, facts, bool(scripts))),
        tag("nav", tag("div", paragraph("Contents"), tag("ol", *contents)), aria_label="Contents"),
        tag("main", body, id="main", tabindex=-1),
        tag("footer", paragraph("Made by recleak from findings alone. This page asks for nothing from any network.")),
        Html("</div>"),
        *(tag("script", Html(each)) for each in scripts),
        Html("</body></html>"),
    ]
    return "\n".join(page) + "\n"


def _top(title: str, kicker: str, facts: str, drawn: bool) -> list[Content]:
    off = "The charts need JavaScript, which is switched off. Below each place there is the same as a table."
    return [
        paragraph(kicker, class_="kicker"),
        tag("h1", title),
        paragraph(facts, class_="facts") if facts else None,
        tag("noscript", tag("p", off, class_="scope")) if drawn else None,
    ]


@cache
def _library() -> str:
    """Vega, Vega-Lite and its loader, as Altair's own pages have them, fit to stand in a script element."""
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("\r\n", "\n").replace("</script", r"<\/script").replace("<!--", r"<\!--")


@cache
def _own(name: str) -> str:
    return files("recleak.report").joinpath(name).read_text(encoding="utf-8")
