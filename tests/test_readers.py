"""The readers of published formats: values, notes on what is wrong, errors, and that nothing else comes out of them."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings

from recleak.data import checkins, lines, movielens, recbole, retail
from recleak.data import text as text_module
from recleak.data.interactions import Interactions, Note
from recleak.data.text import Field, integer, read_json_lines, read_text, real, text, time, verbatim
from recleak.errors import DataError, RecleakError

# The layouts: each makes a valid data set of any number of rows


@dataclass(frozen=True)
class Layout:
    """A published format, with a writer of its event file; users are 1 to 7, items 1 to 5, rows are distinct."""

    read: Callable[[Path], Interactions]
    file: str
    row: Callable[[int], str]
    short: str  # a row with too few fields
    unparsable: str
    header: str | None = None
    sides: Mapping[str, str] = field(default_factory=dict)
    zipped_name: str = "{}.gz"

    def lines(self, rows: int) -> list[str]:
        return ([] if self.header is None else [self.header]) + [self.row(n) for n in range(rows)]

    def files(self, rows: int = 12) -> dict[str, bytes]:
        return {self.file: text_bytes(self.lines(rows))} | {name: each.encode() for name, each in self.sides.items()}


def text_bytes(rows: list[str], end: str = "\n") -> bytes:
    return "".join(row + end for row in rows).encode()


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def table(rows: list[str]) -> str:
    return "".join(row + "\n" for row in rows)


def user(n: int) -> int:
    return n % 7 + 1


def item(n: int) -> int:
    return n % 5 + 1


GENRES = "|".join(["0"] * 5 + ["1"] + ["0"] * 13)  # Comedy

LAYOUTS: dict[str, Layout] = {
    "ml-100k": Layout(
        read=movielens.read_ml_100k,
        file="u.data",
        row=lambda n: f"{user(n)}\t{item(n)}\t{n % 5 + 1}\t{880000000 + n}",
        short="1\t2\t3",
        unparsable="1\ttwo\t3\t880000000",
        sides={
            "u.user": table([f"{n}|{20 + n}|{'MF'[n % 2]}|writer|0213{n}" for n in range(1, 8)]),
            "u.item": table([f"{n}|Film {n} (1995)|01-Jan-1995||http://x/{n}|{GENRES}" for n in range(1, 6)]),
        },
    ),
    "ml-1m": Layout(
        read=movielens.read_ml_1m,
        file="ratings.dat",
        row=lambda n: f"{user(n)}::{item(n)}::{n % 5 + 1}::{978300000 + n}",
        short="1::2::3",
        unparsable="1::2::five::978300000",
        sides={
            "users.dat": table([f"{n}::{'MF'[n % 2]}::25::{n}::0213{n}" for n in range(1, 8)]),
            "movies.dat": table([f"{n}::Film {n} (1995)::Comedy|Drama" for n in range(1, 6)]),
        },
    ),
    "ml-10m": Layout(
        read=movielens.read_ml_10m,
        file="ratings.dat",
        row=lambda n: f"{user(n)}::{item(n)}::{n % 5 + 0.5}::{978300000 + n}",
        short="1::2::3",
        unparsable="1::2::five::978300000",
        sides={"movies.dat": table([f"{n}::Film {n} (1995)::Comedy|Drama" for n in range(1, 6)])},
    ),
    "ml-latest": Layout(
        read=movielens.read_ml_csv,
        file="ratings.csv",
        header="userId,movieId,rating,timestamp",
        row=lambda n: f"{user(n)},{item(n)},{n % 5 + 0.5},{978300000 + n}",
        short="1,2,3",
        unparsable="1,2,five,978300000",
        sides={
            "movies.csv": table(
                ["movieId,title,genres", *[f'{n},"Film, the {n}. (1995)",Comedy|Drama' for n in range(1, 6)]]
            )
        },
    ),
    "recbole": Layout(
        read=recbole.read_recbole,
        file="x.inter",
        header="user_id:token\titem_id:token\trating:float\ttimestamp:float",
        row=lambda n: f"{user(n)}\t{item(n)}\t{n % 5 + 1}\t{880000000 + n}",
        short="1\t2\t3",
        unparsable="1\t2\tgood\t880000000",
        sides={
            "x.user": table(["user_id:token\tage:float\tgender:token", *[f"{n}\t{20 + n}\tF" for n in range(1, 8)]]),
            "x.item": table(["item_id:token\tclass:token_seq", *[f"{n}\tComedy Drama" for n in range(1, 6)]]),
        },
        zipped_name="{}",
    ),
    "foursquare raw": Layout(
        read=checkins.read_foursquare,
        file="dataset_TSMC2014_NYC.txt",
        row=lambda n: (
            f"{user(n)}\t4b{item(n)}\t4bf5\tCafé\t40.7{item(n)}\t-74.0\t-240\tTue Apr 03 18:{n % 60:02}:09 +0000 2012"
        ),
        short="1\t4b1\t4bf5",
        unparsable="1\t4b1\t4bf5\tBar\tnorth\t-74.0\t-240\tTue Apr 03 18:00:09 +0000 2012",
    ),
    "foursquare compact": Layout(
        read=checkins.read_foursquare,
        file="checkins_NYC_venues_min5.tsv",
        header="user_id\tunix_time\tvenue_id\tlatitude\tlongitude\tvenue_category",
        row=lambda n: f"{user(n)}\t{1333476009 + n}\t4b{item(n)}\t40.7{item(n)}\t-74.0\tBar",
        short="1\t1333476009",
        unparsable="1\tnoon\t4b1\t40.7\t-74.0\tBar",
    ),
    "gowalla": Layout(
        read=checkins.read_gowalla,
        file="loc-gowalla_totalCheckins.txt",
        row=lambda n: f"{user(n)}\t2010-10-19T23:{n // 60:02}:{n % 60:02}Z\t40.7{item(n)}\t-74.0\t{item(n)}",
        short="1\t2010-10-19T23:55:27Z\t40.7",
        unparsable="1\t2010-10-19T23:55:27Z\t40.7\twest\t1",
        sides={"gowalla_venues_NYC.tsv": table([f"{n}\tSpot {n}\t40.7{n}\t-74.0" for n in range(1, 6)])},
    ),
    "steam": Layout(
        read=retail.read_steam,
        file="steam-200k.csv",
        row=lambda n: f'{user(n)},"Game, part {item(n)}",play,{n}.5,0',
        short='1,"Game"',
        unparsable='1,"Game",play,long,0',
    ),
    "steam cut at commas": Layout(
        read=lambda folder: retail.read_steam(folder, honor_quotes=False),
        file="steam-200k.csv",
        row=lambda n: f'{user(n)},"Game {item(n)}, again",play,{n}.5,0',
        short='1,"Game"',
        unparsable='one,"Game",play,1.0,0',
    ),
    "amazon json": Layout(
        read=retail.read_amazon,
        file="reviews_Phones_5.json",
        row=lambda n: json.dumps(
            {"reviewerID": f"A{user(n)}", "asin": f"B{item(n)}", "overall": 4.0, "unixReviewTime": 1400630400 + n}
        ),
        short='"reviewerID"',
        unparsable='{"reviewerID": "A1", "asin": "B1", "overall": "good", "unixReviewTime": 1400630400}',
    ),
    "amazon csv": Layout(
        read=retail.read_amazon,
        file="Phones.csv",
        header="reviewerID,asin,unixReviewTime,overall",
        row=lambda n: f"A{user(n)},B{item(n)},{1400630400 + n},4.0",
        short="A1,B1",
        unparsable="A1,B1,never,4.0",
    ),
    "taobao": Layout(
        read=retail.read_taobao,
        file="raw_sample.csv",
        header="user,time_stamp,adgroup_id,pid,nonclk,clk",
        row=lambda n: f"{user(n)},{1494137644 + n},{item(n)},430548_1007,0,1",
        short="1,1494137644",
        unparsable="1,1494137644,ad,430548_1007,0,1",
        sides={
            "user_profile.csv": table(
                [
                    "userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,shopping_level,occupation,"
                    "new_user_class_level ",
                    *[f"{n},0,5,{n % 2 + 1},4,,3,0,2" for n in range(1, 8)],
                ]
            ),
            "ad_feature.csv": table(
                [
                    "adgroup_id,cate_id,campaign_id,customer,brand,price",
                    *[f"{n},62{n},1,2,NULL,9.5" for n in range(1, 6)],
                ]
            ),
        },
    ),
}

EVERY = pytest.mark.parametrize("name", LAYOUTS)
HEADED = pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.header])


def error(read: Callable[[Path], object], path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    return str(caught.value)


def note(data: Interactions, words: str) -> Note:
    found = [each for each in data.notes if words in each.what]
    assert len(found) == 1, data.notes
    return found[0]


# What each format holds


def test_ml_100k_values(tmp_path: Path) -> None:
    flags = ["0"] * 19
    flags[1] = flags[18] = "1"
    write(
        tmp_path,
        {
            "u.data": b"2\t10\t3\t881250949\n1\t9\t5\t881250950\n1\t10\t1\t881250949\n",
            "u.user": b"1|24|M|technician|85711\n2|53|F|other|T8H1N\n",
            "u.item": b"9|Amelie\xe9 (1990)|01-Jan-1990||http://x|" + "|".join(flags).encode() + b"\n"
            b"10|unknown||||" + b"|".join([b"1"] + [b"0"] * 18) + b"\n",
        },
    )
    data = movielens.read_ml_100k(tmp_path)
    assert data.rows.rows() == [(0, 1, 1.0, 881250949), (0, 0, 5.0, 881250950), (1, 1, 3.0, 881250949)]
    assert data.rows.schema == {"user": pl.Int32, "item": pl.Int32, "rating": pl.Float32, "time": pl.Int64}
    assert data.users.rows() == [(1, 24.0, "M", "technician", "85711"), (2, 53.0, "F", "other", "T8H1N")]
    assert data.attributes == {
        "age": "continuous",
        "gender": "categorical",
        "occupation": "categorical",
        "zip": "categorical",
    }
    assert data.items.rows() == [(9, "Amelieé (1990)", ["Action", "Western"]), (10, "unknown", ["unknown"])]
    assert data.notes == ()  # Latin-1 is what the publisher uses


def test_ml_1m_values(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "ratings.dat": b"1::1193::5::978300760\n2::661::3::0\n",
            "users.dat": b"1::F::1::10::48067\n2::M::56::0::02139\n",
            "movies.dat": b"661::James & the Peach (1996)::Animation|Children's\n1193::Cuckoo\xe9 (1975)::Drama\n",
        },
    )
    data = movielens.read_ml_1m(tmp_path)
    assert data.rows.rows() == [(0, 1, 5.0, 978300760), (1, 0, 3.0, None)]
    assert data.users.rows() == [
        (1, "F", "under 18", "K-12 student", "48067"),
        (2, "M", "56 and over", "other", "02139"),
    ]
    assert data.items.rows() == [
        (661, "James & the Peach (1996)", ["Animation", "Children's"]),
        (1193, "Cuckooé (1975)", ["Drama"]),
    ]
    assert [(each.what, each.count) for each in data.notes] == [("ratings without a time (0)", 1)]


def test_ml_1m_notes_an_unknown_occupation(tmp_path: Path) -> None:
    files = LAYOUTS["ml-1m"].files()
    files["users.dat"] = table([f"{n}::F::25::{21 if n == 60 else 3}::02139" for n in range(1, 151)]).encode()
    data = movielens.read_ml_1m(write(tmp_path, files))
    found = note(data, "rows dropped")
    assert (found.file, found.line, found.count) == ("users.dat", 60, 1)
    assert "occupation is '21', not an occupation code" in found.what


def test_ml_10m_values(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "ratings.dat": b"1::122::5::838985046\n2::122::3.5::0\n2::7::0.5::868245777\n",
            "movies.dat": "7::Amelié (2001)::(no genres listed)\n122::Boomerang (1992)::Comedy|Romance\n".encode(),
        },
    )
    data = movielens.read_ml_10m(tmp_path)
    assert data.rows.rows() == [(0, 1, 5.0, 838985046), (1, 1, 3.5, None), (1, 0, 0.5, 868245777)]
    assert data.users.rows() == [(1,), (2,)]
    assert data.items.rows() == [(7, "Amelié (2001)", []), (122, "Boomerang (1992)", ["Comedy", "Romance"])]
    assert [(each.what, each.count) for each in data.notes] == [("ratings without a time (0)", 1)]


def test_ml_latest_values(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "ratings.csv": b"userId,movieId,rating,timestamp\n1,31,2.5,1260759144\n2,11,4.0,1260759179\n",
            "movies.csv": b'movieId,title,genres\n11,"American President, The (1995)",Comedy|Drama\n'
            b"31,Moana,(no genres listed)\n"
            b'40,"""Great"" Man, The",Drama\n',
            "links.csv": b"movieId,imdbId,tmdbId\n1,0114709,862\n",
        },
    )
    data = movielens.read_ml_csv(tmp_path)
    assert data.rows.rows() == [(0, 1, 2.5, 1260759144), (1, 0, 4.0, 1260759179)]
    assert data.users.rows() == [(1,), (2,)]
    assert data.items.rows() == [(11, "American President, The (1995)", ["Comedy", "Drama"]), (31, "Moana", [])]


def test_recbole_values(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "x.inter": b"rating:float\tuser_id:token\tsession:token_seq\titem_id:token\ttimestamp:float\n"
            b"4.5\tu1\ta b\ti9\t887431973.7\n\tu2\t\ti8\t\n",
            "x.user": b"age:float\tuser_id:token\ttags:token_seq\tzip:token\n31\tu1\tred blue\t02139\n\tu2\t\t\n",
            "x.item": b"item_id:token\tmovie_title:token_seq\tclass:token_seq\tyear:float\tlatitude:float\n"
            b"i9\tThe Big Sleep\tCrime  Noir\t1946\t40.5\ni8\t\t\t\t\n",
        },
    )
    data = recbole.read_recbole(tmp_path / "x.inter")
    assert data.rows.rows() == [(0, 1, 4.5, 887431973), (1, 0, None, None)]
    assert data.users.rows() == [("u1", 31.0, "red blue", "02139"), ("u2", None, None, None)]
    assert data.attributes == {"age": "continuous", "tags": "categorical", "zip": "categorical"}
    assert data.items.rows() == [("i8", None, None, None), ("i9", "The Big Sleep", ["Crime", "Noir"], 40.5)]
    assert recbole.read_recbole(tmp_path).fingerprint == data.fingerprint


def test_recbole_reads_by_meaning_whatever_the_type_says(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "x.inter": b"user_id:token\titem_id:float\trating:token\ttimestamp:token\ttime:token\tuser:token\n"
            b"1\t7\t2.5\t2012-04-03 18:00:09\tnoon\tx\n",
            "x.item": b"item_id:token\ttitle:float\tgenre:token\tcategory:token\n7\t1984\tScience fiction\tB\n",
        },
    )
    data = recbole.read_recbole(tmp_path)
    assert data.rows.rows() == [(0, 0, 2.5, 1333476009)]
    assert data.items.rows() == [(7, "1984", ["Science fiction"])]


@pytest.mark.parametrize(
    ("name", "header", "problem"),
    [
        ("x.inter", "user_id:token,item_id:token", r"'user_id:token,item_id:token' is not NAME:TYPE"),
        ("x.inter", "user_id:token\titem_id", r"'item_id' is not NAME:TYPE"),
        ("x.inter", "user_id:token\ttoken", r"'token' is not NAME:TYPE"),
        ("x.inter", "user_id:token\tasin:token", r"no column ['item_id']"),
        ("x.inter", "user_id:token\titem_id:token\titem_id:float", r"the name 'item_id' is taken"),
        ("x.user", "user_id:token\tage:float\tage:token", r"the name 'age' is taken"),
        ("x.user", "user_id:token\tid:token", r"the name 'id' is taken"),
        ("x.user", "uid:token\tage:float", r"no column ['user_id']"),
        ("x.item", "user_id:token\tage:float", r"no column ['item_id']"),
    ],
)
def test_recbole_headers_that_cannot_be_used(tmp_path: Path, name: str, header: str, problem: str) -> None:
    row = "\t".join(["1"] * (header.count("\t") + 1))
    write(tmp_path, LAYOUTS["recbole"].files() | {name: text_bytes([header, row])})
    message = error(recbole.read_recbole, tmp_path)
    assert f"{name}, line 1: " in message
    assert problem in message
    assert "ename" in message or "Give a RecBole atomic file (tab separated)" in message


def test_recbole_wants_one_file(tmp_path: Path) -> None:
    assert "expected one .inter file, found none" in error(recbole.read_recbole, tmp_path)
    write(tmp_path, {"a.inter": b"", "b.inter": b""})
    assert "found a.inter, b.inter" in error(recbole.read_recbole, tmp_path)
    assert "no such file" in error(recbole.read_recbole, tmp_path / "c.inter")


def test_foursquare_raw_values(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "dataset_TSMC2014_NYC.txt": b"470\t49bb\t4bf5\tArts & Crafts Store\t40.7198\t-74.0025\t-240\t"
            b"Tue Apr 03 18:00:09 +0000 2012\n"
            b"979\t4a43\t4bf6\tCaf\xe9\t40.6067\t-74.0441\t-240\tTue Apr 03 20:00:25 +0200 2012\n"
            b"69\t49bb\t4bf5\tArts & Crafts Store\t40.7161\t-73.8830\t-240\tMon Apr 02 18:02:24 +0000 2012\n"
        },
    )
    data = checkins.read_foursquare(tmp_path)
    assert data.users["id"].to_list() == [69, 470, 979]
    assert data.rows.rows() == [(0, 0, 1333389744), (1, 0, 1333476009), (2, 1, 1333476025)]
    assert data.items.rows() == [
        ("49bb", ["Arts & Crafts Store"], 40.7161, -73.8830),  # where the earliest check-in was
        ("4a43", ["Café"], 40.6067, -74.0441),
    ]
    assert {each.what: each.count for each in data.notes} == {
        "venues with more than one latitude; that of the first check-in was kept": 1,
        "venues with more than one longitude; that of the first check-in was kept": 1,
    }


def test_foursquare_compact_values(tmp_path: Path) -> None:
    header = "user_id\tunix_time\tvenue_id\tlatitude\tlongitude\tvenue_category"
    rows = ["2\t1333476009\t4b1\t40.5\t-74.5\t", "2\t1333476008\t4b2\t40.6\t-74.6\tBar", "1\t7\t4b1\t40.5\t-74.5\t"]
    write(tmp_path, {"checkins_NYC_venues_min5.tsv": text_bytes([header, *rows, rows[0]])})
    data = checkins.read_foursquare(tmp_path)
    assert data.rows.rows() == [(0, 0, 7), (1, 1, 1333476008), (1, 0, 1333476009), (1, 0, 1333476009)]
    assert data.items.rows() == [("4b1", [], 40.5, -74.5), ("4b2", ["Bar"], 40.6, -74.6)]
    assert note(data, "rows equal another one in user, item, time; kept").count == 1


def test_gowalla_values_and_box(tmp_path: Path) -> None:
    rows = [
        "0\t2010-10-19T23:55:27Z\t40.7\t-74.0\t22847",
        "0\t2010-10-18T22:17:43Z\t30.2691\t-97.7493\t420315",  # Austin
        "5\t2010-10-17T23:42:03Z\t40.9176\t-74.0\t316637",  # on the northern border
        "5\t2010-10-17T19:26:05Z\t40.5\t-73.9\t16516",
        "5\t2010-10-17T19:26:05Z\t40.5\t-73.9\t16516",
    ]
    files = {
        "loc-gowalla_totalCheckins.txt": text_bytes(rows),
        "gowalla_venues_NYC.tsv": b"22847\tJoe's\t40.7\t-74.0\n99\tIdle\t40.7\t-74.0\n22847\tJim's\t40.7\t-74.0\n",
    }
    data = checkins.read_gowalla(write(tmp_path, files))
    assert data.users["id"].to_list() == [0, 5]
    assert data.rows.rows() == [(0, 1, 1287532527), (1, 0, 1287343565), (1, 0, 1287343565)]
    assert data.items.rows() == [(16516, None, 40.5, -73.9), (22847, "Joe's", 40.7, -74.0)]
    assert {each.what: each.count for each in data.notes} == {
        "check-ins outside the box left out": 2,
        "locations without a name": 1,
        "items described more than once; the first description was kept": 1,
        "items described but without any interaction": 1,
        "rows equal another one in user, item, time; kept": 1,
    }
    everywhere = checkins.read_gowalla(tmp_path, box=None)
    assert (len(everywhere), everywhere.n_items) == (5, 4)
    message = error(lambda folder: checkins.read_gowalla(folder, box=checkins.Box(0, 0, 1, 1)), tmp_path)
    assert "loc-gowalla_totalCheckins.txt: no check-in is inside Box(west=0" in message
    assert "Check the box" in message


def test_steam_values(tmp_path: Path) -> None:
    rows = [
        '151603712,"The Elder Scrolls V Skyrim",purchase,1.0,0',
        '151603712,"The Elder Scrolls V Skyrim",play,273.0,0',
        '5250,"Warhammer 40,000 ""II""",purchase,1.0,0',
        '5250,"Trailing ",play,0.1,0',
    ]
    write(tmp_path, {"steam-200k.csv": text_bytes(rows)})
    data = retail.read_steam(tmp_path)
    titles = ["The Elder Scrolls V Skyrim", "Trailing ", 'Warhammer 40,000 "II"']
    assert data.items.rows() == [(title, title) for title in titles]
    assert data.users["id"].to_list() == [5250, 151603712]
    assert data.rows.rows() == [(0, 1, np.float32(0.1)), (0, 2, 1.0), (1, 0, 1.0), (1, 0, 273.0)]
    played = retail.read_steam(tmp_path, behavior="play")
    assert played.items["id"].to_list() == titles[:2]
    assert note(played, "rows that are not 'play' left out").count == 2
    cut = retail.read_steam(tmp_path, honor_quotes=False)
    assert cut.items["id"].to_list() == [*titles[:2], "Warhammer 40"]
    assert cut.rows.equals(data.rows)
    assert note(cut, "rows with a comma in the title").count == 1
    cut = retail.read_steam(tmp_path, honor_quotes=False, behavior="purchase")
    assert cut.items["id"].to_list() == [titles[0], "Warhammer 40"]


def test_steam_titles_with_newlines_and_stray_quotes(tmp_path: Path) -> None:
    rows = ['1,"two\nlines",play,1.0,0', '1,"Weird" Al,play,2.0,0', '1,5" disk,play,3.0,0']
    data = retail.read_steam(write(tmp_path, {"steam-200k.csv": text_bytes(rows)}))
    assert data.items["id"].to_list() == ['"Weird" Al', '5" disk', "two\nlines"]


def test_amazon_json_values(tmp_path: Path) -> None:
    objects = [
        {"reviewerID": "A30", "asin": "120401325X", "helpful": [0, 0], "reviewText": 'a "b"\n', "overall": 4.0},
        {"reviewerID": "A30", "asin": "3998899561", "overall": 5, "unixReviewTime": 1400630400, "summary": None},
        {"reviewerID": "Zoë", "asin": "120401325X", "overall": None, "unixReviewTime": 1400630401.0},
    ]
    write(tmp_path, {"reviews_x_5.json": text_bytes([json.dumps(each) for each in objects]), "meta_x.json": b"{}\n"})
    data = retail.read_amazon(tmp_path)
    assert data.users["id"].to_list() == ["A30", "Zoë"]
    assert data.items["id"].to_list() == ["120401325X", "3998899561"]
    assert data.rows.rows() == [(0, 0, 4.0, None), (0, 1, 5.0, 1400630400), (1, 0, None, 1400630401)]


def test_amazon_csv_without_stars(tmp_path: Path) -> None:
    rows = ["reviewerID,asin,unixReviewTime", 'A1,"B,1",1400630400', "A2,0002,1400630401", "A2,0002,1400630401"]
    data = retail.read_amazon(write(tmp_path, {"x.csv": text_bytes(rows)}))
    assert data.items["id"].to_list() == ["0002", "B,1"]
    assert data.rows.rows() == [(0, 1, 1400630400), (1, 0, 1400630401), (1, 0, 1400630401)]
    assert note(data, "rows equal another one").count == 1
    empty = ["reviewerID,asin,unixReviewTime,overall", "A1,B1,1400630400,"]
    assert "rating" not in retail.read_amazon(write(tmp_path, {"x.csv": text_bytes(empty)})).rows.columns


def test_amazon_wants_one_file_of_reviews(tmp_path: Path) -> None:
    assert "no file reviews_*.json or *.csv (plain or .gz); there is: nothing" in error(retail.read_amazon, tmp_path)
    write(tmp_path, {"reviews_a.json": b"", "reviews_b.json": b""})
    assert "expected one file of interactions, found reviews_a.json, reviews_b.json" in error(
        retail.read_amazon, tmp_path
    )


@pytest.mark.parametrize("value", ["null", '"\\ud800"'])
def test_amazon_json_ids_that_are_none(tmp_path: Path, value: str) -> None:
    layout = LAYOUTS["amazon json"]
    rows = [*layout.lines(150), f'{{"reviewerID": {value}, "asin": "B1", "unixReviewTime": 1400630400}}']
    found = note(retail.read_amazon(write(tmp_path, {layout.file: text_bytes(rows)})), "rows dropped")
    assert (found.line, found.count) == (151, 1)
    assert "user is empty" in found.what


def test_amazon_json_nested_without_end(tmp_path: Path) -> None:
    rows = ["[" * 100_000, *LAYOUTS["amazon json"].lines(150)]
    found = note(retail.read_amazon(write(tmp_path, {"x.json": text_bytes(rows)})), "not a JSON object")
    assert (found.line, found.count) == (1, 1)


def test_json_lines_become_objects_a_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As objects of Python all lines of a block took a hundred times its size."""
    layout = LAYOUTS["amazon json"]
    rows = layout.lines(8_000)
    write(tmp_path, {layout.file: text_bytes(rows)})
    monkeypatch.setattr(lines, "BLOCK_BYTES", 1 << 20)  # all of it is one block
    fields, peaks, tables = [Field("user", "reviewerID", required=True)], [], []
    for most in (1 << 30, 1 << 14):
        monkeypatch.setattr(lines, "_PIECE", most)
        tracemalloc.start()
        tables.append(read_json_lines(tmp_path / layout.file, fields)[0])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert tables[0].equals(tables[1])
    assert peaks[1] < peaks[0] / 2
    monkeypatch.setattr(text_module, "JSON_BYTES", 200)
    rows[7_000] = json.dumps({"reviewerID": "A1", "asin": "B1", "reviewText": "x" * 200, "unixReviewTime": 1400630400})
    found = note(layout.read(write(tmp_path, {layout.file: text_bytes(rows)})), "rows dropped")
    assert (found.line, found.count) == (7_001, 1)
    assert "not a JSON object of at most 200 bytes" in found.what


def test_short_lines_that_are_not_utf8_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As objects of Python the lines of a block took fifty times its size."""
    path = tmp_path / "a.tsv"
    path.write_bytes(b"u\t2\n" * 200_000 + b"u\xe9\t1\n")
    monkeypatch.setattr(lines, "BLOCK_BYTES", 2 << 20)  # all of it is one block
    found, peaks = [], []
    for most in (1 << 30, 1 << 14):
        monkeypatch.setattr(lines, "_PIECE", most)
        tracemalloc.start()
        found.append(read_text(path, [Field("user", 0), Field("item", 1, integer)], separator="\t", header=False))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert found[0][0].equals(found[1][0])
    assert found[0][1] == found[1][1]
    assert found[1][0]["user"][-1] == "u\xe9"
    assert peaks[1] < peaks[0] / 2


def test_taobao_values(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "raw_sample.csv": b"user,time_stamp,adgroup_id,pid,nonclk,clk\n"
            b"581738,1494137644,1,430548_1007,1,0\n449818,1494638778,3,430548_1007,0,1\n"
            b"914836,1494650879,4,430548_1007,0,1\n",
            "user_profile.csv": b"userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,"
            b"shopping_level,occupation,new_user_class_level \n449818,0,5,2,5,,3,0,3\n523,5,2,2,2,1,3,1,2\n",
            "ad_feature.csv": b"adgroup_id,cate_id,campaign_id,customer,brand,price\n3,6261,83237,1,NULL,170.0\n"
            b"4,,1,1,2,9.0\n",
        },
    )
    clicks = retail.read_taobao(tmp_path)
    assert clicks.rows.rows() == [(0, 0, 1494638778), (1, 1, 1494650879)]
    assert clicks.users.columns[1:] == [
        "gender",
        "age",
        "pvalue_level",
        "shopping_level",
        "occupation",
        "new_user_class_level",
    ]
    assert clicks.users.rows() == [(449818, "F", "5", None, "3", "0", "3"), (914836, *[None] * 6)]
    assert set(clicks.attributes.values()) == {"categorical"}
    assert clicks.items.rows() == [(3, ["6261"]), (4, [])]
    assert {each.what: each.count for each in clicks.notes} == {
        "displays without a click left out": 1,
        "users with interactions but without a description": 1,
        "users described but without any interaction": 1,
    }
    displays = retail.read_taobao(tmp_path, clicks_only=False)
    assert displays.rows["rating"].to_list() == [1.0, 0.0, 1.0]


# What holds for all of them


@EVERY
def test_plain_gzip_line_ends_and_marks_are_the_same(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    files = layout.files()
    plain = layout.read(write(tmp_path / "plain", files))
    assert [each.count for each in plain.notes] == ([12] if name == "steam cut at commas" else [])
    assert (plain.n_users, plain.n_items, len(plain)) == (7, 5, 12)
    variants = {
        "gzip": {layout.zipped_name.format(each): gzip.compress(content) for each, content in files.items()},
        "crlf": {each: content.replace(b"\n", b"\r\n") for each, content in files.items()},
        "mark": {each: b"\xef\xbb\xbf" + content for each, content in files.items()},
        "no last line end": {each: content.removesuffix(b"\n") for each, content in files.items()},
    }
    for variant, changed in variants.items():
        other = layout.read(write(tmp_path / variant, changed))
        assert other.fingerprint == plain.fingerprint, variant
        assert other.notes == plain.notes, variant


@EVERY
@settings(max_examples=6)
@given(order=st.permutations(range(12)))
def test_order_of_rows_does_not_matter(tmp_path_factory: pytest.TempPathFactory, name: str, order: list[int]) -> None:
    layout = LAYOUTS[name]
    head = layout.lines(0)
    rows = layout.lines(12)[len(head) :]
    folder = write(tmp_path_factory.mktemp("order"), layout.files())
    first = layout.read(folder)
    write(folder, {layout.file: text_bytes([*head, *[rows[n] for n in order]])})
    assert layout.read(folder).fingerprint == first.fingerprint


@pytest.mark.parametrize("category", ["", "Bar"])
def test_place_of_a_venue_does_not_depend_on_order(tmp_path: Path, category: str) -> None:
    layout = LAYOUTS["foursquare compact"]
    rows = [
        "1\t100\t4b1\t40.1\t-74.1\tGym",
        f"2\t100\t4b1\t40.2\t-74.2\t{category}",
        "3\t99\t4b1\t40.3\t-74.3\t",
        "4\t101\t4b1\t40.4\t-74.4\tZoo",
    ]
    values = set()
    for turn in range(4):
        write(tmp_path, {layout.file: text_bytes([str(layout.header), *rows[turn:], *rows[:turn]])})
        data = layout.read(tmp_path)
        values.add(data.fingerprint)
        assert data.items["latitude"].to_list() == [40.3]
        assert data.items["categories"].to_list() == [[category or "Gym"]]  # a tie goes by name
        assert note(data, "venues with more than one category; that of the first check-in was kept").count == 1
    assert len(values) == 1


@EVERY
@pytest.mark.parametrize("kind", ["short", "unparsable"])
def test_few_bad_rows_are_dropped_and_noted(tmp_path: Path, name: str, kind: str) -> None:
    layout = LAYOUTS[name]
    bad = getattr(layout, kind)
    good = layout.lines(200)
    head = len(good) - 200
    rows = [*good[: head + 50], "", bad, *good[head + 50 : head + 90], bad, *good[head + 90 :]]
    data = layout.read(write(tmp_path, layout.files() | {layout.file: text_bytes(rows)}))
    found = note(data, "rows dropped")
    assert (found.file, found.line, found.count) == (layout.file, head + 52, 2)
    assert "Mend or delete them" in found.remedy
    assert repr(bad.replace('"', ""))[1:-1][:8] in found.what.replace('"', "")
    assert note(data, "blank lines skipped").count == 1
    clean = layout.read(write(tmp_path, {layout.file: text_bytes(good)}))
    assert data.fingerprint == clean.fingerprint
    assert str(found).startswith(f"{layout.file}, line {head + 52}: rows dropped; the first: ")


@EVERY
@pytest.mark.parametrize("kind", ["short", "unparsable"])
def test_many_bad_rows_are_an_error(tmp_path: Path, name: str, kind: str) -> None:
    layout = LAYOUTS[name]
    bad = getattr(layout, kind)
    good = layout.lines(195)
    head = len(good) - 195
    rows = [*good[: head + 50], bad, bad, bad, *good[head + 50 :]]
    message = error(layout.read, write(tmp_path, layout.files() | {layout.file: text_bytes(rows)}))
    assert message.startswith(f"{layout.file}, line {head + 51}: 3 of 198 rows cannot be used; the first: ")
    assert "Check the format and the columns; up to 1% of bad rows are skipped." in message


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("ml-100k", "1\t2\t3", "3 fields instead of 4: '1\\t2\\t3'"),
        ("ml-100k", "1\t2\t3\t880000000\t5", "5 fields instead of 4"),
        ("steam", '1,"A",play,1.0,0,0', "6 fields instead of 5"),
        ("amazon csv", "A1,B1,1400630400,4.0,", "5 fields instead of 4"),
        ("ml-100k", "\t2\t3\t4", "user is empty"),
        ("ml-100k", "1.5\t2\t3\t4", "user is '1.5', not a whole number"),
        ("ml-100k", "1\t2\tnan\t4", "rating is 'nan', not a finite number"),
        ("ml-100k", "1\t2\t1e999\t4", "rating is '1e999', not a finite number"),
        ("ml-100k", "1\t2\t3\tnoon", "time is 'noon', not a time"),
        ("ml-100k", "99999999999999999999\t2\t3\t4", "not a whole number"),
        ("foursquare raw", "1\t\t4bf5\tBar\t40.7\t-74.0\t-240\tTue Apr 03 18:00:09 +0000 2012", "item is empty"),
        ("foursquare raw", "1\t2\t4bf5\tBar\t40.7\t-74.0\t-240\tTue Apr 33 18:00:09 +0000 2012", "time is 'Tue Apr 33"),
        ("steam", '1,"",play,1.0,0', "item is empty"),
        ("steam", "1,A, B,play,1.0,0", "6 fields instead of 5"),
        ("steam cut at commas", "1,A,play,1.0", "not a line of user,title,behavior,value,0"),
        ("amazon json", '{"reviewerID": "A1"}', "item is empty"),
        ("amazon json", '{"reviewerID": "A1",', "not a JSON object"),
        ("taobao", "1,1494137644,2,430548_1007,0,", "rating is empty"),
    ],
)
def test_reasons_for_bad_rows(tmp_path: Path, name: str, row: str, reason: str) -> None:
    layout = LAYOUTS[name]
    message = error(layout.read, write(tmp_path, layout.files() | {layout.file: text_bytes([*layout.lines(3), row])}))
    head = 1 if layout.header else 0
    assert message.startswith(f"{layout.file}, line {head + 4}: 1 of 4 rows cannot be used; the first: ")
    assert reason in message


@EVERY
def test_missing_files(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    files = layout.files()
    write(tmp_path, {each: content for each, content in files.items() if each != layout.file} | {"other": b""})
    message = error(layout.read, tmp_path)
    assert str(tmp_path) in message
    assert "other" in message or name == "recbole"
    assert "Give the folder that holds the files as published." in message or name == "recbole"
    assert "no such folder" in error(layout.read, tmp_path / "nowhere") or name == "recbole"


def spoil(content: bytes) -> dict[str, tuple[bytes, str, str]]:
    """Files that are not what they should be: content, what the message says, what it advises."""
    packed = gzip.compress(content * 40)
    return {
        "empty": (b"", "the file is empty", "Check that the download"),
        "blank lines only": (b"\n  \n\r\n", "the file is empty", "Check that the download"),
        "mark only": (b"\xef\xbb\xbf", "the file is empty", "Check that the download"),
        "empty gzip": (gzip.compress(b""), "the file is empty", "Check that the download"),
        "zip": (b"PK\x03\x04" + content, "this is a zip archive", "Unpack it"),
        "parquet": (b"PAR1" + content, "this is a Parquet file", ".parquet"),
        "utf-16": (content.decode().encode("utf-16"), "this is UTF-16 text", "iconv -f UTF-16"),
        "utf-16 without a mark": (content.decode().encode("utf-16-le"), "a NUL byte: this is not text", "text file"),
        "truncated gzip": (packed[: len(packed) // 2], "cannot be read to its end", "Fetch it again"),
        "garbled gzip": (packed[:30] + b"garbage" * 9 + packed[60:], "cannot be read to its end", "Fetch it again"),
        "gzip with a tail": (packed + b"tail", "cannot be read to its end", "Fetch it again"),
    }


@EVERY
@pytest.mark.parametrize("case", spoil(b"x"))
def test_files_that_are_something_else(tmp_path: Path, name: str, case: str) -> None:
    layout = LAYOUTS[name]
    files = layout.files()
    for file, content in files.items():
        bad, problem, remedy = spoil(content)[case]
        message = error(layout.read, write(tmp_path / file, files | {file: bad}))
        assert file in message.splitlines()[0]
        assert problem in message
        assert remedy in message.splitlines()[1]


@HEADED
def test_header_only(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    message = error(layout.read, write(tmp_path, layout.files() | {layout.file: text_bytes(["", str(layout.header)])}))
    assert f"{layout.file}, line 2: there is a header but no row" in message
    assert "Check that the export was complete." in message


def separator_of(name: str) -> str:
    return "::" if name in ("ml-1m", "ml-10m") else "," if LAYOUTS[name].file.endswith(".csv") else "\t"


@pytest.mark.parametrize("wrong", [";", "\t", "|", ","])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "amazon json"])
def test_wrong_separator(tmp_path: Path, name: str, wrong: str) -> None:
    layout = LAYOUTS[name]
    right = separator_of(name)
    wrong = "::" if wrong == right else wrong
    rows = [row.replace('"', "").replace(", ", " ").replace(right, wrong) for row in layout.lines(12)]
    message = error(layout.read, write(tmp_path, layout.files() | {layout.file: text_bytes(rows)}))
    assert f"{layout.file}, line 1: " in message
    if name == "recbole":
        assert "Give a RecBole atomic file (tab separated)" in message
    elif name != "steam cut at commas":
        assert f"The separator looks like {wrong!r}, not {right!r}." in message


@HEADED
def test_missing_columns(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    right = separator_of(name)
    rows = [right.join(row.split(right)[1:]) for row in layout.lines(12)]
    message = error(layout.read, write(tmp_path, layout.files() | {layout.file: text_bytes(["", *rows])}))
    assert f"{layout.file}, line {1 if name == 'recbole' else 2}: no column " in message
    assert "user" in message or "reviewerID" in message
    assert "Name the right columns" in message or "rename the columns" in message


@HEADED
def test_columns_that_are_there_twice(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    right = separator_of(name)
    rows = [row.split(right)[0] + right + row for row in layout.lines(12)]
    message = error(layout.read, write(tmp_path, layout.files() | {layout.file: text_bytes(rows)}))
    assert f"{layout.file}, line 1: " in message
    assert "more than one column is called" in message or "is taken" in message
    assert "Rename" in message


@EVERY
def test_mixed_encodings(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    latin_expected = name == "foursquare raw"
    sick = {
        "amazon json": b'{"reviewerID": "A1", "asin": "B1", "x": "\xe9", "unixReviewTime": 1400630400, "overall": 1}'
    }
    rows = [each.encode() for each in layout.lines(12)]
    first = rows[-1]
    if name.startswith("steam"):
        first = b'1,"Caf\xe9 Racer",play,1.0,0'
    elif name in ("ml-100k", "ml-1m", "ml-10m", "ml-latest", "gowalla", "taobao"):
        first = b"\xe9" + first  # an id that is no number: a bad row as well
    else:
        first = sick.get(
            name, first.replace(b"1", b"\xe9", 1) if b"\xc3" not in first else first.replace(b"\xc3\xa9", b"\xe9")
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "MAX_BAD_SHARE", 1.0)
        write(tmp_path, layout.files() | {layout.file: b"\n".join([*rows, first, rows[-1], first])})
        data = layout.read(tmp_path)
    if latin_expected:
        assert not [each for each in data.notes if "Latin-1" in each.what]
        assert ["Café"] in data.items["categories"].to_list()
        return
    found = note(data, "lines are not UTF-8 and were read as Latin-1")
    assert (found.file, found.line, found.count) == (layout.file, len(rows) + 1, 2)
    assert found.remedy == "Convert the file to UTF-8."


@pytest.mark.parametrize(
    ("name", "file", "rows"),
    [
        ("ml-100k", "u.user", ["3|20|M|other|02139", "99|20|M|other|02139"]),
        ("ml-1m", "users.dat", ["3::M::25::3::02139", "99::M::25::3::02139"]),
        ("recbole", "x.user", ["user_id:token\tage:float", "3\t20", "99\t20"]),
    ],
)
def test_users_in_one_file_but_not_the_other(tmp_path: Path, name: str, file: str, rows: list[str]) -> None:
    layout = LAYOUTS[name]
    data = layout.read(write(tmp_path, layout.files() | {file: text_bytes([*rows, rows[-1]])}))
    lacking = note(data, "users with interactions but without a description")
    assert lacking.count == 6
    assert "Check that both files use the same ids (first: 1)." in lacking.remedy
    idle = note(data, "users described but without any interaction")
    assert (idle.count, idle.remedy) == (1, "They are left out (first: 99).")
    assert note(data, "users described more than once; the first description was kept").count == 1
    known = data.users.filter(pl.col("age").is_not_null())
    assert known["id"].to_list() == [3]


def test_an_unclosed_quote_is_an_error_and_not_a_loss(tmp_path: Path) -> None:
    layout = LAYOUTS["steam"]
    for at in (0, 5, 11):
        rows = layout.lines(12)
        rows[at] = '1,"Game,play,1.0,0'
        message = error(layout.read, write(tmp_path, {layout.file: text_bytes(rows)}))
        assert f"{layout.file}, line {at + 1}: not readable as CSV" in message
        assert "A quote was probably opened and not closed; mend the line." in message
    swallowed = ['1,"Game 1,play,1.0,0', '1,"Game 2",play,1.0,0']  # would pass as one row of five fields
    message = error(layout.read, write(tmp_path, {layout.file: text_bytes(swallowed)}))
    assert f"{layout.file}, line 1: not readable as CSV" in message


# Times


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("0", 0),
        ("-5", -5),
        ("978300760", 978300760),
        ("978300760.9", 978300760),
        ("9.7830076e8", 978300760),
        ("978300760123", 978300760),
        ("2000-12-31", 978220800),
        ("2000-12-31 22:12:40", 978300760),
        ("2000-12-31T22:12:40", 978300760),
        ("2000-12-31T22:12:40Z", 978300760),
        ("2000-12-31T22:12:40.250Z", 978300760),
        ("2000-12-31T23:12:40+01:00", 978300760),
        ("2000-12-31 17:12:40-05:00", 978300760),
        ("Sun Dec 31 22:12:40 +0000 2000", 978300760),
        ("Sun Dec 31 17:12:40 -0500 2000", 978300760),
        ("1969-12-31T23:59:59Z", -1),
    ],
)
def test_times(written: str, seconds: int) -> None:
    assert time(pl.Series([written])).to_list() == [seconds]
    mixed = pl.Series("when", [written, None, "2012-02-30", "soon", "0"])
    assert time(mixed).to_list() == [seconds, None, None, None, 0]
    assert time(mixed).name == "when"


@given(st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1)))
def test_iso_times_agree_with_python(moment: datetime) -> None:
    moment = moment.replace(microsecond=0, tzinfo=UTC)
    expected = int(moment.timestamp())
    spellings = [moment.isoformat(), moment.isoformat(" "), moment.strftime("%a %b %d %H:%M:%S %z %Y")]
    assert time(pl.Series(spellings)).to_list() == [expected] * 3


# The size of a block is nobody's business

CELLS = st.sampled_from(
    ["a", "7", "007", '"', '"x"', '"b,c"', '"1\n2"', '""', "", " ", "é", "::", "\r", '"q" r', "\x1c"]
)
ENDS = st.sampled_from(["\n", "\n", "\n", "\r\n", "\n\n", "\n \t\n"])


@st.composite
def raw_tables(draw: st.DrawFn) -> bytes:
    """Text that looks like a table of two columns, more or less; some of its lines are Latin-1."""
    parts = [b"u,v\n"]
    for _ in range(draw(st.integers(1, 8))):
        cells = draw(st.lists(CELLS, min_size=2, max_size=2) | st.lists(CELLS, min_size=1, max_size=3))
        encoding = draw(st.sampled_from(["utf-8", "utf-8", "latin-1"]))
        parts.append((",".join(cells) + draw(ENDS)).encode(encoding))
    return b"".join(parts)


def outcome(read: Callable[[], tuple[pl.DataFrame, list[Note]]], block: int) -> object:
    """All that a caller can see: the rows and the notes, or the message."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", block)
        patch.setattr(lines, "MAX_BAD_SHARE", 0.5)
        try:
            found, notes = read()
        except DataError as problem:
            return str(problem)
        return found.rows(), notes


@settings(max_examples=150)
@given(
    content=raw_tables(),
    separator=st.sampled_from([",", "\t"]),
    block=st.integers(1, 40),
    header=st.booleans(),
    quoted=st.booleans(),
    zipped=st.booleans(),
)
@example(content=b'u,v\n1,"a\nb"\nx,y\n', separator=",", block=7, header=True, quoted=True, zipped=False)
@example(content=b'u,v\nx,y \nx,"y "\n', separator=",", block=4, header=True, quoted=True, zipped=False)
@example(content=b'u,v\nbad\nx,"y"\nx,y\nx,y\n', separator=",", block=4, header=True, quoted=True, zipped=False)
@example(content=b'u,v\n  \nx,"y"\n\t\nx,y\n', separator=",", block=1, header=False, quoted=True, zipped=False)
@example(content=b'u,v\nx,"y"\nx,\r\r\nx,y\r', separator=",", block=1, header=False, quoted=True, zipped=False)
@example(content=b"u,v\nx,y\n \t\nx,y\n", separator="\t", block=9, header=True, quoted=False, zipped=False)
def test_delimited_text_in_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory,
    content: bytes,
    separator: str,
    block: int,
    header: bool,
    quoted: bool,
    zipped: bool,
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "x.csv"
    content = content.replace(b",", separator.encode())
    path.write_bytes(gzip.compress(content) if zipped else content)
    sources: tuple[str | int, str | int] = ("u", "v") if header else (0, 1)
    fields = [Field("u", sources[0], required=True), Field("v", sources[1], verbatim)]

    def read() -> tuple[pl.DataFrame, list[Note]]:
        return read_text(path, fields, separator=separator, header=header, quoted=quoted)

    assert outcome(read, block) == outcome(read, 1 << 20)


@settings(max_examples=60)
@given(
    rows=st.lists(st.sampled_from(['{"u": 1}', '{"u": "é"}', '{"v": 2}', "", " ", "{", "[]"]), min_size=1, max_size=8),
    block=st.integers(1, 40),
)
def test_json_lines_in_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], block: int
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "x.json"
    path.write_bytes("\n".join(rows).encode("latin-1"))

    def read() -> tuple[pl.DataFrame, list[Note]]:
        return read_json_lines(path, [Field("u", "u", required=True)])

    assert outcome(read, block) == outcome(read, 1 << 20)


@EVERY
@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("zipped", [False, True])
def test_layouts_in_blocks_of_any_size(tmp_path: Path, name: str, block: int, zipped: bool) -> None:
    layout = LAYOUTS[name]
    rows = layout.lines(12)
    rows[6:6] = ["", layout.short]
    files = layout.files() | {layout.file: text_bytes(rows, "\r\n")}
    if zipped:
        files = {layout.zipped_name.format(each): gzip.compress(content) for each, content in files.items()}
    write(tmp_path, files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "MAX_BAD_SHARE", 0.1)
        whole = layout.read(tmp_path)
        patch.setattr(lines, "BLOCK_BYTES", block)
        pieces = layout.read(tmp_path)
    assert pieces.fingerprint == whole.fingerprint
    assert pieces.notes == whole.notes
    assert note(pieces, "rows dropped").line == 8


def test_parsers_of_cells() -> None:
    assert integer(pl.Series(["1", "-2", "x", "1.0", None])).to_list() == [1, -2, None, None, None]
    assert real(pl.Series(["1.5", "-2e3", "nan", "inf", "x", None])).to_list() == [1.5, -2000.0, *[None] * 4]
    assert text(pl.Series(["x", None])).to_list() == ["x", None]


# Noise: whatever is in a file, a reader gives Interactions or a message for its user

SNIPPETS = [
    *(
        b'"',
        b"\r",
        b"\n",
        b"\t",
        b",",
        b"::",
        b"|",
        b" ",
        b"\xff",
        b"\xe9",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
        b"\x1c",
        b"\x00",
    ),
    *(
        b"nan",
        b"inf",
        b"-",
        b"1e400",
        b"9" * 25,
        b"\\ud800",
        b"null",
        b"{",
        b"[",
        b"\xef\xbb\xbf",
        b"id",
        b"user_id:token",
    ),
]


@st.composite
def mutations(draw: st.DrawFn, content: bytes) -> bytes:
    """A file's bytes with some deleted, doubled, swapped or put in."""
    for _ in range(draw(st.integers(1, 4))):
        if not content:
            break
        start = draw(st.integers(0, len(content) - 1))
        end = start + draw(st.sampled_from([1, 2, 5, 30, 200]))
        match draw(st.integers(0, 3)):
            case 0:
                content = content[:start] + content[end:]
            case 1:
                content = content[:end] + content[start:]
            case 2:
                content = content[:start] + content[start:end][::-1] + content[end:]
            case _:
                snippet = draw(st.sampled_from(SNIPPETS) | st.binary(min_size=1, max_size=4))
                content = content[:start] + snippet + content[start:]
    return content


@pytest.mark.heavy
@EVERY
@settings(max_examples=40)
@given(noise=st.data())
def test_noise(tmp_path_factory: pytest.TempPathFactory, name: str, noise: st.DataObject) -> None:
    layout = LAYOUTS[name]
    files = layout.files()
    file = noise.draw(st.sampled_from(sorted(files)))
    files[file] = noise.draw(mutations(files[file]) | mutations(files[file]) | st.binary(max_size=200))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", noise.draw(st.sampled_from([7, 64, 1 << 20])))
        patch.setattr(lines, "MAX_BAD_SHARE", noise.draw(st.sampled_from([0.01, 1.0])))
        try:
            found = layout.read(write(tmp_path_factory.mktemp("noise"), files))
        except RecleakError:
            return
    assert len(found) > 0
    assert len(found.fingerprint) == 64
    assert all(str(each) for each in found.notes)
