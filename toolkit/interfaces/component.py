"""What every part has: a name in its kind, options, a key."""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC
from typing import Any, ClassVar

from toolkit import spec


class Component(ABC):
    """A named part. Options are dataclass fields with defaults: `@dataclass class NF4(Quantizer)`."""

    kind: ClassVar[str]
    name: ClassVar[str]
    positional: ClassVar[str | None] = None
    """An option that a key may also give as `name:value`."""

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Option names and their default values, in declaration order."""
        if not dataclasses.is_dataclass(cls):
            return {}
        missing = dataclasses.MISSING
        return {
            f.name: f.default_factory() if f.default_factory is not missing else f.default
            for f in dataclasses.fields(cls)
            if f.init
        }

    @property
    def options(self) -> dict[str, Any]:
        """Every option with its present value."""
        return {name: getattr(self, name) for name in self.defaults()}

    @property
    def key(self) -> str:
        """The component's key: its name and the options that differ from their defaults."""
        defaults = self.defaults()
        return spec.render(self.name, {k: v for k, v in self.options.items() if v != defaults[k]})

    @classmethod
    def summary(cls) -> str:
        """The first sentence of the docstring, for lists."""
        return (inspect.getdoc(cls) or "").partition("\n")[0]
