"""The command `foldray train`: it trains a recipe and prints the closing table."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import nullcontext, redirect_stdout, suppress
from pathlib import Path

from foldray.errors import UserError
from foldray.recipe import Recipe
from trainers.driver.resuming import newest_run
from trainers.driver.trainer import FoldTrainer
from trainers.faults import guardian
from trainers.faults.causes import reason, root_cause, tracebacks
from trainers.sinks.terminal import Console
from trainers.telemetry.metrics import metrics_of
from trainers.telemetry.records import as_json as to_json
from trainers.worker.online import MakeSearch

NEWEST = "newest"


def train(
    recipe: Recipe,
    resume: str | None = None,
    start: str | None = None,
    as_json: bool = False,
    search: MakeSearch | None = None,
) -> int:
    """Train and report. Return 0 on success, 1 if training failed, and 128 + its number if a signal has stopped it.

    Args:
        resume: id of a run to continue; `NEWEST` continues the recipe's newest run in its storage, or starts a new one.
        start: folder of a checkpoint to start a new run from.
        as_json: print a JSON document on standard output instead of the closing table.
    """
    console = Console(as_json)
    if resume == NEWEST:
        resume = newest_run(recipe)
    if again := guardian.run_to_resume():
        resume, start = again, None
    trainer = FoldTrainer(recipe, resume=resume, start=start, search=search, console=console)
    guardian.tell(run=trainer.folder.name, folder=str(trainer.folder))
    failure = None
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():  # Ray tells of lost workers on standard output
            trainer.fit()
    except Exception as error:
        if isinstance(cause := root_cause(error), UserError):
            raise cause from None
        if trainer.run is None or trainer.run.summary is None:
            raise  # training never started, so there are no results to report
        failure = error
    if trainer.run is None or trainer.run.summary is None:
        raise RuntimeError("the trainer returned without a summary")
    summary = trainer.run.summary
    if as_json:
        print(to_json(summary.as_dict()))
    else:
        console.close(summary, trainer.run.tracker.view_url, metrics_of(recipe))
    if failure is not None:
        file, gave_up = _write_traceback(failure, Path(summary.run_dir)), trainer.gave_up
        last = trainer.attempts[-1] if gave_up else None
        what, reached = (last.failure.what, last.reached) if last else (reason(failure), summary.steps)
        why = f" ({gave_up.reason})" if gave_up and gave_up.reason else ""
        text = f"training failed after step {reached}: {what}{why}; the traceback is in {file}"
        print(f"foldray: {text}", file=sys.stderr)
        return 128 + trainer.stopped if trainer.stopped else 1
    if trainer.run.stopped:
        again = f"foldray train RECIPE --resume {summary.run_id}"
        print(f"foldray: stopped after step {summary.steps}; to go on: {again}", file=sys.stderr)
        return 128 + (trainer.stopped or 0)
    return 0


def _write_traceback(failure: Exception, folder: Path) -> Path:
    """Write the tracebacks of a failure into a file, and return its path. If the run's disk is full, it is a temporary file."""
    text = tracebacks(failure)
    for place in (lambda: folder, lambda: Path(tempfile.mkdtemp(prefix="foldray-error-"))):
        with suppress(OSError):
            file = place() / "error.txt"
            file.write_text(text, encoding="utf-8", errors="backslashreplace")
            return file
    return Path(os.devnull)
