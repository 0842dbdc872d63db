"""The leaderboard: places from certificates' own windows, the sign test over models, and what it refuses."""

import csv
import io
import json
import math
import shutil

import numpy as np
import pytest

from toolkit.analysis.certificates.leaderboard import leaderboard, render
from toolkit.cli import main
from toolkit.errors import InputError
from toolkit.records.certificate import render as text_of
from toolkit.records.certificate import seal_of


@pytest.fixture(scope="module")
def two(certify_small):
    """Certificates of two models; the second is exploratory."""
    return certify_small()[1], certify_small(seed=1, fingerprint="cd" * 32, lock=False)[1]


@pytest.fixture
def folder(two, tmp_path):
    for at, path in enumerate(two):
        shutil.copy(path, tmp_path / f"{at}.json")
    return tmp_path


def forged(path, change):
    """The certificate with a change and its seal made right."""
    data = json.loads(path.read_text())
    change(data)
    data["seal"] = seal_of(data)
    path.write_text(text_of(data))


def separated(data, value, at=lambda room: True):
    for room in data["verdicts"]["headroom"]:
        if at(room):
            room["separated"], room["reason"] = value, None if value else "not separated in this test"


def test_a_place_is_the_share_of_the_way_to_the_oracle(folder):
    for name in ("0.json", "1.json"):
        forged(folder / name, lambda d: separated(d, True))
    board = leaderboard(folder)
    assert len(board["rows"]) == 8 and not board["unplaced"] and not board["refused"]
    for row in board["rows"]:
        data = json.loads((folder / row["file"]).read_text())
        arms = [a["headroom"][row["text"]] for a in data["arms"] if a["arm"] == row["arm"]]
        total = {key: sum(math.fsum(room[key]) for room in arms) for key in ("chance", "arm", "oracle")}
        assert row["placed"] == pytest.approx((total["chance"] - total["arm"]) / (total["chance"] - total["oracle"]))
        assert row["low"] is None or row["low"] <= row["placed"] <= row["high"]
        assert (row["budgets"], row["of_budgets"], row["models"]) == (2, 2, 2)
        (claim,) = [c for c in data["verdicts"]["claims"] if (c["arm"], c["text"]) == (row["arm"], row["text"])]
        assert (row["p"], row["adjusted"], row["smallest_p"]) == (claim["p"], claim["adjusted"], claim["smallest_p"])
        assert row["exploratory"] is (row["file"] == "1.json")
    for one, other in zip(board["rows"], board["rows"][1:], strict=False):
        if (one["model"], one["text"]) == (other["model"], other["text"]):
            assert one["placed"] >= other["placed"]


def test_the_unit_of_the_sign_test_is_the_model(folder):
    board = leaderboard(folder)
    assert {s["selector"] for s in board["signs"]} == {"top-error", "bottom-error"}
    for sign in board["signs"]:
        below = 0
        for name in ("0.json", "1.json"):
            claims = json.loads((folder / name).read_text())["verdicts"]["claims"]
            below += np.mean([c["effect"]["standardized"] for c in claims if c["arm"] == sign["selector"]]) < 0
        assert (sign["below"], sign["models"]) == (below, 2)
        assert sign["p"] == pytest.approx(1.0 if below == 1 else 0.5)


def test_one_model_gives_no_sign_test(folder):
    (folder / "1.json").unlink()
    assert leaderboard(folder)["signs"] == []


def test_what_cannot_be_ranked_is_told(folder):
    (folder / "1.json").unlink()

    def change(data):
        separated(data, True)
        separated(data, False, lambda room: room["arm"] == "top-error" and room["text"] == "wikitext2")
        separated(data, False, lambda room: room["arm"] == "bottom-error" and room["budget"] == "layers=0.1")

    forged(folder / "0.json", change)
    board = leaderboard(folder)
    rows = {(r["arm"], r["text"]): r for r in board["rows"]}
    assert rows["top-error", "wikitext2"]["placed"] is None and rows["top-error", "wikitext2"]["budgets"] == 0
    assert rows["bottom-error", "wikitext2"]["budgets"] == 1 and rows["top-error", "python-topics"]["budgets"] == 2
    assert {(u["arm"], u["text"], u["budget"]) for u in board["unplaced"]} == {
        ("top-error", "wikitext2", "layers=0.1"),
        ("top-error", "wikitext2", "layers=0.2"),
        ("bottom-error", "python-topics", "layers=0.1"),
        ("bottom-error", "wikitext2", "layers=0.1"),
    }
    assert "this study cannot rank selectors" in render(board) and "not separated in this test" in render(board)


def test_damaged_and_duplicate_certificates_are_named(folder):
    plain = (folder / "0.json").read_text()
    shutil.copy(folder / "0.json", folder / "2.json")
    (folder / "3.json").write_text(plain[:1000])
    (folder / "4.json").write_text(plain.replace("2.8", "2.9", 1))
    (folder / "5.json").write_text('{"schema": 1}')
    (folder / "6.json").write_text(plain)
    forged(folder / "6.json", lambda d: d["reports"].update(other="0" * 64))
    forged(folder / "6.json", lambda d: d["verdicts"].pop("claims"))
    board = leaderboard(folder)
    reasons = {r["file"]: r["reason"] for r in board["refused"]}
    assert reasons.keys() == {"2.json", "3.json", "4.json", "5.json", "6.json"}
    assert reasons["2.json"] == "it is made of the same reports as 0.json"
    assert "not JSON" in reasons["3.json"] and "edited after it was sealed" in reasons["4.json"]
    assert "not what certify writes" in reasons["6.json"]
    assert str(folder) not in json.dumps(reasons) and len(board["certificates"]) == 2
    text = render(board)
    assert "(exploratory)" in text and "Exploratory:" in text and "- 2.json: it is made of the same reports" in text


@pytest.mark.parametrize("value", [[], {}, True, 10**400])
@pytest.mark.parametrize("key", ["p", "smallest_p", "adjusted", "verdict"])
def test_verdicts_of_another_type_are_refused_and_the_others_placed(folder, key, value):
    def change(data):
        for claim in data["verdicts"]["claims"]:
            claim[key] = value

    forged(folder / "0.json", change)
    board = leaderboard(folder)
    assert "stands where a" in board["refused"][0]["reason"] and len(board["certificates"]) == 1
    assert render(board)


def test_a_forgery_whose_seal_is_right_falls_to_full_verification(folder):
    def change(data):
        data["controls"][0]["outcomes"]["wikitext2"][0] += 1

    forged(folder / "0.json", change)
    assert not leaderboard(folder)["refused"]
    board = leaderboard(folder, verify=True)
    assert "draw 0 of control matched of top-error at layers=0.1 was altered" in board["refused"][0]["reason"]
    assert board["verified"] == "full" and len(board["certificates"]) == 1


def test_without_headroom_there_is_no_place(certify_small, tmp_path):
    _, path = certify_small(headroom=None, budgets=("layers=0.1",), test="each", side="greater")
    shutil.copy(path, tmp_path / "a.json")
    board = leaderboard(tmp_path)
    assert all(row["placed"] is None and row["p"] is not None for row in board["rows"])
    assert "no oracle was measured" in render(board)
    claims = json.loads(path.read_text())["verdicts"]["claims"]
    for row in board["rows"]:  # below zero is better, whatever the side
        (claim,) = [c for c in claims if (c["arm"], c["text"]) == (row["arm"], row["text"])]
        assert row["effect"] == -claim["effect"]["standardized"]


def test_formats(folder, capsys):
    board = leaderboard(folder)
    assert json.loads(render(board, "json")) == board
    lines = list(csv.DictReader(io.StringIO(render(board, "csv"))))
    assert [line["arm"] for line in lines] == [row["arm"] for row in board["rows"]]
    assert [line["p"] for line in lines] == [str(row["p"]) for row in board["rows"]]
    with pytest.raises(InputError, match="did you mean 'json'"):
        render(board, "jso")
    assert main(["leaderboard", str(folder)]) == 0
    assert capsys.readouterr().out.rstrip("\n") == render(board)
    out = folder / "board.csv"
    assert main(["leaderboard", str(folder), "--format", "csv", "-o", str(out)]) == 0
    assert out.read_text() == render(board, "csv") + "\n"


def test_a_folder_without_certificates(tmp_path):
    with pytest.raises(InputError, match="holds no certificate"):
        leaderboard(tmp_path)
    with pytest.raises(InputError, match="is no folder"):
        leaderboard(tmp_path / "nothing")
    assert main(["leaderboard", str(tmp_path)]) == 2
