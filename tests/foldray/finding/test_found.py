"""Found lists: legal for all costs, never slower than a named list, never faster than the bound, and close to the best one."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foldray.clock import COMPUTE, Cost, check, times
from foldray.finding import Problem, blocks_left, find, first_list, lower_bound
from foldray.finding.greedy import Rule, walk
from foldray.finding.moves import improve
from foldray.graph import Chunk, Op, Place, Reduction, SliceCost, StepGraph, slice_sequence
from foldray.kinds import ATTENTION, EXPERT, FFN, HANDOVER, HEAD, WITH_WEIGHTS
from foldray.orders import OVERLAPS, Overlap, step_schedule
from tests.foldray.blocks import DENSE, FURTHER, MOE
from tests.foldray.order import check_lists
from tests.foldray.random_lists import find_at_random, random_cost
from tests.gate import examples

FLAT = SliceCost(0, 1)


def seconds_of(graph: StepGraph, schedule: Any, cost: Cost) -> float:
    return max(span.end for span in times(graph, schedule, cost).values())


BLOCKS = st.lists(st.sampled_from([DENSE, MOE, MOE]), min_size=1, max_size=3).map(tuple)


@st.composite
def graphs(draw: Any) -> StepGraph:
    stages = tuple(draw(st.lists(BLOCKS, min_size=1, max_size=4)))
    pp = max(p for p in range(1, draw(st.integers(1, 4)) + 1) if len(stages) % p == 0)
    stages = stages if pp > 1 else stages[:1]
    parts = draw(st.integers(1, 2))
    micro_batches = draw(st.integers(1, 3)) * (pp if len(stages) > pp else 1) * parts
    tied = pp == 1 and draw(st.booleans())
    kinds = [kind for kind in WITH_WEIGHTS if not (tied and kind == HEAD)]  # as `leaves_weights` leaves a tied head out
    later = tuple(sorted(draw(st.sets(st.sampled_from(kinds)))))
    positions = (
        tuple(Chunk("dense", 8 * i, 8 * i + 8, 8, ((ATTENTION, layers[0]),)) for i in range(draw(st.integers(0, 2))))
        for layers in _layers_by_position(stages, pp)
    )
    chunks = tuple(positions) if draw(st.booleans()) else ()
    degree = draw(st.integers(1, 4))
    cut = slice_sequence("token_uniform", 16, degree, FLAT, attention_degree=draw(st.integers(1, degree)))
    where = {kind: draw(st.sampled_from(["kept", "again", "host"])) for kind in ("attention", "ffn", "expert", "shared")}
    again, offloaded = (tuple(kind for kind, at in where.items() if at == way) for way in ("again", "host"))
    return StepGraph(
        stages, cut, pp, micro_batches, draw(st.booleans()), again, batch_degree=parts, chunks=chunks,
        gathers=draw(st.booleans()), later=later, tied=tied, whole=draw(st.booleans()), offloaded=offloaded,
        passes_on=draw(st.booleans()),
    )  # fmt: skip


def _layers_by_position(stages: tuple, pp: int) -> list[list[int]]:
    graph = StepGraph(stages, slice_sequence("token_uniform", 16, 1, FLAT), pp)
    return [[layer for layer, place in enumerate(graph.at) if place.attention == position] for position in range(pp)]


@pytest.mark.gate(1 / 6)
@given(graphs(), st.integers(0, 1 << 30), st.booleans(), st.booleans(), st.sampled_from([0, 0.3, 0.5, 1, 2]))
@examples(25)
def test_any_costs_and_any_memory_give_a_legal_list(graph: StepGraph, seed: int, shared: bool, zeros: bool, ahead: float) -> None:
    cost = random_cost(graph, seed, shared, zeros)
    found = find(graph, cost, ahead)
    check(graph, found.schedule)
    check_lists(graph, found.schedule)
    problem = Problem(graph, cost)
    own = problem.kept(step_schedule(graph, Overlap("sequential")))
    most = [kept + int(ahead * blocks) for kept, blocks in zip(own, problem.blocks, strict=True)]
    assert (found.kept, found.own) == (problem.kept(found.schedule), own)
    assert all(kept <= limit for kept, limit in zip(found.kept, most, strict=True))
    # Without anything that travels, as in dense blocks, the pipeline's own order leaves all of them.
    plain = problem.left(step_schedule(graph, Overlap("sequential")))
    left = [
        max(own, blocks_left(blocks, ahead)) if graph.recompute else 1000
        for own, blocks in zip(plain, problem.blocks, strict=True)
    ]
    assert all(count <= limit for count, limit in zip(problem.left(found.schedule), left, strict=True))
    assert seconds_of(graph, found.schedule, cost) == pytest.approx(found.seconds)
    assert found.bound <= found.seconds * (1 + 1e-9)
    for kind, reduction in itertools.product(OVERLAPS, ("end", "buckets")):
        lists = step_schedule(graph, Overlap(kind, 1), reduction=Reduction(reduction))
        counts = zip((*problem.kept(lists), *problem.left(lists)), (*most, *left), strict=True)
        if all(count <= limit for count, limit in counts):
            named = seconds_of(graph, lists, cost)
            assert found.seconds <= named * (1 + 1e-9), kind
            assert lower_bound(problem) <= named * (1 + 1e-9), kind


@given(graphs(), st.integers(0, 1 << 30), st.booleans())
@examples(60)
def test_list_scheduling_has_the_clock_of_the_simulator(graph: StepGraph, seed: int, shared: bool) -> None:
    cost = random_cost(graph, seed, shared)
    problem = Problem(graph, cost)
    draw = random.Random(seed)
    priority = [draw.random() for _ in problem.ops]
    most = [blocks + draw.randint(0, 2 * blocks) for blocks in problem.blocks]
    alive, left = ([draw.randint(1, 3) for _ in problem.blocks] for _ in range(2))
    step = walk(problem, Rule(priority, most, alive, left))
    assert step is not None
    assert all(count <= limit for count, limit in zip(problem.left(step.schedule(problem)), left, strict=True))
    assert all(kept <= limit for kept, limit in zip(problem.kept(step.schedule(problem)), most, strict=True))
    assert step is not None
    check(graph, step.schedule(problem))
    check_lists(graph, step.schedule(problem))
    if not shared or graph.positions == 1:  # a link of several positions may be free earlier than a receiver's list says
        assert seconds_of(graph, step.schedule(problem), cost) == pytest.approx(step.seconds)


@given(graphs(), st.integers(0, 1 << 30))
@examples(60)
def test_ops_that_run_again_do_so_late(graph: StepGraph, seed: int) -> None:
    """Whatever the costs, a position makes one state of a kind and micro-batch again at once."""
    again = (ATTENTION, EXPERT, FFN)  # what runs again is not on the host
    graph = replace(graph, recompute=again, offloaded=tuple(kind for kind in graph.offloaded if kind not in again))
    for own in find_at_random(seed, graph, random_cost(graph, seed, True), 1, None).schedule:
        alive = Counter[tuple[str, int]]()
        for op in own:
            if op.kind in graph.recompute and op.direction in "RB":
                alive[op.kind, op.micro_batch] += 1 if op.direction == "R" else -1
                assert alive[op.kind, op.micro_batch] <= 1, op


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("micro_batches", [2, pytest.param(6, marks=pytest.mark.nightly("a long search"))])
def test_experts_with_positions_of_their_own(micro_batches: int) -> None:
    stages, places = ((MOE,), (MOE,), (MOE,), (MOE,)), tuple(Place(layer % 2, 2 + layer % 2) for layer in range(4))
    graph = StepGraph(
        stages, slice_sequence("token_uniform", 16, 1, FLAT), 2, micro_batches, places=places, later=(EXPERT, ATTENTION)
    )
    cost = random_cost(graph, 2, shared=False)
    found = find(graph, cost)
    check(graph, found.schedule)
    check_lists(graph, found.schedule)
    assert found.bound <= found.seconds <= found.named_seconds


@pytest.mark.gate(1 / 4)
@given(st.integers(0, 1 << 30), st.integers(1, 2), st.integers(1, 4), st.integers(1, 2), st.booleans(), st.booleans())
@examples(25)
def test_further_tokens_with_experts_of_their_own(
    seed: int, further: int, micro_batches: int, degree: int, tied: bool, later: bool
) -> None:
    kinds = tuple(kind for kind in WITH_WEIGHTS if not (tied and kind == HEAD))
    graph = _further(further, micro_batches, degree, tied, kinds if later else ())
    found = find(graph, random_cost(graph, seed, False, False), moves=False)
    check(graph, found.schedule)
    check_lists(graph, found.schedule)
    heads = [op for op in found.schedule[0] if op.kind == HEAD and op.direction in "FB"]
    assert [op.direction for op in heads] == ["F", "B"] * (len(heads) // 2), "the logits of several pieces exist at a time"


def _further(further: int, micro_batches: int, degree: int = 1, tied: bool = False, later: tuple[str, ...] = ()) -> StepGraph:
    """Return a step of two blocks and some of further tokens, whose experts have a position of their own."""
    blocks, cut = (MOE, MOE) + (FURTHER,) * further, slice_sequence("token_uniform", 16, degree, FLAT)
    return StepGraph((blocks,), cut, 1, micro_batches, places=(Place(0, 1),) * len(blocks), tied=tied, later=later)


def test_experts_rows_that_wait_for_the_residual_stream_leave_once_it_has_left() -> None:
    """The rows go straight to the next stage, and are posted after its handover: a message of another position."""
    cut = slice_sequence("token_uniform", 16, 1, FLAT)
    graph = StepGraph(((MOE,), (MOE,)), cut, 2, 4, places=(Place(0, 2), Place(1, 3)), later=(EXPERT, ATTENTION))
    for seed in range(20):
        found = find_at_random(seed, graph, random_cost(graph, seed, True), 1, None)
        check(graph, found.schedule)


@pytest.mark.gate(1 / 2)
def test_a_list_that_was_found_before_is_kept_if_it_is_faster() -> None:
    graph = small(blocks=2, micro_batches=3)
    cost = random_cost(graph, 1, False)
    before = find(graph, cost)
    now = find(graph, cost, moves=False)
    again = find(graph, cost, moves=False, before=before.schedule)
    assert before.seconds < now.seconds
    assert again.seconds <= before.seconds


@given(graphs(), st.integers(0, 1 << 30), st.integers(0, 2))
@examples(60)
def test_a_quick_list_is_legal(graph: StepGraph, seed: int, ahead: int) -> None:
    cost = random_cost(graph, seed, True)
    schedule = first_list(graph, cost, ahead)
    check(graph, schedule)
    check_lists(graph, schedule)
    assert seconds_of(graph, schedule, cost) >= lower_bound(Problem(graph, cost)) * (1 - 1e-9)


@pytest.mark.parametrize("blocks", [1, pytest.param(2, marks=pytest.mark.nightly("two long searches"))])
def test_the_same_arguments_give_the_same_list(blocks: int) -> None:
    graph = small(blocks, micro_batches=3, degree=2)
    assert find(graph, random_cost(graph, 1, True)) == find(graph, random_cost(graph, 1, True))


def small(blocks: int, micro_batches: int, degree: int = 1, later: tuple[str, ...] = (EXPERT, ATTENTION)) -> StepGraph:
    cut = slice_sequence("token_uniform", 16, degree, FLAT)
    return StepGraph(((MOE,) * blocks,), cut, micro_batches=micro_batches, ragged=False, later=later)


Kept = dict[tuple[int, int], int]
"""Block of a micro-batch → the number of its ops that are left."""


def faster_exists(problem: Problem, most: int, limit: float) -> bool:
    """Return whether any list of one position that keeps at most `most` blocks takes less than `limit` seconds.

    The search tries every order in which the position may start its ops, computation and all-to-alls. It leaves out orders that
    cannot end in time, and those that another order of the same ops dominates.
    """
    ops, seen = range(len(problem.ops)), dict[int, list[tuple[float, ...]]]()
    computes = [problem.channel[i] < 0 for i in ops]
    left = [sum(problem.seconds[i] for i in ops if computes[i]), sum(problem.seconds[i] for i in ops if not computes[i])]
    sizes = {block: sum(computes[i] and problem.block[i] == block for i in ops) for block in set(problem.block)}

    def go(placed: int, ends: dict[int, float], free: float, quiet: float, rest: list[float], kept: Kept) -> bool:
        if len(ends) == len(problem.ops):
            return True
        live = [i for i in ends if any(not placed >> user & 1 for user in problem.users[i])]
        state = (free, quiet, *(ends[i] for i in sorted(live)))
        if any(all(a <= b for a, b in zip(other, state, strict=True)) for other in seen.get(placed, ())):
            return False
        seen.setdefault(placed, []).append(state)
        for i in ops:
            if placed >> i & 1 or not all(placed >> need & 1 for need in problem.needs[i]):
                continue
            block, begun = problem.block[i], {**kept}
            if computes[i]:
                begun.setdefault(block, sizes[block])
                begun[block] -= 1
                if sum(count > 0 for count in {**begun, block: begun[block] + 1}.values()) > most:
                    continue
            arrived = max((ends[need] for need in problem.needs[i]), default=0.0)
            start = max(free if computes[i] else max(free, quiet), arrived)
            end = start + problem.seconds[i]
            now = (end, quiet) if computes[i] else (free, end)
            remain = list(rest)
            remain[not computes[i]] -= problem.seconds[i]
            if start + problem.tails[i] >= limit or any(a + b >= limit for a, b in zip(now, remain, strict=True)):
                continue
            if go(placed | 1 << i, {**ends, i: end}, *now, remain, begun):
                return True
        return False

    return go(0, {}, 0.0, 0.0, left, {})


@pytest.mark.gate(1)
@pytest.mark.parametrize("seed", range(16))
def test_small_graphs_have_no_list_that_is_much_faster(seed: int) -> None:
    """Within 5 % of the best list, found by trying all of them."""
    draw = random.Random(seed)
    shape = draw.choice([(1, 2, 1), (1, 1, 2), (2, 1, 1), (1, 3, 1)])
    graph = small(*shape)
    cost = random_cost(graph, seed, shared=False)
    ahead = draw.choice([0, 0.5, 1]) if shape[1] < 3 else 0  # trying all lists of more ops takes minutes
    found, problem = find(graph, cost, ahead), Problem(graph, cost)
    most = shape[0] + int(ahead * shape[0])
    assert faster_exists(problem, most, found.seconds * 1.001), "the search misses the list that was found"
    assert not faster_exists(problem, most, found.seconds / 1.05)


def test_local_moves_make_a_bad_order_better() -> None:
    graph = small(blocks=1, micro_batches=1, degree=2)
    cost = random_cost(graph, 2, shared=False)
    problem = Problem(graph, cost)
    rule = Rule([float(-i) for i in range(len(problem.ops))], [1], [1], [1])
    step = walk(problem, rule)
    assert step is not None
    better = improve(problem, step, rule, 800)
    check(graph, better.schedule(problem))
    check_lists(graph, better.schedule(problem))
    assert better.seconds < 0.98 * step.seconds
    assert improve(problem, step, rule, 0) == step


def test_the_bound_counts_what_every_list_has_to_wait_for() -> None:
    """In one micro-batch of one block, every op waits for the one before, so the bound is the whole path."""
    graph = small(1, 1)
    seconds = {EXPERT: 1.0, ATTENTION: 2.0, "dispatch": 4.0, "combine": 4.0}

    def cost(op: Op) -> tuple[tuple[str, float], ...]:
        return (("link" if graph.channel(op) else COMPUTE, seconds.get(op.kind, 0.0)),)

    problem = Problem(graph, cost)
    assert lower_bound(problem) == 2 * (1 + 2 + 4 + 4) + 2  # and the gradients of attention's weights
    several = Problem(small(1, 4), cost)
    assert lower_bound(several) == 2 + 4 * 16 + 2 + 2, "the link waits for the first attention, and others for its last rows"
    assert lower_bound(several, [1]) == 4 * 24, "without a second micro-batch, nothing fills the gaps"


def test_pipelines_are_bound_by_their_busiest_position() -> None:
    graph = StepGraph(((MOE,), (MOE,)), slice_sequence("token_uniform", 16, 1, FLAT), 2, 4, False)

    def cost(op: Op) -> tuple[tuple[str, float], ...]:
        busy = 1.0 if op.kind == ATTENTION and graph.where(op) == (1,) else 0.0
        return (("link" if graph.channel(op) else COMPUTE, 0.5 if op.kind == HANDOVER else busy),)

    assert lower_bound(Problem(graph, cost)) == 8 + 2 * 0.5
