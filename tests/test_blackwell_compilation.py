"""Triton kernels of the data flow pact, compiled ahead of time for GPUs that need not be here.

Compute capabilities 10.0 and 12.0 have a matrix instruction for NVFP4: it must come out of the product that is written
for it, and be assembled. The elementwise kernels and the other products must compile for every capability that they are
offered on. Only the last test runs anything, and only on such a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import warnings

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

HERE = "toolkit_plugins.dataflows.pact"
BLACKWELL = {"10.0": 100, "12.0": 120}
INSTRUCTION = {
    100: r"tcgen05\.mma\S*\.kind::mxf4nvf4\.block_scale\.(block16|scale_vec::4X)",
    120: r"mma\.sync\S*\.kind::mxf4nvf4\.block_scale\.scale_vec::4X\S*\.e2m1\.e2m1\.f32\.ue4m3",
}
MACHINE = {100: "UTCOMMA", 120: "OMMA"}
"""What NVIDIA's disassembler calls it."""
MULTIPLY = {
    "left": "*u8", "left_scales": "*u8", "left_g": "*fp32", "right": "*u8", "right_scales": "*u8", "right_g": "*fp32",
    "bias": "*bf16", "y": "*bf16", "count": "i32", "width": "i32", "blocks": "i32",
}  # fmt: skip
ELEMENTWISE = {
    "kernels.quantize:quantize_kernel": (
        {
            "x_ptr": "*bf16", "noise_ptr": "*fp32", "codes_ptr": "*i32", "scales_ptr": "*u8", "g_ptr": "*fp32",
            "values_ptr": "*bf16", "count": "i32", "width": "i32", "stride": "i32", "noise_stride": "i32",
        },
        {"MODE": 0, "CODES": True, "VALUES": True, "ROWS": 1, "BLOCKS": 64},
    ),
    "kernels.unpack:unpack_kernel": (
        {"codes_ptr": "*i32", "scales_ptr": "*u8", "g_ptr": "*fp32", "values_ptr": "*bf16"}
        | {"count": "i32", "width": "i32"},
        {"ROWS": 1, "WORDS": 128},
    ),
    "products.unpack_kernel:unpack_whole": (
        {"codes": "*u8", "scales": "*u8", "out": "*bf16", "total": "i32"},
        {"BLOCKS": 256},
    ),
    "products.unpack_kernel:unpack_short": (
        {"codes": "*u8", "scales": "*u8", "out": "*fp16", "total": "i32", "columns": "i32", "blocks": "i32"},
        {"BLOCKS": 256},
    ),
}  # fmt: skip
OTHERS = {
    "products.recast_kernel:recast_rows": (
        {"codes": "*u8", "scales": "*u8", "g": "*fp32", "out": "*u8", "out_scales": "*fp32"}
        | {"blocks": "i32", "g_step": "i32"},
        {"CHUNK": 256},
    ),
    "products.recast_kernel:recast_columns": (
        {"codes": "*u8", "scales": "*u8", "g": "*fp32", "tops": "*u8", "out": "*u8", "out_scales": "*fp32"}
        | {"rows": "i32", "blocks": "i32", "out_width": "i32"},
        {"ROWS": 64, "BLOCKS": 8},
    ),
    "products.fused_kernel:multiply_packed": (
        {"x": "*bf16", "codes": "*u8", "scales": "*u8", "g": "*fp32", "bias": "*bf16", "y": "*bf16"}
        | {"count": "i32", "width": "i32", "depth": "i32", "blocks": "i32", "x_step": "i32"},
        {"BIAS": True, "DOWN": False, "M": 64, "N": 128, "K": 64},
    ),
}


@pytest.fixture(autouse=True)
def cold(tmp_path, monkeypatch):
    """Nothing that was compiled before is taken for compiled now."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(target: str, arguments: dict[str, str], constants: dict, arch: int, warps: int = 4):
    """What Triton makes of a kernel whose pointers and larger strides are multiples of 16, as in a model."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = target.partition(":")
    kernel = getattr(importlib.import_module(f"{HERE}.{module}"), name)
    signature = {each: arguments.get(each, "constexpr") for each in kernel.arg_names}
    assert {each for each, kind in signature.items() if kind == "constexpr"} == set(constants), target
    even = [i for i, (each, kind) in enumerate(signature.items()) if kind[0] == "*" or each in ("width", "blocks")]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in even})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings whose default will change
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})


@pytest.mark.parametrize("arch", BLACKWELL.values(), ids=list(BLACKWELL))
def test_the_product_becomes_the_block_scaled_fp4_instruction(arch, tmp_path):
    from toolkit_plugins.dataflows.pact.products.native_kernel import TILE
    from triton.backends.nvidia import compiler

    made = compiled("products.native_kernel:multiply_blocks", MULTIPLY, {"BIAS": True, **TILE}, arch, warps=8)
    ptx = made.asm["ptx"]
    assert re.search(rf"\.target sm_{arch}a", ptx)
    assert re.search(INSTRUCTION[arch], ptx)
    assert not re.search(r"mma\S*(\.|::)(bf16|f16|tf32)\b", ptx)  # nothing is multiplied in a wider format
    text, binary = tmp_path / "product.ptx", tmp_path / "product.cubin"
    text.write_text(ptx)
    tool = compiler.get_ptxas(arch).path
    subprocess.run([tool, f"--gpu-name=sm_{arch}a", str(text), "-o", str(binary)], check=True, capture_output=True)
    assert binary.read_bytes()[:4] == b"\x7fELF" and made.asm["cubin"][:4] == b"\x7fELF"
    disassembler = os.path.join(os.path.dirname(tool), "nvdisasm")
    if os.path.exists(disassembler):
        listing = subprocess.run([disassembler, str(binary)], capture_output=True, text=True)
        if listing.returncode == 0:  # an older one may not know the GPU
            assert MACHINE[arch] in listing.stdout


@pytest.mark.parametrize("arch", BLACKWELL.values(), ids=list(BLACKWELL))
@pytest.mark.parametrize("target", list(ELEMENTWISE))
def test_rounding_and_unpacking_compile(target, arch):
    arguments, constants = ELEMENTWISE[target]
    assert compiled(target, arguments, constants, arch).asm["cubin"][:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", [89, 90])
@pytest.mark.parametrize("target", list(OTHERS))
def test_e4m3_and_fused_products_compile_for_ada_and_hopper(target, arch):
    arguments, constants = OTHERS[target]
    assert compiled(target, arguments, constants, arch).asm["cubin"][:4] == b"\x7fELF"


@pytest.mark.parametrize("target", ["products.unpack_kernel:unpack_whole", "products.fused_kernel:multiply_packed"])
def test_exact_products_compile_for_ampere_which_knows_no_e4m3(target):
    arguments, constants = (ELEMENTWISE | OTHERS)[target]
    assert compiled(target, arguments, constants, 80).asm["cubin"][:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["library", "triton"])
@pytest.mark.parametrize("bias", [False, True])
def test_native_equals_reference_on_a_gpu_that_has_the_instruction(way, bias, monkeypatch):
    if torch.cuda.get_device_capability()[0] not in (10, 12):
        pytest.skip("the GPU has no FP4 matrix instruction")
    from toolkit_plugins.dataflows.pact.execution import Execution
    from toolkit_plugins.dataflows.pact.native import Native
    from toolkit_plugins.dataflows.pact.products import native
    from toolkit_plugins.dataflows.pact.settings import Settings
    from toolkit_plugins.dataflows.pact.weights import PactLinear
    from toolkit_plugins.quantizers.nvfp4 import NVFP4

    if way == "library" and not native.library():
        pytest.skip("this PyTorch has no scaled_mm")
    monkeypatch.setattr(native, "library", lambda: way == "library")
    for out, width, count in ((176, 208, 33), (512, 1024, 256), (40, 48, 5)):
        torch.manual_seed(out)
        weight = 0.02 * torch.randn(out, width, device="cuda")
        b = torch.randn(out, device="cuda").bfloat16() if bias else None
        layer = PactLinear(NVFP4().quantize(weight), b, torch.bfloat16, Settings(), weight).cuda()
        results = {}
        for run in (Native(), Execution()):
            layer.execution = run
            x = torch.randn(count, width, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
            x.requires_grad_()
            y = layer(x)
            y.backward(torch.ones_like(y) * torch.linspace(-1, 1, out, device="cuda").bfloat16())
            results[run.name] = (y.detach(), x.grad)
        assert results["native"][1].abs().max() > 0
        for found, expected in zip(results["native"], results["reference"], strict=True):
            largest = expected.float().abs().max().item()
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-10 * largest)
