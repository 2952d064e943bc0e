"""Fixtures that more than one test file uses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

os.environ.update(COLUMNS="100", NO_COLOR="1", TERM="dumb")  # what is shown does not depend on who looks
os.environ.pop("FORCE_COLOR", None)

hypothesis.settings.register_profile("recleak", deadline=None)  # machines are shared: time says nothing
hypothesis.settings.load_profile("recleak")


@pytest.fixture(scope="session")
def data() -> Callable[[str], Path]:
    """The folder of a data set below RECLEAK_DATA; skips the test if it is not there."""

    def folder(name: str) -> Path:
        root = os.environ.get("RECLEAK_DATA")
        if not root:
            pytest.skip(f"{name}: RECLEAK_DATA is not set; set it to the folder that holds {name}/")
        found = Path(root) / name
        if not found.is_dir():
            pytest.skip(f"{name}: there is no folder {name}/ in RECLEAK_DATA")
        return found

    return folder
