"""The elementwise Triton kernels, compiled ahead of time for GPUs that need not be here, as they are launched there."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import warnings

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

ROWS = {"codes_ptr": "*i32", "scales_ptr": "*u8", "g_ptr": "*fp32"}
PAIR = {f"{each}_{part}": kind for each in ("gate", "up") for part, kind in (("scales", "*u8"), ("g", "*fp32"))}
SIZES = {"count": "i32", "width": "i32"} | {
    name: "i32" for name in ("stride", "noise_stride", "y_stride", "gate_stride", "up_stride")
}
KERNELS = {
    "codes": ("quantize:quantize_kernel", ROWS | {"x_ptr": "*bf16"}, {"MODE": 0, "CODES": True, "VALUES": False}, 2, 0),
    "values": (
        "quantize:quantize_kernel",
        {"x_ptr": "*bf16", "values_ptr": "*bf16"},
        {"MODE": 0, "CODES": False, "VALUES": True},
        2,
        2,
    ),
    "float32 with given noise": (
        "quantize:quantize_kernel",
        ROWS | {"x_ptr": "*fp32", "noise_ptr": "*fp32"},
        {"MODE": 1, "CODES": True, "VALUES": False},
        8,
        0,
    ),
    "drawn noise": (
        "quantize:quantize_kernel",
        {"x_ptr": "*fp16", "noise_ptr": "*i64", "values_ptr": "*fp16"},
        {"MODE": 2, "CODES": False, "VALUES": True},
        2,
        2,
    ),
    "unpack": ("unpack:unpack_kernel", ROWS | {"values_ptr": "*bf16"}, {}, 0, 2),
    "norm": (
        "norm:norm_kernel",
        ROWS | {"x_ptr": "*bf16", "weight_ptr": "*bf16", "rstd_ptr": "*fp32", "y_ptr": "*bf16", "eps": "fp32"},
        {"ROUNDED": True},
        4,
        2,
    ),
    "norm's gradient from rows": (
        "norm:norm_gradient_kernel",
        ROWS | {"gradient_ptr": "*bf16", "weight_ptr": "*bf16", "rstd_ptr": "*fp32", "dx_ptr": "*bf16"},
        {"PACKED": True},
        4,
        2,
    ),
    "norm's gradient from 16 bit": (
        "norm:norm_gradient_kernel",
        {"gradient_ptr": "*bf16", "y_ptr": "*bf16", "weight_ptr": "*bf16", "rstd_ptr": "*fp32", "dx_ptr": "*bf16"},
        {"PACKED": False},
        6,
        2,
    ),
    "gated": (
        "gated:gated_kernel",
        ROWS | PAIR | {"gate_codes": "*i32", "up_codes": "*i32"}
        | {"gate_ptr": "*bf16", "up_ptr": "*bf16", "values_ptr": "*bf16"},
        {"KEEP": True, "ROUND_FIRST": False},
        4,
        2,
    ),
    "gated's gradient": (
        "gated:gated_gradient_kernel",
        PAIR | {"gate_ptr": "*i32", "up_ptr": "*i32", "gradient_ptr": "*bf16"}
        | {"dgate_ptr": "*bf16", "dup_ptr": "*bf16"},
        {"PACKED": True},
        2,
        4,
    ),
}  # fmt: skip
"""Name → kernel, its pointers, its switches, and how many loads and stores of 16 bytes a thread has for 16 values.

Codes and scales are 9 bytes for 16 values, and are not counted.
"""


def source(name: str):
    from triton.compiler import ASTSource

    target, given, switches, _, _ = KERNELS[name]
    module, _, function = target.partition(":")
    kernel = getattr(importlib.import_module(f"toolkit_plugins.dataflows.pact.kernels.{module}"), function)
    tile = {"ROWS": 1, "BLOCKS": 128, "WORDS": 256}
    known = SIZES | given | {n: v for n, v in (tile | switches).items() if n in kernel.arg_names}
    values = {n: known.get(n) for n in kernel.arg_names}
    signature = {n: v if isinstance(v, str) else "constexpr" for n, v in values.items()}
    constants = {n: v for n, v in values.items() if not isinstance(v, str)}
    whole = [i for i, n in enumerate(kernel.arg_names) if n != "count" and signature[n].startswith(("*", "i32"))]
    return ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in whole})


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_to_wide_loads_and_stores(name, capability, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = triton.compile(source(name), target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert made.asm["cubin"]
    ptx = made.asm["ptx"]
    loads = len(re.findall(r"ld\.global\.v4\.b32|ld\.global\.v2\.b64", ptx))
    stores = len(re.findall(r"st\.global\.v4\.b32|st\.global\.v2\.b64", ptx))
    wanted = KERNELS[name][3:]
    assert loads >= wanted[0], f"{loads} loads of 16 bytes of {wanted[0]}"
    assert stores >= wanted[1], f"{stores} stores of 16 bytes of {wanted[1]}"
    assert "div.rn" not in ptx  # a quotient that is right without it, at a third of the instructions
