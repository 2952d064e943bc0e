"""The catalog on the real data, where it is: counts beside the papers'."""

from __future__ import annotations

from pathlib import Path

import pytest

from recleak.data import catalog
from recleak.data.catalog import CATALOG, Counts
from recleak.errors import NotFoundError

REACHED = {
    ("ml-100k", "imia"): Counts(943, 1_682, 100_000),
    ("ml-100k", "apm"): Counts(943, 1_682, 100_000),
    ("ml-100k", "gerai"): Counts(943, 1_682, 100_000),
    ("ml-100k", "pard"): Counts(943, 1_682, 100_000),
    ("ml-100k", "cda"): Counts(943, 1_682, 100_000),
    ("ml-1m", "apm"): Counts(6_040, 3_706, 1_000_209),
    ("ml-1m", "pard"): Counts(6_040, 3_706, 1_000_209),
    ("steam-200k", "imia"): Counts(3_753, 5_092, 114_713),
    ("amazon-cell-phones", "imia"): Counts(27_879, 10_429, 194_439),
    ("gowalla-nyc", "cda"): Counts(725, 18_501, 88_863),
}


@pytest.mark.parametrize(("name", "preset"), REACHED)
def test_presets_give_the_stated_counts(name: str, preset: str) -> None:
    if catalog.locate(name) is None:
        pytest.skip(f"{name} is not here; set RECLEAK_DATA")
    assert Counts.of(catalog.load(name, preset)) == REACHED[name, preset]


def test_foursquare_has_the_papers_users_in_either_layout() -> None:
    if catalog.locate("foursquare-nyc") is None:
        pytest.skip("foursquare-nyc is not here; set RECLEAK_DATA")
    data = catalog.load("foursquare-nyc", "cda")
    assert data.n_users == 1_083
    assert len(data) in (179_468, 227_428)  # compact, raw


def test_age_groups_are_those_of_the_papers() -> None:
    if catalog.locate("ml-100k") is None:
        pytest.skip("ml-100k is not here; set RECLEAK_DATA")
    ages = dict(catalog.load("ml-100k", "pard").users["age"].value_counts().iter_rows())
    assert ages == {"under 35": 544, "35 to 45": 209, "over 45": 190}


def test_the_bands_of_ml_1m_are_grouped_in_the_same_words() -> None:
    if catalog.locate("ml-1m") is None:
        pytest.skip("ml-1m is not here; set RECLEAK_DATA")
    ages = dict(catalog.load("ml-1m", "pard").users["age"].value_counts().iter_rows())
    assert ages == {"under 35": 3_421, "35 to 45": 1_193, "over 45": 1_426}


def test_every_preset_that_differs_from_its_paper_says_why() -> None:
    for name, entry in CATALOG.items():
        for key, preset in entry.presets.items():
            here = REACHED.get((name, key))
            same = here is not None and all(
                published in (None, getattr(here, field)) for field, published in vars(preset.published).items()
            )
            assert same or preset.remark, (name, key)


def test_entries_are_complete() -> None:
    for entry in CATALOG.values():
        assert entry.terms
        assert entry.home.startswith("https://")
        assert all(entry.layouts)
        for known in entry.checksums.values():
            kind, _, digest = known.partition(":")
            assert kind in ("sha256", "git")
            assert set(digest) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    ("name", "first", "rest"),
    [
        ("ml-100k", "u.data", ["u.user", "u.item.gz"]),
        ("ml-100k", "any.inter", ["any.user"]),
        ("ml-1m", "ratings.dat.gz", ["users.dat", "movies.dat"]),
        ("taobao", "raw_sample.csv", ["user_profile.csv.gz", "ad_feature.csv"]),
        ("amazon-cell-phones", "reviews_Phones_5.json.part", ["reviews_Phones_5.json.gz"]),
        ("amazon-cell-phones", "meta_Cell_Phones.json.gz", ["Cell_Phones_5core.csv.gz"]),
        ("gowalla-nyc", "loc-gowalla_totalCheckins.txt.gz.part", ["loc-gowalla_totalCheckins.txt.gz"]),
    ],
)
def test_a_data_set_is_here_when_all_of_its_files_are(
    name: str, first: str, rest: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RECLEAK_CACHE", str(tmp_path))
    monkeypatch.delenv("RECLEAK_DATA", raising=False)
    folder = tmp_path / name
    folder.mkdir()
    (folder / first).touch()
    for file in rest:
        assert catalog.locate(name) is None
        (folder / file).touch()
    assert catalog.locate(name) == folder


def test_what_is_not_here_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("RECLEAK_CACHE", str(tmp_path))
    monkeypatch.setenv("RECLEAK_DATA", str(tmp_path))
    with pytest.raises(NotFoundError, match=r"recleak data get ml-1m.*RECLEAK_DATA"):
        catalog.load("ml-1m")
    files = r"raw_sample\.csv, user_profile\.csv, ad_feature\.csv"
    with pytest.raises(NotFoundError, match=rf"tianchi\.aliyun\.com.*RECLEAK_DATA.* taobao/ with {files}"):
        catalog.load("taobao", "pard")


def test_misspelt_names_get_the_nearest_one() -> None:
    with pytest.raises(NotFoundError, match="Did you mean 'ml-100k'"):
        catalog.load("ml-100")
    with pytest.raises(NotFoundError, match="Did you mean 'gerai'"):
        catalog.load("ml-100k", "gerais")
