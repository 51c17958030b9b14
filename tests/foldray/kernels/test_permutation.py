"""Tests of sorting, copying and summing rows, against plain indexing."""

from __future__ import annotations

import pytest
import torch

from foldray.kernels.permutation import combine, pad_by_expert, permute, sort_by_expert, sum_rows

TOKENS, TOPK, EXPERTS, HIDDEN = 23, 3, 7, 5
DROPS = [0.0, 0.3, 1.0]


def routes(drop: float, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return expert_TK, whose rows have no expert twice, and keep_TK (None if nothing can be dropped)."""
    generator = torch.Generator().manual_seed(5)
    expert_TK = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOPK]
    return expert_TK, torch.rand(tokens, TOPK, generator=generator) >= drop if drop else None


def values(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 2) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).requires_grad_()


def naive_combine(y_NH: torch.Tensor, position_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
    rows = []
    for positions, weights in zip(position_TK.tolist(), weight_TK, strict=True):
        total = torch.zeros(y_NH.shape[1], dtype=y_NH.dtype)
        for n, weight in zip(positions, weights, strict=True):
            if n >= 0:
                total = total + weight * y_NH[n]
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("drop", DROPS)
def test_sort_by_expert(drop: float) -> None:
    expert_TK, keep_TK = routes(drop)
    token_N, position_TK, counts_E = sort_by_expert(expert_TK, keep_TK, EXPERTS)
    kept = [[keep_TK is None or bool(keep_TK[t, k]) for k in range(TOPK)] for t in range(TOKENS)]
    want = sorted((int(expert_TK[t, k]), t, k) for t in range(TOKENS) for k in range(TOPK) if kept[t][k])
    assert token_N.tolist() == [t for _, t, _ in want]
    assert counts_E.tolist() == [sum(e == expert for e, _, _ in want) for expert in range(EXPERTS)]
    rows = {(t, k): n for n, (_, t, k) in enumerate(want)}
    assert position_TK.tolist() == [[rows.get((t, k), -1) for k in range(TOPK)] for t in range(TOKENS)]


@pytest.mark.parametrize("drop", DROPS)
def test_a_number_of_kept_assignments_that_is_known_changes_nothing(drop: float) -> None:
    expert_TK, keep_TK = routes(drop)
    found = sort_by_expert(expert_TK, keep_TK, EXPERTS)
    for one, other in zip(found, sort_by_expert(expert_TK, keep_TK, EXPERTS, int(found[2].sum())), strict=True):
        assert torch.equal(one, other)


def test_sort_without_tokens() -> None:
    token_N, position_TK, counts_E = sort_by_expert(torch.zeros(0, 2, dtype=torch.int64), None, 3)
    assert (token_N.numel(), position_TK.shape, counts_E.tolist()) == (0, (0, 2), [0, 0, 0])


@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("tokens", [TOKENS, 0])
def test_pad_by_expert(drop: float, tokens: int) -> None:
    """Every expert has equally many rows: first those of `sort_by_expert`, then rows of zeros without a token."""
    expert_TK, keep_TK = routes(drop, tokens)
    sorted_N, _, counts_E = sort_by_expert(expert_TK, keep_TK, EXPERTS)
    capacity = max(counts_E.tolist()) + 1
    token_N, position_TK = pad_by_expert(expert_TK, keep_TK, EXPERTS, capacity)
    for tokens_C, tokens_n in zip(token_N.split(capacity), sorted_N.split(counts_E.tolist()), strict=True):
        assert tokens_C.tolist() == tokens_n.tolist() + [tokens] * (capacity - len(tokens_n))
    for t, k in ((t, k) for t in range(tokens) for k in range(TOPK)):
        kept, position = keep_TK is None or bool(keep_TK[t, k]), int(position_TK[t, k])
        assert (position // capacity == expert_TK[t, k] and token_N[position] == t) if kept else position == -1

    x_TH = values(tokens, HIDDEN)
    rows_NH = permute(x_TH, token_N, position_TK, gaps=True)
    assert torch.equal(rows_NH, torch.cat([x_TH, x_TH.new_zeros(1, HIDDEN)])[token_N])
    drows_NH = values(*rows_NH.shape, seed=3).detach()
    used = token_N < tokens
    (got,) = torch.autograd.grad(rows_NH, x_TH, drows_NH)
    torch.testing.assert_close(got, torch.zeros_like(x_TH).index_add(0, token_N[used], drows_NH[used]))


@pytest.mark.parametrize("what", [combine, permute])
def test_without_drops_nothing_changes_if_none_is_said_to_be_possible(what) -> None:
    token_N, position_TK, _ = sort_by_expert(*routes(0.0), EXPERTS)
    x, weight_TK, results = values(TOKENS * TOPK if what is combine else TOKENS, HIDDEN), values(TOKENS, TOPK, seed=4), []
    for drops in (False, True):
        made = (
            combine(x, position_TK, weight_TK, drops=drops) if what is combine else permute(x, token_N, position_TK, drops=drops)
        )
        results.append((made, *torch.autograd.grad(made.square().sum(), [x, weight_TK][: 1 + (what is combine)])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("drop", DROPS)
def test_permute(drop: float) -> None:
    token_N, position_TK, _ = sort_by_expert(*routes(drop), EXPERTS)
    x_TH = values(TOKENS, HIDDEN)
    assert torch.equal(permute(x_TH, token_N, position_TK), x_TH[token_N])
    dx_NH = values(token_N.numel(), HIDDEN, seed=3).detach()
    (got,) = torch.autograd.grad(permute(x_TH, token_N, position_TK), x_TH, dx_NH)
    torch.testing.assert_close(got, torch.zeros_like(x_TH).index_add(0, token_N, dx_NH))
    if token_N.numel():
        assert torch.autograd.gradcheck(lambda x: permute(x, token_N, position_TK), x_TH)


@pytest.mark.parametrize("drop", DROPS)
def test_combine(drop: float) -> None:
    token_N, position_TK, _ = sort_by_expert(*routes(drop), EXPERTS)
    y_NH, weight_TK = values(token_N.numel(), HIDDEN), values(TOKENS, TOPK, seed=4)
    want = naive_combine(y_NH, position_TK, weight_TK)
    torch.testing.assert_close(combine(y_NH, position_TK, weight_TK), want)
    if token_N.numel():
        dout_TH = values(TOKENS, HIDDEN, seed=3).detach()
        grads = [torch.autograd.grad(out, (y_NH, weight_TK), dout_TH) for out in (combine(y_NH, position_TK, weight_TK), want)]
        torch.testing.assert_close(grads[0], grads[1])
        assert torch.autograd.gradcheck(lambda y, w: combine(y, position_TK, w), (y_NH, weight_TK))


@pytest.mark.parametrize("drop", DROPS)
def test_sum_rows_is_the_transpose_of_permute(drop: float) -> None:
    token_N, position_TK, _ = sort_by_expert(*routes(drop), EXPERTS)
    y_NH, x_TH = values(token_N.numel(), HIDDEN), values(TOKENS, HIDDEN, seed=4)
    out_TH = sum_rows(y_NH, token_N, position_TK)
    torch.testing.assert_close(out_TH, naive_combine(y_NH, position_TK, torch.ones(TOKENS, TOPK, dtype=torch.float64)))
    rows_NH = permute(x_TH, token_N, position_TK)
    torch.testing.assert_close((out_TH * x_TH).sum(), (rows_NH * y_NH).sum())
    assert torch.equal(torch.autograd.grad(out_TH, y_NH, x_TH)[0], rows_NH)


def test_dropped_assignments_get_no_gradient() -> None:
    expert_TK, keep_TK = routes(0.3)
    assert keep_TK is not None
    token_N, position_TK, _ = sort_by_expert(expert_TK, keep_TK, EXPERTS)
    weight_TK = values(TOKENS, TOPK)
    combine(values(token_N.numel(), HIDDEN), position_TK, weight_TK).sum().backward()
    assert weight_TK.grad is not None
    assert torch.equal(weight_TK.grad != 0, keep_TK)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 4])
def test_no_rows_still_have_gradients(tokens: int, dtype: torch.dtype) -> None:
    """Test the cases that every assignment is dropped, and that there is no token."""
    position_TK, token_N = torch.full((tokens, 2), -1), torch.zeros(0, dtype=torch.int64)
    x_TH, weight_TK = values(tokens, HIDDEN, dtype=dtype), values(tokens, 2, dtype=dtype)
    out_TH = combine(permute(x_TH, token_N, position_TK), position_TK, weight_TK)
    assert torch.equal(out_TH, torch.zeros(tokens, HIDDEN, dtype=dtype))
    for grad, value in zip(torch.autograd.grad(out_TH.sum(), (x_TH, weight_TK)), (x_TH, weight_TK), strict=True):
        assert torch.equal(grad, torch.zeros_like(value))


def test_rows_nobody_asked_for() -> None:
    """Experts that are padded to a capacity make rows without assignments: five more, and one in place of a drop."""
    for rows, position in ((9, [[0, 4], [8, 2]]), (4, [[0, 3], [-1, 2]])):
        position_TK, y_NH, weight_TK = torch.tensor(position), values(rows, HIDDEN), values(2, 2, seed=4)
        torch.testing.assert_close(combine(y_NH, position_TK, weight_TK), naive_combine(y_NH, position_TK, weight_TK))
        (dy_NH,) = torch.autograd.grad(combine(y_NH, position_TK, weight_TK).sum(), y_NH)
        used = [n in position_TK for n in range(rows)]
        assert (dy_NH.abs().sum(1) > 0).tolist() == used


def test_there_and_back_is_the_identity() -> None:
    token_N, position_TK, _ = sort_by_expert(*routes(0.0), EXPERTS)
    x_TH = values(TOKENS, HIDDEN, dtype=torch.float32)
    out_TH = combine(permute(x_TH, token_N, position_TK), position_TK, torch.full((TOKENS, TOPK), 1 / TOPK))
    torch.testing.assert_close(out_TH, x_TH)


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_bfloat16_sums_in_float32(drop: float) -> None:
    """Sums equal those of float64, rounded once. The gradients of weights keep the weights' precision."""
    token_N, position_TK, _ = sort_by_expert(*routes(drop), EXPERTS)
    y_NH, weight_TK = values(token_N.numel(), 64, dtype=torch.bfloat16), values(TOKENS, TOPK, dtype=torch.float32)
    dout_TH = values(TOKENS, 64, dtype=torch.bfloat16, seed=3).detach()
    out_TH = combine(y_NH, position_TK, weight_TK)
    dy_NH, dweight_TK = torch.autograd.grad(out_TH, (y_NH, weight_TK), dout_TH)
    exact_y, exact_weight = y_NH.detach().double().requires_grad_(), weight_TK.detach().double().requires_grad_()
    exact = naive_combine(exact_y, position_TK, exact_weight)
    exact_dy, exact_dweight = torch.autograd.grad(exact, (exact_y, exact_weight), dout_TH.double())
    assert (out_TH.dtype, dy_NH.dtype, dweight_TK.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    torch.testing.assert_close(out_TH, exact.bfloat16(), rtol=0.008, atol=1e-6)
    torch.testing.assert_close(dy_NH, exact_dy.bfloat16(), rtol=0.008, atol=1e-6)
    torch.testing.assert_close(dweight_TK, exact_dweight.float(), rtol=1e-4, atol=1e-5)


def test_same_bits_every_time() -> None:
    token_N, position_TK, _ = sort_by_expert(*routes(0.3, tokens=512), EXPERTS)
    x_TH, weight_TK = values(512, 64, dtype=torch.float32), values(512, TOPK, dtype=torch.float32, seed=4)
    runs = []
    for _ in range(3):
        # No sine: in a process, the first one of MKL's has an error of 1e-4 now and then, on the second thread.
        out_TH = combine(permute(x_TH, token_N, position_TK).square(), position_TK, weight_TK)
        runs.append((out_TH.detach(), *torch.autograd.grad(out_TH.square().sum(), (x_TH, weight_TK))))
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))


def test_one_token_has_gradients() -> None:
    """A rank's piece of a slice may be one token."""
    y_NH = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    weight_TK = torch.tensor([[0.25, 0.75]], dtype=torch.float64, requires_grad=True)
    combine(y_NH, torch.tensor([[1, 0]]), weight_TK).sum().backward()
    assert torch.equal(y_NH.grad, torch.tensor([[0.75], [0.25]], dtype=torch.float64).expand(2, 3))
    torch.testing.assert_close(weight_TK.grad, y_NH.detach().sum(1).flip(0)[None])
