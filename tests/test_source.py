"""One word for any data: what is at a path is told by its files, and options that do not apply are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from recleak import cli
from recleak.data import store
from recleak.data.columns import ColumnMap
from recleak.data.source import open_data
from recleak.errors import NotFoundError, RecleakError

REVIEW = '{"reviewerID": "u", "asin": "i", "overall": 5.0, "unixReviewTime": 1390000000}\n'
TABLE = "user,item\n1,x\n2,y\n"
CHECKIN = "1\tv\tc\tBar\t40.7\t-74.0\t-240\tTue Apr 03 18:00:09 +0000 2012\n"
# fmt: off
RAW = {
    "ml-100k": {
        "u.data": "1\t2\t3\t978300760\n", "u.user": "1|24|M|writer|02139\n", "u.item": "2|T||||" + "|".join("1" * 19),
    },
    "ml-1m": {"ratings.dat": "1::2::3::978300760\n", "users.dat": "1::F::25::10::48067\n", "movies.dat": "2::T::War\n"},
    "ml-10m": {"ratings.dat": "1::2::3.5::978300760\n", "movies.dat": "2::T::War\n"},
    "ml-latest": {
        "ratings.csv": "userId,movieId,rating,timestamp\n1,2,3.5,978300760\n",
        "movies.csv": "movieId,title,genres\n2,T,War\n",
    },
    "steam": {"steam-200k.csv": "1,Dota 2,play,2.5,0\n"},
    "amazon": {"reviews_Books_5.json": REVIEW},
    "amazon as CSV": {"Cell_Phones_5core.csv": "reviewerID,asin,unixReviewTime\nu,i,1390000000\n", "meta_x.json": ""},
    "foursquare": {"dataset_TSMC2014_NYC.txt": CHECKIN},
    "foursquare, compact": {
        "checkins_NYC_min5.tsv": "user_id\tvenue_id\tvenue_category\tlatitude\tlongitude\tunix_time\n"
        "1\tv\tBar\t40\t-74\t9\n",
    },
    "gowalla": {"loc-gowalla_totalCheckins.txt": "1\t2010-10-19T23:55:27Z\t40.7\t-74.0\t22847\n"},
    "taobao": {
        "raw_sample.csv": "user,time_stamp,adgroup_id,pid,nonclk,clk\n1,1494137644,7,p,0,1\n",
        "user_profile.csv": "userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,shopping_level,"
        "occupation,new_user_class_level \n1,0,5,2,5,,3,0,3\n",
        "ad_feature.csv": "adgroup_id,cate_id,campaign_id,customer,brand,price\n7,6406,1,1,1,170\n",
    },
    "recbole": {"x.inter": "user_id:token\titem_id:token\n1\t2\n"},
}
# fmt: on


def fill(folder: Path, files: dict[str, str], packed: bool = False) -> Path:
    folder.mkdir()
    for name, content in files.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
        else:
            (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize("name", RAW)
def test_raw_folders_open_by_path(tmp_path: Path, name: str) -> None:
    assert len(open_data(str(fill(tmp_path / "some folder", RAW[name])))) == 1
    if name != "recbole":
        assert len(open_data(str(fill(tmp_path / "packed", RAW[name], packed=True)))) == 1


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"log.csv": TABLE},
        {"ratings.csv": TABLE},
        {"package.json": "{}"},
        {"meta_Cell_Phones.json": "{}"},
        {"raw_sample.csv": TABLE},
    ],
)
def test_other_folders_are_not_taken_for_a_data_set(tmp_path: Path, files: dict[str, str]) -> None:
    with pytest.raises(NotFoundError, match="no known data set in this folder") as caught:
        open_data(str(fill(tmp_path / "x", files)))
    assert "gowalla-nyc" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"users": Path("nothere.csv")},
        {"items": Path("nothere.csv")},
        {"columns": ColumnMap(user="zzz")},
        {"columns": ColumnMap(facts={"title": "x"})},
    ],
)
def test_options_that_do_not_apply_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    atomic = fill(tmp_path / "atomic", RAW["recbole"])
    store.save(open_data(str(atomic)), tmp_path / "made", name="made")
    for what in ("ml-100k", "synthetic", tmp_path / "made", atomic, atomic / "x.inter"):
        with pytest.raises(RecleakError, match="is not a table file, so these do not apply to it: ") as caught:
            open_data(str(what), **options)  # type: ignore[arg-type]
        assert str(what) in str(caught.value)


@pytest.mark.parametrize("what", ["nothere.csv", "folder/nothere", "./nothere", "nothere/"])
def test_a_path_that_leads_nowhere(what: str) -> None:
    with pytest.raises(NotFoundError, match="no such file or folder") as caught:
        open_data(what, columns=ColumnMap(user="who"))
    assert str(caught.value).startswith(f"{what}: ")


def test_a_word_that_is_no_name() -> None:
    with pytest.raises(NotFoundError, match=r"Unknown data set 'ml-100'\. Did you mean 'ml-100k'\?"):
        open_data("ml-100")


def test_facts_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fill(tmp_path / "x", {"log.csv": TABLE, "items.csv": "item,label,Kind\nx,X,a|b\ny,Y,a\n"})
    command = ["data", "convert", str(folder / "log.csv"), "--items", str(folder / "items.csv")]
    facts = ["--fact", "title=label", "--fact", "categories=Kind"]
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command, *facts, "--to", str(tmp_path / "out")])
    assert store.load(tmp_path / "out").items.rows() == [("x", "X", ["a", "b"]), ("y", "Y", ["a"])]
    for wrong, message in (
        ("title", "--fact title: expected FACT=COLUMN"),
        ("titel=label", "Did you mean 'title'?"),
        ("title=labl", "no column 'labl'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main([*command, "--fact", wrong, "--to", str(tmp_path / "no")])
        assert message in capsys.readouterr().err


def test_unused_columns_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fill(tmp_path / "x", {"log.csv": TABLE, "items.csv": "item,Title,colour\nx,X,red\ny,Y,red\n"})
    with pytest.raises(SystemExit, match="0"):
        cli.main(["data", "describe", str(folder / "log.csv"), "--items", str(folder / "items.csv"), "--json"])
    assert "columns are not used: colour" in json.dumps(json.loads(capsys.readouterr().out))
