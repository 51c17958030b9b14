"""`foldray status`: what a run's folder tells, while it trains and afterwards."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

from foldray import Recipe
from foldray.cli import main
from tests.trainers.faults.test_watch import WAITS, beat
from tests.trainers.telemetry.records import place, saved, step, validation
from trainers.faults.watch import Watch
from trainers.sinks.run_folder import RANKS, RunFolder
from trainers.telemetry.records import Failed, Record

RECIPE = Recipe.parse({"name": "r", "model": {"preset": "tiny"}, "cluster": {"workers": 2}, "training": {"steps": 100}})


def write(folder: Path, *records: Record, status: str | None = None, beats: bool = True) -> Path:
    run = RunFolder(folder / "r-1", RECIPE, {})
    now = time.time()
    for age, record in zip(range(len(records), 0, -1), records, strict=True):
        run.take({**record, "time": now - age})  # type: ignore[typeddict-item]
    if beats:
        watch = Watch()
        for number in range(20):
            watch.receive(beat(0, "F combine", WAITS, trained_s=2.0 * number, waited_s=1.0 * number))
            watch.receive(beat(1, trained_s=2.0 * number, waited_s=0.2 * number))
        run.write_ranks(watch.beats, watch.paces())
    if status:
        run._write_run(status)
    return run.path


FAILED = Failed(
    kind="failed",
    step=3,
    failure="lost",
    what="the process of rank 1 on 10.0.0.1 ended",
    ranks=[1],
    goes_on=True,
    saved=2,
    reason="",
)
RECORDS: list[Any] = [
    place(0), place(1), step(1), step(2), saved(2), validation(2), step(3), FAILED, place(0), place(1), step(3), step(4),
]  # fmt: skip


def test_a_run_that_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path, *RECORDS)
    assert main(["status", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"last checkpoint: step 2, \d+ s ago", lines.pop(3))
    assert lines[:5] == [
        "r-1: is training",
        "step 4 of 100, loss 2.0000, 0.1 s a step, 12,345 tokens/s, 10 s left",
        "validation: 3.000 bits per byte",
        "failed after step 3: the process of rank 1 on 10.0.0.1 ended; foldray went on from step 2",
        "",
    ]
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert rows[0][:6] == ["0", "10.0.0.1", "50%", "0.56", "1.00", "F"]
    assert rows[1] == ["1", "10.0.0.1", "90%", "1.80", "1.00", "F", "attention", "nothing"]


def test_skipped_steps_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path, place(0), step(1), {**step(2), "grad_norm": math.nan, "skipped_steps": 1}, beats=False)
    assert main(["status", str(run)]) == 0
    assert "skipped steps, whose gradients were not finite: 1" in capsys.readouterr().out
    assert RunFolder(run, RECIPE, {}).summary("failed").metrics["skipped_steps"] == 1


def test_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path, *RECORDS, status="finished")
    assert main(["status", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["status"], found["step"], found["steps"], found["val_bpb"]) == ("r-1", "finished", 4, 100, 3.0)
    assert found["checkpoint"]["step"] == 2
    assert [failure["ranks"] for failure in found["failures"]] == [[1]]
    assert [(each["rank"], each["waits"]) for each in found["ranks"]] == [(0, WAITS), (1, [])]


def test_a_run_that_has_gone_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = write(tmp_path, *RECORDS), time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3700)
    assert main(["status", str(run)]) == 0
    assert capsys.readouterr().out.startswith("r-1: should be training, but is silent; the last news is 1 h 1 min old\n")


def test_a_run_that_has_just_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path, beats=False)
    assert main(["status", str(run)]) == 0
    assert capsys.readouterr().out == "r-1: is training\nstep 0 of 100\nno checkpoint yet\n"


@pytest.mark.parametrize(
    ("file", "text"), [(RANKS, "[]"), (RANKS, '{"time": "now"}'), ("run.json", "{"), ("metrics.jsonl", "3\n")]
)
def test_damaged_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str) -> None:
    run = write(tmp_path, *RECORDS)
    (run / file).write_text(text)
    assert main(["status", str(run)]) == 2
    line = capsys.readouterr().err
    assert line.startswith("foldray: RUN=")
    assert f"its {file} cannot be read" in line
    assert line.count("\n") == 1


def test_texts_of_a_run_do_not_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path, *({**each, "what": "\x1b[2J lost"} if each is FAILED else each for each in RECORDS))
    ranks = json.loads((run / RANKS).read_text())
    ranks["ranks"][0]["doing"] = "\x1b[31m computes"
    (run / RANKS).write_text(json.dumps(ranks))
    (run / "run.json").write_text(json.dumps({"status": "running"}))
    assert main(["status", str(run)]) == 0
    out = capsys.readouterr().out
    assert "failed after step 3: ?[2J lost" in out
    assert "?[31m computes" in out
    assert "\x1b" not in out
    (run / "run.json").write_text(json.dumps({"status": "\x1b[2J"}))
    assert main(["status", str(run)]) == 0
    assert capsys.readouterr().out.startswith("r-1: ?[2J\n")


def test_the_time_to_a_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss is 4 for 20 steps, then 3, but for one step that is no number, and 2 from step 61 on. Each record comes a
    second after the one before, and a step takes a tenth of it."""
    losses = [4.0] * 20 + [3.0] * 40 + [2.0] * 20
    losses[45] = math.inf
    records = [step(number, loss) for number, loss in enumerate(losses, 1)]
    for at, bits in ((70, 2.5), (50, 3.0), (30, 5.0), (10, 3.0)):
        records.insert(at, validation(at, bits))  # type: ignore[arg-type]
    run = write(tmp_path, *records, beats=False)
    tokens = RECIPE.training.global_batch * RECIPE.data.seq_len
    assert main(["status", str(run), "--json", *(f"--loss={loss}" for loss in (3.2, 2.1, 1.9))]) == 0
    first, second, third = json.loads(capsys.readouterr().out)["reached"]
    # The median of twenty losses is 3.5 in step 30, and 3 in step 31.
    assert first["training"] == pytest.approx({"step": 31, "tokens": 31 * tokens, "seconds": 3.1, "elapsed_s": 32.1})
    # In steps 10 and 30, the validation loss is 2.08 and 3.47; in steps 50 and 70, 2.08 and 1.73.
    assert first["validation"]["step"] == second["validation"]["step"] == 50
    assert second["training"]["step"] == 71
    assert third == {"loss": 1.9, "training": None, "validation": third["validation"]}
    assert third["validation"]["step"] == 70
    assert third["validation"]["tokens"] == 70 * tokens
    assert main(["status", str(run), "--loss", "2.1", "--loss", "1.5"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("loss")]
    assert lines == [
        f"loss 2.1: training (median of 20 steps) from step 71 on, {71 * tokens:,} tokens, 7 s of steps, 1 min 14 s after "
        "the start; "
        f"validation from step 50 on, {50 * tokens:,} tokens, 5 s of steps, 51 s after the start",
        "loss 1.5: training (median of 20 steps) not yet; validation not yet",
    ]
    assert main(["status", str(run), "--loss", "nan"]) == 2
    assert "loss=nan: must be a number, in nats per token" in capsys.readouterr().err


@pytest.mark.parametrize("then", [5.0, math.inf])
def test_a_loss_that_rose_again_is_not_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str], then: float) -> None:
    losses = [2.0] * 30 + [then] * 30
    run = write(tmp_path, *(step(number, loss) for number, loss in enumerate(losses, 1)), validation(60, 9.0), beats=False)
    assert main(["status", str(run), "--json", "--loss", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["reached"] == [{"loss": 3.0, "training": None, "validation": None}]
