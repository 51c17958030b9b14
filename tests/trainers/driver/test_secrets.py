"""Passwords in addresses: foldray prints and stores none, and refuses those that Ray would store."""

from __future__ import annotations

import json
import logging
import socket
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import yaml
from mlflow import MlflowClient
from ray.train.torch import TorchTrainer

from foldray.blueprint import PRESETS, count_by_cut, parameter_table
from foldray.cli import main
from foldray.errors import MissingPackage, UserError
from foldray.recipe import Recipe
from tests.trainers.telemetry.records import run
from trainers import FoldTrainer
from trainers.cluster import joining, run_storage, storage_probe
from trainers.cluster.actors import Ranks, on_workers
from trainers.driver import checks
from trainers.sinks import mlflow_server
from trainers.sinks.mlflow_run import Tracker
from tuners import shared_study
from tuners.storage import open_storage

TRACKING = "http://me:hush@127.0.0.1:9"
RECIPE: dict[str, Any] = {
    "model": {"preset": "tiny", "layers": 2},
    "data": {"source": "text", "path": "texts/*", "seq_len": 32, "validation": {"fraction": 0.3}},
    "engine": {"kind": "torch"},
    "training": {"steps": 2, "global_batch": 4, "eval_sequences": 4},
    "tracking": {"uri": TRACKING},
    "tune": {"storage": "postgresql://me:hush@127.0.0.1:9/db"},
    "cluster": {"workers": 2, "storage": "runs"},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a recipe and its texts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in "abcd":
        (tmp_path / "texts" / name).write_text("".join(f"{name} is not {i * i}. " for i in range(500)))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE).replace("hush", "HUSH"))
    return tmp_path


@pytest.fixture
def tracked(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a database in place of the recipe's tracking server. A connection needs the password."""
    connect, uri = mlflow_server._connect, f"sqlite:///{place}/mlflow.db"

    def with_password(given: str) -> MlflowClient:
        assert given in (TRACKING, TRACKING.replace("hush", "HUSH"))
        return connect(uri)

    monkeypatch.setattr(mlflow_server, "_connect", with_password)
    monkeypatch.setattr(checks, "check_reachable", lambda recipe: None)  # nobody listens at the address itself
    return uri


def files_with(secret: str, folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if secret.encode() in path.read_bytes()]


LINES = [
    "tracking.uri=http://me:hush@127.0.0.1:9",
    "tracking.uri=postgresql://me:hush#hush@127.0.0.1:9/db",
    "tracking.uri=mysql://127.0.0.1:9/db?password=hush",
    "tracking.uri=http://***@127.0.0.1:9",
    "cluster.storage=s3://KEY:hu/sh/hush@bucket/runs",
    "cluster.storage=s3://bucket/runs?access_key=KEY&secret_key=hush",
    "cluster.address=me:hush@127.0.0.1:9",
    "cluster.address=ray://me:hush@127.0.0.1:9",
    "cluster.address=http://me:hush@127.0.0.1:9",
    "tracking=http://me:hush@127.0.0.1:9",
    "tracking.uri=[http://me:hush@127.0.0.1:9]",
]


@pytest.mark.parametrize("override", LINES)
def test_no_line_of_error_holds_the_password(
    ray_session: None, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], override: str
) -> None:
    if "address" in override:
        monkeypatch.setattr(ray, "is_initialized", lambda: False)  # otherwise the session's cluster is used
    monkeypatch.setattr(joining, "_ANSWER_S", 1.0)
    capfd.readouterr()
    assert main(["train", "recipe.yaml", override]) == 2
    out, line = capfd.readouterr()
    assert line.startswith("foldray: ")
    assert line.count("\n") == 1
    assert "***" in line
    assert "hush" not in out + line
    assert ("holds a password, a key or a token" in line) == ("storage" in override)
    assert ("lacks its secret" in line) == ("***" in override)
    assert not files_with("hush", place)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg2://me:hush@127.0.0.1:9/db",
        "postgresql+psycopg2://me:hush@127.0.0.1:port/db",
        "postgresql+psycopg2://127.0.0.1:9/db?password=hush",
        "postgresql+psycopg2://me:9@host:hush@127.0.0.1/db",
        "postgresql//me:hush@host/db",
        "://me:hush@host",
        "nonsense://me:hush@host/db",
        "mysql://me:hush@127.0.0.1:9/db",
        "postgresql://***@host/db",
    ],
)
def test_no_refused_study_holds_the_password(url: str) -> None:
    with pytest.raises(UserError) as caught:
        open_storage(url)
    assert "hush" not in f"{caught.value} {caught.value.args} {caught.value.__cause__}"
    assert "***" in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_driver_that_is_missing_is_asked_for_without_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "MySQLdb", None)
    with pytest.raises(MissingPackage, match=r"^tune\.storage=mysql://\*\*\*@host/db: needs the package 'MySQLdb'"):
        open_storage("mysql://me:hush@host/db")


@pytest.mark.nightly("a whole training")
def test_a_training_leaves_no_password_anywhere(
    ray_session: None, place: Path, tracked: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "recipe.yaml", "--json", "name=secret"]) == 0
    out, err = capfd.readouterr()
    summary = json.loads(out)
    assert "HUSH" not in out + err
    assert summary["mlflow_uri"] == "http://***@127.0.0.1:9"
    assert files_with("HUSH", place) == [place / "recipe.yaml"], "the user's own"
    folder = Path(summary["run_dir"])
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["tune"]["storage"] == "postgresql://***@127.0.0.1:9/db"
    params = MlflowClient(tracked).get_run(summary["mlflow_run_id"]).data.params
    assert params["tracking.uri"] == "http://***@127.0.0.1:9"

    assert main(["train", "recipe.yaml", "--json", "training.steps=3", "--resume", summary["run_id"]]) == 0
    assert json.loads(capfd.readouterr().out)["steps"] == 3
    assert main(["train", str(folder / "recipe.yaml")]) == 2
    assert "tracking.uri=http://***@127.0.0.1:9: lacks its secret" in capfd.readouterr().err


@pytest.mark.gate(1 / 3)
def test_workers_are_told_no_password(ray_session: None, place: Path, tracked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def fit(self: TorchTrainer) -> Any:
        told.append(str(self.train_loop_config))
        return SimpleNamespace(return_value={})

    def call(self: Ranks, *given: Any, **_: Any) -> list[dict[str, Any]]:
        told.append(str(given))
        return [{}]

    monkeypatch.setattr(TorchTrainer, "fit", fit)
    monkeypatch.setattr(Ranks, "call", call)
    recipe = Recipe.load("recipe.yaml")
    on_workers(recipe, print)
    FoldTrainer(recipe).fit()
    assert [each.count("://***@127.0.0.1:9") for each in told] == [2, 2]
    assert "HUSH" not in "".join(told)


@pytest.mark.nightly("a whole study")
def test_a_study_leaves_no_password_anywhere(
    ray_session: None, place: Path, tracked: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shared_study, "open_storage", lambda url: open_storage(f"sqlite:///{place}/study.db"))
    monkeypatch.setattr(shared_study, "storage_lock", lambda url, name: nullcontext())
    space = "tune.space={tp: [1], cp: [1], pp: [1], ep: [1, 2], kind: [sequential]}"
    settings = ["tune.trials=2", "tune.turns=1", "tune.steps=1", "tune.pairs=2", "tune.prune=null", space]
    assert main(["tune", "recipe.yaml", "--json", *settings]) == 0
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert "HUSH" not in out + err
    assert document["storage"] == "postgresql://***@127.0.0.1:9/db"
    assert yaml.safe_load(Path(document["files"]["best"]).read_text())["tracking"]["uri"] == "http://***@127.0.0.1:9"
    assert files_with("HUSH", place) == [place / "recipe.yaml"], "the user's own"


def test_a_server_that_fails_later_is_logged_without_the_password(
    place: Path, tracked: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(Recipe.parse(RECIPE), "r", place)

    def down(*_: Any, **__: Any) -> None:
        raise ConnectionError(f"API request to {TRACKING}/api/2.0 failed")

    tracker._client.log_batch = down  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        for record in run(2, layers=len(Recipe.parse(RECIPE).model.moe_layers)):
            tracker.take(record)
        tracker.close("FINISHED")
    assert "MLflow at http://***@127.0.0.1:9 fails (API request to http://***@127.0.0.1:9/api/2.0 failed)" in caplog.text
    assert "hush" not in caplog.text
    assert "hush" not in tracker.view_url


# Tests of the storage, which is tried before anything starts.


def test_a_storage_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    assert run_storage._reachable("cluster.storage", f"file://{tmp_path}") == f"file://{tmp_path}"
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="No such file or directory"):
        storage_probe.probe(f"file://{tmp_path}/absent")


def test_a_storage_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_storage, "_ANSWER_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        uri = f"s3://b/x?endpoint_override=127.0.0.1:{silent.getsockname()[1]}&scheme=http"
        recipe = Recipe.parse({"model": {"preset": "tiny"}, "cluster": {"storage": uri}})
        with pytest.raises(UserError, match=r"^cluster\.storage=s3://b/x.* \(no answer in 2 s\)"):
            run_storage.storage_folder(recipe)


def test_a_folder_may_be_given_as_a_uri(tmp_path: Path) -> None:
    recipe = Recipe.parse(
        {"model": {"preset": "tiny"}, "cluster": {"storage": f"file://{tmp_path}/a b/runs".replace(" ", "%20")}}
    )
    assert run_storage.storage_folder(recipe) == f"{tmp_path}/a b/runs"
    assert not (tmp_path / "a b").exists()


# Tests of the memory check.

LARGE = {"model": {"preset": "tiny", "vocab": 2**24, "hidden": 2**15}}


def test_a_model_that_this_machine_cannot_hold_is_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray starts"))
    with pytest.raises(UserError, match=r"^model=5\.5e\+11 parameters: 1 workers need .* TiB .*, but this machine has"):
        joining.connect(Recipe.parse(LARGE))
    crowd = {"model": {"preset": "tiny"}, "cluster": {"workers": 2**17}, "training": {"global_batch": 2**17}}
    with pytest.raises(UserError, match=r"131072 workers need .* TiB .*, but this machine has"):
        joining.connect(Recipe.parse(crowd), crowded=True)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_model_fits_where_it_is_trained(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every preset must fit on 1024 GPUs with a small fold, and the largest with one of their experts' number."""
    fold = {"tp": 2, "pp": 2, "ep": 16 if PRESETS[preset]["experts"] > 256 else 4}
    given = {
        "model": {"preset": preset, "vocab": PRESETS[preset]["vocab"] + PRESETS[preset]["vocab"] % 2}, "fold": fold,
        "cluster": {"workers": 1024, "gpu": True}, "training": {"global_batch": 1024}, "precision": "bfloat16",
    }  # fmt: skip
    node = {"Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [node] * 128)
    joining.check_room(Recipe.parse(given))


@pytest.mark.parametrize("engine", [{"kind": "torch"}, {"kind": "torch", "zero": 1}])
@pytest.mark.parametrize("fold", [{}, {"ep": 4}, {"tp": 2, "ep": 2, "etp": 2}, {"tp": 2, "pp": 2}])
def test_what_is_asked_for_is_no_more_than_ranks_hold(
    fold: dict[str, int], engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.parse(
        {
            "model": {"preset": "tiny-fine", "tied_embeddings": False}, "fold": fold, "engine": engine, "cluster": {"workers": 8},
            "training": {"global_batch": 8},
        }
    )  # fmt: skip
    ownership, held = recipe.ownership, 0.0
    for rank in range(8):
        for piece in ownership.pieces(rank).values():
            count, expert = _elements(piece.shape), piece.spec.gradient_class == "expert"
            sharers = recipe.placed_fold.edp if expert else recipe.placed_fold.dp * recipe.placed_fold.cp
            own = count / sharers if recipe.engine.zero and sharers > 1 else count
            held += count * 4 + own * 8 + (count * 4 if own == count else count * 4 + own * 4)
    monkeypatch.setattr(joining, "_PROCESS_BYTES", 0)
    joining._check_memory(recipe, held, "it")
    with pytest.raises(UserError, match="8 workers need"):
        joining._check_memory(recipe, held * 0.9, "it")


def _elements(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_are_counted_as_the_table_has_them(preset: str) -> None:
    model = Recipe.parse({"model": {"preset": preset}}).model
    rows = parameter_table(model)
    experts = sum(row.count for row in rows if row.gradient_class == "expert")
    assert count_by_cut(model) == (sum(row.count for row in rows) - experts, experts)
