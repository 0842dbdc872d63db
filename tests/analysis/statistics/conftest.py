"""The simulation of the committed coverage figures, for the tests of what it shows."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "seeds.py"


@pytest.fixture(scope="session")
def simulation():
    """The module benchmarks/seeds.py."""
    spec = importlib.util.spec_from_file_location("benchmark_seeds", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
