"""A grouped product that is as careless as a GPU's: what it need not write is NaN. It takes every type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from foldray.kernels import experts


def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """Multiply the rows of each group with its matrix, or, of two matrices, sum the products of its rows: [E, …, …]."""
    assert offs.dtype == torch.int32
    ends = [0, *offs.tolist()]
    runs = [slice(start, stop) for start, stop in pairwise(ends)]
    if b.dim() == 3:
        out = a.new_full((len(a), b.shape[2]), torch.nan)
        for e, run in enumerate(runs):
            out[run] = a[run] @ b[e]
        return out
    out = a.new_full((len(runs), a.shape[0], b.shape[1]), torch.nan)
    for e, run in enumerate(runs):
        if run.start < run.stop:
            out[e] = a[:, run] @ b[run]
    return out


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Compute experts in grouped products, and fill what these leave."""
    with (
        mock.patch.object(experts, "_implementation", return_value=experts._Grouped),
        mock.patch.object(experts, "_fills_idle", return_value=False),
        mock.patch.object(F, "grouped_mm", grouped_mm),
    ):
        yield
