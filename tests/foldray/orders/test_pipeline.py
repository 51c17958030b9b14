"""Pipeline schedules against the orders of torch and Megatron and the numbers of papers, and their general properties."""

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B, _ComputationType

from foldray import UserError
from foldray.clock import check, unit_times
from foldray.graph import Op, PipelineGraph
from foldray.orders import pipeline
from tests.foldray.order import check_lists, peak

Order = list[tuple[str, int, int]]  # direction, virtual stage, micro-batch


@st.composite
def graphs(draw: st.DrawFn, backward: tuple[bool, ...] = (True, False)) -> PipelineGraph:
    """Draw a legal pipeline of 1 … 8 positions, 1 … 16 micro-batches and 1 … 4 virtual stages."""
    pp, training = draw(st.integers(1, 8)), draw(st.sampled_from(backward))
    virtual_stages = draw(st.integers(1, 4)) if pp > 1 else 1
    step = pp if training and virtual_stages > 1 else 1
    return PipelineGraph(pp, step * draw(st.integers(1, 16 // step)), virtual_stages, training)


TRAINING, EVALUATION = graphs(backward=(True,)), graphs(backward=(False,))


def computing(ops: tuple[Op, ...]) -> Order:
    return [(op.direction, op.layer, op.micro_batch) for op in ops if op.kind == "stage"]


class Recorder:
    """A stage with torch's interface that computes and sends nothing, and records the calls."""

    is_last = False

    def __init__(self, position: int):
        self.stage_index, self.order = position, Order()

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.order.append(("F", self.stage_index, micro_batch))

    def backward_one_chunk(self, micro_batch: int, **_: Any) -> None:
        self.order.append(("B", self.stage_index, micro_batch))

    def nothing(self, *_: Any) -> list:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = perform_reduce_grad = nothing


def torch_order(graph: PipelineGraph, position: int) -> Order:
    """Return the order in which torch's 1F1B runs at a position, or the order that its interleaved schedule plans.

    The objects are made without their constructors, which need stages on a process group. (The plan that torch prints for
    1F1B differs from its runs: it counts the forwards of the last stage from 1.)
    """
    sizes = {"pp_group_size": graph.pp, "n_local_stages": graph.virtual_stages, "_n_microbatches": graph.micro_batches}
    if graph.virtual_stages > 1:
        many: Any = object.__new__(ScheduleInterleaved1F1B)
        vars(many).update(sizes, microbatches_per_round=graph.pp)
        directions = {_ComputationType.FORWARD: "F", _ComputationType.FULL_BACKWARD: "B"}
        steps = [step for step in many._calculate_single_rank_operations(position) if step is not None]
        return [(directions[step.computation_type], step.stage_index, step.microbatch_index) for step in steps]
    one: Any = object.__new__(Schedule1F1B)
    vars(one).update(sizes, _num_stages=graph.pp, _stage=Recorder(position))
    vars(one).update(_loss_fn=None, _internal_losses=[], scale_grads=False)
    one._check_inputs = lambda *_: ([()] * graph.micro_batches, [{}] * graph.micro_batches)
    one._initialize_stage = lambda *_: None
    one._step_microbatches()
    return one._stage.order


def megatron_order(graph: PipelineGraph, position: int) -> Order:
    """Return the order of a position by the loops and indices of megatron/core/pipeline_parallel/schedules.py."""
    pp, chunks, total = graph.pp, graph.virtual_stages, graph.micro_batches * graph.virtual_stages
    warm_up = min(total, pp - position - 1 if chunks == 1 else (pp - position - 1) * 2 + (chunks - 1) * pp)

    def step(k: int, forward: bool) -> tuple[str, int, int]:
        if chunks == 1:
            return "F" if forward else "B", position, k
        in_group = k % (pp * chunks)
        chunk = in_group // pp if forward else chunks - in_group // pp - 1
        return "F" if forward else "B", chunk * pp + position, k // (pp * chunks) * pp + in_group % pp

    order = [step(k, True) for k in range(warm_up)]
    for k in range(total - warm_up):
        order += [step(k + warm_up, True), step(k, False)]
    return order + [step(k, False) for k in range(total - warm_up, total)]


@given(graphs())
def test_every_generated_schedule_passes_the_checker(graph):
    check(graph, pipeline(graph))


@given(TRAINING)
def test_orders_are_those_of_torch(graph):
    schedule = pipeline(graph)
    assert [computing(ops) for ops in schedule] == [torch_order(graph, position) for position in range(graph.pp)]


@given(TRAINING)
def test_orders_are_those_of_megatron(graph):
    schedule = pipeline(graph)
    assert [computing(ops) for ops in schedule] == [megatron_order(graph, position) for position in range(graph.pp)]


@pytest.mark.parametrize(
    ("graph", "before"),
    [
        (PipelineGraph(1, 3), [1]),
        (PipelineGraph(4, 8), [4, 3, 2, 1]),
        (PipelineGraph(4, 2), [2, 2, 2, 1]),
        (PipelineGraph(4, 8, 2), [11, 9, 7, 5]),
        (PipelineGraph(4, 4, 2), [8, 8, 7, 5]),
        (PipelineGraph(2, 4, 3), [7, 5]),
    ],
    ids=str,
)
def test_forwards_before_the_first_backward(graph, before):
    directions = ["".join(direction for direction, _, _ in computing(ops)) for ops in pipeline(graph)]
    assert [text.index("B") for text in directions] == before


@given(TRAINING)
def test_forwards_alive_at_once(graph):
    def most(position: int) -> int:
        if graph.virtual_stages == 1:
            return min(graph.pp - position, graph.micro_batches)
        warm_up = (graph.virtual_stages - 1) * graph.pp + 2 * (graph.pp - 1 - position)
        return min(warm_up + 1, graph.micro_batches * graph.virtual_stages)

    assert peak(graph, pipeline(graph)) == tuple(most(position) for position in range(graph.pp))


@given(TRAINING)
def test_the_bubble_is_that_of_the_paper(graph):
    # arXiv:2104.04473, section 2.2: (pp − 1)(t_F + t_B) / v, where t_F + t_B of a stage of v chunks is v·(1 + 2) here.
    length = max(span.end for span in unit_times(graph, pipeline(graph)).values())
    assert length == 3 * graph.micro_batches * graph.virtual_stages + 3 * (graph.pp - 1)


@given(graphs())
def test_a_send_follows_its_stage_and_a_receive_is_never_late(graph):
    schedule = pipeline(graph)
    times = unit_times(graph, schedule)
    for op in (op for op in times if op.kind == "handover"):
        sender, receiver = graph.where(op)
        (source,) = graph.needs(op)
        assert schedule[sender].index(op) == schedule[sender].index(source) + 1
        assert times[op].end == times[source].end, f"{op} waits for its receiver"
        wanted = times[source].start  # the first piece may leave at once
        place = schedule[receiver].index(op)
        ahead, behind = schedule[receiver][:place], schedule[receiver][place:]
        assert all(times[later].end >= wanted for later in behind), f"{op} is asked for too early"
        # It comes after what the receiver itself sends earlier, so that all positions have one order.
        wanted = max(
            [wanted, *(times[each].end for each in ahead if each.kind == "handover" and graph.where(each)[0] == receiver)]
        )
        assert all(times[each].end <= wanted for each in ahead if graph.channel(each) is None), f"{op} is asked for too late"


@given(graphs())
def test_all_positions_have_one_order_of_handovers(graph):
    check_lists(graph, pipeline(graph))
    if graph.backward:
        check_lists(graph, pipeline(graph, woven=True))


@given(EVALUATION)
def test_forward_only_runs_rounds_of_pp_and_keeps_nothing(graph):
    schedule = pipeline(graph)
    assert {op.direction for ops in schedule for op in ops} == {"F"}
    assert peak(graph, schedule) == (0,) * graph.pp
    for position, ops in enumerate(schedule):
        by_round = sorted((m // graph.pp, layer, m) for m in range(graph.micro_batches) for layer in range(graph.stages))
        assert computing(ops) == [("F", layer, m) for _, layer, m in by_round if layer % graph.pp == position]


def test_forward_only_with_virtual_stages_in_full():
    assert [computing(ops) for ops in pipeline(PipelineGraph(2, 3, 2, backward=False))] == [
        [("F", 0, 0), ("F", 0, 1), ("F", 2, 0), ("F", 2, 1), ("F", 0, 2), ("F", 2, 2)],
        [("F", 1, 0), ("F", 1, 1), ("F", 3, 0), ("F", 3, 1), ("F", 1, 2), ("F", 3, 2)],
    ]


def test_a_whole_schedule_in_full():
    lists = [" | ".join(map(str, ops)) for ops in pipeline(PipelineGraph(2, 2))]
    assert lists == [
        "F0.0 | handover F0.0 | F0.1 | handover F0.1 | handover B1.0 | handover B1.1 | B0.0 | B0.1",
        "handover F0.0 | handover F0.1 | F1.0 | B1.0 | handover B1.0 | F1.1 | B1.1 | handover B1.1",
    ]


def test_generation_does_not_depend_on_hash_seeds():
    code = "from foldray.graph import *; from foldray.orders.pipeline import *; print(pipeline(PipelineGraph(4, 8, 2)))"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"{pipeline(PipelineGraph(4, 8, 2))}\n"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: PipelineGraph(0, 1), ValueError, "pp=0: a pipeline has at least one"),
        (lambda: PipelineGraph(2, 0), ValueError, "micro_batches=0: a pipeline has at least one"),
        (lambda: PipelineGraph(2, 1, 0), UserError, "schedule.virtual_stages=0: a position holds at least one stage"),
        (
            lambda: PipelineGraph(1, 4, 2),
            UserError,
            "needs a pipeline, fold.pp above 1; legal: 1",
        ),
        (
            lambda: pipeline(PipelineGraph(4, 6, 2)),
            UserError,
            r"schedule.virtual_stages=2: .* micro-batches of a step \(6\) to be a multiple of pp=4; legal: 1",
        ),
    ],
)
def test_what_cannot_be_made_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()
