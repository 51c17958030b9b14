"""`foldray tune` checks the whole recipe before it opens a storage or MLflow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foldray.cli import main
from tuners.storage import open_storage

RECIPE = """
model: {preset: tiny, layers: 2}
engine: {kind: torch}
cluster: {workers: 2, storage: runs}
tracking: {uri: "http://127.0.0.1:9"}
"""


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("tune.hardware=nowhere.yaml", "foldray: tune.hardware=nowhere.yaml: cannot be read"),
        ("tune.hardware=recipe.yaml", "foldray: recipe.yaml: name="),
        ("tune.space.tp=[3]", "foldray: tune.space=as given: has no legal setting for 2 workers"),
        ("tune.study=../../etc", "foldray: tune.study=../../etc: "),
        (
            "tune.storage=postgresql://***@host/db",
            "foldray: tune.storage=postgresql://***@host/db: lacks its secret",
        ),
        ("tune.learn=nowhere/learnt.yaml", "foldray: tune.learn=nowhere/learnt.yaml: is in a folder that does not exist"),
        ("tune.trials=3", "foldray: tracking.uri=http://127.0.0.1:9: "),
    ],
)
def test_mistakes_are_told_before_mlflow_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], override: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    assert main(["tune", "recipe.yaml", override]) == 2
    error = capfd.readouterr().err
    assert error.startswith(line)
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"], "nothing is left behind"


@pytest.mark.gate(1 / 2)
def test_the_dashboard_tells_programs_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    study = tmp_path / "runs" / "tune" / "foldray"
    study.mkdir(parents=True)
    open_storage(f"sqlite:///{study}/tune.db")
    served = []
    monkeypatch.setattr("optuna_dashboard.run_server", lambda storage, host, port, artifact_store: served.append((host, port)))
    assert main(["dashboard", "recipe.yaml", "tracking.uri=null", "--port", "8123", "--json"]) == 0
    assert served == [("127.0.0.1", 8123)]
    out, error = capfd.readouterr()
    document = json.loads(out)
    assert document["dashboard"] == "http://127.0.0.1:8123/"
    assert " server --backend-store-uri sqlite:" in document["mlflow"]
    assert "Optuna's dashboard: http://127.0.0.1:8123/" in error
