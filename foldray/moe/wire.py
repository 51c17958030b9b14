"""How rows are written for the wire, in fewer bytes than they are computed in.

| `moe.wire` | rows to experts | rows back from experts | a number is off by at most |
|---|---|---|---|
| `bfloat16` | bfloat16 | bfloat16 | 1/256 of it |
| `float8` | float8 (e4m3), with a scale for each 128 numbers | bfloat16 | 1/16 of it, or 1/458752 of the largest of its 128 |

So it is for activations forward and for gradients backward: what goes out has one format, and what comes back the other, because
rows that come back are summed (DeepSeek-V3's report, section 3.3.3). In float8, NaN or infinity makes all numbers with its scale
NaN.

Legend: N rows, H hidden, G = ⌈H / 128⌉ groups of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F

GROUP = 128
"""Numbers of a row that share a scale."""
_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max
_TINY = torch.finfo(torch.float32).tiny


Read = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class Narrow:
    """Rows in a narrower type."""

    dtype: torch.dtype
    floor: float = 0.0

    @property
    def error(self) -> float:
        return torch.finfo(self.dtype).eps / 2

    def write(self, x_NH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x_NH.to(self.dtype),)

    def read(self, written: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return written[0].to(dtype)


@dataclass(frozen=True)
class Scaled:
    """Rows in float8 [N, H], as bytes, and the scales of their groups [N, G]. The largest number of a group is the largest one of
    the type."""

    error: float = torch.finfo(_FLOAT8).eps / 2
    floor: float = torch.finfo(_FLOAT8).smallest_normal * torch.finfo(_FLOAT8).eps / 2 / _LARGEST

    def write(self, x_NH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        groups_NGg = _grouped(x_NH.to(torch.float32, copy=True))
        # Communication libraries know no float8, so bytes travel. The smallest scale keeps a group of zeros from 0 / 0. A GPU
        # takes a division by a number as this product, whose last bit may differ.
        scale_NG = (torch.linalg.vector_norm(groups_NGg, torch.inf, 2) * (1 / _LARGEST)).clamp_min(_TINY)
        small_NH = groups_NGg.div_(scale_NG[..., None]).flatten(1)[:, : x_NH.shape[1]]
        return small_NH.to(_FLOAT8).view(torch.uint8), scale_NG

    def read(self, written: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        bytes_NH, scale_NG = written
        groups_NGg = _grouped(bytes_NH.view(_FLOAT8).float()).mul_(scale_NG[..., None])
        return groups_NGg.flatten(1)[:, : bytes_NH.shape[1]].to(dtype)


Format = Narrow | Scaled
"""A way to write rows: `write` makes tensors with N rows of them, and `read` the rows again.

`error` is the largest error of a number as a share of it; `floor` that of a number near zero, as a share of the largest one with
the same scale (0 without scales).
"""


@dataclass(frozen=True)
class Wire:
    """The formats of rows to experts, and of rows back."""

    out: Format
    back: Format


_BACK = Narrow(torch.bfloat16)
WIRES: Mapping[str, Wire] = MappingProxyType({"bfloat16": Wire(_BACK, _BACK), "float8": Wire(Scaled(), _BACK)})


def _grouped(x_NH: torch.Tensor) -> torch.Tensor:
    """Cut rows into groups; zeros fill the last one: [N, G, 128]."""
    missing = -x_NH.shape[1] % GROUP
    return (F.pad(x_NH, (0, missing)) if missing else x_NH).unflatten(1, (-1, GROUP))


def write(rows: Sequence[torch.Tensor], form: Format | None) -> tuple[list[torch.Tensor], Read]:
    """Write rows in a format (None leaves them as they are), and what is beside them.

    Each message takes time to start. So what is beside the rows travels side by side in one tensor, as bytes.

    Returns:
        What travels, and what makes tensors like `rows` of it where it has arrived. The latter keeps no tensor.
    """
    first, *scales = rows[:1] if form is None else form.write(rows[0])
    beside = [*scales, *rows[1:]]
    columns = [(x.dtype, x.shape[1]) for x in beside] if len(beside) > 1 else []
    if columns:
        beside = [torch.cat([x.contiguous().view(torch.uint8) for x in beside], 1)]
    return [first, *beside], partial(_read, form=form, dtype=rows[0].dtype, scales=len(scales), columns=columns)


def _read(
    tensors: Sequence[torch.Tensor], form: Format | None, dtype: torch.dtype, scales: int, columns: list[tuple[torch.dtype, int]]
) -> list[torch.Tensor]:
    first, *beside = tensors
    if columns:
        parts = beside[0].split([kind.itemsize * width for kind, width in columns], 1)
        # A single row counts as contiguous whatever its stride is, and only a copy has the stride of other types.
        copies = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        beside = [copy.view(kind) for copy, (kind, _) in zip(copies, columns, strict=True)]
    return [first if form is None else form.read((first, *beside[:scales]), dtype), *beside[scales:]]
