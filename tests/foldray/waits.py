"""Counts how often the host would wait for a GPU in a training step. The step runs on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import current_thread, main_thread
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foldray.comm import DispatchQueue, Pending
from foldray.graph import Op
from foldray.kernels import experts, transfer
from foldray.recipe import Recipe
from foldray.runtime.execution import _Run
from foldray.runtime.gradients import Gradients
from foldray.runtime.micro_batch import MicroBatch
from tests.foldray.parity import engine_on, own_batches

# aten calls whose results, or whose sizes of results, the host has to know.
WAITING = {
    "_local_scalar_dense", "nonzero", "bincount", "masked_select", "equal", "is_nonzero", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "histc",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}  # with a mask
# Copies between host and device, which dispatch nothing on the CPU. Those in `kernels/transfer.py` do not make the host wait.
COPIES: list[tuple[Any, str]] = [
    (torch, "tensor"), (torch, "as_tensor"), (torch, "from_numpy"), (torch, "frombuffer"), (Tensor, "new_tensor"), (Tensor, "to"),
    (Tensor, "cuda"),
]  # fmt: skip
READS: list[tuple[Any, str]] = [(Tensor, "tolist"), (Tensor, "cpu"), (Tensor, "numpy")]


class Ran(NamedTuple):
    """What the host waited for in an op.

    Args:
        op: kind and direction, as in "route F". "between" is between two ops, "queue" is in the thread of a queue.
        waits: the calls, each with the line of code.
    """

    op: str
    waits: list[str]


class Recorder(TorchDispatchMode):
    """Keeps the waits of each op."""

    def __init__(self) -> None:
        super().__init__()
        self.ran, self._between, self._queue = list[Ran](), Ran("between", []), Ran("queue", [])
        self._now = self._between

    def found(self) -> list[Ran]:
        return [*self.ran, self._between, self._queue]

    def add(self, call: str) -> None:
        where = self._now if current_thread() is main_thread() else self._queue
        where.waits.append(f"{call} at {_caller()}")

    @contextmanager
    def op(self, name: str) -> Iterator[None]:
        self._now = Ran(name, [])
        self.ran.append(self._now)
        yield
        self._now = self._between

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in WAITING or repeats or (name in INDEXING and any(_is_mask(index) for index in args[1])):
            self.add(name)
        return func(*args, **kwargs)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _caller() -> str:
    """Return the innermost line of foldray's own code."""
    frame: Any = sys._getframe(1)
    while frame is not None and "/foldray/" not in frame.f_code.co_filename.replace("/tests/foldray/", "/"):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename.rpartition('/foldray/')[2]}:{frame.f_lineno}"


@contextmanager
def recorded(immediate: bool) -> Iterator[Recorder]:
    """Record the waits of ops.

    Args:
        immediate: whether a queue starts its operations at once, as on a GPU.
    """
    recorder, run, hand_over, start = Recorder(), MicroBatch.run, _Run._hand_over, Gradients.start

    def op_of(call: Callable) -> Callable:
        def within(owner: Any, op: Op, *rest: Any) -> Any:
            with recorder.op(f"{op.kind} {op.direction}"):
                return call(owner, op, *rest)

        return within

    def reduce(owner: Gradients, *rest: Any) -> Any:
        with recorder.op("reduce"):
            return start(owner, *rest)

    def counted(owner: Any, name: str, copies: bool) -> Callable:
        plain = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            harmless = copies and sys._getframe(1).f_code.co_filename == transfer.__file__
            moves = name != "to" or "device" in kwargs or any(isinstance(arg, (torch.device, str)) for arg in args[1:])
            if moves and not harmless:
                recorder.add(name)
            return plain(*args, **kwargs)

        return call

    def at_once(queue: DispatchQueue, begin: Callable[[], Pending], ready: bool, device: torch.device | None = None) -> Pending:
        return begin()

    with ExitStack() as stack:
        patches = [(MicroBatch, "run", op_of(run)), (_Run, "_hand_over", op_of(hand_over)), (Gradients, "start", reduce)]
        patches += [(*each, counted(*each, copies)) for group, copies in ((COPIES, True), (READS, False)) for each in group]
        patches += [(DispatchQueue, "start", at_once)] if immediate else []
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield stack.enter_context(recorder)


def waits_of_a_step(rank: int, recipe: Recipe, documents: bool = False) -> list[Ran]:
    """Return what the host waits for in a later step of a training. Experts are computed as on a GPU."""
    before = 2 if recipe.moe.copies else 1  # copies of experts are chosen before the third step
    gpus = mock.patch.object(experts, "_implementation", experts._on_gpus)
    with gpus, engine_on(recipe, rank) as (engine, groups):
        for step in range(before):  # makes lists, and what is kept for later steps
            engine.train(own_batches(recipe, groups, step, documents=documents))
            engine.update(0.1)
        batches = own_batches(recipe, groups, before, documents=documents)
        with recorded(immediate=not recipe.placed_fold.disjoint) as recorder:
            engine.train(batches)
        engine.update(0.1)
    return recorder.found()
