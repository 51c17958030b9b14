"""`foldray plan`: its JSON documents, its pictures, and the mistakes that it refuses."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from foldray.cli import main, planning
from foldray.errors import UserError
from foldray.graph.chunks import REDUCTIONS
from foldray.plan.rows import PAPER as COLUMNS
from foldray.plan.search import Found
from foldray.plan.space import KINDS, Space

ASKED = ["plan", "--model", "mixtral-8x22b", "--cluster", "eos-h100", "--gpus", "64", "--seq-len", "4096", "--global-batch", "64",
         "--pp", "8", "--ep", "8", "--cp", "1"]  # fmt: skip
ROW = dict(zip(COLUMNS, ("A", "Mixtral-8x22B", "MCore w/ Folding", 128, 4096, 256, 1, 2, 8, 8, 1, 49.3), strict=True))


def test_the_document(capsys) -> None:
    assert main([*ASKED, "--top", "3", "--json"]) == 0
    candidates = json.loads(capsys.readouterr().out)["candidates"]
    assert len(candidates) == 3
    assert [each["step_time_s"] for each in candidates] == sorted(each["step_time_s"] for each in candidates)
    for each in candidates:
        assert (each["fold"]["pp"], each["fold"]["ep"], each["fold"]["cp"]) == (8, 8, 1)
        assert sum(each["breakdown"].values()) == pytest.approx(each["step_time_s"])
        assert sum(each["memory"].values()) == pytest.approx(each["memory_gib"])
        assert 0 < each["mfu_causal"] < each["mfu_full"] < 1
        assert each["fits"]
        assert each["traffic"]["pp"] > 0
        assert each["schedule"]["reduction"] in REDUCTIONS
        assert each["schedule"]["batch_degree"] in (1, 2)


def test_the_table_tells_why(capsys) -> None:
    assert main([*ASKED, "--top", "3"]) == 0
    printed = capsys.readouterr().out
    assert "legal folds on eos-h100" in printed
    assert "the first one's step:" in printed
    assert "ms a step ahead of" in printed.splitlines()[-1]


def test_rows_whose_micro_batches_cannot_be_interleaved(tmp_path: Path, capsys) -> None:
    """One sequence per micro-batch: 24 of them at dp 4 are 6, which is no multiple of pp."""
    path = written(tmp_path, [{**ROW, "gpus": 64, "gbs": 24}])
    assert main(["plan", "--score", str(path), "--cluster", "eos-h100", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["step_time_s"] > 0


def test_a_picture_of_time_against_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, draw = list[Found](), planning._plan_picture
    monkeypatch.setattr(planning, "_plan_picture", lambda plans, *more: drawn.append(plans) or draw(plans, *more))
    assert main([*ASKED, "--top", "3", "--picture", str(tmp_path / "plan.png")]) == 0
    assert drawn[0].front[-1].memory.total < min(plan.memory.total for plan in drawn[0].best)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_scores_of_published_rows(tmp_path: Path, capsys) -> None:
    rows = [ROW, {**ROW, "row_id": "B", "method": "FSDP + EP", "pp": 1, "etp_effective": 2, "mfu_pct": ""}]
    path = written(tmp_path, rows)
    assert main(["plan", "--score", str(path), "--cluster", "eos-h100", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [set(each) for each in document["rows"]] == [
        {"row_id", "mfu_causal", "mfu_full", "step_time_s", "memory_gib", "fits", "error", "memory_error", "assumed", "unpriced"}
    ] * 2
    assert [each["error"] is None for each in document["rows"]] == [False, True]
    assert document["pairs"] == []
    assert document["mape"].keys() == {"overall", "MCore w/ Folding"}, "what was not measured has no error"
    assert main(["plan", "--score", str(path), "--cluster", "eos-h100"]) == 0
    assert "worst: A" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"method": "Magic"}, "A: method=Magic: is no known method; legal: "),
        ({"gpus": "many"}, "A: gpus=many: must be a whole number, at least 1"),
        ({"mfu_pct": "0"}, "A: mfu_pct=0: must be a percentage above 0, at most 100"),
        ({"model": "gpt-9"}, "A: "),
        ({"tp": 3}, "A: fold=3·1·8: "),
    ],
    ids=str,
)
def test_rows_that_make_no_sense_are_told_in_one_line(changed: dict, line: str, tmp_path: Path, capsys) -> None:
    assert main(["plan", "--score", str(written(tmp_path, [{**ROW, **changed}])), "--cluster", "eos-h100"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"foldray: {line}"), error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (["--cluster", "eos-h1000"], "cluster=eos-h1000: is no known cluster nor a YAML file; did you mean 'eos-h100'?"),
        (["--cluster", "missing.yaml"], "cluster=missing.yaml: cannot be read"),
        (["--gpus", "0"], "gpus=0: must be at least 1"),
        (["--gpus", "1" + 18 * "0"], "gpus=1000000000000000000: must be at least 1, and at most 131072"),
        (["--top", "1" + 18 * "0"], "top=1000000000000000000: must be at least 1, and at most 1000"),
        (["--tp", "3"], "gpus=64: has no legal fold for this model and batch with"),
        (["--dtype", "int3"], "dtype=int3: has no peak in hardware eos-h100"),
        (["--picture", "plan.pdf"], "picture=plan.pdf: is written as PNG"),
        (["--skew", "-1"], "skew=-1.0: must be a number from 0 to 16"),
        (["--skew", "nan"], "skew=nan: must be a number from 0 to 16"),
        (["--model", "gpt-9"], "model.preset=gpt-9: "),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_told_in_one_line(changed: list[str], line: str, capsys) -> None:
    assert main([*ASKED, *changed]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"foldray: {line}"), error
    assert error.count("\n") == 1


def test_what_is_missing_is_named(capsys) -> None:
    assert main(["plan", "--cluster", "eos-h100", "--gpus", "8"]) == 2
    assert capsys.readouterr().err.startswith("foldray: model=nothing: is required, except with a recipe, --score or --fit")


def test_a_recipe_says_what_to_plan(tmp_path: Path, capsys) -> None:
    """The recipe has model, sequences, batch, precision and workers. Its changes and the command's options go before it."""
    (tmp_path / "recipe.yaml").write_text(
        "model: {preset: mixtral-8x22b, layers: 4}\ndata: {seq_len: 4096}\nprecision: bfloat16\nfold: {ep: 8}\n"
        "training: {global_batch: 16}\ncluster: {workers: 8}\n"
    )
    command = ["plan", str(tmp_path / "recipe.yaml"), "training.global_batch=32", "--cluster", "eos-h100", "--top", "1"]
    named = ["plan", "--cluster", "eos-h100", "--top", "1", "--gpus", "8", "--seq-len", "4096", "--global-batch", "32"]
    assert main([*command, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["candidates"]
    assert math.prod(found["fold"][axis] for axis in ("tp", "cp", "dp", "pp")) == 8
    assert main([*command, "--gpus", "16", "--imbalance", "1.5"]) == 0
    out = capsys.readouterr().out
    assert "legal folds on eos-h100; memory for experts with 1.5 times the mean number of rows" in out
    assert main([*command, "--imbalance", "0.5"]) == 2
    assert capsys.readouterr().err == "foldray: imbalance=0.5: must be at least 1; legal: 1…1000\n"
    assert main([*named, "--model", "mixtral-8x22b"]) == 0


def written(folder: Path, rows: list[dict]) -> Path:
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return folder / "rows.csv"


def test_the_kind_of_a_recipe_is_planned_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def remember(space: Space, *_: Any, **__: Any) -> None:
        asked.append(space.kinds)
        raise UserError("gpus", space.gpus, "are not searched here")

    monkeypatch.setattr("foldray.plan.search.search", remember)
    kind, path = "tests.foldray.orders.zigzag:PAIRS", tmp_path / "recipe.yaml"
    path.write_text(
        "model: {preset: tiny}\nfold: {ep: 4}\ntraining: {global_batch: 8}\ncluster: {workers: 4}\n"
        f"schedule: {{kind: {kind}, degree: 2}}\n"
    )
    assert main(["plan", str(path), "--cluster", "eos-h100"]) == 2
    assert asked == [(*KINDS, kind)]
