"""What this machine has: versions, threads, data, extras; and what is missing, with the remedy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from typing import Any

import torch

from recleak import __version__
from recleak.data import catalog
from recleak.machine import free_memory

_CORE = (
    "torch",
    "numpy",
    "scipy",
    "scikit-learn",
    "polars",
    "altair",
    "vl-convert-python",
    "pydantic",
    "cyclopts",
    "rich",
)
_EXTRAS = {"flower": "flwr", "ray": "ray", "mlflow": "mlflow-skinny", "dev": "pytest"}
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def examine() -> dict[str, Any]:
    """Everything, ready for JSON."""
    return {
        "recleak": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _CORE},
        "extras": {extra: _version(package) for extra, package in _EXTRAS.items()},
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "memory_free_gib": None if (free := free_memory()) is None else round(free / 2**30, 1),
        "browser": next((found for name in _BROWSERS if (found := shutil.which(name))), None),
        "search_path": [str(root) for root in catalog.search_path()],
        "data": {name: str(folder) if (folder := catalog.locate(name)) else None for name in catalog.CATALOG},
    }


def problems(facts: dict[str, Any]) -> list[str]:
    """What is missing and what to do about it."""
    found = [f"{name} is not installed: pip install recleak." for name, v in facts["packages"].items() if v is None]
    for name, folder in facts["data"].items():
        if folder is None:
            entry = catalog.entry(name)
            how = f"recleak data get {name}" if entry.sources else f"fetch it from {entry.home}"
            found.append(f"{entry.title} is not here: {how}")
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
