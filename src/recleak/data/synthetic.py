"""Made-up interactions of any size: seeded, without a download, and with one dial for how much they give away.

The margins are those of MovieLens-100K. One family, the stretched exponential (Laherrère and Sornette 1998), gives both
the rows per user and the popularity of items. Every item belongs to a community. User u takes the community g of a row
with probability

    P(g | u) = (1 - h) mass_g exp(taste_ug) / sum_k mass_k exp(taste_uk) + h [g = home_u]

and then an item of g by popularity; a pair that was drawn before is drawn again, which is successive sampling without
replacement. Taste is the sum of a gender, an age, an occupation and a personal effect. The first three lie in
orthogonal directions of the space of communities, so that none hides another; the last is noise in all directions.

`coupling` is the dial. At 0, taste and h are zero: items come from popularity alone, the order is random and places are
uniform, so that nothing about a person can be told. At 1, nothing is personal: attributes and community explain every
taste, and a plain classifier tells them nearly always. At 0.5, the default, the interactions give away as much as those
of MovieLens-100K do. Mean AUC of a logistic regression over 8 seeds, in brackets MovieLens-100K: gender 0.781 (0.784),
age group 0.809 (0.814), occupation 0.631 (0.630); NDCG@10 of ItemKNN over that of MostPop 1.60 (1.59); Gini coefficient
of popularity 0.625 (0.629). The full table and the command that made it: `benchmarks/calibrate_synthetic.py`.

Axis letters: N rows, U users, I items, G communities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri, softmax

from recleak.data.interactions import Interactions
from recleak.errors import DataError
from recleak.random import bits, uniform

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Taken from MovieLens-100K.
WOMEN = 273 / 943
AGE_SHARES = (544 / 943, 209 / 943, 190 / 943)  # under 35, 35 to 45, over 45
AGE_QUANTILES = {0: 7, 0.05: 18, 0.1: 20, 0.25: 25, 0.5: 31, 544 / 943: 35, 0.75: 43, 753 / 943: 46}
AGE_QUANTILES |= {0.9: 51, 0.95: 56, 0.99: 65, 1: 74}
OCCUPATIONS = (196, 105, 95, 79, 67, 66, 51, 45, 32, 31, 28, 27, 26, 18, 16, 14, 12, 12, 9, 7, 7)  # of 943 users
RATING_SHARES = (0.0611, 0.1137, 0.2715, 0.3417, 0.2120)  # 1 to 5

# Fitted to MovieLens-100K: exponents of the two stretched exponentials, sizes of the effects on taste.
ACTIVITY_EXPONENT, POPULARITY_EXPONENT = 1.25, 2.2
EFFECTS = {"gender": (0.41, 1.1), "age": (0.60, 1.3), "occupation": (0.45, 0.8)}  # at coupling 0.5, at coupling 1
PERSONAL = 1.7  # at coupling 0.5; none at 0 and at 1
HOME = 0.3  # h at coupling 1

# Chosen.
BOX = {"latitude": (40.4774, 40.9176), "longitude": (-74.2589, -73.7004)}  # New York City
CATEGORIES = 6
DAY = 86_400
START, PERIOD = 1_704_067_200, 215 * DAY  # 1 January 2024; about seven months
ROUNDS = 32  # of drawing again what was drawn before


@dataclass(frozen=True)
class Synthetic:
    """The recipe; equal recipes give equal interactions.

    Users have `gender`, `age` (whole years), `occupation` and `community`, their true home. `missing` is the share of
    nulls in the first three. `mean_activity` is the mean number of rows per user, before long histories are cut at half
    of all items. Every user has at least `min_activity` rows, every item at least one.

    >>> data = Synthetic(n_users=200, n_items=400, mean_activity=40).generate()
    >>> data.n_users, data.n_items, data.attributes["age"]
    (200, 400, 'continuous')
    """

    n_users: int = 943
    n_items: int = 1682
    coupling: float = 0.5
    communities: int = 12
    missing: float = 0.0
    mean_activity: float = 106.0
    min_activity: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("coupling", "missing"):
            _require(0 <= getattr(self, name) <= 1, f"{name} is {getattr(self, name)}", "Give a number from 0 to 1.")
        _require(self.n_users >= 2, f"n_users is {self.n_users}", "Give at least 2.")
        _require(
            5 <= self.communities <= self.n_items,
            f"communities is {self.communities} for {self.n_items} items",
            "Give at least 5, so that the attributes find their directions, and at most n_items.",
        )
        _require(
            1 <= self.min_activity <= self.mean_activity <= self.n_items / 2,
            f"min_activity is {self.min_activity}, mean_activity {self.mean_activity} and n_items {self.n_items}",
            "Nobody meets more than half of the items: give 1 <= min_activity <= mean_activity <= n_items / 2.",
        )
        _require(
            self.n_users * self.mean_activity >= 2 * self.n_items,
            f"{self.n_users} users with {self.mean_activity} rows each are too few for {self.n_items} items",
            "Every item gets a row: lower n_items until there are twice as many rows, or raise one of the others.",
        )

    def generate(self) -> Interactions:
        """Draw users, items and rows, in O(N + U G) memory."""
        weight = (-np.log(self._spread("popularity", self.n_items))) ** POPULARITY_EXPONENT  # f64[I]
        community = (self._spread("item community", self.n_items) * self.communities).astype(np.int64)  # i64[I]
        mass = np.bincount(community, weight, self.communities) / weight.sum()  # f64[G]
        woman = self._spread("gender", self.n_users) < WOMEN  # bool[U]
        age = self._spread("age", self.n_users)  # f64[U], as a quantile
        occupation = _pick(OCCUPATIONS, self._spread("occupation", self.n_users))  # i64[U]
        home = _pick(mass, self._spread("home", self.n_users))  # i64[U]
        taste = self._taste(woman, age, occupation)  # f64[U, G]

        share = HOME * self.coupling
        chance = (1 - share) * softmax(np.log(mass) + taste, axis=1)  # f64[U, G]
        chance[np.arange(self.n_users), home] += share
        user, item = self._pairs(chance, weight, community)  # i64[N] each, by user
        user, item = self._ordered(user, item, community)
        events = pl.DataFrame({"user": user + 1, "item": item + 1}, schema={"user": pl.Int32, "item": pl.Int32})
        rating = self._ratings(user, item, taste, community)
        events = events.with_columns(pl.Series("rating", rating), pl.Series("time", self._times(user)))
        return Interactions.build(events, self._users(woman, age, occupation, home), self._items(community))

    def _rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(bits(self.seed, f"synthetic/{purpose}"))

    def _uniform(self, purpose: str, *key: ArrayLike) -> Floats:
        return uniform(self.seed, f"synthetic/{purpose}", *key)

    def _spread(self, purpose: str, n: int) -> Floats:
        """The quantiles (r + 1/2) / n in random order: margins come out the same for every seed."""
        return self._rng(purpose).permutation((np.arange(n) + 0.5) / n)

    def _taste(self, woman: NDArray[np.bool_], age: Floats, occupation: Ints) -> Floats:
        """How much more than popularity a user likes each community, as a log; f64[U, G].

        Sizes follow the power of the coupling that passes through both fitted values. Age is a direction that turns
        with it: by a third of a circle from one group to the next, a quarter as fast inside a group.
        """
        n, rng = self.communities, self._rng("effects")
        size = {name: full * self.coupling ** math.log2(full / half) for name, (half, full) in EFFECTS.items()}
        frame = np.linalg.qr(np.column_stack([np.ones(n), rng.standard_normal((n, n - 1))]))[0].T * math.sqrt(n)
        edges = np.cumsum((0, *AGE_SHARES))
        group = np.searchsorted(edges[1:3], age, "right")
        angle = (group + (age - edges[group]) / np.diff(edges)[group] / 4) * 2 * np.pi / 3
        trade = rng.standard_normal((len(OCCUPATIONS), n - 4))
        trade /= np.linalg.norm(trade, axis=1, keepdims=True)
        own: Floats = self._rng("personal").standard_normal((self.n_users, n))
        own *= PERSONAL * 4 * self.coupling * (1 - self.coupling)
        own += size["gender"] * np.where(woman, 1, -1)[:, None] * frame[1]  # frame[0] would be liking everything
        own += size["age"] * np.column_stack([np.cos(angle), np.sin(angle)]) @ frame[2:4]
        own += size["occupation"] * (trade @ frame[4:])[occupation]
        return own

    def _pairs(self, chance: Floats, weight: Floats, community: Ints) -> tuple[Ints, Ints]:
        """Distinct (user, item) pairs, by user.

        Inverse cumulative distributions, once over communities (user u holds the interval [u, u + 1) of `taken`) and
        once over the items of a community (g holds `stock[first[g]]` to `stock[first[g + 1]]`). After `ROUNDS` rounds
        the few rows still owed, of people who have nearly all that they like, are drawn uniformly from all items; at
        least half of those are free, so this ends soon.
        """
        n = self.n_items
        scale = (self.mean_activity - self.min_activity) / math.gamma(1 + ACTIVITY_EXPONENT)
        activity = self.min_activity + scale * (-np.log(self._spread("activity", self.n_users))) ** ACTIVITY_EXPONENT
        goal = np.minimum(activity.round().astype(np.int64), n // 2)  # i64[U]
        taken = (np.arange(self.n_users)[:, None] + np.cumsum(chance, axis=1)).ravel()  # f64[U * G]
        shelf = np.argsort(community, kind="stable")  # i64[I], items by community
        stock = np.append(0, np.cumsum(weight[shelf]))  # f64[I + 1]
        first = np.searchsorted(community[shelf], np.arange(self.communities + 1))  # i64[G + 1]
        have = np.empty(0, np.int64)  # user * I + item, ascending
        owed, attempt = goal, 0
        while owed.any():
            user = np.repeat(np.arange(self.n_users), owed)
            key = user, attempt, np.arange(len(user)) - np.repeat(np.cumsum(owed) - owed, owed)
            quantile = self._uniform("item", *key)
            if attempt < ROUNDS:
                g = np.searchsorted(taken, user + self._uniform("community", *key), "right") - user * self.communities
                g = np.minimum(g, self.communities - 1)  # rounding may end just above the last one
                low, high = stock[first[g]], stock[first[g + 1]]
                place = np.searchsorted(stock, low + (high - low) * quantile, "right") - 1
                item = shelf[np.minimum(place, first[g + 1] - 1)]
            else:
                item = (quantile * n).astype(np.int64)
            new = np.unique(user * n + item)
            at = np.searchsorted(have, new)
            fresh = np.ones(len(new), bool) if attempt == 0 else have[np.minimum(at, len(have) - 1)] != new
            have = np.insert(have, at[fresh], new[fresh])
            owed = owed - np.bincount(new[fresh] // n, minlength=self.n_users)
            attempt += 1
        return have // n, self._covered(have % n)

    def _covered(self, item: Ints) -> Ints:
        """An item that nobody drew takes the place of another in a random row; no item loses its only row."""
        unmet = np.flatnonzero(np.bincount(item, minlength=self.n_items) == 0)
        spare = np.ones(len(item), bool)
        spare[np.unique(item, return_index=True)[1]] = False
        item[self._rng("unmet").choice(np.flatnonzero(spare), len(unmet), replace=False)] = unmet
        return item

    def _ordered(self, user: Ints, item: Ints, community: Ints) -> tuple[Ints, Ints]:
        """Each user's rows in the order of time: at random at coupling 0, one community after the other at 1."""
        alone = (1 - self.coupling) * self._uniform("order of rows", user, item)
        together = self.coupling * self._uniform("order of communities", user, community[item])
        order = np.argsort(user + 0.999 * (alone + together), kind="stable")  # 0.999: rounding never reaches user + 1
        return user[order], item[order]

    def _times(self, user: Ints) -> Ints:
        """Seconds: sittings of about two rows a minute, days apart; most people come once or twice, some often."""
        restless = 0.009 * np.log(self._spread("restless", self.n_users)) ** 2  # f64[U]: a break before 1.8 % of rows
        row = np.arange(len(user))
        wait = -np.log1p(-self._uniform("wait", row))
        leaves = self._uniform("break", row) < restless[user]
        clock = np.cumsum(np.where(leaves, 3600 + 9 * DAY * wait, 1 + 30 * wait))
        start = np.searchsorted(user, np.arange(self.n_users + 1))  # i64[U + 1]
        since = clock - clock[start[:-1]][user]
        span = since[start[1:] - 1]  # f64[U]
        squeeze = np.minimum(1, PERIOD / np.maximum(span, 1))  # nobody outlasts the period
        begin = START + self._uniform("begin", np.arange(self.n_users)) * (PERIOD - squeeze * span)
        time: Ints = (begin[user] + squeeze[user] * since).astype(np.int64)
        return time

    def _ratings(self, user: Ints, item: Ints, taste: Floats, community: Ints) -> NDArray[np.float32]:
        """Quality of the item, mildness of the user, taste (with coupling) and noise, cut where the shares want it."""
        quality, mildness = ndtri(self._spread("quality", self.n_items)), ndtri(self._spread("mildness", self.n_users))
        liking = 0.8 * ndtri(np.maximum(self._uniform("rating", user, item), 2.0**-53))
        liking += 0.4 * (quality[item] + mildness[user] + self.coupling * taste[user, community[item]])
        cuts = np.quantile(liking, np.cumsum(RATING_SHARES)[:-1])
        return (1 + np.searchsorted(cuts, liking)).astype(np.float32)

    def _users(self, woman: NDArray[np.bool_], age: Floats, occupation: Ints, home: Ints) -> pl.DataFrame:
        years = np.floor(np.interp(age, list(AGE_QUANTILES), list(AGE_QUANTILES.values())))
        columns = {"gender": np.where(woman, "F", "M"), "age": years, "occupation": _names("job", occupation)}
        table = pl.DataFrame({"id": np.arange(1, self.n_users + 1), **columns, "community": _names("community", home)})
        known = {name: self._uniform(f"missing {name}", np.arange(self.n_users)) >= self.missing for name in columns}
        return table.with_columns(pl.when(pl.Series(known[name])).then(name).alias(name) for name in columns)

    def _items(self, community: Ints) -> pl.DataFrame:
        """Titles, one or two categories, and places: near the community's centre at coupling 1, anywhere at 0."""
        number = np.arange(1, self.n_items + 1)
        main = community % CATEGORIES
        other = np.where(
            self._uniform("is mixed", number) < 0.3, (self._uniform("mix", number) * CATEGORIES).astype(int), main
        )
        categories = pl.concat_list(_names("category", main), _names("category", other)).list.unique(
            maintain_order=True
        )
        place = {}
        for name, (low, high) in BOX.items():
            centre = self._uniform(f"centre {name}", np.arange(self.communities))[community]
            near = np.clip(centre + 0.02 * self._rng(f"near {name}").standard_normal(self.n_items), 0, 1)
            anywhere = self._uniform(f"anywhere {name}", number)
            place[name] = low + (high - low) * (self.coupling * near + (1 - self.coupling) * anywhere)
        table = pl.DataFrame({"id": number, **place})
        return table.with_columns(pl.format("Item {}", "id").alias("title"), categories.alias("categories"))


def _require(holds: bool, problem: str, remedy: str) -> None:
    if not holds:
        raise DataError(problem, remedy=remedy)


def _pick(shares: ArrayLike, quantile: Floats) -> Ints:
    """The category at each quantile of a categorical distribution."""
    cdf = np.cumsum(shares)
    return np.minimum(np.searchsorted(cdf / cdf[-1], quantile, "right"), len(cdf) - 1)


def _names(kind: str, codes: Ints) -> NDArray[np.str_]:
    """`kind 1`, `kind 2`, ..."""
    return np.array([f"{kind} {k + 1}" for k in range(int(codes.max()) + 1)])[codes]
