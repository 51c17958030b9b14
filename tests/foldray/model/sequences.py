"""Whole sequences for tests of attention, their documents, and the results in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foldray.blueprint import Layout
from foldray.model.attention_mask import AttentionMask
from foldray.windows import find_window

B, L, D = 2, 48, 6
HEADS = [(4, 2), (4, 4)]
# The starts of documents in each of the two sequences. With cp=4 a chunk has 6 positions, with cp=2 it has 12.
STARTS: dict[str, tuple[list[int], list[int]]] = {
    "inside every chunk": (list(range(2, L, 6)), [1, 4, 9, 10, 11, 16, 20, 27, 35, 40, 46, 47]),
    "at every chunk edge": (list(range(6, L, 6)), list(range(6, L, 6))),
    "at some chunk edges": (list(range(6, L, 6)), [12, 24, 36]),
    "one over all": ([], []),
    "one over all beside many": ([], list(range(2, L, 6))),
    "few and long": ([13, 30], [3, 45]),
    "one each": (list(range(1, L)), [24]),
}


def segments(documents: str | None) -> Tensor | None:
    """Return the document numbers [B, L], in no order. They are unique, except in "numbers that come again"."""
    if documents is None:
        return None
    if documents == "numbers that come again":
        return (torch.arange(L) // 5 % 2).repeat(B, 1)
    number_BL = torch.zeros(B, L, dtype=torch.int64)
    for sequence, starts in enumerate(STARTS[documents]):
        number_BL[sequence, starts] = 1
    return torch.randperm(L, generator=torch.Generator().manual_seed(3))[number_BL.cumsum(1)]


class Asked(NamedTuple):
    """A test case: documents, window, and width of values."""

    documents: str | None = None
    window: str = "full"
    value_dim: int = D


WINDOWS = ["sliding:10", "sliding:3", "chunked:16", "sliding:40"]
ALL = [
    *(Asked(documents) for documents in (None, *STARTS, "numbers that come again")),
    *(Asked(documents, window) for documents in (None, "few and long", "inside every chunk") for window in WINDOWS),
    Asked(value_dim=4), Asked("few and long", "sliding:10", value_dim=9),
    Asked("few and long", "tests.foldray.model.striding:STRIDES"),
]  # fmt: skip
RANGED = [case for case in ALL if case.documents != "numbers that come again"]


def masks(cuts: Sequence[range], cp: int, index: int, case: Asked, device: str = "cpu") -> list[AttentionMask]:
    """Return the `AttentionMask` of a member of the context group, for each slice."""
    shards = [[Layout(cp, cp_rank=i).chunks(part) for i in range(cp)] for part in cuts]
    segment_BL, window = segments(case.documents), find_window(case.window)
    return [
        AttentionMask(part, L, shard, index, segment_BL, window, torch.device(device))
        for part, shard in zip(cuts, shards, strict=True)
    ]


def data_of(heads: tuple[int, int], dtype: torch.dtype, seed: int, value_dim: int = D) -> list[Tensor]:
    """Return random queries, keys, values and output gradients of whole sequences, each [B, heads, L, width]."""
    generator = torch.Generator().manual_seed(seed)
    widths = ((heads[0], D), (heads[1], D), (heads[1], value_dim), (heads[0], value_dim))
    shapes = [(B, n, L, width) for n, width in widths]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def _in_window(first: Callable[[int], int], starts: Sequence[int]) -> Tensor:
    """Return which keys each query of a sequence sees in its window [L, L], which counts from the start of the document."""
    begins = [max(start for start in starts if start <= query) for query in range(L)]
    return torch.tensor([[begins[i] + first(i - begins[i]) <= key <= i for key in range(L)] for i in range(L)])


def reference(data: list[Tensor], case: Asked) -> list[Tensor]:
    """Return the output and the gradients of queries, keys and values, computed in one process in float64."""
    segment_BL, first = segments(case.documents), find_window(case.window).begin
    q, k, v, dout = (x.to(torch.float64).requires_grad_() for x in data)
    starts = STARTS.get(case.documents or "", ([], []))
    seen = torch.stack([_in_window(first, [0, *each]) for each in starts]).unsqueeze(1)
    if segment_BL is not None:
        seen = seen & (segment_BL.unsqueeze(2) == segment_BL.unsqueeze(1)).unsqueeze(1)
    repeats = q.shape[1] // k.shape[1]
    y = F.scaled_dot_product_attention(
        q, k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1), attn_mask=seen
    )
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), dout)]
