"""Flower (extra `flower`): the same training, defenses and recordings in a real federation. See docs/deploy.md.

    client_app   a ClientApp for one user, or for a cohort of users behind one SuperNode
    Federation   the strategy that a ServerApp runs with such clients
    as_mod       a chain of defenses on any Flower client
    Recorder     wraps any strategy, and writes what the server sees as a recording

Flower's own helpers for differential privacy are not used: their clipping leaves out parameters without an axis.
"""

from __future__ import annotations

from recleak.deploy.flower_client import Cohort, client_app
from recleak.deploy.flower_mod import as_mod
from recleak.deploy.flower_recorder import Recorder
from recleak.deploy.flower_server import Federation

__all__ = ["Cohort", "Federation", "Recorder", "as_mod", "client_app"]
