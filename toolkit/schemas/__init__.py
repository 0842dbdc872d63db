"""JSON Schemas of the toolkit's files, generated from the records: `<kind>.schema.json` in this folder.

`python -m toolkit.schemas` writes them anew after a record has changed. A schema says no less than the record
about names, types and ranges; what only code can check (that layers exist, that two keys agree) stays in the
record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.errors import InputError, closest
from toolkit.records.certificate import Certificate
from toolkit.records.exported import Exported
from toolkit.records.finetuning import FineTuning
from toolkit.records.initialization import Initialization
from toolkit.records.io import File
from toolkit.records.lock import Lock
from toolkit.records.plan import Plan
from toolkit.records.profile import Profile
from toolkit.records.report import Report
from toolkit.records.selection import Selection
from toolkit.records.session import Session
from toolkit.records.start import StartFile
from toolkit.records.started import Started
from toolkit.records.study import Study
from toolkit.records.trained import Trained

KINDS: dict[str, type[File]] = {
    "profile": Profile,
    "selection": Selection,
    "plan": Plan,
    "report": Report,
    "study": Study,
    "lock": Lock,
    "certificate": Certificate,
    "fine-tuning": FineTuning,
    "trained": Trained,
    "timing-session": Session,
    "start": StartFile,
    "initialization": Initialization,
    "started": Started,
    "export": Exported,
}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(kind: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one kind of file.

    Every file states its schema version, except a study file, which is written by hand.

    Raises:
        InputError: there is no such kind.
    """
    if kind not in KINDS:
        raise InputError(f"no kind of file is called {kind!r}; {closest(kind, KINDS)}")
    record = KINDS[kind]
    data = record.model_json_schema(by_alias=True)
    data["properties"]["schema"] = {"const": record.version, "description": "version of this file format"}
    if kind not in ("study", "fine-tuning", "initialization"):
        data["required"] = ["schema", *data.get("required", [])]
    return {"$schema": DIALECT, **data}


def file_of(kind: str) -> Path:
    """Where the published schema of a kind lies."""
    return Path(__file__).with_name(f"{kind}.schema.json")
