"""The gradient-alignment attack: a row moves along the gradient of its own score, forth if the item is the client's.

Under binary cross-entropy a step moves the row q_i of an item with label y_i and score z_i by

    - rate (sigmoid(z_i) - y_i) g_i,    g_i = d z_i / d q_i,

that is along g_i for an own item and against it for a negative, whatever the optimizer makes of the length (Adam scales
coordinates, and keeps their signs). What a known defense does to rows that nobody trains, such as a clip of values, is
taken away first (`attacks.shift`). The server has sent the model, so it can compute g_i for every row that an upload
touches and project the row's movement onto it. What it lacks is the client's own vector. In a perceptron that vector
only decides which units are on; zero does well. Where g_i is proportional to it (inner products) all rows move along
one line: the first principal direction of the movements is that line, and the side of the fewer rows is that of the
own items.

**Calibration.** A defense that the adversary knows can be rehearsed. It labels the rows by its first guess, trains
shadow clients with these labels *under the same defense* from the same broadcast, and so has rows whose label it knows.
A logistic regression learns from them what an upload says about a row: its projection, its length, how far it follows
the other own items, and the score that the uploaded head gives it. So regularized, clipped, noisy and graph-based
uploads can be read: where item rows are kept from moving, the head has learned the labels instead.

Axis letters: C clients, N rows of all clients, K rows of the largest client, F features, S shadows of a client.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.attacks.base import Knowledge
from recleak.attacks.membership import (
    FromSums,
    FromUploads,
    calibrated,
    chosen,
    expected_in_sum,
    expected_positives,
    labelled_positives,
    popularity_odds,
    whole,
)
from recleak.attacks.shadow import no_user_features, train_shadows
from recleak.attacks.shift import without_shift_of_rows
from recleak.defenses.base import without_data_hooks
from recleak.errors import ConfigError
from recleak.kernels_heads import along_slopes, score_rows, sum_of_rows
from recleak.models.base import Batch, Params, declared
from recleak.training.chunks import one_thread
from recleak.training.local import LocalData
from recleak.update import Update

ROWS = "item"  # the table that a head reads
_TINY = 1e-20
_ROWS = 1 << 14  # of a padded table
_MOST = 8  # shadows of one client and rehearsal
_RIDGE = 1.0  # of the logistic regression, in units of standardized features


@dataclass(frozen=True, kw_only=True)
class GradientAlignment(FromUploads):
    """Rank the rows of an upload by their movement along the gradient of their own score.

    shadow_rows: calibrate on so many rows for each client, and at least one shadow client, at most eight; 0: no shadow
    client is trained, and the projection alone decides.
    rehearsals: how often the shadows are labelled by the last guess and trained.
    popularity: a prior from the public knowledge on top of what the upload says.
    """

    shadow_rows: int = 500
    rehearsals: int = 1
    popularity: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shadow_rows < 0:
            raise ConfigError(f"shadow_rows is {self.shadow_rows}, expected at least 0.")
        if self.rehearsals < 1:
            raise ConfigError(f"rehearsals is {self.rehearsals}, expected at least 1; without any, shadow_rows=0.")

    def evidence(self, knowledge: Knowledge, received: Params, update: Update, round: int) -> tuple[Tensor, Tensor]:
        """The log odds of the projection, or of the regression on all that an upload shows."""
        update = without_shift_of_rows(knowledge, received, update)
        size = update.offset.diff()
        own = expected_positives(knowledge, size)
        labelled = labelled_positives(knowledge, own, size)
        odds = aligned(knowledge, received, update, labelled)
        for rehearsal in range(self.rehearsals if self.shadow_rows else 0):
            label = chosen(update, odds, whole(labelled))
            shadow, owner, truth = self._rehearse(knowledge, received, update, label, round, rehearsal)
            again = labelled[owner]
            guess = chosen(shadow, aligned(knowledge, received, shadow, again), whole(again))
            known = described(knowledge, received, shadow, guess, again)
            seen = described(knowledge, received, update, label, labelled)
            odds = regressed(known, truth, owner[shadow.owner], seen, update)
        return _of_own(knowledge, odds, update, own, labelled), own

    def listener(self) -> GradientAlignment:
        """The prior comes with the answer."""
        return replace(self, popularity=False)

    def weighed(self, knowledge: Knowledge, item: Tensor, odds: Tensor, uploads: Tensor) -> Tensor:
        """With the prior, once for each upload: what is read of several is no posterior, and noise in it adds up."""
        return odds + uploads * popularity_odds(knowledge, item) if self.popularity else odds

    def _rehearse(
        self, knowledge: Knowledge, received: Params, update: Update, label: Tensor, round: int, rehearsal: int
    ) -> tuple[Update, Tensor, Tensor]:
        """Uploads of shadow clients, whose they are the shadows of (i64[S]), and the labels of their rows."""
        size = update.offset.diff()
        copies = (-(-self.shadow_rows // size.clamp(min=1))).clamp(max=_MOST)  # i64[C]
        owner = torch.repeat_interleave(torch.arange(update.n_clients), copies)  # i64[S]
        copy = torch.arange(len(owner)) - torch.repeat_interleave(copies.cumsum(0) - copies, copies)
        name = copy * knowledge.n_users + update.client[owner]  # one of its own for each shadow
        order = name.argsort()
        name, owner = name[order], owner[order]
        each = update.select(owner)
        start = torch.repeat_interleave(update.offset[owner] - each.offset[:-1], size[owner])
        truth = label[start + torch.arange(len(each.item))]
        seed = int(random.bits(self.seed, "rehearsal", rehearsal) >> np.uint64(1))
        data = with_repeats(knowledge, name.numpy(), each, truth, seed)
        tables = {part.name for part in knowledge.components if part.storage == "per_user"}
        known = {part: torch.cat([value] * _MOST) if part in tables else value for part, value in received.items()}
        moved = train_shadows(knowledge, known, data, round, seed, defense=without_data_hooks(knowledge.defense))
        shadow = replace(each, values=moved.values, rows=_rows_at(each, moved))
        return without_shift_of_rows(knowledge, received, shadow), owner, truth


@dataclass(frozen=True, kw_only=True)
class AlignmentOfSums(FromSums):
    """The projection of a sum of uploads: what is left behind secure aggregation. No shadow client is trained."""

    def evidence(
        self, knowledge: Knowledge, received: Params, mean: Update, clients: int, round: int
    ) -> tuple[Tensor, Tensor]:
        """The log odds of the projection."""
        _, odds, _, expected = read_sum(knowledge, received, mean, clients)
        return odds, expected


def read_sum(
    knowledge: Knowledge, received: Params, mean: Update, clients: int
) -> tuple[Update, Tensor, Tensor, Tensor]:
    """The mean change of n clients without what their defense does to rows that nobody trains; the log odds of its
    rows, f32[N], split at the number of items that anybody owns, or in half; that number, and how many own items each
    client has, f32[1] both.
    """
    n_items = knowledge.n_items
    if len(mean.item) == n_items:  # else who sent a row is not known, so neither is what the defense did to its sum
        mean = without_shift_of_rows(knowledge, received, mean)
    expected = expected_in_sum(knowledge, len(mean.item), clients)
    anybody = -n_items * torch.expm1(clients * torch.log1p(-expected / n_items))
    anybody = anybody.clamp(max=0.5 * len(mean.item))
    return mean, aligned(knowledge, received, mean, anybody), anybody, expected


def _of_own(knowledge: Knowledge, odds: Tensor, update: Update, own: Tensor, labelled: Tensor) -> Tensor:
    """The odds of an own item from those of a positive label, under a defense that adds fakes or flips labels."""
    defense = knowledge.defense
    if not (defense.fakes or defense.flips):
        return odds
    size, owner = update.offset.diff(), update.owner
    positive = calibrated(odds, owner, labelled)
    if_positive = (own * (1 - defense.flips) / labelled.clamp(min=_TINY)).clamp(0, 1)[owner]
    if_negative = (own * defense.flips / (size - labelled).clamp(min=_TINY)).clamp(0, 1)[owner]
    chance = positive * if_positive + (1 - positive) * if_negative
    return (chance.clamp(1e-9, 1 - 1e-9)).logit().float()


def _rows_at(each: Update, moved: Update) -> Params:
    """The rows of `moved` at the items of `each`: a defense may send others too. One that was not sent did not move."""
    touched, sent = (u.owner * u.n_items + u.item for u in (each, moved))
    if torch.equal(touched, sent):
        return moved.rows
    place = torch.searchsorted(sent, touched).clamp(max=max(0, len(sent) - 1))
    there = (sent[place] == touched).nonzero().squeeze(1) if len(sent) else place[:0]
    return {
        name: value.new_zeros(len(touched), *value.shape[1:]).index_copy_(0, there, value[place[there]])
        for name, value in moved.rows.items()
    }


def with_repeats(knowledge: Knowledge, client: NDArray[np.int64], each: Update, label: Tensor, seed: int) -> LocalData:
    """The rows as examples; a negative occurs as often as if q per own item had been drawn with replacement."""
    training = knowledge.training
    negatives = 0 if training is None else training.negatives
    owner, item, positive = each.owner.numpy(), each.item.numpy(), label.numpy()
    clients = len(client)
    own = np.bincount(owner[positive], minlength=clients)
    other = np.bincount(owner[~positive], minlength=clients)
    full = np.bincount(owner, minlength=clients) >= each.n_items  # every row is sent: what was touched is not known
    lot = random.uniform(seed, "touched", client[owner], item)
    rank = np.empty(len(owner), np.int64)
    rank[np.lexsort((lot, positive, owner))] = np.arange(len(owner)) - each.offset.numpy()[:-1][owner]
    touched = positive | ~full[owner] | (rank < (negatives * own)[owner])
    owner, item, positive = owner[touched], item[touched], positive[touched]
    other = np.bincount(owner[~positive], minlength=clients)
    missing = np.where(other > 0, np.maximum(negatives * own - other, 0), 0)  # i64[S]: draws that hit an item again
    again = np.repeat(np.arange(clients), missing)
    number = np.arange(len(again)) - np.repeat(np.cumsum(missing) - missing, missing)
    lot = random.uniform(seed, "repeats", client[again], number)
    place = (np.cumsum(other) - other)[again] + (lot * other[again]).astype(np.int64).clip(0, other[again] - 1)
    drawn = np.concatenate([np.flatnonzero(~positive), np.flatnonzero(~positive)[place]])
    if training is not None and training.loss == "bpr":  # each negative against an own item, in turn
        row = drawn[np.argsort(owner[drawn], kind="stable")]
        count = np.bincount(owner[row], minlength=clients)
        turn = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        better = np.flatnonzero(positive)[(np.cumsum(own) - own)[owner[row]] + turn % own[owner[row]]]
        offset = np.concatenate([[0], np.cumsum(count)])
        return LocalData(client, item[better], np.ones(len(row), np.float32), item[row], offset, each.n_items)
    row = np.concatenate([np.flatnonzero(positive), drawn])
    row = row[np.argsort(owner[row], kind="stable")]
    offset = np.concatenate([[0], np.cumsum(np.bincount(owner[row], minlength=clients))])
    return LocalData(client, item[row], positive[row].astype(np.float32), None, offset, each.n_items)


# --- what a movement shows --------------------------------------------------------------------------------------------


def aligned(knowledge: Knowledge, received: Params, update: Update, expected: Tensor) -> Tensor:
    """The projection of each row's movement onto the gradient of its score, as log odds, f32[N].

    The head as broadcast and as uploaded are both tried: the latter is nearer to the one that moved the rows, unless
    there is noise on it. The one that separates a client's rows better is taken.
    """
    guess = (expected / update.offset.diff().clamp(min=1))[update.owner]  # f32[N]: nothing is known of a row yet

    def read(uploaded: bool) -> tuple[Tensor, Tensor, Tensor]:
        along, _, length = projections(knowledge, received, update, guess, expected, uploaded=uploaded)
        slope, middle, separation = _split(along, update, expected)
        return (along - middle[update.owner]) * slope[update.owner], separation, length

    before, apart_before, length = read(False)
    if not update.values or (_keeps_head(knowledge) and not bool(length.any())):  # the same would be read again
        return before
    after, apart_after, _ = read(True)
    return torch.where((apart_after > apart_before)[update.owner], after, before)


def _keeps_head(knowledge: Knowledge) -> bool:
    """Whether there is a head, and no part of it is sent: with zeros in its place no score depends on a row."""
    head = [part.shared for part in knowledge.components if part.role == "head"]
    return bool(head) and not any(head)


def described(knowledge: Knowledge, received: Params, update: Update, own: Tensor, expected: Tensor) -> Tensor:
    """What the movement of each row looks like, in units of its client's mean movement, f32[N, F]; `own` is a guess."""
    moved = _flat(update.rows)  # f32[N, d]
    length = moved.norm(dim=1)
    unit = _mean(length, update).clamp(min=_TINY)[update.owner]
    before, start, _ = projections(knowledge, received, update, own.float(), expected, uploaded=False)
    after, score, slope = projections(knowledge, received, update, own.float(), expected, uploaded=True)
    learned = score - start  # what the head has learned of the row
    guess = own.float().unsqueeze(1)
    together = _mean(moved * guess, update) / _mean(guess, update).clamp(min=_TINY) - _mean(moved, update)  # f32[C, d]
    together = together / together.norm(dim=1, keepdim=True).clamp(min=_TINY)
    follows = (moved * together[update.owner]).sum(1)
    a, b, n, c = before / unit, after / unit, length / unit, follows / unit
    cosine = after / length.clamp(min=_TINY)
    columns = [a, b, n, c, score, learned, slope, a * a, b * b, n * n, c * c, a * n, b * n, (n + 1e-6).log(), cosine]
    columns += [b * score, score * n, learned * n]
    return torch.stack(columns, dim=1)


def projections(
    knowledge: Knowledge, received: Params, update: Update, own: Tensor, expected: Tensor, *, uploaded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Movements along the unit gradients of the rows' scores; the scores; the lengths of the gradients; f32[N] each.

    `own` is the guessed probability of each row, `uploaded` takes the head as uploaded instead of as broadcast. Where
    all gradients of a client are the same (the client's vector, or zero in its place), the line is that along which
    its rows move.
    """
    products = _of_products(knowledge, received, update, own, expected, uploaded)
    if products is not None:
        return _along_line(update, expected), *products
    found = _of_heads(knowledge, received, update, own, expected, uploaded)
    if found is None:  # clients are padded to the largest of a group, so small that memory does not grow with clients
        parts = []
        for low, high in _groups(update.offset.diff().tolist()):
            rows = slice(int(update.offset[low]), int(update.offset[high]))
            some = update.select(torch.arange(low, high))
            parts.append(_of_any_model(knowledge, received, some, own[rows], expected[low:high], uploaded))
        found = _Slopes(*(torch.cat(each) for each in zip(*parts, strict=True)))
    along = found.product / found.length.clamp(min=_TINY)
    mean = found.total.norm(dim=1) / update.offset.diff().clamp(min=1)
    flat = mean >= 0.999 * _mean(found.length, update)
    if bool(flat.any()):
        along = torch.where(flat[update.owner], _along_line(update, expected), along)
    return along, found.score, found.length


class _Slopes(NamedTuple):
    """The gradients of the scores with respect to the rows, and what moved along them."""

    product: Tensor  # f32[N]: of the movement with the gradient
    score: Tensor  # f32[N]
    length: Tensor  # f32[N]: of the gradient
    total: Tensor  # f32[C, d]: the sum of the gradients


def _groups(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Neighbors that fill a table of bounded size together, as (first, end)."""
    first, widest = 0, 0
    for at, size in enumerate(sizes):
        if at > first and max(widest, size) * (at + 1 - first) > _ROWS:
            yield first, at
            first, widest = at, 0
        widest = max(widest, size)
    yield first, len(sizes)


def _of_products(
    knowledge: Knowledge, received: Params, update: Update, own: Tensor, expected: Tensor, uploaded: bool
) -> tuple[Tensor, Tensor] | None:
    """Scores and lengths of gradients, f32[N] each, where a score is a product with a plain row; None elsewhere."""
    read = declared(knowledge.model, "product")
    if read is None or not _plain_rows(knowledge, update):
        return None
    params, batch = _plain_scene(knowledge, received, update, own, expected, uploaded)
    found = read(knowledge.model, params, batch)
    if found is None:
        return None
    vector, constant = (each.contiguous() for each in found)
    table, item, offset = received[ROWS].contiguous().numpy(), update.item.numpy(), update.offset.numpy()
    score = torch.empty(len(update.item))
    score_rows(table, item, offset, vector.numpy(), constant.numpy(), score.numpy())
    return score, vector.norm(dim=1)[update.owner]


def _of_heads(
    knowledge: Knowledge, received: Params, update: Update, own: Tensor, expected: Tensor, uploaded: bool
) -> _Slopes | None:
    """In one compiled pass, where scores are a perceptron on a user's vector and plain rows; None elsewhere."""
    model, clients = knowledge.model, update.n_clients
    read = declared(model, "head_user")
    if read is None or not _plain_rows(knowledge, update):
        return None
    table, item, offset = received[ROWS].contiguous(), update.item.numpy(), update.offset.numpy()
    params, batch = _plain_scene(knowledge, received, update, own, expected, uploaded)
    user = read(model, params, batch)
    layers = sum(name.startswith("head.") and name.endswith(".weight") for name in params)
    if user is None or layers < 2:
        return None
    names = [f"head.{n}.{kind}" for n in range(1, layers + 1) for kind in ("weight", "bias")]
    same = not (uploaded and any(name in update.values for name in names)) and all(
        part.shared for part in knowledge.components if part.name in names
    )
    head = torch.cat([params[name][: 1 if same else clients].flatten(1) for name in names], dim=1)
    widths = np.array([*(params[f"head.{n}.weight"].shape[1] for n in range(1, layers + 1)), 1])
    rows = len(update.item)
    found = _Slopes(torch.empty(rows), torch.empty(rows), torch.empty(rows), torch.empty(clients, table.shape[1]))
    moved, user = update.rows[ROWS].contiguous().numpy(), user.contiguous().numpy()
    out = (found.product.numpy(), found.score.numpy(), found.length.numpy(), found.total.numpy())
    with one_thread():
        along_slopes(table.numpy(), item, offset, moved, user, head.contiguous().numpy(), widths, *out)
    return found


def _plain_rows(knowledge: Knowledge, update: Update) -> bool:
    """Whether there is one table of items, and its rows were uploaded."""
    tables = [part.name for part in knowledge.components if part.storage == "per_item"]
    return tables == [ROWS] and list(update.rows) == tables and update.item.device.type == "cpu"


def _plain_scene(
    knowledge: Knowledge, received: Params, update: Update, own: Tensor, expected: Tensor, uploaded: bool
) -> tuple[Params, Batch]:
    """What a model reads beside plain rows."""
    model, clients, table = knowledge.model, update.n_clients, received[ROWS].contiguous()
    around = torch.empty(clients, table.shape[1])
    if model.reads_neighbors:
        item, share = update.item.numpy(), own.contiguous().numpy()
        sum_of_rows(table.numpy(), item, share, update.offset.numpy(), around.numpy())
    batch = Batch(
        own=torch.zeros(clients, 0, dtype=torch.bool),
        degree=expected,
        neighbors={ROWS: around} if model.reads_neighbors else {},
        user_features=no_user_features(knowledge, clients),
    )
    return _beside_rows(knowledge, received, update, uploaded), batch


def _beside_rows(knowledge: Knowledge, received: Params, update: Update, uploaded: bool) -> Params:
    """What the adversary takes for the clients' parameters beside item rows, f32[C, *shape]; zero where it cannot know
    them.
    """
    params, clients = {}, update.n_clients
    for part in knowledge.components:
        if part.storage == "per_item":
            continue
        if part.shared:
            whole = received[part.name]
            value = whole.expand(clients, *part.shape) if part.storage == "dense" else whole[update.client]
        else:
            value = torch.zeros(clients, *part.shape)
        params[part.name] = value + update.values[part.name] if uploaded and part.name in update.values else value
    return params


def _of_any_model(
    knowledge: Knowledge, received: Params, update: Update, own: Tensor, expected: Tensor, uploaded: bool
) -> _Slopes:
    """By automatic differentiation of whatever the model computes."""
    model, clients = knowledge.model, update.n_clients
    place = torch.arange(len(update.item)) - update.offset[:-1][update.owner]  # i64[N]: of a row within its client
    width = int(update.offset.diff().max())
    table = {name: received[name][update.item] for name in update.rows}  # f32[N, *shape]
    leaves = {
        name: rows.new_zeros(clients, width, *rows.shape[1:]).index_put_((update.owner, place), rows).requires_grad_()
        for name, rows in table.items()
    }
    kept = [part for part in knowledge.components if part.storage == "per_item" and part.name not in leaves]
    params = {
        **_beside_rows(knowledge, received, update, uploaded),
        **{part.name: torch.zeros(clients, width, *part.shape) for part in kept},
        **leaves,
    }
    weighted = {name: rows * own.reshape(-1, *[1] * (rows.dim() - 1)) for name, rows in table.items()}
    fixed = model.item_features(knowledge.n_items)
    features, around = None, None
    if fixed is not None:
        mine = fixed[update.item]
        features = mine.new_zeros(clients, width, mine.shape[1]).index_put_((update.owner, place), mine)
        around = _sum(mine * own.unsqueeze(1), update)
    unknown = no_user_features(knowledge, clients)
    logits = model.logits(
        params,
        Batch(
            own=torch.zeros(clients, width, dtype=torch.bool),
            degree=expected,
            neighbors={name: _sum(rows, update) for name, rows in weighted.items()} if model.reads_neighbors else {},
            user_features=unknown,
            item_features=features,
            neighbor_features=around,
        ),
    )
    slopes = torch.autograd.grad(logits.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    each = {name: slope[update.owner, place] for name, slope in zip(leaves, slopes, strict=True)}
    gradient = _flat(each)  # f32[N, d]
    product = (_flat(update.rows) * gradient).sum(1)
    score = logits.detach()[update.owner, place]
    return _Slopes(product, score, gradient.norm(dim=1), _sum(gradient, update))


def _along_line(update: Update, expected: Tensor) -> Tensor:
    """Movements of rows along the line along which most of their client's move, f32[N].

    Own items are taken to be on the side that has so many rows as are expected.
    """
    moved = _flat(update.rows)  # f32[N, d]
    each = torch.split(moved, update.offset.diff().tolist())
    scatter = torch.stack([unit.T @ unit for unit in map(_scaled, each)])  # f32[C, d, d]
    line = torch.linalg.eigh(scatter.double()).eigenvectors[:, :, -1].float()
    along = torch.cat([rows @ mine for rows, mine in zip(each, line, strict=True)])
    up, down = ((_sum((sign * along > 0).float(), update) - expected).abs() for sign in (1, -1))  # f32[C] each
    return torch.where((up <= down)[update.owner], along, -along)


def _scaled(rows: Tensor) -> Tensor:
    """Rows over the largest of their numbers, so that no square is too large or too small for float32."""
    return rows / rows.abs().max().clamp(min=_TINY) if len(rows) else rows


def _split(score: Tensor, update: Update, expected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two groups of each client, the `expected` highest and the rest: slope and middle of the log odds, and how far the
    groups are apart, all f32[C].

    The odds are those of two normal distributions of equal variance (linear discriminant). The distance is in units of
    the spread of all rows, so that it can be compared between scores.
    """
    top = chosen(update, score, whole(expected)).float()
    count = _sum(torch.ones_like(top), update)
    high = _sum(top, update)
    low = count - high
    mean_high = _sum(score * top, update) / high.clamp(min=1)
    mean_low = _sum(score * (1 - top), update) / low.clamp(min=1)
    center = torch.where(top > 0, mean_high[update.owner], mean_low[update.owner])
    within = _sum((score - center).square(), update) / count.clamp(min=1)
    spread = _sum((score - _mean(score, update)[update.owner]).square(), update) / count.clamp(min=1)
    gap = mean_high - mean_low
    slope = gap / (within + 1e-3 * gap.square()).clamp(min=_TINY)
    return slope, (mean_high + mean_low) / 2, gap.square() * (high * low) / count.square() / spread.clamp(min=_TINY)


# --- logistic regression, one for each client -------------------------------------------------------------------------


def regressed(known: Tensor, truth: Tensor, owner: Tensor, seen: Tensor, update: Update) -> Tensor:
    """Log odds of the rows `seen`, f32[N, F], from rows whose label is known; each client has a regression of its own.

    Ridge-penalized maximum likelihood by Newton's method, on features standardized by the known rows.
    """
    odds = torch.empty(len(seen))
    for client in range(update.n_clients):
        x, y = known[owner == client].double(), truth[owner == client].double()
        mine = seen[update.offset[client] : update.offset[client + 1]].double()
        mean, spread = x.mean(0), x.std(0, correction=0).clamp(min=1e-9)
        one = torch.ones(len(x), 1, dtype=torch.float64)
        design = torch.cat([one, ((x - mean) / spread).clamp(-8, 8)], dim=1)
        weight = torch.zeros(design.shape[1], dtype=torch.float64)
        ridge = torch.full_like(weight, _RIDGE).index_fill_(0, torch.tensor([0]), 1e-6).diag()
        for _ in range(12):
            chance = torch.sigmoid(design @ weight)
            slope = design.T @ (y - chance) - ridge @ weight
            bend = (design * (chance * (1 - chance)).unsqueeze(1)).T @ design + ridge
            step = torch.linalg.solve(bend, slope)
            largest = step.abs().max()
            weight = weight + step * (4 / largest.clamp(min=4))
            if largest < 1e-4:
                break
        again = torch.cat([torch.ones(len(mine), 1, dtype=torch.float64), ((mine - mean) / spread).clamp(-8, 8)], 1)
        odds[update.offset[client] : update.offset[client + 1]] = (again @ weight).float()
    return odds


def _flat(rows: Params) -> Tensor:
    """All per-item components side by side, f32[N, d]."""
    tables = [value.unsqueeze(-1).flatten(1) for value in rows.values()]
    return tables[0] if len(tables) == 1 else torch.cat(tables, dim=1)


def _sum(values: Tensor, update: Update) -> Tensor:
    return values.new_zeros(update.n_clients, *values.shape[1:]).index_add_(0, update.owner, values)


def _mean(values: Tensor, update: Update) -> Tensor:
    count = update.offset.diff().clamp(min=1).to(values.dtype)
    return _sum(values, update) / count.reshape(-1, *[1] * (values.dim() - 1))
