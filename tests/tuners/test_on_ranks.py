"""Whole studies with measured steps, on the ranks of the pool instead of Ray's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foldray.recipe import Recipe
from tests.foldray.test_recipe import SHIPPED
from tests.pool import RankPool, RankPools
from tuners import report
from tuners.measure import Gain
from tuners.outcome import Outcome
from tuners.study import AS_IT_STANDS, FoldTuner

CHOSEN: dict[str, Any] = {}
"""The orders that a rank has chosen for recipes. The pool closes all process groups after a turn, so each builds its engine."""


def turn(rank: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function({"rank": rank, "device": torch.device("cpu"), "chosen": CHOSEN}, *arguments)


class PoolRanks:
    """The ranks of a pool, as `Bench` uses those of Ray."""

    def __init__(self, pool: RankPool):
        self._pool, self.hosts = pool, ["here"]

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float | None) -> list[Any]:
        return self._pool.run(turn, function, arguments)

    def close(self) -> None:
        self._pool.close()


def tuned(given: Recipe, folder: Path, ranks: RankPools, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Run a study, and check that it ends with a winner that the run-off confirms, or says that none is surely faster."""
    pool = ranks(given.cluster.workers)
    monkeypatch.setattr("tuners.measure.Ranks", lambda recipe, nodes: PoolRanks(pool))
    for name in ("connect", "check_room"):
        monkeypatch.setattr(f"tuners.study.joining.{name}", lambda *_, **__: None)
    tuner = FoldTuner(given, folder)
    outcome = tuner.fit()
    assert [(trial.record.setting, trial.record.reason) for trial in outcome.trials if trial.record.reason] == []
    assert outcome.trials[0].record.setting == f"{tuner.table.default}{AS_IT_STANDS}"
    assert len(outcome.trials) == min(given.tune.trials, len(tuner.table.rows))
    line = report.gain_line(outcome)
    if outcome.gain is None:
        assert outcome.recipe == given
        assert line.startswith(("No setting is surely faster", "The recipe as it stands is the best"))
    else:
        assert (outcome.gain.low > 1, outcome.gain.pairs) == (True, given.tune.pairs)
    assert all(isinstance(result, Gain) for _, result in outcome.run_off)
    print(f"{given.name}: {len(tuner.table.rows)} rows, own: {tuner.table.default}\n{report.trials_table(outcome)}\n{line}\n")
    return outcome


def small(values: dict[str, Any], **tune: Any) -> Recipe:
    """Return a recipe with little to compute, whose study is short."""
    values["model"] |= {"layers": 2}
    values["data"] = {"seq_len": 128}
    values["tune"] = {"trials": 3, "turns": 2, "steps": 1, **tune}
    return Recipe.parse(values)


EIGHT = ("quickstart", "flowmoe", "foldmoe", "disaggregated", "folding", "together", "dropless_deepspeed", "fine_tuning")


@pytest.mark.nightly("whole studies")
@pytest.mark.parametrize("name", EIGHT)
def test_a_shipped_recipe_is_tuned(name: str, ranks: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = (path for path in SHIPPED if path.stem == name)
    values = Recipe.load(path).model_dump()
    values["engine"] = {"kind": "torch"}  # DeepSpeed makes the ranks' process group itself
    tuned(small(values), tmp_path, ranks, monkeypatch)


@pytest.mark.nightly("a whole study")
def test_a_study_of_shared_and_own_workers(ranks: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = (path for path in SHIPPED if path.stem == "disaggregated")
    values = Recipe.load(path).model_dump() | {"engine": {"kind": "torch"}}
    space = {
        "attention": [0, 2],
        "tp": [1],
        "cp": [1],
        "pp": [1],
        "ep": [2],
        "etp": [1],
        "degree": [1],
        "kind": ["sequential", "af_pipe"],
    }
    outcome = tuned(small(values, space=space, trials=9), tmp_path, ranks, monkeypatch)
    rows = [outcome.table.rows[trial.row] for trial in outcome.counted if trial.row is not None]
    assert {row.workers for row in rows} == {"shared", "own"}


@pytest.mark.nightly("a whole study")
def test_a_study_with_a_pipeline_and_chunks(ranks: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later position reduces chunks inside its list, which the first one does not have."""
    values = {
        "name": "pipeline", "model": {"preset": "tiny"}, "engine": {"kind": "torch"}, "fold": {"pp": 2, "ep": 2},
        "training": {"global_batch": 8}, "schedule": {"kind": "stream", "degree": 2, "reduction": "chunks", "sp_bytes": 65536},
        "cluster": {"workers": 4},
    }  # fmt: skip
    space = {
        "tp": [1],
        "cp": [1],
        "pp": [2],
        "ep": [2],
        "etp": [1],
        "kind": ["stream", "list"],
        "degree": [2],
        "sp_bytes": [65536, None],
    }
    outcome = tuned(small(values, space=space), tmp_path, ranks, monkeypatch)
    assert all(trial.record.over_bound and trial.record.over_bound >= 0.99 for trial in outcome.counted)
