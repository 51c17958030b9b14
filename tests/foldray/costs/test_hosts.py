"""A clock with hosts: they issue the kernels of a list, and the GPU runs them."""

from __future__ import annotations

import math

import pytest

from foldray.blueprint import ModelSpec
from foldray.clock import COMPUTE, Host
from foldray.costs.candidate import Candidate, Job
from foldray.costs.device import Device
from foldray.costs.hardware import load_hardware
from foldray.costs.ops import OpWork
from foldray.costs.passes import StageList, stage_list
from foldray.costs.prediction import Step, predict
from foldray.costs.shares import Price, Work
from foldray.fold import Fold
from foldray.graph import Direction, Slicing, StepGraph
from foldray.kinds import ATTENTION, COMBINE, DISPATCH, EXPERT, MERGE, ROUTE
from foldray.orders import Ordering, Overlap

MODEL = ModelSpec.model_validate({"preset": "mixtral-8x22b", "layers": 4})
SECONDS = {ATTENTION: 4.0, ROUTE: 1.0, DISPATCH: 2.0, EXPERT: 4.0, COMBINE: 2.0, MERGE: 1.0}


def a_list(kind: str = "sequential", degree: int = 1, direction: Direction = "F") -> StageList:
    cut = (64 // degree,) * degree
    overlap = Overlap(kind, 1)
    graph = StepGraph(((MODEL.block(0),),) * 3, Slicing(cut, cut), 3, ragged=False)
    return stage_list(graph, 1, direction, overlap)


def prices(order: StageList) -> list[Price]:
    """Return prices: ops that compute need one call of the host, those that travel share a lane and need none."""
    kinds = [each.kind for each in order.compiled.classes]
    lanes = ["link" if kind in (DISPATCH, COMBINE) else COMPUTE for kind in kinds]
    return [Price.of([Work(lane, "ep", SECONDS[kind], calls=lane == COMPUTE)]) for kind, lane in zip(kinds, lanes, strict=True)]


def issued(order: StageList, issue: float, waits: bool, host: float) -> tuple[list[float], list[float], float]:
    """Return starts and ends of ops, and when the host has issued the last one.

    Args:
        issue: seconds of the host for each of its calls.
        waits: whether it waits for the row counts of dispatches.
        host: when it begins.
    """
    own = prices(order)
    begins = [waits and each.kind == DISPATCH and not each.back for each in order.compiled.classes]
    starts, ends, hosts = order.compiled.run(
        [price.lanes for price in own], Host([issue * price.calls for price in own], begins, host)
    )
    return starts, ends, max(hosts)


@pytest.mark.parametrize("direction", ["F", "B"])
@pytest.mark.parametrize(("kind", "degree"), [("sequential", 1), ("stream", 2), ("aaam", 4), ("one_a_one_m", 4)])
def test_a_host_that_is_ahead_changes_nothing(kind: str, degree: int, direction: Direction) -> None:
    order = a_list(kind, degree, direction)
    starts, ends, _ = issued(order, 1e-9, waits=False, host=-1.0)
    assert (starts, ends, ()) == order.compiled.run([price.lanes for price in prices(order)])


@pytest.mark.parametrize(
    ("issue", "end", "host"),
    [
        (2.0, 14.0, 9.0),  # attention 0–4, route 4–5; the host waits until 5; dispatch –7, experts –11, combine –13, merge –14
        (5.0, 20.0, 20.0),  # attention 0–5, route –10, dispatch –12, experts 12–16, combine –18; the host ends the merge at 20
    ],
)
def test_the_slower_clock_counts(issue: float, end: float, host: float) -> None:
    _, ends, last = issued(a_list(), issue, waits=True, host=0.0)
    assert (max(ends), last) == (end, host)


def test_the_host_gives_the_gpu_the_next_piece_before_it_waits_for_row_counts() -> None:
    """With two pieces, the second attention starts at the end of the first routing, as if there was no wait."""
    order = a_list("stream", 2)
    starts, _, _ = issued(order, 0.5, waits=True, host=-10.0)
    kinds = [order.compiled.classes[number].kind for number in order.compiled.class_of]
    assert [start for start, kind in zip(starts, kinds, strict=True) if kind == ATTENTION] == [0.0, 5.0]


@pytest.mark.parametrize(("kind", "degree"), [("stream", 2), ("aaam", 4)])
def test_a_slow_host_takes_as_long_as_its_calls(kind: str, degree: int) -> None:
    order = a_list(kind, degree)
    _, ends, host = issued(order, 1e6, waits=False, host=0.0)
    assert host == 4 * degree * 1e6
    assert max(ends) == pytest.approx(host, rel=1e-4)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("fold", [{}, {"ep": 8}, {"tp": 2, "ep": 4}, {"pp": 2, "ep": 4}], ids=str)
def test_a_step_waits_for_its_host(degree: int, fold: dict[str, int]) -> None:
    """A slower host never makes a step shorter; the shares of a step sum to it, and say how long the GPU waits."""
    overlap = Overlap("stream" if degree > 1 else "sequential", 1)
    cut = (4096 // degree,) * degree
    ordering = Ordering(overlap, overlap, Slicing(cut, cut)) if degree > 1 else Ordering()
    each = Candidate(Job(MODEL, 4096, 16), Fold(8, **fold), ordering)
    before, launch = 0.0, 0.0
    for issue in (0.0, 1e-5, 4e-5, 1.6e-4):
        found = predict(each, load_hardware("h200"), {"issue": issue})
        assert math.fsum(found.breakdown.values()) == pytest.approx(found.seconds)
        # Where lanes are shared, these clocks give them to ops in the order of the list, not to the op that asks first.
        assert found.seconds >= before * (1 - 1e-3)
        assert found.breakdown["launch"] >= launch * (1 - 1e-9)
        before, launch = found.seconds, found.breakdown["launch"]
    device = Device.of(each.job, load_hardware("h200"), {"issue": 1.6e-4})
    step = Step(each, OpWork(each, device))
    assert step.simulated_bound() <= step.prediction().seconds * (1 + 1e-9)


MIXTRAL, WIDE, FINE = ({"hidden": hidden, "heads": heads, "kv_heads": kv, "expert_hidden": inner, "ffn_hidden": inner,
                        "experts": experts, "topk": topk, "head_dim": 128, "vocab": 1024, "moe_every": 1}
                       for hidden, heads, kv, inner, experts, topk in ((4096, 32, 8, 14336, 8, 2), (6144, 48, 8, 16384, 8, 2),
                                                                       (2048, 32, 4, 768, 128, 8)))  # fmt: skip
MEASURED: list[tuple[dict[str, int], int, int, list[float]]] = [
    (MIXTRAL, 1, 8192, [37.0, 45.3, 59.1, 92.5]), (MIXTRAL, 1, 32768, [190, 196, 204, 222]),
    (WIDE, 1, 8192, [62.4, 75.1, 94.6, 140]), (WIDE, 1, 32768, [313, 314, 333, 362]),
    (FINE, 1, 8192, [15.6, 23.9, 40.4, 72.8]), (FINE, 1, 32768, [82.9, 94.1, 108, 134]),
    (MIXTRAL, 4, 8192, [155.4, 179.3, 227.5]), (FINE, 4, 8192, [56.3, 91.0, 155.7]),
]  # fmt: skip
"""Sizes, blocks, tokens, and milliseconds of a step in 1, 2, 4 and 8 pieces on one H200 (docs/notebook/gpus.md)."""


@pytest.mark.parametrize(("sizes", "layers", "length", "measured"), MEASURED, ids=lambda each: str(each)[:24])
def test_steps_of_one_gpu_are_as_measured(sizes: dict[str, int], layers: int, length: int, measured: list[float]) -> None:
    """Within 10 %, and a quarter for fine experts, of which some steps are off by more than 10 % (the page says which)."""
    job = Job(ModelSpec.model_validate({**sizes, "layers": layers}), length, 1)
    for degree, milliseconds in zip((1, 2, 4, 8), measured, strict=False):
        overlap, cut = Overlap("stream" if degree > 1 else "sequential", 1), (length // degree,) * degree
        ordering = Ordering(overlap, overlap, Slicing(cut, cut)) if degree > 1 else Ordering()
        each = Candidate(job, Fold(1), ordering, zero=0)
        step = Step(each, OpWork(each, Device.of(job, load_hardware("h200")))).passes()
        assert step * 1e3 == pytest.approx(milliseconds, rel=0.25 if sizes is FINE else 0.105)
