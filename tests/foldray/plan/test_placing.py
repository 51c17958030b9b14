"""The search for workers of their own for the experts, and the command that shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from foldray import Recipe
from foldray.blueprint import ModelSpec
from foldray.cli import main
from foldray.costs.apart import ApartWork
from foldray.costs.candidate import Candidate, Job
from foldray.costs.device import Device
from foldray.costs.hardware import load_hardware
from foldray.costs.memory import GIB, Memory
from foldray.costs.ops import OpWork
from foldray.costs.prediction import predict, straggling
from foldray.costs.whole import simulate_step, whole_seconds
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.kinds import OP_KINDS
from foldray.plan.placing import (
    Placed,
    _best_order,
    _folds,
    _leaner,
    _placed,
    _short,
    _works,
    adapters,
    apart_seconds,
    kinds,
    least_seconds,
    roofline,
    search_placements,
    sides,
    slower_kind,
)
from foldray.plan.report_placements import placement
from foldray.plan.search import Found, Planned
from foldray.plan.space import Space

MODEL = ModelSpec(preset="deepseek-moe", layers=5)
SPACE = Space(Job(MODEL, 4096, 256), load_hardware("h800"), 16, micro_batches=(1,))


@pytest.mark.nightly("predicts every placement")
def test_what_the_search_leaves_out_is_slower() -> None:
    best = search_placements(SPACE, 1)[0]
    fastest = min((_placed(work, SPACE, True) for work in _works(SPACE)), key=lambda each: each.seconds)
    assert best.fits
    assert best.seconds == pytest.approx(_best_order(fastest, SPACE).seconds)


@pytest.mark.nightly("predicts many placements in whole")
def test_bounds_hold_and_short_steps_stand_for_long_ones() -> None:
    for work in list(_works(SPACE))[::4]:
        whole = whole_seconds(work.candidate, work)
        assert least_seconds(work) <= whole
        waiting = 1 + straggling(16, work.rank.device)
        assert apart_seconds(work) == pytest.approx(whole * waiting, rel=0.04)


def test_ops_run_again_where_memory_needs_it() -> None:
    machines = SPACE.hardware.model_copy(update={"memory_gib": 17.0})
    small = Space(SPACE.job, machines, 16, {"tp": 1, "pp": 1}, micro_batches=(1,))
    best = search_placements(small, 1)[0]
    assert best.fits
    assert best.candidate.ordering.recompute


@pytest.mark.gate(1 / 2)
def test_fewer_micro_batches_are_alive_where_memory_needs_it() -> None:
    """With two positions of each side, four, three and two micro-batches are tried, and each needs less memory than before."""
    pinned = replace(SPACE, pins={"tp": 1, "pp": 2, "ep": 4}, recompute=((), ("expert",)))
    work = next(iter(_works(pinned)))
    fewer, again = _leaner(work, pinned)
    assert again.candidate.ordering.recompute == ("expert",)
    tried = [work, fewer]
    while further := list(_leaner(tried[-1], pinned)):
        tried += further
    assert [each.candidate.ordering.alive for each in tried] == [None, 4, 3, 2]
    assert apart_seconds(tried[-1]) > 1.05 * apart_seconds(work)
    assert all(least_seconds(each) <= whole_seconds(each.candidate, each) for each in tried)
    assert least_seconds(tried[-1]) > least_seconds(work)
    needed = [max(held.activations for held in each.memory()) for each in tried]
    assert needed == sorted(needed, reverse=True)
    assert needed[0] > 1.5 * needed[-1]
    tight = (max(each.total for each in tried[-1].memory()) + 2**20) / GIB
    machines = SPACE.hardware.model_copy(update={"memory_gib": tight})
    assert search_placements(replace(pinned, hardware=machines), 1)[0].fits


def test_found_lists_are_at_least_as_fast() -> None:
    placed = _placed(next(iter(_works(SPACE))), SPACE, True)
    best = _best_order(placed, SPACE)
    assert best.candidate.ordering.weight_gradients == "apart"
    assert best.seconds < placed.seconds
    machines = SPACE.hardware.model_copy(update={"memory_gib": max(each.total for each in placed.memory) / GIB})
    assert _best_order(placed, replace(SPACE, hardware=machines)).fits


def test_the_roofline_gives_more_gpus_to_longer_sequences() -> None:
    shares = []
    for length in (4096, 32768):
        _, allocation = roofline(Space(Job(MODEL, length, 256), SPACE.hardware, 128))
        shares.append(allocation.attention / 128)
        assert sum(adapters(allocation)) > 0
    assert shares[0] < shares[1]


def test_tokens_may_travel_once_to_each_node_of_the_experts() -> None:
    """With `dispatch: rank`, as in the search for workers that share. The keys of a recipe say so."""
    space = Space(replace(SPACE.job, dispatch="rank"), SPACE.hardware, 32, {"tp": 1, "pp": 1, "ep": 16}, expert_gpus=16)
    assert {(fold.cp, fold.ep_inside) for fold in _folds(space)} == {(cp, inside) for cp in (1, 2, 4, 8) for inside in (1, 8)}
    assert {fold.ep_inside for fold in _folds(replace(space, job=SPACE.job))} == {1}
    two = [work for work in _works(replace(space, micro_batches=(1,))) if work.candidate.fold.ep_inside > 1]
    keys = placement(_placed(two[0], space, True))["fold"]
    assert keys == {"tp": 1, "cp": 1, "pp": 1, "ep": 16, "ep_inside": 8}


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(UserError, match="has no MoE block"):
        roofline(Space(Job(ModelSpec(preset="deepseek-moe", layers=1), 4096, 256), SPACE.hardware, 16))


def test_placements_are_compared_with_their_like(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Steps of placements are simulated whole, that of shared workers in passes: both have the same prices."""
    machines = load_hardware("h200")
    job = Job(MODEL, 4096, 16)
    candidate = Candidate(job, Fold(8, ep=8))
    planned = Planned(candidate, predict(candidate, machines), Memory(*[0.0] * 8), True)
    placed = _placed(next(iter(_works(Space(job, machines, 8, micro_batches=(1,))))), Space(job, machines, 8), True)
    monkeypatch.setattr("foldray.plan.placing.search_placements", lambda space, top: [placed])
    monkeypatch.setattr("foldray.plan.search.search", lambda space, top: Found([planned], [planned], 1))
    asked = ["--model", "deepseek-moe", "--gpus", "8", "--seq-len", "4096", "--global-batch", "16"]
    assert main(["plan", "--cluster", "h200", "--disaggregate", "--json", *asked]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["shared"]["step_time_s"] == planned.prediction.seconds
    assert document["speed"] == pytest.approx(planned.prediction.seconds / placed.seconds)
    for name, work in (
        ("own", _short(ApartWork(placed.candidate, sides(Space(job, machines, 8))))),
        ("shared", OpWork(candidate, Device.of(job, machines))),
    ):
        shares, step = document["shares"][name], simulate_step(work.candidate, work)
        assert sum(shares["critical_path"].values()) == pytest.approx(1)
        assert sum(shares["positions"].values()) == pytest.approx(1)
        computing = sum(share for kind, share in shares["positions"].items() if kind in OP_KINDS and not OP_KINDS[kind].travels)
        begin = min(span.start for span in step.spans.values())
        assert computing == pytest.approx(fmean(used.compute for used in step.usage) / (step.seconds - begin))
    demand, _ = roofline(Space(job, machines, 8))
    assert document["roofline"]["experts"]["flops_per_byte"] == demand.experts / demand.bytes
    assert document["speed_over_even_split"] == pytest.approx(document["even_split"]["step_time_s"] / placed.seconds)


KINDS = Space(
    Job(MODEL, 4096, 256), load_hardware("h800"), 16, {"tp": 1, "cp": 1, "pp": 1, "ep": 8}, micro_batches=(1,), expert_gpus=8
)


def test_experts_may_have_another_kind_of_gpu() -> None:
    def best(**changes) -> Placed:
        space = replace(KINDS, experts=KINDS.hardware.model_copy(update={"name": "other", **changes})) if changes else KINDS
        return search_placements(space, 1, 4)[0]

    same = best()
    assert same.candidate.fold.moe_ranks == 8
    assert best(about="the same numbers").seconds == pytest.approx(same.seconds)
    slow = {name: peak / 16 for name, peak in KINDS.hardware.peak_tflops.items()}
    slower = best(peak_tflops=slow)
    assert slower.seconds > 2 * same.seconds
    assert slower.mfu == pytest.approx(same.mfu * same.seconds / slower.seconds * 2 / (1 + 1 / 16))
    assert not best(memory_gib=1.0).fits
    assert slower_kind(replace(KINDS, experts=KINDS.hardware.model_copy(update={"peak_tflops": slow}))).peak_tflops == slow


def test_the_allocator_knows_two_kinds() -> None:
    other = KINDS.hardware.model_copy(update={"peak_tflops": {"bf16": KINDS.hardware.peak_tflops["bf16"] / 3}})
    demand, free = roofline(replace(KINDS, experts=other, expert_gpus=None))
    assert free.attention_nics == free.attention, "every side has the adapters of its own GPUs"
    _, one_kind = roofline(replace(KINDS, expert_gpus=None))
    assert free.experts > one_kind.experts
    few = replace(KINDS, experts=other, expert_gpus=4)
    _, pinned = roofline(few)
    assert (pinned.attention, pinned.experts) == (12, 4)
    ours, theirs = kinds(few)
    assert pinned.sides == pytest.approx((
        max(demand.attention / 12 / ours.flops, demand.bytes / 12 / ours.nic_rate),
        max(demand.experts / 4 / theirs.flops, demand.bytes / 4 / theirs.nic_rate),
    ))  # fmt: skip


@pytest.mark.nightly("a search of placements")
def test_two_kinds_of_gpus_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["plan", "--model", "deepseek-moe", "--gpus", "16", "--seq-len", "4096", "--global-batch", "64", "--cluster", "h800"]
    asked += ["--disaggregate", "--top", "1", "--pp", "1", "--tp", "1", "--cp", "1", "--ep", "8", "--picture", "roofline.png"]
    assert main([*asked, "--expert-cluster", "a100", "--expert-gpus", "8"]) == 0
    shown = capsys.readouterr().out
    assert "on h800 for attention, and on a100 for the experts" in shown
    assert "at the pace of the slower kind" in shown
    assert "8:8" in shown
    assert "even split" not in shown


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--expert-cluster", "a100"], "expert_cluster=a100: needs --disaggregate"),
        (["--expert-gpus", "8"], "expert_gpus=8: needs --disaggregate"),
        (
            ["--disaggregate", "--expert-gpus", "16"],
            "expert_gpus=16: must leave at least one of 16 GPUs to attention; legal: 1…15",
        ),
        (["--disaggregate", "--expert-cluster", "a10000"], "expert_cluster=a10000: is no known cluster nor a YAML file"),
    ],
)
def test_mistakes_about_kinds_of_gpus(capsys, asked: list[str], words: str) -> None:
    given = ["--model", "deepseek-moe", "--gpus", "16", "--seq-len", "4096", "--global-batch", "64", "--cluster", "h800"]
    assert main(["plan", *given, *asked]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.nightly("two searches of placements")
def test_the_command_compares_and_names_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(
        "model: {preset: deepseek-moe, layers: 5, vocab: 102400}\ndata: {seq_len: 4096}\ntraining: {global_batch: 256}\n"
        "precision: bfloat16\ncluster: {workers: 16}\n"
    )
    asked = ["plan", "recipe.yaml", "--cluster", "h800", "--disaggregate", "--top", "2", "--pp", "1"]
    assert main([*asked, "--picture", "roofline.png"]) == 0
    shown = capsys.readouterr().out
    assert "with shared workers:" in shown
    assert ("leave out the section placement" in shown) != ("placement: {attention:" in shown)
    assert Path("roofline.png").read_bytes().startswith(b"\x89PNG")
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    placed = document["placements"][0]
    keys = {name: placed[name] for name in ("fold", "placement", "schedule", "training")}
    recipe = Recipe.parse({"model": {"preset": "deepseek-moe", "layers": 5}, "cluster": {"workers": 16}, **keys})
    assert recipe.placed_fold.attention_ranks == placed["placement"]["attention"]
    assert document["speed"] == pytest.approx(document["shared"]["step_time_s"] / placed["step_time_s"])


def test_a_placed_recipe_needs_the_option(tmp_path: Path, capsys) -> None:
    (tmp_path / "recipe.yaml").write_text("model: {preset: tiny}\nplacement: {attention: 1, experts: 1}\ncluster: {workers: 2}\n")
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--cluster", "h800"]) == 2
    assert "only foldray plan --disaggregate plans" in capsys.readouterr().err
