"""Timing sessions: every arm of a study on one list of batches, interleaved, and the machine beside them.

`time(study)` makes one session, in the process that it is called in; `toolkit time` makes each in a new one.
"""

from toolkit.runs.timing.starting import time

__all__ = ["time"]
