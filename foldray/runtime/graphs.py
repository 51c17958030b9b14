"""Captured ops: what the host does for an op is done once, as a CUDA graph, and every later step replays it.

An op of a small piece costs the host far more than the GPU: dozens of calls of torch, and as many nodes of autograd. A graph
costs one call. Ops are captured one by one, forward, backward, forward again, and gradients of weights, with autograd inside
the capture, because a list orders them freely. (`torch.cuda.make_graphed_callables` captures all forwards and then all
backwards. Megatron-Core captures each layer in the order of one step, as is done here.)

Memory is shared as in any step: what an op frees, a later one takes. So graphs are right only in the order in which they were
captured, and with their inputs where they were. Three rules follow:

- One step captures, in the order of its list. With another list, all graphs are forgotten.
- Micro-batches that are in flight together have memory of their own, a *slot* each. A later micro-batch of a slot replays
  what the first one has captured, so it must have its ops in the same order.
- Inputs are copied to where the graph reads them. Whatever else an op reads must stay where it is: weights, sums of gradients,
  tables of positions.

Nothing is tried and caught: an error inside a capture leaves CUDA's memory in a bad state. So a recipe says beforehand which
ops cannot be captured (`recipe/capturing.py`).
"""

from __future__ import annotations

import dataclasses
import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foldray.errors import UserError
from foldray.graph import Op
from foldray.model import Batch, Transformer
from foldray.runtime.op_graphs import Compute, Computed, OpGraphs

EAGER_STEPS = 2  # load kernels and fill caches before a step captures
MOST_DIFFERENCE = 1e-3  # of a gradient, with graphs and without them, as a share of its norm


class Replay(Protocol):
    """A captured op."""

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """Compute the op with new inputs, and return its results, which lie where those of the capture lay."""


class Recorder(Protocol):
    """The way in which ops are captured."""

    def record(self, slot: int, op: Op, call: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, Replay]:
        """Capture `call(*inputs)` and compute it. Return its results, which own their memory, and what replays it."""

    def forget(self) -> None:
        """Free what was captured."""


def each_tensor(value: Any, change: Callable[[Any], Any], leaves: tuple[type, ...] = (Tensor,)) -> Any:
    """Return a value with all tensors inside its tuples, lists, dictionaries and dataclasses changed."""
    if isinstance(value, leaves):
        return change(value)
    if isinstance(value, dict):
        return {key: each_tensor(part, change, leaves) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [each_tensor(part, change, leaves) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **each_tensor(fields, change, leaves))
    return value


def place_like(x: Tensor) -> Tensor:
    """Return an empty tensor with the same strides, because the order in which numbers are summed may depend on them."""
    if 0 in x.stride():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


class CudaRecorder:
    """Captures CUDA graphs. The graphs of a slot have a pool of memory of their own."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._pools: dict[int, Any] = defaultdict(torch.cuda.graph_pool_handle)
        self._prime(device)

    def record(self, slot: int, op: Op, call: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, Replay]:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        self._stream.wait_stream(torch.cuda.current_stream())
        gc.disable()  # to free another graph would break the capture
        try:
            # Not `torch.cuda.graph`, which waits for the GPU and empties caches each time. NCCL's watchdog asks for events
            # meanwhile, so only this thread is kept from calls that cannot be captured.
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pools[slot], capture_error_mode="thread_local")
                places = [place_like(x) for x in inputs]
                results = call(*places)
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        replay = _CudaReplay(graph, [_alias(x) for x in places], each_tensor(results, _alias))
        replay(inputs)  # the capture has computed nothing
        return results, replay

    def forget(self) -> None:
        self._pools.clear()

    def _prime(self, device: torch.device) -> None:
        """Have cuBLAS take its workspaces for this stream, in this thread and in autograd's, outside of any pool."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.enable_grad():
            for dtype in (torch.bfloat16, torch.float32):
                x = torch.ones(16, 16, dtype=dtype, device=device, requires_grad=True)
                (x @ x).sum().backward()
        torch.cuda.current_stream().wait_stream(self._stream)


class _CudaReplay:
    def __init__(self, graph: torch.cuda.CUDAGraph, places: list[Tensor], results: Any):
        self._graph, self._places, self._results = graph, places, results

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        if inputs:
            torch._foreach_copy_(self._places, list(inputs))
        self._graph.replay()
        return self._results


def _alias(x: Tensor) -> Tensor:
    """Return a tensor in the same memory, which it does not keep."""
    storage = x.untyped_storage()
    weak = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), x.device, storage.nbytes())
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(weak, x.storage_offset(), x.size(), x.stride())


class Slot:
    """The captured ops of one micro-batch in flight after another."""

    def __init__(self, recorder: Recorder, number: int, kinds: frozenset[str]):
        self._recorder, self._number, self._kinds = recorder, number, kinds
        self._replays: dict[Op, Replay] = {}

    def run(self, op: Op, call: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        """Return `call(*inputs)`: captured the first time, replayed later, or just computed if its kind is not captured."""
        if op.kind not in self._kinds:
            return call(*inputs)
        key = op._replace(micro_batch=0)
        if (replay := self._replays.get(key)) is not None:
            return replay(inputs)
        results, self._replays[key] = self._recorder.record(self._number, key, call, inputs)
        return results


class CapturedOps(OpGraphs):
    """Ops of a micro-batch that has a slot. Autograd's graphs are there only while ops are captured."""

    def __init__(self, slot: Slot, *args: Any):
        super().__init__(*args)
        self._slot = slot

    def compute(self, op: Op, compute: Compute, *inputs: Tensor, beside: Sequence[Tensor] = ()) -> Computed:
        def call(*given: Tensor) -> Computed:
            return super(CapturedOps, self).compute(op, compute, *given[: len(inputs)], beside=given[len(inputs) :])

        return self._run(op, call, [*inputs, *beside])

    def compute_again(self, op: Op, *inputs: Tensor) -> Computed:
        again = super().compute_again
        return self._run(op._replace(direction="R"), lambda *given: again(op, *given), inputs)

    def differentiate(self, op: Op, gradients: Sequence[Tensor]) -> list[Tensor]:
        differentiate = super().differentiate
        return self._run(op, lambda *given: differentiate(op, given), gradients)

    def add_left(self, op: Op) -> None:
        add_left = super().add_left
        self._run(op, lambda: add_left(op), ())

    def _run(self, op: Op, call: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        self.begin()
        return self._slot.run(op, call, inputs)


class Captures:
    """What is captured of a rank's steps: nothing in the first ones, then all of one list.

    Args:
        kinds: the kinds of ops that are captured.
        checks: whether the step that captures and the one that replays first also run without graphs, to be compared.
    """

    def __init__(self, recorder: Recorder, kinds: Iterable[str], checks: bool = False):
        self._recorder, self._kinds, self._checks = recorder, frozenset(kinds), checks
        self._steps = 0  # of this list, without those that are traced
        self._slots: dict[int, Slot] = {}
        self._shapes: Any = None
        self._held: Any = None

    def forget(self) -> None:
        """Forget what was captured. Another list begins."""
        self._steps = 0
        self._drop()

    def begin(self, traced: bool) -> bool:
        """Say that a step of training begins, and return whether it is to run without graphs as well, first.

        All ranks return the same, so that both runs communicate on all of them.
        """
        self._steps += not traced  # a step that captures would show no times of ops
        return self._checks and not traced and EAGER_STEPS < self._steps <= EAGER_STEPS + 2

    def slots(self, model: Transformer, order: Sequence[Op], batches: Sequence[Batch], traced: bool) -> dict[int, Slot]:
        """Return the slots of a step by micro-batch; none if the step runs without graphs."""
        shapes = {batch.token_BL.shape for batch in batches}  # a rank may get fewer sequences than before, or none
        if self._slots and shapes != self._shapes:
            self._drop()
        if self._steps > EAGER_STEPS and not traced and not self._slots and len(shapes) == 1 and batches[0].token_BL.numel():
            numbers = slots_of([op for op in order if op.kind in self._kinds])
            made = {number: Slot(self._recorder, number, self._kinds) for number in numbers.values()}
            self._slots = {micro_batch: made[number] for micro_batch, number in numbers.items()}
            self._shapes = shapes
            self._held = model.places(batches[0])  # sequences of another length must not free what graphs read
        return self._slots

    def _drop(self) -> None:
        self._slots, self._held = {}, None
        self._recorder.forget()


def compare(model: Transformer, eager: Mapping[nn.Parameter, Tensor], replayed: Mapping[nn.Parameter, Tensor]) -> None:
    """Compare the gradients of a step without graphs and with them.

    The kernels are the same. Those that add in any order leave small differences. A gradient that is not finite says nothing.

    Raises:
        UserError: the gradients of a parameter differ.
    """
    for name, parameter in model.trained():
        difference, norm = (eager[parameter] - replayed[parameter]).norm(), eager[parameter].norm()
        if norm.isfinite() and not difference <= MOST_DIFFERENCE * norm:
            share = float(difference / norm)
            rule = f"found that captured ops compute another gradient of {name}: it differs by {share:.2g} of its norm"
            raise UserError("schedule.graphs", "check", rule, ["off"])


def slots_of(order: Sequence[Op]) -> dict[int, int]:
    """Return the slot of each micro-batch of a list: the lowest one that is free when it begins, and has its order of ops."""
    orders = defaultdict[int, list[Op]](list)
    for op in order:
        orders[op.micro_batch].append(op._replace(micro_batch=0))
    slots, free, firsts = dict[int, int](), set[int](), list[int]()  # firsts: the first micro-batch of each slot
    left = {micro_batch: len(ops) for micro_batch, ops in orders.items()}
    for op in order:
        here = op.micro_batch
        if here not in slots:
            slots[here] = min((slot for slot in free if orders[firsts[slot]] == orders[here]), default=len(firsts))
            if slots[here] == len(firsts):
                firsts.append(here)
            free.discard(slots[here])
        left[here] -= 1
        if not left[here]:
            free.add(slots[here])
    return slots
