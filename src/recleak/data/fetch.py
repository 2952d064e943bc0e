"""Brings a data set of the catalog into the cache: from its publisher, or out of a package that carries it.

A download continues where it stopped, and only named members leave an archive. All happens in a folder beside the
final one, which gets its name once hashes and counts are right. Nothing is fetched before the terms were accepted.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import shutil
import struct
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from recleak.data import catalog
from recleak.data.catalog import Archive, Counts, Entry, Wheel
from recleak.errors import RecleakError

Progress = Callable[[str, int, int | None], None]  # what, bytes so far, bytes in all
_BLOCK = 1 << 20
_LARGEST_MEMBER = 4 << 30
_TIMEOUT = 30
# RuntimeError: a password, or a way of packing that is not known
_NO_ARCHIVE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    KeyError,
    RuntimeError,
    ValueError,
    OverflowError,
)


class FetchError(RecleakError):
    """A data set could not be brought, or is not what it should be."""


def get(name: str, *, accept: Callable[[Entry], bool], progress: Progress) -> tuple[Path, str]:
    """The folder of a data set and how it came there; sources are tried in order."""
    entry = catalog.entry(name)
    found = catalog.locate(name)
    if found is not None:
        return found, "already here"
    folder = catalog.cache_folder() / entry.folders[0]
    if not entry.sources:
        raise FetchError(
            f"{entry.title} cannot be fetched by a program (an account is needed).\n"
            f"  Get it from {entry.home}, then put {entry.needs} into {folder}."
        )
    if not accept(entry):
        raise FetchError(f"The terms of {entry.title} were not accepted; nothing was fetched.")
    staging = folder.with_name(f"{folder.name}.part")  # parts of downloads, which stay, and `fresh`, which does not
    fresh = staging / "fresh"
    failures = []
    for source in entry.sources:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        try:
            how = (
                _from_wheel(source, fresh, entry)
                if isinstance(source, Wheel)
                else _from_archive(source, fresh, entry, progress)
            )
            how += f"; {_check_counts(entry, fresh)}"
        except FetchError as error:
            failures.append(str(error))
            continue
        how += _put_in_place(fresh, folder)
        shutil.rmtree(staging)
        return folder, how
    shutil.rmtree(fresh)
    raise FetchError("\n".join([f"{entry.title} could not be fetched.", *failures, f"  By hand: {entry.home}"]))


def _put_in_place(fresh: Path, folder: Path) -> str:
    """One rename; files that were there, and were not the data set, are set aside."""
    with contextlib.suppress(OSError):
        folder.rmdir()  # only if it is empty
    aside = None
    if folder.is_symlink() or folder.exists():
        aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.old-", dir=folder.parent))
        folder.rename(aside / folder.name)
    fresh.rename(folder)
    return f"; what was there before is now in {aside}" if aside else ""


def _from_archive(source: Archive, fresh: Path, entry: Entry, progress: Progress) -> str:
    name = source.url.rsplit("/", 1)[1]
    part = fresh.with_name(f"{name}.part")
    download(source.url, part, progress)
    if source.members:
        try:
            unpack(part, source.members, fresh, entry)
        finally:
            part.unlink()
    else:
        _verify(part.replace(fresh / name), entry)
    return f"from {source.url}"


def _from_wheel(source: Wheel, fresh: Path, entry: Entry) -> str:
    """By pip, so that whatever package index is set up here is used; nothing is installed."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
        command += ["--only-binary", ":all:", "--dest", scratch, source.requirement]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if run.returncode or not wheels:
            reason = (run.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise FetchError(f"  package {source.requirement}: {reason}")
        if _digest(wheels[0], "sha256") != source.sha256:
            raise FetchError(f"  package {source.requirement}: its sha256 is not {source.sha256}; not used")
        unpack(wheels[0], source.members, fresh, entry)
    return f"out of the package {source.requirement} (its sha256 is right)"


def download(url: str, part: Path, progress: Progress) -> None:
    """A file over HTTP; what is there already is continued if the server can and still has the same file."""
    if not _continue(url, part, progress):
        part.unlink()
        _continue(url, part, progress)


def _continue(url: str, part: Path, progress: Progress) -> bool:
    """False if the part that is here is of no use; never without one."""
    tag = part.with_name(part.name + ".tag")  # which version of the file the part is of
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "recleak"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if tag.exists() and (version := tag.read_text(encoding="latin-1")):
            headers["If-Range"] = version
    total = None
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:  # noqa: S310 (catalog addresses only)
            sent = reply.headers.get("Content-Range", "")
            if have and reply.status == 206 and not sent.startswith(f"bytes {have}-"):
                return False
            if reply.status != 206:  # the server starts from the beginning
                have = 0
            if length := reply.headers.get("Content-Length"):
                total = have + int(length)
            with part.open("ab" if have else "wb") as out:
                if not have:  # the old part is empty by now, so the tag is never that of other bytes
                    etag = reply.headers.get("ETag", "")  # a weak one (W/...) is of no use for `If-Range`
                    version = etag if etag.startswith('"') else reply.headers.get("Last-Modified", "")
                    tag.write_text(version, encoding="latin-1")
                while block := reply.read1(_BLOCK):
                    out.write(block)
                    have += len(block)
                    progress(part.stem, have, total)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise FetchError(f"  {url}: the server answered {error.code} {error.reason}") from error
        if error.headers.get("Content-Range") != f"bytes */{have}":  # else nothing is left to send
            return False
    except (OSError, http.client.HTTPException) as error:
        broken = isinstance(error, http.client.IncompleteRead)
        reason = "the reply broke off" if broken else getattr(error, "reason", error)
        kept = f" {have:,} bytes are kept; the same command continues." if have else ""
        raise FetchError(f"  {url}: {reason}.{kept}") from error
    if total is not None and have < total:
        raise FetchError(f"  {url}: only {have:,} of {total:,} bytes came. The same command continues.")
    return True


def unpack(archive: Path, members: Mapping[str, str], folder: Path, entry: Entry) -> None:
    """Named members into a folder, each of the declared size and checked."""
    title = archive.name.removesuffix(".part")
    try:
        with zipfile.ZipFile(archive) as opened:
            for member, name in members.items():
                size = opened.getinfo(member).file_size
                if size > _LARGEST_MEMBER:
                    raise FetchError(f"  {title}: {member} is larger than {_LARGEST_MEMBER:,} bytes; not used")
                copied = 0
                with opened.open(member) as source, (folder / name).open("wb") as out:
                    while copied <= size and (block := source.read(_BLOCK)):
                        copied += out.write(block)
                if copied != size:
                    raise FetchError(f"  {title}: {member} does not have the declared {size:,} bytes; not used")
                _verify(folder / name, entry)
    except _NO_ARCHIVE as error:
        raise FetchError(f"  {title}: not the archive that was expected ({error})") from error
    except OSError as error:  # an offset that cannot be; or a full disk
        raise FetchError(f"  {title}: cannot be unpacked ({error.strerror or error})") from error


def _verify(path: Path, entry: Entry) -> None:
    """Compares with the known hash, if there is one; a wrong file is deleted."""
    known = entry.checksums.get(path.name.removesuffix(".gz"))
    if known is None:
        return
    kind, _, expected = known.partition(":")
    got = _digest(path, kind)
    if not got.startswith(expected):
        path.unlink()
        raise FetchError(f"  {path.name}: {kind} is {got}, expected {expected}; deleted")


def _digest(path: Path, kind: str) -> str:
    """The sha256 of a file's bytes, or its id as a git blob; of what is in it if it is .gz."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            if kind == "sha256":
                return hashlib.file_digest(stream, "sha256").hexdigest()
            size = sum(len(block) for block in iter(lambda: stream.read(_BLOCK), b""))
            stream.seek(0)
            digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
            while block := stream.read(_BLOCK):
                digest.update(block)
            return digest.hexdigest()
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return "unknown (not a whole gzip file)"


def check_files(name: str, folder: Path) -> dict[str, bool]:
    """For each file of a data set with a known hash that is here, plain or .gz: whether it is as published."""
    checked = {}
    for file, known in catalog.entry(name).checksums.items():
        kind, _, expected = known.partition(":")
        for path in (folder / file, folder / f"{file}.gz"):
            if path.is_file():
                checked[file] = _digest(path, kind).startswith(expected)
    return checked


def _check_counts(entry: Entry, folder: Path) -> str:
    """Reads what came and compares its counts with those of the release."""
    try:
        got = Counts.of(entry.read(folder))
    except RecleakError as error:
        raise FetchError(f"  What came cannot be read and was deleted: {error}") from error
    if got == entry.counts:
        return f"{got.users:,} users, {got.items:,} items, {got.rows:,} rows, as published"
    raise FetchError(f"  What came has {got}, the published data {entry.counts}; deleted")
