"""The figure: that its numbers are the draws', that nothing overlaps, and that no global state changes."""

import itertools
import sys

import numpy as np
import pytest

from toolkit.analysis.printing.figure import LABEL, _apart, figure
from toolkit.analysis.reading import reports
from toolkit.errors import InputError, RunError

CASES = {
    "small": {"draws": 10, "budgets": ("layers=0.1",)},
    "three budgets, few draws": {"draws": 10},
    "one budget, many draws": {"draws": 499, "budgets": ("layers=0.1",)},
    "four arms under five laws, two texts": {
        "draws": 199,
        "texts": ("wikitext2", "python-topics"),
        "extra_arms": ("bottom-error-at-top-total", "depth"),
        "controls": [
            *({"selector": "random-matched", "name": n, "draws": 199} for n in ("matched", "permuted", "shuffled")),
            {"selector": "random-matched(roles=true,thirds=true)", "draws": 99},
            {"selector": "random-count", "name": "count-matched", "draws": 99, "like": ["top-error"]},
        ],
    },
}


@pytest.fixture
def drawn(monkeypatch):
    """Every matplotlib figure that is saved, kept for a look."""
    from matplotlib.figure import Figure

    kept = []
    save = Figure.savefig

    def keep(self, *args, **kwargs):
        kept.append(self)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow if name.startswith("four") else ()) for name in CASES]
)
def test_no_text_overlaps_and_none_is_cut_off(builder, drawn, tmp_path, case):
    made = builder(**CASES[case])
    made.write()
    out = figure(made.folder, tmp_path / "out.png")
    assert out.read_bytes().startswith(b"\x89PNG")
    (picture,) = drawn
    picture.canvas.draw()
    renderer = picture.canvas.get_renderer()
    texts = [t for t in picture.findobj(lambda a: hasattr(a, "get_text")) if t.get_text().strip() and t.get_visible()]
    undrawn = set()  # matplotlib keeps the labels of ticks outside the limits
    for axes in picture.axes:
        low, high = axes.get_xlim()
        for tick in [*axes.xaxis.get_major_ticks(), *(() if axes.axison else axes.yaxis.get_major_ticks())]:
            if not axes.axison or not low <= tick.get_loc() <= high:
                undrawn |= {tick.label1, tick.label2}
    shown = [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t not in undrawn]
    width, height = picture.bbox.size
    for words, box in shown:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, f"{words!r} is cut off"
    for (a, box), (b, other) in itertools.combinations(shown, 2):
        assert not box.shrunk(1, 0.9).overlaps(other.shrunk(1, 0.9)), f"{a!r} overlaps {b!r}"
    panels = [axes for axes in picture.axes if axes.axison]
    assert len(panels) == len(made.study.budgets) * len(made.study.texts)


@pytest.mark.parametrize("low", [0.0, 0.02, 0.3, 0.45, 0.7, 0.98])
@pytest.mark.parametrize("apart", [0.0, 0.005, 0.1, 0.4, 1.0])
def test_labels_of_near_references_stand_apart(low, apart):
    marks = {"base": low, "16-bit": min(low + apart, 1.0)}  # the base run may be the better one
    places = _apart(marks)
    (a, b) = sorted((x - LABEL, x) if side == "right" else (x, x + LABEL) for x, side in places.values())
    assert a[1] <= b[0] + 1e-9 and a[0] >= -0.02 and b[1] <= 1.02
    assert places["base"][0] <= places["16-bit"][0] or apart > LABEL


def test_points_are_the_draws_and_marks_the_arms(builder, drawn, tmp_path):
    made = builder(draws=30, budgets=("layers=0.1", "layers=0.2"))
    made.write()
    figure(made.folder, tmp_path / "out.png")
    results = reports.read(made.folder)
    panels = [axes for axes in drawn[0].axes if axes.axison]
    for budget, axes in zip(results.budgets, panels, strict=True):
        points = [np.asarray(c.get_offsets()) for c in axes.collections]
        strips = [p for p in points if len(p) == 30]
        marks = [p for p in points if len(p) == 1]
        expected = [("top-error", "matched"), ("top-error", "count-matched"), ("bottom-error", "matched")]
        assert len(strips) == len(marks) == 3
        for (arm, control), strip, mark in zip(expected, strips, marks, strict=True):
            run = results.controls[budget, arm, control]
            assert strip[:, 0].tolist() == run.draws.outcomes["python-topics"]["loss"].tolist()
            assert mark[0, 0] == results.arms[budget, arm].scores["python-topics"].loss
            low, high = axes.get_xlim()
            assert low < strip[:, 0].min() and strip[:, 0].max() < high and low < mark[0, 0] < high
        rows = [(p[:, 1].min(), p[:, 1].max()) for p in strips]  # one strip a row, jitter stays in it
        assert all(b[1] < a[0] for a, b in itertools.pairwise(rows)) and all(b - a < 0.5 for a, b in rows)
    shades = [c.get_facecolor()[0, 0] for c in panels[0].collections if len(c.get_offsets()) == 30]
    assert shades[1] > shades[0] == shades[2]  # draws that hold other memory are fainter


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_the_same_picture_each_time(whole, tmp_path, kind):
    first, second = (figure(whole.folder, tmp_path / f"{n}.{kind}") for n in "ab")
    assert first.stat().st_size > 5_000
    if kind != "svg":  # matplotlib names the parts of an SVG at random
        assert first.read_bytes() == second.read_bytes()


def test_global_state_stays(whole, tmp_path):
    import matplotlib

    before, backend = dict(matplotlib.rcParams), matplotlib.get_backend(auto_select=False)
    loaded = "matplotlib.pyplot" in sys.modules
    figure(str(whole.folder), str(tmp_path / "new" / "out.png"))
    assert dict(matplotlib.rcParams) == before and matplotlib.get_backend(auto_select=False) == backend
    assert ("matplotlib.pyplot" in sys.modules) == loaded


def test_missing_runs_leave_room(builder, tmp_path, drawn):
    import shutil

    made = builder(draws=5, budgets=("layers=0.1", "layers=0.2"))
    made.write()
    shutil.rmtree(made.results / "layers-0.1--bottom-error--matched")
    shutil.rmtree(made.results / "reference-16-bit")
    figure(made.folder, tmp_path / "out.png")
    words = [t.get_text() for t in drawn[0].findobj(lambda a: hasattr(a, "get_text"))]
    assert words.count("missing") == 1 and "2 declared runs are missing." in words


def test_strips_are_grouped_by_arm(builder, drawn, tmp_path):
    made = builder(draws=8, budgets=("layers=0.1",), extra_arms=("depth",))
    made.write()
    figure(made.folder, tmp_path / "out.png")
    (axes,) = [axes for axes in drawn[0].axes if axes.axison]
    names = {
        t.get_text(): t.get_position()[1] for t in axes.texts if t.get_text() in ("top-error", "bottom-error", "depth")
    }
    assert list(names) == ["top-error", "bottom-error", "depth"]
    strips = dict(zip(axes.get_yticks(), [t.get_text() for t in axes.get_yticklabels()], strict=True))
    under = {
        arm: [strips[y] for y in strips if low < y < high]
        for arm, high, low in (
            ("top-error", names["top-error"], names["bottom-error"]),
            ("bottom-error", names["bottom-error"], names["depth"]),
            ("depth", names["depth"], -99),
        )
    }
    assert under == {
        "top-error": ["matched", "count-matched\n(memory not matched)"],
        "bottom-error": ["matched"],
        "depth": ["matched"],
    }


def test_effects_are_those_of_the_sweep(full, drawn, tmp_path):
    """Points against the raw reports, by role; Spearman's ρ against scipy's."""
    import json

    from scipy import stats

    out = figure(full.folder, tmp_path / "effects.png", kind="effects")
    assert out.read_bytes().startswith(b"\x89PNG")
    (picture,) = drawn
    error = full.profile["error.nf4.mse"]
    assert len(picture.axes) == 4

    def losses(run, text):
        raw = json.loads((full.results / run / "report.json").read_text())
        found = [d["scores"][text]["loss"] for d in raw.get("draws", [])]
        return np.array(found or raw["scores"][text]["loss"])

    roles = [row.role for row in full.profile.layers]
    cases = itertools.product(full.texts, (("restore", "base", -1), ("quantize", "16-bit", 1)))
    for axes, (text, (kind, reference, sign)) in zip(picture.axes, cases, strict=True):
        gain = sign * (losses(f"sweep--{kind}", text) - losses(f"reference-{reference}", text))
        rho = stats.spearmanr(gain, error).statistic
        title = axes.get_title()
        assert text in title and f"ρ = {rho:.2f}".replace("-", "−") in title and "n = 210" in title
        by_role = {c.get_label(): np.asarray(c.get_offsets()) for c in axes.collections}
        assert set(by_role) == set(roles) and axes.get_xscale() == "log"
        for role, points in by_role.items():
            mine = [at for at, name in enumerate(roles) if name == role]
            assert points[:, 0].tolist() == [error[at] for at in mine]
            assert points[:, 1] == pytest.approx([1000 * gain[at] for at in mine], rel=1e-9)
    looks = {(tuple(c.get_facecolor()[0]), c.get_paths()[0].vertices.tobytes()) for c in picture.axes[0].collections}
    assert len(looks) == 7  # a colour and a marker of its own for each role
    picture.canvas.draw()
    renderer = picture.canvas.get_renderer()
    for words in picture.findobj(lambda a: hasattr(a, "get_text")):
        box = words.get_window_extent(renderer)
        if words.get_text().strip() and words.get_visible() and not words.get_text().startswith("$"):
            assert box.x0 >= 0 and box.x1 <= picture.bbox.width, f"{words.get_text()!r} is cut off"


def test_roles_beyond_the_markers_share_one():
    from toolkit.analysis.printing.effects_figure import MARKERS, REST, _roles

    many = [f"role-{at}" for at in range(len(MARKERS) + 3) for _ in range(20 - at)]
    found = _roles(many)
    assert len(set(found)) == len(MARKERS) and found.count(REST) == sum(20 - at for at in range(7, 11))
    assert _roles(many[:40]) == many[:40]


def test_effects_need_a_sweep_a_profile_and_their_references(builders, whole, tmp_path):
    import shutil

    with pytest.raises(InputError, match="holds no single-layer sweep"):
        figure(whole.folder, tmp_path / "out.png", kind="effects")
    with pytest.raises(InputError, match="no kind of figure is called 'effect'; did you mean 'effects'"):
        figure(whole.folder, tmp_path / "out.png", kind="effect")
    study = builders.make_full_study(draws=3, few=3, budgets=("layers=0.1",), test="each")
    made = builders.Builder(tmp_path / "study", study)
    made.write(profile=False)
    with pytest.raises(InputError, match=r"there is no profile\.json"):
        figure(made.folder, tmp_path / "out.png", kind="effects")
    builders.make_profile(blocks=29).save(made.results / "profile.json")
    with pytest.raises(InputError, match="has other layers than the reports"):
        figure(made.folder, tmp_path / "out.png", kind="effects")
    made.profile.save(made.results / "profile.json")
    shutil.rmtree(made.results / "reference-base")
    figure(made.folder, tmp_path / "out.png", kind="effects")  # the other sweep is there
    shutil.rmtree(made.results / "reference-16-bit")
    with pytest.raises(InputError, match="reference runs that the sweep is compared with are missing"):
        figure(made.folder, tmp_path / "out.png", kind="effects")


def test_refusals(builder, whole, tmp_path):
    with pytest.raises(InputError, match=r"png, pdf or svg; found 'out\.jpg'"):
        figure(whole.folder, tmp_path / "out.jpg")
    made = builder(draws=5, budgets=("layers=0.1",))
    made.folder.mkdir()
    (made.folder / "study.yaml").write_text("{}")
    made.put(made.reference("base"))
    made.study.save(made.results / "study.json")
    with pytest.raises(InputError, match="no arm with draws"):
        figure(made.folder, tmp_path / "out.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        figure(whole.folder, tmp_path / "file" / "out.png")
