"""Reads a checkpoint's `.metadata` without unpickling it.

`.metadata` says which file holds which box of which tensor. `torch.distributed.checkpoint` writes it as a pickle. Unpickling
calls the functions that the pickle names, so a forged pickle could run any code. This module only reads the opcodes of the
pickle. It builds numbers, texts and containers. An object stays a description: the name of a class, with arguments. Nothing
is imported, called or hashed. Then the module checks every part of the result, and makes torch's own classes from it.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata

_CHECKPOINT = "torch.distributed.checkpoint.metadata."
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
)
_WHOLE_NUMBERS = 2**63  # torch's sizes are below this number
_CONSTANTS: Mapping[str, Any] = MappingProxyType({"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()})
_VALUES = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"})
_TUPLES: Mapping[str, int] = MappingProxyType({"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3})


class Contents(NamedTuple):
    """The tensors of a checkpoint by name, with the boxes that they are cut into, and the file and the place of every box."""

    tensors: dict[str, TensorStorageMetadata]
    places: dict[MetadataIndex, _StorageInfo]


class _Pairs(list):
    """A dictionary as a list of pairs, so no key has to be hashed."""


class _Name(str):
    """The name of a class, a function or a dtype, module first."""


class _Object:
    """A pickle's description of an object: the name of its class or function, the arguments, and the state."""

    def __init__(self, maker: Any, arguments: Any):
        self.maker, self.arguments, self.state = maker, arguments, None


def read_metadata(content: bytes) -> Contents:
    """Return the contents that `torch.distributed.checkpoint` wrote, and check that the boxes of every tensor cover it.

    Any other pickle, or one that names an object that a checkpoint does not need, raises ValueError.
    """
    try:
        return _contents(_Reader().read(content))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = str(error) if type(error) is ValueError else type(error).__name__
        raise ValueError(f"it is not the pickle of a checkpoint: {reason[:120]}") from None


def _contents(value: Any) -> Contents:
    fields = _fields(value, _CHECKPOINT + "Metadata")
    tensors = dict(_tensor(*pair) for pair in _pairs(fields["state_dict_metadata"]))
    places = dict(_place(*pair) for pair in _pairs(fields["storage_data"]))
    for name, tensor in tensors.items():
        if any(MetadataIndex(name, chunk.offsets) not in places for chunk in tensor.chunks):
            raise ValueError(f"it names no file for a part of {name}")
    return Contents(tensors, places)


class _Reader:
    """Runs a pickle's opcodes on a stack and a memory."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stack before each mark
        self.memory: dict[int, Any] = {}

    def read(self, content: bytes) -> Any:
        argument: Any
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name  # a large checkpoint has millions of opcodes, so the most frequent ones come first
            if name == "MEMOIZE":
                self.memory[len(self.memory)] = self.stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                self.stack.append(self.memory[argument])
            elif name in _VALUES:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name not in ("PROTO", "FRAME", "STOP"):
                self._step(name, argument)
        return self.stack.pop()

    def _step(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        match opcode:
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append(_Pairs())
            case "MARK":
                self.below.append(stack)
                self.stack = []
            case "TUPLE":
                self._close().append(tuple(stack))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._take(_TUPLES[opcode])))
            case "APPEND" | "APPENDS":
                items = self._take(1) if opcode == "APPEND" else stack
                _of(list, (stack if opcode == "APPEND" else self._close())[-1], "a list").extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._take(2) if opcode == "SETITEM" else stack
                pairs = zip(items[::2], items[1::2], strict=True)
                _of(_Pairs, (stack if opcode == "SETITEM" else self._close())[-1], "a dictionary").extend(pairs)
            case "STACK_GLOBAL":
                stack.append(_Name(".".join(self._take(2))))
            case "REDUCE" | "NEWOBJ":
                stack.append(_Object(*self._take(2)))
            case "BUILD":
                target, state = self._take(2)
                _of(_Object, target, "an object").state = state
                stack.append(target)
            case _:
                raise ValueError(f"it uses {opcode}")

    def _close(self) -> list[Any]:
        """Restore and return the stack before the last mark."""
        self.stack = self.below.pop()
        return self.stack

    def _take(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError(count)
        items = self.stack[-count:]
        del self.stack[-count:]
        return items


def _tensor(name: Any, value: Any) -> tuple[str, TensorStorageMetadata]:
    fields = _fields(value, _CHECKPOINT + "TensorStorageMetadata")
    properties = _of(_Object, fields["properties"], "TensorProperties")
    dtype, *_ = _of(tuple, properties.state, "TensorProperties")
    if dtype not in _DTYPES:
        raise ValueError("it holds something else where a dtype belongs")
    shape = _size(fields["size"])
    chunks = [_chunk(chunk) for chunk in _of(list, fields["chunks"], "a list")]
    fit = all(len(box.sizes) == len(box.offsets) == len(shape) for box in chunks) and all(
        start + length <= end for box in chunks for start, length, end in zip(box.offsets, box.sizes, shape, strict=True)
    )
    if not fit or sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the parts of {_text(name)} do not make up the tensor")
    return _text(name), TensorStorageMetadata(TensorProperties(_DTYPES[dtype]), shape, chunks)


def _chunk(value: Any) -> ChunkStorageMetadata:
    fields = _fields(value, _CHECKPOINT + "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(fields["offsets"]), _size(fields["sizes"]))


def _place(index: Any, value: Any) -> tuple[MetadataIndex, _StorageInfo]:
    box = _fields(index, _CHECKPOINT + "MetadataIndex")
    place = _fields(value, "torch.distributed.checkpoint.filesystem._StorageInfo")
    if place.get("transform_descriptors") is not None:
        raise ValueError("it names a transformed file")
    offset = box.get("offset")
    key = MetadataIndex(_text(box["fqn"]), None if offset is None else _size(offset))
    return key, _StorageInfo(_text(place["relative_path"]), _whole_number(place["offset"]), _whole_number(place["length"]))


class _Fields(dict):
    """The fields of an object by name. A missing field is an error of the pickle."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"it lacks {name}")


def _fields(value: Any, kind: str) -> _Fields:
    name = kind.rpartition(".")[2]
    if _of(_Object, value, name).maker != kind:
        raise ValueError(f"it holds {str(value.maker).removeprefix(_CHECKPOINT)[:60]} where {name} belongs")
    return _Fields((key, field) for key, field in _pairs(value.state) if isinstance(key, str))


def _pairs(value: Any) -> _Pairs:
    return _of(_Pairs, value, "a dictionary")


def _size(value: Any) -> torch.Size:
    size = _of(_Object, value, "a size")
    (parts,) = _of(tuple, size.arguments, "a size")
    if size.maker != "torch.Size":
        raise ValueError(f"it holds {str(size.maker)[:60]} where a size belongs")
    return torch.Size([_whole_number(part) for part in _of(tuple, parts, "a size")])


def _whole_number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _WHOLE_NUMBERS:
        raise ValueError("it holds something else where a whole number belongs")
    return value


def _text(value: Any) -> str:
    return str(_of(str, value, "a name"))


def _of(kind: type, value: Any, what: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"it holds something else where {what} belongs")
    return value
