"""Metrics: how well a recommender ranks, and how sure a number is."""

from recleak.metrics.intervals import Estimate, bootstrap_mean, clopper_pearson
from recleak.metrics.ranking import Ranks, Scorer, rank, summarize

__all__ = ["Estimate", "Ranks", "Scorer", "bootstrap_mean", "clopper_pearson", "rank", "summarize"]
