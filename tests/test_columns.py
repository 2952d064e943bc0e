"""Any table with a column map: CSV, TSV and Parquet, sniffed separators, guessed names, and what is wrong with it."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from zoneinfo import ZoneInfo

import hypothesis.strategies as st
import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings

from recleak.data import lines
from recleak.data.columns import FACT_GUESSES, GUESSES, ColumnMap, read_columns
from recleak.data.interactions import Interactions, Note
from recleak.data.text import SEPARATORS, sniff_separator
from recleak.errors import DataError, RecleakError

Row = tuple[str, str, float | None, int | None]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def error(read: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        read()
    return str(caught.value)


def note(data: Interactions, words: str) -> Note:
    found = [each for each in data.notes if words in each.what]
    assert len(found) == 1, data.notes
    return found[0]


# Names and positions


@pytest.mark.parametrize("name", GUESSES["user"])
@pytest.mark.parametrize("spell", [str.lower, str.upper])
def test_well_known_names_are_guessed(tmp_path: Path, name: str, spell: Callable[[str], str]) -> None:
    at = GUESSES["user"].index(name)
    names = {kind: spell(guesses[at % len(guesses)]) for kind, guesses in GUESSES.items()}
    header = f"x,{names['time']},{names['item']},{names['user']},{names['rating']}"
    data = read_columns(write(tmp_path / "x.csv", f"{header}\n?,100,i,u,2.5\n"))
    assert (data.users["id"].to_list(), data.items["id"].to_list()) == (["u"], ["i"])
    assert data.rows.rows() == [(0, 0, 2.5, 100)]


def test_every_guess_is_used(tmp_path: Path) -> None:
    for kind, guesses in GUESSES.items():
        others = [each for each in ("user", "item", "rating", "time") if each != kind]
        for guess in guesses:
            path = write(tmp_path / "x.csv", f"{','.join(others)},{guess}\n{','.join('1' * len(others))},7\n")
            data = read_columns(path)
            found = {
                "user": data.users["id"][0],
                "item": data.items["id"][0],
                "rating": data.rows["rating"][0],
                "time": data.rows["time"][0],
            }
            assert found == dict.fromkeys(others, 1) | {kind: 7}


def test_a_map_by_name_and_by_position(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "who;what;stars;when\nu;i;2.5;2012-04-03T18:00:09Z\n")
    data = read_columns(path, ColumnMap(user="who", item="what", rating="stars", time="when"))
    assert data.rows.rows() == [(0, 0, 2.5, 1333476009)]
    path = write(tmp_path / "y.csv", "u;i;2.5;1333476009\nv;i;;\n")
    data = read_columns(path, ColumnMap(user=0, item=1, rating=2, time=3))
    assert data.rows.rows() == [(0, 0, 2.5, 1333476009), (1, 0, None, None)]
    assert read_columns(path, ColumnMap(user=1, item=0)).users["id"].to_list() == ["i"]


@pytest.mark.parametrize(
    ("columns", "problem", "remedy"),
    [
        (
            ColumnMap(),
            "cannot tell which column is the user; there is ['a', 'b', 'c']",
            "--user NAME, or --user NUMBER",
        ),
        (ColumnMap(user="a"), "cannot tell which column is the item", "--item NAME"),
        (ColumnMap(user=0), "cannot tell which column is the item; there is no header", "--item NUMBER"),
        (ColumnMap(user="a", item="z"), "no column 'z' for item; the header has ['a', 'b', 'c']", "right columns"),
        (ColumnMap(user="a", item=1), "no column 'a' for user; the file was said to have no header", "right columns"),
        (ColumnMap(user=0, item=3), "column 3 (counted from 0) was asked for as item, but rows have 3", "column map"),
        (ColumnMap(user=0, item=-1), "column -1 (counted from 0) was asked for as item", "the separator (',')"),
    ],
)
def test_maps_that_do_not_fit(tmp_path: Path, columns: ColumnMap, problem: str, remedy: str) -> None:
    path = write(tmp_path / "x.csv", "a,b,c\n1,2,3\n")
    message = error(lambda: read_columns(path, columns))
    assert message.startswith(f"{path}, line 1: ")
    assert problem in message.splitlines()[0]
    assert remedy in message.splitlines()[1]


def test_names_that_are_there_twice(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "user,item,user\n1,2,3\n")
    message = error(lambda: read_columns(path))
    assert f"{path}, line 1: more than one column is called 'user'" in message
    assert "Rename" in message
    events = write(tmp_path / "e.csv", "user,item\n1,2\n")
    for header, problem in (("user,age,age", "more than one column is called 'age'"), ("user,id,x", "called 'id'")):
        users = write(tmp_path / "u.csv", f"{header}\n1,2,3\n")
        message = error(partial(read_columns, events, users=users))
        assert f"{users}, line 1: " in message
        assert problem in message
        assert "Rename" in message


# Quotes and separators


def test_quotes_as_in_csv(tmp_path: Path) -> None:
    content = 'user,item\n"a,b","say ""hi"""\n"two\nlines", x \n\n"",y\n"c","é"\n'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "MAX_BAD_SHARE", 0.5)
        data = read_columns(write(tmp_path / "x.csv", content))
    assert data.users["id"].to_list() == ["a,b", "c", "two\nlines"]
    assert data.items["id"].to_list() == ['say "hi"', "x", "é"]
    found = note(data, "rows dropped")
    assert (found.file, found.line, found.count) == ("x.csv", 6, 1)
    assert "user is empty" in found.what
    assert note(data, "blank lines").count == 1


def test_a_header_in_quotes_over_two_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", 'user,item,"a\nremark"\n1,2,3\n1,2\n')
    assert "x.csv, line 4: 1 of 2 rows cannot be used" in error(lambda: read_columns(path, ColumnMap(separator=",")))


def test_a_first_row_in_quotes_over_two_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", '1,"a\nb"\n2,c\n')
    data = read_columns(path, ColumnMap(user=0, item=1))
    assert data.items["id"].to_list() == ["a\nb", "c"]


@pytest.mark.parametrize("rows", ['1,"2\n3,4\n5,6\n', '1,2\n"3,4\n', '1,"2\n3,"4"\n5,6\n'])
def test_an_unclosed_quote(tmp_path: Path, rows: str) -> None:
    path = write(tmp_path / "x.csv", "user,item\n" + rows)
    message = error(lambda: read_columns(path, ColumnMap(separator=",")))
    line = 1 + next(n for n, row in enumerate(rows.split("\n"), 1) if row.count('"') == 1)
    assert f"{path}, line {line}: not readable as CSV" in message
    assert "A quote was probably opened and not closed" in message


def test_a_separator_of_two_characters_knows_no_quotes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.dat", 'user::item\n1::"Weird" Al\n2::5" disk\n')
    assert read_columns(path).items["id"].to_list() == ['"Weird" Al', '5" disk']


@pytest.mark.parametrize("separator", SEPARATORS)
def test_separators_are_sniffed(tmp_path: Path, separator: str) -> None:
    rows = [["user", "item", "rating"], *[[f"u{n}", f"i{n % 3}", "4.5"] for n in range(80)]]
    data = read_columns(write(tmp_path / "x.txt", "".join(separator.join(row) + "\n" for row in rows)))
    assert (data.n_users, data.n_items, len(data)) == (80, 3, 80)


def test_sniffing() -> None:
    assert sniff_separator(["a,b c", "d,e f"]) == ","  # as many fields by blanks, which are tried last
    assert sniff_separator(["a,b,c d", "d,e,f g"]) == ","
    assert sniff_separator(["a|b", "c,d|e", "f|g"]) == "|"
    assert sniff_separator(['a,"x', 'y",b', "c,d,e"]) == ","
    assert sniff_separator(['a,"x\n', "c,d"]) == ","
    assert sniff_separator(["a,b,c"] * 19 + ["broken"]) == ","
    assert sniff_separator(["a,b,c"] * 2 + ["broken"]) is None
    assert sniff_separator(["abc", "def"]) is None
    assert sniff_separator(['"' + "x" * 200_000 + ",b"]) == ","  # more than the csv module takes


def test_quoted_newlines_do_not_disturb_sniffing(tmp_path: Path) -> None:
    rows = "".join(f'{n},"a\nb;{n}\n\n"\n' for n in range(40))
    data = read_columns(write(tmp_path / "x.csv", "user,item\n" + rows))
    assert (data.n_users, data.n_items) == (40, 40)
    assert data.notes == ()


def test_a_bad_row_does_not_disturb_sniffing(tmp_path: Path) -> None:
    rows = [f"{n},x" for n in range(150)]
    rows[20] = "broken"
    data = read_columns(write(tmp_path / "x.csv", "user,item\n" + "\n".join(rows)))
    found = note(data, "rows dropped")
    assert (found.line, found.count) == (22, 1)


def test_separators_that_cannot_be_told_or_used(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "user\n1\n2\n")
    message = error(lambda: read_columns(path))
    assert f"{path}, line 1: cannot tell the separator from the first lines, such as 'user'" in message
    assert "--separator" in message
    for separator in ("", '"', "\n", ",\r"):
        message = error(partial(read_columns, path, ColumnMap(separator=separator)))
        assert f"{path}: the separator cannot be {separator!r}" in message
        assert "Say another" in message
    path = write(tmp_path / "y.csv", "user;item\n1;2\n")
    message = error(lambda: read_columns(path, ColumnMap(separator=",")))
    assert "cannot tell which column is the user; there is ['user;item']" in message
    assert "The separator looks like ';', not ','. Say it: --user NAME" in message
    message = error(lambda: read_columns(path, ColumnMap(user="user", item="item", separator=",")))
    assert "no column 'user' for user; the header has ['user;item']" in message
    assert "The separator looks like ';', not ','." in message
    assert len(read_columns(write(tmp_path / "z.csv", "user\titem\n1\t2\n"), ColumnMap(separator="\\t"))) == 1


# Files that are something else


@pytest.mark.parametrize(
    ("content", "problem", "remedy"),
    [
        (b"", "the file is empty", "Check that the download"),
        (b"\n \r\n", "the file is empty", "Check that the download"),
        (b"user,item\n", "there is a header but no row", "Check that the export was complete"),
        (b"user,item\n\n  \n", "there is a header but no row", "Check that the export was complete"),
        (b"PK\x03\x04user,item\n", "this is a zip archive", "Unpack it"),
        (b"PAR1user,item\n", "this is a Parquet file", "Give it the ending .parquet"),
        ("user,item\n1,2\n".encode("utf-16"), "this is UTF-16 text", "iconv"),
        (b"user,item\n1,2\n3,\x004\n", "line 3: a NUL byte: this is not text", "Give a text file"),
        (gzip.compress(b"user,item\n" + b"1,2\n" * 99, mtime=0)[:-9], "cannot be read to its end", "Fetch it again"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(1, 256)) * 3, "cannot tell the separator", "Say it"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, content: bytes, problem: str, remedy: str) -> None:
    path = write(tmp_path / "x.csv", content)
    message = error(lambda: read_columns(path))
    assert message.startswith(str(path))
    assert problem in message
    assert remedy in message.splitlines()[-1]


@pytest.mark.parametrize("name", ["x.csv", "x.parquet"])
def test_no_such_file(tmp_path: Path, name: str) -> None:
    message = error(lambda: read_columns(tmp_path / name))
    assert message == f"{tmp_path / name}: no such file\n  Check the path."


def test_line_ends_marks_and_gzip(tmp_path: Path) -> None:
    content = b'user,item,rating\n1,"a\nb",2\n2,c,\n'
    first = read_columns(write(tmp_path / "x.csv", content))
    assert first.items["id"].to_list() == ["a\nb", "c"]
    for other in (content.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + content, gzip.compress(content), content[:-1]):
        assert read_columns(write(tmp_path / "x.csv", other)).fingerprint == first.fingerprint


def test_lines_in_another_encoding(tmp_path: Path) -> None:
    data = read_columns(write(tmp_path / "x.csv", "user,item\n1,é\n".encode() + b"2,\xe9\n3,\xe9\n"))
    assert data.items["id"].to_list() == ["é"]
    found = note(data, "not UTF-8 and were read as Latin-1")
    assert (found.file, found.line, found.count) == ("x.csv", 3, 2)


# Users and items


def test_user_and_item_files(tmp_path: Path) -> None:
    events = write(tmp_path / "e.csv", "user,item\n1,x\n2,y\n3,x\n")
    users = write(tmp_path / "u.tsv", "age\tuser\tzip\tsize\tnone\n31\t1\t02139\t1.5\t\n\t2\tT8H1N\t\t\n7\t9\t1\t1\t\n")
    items = write(tmp_path / "i.csv", 'item|title|latitude|colour\ny|"A|B"|40.5|red\nx||\n'.replace("x||\n", "x|||\n"))
    data = read_columns(events, users=users, items=items)
    assert data.users.columns == ["id", "age", "zip", "size", "none"]
    assert data.users.rows() == [
        (1, 31.0, "02139", 1.5, None),
        (2, None, "T8H1N", None, None),
        (3, None, None, None, None),
    ]
    assert data.attributes == {
        "age": "continuous",
        "zip": "categorical",
        "size": "continuous",
        "none": "categorical",
    }
    assert data.items.rows() == [("x", None, None), ("y", "A|B", 40.5)]
    assert note(data, "users with interactions but without a description").count == 1
    assert note(data, "users described but without any interaction").remedy == "They are left out (first: 9)."


def test_kinds_can_be_said(tmp_path: Path) -> None:
    events = write(tmp_path / "e.csv", "user,item\n1,x\n2,y\n")
    users = write(tmp_path / "u.csv", "who,age,zip,other\n1,31,02139,x\n2,32,10001,y\n")
    columns = ColumnMap(user_id="who", attributes={"zip": "categorical", "age": "continuous"})
    data = read_columns(events, columns, users=users)
    assert data.users.rows() == [(1, "02139", 31.0), (2, "10001", 32.0)]
    columns = ColumnMap(user_id="who", attributes={"other": "continuous"})
    message = error(lambda: read_columns(events, columns, users=users))
    assert message.startswith("u.csv, line 2: 2 of 2 rows cannot be used; the first: other is 'x', not a finite number")
    columns = ColumnMap(user_id="who", attributes={"gender": "categorical"})
    assert "no column 'gender' for gender" in error(lambda: read_columns(events, columns, users=users))


def test_facts_can_be_mapped(tmp_path: Path) -> None:
    events = write(tmp_path / "e.csv", "user,item\n1,x\n2,y\n")
    items = write(tmp_path / "i.csv", "asin,name,kinds,lat\nx,X,a|b,40.5\ny,Y,,\n")
    facts = {"title": "name", "categories": "kinds", "latitude": "lat"}
    data = read_columns(events, ColumnMap(item_id="asin", facts=facts), items=items)
    assert data.items.rows() == [("x", "X", ["a", "b"], 40.5), ("y", "Y", None, None)]
    with pytest.raises(RecleakError, match=r"Unknown item fact 'titel'\. Did you mean 'title'\?"):
        read_columns(events, ColumnMap(item_id="asin", facts={"titel": "name"}), items=items)


@pytest.mark.parametrize("fact", FACT_GUESSES)
def test_facts_are_guessed_in_any_case(tmp_path: Path, fact: str) -> None:
    events = write(tmp_path / "e.csv", "user,item\n1,x\n")
    for guess in FACT_GUESSES[fact]:
        for name in (guess, guess.title(), guess.upper()):
            items = write(tmp_path / "i.csv", f"item,{name}\nx,7\n")
            data = read_columns(events, items=items)
            assert data.items.columns == ["id", fact]
            assert data.notes == ()


def test_columns_of_the_item_table_that_are_not_used_are_noted(tmp_path: Path) -> None:
    events = write(tmp_path / "e.csv", "user,item\n1,x\n")
    items = write(tmp_path / "i.csv", "item,Title,genres,lat,Name,colour\nx,X,a|b,40.5,N,red\n")
    data = read_columns(events, items=items)
    assert data.items.rows() == [("x", "X", ["a", "b"], 40.5)]
    found = note(data, "columns are not used: Name, colour")
    assert (found.file, found.count) == ("i.csv", 2)
    assert "--fact FACT=NAME, with title, categories" in found.remedy
    data = read_columns(events, ColumnMap(facts={"title": "Name"}), items=items)
    assert data.items.rows() == [("x", "N")]
    note(data, "columns are not used: Title, genres, lat, colour")
    data = read_columns(events, ColumnMap(item_id=0, facts={"title": 4}), items=items)
    assert "not used" not in "".join(each.what for each in data.notes)


@pytest.mark.parametrize(
    ("columns", "header", "key"),
    [
        (ColumnMap(user="who", user_id="key"), "id,user,who,key", 3),
        (ColumnMap(user="who"), "ID,user,who", 2),
        (ColumnMap(user="who"), "ID,user,key", 1),
        (ColumnMap(user="who"), "key,Id", 1),
    ],
)
def test_the_key_of_a_user_table(tmp_path: Path, columns: ColumnMap, header: str, key: int) -> None:
    events = write(tmp_path / "e.csv", "who,item\n7,x\n")
    cells = ["1"] * (header.count(",") + 1)
    cells[key] = "7"
    users = write(tmp_path / "u.csv", f"{header},age\n{','.join(cells)},31\n".replace("id,", "nr,"))
    assert read_columns(events, columns, users=users).users["age"].to_list() == [31.0]
    items = write(tmp_path / "i.csv", f"{header},title\n{','.join(cells)},T\n".replace("user", "item"))
    swapped = ColumnMap(user="item", item=columns.user, item_id=columns.user_id)
    assert read_columns(events, swapped, items=items).items["title"].to_list() == ["T"]


def test_a_side_table_without_a_key(tmp_path: Path) -> None:
    events = write(tmp_path / "e.csv", "user,item\n1,x\n")
    side = write(tmp_path / "s.csv", "a,b\n1,2\n")
    message = error(lambda: read_columns(events, users=side))
    assert (
        message
        == f"{side}, line 1: cannot tell which column is the user; there is ['a', 'b']\n  Say it: --user-id NAME."
    )
    assert error(lambda: read_columns(events, items=side)).endswith("Say it: --item-id NAME.")
    side = write(tmp_path / "s.csv", "user;b\n1;2\n")
    message = error(lambda: read_columns(events, ColumnMap(separator=","), users=side))
    assert "The separator looks like ';', not ','. Say it: --user-id NAME." in message


@pytest.mark.parametrize("columns", [ColumnMap(user_id=0), ColumnMap(attributes={"age": None})])
def test_columns_of_a_table_that_was_not_given(tmp_path: Path, columns: ColumnMap) -> None:
    events = write(tmp_path / "e.csv", "user,item\n1,x\n")
    with pytest.raises(RecleakError, match="say --users FILE"):
        read_columns(events, columns, items=events)
    swapped = ColumnMap(item_id=columns.user_id, facts={"title": "age"} if columns.attributes else {})
    with pytest.raises(RecleakError, match="say --items FILE"):
        read_columns(events, swapped, users=events)


# Times


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (["2024-01-01T10:00Z", "2024-01-01 10:00"], [1704103200] * 2),
        (["2024-01-01T12:00+02:00", "2024-01-01T10:00:00Z"], [1704103200] * 2),
        (["20240131", "19000101"], [1706659200, -2208988800]),
        (["20240131", ""], [1706659200, None]),
        (["20240131", "20240231"], [20240131, 20240231]),  # there is no 31 February
        (["20240131", "1704103200"], [20240131, 1704103200]),
        (["1900-01-01", "2200-12-31T23:59:59"], [-2208988800, 7289654399]),
    ],
)
def test_times(tmp_path: Path, ending: str, written: list[str], seconds: list[int | None]) -> None:
    table = pl.DataFrame({"user": [0, 1], "item": "x", "time": written})
    path = tmp_path / f"x.{ending}"
    if ending == "csv":
        table.write_csv(path)
    else:
        table.write_parquet(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", 16)  # what a column is, all of its blocks tell
        data = read_columns(path)
    assert data.rows["time"].to_list() == seconds
    assert data.notes == ()


def test_typed_times_are_what_they_are(tmp_path: Path) -> None:
    moment = datetime(1970, 8, 23, 6, 15, 31, tzinfo=UTC)  # second 20,240,131
    pl.DataFrame({"user": [1], "item": ["x"], "time": [moment]}).write_parquet(tmp_path / "x.parquet")
    assert read_columns(tmp_path / "x.parquet").rows["time"].to_list() == [20240131]


@pytest.mark.parametrize("wrong", ["1899-12-31", "2201-01-01", "9999-12-31 10:00", "7289654400", "-2208988801", "1e11"])
def test_times_in_an_impossible_year_are_bad_rows(tmp_path: Path, wrong: str) -> None:
    rows = [f"{n},x,2024-01-01" for n in range(150)]
    rows[20] = f"20,x,{wrong}"
    data = read_columns(write(tmp_path / "x.csv", "user,item,time\n" + "\n".join(rows)))
    found = note(data, f"rows dropped; the first: time is '{wrong}', not a time from 1900 to 2200")
    assert (found.line, found.count) == (22, 1)


def test_typed_times_in_an_impossible_year_are_bad_rows(tmp_path: Path) -> None:
    days = [date(2024, 1, 1)] * 149 + [date(9999, 12, 31)]
    pl.DataFrame({"user": range(150), "item": "x", "time": days}).write_parquet(tmp_path / "x.parquet")
    assert note(read_columns(tmp_path / "x.parquet"), "rows dropped; the first: time cannot be used").line == 150


def test_times_of_zero_are_noted(tmp_path: Path) -> None:
    data = read_columns(write(tmp_path / "x.csv", "user,item,time\n1,x,0\n2,x,5\n3,x,0\n4,x,\n"))
    assert data.rows["time"].to_list() == [0, 5, 0, None]
    found = note(data, "times are 0, that is 1 January 1970")
    assert (found.file, found.count) == ("x.csv", 2)
    assert "If 0 means unknown" in found.remedy


# Bad rows


def test_bad_rows(tmp_path: Path) -> None:
    rows = [f"{n % 9},{n % 7},{n % 5},{n}" for n in range(300)]
    bad = [*rows[:100], "1,2,good,4", *rows[100:200], "1,,3,4", "1,2,3", *rows[200:]]
    path = write(tmp_path / "x.csv", "user,item,rating,time\n" + "\n".join(bad))
    data = read_columns(path)
    found = note(data, "rows dropped; the first: rating is 'good', not a finite number: '1,2,good,4'")
    assert (found.file, found.line, found.count) == ("x.csv", 102, 3)
    clean = write(tmp_path / "x.csv", "user,item,rating,time\n" + "\n".join(rows))
    assert data.fingerprint == read_columns(clean).fingerprint
    write(path, "user,item,rating,time\n" + "\n".join([*bad, "1,2,3"]))
    message = error(lambda: read_columns(path))
    assert message.startswith("x.csv, line 102: 4 of 304 rows cannot be used; the first: rating is 'good'")


def test_repeated_rows_are_noted(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "user,item,rating,time\n1,2,3,4\n1,2,5,4\n1,2,3,4\n1,2,3,4\n")
    data = read_columns(path)
    assert len(data) == 4
    assert note(data, "rows equal another one in user, item, rating, time; kept").count == 2


# Parquet


def test_parquet_types(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    zone = timezone(timedelta(hours=2))
    moment = datetime(2012, 4, 3, 20, 0, 9, 500_000, zone)
    times = {
        "int": pl.Series([1333476009]),
        "float": pl.Series([1333476009.5]),
        "milliseconds": pl.Series([1333476009500]),
        "microseconds": pl.Series([1333476009500000]),
        "nanoseconds": pl.Series([1333476009500000000]),
        "text": pl.Series(["2012-04-03T18:00:09Z"]),
        "naive": pl.Series([moment.astimezone(UTC).replace(tzinfo=None)], dtype=pl.Datetime("ns")),
        "zoned": pl.Series([moment.astimezone(ZoneInfo("UTC"))])
        .dt.convert_time_zone("Europe/Paris")
        .dt.cast_time_unit("ms"),
    }
    for name, series in times.items():
        pl.DataFrame({"user": [7], "item": ["x"], "time": series}).write_parquet(path)
        assert read_columns(path).rows["time"].to_list() == [1333476009], name
    pl.DataFrame({"user": [7], "item": ["x"], "time": [date(2012, 4, 3)]}).write_parquet(path)
    assert read_columns(path).rows["time"].to_list() == [1333411200]


def test_parquet_ids(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    for ids in (
        pl.Series([10, 9], dtype=pl.UInt8),
        pl.Series(["10", "9"]),
        pl.Series(["10 ", " 9"]),
        pl.Series(["10", "9"], dtype=pl.Categorical),
        pl.Series([b"10", b"9"]),
        pl.Series([10.0, 9.0]),  # what pandas makes of integers of which some are missing
    ):
        pl.DataFrame({"user": ids, "item": ["x", "y"]}).write_parquet(path)
        assert read_columns(path).users["id"].to_list() == [9, 10], ids.dtype
    pl.DataFrame({"user": [0.5, 9.0], "item": ["x", "y"]}).write_parquet(path)
    assert read_columns(path).users["id"].to_list() == ["0.5", "9.0"]


def test_parquet_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    users: list[float | None] = [float(n % 9) for n in range(300)]
    users[40], users[50] = None, float("nan")
    items = [str(n % 7) for n in range(300)]
    items[41] = " "
    table = pl.DataFrame({"user": users, "item": items, "rating": [4.0] * 299 + [float("nan")]})
    table.write_parquet(path)
    data = read_columns(path)
    found = note(data, "rows dropped; the first: user cannot be used")
    assert (found.file, found.line, found.count) == ("x.parquet", 41, 3)
    assert len(data) == 297
    assert data.rows["rating"].null_count() == 1  # NaN is missing, not bad
    table.with_columns(rating=pl.Series([float("inf"), *[4.0] * 299])).write_parquet(path)
    message = error(lambda: read_columns(path))
    assert message.startswith("x.parquet, line ")
    assert "4 of 300 rows cannot be used" in message


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (pl.DataFrame({"user": [1], "thing": [2]}), "cannot tell which column is the item"),
        (pl.DataFrame({"user": [[1]], "item": [2]}), "a column cannot be used"),
        (pl.DataFrame({"user": [b"\xff"], "item": [2]}), "a column cannot be used"),
        (pl.DataFrame({"user": [1], "item": [2], "rating": [[1.0]]}), "a column cannot be used"),
        (pl.DataFrame({"user": [1], "item": [2], "rating": ["good"]}), "1 of 1 rows cannot be used; the first: rating"),
        (pl.DataFrame({"user": [1], "item": [2], "time": [timedelta(1)]}), "a column cannot be used"),
        (pl.DataFrame({"user": [], "item": []}), "there are columns but no row"),
    ],
)
def test_parquet_that_does_not_fit(tmp_path: Path, table: pl.DataFrame, problem: str) -> None:
    path = tmp_path / "x.parquet"
    table.write_parquet(path)
    message = error(lambda: read_columns(path))
    assert "x.parquet" in message
    assert problem in message
    assert message.count("\n  ") >= 1
    assert "no column ['b']" in error(lambda: read_columns(path, ColumnMap(user="user", item="b")))
    assert "no column [0, 1]" in error(lambda: read_columns(path, ColumnMap(user=0, item=1)))


def test_parquet_users_and_items(tmp_path: Path) -> None:
    events, users, items = (tmp_path / f"{name}.parquet" for name in ("e", "u", "i"))
    pl.DataFrame({"user": [1, 2], "item": [5, 6]}).write_parquet(events)
    pl.DataFrame(
        {"user": ["1", "2"], "age": [30, None], "flag": [True, None], "day": [date(2020, 1, 2)] * 2}
    ).write_parquet(users)
    pl.DataFrame(
        {"item": [5, 6], "title": [1984, None], "categories": [["a", "b"], []], "latitude": ["40.5", None]}
    ).write_parquet(items)
    data = read_columns(events, users=users, items=items)
    assert data.users.rows() == [(1, 30.0, "true", "2020-01-02"), (2, None, None, "2020-01-02")]
    assert data.items.rows() == [(5, "1984", ["a", "b"], 40.5), (6, None, [], None)]
    pl.DataFrame({"item": [5, 6], "categories": [7, None]}).write_parquet(items)
    assert read_columns(events, items=items).items["categories"].to_list() == [["7"], None]


@pytest.mark.parametrize("cut", [0, 3, 4, 11, 100, -1, -5, -100])
def test_truncated_parquet(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.parquet"
    pl.DataFrame({"user": range(100), "item": range(100)}).write_parquet(path)
    write(path, path.read_bytes()[:cut])
    message = error(lambda: read_columns(path))
    assert message.startswith(f"{path}: not readable as Parquet")
    assert "Fetch or write it again." in message


@settings(max_examples=30)
@given(st.binary(max_size=60))
@example(b"PAR1")
@example(b"PAR1\x00\x00\x00\x00PAR1")
def test_noise_for_parquet(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = write(tmp_path_factory.mktemp("noise") / "x.parquet", content)
    assert f"{path}: not readable as Parquet" in error(lambda: read_columns(path))


# Whatever is written is read back

PLAIN = st.sampled_from(
    ["0", "007", "7", "1e5", "-0", "-12", "+1", "1.0", "NA", "null", "nan", "ß", "日本", "a b", "x"]
)
WORDS = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from(list('",;|\t\n: ')), min_size=1, max_size=6
).map(str.strip)
IDS = (PLAIN | WORDS).filter(bool)
TIMES = st.integers(-2 * 10**9, -1) | st.integers(1, 10**7) | st.integers(10**8, 7 * 10**9)  # no 0, no 20240131
ROWS = st.lists(
    st.tuples(
        IDS,
        IDS,
        st.none() | st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.none() | TIMES,
    ),
    min_size=1,
    max_size=8,
)
NAMES = ("user", "item", "rating", "time")


def frame(rows: list[Row]) -> pl.DataFrame:
    schema = {"user": pl.String, "item": pl.String, "rating": pl.Float64, "time": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def as_text(rows: list[Row], order: list[int], separator: str, quoting: int, end: str) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=separator, quoting=quoting, lineterminator=end)  # type: ignore[arg-type]
    writer.writerow([NAMES[at] for at in order])
    for row in rows:
        cells = ["" if cell is None else repr(cell) if isinstance(cell, float) else cell for cell in row]
        writer.writerow([cells[at] for at in order])
    return out.getvalue().encode()


@settings(max_examples=120)
@given(
    rows=ROWS,
    order=st.permutations(range(4)),
    separator=st.sampled_from([each for each in SEPARATORS if len(each) == 1]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    end=st.sampled_from(["\n", "\r\n"]),
    said=st.booleans(),
    block=st.sampled_from([7, 64, 1 << 20]),
    draw=st.data(),
)
def test_round_trip_through_text(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Row],
    order: list[int],
    separator: str,
    quoting: int,
    end: str,
    said: bool,
    block: int,
    draw: st.DataObject,
) -> None:
    expected = Interactions.build(frame(rows))
    shuffled = draw.draw(st.permutations(rows))
    path = write(tmp_path_factory.mktemp("trip") / "x.txt", as_text(shuffled, order, separator, quoting, end))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", block)
        data = read_columns(path, ColumnMap(separator=separator if said else None))
    assert data.rows.equals(expected.rows)
    assert data.users.equals(expected.users)
    assert data.items.equals(expected.items)
    assert data.fingerprint == expected.fingerprint
    assert data.notes == expected.notes


@settings(max_examples=40)
@given(rows=ROWS, draw=st.data())
def test_round_trip_through_parquet(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], draw: st.DataObject
) -> None:
    expected = Interactions.build(frame(rows))
    table = frame(draw.draw(st.permutations(rows))).select(draw.draw(st.permutations(NAMES)))
    path = tmp_path_factory.mktemp("trip") / "x.parquet"
    table.write_parquet(path)
    data = read_columns(path)
    assert data.fingerprint == expected.fingerprint
    assert data.notes == expected.notes


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(-(10**6), 10**6), st.integers(0, 50)), min_size=1, max_size=20))
def test_integer_ids_are_the_same_from_text_and_parquet(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("trip")
    table = pl.DataFrame(pairs, schema={"user": pl.Int64, "item": pl.Int64}, orient="row")
    table.write_parquet(folder / "x.parquet")
    table.write_csv(folder / "x.csv", include_bom=True)
    first, second = read_columns(folder / "x.parquet"), read_columns(folder / "x.csv")
    assert first.fingerprint == second.fingerprint
    assert first.users["id"].to_list() == sorted({user for user, _ in pairs})
    assert second.users["id"].dtype == pl.Int64
    assert np.array_equal(first.popularity, second.popularity)


# Noise

VALID = {
    "e.csv": b'user,item,rating,time\n1,"a,b",2.5,100\n2,"c ""d""\ne",,2012-04-03\n3,f,1,\n',
    "u.csv": b"user;age;zip\n1;31;02139\n2;;\n",
    "i.csv": b"item\ttitle\tcategories\tlatitude\nf\tF\tx|y\t40.5\n",
}


@pytest.mark.heavy
@settings(max_examples=200)
@given(
    name=st.sampled_from(sorted(VALID)),
    start=st.integers(0, 80),
    length=st.integers(0, 12),
    inserted=st.binary(max_size=4)
    | st.sampled_from([b'"', b"\r", b"\n", b"user", b"id", b"1e999", b"\xe9", b"\t", b";;"]),
    separator=st.none() | st.sampled_from([",", ";", "::", "x"]),
    strict=st.booleans(),
)
def test_noise_for_text(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    start: int,
    length: int,
    inserted: bytes,
    separator: str | None,
    strict: bool,
) -> None:
    folder = tmp_path_factory.mktemp("noise")
    content = VALID[name]
    files = VALID | {name: content[:start] + inserted + content[start + length :]}
    paths = {each: write(folder / each, body) for each, body in files.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "MAX_BAD_SHARE", 0.01 if strict else 1.0)
        try:
            data = read_columns(
                paths["e.csv"], ColumnMap(separator=separator), users=paths["u.csv"], items=paths["i.csv"]
            )
        except RecleakError:
            return
    assert len(data) > 0
    assert len(data.fingerprint) == 64


@settings(max_examples=60)
@given(st.binary(max_size=120) | st.text(st.sampled_from('user,item;\t|: "\n\r1.-e'), max_size=60).map(str.encode))
@example(b'user,item\n"' + b"x" * 200_000 + b'",2\n')
@example(b"user,item\r1,2\r3,4\r")
def test_pure_noise(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = write(tmp_path_factory.mktemp("noise") / "x.csv", content)
    for columns in (ColumnMap(), ColumnMap(user=0, item=1), ColumnMap(user="user", item="item", separator=",")):
        try:
            data = read_columns(path, columns)
        except RecleakError:
            continue
        assert len(data.fingerprint) == 64


def test_numbers_that_begin_with_zero_are_names(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item\n1,a\n2,b\n")
    (tmp_path / "people.csv").write_text("user,zip,age\n1,02139,0\n2,10003,31.5\n")
    data = read_columns(tmp_path / "log.csv", users=tmp_path / "people.csv")
    assert data.attributes == {"zip": "categorical", "age": "continuous"}
    assert data.users["zip"].to_list() == ["02139", "10003"]
