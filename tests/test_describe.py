"""The numbers of a description, and the chart in a real browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recleak.data import chart
from recleak.data.describe import describe, gini
from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic


def test_numbers() -> None:
    users = pl.DataFrame({"id": [1, 2, 3], "sex": ["M", None, "M"], "age": [20.0, 40.0, None]})
    events = pl.DataFrame(
        {
            "user": [1, 1, 2, 3, 3, 3],
            "item": [1, 2, 1, 1, 2, 2],
            "rating": [5, 4, 5, 1, 1, 1],
            "time": [0, 9, None, 3, 4, 5],
        }
    )
    facts = describe(Interactions.build(events, users))
    assert (facts["users"], facts["items"], facts["rows"], facts["pairs"]) == (3, 2, 6, 5)
    assert facts["density"] == pytest.approx(5 / 6)
    assert facts["rows_per_user"]["median"] == 2
    assert facts["rating"] == {"1": 3, "4": 1, "5": 2}
    assert facts["time"] == {"first": "1970-01-01T00:00:00+00:00", "last": "1970-01-01T00:00:09+00:00", "unknown": 1}
    assert facts["attributes"]["sex"] == {"kind": "categorical", "missing": 1, "majority": 1.0, "classes": {"M": 2}}
    assert facts["attributes"]["age"]["median"] == 30
    assert facts["attributes"]["age"]["missing"] == 1


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(lambda counts: sum(counts) > 0))
def test_gini_is_the_mean_difference(counts: list[int]) -> None:
    values = np.array(counts)
    naive = np.abs(values[:, None] - values).mean() / (2 * values.mean())
    assert gini(values) == pytest.approx(naive)


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_pictures_are_written(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "deep" / f"chart{ending}"
    chart.save_chart(Synthetic(n_users=60, n_items=80, mean_activity=25).generate(), "small", path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == ".png" else b"<svg")
    assert len(content) > 5_000


@pytest.mark.heavy
def test_the_page_draws_itself_in_a_browser_and_runs_nothing_from_the_data(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here; .ci/run installs it")
    hostile = "</script><script>document.title = 'taken'</script>"
    data = Synthetic(n_users=60, n_items=80, mean_activity=25).generate()
    data = data.with_attributes(gender=pl.Series([hostile, "<b>"] * 30))
    path = tmp_path / "chart.html"
    chart.save_chart(data, hostile, path)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--virtual-time-budget=10000"]
    page = subprocess.run(
        [browser, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    assert 'class="marks"' in page  # what Vega adds once it has drawn
    assert "<title>taken</title>" not in page
    assert "&lt;/script&gt;" in page  # the title, as text
