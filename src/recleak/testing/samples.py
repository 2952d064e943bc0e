"""Small sound files of every layout of data sets that is read, for `hostile` to break.

Rows are 120: a single one that cannot be used is dropped, so that what comes after it is reached too.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import polars as pl

from recleak.data import checkins, lenskit, movielens, recbole, retail

Files = Mapping[str, bytes]  # by their names in a folder
Read = Callable[[Path], object]
_ROWS = 120


def data_sets() -> dict[str, tuple[Read, Files]]:
    """The reader of each layout, and files for it."""
    return {
        "LensKit": (lenskit.read_lenskit, _lenskit()),
        "RecBole": (recbole.read_recbole, _recbole()),
        "MovieLens-100K": (movielens.read_ml_100k, _ml_100k()),
        "MovieLens-1M": (movielens.read_ml_1m, _ml_1m()),
        "MovieLens-10M": (movielens.read_ml_10m, {k: v for k, v in _ml_1m().items() if k != "users.dat"}),
        "MovieLens, CSV": (movielens.read_ml_csv, _ml_csv()),
        "Foursquare": (checkins.read_foursquare, _foursquare()),
        "Foursquare, compact": (checkins.read_foursquare, _foursquare_compact()),
        "Gowalla": (checkins.read_gowalla, _gowalla()),
        "Steam": (_read_steam, _steam()),
        "Amazon, JSON": (retail.read_amazon, {"reviews_Phones_5.json": _reviews()}),
        "Amazon, gzip": (retail.read_amazon, {"reviews_Phones_5.json.gz": gzip.compress(_reviews())}),
        "Amazon, CSV": (retail.read_amazon, _amazon_csv()),
        "Taobao": (retail.read_taobao, _taobao()),
    }


def parquet_of(frame: pl.DataFrame) -> bytes:
    """A table as a Parquet file."""
    out = io.BytesIO()
    frame.write_parquet(out)
    return out.getvalue()


def _text(row: Callable[[int, int, int], str], *header: str) -> bytes:
    """A line for each of many rows: its number, its user from 1 to 7, its item from 1 to 5."""
    lines = [*header, *(row(n, n % 7 + 1, n % 5 + 1) for n in range(_ROWS))]
    return "".join(f"{line}\n" for line in lines).encode()


def _table(rows: int, row: Callable[[int], str], *header: str) -> bytes:
    """A line for each of a few numbers from 1."""
    return "".join(f"{line}\n" for line in (*header, *(row(n) for n in range(1, rows + 1)))).encode()


def _ml_1m() -> Files:
    return {
        "ratings.dat": _text(lambda n, user, item: f"{user}::{item}::{n % 5 + 1}::{978300760 + n}"),
        "users.dat": _table(7, lambda n: f"{n}::{'FM'[n % 2]}::{(1, 25, 56)[n % 3]}::{n}::0213{n}"),
        "movies.dat": _table(5, lambda n: f"{n}::Film {n}: x (1995)::War|Drama"),
    }


def _ml_csv() -> Files:
    titles = "movieId,title,genres", "6,None,(no genres listed)"
    return {
        "ratings.csv": _text(
            lambda n, user, item: f"{user},{item},{n % 5}.5,{978300760 + n}", "userId,movieId,rating,timestamp"
        ),
        "movies.csv": _table(5, lambda n: f'{n},"Film, ""{n}"" (1995)",War|Drama', *titles),
    }


def _foursquare() -> Files:
    when = "Tue Apr 03 18:{:02}:09 +0000 2012"
    return {
        "dataset_TSMC2014_NYC.txt": _text(
            lambda n, user, item: f"{user}\t4b{item}\t4bf5\tCafé\t40.7\t-74.0\t-240\t{when.format(n % 60)}"
        )
    }


def _foursquare_compact() -> Files:
    header = "user_id\tunix_time\tvenue_id\tlatitude\tlongitude\tvenue_category"
    return {
        "checkins_NYC_x.tsv": _text(
            lambda n, user, item: f"{user}\t{1333476009 + n}\t4b{item}\t40.7\t-74.0\tBar", header
        )
    }


def _gowalla() -> Files:
    logs = _text(lambda n, user, item: f"{user}\t2010-10-19T23:{n % 60:02}:27Z\t40.7\t-74.0\t{item}")
    return {
        "loc-gowalla_totalCheckins.txt.gz": gzip.compress(logs),
        "gowalla_venues_NYC.tsv": _table(5, lambda n: f"{n}\tSpot {n}\t40.7\t-74.0"),
    }


def _steam() -> Files:
    row = '{},"Game, {}",{},{}.5,0'
    return {
        "steam-200k.csv": _text(lambda n, user, item: row.format(user, item, ("play", "purchase")[n % 2], n)),
    }


def _read_steam(folder: Path) -> None:
    """By its quotes, and cut at every comma, as a paper's counts ask for."""
    retail.read_steam(folder, honor_quotes=False)
    retail.read_steam(folder)


def _reviews() -> bytes:
    return _text(
        lambda n, user, item: json.dumps(
            {"reviewerID": f"A{user}", "asin": f"B{item}", "overall": 4.0, "unixReviewTime": 1400630400 + n}
        )
    )


def _amazon_csv() -> Files:
    header = "reviewerID,asin,unixReviewTime,overall"
    return {"Phones.csv": _text(lambda n, user, item: f"A{user},B{item},{1400630400 + n},4.0", header)}


def _taobao() -> Files:
    profile = (
        "userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,shopping_level,occupation,"
        "new_user_class_level "
    )
    return {
        "raw_sample.csv": _text(
            lambda n, user, item: f"{user},{1494137644 + n},{item},430548_1007,{n % 2},{1 - n % 2}",
            "user,time_stamp,adgroup_id,pid,nonclk,clk",
        ),
        "user_profile.csv": _table(7, lambda n: f"{n},0,5,{n % 2 + 1},4,,3,0,2", profile),
        "ad_feature.csv": _table(
            5, lambda n: f"{n},62{n},1,2,NULL,9.5", "adgroup_id,cate_id,campaign_id,customer,brand,price"
        ),
    }


def _lenskit() -> Files:
    scalar = {"layout": "scalar", "vector_size": None}
    both = {"entities": {"user": None, "item": None}, "interaction": True, "attributes": {"rating": scalar}}
    schema = {
        "version": "2025.3",
        "default_interaction": "rating",
        "entities": {"user": {"attributes": {"gender": scalar}}, "item": {"attributes": {"title": scalar}}},
        "relationships": {"rating": both},
    }
    rating = pl.DataFrame({"user_num": [0, 0, 1], "item_num": [0, 1, 1], "rating": [1.0, 2.0, 3.0]})
    return {
        "schema.json": json.dumps(schema).encode(),
        "user.parquet": parquet_of(pl.DataFrame({"user_id": [1, 2], "gender": ["f", "m"]})),
        "item.parquet": parquet_of(pl.DataFrame({"item_id": ["a", "b"], "title": ["A", "B"]})),
        "rating.parquet": parquet_of(rating.with_columns(pl.col("user_num", "item_num").cast(pl.Int32))),
    }


def _recbole() -> Files:
    rows = "".join(f"{k % 4}\t{k % 3}\t{k % 5}\t{17 + k}\n" for k in range(12))
    return {
        "x.inter": ("user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + rows).encode(),
        "x.user": b"user_id:token\tage:float\tjob:token_seq\n0\t3\ta b\n1\t4\tc\n",
        "x.item": b"item_id:token\ttitle:token_seq\tclass:token_seq\n0\tA\tx y\n1\tB\tz\n",
    }


def _ml_100k() -> Files:
    genres = "|".join("0" * 19)
    return {
        "u.data": "".join(f"{k % 3 + 1}\t{k % 2 + 1}\t{k % 5 + 1}\t{881250949 + k}\n" for k in range(9)).encode(),
        "u.user": b"1|24|M|technician|85711\n2|53|F|other|94043\n3|23|M|writer|32067\n",
        "u.item": "".join(f"{k}|Film ({1990 + k})|01-Jan-1995||http://x|{genres}\n" for k in (1, 2)).encode("latin-1"),
    }
