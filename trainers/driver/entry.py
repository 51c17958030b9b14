"""The command `foldray train`: it trains a recipe and prints the closing table."""

from __future__ import annotations

import sys
from pathlib import Path

from foldray.errors import UserError
from foldray.recipe import Recipe
from trainers.driver.failures import reason, root_cause, tracebacks
from trainers.driver.report import Console
from trainers.driver.trainer import FoldTrainer
from trainers.records import as_json as to_json
from trainers.worker.online import MakeSearch


def train(
    recipe: Recipe,
    resume: str | None = None,
    start: str | None = None,
    as_json: bool = False,
    search: MakeSearch | None = None,
) -> int:
    """Train and report. Return 0 on success, and 1 if training failed.

    Args:
        resume: id of a run to continue.
        start: folder of a checkpoint to start a new run from.
        as_json: print a JSON document on standard output instead of the closing table.
        search: makes the search for `schedule.sp_bytes: auto` and `schedule.degrees`.

    Raises:
        UserError: the recipe cannot run here. No file has been written.
    """
    console = Console(as_json)
    trainer = FoldTrainer(recipe, resume=resume, start=start, search=search, console=console)
    failure = None
    try:
        trainer.fit()
    except Exception as error:
        cause = root_cause(error)
        if isinstance(cause, UserError):
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
        console.close(summary, trainer.run.tracker.view_url)
    if failure is not None:
        file = _write_traceback(failure, Path(summary.run_dir))
        told = f"training failed after step {summary.steps}: {reason(failure)}; the traceback is in {file}"
        print(f"foldray: {told}", file=sys.stderr)
        return 1
    return 0


def _write_traceback(failure: Exception, folder: Path) -> Path:
    """Write the tracebacks of a failure into a file, and return its path."""
    file = folder / "error.txt"
    file.write_text(tracebacks(failure))
    return file
