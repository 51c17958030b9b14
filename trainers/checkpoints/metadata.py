"""A checkpoint's `.metadata`, read without unpickling it.

`torch.distributed.checkpoint` keeps there, as a pickle, which file holds which box of which tensor. Whoever unpickles calls what
the pickle names, so a forged one could run anything. Here its opcodes are only read: numbers, texts and containers are put
together, and an object stays what the pickle says of it, a class's name with arguments. Nothing is imported, called or hashed.
What is found is checked piece by piece, and torch's own classes are made from it.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

_CHECKPOINT = "torch.distributed.checkpoint.metadata."
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
)
_WHOLE_NUMBERS = 2**63  # torch's sizes are below
_CONSTANTS: Mapping[str, Any] = MappingProxyType({"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()})
_VALUES = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"})
_TUPLES: Mapping[str, int] = MappingProxyType({"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3})


class Contents(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        tensors: by name, with the boxes that they are cut into.
        places: of every box in a file.
    """

    tensors: dict[str, TensorStorageMetadata]
    places: dict[MetadataIndex, _StorageInfo]


class _Pairs(list):
    """A dictionary as its pairs: its keys need not be hashed."""


class _Name(str):
    """The name of a class, a function or a dtype, module first."""


class _Object:
    """What a pickle says of an object: the name of what makes it, the arguments, and the state that is set then."""

    def __init__(self, maker: Any, arguments: Any):
        self.maker, self.arguments, self.state = maker, arguments, None


def read_metadata(content: bytes) -> Contents:
    """What `torch.distributed.checkpoint` wrote, with every tensor's boxes whole and their places in files.

    Raises:
        ValueError: it is no such pickle, or names anything that a checkpoint does not need.
    """
    try:
        return _contents(_Reader().read(content))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = str(error) if type(error) is ValueError else type(error).__name__
        raise ValueError(f"it is no pickle of a checkpoint: {reason[:120]}") from None


def _contents(found: Any) -> Contents:
    fields = _fields(found, _CHECKPOINT + "Metadata")
    tensors = dict(_tensor(*pair) for pair in _pairs(fields["state_dict_metadata"]))
    places = dict(_place(*pair) for pair in _pairs(fields["storage_data"]))
    for name, tensor in tensors.items():
        if any(MetadataIndex(name, chunk.offsets) not in places for chunk in tensor.chunks):
            raise ValueError(f"it names no file for a part of {name}")
    return Contents(tensors, places)


class _Reader:
    """The stack and the memory that a pickle's opcodes work on."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # what was on the stack before each mark
        self.memory: dict[int, Any] = {}

    def read(self, content: bytes) -> Any:
        argument: Any
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name  # the most frequent ones first: a large checkpoint has millions
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
        """End what the last mark began; the stack before it."""
        self.stack = self.below.pop()
        return self.stack

    def _take(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError(count)
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken


def _tensor(name: Any, found: Any) -> tuple[str, TensorStorageMetadata]:
    fields = _fields(found, _CHECKPOINT + "TensorStorageMetadata")
    properties = _of(_Object, fields["properties"], "TensorProperties")
    dtype, *_ = _of(tuple, properties.state, "TensorProperties")
    if dtype not in _DTYPES:
        raise ValueError("it holds something else where a dtype belongs")
    whole = _size(fields["size"])
    chunks = [_chunk(chunk) for chunk in _of(list, fields["chunks"], "a list")]
    fit = all(len(chunk.sizes) == len(chunk.offsets) == len(whole) for chunk in chunks) and all(
        start + length <= end for chunk in chunks for start, length, end in zip(chunk.offsets, chunk.sizes, whole, strict=True)
    )
    if not fit or sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(whole):
        raise ValueError(f"the parts of {_text(name)} do not make up the whole")
    return _text(name), TensorStorageMetadata(TensorProperties(_DTYPES[dtype]), whole, chunks)


def _chunk(found: Any) -> ChunkStorageMetadata:
    fields = _fields(found, _CHECKPOINT + "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(fields["offsets"]), _size(fields["sizes"]))


def _place(index: Any, found: Any) -> tuple[MetadataIndex, _StorageInfo]:
    which = _fields(index, _CHECKPOINT + "MetadataIndex")
    where = _fields(found, "torch.distributed.checkpoint.filesystem._StorageInfo")
    if where.get("transform_descriptors") is not None:
        raise ValueError("it names a transformed file")
    offset = which.get("offset")
    key = MetadataIndex(_text(which["fqn"]), None if offset is None else _size(offset))
    return key, _StorageInfo(_text(where["relative_path"]), _whole_number(where["offset"]), _whole_number(where["length"]))


class _Fields(dict):
    """An object's fields by name; one that is asked for and not there is the pickle's fault."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"it lacks {name}")


def _fields(found: Any, kind: str) -> _Fields:
    name = kind.rpartition(".")[2]
    if _of(_Object, found, name).maker != kind:
        raise ValueError(f"it holds {str(found.maker).removeprefix(_CHECKPOINT)[:60]} where {name} belongs")
    return _Fields((key, value) for key, value in _pairs(found.state) if isinstance(key, str))


def _pairs(found: Any) -> _Pairs:
    return _of(_Pairs, found, "a dictionary")


def _size(found: Any) -> torch.Size:
    made = _of(_Object, found, "a size")
    (parts,) = _of(tuple, made.arguments, "a size")
    if made.maker != "torch.Size":
        raise ValueError(f"it holds {str(made.maker)[:60]} where a size belongs")
    return torch.Size([_whole_number(part) for part in _of(tuple, parts, "a size")])


def _whole_number(found: Any) -> int:
    if type(found) is not int or not 0 <= found < _WHOLE_NUMBERS:
        raise ValueError("it holds something else where a whole number belongs")
    return found


def _text(found: Any) -> str:
    return str(_of(str, found, "a name"))


def _of(kind: type, found: Any, what: str) -> Any:
    if not isinstance(found, kind):
        raise ValueError(f"it holds something else where {what} belongs")
    return found
