"""Studies of starts: arms that begin otherwise, merged and scored before any training; a runner that resumes."""

from toolkit.runs.initialization.runner import run

__all__ = ["run"]
