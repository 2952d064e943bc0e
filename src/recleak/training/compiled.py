"""Visits that have a compiled loop of their own: a client's epochs by hand-written gradients, not step by step for all.

Anything that such a loop does not know leaves the visit to the general way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import kernels_gcn
from recleak.defenses.functional_mechanism import FunctionalMechanism, last_weight, random_polynomial
from recleak.models.feature_gcn import FeatureGCN
from recleak.streams import Streams
from recleak.training.optimizers import SGD

if TYPE_CHECKING:
    from recleak.training.visit import Visit


def walk_epochs(visit: Visit) -> Tensor | None:
    """All epochs of all clients with the epoch hook after each, and the mean loss, f32[C]; None if no loop fits.

    There is one for APM's graph model on an item table under plain SGD.
    """
    model, features = visit.task.model, visit.batches.features
    if type(model) is not FeatureGCN or features is None or not _fits(model, visit):  # a subclass may differ
        return None
    training, clients = visit.task.training, len(visit.client)
    names = [part.name for part in model.components() if part.storage == "dense"]
    params = torch.cat([visit.values[name].flatten(1) for name in names], dim=1)  # f32[C, P]
    starts = np.cumsum([0, *(visit.values[name][0].numel() for name in names)])
    for name, low, high in zip(names, starts, starts[1:], strict=False):
        visit.values[name] = params[:, low:high].view(visit.values[name].shape)  # the hook changes `params` through it
    weights = [name for name in names if name.startswith("head.") and name.endswith(".weight")]
    missing = 4 + 2 * len(weights) - len(names)  # a bounded head has no last bias
    whole = np.concatenate([starts, starts[-1:].repeat(missing)])
    rates = np.array([visit.rates[name] for name in names] + [0.0] * missing)
    widths = np.array([*(visit.values[name].shape[1] for name in weights), 1])
    loss = np.zeros(clients)
    hooked = "epoch" in visit.used
    random = random_polynomial(visit.task.defense, visit.streams.within("penalty")) if "penalty" in visit.used else None
    single = hooked or random is not None  # one epoch at a time
    for epoch in range(training.epochs if single else 1):
        kernels_gcn.feature_gcn_epochs(
            visit.batches.row,
            visit.batches.label.numpy(),
            visit.plan.weight,
            visit.batches.is_own.numpy(),
            visit.plan.per_epoch,
            epoch,
            epoch + 1 if single else training.epochs,
            visit.held.own,
            visit.held.own_offset,
            features.contiguous().numpy(),
            visit.rows["item"].numpy(),
            visit.rates["item"],
            params.numpy(),
            whole,
            rates,
            widths,
            training.loss == "taylor",
            model.bounded,
            *_polynomials(random, visit.plan.per_epoch, epoch, int(widths[-2])),
            loss,
        )
        if hooked:
            visit.end_epoch(np.arange(clients), np.full(clients, epoch + 1))
    return torch.from_numpy((loss / visit.plan.steps).astype(np.float32))


def _polynomials(
    random: tuple[FunctionalMechanism, Streams] | None, per_epoch: NDArray[np.int64], epoch: int, width: int
) -> tuple[float, NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """The random terms of the loss at every step of one epoch: their scale, i64[C] where the steps of each client
    begin, f32[T, d] and f32[T, d, d].
    """
    start = np.cumsum(per_epoch) - per_epoch
    if random is None:
        return 0.0, start, np.empty((0, width), np.float32), np.empty((0, width, width), np.float32)
    mechanism, streams = random
    client = np.repeat(np.arange(len(per_epoch)), per_epoch)
    step = np.arange(len(client)) - start[client] + epoch * per_epoch[client]
    linear, square = mechanism.coefficients(width, streams.select(client).at(step))
    return mechanism.scale(width), start, linear.numpy(), square.numpy()


def _fits(model: FeatureGCN, visit: Visit) -> bool:
    """Whether the loop knows this setting of the model and all that happens to a client beside it."""
    optimizer = visit.optimizer
    return (
        model.item_side == "table"
        and len(model.hidden) > 0
        and isinstance(optimizer, SGD)
        and not optimizer.momentum
        and not optimizer.weight_decay
        and visit.task.training.loss in ("bce", "taylor")
        and visit.device.type == "cpu"
        and "gradient" not in visit.used
        and ("penalty" not in visit.used or _is_polynomial(model, visit))
    )


def _is_polynomial(model: FeatureGCN, visit: Visit) -> bool:
    """Whether the penalty is a random polynomial of the last layer's weights."""
    random = random_polynomial(visit.task.defense, visit.streams)
    return random is not None and random[0].weight in (None, last_weight(part.name for part in model.components()))
