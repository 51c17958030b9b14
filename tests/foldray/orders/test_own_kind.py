"""An overlap kind of the user's own, made of one row and one generator: it trains, and is planned, drawn and refused."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import replace

import pytest

from foldray.blueprint import smallest_slice
from foldray.clock import COMPUTE, check, draw_text, simulate
from foldray.costs.device import Device
from foldray.costs.ops import OpWork
from foldray.costs.prediction import Step, predict
from foldray.errors import UserError
from foldray.graph import Op, SliceCost, StepGraph, slice_sequence
from foldray.kinds import MERGE
from foldray.orders import Overlap, OverlapKind, Run, stage_order, step_schedule
from foldray.plan.space import Space
from tests.foldray.blocks import MOE
from tests.foldray.costs.test_prediction import candidate, machines
from tests.foldray.orders import zigzag
from tests.foldray.parity import check_equal, make_recipe, one_process, train

KIND = "tests.foldray.orders.zigzag:PAIRS"
GRAPH = StepGraph(((MOE, MOE),), slice_sequence("token_uniform", 64, 4, SliceCost.of_model(64, 4)), ragged=False)


def test_it_is_one_row_and_a_short_generator():
    (generator,) = (node for node in ast.parse(inspect.getsource(zigzag)).body if isinstance(node, ast.FunctionDef))
    assert generator.end_lineno - generator.lineno < 40


def test_it_orders_a_stage_and_is_checked():
    order = stage_order(GRAPH, 0, "F", Overlap(KIND))
    letters = {"attention": "A", "expert": "E", "merge": "M"}
    computed = [f"{letters[op.kind]}{op.part}" for op in order if op.kind in letters and op.layer == 0]
    assert " ".join(computed) == "A0 A1 E0 E1 A2 A3 E2 E3 M0 M1 M2 M3"
    check(GRAPH, step_schedule(GRAPH, Overlap(KIND)))


def last_sum_first(run: Run, lag: int) -> Iterator[Op]:
    """Yield the order A0 A1 E0 E1 A2 A3 E2 E3 M3 M2 M1 M0."""
    ops = list(zigzag.in_pairs(run, lag))
    yield from (op for op in ops if op.kind != MERGE)
    yield from (op for op in reversed(ops) if op.kind == MERGE)


LAST_SUM_FIRST = OverlapKind("last_sum_first", "this test", "nothing", last_sum_first)


def test_pieces_of_a_handover_leave_in_order_whatever_a_kind_makes_first():
    graph = replace(GRAPH, stages=((MOE,), (MOE,)), pp=2)
    lists = step_schedule(graph, Overlap(f"{__name__}:LAST_SUM_FIRST"))
    check(graph, lists)
    assert [op.part for op in lists[0] if op.kind == "merge" and op.direction == "F"] == [3, 2, 1, 0]
    assert [op.part for op in lists[0] if op.kind == "handover" and op.direction == "F"] == [0, 1, 2, 3]


def test_it_is_drawn():
    (order,) = schedule = step_schedule(GRAPH, Overlap(KIND))
    simulated = simulate(GRAPH, schedule, lambda op: (("link" if GRAPH.channel(op) else COMPUTE, 1.0),))
    assert len(simulated.spans) == len(order)
    assert "D dispatch" in draw_text(GRAPH, simulated.spans)


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("fold", [{"ep": 2}, {"tp": 2, "ep": 2}], ids=str)
def test_it_trains(ranks, fold: dict[str, int]):
    workers = 4 if "tp" in fold else 2
    recipe = make_recipe(workers, fold, schedule={"kind": KIND, "degree": 4, "backward": "stream"})
    check_equal(ranks(workers).run(train, recipe, 2), one_process(recipe, steps=2))


@pytest.mark.parametrize(
    ("name", "fault"),
    [("FROM_THE_END", "makes lists that cannot run: "), ("WITHOUT_AN_END", "leaves out an op that others need")],
)
def test_a_faulty_kind_is_refused_before_a_step(ranks, name: str, fault: str):
    kind = f"tests.foldray.clock.faulty:{name}"
    recipe = make_recipe(4, {"pp": 2, "ep": 2}, schedule={"kind": kind, "degree": 4})
    with pytest.raises(Exception, match=rf"schedule.kind={kind}: .*{fault}"):
        ranks(4).run(train, recipe, 1)


def test_it_is_planned():
    each = candidate(KIND, 4, {"pp": 2, "ep": 4})
    assert predict(each, machines()).seconds > 0
    work = OpWork(each, Device.of(each.job, machines()))
    schedule = step_schedule(each.graph, each.ordering.forward, each.ordering.backward)
    assert Step(each, work).passes() == pytest.approx(simulate(each.graph, schedule, work.cost).seconds, rel=1e-9)
    space = Space(each.job, machines(), 8, kinds=("sequential", KIND))
    assert KIND in {
        ordering.forward.kind for ordering in space.orderings(smallest_slice(each.fold.cp, each.fold.tp), each.fold.ep > 1, 1)
    }


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("tests.foldray.orders.zigzag:NONE", "cannot be imported"),
        ("tests.foldray.orders.nowhere:PAIRS", "cannot be imported"),
        ("tests.foldray.orders.zigzag:in_pairs", "is a function, not a foldray.orders.OverlapKind"),
        ("zigzag", "is not a legal value"),
    ],
)
def test_what_is_no_kind_is_refused(kind: str, rule: str):
    for section in ({"schedule": {"kind": kind}}, {"tune": {"space": {"kind": ["stream", kind]}}}):
        with pytest.raises(UserError, match=rule) as caught:
            make_recipe(2, 2, **section)
        assert caught.value.legal[-1] == "module:NAME"


def test_what_it_does_not_take_is_refused():
    with pytest.raises(UserError, match="must be 4 lengths"):
        make_recipe(2, 2, schedule={"kind": KIND, "degree": 4, "slices": [16]})
