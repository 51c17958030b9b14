"""Routes on Ray: a training records them, and others replay them, under other folds and after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foldray.cli import main
from foldray.errors import UserError
from foldray.recipe import Recipe
from tests.trainers.driver.runs import fit, losses, recipe
from trainers import FoldTrainer
from trainers.routes.recorded import Recorded

pytestmark = pytest.mark.usefixtures("ray_session")
_STEPS = 6


def routed(storage: Path, fold: dict[str, int] | None = None, **sections: Any) -> Recipe:
    sizes = {"steps": _STEPS, "eval_sequences": 8, **sections.pop("training", {})}
    usual = {"engine": {"kind": "torch"}, "schedule": {"kind": "sequential"}, "checkpoint": {"every": 2}}
    precision = sections.pop("precision", "float64")
    given = recipe(storage, fold=fold or {"ep": 2}, training=sizes, **{**usual, **sections})
    return Recipe.parse({**given.model_dump(mode="json"), "precision": precision})


@pytest.fixture(scope="module")
def recorded(storage: Path, ray_session: None) -> FoldTrainer:
    """A training that has stopped in between, and went on."""
    wanted = {"record": 1, "record_tokens": 1}
    begun = fit(routed(storage, routes=wanted, training={"stop_after": 4}))
    return fit(routed(storage, {"tp": 2}, routes=wanted), resume=begun.run.folder.path.name)


def test_counts_are_those_of_the_metrics(recorded: FoldTrainer) -> None:
    run = recorded.run.folder.path
    routes = Recorded(str(run), "routes")
    assert routes.steps == [*range(1, _STEPS + 1)]
    for line in (run / "metrics.jsonl").read_text().splitlines():
        if (record := json.loads(line))["kind"] == "step":
            counts = routes.counts(record["step"])
            assert counts.shape == (2, 2, 4)
            np.testing.assert_array_equal(counts.sum(axis=0), record["load"])


@pytest.mark.parametrize(
    "fold", [{"ep": 2}, pytest.param({"cp": 2, "ep": 2}, marks=pytest.mark.nightly("trains again"))], ids=str
)
def test_a_replay_is_the_training_again(storage: Path, recorded: FoldTrainer, fold: dict[str, int]) -> None:
    run = str(recorded.run.folder.path)
    replayed = fit(routed(storage, fold, routes={"replay": run}))
    assert losses(replayed) == pytest.approx(losses(recorded), abs=1e-10)
    assert set(replayed.run.folder.history.steps.column("replaced_rate")) == {0.0}


@pytest.mark.nightly("trains again")
def test_with_another_rate_routers_would_choose_others(storage: Path, recorded: FoldTrainer) -> None:
    run = str(recorded.run.folder.path)
    replayed = fit(routed(storage, routes={"replay": run}, optimizer={"lr": 1e-2}))
    rates = replayed.run.folder.history.steps.column("replaced_rate")
    assert rates[0] == 0
    assert rates[-1] > 0


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"training": {"seed": 1}}, r"has routes of a training with another training\.seed \(0 there, 1 here\)"),
        ({"training": {"global_batch": 4}}, r"another training\.global_batch \(8 there, 4 here\)"),
        ({"data": {"seq_len": 16}}, r"another data\.seq_len \(32 there, 16 here\)"),
        ({"data": {"path": "{storage}/texts/[01].txt"}}, "another section data"),
        ({"model": {"topk": 1}}, r"another model\.topk \(2 there, 1 here\)"),
    ],
    ids=str,
)
def test_routes_of_another_training_are_one_line(storage: Path, recorded: FoldTrainer, change: dict[str, Any], line: str) -> None:
    if "path" in change.get("data", {}):
        change = {"data": {"path": change["data"]["path"].format(storage=storage)}}
    with pytest.raises(UserError, match=line):
        fit(routed(storage, routes={"replay": str(recorded.run.folder.path)}, **change))


def test_a_run_without_routes_is_refused_before_ray(storage: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^routes\.replay=.*: has no recorded routes"):
        fit(routed(storage, routes={"replay": str(tmp_path)}))


@pytest.mark.parametrize("key", ["record", "record_tokens", "replay"])
def test_a_model_without_experts_has_no_routes(tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = "nowhere" if key == "replay" else "1"
    assert main(["train", "quickstart", "model.dense_first=4", f"routes.{key}={value}"]) == 2
    assert f"routes.{key}={value}: needs a model with experts" in capsys.readouterr().err


def test_health_sums_them_up(recorded: FoldTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(recorded.run.folder.path)
    assert main(["health", run, "--json"]) == 0
    routes = json.loads(capsys.readouterr().out)["routes"]
    assert routes["steps"] == _STEPS
    assert 1 <= routes["overload"][0] <= routes["overload"][1] <= routes["overload"][2] <= 2
    assert 0 < routes["stays"] < 1
    assert main(["health", run]) == 0
    assert (
        f"recorded routes of 6 steps: fullest rank over the mean: median {routes['overload'][0]:.2f}" in capsys.readouterr().out
    )


@pytest.mark.nightly("starts ranks")
def test_plan_and_bench_take_recorded_shares(recorded: FoldTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(recorded.run.folder.path)
    sizes = ["model.experts=4", "model.topk=2", "data.seq_len=32", "training.micro_batch=4", "cluster.workers=2", "fold.ep=2"]
    assert main(["bench", "quickstart", *sizes, "--routes", run, "--rounds", "1", "--json"]) == 0
    even, uneven = json.loads(capsys.readouterr().out)["results"]
    assert (even["pattern"], uneven["pattern"], uneven["skew"]) == ("0", "recorded", None)
    assert uneven["overload"] > even["overload"]
    assert main(["plan", "quickstart", *sizes, "--cluster", "h100", "--ep", "2", "--routes", run, "--json"]) == 0
    steps = [json.loads(capsys.readouterr().out)["candidates"][0]["step_time_s"]]
    assert main(["plan", "quickstart", *sizes, "--cluster", "h100", "--ep", "2", "--json"]) == 0
    steps.append(json.loads(capsys.readouterr().out)["candidates"][0]["step_time_s"])
    assert steps[0] > steps[1]
    assert main(["plan", "quickstart", "--cluster", "h100", "--routes", run]) == 2
    assert "model.router.shares=4 shares with the sum 2: must have a share for each of 8 experts" in capsys.readouterr().err


@pytest.mark.nightly("trains three times")
def test_experts_that_change_places_change_no_loss(storage: Path, ray_session: None) -> None:
    """The second training stops in between, under another fold, whose ranks have other experts."""
    skewed = {"model": {"router": {"balance_loss": 0.0}, "init_std": 0.2}, "optimizer": {"lr": 1e-2}}
    stays, moves = (fit(routed(storage, moe={"place_every": every}, **skewed)) for every in (None, 1))
    told = [record for record in records_of(moves) if record["kind"] == "placed"]
    assert told
    assert all(record["expected"] < record["overload"] for record in told)
    assert sorted(moves.run.folder.history.placed) == [record["step"] for record in told]
    assert losses(moves) == pytest.approx(losses(stays), abs=1e-10)
    begun = fit(routed(storage, {"ep": 2}, moe={"place_every": 1}, training={"stop_after": 3}, **skewed))
    resumed = fit(
        routed(storage, {"ep": 2, "etp": 1, "tp": 2}, moe={"place_every": 2}, **skewed), resume=begun.run.folder.path.name
    )
    assert losses(resumed) == pytest.approx(losses(stays), abs=1e-10)


@pytest.mark.nightly("trains again")
def test_deepspeed_records_its_routes(storage: Path, ray_session: None) -> None:
    wanted = {"routes": {"record": 2, "record_tokens": 3}, "engine": {"kind": "deepspeed", "zero": 1}, "precision": "float32"}
    trained = fit(routed(storage, **wanted))
    routes = Recorded(str(trained.run.folder.path), "routes")
    assert routes.steps == [2, 3, 4, 6]
    experts = routes.experts(3, range(8))
    np.testing.assert_array_equal([np.bincount(block.flatten(), minlength=4) for block in experts], routes.counts(3).sum(axis=0))


def records_of(trainer: FoldTrainer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trainer.run.folder.path / "metrics.jsonl").read_text().splitlines()]
