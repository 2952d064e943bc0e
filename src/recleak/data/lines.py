"""Files into lines: plain or gzip, told by the first bytes; streamed in blocks, so that memory is bounded by the block.

Text is UTF-8; a line that is not is read as Latin-1 and counted. What is not text gets an error that says what it is.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from recleak.data.interactions import Note
from recleak.errors import DataError

BLOCK_BYTES = 32 << 20
_FIRST_BYTES = 64 << 10
MAX_BAD_SHARE = 0.01
BLANK = " \t\r"  # a line of nothing else is skipped
_LONGEST = 64 << 20  # bytes of a line
_PIECE = 1 << 20  # bytes of lines that are objects of Python at a time
_UNPACKED = 16 << 20  # bytes of text that any gzip file may unpack to
_RATIO = 50  # how many times its size it may unpack to beyond that: logs are 20 times, zeros 1,000
_GZIP = b"\x1f\x8b"
_SHOWN = 100  # characters of a bad line that a message repeats


@dataclass
class Tally:
    """What was seen of a file."""

    file: str
    rows: int = 0
    bad: int = 0
    first_bad: tuple[int, str, str] | None = None  # line, reason, the line's beginning
    latin: int = 0
    first_latin: int | None = None
    blank: int = 0

    def reject(self, line: int, content: str, reason: str) -> None:
        """Remember the first bad row."""
        self.first_bad = self.first_bad or (line, reason, content.rstrip("\r")[:_SHOWN])

    def check(self, hint: str = "") -> None:
        """An error if too many rows were bad."""
        if self.first_bad is None or self.bad <= MAX_BAD_SHARE * self.rows:
            return
        line, reason, content = self.first_bad
        share = f"{self.bad:,} of {self.rows:,} rows cannot be used; the first: {reason}: {content!r}"
        raise DataError(
            share,
            file=self.file,
            line=line,
            remedy=f"{hint}Check the format and the columns; up to {MAX_BAD_SHARE:.0%} of bad rows are skipped.",
        )

    def notes(self, latin_expected: bool) -> list[Note]:
        """What a user should know."""
        found = []
        if self.first_bad is not None:
            line, reason, content = self.first_bad
            what = f"rows dropped; the first: {reason}: {content!r}"
            found.append(Note(what, self.bad, "Mend or delete them to silence this.", self.file, line))
        if self.latin and not latin_expected:
            what = "lines are not UTF-8 and were read as Latin-1"
            found.append(Note(what, self.latin, "Convert the file to UTF-8.", self.file, self.first_latin))
        if self.blank:
            found.append(Note("blank lines skipped", self.blank, file=self.file))
        return found


def find_file(folder: Path, *names: str) -> Path:
    """The first of the named files that is in a folder, plain or .gz."""
    for name in names:
        for candidate in (folder / name, folder / f"{name}.gz"):
            if candidate.is_file():
                return candidate
    there = ", ".join(sorted(each.name for each in folder.iterdir())) if folder.is_dir() else "no such folder"
    raise DataError(
        f"no file {' or '.join(names)} (plain or .gz); there is: {there or 'nothing'}",
        file=folder,
        remedy="Give the folder that holds the files as published.",
    )


def find_one(folder: Path, *patterns: str) -> Path | None:
    """The file of these patterns, if there is one; `meta_*` (Amazon's product descriptions) do not count."""
    found = sorted(each for pattern in patterns for each in folder.glob(pattern) if not each.name.startswith("meta_"))
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise DataError(f"expected one file of interactions, found {names}", file=folder, remedy="Leave one there.")
    return found[0] if found else None


def open_bytes(path: Path) -> BinaryIO:
    """A file's bytes, unpacked if they are gzip; clear errors for what is not delimited text."""
    if not path.is_file():
        raise DataError("no such file", file=path, remedy="Check the path.")
    with path.open("rb") as probe:
        magic = probe.read(4)
    if magic[:2] == _GZIP:
        return cast(BinaryIO, gzip.open(path, "rb"))
    if magic == b"PK\x03\x04":
        raise DataError("this is a zip archive", file=path, remedy="Unpack it and give the file inside.")
    if magic == b"PAR1":
        raise DataError("this is a Parquet file", file=path, remedy="Give it the ending .parquet.")
    if magic[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError("this is UTF-16 text", file=path, remedy="Convert it: iconv -f UTF-16 -t UTF-8 IN > OUT.")
    return path.open("rb")


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as probe:
        return probe.read(2) == _GZIP


def _blocks(path: Path) -> Iterator[bytes]:
    """Blocks of whole lines; the first is small, because some only want to look at the head."""
    carry = b""
    size = min(BLOCK_BYTES, _FIRST_BYTES)
    seen = 0
    try:
        with open_bytes(path) as stream:
            packed = path.stat().st_size
            most = max(_UNPACKED, _RATIO * packed) if _is_gzip(path) else None
            while chunk := stream.read(size if most is None else min(size, most - seen + 1)):
                size = BLOCK_BYTES
                seen += len(chunk)
                if most is not None and seen > most:
                    problem = f"it unpacks to more than {most:,} bytes, expected at most that of {packed:,} bytes"
                    remedy = "If it is yours and right, unpack it first (gunzip) and give the file inside."
                    raise DataError(problem, file=path, remedy=remedy)
                cut = chunk.rfind(b"\n") + 1
                if cut:
                    yield carry + chunk[:cut]
                    carry = chunk[cut:]
                else:
                    carry += chunk
                    if len(carry) > _LONGEST:
                        problem = f"a line of more than {_LONGEST:,} bytes: this is not text"
                        raise DataError(problem, file=path, remedy="Give a text file with a row in each line.")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot be read to its end ({error})", file=path, remedy="Fetch it again.") from error
    if carry:
        yield carry


def pieces(number: int, body: bytes) -> Iterator[tuple[int, bytes]]:
    """Lines in pieces with the number of their first: as objects of Python they take a hundred times their size."""
    start = 0
    while start < len(body):
        end = body.find(b"\n", start + _PIECE) + 1 or len(body)
        piece = body[start:end]
        yield number, piece
        number, start = number + piece.count(b"\n"), end


@dataclass
class LineFeed:
    """The lines of a file, block by block; an iterator for `csv.reader` and a look ahead for everybody else."""

    path: Path
    tally: Tally
    line: int = 0  # the number of the last line handed out
    block: bytes = b""  # UTF-8, lines ended by \n
    at: int = 0  # where the next line begins in it

    def __post_init__(self) -> None:
        self._blocks = _blocks(self.path)

    @property
    def more(self) -> bool:
        """Whether there are lines left in the block."""
        return self.at < len(self.block)

    def peek(self) -> str | None:
        """The next line that is not blank, without taking it."""
        while self.more or self._load():
            line = self.next_line()
            if line.strip(BLANK):
                return line
            self.tally.blank += 1
            self.skip()
        return None

    def next_line(self) -> str:
        """The next line of the block, blank or not, without taking it."""
        return self.block[self.at : self._end()].decode()

    def skip(self) -> None:
        """Take the next line of the block."""
        self.at = self._end() + 1
        self.line += 1

    def rest(self) -> tuple[int, bytes]:
        """The number of the next line, and all lines left in the block; takes them."""
        number, lines = self.line + 1, self.block[self.at :]
        self.line += lines.count(b"\n")
        self.at = len(self.block)
        return number, lines

    def __iter__(self) -> LineFeed:
        return self

    def __next__(self) -> str:
        if not self.more and not self._load():
            raise StopIteration
        line = self.next_line()
        self.skip()
        return line + "\n"

    def _end(self) -> int:
        return self.block.index(b"\n", self.at)

    def _load(self) -> bool:
        raw = next(self._blocks, None)
        if raw is None:
            return False
        if self.line == 0:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if b"\x00" in raw:
            line = self.line + 1 + raw[: raw.index(b"\x00")].count(b"\n")
            raise DataError("a NUL byte: this is not text", file=self.path, line=line, remedy="Give a text file.")
        if b"\r" in raw:
            raw = raw.replace(b"\r\n", b"\n")
        if not raw.endswith(b"\n"):
            raw += b"\n"
        try:
            raw.decode()
        except UnicodeDecodeError:
            raw = b"".join(self._as_utf8(*piece) for piece in pieces(self.line + 1, raw))
        self.block, self.at = raw, 0
        return True

    def _as_utf8(self, first: int, body: bytes) -> bytes:
        """Lines, each of which is read as Latin-1 if it is not UTF-8."""
        lines = enumerate(body.removesuffix(b"\n").split(b"\n"), first)
        return b"".join(self._utf8(line, number) + b"\n" for number, line in lines)

    def _utf8(self, line: bytes, number: int) -> bytes:
        try:
            line.decode()
        except UnicodeDecodeError:
            self.tally.latin += 1
            self.tally.first_latin = self.tally.first_latin or number
            return line.decode("latin-1").encode()
        return line
