"""APM as data: every printed number, tables that repeat each other, and cells that say what to measure."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from recleak.data.catalog import CATALOG
from recleak.metrics.intervals import Estimate
from recleak.papers import base
from recleak.papers.base import Cell, Paper, Point
from recleak.papers.cells_file import as_json
from recleak.papers.render import Report, sections, write_markdown
from recleak.papers.reproduce import Selection
from recleak.papers.store import Judged, Results, Store

OURS = {
    "2+",
    "nulls",
    "3+",
    "4+",
    "noise",
    "6+",
    "choices",
    "rounds",
    "levels",
    "ledger",
    "occupation",
}  # tables that the paper does not have
FEDREC = {"apm-measured", "none", "f-gerai", "f-gerai-nl", "gaussian", "fednews", "apm", "fixrec-max", "fixrec-min"}
CLIPPED = {"gaussian", "fednews", "apm", "fixrec-max", "fixrec-min"}
FITTED = {"aia", "dt", "svc", "knn", "gbt", "careful"}  # to parts of uploads
OTHERS = {"random", "proportional", "majority", "interactions", "true-items", "exact", "chain"}


@pytest.fixture(scope="module")
def apm() -> Paper:
    return base.load("apm")


@pytest.fixture(scope="module")
def judged(apm: Paper, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Judged]:
    results = Results(apm, Store(tmp_path_factory.mktemp("nothing")), code=0, variant="as-written")
    return {claim.text: results.judge(claim) for claim in apm.claims}


def published(paper: Paper, table: str, choose: Callable[[str], bool] = lambda _: True) -> list[float]:
    found = [(name, cell.published) for name, cell in paper.cells.items() if name.startswith(f"{table}/")]
    return [value for name, value in found if value is not None and choose(name)]


def key(cell: Cell) -> str:
    return json.dumps([cell.run, cell.ask, cell.metric], sort_keys=True)


def test_every_published_number_is_there(apm: Paper) -> None:
    numbers = {table.id: len(published(apm, table.id)) for table in apm.all_tables}
    printed = {"2": 56, "3": 6, "4": 112, "5": 24, "6": 36, "fig4": 4}  # of Figure 4, section 3.3 tells four
    assert {table: count for table, count in numbers.items() if count} == printed
    assert {table.id for table in apm.tables} == {*"23456", *OURS}
    assert {table.id for table in apm.figures} == {"fig2", "fig4", "fig5", "fig6", "fig7"}
    for table in "23456":
        assert all(cell.published is not None for name, cell in apm.cells.items() if name.startswith(f"{table}/"))


@pytest.mark.parametrize(
    ("table", "part", "sum_by_hand"),  # sums of columns, or of rows, of the printed tables
    [
        ("2", "age/ml-100k/*/0.1", 3.454),
        ("2", "age/ml-100k/*/0.2", 3.671),
        ("2", "age/ml-1m/*/0.1", 3.409),
        ("2", "age/ml-1m/*/0.2", 3.604),
        ("2", "gender/ml-100k/*/0.1", 4.378),
        ("2", "gender/ml-100k/*/0.2", 4.523),
        ("2", "gender/ml-1m/*/0.1", 4.452),
        ("2", "gender/ml-1m/*/0.2", 4.560),
        ("3", "*/ml-100k", 0.275),
        ("3", "*/ml-1m", 0.150),
        ("4", "age/ml-100k/*/dt", 2.857),
        ("4", "age/ml-100k/*/svc", 2.904),
        ("4", "age/ml-100k/*/knn", 3.250),
        ("4", "age/ml-1m/*/dt", 2.899),
        ("4", "age/ml-1m/*/svc", 2.838),
        ("4", "age/ml-1m/*/knn", 3.114),
        ("4", "gender/ml-100k/*/dt", 4.013),
        ("4", "gender/ml-100k/*/svc", 3.705),
        ("4", "gender/ml-100k/*/knn", 4.438),
        ("4", "gender/ml-1m/*/dt", 4.253),
        ("4", "gender/ml-1m/*/svc", 3.814),
        ("4", "gender/ml-1m/*/knn", 4.304),
        ("5", "age/*/0.1", 1.592),
        ("5", "age/*/0.2", 1.664),
        ("5", "age/*/0.3", 1.719),
        ("5", "gender/*/0.1", 2.200),
        ("5", "gender/*/0.2", 2.257),
        ("5", "gender/*/0.3", 2.266),
        ("6", "*/ml-100k/*/hit@20", 0.447),
        ("6", "*/ml-100k/*/age", 2.942),
        ("6", "*/ml-100k/*/gender", 3.762),
        ("6", "*/ml-1m/*/hit@20", 0.461),
        ("6", "*/ml-1m/*/age", 2.862),
        ("6", "*/ml-1m/*/gender", 3.923),
    ],
)
def test_columns_add_up_as_printed(apm: Paper, table: str, part: str, sum_by_hand: float) -> None:
    def chosen(name: str) -> bool:
        return all(word in ("*", got) for word, got in zip(part.split("/"), name.split("/")[1:], strict=True))

    assert sum(published(apm, table, chosen)) == pytest.approx(sum_by_hand)


def test_single_numbers(apm: Paper) -> None:
    expected = {
        "2/age/ml-100k/none/0.1": 0.528,
        "2/gender/ml-1m/f-dpmf/0.2": 0.717,
        "2/gender/ml-100k/gaussian/0.2": 0.642,
        "3/apm/ml-100k": 0.103,
        "3/fixrec-max/ml-1m": 0.043,
        "4/age/ml-1m/apm/svc": 0.333,
        "4/gender/ml-100k/f-gerai-nl/svc": 0.587,
        "4/gender/ml-1m/fednews/dt": 0.614,
        "5/age/svc/0.3": 0.382,
        "5/gender/knn/0.2": 0.623,
        "6/ncf/ml-1m/fednews/gender": 0.675,
        "6/lightgcn/ml-100k/none/hit@20": 0.080,
        "fig4/gender/ml-1m/0.1/full": 0.684,
    }
    assert {name: apm.cells[name].published for name in expected} == expected


def test_tables_repeat_the_same_runs_with_the_same_numbers(apm: Paper) -> None:
    known: dict[str, float] = {}
    for cell in apm.cells.values():
        if cell.published is not None:
            assert known.setdefault(key(cell), cell.published) == cell.published
    # AIA of Table 4 is Table 2's; of Table 5, ζ 0.1 is Table 4's and AIA at ζ 0.2 is Table 2's; Figure 4 is Table 2's
    assert len(known) == 238 - 28 - (8 + 2) - 4
    # nothing else is measured twice within a table
    for table in apm.all_tables:
        assert len({key(cell) for cell in table.cells}) == len(table.cells), table.id


def test_cells_say_what_to_measure(apm: Paper) -> None:
    for name, cell in apm.cells.items():
        run, ask = cell.run, cell.ask
        changed = set(run) - {"data", "preset", "model", "defense", "factors"}
        assert len(run) == 5 + len(changed), name
        assert changed <= ({"rounds", "negatives", "initial"} if name.startswith("choices/") else set()), name
        assert str(run["preset"]) in CATALOG[str(run["data"])].presets, name
        swept = str(run["defense"]).removeprefix("uniform-").isdigit()
        of_model = {"feature-gcn": FEDREC, "mf": {"none", "f-dpmf"}}.get(str(run["model"]), {"none", "fednews", "apm"})
        assert run["defense"] in of_model or (swept and run["model"] == "feature-gcn"), name
        assert run["factors"] == 64 or name.startswith("fig7/"), name
        if ask.get("measure") in ("ledger", "levels"):
            assert name.startswith(f"{ask['measure']}/"), name
            continue
        if ask.get("measure") in ("utility", "validation"):
            assert ask["measure"] == "utility" or name.startswith("choices/"), name
            assert cell.metric == "hit@20", name
            continue
        assert cell.metric in {"macro-f1", "micro-f1", "auc"}, name
        assert ask["attribute"] in {"age", "gender", "occupation"}, name
        assert ask["zeta"] in {0.1, 0.2, 0.3}, name
        assert ask["attack"] in (FITTED if "part" in ask else OTHERS), name
        assert ask.get("part", "full") in {"full", "user", "item", "head", "head.1", "head.2"}, name
        assert set(ask) <= {"attack", "attribute", "zeta", "part", "uploads", "noise", "round", "shift", "graded"}, name
        several = ask.get("uploads") == "all" or ask["attack"] == "chain" or name.startswith("rounds/")
        several &= run["model"] != "lightgcn"  # whose values start within the bound
        assert ("shift" in ask) == (ask["attack"] == "careful" or (several and run["defense"] in CLIPPED)), name
        assert ask["attack"] != "exact" or run["model"] == "feature-gcn", name  # others have no E_U
        assert "noise" not in ask or run["defense"] in {"gaussian", "fednews", "apm"}, name
    runs = {json.dumps(cell.run, sort_keys=True) for cell in apm.cells.values()}
    # FedRec with 8 defenses and the sweep; MF; FedLightGCN without and with two; NCF the same; three more dimensions;
    # and what is left open
    assert len(runs) == 2 * 8 + 7 + 2 * 2 + 2 * 3 + 2 * 3 + 3 + 7


def test_utility_is_measured_wherever_a_defense_is_compared(apm: Paper) -> None:
    """The picture of privacy against utility needs both of the same run."""
    assert apm.tradeoff is not None
    utility = {json.dumps(cell.run, sort_keys=True) for cell in apm.cells.values() if cell.metric == "hit@20"}
    for cell in apm.cells.values():
        if cell.ask in [way.ask for way in apm.tradeoff.attacks] and (cell.run["model"], cell.run["defense"]) not in {
            ("mf", "none"),
            ("ncf", "none"),
        }:
            assert json.dumps(cell.run, sort_keys=True) in utility
    assert any(cell.ask == apm.tradeoff.chance.ask for cell in apm.cells.values())


def test_claims_that_fail_in_the_papers_own_numbers(judged: dict[str, Judged]) -> None:
    assert {each.verdict for each in judged.values()} == {"not run"}
    failing = {
        text: [str(part) for part, verdict in zip(each.claim.holds_if, each.theirs, strict=True) if verdict != "holds"]
        for text, each in judged.items()
        if each.published == "does not hold"
    }
    assert failing == {
        "Deep recommenders are safer than a shallow one: F-DPMF leaks more than Pure FedRec.": [
            "2/gender/ml-100k/f-dpmf/0.2 > 2/gender/ml-100k/none/0.2"
        ],
        "Noise on uploads (FedRec-GN, FedNews, APM) is safer than noise in the optimization "
        "(F-GERAI, F-GERAI-NL, F-DPMF).": ["2/gender/ml-1m/gaussian/0.1 < 2/gender/ml-1m/f-gerai/0.1"],
        "FedNews is slightly safer than APM against KNN.": [
            "4/age/ml-100k/fednews/knn < 4/age/ml-100k/apm/knn",
            "4/gender/ml-1m/fednews/knn < 4/gender/ml-1m/apm/knn",
        ],
        "FedRec-GN is less safe than FedNews.": [
            "4/age/ml-100k/gaussian/dt > 4/age/ml-100k/fednews/dt",
            "4/age/ml-100k/gaussian/svc > 4/age/ml-100k/fednews/svc",
            "4/age/ml-1m/gaussian/svc > 4/age/ml-1m/fednews/svc",
        ],
        "FedRec-GN is less safe than FedNews, in Table 2 too.": ["2/age/ml-1m/gaussian/0.2 > 2/age/ml-1m/fednews/0.2"],
        "More known users make attackers better.": [
            "5/age/dt/0.3 > 5/age/dt/0.2",
            "5/gender/svc/0.3 > 5/gender/svc/0.2",
        ],
        "More known users make AIA better, against all methods.": [
            "2/gender/ml-100k/f-dpmf/0.2 > 2/gender/ml-100k/f-dpmf/0.1",
            "2/gender/ml-1m/none/0.2 > 2/gender/ml-1m/none/0.1",
        ],
    }


def test_claims_of_most_comparisons_need_more_than_half(judged: dict[str, Judged]) -> None:
    for beginning, fails in (("APM is the safest against most attackers", 4), ("AIA is the strongest attacker", 6)):
        (found,) = (each for text, each in judged.items() if text.startswith(beginning))
        assert found.claim.at_least == len(found.claim.holds_if) // 2 + 1
        assert found.theirs.count("does not hold") == fails
        assert found.published == "holds"


def test_every_defense_has_its_direct_attack_its_chain_and_the_ceiling_of_the_chain(apm: Paper) -> None:
    methods = {str(cell.run["defense"]) for name, cell in apm.cells.items() if name[:2] in ("2/", "3/")}
    for attribute, data, defense in product(("age", "gender"), ("ml-100k", "ml-1m"), methods):
        for reader in ("aia-all", "chain", "ceiling", "careful"):
            for metric in ("macro-f1", "auc"):
                assert f"4+/{attribute}/{data}/{defense}/{reader}/{metric}" in apm.cells
    assert not any(cell.run["model"] == "mf" and cell.ask.get("attack") == "exact" for cell in apm.cells.values())


def test_occupation_is_judged_by_what_chance_gives(apm: Paper) -> None:
    """As measured once: AUC 0.550 [0.523, 0.578], right for 0.162 [0.127, 0.198], the most frequent value for 0.085."""
    claim = next(each for each in apm.claims if each.text.startswith("Occupation"))
    values = {"auc": (0.523, 0.578), "micro-f1": (0.127, 0.198)}
    for comparison in claim.holds_if[:2]:
        left = Estimate(0.55, *values[comparison.left.rpartition("/")[2]], 425)
        right = Point(value=0.5) if comparison.right == 0.5 else Estimate(0.085, 0.059, 0.113, 425)
        assert comparison.judge(left, right) == "does not hold"


def test_claims_are_told_apart(apm: Paper, judged: dict[str, Judged]) -> None:
    assert len(judged) == len(apm.claims)
    assert all("not run" in each.theirs or each.published in {"holds", "does not hold"} for each in judged.values())
    assert [variant.name for variant in apm.variants] == ["as-written", "section-5.7"]


def test_it_renders(apm: Paper, tmp_path: Path) -> None:
    for variant in ("as-written", "section-5.7"):
        results = Results(apm, Store(tmp_path), code=0, variant=variant)
        report = Report.of(results, Selection().cells(apm))
        assert len(report.claims) == len(apm.claims)
        assert len(as_json(report)) == len(apm.cells)  # no row and column of a table stand for two cells
        write_markdown(report, tmp_path / f"{variant}.md")
        assert sections(report)[variant] in (tmp_path / f"{variant}.md").read_text()
