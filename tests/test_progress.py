"""The progress bar: rounds, loss, speed and time left in a terminal; not a byte elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from recleak import progress
from recleak.progress import Progress


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool = True, width: int = 100, asked: bool = True) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=width, _environ={"TERM": "xterm"})
    monkeypatch.setattr(progress, "err", console)
    with Progress(4, done=1, shown=asked) as bar:
        bar.round(2, 0.5, 12)
        bar._bar.refresh()
        bar.round(3, float("nan"), 0)
    return screen.getvalue()


def test_a_terminal_shows_rounds_loss_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = shown(monkeypatch)
    assert all(words in seen for words in ("round", "2/4", "loss 0.5000", "clients/s", "━"))
    assert "nobody answered" in seen
    assert "nan" not in seen


def test_a_narrow_terminal_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = shown(monkeypatch, width=45)
    assert "2/4" in seen
    assert "loss 0.5000" in seen
    assert "━" not in seen
    assert "…" not in seen


@pytest.mark.parametrize(("terminal", "asked"), [(False, True), (True, False)])
def test_silent_where_nobody_looks(monkeypatch: pytest.MonkeyPatch, terminal: bool, asked: bool) -> None:
    assert shown(monkeypatch, terminal=terminal, asked=asked) == ""
