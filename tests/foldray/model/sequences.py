"""Whole sequences to attend to, their documents, and what comes out in one process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

B, L, D = 2, 48, 6
HEADS = [(4, 2), (4, 4)]
# Where documents start, for each of the two sequences. With cp=4 a chunk has 6 positions, with cp=2 it has 12.
STARTS: dict[str, tuple[list[int], list[int]]] = {
    "inside every chunk": (list(range(2, L, 6)), [1, 4, 9, 10, 11, 16, 20, 27, 35, 40, 46, 47]),
    "at every chunk edge": (list(range(6, L, 6)), list(range(6, L, 6))),
    "at some chunk edges": (list(range(6, L, 6)), [12, 24, 36]),
    "one over all": ([], []),
    "one over all beside many": ([], list(range(2, L, 6))),
    "few and long": ([13, 30], [3, 45]),
    "one each": (list(range(1, L)), [24]),
}
ALL = [None, *STARTS, "numbers that come again"]


def segments(documents: str | None) -> Tensor | None:
    """Document numbers [B, L], unique and in no order."""
    if documents is None:
        return None
    if documents == "numbers that come again":
        return (torch.arange(L) // 5 % 2).repeat(B, 1)
    number_BL = torch.zeros(B, L, dtype=torch.int64)
    for sequence, starts in enumerate(STARTS[documents]):
        number_BL[sequence, starts] = 1
    return torch.randperm(L, generator=torch.Generator().manual_seed(3))[number_BL.cumsum(1)]


def data_of(heads: tuple[int, int], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Queries, keys, values and the output's gradient of whole sequences."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, n, L, D) for n in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def reference(data: list[Tensor], segment_BL: Tensor | None) -> list[Tensor]:
    """Output and gradients of queries, keys and values, in one process, in float64."""
    q, k, v, dout = (x.to(torch.float64).requires_grad_() for x in data)
    seen = torch.ones(L, L, dtype=torch.bool).tril().expand(B, 1, L, L)
    if segment_BL is not None:
        seen = seen & (segment_BL.unsqueeze(2) == segment_BL.unsqueeze(1)).unsqueeze(1)
    repeats = q.shape[1] // k.shape[1]
    y = F.scaled_dot_product_attention(
        q, k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1), attn_mask=seen
    )
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), dout)]
