"""Ranking studies: selections and their random controls, measured by the losses of a model that is not trained."""

from toolkit.runs.ranking.runner import run

__all__ = ["run"]
