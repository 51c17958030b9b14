"""`foldray verify --peer`: a fault of another project is found, and what it prints can be trusted."""

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foldray.cli import main
from foldray.cli.arguments import PEERS
from tests.trainers.referee.plain import FAULTS
from trainers.referee import entry
from trainers.referee.entry import table
from trainers.referee.projects import PROJECTS, Project
from trainers.referee.verdicts import AGREES, FIGURES, judged, told

ROOT = Path(__file__).parents[3]
SAME = {"loss": 0.0, "gradient": 1e-9, "norm": 1e-9, "evaluation": 0.0, "worst": {"w": 1e-9}, "missing": []}
DTYPE = "float64"


def python(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def found(**tokens) -> dict:
    return {"tokens": copy.deepcopy(SAME) | tokens, "means": copy.deepcopy(SAME) | {"gradient": 0.5, "loss": 0.1}}


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("value", [2 * AGREES[DTYPE], 1.0, math.inf, math.nan])
def test_a_difference_in_any_figure_is_found(figure, value):
    assert judged(found(), DTYPE)["verdict"] == "agrees"
    row = judged(found(**{figure: value}), DTYPE)
    assert row["verdict"] == "differs"
    assert figure in row["remark"]


def test_a_gradient_that_is_missing_is_a_difference():
    row = judged(found(missing=["model.router"]), DTYPE)
    assert (row["verdict"], row["remark"]) == ("differs", "no gradient of model.router")


def test_rounding_counts_by_the_type_of_numbers():
    assert judged(found(norm=1e-5), "float32")["verdict"] == "agrees"
    assert judged(found(norm=1e-5), "float64")["verdict"] == "differs"


def test_the_mean_of_ranks_is_told_from_a_fault():
    differences = found(loss=0.1, gradient=0.3) | {"means": SAME}
    assert judged(differences, DTYPE)["verdict"] == "mean of ranks"
    half = {"means": SAME | {"norm": 0.2}}
    row = judged(found(loss=0.1, gradient=0.3, norm=0.1) | half, DTYPE)
    assert (row["verdict"], row["remark"]) == ("differs", "norm 2e-1 (to the mean of ranks)")


def test_an_error_is_its_first_line_and_the_projects_last():
    text = (
        'Traceback (most recent call last):\n  File "/x/site-packages/deepspeed/a.py", line 3, in f\n'
        '  File "/x/site-packages/deepspeed/b.py", line 12, in g\n  File "/x/site-packages/torch/c.py", line 4, in h\n'
        "ValueError: no such thing\nand more\n"
    )
    assert told(text) == "ValueError: no such thing (deepspeed/b.py:12)"
    assert judged({"error": text}, DTYPE) == {"verdict": "does not run", "remark": told(text)}
    assert told("3 of 4 ranks did not end in 180 s") == "3 of 4 ranks did not end in 180 s"


def test_a_table_has_every_figure():
    rows = [{"layout": "dp4", "case": "router", **judged(found(norm=0.25), DTYPE)}]
    assert table(rows).splitlines()[-1] == "| dp4 | router | 0 | 1e-9 | 2e-1 | 0 | differs: norm 2e-1 |"


@pytest.mark.gate(1 / 3)
def test_faults_of_a_small_project_are_found():
    rows = json.loads(python("-m", "tests.trainers.referee.plain"))
    assert {fault: rows[fault]["verdict"] for fault in FAULTS} == FAULTS
    assert rows["error"]["remark"] == "ValueError: this rank"
    assert rows["masked tokens"]["verdict"] == "mean of ranks"
    assert rows["masked tokens, counted"]["verdict"] == "agrees"


def test_the_command_line_knows_every_project():
    assert set(PEERS) == set(PROJECTS)
    for project in PROJECTS.values():
        assert all(set(layout.cases) <= set(project.cases) for layout in project.layouts.values())


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ([], ["recipe=nothing", "--peer"]),
        (["quickstart", "--layout", "dp4 ep2"], ["layout=", "needs --peer"]),
        (["--dtype", "float32"], ["dtype=float32", "needs --peer"]),
        (["--peer", "tutel"], ["peer=tutel", "legal: transformers, deepspeed, torchtitan, megatron"]),
        (["quickstart", "--peer", "deepspeed"], ["recipe=quickstart", "--peer"]),
        (["--all", "--peer", "deepspeed"], ["all=True", "--peer"]),
        (
            ["--peer", "transformers", "--layout", "dp4 ep3"],
            ["layout=dp4 ep3", "did you mean 'dp4 ep", "legal: dp4 ep2, dp4 ep4"],
        ),
        (["--peer", "megatron", "--case", "window"], ["case=window", "legal: as it is, router"]),
        (["--peer", "transformers", "--layout", "tp2 ep2 (flag)", "--case", "router"], ["case=router", "legal: as it is"]),
        (["--peer", "deepspeed", "--dtype", "float16"], ["dtype=float16", "legal: float32, float64"]),
    ],
)
def test_a_mistake_is_one_line(arguments, fragments, capsys):
    assert main(["verify", *arguments]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert all(fragment in line for fragment in fragments), line


def test_a_project_that_is_not_installed_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "megatron", None)
    assert main(["verify", "--peer", "megatron"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "'megatron', which is not installed; install it with: pip install megatron-core==0.16.1" in line


def test_what_a_project_prints_is_not_in_the_document(monkeypatch, capsys):
    monkeypatch.setattr(Project, "load", lambda self: (print("Welcome!"), self.tried))
    monkeypatch.setattr(entry, "_rows", lambda *given: [{"case": case} for _, case in given[2]])
    assert entry.referee("deepspeed", ["dp4 ep2 (as installed)"], as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["version"], document["rows"]) == ("0.19.8", [{"case": "as it is"}])


@pytest.mark.nightly("four ranks of transformers, four times")
def test_transformers_agrees_until_a_fault_is_planted():
    pytest.importorskip("accelerate")
    source = """
        import sys
        from trainers.referee import huggingface
        from trainers.referee.entry import referee
        plain = huggingface.Transformers.train
        def train(self, *given):
            loss, gradients, norm = plain(self, *given)
            gradients["model.layers.0.mlp.gate.weight"] *= FACTOR
            return loss, gradients, norm
        huggingface.Transformers.train = train
        sys.exit(referee("transformers", ["tp2 ep2"], ["as it is", "router"], None, as_json=True))
    """
    verdicts = {}
    for factor in ("1", "1.001"):
        rows = json.loads(python("-c", "\n".join(line[8:] for line in source.replace("FACTOR", factor).splitlines())))["rows"]
        verdicts[factor] = {row["case"]: (row["verdict"], next(iter(row["worst"]))) for row in rows}
    assert {verdict for verdict, _ in verdicts["1"].values()} == {"agrees"}
    assert set(verdicts["1.001"].values()) == {("differs", "model.layers.0.mlp.gate.weight")}


@pytest.mark.nightly("four ranks of DeepSpeed")
def test_a_document_is_all_that_deepspeed_leaves_on_stdout():
    command = "-m", "foldray", "verify", "--peer", "deepspeed", "--layout", "tp2 dp2 ep4 (ZeRO-2)", "--case", "as it is", "--json"
    document = json.loads(python(*command))
    assert [row["verdict"] for row in document["rows"]] == ["differs"], "if it agrees, docs/notebook/referee.md is out of date"
    assert document["version"] == document["tried"]
