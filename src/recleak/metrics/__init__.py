"""Metrics: how well a recommender ranks, how well an adversary answers, and how sure a number is."""

from recleak.metrics.inference import (
    PerUser,
    advantage,
    auc,
    auc_by_user,
    f1_by_user,
    precision_by_user,
    recall_by_user,
    roc,
    tpr_at_fpr,
)
from recleak.metrics.intervals import Estimate, bootstrap_mean, bootstrap_ratio, bootstrap_two_level, clopper_pearson
from recleak.metrics.ranking import Ranks, Scorer, rank, summarize

__all__ = [
    "Estimate",
    "PerUser",
    "Ranks",
    "Scorer",
    "advantage",
    "auc",
    "auc_by_user",
    "bootstrap_mean",
    "bootstrap_ratio",
    "bootstrap_two_level",
    "clopper_pearson",
    "f1_by_user",
    "precision_by_user",
    "rank",
    "recall_by_user",
    "roc",
    "summarize",
    "tpr_at_fpr",
]
