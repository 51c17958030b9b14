"""The autograd graphs of a micro-batch's ops, from forward to backward, and the gradients of weights that wait for their op.

The graph of an op begins at its inputs and ends at its results. It keeps only what its backward needs. Between ops that cut the
same tokens differently, a token buffer keeps the pieces (FoldMoE, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from foldray.comm import Pending
from foldray.graph import Op, StepGraph
from foldray.kernels.autograd import ByHand, Task
from foldray.kinds import ATTENTION, PROJECT
from foldray.model import Transformer
from foldray.runtime.kept import HostMemory, Kept


class TokenBuffer:
    """Activations [B, s, H], or their gradient. Ops put pieces in and take other pieces out, every token once.

    A piece that is taken just as it was put is not copied. The buffer frees a piece once all of its tokens are taken.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[range, torch.Tensor]] = []
        self._left: list[int] = []  # tokens of each piece that are still to be taken
        self._coming: list[tuple[range, Pending]] = []

    def put(self, tokens: range, x_BsH: torch.Tensor) -> None:
        self._pieces.append((tokens, x_BsH))
        self._left.append(len(tokens))

    def put_later(self, tokens: range, pending: Pending) -> None:
        """Put a piece that is still on its way. `take` waits for it if it needs any of its tokens."""
        self._coming.append((tokens, pending))

    def take(self, tokens: range) -> torch.Tensor:
        """Take these tokens out: [B, len(tokens), H].

        Raises:
            RuntimeError: some of the tokens are not in the buffer.
        """
        coming = [piece for piece in self._coming if piece[0].start < tokens.stop and tokens.start < piece[0].stop]
        for held, pending in coming:
            self._coming.remove((held, pending))
            self.put(held, *pending.wait())
        taken: list[tuple[int, torch.Tensor]] = []
        for number, (held, x_BsH) in enumerate(self._pieces):
            start, stop = max(held.start, tokens.start), min(held.stop, tokens.stop)
            if start < stop:
                whole = stop - start == len(held)
                taken.append((start, x_BsH if whole else x_BsH[:, start - held.start : stop - held.start]))
                self._left[number] -= stop - start
        if sum(x_BsH.shape[1] for _, x_BsH in taken) != len(tokens):
            raise RuntimeError(f"tokens {tokens.start}…{tokens.stop - 1} are not all here")
        kept = [number for number, left in enumerate(self._left) if left]
        self._pieces, self._left = [self._pieces[number] for number in kept], [self._left[number] for number in kept]
        parts = [x_BsH for _, x_BsH in sorted(taken, key=lambda part: part[0])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class Computed(NamedTuple):
    """The results of an op.

    Args:
        ends: tensors that may have a gradient. Whole numbers among them have none.
    """

    ends: Sequence[torch.Tensor]
    aside: Any = None


class ComputesByHand(NamedTuple):
    """Computes the one result of an op without autograd."""

    run: Callable[..., ByHand]

    def __call__(self, *inputs: torch.Tensor) -> Computed:
        return Computed([self.run(*inputs).result])


Compute = Callable[..., Computed] | ComputesByHand


class _Input(NamedTuple):
    """An input of an op: the end of its graph, and what a gradient of zeros would be like."""

    edge: GradientEdge
    like: tuple[torch.Size, torch.dtype, torch.device]

    def zeros(self) -> torch.Tensor:
        shape, dtype, device = self.like
        return torch.zeros(shape, dtype=dtype, device=device)


class _Source(torch.autograd.Function):
    """Begins the graph of an op at an input. The graph of a leaf would keep the input, even if no backward needs it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        return None, None


class OpGraph(NamedTuple):
    """The autograd graph of an op, which its backward needs.

    Args:
        ends: edges of the results; None for a result without a gradient. An edge does not keep the result in memory.
        inputs: the edges at which the gradients of the inputs are taken. They do not keep the inputs either.
    """

    ends: list[GradientEdge | None]
    inputs: list[_Input]

    def differentiate(
        self, gradients: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]
    ) -> tuple[list[torch.Tensor], Sequence[torch.Tensor | None]]:
        """Return the gradients of the inputs, and those of parameters; None for a parameter that was not used.

        Args:
            gradients: the gradients of the results, but not of whole numbers. Nor do these have gradients among the inputs.
        """
        ends = [(edge, gradient) for edge, gradient in zip(self.ends, gradients, strict=False) if edge is not None]
        wanted: list[Any] = [*(source.edge for source in self.inputs), *parameters]
        if not wanted:  # all weights are frozen
            return [], []
        results = torch.autograd.grad([edge for edge, _ in ends], wanted, [gradient for _, gradient in ends], allow_unused=True)
        count = len(self.inputs)
        input_gradients = [
            source.zeros() if part is None else part for source, part in zip(self.inputs, results[:count], strict=True)
        ]
        return input_gradients, results[count:]


class HandGraph(NamedTuple):
    """The backward of an op that was computed without autograd. It differentiates as `OpGraph` does."""

    backward: Callable[[torch.Tensor], tuple[list[torch.Tensor], dict[nn.Parameter, torch.Tensor]]]

    def differentiate(
        self, gradients: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]
    ) -> tuple[list[torch.Tensor], Sequence[torch.Tensor | None]]:
        with torch.no_grad():
            input_gradients, parts = self.backward(*gradients)
        return input_gradients, [parts.get(parameter) for parameter in parameters]


def build(
    compute: Compute, inputs: Sequence[torch.Tensor], beside: Sequence[torch.Tensor] = ()
) -> tuple[Computed, OpGraph | HandGraph]:
    """Return the detached results of `compute(*inputs, *beside)`, and the graph that goes back to the inputs."""
    if isinstance(compute, ComputesByHand):
        with torch.no_grad():
            result, backward = compute.run(*inputs)
        return Computed([result]), HandGraph(backward)
    with torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True)
        sources = [_Source.apply(anchor, x.detach()) if x.is_floating_point() else x for x in inputs]
        results, aside = compute(*sources, *beside)
    edges = [get_gradient_edge(x) if x.requires_grad else None for x in results if x.is_floating_point()]
    starts = [_Input(get_gradient_edge(x), (x.shape, x.dtype, x.device)) for x in sources if x.is_floating_point()]
    return Computed([result.detach() for result in results], aside), OpGraph(edges, starts)


SumOf = Callable[[nn.Parameter], torch.Tensor]
"""Returns the sum of a parameter's gradients, to which ops add."""


class _Inputs(NamedTuple):
    """The inputs of an op with a gradient, and those without."""

    inputs: Sequence[torch.Tensor]
    beside: Sequence[torch.Tensor]


class _Built(NamedTuple):
    """The graph of an op, and the gradients of weights that its backward leaves for later."""

    graph: OpGraph | HandGraph
    left: list[Task]


class OpGraphs:
    """Computes ops and their gradients.

    Args:
        training: whether ops go backward.
        now: returns the moment that `began` has.
        host: where some kinds of ops keep what their backward needs; None if none do (`StepGraph.offloaded`).

    Attributes:
        began: the moment at which the last op that computes began to compute, after all waiting.
    """

    def __init__(
        self,
        model: Transformer,
        graph: StepGraph,
        sum_of: SumOf,
        training: bool = True,
        now: Callable[[], Any] = perf_counter,
        host: HostMemory | None = None,
    ):
        self.model, self.graph, self.sum_of, self.training, self.now = model, graph, sum_of, training, now
        self._graphs: dict[Op, _Built] = {}  # by forward op
        self._later: dict[Op, list[Task]] = {}  # by the op that computes these gradients of weights
        self._again: dict[Op, tuple[Compute, _Inputs]] = {}  # by forward op that will run again
        self._host = host
        self._kept: dict[Op, Kept] = {}  # by the op that brings it to the host
        self.begin()

    def begin(self) -> None:
        """Say that an op begins to compute."""
        self.began = self.now()

    def compute(self, op: Op, compute: Compute, *inputs: torch.Tensor, beside: Sequence[torch.Tensor] = ()) -> Computed:
        """Compute the results of an op, detached from its graph: `compute(*inputs, *beside)`.

        `compute` reads no other tensors that a batch brings, or that are made anew for it, but for the results of earlier ops.

        Args:
            beside: inputs without a gradient.
        """
        for left in self.graph.left_before(op):
            self._kept[left].let_go()
        self.begin()
        if not self.training or op.kind in self.graph.again:
            if self.training:
                # Attention that runs again takes its queries from projections that run again.
                self._again[op] = compute, _Inputs(() if op.kind == ATTENTION and self.graph.gathers else inputs, beside)
            with torch.no_grad():
                return compute(*inputs, *beside)
        return self._build(op, compute, _Inputs(inputs, beside))

    def compute_again(self, op: Op, *inputs: torch.Tensor) -> Computed:
        """Compute the results of a forward op again, and keep its graph for its backward.

        Args:
            inputs: its inputs; none are those of the first time.
        """
        self.begin()
        compute, first = self._again.pop(op)
        return self._build(op, compute, first._replace(inputs=inputs) if inputs else first)

    def _build(self, op: Op, compute: Compute, given: _Inputs) -> Computed:
        # On a GPU, products of weights' gradients add to the sums themselves, after the rest of the op's backward.
        later = self.model.later.collect(bool(self.graph.weights(op)) or next(self.model.parameters()).is_cuda)
        with later as left, nullcontext() if (kept := self._kept_for(op)) is None else kept.hooks():
            computed, graph = build(compute, *given)
        self._graphs[op] = _Built(graph, left)
        return computed

    def move(self, op: Op) -> Pending:
        """Start to bring to the host what ops keep for their backward, or to fetch it: run an `offload`."""
        return self._kept[op].send() if op.direction == "F" else self._kept[op._replace(direction="F")].fetch()

    def _kept_for(self, op: Op) -> Kept | None:
        """Return where a forward op keeps what its backward needs, if that goes to the host."""
        if (offload := self.graph.offload_of(op)) is None:
            return None
        if offload not in self._kept:
            assert self._host is not None, f"{op} keeps what it needs on the host, and there is none"
            self._kept[offload] = self._host.keep(offload.part)
        return self._kept[offload]

    def differentiate(self, op: Op, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of an op's inputs, given those of its results, and add the gradients of its parameters.

        The gradients of weights may be left to an op of their own (W).
        """
        graph, left = self._graphs.pop(op._replace(direction="F"))
        if (kept := self._kept_for(op)) is not None:
            kept.wait()
        self.begin()
        parameters = self.model.parameters_of(ATTENTION if op.kind == PROJECT else op.kind, op.layer)
        input_gradients, parts = graph.differentiate(gradients, parameters)
        del graph  # what it keeps must be gone before gradients of weights are made
        for parameter, part in zip(parameters, parts, strict=True):
            if part is not None:
                self.sum_of(parameter).add_(part)
        if ops := self.graph.weights(op):
            for later_op in ops:
                self._later.setdefault(later_op, []).extend(left)
            left.clear()  # nodes of the graph may hold this list
        else:
            self._add_all(left)
        return input_gradients

    def add_left(self, op: Op) -> None:
        """Compute the gradients of weights that the backward of an op has left, and add them."""
        self.begin()
        self._add_all(self._later.pop(op))

    def _add_all(self, tasks: list[Task]) -> None:
        while tasks:  # the list must not keep what a task is computed from; nodes of the graph may hold the list
            task = tasks.pop(0)
            task.add(self.sum_of(task.weight))
