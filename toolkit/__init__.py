"""Controlled ablations for quantized LoRA fine-tuning.

    import toolkit as tk

    profile = tk.profile("HuggingFaceTB/SmolLM2-135M-Instruct")
    protected = tk.select("top-error", profile, budget=tk.Budget(layers=0.20))
    controls = [tk.select("random-matched", profile, like=protected, seed=s) for s in range(10)]
    model = tk.build("HuggingFaceTB/SmolLM2-135M-Instruct", tk.Plan.protecting(protected, base="nf4"))

Names are imported when first used, so that `import toolkit` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Budget": "toolkit.records.budget",
    "Plan": "toolkit.records.plan",
    "Profile": "toolkit.records.profile",
    "Selection": "toolkit.records.selection",
    "Report": "toolkit.records.report",
    "Study": "toolkit.records.study",
    "FineTuning": "toolkit.records.finetuning",
    "Use": "toolkit.records.finetuning",
    "Initialization": "toolkit.records.initialization",
    "Levers": "toolkit.records.levers",
    "Seeds": "toolkit.records.levers",
    "Trained": "toolkit.records.trained",
    "Session": "toolkit.records.session",
    "Answered": "toolkit.interfaces",
    "Example": "toolkit.interfaces",
    "Hub": "toolkit.interfaces",
    "Scored": "toolkit.interfaces",
    "Task": "toolkit.interfaces",
    "Windows": "toolkit.interfaces",
    "Component": "toolkit.interfaces",
    "DataFlow": "toolkit.interfaces",
    "Pick": "toolkit.interfaces",
    "Quantizer": "toolkit.interfaces",
    "Given": "toolkit.interfaces",
    "Grid": "toolkit.interfaces",
    "Initializer": "toolkit.interfaces",
    "Moments": "toolkit.interfaces",
    "Start": "toolkit.interfaces",
    "RankingSelector": "toolkit.interfaces",
    "CalibratedSelector": "toolkit.interfaces",
    "Scaler": "toolkit.interfaces",
    "Selector": "toolkit.interfaces",
    "Law": "toolkit.interfaces",
    "InputError": "toolkit.errors",
    "RunError": "toolkit.errors",
    "ToolkitError": "toolkit.errors",
    "hookimpl": "toolkit.registry",
    "register": "toolkit.registry",
    "profile": "toolkit.weights.profiling",
    "select": "toolkit.selection.select",
    "draws": "toolkit.selection.select",
    "chains": "toolkit.selection.select",
    "calibrated": "toolkit.runs.calibration",
    "build": "toolkit.runs.building",
    "export": "toolkit.runs.exporting",
    "fuse": "toolkit.runs.exporting",
    "calibrate": "toolkit.runs.starting.calibrating",
    "initialize": "toolkit.runs.starting.single",
    "initialize_plan": "toolkit.runs.starting.computing",
    "run": "toolkit.runs.studies",
    "train": "toolkit.runs.finetuning.single",
    "Pacing": "toolkit.runs.training",
    "time": "toolkit.runs.timing",
    "lock": "toolkit.runs.studies",
    "certify": "toolkit.analysis.certificates.certifying",
    "verify": "toolkit.analysis.certificates.verification",
    "leaderboard": "toolkit.analysis.certificates.leaderboard",
    "compare": "toolkit.comparison",
    "Certificate": "toolkit.records.certificate",
    "table": "toolkit.analysis.printing.table",
    "figure": "toolkit.analysis.printing.figure",
    "judge": "toolkit.analysis.judge",
    "demo_model": "toolkit.weights.demo_model",
}
_KINDS = ("quantizer", "selector", "initializer", "scaler", "dataflow", "task")

__all__ = [*_HOME, *_KINDS]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _KINDS:
        from toolkit.registry import registry

        def make(key: str, **options: Any) -> Any:
            return registry.make(name, key, options)

        make.__name__ = make.__qualname__ = name
        make.__doc__ = f"A {name} from its key, such as `name(option=value)`, and options."
        globals()[name] = make
        return make
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from toolkit.analysis.certificates.certifying import certify as certify
    from toolkit.analysis.certificates.leaderboard import leaderboard as leaderboard
    from toolkit.analysis.certificates.verification import verify as verify
    from toolkit.analysis.judge import judge as judge
    from toolkit.analysis.printing.figure import figure as figure
    from toolkit.analysis.printing.table import table as table
    from toolkit.comparison import compare as compare
    from toolkit.errors import InputError as InputError
    from toolkit.errors import RunError as RunError
    from toolkit.errors import ToolkitError as ToolkitError
    from toolkit.interfaces import Answered as Answered
    from toolkit.interfaces import CalibratedSelector as CalibratedSelector
    from toolkit.interfaces import Component as Component
    from toolkit.interfaces import DataFlow as DataFlow
    from toolkit.interfaces import Example as Example
    from toolkit.interfaces import Given as Given
    from toolkit.interfaces import Grid as Grid
    from toolkit.interfaces import Hub as Hub
    from toolkit.interfaces import Initializer as Initializer
    from toolkit.interfaces import Law as Law
    from toolkit.interfaces import Moments as Moments
    from toolkit.interfaces import Pick as Pick
    from toolkit.interfaces import Quantizer as Quantizer
    from toolkit.interfaces import RankingSelector as RankingSelector
    from toolkit.interfaces import Scaler as Scaler
    from toolkit.interfaces import Scored as Scored
    from toolkit.interfaces import Selector as Selector
    from toolkit.interfaces import Start as Start
    from toolkit.interfaces import Task as Task
    from toolkit.interfaces import Windows as Windows
    from toolkit.records.budget import Budget as Budget
    from toolkit.records.certificate import Certificate as Certificate
    from toolkit.records.finetuning import FineTuning as FineTuning
    from toolkit.records.finetuning import Use as Use
    from toolkit.records.initialization import Initialization as Initialization
    from toolkit.records.levers import Levers as Levers
    from toolkit.records.levers import Seeds as Seeds
    from toolkit.records.plan import Plan as Plan
    from toolkit.records.profile import Profile as Profile
    from toolkit.records.report import Report as Report
    from toolkit.records.selection import Selection as Selection
    from toolkit.records.session import Session as Session
    from toolkit.records.study import Study as Study
    from toolkit.records.trained import Trained as Trained
    from toolkit.registry import hookimpl as hookimpl
    from toolkit.registry import register as register
    from toolkit.runs.building import build as build
    from toolkit.runs.calibration import calibrated as calibrated
    from toolkit.runs.exporting import export as export
    from toolkit.runs.exporting import fuse as fuse
    from toolkit.runs.finetuning.single import train as train
    from toolkit.runs.starting.calibrating import calibrate as calibrate
    from toolkit.runs.starting.computing import initialize_plan as initialize_plan
    from toolkit.runs.starting.single import initialize as initialize
    from toolkit.runs.studies import lock as lock
    from toolkit.runs.studies import run as run
    from toolkit.runs.timing import time as time
    from toolkit.runs.training import Pacing as Pacing
    from toolkit.selection.select import chains as chains
    from toolkit.selection.select import draws as draws
    from toolkit.selection.select import select as select
    from toolkit.weights.demo_model import demo_model as demo_model
    from toolkit.weights.profiling import profile as profile
