"""Which item rows of a received model its sender's own training moved: what attacks at nodes of a gossip begin with.

What a network has in common is taken away: the mean of the models that a group of nodes received in earlier ticks, each
tick counting twice as much as the one before. What is left of a sender's own items points in one direction (in GMF
along h * u, of its negatives against it): that one where the sender's vector is sent, else the leading direction of
what is left, with the sign that has popular items on the side of the own ones. For models with one item table of
vectors, and for PRME-G, whose table of preferences is read.

Axis letters: A groups, I items, d factors, m models, k pairs of a group and a model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recleak.attacks.base import Knowledge, State
from recleak.attacks.community import WEIGHT
from recleak.attacks.community_targets import groups_of
from recleak.attacks.membership import popularity_odds
from recleak.errors import ConfigError
from recleak.kernels_moved import add_models, project_apart, spread_apart
from recleak.models.mf import GMF
from recleak.models.prme import PRMEG
from recleak.wire import Push

PREFERENCE = "item.preference"  # of PRME-G
_SUM = "sum/"  # before the number of a group that received something in this tick: the sum of these models, f32[I, d]


def nothing_common(knowledge: Knowledge, groups: int) -> State:
    """The state of so many groups before the first message; later it is up to two item tables of each."""
    part = next(part for part in knowledge.components if part.name == table_of(knowledge))
    nothing = torch.zeros(groups, knowledge.n_items, *part.shape)
    return {
        "common": nothing,
        "weight": torch.zeros(groups),
        "tick": torch.tensor([-1]),
        "count": torch.zeros(groups),
    }


def received(knowledge: Knowledge, state: State, message: Push) -> tuple[State, Tensor, Tensor]:
    """The state with these models too, and the pairs of a group and a model that it can compare, i64[k] each.

    There is something to compare with if the group received a model in an earlier tick: `common` of the state.
    """
    if int(state["tick"]) != message.round:
        state = _next_tick(state, message.round)
    adversary, push = groups_of(knowledge)[:, message.receiver].nonzero(as_tuple=True)
    pair = torch.unique(torch.stack([adversary, message.model[push]]), dim=1)  # colluders may receive a model twice
    models, count = message.params[table_of(knowledge)], torch.bincount(pair[0], minlength=len(state["count"]))
    sums = {}
    for group, what in zip(count.nonzero().flatten().tolist(), pair[1].split(count[count > 0].tolist()), strict=True):
        name = f"{_SUM}{group}"
        sums[name] = state[name].clone() if name in state else torch.zeros_like(state["common"][group])
        add_models(models.numpy(), what.contiguous().numpy(), sums[name].numpy())
    who, what = pair[:, state["weight"][pair[0]] > 0]
    return {**state, **sums, "count": state["count"] + count}, who, what


def _next_tick(state: State, tick: int) -> State:
    """What was received in the last tick is what models have in common from now on, with half of what was before."""
    before, count = state["weight"] / 2, state["count"]
    weight, common = before + count, state["common"].clone()
    for group in count.nonzero().flatten().tolist():  # of who received nothing it stays as it was
        common[group] *= before[group] / weight[group]
        common[group] += state[f"{_SUM}{group}"] / weight[group]
    fresh = {"count": torch.zeros_like(count), "tick": torch.tensor([tick]), "common": common, "weight": weight}
    return {name: value for name, value in state.items() if not name.startswith(_SUM)} | fresh


def popular_side(knowledge: Knowledge) -> Tensor:
    """Own items are drawn by popularity, negatives uniformly: what popular items have more than others, f32[I]."""
    odds = popularity_odds(knowledge, torch.arange(knowledge.n_items))
    return odds - odds.mean()


def moved_rows(
    models: Tensor, common: Tensor, who: Tensor, what: Tensor, direction: Tensor | None, side: Tensor
) -> Tensor:
    """How far the rows of each pair's model moved from what is common, along its direction, f32[k, I].

    f32[m, I, d], f32[A, I, d], i64[k] twice, f32[k, d] and f32[I]. Without a direction it is the `leading` one, with
    the sign with which rows moved with `side`.
    """
    along = leading(models, common, who, what) if direction is None else direction
    moved = torch.empty(len(who), models.shape[1])
    given = (models, common, who, what, along, side)
    project_apart(*(each.contiguous().numpy() for each in given), direction is not None, moved.numpy())
    return moved


def leading(models: Tensor, common: Tensor, who: Tensor, what: Tensor) -> Tensor:
    """Where the rows of each pair's model differ most from what is common, a direction but for its sign, f32[k, d]."""
    spread = torch.empty(len(who), models.shape[2], models.shape[2], dtype=torch.float64)
    spread_apart(*(each.contiguous().numpy() for each in (models, common, who, what)), spread.numpy())
    along: Tensor = torch.linalg.eigh(spread).eigenvectors[:, :, -1].float()
    return along


def directions(knowledge: Knowledge, message: Push) -> Tensor | None:
    """Along which the own items of each sender move, f32[m, d]; None where vectors are not sent.

    In GMF that is h * u; in PRME-G items come nearer to u.
    """
    params, by_product = message.params, type(knowledge.model) is GMF
    if "user" not in params or (by_product and WEIGHT not in params):
        return None
    if not by_product and not isinstance(knowledge.model, PRMEG):
        return None
    sender = senders(message)
    own = params["user"][torch.arange(len(sender)), sender]
    return own * params[WEIGHT].squeeze(-1) if by_product else own


def senders(message: Push) -> Tensor:
    """Whose each model is, i64[m]."""
    m = int(message.model.max()) + 1 if len(message.model) else 0
    return torch.empty(m, dtype=torch.int64).index_copy_(0, message.model, message.sender)


def table_of(knowledge: Knowledge) -> str:
    """The one item table, of vectors; of PRME-G, that of preferences: rows of its other table come near to each other,
    not to one vector.
    """
    if isinstance(knowledge.model, PRMEG):
        return PREFERENCE
    tables = [part for part in knowledge.components if part.storage == "per_item" and part.shared]
    if len(tables) != 1 or len(tables[0].shape) != 1:
        names = ", ".join(part.name for part in tables) or "none"
        raise ConfigError(f"The chain at nodes needs one shared item table of vectors, got {names}.")
    return tables[0].name
