"""Functions of routers for GPUs, in few kernels where torch's own take dozens. `routing_kernels.py` has their kernels.

Every function is deterministic: programs write partial sums, which one more kernel adds up in a fixed order.

Legend: B sequences, s positions of a piece, T = B · s tokens, K experts per token, E experts, M = T · K assignments, N rows, P
programs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foldray.kernels import fused
from foldray.kernels.fused import blocks, launch, power_of_two

MOST_EXPERTS = 1024  # of which one program compares all
_TILE = 2048  # numbers of a tile, 16 for each thread of four warps
_ROWS = 64  # assignments of a program


class GateRule(NamedTuple):
    """How a gate chooses and weighs (`RouterSpec`).

    Args:
        sigmoid: whether scores are sigmoids of the logits, else their softmax.
        last: whether top-k compares the logits, and the softmax of the chosen ones are the weights.
        normalize: whether the weights of a token sum to 1.
        scale: a factor on all weights.
    """

    topk: int
    sigmoid: bool
    last: bool
    normalize: bool
    scale: float


class Gated(NamedTuple):
    """What a gate has chosen, int64 and float32 [T, K], and its sums for the balance losses, as `moe.router.Tally` has them."""

    expert_TK: Tensor
    weight_TK: Tensor
    count_BE: Tensor
    score_BE: Tensor
    z: Tensor


def gates(logits_TE: Tensor) -> bool:
    """Whether `gate` takes these logits."""
    return fused.fits(logits_TE) and logits_TE.dtype == torch.float32 and 0 < logits_TE.numel() <= len(logits_TE) * MOST_EXPERTS


def sorts(expert_TK: Tensor) -> bool:
    """Whether `sort` and `pad` take these numbers."""
    return expert_TK.is_cuda and fused.has_triton()


def gate(logits_TE: Tensor, bias_E: Tensor, sequences: int, rule: GateRule) -> Gated:
    """Choose experts by float32 logits and a bias of the scores, of which the first of equal ones, and weigh them.

    Weights, score_BE and z have gradients. There must be tokens, and at most `MOST_EXPERTS` experts.
    """
    return Gated(*_Gate.apply(logits_TE, bias_E, sequences, rule))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, bias_E: Tensor, sequences: int, rule: GateRule) -> tuple[Tensor, ...]:
        logits_TE = logits_TE.contiguous()
        (tokens, experts), length = logits_TE.shape, logits_TE.shape[0] // sequences
        expert_TK = torch.empty(tokens, rule.topk, dtype=torch.int64, device=logits_TE.device)
        weight_TK = logits_TE.new_empty(tokens, rule.topk)
        together, constants = _tiles(experts, rule)
        parts = blocks(length, together)
        sums = logits_TE.new_empty(sequences * parts, experts)
        counts, squares = torch.empty_like(sums, dtype=torch.int32), sums.new_empty(len(sums))
        tensors = (logits_TE, bias_E, expert_TK, weight_TK, sums, counts, squares)
        _run("gate", (parts, sequences), *tensors, length, experts, rule.scale, *constants)
        score_BE, z = sums.new_empty(sequences, experts), sums.new_empty(())
        count_BE = torch.empty_like(score_BE, dtype=torch.int64)
        numbers = (parts, experts, len(sums), 128, 16)
        _run("gate_sums", (blocks(experts, 16), sequences), sums, counts, squares, score_BE, count_BE, z, *numbers)
        ctx.sequences, ctx.rule = sequences, rule
        ctx.save_for_backward(logits_TE, expert_TK)
        ctx.mark_non_differentiable(expert_TK, count_BE)
        ctx.set_materialize_grads(False)  # gradients of zeros for whole numbers would take two kernels
        return expert_TK, weight_TK, count_BE, score_BE, z

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _: Any, dweight_TK: Tensor | None, __: Any, dscore_BE: Tensor | None, dz: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        logits_TE, expert_TK = ctx.saved_tensors
        experts, length = logits_TE.shape[1], logits_TE.shape[0] // ctx.sequences
        dlogits_TE = torch.empty_like(logits_TE)
        together, constants = _tiles(experts, ctx.rule)
        slopes = [
            logits_TE.new_zeros(shape) if slope is None else slope.contiguous()
            for slope, shape in ((dweight_TK, expert_TK.shape), (dscore_BE, (ctx.sequences, experts)), (dz, ()))
        ]
        grid, numbers = (blocks(length, together), ctx.sequences), (length, experts, ctx.rule.scale)
        _run("gate_backward", grid, logits_TE, expert_TK, *slopes, dlogits_TE, *numbers, *constants)
        return dlogits_TE, None, None, None


def sort(expert_TK: Tensor, keep_TK: Tensor | None, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Do as `permutation.sort_by_expert`, but return a token for every assignment. Those behind the rows are any numbers."""
    token_M = torch.empty(expert_TK.numel(), dtype=torch.int64, device=expert_TK.device)
    position_TK, count_E = _place(expert_TK, keep_TK, experts, token_M, None)
    return token_M, position_TK, count_E


def pad(expert_TK: Tensor, keep_TK: Tensor | None, experts: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Do as `permutation.pad_by_expert`."""
    token_N = torch.full((experts * capacity,), len(expert_TK), device=expert_TK.device)
    return token_N, _place(expert_TK, keep_TK, experts, token_N, capacity)[0]


def _place(
    expert_TK: Tensor, keep_TK: Tensor | None, experts: int, token_N: Tensor, capacity: int | None
) -> tuple[Tensor, Tensor]:
    """Fill the tokens of rows. Return the row of each assignment, and the number of each expert's."""
    expert_TK, keep_TK = expert_TK.contiguous(), None if keep_TK is None else keep_TK.contiguous()
    total, programs = expert_TK.numel(), max(1, blocks(expert_TK.numel(), _ROWS))
    count_PE = torch.empty(programs, experts, dtype=torch.int32, device=expert_TK.device)
    count_E, position_TK = torch.empty(experts, dtype=torch.int64, device=expert_TK.device), torch.empty_like(expert_TK)
    columns = min(_ROWS, power_of_two(experts))
    _run("count_by_expert", (programs,), expert_TK, keep_TK, count_PE, total, experts, _ROWS, columns)
    _run("scan_by_expert", (blocks(experts, 16),), count_PE, count_E, programs, experts, 256, 16)
    tensors = (expert_TK, keep_TK, count_PE, count_E, token_N, position_TK)
    constants = (max(1, expert_TK.shape[1]), capacity is not None, _ROWS, columns)
    _run("place_by_expert", (programs,), *tensors, total, capacity or 0, experts, *constants)
    return position_TK, count_E


def _tiles(experts: int, rule: GateRule) -> tuple[int, tuple[Any, ...]]:
    """Return the tokens of a program, and the constants of a gate's kernels."""
    columns = power_of_two(experts)
    together = max(1, _TILE // columns)
    return together, (rule.topk, rule.sigmoid, rule.last, rule.normalize, together, columns, power_of_two(rule.topk))


def _run(kernel: str, grid: tuple[int, ...], first: Tensor, *others: Any) -> None:
    launch(kernel, grid, first, *others, module="routing_kernels")
