"""The legal numbers of stages per position, and the numbers that need the least memory."""

from __future__ import annotations

import pytest

from foldray.blueprint import BlockSpec
from foldray.planner.staging import make_stagings
from tests.foldray.blocks import DENSE, MOE


@pytest.mark.parametrize(
    ("blocks", "pp", "micro_batches", "legal", "leanest"),
    [
        ([MOE] * 8, 1, 4, [1], [1]),
        ([MOE] * 8, 2, 4, [1, 2, 4], [1]),
        ([MOE] * 8, 2, 3, [1], [1]),  # 3 micro-batches are not a multiple of pp
        ([MOE] * 7, 2, 4, [1], [1]),  # the stages would have two lengths
        ([DENSE, *[MOE] * 7], 2, 4, [1, 2, 4], [1]),
        ([DENSE, MOE] * 2, 2, 4, [1, 2], [1, 2]),  # with 2 stages each, a position has only dense blocks
    ],
)
def test_stagings(blocks: list[BlockSpec], pp: int, micro_batches: int, legal: list[int], leanest: list[int]) -> None:
    found = make_stagings(blocks, pp, micro_batches)
    assert [each.virtual_stages for each in found.all] == legal
    assert [each.virtual_stages for each in found.leanest] == leanest
    assert found.first_blocks == len(blocks) // pp // legal[-1]
    for each in found.all:
        counts = [count for content in map(each.layout.positions.content, range(each.layout.pp)) for _, count in content.blocks]
        assert sum(counts) == len(blocks)
        assert each.layout.positions in found.positions
