"""`foldray bench` and `foldray timeline` on Ray, and the mistakes that they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from foldray.blueprint import ModelSpec, expert_shares
from foldray.cli import main
from foldray.clock import Recording, busy, draw_text, perfetto, replay
from foldray.comm import Groups
from foldray.errors import UserError
from foldray.finding import recorded_bound
from foldray.graph import StepGraph
from foldray.kinds import REDUCE
from foldray.recipe import Recipe
from foldray.runtime import Trace
from tests.foldray.parity import engine_of, make_recipe
from tests.foldray.random_recipes import draw
from trainers.measure.bench import DEFAULT, recorded, timed_step
from trainers.measure.trial import Turn, measure_turn
from tuners.measure import Measurement

RECIPE = """
model: {preset: tiny, layers: 2}
data: {seq_len: 64}
fold: {ep: 2}
schedule: {kind: stream, degree: 4}
cluster: {workers: 2}
engine: {kind: torch}
training: {global_batch: 4, micro_batch: 2}
"""


@pytest.mark.nightly("a whole measurement")
def test_schedules_are_measured_side_by_side(ray_session, recipe: Path, capsys) -> None:
    asked = ["--schedule", "sequential", "--schedule", "one_a_one_m-even:2", "--schedule", "stream:4/3:1"]
    assert main(["bench", str(recipe), "--json", "--rounds", "2", *asked]) == 0
    document = json.loads(capsys.readouterr().out)
    results = document["results"]
    if (cost := document["slice_cost"]) is not None:  # such short slices may show only noise
        assert len(cost) == 2
        assert min(cost) >= 0 < max(cost)
    assert [(r["schedule"], r["degree"], r["attention_degree"], r["slicing"]) for r in results] == [
        ("sequential", 1, None, "whole"), ("one_a_one_m", 2, None, "token_uniform"), ("stream", 4, 3, "time_uniform"),
    ]  # fmt: skip
    keys = {
        "seq_len",
        "schedule",
        "degree",
        "attention_degree",
        "slicing",
        "reduction",
        "batch_degree",
        "sp_bytes",
        "engine",
        "backend",
        "step_ms",
        "forward_ms",
        "backward_ms",
        "compute_ms",
    }
    for result in results:
        assert set(result) == {*keys, "comm_ms", "exposed_comm_ms", "bound_ms", "energy_j", "by_kind_ms", "critical_path_ms"}
        assert sum(result["by_kind_ms"].values()) == pytest.approx(sum(result["critical_path_ms"].values()))
        assert {"attention", "route", "expert", "merge", "head"} <= set(result["by_kind_ms"])
        step = result["step_ms"]
        assert 0 < step["min"] <= step["median"] <= step["max"]
        recorded = result["forward_ms"] + result["backward_ms"]  # of other steps than the timed ones, so only the unit is certain
        assert step["min"] / 10 < recorded < step["max"] * 10
        assert 0 <= result["exposed_comm_ms"] <= result["comm_ms"]
        assert 0 < result["compute_ms"] <= recorded * 1.001


@pytest.mark.nightly("a whole measurement")
def test_lengths_are_measured_one_after_another(ray_session, recipe: Path, capsys) -> None:
    asked = ["--rounds", "1", "--schedule", "sequential", "--schedule", "stream:2", "--length", "32", "--length", "64"]
    assert main(["bench", str(recipe), *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("sequences")] == ["sequences of 32 tokens", "sequences of 64 tokens"]
    shares = [line.split() for line in lines if line.startswith("experts")]
    assert len(shares) == 4, "of the workers and of the critical path, for each length"
    assert all(0 < float(share.rstrip("%")) < 100 for row in shares for share in row[1:])
    assert main(["bench", str(recipe), "--json", *asked]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    measured = [(result["seq_len"], result["schedule"]) for result in results]
    assert measured == [(32, "sequential"), (32, "stream"), (64, "sequential"), (64, "stream")]


@pytest.mark.nightly("a whole measurement")
def test_a_timeline_is_drawn_and_traced(ray_session, recipe: Path, capsys) -> None:
    assert main(["timeline", str(recipe), "--picture", "step.png", "--trace", "step.json"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("measured: ")
    assert "simulated from these op times" in shown
    assert sum(line.split("│")[0].strip() == "compute" for line in shown.split("\n")) == 2
    assert re.search(r"\n +all workers  critical path\nattention +\d+\.\d% +\d+\.\d%\n", shown)
    assert Path("step.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads(Path("step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"attention", "expert", "dispatch", "combine"}
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["recipe.yaml", "step.json", "step.png"], "and no folder of runs"


@pytest.mark.nightly("two measurements")
def test_workers_of_their_own_are_measured_and_drawn(ray_session, recipe: Path, capsys) -> None:
    recipe.write_text(RECIPE.replace("{kind: stream, degree: 4}", "{degree: 2}").replace("ep: 2", "ep: 1"))
    placed = ["placement.attention=1", "placement.experts=1"]
    assert main(["bench", str(recipe), *placed, "--json", "--rounds", "1"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(r["schedule"], r["degree"]) for r in results] == [("af_pipe", 2), ("af_pipe", 1), ("af_pipe", 2), ("af_pipe", 4)]
    assert main(["timeline", str(recipe), *placed, "--picture", "step.png", "--trace", "step.json"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("the first worker of attention\n") == shown.count("the first worker of the experts\n") == 2
    measured, simulated = (float(line.split()[-2]) for line in shown.split("\n") if line.endswith(" ms"))
    assert 0.5 < simulated / measured < 1.2
    assert "that no order of its ops can beat" in shown
    events = json.loads(Path("step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event.get("cat") == "expert"} == {1}
    assert {event["pid"] for event in events if event.get("cat") == "attention"} == {0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "--rounds", "0"], "rounds=0: must be at least 1"),
        (["bench", "--length", "0"], "data.seq_len=0: must be greater than or equal to 1"),
        (["bench", "--length", "64", "--length", "2"], "a sequence of 2 tokens has at most 2 slices; legal: 1…2"),
        (["bench", "--length", "64", "--skew", "1"], "length=64: is that of the recipe with --skew; leave it out"),
        (["bench", "--schedule", "steam:4"], "schedule=steam:4: names no kind of schedule; legal: sequential, moe_only"),
        (["bench", "--schedule", "one_a_one_m:4@0"], "has a 0; degrees, slices, lags and parts are at least 1"),
        (["bench", "--schedule", "stream:4:0"], "schedule=stream:4:0: has a 0; degrees, slices, lags and parts are at least 1"),
        (["bench", "--schedule", "stream:4:x"], "schedule=stream:4:x: must read KIND:DEGREE/SLICES:LAG:BACKWARD_LAG"),
        (["bench", "--schedule", "stream-ahead=1:4"], "must have a number behind ahead=, which only found kinds have"),
        (["bench", "--schedule", "list-ahead=inf:2"], "must have a number behind ahead=, which only found kinds have"),
        (["bench", "--schedule", "stream:99"], "schedule.degree=99: a sequence of 64 tokens has at most 64 slices; legal: 1…64"),
        (["timeline", "--picture", "step.jpg"], "picture=step.jpg: is written as PNG"),
        (["timeline", "--trace", "nowhere/step.json"], "trace=nowhere/step.json: cannot be written"),
    ],
)
def test_mistakes_are_one_line(recipe: Path, capsys, arguments: list[str], words: str) -> None:
    assert main([arguments[0], str(recipe), *arguments[1:]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert len(err.strip().split("\n")) == 1
    assert [path.name for path in recipe.parent.iterdir()] == ["recipe.yaml"]


def test_a_name_says_how_much_a_list_may_keep() -> None:
    recipe = Recipe.parse({"model": {"preset": "tiny"}})
    assert [recipe.named_ordering(name).ahead for name in ("list:2", "list-ahead=0.5:2", "list-ahead=0")] == [1, 0.5, 0]


def test_the_default_schedules_fit_a_plain_recipe() -> None:
    recipe = Recipe.parse({"model": {"preset": "tiny"}})
    assert [recipe.named_ordering(name).forward.kind for name in DEFAULT] == [name.split(":")[0] for name in DEFAULT]
    shared = {"fold": {"tp": 2, "cp": 2}, "cluster": {"workers": 4}, "training": {"global_batch": 4}}
    with pytest.raises(UserError, match="at most 64 slices of 4"):
        Recipe.parse({"model": {"preset": "tiny"}, **shared}).named_ordering("stream:65")


@pytest.mark.nightly("a whole measurement")
def test_uneven_routing_is_measured_beside_even_routing(ray_session, recipe: Path, capsys) -> None:
    asked = ["--rounds", "2", "--skew", "16", "--skew", "1", "--picture", "uneven.png"]
    assert main(["bench", str(recipe), "--json", *asked]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["skew"] for result in results] == [0, 1, 16]
    experts, topk = 8, 2
    model = ModelSpec.model_validate({"preset": "tiny", "layers": 2})
    assert (model.experts, model.topk) == (experts, topk)
    for result in results:
        expected = sum(expert_shares(experts, topk, result["skew"])[: experts // 2]) / topk * 2
        assert result["overload"] == pytest.approx(expected, abs=0.05)
        assert 0 < result["step_ms"]["min"] <= result["step_ms"]["median"] <= result["step_ms"]["max"]
    predicted = [result["predicted_ratio"] for result in results]
    assert predicted[0] == 1
    assert 1 < predicted[1] < predicted[2] < 2
    assert Path("uneven.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (["--skew", "-1"], "model.router.skew=-1.0: must be greater than or equal to 0"),
        (["--skew", "1", "--rounds", "0"], "rounds=0: must be at least 1"),
        (["--skew", "1", "--schedule", "stream:2"], "schedule=stream:2: is that of the recipe with --skew; leave it out"),
        (["--skew", "1", "--picture", "x.pdf"], "picture=x.pdf: is written as PNG: the name must end in .png"),
        (["--picture", "x.png"], "picture=x.png: needs --skew"),
        (["--skew", "1", "moe.backend=deepspeed"], "moe.backend=deepspeed: has gates of its own"),
    ],
    ids=str,
)
def test_mistakes_about_uneven_routing(recipe: Path, asked: list[str], line: str, capsys) -> None:
    assert main(["bench", str(recipe), *asked]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"foldray: {line}"), error
    assert error.count("\n") == 1


CHUNKS: dict[str, Any] = {"reduction": "chunks", "sp_bytes": 4096}
DEEPSPEED: dict[str, Any] = {"engine": {"kind": "deepspeed", "zero": 2}, "precision": "float32"}
RECIPES: dict[str, Recipe] = {
    "PP2": make_recipe(4, {"pp": 2, "ep": 2}),
    "PP2, DeepSpeed, chunks": make_recipe(4, {"pp": 2, "ep": 2}, schedule={"virtual_stages": 2, **CHUNKS}, **DEEPSPEED),
    "experts apart": make_recipe(4, {}, placement={"attention": 1, "experts": 3}, schedule=CHUNKS),
    "experts apart, stages": make_recipe(6, {"tp": 2}, placement={"attention": 2, "experts": 4, "expert_pp": 2}),
}


def measured(rank: int, recipe: Recipe) -> tuple[tuple[StepGraph, list[Recording]], Turn]:
    """Record a step as `bench` and `timeline` do, and as a tuner does."""
    groups, state = Groups.create(recipe.placed_fold, rank), {"rank": rank, "device": torch.device("cpu")}
    engine = engine_of(recipe, groups)
    engine.execution.trace = trace = Trace()
    graph, *_ = timed_step(recipe, engine, groups, state["device"])
    found = recorded(engine, trace, groups, graph)
    engine.close()
    turn = measure_turn(state, recipe.model_dump(exclude_unset=True), steps=1, keep=1, record=True)
    state["kept"].popitem()[1].engine.close()
    return found, turn


def check_recorded(ranks: Any, recipe: Recipe) -> StepGraph:
    """Check that all commands have the reductions of all positions: their drawings, their replay and the bound."""
    results = ranks(recipe.cluster.workers).run(measured, recipe)
    (graph, recordings), turns = results[0][0], [turn for _, turn in results]
    names = {
        event["name"] for event in json.loads(json.dumps(perfetto(graph, [each.spans for each in recordings])))["traceEvents"]
    }
    assert names >= {str(op) for each in recordings for op in each.order}
    for rank, recording in enumerate(recordings):
        assert recorded_bound(graph, recordings) <= replay(graph, recordings, rank).seconds * (1 + 1e-9)
        assert draw_text(graph, recording.spans)
    used = busy(graph, recordings)
    assert sum(used.ranks.values()) == pytest.approx(sum(used.path.values()))
    (tuned := Measurement()).add(turns, turns)
    assert tuned.recorded is not None
    assert tuned.recorded[0].chunks == graph.chunks
    over = tuned.over_bound()
    assert over is not None
    assert over > 0
    return graph


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", RECIPES)
def test_steps_with_several_positions_are_recorded(ranks, name: str) -> None:
    graph = check_recorded(ranks, RECIPES[name])
    assert {op.layer for op in graph.ops() if op.kind == REDUCE} - {0}, "a later position reduces"


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("seed", range(16))
def test_steps_of_random_recipes_are_recorded(ranks, seed: int) -> None:
    check_recorded(ranks, draw(seed).recipe)
