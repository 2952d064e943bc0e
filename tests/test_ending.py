"""Systems of an audit that end early, and what their users want protected."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from recleak.attacks.alignment import GradientAlignment
from recleak.attacks.attribute import ThroughItems
from recleak.attacks.representation import FromRepresentations
from recleak.data import store
from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Chain, Defense
from recleak.defenses.consent import UserConsent
from recleak.defenses.decoupling import Decoupling
from recleak.defenses.early_stop import EarlyStop, early_stop_of
from recleak.defenses.spending import NoGuarantee
from recleak.ending import within
from recleak.errors import ConfigError
from recleak.experiment import experiment
from recleak.findings import Findings
from recleak.made import private_attributes
from recleak.runs import audit_run

LOCAL = {"epochs": 1, "optimizer": {"use": "adam", "learning_rate": 0.02, "keep": True}}
EXAMPLE = Path(__file__).parents[1] / "examples" / "matrix-decoupling.toml"


@pytest.fixture(scope="module")
def people() -> Interactions:
    made = Synthetic(n_users=60, n_items=50, mean_activity=14, min_activity=6).generate()
    height = np.where(np.arange(60) < 3, np.nan, 170.0 + np.arange(60) % 30)
    wish = ["yes", "no", None] * 20
    users = made.users.with_columns(pl.Series("height", height).fill_nan(None), pl.Series("wish", wish))
    return Interactions(made.rows, users, made.items)


@pytest.fixture(scope="module")
def data(people: Interactions, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "small"
    store.save(people, folder, name="small")
    return str(folder)


def audited(data: str, folder: Path, **changes: Any) -> Findings:
    table = {
        "data": {"name": data, "candidates": 20},
        "model": {"use": "ncf", "factors": 4, "hidden": [4]},
        "protocol": {"use": "federated", "rounds": 6, "local": LOCAL},
        "attacks": [{"use": "alignment", "shadow_rows": 0, "round": 5}],
    }
    return audit_run(experiment({**table, **changes}), folder, command="test")


@pytest.mark.heavy
def test_a_system_ends_where_its_rule_says_and_attacks_read_its_last_round(data: str, tmp_path: Path) -> None:
    plateau = {"use": "plateau", "every": 1, "patience": 2, "least": 1.0}  # nothing is better by 1: it ends at once
    protocol = {"use": "federated", "rounds": 6, "local": LOCAL, "stopping": plateau}
    defenses = ["none", {"use": "early-stop", "level": 0.0, "every": 1}]
    findings = audited(data, tmp_path / "run", protocol=protocol, defenses=defenses)
    notes = [note for note in findings.about["notes"] if "training ended" in note]
    assert [note.partition("ended after ")[2] for note in notes] == ["3 of at most 6 rounds", "1 of at most 6 rounds"]
    rows = findings.scores.filter((pl.col("metric") == "auc") & pl.col("attack").str.starts_with("alignment"))
    assert len(rows) == 2
    assert rows["value"].is_not_null().all(), "round 5 is not there"


@pytest.mark.heavy
def test_a_level_that_is_not_reached_ends_nothing(data: str, tmp_path: Path) -> None:
    findings = audited(data, tmp_path / "run", defenses={"use": "early-stop", "level": 1.1, "every": 1})
    assert any("ended after 6 of at most 6 rounds" in note for note in findings.about["notes"])


@pytest.mark.heavy
def test_two_levels_are_refused(data: str, tmp_path: Path) -> None:
    reached = {"use": "reached", "level": 0.2}
    protocol = {"use": "federated", "rounds": 6, "local": LOCAL, "stopping": reached}
    findings = audited(data, tmp_path / "run", protocol=protocol, defenses={"use": "early-stop", "level": 0.3})
    assert "expected one level of utility" in findings.scores["reason"][0]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"use": "plateau", "every": 0}, "every is 0"),
        ({"use": "plateau", "patience": 0}, "patience is 0"),
        ({"use": "network"}, "expected a rule"),
        ("soon", "expected an instance of Plateau"),
    ],
)
def test_rules_that_cannot_be(rule: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment({"protocol": {"use": "federated", "stopping": rule}})


def test_early_stop_is_found_in_a_chain_and_promises_nothing() -> None:
    early = EarlyStop(0.4)
    assert early_stop_of(Chain((Defense(), Chain((early,))))) == early
    assert early_stop_of(Chain((Defense(),))) is None
    (spent,) = early.spends()
    assert isinstance(spent, NoGuarantee)
    assert "private validation items" in spent.why  # tuning on private data is flagged
    with pytest.raises(ConfigError, match="level is nan"):
        EarlyStop(float("nan"))
    with pytest.raises(ConfigError, match="every is 0"):
        EarlyStop(0.4, every=0)


def test_attacks_that_read_a_later_round_read_the_last_one() -> None:
    assert within(GradientAlignment(round=99), 30).round == 29
    assert within(GradientAlignment(round=3), 30).round == 3
    assert within(GradientAlignment(), 30).round is None
    assert within(FromRepresentations(rounds=99), 30).rounds == 29
    assert within(FromRepresentations(rounds="all"), 30).rounds == "all"
    assert within(ThroughItems(membership=GradientAlignment(round=99)), 30).membership.round == 29


# --- what users want protected ----------------------------------------------------------------------------------------


def test_users_say_what_they_want_protected(people: Interactions) -> None:
    defense = UserConsent({"gender": 2}, protected={"gender": "wish"})
    made = private_attributes(defense, people, seed=0)
    assert made.protected["gender"].tolist() == [True, False, True] * 20, "who says nothing wants it"
    assert not bool((made.public & made.protected["gender"]).any()), "who wants it protected tells nothing"
    assert bool(made.public.any())


def test_a_share_of_users_wants_an_attribute_protected(people: Interactions) -> None:
    for share, least, most in ((0.0, 0, 0), (0.5, 10, 38), (1.0, 60, 60)):
        made = private_attributes(UserConsent({"gender": 2}, protected={"gender": share}), people, seed=0)
        wanted = made.protected["gender"]
        count = int((wanted | made.public).sum()) if share == 1 else int(wanted.sum())
        assert least <= count <= most
    assert private_attributes(UserConsent({"gender": 2}), people, seed=0).protected == {}


def test_numbers_are_in_deviations_of_those_who_tell(people: Interactions) -> None:
    made = private_attributes(Decoupling({"height": 1, "gender": 2}), people, seed=0)
    height, gender = made.labels["height"], made.labels["gender"]
    assert height.dtype == torch.float32
    assert gender.dtype == torch.int64
    assert height[:3].isnan().all(), "who has none"
    told = height[made.public & ~height.isnan()]
    assert float(told.mean()) == pytest.approx(0, abs=1e-5)
    assert float(told.std(correction=0)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("attributes", "protected", "message"),
    [
        ({"hair": 2}, {}, "hair"),
        ({"gender": 1}, {}, "it has classes"),
        ({"occupation": 2}, {}, "expected 19"),
        ({"gender": 2}, {"age": 0.5}, "age"),
        ({"gender": 2}, {"gender": "wishes"}, "Did you mean 'wish'"),
        ({"gender": 2}, {"gender": "occupation"}, "expected yes or no"),
    ],
)
def test_what_cannot_be_protected_is_said(
    people: Interactions, attributes: dict[str, int], protected: dict[str, float | str], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        private_attributes(UserConsent(attributes, protected=protected), people, seed=0)


@pytest.mark.heavy
def test_an_audit_protects_a_number_and_who_wants_it(data: str, tmp_path: Path) -> None:
    consent = {"use": "user-consent", "attributes": {"height": 1, "wish": 2}, "protected": {"height": "wish"}}
    pard = {"use": "decoupling", "attributes": {"height": 1}, "relevant": 0.0, "protected": {"height": 0.5}}
    shared = {"use": "share", "components": ["user"], "averaged": False}
    sizes = {"factors": 4}
    defenses = [
        {"name": name, "use": "chain", "defenses": [shared, {**each, **sizes}]}
        for name, each in (("UC-FedRec", consent), ("PARD", pard))
    ]
    attacks = [{"use": "from-representations", "name": "vectors", "rounds": "last"}]
    findings = audited(data, tmp_path / "run", defenses=defenses, attacks=attacks, attributes=["height"], known=0.3)
    rows = findings.scores.filter((pl.col("attack") == "vectors") & (pl.col("metric") == "auc"))
    assert rows["value"].is_not_null().all(), rows["reason"].to_list()


def test_the_example_with_early_stop_plans() -> None:
    plan = experiment(tomllib.loads(EXAMPLE.read_text(encoding="utf-8")))
    found = {(each.model.label, each.protocol.label) for each in plan.systems}
    assert found == {("FedNCF", "federated"), ("PARD's model", "federated, slower items")}
    early = [each for each in plan.systems if each.defense.label == "Early-stop"]
    assert len(early) == 2
