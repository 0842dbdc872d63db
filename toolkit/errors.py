"""What can go wrong, said in one or a few lines: the thing, what was found, what is allowed.

`InputError` is the user's to mend (shell exit code 2); `RunError` is a run that failed (exit code 1).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ToolkitError(Exception):
    """Base of every error raised on purpose; its text is meant for the user."""

    exit_code = 1


class InputError(ToolkitError):
    """Bad input: a file, a name, an option or a budget that cannot be used as given."""

    exit_code = 2


class RunError(ToolkitError):
    """A run that could not be finished although its input was right (a full disk, an audit that differs)."""


def closest(name: str, allowed: Iterable[str], count: int = 3) -> str:
    """The end of an error message: the closest right names, or all of them where none is close.

    Args:
        name: what was given.
        allowed: every right name.
        count: how many close matches to offer at most.
    """
    names = sorted(set(map(str, allowed)))
    if not names:
        return "there are none"
    near = difflib.get_close_matches(name, names, n=count, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(repr(n) for n in near) + "?"
    shown = ", ".join(names[:20]) + (f", … ({len(names)} in all)" if len(names) > 20 else "")
    return f"allowed: {shown}"
