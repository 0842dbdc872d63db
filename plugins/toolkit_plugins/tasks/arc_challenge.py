"""The hard set of ARC."""

from __future__ import annotations

from toolkit.interfaces import Hub
from toolkit_plugins.tasks.arc_easy import ARCEasy


class ARCChallenge(ARCEasy):
    """School science, the hard set: the likeliest of three to five answers."""

    name = "arc-challenge"
    hub = Hub("allenai/ai2_arc", "ARC-Challenge")
