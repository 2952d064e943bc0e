"""Audits of vectors: embeddings and uploads from files, whose the rows are, attributes and own items, nulls beside."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor

from recleak.attacks.base import Knowledge, WhichAttribute, WhichItems
from recleak.attacks.vectors import FromVectors, PopularItems, ScoredItems
from recleak.cli import app
from recleak.data import store
from recleak.data.arrays import Arrays
from recleak.data.columns import read_ids
from recleak.embeddings import Files, _check_ids, experiment_of
from recleak.errors import ConfigError, DataError, RecleakError
from recleak.experiment import experiment
from recleak.models.central import UnknownModel
from recleak.protocols.vectors import Vectors
from recleak.recording import Listening
from recleak.runs import audit_run
from recleak.testing.attacks import AttackContract, Case
from recleak.wire import Embeddings, Holder, Message, Upload, decode, encode

USERS, ITEMS, WIDTH = 240, 40, 6


class Kept:
    """A tap that keeps messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def receive(self, message: Message) -> None:
        self.messages.append(message)

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vectors that tell gender and income, and whose products tell the items."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    gender, income = rng.integers(2, size=USERS), rng.normal(size=USERS)
    vector = rng.normal(size=(USERS, WIDTH))
    vector[:, 0] += 3 * gender
    vector[:, 1] = income
    item = rng.normal(size=(ITEMS, WIDTH))
    score = vector @ item.T + 0.1 * rng.normal(size=(USERS, ITEMS))
    own = np.argsort(-score, axis=1)[:, :8]
    names = [f"u{place}" for place in range(USERS)]
    people = {
        "user": names,
        "gender": np.where(gender, "m", "f"),
        "income": income,
        "coin": rng.integers(2, size=USERS),
    }
    pl.DataFrame(people).with_columns(pl.col("coin").cast(pl.String)).write_csv(folder / "users.csv")
    things = [f"i{place}" for place in range(ITEMS)]
    rows = [{"user": names[u], "item": things[i]} for u in range(USERS) for i in own[u].tolist()]
    pl.DataFrame(rows).write_csv(folder / "train.csv")
    np.save(folder / "users.npy", vector.astype(np.float32))
    np.savez(folder / "both.npz", user=vector, item=item, user_ids=np.array(names), item_ids=np.array(things))
    save_file({"user.weight": vector.astype(np.float16), "other": np.zeros(3)}, folder / "users.safetensors")
    return folder


# --- files --------------------------------------------------------------------------------------------------------


def test_the_same_vectors_in_all_formats(files: Path, tmp_path: Path) -> None:
    table = {name: Arrays.of(files / name) for name in ("users.npy", "both.npz", "users.safetensors")}
    assert table["both.npz"].shapes["item"] == (ITEMS, WIDTH)
    matrices = [
        each.matrix(each.choose(None, ("user",), "user")) for each in table.values()
    ]  # by the only one, by name, by the only one
    for each in matrices:
        assert each.dtype == np.float32
        np.testing.assert_allclose(each, matrices[0], atol=5e-3)
    fortran = tmp_path / "fortran.npy"
    np.save(fortran, np.asfortranarray(matrices[0].astype(">f8")))
    np.testing.assert_array_equal(Arrays.of(fortran).matrix("array"), matrices[0])


def test_arrays_are_named_where_it_is_not_clear_which(tmp_path: Path) -> None:
    np.savez(tmp_path / "two.npz", a=np.ones((2, 2)), b=np.ones((3, 2)))
    arrays = Arrays.of(tmp_path / "two.npz")
    with pytest.raises(DataError, match=r"cannot tell.*a \[2, 2\], b \[3, 2\]\n.*--user-array NAME"):
        arrays.choose(None, ("user",), "user")
    with pytest.raises(DataError, match="no array 'c'"):
        arrays.choose("c", ("user",), "user")
    assert arrays.choose("b", ("user",), "user") == "b"


def test_ids_from_a_table(tmp_path: Path) -> None:
    contents = {"alone": "x\ny\n", "headed": "item\nx\ny\n", "among": "name,item_id\nA,x\nB,y\n"}
    for name, text in contents.items():
        (tmp_path / f"{name}.csv").write_text(text)
        assert read_ids(tmp_path / f"{name}.csv", "item") == ["x", "y"], name
    pl.DataFrame({"thing": [1, 2]}).write_parquet(tmp_path / "ids.parquet")
    assert read_ids(tmp_path / "ids.parquet", "item") == ["1", "2"]
    (tmp_path / "odd.csv").write_text("name,thing\nA,x\n")
    with pytest.raises(DataError, match="which column is the item"):
        read_ids(tmp_path / "odd.csv", "item")


# --- whose rows are whose -----------------------------------------------------------------------------------------


def settings(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table["protocol"].items() if name not in ("use", "name")}


def test_what_is_sent_is_what_the_files_say(files: Path, tmp_path: Path) -> None:
    shuffled = tmp_path / "shuffled.npz"
    given = np.load(files / "both.npz")
    order = np.random.default_rng(1).permutation(USERS)
    np.savez(shuffled, user=given["user"][order], item=given["item"], item_ids=given["item_ids"])
    (tmp_path / "order.csv").write_text("user\n" + "\n".join(given["user_ids"][order]) + "\n")
    by_array = Files(files / "both.npz", item_array="item")
    by_table = Files(shuffled, item_array="item", user_ids=tmp_path / "order.csv")
    sent = []
    for place, each in enumerate((by_array, by_table)):
        table = experiment_of(each, files / "users.csv", files / "train.csv", tmp_path / f"run{place}")
        data, tap = store.load(Path(table["data"]["name"])), Kept()
        Vectors(**settings(table)).send(data, [tap])  # type: ignore[list-item]
        (message,) = tap.messages
        assert isinstance(message, Embeddings)
        names = data.users["id"].gather(message.user.numpy()).to_list()
        sent.append({name: row.tolist() for name, row in zip(names, message.vector, strict=True)})
        things = data.items["id"].gather(message.item.numpy()).to_list()
        np.testing.assert_allclose(message.item_vector, given["item"][[int(each[1:]) for each in things]], rtol=1e-6)
    assert sent[0] == sent[1]
    np.testing.assert_allclose(sent[0]["u7"], given["user"][7], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user_ids": "few.csv"}, "240 vectors of users and 1 ids"),
        ({"user_ids": "twice.csv"}, "'u1' stands twice"),
        ({"user_ids": "others.csv"}, r"no user of the vectors \(first: v0\) is in users.csv \(first: u0\)"),
        ({"items": "narrow.npy"}, "items have 5 numbers, those of users 6"),
        ({"items": "items.npy"}, "'i0' of train.csv is no row number from 0 to 39"),
        ({"vectors": "few.npy"}, "3 vectors of users, and users.csv has 240 users"),
        ({"vectors": "few.pt"}, "not a file of arrays by its ending '.pt'"),
        ({"vectors": "nan.npy"}, r"1 of 240 rows of 'array' \(the first: 2\) have numbers that are not finite"),
    ],
)
def test_what_does_not_fit_is_told(files: Path, tmp_path: Path, change: dict[str, str], message: str) -> None:
    (tmp_path / "few.csv").write_text("user\nu1\n")
    (tmp_path / "twice.csv").write_text("user\n" + "u1\n" * USERS)
    (tmp_path / "others.csv").write_text("user\n" + "".join(f"v{place}\n" for place in range(USERS)))
    np.save(tmp_path / "narrow.npy", np.ones((ITEMS, WIDTH - 1)))
    np.save(tmp_path / "items.npy", np.ones((ITEMS, WIDTH)))
    np.save(tmp_path / "few.npy", np.ones((3, WIDTH)))
    broken = np.ones((USERS, WIDTH))
    broken[2, 1] = np.nan
    np.save(tmp_path / "nan.npy", broken)
    changes: dict[str, Any] = {name: tmp_path / file for name, file in change.items()}
    given = replace(Files(files / "users.npy"), **changes)
    with pytest.raises(RecleakError, match=message):
        experiment_of(given, files / "users.csv", files / "train.csv", tmp_path / "run")


def test_an_id_that_stands_twice_is_found_in_one_pass(tmp_path: Path) -> None:
    ids = [str(place) for place in range(200_000)]
    begun = time.process_time()
    with pytest.raises(DataError, match="the user '199999' stands twice"):
        _check_ids([*ids, ids[-1]], len(ids) + 1, tmp_path, "user")
    assert time.process_time() - begun < 5  # one pair of ids after the other would take minutes


def notes_of(table: dict[str, Any]) -> list[str]:
    return [str(note) for note in store.load(Path(table["data"]["name"])).notes]


def test_rows_in_the_order_of_the_users_are_always_noted(files: Path, tmp_path: Path) -> None:
    """Nothing can tell that the order is another one; the same run directory may have seen the same data with ids."""
    (tmp_path / "ids.csv").write_text("user\n" + "".join(f"u{place}\n" for place in range(USERS)))
    with_ids = Files(files / "users.npy", user_ids=tmp_path / "ids.csv")
    assert notes_of(experiment_of(with_ids, files / "users.csv", None, tmp_path / "run")) == []
    (note,) = notes_of(experiment_of(Files(files / "users.npy"), files / "users.csv", None, tmp_path / "run"))
    assert note.startswith("users.npy: rows of vectors were taken in the order of users.csv (240). ")
    assert "say whose they are, with --user-ids" in note


def test_vectors_of_items_beside_those_of_users_are_used(files: Path, tmp_path: Path) -> None:
    named = experiment_of(
        Files(files / "both.npz", item_array="item"), files / "users.csv", files / "train.csv", tmp_path
    )
    found = experiment_of(Files(files / "both.npz"), files / "users.csv", files / "train.csv", tmp_path)
    assert found == named
    assert [each["use"] for each in found["attacks"]].count("scored-items") == 3
    without = experiment_of(Files(files / "both.npz"), files / "users.csv", None, tmp_path / "other")
    assert not any(each["use"] == "scored-items" for each in without["attacks"])


def test_vectors_of_items_that_are_not_used_are_noted(files: Path, tmp_path: Path) -> None:
    given = np.load(files / "both.npz")
    ids = {"user": given["user"], "user_ids": given["user_ids"]}
    odd = {
        "alone": ({}, "no vectors of items were found"),
        "narrow": ({"item": given["item"][:, 1:], "item_ids": given["item_ids"]}, "vectors of items have 5 numbers"),
        "nameless": ({"item": given["item"]}, "the item 'i0' of train.csv is no row number"),
    }
    for name, (more, reason) in odd.items():
        np.savez(tmp_path / f"{name}.npz", **ids, **more)
        run = tmp_path / name
        table = experiment_of(Files(tmp_path / f"{name}.npz"), files / "users.csv", files / "train.csv", run)
        (note,) = notes_of(table)
        assert reason in note
        assert "--item" in note
        assert not any(each["use"] == "scored-items" for each in table["attacks"])


def test_nothing_is_written_behind_a_link_or_into_a_folder_of_something_else(files: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "given").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    (tmp_path / "file").touch()
    given = Files(files / "users.npy")
    wrong = {"linked": "a link", "photos": r"photos holds other things \(cat.jpg\)", "file": "is a file"}
    for name, message in wrong.items():
        with pytest.raises(RecleakError, match=message):
            experiment_of(given, files / "users.csv", None, tmp_path / name)
    left = {str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*")}
    assert left == {"elsewhere", "linked", "linked/given", "photos", "photos/cat.jpg", "file"}


def test_items_need_interactions(files: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without --interactions"):
        experiment_of(Files(files / "both.npz", item_array="item"), files / "users.csv", None, tmp_path)


def test_uploads_are_not_compared_with_items(files: Path, tmp_path: Path) -> None:
    given = Files(files / "both.npz", item_array="item")
    with pytest.raises(ConfigError, match="items are compared with embeddings"):
        experiment_of(given, files / "users.csv", files / "train.csv", tmp_path, kind="uploads")


# --- attacks ------------------------------------------------------------------------------------------------------


def knowledge(n_users: int, n_items: int, **public: torch.Tensor) -> Knowledge:
    return Knowledge(UnknownModel(), n_users, n_items, (), public=public)


def test_items_are_scored_as_a_loop_would() -> None:
    generator = torch.Generator().manual_seed(0)
    user, item = torch.randn(5, 3, generator=generator), torch.randn(7, 3, generator=generator)
    message = Embeddings(torch.arange(5), user, torch.arange(6), item[:6])  # one item has no vector
    known = knowledge(6, 7, popularity=torch.arange(7.0))
    scores = {
        "product": [[float(u @ i) for i in item[:6]] for u in user],
        "cosine": [[float(u @ i / u.norm() / i.norm()) for i in item[:6]] for u in user],
        "distance": [[-float((u - i).norm()) for i in item[:6]] for u in user],
    }
    pairs = torch.cartesian_prod(torch.arange(6), torch.arange(7)).flip(0)  # in any order
    for scoring, expected in scores.items():
        listening: Listening[Any, Any] = Listening(Holder(), ScoredItems(scoring=scoring), known)  # type: ignore[arg-type]
        listening.receive(message)
        answer = listening.answer(WhichItems(pairs[:, 0], pairs[:, 1]))
        found = torch.zeros(6, 7, dtype=torch.float64).index_put_((pairs[:, 0], pairs[:, 1]), answer)
        assert (found[5] == 0).all()  # a user without a vector
        assert (found[:, 6] == 0).all()
        assert torch.equal(found[:5, :6].argsort(1), torch.tensor(expected).argsort(1))
        torch.testing.assert_close(found[:5].sum(1), torch.full((5,), 21 / 6, dtype=torch.float64), rtol=1e-3, atol=0)


def planted(*, related: bool) -> tuple[Tensor, Tensor, Embeddings]:
    """Labels of users i64[n], own items bool[n, m], and vectors that tell them, or tell others'."""
    generator = torch.Generator().manual_seed(3)
    label, other = (torch.randint(2, (80,), generator=generator) for _ in range(2))
    user, item = torch.randn(80, 4, generator=generator), torch.randn(30, 4, generator=generator)
    user[:, 0] += 6 * (label if related else other)
    own = (user if related else torch.randn(80, 4, generator=generator)) @ item.T > 1.5
    return label, own, Embeddings(torch.arange(80), user, torch.arange(30), item)


class OfAttributes(AttackContract):
    attack = FromVectors()

    def planted(self) -> Case:
        return self._case(related=True)

    def unrelated(self) -> Case:
        return self._case(related=False)

    def _case(self, *, related: bool) -> Case:
        label, _, message = planted(related=related)
        known = knowledge(80, 30, **{"labels of sex": torch.where(torch.arange(80) < 40, label, -1)})
        question = WhichAttribute(torch.arange(40, 80), "sex", ("no", "yes"))
        return Case(Holder(), known, [message], question, label[40:] == 1)

    def _answer(self, case: Case) -> Tensor:
        return super()._answer(case)[:, 1]


class TestFromVectors(OfAttributes):
    pass


class OfItems(OfAttributes):
    def _case(self, *, related: bool) -> Case:
        _, own, message = planted(related=related)
        pairs = torch.cartesian_prod(torch.arange(80), torch.arange(30))
        known = knowledge(80, 30, popularity=own.sum(0).float())
        return Case(Holder(), known, [message], WhichItems(pairs[:, 0], pairs[:, 1]), own.flatten())

    def _answer(self, case: Case) -> Tensor:
        return AttackContract._answer(self, case)


class TestScoredItems(OfItems):
    attack = ScoredItems()  # type: ignore[assignment]


def test_the_null_of_items_sees_no_vector() -> None:
    known = knowledge(4, 3, popularity=torch.tensor([1.0, 4.0, 2.0]))
    attack = PopularItems()
    message = Embeddings(torch.arange(4), torch.ones(4, 2), torch.arange(3), torch.ones(3, 2))
    state = attack.fold(known, attack.init(known), message)
    answer = attack.answer(known, state, WhichItems(torch.tensor([0, 0, 0, 3]), torch.tensor([0, 1, 2, 1])))
    assert answer[1] == answer[3]
    assert answer[1] > answer[2] > answer[0]


def test_vectors_of_two_sizes_or_of_strangers_are_refused() -> None:
    known = knowledge(2, 0, **{"labels of gender": torch.tensor([0, 1])})
    attack = FromVectors()
    empty = torch.zeros(0, dtype=torch.int64)
    state = attack.fold(
        known, attack.init(known), Embeddings(torch.tensor([0]), torch.ones(1, 2), empty, torch.ones(0, 2))
    )
    with pytest.raises(ConfigError, match="vectors of 2 and of 3 numbers"):
        attack.fold(known, state, Embeddings(torch.tensor([1]), torch.ones(1, 3), empty, torch.ones(0, 3)))
    with pytest.raises(ConfigError, match="user 2, expected numbers below 2"):
        attack.fold(known, state, Embeddings(torch.tensor([2]), torch.ones(1, 2), empty, torch.ones(0, 2)))
    question = WhichAttribute(torch.arange(2), "gender", ("f", "m"))
    assert attack.answer(known, attack.init(known), question).tolist() == [[1, 0], [0, 1]]  # nobody was seen


def test_embeddings_keep_their_meaning_in_bytes() -> None:
    message = Embeddings(torch.tensor([3, 1]), torch.randn(2, 4), torch.tensor([0]), torch.randn(1, 4))
    again = decode(encode(message))
    assert isinstance(again, Embeddings)
    for name in ("user", "vector", "item", "item_vector"):
        assert torch.equal(getattr(again, name), getattr(message, name))


# --- audits -------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_leaks_are_found_beside_their_nulls_and_nothing_where_there_is_none(files: Path, tmp_path: Path) -> None:
    given = Files(files / "both.npz", item_array="item")
    table = experiment_of(given, files / "users.csv", files / "train.csv", tmp_path / "run")
    findings = audit_run(experiment(table), tmp_path / "run", command="test")
    verdicts = {row["question"]: row for row in findings.verdicts.to_dicts()}
    assert set(verdicts) == {"gender", "income", "coin", "membership"}
    assert {name: row["verdict"] for name, row in verdicts.items() if name != "coin"} == dict.fromkeys(
        ("gender", "income", "membership"), "leaks"
    )
    assert verdicts["coin"]["low"] <= 0.5 <= verdicts["coin"]["high"]
    assert verdicts["gender"]["value"] > 0.9
    assert verdicts["gender"]["null"] == "majority-of-holder"
    assert "Somebody who holds users' vectors" in verdicts["gender"]["words"]
    assert "The vectors add to that." in verdicts["gender"]["words"]
    assert verdicts["membership"]["attack"] == "items by product"
    assert verdicts["membership"]["null"] == "popular-items"
    assert verdicts["membership"]["value"] > 0.95
    shuffled = audit_run(experiment({**table, "shuffle_labels": True}), tmp_path / "run", command="test")
    for row in shuffled.verdicts.to_dicts():
        assert row["low"] <= 0.51, row["question"]
    stored = [json.loads(file.read_text()) for file in (tmp_path / "run" / "cells").glob("*/*.json")]
    income = next(each for each in stored if each.get("question") == "income")
    assert [name.split()[0] for name in sorted(income["classes"]) if not name[0].isdigit() and name[0] != "-"] == [
        "from",
        "under",
    ]  # cut at quantiles that the names tell


@pytest.mark.heavy
def test_uploads_are_read_by_the_server(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["audit", "--uploads", str(files / "users.npy"), "--users", str(files / "users.csv")]
    out = ["--out", str(tmp_path / "run"), "--workers", "1", "--attribute", "gender"]
    app([*arguments, *out, "--json"], result_action="return_value")
    (verdict,) = json.loads(capsys.readouterr().out)["verdicts"]
    assert (verdict["question"], verdict["verdict"], verdict["null"]) == ("gender", "leaks", "majority")
    assert "The server that receives uploads" in verdict["words"]
    assert (tmp_path / "run" / "report.html").exists()
    with pytest.raises(SystemExit):
        app([*arguments, *out, "--fail-if", "gender.auc > 0.6"], result_action="return_value")


def test_uploads_go_over_the_wire_as_uploads(files: Path, tmp_path: Path) -> None:
    table = experiment_of(Files(files / "users.npy"), files / "users.csv", None, tmp_path, kind="uploads")
    assert table["model"]["sends"] == WIDTH
    data, tap = store.load(Path(table["data"]["name"])), Kept()
    Vectors(**settings(table)).send(data, [tap])  # type: ignore[list-item]
    (message,) = tap.messages
    assert isinstance(message, Upload)
    decode(encode(message))
    place = data.users["id"].to_list().index("u7")
    at = message.update.client.tolist().index(place)
    np.testing.assert_allclose(message.update.values["upload"][at], np.load(files / "users.npy")[7])


def test_one_kind_of_output_at_a_time(files: Path) -> None:
    both = ["--embeddings", str(files / "users.npy"), "--uploads", str(files / "users.npy")]
    for given in (both, ["--embeddings", str(files / "users.npy")]):
        with pytest.raises(
            ConfigError, match="expected one of --recommendations, --embeddings, --uploads, and --users"
        ):
            app(["audit", *given], result_action="return_value", exit_on_error=False)
