"""Which components exist: pluggy, entry points, and look-up with close matches.

A package registers with one line under `[project.entry-points."toolkit.plugins"]`, naming a module that
implements the hook below. The built-in components come through the same hook as a stranger's.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import pluggy
from pydantic import ConfigDict, TypeAdapter, ValidationError

from toolkit import spec
from toolkit.errors import InputError, RunError, ToolkitError, closest
from toolkit.interfaces import KINDS, Component

PROJECT = "toolkit"
GROUP = "toolkit.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

C = TypeVar("C", bound=type[Component])


class Hooks:
    """What a plug-in may implement."""

    @hookspec
    def toolkit_components(self, kind: str) -> Iterable[type[Component]]:
        """Return component classes.

        `kind` is the kind that is asked for ("quantizer", "selector", …): a large plug-in can import only
        that part. A small one leaves the argument out and returns all of its classes.
        """


class Registry:
    """The components of every loaded plug-in, found by kind and name.

    A plug-in that fails to import, or whose hook fails, is kept in `failures` by the name of its
    distribution; the others still work.
    """

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(PROJECT)
        self.manager.add_hookspecs(Hooks)
        self.failures: dict[str, str] = {}
        self._loaded = False
        self._found: dict[str, dict[str, tuple[type[Component], str]]] = {}

    def load(self) -> None:
        """Import the module of every entry point, once."""
        if self._loaded:
            return
        self._loaded = True
        points = sorted(
            importlib.metadata.entry_points(group=GROUP),
            key=lambda p: (p.dist.name if p.dist else "", p.name),
        )
        for point in points:
            source = point.dist.name if point.dist else point.value
            try:
                plugin = point.load()
                if not self.manager.is_registered(plugin):
                    self.add(plugin, f"{source}:{point.name}")
                    if not any(caller.has_spec() for caller in self.manager.get_hookcallers(plugin) or ()):
                        self._fail(source, _no_hook(plugin, point.value))
            except (Exception, SystemExit) as error:  # the module's own, or a hook whose arguments do not exist
                text = " ".join(str(error).split())
                self._fail(source, f"module {point.value!r} does not import: {type(error).__name__}: {text}")

    def add(self, plugin: object, source: str) -> None:
        """Register a module or object that implements the hook; `source` names it in messages."""
        self.manager.register(plugin, name=source)
        self._found.clear()

    def of_kind(self, kind: str) -> Mapping[str, tuple[type[Component], str]]:
        """Name → (class, distribution) of every component of a kind, sorted by name.

        Raises:
            InputError: an unknown kind, two components of one name (both distributions named), or a class
                that is not a component of its kind.
        """
        if kind not in KINDS:
            raise InputError(f"no kind of component is called {kind!r}; {closest(kind, KINDS)}")
        self.load()
        if kind not in self._found:
            self._found[kind] = dict(sorted(self._collect(kind).items()))
        return self._found[kind]

    def _collect(self, kind: str) -> dict[str, tuple[type[Component], str]]:
        found: dict[str, tuple[type[Component], str]] = {}
        for impl in self.manager.hook.toolkit_components.get_hookimpls():
            source = impl.plugin_name.partition(":")[0]
            try:
                classes = list(impl.function(*([kind] if "kind" in impl.argnames else [])))
                for cls in classes:
                    _validate(cls)
            except (Exception, SystemExit) as error:
                self._fail(source, f"{type(error).__name__}: {error}")
                continue
            for cls in classes:
                if cls.kind != kind:
                    continue
                if cls.name in found and found[cls.name][0] is not cls:
                    raise InputError(
                        f"two {kind}s are called {cls.name!r}: one from {found[cls.name][1]} and one from "
                        f"{source}; uninstall one of them, or ask its author to rename it"
                    )
                found[cls.name] = (cls, source)
        return found

    def _fail(self, source: str, reason: str) -> None:
        if source not in self.failures:
            self.failures[source] = reason
            print(f"warning: plug-in {source} was left out: {reason}", file=sys.stderr)

    def find(self, kind: str, name: str) -> type[Component]:
        """The class of that kind and name.

        Raises:
            InputError: there is none; the closest names are offered, and failed plug-ins named.
        """
        found = self.of_kind(kind)
        if name not in found:
            failed = f" (plug-ins that failed: {', '.join(self.failures)})" if self.failures else ""
            raise InputError(f"no {kind} is called {name!r}; {closest(name, found)}{failed}")
        return found[name][0]

    def make(self, kind: str, key: str | Component, options: Mapping[str, Any] | None = None) -> Any:
        """A component from its key, such as `nf4(block=128)`; `options` add to those in the key.

        `name:value` is short for `name(option=value)` where a component has such an option.

        Raises:
            InputError: unknown name, unknown option, or a value that its option does not take.
        """
        if isinstance(key, Component):
            if key.kind != kind:
                raise InputError(f"{key.key} is a {key.kind}, and a {kind} is asked for")
            return key
        name, written = spec.parse(key)
        name, colon, value = name.partition(":")
        cls = self.find(kind, name)
        if colon:
            if cls.positional is None or not value:
                raise InputError(f"cannot read {key!r}: {kind} {name!r} has no option that is written after a colon")
            written = {cls.positional: value, **written}
        added = {k.replace("-", "_"): v for k, v in (options or {}).items()}
        if twice := sorted(written.keys() & added.keys()):
            raise InputError(f"option {twice[0]!r} of {kind} {name!r} is set twice: in {key!r} and beside it")
        given = written | added
        try:
            return cls(**_convert(cls, given))
        except ToolkitError:
            raise
        except Exception as error:  # a plug-in's own mistake: an annotation without a meaning, no default
            source = self.of_kind(kind)[name][1]
            raise RunError(f"{kind} {name!r} from {source} cannot be made: {type(error).__name__}: {error}") from error


def _no_hook(plugin: object, module: str) -> str:
    """Why a plug-in gives nothing: its hook is misspelled, unmarked, or not there."""
    hook = next(name for name in vars(Hooks) if not name.startswith("_"))
    if callable(getattr(plugin, hook, None)):
        return f"module {module!r}: {hook} is not marked with @hookimpl"
    marked = [name for name, value in vars(plugin).items() if hasattr(value, f"{PROJECT}_impl")]
    found = f" (it marks {', '.join(marked)})" if marked else ""
    return f"module {module!r} implements no hook: a function {hook}, marked with @hookimpl, is asked for{found}"


def _validate(cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Component)):
        raise TypeError(f"toolkit_components returned {cls!r}, which is no Component class")
    if getattr(cls, "kind", None) not in KINDS or not issubclass(cls, KINDS[cls.kind]):
        raise TypeError(f"{cls.__name__} must inherit from one of {', '.join(c.__name__ for c in KINDS.values())}")
    if not isinstance(getattr(cls, "name", None), str) or not cls.name or set(cls.name) & set("(),=: \t\n/"):
        raise TypeError(f"{cls.__name__}.name must be a plain word, found {getattr(cls, 'name', None)!r}")
    if cls.__abstractmethods__:
        raise TypeError(f"{cls.__name__} does not implement {', '.join(sorted(cls.__abstractmethods__))}")


def _convert(cls: type[Component], given: Mapping[str, Any]) -> dict[str, Any]:
    """Option values as their annotated types."""
    import typing

    allowed = cls.defaults()
    hints = typing.get_type_hints(cls)
    values = {}
    for name, raw in given.items():
        if name not in allowed:
            hint = closest(name, allowed) if allowed else "it takes no options"
            raise InputError(f"{cls.kind} {cls.name!r} has no option {name!r}; {hint}")
        try:
            adapter = TypeAdapter(hints[name], config=ConfigDict(arbitrary_types_allowed=True))
            values[name] = adapter.validate_python(raw)
        except ValidationError as error:
            detail = error.errors()[0]["msg"]
            raise InputError(
                f"option {name!r} of {cls.kind} {cls.name!r}: found {raw!r}; {detail} (default {allowed[name]!r})"
            ) from None
    return values


registry = Registry()
"""The one registry of this process."""


def register(cls: C) -> C:
    """Add a component class by hand, as a decorator: for a notebook cell or a script without a package."""

    class _Inline:
        @staticmethod
        @hookimpl
        def toolkit_components() -> list[type[Component]]:
            return [cls]

    _validate(cls)
    name = f"{cls.__module__}.{cls.__qualname__}:inline"
    if registry.manager.has_plugin(name):  # the cell was run again: the newer class counts
        registry.manager.unregister(name=name)
    registry.add(_Inline, name)
    return cls
