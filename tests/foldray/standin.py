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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from foldray.graph import Op
from foldray.runtime.graphs import each_tensor, place_like

_ALIGNED = 64  # bytes; the last bits of a result may depend on the alignment
_OF_THE_HOST = (
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero", "aten::bincount",
    "aten::_unique2", "aten::unique_dim",
)  # fmt: skip
_READS = ("tolist", "numpy", "cpu")  # of a tensor of the CPU, they call no operator
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


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with all tensors (or views) inside it changed."""
    return each_tensor(value, change, (Tensor, _View))


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _each(value, found.append)
    return found


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
def survey(constants: dict[int, StorageWeakRef]) -> Iterator[None]:
    """Find the storages that ops use in here, and that are still there afterwards. A graph may keep their addresses."""
    with _Survey() as found:
        yield
    constants.update((key, weak) for key, weak in found.seen.items() if not weak.expired())


@contextmanager
def _nothing_read() -> Iterator[None]:
    """Refuse that this thread reads a tensor on the host. Others may read counts that travel."""
    here = get_ident()

    def refused(name: str) -> Callable[..., Any]:
        read = getattr(Tensor, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == here:
                raise NotCapturable(f"{name} needs the host")
            return read(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in _READS:
            stack.enter_context(mock.patch.object(Tensor, name, refused(name)))
        yield


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


class Standin:
    """Records ops as the product's recorder of CUDA graphs does.

    Args:
        constants: what recorded ops may read and write beside their inputs (`survey`), by the addresses of storages.
    """

    def __init__(self, constants: Mapping[int, StorageWeakRef]):
        self.constants = constants
        self.slots: dict[int, Slot] = {}
        self.calls: dict[Op, int] = {}  # that compute, by op: on a GPU, about as many kernels

    def record(self, slot: int, op: Op, call: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, Callable[..., Any]]:
        results, replay, self.calls[op] = self.slots.setdefault(slot, Slot(self.constants)).record(call, inputs)
        return results, replay

    def forget(self) -> None:
        self.slots = {}


class Slot(TorchDispatchMode):
    """The recordings of one micro-batch in flight after another."""

    def __init__(self, constants: Mapping[int, StorageWeakRef]):
        super().__init__()
        self.constants = constants
        self._arena, self._places, self._fixed = _Arena(), dict[int, int](), dict[int, StorageWeakRef]()
        self._number: dict[int, int] = {}  # by address, of storages that are there
        self._alive: dict[int, StorageWeakRef] = {}
        self._calls: list[_Call] = []
        self._memory: Tensor | None = None

    def record(self, call: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, Callable[..., Any], int]:
        """Compute `call(*inputs)`, and return its results, what replays it, and how many calls that computes."""
        if self._memory is not None:
            raise NotCapturable("an op comes after the slot has been replayed")
        self._bury()
        places = [place_like(x).copy_(x) for x in inputs]
        given, calls = [self._view(x, new=True) for x in places], list[_Call]()
        self._calls = calls
        with _nothing_read(), self:
            results = call(*places)
        made = _each(results, self._view)
        return results, lambda inputs: self._replay(calls, given, made, inputs), len(calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        masked = name in ("aten::index", "aten::index_put_", "aten::index_put") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if masked or name in _OF_THE_HOST or name in _RANDOM or not name.startswith(("aten::", "mkldnn::")):
            raise NotCapturable(f"{name} needs the host")
        arguments = _each((list(args), dict(kwargs)), self._view)
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
            elif (weak := self.constants.get(key)) is not None and not weak.expired():
                self._fixed[number] = weak
            else:
                raise NotCapturable(f"a tensor {tuple(x.shape)} of {x.dtype} is no input, and does not stay")
            self._number[key] = number
        return _View(self._number[key], x.dtype, tuple(x.shape), x.stride(), x.storage_offset())

    def _bury(self) -> None:
        for key in [key for key, weak in self._alive.items() if weak.expired()]:
            del self._alive[key], self._arena.taken[self._number.pop(key)]

    @torch.no_grad()
    def _replay(self, calls: list[_Call], given: list[_View], results: Any, inputs: Sequence[Tensor]) -> Any:
        if self._memory is None:  # no byte of it is a number in any type of floats
            self._memory = torch.full((self._arena.bytes + _ALIGNED,), 0xFF, dtype=torch.uint8)
        for view, x in zip(given, inputs, strict=True):
            self._tensor(view).copy_(x)
        for function, arguments, made in calls:
            if not made and not function._schema.is_mutable:
                continue  # memory that nothing has written yet
            args, kwargs = _each(arguments, self._tensor)
            found = function(*args, **kwargs)
            for place, view in made.items():
                self._tensor(view).copy_(found[place] if isinstance(found, tuple | list) else found)
        return _each(results, self._tensor)

    def _tensor(self, view: _View) -> Tensor:
        if (fixed := self._fixed.get(view.storage)) is not None:
            if fixed.expired():
                raise NotCapturable(f"a tensor {view.size} of {view.dtype} that an op reads is gone")
            memory, begin = torch.UntypedStorage._new_with_weak_ptr(fixed.cdata), 0
        else:
            assert self._memory is not None
            memory, begin = self._memory.untyped_storage(), -self._memory.data_ptr() % _ALIGNED + self._places[view.storage]
        offset = begin // view.dtype.itemsize + view.offset
        return torch.empty(0, dtype=view.dtype).set_(memory, offset, view.size, view.stride)
