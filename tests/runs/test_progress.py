"""Progress where stderr is no terminal: lines that a log can keep, and no estimate from nothing."""

from __future__ import annotations

import pytest

from toolkit.runs import progress
from toolkit.runs.progress import Progress, spell


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves by hand."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.now)
    return Clock


def test_no_time_is_promised_before_a_step_is_done(clock, capsys):
    with Progress(25) as bar:
        clock.now += 150
        bar.step("loading", 0)
        assert capsys.readouterr().err == "loading: 0 of 25\n"
        clock.now += 50
        bar.step("first")
        assert capsys.readouterr().err == "first: 1 of 25, 80 min left\n"


def test_a_line_every_half_minute_and_the_last_one(clock, capsys):
    with Progress(3) as bar:
        clock.now += progress.EVERY - 1
        bar.step("a")
        assert capsys.readouterr().err == ""
        clock.now += 1
        bar.step("a")
        assert capsys.readouterr().err == "a: 2 of 3, 15 s left\n"
        bar.step("b")
        assert capsys.readouterr().err == f"b: 3 of 3, in {progress.EVERY:.0f} s\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (89, "89 s"), (90, "2 min"), (3826, "64 min"), (5399, "1 h 30 min"), (7765, "2 h 09 min")],
)
def test_durations_are_read_at_a_glance(seconds, text):
    assert spell(seconds) == text


def test_what_was_done_before_counts_but_not_for_the_time_left(clock, capsys):
    with Progress(100, done=50) as bar:
        clock.now += 40
        bar.step("loss 1.0", 10)
    # 10 steps in 40 s: 40 more take 160 s; all 60 in 40 s would promise 27 s
    assert capsys.readouterr().err == "loss 1.0: 60 of 100, 3 min left\n"


def test_a_pass_over_layers_is_told_where_nobody_asked_for_a_function(clock, capsys):
    with progress.reporting(None, 3, "starts of demo") as report:
        assert capsys.readouterr().err == "starts of demo: 0 of 3\n"
        clock.now += progress.EVERY
        report(2, 3, "mlp.up")
        assert capsys.readouterr().err == "starts of demo: mlp.up: 2 of 3, 15 s left\n"
        report(3, 3, "mlp.down")
    assert capsys.readouterr().err == "starts of demo: mlp.down: 3 of 3, in 30 s\n"
    with progress.reporting(False, 1, "starts of demo") as report:
        report(1, 1, "mlp.up")
    heard = []
    with progress.reporting(lambda *told: heard.append(told), 1, "starts of demo") as report:
        report(1, 1, "mlp.up")
    assert capsys.readouterr().err == "" and heard == [(1, 1, "mlp.up")]
