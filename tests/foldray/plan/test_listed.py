"""Candidates with found lists: quick predictions are near those of a longer search."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from foldray.blueprint import ModelSpec
from foldray.clock import COMPUTE
from foldray.costs.candidate import Candidate, Job
from foldray.costs.device import Device
from foldray.costs.hardware import load_hardware
from foldray.costs.memory import blocks_in_flight, fullest
from foldray.costs.ops import OpWork
from foldray.finding import Problem
from foldray.fold import Fold
from foldray.graph import Slicing
from foldray.kinds import EXPERT, HEAD
from foldray.orders import Ordering, Overlap, WeightGradients, step_schedule
from foldray.plan.listed import step_seconds, with_kind, with_list
from foldray.plan.search import Planned
from foldray.plan.space import RECOMPUTE

WEIGHTS: tuple[WeightGradients, ...] = ("apart", "whole")
MACHINES = load_hardware("eos-h100")
MODEL = ModelSpec(
    layers=8, hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn_hidden=2048, experts=8, topk=2, expert_hidden=1024, vocab=4096
)


@pytest.mark.gate(2)
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("axes", [{"ep": 8}, {"pp": 2, "ep": 4}, {"pp": 4, "ep": 2}, {"tp": 2, "ep": 4, "etp": 2}], ids=str)
def test_a_quick_prediction_is_near_that_of_a_longer_search(axes: dict[str, int], degree: int) -> None:
    fold = Fold(8, **axes)
    candidate = Candidate(Job(MODEL, 4096, 16 * fold.dp), fold)
    listed = with_kind(candidate, "list", degree, MACHINES)
    assert step_seconds(listed.candidate, Device.of(candidate.job, MACHINES)) == pytest.approx(listed.seconds, rel=0.02)
    assert listed.over_bound >= 1


@pytest.mark.parametrize("issue", [0.0, 4e-5])
@pytest.mark.parametrize("kind", ["sequential", "stream"])
@pytest.mark.parametrize(
    ("preset", "axes"),
    [("mixtral-8x22b", {"ep": 8}), ("qwen3-30b-a3b", {"ep": 8}), ("mixtral-8x22b", {"tp": 2, "ep": 4, "etp": 2}),
     ("deepseek-v2-lite", {"ep": 8}), ("qwen3-30b-a3b", {"pp": 2, "ep": 4}), ("mixtral-8x22b", {"pp": 2, "ep": 4})],
    ids=str,
)  # fmt: skip
def test_a_step_has_one_price(preset: str, axes: dict[str, int], kind: str, issue: float) -> None:
    """Passes of stages and all ops of a step, on the same clocks of GPU and host, take equally long."""
    model = ModelSpec.model_validate({"preset": preset, "layers": 8})
    job, fold, machines = Job(model, 4096, 32), Fold(8, **axes), load_hardware("h200")
    cut = (4096 // fold.tp // 2,) * 2
    ordering = Ordering(Overlap(kind, 1), Overlap(kind, 1), Slicing(cut, cut)) if kind == "stream" else Ordering()
    candidate, device = Candidate(job, fold, ordering), Device.of(job, machines, {"issue": issue})
    passes, whole = (step_seconds(candidate, device, whole=whole) for whole in (False, True))
    # Of passes, each begins with a host that is as far ahead as at the end of a pass like it. In a bubble it gets further ahead.
    assert passes == pytest.approx(whole, rel=(0.04 if "pp" in axes else 0.02) if issue else 0.006)
    assert passes >= whole * (1 - 0.006)


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize(("pp", "virtual_stages"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("degree", [1, 2])
def test_the_ledger_counts_the_blocks_of_the_pipelines_own_order(pp: int, virtual_stages: int, degree: int) -> None:
    fold = Fold(8, pp=pp)
    candidate = Candidate(Job(MODEL, 4096, 8 * fold.dp), fold, virtual_stages=virtual_stages)
    candidate = with_kind(candidate, "list", degree, MACHINES).candidate
    problem = Problem(candidate.graph, lambda op: ((COMPUTE, 1.0),))
    own = problem.kept(step_schedule(candidate.graph, Overlap("sequential")))
    flying = [blocks_in_flight(candidate.layout, candidate.pipeline, place) for place in range(pp)]
    assert list(own) == [sum(count for _, count in each) for each in flying]


def test_a_list_keeps_as_much_as_there_is_memory_for_and_recomputes_what_must_be() -> None:
    fold = Fold(8, ep=8)
    candidate = Candidate(Job(MODEL, 4096, 4 * fold.dp), fold)
    whole = with_kind(candidate, "list", 2, MACHINES)
    assert (whole.fits, whole.candidate.ordering.ahead) == (True, 1)
    shares = 0.93, 0.84, 0.5
    some, little, too_little = (MACHINES.model_copy(update={"memory_gib": share * whole.memory_gib}) for share in shares)
    less = with_kind(candidate, "list", 2, some)
    assert less.fits
    assert less.candidate.ordering.ahead in (0.25, 0.5, 0.75)
    assert less.memory_gib < whole.memory_gib
    again = with_kind(candidate, "list", 2, little)
    assert (again.fits, again.candidate.ordering.recompute) == (True, (EXPERT,))
    assert again.memory_gib < less.memory_gib
    least = with_kind(candidate, "list", 2, too_little)
    assert (least.fits, least.candidate.ordering.ahead) == (False, 0)
    assert least.candidate.ordering.recompute == RECOMPUTE[-1]


@pytest.mark.parametrize("axes", [{"ep": 8}, {"cp": 2, "ep": 4}, {"tp": 2, "ep": 4, "etp": 2}], ids=str)
def test_one_op_of_all_pieces_has_the_price_of_an_op_for_each(axes: dict[str, int]) -> None:
    """It adds to the sums piece by piece. Keys and values that are gathered count once, with the projections."""
    fold, spent = Fold(8, **axes), []
    for weights in WEIGHTS:
        ordering = Ordering(slicing=Slicing((2048, 2048), (1024,) * 4), weight_gradients=weights)
        candidate = Candidate(Job(MODEL, 4096, 16 * fold.dp), fold, ordering)
        work, kinds = OpWork(candidate, Device.of(candidate.job, MACHINES)), Counter[str]()
        ops = [op for op in candidate.graph.ops() if op.direction == "W"]
        for op in ops:
            kinds[op.kind] += sum(part.seconds for part in work.work(op))
        spent.append(kinds)
        several = {(op.kind, op.layer, op.micro_batch) for op in ops if op.kind != HEAD}
        assert (len(several) == sum(op.kind != HEAD for op in ops)) == (weights == "whole")
    assert spent[0] == pytest.approx(spent[1], rel=1e-9)
    assert min(spent[0].values()) > 0


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("preset", "layers", "faster"), [("deepseek-v2-lite", 8, "whole"), ("deepseek-v2-lite", 6, "apart")], ids=str
)
def test_a_list_has_one_op_of_all_pieces_only_where_that_is_faster(
    preset: str, layers: int, faster: WeightGradients, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = load_hardware("h200")
    candidate = Candidate(Job(ModelSpec.model_validate({"preset": preset, "layers": layers}), 8192, 64), Fold(8, ep=8))
    seconds = {weights: with_kind(candidate, "list", 2, hardware, weights=weights).seconds for weights in WEIGHTS}
    assert min(seconds, key=seconds.__getitem__) == faster
    monkeypatch.setattr("foldray.plan.listed.DEGREES", (2,))
    listed = with_list(Planned(candidate, None, None, True), hardware)  # type: ignore[arg-type]
    assert (listed.seconds, listed.candidate.ordering.weight_gradients) == (seconds[faster], faster)


def test_blocks_that_need_most_are_counted_first() -> None:
    small, large = MODEL.block(0), replace(MODEL.block(0), moe=None)
    held, size = [(small, 2), (large, 1)], {small: 1.0, large: 10.0}
    assert fullest(held, size, most=3, micro_batches=4) == 30  # those of three micro-batches
    assert fullest(held, size, most=6, micro_batches=4) == 42
    assert fullest(held, size, most=6, micro_batches=1) == 12  # no more than there are
