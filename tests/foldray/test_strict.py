"""The strict communicator finds planted faults by name, and what gloo forgives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from time import perf_counter, sleep
from typing import Any
from unittest.mock import patch

import pytest
import torch

from foldray.comm import Communicator, Groups
from foldray.fold import Fold
from foldray.moe.exchange import AllToAll
from foldray.recipe import Recipe
from foldray.runtime import Gradients
from tests.foldray.order import Meeting, Started, Unordered, check_order
from tests.foldray.parity import make_recipe, train
from tests.foldray.strict import StrictPools
from tests.pool import RankFailure, RankPools

WAIT_S = 0.3


@pytest.fixture
def strict_ranks(ranks: RankPools) -> StrictPools:
    return StrictPools(ranks)


def without_wait(rank: int, recipe: Recipe) -> dict[str, Any]:
    with patch.object(Gradients, "finish", lambda gradients: gradients._travelling.clear()):
        return train(rank, recipe)


def test_a_planted_missing_wait(strict_ranks: StrictPools) -> None:
    place = r"the all-reduce of dense_gradients among ranks \(0, 1\), shapes \(\d+,\), started at \S+/runtime/gradients.py:\d+"
    with pytest.raises(RankFailure, match=f"MissingWait: nobody has waited for {place}"):
        strict_ranks(2).run(without_wait, make_recipe(2, {"ep": 2}))


def with_early_reuse(rank: int, recipe: Recipe) -> dict[str, Any]:
    start_out = AllToAll.start_out

    def start_and_reuse(self: AllToAll, rows: Sequence[torch.Tensor], *others: Any) -> Any:
        pending = start_out(self, rows, *others)
        with torch.no_grad():
            rows[0].mul_(2)
        return pending

    with patch.object(AllToAll, "start_out", start_and_reuse):
        return train(rank, recipe)


def test_a_planted_early_reuse_of_an_input(strict_ranks: StrictPools) -> None:
    with pytest.raises(
        RankFailure, match=r"EarlyReuse: .* an input \(\d+, 16\) of the all-to-all of tokens among ranks \(0, 1\)"
    ):
        strict_ranks(2).run(with_early_reuse, make_recipe(2, {"ep": 2}))


def in_opposite_order(rank: int) -> None:
    groups = Groups.create(Fold(2, ep=2), rank)
    pairs = [(groups.control, torch.ones(2)), (groups.dense_gradients, torch.ones(3))]
    for pending in [communicator.start_all_reduce(x) for communicator, x in (pairs if rank else pairs[::-1])]:
        pending.wait()
    groups.close()


def test_a_planted_unordered_pair(strict_ranks: StrictPools) -> None:
    with pytest.raises(Unordered) as told:
        strict_ranks(2).run(in_opposite_order)
    place = r"among ranks \(0, 1\) at \S+/test_strict.py:\d+, and waits for rank"
    parts = [
        f"rank {rank} runs float32 all-reduce 0 of {name} {place} {1 - rank}"
        for rank, name in enumerate(("dense_gradients", "control"))
    ]
    assert re.fullmatch("a cycle of operations: " + "; ".join(parts), str(told.value))


def early_looks(rank: int) -> None:
    """Look at everything that an operation has before anybody waits for it, and after that."""
    groups = Groups.create(Fold(2, ep=2), rank)
    line, x, counts = groups.tokens, torch.full((2, 3), float(rank)), torch.tensor([rank, 7])
    out, called = torch.zeros(2, 3), list[int]()
    pendings = [
        line.start_all_gather(x), groups.counts.start_all_gather(counts), line.start_all_to_all(x, [1, 1], [1, 1]),
        line.shift([x]), line.start_reduce_scatter(x.repeat(2, 1), out),
    ]  # fmt: skip
    mine = x.clone()
    pendings.append(groups.control.start_all_reduce(mine))
    for each in pendings:
        done = each.when_done(lambda: called.append(1))
        assert all(future.done() for future in done)
        assert each.is_running
        for result in each._tensors:
            assert bool((result.isnan() if result.is_floating_point() else result == torch.iinfo(result.dtype).min).all())
    assert len(called) == len(pendings)
    gathered, numbers, exchanged, shifted, _, summed = (each.wait()[0] for each in pendings)
    assert torch.equal(gathered, torch.tensor([0.0, 1.0]).repeat_interleave(2).view(4, 1).expand(4, 3))
    assert numbers.tolist() == [0, 7, 1, 7]
    assert torch.equal(exchanged, torch.tensor([[0.0], [1.0]]).expand(2, 3))
    assert torch.equal(shifted, torch.full((2, 3), 1.0 - rank))
    assert torch.equal(out, torch.ones(2, 3))
    assert summed is mine
    assert torch.equal(mine, torch.ones(2, 3))
    groups.close()


def test_results_are_poison_until_somebody_waits_and_futures_are_done_at_once(strict_ranks: StrictPools) -> None:
    strict_ranks(2).run(early_looks)


def writes_early(rank: int) -> None:
    groups = Groups.create(Fold(2, ep=2), rank)
    pending = groups.control.start_all_reduce(x := torch.ones(2))
    x += 1
    x.zero_()
    pending.wait()


def test_a_result_that_is_written_early(strict_ranks: StrictPools) -> None:
    with pytest.raises(RankFailure, match=r"EarlyReuse: .* a result \(2,\) of the all-reduce of control"):
        strict_ranks(2).run(writes_early)


def late_receive(rank: int, elements: int) -> float:
    """Return how long a send takes whose receive comes `WAIT_S` late."""
    groups = Groups.create(Fold(2, pp=2), rank)
    up: Communicator = groups.handovers_up
    groups.control.all_reduce(torch.zeros(1))
    began = perf_counter()
    if rank:
        sleep(WAIT_S)
        up.receive(torch.empty(elements), 0).wait()
    else:
        up.send(torch.ones(elements), 1).wait()
    took = perf_counter() - began
    groups.close()
    return took


@pytest.mark.parametrize("elements", [1, 1 << 20])
def test_a_send_waits_for_its_receive(strict_ranks: StrictPools, elements: int) -> None:
    assert strict_ranks(2).run(late_receive, elements)[0] > 0.8 * WAIT_S


def collective(name: str, number: int = 0, ranks: tuple[int, ...] = (0, 1)) -> Started:
    return Started((Meeting(name, "all-reduce", ranks, number),), "here")


def messages(*pairs: tuple[int, int]) -> Started:
    return Started(tuple(Meeting("rows", "message", pair, 0) for pair in pairs), "here")


def test_orders() -> None:
    a, b, later = collective("a"), collective("b"), collective("a", 1)
    check_order({0: [a, b, later], 1: [a, b, later]})
    with pytest.raises(Unordered, match=r"rank 0 runs all-reduce 0 of a .* rank 1; rank 1 runs all-reduce 0 of b .* rank 0"):
        check_order({0: [a, b], 1: [b, a]})
    with pytest.raises(Unordered, match=r"rank 0 has started all-reduce 1 of a .*, but rank 1 never starts"):
        check_order({0: [a, later], 1: [a]})


def test_orders_of_messages() -> None:
    """Messages that start together may meet each other's in any order. A ring that sends before it receives waits for ever."""
    check_order({0: [messages((0, 1), (1, 0))], 1: [messages((1, 0), (0, 1))]})
    check_order({0: [messages((0, 1)), messages((1, 0))], 1: [messages((0, 1)), messages((1, 0))]})
    ring = {rank: [messages((rank, (rank + 1) % 3)), messages(((rank - 1) % 3, rank))] for rank in range(3)}
    with pytest.raises(Unordered, match=r"a cycle of operations: rank 0 .* rank 1; rank 1 .* rank 2; rank 2 .* rank 0"):
        check_order(ring)


def test_orders_around_three_ranks() -> None:
    """No two ranks contradict each other, but all three together do."""
    a, b, c = collective("a", ranks=(0, 1)), collective("b", ranks=(1, 2)), collective("c", ranks=(0, 2))
    check_order({0: [a, c], 1: [a, b], 2: [b, c]})
    with pytest.raises(Unordered):
        check_order({0: [c, a], 1: [a, b], 2: [b, c]})
