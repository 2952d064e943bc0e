"""What clients keep: written, read again, and put back as it was at the last commit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from recleak.models.components import Component, Given
from recleak.models.mf import MF
from recleak.training import state
from recleak.training.optimizers import SGD, Adam
from recleak.training.state import CheckpointError, ClientStore, differences, identify, locked, read_file, replace_file
from recleak.training.visit import AGE
from recleak.update import Update

KEPT = tuple(
    Component(part.name, part.storage, part.role, part.shape, part.init, shared=False) for part in MF(3).components()
)
CLIENTS = np.arange(6)


def store(directory: Path | None, committed: int = 0) -> ClientStore:
    return ClientStore(KEPT, Adam(keep=True), 6, 5, seed=1, directory=directory, committed=committed)


def some(clients: list[int], number: float) -> Update:
    """Two rows for each client, all values the same number."""
    n = len(clients)
    values = {name: torch.full((n, 3), number) for name in ("user", "user/mean", "user/square")}
    rows = {name: torch.full((2 * n, 3), number) for name in ("item", "item/mean", "item/square")}
    item = torch.tensor([1, 4] * n)
    age = {AGE: torch.full((n,), int(number))}
    return Update(torch.tensor(clients), {**values, **age}, rows, item, torch.arange(n + 1) * 2, 5)


def everything(kept: ClientStore) -> dict[str, Tensor]:
    read = kept.read(CLIENTS)
    return {**read.values, **{f"{name} rows": value for name, value in read.rows.items()}, "item": read.item}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_written_is_read_and_others_are_fresh(tmp_path: Path, on_disk: bool) -> None:
    kept = store(tmp_path if on_disk else None)
    fresh = everything(kept)
    assert torch.equal(fresh["user"], KEPT[0].draw(1, CLIENTS))
    assert not fresh["user/mean"].any()
    assert len(fresh["item"]) == 0
    kept.write(some([1, 4], 2.0))
    read = kept.read(np.array([1, 2]))
    assert torch.equal(read.values["user"][0], torch.full((3,), 2.0))
    assert torch.equal(read.values["user"][1], fresh["user"][2])
    assert read.values[AGE].tolist() == [2, 0]
    assert (read.item.tolist(), read.offset.tolist()) == ([1, 4], [0, 2, 2])
    assert torch.equal(read.rows["item/mean"], torch.full((2, 3), 2.0))


@pytest.mark.parametrize("names", [{"user"}, {"user", "item"}, {"item/mean", AGE}, set[str]()])
def test_a_part_is_read_as_it_is_in_the_whole(names: set[str]) -> None:
    kept = store(None)
    kept.write(some([1, 4], 2.0))
    part, whole = kept.read(np.array([1, 2]), names), kept.read(np.array([1, 2])).only(names)
    assert_equal(part.values, whole.values)
    assert_equal(part.rows, whole.rows)
    assert (part.item.tolist(), part.offset.tolist()) == (whole.item.tolist(), whole.offset.tolist())


def test_a_kill_at_any_write_leaves_the_last_commit(tmp_path: Path) -> None:
    """The folder is copied at every moment between two file operations; each copy opens as it was at its commit."""
    kept = store(tmp_path)
    expected = {0: everything(kept)}
    kept.write(some([0, 1, 2], 1.0))
    kept.write(some([1, 5], 2.0))
    copies = [(0, "two entries")]
    shutil.copytree(tmp_path, tmp_path.with_name("two entries"))
    shutil.copytree(tmp_path, tmp_path.with_name("before the commit"))
    kept.flush()
    expected[1] = everything(kept)
    shutil.copytree(tmp_path, tmp_path.with_name("journal not deleted yet"))
    copies += [(0, "before the commit"), (1, "journal not deleted yet")]
    kept.commit(1)
    kept.write(some([1, 2], 3.0))
    kept.write(some([1, 3], 4.0))
    shutil.copytree(tmp_path, tmp_path.with_name("second round"))
    shutil.copytree(tmp_path, tmp_path.with_name("cut off"))
    (tmp_path.with_name("cut off") / "clients" / "journal" / "00000002.safetensors.partial").write_bytes(b"cut")
    copies += [(1, "second round"), (1, "cut off")]
    for committed, name in copies:
        opened = store(tmp_path.with_name(name), committed)
        assert_equal(everything(opened), expected[committed])
        assert not list((tmp_path.with_name(name) / "clients" / "journal").iterdir())
        opened.write(some([1], 9.0))
        assert_equal(everything(store(tmp_path.with_name(name), committed)), expected[committed])


def test_an_undo_that_was_cut_off_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store(tmp_path)
    fresh = everything(kept)
    for number in (1.0, 2.0, 3.0):
        kept.write(some([1, 2], number))
    real, left = Path.unlink, [1]

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        real(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(KeyboardInterrupt):
        store(tmp_path)
    monkeypatch.undo()
    assert len(list((tmp_path / "clients" / "journal").iterdir())) == 2
    assert_equal(everything(store(tmp_path)), fresh)


def test_a_store_of_another_model_is_refused(tmp_path: Path) -> None:
    store(tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)user.bin: 72 bytes, expected 48.*another directory"):
        ClientStore(MF(2).components(), SGD(), 6, 5, seed=1, directory=tmp_path)


def test_the_version_tells_of_every_write(tmp_path: Path) -> None:
    one, other = store(tmp_path), store(tmp_path)
    before = one.version
    other.write(some([3], 1.0))
    assert one.version > before


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store(tmp_path)
    before = everything(kept)
    monkeypatch.setattr(state, "_ROOM", 1 << 62)
    with pytest.raises(CheckpointError, match=r"(?s)bytes are free, expected at least.*Make room"):
        kept.write(some([3], 1.0))
    assert_equal(everything(kept), before)


def test_files_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.safetensors"
    replace_file(file, {"x": torch.arange(3)}, {"round": 1})
    (tmp_path / "a.safetensors.partial").write_bytes(b"left over")
    replace_file(file, {"x": torch.arange(4)}, {"round": 2})
    tensors, about = read_file(file)
    assert (tensors["x"].tolist(), about) == ([0, 1, 2, 3], {"round": 2})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        replace_file(file, {"x": torch.arange(5)}, {"round": 3})
    assert read_file(file)[1] == {"round": 2}
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"(?s)not readable.*damaged"):
        read_file(file)


def test_a_lock_keeps_others_out_until_its_owner_ends(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from recleak.training.state import locked\n"
    code += "with locked(Path(sys.argv[1])):\n    print('locked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=rf"(?s)in use by process {other.pid} on .*another directory"):
            locked(tmp_path).__enter__()
        other.kill()
    with locked(tmp_path):
        pass


@dataclass
class Setting:
    table: dict[str, float]
    values: Tensor


class Plain:
    def __init__(self, number: int) -> None:
        self.number = number


def test_identities_tell_weights_and_mappings_apart() -> None:
    one = Setting({"a": 1.0, "b": 2.0}, torch.zeros(2))
    assert identify(one) == identify(Setting({"b": 2.0, "a": 1.0}, torch.zeros(2)))
    others = [
        Setting({"a": 1.0, "b": 2.5}, torch.zeros(2)),
        Setting({"a": 1.0, "b": 2.0}, torch.tensor([0.0, 1e-30])),
        Setting({"a": 1.0, "b": 2.0}, torch.zeros(1, 2)),
    ]
    texts = [json.dumps(identify(each)) for each in (one, *others)]
    assert len(set(texts)) == 4
    assert identify(Given(torch.ones(2, 1))) != identify(Given(torch.zeros(2, 1)))
    assert identify(Plain(1)) == identify(Plain(1)) != identify(Plain(2))
    assert identify((np.arange(2), None, {3, 1}, int, len)) == [identify(np.arange(2)), None, ["1", "3"], "int", "len"]
    assert identify(torch.tensor(2.5)) != identify(torch.tensor(2.0))
    assert list(differences(identify(one), identify(others[0]))) == ["table.b was 2.0, now 2.5"]
    assert list(differences({"a": [1, 2]}, {"a": [1, 3], "b": 1})) == ["a[1] was 2, now 3", "b was absent, now 1"]
