"""What a Parquet file unpacks to, by its own bookkeeping: the footer and the headers of its pages. Nothing is decoded.

A footer may say anything, but a decoder goes by the pages, so they are asked too, and the larger number counts.
(Apache Parquet's `parquet.thrift`, in Thrift's compact protocol.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_MAGIC = b"PAR1"
_FOOTER = 1 << 28  # bytes
_HEADERS = (1 << 9, 1 << 16)  # bytes of a page's header: of most, and of one with long statistics
_PAGE = 256  # bytes that a page takes, whatever is in it
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 16, 4: 4, 5: 8, 6: 16, 7: 16}  # bytes of a value in memory by its physical type
_LIST = 8  # bytes of an end of a list
_DELTA_STRINGS = 7  # an encoding in which a text begins as the one before it
_DEEPEST = 64
_BYTES, _TRUE, _FALSE, _DOUBLE, _TEXT, _LISTS, _SETS, _MAP, _STRUCT, _UUID = 3, 1, 2, 7, 8, 9, 10, 11, 12, 13


@dataclass(frozen=True)
class Size:
    """Rows of a table, and the bytes that it takes in memory, at most; a text that stands often counts once."""

    rows: int
    memory: int


@dataclass(frozen=True)
class _Chunk:
    """A column of a row group."""

    kind: int = 6
    path: int = 1  # names from the root: more than one is a list or a record
    values: int = 0
    unpacked: int = 0
    packed: int = 0
    data: int = 0
    dictionary: int = 0


def size_of(path: Path, most: int) -> Size:
    """The size of a table; of one that takes more than `most` bytes, something above that. ValueError: no Parquet."""
    length = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, length - 8))
        end = file.read(8)
        footer = int.from_bytes(end[:4], "little")
        if len(end) < 8 or end[4:] != _MAGIC or not 0 < footer <= min(length - 8, _FOOTER):
            raise ValueError(f"it has no footer of Parquet: its last bytes are {end!r}")
        file.seek(length - 8 - footer)
        thrift = _Thrift(file.read(footer))
        lengths: list[int] = []
        groups: list[tuple[int, list[_Chunk]]] = []
        rows = 0
        for field, kind in thrift.fields():
            if (field, kind) == (2, _LISTS):
                lengths = [each for each in map(_leaf, thrift.structs()) if each is not None]
            elif field == 3:
                rows = thrift.number(kind)
            elif (field, kind) == (4, _LISTS):
                groups = [_group(each) for each in thrift.structs()]
            else:
                thrift.skip(kind)
        memory = 0
        rows = max(rows, sum(count for count, _ in groups))
        for count, chunks in groups:
            for place, chunk in enumerate(chunks):
                fixed = lengths[place] if chunk.kind == 7 and place < len(lengths) else 0
                memory += _memory(file, chunk, count, fixed, most - memory)
                if memory > most:
                    return Size(rows, memory)
    return Size(rows, memory)


def _leaf(thrift: _Thrift) -> int | None:
    """The length of a column's values, where all have the same; None of what is no column."""
    length, children = 0, 0
    for field, kind in thrift.fields():
        if field in (2, 5):
            number = thrift.number(kind)
            length, children = (number, children) if field == 2 else (length, number)
        else:
            thrift.skip(kind)
    return None if children else max(0, length)


def _group(thrift: _Thrift) -> tuple[int, list[_Chunk]]:
    """The rows and the columns of a row group."""
    rows, chunks = 0, []
    for field, kind in thrift.fields():
        if (field, kind) == (1, _LISTS):
            for column in thrift.structs():
                chunk = _Chunk()
                for inner, inner_kind in column.fields():
                    if (inner, inner_kind) == (3, _STRUCT):
                        chunk = _chunk(column)
                    else:
                        column.skip(inner_kind)
                chunks.append(chunk)
        elif field == 3:
            rows = thrift.number(kind)
        else:
            thrift.skip(kind)
    return max(0, rows), chunks


def _chunk(thrift: _Thrift) -> _Chunk:
    names = {1: "kind", 5: "values", 6: "unpacked", 7: "packed", 9: "data", 11: "dictionary"}
    found: dict[str, int] = {}
    for field, kind in thrift.fields():
        if field in names:
            found[names[field]] = thrift.number(kind)
        elif (field, kind) == (3, _LISTS):
            found["path"] = thrift.skip(kind)
        else:
            thrift.skip(kind)
    return _Chunk(**{name: max(0, value) for name, value in found.items()})


def _memory(file: IO[bytes], chunk: _Chunk, rows: int, fixed: int, most: int) -> int:
    """Bytes of one column in memory: its values, and what its pages unpack to; more than `most` is not added up."""
    width = _WIDTHS.get(chunk.kind, 16) + fixed
    values, unpacked = 0, 0
    starts = [each for each in (chunk.dictionary, chunk.data) if each > 0]
    at = min(starts, default=0)
    end = at + chunk.packed
    while starts and at < end and unpacked + values * width <= most:
        page = _page(file, at)
        if page is None:
            break  # the decoder comes no further either
        values += page.values
        unpacked += page.unpacked * (page.values if page.encoding == _DELTA_STRINGS else 1) + _PAGE
        at = page.end
    lists = rows * _LIST if chunk.path > 1 else 0
    return max(values, chunk.values, rows) * width + max(unpacked, chunk.unpacked) + lists


@dataclass(frozen=True)
class _Page:
    values: int
    unpacked: int
    encoding: int
    end: int  # the place after it


def _page(file: IO[bytes], at: int) -> _Page | None:
    """What the header of a page says; None if there is none."""
    for most in _HEADERS:
        file.seek(at)
        if (found := _header(file.read(most), at)) is not None:
            return found
    return None


def _header(data: bytes, at: int) -> _Page | None:
    thrift = _Thrift(data)
    values = unpacked = packed = encoding = 0
    try:
        for field, kind in thrift.fields():
            if field in (2, 3):
                number = thrift.number(kind)
                unpacked, packed = (number, packed) if field == 2 else (unpacked, number)
            elif field in (5, 7, 8) and kind == _STRUCT:
                for inner, inner_kind in thrift.fields():
                    if inner == 1 and field != 7:  # the values of a dictionary are counted by those that use them
                        values = thrift.number(inner_kind)
                    elif (field, inner) in ((5, 2), (8, 4)):
                        encoding = thrift.number(inner_kind)
                    else:
                        thrift.skip(inner_kind)
            else:
                thrift.skip(kind)
    except ValueError:
        return None
    if min(values, unpacked, packed) < 0:
        return None
    return _Page(values, unpacked, encoding, at + thrift.at + packed)


class _Thrift:
    """A cursor in Thrift's compact protocol; a ValueError where it makes no sense."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Number and type of each field of a record; the caller takes or skips its value before the next."""
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            yield number, head & 15

    def structs(self) -> Iterator[_Thrift]:
        """The cursor at each record of a list; the caller takes all of its fields."""
        size, kind = self._list()
        if kind != _STRUCT:
            raise ValueError(f"a list of type {kind}, expected records")
        for _ in range(size):
            yield self

    def number(self, kind: int) -> int:
        """A whole number."""
        if kind not in (4, 5, 6):
            raise ValueError(f"a field of type {kind}, expected a whole number")
        return self._signed()

    def skip(self, kind: int, depth: int = 0) -> int:
        """Leaves a value out; returns how many things a list has."""
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply")
        if kind in (4, 5, 6):
            self._varint()
        elif kind == _BYTES:
            self._take(1)
        elif kind == _DOUBLE:
            self._take(8)
        elif kind == _UUID:
            self._take(16)
        elif kind == _TEXT:
            self._take(self._varint())
        elif kind in (_LISTS, _SETS):
            size, inner = self._list()
            for _ in range(size):
                self._skip_one(inner, depth)
            return size
        elif kind == _MAP:
            size = self._varint()
            kinds = self._byte() if size else 0
            for _ in range(size):
                self._skip_one(kinds >> 4, depth)
                self._skip_one(kinds & 15, depth)
        elif kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner, depth + 1)
        elif kind not in (_TRUE, _FALSE):
            raise ValueError(f"a value of type {kind}, which there is not")
        return 0

    def _skip_one(self, kind: int, depth: int) -> None:
        """A thing in a list, where a truth value takes a byte."""
        self.skip(_BYTES if kind in (_TRUE, _FALSE) else kind, depth + 1)

    def _list(self) -> tuple[int, int]:
        head = self._byte()
        size = self._varint() if head >> 4 == 15 else head >> 4
        if size > len(self.data) - self.at:  # each takes a byte at least
            raise ValueError(f"a list of {size:,} things in {len(self.data) - self.at:,} bytes")
        return size, head & 15

    def _byte(self) -> int:
        self._take(1)
        return self.data[self.at - 1]

    def _take(self, count: int) -> None:
        if count > len(self.data) - self.at:
            raise ValueError("it ends within its bookkeeping")
        self.at += count

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _signed(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
