"""The owners of a buffer's elements: every element has one owner, and chunks of any size reach their owners."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from foldray.runtime.sharding import Sharding

shardings = st.builds(
    lambda sections, ranks, granule: [Sharding(tuple(sections), ranks, index, granule) for index in range(ranks)],
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(1, 3),
)


@given(shardings, st.data())
def test_chunks_bring_every_element_to_its_owner(owners: list[Sharding], data: st.DataObject) -> None:
    """A parameter finds its own elements in the tensor of its rank, whatever the chunks were."""
    first = owners[0]
    flat = torch.arange(first.padded)
    mine = [torch.full((first.owned,), -1) for _ in owners]
    size, start = first.deal * data.draw(st.integers(1, 10)), 0
    while start < first.padded:
        stop = min(start + size, first.padded)
        rows = [first.by_owner(flat[cut.section.start : cut.section.stop])[:, cut.columns] for cut in first.cuts(start, stop)]
        for own, part in zip(mine, torch.cat(rows, dim=1), strict=True):
            own[first.share(start, stop)] = part
        start = stop
    assert torch.equal(first.in_order(torch.cat(mine)), flat)
    for begin, elements in zip(first.starts, first.sections, strict=False):
        low = data.draw(st.integers(0, elements - 1))
        run = flat[begin + low : begin + data.draw(st.integers(low + 1, elements))]
        found = [own[sharding.own(int(run[0]), int(run[-1]) + 1)] for own, sharding in zip(mine, owners, strict=True)]
        assert torch.equal(torch.cat(found), run)
        inside = [run[sharding.within(int(run[0]), int(run[-1]) + 1)] for sharding in owners]
        assert all(map(torch.equal, found, inside))


@given(shardings)
def test_sections_begin_at_whole_deals(owners: list[Sharding]) -> None:
    first = owners[0]
    assert all(start % first.deal == 0 for start in first.starts)
    assert first.owned * first.ranks == first.padded < sum(first.sections) + len(first.sections) * first.deal
