"""Vectors that exist already: embeddings of users and items, or what users sent. Nothing is trained here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from recleak.data.interactions import Interactions
from recleak.errors import ConfigError, DataError
from recleak.recording import Tap
from recleak.training.state import read_file
from recleak.update import Update
from recleak.wire import Embeddings, MessageError, Upload, encode

Kind = Literal["embeddings", "uploads"]
_REMEDY = "Give a file that `recleak audit --embeddings` wrote."
UPLOAD = "upload"  # the name of the one component that plain uploads have


@dataclass(frozen=True)
class Vectors:
    """Vectors from safetensors: `user` i64[B] and `vector` f32[B, d], `item` i64[J] and `item_vector` f32[J, d].

    `recleak audit --embeddings` and `--uploads` write the file, with codes of users and items as in the data. `digest`
    is part of the settings so that other vectors are another cell. kind "embeddings": somebody holds them; "uploads":
    a server receives them, each from its user.
    """

    vectors: str
    digest: str = ""
    kind: Kind = "embeddings"

    history: ClassVar[bool] = False  # nobody but the audit reads what users did
    rounds: ClassVar[int] = 1
    local: ClassVar[None] = None  # no client trains

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"kind is {self.kind!r}, expected one of {', '.join(get_args(Kind))}.")

    def users(self, data: Interactions) -> NDArray[np.int64]:
        """Who has a vector, ascending."""
        return np.sort(self._read(data).user.numpy())

    def send(self, data: Interactions, taps: Sequence[Tap]) -> None:
        """Put the vectors on the wire."""
        found = self._read(data)
        message: Embeddings | Upload = found
        if self.kind == "uploads":
            order = found.user.argsort()
            nothing, offset = torch.zeros(0, dtype=torch.int64), torch.zeros(len(order) + 1, dtype=torch.int64)
            sent = Update(found.user[order], {UPLOAD: found.vector[order]}, {}, nothing, offset, data.n_items)
            message = Upload(0, sent, torch.ones(len(order)))
        for tap in taps:
            tap.receive(message)
        for tap in taps:
            tap.close()

    def _read(self, data: Interactions) -> Embeddings:
        path = Path(self.vectors)
        if not path.is_file():
            raise ConfigError(f"{path}: no such file, expected vectors as `recleak audit --embeddings` writes.")
        tensors, _ = read_file(path)
        try:
            found = Embeddings(*(tensors[name] for name in ("user", "vector", "item", "item_vector")))
            encode(found)  # its checks of types and shapes
        except (KeyError, MessageError) as error:
            problem = f"no tensor {error}" if isinstance(error, KeyError) else str(error).removesuffix(".")
            raise DataError(problem, file=path, remedy=_REMEDY) from error
        if not (found.vector.isfinite().all() and found.item_vector.isfinite().all()):
            raise DataError("a vector is not finite", file=path, remedy=_REMEDY)
        for code, bound, what in ((found.user, data.n_users, "user"), (found.item, data.n_items, "item")):
            if len(code) and int(code.max()) >= bound:
                problem = f"the vectors name the {what} {int(code.max())}, the data have {bound}"
                raise DataError(problem, file=path, remedy="Give the data that the vectors are of.")
        return found
