"""Files of strangers: small sound ones for every reader. `testing.breaking` breaks them; `tests/test_hostile.py` and
`benchmarks/fuzz.py` read what comes out.

A reader may take a broken file for a sound one that says something else. It may refuse it with a `RecleakError`. It may
do nothing else: no other error, no endless loop, no memory beyond the file's own size.
"""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import polars as pl
import torch
from safetensors.numpy import save

from recleak.audited import ranked, stored
from recleak.data import catalog, store
from recleak.data.arrays import Arrays
from recleak.data.columns import read_columns, read_ids, read_lists, read_users
from recleak.data.describe import describe
from recleak.data.fetch import unpack
from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic
from recleak.experiment import experiment, quick_start
from recleak.experiment import read as read_experiment
from recleak.files import read_table
from recleak.findings import TABLES, Findings
from recleak.models.central import UnknownModel
from recleak.models.components import Component
from recleak.papers.base import Paper
from recleak.papers.cells_file import from_json
from recleak.papers.store import Question, Store
from recleak.protocols.published import Published
from recleak.protocols.recorded import checked, survey
from recleak.protocols.saving import Checkpoint
from recleak.protocols.vectors import Kind, Vectors
from recleak.published import check_folder
from recleak.recording import Recorder, read_manifest, replay
from recleak.testing.samples import Files, data_sets, parquet_of
from recleak.training.optimizers import Adam
from recleak.training.state import ClientStore, read_file, replace_file
from recleak.update import Update
from recleak.wire import (
    Aggregate,
    Broadcast,
    Disclosure,
    Embeddings,
    Message,
    Push,
    Recommendations,
    Server,
    Upload,
    decode,
    encode,
)


class Late(BaseException):
    """For an alarm clock: no reader takes it for something that is wrong with a file."""


def excused(error: BaseException) -> bool:
    """Whether an error was made of an alarm, or of a lack of memory: then it does not count as a refusal."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        if isinstance(each, Late | MemoryError):
            return True
        seen.add(id(each))
        left += [each.__cause__, each.__context__]
    return False


@dataclass(frozen=True)
class Reader:
    """A reader, a sound input and how often it is tried, of all tries."""

    read: Callable[[Path], object]
    sound: Files
    share: int


def readers(folder: Path, paper: Paper | None = None) -> dict[str, Reader]:
    """All readers of files that may come from strangers; sound files are made in a folder."""
    config = {"format": "recleak run", "seed": 0}
    checkpoint = Checkpoint(None, config)
    about = {"run": checkpoint._run, "round": 2, "loss": [0.5, 0.25]}
    run_file = {
        "run.json": checkpoint._text.encode(),
        "checkpoint.safetensors": _saved({"params w": torch.ones(2, 3), "tap 0 a": torch.zeros(4)}, about, folder),
    }
    table = "user,item,rating,time\n" + "".join(
        f"u{k % 5},i{k % 7},{k % 5 + 1},{1_700_000_000 + k}\n" for k in range(30)
    )
    people = "user,gender,age,zip\n" + "".join(f"u{k},{'fm'[k % 2]},{20 + k},0213{k}\n" for k in range(5))
    things = "item;title;genres\n" + "".join(f'i{k};"T ""{k}""";a|b\n' for k in range(7))
    lists = "user\titem\trank\n" + "".join(f"u{k // 3}\ti{k}\t{k % 3}\n" for k in range(9))
    vectors = np.arange(12, dtype=np.float32).reshape(4, 3)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "user": vectors,
        "item": vectors.astype(np.float64),
        "user_ids": np.array(["a", "b", "c", "d"]),
    }
    made = {
        **{type(each).__name__: Reader(_decode, {"a.safetensors": encode(each)}, 4) for each in _messages()},
        "recording": Reader(_replay, _recorded(folder / "recording", _messages()), 6),
        "audited recording": Reader(_survey, _recorded(folder / "audited", _messages()[:2], _PARTS), 6),
        "checkpoint": Reader(lambda at: _resume(at, config), run_file, 9),
        "what clients keep": Reader(_clients, _kept(folder / "kept"), 9),
        "npy": Reader(lambda at: _arrays(at / "a.npy"), {"a.npy": _npy(vectors)}, 9),
        "npz": Reader(lambda at: _arrays(at / "a.npz"), {"a.npz": _npz_of(arrays)}, 9),
        "safetensors": Reader(lambda at: _arrays(at / "a.safetensors"), {"a.safetensors": save(_numbers(arrays))}, 10),
        "data set": Reader(lambda at: describe(store.load(at)), _data_set(folder / "data"), 4),
        **{name: Reader(read, files, 3) for name, (read, files) in data_sets().items()},
        "CSV": Reader(_columns, {"a.csv": table.encode(), "u.csv": people.encode(), "i.csv": things.encode()}, 3),
        "gzip CSV": Reader(lambda at: read_columns(at / "a.csv"), {"a.csv": gzip.compress(table.encode())}, 1),
        "Parquet": Reader(lambda at: read_columns(at / "a.parquet"), {"a.parquet": _parquet(table)}, 3),
        "lists": Reader(lambda at: read_lists(at / "a.tsv"), {"a.tsv": lists.encode()}, 1),
        "ids": Reader(lambda at: read_ids(at / "a.csv", "item"), {"a.csv": b"item\nx\ny\nz\n"}, 1),
        "findings": Reader(Findings.read, _findings(folder / "findings"), 2),
        "facts of a cell": Reader(_facts, {"a.json": b'{"reason": null, "roc": []}', "a.parquet": _parquet(table)}, 2),
        "archive": Reader(_archive, {"a.zip": _zip({"x/a.csv": table.encode(), "x/b.csv": people.encode()})}, 3),
        "run directory": Reader(_directory, {"experiment.json": _experiment()}, 1),
        "ranks of a cell": Reader(_ranks, {"a.parquet": parquet_of(_metrics()), "b.parquet": parquet_of(_named())}, 2),
        "lists of a run": Reader(_lists, {"a.parquet": parquet_of(_shown())}, 2),
        "vectors of a run": Reader(_vectors, {"a.safetensors": _given(folder)}, 2),
        "experiment": Reader(lambda at: read_experiment(at / "a.toml"), {"a.toml": b'title = "x"\nseeds = [1]\n'}, 1),
        "stored result": Reader(_stored, _result(folder / "results"), 3),
    }
    if find_spec("flwr") is not None:
        made["Flower array"] = Reader(_flower, {"a.npy": _npy(vectors)}, 3)
    if paper is not None:
        name = next(iter(paper.cells))
        row = {
            "cell": name,
            "code": 1,
            "variant": "text",
            "ours": 0.5,
            "low": 0.4,
            "high": None,
            "users": 3,
            "seeds": 1,
        }
        cells = json.dumps([{**row, "seconds": 1.5, "series": [[0, 0.5]]}] * 2).encode()
        made["reproduction"] = Reader(lambda at: from_json(at / "a.json", paper, 1, "text"), {"a.json": cells}, 3)
    return made


def _messages() -> list[Message]:
    two, offset = torch.tensor([1, 4]), torch.tensor([0, 2, 3])
    update = Update(two, {"w": torch.ones(2, 2)}, {"item": torch.ones(3, 2)}, torch.tensor([0, 3, 2]), offset, 5)
    return [
        Broadcast(0, {"item": torch.ones(5, 2), "w": torch.ones(2)}),
        Upload(1, update, torch.ones(2)),
        Aggregate(1, two, {"item": torch.ones(5, 2)}, {"item": torch.ones(5)}, 2.0),
        Push(1, two, two.flip(0), {"w": torch.ones(2, 3)}, torch.tensor([0, 1])),
        Recommendations(0, two, torch.tensor([[3, 1], [2, -1]])),
        Disclosure(two, {"w": torch.ones(2, 2)}, {"age": torch.tensor([0, 1])}),
        Embeddings(two, torch.ones(2, 3), torch.tensor([0]), torch.ones(1, 3)),
    ]


def _decode(folder: Path) -> Message:
    return decode((folder / "a.safetensors").read_bytes())


_PARTS = (Component("item", "per_item", "item", (2,)), Component("w", "dense", "head", (2,), layer=1))


def _recorded(folder: Path, messages: list[Message], parts: tuple[Component, ...] | None = None) -> Files:
    recorder = Recorder(Server(), folder, components=UnknownModel(3).components() if parts is None else parts)
    for message in messages:
        recorder.receive(message)
    recorder.close()
    return _contents(folder)


def _replay(folder: Path) -> None:
    read_manifest(folder)
    for _ in replay(folder):
        pass


def _survey(folder: Path) -> None:
    """As an audit reads a recording: each message fits to those before."""
    survey.cache_clear()
    survey(folder)
    for _ in checked(folder):
        pass


def _flower(folder: Path) -> None:
    """As it comes over a network of Flower."""
    from flwr.app import Array

    from recleak.deploy.flower_records import floats_of

    floats_of("a", Array("float32", (4, 3), "numpy.ndarray", (folder / "a.npy").read_bytes()))


def _saved(tensors: dict[str, torch.Tensor], about: dict[str, Any], folder: Path) -> bytes:
    replace_file(folder / "x.safetensors", tensors, about)
    return (folder / "x.safetensors").read_bytes()


def _resume(folder: Path, config: dict[str, Any]) -> None:
    read_file(folder / "checkpoint.safetensors")
    saved = Checkpoint(folder, config).read(5, ())
    if saved is not None:
        saved.tensor("params w", torch.ones(2, 3))
        saved.numbers("loss")


def _numbers(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: each for name, each in arrays.items() if each.dtype.kind == "f"}


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def _npz_of(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]
    return out.getvalue()


def _arrays(path: Path) -> None:
    found = Arrays.of(path)
    for name, shape in found.shapes.items():
        if len(shape) == 2:
            found.matrix(name)
        elif len(shape) == 1:
            found.ids(name)


def _data_set(folder: Path) -> Files:
    store.save(Synthetic(n_users=8, n_items=12, mean_activity=3, min_activity=2).generate(), folder, name="small")
    return _contents(folder)


_OWN = (
    Component("user", "per_user", "user", (2,), shared=False),
    Component("item", "per_item", "item", (2,), shared=False),
)


def _store(folder: Path) -> ClientStore:
    return ClientStore(_OWN, Adam(keep=True), 4, 3, seed=1, directory=folder)


def _kept(folder: Path) -> Files:
    """A store with a journal, as a run leaves it that was killed in its second round."""
    folder.mkdir()
    store, item = _store(folder), torch.tensor([1, 2, 0])
    client, offset = torch.tensor([0, 2]), torch.tensor([0, 2, 3])
    for number in (1, 2):
        before = store.read(client.numpy())
        values = {name: torch.full_like(value, number) for name, value in before.values.items()}
        store.write(Update(client, values, {name: torch.full((3, 2), 1.0) for name in before.rows}, item, offset, 3))
    store.flush()
    return _contents(folder)


def _clients(folder: Path) -> None:
    """Opened, with what the journal has put back; read; written."""
    store = _store(folder)
    store.write(store.read(np.arange(4)))


def _parquet(csv: str) -> bytes:
    return parquet_of(pl.read_csv(io.StringIO(csv)))


def _columns(folder: Path) -> None:
    read_users(folder / "u.csv")
    read_columns(folder / "a.csv", users=folder / "u.csv", items=folder / "i.csv")


def _findings(folder: Path) -> Files:
    about = {"title": "x", "level": 0.95, "systems": [{"data": "d", "model": "m", "protocol": "p", "defense": "n"}]}
    row = {"data": "d", "model": "m", "protocol": "p", "defense": "n", "question": "gender", "attack": "a"}
    scores = {**dict.fromkeys(TABLES["scores"]), **row, "metric": "auc", "value": 0.5}
    Findings.of(about, {"scores": [scores]}).write(folder)
    return _contents(folder)


def _facts(folder: Path) -> None:
    stored(folder / "a.json", "reason")
    read_table(folder / "a.parquet")


def _zip(members: Files) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def _archive(folder: Path) -> None:
    """As it comes from a publisher."""
    (folder / "out").mkdir()
    entry = catalog.CATALOG["taobao"]  # whose hashes nobody knows
    unpack(folder / "a.zip", {"x/a.csv": "a.csv", "x/b.csv": "b.csv"}, folder / "out", entry)


def _experiment() -> bytes:
    return experiment(quick_start()).model_dump_json().encode()


def _directory(folder: Path) -> None:
    check_folder(folder)


def _metrics() -> pl.DataFrame:
    return pl.DataFrame({"user": [0, 2, 3], "hit@10": [0.0, 1.0, 0.0], "ndcg@10": [0.0, 0.5, 0.0]})


def _named() -> pl.DataFrame:
    return pl.concat(_metrics().with_columns(recommender=pl.lit(name)) for name in ("chance", "MostPop"))


def _ranks(folder: Path) -> None:
    ranked(folder / "a.parquet", "hit@10")
    ranked(folder / "b.parquet", by="recommender")


def _small() -> Interactions:
    return Interactions.build(pl.DataFrame({"user": ["a", "b", "c"], "item": ["x", "y", "z"]}))


def _shown() -> pl.DataFrame:
    return pl.DataFrame({"user": ["a", "a", "c"], "item": ["x", "z", "y"], "session": [0, 0, 0], "rank": [0, 1, 0]})


def _lists(folder: Path) -> None:
    given = Published(str(folder / "a.parquet"))
    given.users(_small())
    given.send(_small(), [])


def _given(folder: Path) -> bytes:
    user, item = torch.tensor([0, 2]), torch.tensor([1])
    return _saved({"user": user, "vector": torch.ones(2, 3), "item": item, "item_vector": torch.ones(1, 3)}, {}, folder)


def _vectors(folder: Path) -> None:
    for kind in get_args(Kind):
        given = Vectors(str(folder / "a.safetensors"), kind=kind)
        given.users(_small())
        given.send(_small(), [])


def _question() -> Question:
    return Question("imia", 1, "text", {"data": "x"}, {"attack": "y"})


def _result(folder: Path) -> Files:
    Store(folder).write(_question(), 0, {"auc": np.array([0.5, 0.25])}, {"curve": [0.1, 0.2]}, 1.0)
    return _contents(folder)


def _stored(folder: Path) -> None:
    found = Store(folder)
    for seed in found.seeds(_question()):
        found.read(_question(), seed)


def _contents(folder: Path) -> Files:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
