"""Studies of starts written by hand: reports whose numbers the tests know."""

from __future__ import annotations

from pathlib import Path

from toolkit.records import rows
from toolkit.records.initialization import Initialization
from toolkit.records.profile import Reference
from toolkit.records.report import Provenance, Score, Text
from toolkit.records.started import COLUMNS, LayerOutcome, Started

WINDOWS, WINDOW = 8, 11
"""8 windows of 10 scored tokens."""


def make_study(**changes) -> Initialization:
    data = {
        "kind": "initialization",
        "name": "starts",
        "question": "Does a fitted start lose less?",
        "texts": {"letters": "letters.txt"},
        "window": WINDOW,
        "scalings": [1.0, 4.0],
        "arms": [{"name": "plain"}, {"name": "fitted", "initializer": "loftq"}],
        "analysis": {"baseline": "plain", "resamples": 400, "block": 1},
    }
    return Initialization.model_validate(data | changes)


def score(nll: list[float], kl: list[float]) -> Score:
    tokens = len(nll) * (WINDOW - 1)
    return Score(tokens=tokens, loss=sum(nll) / tokens, perplexity=1.0, kl=sum(kl) / tokens, agreement=0.5)


def layer(zero: float, residual: float, parameters: int = 100, role: str = "q_proj", **more) -> LayerOutcome:
    return LayerOutcome(role=role, parameters=parameters, zero=zero, residual=residual, **more)


def write(
    folder: Path,
    study: Initialization,
    run: str,
    arm: str,
    nll: dict[str, list[float]],
    layers: dict[str, LayerOutcome] | None = None,
    **changes,
) -> Started:
    """One report with its rows: rounding of inputs → nll of each window of the one text."""
    where = folder / run
    lines = [[key, "letters", values, [v / 100 for v in values], [5] * len(values)] for key, values in nll.items()]
    text = Text(
        source="letters.txt",
        sha256="ab" * 32,
        characters=900,
        tokens=WINDOWS * WINDOW,
        windows=WINDOWS,
        window=WINDOW,
        stride=WINDOW,
        bos=False,
    )
    provenance = Provenance(
        toolkit="0.1.0",
        python="3.11",
        packages={"torch": "2.13"},
        platform="Linux",
        device="processor",
        threads=1,
        compute_dtype="float32",
        started="2026-01-01T00:00:00+00:00",
        seconds=1.0,
        peak_memory={"base_resident": 1, "peak_resident": 2},
    )
    report = Started(
        **{
            "study": study.name,
            "form": study.form,
            "run": run,
            "role": "reference" if layers is None else "arm",
            "arm": arm,
            "model": "small",
            "fingerprint": "f0" * 32,
            "reference": Reference(dtype="bfloat16", note="weights as they were released"),
            "settings": "5e" * 32,
            "layers": layers or {},
            "scores": {"letters": {key: score(v, [x / 100 for x in v]) for key, v in nll.items()}},
            "texts": {"letters": text},
            "rows": rows.write(where, COLUMNS, lines),
            "provenance": provenance,
        }
        | changes
    )
    report.save(where / "report.json")
    study.save(folder / "study.json")
    return report
