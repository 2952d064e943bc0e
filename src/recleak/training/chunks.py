"""Clients that are at hand, trained in chunks by threads of this process: what shadow clients need of an executor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from recleak.machine import cores as cores
from recleak.models.base import Params
from recleak.training.cohort import Task, Trained, join, train
from recleak.training.local import LocalData, steps_per_epoch
from recleak.update import Update


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread per operation, in torch and in the BLAS of the kernels: results depend on it in their last bits.

    Libraries that an import loaded; not one that was opened without any import since the last call (by `ctypes`).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _libraries(tuple(sys.modules)).limit(limits=1):
            yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=1)
def _libraries(modules: tuple[str, ...]) -> ThreadpoolController:
    """The loaded libraries that have threads of their own. To look for them takes 3 ms, and as a rule imports alone
    load more (numba takes its BLAS from scipy): while the same modules are there, they are taken to be the same.
    """
    return ThreadpoolController()


def train_in_chunks(
    task: Task, received: Params, kept: Update, data: LocalData, round: int, *, chunk: int = 32
) -> Trained:
    """Train the clients of `data` in chunks, side by side in this process; the result has them ascending."""
    order = np.argsort(-steps_per_epoch(task.training.batch_size, data.count), kind="stable")
    width = cores()
    size = max(1, min(chunk, -(-len(order) // width)))
    places = [order[start : start + size] for start in range(0, len(order), size)]
    if len(places) > 1 and size * width >= len(order):
        places = [
            order[start::width] for start in range(min(width, len(order)))
        ]  # one each: long and short ones for all

    def work(place: NDArray[np.int64]) -> Trained:
        return train(task, received, kept.select(torch.from_numpy(place)), data.select(place), round)

    with one_thread():
        if len(places) == 1:
            return join([work(places[0])])
        with ThreadPoolExecutor(width, thread_name_prefix="recleak") as pool:
            return join(list(pool.map(work, places)))
