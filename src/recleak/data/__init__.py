"""Interactions, and everything that reads, makes, splits or describes them."""

from recleak.data.frames import from_frame
from recleak.data.interactions import Interactions, Note

__all__ = ["Interactions", "Note", "from_frame"]
