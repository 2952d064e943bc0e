"""recleak measures what a recommender system leaks about its users, to whom, and what stopping it costs."""

__version__ = "0.1.0"
