"""Routes on Ray: a training records them, and others replay them, under other folds and after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foldray.cli import main
from foldray.errors import UserError
from tests.trainers.driver.runs import fit, losses, recipe
from trainers import FoldTrainer
from trainers.routes.recorded import Recorded

pytestmark = pytest.mark.usefixtures("ray_session")
_STEPS = 6


def routed(storage: Path, fold: dict[str, int] | None = None, **sections: Any) -> Any:
    sizes = {"steps": _STEPS, "eval_sequences": 8, **sections.pop("training", {})}
    return recipe(
        storage, fold=fold or {"ep": 2}, training=sizes, engine={"kind": "torch"}, checkpoint={"every": 2}, precision="float64",
        schedule={"kind": "sequential"}, **sections,
    )  # fmt: skip


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
        ({"data": {"validation": {"fraction": 0.2}}}, "another section data"),
        ({"model": {"topk": 1}}, r"another model\.topk \(2 there, 1 here\)"),
    ],
    ids=str,
)
def test_routes_of_another_training_are_one_line(storage: Path, recorded: FoldTrainer, change: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        fit(routed(storage, routes={"replay": str(recorded.run.folder.path)}, **change))


def test_a_run_without_routes_is_refused_before_ray(storage: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^routes\.replay=.*: has no recorded routes"):
        fit(routed(storage, routes={"replay": str(tmp_path)}))


@pytest.mark.parametrize("key", ["record", "record_tokens", "replay"])
def test_a_model_without_experts_has_no_routes(tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = "nowhere" if key == "replay" else "1"
    assert main(["train", "quickstart", "model.moe_every=0", f"routes.{key}={value}"]) == 2
    assert f"routes.{key}={value}: needs a model with experts" in capsys.readouterr().err


def test_plan_and_bench_take_recorded_shares(recorded: FoldTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(recorded.run.folder.path)
    sizes = ["model.experts=4", "model.topk=2", "data.seq_len=32", "training.global_batch=8", "cluster.workers=2", "fold.ep=2"]
    assert main(["bench", "quickstart", *sizes, "--routes", run, "--rounds", "1", "--json"]) == 0
    even, uneven = json.loads(capsys.readouterr().out)["results"]
    assert (even["pattern"], uneven["pattern"], uneven["skew"]) == ("0", "recorded", None)
    assert uneven["overload"] > even["overload"]
    assert main(["plan", "quickstart", *sizes, "--cluster", "h100", "--routes", run, "--json"]) == 0
    steps = [json.loads(capsys.readouterr().out)["plans"][0]["step_time_s"]]
    assert main(["plan", "quickstart", *sizes, "--cluster", "h100", "--json"]) == 0
    steps.append(json.loads(capsys.readouterr().out)["plans"][0]["step_time_s"])
    assert steps[0] > steps[1]
    assert main(["plan", "quickstart", "--cluster", "h100", "--routes", run]) == 2
    assert "model.router.shares=4 shares with the sum 2: must have a share for each of 8 experts" in capsys.readouterr().err
