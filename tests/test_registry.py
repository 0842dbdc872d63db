"""The registry: options and keys, close matches, clashes that name both sources, plug-ins that fail."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Literal

import pytest

from toolkit import hookimpl
from toolkit.errors import InputError
from toolkit.interfaces import KINDS, RankingSelector, Scaler
from toolkit.registry import Registry, register, registry


@dataclasses.dataclass
class Times(Scaler):
    """s = factor·α/r."""

    name = "times"
    factor: int = 2
    mode: Literal["plain", "root"] = "plain"
    on: bool = True

    def __call__(self, alpha, rank):
        return self.factor * alpha / rank


class Plugin:
    def __init__(self, *classes):
        self.classes = classes

    @hookimpl
    def toolkit_components(self):
        return list(self.classes)


class PerKind:
    """A plug-in that asks which kind is wanted."""

    def __init__(self):
        self.asked = []

    @hookimpl
    def toolkit_components(self, kind):
        self.asked.append(kind)
        return [Times] if kind == "scaler" else []


def fresh(*plugins):
    made = Registry()
    made._loaded = True  # these tests look at their own plug-ins only
    for at, plugin in enumerate(plugins):
        made.add(plugin, f"dist-{at}:point")
    return made


def test_options_keys_and_types():
    made = fresh(Plugin(Times))
    scaler = made.make("scaler", "times(factor=3,on=false)")
    assert (scaler.factor, scaler.on, scaler(16, 8)) == (3, False, 6.0)
    assert scaler.key == "times(factor=3,on=false)"
    assert made.make("scaler", "times(factor=2)").key == "times"
    assert made.make("scaler", "times", {"factor": 5}).key == "times(factor=5)"
    assert made.make("scaler", scaler) is scaler


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("timse", ["timse", "'times'"]),
        ("times(factr=3)", ["factr", "'factor'"]),
        ("times(factor=x)", ["'factor'", "'x'", "default 2"]),
        ("times(mode=cube)", ["'mode'", "'cube'", "plain"]),
        ("times(factor=2", ["times(factor=2"]),
    ],
)
def test_wrong_keys_name_what_was_found_and_what_is_allowed(key, words):
    with pytest.raises(InputError) as error:
        fresh(Plugin(Times)).make("scaler", key)
    for word in words:
        assert word in str(error.value)


def test_unknown_kind():
    with pytest.raises(InputError, match="did you mean 'scaler'"):
        fresh().of_kind("scalar")


def test_a_component_of_another_kind_is_refused():
    with pytest.raises(InputError, match="is a scaler, and a selector is asked for"):
        fresh(Plugin(Times)).make("selector", Times())


def test_only_the_wanted_kind_is_asked_for():
    plugin = PerKind()
    made = fresh(plugin)
    assert list(made.of_kind("scaler")) == ["times"]
    assert plugin.asked == ["scaler"]


def test_two_of_one_name_name_both_distributions():
    class Other(Times):
        name = "times"

    with pytest.raises(InputError) as error:
        fresh(Plugin(Times), Plugin(Other)).of_kind("scaler")
    assert "dist-0" in str(error.value) and "dist-1" in str(error.value) and "'times'" in str(error.value)


def test_one_class_from_two_sources_is_no_clash():
    assert list(fresh(Plugin(Times), Plugin(Times)).of_kind("scaler")) == ["times"]


def test_a_failing_plugin_is_named_and_the_rest_work(capsys):
    class Broken:
        @hookimpl
        def toolkit_components(self):
            raise RuntimeError("no such card")

    class Unfinished(Scaler):
        name = "unfinished"

    class Nameless(Scaler):
        def __call__(self, alpha, rank):
            return 1.0

    made = fresh(Broken(), Plugin(Unfinished), Plugin(Nameless), Plugin(int), Plugin(Times))
    assert list(made.of_kind("scaler")) == ["times"]
    assert set(made.failures) == {"dist-0", "dist-1", "dist-2", "dist-3"}
    assert "__call__" in made.failures["dist-1"]
    warned = capsys.readouterr().err
    assert "dist-0" in warned and "no such card" in warned
    with pytest.raises(InputError, match="plug-ins that failed: dist-0"):
        made.find("scaler", "nothing")


def test_a_module_that_cannot_be_registered_is_named_and_the_rest_work(monkeypatch, capsys):
    class Misnamed:
        @hookimpl
        def toolkit_components(self, kinds):  # the hook's argument is called `kind`
            return [Times]

    def point(name, load):
        return SimpleNamespace(name=name, value=f"{name}_module", dist=None, load=load)

    points = [point("misnamed", Misnamed), point("absent", lambda: 1 / 0), point("sound", lambda: Plugin(Times))]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    made = Registry()
    assert list(made.of_kind("scaler")) == ["times"]
    assert set(made.failures) == {"misnamed_module", "absent_module"}
    assert "kinds" in made.failures["misnamed_module"] and "ZeroDivisionError" in made.failures["absent_module"]
    assert "misnamed_module" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            {"toolkit_component": hookimpl(lambda: [Times])},
            "implements no hook.*toolkit_components.*marks toolkit_component",
        ),
        ({"toolkit_components": lambda: [Times]}, "toolkit_components is not marked with @hookimpl"),
        ({}, "no hook"),
    ],
)
def test_a_module_that_gives_nothing_is_named(monkeypatch, capsys, names, words):
    module = SimpleNamespace(**names)
    found = [SimpleNamespace(name="slip", value="slip_module", dist=None, load=lambda: module)]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)
    made = Registry()
    assert made.of_kind("scaler") == {}
    assert re.search(words, made.failures["slip_module"]) and "slip_module" in capsys.readouterr().err


def test_register_by_hand_replaces_itself():
    def cell(value):
        class Inline(RankingSelector):
            """By hand."""

            name = "inline-for-test"

            def score(self, profile):
                return [value] * len(profile)

        return Inline

    try:
        register(cell(1.0))
        newer = register(cell(2.0))
        assert registry.find("selector", "inline-for-test") is newer
    finally:
        for name, _ in list(registry.manager.list_name_plugin()):
            if name.endswith(":inline"):
                registry.manager.unregister(name=name)
        registry._found.clear()


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_built_in_component_has_a_name_a_key_and_a_sentence(kind):
    found = registry.of_kind(kind)
    assert found
    for name, (cls, source) in found.items():
        made = registry.make(kind, name, {"value": 1.0} if "value" in cls.defaults() else {})
        assert cls.name == name and source
        assert made.key.startswith(name)
        assert len(cls.summary()) > 15
