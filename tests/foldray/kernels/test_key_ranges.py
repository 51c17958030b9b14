"""Masks as ranges of keys: what packed sequences make of them, and attention with them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from foldray.kernels import attention
from foldray.kernels.attention import attend, attend_backward, merge
from foldray.kernels.key_ranges import KeyRanges, Spans
from tests.foldray.packed import WAYS, packed
from tests.gate import examples

L = 24


def _ranges(queries: range, keys: range, starts: list[list[int]], size: int | None) -> KeyRanges:
    """Return the ranges of documents that begin at these positions, and of a sliding window."""
    first_BS = np.array([[max(s for s in [0, *row] if s <= q) for q in queries] for row in starts])
    if size is not None:
        first_BS = np.maximum(first_BS, np.arange(queries.start, queries.stop) - size + 1)
    stop_BS = np.tile(np.arange(queries.start, queries.stop) + 1, (len(starts), 1))
    return KeyRanges(*((x - keys.start).clip(0, len(keys)) for x in (first_BS, stop_BS)), len(keys))


def _seen(ranges: KeyRanges) -> Tensor:
    """Return the mask as bools [B, S, T]."""
    key_T = torch.arange(ranges.keys)
    return (key_T >= torch.from_numpy(ranges.first_BS)[..., None]) & (key_T < torch.from_numpy(ranges.stop_BS)[..., None])


def _drawn(spans: Spans, queries: int, keys: int) -> Tensor:
    """Return which keys a kernel lets every query of all sequences see: bool [B · S, B · T]."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    ends = (pairwise(x.tolist()) for x in (spans.cu_seqlens_q, spans.cu_seqlens_k))
    for (start, stop), (first, last) in zip(*ends, strict=True):
        for query in range(start, stop):
            aligned = last - 1 - (stop - 1 - query)
            low = first if spans.window < 0 else max(first, aligned - spans.window)
            seen[query, low : max(low, aligned + 1 if spans.causal else last)] = True
    return seen


@st.composite
def _cases(draw: st.DrawFn) -> KeyRanges:
    """Documents and windows of one or two sequences. The keys end with the queries or before them."""
    starts = draw(st.lists(st.lists(st.integers(1, L - 1), max_size=4), min_size=1, max_size=2))
    begin = draw(st.integers(0, L - 2))
    queries = range(begin, draw(st.integers(begin + 1, L)))
    stop = draw(st.sampled_from([queries.stop, *range(1, begin + 1)]))
    keys = range(draw(st.integers(0, min(stop - 1, begin))), stop)
    return _ranges(queries, keys, starts, draw(st.none() | st.integers(1, L)))


@examples(300)
@given(_cases())
def test_packed_sequences_say_what_ranges_say(ranges: KeyRanges) -> None:
    sequences = len(ranges.first_BS)
    spans = ranges.spans(sequences)
    if spans is None:  # windows that slide over the ends of documents in a different way in each sequence
        assert sequences > 1
        assert all(
            KeyRanges(a[None], b[None], ranges.keys).spans(1) for a, b in zip(ranges.first_BS, ranges.stop_BS, strict=True)
        )
        return
    seen_BST = _seen(ranges)
    assert torch.equal(
        _drawn(spans, sequences * seen_BST.shape[1], sequences * ranges.keys), torch.block_diag(*seen_BST.int()).bool()
    )
    assert spans.blind == bool((~seen_BST.any(-1)).any())


def test_one_row_stands_for_all_sequences() -> None:
    ranges = _ranges(range(4, 8), range(8), [[6]], 3)
    spans = ranges.spans(3)
    assert spans is not None
    assert torch.equal(_drawn(spans, 12, 24), torch.block_diag(*[_seen(ranges)[0].int()] * 3).bool())


def test_documents_are_runs_and_nothing_else() -> None:
    """Neither keys nor queries are copied, and there are as many runs as documents."""
    spans = _ranges(range(24), range(24), [[5, 9], [20]], None).spans(2)
    assert spans is not None
    assert spans.cu_seqlens_q.tolist() == spans.cu_seqlens_k.tolist() == [0, 5, 9, 24, 44, 48]
    assert spans[2:] == (20, 20, True, -1, False)


@pytest.mark.parametrize("size", [None, 3])
def test_queries_behind_keys_see_the_end_of_one_document(size: int | None) -> None:
    spans = _ranges(range(12, 24), range(4, 12), [[2, 14]], size).spans(1)
    assert spans is not None
    ends = spans.cu_seqlens_q.tolist(), spans.cu_seqlens_k.tolist()
    assert ends == (([0, 2, 12], [0, 8, 8]) if size is None else ([0, 0, 2, 12], [0, 6, 8, 8]))
    assert spans[4:] == (False, -1 if size is None else 0, True)


def test_what_packed_sequences_cannot_say_is_not_said() -> None:
    """Queries 2 and 3 see keys that queries 0 and 1 see as well, but not all of them, and no window says so."""
    first, stop = np.array([[0, 0, 1, 1]]), np.array([[1, 2, 3, 4]])
    assert KeyRanges(first, stop, 4).spans(1) is None
    assert KeyRanges(np.array([[0, 1, 0]]), np.array([[1, 2, 3]]), 3).spans(1) is None


@pytest.mark.gate(2)
@pytest.mark.parametrize("value_dim", [8, 6])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("way", ["packed", "plain"])
@examples(20)
@given(ranges=_cases())
def test_attention_is_that_of_bools(way: str, groups: int, value_dim: int, ranges: KeyRanges) -> None:
    sequences, seen_B1ST = len(ranges.first_BS), _seen(ranges).unsqueeze(1)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout, other = (
        torch.randn(sequences, *shape, generator=generator, dtype=torch.float64)
        for shape in (
            (4, seen_B1ST.shape[2], 8), (groups, ranges.keys, 8), (groups, ranges.keys, value_dim),
            (4, seen_B1ST.shape[2], value_dim), (4, seen_B1ST.shape[2], value_dim),
        )
    )  # fmt: skip
    # Merge with other keys of the same weight, so that the merged sum differs from the part's own sum.
    expected, zero = attend(q, k, v, seen_B1ST), torch.zeros(q.shape[:3], dtype=torch.float64)
    whole = merge(*expected, other, zero)
    wanted = *expected, *attend_backward(dout, q, k, v, *whole, seen_B1ST)
    with WAYS[way]():
        found = *attend(q, k, v, ranges), *attend_backward(dout, q, k, v, *whole, ranges)
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x.isinf(), y.isinf())
        assert float((x.nan_to_num(neginf=0.0) - y.nan_to_num(neginf=0.0)).abs().max()) <= 1e-12


def test_what_packed_sequences_express_reaches_their_kernel() -> None:
    ranges, (q, k) = _ranges(range(24), range(24), [[5, 9]], 4), torch.randn(2, 1, 4, 24, 8, dtype=torch.float64)
    with packed() as aten:
        out, lse = attend(q, k, k, ranges)
        attend_backward(out, q, k, k, out, lse, ranges)
    assert aten.calls == 2


def test_runs_of_one_query_stay_apart() -> None:
    """Kernels may take all runs to have one query if the longest has, and here some have none."""
    ranges = _ranges(range(4, 8), range(8), [[4, 5, 6, 7]], None)
    q, k = torch.randn(1, 4, 4, 8, dtype=torch.float64), torch.randn(1, 2, 8, 8, dtype=torch.float64)
    with packed() as aten:
        out, _ = attend(q, k, k, ranges)
    assert aten.calls == 1
    assert torch.allclose(out, k[:, :, 4:].repeat_interleave(2, dim=1), atol=1e-12)


def test_the_kernel_takes_16_bits_and_heads_up_to_256(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for capability in ((7, 5), (8, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        with FakeTensorMode():
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                for width in (100, 256, 264):
                    q, v = (torch.empty(1, 2, 8, each, device="cuda", dtype=dtype) for each in (64, width))
                    found[capability, dtype, width] = attention._packs(q, v)
                    assert not attention._takes_fused(q, v, _ranges(range(8), range(8), [[3]], None))
    assert {key for key, taken in found.items() if taken} == {
        (capability, dtype, width)
        for capability in ((8, 0), (9, 0)) for dtype in (torch.bfloat16, torch.float16) for width in (100, 256)
    }  # fmt: skip
    assert not attention._packs(*(torch.empty(1, 2, 8, 8) for _ in range(2)))


@pytest.mark.parametrize("way", ["packed", "plain"])
def test_there_may_be_no_sequence(way: str) -> None:
    q, k, ranges = torch.empty(0, 4, 24, 8), torch.empty(0, 2, 24, 8), _ranges(range(24), range(24), [[5]], 3)
    with WAYS[way]():
        out, lse = attend(q, k, k, ranges)
        gradients = attend_backward(out, q, k, k, out, lse, ranges)
    assert [x.shape for x in (out, lse, *gradients)] == [q.shape, q.shape[:3], q.shape, k.shape, k.shape]
