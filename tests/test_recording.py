"""Recordings: what was heard live is what is replayed, bit for bit, whenever the writer was killed."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recleak.attacks.base import Knowledge, State, WhichItems
from recleak.errors import DataError
from recleak.models.components import Component
from recleak.recording import Listening, Manifest, Recorder, Tap, read_manifest, replay
from recleak.testing import planted_items
from recleak.wire import (
    Aggregator,
    Audience,
    Broadcast,
    Disclosure,
    Message,
    Peers,
    Push,
    Server,
    ServerMessage,
    Upload,
    Vantage,
    encode,
)

CASE = planted_items()
MESSAGES = CASE.messages
COMPONENTS = CASE.knowledge.components


class Everything:
    """Sums in the order of arrival: its state depends on every bit and on the order."""

    vantage = Server

    def init(self, knowledge: Knowledge) -> State:
        return {"rows": torch.zeros(knowledge.n_items), "seen": torch.tensor(0)}

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        rows = state["rows"] * 1.01
        if isinstance(message, Upload):
            rows = rows.index_add(0, message.update.item, message.update.rows["item"].sum(1) * state["seen"])
        elif isinstance(message, Broadcast):
            rows = rows + message.params["item"].sum(1)
        return {"rows": rows, "seen": state["seen"] + 1}

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        return state["rows"][question.item]


def listening() -> Listening[ServerMessage, WhichItems]:
    return Listening(Server(), Everything(), CASE.knowledge)


def recorder(folder: Path) -> Recorder:
    return Recorder(Server(), folder, components=COMPONENTS, source="run 1")


def feed(tap: Tap, messages: list[Message] | tuple[Message, ...]) -> None:
    for message in messages:
        tap.receive(message)


def record(folder: Path) -> Path:
    writer = recorder(folder)
    feed(writer, list(MESSAGES))
    writer.close()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def same_states(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return record(tmp_path / "recording")


def test_replayed_equals_live(folder: Path) -> None:
    live, replayed = listening(), listening()
    feed(live, list(MESSAGES))
    for message in replay(folder):
        replayed.receive(message)
    assert same_states(live.state(), replayed.state())
    assert torch.equal(live.answer(CASE.question), replayed.answer(CASE.question))
    assert int(live.state()["seen"]) == len(MESSAGES)


def test_the_folder(folder: Path) -> None:
    numbers = range(1, len(MESSAGES) + 1)
    expected = {"manifest.json", "messages.sha256", *[f"messages/{number:08d}.safetensors" for number in numbers]}
    assert set(contents(folder)) == expected
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == "recleak recording"
    assert manifest["version"] == 1
    assert manifest["source"] == "run 1"
    assert manifest["vantage"] == {"name": "Server"}
    assert manifest["complete"] is True
    assert manifest["messages"] == len(MESSAGES)
    assert manifest["sha256"] == hashlib.sha256((folder / "messages.sha256").read_bytes()).hexdigest()
    described = {"name": "item", "storage": "per_item", "role": "item", "shape": [4], "layer": None, "shared": True}
    assert manifest["components"][1] == described
    assert read_manifest(folder) == Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    for number, line in enumerate((folder / "messages.sha256").read_text().splitlines(), start=1):
        data = (folder / f"messages/{number:08d}.safetensors").read_bytes()
        assert line == f"{hashlib.sha256(data).hexdigest()}  messages/{number:08d}.safetensors"


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed")
def test_sha256sum_reads_the_digests(folder: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--quiet", "messages.sha256"], cwd=folder, check=True)


def test_a_recording_holds_what_its_vantage_point_sees(tmp_path: Path) -> None:
    one = torch.tensor([1])
    extra: list[Message] = [Push(0, one, one, {"w": torch.ones(1)}, one - 1), Disclosure(one, {}, {"age": one})]
    expected: dict[str, tuple[Vantage[Any], set[type]]] = {
        "aggregator": (Aggregator(), {Broadcast, Disclosure}),
        "peers": (Peers(torch.ones(1, 2, dtype=torch.bool)), {Push, Disclosure}),
        "audience": (Audience(), {Disclosure}),
    }
    for name, (vantage, kinds) in expected.items():
        writer = Recorder(vantage, tmp_path / name)
        feed(writer, [*MESSAGES, *extra])
        writer.close()
        assert {type(message) for message in replay(tmp_path / name)} == kinds
    assert read_manifest(tmp_path / "peers").vantage == {"name": "Peers", "nodes": 2, "groups": [[0, 1]]}


def test_an_empty_recording(tmp_path: Path) -> None:
    writer = recorder(tmp_path / "empty")
    writer.close()
    assert list(replay(tmp_path / "empty")) == []
    assert read_manifest(tmp_path / "empty").complete


# --- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", range(len(MESSAGES) + 1))
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_killed_run_continues_with_the_same_bytes(tmp_path: Path, folder: Path, saved: int, after: int) -> None:
    first, attack = recorder(tmp_path / "again"), listening()
    for tap in (first, attack):
        feed(tap, list(MESSAGES[:saved]))
    states = first.state(), attack.state()
    feed(first, list(MESSAGES[saved : saved + after]))  # written after the round was saved, then killed
    written = min(saved + after, len(MESSAGES))
    assert [encode(message) for message in replay(tmp_path / "again")] == [encode(m) for m in MESSAGES[:written]]

    second, rest = recorder(tmp_path / "again"), listening()
    second.restore(states[0])
    rest.restore(states[1])
    assert len(list(replay(tmp_path / "again"))) == saved
    for tap in (second, rest):
        feed(tap, list(MESSAGES[saved:]))
    second.close()
    assert contents(tmp_path / "again") == contents(folder)
    whole = listening()
    feed(whole, list(MESSAGES))
    assert same_states(rest.state(), whole.state())


def test_a_kill_in_the_middle_of_a_message(tmp_path: Path, folder: Path) -> None:
    writer = recorder(tmp_path / "killed")
    feed(writer, list(MESSAGES[:4]))
    state = writer.state()
    whole = tmp_path / "killed" / "messages" / "00000005.safetensors"
    whole.with_name(whole.name + ".part").write_bytes(b"half of")
    assert len(list(replay(tmp_path / "killed"))) == 4
    whole.write_bytes(encode(MESSAGES[4]))  # there, but its line is not
    assert len(list(replay(tmp_path / "killed"))) == 4
    with open(tmp_path / "killed" / "messages.sha256", "ab") as file:
        file.write(b"0123456789")  # half of the line
    (tmp_path / "killed" / "manifest.json.part").write_bytes(b"{")
    assert len(list(replay(tmp_path / "killed"))) == 4
    second = recorder(tmp_path / "killed")
    second.restore(state)
    feed(second, list(MESSAGES[4:]))
    second.close()
    assert contents(tmp_path / "killed") == contents(folder)


def test_a_complete_recording_can_be_continued_from_a_saved_state(tmp_path: Path, folder: Path) -> None:
    """A run that was killed after its last message, before its result was written."""
    before = contents(folder)
    writer = recorder(folder)
    writer.restore({"messages": torch.tensor(2)})
    assert not read_manifest(folder).complete
    feed(writer, list(MESSAGES[2:]))
    writer.close()
    assert contents(folder) == before


def test_an_unfinished_recording_is_not_erased_without_a_saved_state(tmp_path: Path, folder: Path) -> None:
    """A server that is started again with the same settings."""
    feed(recorder(tmp_path / "again"), list(MESSAGES[:3]))
    (tmp_path / "again" / "messages" / "notes.txt").write_text("mine")
    before = contents(tmp_path / "again")
    calls: list[Callable[[Tap], Any]] = [
        lambda tap: tap.receive(MESSAGES[0]),
        lambda tap: tap.state(),
        lambda tap: tap.close(),
    ]
    for call in calls:
        with pytest.raises(DataError, match=r"(?s)unfinished recording already, with 3 messages.*another folder"):
            call(recorder(tmp_path / "again"))
    assert contents(tmp_path / "again") == before
    assert len(list(replay(tmp_path / "again"))) == 3
    second = recorder(tmp_path / "again")
    second.restore({"messages": torch.tensor(0)})
    feed(second, list(MESSAGES))
    second.close()
    found = contents(tmp_path / "again")
    assert found.pop("messages/notes.txt") == b"mine"
    assert found == contents(folder)


def test_an_unfinished_recording_without_a_message_begins_again(tmp_path: Path, folder: Path) -> None:
    recorder(tmp_path / "again").state()
    record(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder)


def test_killed_before_the_manifest_was_there(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "manifest.json.part").write_bytes(b"{")
    record(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_nothing_else_is_overwritten(tmp_path: Path, folder: Path) -> None:
    before = contents(folder)
    with pytest.raises(DataError, match=r"complete recording already\n  Nothing is overwritten"):
        recorder(folder).receive(MESSAGES[0])
    feed(recorder(tmp_path / "unfinished"), list(MESSAGES[:2]))
    others = [
        Recorder(Aggregator(), tmp_path / "unfinished", components=COMPONENTS, source="run 1"),
        Recorder(Server(), tmp_path / "unfinished", components=COMPONENTS[:2], source="run 1"),
        Recorder(Server(), tmp_path / "unfinished", components=COMPONENTS, source="run 2"),
    ]
    unfinished = contents(tmp_path / "unfinished")
    for other, field in zip(others, ("vantage", "components", "source"), strict=True):
        with pytest.raises(DataError, match=rf"manifest\.json: there is a recording of something else: got {field}"):
            other.receive(MESSAGES[0])
        with pytest.raises(DataError, match="something else"):
            other.restore({"messages": torch.tensor(1)})
    assert contents(tmp_path / "unfinished") == unfinished
    assert contents(folder) == before


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match="other files"):
        recorder(tmp_path).receive(MESSAGES[0])
    assert contents(tmp_path) == {"thesis.txt": b"mine"}


def test_a_closed_recorder_takes_nothing_more(tmp_path: Path) -> None:
    writer = recorder(tmp_path / "closed")
    feed(writer, list(MESSAGES[:2]))
    writer.close()
    with pytest.raises(DataError, match="complete recording already"):
        writer.receive(MESSAGES[2])
    assert len(list(replay(tmp_path / "closed"))) == 2


@pytest.mark.parametrize("state", [{}, {"message": torch.tensor(1)}, {"messages": torch.tensor(-1)}])
def test_a_state_of_something_else_is_refused(tmp_path: Path, state: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="expected `messages`"):
        recorder(tmp_path).restore(state)


def test_lost_messages_are_noticed_by_restore(folder: Path, tmp_path: Path) -> None:
    writer = recorder(tmp_path / "short")
    feed(writer, list(MESSAGES[:2]))
    with pytest.raises(DataError, match="got 2 messages, expected at least the 5 of the saved state"):
        recorder(tmp_path / "short").restore({"messages": torch.tensor(5)})


def test_a_changed_message_is_named(folder: Path) -> None:
    file = folder / "messages" / "00000003.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = replay(folder)
    next(found), next(found)
    with pytest.raises(DataError, match=r"00000003\.safetensors: got SHA-256 \w{12}, messages\.sha256 says"):
        next(found)


def test_exchanged_messages_are_named(folder: Path) -> None:
    one, other = (folder / "messages" / f"0000000{number}.safetensors" for number in (2, 3))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    with pytest.raises(DataError, match=r"00000002\.safetensors"):
        list(replay(folder))


def test_a_missing_message_is_named(folder: Path) -> None:
    (folder / "messages" / "00000002.safetensors").unlink()
    with pytest.raises(DataError, match=r"00000002\.safetensors: not readable"):
        list(replay(folder))


def test_a_message_that_is_none_is_named(folder: Path) -> None:
    """The digests are right, the content is not: written by something else, or by another version."""
    (folder / "messages" / "00000001.safetensors").write_bytes(b"nothing")
    lines = (folder / "messages.sha256").read_text().splitlines(keepends=True)
    lines[0] = f"{hashlib.sha256(b'nothing').hexdigest()}  messages/00000001.safetensors\n"
    (folder / "messages.sha256").write_text("".join(lines))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"] = hashlib.sha256((folder / "messages.sha256").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"00000001\.safetensors: Not a usable message: got 7 bytes"):
        list(replay(folder))


def test_changed_digests_are_noticed(folder: Path) -> None:
    path = folder / "messages.sha256"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 1])
    with pytest.raises(DataError, match=r"messages\.sha256: got 8 messages, the manifest says 9"):
        list(replay(folder))
    path.write_bytes(whole.replace(b"a", b"b"))
    with pytest.raises(DataError, match=r"messages\.sha256: its SHA-256 is not"):
        list(replay(folder))
    path.unlink()
    with pytest.raises(DataError, match="got 0 messages"):
        list(replay(folder))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "recleak recording", "version": 2}', "\x00", "\xff"])
def test_a_bad_manifest_is_a_clear_error(folder: Path, content: str) -> None:
    (folder / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"manifest\.json: not a valid manifest"):
        list(replay(folder))
    with pytest.raises(DataError, match=r"manifest\.json: not a valid manifest"):
        recorder(folder).receive(MESSAGES[0])


def test_no_recording_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no manifest\.json\n  Give a folder that a Recorder wrote"):
        list(replay(tmp_path / "nowhere"))


def test_replay_reads_one_message_at_a_time(folder: Path) -> None:
    found = replay(folder)
    next(found)
    for number in range(2, len(MESSAGES) + 1):
        (folder / "messages" / f"{number:08d}.safetensors").unlink()
    with pytest.raises(DataError, match=r"00000002"):
        next(found)


def test_components_are_described(tmp_path: Path) -> None:
    head = Component("head.1", "dense", "head", (3, 2), layer=1, shared=False)
    Recorder(Server(), tmp_path / "x", components=(head,)).state()
    (part,) = read_manifest(tmp_path / "x").components
    assert (part.name, part.storage, part.shape, part.layer, part.shared) == ("head.1", "dense", (3, 2), 1, False)
