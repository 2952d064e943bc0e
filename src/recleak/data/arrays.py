"""Arrays from files of anybody: `.npy`, `.npz` and `.safetensors`. Nothing is unpickled, and nothing is believed.

A header is read first; type, shape and size must fit the file before memory is taken for a single number. What does not
fit is a `DataError` that says what was got, what was expected and what to do.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from recleak.errors import DataError
from recleak.strict_json import parse_json

ENDINGS = (".npy", ".npz", ".safetensors")
_MAGIC = b"\x93NUMPY"
_HEADER = 10_000  # bytes of a NumPy header: as many as numpy itself reads from strangers
_TENSORS_HEADER = 100_000_000  # bytes of a safetensors header: as many as safetensors itself reads
_MEMBERS = 1_000  # arrays in one .npz
_AXES = 8
_PACKED = 64 << 20  # bytes that any .npz may unpack to
_RATIO = 50  # how much larger than the file it may be beyond that
_DESCR = re.compile(r"'descr':\s*'([<>|=]?)([a-zA-Z])(\d{0,4})'")
_ORDER = re.compile(r"'fortran_order':\s*(True|False)")
_SHAPE = re.compile(r"'shape':\s*\(((?:\s*\d{1,18}\s*,)*(?:\s*\d{1,18})?)\s*\)")
_KINDS = {"f": (2, 4, 8), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8)}
_TORCH: dict[str, tuple[torch.dtype, int]] = {
    "F64": (torch.float64, 8),
    "F32": (torch.float32, 4),
    "F16": (torch.float16, 2),
    "BF16": (torch.bfloat16, 2),
    "I64": (torch.int64, 8),
    "I32": (torch.int32, 4),
    "I16": (torch.int16, 2),
    "I8": (torch.int8, 1),
    "U8": (torch.uint8, 1),
}


@dataclass(frozen=True)
class Arrays:
    """The arrays of a file; each is read when it is asked for."""

    path: Path
    shapes: dict[str, tuple[int, ...]]  # of the arrays that could be read, by name

    @classmethod
    def of(cls, path: Path) -> Arrays:
        """What a file holds; only headers are read. The one array of a `.npy` file is called `array`."""
        if path.suffix not in ENDINGS:
            remedy = f"Give a file that ends in {', '.join(ENDINGS)}; numpy.save and safetensors write them."
            raise DataError(f"not a file of arrays by its ending {path.suffix!r}", file=path, remedy=remedy)
        if not path.is_file():
            raise DataError("no such file", file=path, remedy="Check the path.")
        with _told(path):
            if path.suffix == ".safetensors":
                return cls(path, {name: shape for name, (_, shape, _) in _tensors(path).items()})
            if path.suffix == ".npy":
                with open(path, "rb") as file:
                    return cls(path, {"array": _npy(file, path.stat().st_size).shape})
            shapes = {}
            with zipfile.ZipFile(path) as archive:
                for name, member in _members(archive, path).items():
                    with archive.open(member) as file:
                        found = _npy(file, member.file_size, other_kinds=True)
                        if found.known:
                            shapes[name] = found.shape
            return cls(path, shapes)

    def choose(self, wanted: str | None, guesses: tuple[str, ...], what: str) -> str:
        """The name of a matrix: as given, or by well-known names, or the only one."""
        matrices = [name for name, shape in self.shapes.items() if len(shape) == 2]
        if wanted is not None:
            if wanted in self.shapes:
                return wanted
            raise self._unclear(f"no array {wanted!r}", what)
        for guess in guesses:
            if guess in matrices:
                return guess
        if len(matrices) == 1:
            return matrices[0]
        raise self._unclear(f"cannot tell which array has the vectors of {what}", what)

    def _unclear(self, problem: str, what: str) -> DataError:
        there = ", ".join(f"{name} {list(shape)}" for name, shape in [*self.shapes.items()][:20]) or "none"
        return DataError(f"{problem}; there is: {there:.500}", file=self.path, remedy=f"Name it: --{what}-array NAME.")

    def matrix(self, name: str) -> NDArray[np.float32]:
        """A matrix of finite numbers, f32[n, d], with memory of its own."""
        shape = self.shapes[name]
        if len(shape) != 2 or 0 in shape:
            problem = f"the array {name!r} is {list(shape)}, expected a row of numbers for each user or item"
            raise DataError(problem, file=self.path, remedy="Give a matrix, with at least one row and one column.")
        values = self._read(name)
        if values.dtype.kind not in "fiu":
            problem = f"the array {name!r} has the type {values.dtype}, expected numbers"
            raise DataError(problem, file=self.path, remedy="Save vectors as float32.")
        with np.errstate(over="ignore"):
            found = values.astype(np.float32)
        bad = ~np.isfinite(found).all(axis=1)
        if bad.any():
            first = f"{int(bad.sum()):,} of {len(found):,} rows of {name!r} (the first: {int(bad.argmax())})"
            problem = f"{first} have numbers that are not finite, or too large for float32"
            raise DataError(problem, file=self.path, remedy="Leave these users or items out, or mend their vectors.")
        return found

    def ids(self, name: str) -> list[str]:
        """A column of ids, whole numbers or text, as text."""
        values = self._read(name)
        if values.ndim != 1 or values.dtype.kind not in "iuU":
            problem = (
                f"the ids {name!r} are {values.dtype}{list(values.shape)}, expected whole numbers or text, one axis"
            )
            raise DataError(problem, file=self.path, remedy="Save ids as integers, or as text (numpy.array(ids, str)).")
        if values.dtype.kind == "U" and values.size:
            letter = np.ascontiguousarray(values).view(f"{values.dtype.str[0]}u4")  # its place in Unicode
            if letter.max() > 0x10FFFF or ((letter >= 0xD800) & (letter < 0xE000)).any():
                raise DataError(f"the ids {name!r} are no text", file=self.path, remedy="Save them again.")
        return [str(each) for each in values.tolist()]

    def _read(self, name: str) -> NDArray[Any]:
        with _told(self.path):
            if self.path.suffix == ".safetensors":
                dtype, shape, (start, stop) = _tensors(self.path)[name]
                with open(self.path, "rb") as file:
                    file.seek(start)
                    data = bytearray(file.read(stop - start))
                values = torch.frombuffer(data, dtype=_TORCH[dtype][0]).reshape(shape)
                return (values.float() if dtype == "BF16" else values).numpy()
            if self.path.suffix == ".npy":
                with open(self.path, "rb") as file:
                    return _npy(file, self.path.stat().st_size).read(file)
            with zipfile.ZipFile(self.path) as archive:
                member = _members(archive, self.path)[name]
                with archive.open(member) as file:
                    return _npy(file, member.file_size).read(file)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Whatever goes wrong inside a file is said as a DataError."""
    broken = (ValueError, OSError, EOFError, KeyError, struct.error, zlib.error, zipfile.BadZipFile, OverflowError)
    try:
        yield
    except MemoryError as error:
        remedy = "Give fewer rows, or numbers of fewer bytes (float16), or more memory."
        raise DataError("there is not enough memory for it", file=path, remedy=remedy) from error
    except (*broken, NotImplementedError, RuntimeError) as error:
        reason = str(error) or type(error).__name__
        remedy = "Save it again with numpy.save, numpy.savez or safetensors; pickled objects are not read."
        raise DataError(f"not readable as {path.suffix[1:]} ({reason:.200})", file=path, remedy=remedy) from error


# --- NumPy ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Npy:
    """What a NumPy header says, once it was found to fit the file."""

    dtype: np.dtype[Any] | None  # None: of a type that is not read
    fortran: bool
    shape: tuple[int, ...]

    @property
    def known(self) -> bool:
        return self.dtype is not None

    def read(self, file: IO[bytes]) -> NDArray[Any]:
        """The numbers, of a file that stands behind the header."""
        if self.dtype is None:
            raise ValueError("the type of the array is not one of numbers or text")
        size = prod(self.shape) * self.dtype.itemsize
        data = file.read(size + 1)
        if len(data) != size:
            raise ValueError(f"got {len(data):,} bytes of numbers, the header says {size:,}")
        return np.frombuffer(data, self.dtype).reshape(self.shape, order="F" if self.fortran else "C")


def _npy(file: IO[bytes], size: int, *, other_kinds: bool = False) -> _Npy:
    """The header of an array in `size` bytes; one whose shape does not fit them is refused.

    other_kinds: an array of a type that is not read (such as pickled objects) is no error, it is only not known.
    """
    start = file.read(8)
    if start[:6] != _MAGIC or len(start) < 8 or start[6] not in (1, 2, 3):
        raise ValueError("it does not begin as a NumPy array of version 1, 2 or 3")
    wide = start[6] > 1
    length = struct.unpack("<I" if wide else "<H", file.read(4 if wide else 2))[0]
    if length > _HEADER:
        raise ValueError(f"its header has {length:,} bytes, expected at most {_HEADER:,}")
    header = file.read(length)
    if len(header) != length:
        raise ValueError("it ends within its header")
    text = header.decode("utf-8" if start[6] == 3 else "latin-1")
    shape = _shape(text)
    order = _ORDER.search(text)
    if order is None:
        raise ValueError(f"its header is {text[:100].strip()!r}, expected descr, fortran_order and shape")
    dtype = _dtype(text)
    if dtype is None:
        if other_kinds:
            return _Npy(None, False, shape)
        raise ValueError(f"its header is {text[:100].strip()!r}, expected a type of plain numbers or text")
    said, there = prod(shape) * dtype.itemsize, size - (12 if wide else 10) - length
    if said != there:
        raise ValueError(f"its shape {list(shape)} takes {said:,} bytes, there are {there:,}")
    return _Npy(dtype, order[1] == "True", shape)


def _shape(text: str) -> tuple[int, ...]:
    found = _SHAPE.search(text)
    if found is None:
        raise ValueError(f"its header is {text[:100].strip()!r}, expected descr, fortran_order and shape")
    shape = tuple(int(each) for each in found[1].split(",") if each.strip())
    if len(shape) > _AXES:
        raise ValueError(f"it has {len(shape)} axes, expected at most {_AXES}")
    return shape


def _dtype(text: str) -> np.dtype[Any] | None:
    found = _DESCR.search(text)
    if found is None:
        return None
    order, kind, width = found[1], found[2], int(found[3] or 0)
    if width not in _KINDS.get(kind, range(1, 1_000) if kind == "U" else ()):
        return None
    return np.dtype(f"{order.replace('|', '=')}{kind}{width}")


def _members(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """The arrays of a .npz by name: different names, plainly packed, and not far more than the file is large."""
    members = archive.infolist()
    if len(members) > _MEMBERS:
        raise ValueError(f"it has {len(members):,} members, expected at most {_MEMBERS:,}")
    total, room = sum(each.file_size for each in members), max(_PACKED, _RATIO * path.stat().st_size)
    if total > room:
        raise ValueError(f"it unpacks to {total:,} bytes, expected at most {room:,} of such a file")
    found: dict[str, zipfile.ZipInfo] = {}
    for each in members:
        name = each.filename.removesuffix(".npy")
        if name in found:
            raise ValueError(f"two arrays are called {name[:80]!r}")
        if each.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or each.flag_bits & 1:
            raise ValueError(f"the array {name[:80]!r} is encrypted, or packed in a way that numpy does not write")
        if each.filename.endswith(".npy"):
            found[name] = each
    return found


# --- safetensors ------------------------------------------------------------------------------------------------------


def _tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], tuple[int, int]]]:
    """Type, shape and place (first byte and the one after the last) of each tensor whose type is read."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _TENSORS_HEADER):
            raise ValueError(f"its header should have {length:,} bytes, the file has {size:,}")
        header = parse_json(file.read(length).decode("utf-8"))
    if not isinstance(header, dict):
        raise ValueError(f"its header is {json.dumps(header)[:80]}, expected an object")
    found = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(about, dict) or not {"dtype", "shape", "data_offsets"} <= set(about):
            raise ValueError(f"the tensor {name[:80]!r} has no dtype, shape and data_offsets")
        dtype, shape, place = about["dtype"], about["shape"], about["data_offsets"]
        if not (_whole(shape, _AXES) and _whole(place, 2) and len(place) == 2 and place[0] <= place[1]):
            raise ValueError(f"the tensor {name[:80]!r} has shape {shape!s:.80} and data_offsets {place!s:.80}")
        if not isinstance(dtype, str) or dtype not in _TORCH:
            continue
        start, stop = (8 + length + each for each in place)
        if stop > size or stop - start != prod(shape) * _TORCH[dtype][1]:
            said = prod(shape) * _TORCH[dtype][1]
            raise ValueError(
                f"the tensor {name[:80]!r} takes {said:,} bytes, its place has {stop - start:,} of {size:,}"
            )
        found[name] = (dtype, tuple(shape), (start, stop))
    return found


def _whole(values: Any, most: int) -> bool:
    """Whether it is a list of at most so many whole numbers from 0."""
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(type(each) is int and 0 <= each < 2**63 for each in values)
    )
