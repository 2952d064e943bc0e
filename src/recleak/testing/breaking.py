"""Ways to break files: bytes, JSON, tensors, archives and tables with something odd in them.

A broken input is a function of (seed, reader, number), so that it can be made again.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random as dice
import zipfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import polars as pl

from recleak.testing.hostile import Reader
from recleak.testing.samples import Files

_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**53 + 1, 2**63, 10**30, -0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "../../etc/passwd", "/etc/passwd", "nan", "-1", "\ud800", "\x00", "é" * 50, "F32", "F8_E4M3", "BOOL"),
    *([], {}, [[]], [None], {"": None}, [1, [2, [3]]], [[[0] * 3] * 3]),
)
_TOKENS = (
    *(b"NaN", b"-Infinity", b"1e999", b"-1", b"999999999999999999999", b"null", b"true", b"\x00", b"\xff\xfe", b'"'),
    *(b"[" * 3000, b'{"a":' * 200, b"\n", b",", b"\t", b"::", b"../", b"'shape': (99999999999,)", b"'|O'", b"\r\r\n"),
)


def broken(reader: Reader, name: str, number: int, seed: int = 0) -> dict[str, bytes]:
    """The files of a reader with one of them, or two, broken."""
    draw = dice.Random(f"{seed} {name} {number}")  # noqa: S311 (reproducible, not secret)
    files = dict(reader.sound)
    for _ in range(1 if draw.random() < 0.8 else 2):
        file = draw.choice(sorted(files))
        files[file] = _broken_file(file, files[file], draw, reader.sound)
    if "messages.sha256" in files and draw.random() < 0.8:  # as a stranger would who means it
        _sign(files)
    return files


def _broken_file(name: str, data: bytes, draw: dice.Random, others: Files) -> bytes:
    """By what it is, or byte by byte."""
    with suppress(Exception, pl.exceptions.PanicException):  # it may have been broken before
        if draw.random() < 0.6:
            if name.endswith(".json"):
                return _json_text(data, draw)
            if name.endswith(".safetensors"):
                return _tensors(data, draw)
            if name.endswith((".npz", ".zip")):
                return _npz(data, draw)
            if name.endswith(".parquet") and draw.random() < 0.7:
                return _table(data, draw)
            if data[:2] == b"\x1f\x8b":
                return _gzip(name, data, draw)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        data = _bytes(data, draw, others)
    return data


def _bytes(data: bytes, draw: dice.Random, others: Files) -> bytes:
    """One change of bytes, more often near the beginning and the end, where headers are."""
    at = draw.choice(
        (draw.randrange(len(data) + 1), min(len(data), draw.randrange(120)), max(0, len(data) - draw.randrange(60)))
    )
    width = draw.choice((1, 1, 2, 4, 8, 30))
    match draw.randrange(9):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[at + width :]
        case 2:
            return data[:at] + draw.randbytes(width) + data[at + width :]
        case 3 if at < len(data):
            return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
        case 4:
            return data[:at] + data[max(0, at - width * 8) : at] + data[at:]
        case 5:
            value = draw.choice((0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1))
            return data[:at] + value.to_bytes(8, "little")[: draw.choice((2, 4, 8))] + data[at + 8 :]
        case 6:
            return data[:at] + draw.choice(_TOKENS) + data[at:]
        case 7:
            other = others[draw.choice(sorted(others))]
            return data[:at] + other[: draw.randrange(200)] + data[at:]
        case _:
            return data[:at] + bytes(width) + data[at + width :]


def _odd_node(value: Any, draw: dice.Random) -> Any:
    """JSON with something odd somewhere."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        if draw.random() < 0.05:
            return {**value, str(draw.choice(_ODD)): draw.choice(_ODD)}
        return {**value, key: _odd_node(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        if draw.random() < 0.2:
            return value[:at] + value[at:] * 2
        return [*value[:at], _odd_node(value[at], draw), *value[at + 1 :]]
    return draw.choice(_ODD)


def _json_text(data: bytes, draw: dice.Random) -> bytes:
    """JSON with something odd in it; if it is JSON in lines, in one of them."""
    try:
        return _json(_odd_node(json.loads(data), draw), draw)
    except ValueError:
        lines = data.splitlines(keepends=True)
        at = draw.randrange(len(lines))
        lines[at] = _json(_odd_node(json.loads(lines[at]), draw), draw) + b"\n"
        return b"".join(lines)


def _json(value: Any, draw: dice.Random) -> bytes:
    text = json.dumps(value, ensure_ascii=draw.random() < 0.5)
    if draw.random() < 0.05:
        text = "[" * 5000 + text + "]" * 5000
    if draw.random() < 0.05 and text.startswith("{") and len(text) > 2:
        text = text[:-1] + ", " + text[1:]  # every key twice
    return text.encode("utf-8", "surrogatepass")


def _tensors(data: bytes, draw: dice.Random) -> bytes:
    """Safetensors with an odd header, whose own length is right."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    about = header.get("__metadata__", {})
    if about.get("recleak") and draw.random() < 0.5:
        header["__metadata__"] = {
            **about,
            "recleak": _json(_odd_node(json.loads(about["recleak"]), draw), draw).decode(),
        }
    else:
        header = _odd_node(header, draw)
    if draw.random() < 0.3:
        at = draw.randrange(len(body) + 1)
        odd = draw.choice((b"\xff" * 8, bytes(8), (2**62).to_bytes(8, "little"), b"\x00\x00\xc0\x7f"))
        body = (body[:at] + odd + body[at + len(odd) :])[: len(body)]
    text = _json(header, draw)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def _npz(data: bytes, draw: dice.Random) -> bytes:
    """An archive with an odd member, or an odd list of them."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w") as made:
        names = archive.namelist()
        chosen = draw.choice(names)
        for name in names:
            content = archive.read(name)
            if name == chosen:
                name = draw.choice((name, name, name, "../../x.npy", "x", "user_ids.npy", "a/" * 50 + "b.npy"))
                content = _bytes(content, draw, {"": content})
                content = bytes(1 << 20) if draw.random() < 0.02 else content
            made.writestr(zipfile.ZipInfo(name), content, draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
    return out.getvalue()


def _table(data: bytes, draw: dice.Random) -> bytes:
    """Parquet with an odd column."""
    frame = pl.read_parquet(io.BytesIO(data))
    name = draw.choice(frame.columns)
    odd: list[Callable[[], pl.DataFrame]] = [
        lambda: frame.drop(name),
        lambda: frame.rename({name: draw.choice(("id", "user", "é", "", "x.y"))}),
        lambda: frame.head(draw.randrange(3)),
        lambda: pl.concat([frame, frame]),
        lambda: frame.with_columns(pl.lit(draw.choice((-1, 2**31, 2**40))).alias(name)),
        lambda: frame.with_columns(pl.lit(draw.choice((float("nan"), float("inf"), 1e300))).alias(name)),
        lambda: frame.with_columns(pl.lit(None).alias(name)),
        lambda: frame.with_columns(pl.lit([draw.choice(("x", "\x1b[2J", ""))]).alias(name)),
        lambda: frame.with_columns(pl.lit(draw.choice(("", "x", "1", "nan"))).alias(name)),
        lambda: frame.with_columns(pl.col(name).cast(draw.choice((pl.Int8, pl.String, pl.Float32)), strict=False)),
        lambda: frame.with_columns(pl.struct(pl.col(name)).alias(name)),
        lambda: frame.with_columns(pl.lit(b"\xff\x00").alias(name)),
        lambda: frame.reverse(),
    ]
    out = io.BytesIO()
    (_large(frame, name, draw) if draw.random() < 0.02 else draw.choice(odd)()).write_parquet(out)
    return out.getvalue()


def _gzip(name: str, data: bytes, draw: dice.Random) -> bytes:
    """A sound archive of broken text, now and then of endless one."""
    text = gzip.decompress(data)
    if ".json" in name and draw.random() < 0.5:
        text = _json_text(text, draw)
    if draw.random() < 0.03:
        text += draw.choice((b"1,1,1,1\n", b",", b"\n", b"x", b"{}\n", text[-20:], b'"')) * draw.choice(
            (1 << 14, 1 << 22)
        )
    return gzip.compress(_bytes(text, draw, {"": text}), 1)


def _large(frame: pl.DataFrame, name: str, draw: dice.Random) -> pl.DataFrame:
    """Very much of nothing: rows, columns, a list, a text."""
    many = draw.choice((1 << 16, 1 << 22))
    match draw.randrange(4):
        case 0:
            return pl.select(pl.lit(frame[name][0]).alias(each) for each in frame.columns).select(
                pl.all().repeat_by(many).explode()
            )
        case 1:
            return frame.head(1).with_columns(pl.lit(0).repeat_by(many).alias(name))
        case 2:
            return frame.with_columns(pl.lit("x" * many).alias(name))
        case _:
            return frame.with_columns(pl.lit(0.0).alias(f"{name}{place}") for place in range(500))


def _sign(files: dict[str, bytes]) -> None:
    """Digests that fit the messages of a recording again."""
    names = sorted(name for name in files if name.startswith("messages/"))
    lines = b"".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n".encode() for name in names)
    files["messages.sha256"] = lines
    with suppress(Exception):
        manifest = json.loads(files["manifest.json"])
        manifest["sha256"] = hashlib.sha256(lines).hexdigest()
        files["manifest.json"] = json.dumps(manifest).encode()
