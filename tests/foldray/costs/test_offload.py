"""What the planner counts for an optimizer on the host and for moments in bfloat16: by hand, and as the tensors of real runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from foldray.blueprint import Ownership
from foldray.costs.candidate import Candidate, Content, Job, Software, StageForm
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware, load_hardware
from foldray.costs.memory import content_parameters, ledger
from foldray.costs.offload import host_held, offloaded
from foldray.costs.prediction import predict
from foldray.costs.rank import RankCosts
from foldray.fold import Fold
from foldray.recipe import Recipe
from foldray.refold import as_candidate
from tests.foldray.costs.test_memory import MIXTRAL, WIDE
from tests.foldray.live import storage
from tests.foldray.parity import engine_on, go_on, make_recipe

H100 = load_hardware("h100")
FOLDS: list[tuple[int, dict[str, int]]] = [(1, {}), (4, {"ep": 2}), (4, {"tp": 2, "etp": 2}), (4, {"pp": 2, "ep": 2})]


def found_for(job: Job, hardware: Hardware = H100, zero: int = 1) -> Any:
    candidate = Candidate(job, Fold(16, ep=8), zero=zero)
    rank = RankCosts(job, candidate.fold, Device.of(job, hardware), 1, zero)
    return ledger(candidate, rank), offloaded(candidate, rank), predict(candidate, hardware)


def test_mixtral_by_hand() -> None:
    """A layer and the ends of Mixtral on 16 GPUs with EP8: 16 ranks share dense parameters, and two share an expert."""
    job = Job(MIXTRAL.model_copy(update={"layers": 1}), 4096, 64, offload=True)
    attention, expert, ends = 2 * 6144**2 + 2 * 6144 * 1024, 3 * 6144 * 16384, 2 * 32000 * 6144
    replicated = 3 * 6144 + 6144 * 8
    owned, whole = (attention + ends + replicated) / 16 + expert / 2, attention + ends + replicated + expert
    (memory, host, step), (usual, none, before) = found_for(job), found_for(Job(job.model, 4096, 64))
    assert none is None
    assert memory.optimizer == 0
    assert memory.weights == pytest.approx(2 * whole)
    assert usual.optimizer == pytest.approx(8 * owned)
    assert usual.weights - memory.weights == pytest.approx(4 * owned)
    assert memory._replace(weights=0, optimizer=0) == usual._replace(weights=0, optimizer=0)
    assert host.held == pytest.approx((6 * owned, 4 * owned, 8 * owned))
    assert host.travels == pytest.approx(6 * owned)
    # Over PCIe 6 bytes, and through the host's memory 8 for weights, 16 for moments, 4 for gradients and 6 to round.
    seconds = owned * (6 / 64e9 + 34 / 76.8e9) / 0.8
    assert host.seconds == pytest.approx(seconds)
    assert step.breakdown["optimizer"] == pytest.approx(seconds)
    assert before.breakdown["optimizer"] < seconds / 10


def test_rounded_moments_take_half() -> None:
    small, wide = Software(moments=2), Software()
    for offload in (False, True):
        (memory, host, step), (usual, others, before) = (
            found_for(Job(MIXTRAL.model_copy(update={"layers": 2}), 4096, 64, software=software, offload=offload))
            for software in (small, wide)
        )
        assert memory.optimizer == usual.optimizer / 2
        if offload:
            assert host.held == others.held._replace(optimizer=others.held.optimizer / 2)
        assert step.breakdown["optimizer"] < before.breakdown["optimizer"]


def test_seconds_that_nobody_knows_are_left_out() -> None:
    job = Job(MIXTRAL.model_copy(update={"layers": 1}), 4096, 64, offload=True)
    memory, host, step = found_for(job, H100.model_copy(update={"host": None}))
    assert (host.seconds, step.breakdown.get("optimizer", 0)) == (None, 0)
    assert (memory, host.held) == (found_for(job)[0], found_for(job)[1].held)


def test_a_recipe_says_where_its_optimizer_is() -> None:
    engine, optimizer = {"kind": "torch", "offload": "optimizer"}, {"kind": "adamw", "moments": "bfloat16"}
    job = as_candidate(make_recipe(2, 2, precision="bfloat16", engine=engine, optimizer=optimizer)).job
    assert (job.offload, job.software) == (True, Software(moments=2))
    job = as_candidate(make_recipe(2, 2)).job
    assert (job.offload, job.software) == (False, Software())


# Comparisons with tensors.


@pytest.mark.gate(1)
@pytest.mark.parametrize("moments", [None, "bfloat16"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(("world", "fold"), FOLDS, ids=str)
def test_both_sides_hold_what_is_counted(
    ranks: Any, world: int, fold: dict[str, int], zero: int, precision: str, moments: str | None
) -> None:
    """Device and host agree within 1 % on every rank. What is on the host was counted on the device without it."""
    for offload in ("optimizer", None):
        recipe = make_recipe(
            world, fold, precision=precision, engine={"kind": "torch", "zero": zero, "offload": offload},
            optimizer={"kind": "adamw", "moments": moments}, model=WIDE, moe={"experts": "grouped"},
        )  # fmt: skip
        for number, (device, host) in enumerate(ranks(world).run(_held, recipe)):
            rank, content = _counted(recipe, number)
            owned = {family: rank.fold.group_size(family) if zero else 1 for family in rank.elements(content)}
            most = sum(count / owned[family] for family, count in rank.elements(content).items())
            assert content_parameters(rank, content) == pytest.approx(device, rel=0.01)
            assert tuple(host_held(rank, most) if offload else (0, 0, 0)) == pytest.approx(host, rel=0.01)


def _counted(recipe: Recipe, number: int) -> tuple[RankCosts, Content]:
    candidate, model = as_candidate(recipe), recipe.model
    rank = RankCosts(candidate.job, candidate.fold, Device.of(candidate.job, H100), 1, candidate.zero)
    stages = Ownership(model, candidate.fold).held_stages(number)
    return rank, Content.of([StageForm(tuple(map(model.block, each.layers)), each.first, each.last) for each in stages])


def _held(rank: int, recipe: Recipe) -> tuple[list[int], list[int]]:
    """Return the bytes of weights, gradients and moments on the device, and the same on the host."""
    with engine_on(recipe, rank) as (engine, groups):
        go_on(engine, groups, recipe, range(1))
        moments = _bytes(
            each for rule, _ in engine.optimizers for state in rule.state.values() for each in state.values() if each.dim()
        )
        gradients = _bytes(each for buffer in engine.gradients.buffers for each in (buffer.flat, buffer.sums) if each is not None)
        if engine.host is None:
            weights = _bytes([*engine.model.parameters(), *engine.masters.values()])
            return [weights, gradients, moments], [0, 0, 0]
        on_host, received = _bytes(engine.host.tensors()), _bytes(master.grad for master in engine.masters.values())
        return [_bytes(engine.model.parameters()), gradients, 0], [on_host - received, received, moments]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(dict(map(storage, tensors)).values())
