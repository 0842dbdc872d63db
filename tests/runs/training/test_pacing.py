"""A paced run waits, goes on, and has lost nothing."""

import datetime
import threading
import time

import pytest
import torch

from toolkit.errors import InputError
from toolkit.records.levers import Levers, Seeds
from toolkit.runs.training import Pacing, train
from toolkit.runs.training.checkpoints import found
from toolkit.runs.training.pacing import Pacer, sensor

LEVERS = Levers(batch=4, accumulation=1, steps=8, learning_rate=1e-2)


@pytest.mark.parametrize(
    ("window", "hour", "inside"),
    [
        ("22:00-07:00", "23:10", True),
        ("22:00-07:00", "06:59", True),
        ("22:00-07:00", "07:00", False),
        ("22:00-07:00", "21:59", False),
        ("09:30-17:00", "09:30", True),
        ("09:30-17:00", "17:00", False),
        ("9:30 - 17:00", "12:00", True),
    ],
)
def test_windows(window, hour, inside):
    now = datetime.datetime.fromisoformat(f"2026-03-01 {hour}")
    reason = Pacer(Pacing(window=window)).reason(now)
    assert (reason is None) == inside
    assert inside or (hour in reason and window in reason)


def test_it_stays_paused_until_it_is_cool():
    readings = iter([60.0, 70.0, 81.0, 76.0, 71.0, 69.9, 75.0, 80.0])
    pacer = Pacer(Pacing(pause_above=80, resume_below=70, temperature=lambda: next(readings)))  # one reading is a check
    assert [pacer.reason() is not None for _ in range(7)] == [False, True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": "22:00"}, "write it as 22:00-07:00"),
        ({"window": "25:00-07:00"}, "write it as"),
        ({"window": "07:00-07:00"}, "is empty"),
        ({"resume_below": 60}, "without pause_above"),
        ({"pause_above": 60, "resume_below": 70}, "while it is too hot"),
        ({"poll": 0}, "above 0"),
    ],
)
def test_what_cannot_be_paced(fields, message):
    with pytest.raises(InputError, match=message):
        Pacing(**fields)


def test_a_machine_without_a_sensor_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("toolkit.runs.training.pacing.Path", lambda _: tmp_path)
    with pytest.raises(InputError, match="no thermal zone"):
        sensor("cpu")


@pytest.fixture
def whole(arm, rows, adapters, tmp_path):
    model = arm("none")
    train(model, rows(), LEVERS, Seeds.all(0), folder=tmp_path / "whole", pad=0, progress=False)
    return adapters(model)


def at(model, passes, act):
    """Do something in the n-th forward pass."""
    count = [0]

    def hook(*_):
        count[0] += 1
        if count[0] == passes:
            act()

    model.get_base_model().lm_head.register_forward_hook(hook)
    return model


def test_it_waits_while_the_stop_file_exists(arm, rows, adapters, whole, tmp_path, capsys):
    stop, folder = tmp_path / "wait", tmp_path / "run"
    saved = []

    def pause():
        stop.touch()

        def resume():
            time.sleep(0.8)
            saved.extend(path.name for path in found(folder))
            stop.unlink()

        threading.Thread(target=resume).start()

    model = at(arm("none"), 3, pause)
    pacing = Pacing(stop_file=stop, poll=0.05)
    outcome = train(model, rows(), LEVERS, Seeds.all(0), folder=folder, pad=0, pacing=pacing, name="run 7")
    assert outcome.finished and not outcome.stopped
    assert 0.5 < outcome.course.paused < 5
    assert saved == ["checkpoint-3"]  # a kill while it waits would lose nothing
    assert "run 7 waits" in capsys.readouterr().err
    assert all(torch.equal(adapters(model)[name], value) for name, value in whole.items())


def test_it_waits_while_it_is_hot_and_the_clock_stands(arm, rows, tmp_path):
    degrees = [50.0]
    model = at(arm("none"), 2, lambda: degrees.__setitem__(0, 95.0))
    looks = []

    def temperature():
        looks.append(degrees[0])
        if looks.count(95.0) == 4:
            degrees[0] = 40.0
        return degrees[0]

    pacing = Pacing(pause_above=90, temperature=temperature, poll=0.3)
    started = time.monotonic()
    outcome = train(model, rows(), LEVERS, Seeds.all(0), folder=tmp_path, pad=0, pacing=pacing, progress=False)
    assert outcome.finished and outcome.course.paused >= 0.6
    assert outcome.course.seconds + outcome.course.paused <= time.monotonic() - started


def test_stop_saves_and_ends_and_the_same_call_resumes(arm, rows, adapters, whole, tmp_path):
    stop, folder = tmp_path / "wait", tmp_path / "run"
    pacing = Pacing(stop_file=stop, poll=0.05)
    model = at(arm("none"), 5, lambda: stop.write_text("stop\n"))
    outcome = train(model, rows(), LEVERS, Seeds.all(0), folder=folder, pad=0, pacing=pacing, progress=False)
    assert outcome.stopped and not outcome.finished and not outcome.flags
    assert outcome.course.steps == 5 and [path.name for path in found(folder)] == ["checkpoint-5"]
    stop.unlink()
    model = arm("none")
    outcome = train(model, rows(), LEVERS, Seeds.all(0), folder=folder, pad=0, pacing=pacing, progress=False)
    assert outcome.finished and outcome.course.resumed == 1 and outcome.course.steps == 8
    assert all(torch.equal(adapters(model)[name], value) for name, value in whole.items())
    assert not found(folder)


@pytest.mark.parametrize("given", [{"pause_above": float("nan")}, {"pause_above": 80, "resume_below": float("nan")}])
def test_a_temperature_that_is_no_number_is_refused(given):
    with pytest.raises(InputError, match="is nan; a temperature in °C"):
        Pacing(**given)


def test_a_folder_is_no_stop_file(tmp_path):
    with pytest.raises(InputError, match="is a folder, and a run would wait for ever"):
        Pacing(stop_file=tmp_path)
