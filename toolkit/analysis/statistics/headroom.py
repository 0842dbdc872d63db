"""How much of what is possible an arm reaches, (chance − arm)/(chance − oracle), and whether there is any of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from toolkit.analysis.reading.evidence import Room
from toolkit.analysis.statistics import bootstrap
from toolkit.analysis.statistics.bootstrap import Interval
from toolkit.analysis.statistics.inference import Side, paired, rank
from toolkit.analysis.statistics.sentences import percent
from toolkit.errors import InputError
from toolkit.records.study import Headroom

CANNOT_RANK = "this study cannot rank selectors"


def headroom(room: Room, level: float, settings: Headroom, what: str = "the arm", seed: int = 0) -> dict[str, Any]:
    """H = (chance − arm)/(chance − oracle) on the scored windows: 0 at chance, 1 at the oracle.

    chance is the mean draw, window by window; every loss is Σ nats/Σ tokens, and is better where lower, whatever
    side the study's claim is on. The interval is `bootstrap.ratio`'s, over windows. The oracle is separated from
    chance where its randomization p among the draws is at most the level and the interval over windows of
    chance − oracle lies above 0; the anti-oracle, where both hold on the other side.

    Returns:
        `headroom`, `low`, `high` (None where the windows do not bound them), `losses` of `chance`,
        `arm`, `oracle`, `anti` (nats a token), `oracle_test` and `anti_test` (p, smallest_p, the gain with its
        interval, separated), `separated` (the oracle's), `reason`, `sd_over_sets` (of the draws' losses),
        `se_over_text` (of arm − chance, over windows), `windows`, `block`, `draws`, and `sentence`.

    Raises:
        InputError: windows that do not fit each other, or a number that is not finite.
    """
    _check(room, what)
    t = np.asarray(room.tokens, dtype=np.float64)
    chance, arm, oracle, anti = (
        np.asarray(x, dtype=np.float64) for x in (room.chance, room.arm, room.oracle, room.anti)
    )
    draws = np.asarray(room.draws, dtype=np.float64)
    block = min(settings.block, len(t))
    how: dict[str, Any] = {"block": block, "resamples": settings.resamples, "seed": seed}
    share = bootstrap.ratio(chance - arm, chance - oracle, what=f"headroom of {what}", **how)
    oracle_test = _test(chance - oracle, oracle, t, draws, "less", level, how, f"oracle of {what}")
    anti_test = _test(anti - chance, anti, t, draws, "greater", level, how, f"anti-oracle of {what}")
    found = {
        "headroom": share.value,
        "low": share.low,
        "high": share.high,
        "losses": {
            name: float(x.sum() / t.sum())
            for name, x in (("chance", chance), ("arm", arm), ("oracle", oracle), ("anti", anti))
        },
        "oracle_test": oracle_test,
        "anti_test": anti_test,
        "separated": oracle_test["separated"],
        "reason": _reason(oracle_test, level),
        "sd_over_sets": float(draws.std(ddof=1)) if len(draws) > 1 else None,
        "se_over_text": paired(arm, chance, t, what).standard_error,
        "windows": len(t),
        "block": block,
        "draws": len(draws),
    }
    return found | {"sentence": _sentence(found)}


def _test(
    gain: np.ndarray,
    reference: np.ndarray,
    tokens: np.ndarray,
    draws: np.ndarray,
    side: Side,
    level: float,
    how: dict[str, Any],
    what: str,
) -> dict[str, Any]:
    place = rank(float(reference.sum() / tokens.sum()), draws, side, what)
    over_text: Interval = bootstrap.mean(gain, tokens, what=what, **how)
    above = over_text.low is not None and over_text.low > 0
    return {
        "p": place.p,
        "smallest_p": place.smallest_p,
        "gain": asdict(over_text),
        "separated": place.p <= level and above,
    }


def _reason(test: dict[str, Any], level: float) -> str | None:
    """Why the oracle is not separated from chance; None where it is."""
    if test["separated"]:
        return None
    if test["smallest_p"] > level:
        return f"its draws give no p below {test['smallest_p']:.3g}"
    if test["p"] > level:
        return f"the oracle's p among the draws is {test['p']:.3g}"
    if test["gain"]["low"] is None:
        return f"{test['gain']['windows']} windows are too few for an interval"
    return "over windows, the interval of the oracle's gain includes 0"


def _sentence(found: dict[str, Any]) -> str:
    if not found["separated"]:
        return f"{CANNOT_RANK}: the oracle is not separated from chance ({found['reason']})"
    share = f"it goes {percent(found['headroom'])} of the way from chance to the oracle"
    if found["low"] is None:
        return f"{share} (the {found['windows']} windows do not bound it)"
    return f"{share} (95% interval over windows {percent(found['low'])} to {percent(found['high'])})"


def _check(room: Room, what: str) -> None:
    sizes = {name: len(getattr(room, name)) for name in ("tokens", "chance", "arm", "oracle", "anti")}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {n}" for name, n in sizes.items())
        raise InputError(f"headroom of {what}: the windows do not fit each other: {listed}")
    for name in (*sizes, "draws"):
        row = np.asarray(getattr(room, name), dtype=np.float64)
        bad = np.flatnonzero(~np.isfinite(row))
        if not len(row) or len(bad):
            found = f"number {int(bad[0])} is {row[bad[0]]}" if len(bad) else "there is none"
            raise InputError(f"headroom of {what}: {name}: {found}; only finite sums can be compared")
