"""Lists that exist already: of any recommender, trained by anybody. Nothing is trained here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from recleak.data.interactions import Interactions
from recleak.errors import ConfigError, DataError
from recleak.files import read_table
from recleak.recording import Tap
from recleak.wire import Recommendations

BLOCK = 1024  # users in one message
_COLUMNS = ("user", "item", "session", "rank")
_PLACES = 1 << 24  # of a table of lists, of any number of items
_RATIO = 50  # how many places there may be for each item beyond that


@dataclass(frozen=True)
class Published:
    """Lists from a Parquet table with the columns user, item (ids as in the data), session and rank from 0.

    `recleak audit --recommendations` writes it. `digest` is part of the settings so that other lists are another cell.
    `history`: whether the interactions of the data are what users did; if not, there is no history to read.
    """

    lists: str
    digest: str = ""
    history: bool = True
    sessions: int = 1

    @property
    def rounds(self) -> int:
        """What attacks count: sessions."""
        return self.sessions

    @property
    def local(self) -> None:
        """No client trains."""
        return None

    def users(self, data: Interactions) -> NDArray[np.int64]:
        """Who has a list, ascending."""
        return np.unique(self._coded(data)["user"].to_numpy().astype(np.int64))

    def send(self, data: Interactions, taps: Sequence[Tap]) -> None:
        """Put the lists on the wire, session by session."""
        table = self._coded(data)
        for number, session in enumerate(table["session"].unique().sort()):
            part = table.filter(pl.col("session") == session)
            user, place = np.unique(part["user"].to_numpy().astype(np.int64), return_inverse=True)
            rank = part["rank"].to_numpy()
            longest = int(rank.max()) + 1
            if (places := len(user) * longest) > max(_PLACES, _RATIO * len(part)):
                problem = (
                    f"{len(user):,} lists, the longest of {longest:,} items, take {places:,} places for {len(part):,}"
                )
                raise DataError(problem, file=Path(self.lists), remedy="Cut the longest lists.")
            item = np.full((len(user), longest), -1, np.int64)
            item[place, rank] = part["item"].to_numpy()
            for start in range(0, len(user), BLOCK):
                block = slice(start, start + BLOCK)
                message = Recommendations(number, torch.from_numpy(user[block]), torch.from_numpy(item[block]))
                for tap in taps:
                    tap.receive(message)
        for tap in taps:
            tap.close()

    def _coded(self, data: Interactions) -> pl.DataFrame:
        """The lists with codes of users and items in place of ids."""
        if not Path(self.lists).is_file():
            raise ConfigError(
                f"{self.lists}: no such file, expected lists as `recleak audit --recommendations` writes."
            )
        table = _checked(read_table(Path(self.lists), columns=_COLUMNS), Path(self.lists))
        for name, side in (("user", data.users), ("item", data.items)):
            known = pl.DataFrame({name: side["id"].cast(pl.String), "code": np.arange(side.height)})
            table = table.join(known, on=name, how="left", maintain_order="left")
            if table["code"].null_count():
                first = table.filter(pl.col("code").is_null())[name][0]
                problem = f"the lists name a {name} that the data does not have ({first})"
                raise DataError(problem, file=Path(self.lists), remedy="Give the data that the lists are of.")
            table = table.drop(name).rename({"code": name})
        return table


def _checked(table: pl.DataFrame, file: Path) -> pl.DataFrame:
    """An error unless each list has one item at each rank from 0 on."""
    remedy = "Give a file that `recleak audit --recommendations` wrote."
    kinds = table.schema
    texts = all(kinds.get(name) == pl.String for name in ("user", "item"))
    numbers = all(name in kinds and kinds[name].is_integer() for name in ("session", "rank"))
    if not (texts and numbers) or table.is_empty() or any(table.null_count().row(0)):
        problem = (
            f"got {table.height:,} rows of {dict(kinds)!s:.200}, expected texts user, item and numbers session, rank"
        )
        raise DataError(problem, file=file, remedy=remedy)
    rank = pl.col("rank")
    whole = (rank.min() == 0) & (rank.max() == pl.len() - 1) & ~rank.is_duplicated().any()
    if not table.group_by("user", "session").agg(whole=whole)["whole"].all():
        raise DataError("ranks of a list are not 0, 1, 2, ... once each", file=file, remedy=remedy)
    return table
