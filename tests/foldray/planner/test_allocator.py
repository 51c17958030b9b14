"""The allocator of GPUs and network adapters finds what a search through all allocations finds."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import pytest

from foldray.errors import UserError
from foldray.planner.allocator import Allocation, Demand, Machines, allocate, assigned


def every(demand: Demand, machines: list[Machines], nics: int, rate: float) -> Iterator[Allocation]:
    counts = [kind.gpus // kind.unit for kind in machines]
    for units in itertools.product(*(range(count + 1) for count in counts)):
        if 0 < sum(units) < sum(counts):
            yield from (assigned(demand, machines, nics, rate, units, own) for own in range(1, nics))


def best(allocations: Iterator[Allocation]) -> tuple[float, float]:
    """Return the least seconds of the slower side, and the largest sum of both paces among allocations that have them."""
    found = list(allocations)
    least = min(each.seconds for each in found)
    return least, max(sum(1 / side for side in each.sides) for each in found if each.seconds <= least * (1 + 2e-6))


@pytest.mark.gate(97)
@pytest.mark.parametrize("seed", range(200))
def test_the_program_finds_the_best_of_all_allocations(seed: int) -> None:
    draw = random.Random(seed)
    machines = [
        Machines(draw.randint(1, 4) * unit, 10 ** draw.uniform(-1, 1), 10 ** draw.uniform(-1, 1), unit)
        for unit in [draw.choice([1, 2, 8]) for _ in range(draw.randint(1, 3))]
    ]
    if sum(kind.gpus // kind.unit for kind in machines) < 2:
        machines.append(Machines(2, 1.0, 1.0))
    demand = Demand(10 ** draw.uniform(-1, 2), 10 ** draw.uniform(-1, 2), 10 ** draw.uniform(-2, 2))
    nics, rate = draw.randint(2, 12), 10 ** draw.uniform(-1, 1)
    found = allocate(demand, machines, nics, rate)
    least, paces = best(every(demand, machines, nics, rate))
    assert found.seconds == pytest.approx(least, rel=3e-6)
    assert sum(1 / side for side in found.sides) == pytest.approx(paces, rel=1e-5)
    assert sum(found.attention) + sum(found.experts) == sum(kind.gpus for kind in machines)
    assert found.attention_nics + found.expert_nics == nics


def test_128_nodes_take_less_than_two_seconds() -> None:
    started = time.process_time()
    found = allocate(Demand(3e12, 1e12, 1e9), [Machines(1024, 5e14, 4e14)], 1024, 5e12)
    assert time.process_time() - started < 2
    assert 2 < sum(found.attention) / sum(found.experts) < 3


def test_adapters_go_to_the_side_that_waits_for_its_rows() -> None:
    # Attention computes for 4 s on two GPUs; the experts would wait for their rows with half of the adapters.
    found = allocate(Demand(8.0, 2.0, 12.0), [Machines(4, 1.0, 1.0, 2)], 8, 1.0)
    assert (found.attention, found.experts) == ((2,), (2,))
    assert found.seconds == 4.0
    assert (found.attention_nics, found.expert_nics) == (3, 5)


def test_gpus_are_balanced_even_if_adapters_set_the_pace() -> None:
    found = allocate(Demand(3.0, 1.0, 1000.0), [Machines(8, 1.0, 1.0)], 4, 1.0)
    assert (found.attention, found.experts) == ((6,), (2,))
    assert (found.attention_nics, found.expert_nics) == (2, 2)


def test_slower_machines_take_the_side_that_they_are_better_at() -> None:
    """As in HeterMoE: older GPUs are nearly as fast with the experts' products, and much slower with attention."""
    found = allocate(Demand(4.0, 3.2, 0.0), [Machines(4, 1.0, 1.0), Machines(4, 0.25, 0.8)], 2, 1.0)
    assert (found.attention, found.experts) == ((4, 0), (0, 4))


def test_too_little_to_share_is_one_line() -> None:
    with pytest.raises(UserError, match="gpus=8: attention and the experts need one unit of GPUs each"):
        allocate(Demand(1.0, 1.0, 1.0), [Machines(8, 1.0, 1.0, 8)], 8, 1.0)
    with pytest.raises(UserError, match="nics=1"):
        allocate(Demand(1.0, 1.0, 1.0), [Machines(8, 1.0, 1.0)], 1, 1.0)
