"""Shares of a step's time: names, sums, and the lanes of an op."""

from __future__ import annotations

import pytest

from foldray.clock import COMPUTE
from foldray.costs.shares import Price, Shares, Stretch, Work


def test_shares_add_and_scale_by_name() -> None:
    one = Shares.of([("gemm", 1.0), ("gemm", 2.0), ("exposed_tp", 0.5), ("tp", 0.5)])
    other = Shares.of([("gemm", 1.0), ("bubble", 4.0)])
    both = one + other * 2.0
    assert both.of_step() == {"gemm": 5.0, "exposed_tp": 0.5, "bubble": 8.0}
    assert both.of_groups() == {"tp": 0.5}
    assert Shares() + one == one
    with pytest.raises(KeyError):
        Shares.of([("idle", 1.0)])


def test_a_price_puts_together_what_follows_on_a_lane() -> None:
    works = [Work(COMPUTE, "gemm", 1.0), Work(COMPUTE, "memory", 2.0), Work("intra", "tp", 4.0), Work("intra", "cp", 0.0),
             Work(COMPUTE, "launch", 8.0)]  # fmt: skip
    price = Price.of(works)
    assert price.lanes == ((COMPUTE, 3.0), ("intra", 4.0), (COMPUTE, 8.0))
    assert price.seconds == 15.0
    assert price.shares(travels=False) == Shares.of([("gemm", 1), ("memory", 2), ("exposed_tp", 4), ("launch", 8), ("tp", 4)])
    assert Price.of([]).lanes == ((COMPUTE, 0.0),)


def test_what_an_op_that_travels_takes_is_no_share_of_the_step() -> None:
    price = Price.of([Work("inter", "ep", 3.0)])
    assert price.shares(travels=True).of_step() == {}
    assert price.shares(travels=True).of_groups() == {"ep": 3.0}


def test_stretches_add() -> None:
    assert Stretch(1.0, 0.5, 0.25) + Stretch(2.0, 0.0, 1.0).times(3) == Stretch(7.0, 0.5, 3.25)
