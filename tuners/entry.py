"""`foldray tune` and `foldray dashboard`, from the command line to what they print."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from foldray.errors import MissingPackage, UserError
from foldray.recipe import Recipe
from foldray.urls import without_secrets
from trainers.cluster.run_storage import storage_folder
from trainers.records import as_json as to_json
from tuners import report
from tuners.learning import learnt
from tuners.storage import open_storage
from tuners.study import FoldTuner, Outcome
from tuners.watchers import Console, Dashboard, Runs, artifact_folder


def tune(recipe: Recipe, as_json: bool = False) -> int:
    """Tune and report; 1 where nothing could be measured.

    Raises:
        UserError: the recipe cannot be tuned here.
    """
    folder = study_folder(recipe)
    console, runs = Console(recipe.tune.trials), None
    try:
        runs = Runs(recipe, folder.parent.parent, folder)
        tuner = FoldTuner(recipe, folder, (console, Dashboard(folder), runs))
        outcome = tuner.fit()
    except RuntimeError as error:
        console.close()
        if runs is not None and runs.parent:
            runs.close("FAILED", [])
        print(f"foldray: {error}", file=sys.stderr)
        return 1
    except BaseException:
        console.close()
        if runs is not None and runs.parent:
            runs.close("KILLED", [])
        raise
    reference = float(tuner.study.user_attrs["reference_s"])
    files = report.write(outcome, tuner.study, reference, folder)
    if recipe.tune.learn and tuner.hardware is not None:
        files["learnt"] = learnt(tuner.hardware, outcome, Path(recipe.tune.learn))
    runs.close("FINISHED", list(files.values()))
    if as_json:
        paths = {name: str(path) for name, path in files.items()}
        document = report.summary(outcome, reference) | {
            "files": paths,
            "storage": without_secrets(tuner.url),
            "mlflow_uri": runs.server.uri,
        }
        print(to_json(document))
    else:
        print(_closing(recipe, outcome, files, runs))
    return 0


def dashboard(recipe: Recipe, host: str, port: int) -> int:
    """Serve Optuna's dashboard of a recipe's study until it is stopped; say how MLflow's is started.

    Raises:
        UserError: there is no study yet.
    """
    try:
        from optuna_dashboard import run_server
    except ModuleNotFoundError as error:
        raise MissingPackage("dashboard", host, error.name or "optuna-dashboard", "pip install optuna-dashboard") from None
    from optuna.artifacts import FileSystemArtifactStore

    folder = study_folder(recipe)
    url = recipe.tune.storage or f"sqlite:///{folder}/tune.db"
    if recipe.tune.storage is None and not (folder / "tune.db").exists():
        raise UserError("tune.study", recipe.tune.study, f"has no database in {folder}; run foldray tune first")
    storage, artifacts = open_storage(url), artifact_folder(folder)
    artifacts.mkdir(parents=True, exist_ok=True)
    print(f"Optuna's dashboard: http://{host}:{port}/ (Ctrl-C stops it)", file=sys.stderr)
    if command := Runs(recipe, folder.parent.parent, folder).server.view_command():
        print(f"MLflow: {command}", file=sys.stderr)
    run_server(storage, host=host, port=port, artifact_store=FileSystemArtifactStore(str(artifacts)))
    return 0


def study_folder(recipe: Recipe) -> Path:
    """Of a study's report, pictures and, unless the recipe names another, database.

    Raises:
        UserError: runs are stored where no files can be written.
    """
    storage = storage_folder(recipe)
    if "://" in storage:
        raise UserError("cluster.storage", storage, "must be a folder for tuning; a study's pictures are written there")
    return Path(storage) / "tune" / recipe.tune.study


def _closing(recipe: Recipe, outcome: Outcome, files: dict[str, Path], runs: Runs) -> str:
    shown = [f"\n{report.table(outcome)}\n", f"{outcome.best}: {report.gain_line(outcome)}", ""]
    shown += [f"  {name:<12}{path}" for name, path in files.items()]
    train = shlex.join(["foldray", "train", str(files["best"])])
    shown += ["", f"train it:   {train}", f"look at it: foldray dashboard RECIPE, and {runs.server.view_url(runs.parent)}"]
    return "\n".join(shown)
