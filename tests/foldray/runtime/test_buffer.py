"""The token buffer: tokens go in with any cut and come out with any other, and nothing stays after the last take."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foldray.comm import Pending
from foldray.runtime.op_graphs import TokenBuffer


def cuts(length: int) -> st.SearchStrategy[list[range]]:
    inner = st.sets(st.integers(1, length - 1), max_size=6) if length > 1 else st.just(set())
    return inner.map(lambda ends: [range(a, b) for a, b in pairwise([0, *sorted(ends), length])])


@given(st.integers(1, 20).flatmap(lambda length: st.tuples(cuts(length), cuts(length), st.randoms())))
def test_what_was_put_comes_out_in_any_other_cut(given: tuple) -> None:
    put, taken, random = given
    x_BLH = torch.arange(2 * put[-1].stop * 3).view(2, -1, 3)
    buffer = TokenBuffer()
    for tokens in random.sample(put, len(put)):
        buffer.put(tokens, x_BLH[:, tokens.start : tokens.stop])
    for tokens in random.sample(taken, len(taken)):
        assert torch.equal(buffer.take(tokens), x_BLH[:, tokens.start : tokens.stop])
    assert buffer._pieces == []


def test_a_piece_taken_as_it_was_put_is_not_copied() -> None:
    buffer, x_BLH = TokenBuffer(), torch.zeros(1, 4, 2)
    buffer.put(range(4), x_BLH)
    assert buffer.take(range(4)) is x_BLH


def test_what_is_missing_is_told() -> None:
    buffer = TokenBuffer()
    buffer.put(range(4), torch.zeros(1, 4, 2))
    with pytest.raises(RuntimeError, match=r"tokens 2…5 are not all here"):
        buffer.take(range(2, 6))


def test_what_is_on_its_way_is_waited_for() -> None:
    buffer, x_BLH = TokenBuffer(), torch.ones(1, 4, 2)
    buffer.put_later(range(4), Pending([], (x_BLH,)))
    assert torch.equal(buffer.take(range(1, 3)), x_BLH[:, 1:3])


def test_only_what_is_needed_is_waited_for() -> None:
    class Never(Pending):
        def wait(self) -> tuple[torch.Tensor, ...]:
            raise AssertionError("nothing needs this piece")

    buffer, x_BLH = TokenBuffer(), torch.ones(1, 4, 2)
    buffer.put_later(range(4, 8), Never([], (x_BLH,)))
    buffer.put_later(range(4), Pending([], (x_BLH,)))
    assert torch.equal(buffer.take(range(4)), x_BLH)
