"""What the planner counts for Muon against counts by hand, and against the tensors of real runs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from foldray.blueprint import ModelSpec, Ownership, count_by_op
from foldray.costs.apart import ApartWork, Sides
from foldray.costs.candidate import Candidate, Content, Job, StageForm
from foldray.costs.device import Device
from foldray.costs.hardware import load_hardware
from foldray.costs.memory import ledger, parameters
from foldray.costs.prediction import predict
from foldray.costs.rank import RankCosts
from foldray.costs.updates import _ROUND as PLANNED_ROUND
from foldray.costs.updates import elements, matrices, moment, muon_seconds
from foldray.fold import Fold
from foldray.recipe import Recipe
from foldray.runtime import muon
from tests.foldray.costs.test_memory import EOS, MIXTRAL, WIDE
from tests.foldray.live import Live, storage
from tests.foldray.parity import engine_on, go_on, make_recipe

BLOCK = Content(((MIXTRAL.block(0), 7),), False, None)


def rank_of(model: ModelSpec, fold: Fold, zero: int = 1, iterations: int = 5, dtype: str = "bf16") -> RankCosts:
    job = Job(model, 4096, 4 * fold.dp, dtype, iterations)
    return RankCosts(job, fold, Device.of(job, EOS), 1, zero)


def test_mixtral_by_hand() -> None:
    """TP2 EP8 ETP2 PP4: of the dense matrices and of its expert, a rank has half, and of the router all."""
    rank = rank_of(MIXTRAL, Fold(128, tp=2, pp=4, ep=8, etp=2))
    dense, replicated, expert = matrices(rank, BLOCK)
    assert dense.shapes == {(6144, 6144): 14, (6144, 1024): 14}  # queries and out, keys and values
    assert replicated.shapes == {(6144, 8): 7}
    assert expert.shapes == {(6144, 16384): 14, (16384, 6144): 7}
    attention = 7 * (2 * 6144 * 6144 + 2 * 6144 * 1024)
    assert elements(rank, BLOCK) == {"dp_cp": attention / 2, "tp_dp_cp": 7 * 6144 * 8, "edp": 7 * 3 * 6144 * 16384 / 2}
    # Five iterations of 4 m² n + 2 m³ FLOPs for each of 21 matrices. The two ranks of ETP and the two of EDP share the work.
    flops = 5 * 21 * (4 * 6144**2 * 16384 + 2 * 6144**3) / 4
    fastest = flops / rank.device.peak
    assert fastest < muon_seconds(rank, expert) < 2.5 * fastest


def test_more_ranks_share_the_work_but_nobody_takes_less_than_a_matrix() -> None:
    found = {}
    for size in (8, 64, 512, 1024):
        rank = rank_of(MIXTRAL, Fold(size, ep=8))
        found[size] = muon_seconds(rank, matrices(rank, BLOCK)[2])
    assert found[64] < 0.25 * found[8]
    assert found[1024] > 0.9 * found[512]


@pytest.mark.parametrize("fold", [{"ep": 8}, {"tp": 2, "ep": 4}, {"pp": 2, "ep": 4}], ids=str)
def test_muon_takes_longer_than_adamw_and_less_memory_for_its_state(fold: dict[str, int]) -> None:
    model = MIXTRAL.model_copy(update={"layers": 4})
    found = []
    for iterations in (0, 5):
        job = Job(model, 4096, 64, "bf16", iterations)
        candidate = Candidate(job, Fold(16, **fold))
        held = ledger(candidate, RankCosts(job, candidate.fold, Device.of(job, EOS), 1))
        found.append((predict(candidate, load_hardware("eos-h100")).seconds, held.optimizer))
    (adamw, two), (slower, one) = found
    assert slower > adamw
    assert 0.5 * two < one < 0.6 * two


def test_ranks_of_the_experts_have_one_moment() -> None:
    model = MIXTRAL.model_copy(update={"layers": 4})
    found = []
    for iterations in (0, 5):
        job = Job(model, 4096, 64, "bf16", iterations)
        candidate = Candidate(job, Fold(16, ep=8, expert_ranks=8))
        device = Device.of(job, EOS)
        found.append([side.optimizer for side in ApartWork(candidate, Sides(device, device)).memory()])
    (attention, experts), (less, half) = found
    assert half == experts / 2
    assert attention / 2 < less < attention


def test_matrices_are_those_of_the_parameter_table() -> None:
    """All parameters of a block but its norms."""
    rank = rank_of(MIXTRAL, Fold(1))
    block = MIXTRAL.block(0)
    counted = sum(sum(count) for (_, own), count in count_by_op(MIXTRAL).items() if own == block)
    assert sum(elements(rank, Content(((block, 1),), True, block)).values()) == counted - 2 * 6144


# Comparisons with tensors.

FOLDS: list[tuple[int, dict[str, int]]] = [(1, {}), (4, {"ep": 2}), (4, {"tp": 2, "etp": 2}), (4, {"pp": 2, "ep": 2})]


@pytest.mark.gate(2)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(("world", "fold"), FOLDS, ids=str)
def test_memory_is_that_of_a_run(ranks: Any, world: int, fold: dict[str, int], zero: int) -> None:
    """The state agrees within 1 %. What Muon needs for a moment is at most what is counted, and at least half of that."""
    assert PLANNED_ROUND == muon.ROUND
    recipe = make_recipe(
        world, fold, precision="float32", engine={"kind": "torch", "zero": zero}, optimizer={"kind": "muon"}, model=WIDE
    )
    model, placed = recipe.model, recipe.placed_fold
    rank = rank_of(model, placed, zero, dtype="fp32")
    for number, (state, peak) in enumerate(ranks(world).run(_held, recipe)):
        stages = Ownership(model, placed).held_stages(number)
        content = Content.of([StageForm(tuple(map(model.block, each.layers)), each.first, each.last) for each in stages])
        held = parameters(placed, zero, 4, rank.elements(content), elements(rank, content))
        assert held.optimizer == pytest.approx(state, rel=0.01)
        assert 0.5 * moment(rank, content) <= peak <= moment(rank, content)


def _held(rank: int, recipe: Recipe) -> tuple[int, int]:
    """Return the bytes of the optimizer's state, and the most that are alive in a step of Muon beyond those before."""
    with engine_on(recipe, rank) as (engine, groups):
        go_on(engine, groups, recipe, range(1))
        states = [state for optimizer, _ in engine.optimizers for state in optimizer.state.values()]
        state = sum(dict(storage(each) for memory in states for each in memory.values() if each.dim()).values())
        gc.collect()
        before = {storage(each)[0] for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}
        with Live(before) as live:
            next(each for each, _ in engine.optimizers if isinstance(each, muon.Muon)).step()
    return state, live.peak
