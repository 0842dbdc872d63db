"""What is refused before anything is read: an empty folder, a model that is not there, processes that do not divide."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.cli import main
from toolkit.errors import InputError
from toolkit.records.study import Study
from toolkit.runs import finetuning, ranking, studies
from toolkit.runs.finetuning.asking import asked
from toolkit.runs.finetuning.design import divided
from toolkit.runs.ranking.asking import asked as asked_ranking

UNREAD = {"sums": {"task": "arithmetic(largest=10)", "data": "no-such-folder"}}
"""A task whose rows cannot be read: whoever tries says so."""


@pytest.mark.parametrize("verb", [["run"], ["lock"], ["time"], ["time", "--sessions", "2"]])
@pytest.mark.parametrize("out", ["", " "])
def test_an_empty_out_is_not_the_current_folder(study, verb, out, tmp_path, monkeypatch, capfd):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    folder = study(tasks=UNREAD)
    assert main([verb[0], str(folder), *verb[1:], "--out", out]) == 2
    said = capfd.readouterr().err
    assert "out is empty: name a folder for the results, or leave it out for the study's own" in said
    assert "session 1" not in said and not list(Path().iterdir())


@pytest.mark.parametrize("begin", [studies.run, studies.lock])
def test_an_empty_out_is_refused_in_python_for_both_kinds(declared, begin):
    ranking = Path(__file__).parents[3] / "studies" / "ranking-control"
    for asked_for in (declared(), ranking):
        with pytest.raises(InputError, match=r"^out is empty"):
            begin(asked_for, out="")


@pytest.mark.parametrize("model", ["./gone", "../gone", "/gone/model", "~/gone/model", "gone.safetensors"])
@pytest.mark.parametrize("begin", [studies.run, studies.lock])
def test_a_model_that_is_not_there_is_said_before_rows_are_read(study, tmp_path, begin, model):
    with pytest.raises(InputError, match=r"^no model at .*gone"):
        begin(study(tasks=UNREAD), model=model, out=tmp_path / "out")
    ranking = Path(__file__).parents[3] / "studies" / "ranking-control"
    with pytest.raises(InputError, match=r"^no model at .*gone"):
        begin(ranking, model=model, texts=["no-such-file.txt"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_study_given_as_an_object_lies_where_its_results_will_whatever_its_kind(declared, tmp_path, monkeypatch):
    """`home` is what a commit is looked for in, and never the current folder by chance."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab").mkdir()
    selections = Study.read(Path(__file__).parents[3] / "studies" / "ranking-control")
    for ask, given in ((asked, declared()), (asked_ranking, selections)):
        found = ask(given, model="org/Name", out=tmp_path / "lab" / "new" / "out")
        assert found.study == given.model_copy(update={"model": "org/Name"}) and found.study.model == "org/Name"
        assert (found.home, found.folder) == (tmp_path / "lab", tmp_path / "lab" / "new" / "out")
        with pytest.raises(InputError, match=rf"\({type(given).__name__}\) needs `out`"):
            ask(given)


def test_a_study_that_cannot_be_run_is_named_whatever_its_kind(study, tmp_path):
    selections = Path(__file__).parents[3] / "studies" / "ranking-control" / "study.yaml"
    text = selections.read_text(encoding="utf-8")
    wrong = tmp_path / "study.yaml"
    wrong.write_text(text.replace("base: nf4 ", "base: nf5 "), encoding="utf-8")
    trained = study(arms=[{"name": "q", "base": "nf5"}], analysis={"baseline": "q"}) / "study.yaml"
    for begin, given in ((ranking.run, wrong), (finetuning.run, trained)):
        with pytest.raises(InputError, match=rf"^{given}: .*'nf5'"):
            begin(given, out=tmp_path / "out")


def test_a_hub_id_is_left_to_the_hub(study):
    assert asked(study(), model="org/Name-2.5").study.model == "org/Name-2.5"


@pytest.mark.parametrize(
    ("changes", "count"), [({}, 3), ({"tune": {"lever": "accumulation", "values": [4, 5], "rows": 4}}, 5)]
)
def test_processes_that_do_not_divide_the_accumulation_are_refused_at_once(
    study, declared, monkeypatch, changes, count, tmp_path
):
    """By the trials as well, and before the processes meet, which one process alone would wait for."""
    levers = {"steps": 3, "batch": 4, "accumulation": 3 if not changes else 4, "length": 64, "rank": 2}
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = rf"task 'sums', arm 'qlora': accumulation {count} does not divide among 2 processes \(torchrun\)"
    with pytest.raises(InputError, match=message):
        finetuning.run(study(tasks=UNREAD, levers=levers, **changes), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    divided(declared(levers=levers | {"accumulation": 4}), 2)
    with pytest.raises(InputError, match=r"Make it a multiple of 3"):
        divided(declared(levers=levers | {"accumulation": 4}), 3)
