"""The data sets that the papers use: where they are, what may be done with them, each paper's preprocessing and counts.

No data is in this package. `locate` looks in `RECLEAK_DATA` and in the cache; `recleak.data.fetch` brings what it can.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import platformdirs
import polars as pl

from recleak.data import checkins, movielens, prepare, recbole, retail
from recleak.data.interactions import Interactions
from recleak.errors import NotFoundError, unknown_name

Read = Callable[[Path], Interactions]


@dataclass(frozen=True)
class Counts:
    """Users, items and interactions; None where a paper does not say."""

    users: int | None
    items: int | None
    rows: int | None

    @classmethod
    def of(cls, data: Interactions) -> Counts:
        """Those of a data set."""
        return cls(data.n_users, data.n_items, len(data))


@dataclass(frozen=True)
class Preset:
    """A paper's preprocessing, the counts that it prints, and what to know where ours differ."""

    paper: str
    prepare: Callable[[Path], Interactions]
    published: Counts
    remark: str = ""


@dataclass(frozen=True)
class Archive:
    """A file at the publisher's; `members` maps names inside a zip to file names here (a plain file: to itself)."""

    url: str
    members: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wheel:
    """A package on the package index that carries the data; members as in `Archive`."""

    requirement: str
    sha256: str
    members: Mapping[str, str]


@dataclass(frozen=True)
class Entry:
    """A data set."""

    title: str
    folders: tuple[str, ...]  # its names below RECLEAK_DATA or the cache; the first is where `get` puts it
    layouts: tuple[tuple[str, ...], ...]  # the data is there if all of one layout is; a plain name may end in .gz too
    read: Read
    terms: str
    home: str
    presets: Mapping[str, Preset] = field(default_factory=dict)
    sources: tuple[Archive | Wheel, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict)  # file -> sha256:... or git:... (a blob id or its start)
    counts: Counts = Counts(None, None, None)  # of `read` on the published files

    @property
    def needs(self) -> str:
        """The files that must be there, for a message."""
        return ", ".join(self.layouts[0])

    def holds(self, folder: Path) -> bool:
        """Whether all files of one layout are in a folder, whatever its name."""
        return any(has_all(folder, layout) for layout in self.layouts)


def has_all(folder: Path, layout: Iterable[str]) -> bool:
    """Whether all files of a layout are in a folder, plain or .gz."""
    return all(_has(folder, pattern) for pattern in layout)


def _has(folder: Path, pattern: str) -> bool:
    return any(path.is_file() for path in folder.glob(pattern)) or (folder / f"{pattern}.gz").is_file()


def _read_ml_100k(folder: Path) -> Interactions:
    """The published files, or the same ratings and users as RecBole ships them."""
    if not list(folder.glob("*.inter")):
        return movielens.read_ml_100k(folder)
    data = recbole.read_recbole(folder)
    age = pl.col("age").cast(pl.Float64)
    return replace(data, users=data.users.select("id", age, "gender", "occupation", pl.col("zip_code").alias("zip")))


def _ml_100k_grouped(folder: Path) -> Interactions:
    return prepare.age_groups(_read_ml_100k(folder))


def _ml_1m_grouped(folder: Path) -> Interactions:
    """The seven bands in the papers' three groups; 45 to 49 counts as over 45."""
    data = movielens.read_ml_1m(folder)
    young, middle, old = "under 35", "35 to 45", "over 45"
    groups = dict(zip(movielens.AGE_BANDS_1M.values(), (young, young, young, middle, old, old, old), strict=True))
    return data.with_attributes(age=data.users["age"].replace_strict(groups, default=None))


def _steam_imia(folder: Path) -> Interactions:
    pairs = prepare.binarize(retail.read_steam(folder, honor_quotes=False)).distinct()
    return prepare.at_least(pairs, user_rows=5)


def _gowalla_cda(folder: Path) -> Interactions:
    return prepare.at_least(checkins.read_gowalla(folder), user_rows=40)


def _taobao_pard(folder: Path) -> Interactions:
    clicks = retail.read_taobao(folder).distinct()
    return prepare.k_core(clicks, user_rows=10, item_rows=5)


_GROUPLENS = (
    "GroupLens: for research; no redistribution and no commercial or revenue-bearing use without permission; cite "
    "Harper and Konstan (2015), The MovieLens Datasets, ACM TiiS 5(4)."
)
_ML_100K = Counts(943, 1_682, 100_000)
_TEN_THOUSAND = (
    "The paper prints 10,000 ratings; 943 users and 1,682 movies are those of the whole set of 100,000, which is used."
)

CATALOG: Mapping[str, Entry] = {
    "ml-100k": Entry(
        title="MovieLens-100K",
        folders=("ml-100k",),
        layouts=(("u.data", "u.user", "u.item"), ("*.inter", "*.user")),
        read=_read_ml_100k,
        terms=_GROUPLENS,
        home="https://grouplens.org/datasets/movielens/100k/",
        presets={
            "imia": Preset("Yuan et al. 2023 (IMIA), Table 2", lambda f: prepare.binarize(_read_ml_100k(f)), _ML_100K),
            "apm": Preset(
                "Zhang et al. (APM), section 5.1",
                _ml_100k_grouped,
                Counts(943, 1_682, 10_000),
                _TEN_THOUSAND + " The three age groups are garbled in its Table 1; GERAI's are used.",
            ),
            "gerai": Preset(
                "Zhang et al. 2021 (GERAI), section 5.1",
                _ml_100k_grouped,
                Counts(943, 1_682, 10_000),
                _TEN_THOUSAND,
            ),
            "pard": Preset("Zhao et al. (PARD), Table II", lambda f: prepare.binarize(_ml_100k_grouped(f)), _ML_100K),
            "cda": Preset(
                "Belal et al. 2023 (CDA), Table 2",
                lambda f: prepare.binarize(_read_ml_100k(f)),
                Counts(943, None, 100_000),
            ),
        },
        sources=(
            Archive(
                "https://files.grouplens.org/datasets/movielens/ml-100k.zip",
                {f"ml-100k/{name}": name for name in ("README", "u.data", "u.user", "u.item")},
            ),
            Wheel(
                "recbole==1.2.1",
                "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
                {
                    f"recbole/dataset_example/ml-100k/ml-100k.{end}": f"ml-100k.{end}"
                    for end in ("inter", "user", "item")
                },
            ),
        ),
        checksums={
            "u.data": "sha256:06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490",
            "u.user": "sha256:f120e114da2e8cf314fd28f99417c94ae9ddf1cb6db8ce0e4b5995d40e90e62c",
            "u.item": "sha256:553841ebc7de3a0fd0d6b62a204ea30c1e651aacfb2814c7a6584ac52f2c5701",
            "ml-100k.inter": "sha256:4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
            "ml-100k.user": "sha256:4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
            "ml-100k.item": "sha256:51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
        },
        counts=_ML_100K,
    ),
    "ml-1m": Entry(
        title="MovieLens-1M",
        folders=("ml-1m",),
        layouts=(("ratings.dat", "users.dat", "movies.dat"),),
        read=movielens.read_ml_1m,
        terms=_GROUPLENS,
        home="https://grouplens.org/datasets/movielens/1m/",
        presets={
            "apm": Preset(
                "Zhang et al. (APM), section 5.1",
                _ml_1m_grouped,
                Counts(6_039, 3_705, 1_000_000),
                "The paper's 6,039 users and 3,705 movies are each one less than the file has, as if the largest index "
                "counted from 0 had been taken for the number; no filter gives them.",
            ),
            "pard": Preset(
                "Zhao et al. (PARD), Table II",
                lambda f: prepare.binarize(_ml_1m_grouped(f)),
                Counts(6_040, 3_706, 1_000_209),
            ),
        },
        sources=(
            Archive(
                "https://files.grouplens.org/datasets/movielens/ml-1m.zip",
                {f"ml-1m/{name}": name for name in ("README", "ratings.dat", "users.dat", "movies.dat")},
            ),
        ),
        checksums={
            "users.dat": "sha256:1dc3a95300cb19f7c10e027daf29b8cdf1d908dab65b5edfb45950aa389a10a3",
            "movies.dat": "sha256:0140fc2356357c1a851d0f52e893a1e4d3696df632c4141cea8d5bc3d621f0b9",
            "ratings.dat": "git:77a7c4b150f588c23bb9e1f068aa996c0b413695",
        },
        counts=Counts(6_040, 3_706, 1_000_209),
    ),
    "steam-200k": Entry(
        title="Steam-200K",
        folders=("steam-200k",),
        layouts=(("steam-200k.csv",),),
        read=retail.read_steam,
        terms="Published by Tamber on Kaggle; the licence is stated on its page only, so do not redistribute.",
        home="https://www.kaggle.com/datasets/tamber/steam-video-games",
        presets={
            "imia": Preset(
                "Yuan et al. 2023 (IMIA), Table 2",
                _steam_imia,
                Counts(3_753, 5_134, 114_713),
                "Reached by cutting lines at every comma, quotes ignored, one row per (user, title), users with at "
                "least 5. 5,134 titles are those before the user filter; 5,092 are left after it.",
            )
        },
        checksums={"steam-200k.csv": "sha256:2464a568e9b6b007d13d34e2e3a6c8de00e5e7443f4913155f365aaa328c2874"},
        counts=Counts(12_393, 5_155, 200_000),
    ),
    "amazon-cell-phones": Entry(
        title="Amazon Cell Phones and Accessories, 5-core (2014)",
        folders=("amazon-cell-phones", "amazon_cell_phones"),
        layouts=(("reviews_*.json",), ("reviews_*.json.gz",), ("*Cell_Phones*.csv",), ("*Cell_Phones*.csv.gz",)),
        read=retail.read_amazon,
        terms="No licence stated; for research; cite McAuley et al. (SIGIR 2015) and He and McAuley (WWW 2016).",
        home="https://jmcauley.ucsd.edu/data/amazon/",
        presets={
            "imia": Preset(
                "Yuan et al. 2023 (IMIA), Table 2",
                lambda f: prepare.binarize(retail.read_amazon(f)),
                Counts(13_174, 5_970, 103_593),
                "Not reached by any k-core or one-pass filter on users and items: most likely a threshold on the stars "
                "came first, and which is not said. The whole 5-core is used.",
            ),
            "imia-nearest": Preset(
                "Yuan et al. 2023 (IMIA), Table 2",
                lambda f: prepare.at_least(prepare.binarize(retail.read_amazon(f)), item_rows=7, user_rows=6),
                Counts(13_174, 5_970, 103_593),
                "The one-pass filter that comes nearest: items with at least 7, then users with at least 6 reviews.",
            ),
        },
        sources=(
            Archive(
                "https://snap.stanford.edu/data/amazon/productGraph/categoryFiles/"
                "reviews_Cell_Phones_and_Accessories_5.json.gz"
            ),
        ),
        counts=Counts(27_879, 10_429, 194_439),
    ),
    "foursquare-nyc": Entry(
        title="Foursquare check-ins, New York (TSMC2014)",
        folders=("foursquare-nyc", "foursquare_nyc"),
        layouts=(("dataset_TSMC2014_NYC.txt",), ("checkins_NYC*.tsv",), ("checkins_NYC*.tsv.gz",)),
        read=checkins.read_foursquare,
        terms="No licence stated; for research; cite Yang et al. (IEEE TSMC: Systems 45(1), 2015).",
        home="https://sites.google.com/site/yangdingqi/home/foursquare-dataset",
        presets={
            "cda": Preset(
                "Belal et al. 2023 (CDA), Table 2",
                checkins.read_foursquare,
                Counts(1_083, None, 200_000),
                "The paper rounds; the release has 227,428 check-ins at 38,333 venues. The compact layout holds those "
                "at venues with at least 5 check-ins: 179,468 at 9,989.",
            )
        },
        sources=(
            Archive(
                "http://www-public.tem-tsp.eu/~zhang_da/pub/dataset_tsmc2014.zip",
                {"dataset_tsmc2014/dataset_TSMC2014_NYC.txt": "dataset_TSMC2014_NYC.txt"},
            ),
        ),
        checksums={"dataset_TSMC2014_NYC.txt": "git:d7b3401f"},
        counts=Counts(1_083, 38_333, 227_428),
    ),
    "gowalla-nyc": Entry(
        title="Gowalla check-ins (SNAP), New York",
        folders=("gowalla-nyc", "gowalla_nyc"),
        layouts=(("loc-gowalla_totalCheckins*.txt",), ("loc-gowalla_totalCheckins*.txt.gz",)),
        read=checkins.read_gowalla,
        terms="No licence stated; for research; cite Cho, Myers and Leskovec (KDD 2011).",
        home="https://snap.stanford.edu/data/loc-Gowalla.html",
        presets={
            "cda": Preset(
                "Belal et al. 2023 (CDA), Table 2 and section 5.3",
                _gowalla_cda,
                Counts(718, 32_924, 185_932),
                "Not reached: the paper has more venues and check-ins than the whole New York box of SNAP's file has, "
                "so it used a wider area or another crawl. Users with at least 40 check-ins come nearest in number.",
            )
        },
        sources=(Archive("https://snap.stanford.edu/data/loc-gowalla_totalCheckins.txt.gz"),),
        counts=Counts(7_115, 21_509, 138_957),
    ),
    "taobao": Entry(
        title="Taobao display advertising (Alibaba)",
        folders=("taobao",),
        layouts=(("raw_sample.csv", "user_profile.csv", "ad_feature.csv"),),
        read=retail.read_taobao,
        terms="Alibaba Tianchi: an account is needed; for research, under the licence shown there.",
        home="https://tianchi.aliyun.com/dataset/56",
        presets={
            "pard": Preset(
                "Zhao et al. (PARD), Table II",
                _taobao_pard,
                Counts(3_198, 4_282, 48_002),
                "Users with at least 10 and items with at least 5 clicks, read as a core; the paper does not say which "
                "part of the data it starts from.",
            )
        },
    ),
}


def entry(name: str) -> Entry:
    """A catalog entry by name."""
    if name not in CATALOG:
        raise unknown_name("data set", name, CATALOG)
    return CATALOG[name]


def cache_folder() -> Path:
    """Where downloads go: `RECLEAK_CACHE`, or the platform's cache folder."""
    given = os.environ.get("RECLEAK_CACHE")
    return Path(given) if given else Path(platformdirs.user_cache_dir("recleak"))


def search_path() -> list[Path]:
    """The folders that are looked into, in order."""
    given = os.environ.get("RECLEAK_DATA")
    return [*([Path(given)] if given else []), cache_folder()]


def locate(name: str) -> Path | None:
    """The folder of a data set, if all of its files are here."""
    known = entry(name)
    for root in search_path():
        for folder in known.folders:
            if known.holds(root / folder):
                return root / folder
    return None


def load(name: str, preset: str | None = None) -> Interactions:
    """A data set of the catalog, as published or with a paper's preprocessing."""
    known = entry(name)
    if preset is not None and preset not in known.presets:
        raise unknown_name(f"preset of {name}", preset, known.presets)
    folder = locate(name)
    if folder is None:
        looked = ", ".join(str(root / known.folders[0]) for root in search_path())
        how = f"`recleak data get {name}`" if known.sources else f"fetch it from {known.home}"
        raise NotFoundError(
            f"{known.title} is not here (looked in {looked}).\n"
            f"  To have it, {how}, or set RECLEAK_DATA to a folder that holds {known.folders[0]}/ with {known.needs}."
        )
    return known.read(folder) if preset is None else known.presets[preset].prepare(folder)
