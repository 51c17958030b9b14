"""MLflow: the data that a run logs, and servers that do not answer."""

import json
import logging
import math
import shlex
import socket
import time
from pathlib import Path
from typing import Any

import mlflow.cli
import pytest
from mlflow import MlflowClient

from foldray import Recipe, UserError
from foldray.urls import without_secrets
from tests.trainers.telemetry.records import resumed, run, saved, step, validation
from trainers.sinks.mlflow_run import Tracker
from trainers.sinks.mlflow_server import default_uri, flatten
from trainers.telemetry.records import Record


def recipe(uri: str | None = None, **changes: Any) -> Recipe:
    return Recipe.parse({"name": "r", "model": {"preset": "tiny"}, "tracking": {"uri": uri, "experiment": "tests"}, **changes})


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """A folder with one database for all tests of the module, because making its tables takes seconds.

    Its name has characters that mean something in a URL.
    """
    folder = tmp_path_factory.mktemp("storage") / "50%25 more?a=1#b"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def finished(storage: Path) -> Tracker:
    tracker = Tracker(recipe(), "r-1", storage)
    for record in run(30):
        tracker.take(record)
    (storage / "loss.png").write_bytes(b"a picture")
    tracker.store([storage / "loss.png", storage / "not there.png"])
    tracker.close("FINISHED")
    return tracker


def history(tracker: Tracker, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in tracker._client.get_metric_history(tracker.run_id, name)]


def test_a_run_is_in_the_storages_database(finished, storage):
    run_of = finished._client.get_run(finished.run_id)
    assert finished.uri == default_uri(storage)
    assert (storage / "mlflow.db").stat().st_size > 0
    assert [path.name for path in storage.parent.iterdir()] == [storage.name]
    assert (run_of.info.status, run_of.info.run_name) == ("FINISHED", "r-1")
    assert run_of.info.artifact_uri.startswith(f"{storage.as_uri()}/mlartifacts/")
    assert [file.path for file in finished._client.list_artifacts(finished.run_id)] == ["loss.png"]


def test_the_recipe_is_in_the_parameters(finished):
    params = finished._client.get_run(finished.run_id).data.params
    assert params["model.preset"] == "tiny"
    assert params["optimizer.betas"] == "[0.9, 0.95]"
    assert params["training.eval_every"] == "null"
    assert params["engine.zero"] == "1"


def test_every_step_and_validation_is_there(finished):
    metrics = finished._client.get_run(finished.run_id).data.metrics
    names = ("max_over_mean", "entropy")
    layers = {f"expert_load/layer_{layer}/{name}" for layer in recipe().model.moe_layers for name in names}
    assert set(metrics) == layers | {
        "loss", "learning_rate", "grad_norm", "tokens_per_s", "step_time_s", "mfu", "product_share", "balance_loss",
        "z_loss", "drop_rate",
        "expert_load/max_over_mean", "expert_load/dead", "expert_load/rank_max_over_mean", "expert_load/entropy",
        "validation/bits_per_byte", "validation/loss",
    }  # fmt: skip
    assert [at for at, _ in history(finished, "loss")] == list(range(1, 31))
    assert [at for at, _ in history(finished, "validation/bits_per_byte")] == [10, 20, 30]


def test_conversations_have_no_bits_per_byte(storage):
    tracker = Tracker(recipe(), "r-2", storage)
    for record in (step(1), {**validation(1), "bits_per_byte": None}, {**step(2), "trained_tokens": 7, "skipped_steps": 3}):
        tracker.take(record)
    tracker.close("FINISHED")
    metrics = tracker._client.get_run(tracker.run_id).data.metrics
    assert "validation/bits_per_byte" not in metrics
    assert (metrics["validation/loss"], metrics["trained_tokens"]) == (validation(1)["loss"], 7)
    assert metrics["skipped_steps"] == 3


def test_a_resumed_run_is_opened_again_and_no_step_is_logged_twice(finished, storage, monkeypatch):
    other = recipe(optimizer={"lr": 0.5})
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "get_metric_history", lambda *_: pytest.fail("it has every step of a week"))
        tracker = Tracker(other, "r-1", storage, finished.run_id)
    assert tracker._client.get_run(tracker.run_id).info.status == "RUNNING"
    records: list[Record] = [
        resumed(28),
        step(29),
        step(30),
        step(31),
        validation(30),
        validation(31),
        saved(31),
        step(32, loss=math.inf),
    ]
    for record in records:
        tracker.take(record)
    tracker.close("KILLED")
    assert tracker.run_id == finished.run_id
    assert [at for at, _ in history(tracker, "loss")] == list(range(1, 33))
    assert math.isnan(history(tracker, "loss")[-1][1])
    assert [at for at, _ in history(tracker, "validation/bits_per_byte")] == [10, 20, 30, 31]
    after = tracker._client.get_run(tracker.run_id)
    assert (after.info.status, after.data.params["optimizer.lr"]) == ("KILLED", "0.001")


def test_a_run_that_mlflow_does_not_know_is_begun_anew(storage):
    tracker = Tracker(recipe(), "r-2", storage, "0123456789abcdef0123456789abcdef")
    tracker.close("FAILED")
    assert tracker._client.get_run(tracker.run_id).info.status == "FAILED"


def test_a_run_whose_recipe_mlflow_does_not_take_has_failed(storage, monkeypatch):
    monkeypatch.setattr(MlflowClient, "log_batch", lambda *_, **__: pytest.fail("no"))
    client = Tracker.__new__(Tracker)
    client._client, client.experiment_id = MlflowClient(default_uri(storage)), "0"
    with pytest.raises(pytest.fail.Exception):
        client._create(recipe(), "r-6")
    (found,) = client._client.search_runs(["0"], "attributes.run_name = 'r-6'")
    assert found.info.status == "FAILED"


def test_a_deleted_run_is_begun_anew_with_a_word(storage, caplog):
    """Whoever deleted it may have meant it. A job that resumes by itself must get on."""
    made = Tracker(recipe(), "r-5", storage)
    made.close("KILLED")
    made._client.delete_run(made.run_id)
    again = Tracker(recipe(), "r-5", storage, made.run_id)
    again.take(step(1))
    again.close("FINISHED")
    assert again.run_id != made.run_id
    assert history(again, "loss") == [(1, 2.0)]
    assert f"run {made.run_id} is deleted (mlflow runs restore --run-id {made.run_id} brings it back)" in caplog.text


def test_a_deleted_experiment_is_refused(storage):
    made = Tracker(recipe(tracking={"experiment": "gone"}), "r", storage)
    made.close("FINISHED")
    made._client.delete_experiment(made.experiment_id)
    with pytest.raises(UserError, match=r"tracking\.experiment=gone: is deleted"):
        Tracker(recipe(tracking={"experiment": "gone"}), "r", storage)


def test_the_command_that_shows_the_run(finished, storage):
    command = finished.view_command()
    assert f" server --backend-store-uri {shlex.quote(default_uri(storage))} " in command
    assert f" --artifacts-destination {shlex.quote(storage.as_uri())}/mlartifacts --host 127.0.0.1 " in command
    assert finished.view_url.endswith(f"/#/experiments/{finished.experiment_id}/runs/{finished.run_id}")
    program, arguments = command.split(" server ")
    assert Path(program).name == "mlflow" or program.endswith(" -m mlflow")
    mlflow.cli.server.make_context("server", shlex.split(arguments))  # fails if MLflow has no such option


def test_a_failure_during_the_run_is_one_warning_and_nothing_is_lost(storage, monkeypatch, caplog):
    tracker = Tracker(recipe(), "r-3", storage)
    send = tracker._client.log_batch

    def down(*_, **__):
        raise ConnectionError("server down")

    monkeypatch.setattr(tracker._client, "log_batch", down)
    tracker.take(step(1))
    tracker._sender._send_pending()
    tracker.take(step(2))
    tracker._sender._send_pending()
    assert caplog.text.count("server down") == 1
    monkeypatch.setattr(tracker._client, "log_batch", send)
    tracker.close("FINISHED")
    assert [at for at, _ in history(tracker, "loss")] == [1, 2]
    assert caplog.text.count("WARNING") == 2
    assert caplog.text.count("answers again, and gets the metrics that it missed") == 1


def test_a_database_that_is_gone_is_one_line(tmp_path, capfd, caplog):
    """MLflow itself would print the stack of every try."""
    tracker = Tracker(recipe(), "r-4", tmp_path)
    (tmp_path / "mlflow.db").unlink()
    for number in (1, 2):
        tracker.take(step(number))
        tracker._sender._send_pending()
    assert [entry.name for entry in caplog.records] == ["trainers.sinks.mlflow_run"]
    assert "fails (attempt to write a readonly database)" in caplog.text
    assert "Traceback" not in capfd.readouterr().err
    tracker.close("FAILED")


@pytest.fixture
def slept(monkeypatch):
    """The seconds of every pause between two tries."""
    pauses, sleep = [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (pauses.append(seconds), sleep(seconds)))
    return pauses


@pytest.mark.parametrize(
    "uri", ["nonsense://x", "sqlite:////proc/nowhere/mlflow.db", "sqlite://mlflow.db", "postgresql://u:p@127.0.0.1:1/mlflow"]
)
def test_an_unusable_uri_is_the_users_mistake(uri, tmp_path, slept):
    with pytest.raises(UserError, match=r"^tracking\.uri=.*legal: sqlite:////folder/mlflow\.db") as caught:
        Tracker(recipe(uri), "r", tmp_path)
    assert caught.value.value == without_secrets(uri)
    assert "\n" not in str(caught.value)
    assert sum(slept) < 15
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_the_users_mistake(tmp_path):
    (tmp_path / "notes.db").write_text("not a database at all, " * 100)
    with pytest.raises(UserError, match=r"tracking\.uri=.*not a database"):
        Tracker(recipe(f"sqlite:///{tmp_path}/notes.db"), "r", tmp_path)


def test_a_server_that_refuses_is_the_users_mistake(tmp_path, slept):
    with socket.socket() as bound:  # a bound port that does not listen refuses connections
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(UserError, match=r"^tracking\.uri=http.*Connection refused"):
            Tracker(recipe(f"http://127.0.0.1:{bound.getsockname()[1]}"), "r", tmp_path)
        assert sum(slept) < 15


def test_a_server_that_never_answers_is_the_users_mistake(tmp_path, monkeypatch, slept):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(UserError, match=r"^tracking\.uri=http.*timed out"):
            Tracker(recipe(f"http://127.0.0.1:{silent.getsockname()[1]}"), "r", tmp_path)
        assert sum(slept) < 15


def test_a_relative_database_is_named_absolutely(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainers.sinks.mlflow_server._connect", lambda uri: pytest.fail(uri))
    with pytest.raises(pytest.fail.Exception, match=f"sqlite:///{tmp_path}/my.db"):
        Tracker(recipe("sqlite:///my.db"), "r", tmp_path)


def test_nothing_is_said_on_the_terminal(tmp_path, capfd):
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.INFO)
    Tracker(recipe(), "r-quiet", tmp_path).close("FINISHED")
    assert capfd.readouterr() == ("", "")


def test_flatten():
    assert flatten({"a": {"b": 1, "c": {"d": None}}, "e": "x", "f": [1, True]}) == {
        "a.b": "1", "a.c.d": "null", "e": "x", "f": json.dumps([1, True]),
    }  # fmt: skip
