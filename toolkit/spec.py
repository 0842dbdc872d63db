"""Component keys: `nf4`, `nf4(block=128,double=false)`, `residual(inner=nvfp4)`.

A key names a component and those of its options that differ from their defaults. One string is the
component's key everywhere: on the command line, in profiles, plans, reports and tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import InputError


def parse(text: str) -> tuple[str, dict[str, str]]:
    """Split a key into its name and its options, still as text.

    Raises:
        InputError: unbalanced parentheses, an option without `=`, or an option given twice.
    """
    text = text.strip()
    name, opening, rest = text.partition("(")
    name = name.strip()
    if not name or (opening and not rest.endswith(")")) or ")" in name:
        raise InputError(f"cannot read {text!r}: write a name, or name(option=value,…)")
    options: dict[str, str] = {}
    for item in _split(rest[:-1], text) if opening else []:
        key, equals, value = item.partition("=")
        key, value = key.strip().replace("-", "_"), value.strip()
        if not equals or not key or not value:
            raise InputError(f"cannot read {item!r} in {text!r}: options are written option=value")
        if key in options:
            raise InputError(f"option {key!r} stands twice in {text!r}")
        options[key] = value
    return name, options


def render(name: str, options: Mapping[str, Any]) -> str:
    """The key of a component with these options (those that differ from the defaults, in order)."""
    if not options:
        return name
    return f"{name}({','.join(f'{key}={_text(value)}' for key, value in options.items())})"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _split(text: str, whole: str) -> list[str]:
    """Split at the commas that stand outside nested parentheses."""
    items, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth < 0:
            raise InputError(f"unbalanced parentheses in {whole!r}")
        if char == "," and depth == 0:
            items.append(text[start:at])
            start = at + 1
    if depth:
        raise InputError(f"unbalanced parentheses in {whole!r}")
    items.append(text[start:])
    return [item for item in items if item.strip()]
