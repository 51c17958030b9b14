"""A stand-in on the CPU for captured CUDA graphs: ops are recorded as calls of torch's operators, and replayed without Python.

What a CUDA graph would do wrong, the stand-in does wrong, too:

- A replay computes in the memory that the recording had. Tensors of a slot share one arena, in which a place is free as soon
  as nothing holds its tensor any more, as in CUDA's caching allocator. So a replay in another order than the recorded one finds
  other numbers there.
- A replay reads the addresses of the recording. So a recorded op may read its inputs, results of the same slot, and what was
  there before and stays (`survey`): weights, sums of gradients, tables. Any other tensor is refused.
- The host does not take part. So a recorded op may read no number of a tensor, draw no random number and send nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_ALIGNED = 64  # bytes; the last bits of a result may depend on the alignment
_OF_THE_HOST = (
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero", "aten::bincount",
    "aten::_unique2", "aten::unique_dim",
)  # fmt: skip
_RANDOM = ("aten::normal_", "aten::uniform_", "aten::bernoulli_", "aten::random_", "aten::multinomial", "aten::native_dropout")
_UNFILLED = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")


class NotCapturable(Exception):
    """An op does what a CUDA graph cannot repeat."""


class _View(NamedTuple):
    """A tensor of a recording: the number of its storage, and where it lies there."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Call(NamedTuple):
    """A call that computes: `made` are the results that it has made anew, by their places among all results."""

    function: Any
    arguments: Any
    made: Mapping[int, _View]


def each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with all tensors (or views) inside it changed."""
    if isinstance(value, Tensor | _View):
        return change(value)
    if isinstance(value, dict):
        return {key: each(part, change) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [each(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: each(getattr(value, field.name), change) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    each(value, found.append)
    return found


def _copy(x: Tensor) -> Tensor:
    """Return a copy with the same strides: the order in which numbers are summed may depend on them."""
    if 0 in x.stride():
        return x.detach().clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach())


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class _Survey(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for x in _tensors((list(args), kwargs or {}, results)):
            self.seen.setdefault(_key(x), StorageWeakRef(x.untyped_storage()))
        return results


@contextmanager
def survey(constants: dict[int, Tensor]) -> Iterator[None]:
    """Find the storages that ops use in here, and that are still there afterwards. A graph may keep their addresses."""
    held: dict[int, Tensor] = {}
    with _Survey() as found:
        yield
    for key, weak in found.seen.items():
        if not weak.expired():
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is not None:
                held[key] = torch.empty(0, dtype=torch.uint8).set_(storage)
    constants.update(held)


class _Arena:
    """Memory of a slot, in which tensors have places while they are there."""

    def __init__(self) -> None:
        self.taken: dict[int, tuple[int, int]] = {}  # by storage: first byte, and the byte behind the last one
        self.bytes = 0

    def take(self, storage: int, size: int) -> int:
        """Return the first gap that is large enough."""
        begin, needed = 0, -(-max(size, 1) // _ALIGNED) * _ALIGNED
        for first, stop in sorted(self.taken.values()):
            if first - begin >= needed:
                break
            begin = max(begin, stop)
        self.taken[storage] = begin, begin + needed
        self.bytes = max(self.bytes, begin + needed)
        return begin


class Slot(TorchDispatchMode):
    """The recordings of one micro-batch in flight after another.

    Args:
        constants: what recorded ops may read and write beside their inputs (`survey`), by the addresses of storages.
    """

    def __init__(self, constants: Mapping[int, Tensor]):
        super().__init__()
        self.constants = constants
        self._arena, self._places, self._fixed = _Arena(), dict[int, int](), dict[int, Tensor]()
        self._number: dict[int, int] = {}  # by address, of storages that are there
        self._alive: dict[int, StorageWeakRef] = {}
        self._recorded: dict[Any, tuple[list[_Call], list[_View], Any]] = {}
        self._calls: list[_Call] = []
        self._memory: Tensor | None = None

    def run(self, key: Any, call: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        """Record `call(*inputs)` the first time, and replay it later."""
        return self._replay(key, inputs) if key in self._recorded else self._record(key, call, inputs)

    def calls(self) -> dict[Any, int]:
        """Return how many calls that compute each recording has: on a GPU, about as many kernels."""
        return {key: len(calls) for key, (calls, _, _) in self._recorded.items()}

    def _record(self, key: Any, call: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        if self._memory is not None:
            raise NotCapturable(f"{key} comes after the slot has been replayed")
        self._bury()
        copies = [_copy(x) for x in inputs]
        given, self._calls = [self._view(x, new=True) for x in copies], []
        with self:
            results = call(*copies)
        self._recorded[key] = self._calls, given, each(results, self._view)
        return results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        masked = name in ("aten::index", "aten::index_put_", "aten::index_put") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if masked or name in _OF_THE_HOST or name in _RANDOM or not name.startswith(("aten::", "mkldnn::")):
            raise NotCapturable(f"{name} needs the host")
        arguments = each((list(args), dict(kwargs)), self._view)
        results = func(*args, **kwargs)
        listed = results if isinstance(results, tuple | list) else [results]
        fresh = {i: x for i, x in enumerate(listed) if isinstance(x, Tensor) and _key(x) not in self._number}
        made = {i: self._view(x, new=True) for i, x in fresh.items()}
        if made or func._schema.is_mutable:
            self._calls.append(_Call(func, arguments, {} if name in _UNFILLED else made))
        self._bury()
        return results

    def _view(self, x: Tensor, new: bool = False) -> _View:
        key, storage = _key(x), x.untyped_storage()
        if key not in self._number:
            number = len(self._places) + len(self._fixed)
            if new:
                self._places[number] = self._arena.take(number, storage.nbytes())
                self._alive[key] = StorageWeakRef(storage)
            elif key in self.constants:
                self._fixed[number] = self.constants[key]
            else:
                raise NotCapturable(f"a tensor {tuple(x.shape)} of {x.dtype} is no input, and does not stay")
            self._number[key] = number
        return _View(self._number[key], x.dtype, tuple(x.shape), x.stride(), x.storage_offset())

    def _bury(self) -> None:
        for key in [key for key, weak in self._alive.items() if weak.expired()]:
            del self._alive[key], self._arena.taken[self._number.pop(key)]

    @torch.no_grad()
    def _replay(self, key: Any, inputs: Sequence[Tensor]) -> Any:
        if self._memory is None:  # no byte of it is a number in any type of floats
            self._memory = torch.full((self._arena.bytes + _ALIGNED,), 0xFF, dtype=torch.uint8)
        calls, given, results = self._recorded[key]
        for view, x in zip(given, inputs, strict=True):
            self._tensor(view).copy_(x)
        for function, arguments, made in calls:
            if not made and not function._schema.is_mutable:
                continue  # memory that nothing has written yet
            args, kwargs = each(arguments, self._tensor)
            found = function(*args, **kwargs)
            for place, view in made.items():
                self._tensor(view).copy_(found[place] if isinstance(found, tuple | list) else found)
        return each(results, self._tensor)

    def _tensor(self, view: _View) -> Tensor:
        if (fixed := self._fixed.get(view.storage)) is not None:
            memory, begin = fixed, 0
        else:
            assert self._memory is not None
            memory, begin = self._memory, -self._memory.data_ptr() % _ALIGNED + self._places[view.storage]
        offset = begin // view.dtype.itemsize + view.offset
        return torch.empty(0, dtype=view.dtype).set_(memory.untyped_storage(), offset, view.size, view.stride)


def slots_of(micro_batches: Iterable[int]) -> dict[int, int]:
    """Return the slot of each micro-batch: the lowest one that is free when it begins.

    Args:
        micro_batches: those of the recorded ops of a list, in order.
    """
    order = list(micro_batches)
    ends = {micro_batch: place for place, micro_batch in enumerate(order)}
    slots, free, opened = dict[int, int](), set[int](), 0
    for place, micro_batch in enumerate(order):
        if micro_batch not in slots:
            if not free:
                free.add(opened)
                opened += 1
            slots[micro_batch] = min(free)
            free.remove(slots[micro_batch])
        if ends[micro_batch] == place:
            free.add(slots[micro_batch])
    return slots
