"""The published schemas: they are the records', real files fit them, and broken ones do not."""

import copy
import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError

import toolkit.schemas
from toolkit.errors import InputError
from toolkit.records.budget import Budget
from toolkit.records.plan import Plan
from toolkit.schemas import KINDS, file_of, schema
from toolkit.selection.select import select

ROOT = Path(__file__).parent.parent
ANYTHING = {"options", "small"}  # keys whose values are free


def _documents():
    """Real files of every kind, as plain data."""
    spec = importlib.util.spec_from_file_location("schema_builders", ROOT / "tests" / "analysis" / "builders.py")
    builders = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builders)
    made = builders.Builder(ROOT, builders.make_study(draws=3, budgets=("layers=0.05",)))
    profile, budget = builders.make_profile(blocks=2), Budget(layers="0.2")
    top = select("top-error", profile, budget)
    drawn = select("random-matched", profile, like=top, seed=3)
    adapted = Plan.protecting(top, "nf4", adapt=drawn, rank=8, alpha=16, scaler="rslora")
    records = {
        "profile": [profile],
        "selection": [top, drawn, select("random-count", profile, Budget(parameters=0.3))],
        "plan": [Plan.protecting(top, "nf4(block=128)", compute_dtype="bfloat16"), adapted],
        "report": [
            made.reference("base"),
            made.arm("top-error", made.study.budgets[0]),
            made.control("matched", "top-error", made.study.budgets[0], 3),
        ],
        "study": [made.study],
    }
    return {kind: [json.loads(json.dumps(r.to_json())) for r in items] for kind, items in records.items()}


DOCUMENTS = _documents()


@pytest.mark.parametrize("kind", KINDS)
def test_the_committed_schema_is_the_records(kind):
    committed = json.loads(file_of(kind).read_text())
    assert committed == schema(kind), "run `python -m toolkit.schemas`"
    Draft202012Validator.check_schema(committed)


def test_the_folder_holds_these_schemas_and_no_other():
    assert {p.name for p in file_of("plan").parent.glob("*.json")} == {f"{kind}.schema.json" for kind in KINDS}
    with pytest.raises(InputError, match="did you mean 'profile'"):
        schema("profil")


@pytest.mark.parametrize("kind", KINDS)
def test_real_files_fit(kind):
    for document in DOCUMENTS[kind]:
        Draft202012Validator(schema(kind)).validate(document)
        KINDS[kind].model_validate(document)


def _committed(pattern):
    return sorted((ROOT / "studies").glob(pattern))


def test_the_studies_in_the_tree_fit():
    found = _committed("*/study.yaml")
    assert found
    for path in found:
        Draft202012Validator(schema("study")).validate(yaml.safe_load(path.read_text()))


def test_the_reports_in_the_tree_fit():
    found = _committed("*/results/*/report.json")
    if not found:
        pytest.skip("no study's results are in this tree")
    validator = Draft202012Validator(schema("report"))
    for path in found[:20]:
        validator.validate(json.loads(path.read_text()))


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "study"])
@pytest.mark.parametrize("version", [None, 0, 2, "1"])
def test_another_schema_version_does_not_fit(kind, version):
    document = dict(DOCUMENTS[kind][0], schema=version)
    if version is None:
        del document["schema"]
    assert not Draft202012Validator(schema(kind)).is_valid(document)


def places(data, at=()):
    """Every place in nested data, as a path, except inside free values."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if key in ANYTHING:
            continue
        yield (*at, key)
        yield from places(value, (*at, key))


def broken(document, place, how):
    """The document with one place changed."""
    document = copy.deepcopy(document)
    node = document
    for step in place[:-1]:
        node = node[step]
    if how == "removed":
        del node[place[-1]]
    elif how == "unknown key":
        if not isinstance(node[place[-1]], dict):
            return None
        node[place[-1]]["unheard-of"] = {"wrong": 1}
    else:
        node[place[-1]] = how
    return document


CHANGES = ["removed", "unknown key", {"wrong": 1}, ["wrong"], "x y", -1, None, True]


def refusal(kind, document):
    """`None`, or why the record refuses: its shape, or a check that only code can make."""
    try:
        KINDS[kind].model_validate(document)
    except ValidationError:
        return "shape"
    except InputError:
        return "code"
    return None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_broken_files_do_not_fit(kind, data):
    """Wherever a file is broken, the schema refuses what the record refuses for its shape, and nothing else."""
    validator = Draft202012Validator(schema(kind))
    document = data.draw(st.sampled_from(DOCUMENTS[kind]))
    place = data.draw(st.sampled_from([p for p in places(document) if p != ("schema",)]))
    changed = broken(document, place, data.draw(st.sampled_from(CHANGES)))
    if changed is None:
        return
    fits, why = validator.is_valid(changed), refusal(kind, changed)
    if why == "shape":
        assert not fits
    if not fits:
        assert why is not None or coerced(document, changed, place)


def coerced(document, changed, place):
    """Whether the record took the new value for the old one's type, as it does with a truth value for a number."""
    node = changed
    for step in place:
        node = node[step]
    return node is True


def test_the_command_writes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(toolkit.schemas, "file_of", lambda kind: tmp_path / f"{kind}.schema.json")
    runpy.run_module("toolkit.schemas", run_name="__main__")
    for kind in KINDS:
        assert (tmp_path / f"{kind}.schema.json").read_bytes() == file_of(kind).read_bytes()


def test_they_need_no_torch():
    code = "import sys, toolkit.schemas as s; [s.schema(k) for k in s.KINDS]; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
