"""Figures of fine-tuning studies: fronts and classes by hand, labels that keep apart, files, and errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.analysis.printing.figure import figure
from toolkit.analysis.printing.trained.frontier_figure import Point, classes, front, points
from toolkit.analysis.printing.trained.summary import summary
from toolkit.errors import InputError

GIB = 2**30
PEAKS = {"qlora": 3.83, "aqlora-q": 4.05, "matched": 4.04, "lora": 5.18}


def point(name, speed, outcome, peak=1.0):
    return Point(name, speed, (speed, speed), outcome, None, int(peak * GIB))


def test_a_class_holds_what_exceeds_its_smallest_by_a_tenth():
    made = [point(n, 1, 1, p) for n, p in (("d", 5.18), ("a", 3.83), ("b", 4.05), ("c", 4.3))]
    assert [[p.arm for p in group] for group in classes(made)] == [["a", "b"], ["c"], ["d"]]


def test_a_front_holds_what_nothing_beats_on_both_axes():
    made = [point("slow", 1, 0.9), point("mid", 2, 0.8), point("beaten", 1.5, 0.75), point("fast", 3, 0.6)]
    assert [p.arm for p in front(made, 1)] == ["slow", "mid", "fast"]
    # of losses, lower is better: now the fastest has the least
    assert [p.arm for p in front(made, -1)] == ["fast"]


def test_equal_points_are_both_on_the_front_and_ties_on_one_axis_are_not():
    twins = [point("a", 1, 0.9), point("b", 1, 0.9)]
    assert {p.arm for p in front(twins, 1)} == {"a", "b"}
    assert [p.arm for p in front([point("a", 1, 0.9), point("b", 1, 0.8)], 1)] == ["a"]


NUMBERS = st.floats(0.1, 10, allow_nan=False)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=12), st.sampled_from([1, -1]))
def test_fronts_and_classes_of_any_points(values, sign):
    made = [point(str(n), *value) for n, value in enumerate(values)]
    groups = classes(made)
    assert sorted(p.arm for group in groups for p in group) == sorted(p.arm for p in made)
    assert all(group[-1].peak <= 1.1 * group[0].peak for group in groups)

    def beats(a, b):
        at_least = a.speed >= b.speed and sign * a.outcome >= sign * b.outcome
        return at_least and (a.speed > b.speed or sign * a.outcome > sign * b.outcome)

    best = {p.arm for p in front(made, sign)}
    assert best and all((p.arm in best) is not any(beats(other, p) for other in made) for p in made)


@pytest.fixture
def study(made, trained):
    """Four arms on two tasks, with repeats, trials and two sessions."""
    arms = [*trained.ARMS, {"name": "lora", "base": "none"}]
    builder = made(
        tasks=("sums", "words"),
        arms=arms,
        repeats={"arm": "qlora", "count": 4},
        tune={"values": [1e-4, 3e-4, 1e-3]},
        values=trained.noisy({"aqlora-q": -0.1, "lora": -0.12}),
    ).write()
    for n, name in enumerate(("s1", "s2")):
        speeds = {("qlora", k): [1 + 0.002 * (k + n) + 0.001 * r for r in range(5)] for k in range(3)}
        for arm, speed in (("aqlora-q", 1.06), ("matched", 1.055), ("lora", 1.3)):
            speeds[arm, 0] = [speed + 0.003 * n + 0.001 * r for r in range(5)]
        builder.session(name, speeds, peaks=PEAKS)
    return builder


def test_points_are_means_over_kept_sessions_and_runs(study):
    data = summary(study.folder)
    found = {p.arm: p for p in points(data, "score")}
    assert found["lora"].peak == int(5.18 * GIB)
    assert found["lora"].speed == pytest.approx(64 * np.mean([1.303, 1.306]))
    average = next(e for e in data["averages"] if e["arm"] == "lora")
    assert found["lora"].outcome == average["all"]["score"]["mean"]


@pytest.mark.parametrize("kind", ["strips", "frontier", "tuning"])
@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_every_figure_in_every_format_and_the_same_each_time(study, tmp_path, kind, ending, begins):
    pytest.importorskip("matplotlib")
    first, second = (figure(study.folder, tmp_path / f"{n}.{ending}", kind=kind) for n in "ab")
    assert first.read_bytes().startswith(begins) and len(first.read_bytes()) > 5000
    if ending != "svg":  # svg names its parts by chance
        assert first.read_bytes() == second.read_bytes()


def test_labels_keep_apart(made, trained, monkeypatch, tmp_path):
    """Eight arms of nearly one speed and score: no label covers another or a mark."""
    pytest.importorskip("matplotlib")
    from toolkit.analysis.printing.trained import frontier_figure as module

    arms = [{"name": "qlora"}, *({"name": f"a-long-name-{n}"} for n in range(7))]
    builder = made(arms=arms, seeds=4, values=trained.noisy()).write()
    speeds = {("qlora", k): [1 + 0.001 * k] * 5 for k in range(3)}
    speeds |= {(f"a-long-name-{n}", 0): [1 + 0.004 * n] * 5 for n in range(7)}
    builder.session("s1", speeds)
    kept = []
    monkeypatch.setattr(module.drawing, "save", lambda picture, out: kept.append(picture))
    figure(builder.folder, tmp_path / "x.png", kind="frontier")
    picture = kept[0]
    renderer = picture.canvas.get_renderer()
    texts = [t for t in picture.axes[0].texts if "GiB" in t.get_text()]
    assert len(texts) == 8
    boxes = [module._text_box(t, renderer) for t in texts]
    for at, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[at + 1 :]), texts[at].get_text()


def test_figures_say_what_they_lack(made, tmp_path):
    pytest.importorskip("matplotlib")
    builder = made(seeds=1).write()
    out = tmp_path / "x.png"
    with pytest.raises(InputError, match="no timing session; `toolkit time`"):
        figure(builder.folder, out, kind="frontier")
    with pytest.raises(InputError, match="a `tune` block"):
        figure(builder.folder, out, kind="tuning")
    with pytest.raises(InputError, match="did you mean 'tuning'"):
        figure(builder.folder, out, kind="tunning")
    with pytest.raises(InputError, match="effects"):
        figure(builder.folder, out, kind="effects")
    with pytest.raises(InputError, match="png, pdf or svg"):
        figure(builder.folder, tmp_path / "x.gif")
    builder.session("s1", {("qlora", k): [1 + 0.1 * k] * 5 for k in range(3)})
    with pytest.raises(InputError, match="no timing session lies below the floor of 3%"):
        figure(builder.folder, out, kind="frontier")
    assert not out.exists()


def test_strips_of_an_unfinished_arm_and_of_scores(made, trained, tmp_path):
    pytest.importorskip("matplotlib")
    from toolkit.records.trained import Flag

    builder = made(tasks=("sums", "words"), seeds=2, analysis={"outcome": "score"}).write()
    for seed in range(2):
        builder.run("words", "matched", seed, fatal=Flag(check="memory", severity="fatal", reason="out of memory"))
    assert figure(builder.folder, tmp_path / "x.svg").read_text().count("<svg") == 1
