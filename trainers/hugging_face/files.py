"""Writes files in the format of safetensors, one tensor after another.

A file begins with the length of its header, 8 bytes. The header is JSON: for every tensor, its type, its shape, and the place of
its bytes behind the header. The library writes a file only if all of its tensors are in memory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ALIGNMENT = 8


class Form(NamedTuple):
    """A tensor that is to be written."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(path: Path, forms: Sequence[Form], tensors: Iterable[torch.Tensor]) -> None:
    """Write the tensors of these forms, in the same order. Each tensor is freed before the next one is taken."""
    header, offset = dict[str, Any](__metadata__={"format": "pt"}), 0
    for form in forms:
        offsets = [offset, offset + form.bytes]
        header[form.name] = {"dtype": _NAMES[form.dtype], "shape": list(form.shape), "data_offsets": offsets}
        offset += form.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for form, tensor in zip(forms, tensors, strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == (tuple(form.shape), form.dtype), form.name
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
