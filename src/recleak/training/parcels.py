"""Chunks and their results as plain arrays, for other processes and machines: tensors would travel through shared
memory, of which containers have little.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.training.cohort import Trained
from recleak.update import Update

Arrays = tuple[dict[str, Any], dict[str, Any], list[Any]]
Result = tuple[Arrays, Arrays, NDArray[np.float32], NDArray[np.float32], int]


def arrays_of(update: Update) -> Arrays:
    """An update without its tensors."""
    return (
        {name: value.numpy() for name, value in update.values.items()},
        {name: value.numpy() for name, value in update.rows.items()},
        [update.client.numpy(), update.item.numpy(), update.offset.numpy(), update.n_items],
    )


def update_of(arrays: Arrays) -> Update:
    """The update again."""
    values, rows, (client, item, offset, n_items) = arrays
    return Update(
        tensor_of(client),
        {name: tensor_of(value) for name, value in values.items()},
        {name: tensor_of(value) for name, value in rows.items()},
        tensor_of(item),
        tensor_of(offset),
        n_items,
    )


def result_of(trained: Trained) -> Result:
    """What a chunk has after training, without its tensors."""
    update, kept = arrays_of(trained.update), arrays_of(trained.kept)
    return update, kept, trained.loss.numpy(), trained.positives.numpy(), trained.steps


def trained_of(result: Result) -> Trained:
    """The same again."""
    update, kept, loss, positives, steps = result
    return Trained(update_of(update), update_of(kept), tensor_of(loss), tensor_of(positives), steps)


def tensor_of(array: NDArray[Any]) -> Tensor:
    """A tensor that may be written to: on the array's own memory if that may be, else a copy."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
