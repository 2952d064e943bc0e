"""Files of strangers: whatever is in them, there is a `RecleakError` or a value, and nothing else happens."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import time
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from recleak.audited import _graded, ranked, stored
from recleak.cells import Ask
from recleak.data import catalog, lines
from recleak.data.arrays import Arrays
from recleak.data.columns import read_columns, read_users
from recleak.data.fetch import FetchError, unpack
from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic
from recleak.errors import DataError, RecleakError
from recleak.files import read_bytes, read_table, refuse_links
from recleak.findings import Findings, FindingsError
from recleak.models.mf import MF
from recleak.papers.base import load
from recleak.parquet import size_of
from recleak.protocols.centralized import Centralized, train_centralized
from recleak.protocols.federated import Federated, train_federated
from recleak.protocols.gossip import Gossip, train_gossip
from recleak.protocols.published import Published
from recleak.protocols.saving import Checkpoint
from recleak.protocols.vectors import Vectors
from recleak.recording import Recorder, replay
from recleak.strict_json import parse_json
from recleak.testing.breaking import broken
from recleak.testing.hostile import Late, Reader, excused, readers
from recleak.training.cohort import LocalTraining
from recleak.training.optimizers import Adam
from recleak.training.state import CheckpointError, ClientStore, locked, read_file, replace_file
from recleak.wire import Broadcast, MessageError, Server, decode

NAMES = (
    *("Broadcast", "Upload", "Aggregate", "Push", "Recommendations", "Disclosure", "Embeddings", "recording"),
    *("audited recording", "checkpoint", "what clients keep", "npy", "npz", "safetensors", "data set", "LensKit"),
    *("RecBole", "MovieLens-100K", "MovieLens-1M", "MovieLens-10M", "MovieLens, CSV", "Foursquare"),
    *("Foursquare, compact", "Gowalla", "Steam", "Amazon, JSON", "Amazon, gzip", "Amazon, CSV", "Taobao"),
    *(
        "CSV",
        "gzip CSV",
        "Parquet",
        "lists",
        "ids",
        "findings",
        "facts of a cell",
        "archive",
        "run directory",
        "ranks of a cell",
    ),
    *("lists of a run", "vectors of a run", "experiment", "stored result", "Flower array", "reproduction"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    return readers(tmp_path_factory.mktemp("sound"), load("imia"))


def put(content: dict[str, bytes], folder: Path) -> Path:
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


# --- all readers --------------------------------------------------------------------------------------------------


def test_every_reader_reads_what_is_sound(made: dict[str, Reader], tmp_path: Path) -> None:
    assert set(made) == set(NAMES)
    for name, reader in made.items():
        reader.read(put(dict(reader.sound), tmp_path / name))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(NAMES), number=st.integers(0, 10**9))
def test_a_broken_file_is_refused_or_read(
    made: dict[str, Reader], tmp_path_factory: pytest.TempPathFactory, name: str, number: int
) -> None:
    folder = put(broken(made[name], name, number, seed=2), tmp_path_factory.mktemp("broken"))
    try:
        made[name].read(folder)
    except RecleakError as error:
        assert str(error)  # noqa: PT017 (any number of inputs raise none)
        assert not excused(error)  # noqa: PT017


@pytest.mark.parametrize(("wrong", "counts"), [(MemoryError(), False), (Late(), False), (OSError("gone"), True)])
def test_an_alarm_or_a_lack_of_memory_is_no_refusal(
    wrong: BaseException, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a reader that never ends, or takes all memory, would pass."""

    def struck(*given: Any, **named: Any) -> Any:
        raise wrong

    np.save(tmp_path / "a.npy", np.ones((2, 3)))
    monkeypatch.setattr("recleak.data.arrays._npy", struck)
    with pytest.raises(BaseException) as raised:  # noqa: PT011 (of whatever kind)
        Arrays.of(tmp_path / "a.npy")
    assert excused(raised.value) is not counts
    assert isinstance(raised.value, RecleakError) is not isinstance(wrong, Late)


def test_what_is_broken_can_be_made_again(made: dict[str, Reader]) -> None:
    one, again, other = (broken(made["npz"], "npz", number) for number in (3, 3, 4))
    assert one == again
    assert one != other


def test_most_of_what_is_broken_is_refused(made: dict[str, Reader], tmp_path: Path) -> None:
    """Otherwise nothing would be tested."""
    refused = 0
    for number in range(40):
        try:
            made["Upload"].read(put(broken(made["Upload"], "Upload", number), tmp_path / str(number)))
        except RecleakError:
            refused += 1
    assert refused > 30


# --- arrays -------------------------------------------------------------------------------------------------------


def npy(descr: str, shape: str, body: bytes = b"", version: int = 1, length: int | None = None) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    size = len(header) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", size) + header + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (npy("'<f4'", "(1000000000, 1000000000)"), "takes 4,000,000,000,000,000,000 bytes, there are 0"),
        (npy("'<f4'", "(2, 3)", bytes(23)), "takes 24 bytes, there are 23"),
        (npy("'|O'", "(2, 3)", b"cos\nsystem\n"), "expected a type of plain numbers or text"),
        (npy("[('a', '<f4')]", "(2, 3)", bytes(24)), "expected a type of plain numbers"),
        (npy("'<f4'", "(2, 3)", bytes(24), version=2, length=2**32 - 1), "header has 4,294,967,295 bytes"),
        (npy("'<f4'", "(2, -3)", bytes(24)), "expected descr, fortran_order and shape"),
        (npy("'<f4'", "(" + "1" * 60, bytes(8)), "expected descr, fortran_order and shape"),  # at once
        (npy("'<f4'", "(2," + "1," * 40 + ")", bytes(8)), "has 41 axes"),
        (npy("'<f4'", "(2, 3)", np.full(6, np.inf, "<f4").tobytes()), "2 of 2 rows of 'array' .* not finite"),
        (npy("'<f4'", "(0, 3)"), "expected a row of numbers"),
        (npy("'<f8'", "(6,)", bytes(48)), "expected a row of numbers"),
        (b"\x93NUMPY\x01", "does not begin as a NumPy array"),
        (b"", "does not begin as a NumPy array"),
    ],
)
def test_numpy_arrays_that_cannot_be(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(DataError, match=message):
        Arrays.of(tmp_path / "a.npy").matrix("array")


def zipped(path: Path, *members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members:
            with pytest.warns(UserWarning, match="Duplicate") if name in archive.namelist() else nullcontext():
                archive.writestr(name, data)
    return path


def test_archives_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = npy("'<f4'", "(2, 3)", bytes(24))
    monkeypatch.setattr("recleak.data.arrays._PACKED", 1 << 16)
    bomb = zipped(tmp_path / "bomb.npz", ("user.npy", npy("'<f4'", f"({1 << 19},)", bytes(1 << 21))))
    with pytest.raises(DataError, match=r"unpacks to 2,097,\d+ bytes, expected at most"):
        Arrays.of(bomb)
    with pytest.raises(DataError, match="two arrays are called 'user'"):
        Arrays.of(zipped(tmp_path / "twice.npz", ("user.npy", fine), ("user.npy", fine)))
    with pytest.raises(DataError, match="packed in a way"):
        Arrays.of(zipped(tmp_path / "lzma.npz", ("user.npy", fine), method=zipfile.ZIP_LZMA))
    monkeypatch.setattr("recleak.data.arrays._MEMBERS", 1)
    with pytest.raises(DataError, match="2 members, expected at most 1"):
        Arrays.of(zipped(tmp_path / "many.npz", ("a.npy", fine), ("b.npy", fine)))


def test_publishers_archives_that_cannot_be(tmp_path: Path) -> None:
    members, entry = {"x/a.csv": "a.csv"}, catalog.CATALOG["taobao"]
    sound = zipped(tmp_path / "a.zip", ("x/a.csv", b"1,2\n" * 9)).read_bytes()
    at = sound.index(b"PK\x01\x02")  # the list of members
    for place, value, message in (
        (at + 42, 2**31, "cannot be unpacked|not the archive"),  # where it begins
        (at + 8, 1, "not the archive"),  # a password
        (at + 10, 99, "not the archive"),  # a way of packing
        (at + 24, 2**32 - 2, "not the declared|does not have the declared|larger than"),  # its size
    ):
        width = 4 if value > 2**16 else 2
        broken = sound[:place] + value.to_bytes(width, "little") + sound[place + width :]
        (tmp_path / "a.zip").write_bytes(broken)
        with pytest.raises(FetchError, match=message):
            unpack(tmp_path / "a.zip", members, tmp_path, entry)


def test_names_in_an_archive_lead_nowhere_and_objects_are_left_alone(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    fine = npy("'<f4'", "(2, 3)", bytes(24))
    odd = zipped(inside / "odd.npz", ("../../evil.npy", fine), ("objects.npy", npy("'|O'", "(2, 3)", b"cos\n")))
    arrays = Arrays.of(odd)
    assert arrays.shapes == {"../../evil": (2, 3)}
    arrays.matrix("../../evil")
    assert {each.name for each in tmp_path.rglob("*")} == {"inside", "odd.npz"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [2**40, 2**40]}, "takes 4,835,703,278,458,516,698,824,704 bytes"),
        ({"data_offsets": [0, 10**9]}, "takes 24 bytes, its place has 1,000,000,000"),
        ({"data_offsets": [24, 0]}, "data_offsets"),
        ({"shape": [-2, -3]}, "shape"),
        ({"shape": [2.0, 3]}, "shape"),
        ({"dtype": "F8_E5M2"}, "cannot tell which array"),
        ({"dtype": ["F32"]}, "cannot tell which array"),
    ],
)
def test_tensors_that_cannot_be(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    data = save({"user": np.zeros((2, 3), np.float32)})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["user"] |= change
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    def read() -> object:
        arrays = Arrays.of(tmp_path / "a.safetensors")
        return arrays.matrix(arrays.choose(None, ("user",), "user"))

    with pytest.raises(DataError, match=message):
        read()


def test_a_header_longer_than_the_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(DataError, match="header should have 9,223,372,036,854,775,808 bytes, the file has 10"):
        Arrays.of(tmp_path / "a.safetensors")


def test_text_that_is_none(tmp_path: Path) -> None:
    for place, letter in enumerate((0x110000, 0xD800)):
        np.savez(tmp_path / f"{place}.npz", user_ids=np.array([letter], "<u4").view("<U1"))
        with pytest.raises(DataError, match="are no text"):
            Arrays.of(tmp_path / f"{place}.npz").ids("user_ids")


# --- JSON ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[" * 101 + "]" * 101, "more than 100 levels"),
        ('{"a": {"b": 1, "b": 2}}', "'b' stands twice"),
        ("[NaN]", "NaN is no JSON"),
        ("[-Infinity]", "-Infinity is no JSON"),
        ("1" * 5000, "digits"),
        (b"\xff", "utf-8"),
    ],
)
def test_json_that_is_not_plain(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_json_that_is_plain() -> None:
    assert parse_json(b'{"a": [1, {"a": null}], "b": 1e3}') == {"a": [1, {"a": None}], "b": 1000.0}
    assert parse_json("[Infinity]", constants=True) == [float("inf")]


def test_a_key_that_stands_twice_is_found_in_one_pass() -> None:
    names = [str(place) for place in range(200_000)]
    text = "{" + ",".join(f'"{name}":0' for name in (*names, names[-1])) + "}"
    begun = time.process_time()
    with pytest.raises(ValueError, match="'199999' stands twice"):
        parse_json(text)
    assert time.process_time() - begun < 5  # one pair of keys after the other would take minutes


# --- tables and text ----------------------------------------------------------------------------------------------


MANY = 1 << 20


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pl.DataFrame({"user": np.zeros(16 * MANY, np.int8)}), "16,777,216 rows that take"),
        (pl.DataFrame({"user": [[0] * (9 * MANY)]}, schema={"user": pl.List(pl.Int8)}), "1 rows that take"),
        (pl.DataFrame({f"a{n}": np.zeros(MANY // 4) for n in range(40)}), "262,144 rows that take"),
        (pl.DataFrame({"user": ["x" * 1_000] * MANY}), "texts of 1,048,576,000 bytes"),
    ],
)
def test_a_small_file_of_a_large_table_is_not_read(tmp_path: Path, table: pl.DataFrame, message: str) -> None:
    """Rows, lists, columns and texts that take no room in a file, and much in memory."""
    path = tmp_path / "a.parquet"
    table.rename({table.columns[0]: "user"}).with_columns(item=pl.lit(1)).write_parquet(path)
    assert path.stat().st_size < 100_000
    for read in (read_table, read_columns, read_users):
        with pytest.raises(DataError, match=rf"got {message}.*at most 67,108,864 of .*\n.*write it as CSV"):
            read(path)


def test_tables_that_repeat_themselves_are_read(tmp_path: Path) -> None:
    """The same ten items for everybody: 170 times as much in memory as in the file, and right."""
    users = 150_000
    who = pl.Series("user", range(users)).cast(pl.String)
    lists = pl.DataFrame({"user": who.repeat_by(10).explode(), "item": [f"i{rank}" for rank in range(10)] * users})
    lists = lists.with_columns(session=pl.lit(0, pl.Int64), rank=pl.int_range(pl.len()) % 10)
    lists.write_parquet(tmp_path / "a.parquet")
    assert size_of(tmp_path / "a.parquet", 1 << 60).memory > max(
        64 << 20, 100 * (tmp_path / "a.parquet").stat().st_size
    )
    assert read_table(tmp_path / "a.parquet").equals(lists)


def test_sizes_of_tables(tmp_path: Path) -> None:
    """Never less than it really takes, and not many times as much."""
    rng = np.random.default_rng(0)
    table = pl.DataFrame(
        {
            "a": rng.integers(50, size=30_000).astype(np.int32),
            "b": rng.normal(size=30_000),
            "c": pl.Series(rng.integers(9, size=30_000)).cast(pl.String),
            "d": [["x"], [], ["yy", None]] * 10_000,
            "e": [True, None, False] * 10_000,
        }
    )
    for options in ({}, {"compression": "uncompressed"}, {"row_group_size": 700}, {"data_page_size": 1_000}):
        table.write_parquet(tmp_path / "a.parquet", **options)
        found = size_of(tmp_path / "a.parquet", 1 << 60)
        assert found.rows == 30_000
        assert table.estimated_size() <= found.memory <= 8 * table.estimated_size()
    assert size_of(tmp_path / "a.parquet", 1_000).memory > 1_000  # it stops early
    for odd in (b"", b"PAR1", b"PAR1" + b"\x15" * 40 + (40).to_bytes(4, "little") + b"PAR1", b"\xff" * 60 + b"PAR1"):
        (tmp_path / "b.parquet").write_bytes(odd)
        with pytest.raises(ValueError, match=r"footer|bookkeeping|type|bits|things|nested"):
            size_of(tmp_path / "b.parquet", 1 << 60)


def test_a_footer_that_lies_is_not_believed(tmp_path: Path) -> None:
    """The pages say how much there is, whatever the end of the file says."""
    table = pl.DataFrame({"user": np.zeros(16 * MANY, np.int8)})
    table.write_parquet(tmp_path / "a.parquet", row_group_size=table.height, statistics=False)
    data = (tmp_path / "a.parquet").read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    said = _varint(2 * table.height)
    assert said in data[footer:]
    less = bytes([20 | 128, *[128] * (len(said) - 2), 0])  # 10, as long
    (tmp_path / "a.parquet").write_bytes(data[:footer] + data[footer:].replace(said, less))
    assert size_of(tmp_path / "a.parquet", 1 << 60).memory > 64 << 20
    with pytest.raises(DataError, match="rows that take"):
        read_table(tmp_path / "a.parquet")


def _varint(value: int) -> bytes:
    """A number as Thrift writes it, without its sign."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def test_lists_stand_only_where_they_are_expected(tmp_path: Path) -> None:
    nested = pl.DataFrame({"user": [1], "item": [2], "categories": [["a"]]})
    nested.write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"the column 'categories' is List\(String\), expected plain values"):
        read_table(tmp_path / "a.parquet")
    assert read_table(tmp_path / "a.parquet", lists=["categories"]).equals(nested)
    with pytest.raises(DataError, match="a column 'categories', expected user, item"):
        read_table(tmp_path / "a.parquet", lists=["categories"], columns=["user", "item"])
    with pytest.raises(DataError, match=r"a column cannot be used: 'categories' is List\(String\)"):
        read_users(tmp_path / "a.parquet")


def test_a_small_archive_of_much_text_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(gzip.compress(b"user,item\n" + b"1,1\n" * (5 * MANY)))
    with pytest.raises(DataError, match=r"unpacks to more than 16,777,216 bytes.*\n.*gunzip"):
        read_columns(path)
    seen = np.random.default_rng(0).integers(8, size=MANY).tolist()
    rows = (f"{n // 1000},{item},{1_700_000_000 + n // 50},GET /item 200\n" for n, item in enumerate(seen))
    log = "user,item,time,what\n" + "".join(rows)
    path.write_bytes(gzip.compress(log.encode()))
    assert len(log) > max(16 << 20, 20 * path.stat().st_size)  # as logs are
    assert len(read_columns(path)) == MANY


def test_a_row_of_far_too_many_fields_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"user,item" + b"," * 20_000 + b"\n1,2" + b"," * 20_000 + b"\n")
    with pytest.raises(DataError, match="a row of 20,002 fields, expected at most 10,000"):
        read_columns(tmp_path / "a.csv")


def test_an_endless_line_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_LONGEST", 1 << 18)
    monkeypatch.setattr(lines, "BLOCK_BYTES", 1 << 16)
    (tmp_path / "a.csv").write_bytes(gzip.compress(b"user,item\n" + b"x" * (1 << 22)))
    with pytest.raises(DataError, match="a line of more than 262,144 bytes"):
        read_columns(tmp_path / "a.csv")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a plain one"):
        read_bytes(tmp_path / "pipe")
    with pytest.raises(DataError):
        read_table(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(11))
    with pytest.raises(OSError, match="11 bytes, expected at most 10"):
        read_bytes(tmp_path / "large", 10)


# --- links --------------------------------------------------------------------------------------------------------


def test_nothing_behind_links_is_read_or_written(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in (".lock", "run.json", "cells/x/facts.json"):
        folder = tmp_path / f"run of {name.replace('/', ' ')}"
        (folder / name).parent.mkdir(parents=True)
        (folder / name).symlink_to(precious)
        with pytest.raises(DataError, match="a link"), locked(folder):
            pass
    assert precious.read_text() == "mine"
    (tmp_path / "to a run").symlink_to(tmp_path / "empty", target_is_directory=True)
    (tmp_path / "empty").mkdir()
    refuse_links(tmp_path / "to a run")  # the folder itself may be one: its owner named it


def test_a_recording_with_links_is_refused(tmp_path: Path) -> None:
    recorder = Recorder(Server(), tmp_path / "recording")
    recorder.receive(Broadcast(0, {}))
    recorder.close()
    message = tmp_path / "recording" / "messages" / "00000001.safetensors"
    message.rename(tmp_path / "elsewhere")
    message.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="a link"):
        list(replay(tmp_path / "recording"))
    message.unlink()
    (tmp_path / "recording" / "messages").rmdir()
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "00000007.safetensors").touch()
    (tmp_path / "recording" / "messages").symlink_to(tmp_path / "others", target_is_directory=True)
    with pytest.raises(DataError, match="a link"):
        Recorder(Server(), tmp_path / "recording").restore({"messages": torch.tensor(0)})
    assert (tmp_path / "others" / "00000007.safetensors").exists()


def test_findings_with_links_or_of_other_types_are_refused(made: dict[str, Reader], tmp_path: Path) -> None:
    sound = dict(made["findings"].sound)
    about = json.loads(sound["findings.json"])
    for key, value in (("systems", {}), ("level", "high"), ("level", 2), ("notes", [1]), ("environment", [])):
        folder = tmp_path / f"{key} {value}"
        odd = {**about, "about": {**about["about"], key: value}}
        put({**sound, "findings.json": json.dumps(odd).encode()}, folder)
        with pytest.raises(FindingsError, match=key):
            Findings.read(folder)
    odd_table = io.BytesIO()
    scores = pl.read_parquet(io.BytesIO(sound["findings/scores.parquet"]))
    scores.with_columns(pl.struct("value").alias("value")).write_parquet(odd_table)
    with pytest.raises(FindingsError, match=r"scores.*the column 'value' is Struct"):
        Findings.read(put({**sound, "findings/scores.parquet": odd_table.getvalue()}, tmp_path / "struct"))
    linked = put(sound, tmp_path / "linked")
    (linked / "report.html").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FindingsError, match="a link"):
        Findings.read(linked)


def test_cells_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    for text in ("[]", "{}", "{", "[" * 5000, '{"reason": null, "reason": 1}'):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(DataError, match="it will be measured again"):
            stored(tmp_path / "a.json", "reason")
    whole = {"user": [0, 2], "valid": [True, False], "auc": [0.5, None], "exposed": [0.1, 0.2], "accuracy": [0.0, 1.0]}
    table = pl.DataFrame({**whole, "round": [0, 0], "activity": [3, 4]})
    table.write_parquet(tmp_path / "a.parquet")
    items, gender, community = Ask("a", {}), Ask("a", {}, attribute="gender"), Ask("a", {}, community=5)
    assert _graded(tmp_path / "a.parquet", 3, gender).equals(table)
    cases = ((2, gender, table), (3, items, table), (3, community, table), (3, gender, table.drop("auc")))
    for users, ask, frame in cases:
        frame.write_parquet(tmp_path / "a.parquet")
        with pytest.raises(DataError, match="it will be measured again"):
            _graded(tmp_path / "a.parquet", users, ask)


def test_ranks_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    whole = pl.DataFrame({"user": [0, 2], "hit@10": [0.0, 1.0]})
    whole.write_parquet(tmp_path / "a.parquet")
    assert ranked(tmp_path / "a.parquet", "hit@10").equals(whole)
    for frame in (
        whole.drop("user"),
        whole.drop("hit@10"),
        whole.with_columns(user=pl.lit(0)),
        whole.with_columns(pl.col("hit@10").cast(pl.String)),
        whole.with_columns(pl.lit(None, pl.Float64).alias("hit@10")),
    ):
        frame.write_parquet(tmp_path / "a.parquet")
        with pytest.raises(DataError, match="it will be measured again"):
            ranked(tmp_path / "a.parquet", "hit@10")
    whole.write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="it will be measured again"):
        ranked(tmp_path / "a.parquet", by="recommender")


THREE = Interactions.build(pl.DataFrame({"user": ["a", "b", "c"], "item": ["x", "y", "z"]}))


def test_lists_of_a_run_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pl.DataFrame({"user": ["a", "a", "c"], "item": ["x", "z", "y"], "session": [0] * 3, "rank": [0, 1, 0]})
    given = Published(str(tmp_path / "a.parquet"))
    whole.write_parquet(tmp_path / "a.parquet")
    given.send(THREE, [])
    for frame, message in (
        (whole.drop("rank"), "expected texts user, item"),
        (whole.with_columns(user=pl.lit(1)), "expected texts user, item"),
        (whole.with_columns(rank=pl.lit(None, pl.Int64)), "expected texts user, item"),
        (whole.with_columns(rank=pl.Series([0, 2**40, 0])), "are not 0, 1, 2"),
        (whole.with_columns(rank=pl.Series([-1, 0, 0])), "are not 0, 1, 2"),
        (whole.with_columns(rank=0), "are not 0, 1, 2"),
    ):
        frame.write_parquet(tmp_path / "a.parquet")
        with pytest.raises(DataError, match=message):
            given.send(THREE, [])
    monkeypatch.setattr("recleak.protocols.published._PLACES", 3)
    monkeypatch.setattr("recleak.protocols.published._RATIO", 1)
    whole.write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"2 lists, the longest of 2 items, take 4 places for 3"):
        given.send(THREE, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user": torch.tensor([0.0, 2.0])}, "user"),
        ({"user": torch.tensor([0, -1])}, "negative"),
        ({"vector": torch.ones(3, 3)}, "B = 2"),
        ({"vector": torch.full((2, 3), torch.nan)}, "not finite"),
        ({"item_vector": torch.ones(1, 4)}, "d = 3"),
        ({"item": torch.tensor([3])}, "the data have 3"),
    ],
)
def test_vectors_of_a_run_that_are_none(tmp_path: Path, change: dict[str, torch.Tensor], message: str) -> None:
    whole = {"user": torch.tensor([0, 2]), "vector": torch.ones(2, 3), "item": torch.tensor([1])}
    replace_file(tmp_path / "a.safetensors", {**whole, "item_vector": torch.ones(1, 3), **change}, {})
    with pytest.raises(DataError, match=message):
        Vectors(str(tmp_path / "a.safetensors")).send(THREE, [])


# --- messages and checkpoints -------------------------------------------------------------------------------------


def test_a_header_with_a_key_twice_is_refused() -> None:
    text = b'{"__metadata__":{"recleak":"{}"},"__metadata__":{"recleak":"{}"}}'
    with pytest.raises(MessageError):
        decode(len(text).to_bytes(8, "little") + text)
    inner = json.dumps('{"version":1,"version":1,"kind":"broadcast","numbers":{"round":0},"tensors":[]}')
    text = f'{{"__metadata__":{{"recleak":{inner}}}}}'.encode()
    with pytest.raises(MessageError, match="expected a JSON object with a version"):
        decode(len(text).to_bytes(8, "little") + text)


def saved(folder: Path, **about: Any) -> Checkpoint:
    checkpoint = Checkpoint(folder, {"format": "x"})
    folder.mkdir()
    (folder / "run.json").write_text('{"format": "x"}')
    facts = {"run": checkpoint._run, "round": 2, "loss": [0.5], **about}
    replace_file(folder / "checkpoint.safetensors", {"w": torch.ones(2, 3)}, facts)
    return checkpoint


def test_what_was_saved_is_what_is_asked_for(tmp_path: Path) -> None:
    found = saved(tmp_path / "run").read(5, ())
    assert found is not None
    assert torch.equal(found.tensor("w", torch.zeros(2, 3)), torch.ones(2, 3))
    assert (found.count("round"), found.numbers("loss")) == (2, [0.5])
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: found.tensor("w", torch.zeros(3, 2)), r"'w' is torch.float32\[2, 3\], expected torch.float32\[3, 2\]"),
        (lambda: found.tensor("w", torch.zeros(2, 3, dtype=torch.float16)), "expected torch.float16"),
        (lambda: found.tensor("v", torch.zeros(2)), "'v' is nothing"),
        (lambda: found.count("loss"), "expected a whole number from 0"),
        (lambda: found.numbers("round"), "expected a list of numbers"),
    ]
    for ask, message in wrong:
        with pytest.raises(CheckpointError, match=message):
            ask()


@pytest.mark.parametrize("round", [-1, 1.5, "2", None, [2]])
def test_rounds_that_cannot_be(tmp_path: Path, round: Any) -> None:
    with pytest.raises(CheckpointError, match="'round' is"):
        saved(tmp_path / "run", round=round).read(5, ())


def test_what_a_tap_cannot_use_is_told(tmp_path: Path) -> None:
    recorder = Recorder(Server(), tmp_path / "recording")
    with pytest.raises(CheckpointError, match="what tap 0 knew cannot be used"):
        saved(tmp_path / "run").read(5, [recorder])


def test_facts_that_are_no_object(tmp_path: Path) -> None:
    for text in ("[1]", "[" * 5000, '{"a": 1, "a": 2}', "x"):
        (tmp_path / "a.safetensors").write_bytes(save({"w": np.ones(2)}, {"recleak": text}))
        with pytest.raises(CheckpointError, match="not readable"):
            read_file(tmp_path / "a.safetensors")


def test_a_journal_that_points_outside(tmp_path: Path) -> None:
    parts = MF(factors=2).components()
    arguments = (parts, Adam(), 4, 3, 0, tmp_path)
    ClientStore(*arguments)
    none = torch.zeros(0, dtype=torch.int64)
    for client in (torch.tensor([4]), torch.tensor([-1]), torch.tensor([0.0])):
        tensors = {"client": client, "user": none, "item": none, "visited": torch.ones(1, dtype=torch.uint8)}
        replace_file(tmp_path / "clients" / "journal" / "00000000.safetensors", tensors, {"committed": 0})
        with pytest.raises(CheckpointError, match="cannot be put back"):
            ClientStore(*arguments)


@pytest.mark.parametrize("name", ["clients", "clients/writes.bin", "clients/journal/1.safetensors.partial"])
def test_what_clients_keep_is_in_plain_files(tmp_path: Path, name: str) -> None:
    """The first is a file where a folder should be, the others are folders."""
    arguments = (MF(factors=2).components(), Adam(), 4, 3, 0, tmp_path)
    if name == "clients":
        (tmp_path / name).write_bytes(b"")
    else:
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="cannot be used"):
        ClientStore(*arguments)


DATA = Synthetic(n_users=12, n_items=20, mean_activity=5, min_activity=3).generate()
LOCAL = LocalTraining(epochs=1, negatives=1, batch_size=8)


def federated(rounds: int, folder: Path) -> object:
    return train_federated(Federated(rounds=rounds, local=LOCAL), MF(factors=2), DATA, directory=folder)


def gossip(rounds: int, folder: Path) -> object:
    return train_gossip(Gossip(rounds=rounds, degree=2, delay=1, local=LOCAL), MF(factors=2), DATA, directory=folder)


def centralized(rounds: int, folder: Path) -> object:
    return train_centralized(Centralized(epochs=rounds), MF(factors=2), DATA, directory=folder)


@pytest.mark.heavy
@pytest.mark.parametrize("train", [federated, gossip, centralized])
def test_a_checkpoint_of_other_shapes_is_refused(train: Callable[[int, Path], object], tmp_path: Path) -> None:
    train(1, tmp_path / "run")
    file = tmp_path / "run" / "checkpoint.safetensors"
    tensors, about = read_file(file)
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "longer": lambda value: torch.cat([value, value]),
        "whole numbers": lambda value: value.to(torch.int32),
    }
    for name in tensors:
        for change in changes.values():
            if tensors[name].numel() and tensors[name].dim():
                replace_file(file, {**tensors, name: change(tensors[name])}, about)
                with pytest.raises(CheckpointError):
                    train(2, tmp_path / "run")
        replace_file(file, {each: value for each, value in tensors.items() if each != name}, about)
        with pytest.raises(CheckpointError):
            train(2, tmp_path / "run")
    for key in about:
        replace_file(file, tensors, {**about, key: "x"})
        with pytest.raises(CheckpointError):
            train(2, tmp_path / "run")
    replace_file(file, tensors, about)
    train(2, tmp_path / "run")


def test_a_truncated_archive_says_so(tmp_path: Path) -> None:
    out = io.BytesIO()
    np.savez(out, user=np.ones((3, 2)))
    (tmp_path / "a.npz").write_bytes(out.getvalue()[:-30])
    with pytest.raises(DataError, match=r"a.npz: not readable as npz \(.*\)\n  Save it again"):
        Arrays.of(tmp_path / "a.npz")
