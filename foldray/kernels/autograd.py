"""Ops whose backward is not autograd's own: it computes again, in a wider type, or later.

Cheap results are computed again instead of kept. The product of a router has narrow inputs, and its results are not rounded to
their type.

Gradients of weights may be computed later than those of inputs. A product y = x @ W has two gradients. The op before waits
for that of x. Nothing in a step waits for that of W before the sum over ranks, so a schedule may compute it whenever a rank
would be idle (ZB-H1 in Zero Bubble Pipeline Parallelism, arXiv:2401.10241; Lancet, arXiv:2404.19429, puts it under
all-to-alls).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from foldray.kernels import fused


def keeping_inputs(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return `compute(*inputs)`, and keep only the inputs for backward. Backward calls `compute` again first."""
    return _KeepingInputs.apply(compute, *inputs)


def all_keeping_inputs(compute: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the several results of `compute(*inputs)`, as `keeping_inputs` does."""
    return _KeepingInputs.apply(compute, *inputs)


class _KeepingInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.compute = compute
        ctx.save_for_backward(*inputs)
        return compute(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_results: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [tensor.detach().requires_grad_(needs) for tensor, needs in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            computed = ctx.compute(*inputs)
        results = computed if isinstance(computed, tuple) else (computed,)
        gradients = iter(torch.autograd.grad(results, [tensor for tensor in inputs if tensor.requires_grad], of_results))
        return None, *(next(gradients) if needs else None for needs in needed)


class ByHand(NamedTuple):
    """A result that was computed without autograd.

    Args:
        backward: takes the gradient of the result. Returns those of the inputs, and those of weights that are not left for later.
    """

    result: Tensor
    backward: Callable[[Tensor], tuple[list[Tensor], dict[nn.Parameter, Tensor]]]


def by_hand(function: type[torch.autograd.Function], *inputs: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Any, ...]]]:
    """Compute a function without autograd, and return its result and its backward.

    It saves the host the nodes of autograd around the function.
    """
    ctx = _Context(tuple(not isinstance(x, nn.Parameter) or x.requires_grad for x in inputs))
    return function.forward(ctx, *inputs), partial(function.backward, ctx)


class _Context:
    """What a function keeps for its backward."""

    saved_tensors: tuple[Tensor | None, ...] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def wide_product(x_TH: Tensor, weight_HE: Tensor) -> Tensor:
    """Return x @ weight in float32, or in the inputs' type if that is wider: [T, H] → [T, E]. Only the inputs are kept."""
    if x_TH.is_cuda and x_TH.dtype == weight_HE.dtype == torch.bfloat16:
        return _WideProduct.apply(x_TH, weight_HE)
    dtype = at_least_float32(x_TH)
    return keeping_inputs(lambda x_TH, weight_HE: x_TH.to(dtype) @ weight_HE.to(dtype), x_TH, weight_HE)


class _WideProduct(torch.autograd.Function):
    """The product of bfloat16 tensors with float32 sums.

    On a GPU this is 5 to 14 times as fast as a product of float32 tensors (H100, 8192 tokens). The products of two bfloat16
    numbers are exact in float32, so only the order of the sums differs. The gradient is split into two bfloat16 numbers,
    which together have 16 digits.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_HE: Tensor) -> Tensor:
        ctx.save_for_backward(x_TH, weight_HE)
        return torch.mm(x_TH, weight_HE, out_dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TE: Tensor) -> tuple[Tensor, Tensor | None]:
        x_TH, weight_HE = ctx.saved_tensors
        both_TE = _halves(gradient_TE)
        dx_TH = both_TE @ torch.cat((weight_HE, weight_HE), dim=1).t()
        if not ctx.needs_input_grad[1]:
            return dx_TH, None
        high_HE, low_HE = torch.mm(x_TH.t(), both_TE, out_dtype=torch.float32).chunk(2, dim=1)
        return dx_TH, (high_HE + low_HE).to(weight_HE.dtype)


def _halves(x_TE: Tensor) -> Tensor:
    """Split float32 numbers into sums of two bfloat16 numbers, side by side: [T, E] → [T, 2 · E]."""
    if fused.fits(x_TE):
        return fused.halves(x_TE)
    high_TE = x_TE.bfloat16()
    return torch.cat((high_TE, (x_TE - high_TE).bfloat16()), dim=1)


Add = Callable[[Tensor], None]
"""Computes the gradient of a weight and adds it to a sum: a contiguous tensor of the weight's shape, at least float32."""

Leave = Callable[..., None]
"""Leaves the gradients of some weights for later. It takes an `Add` for each of them."""


class Task(NamedTuple):
    """The gradient of a weight, not computed yet. The task keeps what it is computed from in memory."""

    weight: nn.Parameter
    add: Add


class Later:
    """Says whether the products of a model leave gradients of weights for later. All modules of a model share one."""

    def __init__(self) -> None:
        self._tasks: list[Task] | None = None

    @contextmanager
    def collect(self, some: bool = True) -> Iterator[list[Task]]:
        """Have the products in this context leave the gradients of their weights, if `some` are to be left.

        Their backward appends them to the list.
        """
        left: list[Task] = []
        before, self._tasks = self._tasks, left if some else None
        try:
            yield left
        finally:
            self._tasks = before

    def leaver(self, *weights: nn.Parameter) -> Leave | None:
        """Return what leaves the gradients of these weights for later; None outside of `collect`, or if they are frozen."""
        if (tasks := self._tasks) is None or not all(weight.requires_grad for weight in weights):
            return None
        return lambda *adds: tasks.extend(map(Task, weights, map(torch.no_grad(), adds)))


def add_product(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """Add a @ b to a sum. On a GPU the product itself adds, and rounds nothing to the type of a and b."""
    if a_MK.is_cuda and a_MK.dtype != sum_MN.dtype:
        torch.ops.aten.addmm.dtype_out(sum_MN, a_MK, b_KN, sum_MN.dtype, out=sum_MN)
    else:
        sum_MN += a_MK @ b_KN


def product(x: Tensor, weight: nn.Parameter, later: Later, transposed: bool = False, columns: slice | None = None) -> Tensor:
    """Return x @ weight, or x @ weight.T if `transposed`: [..., in] → [..., out].

    Args:
        columns: the columns of the weight that are used; None is all.
    """
    leave = later.leaver(weight)
    if leave is None:
        return x @ _used(weight, transposed, columns)
    return _Product.apply(x, weight, leave, transposed, columns)


def _used(weight: Tensor, transposed: bool, columns: slice | None) -> Tensor:
    weight = weight if columns is None else weight[:, columns]
    return weight.t() if transposed else weight


class _Product(torch.autograd.Function):
    """A product whose backward leaves the gradient of the weight for later. Both gradients have the bits of autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, leave: Leave, transposed: bool, columns: slice | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.leave, ctx.transposed, ctx.columns = leave, transposed, columns
        return x @ _used(weight, transposed, columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x, weight), transposed, columns = ctx.saved_tensors, ctx.transposed, ctx.columns
        x = x.detach()  # with its history, it would keep the whole graph of the op

        def add(total: Tensor) -> None:
            x_TI, dy_TO = x.flatten(0, -2), dy.flatten(0, -2)
            total = total if columns is None else total[:, columns]
            add_product(total, *((dy_TO.t(), x_TI) if transposed else (x_TI.t(), dy_TO)))

        ctx.leave(add)
        return dy @ _used(weight, not transposed, columns), None, None, None, None
