"""How many stages a position may have, and which of these numbers bound the rest."""

from __future__ import annotations

import pytest

from foldray.planner.staging import make_stagings


@pytest.mark.parametrize(
    ("kinds", "pp", "micro_batches", "legal", "leanest"),
    [
        (["moe"] * 8, 1, 4, [1], [1]),
        (["moe"] * 8, 2, 4, [1, 2, 4], [1]),
        (["moe"] * 8, 2, 3, [1], [1]),  # no full rounds
        (["moe"] * 7, 2, 4, [1], [1]),  # stages of two lengths
        (["dense", *["moe"] * 7], 2, 4, [1, 2, 4], [1]),
        (["dense", "moe"] * 2, 2, 4, [1, 2], [1, 2]),  # interleaved, a position has dense blocks alone
    ],
)
def test_stagings(kinds: list[str], pp: int, micro_batches: int, legal: list[int], leanest: list[int]) -> None:
    found = make_stagings(kinds, pp, micro_batches)
    assert [each.virtual_stages for each in found.all] == legal
    assert [each.virtual_stages for each in found.leanest] == leanest
    assert found.first_blocks == len(kinds) // pp // legal[-1]
    for each in found.all:
        blocks = [count for content in each.layout.contents_at for _, count in content.blocks]
        assert sum(blocks) == len(kinds)
        assert each.layout.contents_at in found.contents_at
