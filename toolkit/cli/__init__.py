"""The shell: one thin function a verb, each calling what Python calls.

Errors go to stderr in one or a few lines: exit code 2 for bad input, 1 for a failed run; `--debug`, anywhere
on the line, shows the traceback. Verbs import what they need when they run.
"""

from __future__ import annotations

import os
import sys

from toolkit.cli import building, calibrating, exporting, judging, running, starting, timing  # noqa: F401 — verbs
from toolkit.cli.output import app
from toolkit.errors import ToolkitError

__all__ = ["app", "main"]


INTERRUPTED = 130


def _interrupted() -> int:
    print("interrupted; what was finished or saved is kept, the same command goes on from there", file=sys.stderr)
    return INTERRUPTED


def main(arguments: list[str] | None = None) -> int:
    """The shell's entry point; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [a for a in given if a != "--debug"]
    try:
        try:
            app(given, prog_name="toolkit")
        finally:
            sys.stdout.flush()  # so that a reader that went away is noticed here
    except ToolkitError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as end:  # typer's own: help, usage errors
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # its mark of a reader that went away, as `head` does
            return 0
        if end.code == INTERRUPTED:  # typer's word for a KeyboardInterrupt, of which it says nothing
            return _interrupted()
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:  # noticed only in the flush above
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to write goes nowhere
        return 0
    except Exception as error:  # not foreseen: one line all the same, and the place for those who ask
        if debug:
            raise
        reason = " ".join(str(error).split())[:300]
        print(f"error: unexpected {type(error).__name__}: {reason} (--debug shows where)", file=sys.stderr)
        return 1
    return 0
