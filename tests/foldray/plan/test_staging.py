"""The legal numbers of stages per position, and the numbers that need the least memory."""

from __future__ import annotations

import pytest

from foldray.blueprint import BlockSpec
from foldray.plan.space import Weights, make_stagings
from tests.foldray.blocks import DENSE, MOE


@pytest.mark.parametrize(
    ("blocks", "pp", "micro_batches", "legal", "leanest"),
    [
        ([MOE] * 8, 1, 4, [1], [1]),
        ([MOE] * 8, 2, 4, [1, 2, 4], [1]),
        ([MOE] * 8, 2, 3, [1], [1]),  # 3 micro-batches are not a multiple of pp
        ([MOE] * 7, 2, 4, [1, 2], [1]),  # the last stage has one block less
        ([MOE] * 7, 4, 8, [1], [1]),  # eight stages would be more than there are blocks
        ([DENSE, *[MOE] * 7], 2, 4, [1, 2, 4], [1]),
        ([DENSE, MOE] * 2, 2, 4, [1, 2], [1, 2]),  # with 2 stages each, a position has only dense blocks
    ],
)
def test_stagings(blocks: list[BlockSpec], pp: int, micro_batches: int, legal: list[int], leanest: list[int]) -> None:
    found = make_stagings(blocks, pp, micro_batches)
    assert [each.virtual_stages for each in found.all] == legal
    assert [each.virtual_stages for each in found.leanest] == leanest
    assert found.first_blocks == len(blocks) // (pp * legal[-1])
    for each in found.all:
        counts = [count for content in map(each.layout.positions.content, range(each.layout.pp)) for _, count in content.blocks]
        assert sum(counts) == len(blocks)
        assert each.layout.positions in found.positions


def test_the_embedding_and_the_head_may_count_as_blocks() -> None:
    """Qwen3-235B has 94 blocks, and Megatron-LM trains it with PP8 VP4: the embedding and the head count as one more each."""
    found = make_stagings([MOE] * 94, 8, 64, Weights({}, 1.2))
    assert sorted({each.virtual_stages for each in found.all}) == [1, 2, 3, 4, 6]
    four = [each.stage_layers for each in found.all if each.virtual_stages == 4]
    assert four == [None, (*[3] * 31, 1), (2, *[3] * 30, 2)]
    for each in found.all:
        sizes = [len(each.layout.forms[number].blocks) for number in each.layout.form_of]
        assert each.stage_layers in (None, tuple(sizes))
        assert sum(sizes) == 94


def test_equal_stages_are_enough_where_ends_are_small() -> None:
    assert [each.stage_layers for each in make_stagings([MOE] * 8, 2, 4, Weights({}, 0.0)).all] == [None] * 3
    assert [each.stage_layers for each in make_stagings([MOE] * 8, 1, 4, Weights({}, 3.0)).all] == [None]


def test_light_blocks_count_less() -> None:
    """Three dense blocks that take a third of the time leave the first of two positions one block more."""
    found = make_stagings([*[DENSE] * 3, *[MOE] * 13], 2, 3, Weights({DENSE: 0.33, MOE: 1.15}, 0.5)).all
    assert [each.stage_layers for each in found] == [None, (9, 7)]
