"""Runs of flat parameters as boxes."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from foldray.blueprint import ParameterSpec, Piece
from foldray.runtime.shards import boxes, cut

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(st.data(), SHAPES)
def test_the_boxes_of_a_run_are_its_elements_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = torch.arange(size).view(shape)
    found = list(boxes(shape, start, stop))
    seen = [whole[tuple(slice(at, at + n) for at, n in zip(*box, strict=True))].flatten() for box in found]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *seen]).tolist() == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)


@given(st.data())
def test_runs_of_several_owners_hold_every_part_once(data: st.DataObject) -> None:
    """A tensor packs three parts side by side in each of some experts, of which each is a box of a larger parameter."""
    experts, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    widths = data.draw(st.lists(st.integers(1, 4), min_size=3, max_size=3))
    shape = (experts, rows, sum(widths))
    whole = torch.arange(prod(shape)).view(shape)
    ends = sorted(data.draw(st.lists(st.integers(0, whole.numel()), max_size=3)))
    runs = list(zip([0, *ends], [*ends, whole.numel()], strict=True))
    before = 0
    for width in widths:
        for expert in range(experts):
            index = (expert, slice(None), slice(before, before + width))
            spec = ParameterSpec(f"{expert}.{before}", (rows + 2, width + 5), 0, "expert")
            piece, filled = Piece(spec, (1, 3), (rows, width)), torch.full(spec.shape, -1)
            for start, stop in runs:
                for shard in cut(whole.flatten()[start:stop], shape, start, index, piece, "k"):
                    box = tuple(slice(at, at + n) for at, n in zip(shard.offset, shard.tensor.shape, strict=True))
                    assert bool((filled[box] == -1).all()), "no element twice"
                    filled[box] = shard.tensor
            assert torch.equal(filled[1 : 1 + rows, 3 : 3 + width], whole[index])
            assert int((filled == -1).sum()) == filled.numel() - rows * width
        before += width
