"""`foldray health`: the table of a run, and what is refused."""

import json
import os
from pathlib import Path

import pytest

from foldray import Recipe
from foldray.cli import main
from tests.trainers.pictures.test_training import size
from tests.trainers.telemetry.records import step
from trainers.sinks.run_folder import as_yaml
from trainers.telemetry.history import LOAD_WINDOW
from trainers.telemetry.records import Step, as_json

STEPS = 30


def recipe(**model: object) -> Recipe:
    sizes = {"preset": "tiny", "layers": 4, "experts": 4, "moe_every": 2, **model}
    return Recipe.parse({"name": "r", "model": sizes, "fold": {"ep": 2}, "cluster": {"workers": 2}})


def write(folder: Path, records: list[Step], made: Recipe) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(as_yaml(made))
    (folder / "metrics.jsonl").write_text("".join(as_json(record) + "\n" for record in records))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose first ten steps use other experts than the newest ones."""
    loads = [[[0, 0, 8, 0], [1, 1, 1, 1]]] * (STEPS - LOAD_WINDOW) + [[[6, 2, 0, 0], [3, 3, 3, 3]]] * LOAD_WINDOW
    return write(tmp_path / "r-1", [step(number, load=load) for number, load in enumerate(loads, 1)], recipe())


def test_the_newest_steps_are_shown_by_layer(run, capsys):
    assert main(["health", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"r-1, steps {STEPS - LOAD_WINDOW + 1}–{STEPS}: 4 experts in each MoE layer, 2 on each of 2 ranks"
    layers = [str(layer) for layer in recipe().model.moe_layers]
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0] in [*layers, "worst"]]
    assert rows == [
        [layers[0], "3.00", "2.00", "0.4056", "2", "2"],
        [layers[1], "1.00", "1.00", "1.0000", "0", "0"],
        ["worst", "3.00", "2.00", "0.4056", "2", "2"],
    ]


def test_one_document_and_a_picture(run, tmp_path, capsys):
    assert main(["health", str(run), "--json", "--picture", str(tmp_path / "page.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["steps"], found["experts"], found["ep"]) == ("r-1", [11, 30], 4, 2)
    assert [layer["layer"] for layer in found["layers"]] == list(recipe().model.moe_layers)
    assert found["layers"][0]["dead"] == found["worst"]["dead"] == 2
    assert size(tmp_path / "page.png")


def test_a_run_of_an_older_foldray_is_shown_as_well(run, tmp_path, capsys):
    main(["health", str(run), "--json"])
    new = capsys.readouterr().out
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    added = {"rank_max_over_mean", "load_entropy", "by_layer"}
    assert added <= set(lines[0])
    write(run, [{key: value for key, value in line.items() if key not in added} for line in lines], recipe())
    assert main(["health", str(run), "--json", "--picture", str(tmp_path / "page.png")]) == 0
    assert capsys.readouterr().out == new


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["health", *arguments]) == 2
    out, line = capsys.readouterr()
    assert out == ""
    assert line.startswith("foldray: ")
    assert line.count("\n") == 1
    return line


def test_what_is_no_run_is_refused(run, tmp_path, capsys):
    assert "has no metrics.jsonl" in refused(capsys, str(tmp_path / "absent"))
    assert "has no metrics.jsonl" in refused(capsys, str(run / "metrics.jsonl"))
    assert "picture=x.jpg: is written as PNG" in refused(capsys, str(run), "--picture", "x.jpg")
    write(run, [step(1)], recipe())
    assert "has no loads of experts" in refused(capsys, str(run))
    write(run, [step(1, load=[[1, 2, 3, 4]])], recipe())
    assert "of different models: 1 MoE layers of 4 experts and 2 MoE layers of 4 experts" in refused(capsys, str(run))
    (run / "recipe.yaml").unlink()
    assert "its recipe.yaml is missing" in refused(capsys, str(run))


@pytest.mark.parametrize("load", [[[1, 2], [3, 4]], [[1, 2], [3]], [[1, -2, 3, 4], [1, 2, 3, 4]], [[[1]]], "x", {"a": 1}])
def test_forged_loads_are_refused(run, load, capsys):
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({**step(31), "load": load}) + "\n")
    assert "RUN=r-1: its metrics.jsonl cannot be read (line 31 is not a record of a run)" in refused(capsys, str(run))


def test_a_pipe_is_refused(run, capsys):
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert "is not a regular file" in refused(capsys, str(run))
