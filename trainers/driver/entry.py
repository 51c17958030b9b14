"""`foldray train`: a recipe from the command line to its closing table."""

from __future__ import annotations

import sys
import textwrap
import traceback
from pathlib import Path

from foldray.errors import UserError
from foldray.recipe import Recipe
from foldray.urls import told_without
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
    """Train and report; 0 on success, 1 when training failed.

    Args:
        resume: id of a run to go on with.
        start: folder of a checkpoint to begin a new run at.
        search: makes what searches for `schedule.sp_bytes: auto` and `schedule.degrees`.

    Raises:
        UserError: the recipe cannot run here; nothing has been written.
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
            raise  # nothing has been trained that could be reported on
        failure = error
    if trainer.run is None or trainer.run.summary is None:
        raise RuntimeError("the trainer came back without a summary")
    summary = trainer.run.summary
    if as_json:
        print(to_json(summary.as_dict()))
    else:
        console.close(summary, trainer.run.tracker.view_url)
    if failure is not None:
        cause, file = root_cause(failure), _keep(failure, Path(summary.run_dir))
        reason = textwrap.shorten(told_without(f"{type(cause).__name__}: {cause}"), 600, placeholder=" …")
        print(f"foldray: training failed after step {summary.steps}: {reason}; the traceback is in {file}", file=sys.stderr)
        return 1
    return 0


def _keep(failure: Exception, folder: Path) -> Path:
    """Write down the tracebacks of every worker that failed, and of the driver; the file."""
    workers = {f"rank {rank}": error for rank, error in getattr(failure, "worker_failures", {}).items()}
    texts = [f"{where}\n{''.join(traceback.format_exception(error))}" for where, error in {**workers, "driver": failure}.items()]
    file = folder / "error.txt"
    file.write_text(told_without("\n".join(texts)))
    return file


def root_cause(error: BaseException) -> BaseException:
    """The first worker's own exception inside what Ray wraps around it; a user's mistake goes before what came of it."""
    if isinstance(error, UserError):
        return error
    failures = list((getattr(error, "worker_failures", None) or {}).values())
    if failures:
        return root_cause(next((failure for failure in failures if isinstance(failure, UserError)), failures[0]))
    inner = getattr(error, "cause", None) or error.__cause__
    return root_cause(inner) if isinstance(inner, BaseException) else error
