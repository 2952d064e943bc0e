"""Interactions, and everything that reads, makes, splits or describes them."""

from recleak.data.interactions import Interactions, Note

__all__ = ["Interactions", "Note"]
