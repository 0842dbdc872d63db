"""Who else uses the machine: a device in use is refused by name, and our own process is not taken for another's."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from toolkit.errors import RunError
from toolkit.records.session import Machine
from toolkit.runs.timing import cpu_watch, machine
from toolkit.runs.timing.cpu_watch import CpuWatch
from toolkit.runs.timing.machine import BlindWatch, GpuWatch

CUDA = torch.device("cuda", 0)


class Nvml:
    """A stand-in for `pynvml` on a machine without a GPU: a device whose state the test sets."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, pids=(), busy=0, reasons=0):
        self.pids, self.busy, self.reasons, self.uses = list(pids), busy, reasons, []

    def nvmlDeviceGetName(self, handle):
        return "A GPU"

    def nvmlDeviceGetUUID(self, handle):
        return b"GPU-1234"

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self.busy)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self.reasons

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return 1755

    def nvmlDeviceGetTemperature(self, handle, kind):
        raise self.NVMLError("not supported")

    def nvmlDeviceGetPowerUsage(self, handle):
        return 512_300

    def nvmlDeviceGetProcessUtilization(self, handle, since):
        return self.uses


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(machine, "PERIOD", 0.01)


def watch(nvml, used=False):
    return GpuWatch(CUDA, nvml, handle=0, ours_already=used)


def test_a_device_that_another_process_uses_is_refused_by_its_number():
    with pytest.raises(RunError, match=r"2 other compute processes: 41( \(.*\))?, 4242424"):
        watch(Nvml([4242424, 41])).refuse()


def test_beside_others_does_not_help_on_a_gpu():
    with pytest.raises(RunError, match="in use by 1 other compute process"):
        watch(Nvml([41])).refuse(beside_others=True)


def test_a_busy_device_without_a_visible_process_is_refused():
    with pytest.raises(RunError, match="37% busy before anything of ours runs"):
        watch(Nvml(busy=37)).refuse()


def test_what_appears_with_our_first_use_is_ours_also_under_another_number():
    nvml = Nvml()
    found = watch(nvml)
    found.refuse()
    found.claim(lambda: nvml.pids.append(99))  # a number that this container does not have
    assert found.others() == {} and not found.labels
    nvml.pids.append(100)
    assert list(found.others()) == [100]


def test_a_container_that_shows_no_processes_is_labelled():
    found = watch(Nvml())
    found.claim(lambda: None)
    assert "others were not seen" in found.labels[0]


def test_this_process_is_known_by_its_number():
    watch(Nvml([os.getpid()]), used=True).refuse()


def test_a_second_session_takes_the_only_process_for_itself_and_says_so():
    found = watch(Nvml([99]), used=True)
    found.refuse()
    assert "taken for the one compute process" in found.labels[0]
    with pytest.raises(RunError, match="in use by 2"):
        watch(Nvml([99, 100]), used=True).refuse()


def test_a_sample_knows_reasons_of_throttling_and_the_load_of_others():
    nvml = Nvml(reasons=0x4 | 0x20 | 0x1)
    found = watch(nvml)
    found.claim(lambda: nvml.pids.append(99))
    found.begin()
    nvml.pids.append(77)
    time.sleep(0.1)
    nvml.pids.remove(77)  # was there during the sample alone
    nvml.reasons = 0
    nvml.uses = [SimpleNamespace(pid=99, smUtil=90), SimpleNamespace(pid=78, smUtil=12)]
    seen = found.end()
    assert seen.throttled == ["software power cap", "software thermal slowdown"]  # being idle is none
    assert seen.load == ["process 77", "process 78 (12%)"]
    assert (seen.clock, seen.temperature, seen.power) == (1755.0, None, 512.3)
    found.begin()
    assert found.end().throttled == []


def test_the_gpus_record():
    found = watch(Nvml()).machine()
    assert (found.device, found.identity, found.driver) == ("A GPU", "GPU-1234", "580.1")
    assert found.clocks == {"sm": 1980.0, "memory": 3201.0}


def test_without_nvml_the_labels_say_what_was_not_seen():
    found = BlindWatch(CUDA, "NVMLError_LibraryNotFound: no driver")
    assert "clocks, throttling and other processes were not seen" in found.labels[0]
    assert found.end().load == []


def test_a_job_is_part_of_the_allocation(monkeypatch):
    for name in machine.JOBS:
        monkeypatch.delenv(name, raising=False)
    boot = machine.allocation()
    assert boot.startswith("boot ") and machine.allocation() == boot
    monkeypatch.setenv("SLURM_JOB_ID", "1234")
    assert machine.allocation() == f"{boot}, job 1234"


def test_the_cpus_record():
    found = CpuWatch().machine()
    assert isinstance(found, Machine) and found.device and found.identity is None


@pytest.fixture
def spinners():
    """Processes that keep every CPU busy."""
    code = "import time\nend = time.time() + 60\nwhile time.time() < end: pass"
    made = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(psutil.cpu_count())]
    time.sleep(0.3)
    yield made
    for process in made:
        process.kill()
        process.wait()


def test_busy_cpus_are_refused_and_with_beside_others_labelled(spinners):
    with pytest.raises(RunError, match=r"other processes keep .* CPUs busy \(.*--beside-others"):
        CpuWatch(window=0.5).refuse()
    found = CpuWatch(window=0.5)
    found.refuse(beside_others=True)
    assert found.labels[0].startswith("timed beside others: other processes keep")
    found.begin()
    time.sleep(0.3)
    (load,) = found.end().load
    assert float(load.removeprefix("others on ").removesuffix(" CPUs")) >= 0.5


def test_our_own_work_is_no_load_of_others(monkeypatch):
    """Counts as the system gives them: 2 s passed, 3 CPU seconds were used, 1.9 of them ours."""
    counts = iter([(10.0, 100.0, 50.0), (12.0, 103.0, 51.9)])
    monkeypatch.setattr(cpu_watch, "_cpu_counts", lambda: next(counts))
    found = CpuWatch()
    found.begin()
    assert found._others() == pytest.approx(0.55)
