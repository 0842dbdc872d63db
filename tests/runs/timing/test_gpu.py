"""Timing on a CUDA device: nothing waits for it while the clock runs, and who uses it is known."""

import subprocess
import sys

import pytest
import torch

from toolkit.errors import RunError
from toolkit.records.levers import Levers, Seeds
from toolkit.records.plan import Plan
from toolkit.runs.building import build
from toolkit.runs.timing import machine, memory
from toolkit.runs.timing.cycling import driver
from toolkit.runs.timing.profiling import GAP, shares

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def device():
    return torch.device("cuda", 0)


@pytest.mark.parametrize("base", ["none", "nf4"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_step_of_ours_waits_for_the_device_while_the_clock_runs(
    tiny, examples, tmp_path, device, waits, packing, base, checkpointing
):
    """transformers waits once a forward to see whether rows are packed, in whatever loop; nothing else may."""
    model = build(tiny(torch.bfloat16).to(device), Plan.protecting(None, base=base, rank=4), dtype="bfloat16")
    levers = Levers(batch=2, accumulation=2, checkpointing=checkpointing)
    found = driver(model, examples((5, 8), (9, 4), (12, 12), (6, 7)), levers, Seeds.all(0), tmp_path, 0)
    seen = waits()

    def begin():
        seen.begin()
        torch.cuda.set_sync_debug_mode("warn")

    def end():
        torch.cuda.set_sync_debug_mode("default")
        seen.end()

    try:
        ran = found.run(cycles=3, begin=begin, end=end)
    finally:
        end()
    found.close()
    known, elsewhere = seen.split(*packing)
    assert ran.cycles == 3 and ran.seconds > 0
    assert not elsewhere and known <= 3 * 4  # four micro-batches a cycle


def test_the_debug_mode_tells_where_python_waited(device, waits):
    """What the test above reasons from."""
    seen, one = waits(), torch.ones(1, device=device)

    def look():
        return bool(one > 0)

    seen.begin()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        look(), look()
        one.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        seen.end()
    known, elsewhere = seen.split(look)
    assert known == 2 and sum(elsewhere.values()) == 1 and next(iter(elsewhere)).startswith(__file__)


def test_the_memory_pass_counts_bytes(device):
    found = memory.measure(
        device,
        lambda: torch.ones(2**20, device=device),
        lambda built: built.double(),
    )
    assert found.peak_allocated - found.base_allocated == 2**23
    assert found.base_allocated <= found.base_reserved <= found.peak_reserved


def test_the_profile_tells_kernels_from_waiting(tiny, examples, tmp_path, device):
    model = build(tiny(torch.bfloat16).to(device), Plan.protecting(None, base="nf4", rank=4), dtype="bfloat16")
    found = driver(model, examples((5, 8), (9, 4)), Levers(batch=2, accumulation=2), Seeds.all(0), tmp_path, 0)
    ran = found.run(cycles=5)
    told = shares(device, found, ran.seconds / ran.cycles)
    found.close()
    assert sum(told.values()) == pytest.approx(1, abs=0.01)
    assert told[GAP] > 0.3 and told["matrix products"] > 0 and told["optimizer"] > 0  # so small a model waits


def test_another_compute_process_is_refused(device):
    pytest.importorskip("pynvml")
    seen = machine.watch(device)
    if not isinstance(seen, machine.GpuWatch) or not seen.processes():
        pytest.skip("NVML shows no processes here")
    code = "import torch, time; torch.zeros(1, device='cuda'); print('ready', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(RunError, match="is in use by"):
            machine.watch(device).refuse()
    finally:
        other.kill()
        other.wait()


def test_a_sample_knows_the_clock(device):
    pytest.importorskip("pynvml")
    seen = machine.watch(device)
    if not isinstance(seen, machine.GpuWatch):
        pytest.skip("NVML cannot be read here")
    seen.begin()
    found = seen.end()
    record = seen.machine()
    assert record.identity.startswith("GPU-") and record.driver
    assert 0 < found.clock <= record.clocks["sm"]
