"""What the planner says of copies of experts: loads, links, memory and the step."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from foldray.blueprint import ModelSpec, pattern_shares
from foldray.blueprint.placing import overload_of, spread
from foldray.cli import main
from foldray.costs.candidate import Candidate, Job
from foldray.costs.copying import CopyRoom
from foldray.costs.device import Device
from foldray.costs.hardware import load_hardware
from foldray.costs.memo import Memo
from foldray.costs.memory import ledger
from foldray.costs.ops import OpWork
from foldray.costs.prediction import Step
from foldray.costs.whole import whole_seconds
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.graph import Op
from foldray.refold import as_candidate
from tests.foldray.parity import make_recipe

_TOKENS = 64 * 4096


def work_of(room: int, skew: float, places: bool = False, **fold: int) -> OpWork:
    model = ModelSpec.model_validate({"preset": "qwen3-30b-a3b", "layers": 4, "router": {"skew": skew}})
    job = Job(model, 4096, 64, copies=CopyRoom(room, _TOKENS) if room else None, places=places)
    candidate = Candidate(job, Fold(16, **{"ep": 8, **fold}))
    return OpWork(candidate, Device.of(job, load_hardware("h200")))


def seconds(work: OpWork) -> float:
    return Step(work.candidate, work).prediction().seconds


def test_copies_shorten_an_uneven_step_and_leave_an_even_one() -> None:
    plain, copied, even, roomy = (work_of(room, skew) for room, skew in ((0, 1.0), (2, 1.0), (0, 0.0), (2, 0.0)))
    assert copied.rank.overload < 1.1 < 2 < plain.rank.overload
    assert seconds(even) <= seconds(copied) < 0.8 * seconds(plain)
    assert seconds(roomy) == seconds(even)
    assert Step(copied.candidate, copied).copying == [pytest.approx(0)], "attention of 16,384 tokens hides them"


def test_a_step_simulated_as_a_whole_agrees() -> None:
    for room in (0, 2):
        work = work_of(room, 1.0)
        assert whole_seconds(work.candidate, work) == pytest.approx(seconds(work), rel=0.03)
    graph = work.candidate.reducing
    assert graph.copied == (0, 1, 2, 3)
    out, home = (work.cost(Op("copy", way, 1)) for way in "FB")
    assert home[0][1] == pytest.approx(2 * out[0][1], rel=0.05), "gradients are float32, and weights bfloat16"
    assert work.candidate.graph.copied == ()


def test_memory_of_copies() -> None:
    """A copy has 3·2048·768 numbers: 2 bytes of each weight, and 4 of each sum where micro-batches add to it."""
    plain, copied, roomy = (ledger(work.candidate, work.rank) for work in (work_of(0, 1.0), work_of(2, 1.0), work_of(2, 0.0)))
    even = work_of(0, 0.0)
    numbers = 2 * 4 * 3 * 2048 * 768
    assert copied.weights - plain.weights == roomy.weights - plain.weights == 2 * numbers
    assert copied.gradients - plain.gradients == 4 * numbers
    assert roomy.gradients == plain.gradients, "without copies, nobody adds to their sums"
    assert roomy.activations == ledger(even.candidate, even.rank).activations
    assert copied.activations < plain.activations, "the fullest rank has fewer rows"


def test_experts_that_change_places() -> None:
    """The places are those that training gives them, where every rank sees the pattern."""
    plain, placed, both = (work_of(room, 1.0, places) for room, places in ((0, False), (0, True), (2, True)))
    shares = pattern_shares(plain.rank.model)
    assert shares is not None
    assert placed.rank.overload == pytest.approx(overload_of(shares, 8, spread(shares, 8)))
    assert both.rank.overload <= placed.rank.overload < plain.rank.overload
    assert seconds(both) <= seconds(placed) < seconds(plain)
    even, same = work_of(0, 0.0), work_of(0, 0.0, True)
    assert seconds(even) == seconds(same)
    recipe: Any = make_recipe(4, 4, model={"router": {"skew": 1.0}}, moe={"place_every": 5})
    assert as_candidate(recipe).job.places


def test_prices_are_shared_only_where_copies_are_the_same() -> None:
    """With four replicas of all experts, each has a quarter of the rows, and no copy is worth its way."""
    job = replace(work_of(2, 1.0).candidate.job, copies=CopyRoom(2, 4096 * 8))
    memo, device = Memo(), Device.of(job, load_hardware("h200"))
    works = [OpWork(Candidate(job, Fold(32, ep=8, pp=pp)), device, memo=memo) for pp in (4, 1)]
    assert [work.rank.overload for work in works] != [works[0].rank.overload] * 2
    prices = [work.rank.price("expert", False, range(4096), job.blocks[0]) for work in works]
    alone = [OpWork(work.candidate, device).rank.price("expert", False, range(4096), job.blocks[0]) for work in works]
    assert prices == alone
    assert prices[0].seconds < prices[1].seconds


def test_one_rank_with_all_experts_has_no_copies() -> None:
    alone, plain = work_of(2, 1.0, ep=1), work_of(0, 1.0, ep=1)
    assert seconds(alone) == seconds(plain)
    assert ledger(alone.candidate, alone.rank) == ledger(plain.candidate, plain.rank)


def test_a_recipe_says_how_many() -> None:
    recipe: Any = make_recipe(4, 4, model={"router": {"skew": 1.0}}, moe={"copies": 3})
    candidate = as_candidate(recipe)
    assert candidate.job.copies == CopyRoom(3, 8 * 16)
    assert replace(candidate.job, copies=None) == as_candidate(make_recipe(4, 4, model={"router": {"skew": 1.0}})).job
    with pytest.raises(UserError, match=r"moe\.copies"):
        make_recipe(4, 4, moe={"copies": -1})


def test_a_plan_says_what_copies_would_bring(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "qwen3-30b-a3b", "--cluster", "h200", "--gpus", "16", "--seq-len", "4096", "--global-batch", "64",
             "--pp", "1", "--tp", "1", "--cp", "1", "--ep", "8", "--top", "1"]  # fmt: skip
    assert main([*asked, "--skew", "1", "--json"]) == 0
    (plain,) = json.loads(capsys.readouterr().out)["candidates"]
    found = plain["with_copies"]
    assert found["step_time_s"] < 0.9 * plain["step_time_s"]
    assert found["memory_gib"] <= load_hardware("h200").memory_gib
    assert main([*asked, "--skew", "1", "--copies", str(found["copies"]), "--json"]) == 0
    (copied,) = json.loads(capsys.readouterr().out)["candidates"]
    assert copied["step_time_s"] <= found["step_time_s"] * 1.001
    assert "with_copies" not in copied
    assert main([*asked, "--skew", "1"]) == 0
    assert f"\n  1 copies={found['copies']} " in capsys.readouterr().out
    assert main([*asked, "--skew", "0", "--json"]) == 0
    assert "with_copies" not in json.loads(capsys.readouterr().out)["candidates"][0]
    assert main([*asked, "--copies", "-1"]) == 2
    assert capsys.readouterr().err == "foldray: copies=-1: must be a number of copies; legal: 0…4096\n"
