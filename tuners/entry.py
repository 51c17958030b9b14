"""The commands `foldray tune` and `foldray dashboard`."""

from __future__ import annotations

import shlex
import sys
from contextlib import closing
from pathlib import Path

from foldray.errors import MissingPackage, UserError
from foldray.recipe import Recipe
from foldray.urls import without_secrets
from trainers.sinks.mlflow_server import check_reachable
from trainers.telemetry.records import as_json as to_json
from tuners import report
from tuners.learning import write_corrected_hardware
from tuners.outcome import Outcome
from tuners.storage import open_storage, study_folder, study_url
from tuners.study import FoldTuner
from tuners.watchers import Console, DashboardNotes, MlflowRuns, artifact_folder


def tune(recipe: Recipe, as_json: bool = False) -> int:
    """Tune a recipe and print a report. Return 0 on success, and 1 if the measurements failed.

    All files that the recipe names are read and checked before the storage or MLflow is opened.
    """
    folder, learn = study_folder(recipe), recipe.tune.learn and Path(recipe.tune.learn)
    if learn and not learn.absolute().parent.is_dir():
        raise UserError("tune.learn", learn, "is in a folder that does not exist")
    tuner = FoldTuner(recipe, folder)
    runs = MlflowRuns(recipe, folder.parent.parent, folder)
    console = Console(recipe.tune.trials)
    try:
        with closing(console):
            outcome = tuner.fit((console, DashboardNotes(folder), runs))
    except RuntimeError as error:
        runs.close("FAILED", [])
        print(f"foldray: {error}", file=sys.stderr)
        return 1
    except BaseException:
        runs.close("KILLED", [])
        raise
    files = report.write_report(outcome, tuner.study, folder)
    if learn and tuner.hardware is not None:
        files["learnt"] = write_corrected_hardware(tuner.hardware, outcome, learn)
    runs.close("FINISHED", list(files.values()))
    if as_json:
        paths = {name: str(path) for name, path in files.items()}
        urls = {"storage": without_secrets(tuner.url), "mlflow_uri": runs.server.uri}
        print(to_json(report.summary(outcome) | {"files": paths} | urls))
    else:
        print(_closing(outcome, files, runs))
    return 0


def dashboard(recipe: Recipe, host: str, port: int, as_json: bool = False) -> int:
    """Serve Optuna's dashboard of a recipe's study until the user stops it. Print the command that starts MLflow's server.

    With `as_json`, standard output also gets the dashboard's address and the command as a JSON document.
    """
    try:
        from optuna_dashboard import run_server
    except ModuleNotFoundError as error:
        raise MissingPackage("dashboard", host, error.name or "optuna-dashboard", "pip install optuna-dashboard") from None
    from optuna.artifacts import FileSystemArtifactStore

    folder = study_folder(recipe)
    url = study_url(recipe, folder)
    check_reachable(recipe)  # before a database is made
    if recipe.tune.storage is None and not (folder / "tune.db").exists():
        raise UserError("tune.study", recipe.tune.study, f"has no database in {folder}; run foldray tune first")
    storage, artifacts = open_storage(url), artifact_folder(folder)
    artifacts.mkdir(parents=True, exist_ok=True)
    address, command = f"http://{host}:{port}/", MlflowRuns(recipe, folder.parent.parent, folder).server.view_command()
    print(f"Optuna's dashboard: {address} (Ctrl-C stops it)", file=sys.stderr)
    if command:
        print(f"MLflow: {command}", file=sys.stderr)
    if as_json:
        print(to_json({"dashboard": address, "mlflow": command}), flush=True)
    run_server(storage, host=host, port=port, artifact_store=FileSystemArtifactStore(str(artifacts)))
    return 0


def _closing(outcome: Outcome, files: dict[str, Path], runs: MlflowRuns) -> str:
    lines = [f"\n{report.trials_table(outcome)}\n", f"{outcome.best}: {report.gain_line(outcome)}", ""]
    lines += [f"  {name:<12}{path}" for name, path in files.items()]
    train = shlex.join(["foldray", "train", str(files["best"])])
    lines += ["", f"train it:   {train}", f"look at it: foldray dashboard RECIPE, and {runs.server.view_url(runs.study_run_id)}"]
    return "\n".join(lines)
