"""The report: findings as one page that needs nothing else, neither a network nor a server."""

from recleak.report.compare import compare
from recleak.report.page import render, write

__all__ = ["compare", "render", "write"]
