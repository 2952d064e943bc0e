"""The report: what it says, that names stay text, that nothing leaves the page, and how it looks in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Page, sync_playwright

from recleak.errors import ConfigError
from recleak.files import WriteError
from recleak.findings import SYSTEM, TABLES, Findings
from recleak.report import charts, compare, matrix, page, render, write
from recleak.report.markup import Html, script_json, tag
from recleak.report.view import System, View
from report_sample import COMMENT, DATA, DEFENSES, IMAGE, QUESTION, SCRIPT, big, empty, sample

LIMIT = 2_000_000  # bytes of a page
SECTIONS = ["verdict", "tradeoff", "matrix", "curves", "parts", "exposed", "ledger", "method"]
VOID = {"meta", "link", "br", "hr", "line", "wbr"}


@dataclass
class Element:
    """A node of a parsed page."""

    name: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    def every(self, *names: str) -> list[Element]:
        """All elements below with one of the names (any, if none is given), in order."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                found += ([child] if child.name in names or not names else []) + child.every(*names)
        return found

    def having(self, class_: str) -> list[Element]:
        return [each for each in self.every() if class_ in each.attributes.get("class", "").split()]

    def at(self, place: str) -> Element:
        """The section whose heading has this id."""
        return next(each for each in self.every("section") if each.attributes["aria-labelledby"] == place)

    @property
    def text(self) -> str:
        return "".join(each if isinstance(each, str) else each.text for each in self.children)

    @property
    def words(self) -> str:
        """The text, with single spaces."""
        return " ".join(self.text.split())

    @property
    def cells(self) -> list[list[str]]:
        """The body of a table."""
        return [[cell.words for cell in row.every("th", "td")] for row in self.every("tbody")[0].every("tr")]


class _Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {name: value or "" for name, value in attrs})
        assert len(made.attributes) == len(attrs), f"an attribute twice: {attrs}"
        self.open[-1].children.append(made)
        if tag not in VOID:
            self.open.append(made)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().name == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data[:80]}")


def parsed(text: str) -> Element:
    """The tree of a page; every tag must be closed, in order."""
    tree = _Tree()
    tree.feed(text)
    tree.close()
    assert len(tree.open) == 1
    return tree.open[0]


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the drawing library: it takes seconds to bundle, and says nothing about findings."""
    monkeypatch.setattr(page, "_library", lambda: "/* library */")


@pytest.fixture(scope="module")
def made() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "_library", lambda: "/* library */")
        return render(sample())


@pytest.fixture(scope="module")
def tree(made: str) -> Element:
    return parsed(made)


def one(**rows: list[dict[str, Any]]) -> Findings:
    """Findings of one system; what is not given is null."""
    system = {"data": "d", "model": "m", "protocol": "p", "defense": "none"}
    filled = {
        name: [{**dict.fromkeys(TABLES[name]), **system, "question": QUESTION, **row} for row in each]
        if "question" in TABLES[name]
        else [{**dict.fromkeys(TABLES[name]), **system, **row} for row in each]
        for name, each in rows.items()
    }
    return Findings.of({"title": "One"}, filled)


VALUE = {"value": 0.9, "low": 0.85, "high": 0.95, "users": 50, "seeds": 2}
VERDICT = {**VALUE, "attack": "A", "null": "N", "null_value": 0.6, "null_low": 0.5, "null_high": 0.7, "excess": 0.3}
VERDICT |= {"excess_low": 0.2, "excess_high": 0.4, "verdict": "leaks", "words": "It is told.", "candidates": 2}


# --- structure --------------------------------------------------------------------------------------------------------


def test_sections_stand_in_order_and_the_contents_link_to_them(tree: Element) -> None:
    assert [heading.attributes["id"] for heading in tree.every("h2")] == SECTIONS
    links = tree.every("nav")[0].every("a")
    assert [link.attributes["href"] for link in links] == [f"#{place}" for place in SECTIONS]
    assert [link.words for link in links] == [heading.words for heading in tree.every("h2")]


def test_headings_are_ordered_and_landmarks_are_there(tree: Element) -> None:
    levels = [int(each.name[1]) for each in tree.every("h1", "h2", "h3", "h4")]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert tree.every("html")[0].attributes["lang"] == "en"
    assert [len(tree.every(name)) for name in ("header", "nav", "main", "footer")] == [1, 1, 1, 1]
    places = [each.attributes["id"] for each in tree.every() if "id" in each.attributes]
    assert len(places) == len(set(places))


def test_tables_have_captions_and_scopes(tree: Element) -> None:
    assert len(tree.every("table")) > 20
    for each in tree.every("table"):
        assert each.every("caption")[0].words
        assert all(cell.attributes.get("scope") in ("col", "row", "colgroup") for cell in each.every("th"))
        columns = each.every("thead")[0].every("tr")[-1].every("th")
        assert {len(row) for row in each.cells} == {len(columns)}
    boxes = tree.having("scroll")
    assert len(boxes) == len(tree.every("table"))
    assert all(box.attributes["tabindex"] == "0" and box.attributes["aria-label"] for box in boxes)


def test_every_chart_has_words_a_caption_and_a_table(tree: Element) -> None:
    figures = tree.having("drawn")
    assert len(figures) >= 10
    for each in figures:
        (place,) = each.having("chart")
        assert place.attributes["role"] == "img"
        assert re.search(r"\d\.\d", place.attributes["aria-label"])
        assert each.every("figcaption")[0].words
        assert each.every("details")[0].every("table")
        assert json.loads(each.every("script")[0].text)["layer"]


def test_the_same_findings_give_the_same_page(no_library: None) -> None:
    findings = one(verdicts=[VERDICT], utility=[{"recommender": "m", "metric": "hit@10", **VALUE}])
    assert render(findings) == render(findings)


# --- what it says -----------------------------------------------------------------------------------------------------


def test_verdicts_are_words_before_anything_else(tree: Element) -> None:
    first = tree.at("verdict")
    assert first.having("lead")[0].words == (
        "It leaks. In 8 of 11 cases an adversary learns more about users than a guesser does. "
        "1 case could not be measured."
    )
    cards = first.having("card")
    assert len(cards) == 12
    assert [each.words for each in first.having("badge")].count("▲ Leaks") == 8
    assert [each.words for each in first.having("badge")].count("○ No leak found") == 3
    assert [each.words for each in first.having("badge")].count("– Not measured") == 1
    assert "tells a user’s own items from others with AUC 0.98 [0.97, 0.99]" in cards[0].words
    assert "Beyond the best guesser (Popularity): +0.13 [+0.11, +0.14]." in cards[0].words
    assert "honest but curious" in first.words
    assert "out of scope" in first.words


def test_defenses_are_judged_by_the_corrected_p(tree: Element) -> None:
    items = [each.words for each in tree.at("verdict").every("li")]
    (noise,) = {each for each in items if each.startswith("noise 0.1")}
    assert "lowers leakage (membership: AUC −0.055 [−0.067, −0.043], p < 0.001)" in noise
    assert "does not clearly change utility (hit@10 −0.011 [−0.023, +0.001], p = 0.930)" in noise
    assert any("lowers utility (hit@10 −0.067" in each for each in items)


def test_a_p_that_is_small_before_the_correction_only_is_no_change(no_library: None) -> None:
    row = {**VALUE, "value": -0.1, "reference": "r", "attack": "A", "metric": "auc", "p": 0.001, "p_holm": 0.06}
    words = parsed(render(one(verdicts=[VERDICT], comparisons=[row]))).at("verdict").words
    assert "does not clearly change leakage" in words
    assert "lowers" not in words


@pytest.mark.parametrize(
    ("verdict", "lead"),
    [("leaks", "It leaks."), ("not found", "No leak was found."), ("not measured", "Nothing was measured.")],
)
def test_the_first_words_follow_the_verdict(no_library: None, verdict: str, lead: str) -> None:
    first = parsed(render(one(verdicts=[{**VERDICT, "verdict": verdict}]))).at("verdict")
    assert first.having("lead")[0].words.startswith(lead)
    assert "one defense only" in first.words


def test_a_self_test_says_so_first(no_library: None) -> None:
    findings = one(verdicts=[VERDICT])
    shuffled = parsed(render(Findings({**findings.about, "self_test": True}, **findings.tables)))
    notice = shuffled.at("verdict").every()[1]
    assert notice.attributes["class"] == "notice"
    assert "labels were shuffled" in notice.words
    assert "1 of 1 verdict says “leaks” still" in notice.words
    assert not shuffled.having("lead")
    assert not parsed(render(findings)).having("notice")


def test_the_matrix_colors_numbers_and_gives_reasons(tree: Element) -> None:
    heat = tree.at("matrix").having("heat")[0]
    rows = {row.every("th")[0].words: row.every("td") for row in heat.every("tbody")[0].every("tr")}
    assert list(rows) == list(DEFENSES)
    alignment, _, k_means, sums, *nulls = rows["none"]
    assert (alignment.words, alignment.attributes["class"]) == ("0.98", "h10 chosen")
    assert (k_means.words, k_means.attributes["class"]) == ("0.72", "h7")
    assert sums.attributes["class"] == "void"
    assert sums.attributes["title"] == "AlignmentOfSums on none: this attack reads sums; here every upload is seen"
    assert "this attack reads sums" in sums.words
    assert [each.attributes["class"] for each in nulls] == ["h9 apart", "h5", "h5"]
    assert "chosen" in rows["secure aggregation"][3].attributes["class"]
    table = tree.at("matrix").every("details")[0].every("table")[0]
    assert sum("behind secure aggregation" in row[-1] for row in table.cells) == 3


def test_rates_at_few_false_alarms_stand_in_a_table(tree: Element) -> None:
    table = next(each for each in tree.at("curves").every("table") if "TPR" in each.every("caption")[0].words)
    assert [cell.words for cell in table.every("thead")[0].every("th")][2:] == ["TPR at 1 % FPR", "TPR at 0.1 % FPR"]
    assert table.cells[0][1] == "GradientAlignment (attack)"
    assert table.cells[0][2].startswith("49.2 % [")
    assert table.cells[1][1:] == ["Popularity (best guesser)", table.cells[1][2], "too few to tell"]


def test_the_most_exposed_users_are_named_and_no_others(tree: Element, made: str) -> None:
    (table, _) = [
        each for each in tree.at("exposed").every("table") if "most exposed" in each.every("caption")[0].words
    ]
    assert len(table.cells) == 10
    assert table.cells[0][0] == f"0 {IMAGE}{COMMENT}"
    assert table.cells[0][1:4] == ["20", "1.00", "100 %"]
    ranks = sample().risk.filter((pl.col("model") == "Fed-NCF") & (pl.col("defense") == "none"))
    best = ranks.filter(pl.col("attack") == "GradientAlignment").group_by("user").agg(pl.col("rank").min())
    assert {row[0] for row in table.cells} <= set(best.filter(pl.col("rank") <= 10)["user"])


@pytest.mark.parametrize(
    ("question", "metric", "heading", "axis"),
    [
        ("community", "bound", "Who is found in communities", "share of the adversaries of its community who find"),
        ("faith", "accuracy", "Who is found: faith", "share of the adversaries who find a user"),
        ("gender", "macro-f1", "Of whom it is told: gender", "probability given to what is true of a user"),
    ],
)
def test_people_without_an_auc_of_their_own_are_exposed_too(
    no_library: None, question: str, metric: str, heading: str, axis: str
) -> None:
    scores = [
        {**VALUE, "question": question, "attack": "A", "role": "attack", "metric": each} for each in ("auc", metric)
    ]
    risk = [
        {"question": question, "attack": "A", "seed": 0, "user": f"u{rank}", "activity": 7, "rank": rank}
        | {"exposed": None if rank == 31 else 1 - (rank - 1) / 30}
        for rank in range(1, 32)
    ]
    made = render(one(verdicts=[{**VERDICT, "question": question}], scores=scores, risk=risk))
    section = parsed(made).at("exposed")
    assert [each.words for each in section.every("h3")] == [heading]
    assert axis in made
    numbers, named = section.every("table")
    assert numbers.cells[0] == ["none", "30", "51.7 %", "13 %", "52 %", "90 %", "53 %", "0 %"]
    assert len(named.cells) == 10
    assert named.cells[0] == ["u1", "7", "100 %"]
    assert "AUC" not in named.text


def test_how_much_of_a_community_is_found_stands_beside_the_bound(no_library: None) -> None:
    names = ("auc", "accuracy", "bound", "accuracy@best", "accuracy@chosen", "accuracy@10%")
    key = {"question": "community", "attack": "A", "role": "attack"}
    scores = [{**VALUE, **key, "metric": name, "value": 0.5 + place / 10} for place, name in enumerate(names)]
    page = parsed(render(one(verdicts=[{**VERDICT, "question": "community"}], scores=scores)))
    (table,) = [each for each in page.at("parts").every("table") if "How much of a community" in each.text]
    assert table.cells[0][:2] == ["none", "A"]
    assert [cell[:5] for cell in table.cells[0][2:6]] == ["0.600", "0.700", "0.800", "0.900"]
    assert "accuracy, best round by the truth" in table.text
    assert "accuracy, round chosen without the truth" in table.text
    assert table.cells[0][-1] == "–", "what was not measured is a dash"


def test_parts_that_were_not_measured_say_why(tree: Element) -> None:
    tables = [each for each in tree.at("parts").every("table") if "component" in each.every("caption")[0].words]
    assert ["user", "none", "–", "not sent: the client keeps it"] in tables[0].cells
    captions = [each.words for each in tree.at("parts").every("figcaption")]
    assert any("Attack: KMeans." in each for each in captions)  # not the chosen one, but the one that was split


def test_the_ledger_says_where_there_is_no_guarantee(tree: Element) -> None:
    ledger = tree.at("ledger")
    rows = {row[0]: row for row in ledger.every("table")[0].cells}
    kept = rows[f"{DATA} · Fed-NCF · federated · noise 0.1"]
    assert kept[2:5] == ["1.04", "12.3δ = 1e−05, 40 uses", "2.31200 canaries, 95 % sure"]
    assert rows[f"{DATA} · Fed-LightGCN · federated · noise 0.1"][3] == "no guarantee"  # infinite
    assert rows[f"{DATA} · Fed-NCF · federated · secure aggregation"][2:5] == ["nothing", "no guarantee", "–"]
    assert f"No guarantee is known of {DATA} · Fed-NCF · federated · proximal" in ledger.words


def test_the_configuration_is_exact(tree: Element) -> None:
    blocks = [each.every("code")[0].text for each in tree.at("method").every("pre")]
    assert blocks[0] == sample().about["command"]
    assert json.loads(blocks[-1]) == sample().about["experiment"]
    assert any("facts: popularity, which defense is in force" in each for each in blocks)
    assert "2.13.0" in tree.at("method").words


# --- nothing, or nulls ------------------------------------------------------------------------------------------------


def test_without_findings_every_section_says_so() -> None:
    bare = parsed(render(empty()))
    assert [heading.attributes["id"] for heading in bare.every("h2")] == SECTIONS
    assert all(len(bare.at(place).words) > 30 for place in SECTIONS)
    assert not bare.every("script", "table")
    assert "script-src 'none'" in bare.every("meta")[1].attributes["content"]


def test_rows_without_a_single_value_are_shown(no_library: None) -> None:
    rows = {name: [dict.fromkeys(schema)] for name, schema in TABLES.items()}
    words = parsed(render(Findings.of({}, rows))).words
    assert "Not measured" in words
    assert "None" not in words
    assert "nan" not in words


def test_infinite_and_missing_numbers_reach_no_chart(no_library: None) -> None:
    odd = {"low": float("-inf"), "high": float("nan")}
    part = {"attack": "A", "kind": "round", "part": "1", "x": 1.0, **VALUE, **odd}
    findings = one(
        verdicts=[{**VERDICT, **odd}],
        utility=[{"recommender": "m", "metric": "hit@10", **VALUE, **odd}],
        parts=[part, {**part, "kind": "component", "part": "item"}, {**part, "value": float("nan"), "x": 2.0}],
        roc=[{"attack": "A", "role": "attack", "seed": 0, "fpr": x, "tpr": x} for x in (0.0, 0.5, float("nan"), 1.0)],
        risk=[{"attack": "A", "seed": 0, "user": "u", "auc": x, "rank": 1} for x in (0.5, float("nan"), None)],
    )
    tree = parsed(render(findings))
    assert len(tree.having("drawn")) == 5
    assert "nan" not in "".join(script.words for script in tree.every("script"))


def test_one_system_needs_no_heading_of_its_own(no_library: None) -> None:
    tree = parsed(render(one(verdicts=[VERDICT], utility=[{"recommender": "m", "metric": "hit@10", **VALUE}])))
    assert not tree.at("tradeoff").every("h3")


# --- safety -----------------------------------------------------------------------------------------------------------


def test_names_stay_text(tree: Element, made: str) -> None:
    assert not tree.every("img")
    assert SCRIPT not in made
    assert IMAGE not in made
    assert COMMENT not in made
    assert tree.every("title")[0].words == sample().about["title"]
    assert tree.every("h1")[0].words == sample().about["title"]
    assert any(DATA in each.words for each in tree.every("h3"))
    ours = "aria-hidden aria-label aria-labelledby charset class colspan content href http-equiv id lang name rel role "
    ours += "scope stroke stroke-dasharray stroke-width style tabindex title type viewbox x1 x2 y1 y2"
    assert {key for each in tree.every() for key in each.attributes} <= set(ours.split())


def test_nothing_asks_the_network(tree: Element, made: str) -> None:
    sources = [
        each.attributes[key] for each in tree.every() for key in ("src", "href", "action") if key in each.attributes
    ]
    assert all(each.startswith("#") or each == "data:," for each in sources)
    styles = tree.every("style")[0].words + "".join(each.attributes.get("style", "") for each in tree.every())
    assert not re.search(r"@import|@font-face|url\(|https?:", styles)
    assert not tree.every("iframe", "object", "embed", "base", "form", "img", "audio", "video")


def test_scripts_run_by_their_hash_only(tree: Element) -> None:
    (policy,) = [each.attributes["content"] for each in tree.every("meta") if "http-equiv" in each.attributes]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    code = [each for each in tree.every("script") if "type" not in each.attributes]
    digests = [hashlib.sha256(each.text.encode()).digest() for each in code]
    assert rules["script-src"].split() == [f"'sha256-{base64.b64encode(each).decode()}'" for each in digests]
    assert {each.attributes["type"] for each in tree.every("script") if each not in code} == {"application/json"}
    assert "connect-src" not in rules  # nothing may be fetched: the default holds


HOSTILE = st.text(st.sampled_from("<>&\"'/!-=a \x00") | st.characters())


@given(HOSTILE)
def test_any_text_survives_as_text(text: str) -> None:
    inner = parsed(tag("p", text, title=text)).every("p")[0]
    allowed = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)
    assert inner.text == allowed
    assert inner.attributes["title"] == allowed


@given(st.recursive(st.none() | st.booleans() | st.integers() | HOSTILE, st.lists, max_leaves=5))
def test_json_in_a_script_is_inert_and_exact(value: Any) -> None:
    packed = script_json(value)
    assert json.loads(packed) == value
    assert not set("<>&") & set(packed)
    assert packed.isascii()


def test_markup_is_not_escaped_twice() -> None:
    assert tag("p", tag("b", "<&"), Html("<i></i>"), None) == "<p><b>&lt;&amp;</b><i></i></p>"


# --- size and files ---------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_pages_stay_small() -> None:
    assert len(render(sample()).encode()) < LIMIT
    assert len(render(big()).encode()) < LIMIT


@pytest.mark.heavy
def test_more_users_and_longer_curves_make_no_larger_page(no_library: None) -> None:
    few, many = render(big(4, 2, 2_000, 400)), render(big(4, 2, 50_000, 4_000))
    assert len(many) < 1.1 * len(few)


def test_a_page_is_written_whole_or_not_at_all(
    no_library: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "report.html"
    assert write(empty(title="First é"), path) == path
    first = path.read_text(encoding="utf-8")
    assert "First é" in first

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(WriteError, match="No space"):
        write(empty(title="Second"), path)
    assert path.read_text(encoding="utf-8") == first
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]


# --- charts -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=8))
def test_the_front_is_what_nothing_dominates(points: list[tuple[float, float]]) -> None:
    for (x, y), front in zip(points, charts.pareto(points), strict=True):
        dominated = [(a, b) for a, b in points if (a > x and b <= y) or (a >= x and b < y)]
        assert front == (not dominated)


@given(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=200), st.integers(2, 30))
def test_the_share_of_users_at_least_so_exposed(values: list[float], points: int) -> None:
    found = charts.survival(np.array(values, np.float64), points)
    assert len(found) <= points
    assert found[0] == (min(values), 1.0)
    assert found[-1][0] == max(values)
    for value, share in found:
        assert share == pytest.approx(np.mean(np.array(values) >= value))


@given(st.integers(1, 300), st.integers(2, 50))
def test_thinned_curves_keep_their_ends_and_invent_nothing(length: int, points: int) -> None:
    rng = np.random.default_rng(length)
    fpr, tpr = np.sort(rng.integers(0, 50, length) / 50), np.sort(rng.integers(0, 50, length) / 50)
    kept = charts.thinned(fpr, tpr, points)
    visible = np.flatnonzero((fpr > 0) & (tpr > 0))
    assert len(kept) <= max(points, 0)
    assert set(kept) <= set(visible)
    if len(visible):
        assert (fpr[kept[-1]], tpr[kept[-1]]) == (fpr[-1], tpr[-1])
        assert kept[0] == visible[0]


def test_defenses_look_the_same_in_all_charts_and_differ(tree: Element) -> None:
    looks: dict[str, set[str]] = {}
    for each in tree.having("legend"):
        for item in each.every("li"):
            for line in item.every("line"):
                looks.setdefault(item.words, set()).add(
                    line.attributes["stroke"] + line.attributes.get("stroke-dasharray", "")
                )
    assert [len(looks[name]) for name in DEFENSES] == [1, 1, 1, 1]
    many = charts.series_of(map(str, range(32)))
    assert len({(each.color, each.dash) for each in many}) == 32


def test_baselines_of_the_setting_are_reference_lines(tree: Element) -> None:
    (spec, *_) = [json.loads(each.every("script")[0].text) for each in tree.at("tradeoff").having("drawn")]
    sets = [
        [dict(zip(each["columns"], row, strict=True)) for row in each["rows"]] for each in spec["datasets"].values()
    ]
    lines = next(rows for rows in sets if rows[0].get("label") == "chance")
    assert {row["label"]: row["x"] for row in lines} == {"chance": 0.1, "MostPop": 0.262, "ItemKNN": 0.423}
    points = next(rows for rows in sets if "letter" in rows[0])
    assert [(row["letter"], row["front"]) for row in points] == [("A", True), ("B", False), ("C", False), ("D", True)]


def test_no_number_of_systems_is_too_many_for_a_chart() -> None:
    marks = charts.series_of(f"defense {place}" for place in range(100))
    rows = [{"series": mark.label, "exposure": x / 80, "share": 0.5} for mark in marks for x in range(80)]
    (packed,) = [each for each in charts.exposure(rows, marks)["datasets"].values() if "share" in each["columns"]]
    assert len(packed["rows"]) == 8000


def test_baselines_of_other_data_are_not_taken() -> None:
    own = {"recommender": "m", "metric": "hit@10", **VALUE}
    other = [{**own, "data": "other"}, {**own, "data": "other", "recommender": "MostPop", "value": 0.7}]
    view = View(one(verdicts=[VERDICT], utility=[own, {**own, "recommender": "chance", "value": 0.1}, *other]))
    assert [view.baselines(setting) for setting in view.settings] == [{"chance": 0.1}, {"MostPop": 0.7}]


def test_the_reference_is_what_comparisons_say_if_it_is_there() -> None:
    rows = [{"defense": name, "reference": "b", "metric": "auc"} for name in ("a", "c")]
    verdicts = [{**VERDICT, "defense": name} for name in ("a", "b", "c")]
    named, unknown = View(one(verdicts=verdicts, comparisons=rows)), View(one(verdicts=verdicts[::2], comparisons=rows))
    assert [view.reference(view.settings[0]) for view in (named, unknown)] == ["b", "a"]


def luminance(color: str) -> float:
    """Of #rrggbb (WCAG 2.2)."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_all_pairs_of_ink_and_ground_can_be_read_in_light_and_dark() -> None:
    """4.5 to 1 at least (WCAG 2.2, 1.4.3), for colors that a sample may not use too."""
    style = parsed(render(empty())).every("style")[0].text
    light, dark = (
        dict(re.findall(r"--(\w+(?:-\w+)?): (#\w{6})", part))
        for part in style.split("(prefers-color-scheme: dark)")[:2]
    )
    pairs = [("ink", f"d{step}") for step in range(11)] + [("paper", f"c{place}") for place in range(8)]
    pairs += [(ink, f"{ink}-soft") for ink in ("bad", "good", "none", "warn")]
    pairs += [(ink, ground) for ink in ("ink", "soft", "faint", "link") for ground in ("paper", "panel")]
    for colors in (light, dark):
        for ink, ground in pairs:
            one, other = sorted([luminance(colors[ink]), luminance(colors[ground])])
            assert (other + 0.05) / (one + 0.05) >= 4.5, (ink, colors[ink], ground, colors[ground])


# --- runs side by side ------------------------------------------------------------------------------------------------


def shifted(findings: Findings, by: float, **about: Any) -> Findings:
    """The same with other verdicts and settings."""
    moved = findings.verdicts.with_columns(pl.col("value", "low", "high") - by)
    experiment = {**findings.about["experiment"], "training": {"rounds": 80}}
    return Findings({**findings.about, "experiment": experiment, **about}, **{**findings.tables, "verdicts": moved})


def test_runs_stand_side_by_side(no_library: None) -> None:
    first = sample(users=20, points=20)
    tree = parsed(compare([("a", first), (f"b {SCRIPT}", shifted(first, 0.1)), ("c", shifted(first, 0.001))]))
    assert [heading.attributes["id"] for heading in tree.every("h2")] == ["overview", "leakage", "utility", "settings"]
    table = tree.at("leakage").every("table")[0]
    row = next(row for row in table.cells if row[0] == "none, membership")
    assert row[1:] == [
        "0.98 [0.97, 0.99]▲ Leaks",
        "0.89 [0.88, 0.90]▲ Leaks",
        "0.98 [0.97, 0.99]▲ Leaks",
        "−0.100 ◆ intervals apart",
        "−0.001",
    ]
    utility = tree.at("utility").every("table")[0].cells[0]
    assert utility == ["none", *["0.402 [0.384, 0.420]"] * 3, "0.000", "0.000"]
    settings = {row[0]: row[1:] for row in tree.at("settings").every("table")[0].cells}
    assert settings["training.rounds"] == ["40", "80", "80"]
    assert settings["training.use"] == ["federated.Federated", "not there", "not there"]
    assert "seeds.0" not in settings


def test_a_system_that_a_run_does_not_have_is_a_dash(no_library: None) -> None:
    first = one(verdicts=[VERDICT])
    other = Findings.of({}, {"verdicts": first.verdicts.with_columns(pl.lit("noise").alias("defense"))})
    cells = parsed(compare([("a", first), ("b", other)])).at("leakage").every("table")[0].cells
    assert [row[1:] for row in cells] == [
        ["0.90 [0.85, 0.95]▲ Leaks", "–", "–"],
        ["–", "0.90 [0.85, 0.95]▲ Leaks", "–"],
    ]


def test_nothing_can_be_compared_with_nothing() -> None:
    assert "No run has a verdict." in compare([("a", empty()), ("b", empty())])


@pytest.mark.parametrize("names", [[], ["a"], ["a", "a"]])
def test_runs_to_compare_must_be_told_apart(names: list[str]) -> None:
    with pytest.raises(ValueError, match="expected at least two with different names"):
        compare([(name, empty()) for name in names])


# --- in a browser -----------------------------------------------------------------------------------------------------


@dataclass
class Opened:
    """A page in a browser, and all that happened while it was drawn."""

    page: Page
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)


Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no program `chromium` on the path: pages are not looked at in a browser")
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    runs = folder / "runs.html"
    runs.write_text(compare([(SCRIPT, sample(users=20)), ("b", sample(users=20))]), encoding="utf-8")
    return {
        "report": write(sample(), folder / "report.html"),
        "big": write(big(), folder / "big.html"),
        "runs": runs,
        "empty": write(empty(), folder / "empty.html"),
    }


@pytest.fixture
def open_page(browser: Browser, files: dict[str, Path]) -> Iterator[Open]:
    contexts: list[BrowserContext] = []

    def opened(name: str = "report", *, width: int = 1280, **options: Any) -> Opened:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        found = Opened(context.new_page())

        def heard(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                found.problems.append(message.text)

        def asked(dialog: Dialog) -> None:
            found.dialogs.append(dialog.message)
            dialog.dismiss()

        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("console", heard)
        found.page.on("pageerror", lambda error: found.problems.append(str(error)))
        found.page.on("dialog", asked)
        found.page.goto(files[name].as_uri())
        if options.get("java_script_enabled", True) and found.page.locator("figure.drawn").count():
            found.page.wait_for_selector("html[data-charts=done]", state="attached", timeout=120_000)
        return found

    yield opened
    for each in contexts:
        each.close()


def sizes(page: Page) -> list[tuple[float, float]]:
    """Of all charts that were drawn."""
    boxes = [each.bounding_box() for each in page.locator(".chart svg").all()]
    return [(box["width"], box["height"]) for box in boxes if box is not None]


def color(page: Page, selector: str, name: str) -> str:
    return str(page.locator(selector).first.evaluate(f"each => getComputedStyle(each).{name}"))


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["report", "big", "runs", "empty"])
def test_charts_are_drawn_and_nothing_is_asked_for(open_page: Open, files: dict[str, Path], name: str) -> None:
    opened = open_page(name)
    assert len(sizes(opened.page)) == opened.page.locator("figure.drawn").count()
    assert all(width > 300 and height > 80 for width, height in sizes(opened.page))
    assert (len(sizes(opened.page)) > 0) == (name != "empty")
    assert opened.problems == []
    assert opened.dialogs == []
    assert opened.requests == [files[name].as_uri()]


@pytest.mark.heavy
def test_lines_dots_and_labels_are_in_the_charts(open_page: Open) -> None:
    page = open_page().page
    for place in ("tradeoff", "curves", "parts", "exposed"):
        section = page.locator(f"section[aria-labelledby={place}]")
        assert section.locator(".mark-line path, .mark-symbol path").count() > 4, place
    points = page.locator("section[aria-labelledby=tradeoff] .chart").first
    shown = points.locator("text").all_text_contents()
    assert {"A", "B", "C", "D", "none", "MostPop", "ItemKNN", "chance"} <= set(shown)
    assert points.locator(".mark-rule line").count() >= 4 * 2 + 3 + 1  # two intervals each, baselines, a coin


@pytest.mark.heavy
def test_hostile_names_do_nothing_even_in_a_tooltip(open_page: Open) -> None:
    opened = open_page()
    point = opened.page.locator("section[aria-labelledby=tradeoff] .mark-symbol path").nth(2)
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    assert box is not None
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = opened.page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    assert IMAGE in tip.inner_text().replace("\n", " ")
    for summary in opened.page.locator("summary").all():
        summary.click()
    assert opened.page.locator("img").count() == 0
    assert opened.page.locator("script:not([type])").count() == 2
    assert opened.dialogs == []
    assert opened.problems == []


@pytest.mark.heavy
def test_it_is_dark_where_the_reader_likes_it_dark(open_page: Open) -> None:
    light, dark = (open_page(color_scheme=scheme).page for scheme in ("light", "dark"))
    assert color(light, "body", "backgroundColor") == "rgb(253, 252, 250)"
    assert color(dark, "body", "backgroundColor") == "rgb(20, 23, 27)"
    for selector, name in ((".chart svg .role-axis-label text", "fill"), (".chart svg .mark-line path", "stroke")):
        assert color(light, selector, name) != color(dark, selector, name)
    dark.emulate_media(media="print")
    assert color(dark, "body", "backgroundColor") == "rgb(255, 255, 255)"
    assert color(dark, ".chart svg .mark-line path", "stroke") == color(light, ".chart svg .mark-line path", "stroke")


@pytest.mark.heavy
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_is_easy_to_tell_from_its_ground(open_page: Open, scheme: str) -> None:
    """4.5 to 1 at least (WCAG 2.2, 1.4.3)."""
    page = open_page(color_scheme=scheme).page
    for summary in page.locator("summary").all():
        summary.click()
    low = page.evaluate(
        """() => {
          const luminance = ([r, g, b]) => [r, g, b].map((v) => v / 255)
            .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
            .reduce((sum, v, place) => sum + v * [0.2126, 0.7152, 0.0722][place], 0);
          const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
          const ground = (each) => {
            for (let node = each; node; node = node.parentElement) {
              const found = numbers(getComputedStyle(node).backgroundColor);
              if (found.length < 4 || found[3] > 0) return found;
            }
          };
          const found = [];
          for (const each of document.querySelectorAll("body *:not(script)")) {
            const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
            if (!own || !each.checkVisibility()) continue;
            const look = getComputedStyle(each);
            const inChart = each.closest(".chart");
            const ink = luminance(numbers(inChart ? look.fill : look.color));
            const back = luminance(ground(inChart ?? each));
            const ratio = (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
            const onDot = inChart && look.fontWeight >= 600;  // a letter of the trade-off: its ground is a mark
            if (ratio < 4.5 && !onDot) found.push([each.textContent.slice(0, 40), each.className, ratio]);
          }
          return found;
        }"""
    )
    assert low == []


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["report", "big", "runs", "empty"])
def test_a_phone_needs_no_sideways_scrolling(open_page: Open, name: str) -> None:
    page = open_page(name, width=375).page
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert all(width <= 375 for width, _ in sizes(page))
    if name == "report":
        assert page.evaluate(
            "[...document.querySelectorAll('.scroll')].some((box) => box.scrollWidth > box.clientWidth)"
        )


@pytest.mark.heavy
def test_it_prints(open_page: Open) -> None:
    page = open_page(color_scheme="dark").page
    paper = page.pdf(format="A4")
    assert paper.startswith(b"%PDF")
    pages = len(re.findall(rb"/Type\s*/Page\b", paper))
    assert 8 <= pages <= 40
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 673, "height": 950})  # A4 without its margins
    assert page.evaluate("document.documentElement.scrollWidth") == 673
    assert all(100 < width <= 673 for width, _ in sizes(page))
    assert not page.locator("nav").is_visible()


@pytest.mark.heavy
def test_without_javascript_there_are_the_tables(open_page: Open) -> None:
    opened = open_page(java_script_enabled=False)
    page = opened.page
    assert page.locator("noscript").inner_text().startswith("The charts need JavaScript")
    page.locator("summary").filter(has_text="numbers of this chart").first.click()
    assert page.locator("section[aria-labelledby=tradeoff] table").first.is_visible()
    assert page.locator("table.heat").first.is_visible()
    assert opened.problems == []


@pytest.mark.heavy
def test_a_keyboard_reaches_links_and_boxes_and_shows_where_it_is(open_page: Open) -> None:
    page = open_page().page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") > 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')") == "#verdict"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.heavy
def test_a_chart_that_cannot_be_drawn_opens_its_table(open_page: Open, files: dict[str, Path], tmp_path: Path) -> None:
    text = files["report"].read_text(encoding="utf-8")
    start = text.index('{"layer"') if '{"layer"' in text else text.index('type="application/json">') + 24
    files["broken"] = tmp_path / "broken.html"
    files["broken"].write_text(text[:start] + "no JSON " + text[start:], encoding="utf-8")
    opened = open_page("broken")
    assert opened.page.locator(".chart.failed").count() == 1
    assert opened.page.locator("figure.drawn").first.locator("table").is_visible()
    assert len(opened.problems) == 1
    assert len(sizes(opened.page)) == opened.page.locator("figure.drawn").count() - 1


def test_the_labels_of_a_system_are_those_of_the_findings() -> None:
    assert System._fields == SYSTEM


# --- the matrix, for a page of documentation --------------------------------------------------------------------------


def test_the_matrix_as_markdown(tmp_path: Path) -> None:
    target = tmp_path / "page.md"
    target.write_text("# Mine\n\n<!-- begin matrix -->\nstale\n<!-- end matrix -->\n\nkept\n", encoding="utf-8")
    matrix.write_markdown(sample(), target)
    text = target.read_text(encoding="utf-8")
    assert text.startswith("# Mine")
    assert text.endswith("kept\n")
    assert "stale" not in text
    assert "| none | **0.9" in text, "the chosen attack is bold"
    assert "*Popularity*" in text
    assert "(a)" in text, "what makes no sense has a footnote"
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert not any("<script" in line or "<img" in line for line in rows)
    once = text
    matrix.write_markdown(sample(), target)
    assert target.read_text(encoding="utf-8") == once


def test_an_attack_that_answers_as_another_has_a_footnote() -> None:
    key = {"role": "attack", "metric": "auc"}
    scores: list[dict[str, Any]] = [
        {**VALUE, **key, "attack": "A", "reason": None},
        {**VALUE, **key, "attack": "B", "reason": "The same as 'A': it answers alike here, about every user."},
    ]
    found = one(verdicts=[VERDICT], scores=scores)
    text = matrix.markdown(replace(found, about={**found.about, "level": 0.95}))
    assert "| **0.900 [0.850, 0.950]** | 0.900 [0.850, 0.950] (a) |" in text
    assert "(a) The same as 'A'" in text


def test_a_page_without_a_place_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "page.md"
    target.write_text("precious", encoding="utf-8")
    with pytest.raises(ConfigError, match="begin matrix"):
        matrix.write_markdown(sample(), target)
    assert target.read_text(encoding="utf-8") == "precious"
    assert "| defense |" in matrix.write_markdown(sample(), tmp_path / "new.md").read_text(encoding="utf-8")


def test_a_page_has_a_place_for_each_run(tmp_path: Path) -> None:
    target, other = tmp_path / "page.md", "<!-- begin ab -->\nkept\n<!-- end ab -->"
    target.write_text(f"<!-- begin a+b -->\n<!-- end a+b -->\n{other}", encoding="utf-8")
    first, _, rest = matrix.write_markdown(sample(), target, "a+b").read_text("utf-8").partition("<!-- end a+b -->")
    assert "| defense |" in first
    assert rest.strip() == other


@pytest.mark.heavy
def test_the_matrix_as_a_picture(tmp_path: Path) -> None:
    png = matrix.write_picture(sample(), tmp_path / "matrix.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) < 300_000
