"""Collectives and their gradients against formulas over the tensors of all ranks; counted traffic; members of groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from foldray.comm import (
    TRAFFIC,
    Communicator,
    Count,
    Groups,
    Traffic,
    gather_rows,
    gather_sequence,
    mirrored,
    scatter_rows,
    scatter_sequence,
)
from foldray.fold import Fold
from tests.foldray.live import Live

FOLDS = [
    Fold(4, tp=4, ep=4),
    Fold(4, tp=2, cp=2, etp=2),
    Fold(4, tp=2, cp=2, ep=2, order="cp-tp-dp-pp"),  # tensor-parallel ranks are not neighbours
]
ROWS = [3, 0, 2, 1]  # rows of the members of a group of 4; a smaller group takes the first ones
H, EIGHT = 5, 8  # columns; bytes of a float64


def node(rank: int) -> int:
    return rank // 2


def data(rank: int, seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64)


def crossing(i: int, j: int) -> int:
    """Return the number of rows that member i sends to member j."""
    return (3 * i + 2 * j) % 5


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def with_gradient(step: Callable[[Tensor], Tensor], x: Tensor, seed: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return a step's output, and its input's gradient for an output gradient that differs from rank to rank."""
    x = x.clone().requires_grad_()
    y = step(x)
    (gradient,) = torch.autograd.grad(y, x, data(rank, seed, *y.shape))
    return y.detach(), gradient


def _plain(rank: int, fold: Fold) -> None:
    groups = Groups.create(fold, rank)
    line = groups.tensor
    members, me, n = line.ranks, line.index, line.size
    assert members[me] == rank

    x = data(rank, 1, 3, 4)
    summed = line.all_reduce(x)
    assert summed is x, "in place"
    check(x, sum(data(r, 1, 3, 4) for r in members))
    check(line.all_reduce(data(rank, 2, 7), "max"), torch.stack([data(r, 2, 7) for r in members]).amax(0))

    check(line.all_gather(data(rank, 3, 2, 3)), torch.cat([data(r, 3, 2, 3) for r in members]))
    turned = line.all_gather(data(rank, 4, 3, 2).T)  # not contiguous
    check(turned, torch.cat([data(r, 4, 3, 2).T for r in members]))

    part = line.reduce_scatter(data(rank, 5, 2 * n, 3))
    check(part, sum(data(r, 5, 2 * n, 3)[2 * me : 2 * me + 2] for r in members))
    given = data(rank, 5, 3, 2 * n).T
    before, part = given.clone(), line.reduce_scatter(given)
    check(part, sum(data(r, 5, 3, 2 * n).T[2 * me : 2 * me + 2] for r in members))
    assert torch.equal(given, before)
    given, out = data(rank, 5, 2 * n, 3), torch.empty(2, 3, dtype=torch.float64)
    with Live() as live:
        seen = given.view_as(given), out.view_as(out)
        (part,) = line.start_reduce_scatter(given, out).wait()
    check(part, sum(data(r, 5, 2 * n, 3)[2 * me : 2 * me + 2] for r in members))
    assert part is out
    assert live.peak == sum(each.untyped_storage().nbytes() for each in seen), "it needs no memory"

    received, sent = [crossing(i, me) for i in range(n)], [crossing(me, j) for j in range(n)]
    rows = line.all_to_all(data(rank, 6, sum(sent), H), received, sent)
    starts = [sum(crossing(i, j) for j in range(me)) for i in range(n)]
    whole = [data(r, 6, sum(crossing(i, j) for j in range(n)), H) for i, r in enumerate(members)]
    check(rows, torch.cat([x[start:][:count] for x, start, count in zip(whole, starts, received, strict=True)]))

    shapes = ((2, 3), (4,), (3, 2))
    mine = [data(rank, 7 + i, *shape) for i, shape in enumerate(shapes)]
    mine[2] = mine[2].T
    came = line.shift(mine).wait()
    for i, (tensor, shape) in enumerate(zip(came, shapes, strict=True)):
        before = data(members[me - 1], 7 + i, *shape)
        check(tensor, before.T if i == 2 else before)

    # Each member sends two messages to every other member. The messages of a pair arrive in order.
    others = [member for member in range(n) if member != me]
    sends = [line.send(data(rank, 20 + k, 2, 3 + k).T if k else data(rank, 20, 2, 3), to) for to in others for k in (0, 1)]
    for source in others:
        for k in (0, 1):
            (tensor,) = line.receive(x.new_empty((3 + k, 2) if k else (2, 3)), source).wait()
            sent_k = data(members[source], 20 + k, 2, 3 + k)
            check(tensor, sent_k.T if k else sent_k)
    assert all(pending.wait() == () for pending in sends)
    groups.close()


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("fold", FOLDS, ids=lambda fold: f"{fold} {fold.order}")
def test_collectives_are_their_formulas(ranks, fold: Fold) -> None:
    ranks(4).run(_plain, fold)


def _mirrored(rank: int, fold: Fold) -> None:
    groups = Groups.create(fold, rank)
    line = groups.tensor
    members, me, n = line.ranks, line.index, line.size
    rows, total = ROWS[:n], sum(ROWS[:n])
    first = sum(rows[:me])

    received, sent = [crossing(i, me) for i in range(n)], [crossing(me, j) for j in range(n)]
    both_ways = (lambda x: line.all_to_all(x, received, sent)), (lambda x: line.all_to_all(x, sent, received))
    y, gradient = with_gradient(lambda x: mirrored(x, *both_ways), data(rank, 1, sum(sent), H), 2, rank)
    back = []
    for j, r in enumerate(members):  # member j's gradient has the rows of all members in order
        upstream = data(r, 2, sum(crossing(i, j) for i in range(n)), H)
        back.append(upstream[sum(crossing(i, j) for i in range(me)) :][: crossing(me, j)])
    assert y.shape == (sum(received), H)
    check(gradient, torch.cat(back))

    y, gradient = with_gradient(lambda x: gather_rows(x, line, rows), data(rank, 3, rows[me], H), 4, rank)
    check(y, torch.cat([data(r, 3, rows[i], H) for i, r in enumerate(members)]))
    check(gradient, sum(data(r, 4, total, H)[first : first + rows[me]] for r in members))

    y, gradient = with_gradient(lambda x: scatter_rows(x, line, rows), data(rank, 5, total, H), 6, rank)
    check(y, sum(data(r, 5, total, H)[first : first + rows[me]] for r in members))
    check(gradient, torch.cat([data(r, 6, rows[i], H) for i, r in enumerate(members)]))

    own = slice(3 * me, 3 * me + 3)
    y, gradient = with_gradient(lambda x: gather_sequence(x, line), data(rank, 7, 2, 3, H), 8, rank)
    check(y, torch.cat([data(r, 7, 2, 3, H) for r in members], dim=1))
    check(gradient, sum(data(r, 8, 2, 3 * n, H)[:, own] for r in members))

    y, gradient = with_gradient(lambda x: scatter_sequence(x, line), data(rank, 9, 2, 3 * n, H), 10, rank)
    check(y, sum(data(r, 9, 2, 3 * n, H)[:, own] for r in members))
    check(gradient, torch.cat([data(r, 10, 2, 3, H) for r in members], dim=1))
    groups.close()


@pytest.mark.parametrize("fold", FOLDS, ids=lambda fold: f"{fold} {fold.order}")
def test_differentiable_collectives_and_their_gradients_are_their_formulas(ranks, fold: Fold) -> None:
    ranks(4).run(_mirrored, fold)


def _wide_sums(rank: int) -> float:
    groups = Groups.create(Fold(4, tp=4), rank)
    x_NH = torch.full((1, 1), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    sums = scatter_rows(x_NH, groups.tensor, [1, 0, 0, 0])
    groups.close()
    assert sums.dtype == torch.bfloat16
    return float(sums[0]) if rank == 0 else float(sums.numel())


def test_rows_are_summed_in_float32(ranks) -> None:
    # In bfloat16, 256 + 1 is 256, so a sum in bfloat16 is 256. The exact sum 259 is rounded to 260.
    assert ranks(4).run(_wide_sums) == [260.0, 0.0, 0.0, 0.0]


def _traffic(rank: int) -> list[dict[str, tuple[int, int, int]]]:
    """Return the counts of every operation, for a group of all four ranks and for a group of two on different nodes."""
    found = []
    for fold in (FOLDS[0], FOLDS[2]):
        groups = Groups.create(fold, rank, node=node)
        line, n = groups.tensor, groups.tensor.size
        line.all_reduce(torch.zeros(10, dtype=torch.float64))
        line.all_gather(torch.zeros(4, 3, dtype=torch.bfloat16))
        line.reduce_scatter(torch.zeros(4 * n, 3))
        rows = [line.index + j for j in range(n)]
        line.all_to_all(torch.zeros(sum(rows), H, dtype=torch.float64), rows, rows)
        line.shift([torch.zeros(3), torch.zeros(2, 2)]).wait()
        before, after = (line.index - 1) % n, (line.index + 1) % n
        sending = line.send(torch.zeros(7), after)
        line.receive(torch.empty(7), before).wait()
        sending.wait()
        assert {name for name, _ in groups.traffic.counts} == {"tensor"}
        counts = {operation: count for (_, operation), count in groups.traffic.counts.items()}
        found.append({operation: (c.calls, c.inside_bytes, c.across_bytes) for operation, c in counts.items()})
        total = groups.traffic.by_name()["tensor"]
        assert (total.calls, total.inside_bytes + total.across_bytes) == (6, sum(sum(c[1:]) for c in found[-1].values()))
        groups.traffic.clear()
        assert groups.traffic.counts == {}
        groups.close()
    return found


def test_traffic_is_counted_pair_by_pair_and_around_the_ring(ranks) -> None:
    for rank, (four, two) in enumerate(ranks(4).run(_traffic)):
        n, inside = 4, rank % 2 == 0  # the next rank of the ring is on the same node only for even ranks
        ring = {
            "all_reduce": 2 * 10 * EIGHT * (n - 1) // n,
            "all_gather": 4 * 3 * 2 * (n - 1),
            "reduce_scatter": 4 * 3 * 4 * (n - 1),
            "shift": (3 + 4) * 4,
            "send": 7 * 4,
        }
        neighbour = rank ^ 1
        beside = (rank + neighbour) * H * EIGHT
        away = sum(rank + other for other in range(4) if other // 2 != rank // 2) * H * EIGHT
        assert four == {op: (1, count, 0) if inside else (1, 0, count) for op, count in ring.items()} | {
            "all_to_all": (1, beside, away)
        }
        # The tensor-parallel pairs (0, 2) and (1, 3) always cross nodes.
        pair = {"all_reduce": 80, "all_gather": 24, "reduce_scatter": 48, "shift": 28, "send": 28}
        assert two == {op: (1, 0, count) for op, count in pair.items()} | {"all_to_all": (1, 0, (0 + 1) * H * EIGHT)}


def test_without_nodes_everything_is_inside() -> None:
    traffic = Traffic()
    line = Communicator("x", (0, 1, 2), 1, None, (), traffic)
    line._count("op", {0: 5, 1: 100, 2: 7})
    assert traffic.counts == {("x", "op"): Count(1, 12, 0)}


def _axes_of_one(rank: int) -> None:
    groups = Groups.create(Fold(4, tp=4, ep=4), rank)
    for name in ("expert_slices", "context", "handovers_up", "handovers_down", "dense_gradients", "expert_gradients"):
        line = getattr(groups, name)
        assert (line.group, line.size, line.ranks, line.index) == (None, 1, (rank,), 0), name
        _is_alone(line)
    assert groups.traffic.counts == {}
    groups.close()


def _is_alone(line: Communicator) -> None:
    x = torch.randn(2, 4, 3)
    assert line.all_reduce(x) is line.all_gather(x) is line.reduce_scatter(x) is line.all_to_all(x, [2], [2]) is x
    assert line.shift([x]).wait() == (x,)
    assert gather_sequence(x, line) is scatter_sequence(x, line) is x
    assert gather_rows(x, line, [2]) is scatter_rows(x, line, [2]) is x
    assert line.traffic.counts == {}


def test_an_axis_of_one_has_no_group_and_no_traffic(ranks) -> None:
    ranks(4).run(_axes_of_one)


def test_a_fold_of_one_needs_no_process_group() -> None:
    groups = Groups.create(Fold(1))
    for name in TRAFFIC:
        _is_alone(getattr(groups, name))
    groups.close()


def _membership(rank: int, folds: list[Fold]) -> None:
    import torch.distributed as dist

    for fold in folds:
        groups = Groups.create(fold, rank)
        for name, family in TRAFFIC.items():
            line = getattr(groups, name)
            (ours,) = [ranks for ranks in fold.groups(family) if rank in ranks] or [(rank,)]
            assert line.ranks == ours, name
            assert line.ranks[line.index] == rank
            if line.group is not None:
                assert tuple(dist.get_process_group_ranks(line.group)) == ours
        group, members = groups.process_group("tp")
        assert dist.get_process_group_ranks(group) == list(members)  # this also holds for one member
        groups.close()
        groups.close()  # a second time does nothing


def test_a_rank_is_in_the_groups_of_its_folds_tables(ranks) -> None:
    folds = [*FOLDS, Fold(4, pp=4), Fold(4, pp=2, ep=2), Fold(4, cp=2, etp=2, moe_order="edp-etp-ep-pp")]
    ranks(4).run(_membership, folds)


def _timeouts(rank: int) -> set[timedelta]:
    import torch.distributed as dist

    made, found = dist.new_group, set()

    def noted(*given: Any, timeout: timedelta, **more: Any) -> Any:
        found.add(timeout)
        return made(*given, timeout=timeout, **more)

    with patch.object(dist, "new_group", noted):
        groups = Groups.create(Fold(2, tp=2, ep=2), rank, timedelta(seconds=1007))
        groups.process_group("tp")
    groups.control.all_reduce(torch.zeros(1))  # a rank that closes would cut off the other one, which still connects
    groups.close()
    return found


def test_every_group_has_the_timeout(ranks) -> None:
    """With another one, ranks would wait much longer for a rank that stands still."""
    assert ranks(2).run(_timeouts) == [{timedelta(seconds=1007)}] * 2


def _refusals(rank: int) -> list[str]:
    found = []
    for fold in (Fold(8), Fold(4, offset=1), Fold(2, offset=2 if rank < 2 else 0)):
        with pytest.raises(ValueError, match="rank") as error:
            Groups.create(fold, rank)
        found.append(str(error.value))
    return found


def test_groups_of_a_fold_that_does_not_fit_are_refused(ranks) -> None:
    for rank, found in enumerate(ranks(4).run(_refusals)):
        assert found == [
            "the fold has ranks 0…7, but the process group has only 4",
            "the fold has ranks 1…4, but the process group has only 4",
            f"rank {rank} is not in the fold's ranks " + ("2…3" if rank < 2 else "0…1"),
        ]
    for fold, rank in ((Fold(2), 0), (Fold(1), 1), (Fold(1, offset=3), 0)):
        with pytest.raises(ValueError, match="process group has only 1" if fold.world_size > 1 else "is not in the fold's"):
            Groups.create(fold, rank)


def _send_alone(groups: Groups) -> Any:
    return groups.handovers_up.send(torch.zeros(1), 0)


@pytest.mark.parametrize("talk", [_send_alone, lambda groups: groups.handovers_up.receive(torch.zeros(1), 0)])
def test_nobody_sends_to_itself(talk: Callable[[Groups], Any]) -> None:
    with pytest.raises(AssertionError, match="handovers_up has only one member"):
        talk(Groups.create(Fold(1)))
