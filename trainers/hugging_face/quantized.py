"""Quantized tensors in a folder of transformers: fewer bits for each value, and a scale that a block of values shares.

FP8: matrices of 8-bit floats in rectangular blocks (DeepSeek-V3, section 3.3). MXFP4: rows of 4-bit floats in blocks of 32 (OCP
Microscaling Formats, MX v1.0). A tensor is its values and its scales, two names in the files. Reading a box of it reads the part
of the files that the box needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_PLAIN = ("F64", "F32", "F16", "BF16")
_SCALES = ("F32", "F16", "BF16", "F8_E8M0")
_FP8 = "F8_E4M3"
_BYTES = "U8"
# The values of E2M1 by their bits without the sign, which is the fourth (MX v1.0, section 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 32  # values with a scale in common (MX v1.0, section 5.1)
_AXES = 3  # experts, inputs, outputs
_SAVE = "save it with plain weights"


class Part(Protocol):
    """A tensor in a file in the format of safetensors (`get_slice`)."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...


class Stored(Protocol):
    """A tensor of a folder. Slicing it gives the values that it stands for.

    An index has whole numbers or slices for some of the first axes; the last two have slices. It may end with an ellipsis.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class Plain:
    """A tensor that is not quantized."""

    values: Part

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.values[index]


@dataclass(frozen=True)
class Scaled:
    """A tensor of FP8: each value stands for itself, times the scale of its block. Its axes are [..., rows, columns].

    Args:
        scales: [..., rows / height, columns / width], rounded up. Blocks at the edges may be smaller.
        block: height and width of a block.
    """

    values: Part
    scales: Part
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        *before, rows, columns = _places(index, self.shape)
        values = self.values[_slices(*before, rows, columns)].float()
        (down, heights), (across, widths) = map(_blocks, (rows, columns), self.block)
        scales = self.scales[(*_slices(*before), ...)].float().index_select(-2, down).index_select(-1, across)
        # One row of blocks after another, so scales as large as the tensor never exist.
        for part, scale in zip(values.split(heights.tolist(), -2), scales.unbind(-2), strict=True):
            part.mul_(scale.repeat_interleave(widths, -1).unsqueeze(-2))
        return values


@dataclass(frozen=True)
class Packed:
    """A tensor of MXFP4, [experts, inputs, outputs]. The files have its outputs before its inputs, and two inputs in a byte.

    Args:
        blocks: the values, [experts, outputs, inputs / 32, 16]. A byte has its first value in the low bits.
        scales: the exponents of two, with 127 added, [experts, outputs, inputs / 32].
    """

    blocks: Part
    scales: Part

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, blocks, _ = self.blocks.get_shape()
        return experts, blocks * _BLOCK, outputs

    def __getitem__(self, index: Any) -> torch.Tensor:
        experts, inputs, outputs = _places(index, self.shape)
        first, last = inputs.start // _BLOCK, -(-inputs.stop // _BLOCK)
        box = _slices(experts, outputs, range(first, last))
        values = torch.nn.functional.embedding(self.blocks[box].int(), _pairs()).flatten(-2)  # twice as fast as an index
        values *= self.scales[box].view(torch.float8_e8m0fnu).float().unsqueeze(-1)
        start = first * _BLOCK
        return values.flatten(-2)[..., inputs.start - start : inputs.stop - start : inputs.step].transpose(-1, -2)


class Format:
    """How a folder has its tensors. This one is of folders that are not quantized."""

    method: str = ""
    title: str = ""
    """The format for people."""

    def parts(self, name: str, names: Collection[str]) -> tuple[str, ...]:
        """Return the names, among those in the files, of a tensor whose plain name this is."""
        return (name,)

    def tensor(self, name: str, parts: Sequence[Part]) -> Stored:
        """Return the tensor of these parts, or raise a ValueError for a wrong type or shape."""
        (values,) = parts
        _check_type(name, values, _PLAIN)
        return Plain(values)


class Fp8(Format):
    """FP8 in blocks of a height and a width. A folder may also have tensors that are not quantized."""

    method = "fp8"

    def __init__(self, block: tuple[int, int]):
        self.block, self.title = block, f"fp8 in blocks of {block[0]} × {block[1]}"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Fp8:
        """Read `quantization_config`, or raise a ValueError as `format_of`."""
        block = config.get("weight_block_size")
        if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
            raise ValueError(f"says weight_block_size={block}, and foldray reads fp8 in blocks of two sizes only; {_SAVE}")
        return cls((block[0], block[1]))

    def parts(self, name: str, names: Collection[str]) -> tuple[str, ...]:
        scales = f"{name}_scale_inv"
        return (name, scales) if scales in names else (name,)

    def tensor(self, name: str, parts: Sequence[Part]) -> Stored:
        values, *rest = parts
        if not rest:
            if values.get_dtype() == _FP8:
                raise ValueError(f"has the tensor {name} of type {_FP8} without its scales, {name}_scale_inv")
            return super().tensor(name, parts)
        (scales,) = rest
        _check_type(name, values, (_FP8,))
        _check_type(f"{name}_scale_inv", scales, _SCALES)
        if len(shape := values.get_shape()) < 2:
            raise ValueError(f"has the tensor {name} of type {_FP8} in shape {shape}, which has no blocks")
        *before, rows, columns = shape
        height, width = self.block
        _check_shape(f"{name}_scale_inv", scales, [*before, -(-rows // height), -(-columns // width)])
        return Scaled(values, scales, self.block)


class Mxfp4(Format):
    """MXFP4, as GPT-OSS has it: the experts' matrices are quantized, and other tensors are not."""

    method = "mxfp4"
    title = f"mxfp4 in blocks of {_BLOCK}"

    def parts(self, name: str, names: Collection[str]) -> tuple[str, ...]:
        packed = (f"{name}_blocks", f"{name}_scales")
        return packed if name not in names and any(part in names for part in packed) else (name,)

    def tensor(self, name: str, parts: Sequence[Part]) -> Stored:
        if len(parts) == 1:
            return super().tensor(name, parts)
        blocks, scales = parts
        _check_type(f"{name}_blocks", blocks, (_BYTES,))
        _check_type(f"{name}_scales", scales, (_BYTES,))
        shape = blocks.get_shape()
        if len(shape) != _AXES + 1 or shape[-1] != _BLOCK // 2:
            wanted = f"[experts, outputs, inputs / {_BLOCK}, {_BLOCK // 2}]"
            raise ValueError(f"has {name}_blocks in shape {shape}, and mxfp4 needs {wanted}")
        _check_shape(f"{name}_scales", scales, shape[:-1])
        return Packed(blocks, scales)


_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = {"fp8": Fp8.of, "mxfp4": lambda config: Mxfp4()}


def format_of(config: Mapping[str, Any]) -> Format:
    """Return the format of a folder's tensors by its `config.json`.

    If foldray does not read the format, raise a ValueError whose message goes on from the file's name.
    """
    given = config.get("quantization_config")
    if given is None:
        return Format()
    if not isinstance(given, dict):
        raise ValueError("has a quantization_config that is no JSON object")
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in _FORMATS:
        known = " and ".join(_FORMATS)
        raise ValueError(f"says quant_method={method}, which foldray does not read, only {known}; {_SAVE}")
    return _FORMATS[method](given)


def _check_type(name: str, part: Part, legal: Sequence[str]) -> None:
    if (dtype := part.get_dtype()) not in legal:
        raise ValueError(f"has the tensor {name} of type {dtype}, and foldray reads it as {' or '.join(legal)} only")


def _check_shape(name: str, part: Part, wanted: list[int]) -> None:
    if (shape := part.get_shape()) != wanted:
        raise ValueError(f"has {name} in shape {shape}; the tensor that it scales needs {wanted}")


def _places(index: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """Return the place of an index on each axis, a number or a range."""
    given = [axis for axis in (index if isinstance(index, tuple) else (index,)) if axis is not ...]
    given += [slice(None)] * (len(shape) - len(given))
    return tuple(range(size)[axis] for size, axis in zip(shape, given, strict=True))


def _slices(*places: Any) -> tuple[int | slice, ...]:
    return tuple(slice(place.start, place.stop, place.step) if isinstance(place, range) else place for place in places)


def _blocks(places: range, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks of this size in which places lie, and how many places lie in each."""
    return torch.unique_consecutive(torch.arange(places.start, places.stop, places.step) // size, return_counts=True)


def _pairs() -> torch.Tensor:
    """Return the two values in each byte, [256, 2]."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
