"""The predicted step of a fold whose experts have ranks of their own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest

from foldray.blueprint import ModelSpec, ranks_of_a_token
from foldray.costs import traffic
from foldray.costs.apart import ApartWork, Sides, most_kept
from foldray.costs.candidate import Candidate, Job
from foldray.costs.device import Device
from foldray.costs.hardware import Link, load_hardware
from foldray.costs.ops import OpWork
from foldray.costs.whole import pass_seconds, simulate_step, whole_seconds
from foldray.fold import Fold
from foldray.graph import Op
from foldray.kinds import ATTENTION, COMBINE, DISPATCH, EXPERT, HEAD, INTRA_COMBINE, INTRA_DISPATCH, MERGE, ROUTE, SHARED
from foldray.nodes import Room, arrange
from foldray.orders import Ordering, Overlap, position_list

MODEL = ModelSpec(preset="deepseek-moe", layers=5)  # four MoE blocks, after a dense one
JOB = Job(MODEL, 4096, 64)
DEVICE = Device.of(JOB, load_hardware("h800"))


def work(fold: Fold, nics: tuple[float, float] = (1.0, 1.0), device: Device = DEVICE, **changes) -> ApartWork:
    return ApartWork(Candidate(JOB, fold, **changes), Sides(DEVICE, device, nics))


def seconds(work: OpWork, kind: str, direction: str = "F") -> float:
    return sum(each.seconds for each in work.work(Op(kind, direction, 1)))  # type: ignore[arg-type]


def test_a_token_goes_once_to_each_rank() -> None:
    model = ModelSpec(preset="tiny", experts=8, topk=3)
    for ep in (1, 2, 4, 8):
        local = 8 // ep
        choices = [len({expert // local for expert in chosen}) for chosen in combinations(range(8), 3)]
        assert ranks_of_a_token(model, ep) == pytest.approx(sum(choices) / len(choices))


@pytest.mark.parametrize("direction", ["F", "B"])
def test_experts_cost_what_they_cost_on_shared_ranks(direction: str) -> None:
    """Eight ranks of attention and eight of the experts compute what eight ranks with both compute."""
    shared = OpWork(Candidate(JOB, Fold(8, ep=8)), DEVICE)
    apart = work(Fold(16, ep=8, expert_ranks=8))
    assert seconds(apart, EXPERT, direction) == pytest.approx(seconds(shared, EXPERT, direction))
    once = OpWork(Candidate(replace(JOB, dispatch="rank"), Fold(16, ep=16, ep_inside=8)), DEVICE)
    to_nodes = work(Fold(32, ep=16, ep_inside=8, expert_ranks=16))
    legs = [Op(kind, direction, 1) for kind in (INTRA_DISPATCH, EXPERT, INTRA_COMBINE)]  # type: ignore[arg-type]
    assert sorted(to_nodes.work(legs[1])) == sorted(each for op in legs for each in once.work(op))
    assert sum(each.seconds for each in to_nodes.work(Op(EXPERT, direction, 1)) if each.what == "ep_inside") > 0  # type: ignore[arg-type]
    fewer = work(Fold(12, ep=4, expert_ranks=4))
    assert seconds(fewer, EXPERT, direction) > 1.9 * seconds(apart, EXPERT, direction)


def test_rows_travel_once_to_each_node() -> None:
    """A token has experts on about 5.3 of 16 ranks, and on 2 nodes at most. A slow rank has no more senders than others."""
    once, apart = work(Fold(32, ep=16, ep_inside=8, expert_ranks=16)), work(Fold(32, ep=16, expert_ranks=16))
    rows = [ranks_of_a_token(MODEL, places) for places in (2, 16)]
    start = DEVICE.hardware.inter.of(4)[1]
    for kind in (DISPATCH, COMBINE):
        ours, theirs = seconds(once, kind) - 2 * start, seconds(apart, kind) - 16 * start
        assert ours / theirs == pytest.approx(rows[0] / rows[1])
    few = work(Fold(17, ep=16, ep_inside=8, expert_ranks=16))  # one sender, whose rows all go to the same rank of each node
    assert seconds(few, COMBINE) >= seconds(once, COMBINE) - 2 * start


def test_rows_take_as_long_as_the_slower_end() -> None:
    even, few = work(Fold(32, ep=16, expert_ranks=16)), work(Fold(24, ep=8, expert_ranks=8))
    assert seconds(even, DISPATCH) > seconds(even, COMBINE) > 0  # weights travel along
    assert seconds(few, COMBINE) > 1.5 * seconds(work(Fold(24, ep=8, expert_ranks=8), (1.0, 2.0)), COMBINE)
    assert seconds(work(Fold(24, ep=8, expert_ranks=8), (2.0, 1.0)), COMBINE) == pytest.approx(seconds(few, COMBINE))


@pytest.mark.parametrize("positions", [1, 2])
def test_rows_do_not_leave_nodes_that_hold_both_halves(positions: int) -> None:
    """Where the planner has rows on the links inside nodes, training seats the ranks so that no rows cross nodes."""
    fold = Fold(16, tp=2 // positions, pp=positions, ep=2 // positions, expert_ranks=8, expert_pp=positions)
    job, sides = replace(JOB, global_batch=512), Sides(DEVICE, DEVICE)
    near, apart = (ApartWork(Candidate(job, each), sides) for each in (fold, replace(fold, ep=8 // positions)))
    assert (fold.edp, near.shared_nodes, apart.shared_nodes) == (4, (4, 4), None)
    travels = traffic.edges(near.candidate)
    where = arrange(travels, [Room(node, 8) for node in range(2)])
    assert travels.split(where)["rows"].across == 0 < travels.split(where)["edp"].across
    assert [sum(where[rank] == node for rank in range(8)) for node in range(2)] == [4, 4]
    # The same bytes over NVLink, with four times the speed, and not over the network.
    link, reached = DEVICE.hardware.intra, DEVICE.share["exchange"]
    rows = 4096 / fold.tp * ranks_of_a_token(MODEL, fold.ep) * 2048 * 2
    assert seconds(near, COMBINE) == pytest.approx(link.latency_us * 1e-6 * fold.ep + rows / (link.gb_s * 1e9 * reached))
    # Sums of gradients go round the same nodes, but only half of a node's adapters are attention's.
    shape = near.rank.network.shape("dp_cp")
    assert shape == (4, 2, 2)
    shape = near.expert_rank.network.shape("edp")
    assert shape == (4, 2, 2)


def test_nodes_with_both_halves_are_faster_over_slow_networks() -> None:
    fold, slow = Fold(32, ep=4, expert_ranks=16), load_hardware("a10g-g5.48xlarge")
    job = Job(ModelSpec(preset="deepseek-moe", layers=3), 4096, 1024)
    device = Device.of(job, slow.model_copy(update={"memory_gib": 999.0}))
    near = ApartWork(Candidate(job, fold), Sides(device, device))
    elsewhere = replace(device, hardware=device.hardware.model_copy(update={"about": "the same GPUs, on other nodes"}))
    far = ApartWork(Candidate(job, fold), Sides(device, elsewhere))
    assert near.shared_nodes
    assert not far.shared_nodes
    assert whole_seconds(near.candidate, near) < 0.9 * whole_seconds(far.candidate, far)
    few = ApartWork(Candidate(replace(job, global_batch=16), fold), Sides(device, device))
    assert few.shared_nodes is None, "gradients would be more bytes than rows"


def test_each_end_has_its_own_links() -> None:
    fold = Fold(32, ep=16, expert_ranks=16)
    half = replace(DEVICE, hardware=DEVICE.hardware.model_copy(update={"inter": Link(gb_s=25, latency_us=20)}))
    assert seconds(work(fold, device=half), COMBINE) == pytest.approx(seconds(work(fold, (1.0, 0.5)), COMBINE))
    slower = ApartWork(Candidate(JOB, fold), Sides(half, DEVICE))
    assert seconds(slower, COMBINE) == pytest.approx(seconds(work(fold, (0.5, 1.0)), COMBINE))


def test_a_step_is_as_long_as_its_slower_side_at_least() -> None:
    fold = Fold(32, pp=2, ep=8, expert_ranks=16, expert_pp=2)
    apart = work(fold, virtual_stages=2)
    simulated = simulate_step(apart.candidate, apart)
    busiest = max(usage.compute for usage in simulated.usage)
    assert busiest < simulated.seconds < 1.6 * busiest
    assert whole_seconds(apart.candidate, apart) > simulated.seconds


def test_faster_experts_shorten_the_side_that_waits_for_them() -> None:
    fold = Fold(20, ep=4, expert_ranks=4)
    slow = work(fold, (1.0, 8.0))  # rows do not set the pace
    faster = replace(DEVICE, hardware=DEVICE.hardware.model_copy(update={
        "peak_tflops": {name: 4 * peak for name, peak in DEVICE.hardware.peak_tflops.items()}
    }))  # fmt: skip
    fast = work(fold, (1.0, 8.0), faster)
    assert whole_seconds(fast.candidate, fast) < 0.9 * whole_seconds(slow.candidate, slow)


def test_memory_is_that_of_each_side() -> None:
    apart = work(Fold(16, ep=8, expert_ranks=8))
    attention, experts = apart.memory()
    weights = OpWork(Candidate(JOB, Fold(8, ep=8)), DEVICE).rank.weights[EXPERT, JOB.blocks[-1]]
    assert experts.weights == pytest.approx(4 * weights * (2 + 4))  # in bfloat16, with float32 copies
    assert attention.activations > 0
    assert experts.activations > 0
    assert attention.logits > experts.logits == 0


def test_a_further_token_has_a_block_on_both_sides_and_a_head() -> None:
    """Attention's side also makes the block's input, and keeps the gradient of the head before it."""
    fold, job = Fold(16, ep=8, expert_ranks=8), replace(JOB, model=MODEL.model_copy(update={"mtp_depth": 1}))
    plain, more = (ApartWork(Candidate(each, fold), Sides(DEVICE, DEVICE)) for each in (JOB, job))
    last = len(JOB.blocks) - 1
    busy = []
    for each in (plain, more):
        sides = Counter[int]()
        for op in (op for op in each.candidate.graph.ops() if each.candidate.graph.channel(op) is None):
            sides[each.candidate.graph.where(op)[0]] += sum(part.seconds for part in each.work(op))  # type: ignore[assignment]
        busy.append(sides)

    def both(kind: str, layer: int) -> float:
        return sum(part.seconds for way in ("F", "B") for part in more.work(Op(kind, way, layer)))  # type: ignore[arg-type]

    passes = plain.candidate.micro_batches
    assert busy[1][1] - busy[0][1] == pytest.approx(passes * both(EXPERT, last))
    added = [(HEAD, last + 1), (ATTENTION, last + 1), (ROUTE, last), (SHARED, last), (MERGE, last)]
    assert busy[1][0] - busy[0][0] == pytest.approx(passes * sum(both(*each) for each in added))
    assert both(ATTENTION, last + 1) > both(ATTENTION, last)
    (ours, theirs), (before, others) = more.memory(), plain.memory()
    state = 4096 * MODEL.hidden * 2
    kept = more._kept(more.rank, job.blocks[-1], "dp_cp") - plain._kept(plain.rank, JOB.blocks[-1], "dp_cp")
    assert kept == pytest.approx(6 * state + 8 * 4096)
    assert ours.activations > before.activations
    assert theirs.weights / others.weights == pytest.approx(5 / 4)


def test_what_is_kept_is_counted_at_its_peak() -> None:
    graph = work(Fold(16, ep=8, expert_ranks=8)).candidate.graph
    kept = most_kept(position_list(graph, 1, Candidate(JOB, Fold(16, ep=8, expert_ranks=8)).ordering), EXPERT)
    assert 0 < kept.total() <= 4 * graph.micro_batches


def test_gradients_of_weights_of_their_own_free_no_block_again() -> None:
    together, apart = (
        work(Fold(16, ep=8, expert_ranks=8), ordering=Ordering(weight_gradients=way)) for way in ("together", "apart")
    )
    for kind, place in ((ATTENTION, 0), (EXPERT, 1)):
        once, again = (
            most_kept(position_list(each.candidate.graph, place, each.candidate.ordering), kind) for each in (together, apart)
        )
        assert once == again
    for one, other in zip(together.memory(), apart.memory(), strict=True):
        assert one.activations == other.activations


def test_lists_need_more_memory_by_what_they_may_keep() -> None:
    """With `ahead: 1`, both sides may keep the halves of one more micro-batch."""
    ways = {"forward": Overlap("list"), "backward": Overlap("list")}
    named, none, one = (
        work(Fold(16, ep=8, expert_ranks=8), ordering=Ordering(**more, weight_gradients="apart")).memory()
        for more in ({}, {**ways, "ahead": 0}, {**ways, "ahead": 1})
    )
    for side in range(2):
        assert named[side].activations <= none[side].activations < one[side].activations
        assert named[side].buffers == none[side].buffers == one[side].buffers


def test_steps_that_differ_in_sizes_alone_share_lists_and_not_costs() -> None:
    crowded = replace(DEVICE, changed={"crowding": 0.3})
    one, alike, fewer, again = (
        ApartWork(Candidate(JOB, Fold(16, tp=tp, ep=8, expert_ranks=8), Ordering(**way), tp), Sides(crowded, crowded))
        for tp, way in ((1, {}), (2, {}), (1, {"alive": 2}), (2, {"recompute": (EXPERT,)}))
    )
    assert one.candidate.graph != alike.candidate.graph
    assert one.candidate.reducing.in_units == alike.candidate.reducing.in_units != again.candidate.reducing.in_units
    seconds = list[float]()
    for each in (one, alike, fewer, again):
        simulated = simulate_step(each.candidate, each)
        overlapped = max(used.communication - used.exposed for used in simulated.usage)
        seconds.append(pass_seconds(each.candidate, each))
        assert seconds[-1] == simulated.seconds + 0.3 * overlapped
    assert len(set(seconds)) == 4
