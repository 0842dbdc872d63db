"""Keep every second layer: a whole plug-in for qlora-toolkit."""

from toolkit import RankingSelector, hookimpl


class Alternating(RankingSelector):
    """Keep the even layers first, then the odd ones, each in model order."""

    name = "alternating"

    def score(self, profile):
        return [1 - at % 2 for at in range(len(profile))]


@hookimpl
def toolkit_components():
    return [Alternating]
