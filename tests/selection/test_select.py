"""What `select` and `draws` check, with selectors that do each thing wrong."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass
from decimal import Decimal

import pytest

import toolkit as tk
from toolkit.interfaces import Law, Pick, Selector
from toolkit.selection.select import stream


class Answer(Selector):
    """Answers what it is told to."""

    name = "test-answer"

    def __init__(self, answer):
        self.answer = answer

    def select(self, profile, budget, rng, like):
        return self.answer(profile) if callable(self.answer) else self.answer


@dataclass
class Coin(Selector):
    """Random, matches where asked to, knows no budget."""

    name = "test-coin"
    random = True

    keep: float = 0.5

    def select(self, profile, budget, rng, like):
        return [name for name in profile.names if rng.random() < self.keep]


def test_the_record(tiny):
    selection = tk.select("top-error", tiny, "layers=0.2")
    rows = [tiny.row(name) for name in selection.layers]
    best = sorted(range(16), key=lambda i: -tiny.errors("nf4")[i])[:4]
    assert selection.layers == [tiny.names[i] for i in sorted(best)]  # model order
    assert selection.parameters == sum(r.parameters for r in rows) and selection.bytes == 2 * selection.parameters
    assert selection.of == {"layers": 16, "parameters": 480, "bytes": 960}
    assert (selection.selector, selection.budget, selection.seed) == ("top-error", tk.Budget(layers=0.2), None)
    assert selection.options == {"rounding": "ceil", "quantizer": "nf4", "measure": "mse"}
    assert selection.matched_to is selection.mismatch is selection.feasible_subsets is selection.inclusion is None


def test_the_record_of_a_matched_draw(tiny, tmp_path):
    like = tk.select("top-error", tiny, "layers=0.5")
    selection = tk.select("random-matched(within=0.1)", tiny, like=like, seed=5)
    assert selection.selector == "random-matched(within=0.1)" and selection.options["within"] == "0.1"
    assert selection.seed == 5 and selection.budget is None
    to = selection.matched_to
    assert (to.selector, to.hash, to.layers) == ("top-error", like.layers_hash, 8)
    assert (to.parameters, to.bytes) == (like.parameters, like.bytes)
    assert selection.mismatch == (selection.parameters - like.parameters) / like.parameters
    assert len(selection.inclusion) == 16
    selection.save(tmp_path / "s.json")
    assert tk.Selection.load(tmp_path / "s.json") == selection
    assert tk.select("random-matched", tiny, "layers=0.5", like=like, within=Decimal("0.1"), seed=5).layers == (
        selection.layers
    )


def test_a_matched_selector_needs_something_to_match(tiny):
    with pytest.raises(tk.InputError, match="--like"):
        tk.select("random-matched", tiny, "layers=0.2")


def test_a_selector_that_matches_nothing_takes_nothing_to_match(tiny):
    with pytest.raises(tk.InputError, match="top-error matches nothing"):
        tk.select("top-error", tiny, "layers=0.2", like=tk.select("all", tiny))


def test_the_matched_selection_is_of_this_profile(tiny, profile_of):
    other = profile_of(4, {"attn.q": (4, 4)}, model="other")
    with pytest.raises(tk.InputError, match="another model"):
        tk.select("random-matched", tiny, like=tk.select("all", other))
    changed = tk.select("all", tiny).model_copy(update={"fingerprint": "older"})
    with pytest.raises(tk.InputError, match="weights have changed"):
        tk.select("random-matched", tiny, like=changed)
    renamed = tk.select("all", tiny).model_copy(update={"layers": ["model.layers.0.attn.qq"]})
    with pytest.raises(tk.InputError, match=r"did you mean 'model\.layers\.0\.attn\.q'"):
        tk.select("random-matched", tiny, like=renamed)
    with pytest.raises(tk.InputError, match="empty"):
        tk.select("random-matched", tiny, like=tk.select("none", tiny))


def test_a_budget_beside_a_matched_selection_is_that_selections(tiny):
    like = tk.select("top-error", tiny, "layers=0.5")
    assert tk.select("random-matched", tiny, "layers=0.50", like=like).budget == tk.Budget(layers="0.5")
    with pytest.raises(tk.InputError, match=r"budget layers=0\.4, but .* has budget layers=0\.5"):
        tk.select("random-matched", tiny, "layers=0.4", like=like)
    with pytest.raises(tk.InputError, match="has no budget"):
        tk.select("random-count", tiny, "layers=0.4", like=tk.select("listed", tiny, file=_file(tiny)))


def _file(profile):
    import tempfile

    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write(profile.names[0])
    return file.name


def test_a_missing_budget(tiny):
    with pytest.raises(tk.InputError, match="top-error needs a budget"):
        tk.select("top-error", tiny)
    assert tk.select("all", tiny, "layers=0.2").budget is None  # it has none, and none is recorded


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": 0.2}, r"budget is 0\.2 \(float\), and a Budget, such as layers=0\.2"),
        ({"profile": "org/name"}, r"profile is 'org/name' \(str\), and a Profile, such as tk\.profile"),
        ({"like": ["a"]}, r"like is \['a'\] \(list\), and a Selection is asked for"),
    ],
)
def test_arguments_of_another_type(tiny, given, message):
    with pytest.raises(tk.InputError, match=message):
        tk.select(**{"selector": "top-error", "profile": tiny, "budget": "layers=0.5"} | given)


def test_a_budget_that_selects_nothing(tiny):
    with pytest.raises(tk.InputError, match=r"smallest layer, .*attn\.k, costs 16 bytes"):
        tk.select("top-error", tiny, tk.Budget(bytes=8))
    with pytest.raises(tk.InputError, match="selects nothing"):
        tk.select(Answer([]), tiny, "layers=0.2")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (["model.layers.0.attn.qq"], r"which tiny does not have; did you mean 'model\.layers\.0\.attn\.q'"),
        (["model.layers.0.attn.q"] * 2, "'model.layers.0.attn.q' twice"),
        ([3], "layer 3, which"),
        ("model.layers.0.attn.q", "a sequence of layer names"),
    ],
)
def test_wrong_answers(tiny, answer, message):
    with pytest.raises(tk.InputError, match=message):
        tk.select(Answer(answer), tiny, "layers=0.2")


@pytest.mark.parametrize(
    "change",
    [
        lambda profile: profile.layers.reverse(),
        lambda profile: profile.layers.pop(),
        lambda profile: profile.layers[0].error.clear(),
        lambda profile: object.__setattr__(profile, "blocks", 1),
    ],
)
def test_a_selector_that_changes_the_profile(tiny, change):
    names = tiny.names

    def answer(profile):
        change(profile)
        return names[:1]

    with pytest.raises(tk.InputError, match="test-answer changed the profile"):
        tk.select(Answer(answer), tiny, "layers=0.2")
    assert tiny.names == names


def test_unknown_selectors_and_options(tiny):
    with pytest.raises(tk.InputError, match="did you mean 'top-error'"):
        tk.select("top-eror", tiny, "layers=0.2")
    with pytest.raises(tk.InputError, match="did you mean 'measure'"):
        tk.select("top-error", tiny, "layers=0.2", mesure="mae")
    with pytest.raises(tk.InputError, match="ready selector"):
        tk.select(Coin(), tiny, "layers=0.2", keep=0.3)
    with pytest.raises(tk.InputError, match="seed"):
        tk.select("top-error", tiny, "layers=0.2", seed="1")


def test_draws(tiny):
    found = tk.draws(Coin(), tiny, "layers=0.2", count=40)
    assert len({tuple(s.layers) for s in found}) == 40 and all(s.seed == 0 for s in found)
    assert found[0] == tk.select(Coin(), tiny, "layers=0.2")
    with pytest.raises(tk.InputError, match="not random"):
        tk.draws("top-error", tiny, "layers=0.2", count=3)
    with pytest.raises(tk.InputError, match="at least 1"):
        tk.draws(Coin(), tiny, "layers=0.2", count=0)


class Fixed(Law):
    """A law that draws one set again and again."""

    name = "test-fixed"

    def draws(self, profile, budget, rng, like, count):
        return [Pick(profile.names[:1])] * count

    def chains(self, profile, likes, rng, count):
        return [(Pick(profile.names[:1]), Pick(profile.names[: 1 + self.shared]))] * count


class Shared(Fixed):
    """The same, as draws that may repeat."""

    name = "test-shared"
    shared = True


def test_only_a_shared_law_may_repeat(tiny):
    like = tk.select("top-error", tiny, "layers=0.5")
    assert [s.draw for s in tk.draws(Shared(), tiny, like=like, count=3)] == [0, 1, 2]
    assert len(tk.chains(Shared(), tiny, likes=[like, like], count=3)) == 3
    with pytest.raises(tk.InputError, match="test-fixed gave the same selection twice"):
        tk.draws(Fixed(), tiny, like=like, count=3)
    with pytest.raises(tk.InputError, match="test-fixed gave the same family twice"):
        tk.chains(Fixed(), tiny, likes=[like, like], count=3)
    with pytest.raises(tk.InputError, match="test-fixed drew 2 selections for 3 to match"):
        tk.chains(Fixed(), tiny, likes=[like] * 3, count=1)
    with pytest.raises(tk.InputError, match="test-fixed matches another selection"):
        tk.draws(Fixed(), tiny, count=3)


def test_the_stream_of_a_shared_law_knows_no_matched_selection(tiny):
    class Probe(Shared):
        name = "test-probe"

        def draws(self, profile, budget, rng, like, count):
            return [Pick([profile.names[rng.randrange(16)]]) for _ in range(count)]

    likes = [tk.select(s, tiny, "layers=0.5") for s in ("top-error", "bottom-error")]
    one, two = (tk.draws(Probe(), tiny, like=like, count=20) for like in likes)
    assert [s.layers for s in one] == [s.layers for s in two]
    Probe.shared = False
    first, second = (tk.select(Probe(), tiny, like=like, seed=5).layers for like in likes)
    assert first == [tiny.names[stream("test-probe", 5, likes[0]).randrange(16)]]
    assert second == [tiny.names[stream("test-probe", 5, likes[1]).randrange(16)]]
    joined = f"k|3|{likes[0].layers_hash},{likes[1].layers_hash}"
    assert stream("k", 3, *likes).random() == random.Random(joined).random()


def test_a_draw_knows_its_number(tiny):
    assert tk.select("top-error", tiny, "layers=0.5").draw is None
    assert tk.select(Coin(), tiny, "layers=0.5").draw == 0
    assert [s.draw for s in tk.draws(Coin(), tiny, "layers=0.5", count=4)] == [0, 1, 2, 3]
    assert tk.draws(Coin(), tiny, "layers=0.5", count=1)[0].chain is None


def test_the_stream_is_a_pure_function_and_touches_no_global_state(tiny):
    like = tk.select("top-error", tiny, "layers=0.5")
    assert stream("k", 3, like).random() == random.Random(f"k|3|{like.layers_hash}").random()
    state = random.getstate()
    first = tk.select("random-matched", tiny, like=like, seed=7, within="0.2")
    assert random.getstate() == state
    random.seed(1)
    assert tk.select("random-matched", tiny, like=like, seed=7, within="0.2") == first
    other = tk.select("bottom-error", tiny, "layers=0.5")
    assert stream("k", 3, like).random() != stream("k", 3, other).random()


def test_selecting_needs_no_torch():
    code = (
        "import sys, toolkit as tk; from toolkit.registry import registry; registry.of_kind('selector');"
        "import toolkit.selection.select, toolkit.selection.similarity;"
        "print([m for m in ('torch', 'transformers', 'bitsandbytes', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
