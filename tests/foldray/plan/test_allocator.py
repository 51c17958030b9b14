"""The allocator of GPUs and network adapters finds what a search through all allocations finds."""

from __future__ import annotations

import random
import time

import pytest

from foldray.errors import UserError
from foldray.plan.allocator import Demand, allocate


def sides(demand: Demand, gpus: int, flops: float, nics: int, rate: float, own: int, cards: int) -> tuple[float, float]:
    """Return the seconds of both sides (equations 5 and 6 of DisagMoE), computed one by one."""
    attention = max(demand.attention / (own * flops), demand.bytes / (cards * rate))
    return attention, max(demand.experts / ((gpus - own) * flops), demand.bytes / ((nics - cards) * rate))


@pytest.mark.parametrize("seed", range(20))
def test_no_allocation_is_better(seed: int) -> None:
    draw = random.Random(seed)
    demand = Demand(10 ** draw.uniform(-1, 2), 10 ** draw.uniform(-1, 2), 10 ** draw.uniform(-2, 2))
    cluster = draw.randint(2, 12), 10 ** draw.uniform(-1, 1), draw.randint(2, 12), 10 ** draw.uniform(-1, 1)
    found = allocate(demand, *cluster)
    every = [sides(demand, *cluster, own, cards) for own in range(1, cluster[0]) for cards in range(1, cluster[2])]
    least = min(max(each) for each in every)
    assert max(found.sides) == pytest.approx(least)
    assert min(found.sides) == pytest.approx(min(min(each) for each in every if max(each) <= least * (1 + 1e-8)))
    assert found.sides == pytest.approx(sides(demand, *cluster, found.attention, found.attention_nics))
    assert (found.attention + found.experts, found.attention_nics + found.expert_nics) == (cluster[0], cluster[2])


def test_128_nodes_take_less_than_two_seconds() -> None:
    started = time.process_time()
    found = allocate(Demand(3e12, 1e12, 1e9), 1024, 5e14, 1024, 5e12)
    assert time.process_time() - started < 2
    assert found.attention / found.experts == pytest.approx(3, rel=0.01)


def test_adapters_go_to_the_side_that_waits_for_its_rows() -> None:
    # Attention computes for 4 s on two GPUs; the experts would wait for their rows with half of the adapters.
    found = allocate(Demand(8.0, 4.0, 12.0), 4, 1.0, 8, 1.0)
    assert (found.attention, found.experts, max(found.sides)) == (2, 2, 4.0)
    assert (found.attention_nics, found.expert_nics) == (3, 5)


def test_gpus_are_balanced_even_if_adapters_set_the_pace() -> None:
    found = allocate(Demand(3.0, 1.0, 1000.0), 8, 1.0, 4, 1.0)
    assert (found.attention, found.experts) == (6, 2)
    assert (found.attention_nics, found.expert_nics) == (2, 2)


def test_too_little_to_share_is_one_line() -> None:
    with pytest.raises(UserError, match="gpus=1: attention and the experts need one GPU each"):
        allocate(Demand(1.0, 1.0, 1.0), 1, 1.0, 8, 1.0)
    with pytest.raises(UserError, match="nics=1"):
        allocate(Demand(1.0, 1.0, 1.0), 8, 1.0, 1, 1.0)
