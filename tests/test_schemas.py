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
from toolkit.records.certificate import Certificate, CertifiedArm, CertifiedDraws, CertifiedRoom, tied
from toolkit.records.declared import kind_of
from toolkit.records.exported import Exported, ExportedLayer, Survival
from toolkit.records.finetuning import FineTuning
from toolkit.records.initialization import Initialization
from toolkit.records.levers import Levers, Seeds
from toolkit.records.lock import Lock
from toolkit.records.plan import Plan
from toolkit.records.report import Rows, mask
from toolkit.records.session import Machine, Memory, Sample, Session, Timed
from toolkit.records.start import CalibrationText, LayerStart, StartFile
from toolkit.records.started import COLUMNS, LayerOutcome, Started
from toolkit.records.trained import ROW, Course, Data, Flag, Scores, Trained
from toolkit.schemas import KINDS, file_of, schema
from toolkit.selection.select import select

ROOT = Path(__file__).parent.parent
ANYTHING = {"options", "small"}  # keys whose values are free


def _documents():
    """Real files of every kind, as plain data."""
    spec = importlib.util.spec_from_file_location("schema_builders", ROOT / "tests" / "analysis" / "builders.py")
    builders = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builders)
    made = builders.Builder(ROOT, builders.make_study(draws=3, budgets=("layers=0.05",)), blocks=4)
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
        "lock": [_lock(made)],
        "certificate": [_certificate(made, None), _certificate(made, _lock(made))],
        "fine-tuning": [_fine_tuning()],
        "trained": _trained(made, profile, top, adapted),
        "timing-session": [_session(made, adapted)],
        "initialization": [_initialization()],
        "started": _started(made, adapted),
        "start": [_start(made)],
        "export": [_export()],
    }
    return {kind: [json.loads(json.dumps(r.to_json())) for r in items] for kind, items in records.items()}


def _start(made):
    """Starts of two layers, one of them calibrated."""
    return StartFile(
        model="demo",
        fingerprint="cd" * 32,
        reference="bfloat16 weights, as the model stores them",
        plan="ab" * 32,
        seed=3,
        dtype="bfloat16",
        base="ba" * 32,
        calibration=CalibrationText(
            source="text.txt", sha256="7e" * 32, windows=4, window=64, tokens=256, activations="nvfp4"
        ),
        layers={
            "a.q_proj": LayerStart(
                initializer="gptq",
                quantizer="nvfp4",
                residuals=[0.1, 0.12],
                kept=1,
                notes={"damping": 0.01, "dead": 0},
                seconds=0.5,
                base="5a" * 32,
            ),
            "a.o_proj": LayerStart(initializer="loftq", quantizer="nf4", rank=8, scaling=2.0, residuals=[0.1]),
        },
        seconds=1.5,
        peak_bytes=1000,
        provenance=made.reference("base").provenance,
    )


def _export():
    """A base with an adapter merged into it."""
    whole = Survival(share=0.75, norm=1.25, change=0.01)
    layers = {
        "a.q_proj": ExportedLayer(quantizer="nvfp4", base="merged", rescaled=0.02, differing=3, merged=whole),
        "a.o_proj": ExportedLayer(merged=Survival(change=0.0)),
    }
    return Exported(
        form="compressed-tensors",
        layout="nvfp4-pack-quantized",
        model="demo",
        fingerprint="cd" * 32,
        plan="ab" * 32,
        plan_base="ba" * 32,
        start="5a" * 32,
        adapter="ad" * 32,
        onto="base",
        dtype="bfloat16",
        layers=layers,
        merged=whole,
        checked=["read by the library"],
        notes=["a note"],
        packages={"torch": "2.13.0"},
    )


def _lock(made):
    """The lock of a builder's study."""
    return Lock(
        study=made.study.name,
        form=made.study.form,
        analysis=made.study.analysis,
        declaration=made.study.declaration,
        code={"toolkit": "0.1.0", "sources": "c0" * 32, "torch": "2.13.0"},
        model=made.profile.model,
        fingerprint=made.profile.fingerprint,
        texts={name: text.sha256 for name, text in made.texts.items()},
        created="2025-12-31T00:00:00+00:00",
    )


def _certificate(made, lock):
    """A certificate of one arm and one control; with a lock, confirmatory and with headroom."""
    budget = made.study.budgets[0]
    arm, control = made.arm("top-error", budget), made.control("matched", "top-error", budget, 3)
    outcomes = {text: score.loss for text, score in arm.scores.items()}
    drawn = {text: [draw.scores[text].loss for draw in control.draws] for text in made.texts}
    room = CertifiedRoom(
        tokens=[511, 511],
        chance=[1400.5, 1401.0],
        arm=[1399.5, 1402.25],
        oracle=[1.0, 2.0],
        anti=[3.0, 4.0],
        draws=[2.7],
    )
    rooms = {"python-topics": room} if lock else {}
    plain = {text: r.model_dump(mode="json") for text, r in rooms.items()}
    certified = CertifiedArm(
        arm="top-error",
        budget=str(budget),
        selector=arm.selection.selector,
        total_of="bottom-error" if lock else None,
        mask=mask(frozenset(arm.selection.layers), made.names),
        hash=arm.selection.layers_hash,
        parameters=arm.selection.parameters,
        bytes=arm.selection.bytes,
        outcomes=outcomes,
        headroom=rooms,
        scored=tied(arm.selection.layers_hash, outcomes, plain),
    )
    draws = CertifiedDraws(
        control="matched",
        arm="top-error",
        budget=str(budget),
        law=control.law,
        seed=7,
        family=[str(budget)] if lock else None,
        asked=3,
        mismatch={"mean": 0.0, "largest": 0.0},
        hashes=[f"{at:016x}" for at in range(3)],
        outcomes=drawn,
    )
    return Certificate(
        study=made.study,
        profile=made.profile,
        profile_hash=made.profile.hash,
        texts=made.texts,
        lock=lock,
        exploratory=[] if lock else ["there is no lock"],
        settings="5e" * 32,
        arms=[certified],
        controls=[draws],
        reports={arm.run: "0a" * 32, control.run: "0b" * 32},
        provenance={"toolkit": "0.1.0", "packages": {"torch": "2.13.0"}},
        verdicts={"claims": [{"arm": "top-error", "p": 0.25}]},
    ).sealed()


def _fine_tuning():
    """A fine-tuning study that uses every part of the file."""
    top = {"selector": "top-error", "budget": "layers=0.2"}
    return FineTuning.model_validate(
        {
            "kind": "fine-tuning",
            "name": "trained",
            "question": "Does it help?",
            "tasks": {
                "sums": {"task": "arithmetic", "train_rows": 64, "rows": 32, "levers": {"length": 64}},
                "words": {"task": "copa", "data": "rows", "train": "rte", "train_data": "more"},
            },
            "arms": [
                {"name": "qlora"},
                {"name": "top", "protect": top, "compute_dtype": "float32", "range_guard": True},
                {"name": "drawn", "protect": {"selector": "random-matched", "like": "top", "draws": 2}},
                {"name": "deep", "adapt": {"selector": "depth", "budget": "layers=0.85", "draw": "once"}, "dora": True},
                {"name": "long", "base": "none", "scaler": "rslora", "levers": {"steps": 40}},
            ],
            "levers": {"steps": 20, "checkpointing": True},
            "factors": ["steps"],
            "seeds": [{"adapter": 0, "data": 1, "draw": 2}, {"adapter": 1, "data": 1, "draw": 2}],
            "repeats": {"arm": "qlora"},
            "tune": {"values": [1e-4, 3e-4]},
            "timing": {"task": "sums", "arms": ["qlora", "top"], "noisiest": "top"},
            "analysis": {
                "baseline": "qlora",
                "pairs": [["top", "deep"]],
                "paired": True,
                "margin": 0.01,
                "margin_reason": "smaller gaps change no answer",
            },
            "small": {"seeds": 2},
        }
    )


def _initialization():
    """A study of starts that uses every part of the file."""
    return Initialization.model_validate(
        {
            "kind": "initialization",
            "name": "starts",
            "question": "Does a fitted start lose less?",
            "texts": {"letters": "letters.txt"},
            "tokens": 4096,
            "calibration": {"text": "other.txt", "windows": 8},
            "scalings": [0.5, 2],
            "activations": ["none", "nvfp4"],
            "arms": [
                {"name": "plain", "base": "nvfp4"},
                {"name": "fitted", "protect": {"selector": "top-error", "budget": "layers=0.2"}},
            ],
            "analysis": {"baseline": "plain", "pairs": [["plain", "fitted"]], "block": 2},
            "small": {"scalings": [2]},
        }
    )


def _started(made, plan):
    """The report of an arm with everything in it, and of the 16-bit model."""
    base = made.reference("base")
    scores = {text: {"none": score} for text, score in base.scores.items()}
    layer = LayerOutcome(
        role="q_proj",
        parameters=4096,
        zero=0.09,
        residual=0.08,
        output_zero=0.1,
        output=0.07,
        residuals=[0.09, 0.08],
        kept=1,
        notes={"fallback": "rounding"},
        seconds=0.1,
    )
    sixteen = Started(
        study="starts",
        form="full",
        run="16-bit",
        role="reference",
        arm="16-bit",
        model=base.model,
        fingerprint=base.fingerprint,
        reference=base.reference,
        settings="5e" * 32,
        scores=scores,
        texts=base.texts,
        provenance=base.provenance,
    )
    arm = {"run": "fitted.s2", "role": "arm", "arm": "fitted", "scaling": 2.0, "lock": "10" * 32, "plan": plan}
    arm |= {"layers": {"a": layer}, "fallbacks": {"rounding": 1}, "seconds": 0.1, "labels": ["small form"]}
    arm |= {"calibration": next(iter(base.texts.values()))}
    rows = Rows(file="rows.jsonl.gz", sha256="ab" * 32, count=1, columns=list(COLUMNS))
    return [sixteen, sixteen.model_copy(update=arm | {"rows": rows})]


def _trained(made, profile, top, plan):
    """The report of a finished run, and of one that ran out of memory."""
    data = Data(source="code", sha256="da" * 32, found=100, rows=90, unusable=1, cut=9)
    course = Course(
        steps=20,
        planned=20,
        examples=640,
        target_tokens=1000,
        real_tokens=9000,
        computed_tokens=10_000,
        first_loss=3.5,
        last_loss=0.25,
        seconds=12.5,
        resumed=1,
        paused=2.0,
        lowest=1,
        scale=65536.0,
        trainable=4096,
    )
    common = {
        "study": "trained",
        "form": "full",
        "arm": "top",
        "task": "sums",
        "levers": Levers(steps=20),
        "model": profile.model,
        "fingerprint": profile.fingerprint,
        "reference": profile.reference,
        "settings": "5e" * 32,
        "plan": plan,
        "protect": top,
        "train": data,
        "provenance": made.reference("base").provenance,
    }
    scores = Scores(rows=90, loss=0.5, metric="accuracy", score=0.75, chance=0.5, unparsed=0.1, further={"f1": 0.5})
    whole = Trained(
        **common,
        run="sums--top--seed0-r1",
        role="repeat",
        seeds=Seeds.all(0, repeat=1),
        finished=True,
        draw=1,
        own=True,
        value=3e-4,
        lock="10" * 32,
        labels=["this draw only"],
        adapt=top,
        test=data,
        course=course,
        scores={"": scores, "set": scores},
        adapter="adapter",
        rows=Rows(file="rows.jsonl.gz", sha256="0f" * 32, count=90, columns=ROW),
    )
    ended = Trained(
        **common,
        run="sums--top--seed1",
        role="arm",
        seeds=Seeds(adapter=1, data=2, draw=3),
        finished=False,
        flags=[Flag(check="loss", severity="fatal", reason="the loss is not finite", step=7, layer="a.b")],
        test=data,
        course=course.model_copy(update={"steps": 7, "lowest": None, "scale": None}),
    )
    return [whole, ended]


def _session(made, plan):
    """A timing session of two arms, one with a duplicate."""
    sample = Sample(
        round=0, order=1, seconds=10.5, cycles=2, steps=16, tokens=9000, clock=1980.0, throttled=["power"], load=["9"]
    )
    memory = Memory(base_allocated=10, base_reserved=20, peak_allocated=30, peak_reserved=40)
    timed = Timed(
        arm="qlora", plan=plan, levers=Levers(), trainable=4096, samples=[sample], memory=memory, profile={"gemm": 0.5}
    )
    return Session(
        study="trained",
        form="full",
        session="20260101T000000Z",
        declaration="de" * 32,
        task="sums",
        model=made.profile.model,
        fingerprint=made.profile.fingerprint,
        baseline="qlora",
        protocol=_fine_tuning().timing,
        seed=0,
        batches=[{"examples": 6, "real": 900, "target": 60, "computed": 1000}],
        machine=Machine(host="host", device="device", identity="GPU-0", clocks={"sm": 1980.0}, allocation="boot"),
        arms=[timed, timed.model_copy(update={"duplicate": 1, "memory": None})],
        labels=["another process was there"],
        provenance=made.reference("base").provenance,
    )


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
        kind = "study" if (found := kind_of(path)) == "ranking-control" else found
        Draft202012Validator(schema(kind)).validate(yaml.safe_load(path.read_text()))


def test_the_reports_in_the_tree_fit():
    found = _committed("*/results/*/report.json")
    if not found:
        pytest.skip("no study's results are in this tree")
    for path in found[::5]:
        report = json.loads(path.read_text())
        Draft202012Validator(schema(report["kind"])).validate(report)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("study", "fine-tuning", "initialization")])
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
