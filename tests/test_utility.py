"""Baselines on a split: chance is exact, known items do not compete."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from recleak.data.interactions import Interactions
from recleak.data.split import Split, leave_one_out
from recleak.data.synthetic import Synthetic
from recleak.utility import compare


@pytest.fixture(scope="module")
def split() -> Split:
    return leave_one_out(Synthetic(n_users=60, n_items=80, mean_activity=25).generate())


class Oracle:
    """Ranks what the user is known to have first, then the test item."""

    def __init__(self, split: Split) -> None:
        known = (split.train.matrix() + split.valid.matrix()).toarray()
        self.table = torch.from_numpy(2 * known + split.test.matrix().toarray())

    def scores(self, users: Tensor) -> Tensor:
        return self.table[users]


def test_train_and_validation_items_do_not_compete(split: Split) -> None:
    def fit(train: Interactions) -> Oracle:
        assert len(train) == len(split.train)
        return Oracle(split)

    found = compare(split, {"oracle": fit}, ks=(1, 10))
    chance, oracle = found.rows
    assert oracle.metrics["Hit@1"].value == 1
    free = split.train.n_items - split.train.activity - split.valid.activity
    assert chance.metrics["Hit@1"].value == pytest.approx(np.mean(1 / free))
    assert found.candidates == "full ranking"


def test_sampled_candidates_are_named_and_short_users_counted(split: Split) -> None:
    found = compare(split, negatives=50)
    assert found.candidates.startswith("50 sampled, excluding all positives")
    have = split.train.activity + split.valid.activity + split.test.activity
    assert found.short_users == (split.train.n_items - have < 50).sum() > 0
    assert [row.model for row in found.rows] == ["chance", "MostPop", "ItemKNN"]


def test_no_model_is_refused(split: Split) -> None:
    with pytest.raises(ValueError, match="at least one"):
        compare(split, {})
