"""The stages of a MoE layer with identity experts and different tokens on every rank: their results, and what they send.

Each ETP slice of an identity expert returns 1/etp of its rows, so that the sum over the slices restores them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from foldray.comm import Groups, gather_rows, scatter_rows
from foldray.fold import Fold
from foldray.kernels.capacity import keep_within
from foldray.moe import AllToAll, Received, Routing, RowCounts, Tally, combine, dispatch
from foldray.moe.layer import TorchPermutation, combine_preprocess, dispatch_postprocess
from tests.pool import RankPool

H, E, K = 6, 16, 3
BYTES = H * 8  # bytes of a row in float64
SIZES = [1, 2, 4]
CASES = ["even weights", "any weights", "drops", "pad", "one expert", "some ranks without tokens", "no tokens"]
FOLDS = {world: [Fold(world, ep=ep, etp=etp) for ep in SIZES for etp in SIZES if ep * etp <= world] for world in (1, 2, 4, 8)}
MIXED = [
    Fold(8, tp=2, cp=2, ep=4, etp=2, order="cp-tp-dp-pp"),
    Fold(8, tp=2, pp=2, ep=2, etp=2, moe_order="ep-etp-edp-pp"),
    Fold(8, ep=2, etp=2, moe_order="edp-ep-etp-pp"),
    Fold(8, ep=4, etp=2, moe_order="ep-edp-etp-pp"),
]


class Tokens(NamedTuple):
    """The tokens of a rank, the gradient of their outputs, and their routing."""

    x_TH: Tensor
    grad_TH: Tensor
    routing: Routing


def node(rank: int) -> int:
    return rank // 2


def tokens(rank: int, case: str) -> Tokens:
    """Return the tokens of a rank. Their number differs between ranks, and no two ranks have the same token."""
    generator = torch.Generator().manual_seed(rank)
    count = 0 if case == "no tokens" or (case.startswith("some") and rank % 3 == 0) else 6 + 2 * (rank % 4)
    x_TH, grad_TH = torch.randn(2, count, H, generator=generator, dtype=torch.float64)
    x_TH = x_TH + 10 * rank
    expert_TK = torch.rand(count, E, generator=generator).argsort(1)[:, :K]
    weight_TK = torch.rand(count, K, generator=generator, dtype=torch.float64)
    if case == "even weights":
        weight_TK = torch.full_like(weight_TK, 1 / K)
    if case == "one expert":  # ranks without expert 5 receive nothing
        expert_TK, weight_TK = torch.full((count, 1), 5), weight_TK[:, :1].clone()
    keep_TK, capacity = None, None
    if case in ("drops", "pad"):
        expert_TK = torch.rand(count, 6, generator=generator).argsort(1)[:, :K] + 5  # few experts, so many drops
        keep_TK = keep_within(1, expert_TK, weight_TK, 2, E, "probability")
        assert (~keep_TK).sum() > count // 2
        capacity = 2 if case == "pad" else None
    count_BE = torch.bincount(expert_TK.flatten(), minlength=E).unsqueeze(0)
    nothing = torch.zeros(())
    return Tokens(
        x_TH, grad_TH, Routing(expert_TK, weight_TK, keep_TK, capacity, Tally(count_BE, nothing, nothing, nothing, None))
    )


def rows(rank: int, case: str) -> list[int]:
    """Count the rows that a rank sends to each expert."""
    routing = tokens(rank, case).routing
    if routing.capacity is not None:
        return [routing.capacity] * E
    kept = [True] * routing.expert_TK.numel() if routing.keep_TK is None else routing.keep_TK.flatten().tolist()
    count = Counter(expert for expert, keep in zip(routing.expert_TK.flatten().tolist(), kept, strict=True) if keep)
    return [count[expert] for expert in range(E)]


def round_trips(rank: int, folds: list[Fold]) -> list[list[dict[str, tuple[int, int, int]]]]:
    """Check all results, and return what this rank sent in each stage, for every fold and case."""
    found = []
    for fold in folds:
        groups = Groups.create(fold, rank, node=node)
        found.append([round_trip(groups, case) for case in CASES])
        groups.close()
    return found


def round_trip(groups: Groups, case: str) -> dict[str, tuple[int, int, int]]:
    sent: dict[str, tuple[int, int, int]] = {}

    def measure(stage: str) -> None:
        for (name, operation), count in groups.traffic.counts.items():
            assert operation == ("all_gather" if name == "counts" else "all_to_all")
            sent[f"{stage} {name}"] = (count.calls, count.inside_bytes, count.across_bytes)
        groups.traffic.clear()

    x_TH, grad_TH, routing = tokens(groups.rank, case)
    x_TH.requires_grad_()
    routing.weight_TK.requires_grad_()
    exchange, permutation, slices = AllToAll(groups), TorchPermutation(), groups.expert_slices
    rows_NH, sides = permutation.encode(x_TH, routing)
    assert groups.traffic.counts == {}
    received = exchange.start_counts(sides)
    measure("exchange")
    (rows_NH,) = dispatch(exchange, [rows_NH], sides, received)
    rows_NH = gather_rows(rows_NH, slices, received.rows_by_slice)
    measure("dispatch")
    rows_NH = dispatch_postprocess(rows_NH, received)
    _check_arrivals(rows_NH, received.rows_by_expert, groups, case)
    y_NH = combine_preprocess(rows_NH / groups.fold.etp, received)
    assert groups.traffic.counts == {}
    y_NH = combine(exchange, scatter_rows(y_NH, slices, received.rows_by_slice), sides, received)
    measure("combine")
    out_TH = permutation.decode(y_NH, sides, routing.weight_TK)
    out_TH.backward(grad_TH)
    measure("backward")

    kept_TK = routing.weight_TK.detach() * (1.0 if routing.keep_TK is None else routing.keep_TK)
    share_T1 = kept_TK.sum(1, keepdim=True)
    torch.testing.assert_close(out_TH.detach(), x_TH.detach() * share_T1, rtol=1e-12, atol=0)
    torch.testing.assert_close(x_TH.grad, grad_TH * share_T1, rtol=1e-12, atol=0)
    by_weight_T1 = (x_TH.detach() * grad_TH).sum(1, keepdim=True)
    torch.testing.assert_close(routing.weight_TK.grad, by_weight_T1 * (kept_TK != 0), rtol=1e-10, atol=1e-10)
    if case == "even weights":
        torch.testing.assert_close(out_TH.detach(), x_TH.detach(), rtol=1e-12, atol=0)
    return sent


def _check_arrivals(rows_NH: Tensor, counts: list[int], groups: Groups, case: str) -> None:
    """Check the rows of every expert: the tokens of the ETP×EP group's ranks in order, where the EP rank changes faster."""
    local = E // groups.fold.ep
    place = {rank: groups.fold.moe.coordinate(rank) for rank in groups.counts.ranks}
    sources = sorted(place, key=lambda rank: (place[rank]["etp"], place[rank]["ep"]))
    for expert, block in enumerate(rows_NH.detach().split(counts), start=groups.tokens.index * local):
        expected = []
        for source in sources:
            x_TH, _, routing = tokens(source, case)
            chose_TK = (routing.expert_TK == expert) & (True if routing.keep_TK is None else routing.keep_TK)
            expected.append(x_TH[chose_TK.any(1)])
            if routing.capacity is not None:
                expected.append(x_TH.new_zeros(routing.capacity - len(expected[-1]), H))
        torch.testing.assert_close(block, torch.cat(expected), rtol=0, atol=0)


def counted_by_hand(fold: Fold, case: str) -> list[dict[str, tuple[int, int, int]]]:
    """Count what every rank sends in each stage, pair by pair: calls, bytes inside its node, and bytes across nodes."""
    place = {rank: fold.moe.coordinate(rank) for rank in range(fold.world_size)}
    sent = {rank: rows(rank, case) for rank in place}

    def together(a: int, b: int, *axes: str) -> bool:
        return all(place[a][axis] == place[b][axis] for axis in axes)

    def owned(rows_E: list[int], rank: int) -> int:
        local = E // fold.ep
        return sum(rows_E[place[rank]["ep"] * local :][:local])

    there: Counter[tuple[int, int]] = Counter()  # (source, destination): rows of the all-to-all over EP
    for a in place:
        for b in place:
            if together(a, b, "etp", "edp", "pp"):
                there[a, b] = owned(sent[a], b)
    received = {b: sum(there[a, b] for a in place) for b in place}
    slices = [(a, b) for a in place for b in place if together(a, b, "ep", "edp", "pp")]
    back = {(b, a): count for (a, b), count in there.items()}
    gathered, scattered = {pair: received[pair[0]] for pair in slices}, {pair: received[pair[1]] for pair in slices}

    def sides(pairs: dict[tuple[int, int], int], rank: int, calls: int = 1, row: int = BYTES) -> tuple[int, int, int]:
        mine = {b: count for (a, b), count in pairs.items() if a == rank != b}
        inside = sum(count for b, count in mine.items() if node(b) == node(rank))
        return calls, inside * row, (sum(mine.values()) - inside) * row

    found = []
    for rank in place:
        stages: dict[str, tuple[int, int, int]] = {}
        if fold.ep * fold.etp > 1:
            members = next(group for group in fold.groups("etp_ep") if rank in group)
            following = members[(members.index(rank) + 1) % len(members)]
            stages["exchange counts"] = sides({(rank, following): len(members) - 1}, rank, row=E * 8)
        for name, size, first, second in (("tokens", fold.ep, there, back), ("expert_slices", fold.etp, gathered, scattered)):
            if size > 1:
                stages[f"dispatch {name}"], stages[f"combine {name}"] = sides(first, rank), sides(second, rank)
                both = {pair: first[pair] + second[pair] for pair in first.keys() & second.keys()}
                assert first.keys() == second.keys()
                stages[f"backward {name}"] = sides(both, rank, calls=2)
        found.append(stages)
    return found


def check(found: list[Any], folds: list[Fold]) -> None:
    for f, fold in enumerate(folds):
        for c, case in enumerate(CASES):
            for rank, expected in enumerate(counted_by_hand(fold, case)):
                assert found[rank][f][c] == expected, f"{fold}, {case}, rank {rank}"


def test_one_rank_alone_sends_nothing() -> None:
    found = round_trips(0, FOLDS[1])
    assert found == [[{}] * len(CASES)]
    check([found], FOLDS[1])


@pytest.mark.gate(1 / 5)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_round_trips_restore_tokens_and_gradients_and_send_what_the_volumes_says(ranks, world: int) -> None:
    check(ranks(world).run(round_trips, FOLDS[world], timeout=240), FOLDS[world])


@pytest.mark.gate(1 / 2)
def test_round_trips_over_folds_in_other_orders(ranks) -> None:
    check(ranks(8).run(round_trips, MIXED, timeout=240), MIXED)


@pytest.mark.nightly("sixteen ranks")
def test_round_trips_over_sixteen_ranks() -> None:
    folds = [Fold(16, ep=4, etp=4), Fold(16, tp=4, ep=4, etp=4, moe_order="ep-etp-edp-pp")]
    pool = RankPool(16)
    try:
        check(pool.run(round_trips, folds, timeout=240), folds)
    finally:
        pool.close()


def _volumes(rank: int, fold: Fold) -> list[tuple[int, int, int]]:
    """Return (counted bytes, bytes by the formula) of this rank's dispatch and combine, over EP and over ETP."""
    groups = Groups.create(fold, rank)
    x_TH, _, routing = tokens(rank, "any weights")
    exchange, slices = AllToAll(groups), groups.expert_slices
    rows_NH, sides = TorchPermutation().encode(x_TH, routing)
    arrived = exchange.start_counts(sides)
    (y_NH,) = dispatch(exchange, [rows_NH], sides, arrived)
    y_NH = gather_rows(y_NH, slices, arrived.rows_by_slice)
    combine(exchange, scatter_rows(y_NH, slices, arrived.rows_by_slice), sides, arrived)
    received = list(arrived.rows_by_slice)
    from_self = sum(arrived.counts.rows_XRE[slices.index][groups.tokens.index])
    own = received.pop(slices.index)
    leaving_R = sides.rows_E.view(fold.ep, -1).sum(1)
    leaving = int(leaving_R.sum() - leaving_R[groups.tokens.index])
    counts = groups.traffic.by_name()
    pairs = [
        (counts["tokens"].inside_bytes, (leaving + own - from_self) * BYTES),
        (counts["expert_slices"].inside_bytes, (own * (fold.etp - 1) + sum(received)) * BYTES),
    ]
    groups.close()
    return pairs


def test_volumes_follow_from_the_counts(ranks) -> None:
    for pairs in ranks(8).run(_volumes, Fold(8, ep=4, etp=2)):
        for counted, formula in pairs:
            assert counted == formula > 0


def test_equal_counts_are_those_that_padding_makes() -> None:
    _, sides = TorchPermutation().encode(tokens(1, "pad").x_TH, tokens(1, "pad").routing)
    exchange = AllToAll(Groups.create(Fold(1)))
    assert exchange.equal_counts(sides).counts == exchange.start_counts(sides).counts


def test_the_two_sides_hold_what_their_names_say() -> None:
    received = Received.of(RowCounts(torch.arange(12).view(2, 3, 2).tolist(), [3, 7]), index=1)
    assert received.leaving_by_rank == [3, 7]
    assert received.rows_by_rank == [13, 17, 21]
    assert received.rows_by_slice == [15, 51]
    assert received.rows_by_expert == [30, 36]
