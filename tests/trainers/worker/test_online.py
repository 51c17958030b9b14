"""The first steps of a training: it measures ops, tries degrees and sizes, and keeps the fastest measured ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient

from foldray.comm import Groups
from foldray.errors import UserError
from foldray.recipe import Recipe
from tests.trainers.driver.runs import MODEL
from trainers import FoldTrainer
from trainers.worker.online import PATIENCE, SMALLEST, STEPS, TURNS, WATCHED, Knobs, Online
from tuners import OnlineSearch


class Known:
    """A search that tries given rows."""

    def __init__(self, rows: list[Knobs]):
        self.rows, self.told = list(rows), {}

    def ask(self) -> Knobs | None:
        return self.rows.pop(0) if self.rows else None

    def tell(self, knobs: Knobs, seconds: float) -> None:
        self.told[knobs] = seconds

    @property
    def finalists(self) -> list[Knobs]:
        return sorted(self.told, key=self.told.__getitem__)[:2]


SIZES = [Knobs(1, 1000), Knobs(1, 2000), Knobs(1, 500)]


def tuned(
    ranks: Any, seconds: Callable[..., float], steps: int, rows: list[Knobs] = SIZES, **schedule: Any
) -> list[dict[str, Any]]:
    return ranks(2).run(_tune, seconds, steps, rows, schedule)


def _tune(rank: int, seconds: Callable[..., float], steps: int, rows: list[Knobs], schedule: dict[str, Any]) -> dict[str, Any]:
    """Run steps with made-up times.

    Args:
        seconds: the time of a step by rank, size (or degree, if degrees are searched) and the number of its steps so far.
    """
    from tests.foldray.parity import batches, engine_of, make_recipe

    recipe = make_recipe(2, {"ep": 2}, schedule={"reduction": "chunks", **schedule})
    groups = Groups.create(recipe.placed_fold, rank)
    execution, known, records = engine_of(recipe, groups).execution, list[Known](), []

    def make(degrees: Any, sizes: Any) -> Known:
        known.append(Known(rows))
        return known[-1]

    online = Online(execution, groups, torch.device("cpu"), recipe.orderings, sizes=rows[0].sp_bytes > 0)
    going = online.steps(make, records.append)
    next(going)
    sizes: list[int | None] = []
    for _ in range(steps):
        if execution.lacks_costs or execution.trace is not None:  # other steps do not matter here
            execution.train(batches(recipe, groups.dp_rank, 0))
            execution.gradients.zero()
        slicing = execution.ordering.slicing
        degree = slicing.degree if slicing else 1
        sizes.append(degree if recipe.schedule.degrees else execution.ordering.reduction.bytes)
        try:
            going.send(seconds(rank, sizes[-1], sizes.count(sizes[-1])))
        except StopIteration:
            break
    groups.close()
    return {"sizes": sizes, "told": known[-1].told if known else {}, "records": records, "costs": execution.ordering.costs,
            "chosen": online.chosen, "runs": execution.ordering}  # fmt: skip


def made_up(rank: int, size: int | None, number: int) -> float:
    """Return times with slow first steps and one outlier. With 500 the second rank is slower."""
    if number <= 2:
        return 50.0
    if number == 6:
        return 9.0
    return {1000: 3.0, 2000: 2.0, 500: 1.0 + 4 * rank}.get(size or 0, 7.0)


def test_all_ranks_try_the_same_sizes_and_the_slowest_counts(ranks) -> None:
    first, second = tuned(ranks, made_up, 2 + 3 * STEPS + 4 * TURNS)
    last = [2000] * TURNS + [1000] * 2 * TURNS + [2000] * TURNS
    assert first["sizes"] == second["sizes"] == [None] * 2 + [1000] * STEPS + [2000] * STEPS + [500] * STEPS + last
    assert list(first["told"].values()) == [3.0, 2.0, 5.0], "medians behind the warm-up, of the slower rank"
    assert second["told"] == {}
    assert first["chosen"] == second["chosen"] == Knobs(1, 2000)
    assert first["runs"].reduction.bytes == second["runs"].reduction.bytes == 2000
    assert first["costs"] == second["costs"] is not None, "both go by the first rank's"
    assert [record["sp_bytes"] for record in first["records"]] == [1000, 2000, 500, 2000]
    assert [record["step_time_s"] for record in first["records"]] == [3.0, 2.0, 5.0, 2.0]
    assert [record["chosen"] for record in first["records"]] == [False, False, False, True]
    assert second["records"] == []


def drifting(rank: int, size: int | None, number: int) -> float:
    """Return times of a machine that was slow during the trial of 1000."""
    return 1.0 if size == 1000 and number > STEPS else made_up(rank, size, number)


def test_the_best_two_take_turns_and_these_decide(ranks) -> None:
    first, second = tuned(ranks, drifting, 2 + 3 * STEPS + 4 * TURNS)
    assert list(first["told"].values()) == [3.0, 2.0, 5.0]
    assert first["chosen"] == second["chosen"] == Knobs(1, 1000)
    assert first["records"][-1] == {
        "kind": "tried",
        "degree": 1,
        "sp_bytes": 1000,
        "step_time_s": 1.0,
        "chosen": True,
        "order": None,
    }


def test_steps_that_drift_for_long_are_searched_for_again(ranks) -> None:
    """The link becomes slower in mid-run. Then another size is the best, and one search more finds it."""
    search, watch = 3 * STEPS + 4 * TURNS, WATCHED * (1 + PATIENCE)
    first, second = tuned(ranks, slower, 2 + search + watch + 2 + search)
    assert first["sizes"] == second["sizes"]
    assert first["sizes"][2 + search : 2 + search + watch] == [2000] * watch, "the first median is the time that was found"
    assert first["sizes"][2 + search + watch + 2 :][: 3 * STEPS] == [1000] * STEPS + [2000] * STEPS + [500] * STEPS
    assert first["chosen"] == second["chosen"] == Knobs(1, 1000)
    (drifted,) = [record for record in first["records"] if record["kind"] == "drifted"]
    assert drifted == {"kind": "drifted", "step_time_s": 4.0, "found_s": 2.0}
    assert not second["records"]


def slower(rank: int, size: int | None, number: int) -> float:
    """Return times that change after the first median of the watch."""
    if number <= STEPS + 2 * TURNS + WATCHED:
        return made_up(rank, size, number) if size != 2000 else 2.0
    return {2000: 4.0}.get(size or 0, 3.0)


def test_steps_that_drift_for_a_while_only_are_left_alone(ranks) -> None:
    search, watch = 3 * STEPS + 4 * TURNS, WATCHED * 2 * PATIENCE
    first, _ = tuned(ranks, unsteady, 2 + search + watch)
    assert first["sizes"][2 + search :] == [2000] * watch
    assert not [record for record in first["records"] if record["kind"] == "drifted"]


def unsteady(rank: int, size: int | None, number: int) -> float:
    """Return times of a machine that is slow in all but every third median of the watch."""
    watched = number - (STEPS + 2 * TURNS)
    return 3.0 if size == 2000 and watched > 0 and watched // WATCHED % 3 else made_up(rank, size, number)


def by_degree(rank: int, degree: int, number: int) -> float:
    return {1: 3.0, 2: 1.0, 4: 2.0}[degree]


@pytest.mark.nightly("measures every degree")
def test_degrees_take_turns_and_each_learns_its_costs_once(ranks) -> None:
    """Each degree measures its ops when it first runs. Nothing else in the steps changes."""
    rows = [Knobs(4), Knobs(2), Knobs(1)]
    first, second = tuned(ranks, by_degree, 6 + 3 * STEPS + 4 * TURNS, rows, kind="one_a_one_m", degrees=[1, 2, 4])
    last = [2] * TURNS + [4] * 2 * TURNS + [2] * TURNS
    assert first["sizes"] == second["sizes"] == [1] * 2 + [4] * (2 + STEPS) + [2] * (2 + STEPS) + [1] * STEPS + last
    assert list(first["told"].values()) == [2.0, 1.0, 3.0]
    assert first["chosen"] == second["chosen"] == Knobs(2)
    assert first["runs"] == second["runs"]
    assert (first["runs"].slicing.degree, first["runs"].forward.kind) == (2, "one_a_one_m")
    assert first["runs"].costs is not None
    assert {record["sp_bytes"] for record in first["records"]} == {None}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "text.txt").write_text("".join(f"{i} and {i * i}. " for i in range(4000)))
    (tmp_path / "more.txt").write_text("".join(f"{i} or {i * 7}. " for i in range(2000)))
    return Recipe.parse(
        {
            "name": "chunks", "model": MODEL, "engine": {"kind": "torch"}, "fold": {"ep": 2},
            "data": {"source": "text", "path": str(tmp_path / "*.txt"), "seq_len": 32, "validation": {"fraction": 0.5}},
            "training": {"steps": 45, "global_batch": 4, "micro_batch": 2, "eval_sequences": 8},
            "schedule": {"kind": "one_a_one_m", "degree": 2, "reduction": "chunks", "sp_bytes": "auto"},
            "cluster": {"workers": 2, "storage": str(tmp_path / "runs")},
        }
    )  # fmt: skip


def test_what_is_left_open_needs_a_search(recipe: Recipe) -> None:
    with pytest.raises(UserError, match=r"schedule.sp_bytes=auto: needs a search: FoldTrainer\(recipe, search="):
        FoldTrainer(recipe)
    schedule = {"kind": "stream", "degree": 2, "degrees": [2, 4]}
    with pytest.raises(UserError, match=r"schedule.degrees=\(2, 4\): needs a search"):
        FoldTrainer(Recipe.parse({**recipe.model_dump(), "schedule": schedule}))


@pytest.mark.nightly("three trainings with a search")
def test_what_is_found_while_training_changes_nothing(ray_session, recipe: Recipe) -> None:
    trainer = FoldTrainer(recipe, search=OnlineSearch)
    trainer.fit()
    assert trainer.run is not None
    assert trainer.run.summary is not None
    history, folder = trainer.run.folder.history, Path(trainer.run.summary.run_dir)
    tried, (chosen,) = [record for record in history.tried if not record["chosen"]], [r for r in history.tried if r["chosen"]]
    assert 1 < len(tried) == len({record["sp_bytes"] for record in tried}) <= 8
    assert all(record["sp_bytes"] >= SMALLEST for record in tried)
    assert chosen["sp_bytes"] in [record["sp_bytes"] for record in sorted(tried, key=lambda record: record["step_time_s"])[:2]]
    assert (folder / "online_search.png").read_bytes().startswith(b"\x89PNG")
    client = MlflowClient(trainer.run.tracker.uri)
    logged = client.get_metric_history(trainer.run.tracker.run_id, "online/step_time_s")
    assert sorted(metric.value for metric in logged) == sorted(record["step_time_s"] for record in history.tried)
    assert "online_search.png" in {each.path for each in client.list_artifacts(trainer.run.tracker.run_id)}

    plain = FoldTrainer(Recipe.parse({**recipe.model_dump(), "schedule": {"kind": "one_a_one_m", "degree": 2}}))
    plain.fit()
    assert plain.run is not None
    steps = plain.run.folder.history.steps
    assert [history.steps[step]["loss"] for step in steps] == [steps[step]["loss"] for step in steps], "sums of two are exact"

    again = FoldTrainer(recipe.model_copy(update={"training": recipe.training.model_copy(update={"steps": 48})}),
                        resume=folder.name, search=OnlineSearch)  # fmt: skip
    again.fit()
    assert again.run is not None
    assert again.run.folder.history.last_step == 48
    assert len(again.run.folder.history.tried) == len(tried) + 1, "the same fold on the same nodes does not search again"
    last = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["kind"] in ("step", "validation", "checkpoint")


ENGINES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "DeepSpeed": (2, {"ep": 2}, {"engine": {"kind": "deepspeed", "zero": 2}, "precision": "float32"}),
    "pipeline": (4, {"pp": 2, "ep": 2}, {}),
    "ZeRO-2": (4, {"ep": 2}, {"engine": {"kind": "torch", "zero": 2}}),
    "all": (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}, {"engine": {"kind": "deepspeed", "zero": 1}, "precision": "float32"}),
}


def _searched(rank: int, recipe: Recipe, searching: bool, steps: int) -> dict[str, Any]:
    """Train some steps, with or without a search, and return the weights."""
    from tests.foldray.parity import batches, weights
    from trainers.worker.engines import make_engine

    groups = Groups.create(recipe.placed_fold, rank)
    engine = make_engine(recipe, groups, torch.device("cpu"))
    rows, records = [Knobs(1, 4096), Knobs(2, 65536), Knobs(2, 4096)], list[Any]()
    online = Online(engine.execution, groups, torch.device("cpu"), recipe.orderings, sizes=True)
    going = online.steps((lambda degrees, sizes: Known(rows)) if searching else None, records.append)
    next(going, None)
    for step in range(steps):
        engine.train(batches(recipe, groups.dp_rank, step))
        engine.update(0.01)
        if searching:
            going.send(float(len(records)))
    found = {"weights": weights(engine), "chosen": online.chosen}
    engine.close()
    groups.close()
    return found


@pytest.mark.nightly("100 steps on up to eight ranks")
@pytest.mark.parametrize("name", ENGINES)
def test_a_search_changes_no_weight_beyond_rounding(ranks, name: str) -> None:
    """Degrees and sizes change in every trial; the weights after all of these steps are those of a training without a search."""
    from tests.foldray.parity import make_recipe

    workers, fold, sections = ENGINES[name]
    schedule = {"kind": "one_a_one_m", "degree": 2, "degrees": [1, 2], "reduction": "chunks", "sp_bytes": "auto"}
    recipe, steps = make_recipe(workers, fold, schedule=schedule, **sections), 2 * 2 + 3 * STEPS + 4 * TURNS
    searched = ranks(workers).run(_searched, recipe, True, steps, timeout=240)
    plain = ranks(workers).run(_searched, recipe, False, steps, timeout=240)
    assert searched[0]["chosen"] is not None
    limit = 1e-9 if recipe.precision == "float64" else 2e-4
    for one, other in zip(searched, plain, strict=True):
        for key, (weight, _) in one["weights"].items():
            expected = other["weights"][key].tensor
            assert float((weight - expected).abs().max()) <= limit * float(expected.abs().max()), key


@pytest.mark.nightly("finds lists of two degrees")
def test_a_list_is_found_twice_and_told_once(ranks) -> None:
    rows = [Knobs(2, 0), Knobs(1, 0)]
    schedule = {"kind": "list", "reduction": "end", "degree": 2, "degrees": [1, 2]}
    first, second = tuned(ranks, made_up, 6 + 2 * STEPS + 4 * TURNS, rows, **schedule)
    listed = [record for record in first["records"] if record["kind"] == "listed"]
    assert [record["degree"] for record in listed] == [2, 1], "once for each degree, however often it is taken up again"
    assert not [record for record in second["records"] if record["kind"] == "listed"], "only rank 0 tells"
    assert first["runs"].found.order == second["runs"].found.order
    own = next(record for record in listed if record["degree"] == first["chosen"].order)
    assert own["lists"] == [[list(op) for op in first["runs"].found.order]]
    assert own["bound"] <= own["seconds"] <= own["named_seconds"]


@pytest.mark.nightly("finds five lists")
def test_every_size_of_chunks_has_a_list_of_its_own(ranks) -> None:
    learning = 3 + 3 * 3  # without a size, then with each
    first, second = tuned(ranks, made_up, learning + 3 * STEPS + 4 * TURNS, kind="list")
    assert first["chosen"] == second["chosen"] == Knobs(1, 2000)
    for each in (first, second):
        found = each["runs"].found
        assert found.timed == 2
        assert max(chunk.bytes for position in found.graph.chunks for chunk in position) == 2000, "the list has other chunks"
    assert [record["kind"] for record in first["records"]].count("listed") == 5
    last = [record for record in first["records"] if record["kind"] == "listed"][-1]
    assert last["lists"] == [[list(op) for op in first["runs"].found.order]], "the list that runs is told last"


def test_lags_are_chosen_after_the_second_step_and_told(ranks) -> None:
    rows = [Knobs(4, 0), Knobs(2, 0)]
    schedule = {"kind": "stream", "reduction": "end", "degree": 4, "degrees": [2, 4]}
    first, second = tuned(ranks, made_up, 4 + 2 * STEPS + 4 * TURNS, rows, **schedule)
    settled = [record for record in first["records"] if record["kind"] == "settled"]
    assert [record["degree"] for record in settled] == [4, 2], "once for each degree, however often it is taken up again"
    assert not [record for record in second["records"] if record["kind"] == "settled"]
    assert first["runs"] == second["runs"]
    assert not first["runs"].open
    (own,) = [record for record in settled if record["degree"] == first["chosen"].order]
    assert (own["forward"], own["backward"]) == (str(first["runs"].forward), str(first["runs"].backward))
