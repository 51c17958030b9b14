"""Orders inside a stage: they equal those of the papers and pass the checker for all sizes, and the checker finds faults."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foldray.clock import COMPUTE, ScheduleError, check, times
from foldray.finding import Problem
from foldray.graph import SLICINGS, Op, SliceCost, Slicing, StepGraph, handover, slice_sequence
from foldray.kinds import ATTENTION, GATHER, OP_KINDS, PROJECT, WITH_WEIGHTS
from foldray.orders import OVERLAPS, Ordering, Overlap, position_list, stage_order, step_schedule
from tests.foldray.blocks import DENSE, FURTHER, MOE
from tests.foldray.order import check_lists
from tests.gate import examples

COST = SliceCost.of_model(64, 4)
LETTERS = {
    "attention": "A",
    "expert": "E",
    "merge": "M",
    "ffn": "F",
    "dispatch": "D",
    "combine": "C",
    "head": "H",
    "project": "Q",
}


def graph_of(
    stages: tuple = ((MOE,),), degree: int = 4, kind: str = "", slicing: str = "token_uniform", **more: Any
) -> StepGraph:
    cut = slice_sequence(slicing, 64, degree, COST)
    if kind == "moe_only":
        cut = cut._replace(attention=(64,))
    if kind == "sequential":
        cut = Slicing((64,), (64,))
    return StepGraph(stages, cut, **{"ragged": False, **more})


def computed(ops: tuple[Op, ...], layers: bool = False) -> str:
    """Return the computation in the notation of the papers: A2 is the attention of slice 2, with its router."""
    names = (f"{LETTERS[op.kind]}{op.layer if layers else ''}{op.part}" for op in ops if op.kind in LETTERS)
    return " ".join(name for name in names if name[0] not in "DC")


def sent(ops: tuple[Op, ...]) -> str:
    return " ".join(f"{LETTERS[op.kind]}{op.part}" for op in ops if op.kind in ("dispatch", "combine"))


@pytest.mark.parametrize(
    ("kind", "computation", "communication"),
    [
        ("sequential", "A0 E0 M0 H0", "D0 C0"),
        ("moe_only", "A0 E0 E1 E2 E3 M0 M1 M2 M3 H0 H1 H2 H3", "D0 D1 D2 D3 C0 C1 C2 C3"),
        ("aaam", "A0 A1 A2 A3 E0 E1 E2 E3 M0 M1 M2 M3 H0 H1 H2 H3", "D0 D1 D2 D3 C0 C1 C2 C3"),
        # FoldMoE, figure 7: the first combine goes between the second dispatch and the third.
        ("one_a_one_m", "A0 A1 E0 A2 E1 A3 E2 E3 M0 M1 M2 M3 H0 H1 H2 H3", "D0 D1 C0 D2 C1 D3 C2 C3"),
        ("stream", "A0 A1 A2 E0 A3 E1 M0 H0 E2 M1 H1 E3 M2 H2 M3 H3", "D0 D1 D2 C0 D3 C1 C2 C3"),
    ],
)
def test_one_block_forward(kind: str, computation: str, communication: str) -> None:
    order = stage_order(graph_of(kind=kind), 0, "F", Overlap(kind))
    assert computed(order) == computation
    assert sent(order) == communication


@pytest.mark.parametrize(
    ("kind", "computation", "communication"),
    [
        ("sequential", "H0 M0 E0 A0", "C0 D0"),
        ("one_a_one_m", "H3 H2 H1 H0 M3 M2 E3 M1 E2 A3 M0 E1 A2 E0 A1 A0", "C3 C2 D3 C1 D2 C0 D1 D0"),
    ],
)
def test_one_block_backward(kind: str, computation: str, communication: str) -> None:
    order = stage_order(graph_of(kind=kind), 0, "B", Overlap(kind))
    assert computed(order) == computation
    assert sent(order) == communication


def test_a_stream_does_not_drain_between_blocks_nor_at_a_dense_one() -> None:
    order = stage_order(graph_of(((MOE, DENSE, MOE),)), 0, "F", Overlap("stream"))
    assert computed(order, layers=True) == (
        "A00 A01 A02 E00 A03 E01 M00 A10 F10 E02 M01 A11 F11 E03 M02 A12 F12 M03 A13 F13 "
        "A20 A21 A22 E20 A23 E21 M20 H20 E22 M21 H21 E23 M22 H22 M23 H23"
    )


@pytest.mark.parametrize(
    ("kind", "forward"),
    [
        ("sequential", "A00 E00 M00 H00 A10 E10 M10 H10"),
        ("one_a_one_m", "A00 A01 E00 E01 M00 M01 H00 H01 A10 A11 E10 E11 M10 M11 H10 H11"),
        ("stream", "A00 A01 E00 M00 H00 E01 M01 H01 A10 A11 E10 M10 H10 E11 M11 H11"),
    ],
)
def test_every_further_token_has_a_head(kind: str, forward: str) -> None:
    graph = graph_of(((MOE, FURTHER),), degree=2, kind=kind, micro_batches=2, later=("head",))
    assert graph.heads == (0, 1)
    assert computed(stage_order(graph, 0, "F", Overlap(kind)), layers=True) == forward
    (step,) = step_schedule(graph, Overlap(kind))
    check(graph, (step,))
    heads = [op for op in step if op.kind == "head" and op.direction in "FB"]
    assert all(back == op._replace(direction="B") for op, back in zip(heads[::2], heads[1::2], strict=True))


def test_one_piece_is_sequential_and_of_two_one_a_one_m_is_aaam() -> None:
    for direction in ("F", "B"):
        whole = {stage_order(graph_of(degree=1), 0, direction, Overlap(kind, lag)) for kind in OVERLAPS for lag in (1, 2, 3)}
        assert len(whole) == 1
        halves = {stage_order(graph_of(degree=2), 0, direction, Overlap(kind)) for kind in ("aaam", "one_a_one_m")}
        assert len(halves) == 1


BLOCKS = st.lists(st.sampled_from([DENSE, MOE]), min_size=1, max_size=3).map(tuple)


@given(
    st.integers(1, 80), st.integers(1, 8), st.integers(1, 512), st.integers(1, 16), st.lists(BLOCKS, min_size=1, max_size=4),
    st.sampled_from(list(OVERLAPS)), st.sampled_from(list(OVERLAPS)), st.sampled_from(SLICINGS), st.integers(1, 5),
    st.integers(1, 5), st.integers(1, 3),
    st.booleans(), st.sets(st.sampled_from(["attention", "ffn", "expert"])), st.booleans(), st.integers(1, 4), st.booleans(),
    st.sets(st.sampled_from(WITH_WEIGHTS)), st.integers(0, 2), st.integers(0, 7), st.booleans(), st.booleans(),
)  # fmt: skip
@examples(200)
def test_whatever_is_generated_passes_the_checker(
    length,
    degree,
    hidden,
    heads,
    stages,
    forward,
    backward,
    slicing,
    lag,
    other,
    micro_batches,
    ragged,
    again,
    training,
    pp,
    gathers,
    later,
    further,
    fewer,
    whole,
    passes_on,
) -> None:
    degree = min(degree, length)
    cost = SliceCost.of_model(hidden, heads)
    cut = slice_sequence(slicing, length, degree, cost, attention_degree=max(1, degree - fewer))
    assert cut.supplies()
    pp = max(p for p in range(1, pp + 1) if len(stages) % p == 0)
    stages = stages if pp > 1 else stages[:1]
    stages = (*stages[:-1], stages[-1] + (FURTHER,) * further)
    micro_batches *= pp  # interleaved 1F1B needs a multiple of pp
    graph = StepGraph(
        tuple(stages),
        cut,
        pp,
        micro_batches,
        ragged,
        tuple(sorted(again)),
        training,
        gathers=gathers,
        later=tuple(sorted(later)),
        whole=whole,
        passes_on=passes_on,
    )
    schedule = step_schedule(graph, Overlap(forward, lag), Overlap(backward, other))
    check(graph, schedule)
    check_lists(graph, schedule)


def test_a_forward_and_a_backward_are_woven_in_turns() -> None:
    """Block i goes forward beside block n − 1 − i: each computes while the all-to-all of the other one is on its way."""
    graph = graph_of(((MOE, MOE),), degree=1, micro_batches=2)
    (step,) = step_schedule(graph, Overlap("weave"))
    check(graph, (step,))
    first, last = step.index(Op("head", "B", 1)), step.index(Op("embed", "B", 0))
    names = [f"{OP_KINDS[op.kind].letter.upper()}{op.direction}{op.layer}" for op in step[first : last + 1]]
    assert " ".join(names) == (
        "HB1 MB1 CB1 IF0 AF0 RF0 DF0 EB1 DB1 XF0 EF0 CF0 XB1 RB1 AB1 MB0 CB0 MF0 AF1 RF1 DF1 EB0 DB0 XF1 EF1 CF1 XB0 RB0 AB0 IB0"
    )


@pytest.mark.parametrize(("pp", "stages", "micro_batches"), [(2, 2, 4), (4, 4, 6), (2, 4, 4), (4, 8, 8), (3, 3, 1), (2, 2, 2)])
@pytest.mark.parametrize("degree", [1, 2])
def test_woven_pipelines_keep_their_warm_up_and_one_more_block(pp: int, stages: int, micro_batches: int, degree: int) -> None:
    graph = graph_of(((MOE,),) * stages, degree, pp=pp, micro_batches=micro_batches, later=("expert",))
    lists = step_schedule(graph, Overlap("weave"))
    check(graph, lists)
    check_lists(graph, lists)
    if stages == pp:
        kept = Problem(graph, lambda op: ((COMPUTE, 1.0),)).kept(lists)
        assert kept == tuple(min(2 * (pp - 1 - place) + 2, micro_batches) for place in range(pp))


@pytest.mark.parametrize(("pp", "virtual_stages"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_a_woven_pipeline_has_the_bubble_of_its_own_pipeline(pp: int, virtual_stages: int) -> None:
    """Positions do not wait for each other's pairs. Here, all-to-alls take no time."""
    graph = graph_of(((MOE, MOE),) * pp * virtual_stages, 1, pp=pp, micro_batches=4 * pp)
    computing = {"F": ((COMPUTE, 1.0),), "B": ((COMPUTE, 2.0),)}

    def seconds(kind: str) -> float:
        lists = step_schedule(graph, Overlap(kind))
        found = times(graph, lists, lambda op: (("link", 0.0),) if graph.channel(op) else computing[op.direction])
        return max(span.end for span in found.values())

    assert seconds("weave") <= 1.01 * seconds("sequential")


def test_gradients_of_weights_are_computed_while_rows_travel() -> None:
    """Those of the experts run behind the dispatch of the rows' gradients, those of attention behind the next combine."""
    graph = graph_of(((MOE, MOE),), degree=1, later=("attention", "expert", "head"))
    step = position_list(graph, 0, Ordering())
    names = [f"{OP_KINDS[op.kind].letter.upper()}{op.direction}{op.layer}" for op in step[step.index(Op("head", "B", 1)) :]]
    assert " ".join(names) == ("HB1 MB1 CB1 HW1 EB1 DB1 EW1 XB1 RB1 AB1 MB0 CB0 AW1 EB0 DB0 EW0 XB0 RB0 AB0 IB0 AW0")


def test_one_op_has_the_gradients_of_weights_of_all_pieces() -> None:
    """It follows the backward of the last piece. Those of a head stay apart."""
    graph = replace(graph_of(((MOE, MOE),), degree=2, later=("attention", "expert", "head")), whole=True)
    step = position_list(graph, 0, Ordering(Overlap("aaam"), Overlap("aaam")))
    check(graph, (step,))
    names = [f"{OP_KINDS[op.kind].letter.upper()}{op.direction}{op.layer}{op.part}" for op in step if op.direction in "BW"]
    assert " ".join(names[3:]) == (
        "MB11 CB11 HW11 MB10 CB10 EB11 DB11 EB10 DB10 EW10 XB11 RB11 AB11 XB10 RB10 AB10 "
        "MB01 CB01 AW10 MB00 CB00 EB01 DB01 EB00 DB00 EW00 XB01 RB01 AB01 IB01 XB00 RB00 AB00 IB00 AW00"
    )
    weights, last = Op("expert", "W", 1), Op("expert", "B", 1)
    assert set(graph.needs(weights)) == {last, last._replace(part=1)}
    early = tuple(moved for op in step if op != weights for moved in ((weights, op) if op == last else (op,)))
    with pytest.raises(ScheduleError, match=r"expert W.* which it needs"):
        check(graph, (early,))


@pytest.mark.parametrize(("degree", "parts", "micro_batches"), [(1, 1, 2), (2, 1, 1), (1, 2, 2), (1, 2, 4), (2, 2, 2)])
def test_gradients_of_the_same_weights_are_added_in_the_order_of_backward(degree: int, parts: int, micro_batches: int) -> None:
    """Otherwise sums would have other bits."""
    graph = graph_of(degree=degree, later=("expert",), micro_batches=micro_batches, batch_degree=parts)
    (order,) = step_schedule(graph, Overlap("aaam"))
    check(graph, (order,))
    adds = [op for op in order if op.direction == "W"]
    assert [op._replace(direction="B") for op in adds] == [op for op in order if (op.kind, op.direction) == ("expert", "B")]
    for first, second in pairwise(adds):
        late = [op for op in order if op not in adds]  # all of them at the end, so that only their own order can be wrong
        swapped = [{first: second, second: first}.get(op, op) for op in adds]
        check(graph, ((*late, *adds),))
        with pytest.raises(ScheduleError, match=r"expert W.* which it needs"):
            check(graph, ((*late, *swapped),))


def test_keys_and_values_are_gathered_a_slice_ahead() -> None:
    """Projections and the gather come before attention of the slice before; backward is the mirror image."""
    graph = graph_of(((MOE, MOE),), gathers=True)
    forward, backward = (stage_order(graph, 0, direction, Overlap("one_a_one_m")) for direction in "FB")
    assert computed(forward[: forward.index(Op(ATTENTION, "F", 1, 1, 0))], layers=True) == (
        "Q00 Q01 A00 Q02 A01 E00 Q03 A02 E01 A03 E02 E03 M00 M01 M02 M03 Q10 Q11 A10 Q12"
    )
    stream = stage_order(graph, 0, "F", Overlap("stream", 2))
    assert computed(stream[: stream.index(Op(ATTENTION, "F", 1, 1, 0))], layers=True) == (
        "Q00 Q01 A00 Q02 A01 Q03 A02 E00 A03 M00 Q10 E01 A10 M01 Q11 E02"
    )
    for order, maker in ((forward, PROJECT), (backward, ATTENTION)):
        for before, op in pairwise(order):
            assert (op.kind == GATHER) == (before.kind == maker)
    for part in range(1, 4):
        assert backward.index(Op(GATHER, "B", 0, part, 0)) < backward.index(Op(ATTENTION, "B", 0, part - 1, 0))
        assert backward.index(Op(ATTENTION, "B", 0, part - 1, 0)) < backward.index(Op(PROJECT, "B", 0, part, 0))


@pytest.mark.parametrize("kind", ["moe_only", "one_a_one_m", "stream"])
def test_a_stage_begins_with_the_first_piece_of_the_stage_before(kind: str) -> None:
    """With one block per stage, three of four pieces travel while the stage still computes."""
    slicing = Slicing((64,) if kind == "moe_only" else (16,) * 4, (16,) * 4)
    graph = StepGraph(((MOE,), (MOE,)), slicing, 2)
    schedule = step_schedule(graph, Overlap(kind, 1))
    check(graph, schedule)
    check_lists(graph, schedule)
    assert [str(op) for op in schedule[0] if op.kind == "handover" and op.direction == "F"] == [
        "handover F0.0", "handover F0.0/1", "handover F0.0/2", "handover F0.0/3",
    ]  # fmt: skip
    spans = times(graph, schedule, lambda each: ((str(graph.channel(each) or COMPUTE), 1.0),))
    sums = [spans[op("merge", "F", 0, part)] for part in range(4)]
    sent = [spans[handover("F", 0, 0, part)] for part in range(4)]
    assert [each.start for each in sent[:2]] == [each.end for each in sums[:2]]
    first = spans[op("attention", "F", 1, 0)].start
    assert first == (sent[-1] if kind == "moe_only" else sent[0]).end
    assert (first < sums[-1].end) == (kind != "moe_only")
    gradients = [each for each in schedule[1] if each.kind == "handover" and each.direction == "B"]
    assert [each.part for each in gradients] == ([0] if kind == "moe_only" else [3, 2, 1, 0])


def test_the_last_part_of_a_micro_batch_hands_over_its_gradients_first() -> None:
    """Each piece leaves right after attention has gone backward, while the other part is still computed."""
    graph = graph_of(((MOE,), (MOE,)), 1, pp=2, micro_batches=2, batch_degree=2)
    schedule = step_schedule(graph, Overlap("flow"))
    check(graph, schedule)
    sent = [(before, op) for before, op in pairwise(schedule[1]) if op.kind == "handover" and op.direction == "B"]
    assert [op.micro_batch for _, op in sent] == [1, 0]
    assert all(before == Op("attention", "B", 1, 0, op.micro_batch) for before, op in sent)


def test_slices_and_micro_batches_meet_by_their_tokens() -> None:
    graph = StepGraph(((MOE, MOE),), Slicing((5, 2, 1), (3, 3, 2)), ragged=False)
    route = [{need.part for need in graph.needs(op) if need.kind == "attention"} for op in graph.pieces("route", 0)]
    assert route == [{0}, {0, 1}, {1, 2}]
    entering = [{need.part for need in graph.needs(op) if need.kind == "merge"} for op in graph.pieces("attention", 1)]
    assert entering == [{0, 1}, {1, 2}, {2}]
    back = [{need.part for need in graph.needs(op) if need.kind == "attention"} for op in graph.pieces("merge", 0, 0, "B")]
    assert back == [{0}, {0, 1}, {1, 2}]
    assert list(accumulate(len(graph.tokens(op)) for op in graph.pieces("attention", 1))) == [5, 7, 8]


GRAPH = graph_of(((MOE, MOE),), degree=2, ragged=True, recompute=("expert",))
GOOD = step_schedule(GRAPH, Overlap("one_a_one_m"))[0]


def op(kind: str, direction: Any, layer: int, part: int) -> Op:
    return Op(kind, direction, layer, part)


def moved(what: Op, before: Op) -> tuple[Op, ...]:
    """Return the good list with one op moved before another."""
    left = [each for each in GOOD if each != what]
    place = left.index(before)
    return (*left[:place], what, *left[place:])


FAULTS: dict[str, tuple[tuple[Op, ...], str]] = {
    "a lost backward": (tuple(o for o in GOOD if o != op("attention", "B", 0, 1)), "lacks attention B0.0/1"),
    "a lost collective": (tuple(o for o in GOOD if o != op("combine", "F", 1, 0)), "lacks combine F1.0"),
    "a lost recomputation": (tuple(o for o in GOOD if o != op("expert", "R", 1, 1)), "lacks expert R1.0/1"),
    "an op twice": ((*GOOD, op("merge", "B", 0, 0)), "merge B0.0 twice"),
    "a piece too many": ((*GOOD, op("route", "F", 0, 2)), "route F0.0/2, which the graph does not know"),
    "a block too many": ((*GOOD, op("route", "F", 2, 0)), "which the graph does not know"),
    "a counts op that goes backward": ((*GOOD, op("counts", "B", 0, 0)), "which the graph does not know"),
    "experts before their rows": (
        moved(op("expert", "F", 0, 1), op("dispatch", "F", 0, 1)),
        "expert F0.0/1 before dispatch F0.0/1, which it needs",
    ),
    "rows before their counts": (
        moved(op("dispatch", "F", 0, 0), op("counts", "F", 0, 0)),
        "dispatch F0.0 before counts F0.0, which it needs",
    ),
    "a sum before its rows": (moved(op("merge", "F", 0, 0), op("combine", "F", 0, 0)), "merge F0.0 before combine F0.0"),
    "a slice before the one it looks back to": (
        moved(op("attention", "F", 1, 1), op("attention", "F", 1, 0)),
        "attention F1.0/1 before attention F1.0, which it needs",
    ),
    "a slice backward before those that saw its keys": (
        moved(op("attention", "B", 0, 0), op("attention", "B", 0, 1)),
        "attention B0.0 before",
    ),
    "the next block before this one": (
        moved(op("attention", "F", 1, 0), op("merge", "F", 0, 0)),
        "attention F1.0 before merge F0.0",
    ),
    "backward before the loss": (moved(op("merge", "B", 1, 1), op("head", "F", 1, 1)), "merge B1.0/1 before"),
    "a backward before its recomputation": (
        moved(op("expert", "B", 0, 0), op("expert", "R", 0, 0)),
        "expert B0.0 before expert R0.0, which it needs",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name: str) -> None:
    check(GRAPH, (GOOD,))
    ops, words = FAULTS[name]
    with pytest.raises(ScheduleError) as caught:
        check(GRAPH, (ops,))
    assert words in str(caught.value)


def swapped(a: Op, b: Op) -> tuple[Op, ...]:
    other = {a: b, b: a}
    return tuple(other.get(each, each) for each in GOOD)
