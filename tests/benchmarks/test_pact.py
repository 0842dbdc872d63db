"""The small form of the data flow's benchmark runs by its reference, and says what a device refuses."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_small_form_steps_every_method_that_runs_here(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    path = tmp_path / "pact.json"
    main = runpy.run_path(str(ROOT / "benchmarks" / "pact.py"))["main"]
    main(
        [
            "-o",
            str(path),
            "--small",
            "--device",
            "cpu",
            "--rounds",
            "2",
            "--seconds",
            "0.01",
            "--parts",
            "step",
            "batch",
        ]
    )
    found = json.loads(path.read_text())
    stepped = found["step"]["methods"]
    assert {"bf16 LoRA, CUDA graphs", "QLoRA, CUDA graphs", "PACT auto, CUDA graphs"} <= set(stepped)
    assert all(len(one["ms a step, rounds"]) == 2 and one["tokens/s"] > 0 for one in stepped.values())
    assert all("cannot run here" in reason and "PACT" in name for name, reason in found["step"]["failed"].items())
    assert found["largest batch"]["QLoRA, by hand"]["batch"] == 2


def test_kernels_are_told_apart_by_what_they_do(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    category = runpy.run_path(str(ROOT / "benchmarks" / "pact.py"))["category"]
    assert category("quantize_kernel") == category("norm_gradient_kernel") == "quantization and fused kernels"
    assert category("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT") == "bf16 products"
    assert category("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x256x64") == "fp8 products"
    assert category("pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel") == "attention"
    assert category("void at::native::vectorized_elementwise_kernel<4>") == "elementwise and other"
