"""What several benchmarks need: the tests' builder of realistic studies, and the name of this machine's CPU."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from pathlib import Path
from types import ModuleType


def builders() -> ModuleType:
    """The module that writes profiles and studies for the tests."""
    path = Path(__file__).parent.parent / "tests" / "analysis" / "builders.py"
    spec = importlib.util.spec_from_file_location("builders", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cpu() -> str:
    """The CPU's name and how many this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} CPUs"
