"""Tests of the fused kernels against torch's own path in float64, on a GPU or on Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/foldray/kernels/test_fused.py   # without a GPU
python -m pytest -o addopts= --noconftest tests/foldray/kernels/test_fused.py   # with torch and pytest only
"""

from __future__ import annotations

import copy
import os
from importlib.util import find_spec

import pytest
import torch

from foldray.blueprint import ModelSpec, RopeSpec
from foldray.kernels import attention, fused
from foldray.kernels.activations import GATED_SILU
from foldray.kernels.permutation import combine, permute
from foldray.model.layers import Norm
from foldray.model.rotary import rotate, rotation

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
RUNS = find_spec("triton") is not None and (DEVICE == "cuda" or INTERPRETED)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Half a unit in the last place of narrow types, so one rounding. The interpreter cuts bfloat16 off instead of rounding it.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-11 * 1.01, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8 * 1.01}

needs_kernels = pytest.mark.skipif(not RUNS, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")


@pytest.fixture
def through_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter compute with tensors on the CPU, except those in float64, which are what to expect."""
    if DEVICE == "cpu":
        monkeypatch.setattr(fused, "fits", lambda *tensors: all(x.dtype != torch.float64 for x in tensors))


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def gapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers as a view, with a gap after each row."""
    return torch.cat((tensor, torch.full_like(tensor[..., :3], torch.nan)), -1)[..., : tensor.shape[-1]]


def columnwise(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers as a view whose last axis has gaps."""
    return tensor.t().contiguous().t()


def routes(tokens: int, topk: int, padding: int, drop: float) -> torch.Tensor:
    """Return position_TK: rows in random order, of which `padding` have no assignment, and -1 for dropped assignments."""
    generator = torch.Generator().manual_seed(4)
    position = torch.randperm(tokens * topk + padding, generator=generator)[: tokens * topk].view(tokens, topk)
    return position.masked_fill(torch.rand(tokens, topk, generator=generator) < drop, -1).to(DEVICE)


def check(got: torch.Tensor, want: torch.Tensor, atol: float = 2e-6) -> None:
    """Compare with what float64 gives, rounded once."""
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=ROUNDING[got.dtype], atol=atol)


VIEWS = {"whole": torch.Tensor.contiguous, "gapped": gapped, "columnwise": columnwise}


def test_which_tensors_fit():
    """Tensors of the CPU do not, so they take torch's path as before. On a GPU, float64 does not."""
    half = values(2, 4, dtype=torch.bfloat16)
    assert not fused.fits(half.cpu())
    assert not fused.fits(half.double())
    assert not fused.fits(half, half.double())
    assert fused.fits(half, half.float()) == (DEVICE == "cuda" and RUNS)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("rows", "inner"), [(3, 40), (1, 513), (2, 1), (2, 2048), (0, 8)])
def test_gated_silu(through_kernels, dtype, view, rows, inner):
    up_NW, dh_NF = values(rows, 2 * inner, dtype=dtype) * 4, values(rows, inner, dtype=dtype, seed=2)
    wide_NW = up_NW.double().requires_grad_()
    want_NF = GATED_SILU.plain(wide_NW)
    (dwant_NW,) = torch.autograd.grad(want_NF, wide_NW, dh_NF.double())
    check(GATED_SILU.forward(VIEWS[view](up_NW)), want_NF, atol=1e-5)
    h_NF, dup_NW = GATED_SILU.backward(VIEWS[view](dh_NF.clone()), VIEWS[view](up_NW))
    check(h_NF, want_NF, atol=1e-5)
    check(dup_NW, dwant_NW, atol=1e-5)
    check(GATED_SILU.backward(dh_NF[:, :1].expand_as(dh_NF), up_NW)[0], want_NF, atol=1e-5)


@needs_kernels
def test_gated_silu_keeps_rows_of_zeros(through_kernels):
    zeros = torch.zeros(2, 24, device=DEVICE)
    assert torch.equal(GATED_SILU.forward(zeros), zeros[:, :12])
    assert torch.equal(GATED_SILU.backward(zeros[:, :12].clone(), zeros)[1], zeros)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("hidden", "view", "weight_dtype", "route"),
    [
        (40, "whole", torch.float32, (1, 1, 0, 0.0)),
        (513, "gapped", torch.bfloat16, (1, 8, 2, 0.5)),
        (2048, "columnwise", torch.float32, (5, 8, 0, 0.3)),
        (40, "gapped", torch.float32, (7, 2, 3, 0.4)),
        (513, "whole", torch.float32, (6, 3, 0, 0.0)),
        (513, "columnwise", torch.bfloat16, (3, 2, 1, 1.0)),
        (1, "whole", torch.float32, (4, 2, 1, 0.2)),
        (40, "whole", torch.float32, (0, 2, 0, 0.0)),
    ],
)
def test_combine(through_kernels, dtype, view, weight_dtype, hidden, route):
    position_TK = routes(*route)
    y_NH = values(position_TK.numel() + route[2], hidden, dtype=dtype)
    weight_TK, dout_TH = values(*position_TK.shape, dtype=weight_dtype, seed=2), values(route[0], hidden, dtype=dtype, seed=3)
    wide = y_NH.double().requires_grad_(), weight_TK.double().requires_grad_()
    narrow = VIEWS[view](y_NH).requires_grad_(), columnwise(weight_TK).requires_grad_()
    want_TH, out_TH = (combine(y, columnwise(position_TK), weight) for y, weight in (wide, narrow))
    check(out_TH, want_TH)
    want = torch.autograd.grad(want_TH, wide, dout_TH.double())
    got = torch.autograd.grad(out_TH, narrow, VIEWS[view](dout_TH))
    check(got[0], want[0])
    check(got[1], want[1], atol=hidden * 1e-6)  # a sum over H that may cancel


@needs_kernels
def test_a_dropped_assignment_adds_nothing(through_kernels):
    """Its weight and the rows without an assignment are never read, and its own gradient is zero for any gradient."""
    position_TK = torch.tensor([[-1, 2], [0, -1]], device=DEVICE)
    y_NH, weight_TK = values(3, 20), torch.tensor([[torch.nan, 0.5], [2.0, torch.inf]], device=DEVICE)
    y_NH[1] = torch.nan
    out_TH = combine(y_NH.requires_grad_(), position_TK, weight_TK.requires_grad_())
    assert torch.equal(out_TH, torch.stack((y_NH[2] * 0.5, y_NH[0] * 2)))
    dy_NH, dweight_TK = torch.autograd.grad(out_TH, (y_NH, weight_TK), torch.full_like(out_TH, torch.inf))
    assert torch.equal(dy_NH[1], torch.zeros_like(dy_NH[1]))
    assert dweight_TK[position_TK < 0].tolist() == [0.0, 0.0]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("hidden", [40, 513])
@pytest.mark.parametrize("route", [(1, 1, 0, 0.0), (5, 8, 0, 0.3), (7, 2, 0, 0.0), (3, 2, 0, 1.0), (0, 2, 0, 0.0)])
def test_permute(through_kernels, dtype, view, hidden, route):
    order_TK = routes(*route)
    kept_M = (order_TK >= 0).flatten().nonzero()[:, 0]
    rank_N = order_TK.flatten()[kept_M].argsort()  # rows of kept assignments without gaps, in random order
    position_TK = torch.full_like(order_TK, -1).flatten().scatter_(0, kept_M[rank_N], torch.arange(len(rank_N), device=DEVICE))
    position_TK, token_N = position_TK.view_as(order_TK), kept_M[rank_N] // route[1]
    x_TH, dx_NH = values(route[0], hidden, dtype=dtype).requires_grad_(), values(len(token_N), hidden, dtype=dtype, seed=3)
    wide_TH = x_TH.detach().double().requires_grad_()
    (want_TH,) = torch.autograd.grad(permute(wide_TH, token_N, position_TK), wide_TH, dx_NH.double())
    (got_TH,) = torch.autograd.grad(permute(x_TH, token_N, position_TK), x_TH, VIEWS[view](dx_NH))
    check(got_TH, want_TH)


@needs_kernels
def test_sums_go_in_the_order_of_choices():
    rows_NH = torch.tensor([[1.0], [1e8], [-1e8]], device=DEVICE).expand(3, 32)
    position_TK = torch.tensor([[0, 1, 2], [1, 2, 0]], device=DEVICE)
    assert fused.sum_rows(rows_NH, position_TK)[:, 0].tolist() == [0.0, 1.0]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3, 5, 8), (2, 4, 3, 128), (1, 1, 2, 20), (1, 40, 2, 64)], ids=str)
def test_merge(through_kernels, dtype, shape):
    """Merge parts whose heads or whose positions lie beside each other; some queries see no key of one part, or of both."""
    outs = [values(*shape, dtype=dtype, seed=seed) for seed in (1, 2)]
    lses = [values(*shape[:3], dtype=torch.float32, seed=seed) * 9 for seed in (3, 4)]
    lses[0][:, :, 0], lses[1][:, 0, 1:], lses[0][:, 0, -1] = -torch.inf, -torch.inf, -torch.inf
    want, want_lse = attention.merge(outs[0].double(), lses[0].double(), outs[1].double(), lses[1].double())
    outs[1] = outs[1].transpose(1, 2).contiguous().transpose(1, 2)
    got, got_lse = fused.merge(outs[0], lses[0], outs[1], lses[1])
    assert got.dtype == torch.float32
    assert got.transpose(1, 2).is_contiguous()
    check(got, want, atol=1e-5)
    check(got_lse, want_lse, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 3, 10), (1, 1, 1, 2), (1, 3, 40, 128), (2, 4, 2, 16), (1, 0, 2, 8)])
def test_rotate(through_kernels, dtype, shape):
    """The heads are a view of a product, and the gradient comes with another order of axes, as in attention."""
    batch, positions, heads, width = shape
    product_BSW = values(batch, positions, heads * width + 7, dtype=dtype)
    position_S = torch.arange(positions, device=DEVICE) * 1001
    dout_BSND = values(batch, heads, positions, width, dtype=dtype, seed=2).transpose(1, 2)
    found = []
    for source in (product_BSW, product_BSW.double()):
        source.requires_grad_()
        x_BSND = source[..., 3:-4].unflatten(-1, (heads, width))
        out_BSND = rotate(x_BSND, rotation(position_S, RopeSpec(width, 10000.0, False), source.dtype))
        found.append((out_BSND, *torch.autograd.grad(out_BSND, source, dout_BSND.to(source.dtype))))
    for got, want in zip(*found, strict=True):
        check(got, want)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("heads", [(3, 1, 10, 10, 1.0), (4, 2, 16, 6, 0.5), (1, 1, 2, 2, 1.0), (40, 4, 128, 128, 1.0)], ids=str)
@pytest.mark.parametrize("shape", [(2, 5), (1, 1), (1, 0)], ids=str)
def test_split_rotate(through_kernels, dtype, biased, heads, shape):
    """The product is a view with gaps, and the gradients come with other orders of axes, as in attention."""
    queries, keys, width, turning, scale = heads
    sizes, count = (queries, keys, keys), queries + 2 * keys
    product_BSW = values(*shape, count * width + 5, dtype=dtype)
    bias_W = values(count * width, dtype=dtype, seed=9) if biased else None
    position_S = torch.arange(shape[1], device=DEVICE) * 1001
    slopes = [values(shape[0], n, shape[1], width, dtype=dtype, seed=n).transpose(1, 2) for n in (queries, keys)]
    slopes.append(values(shape[0], shape[1], width, keys, dtype=dtype, seed=7).transpose(2, 3))
    found = []
    for source, bias in ((product_BSW, bias_W), (product_BSW.double(), None if bias_W is None else bias_W.double())):
        source, leaves = source.requires_grad_(), [source]
        x_BSW = source[..., 2:-3]
        if bias is not None:
            leaves.append(bias.requires_grad_())
        turn = rotation(position_S, RopeSpec(turning, 10000.0, False), source.dtype)
        if source.dtype == torch.float64:
            # The kernel rounds the sum with the bias, as torch does.
            x_BSW = x_BSW if bias is None else x_BSW + bias
            q, k, v = (part.unflatten(-1, (-1, width)) if part.numel() else part.view(*shape, part.shape[-1] // width, width)
                       for part in x_BSW.split([n * width for n in sizes], -1))  # fmt: skip
            outs = [rotate(q, turn) * scale, rotate(k, turn), v]
        else:
            given = fused.Heads(queries, keys, width)
            outs = list(fused.split_rotate(x_BSW, bias, turn.cos_SR, turn.sin_SR, given, scale))
            assert all(out.is_contiguous() and out.untyped_storage() is not source.untyped_storage() for out in outs)
        gradients = torch.autograd.grad(outs, leaves, [slope.to(source.dtype) for slope in slopes])
        found.append((outs, gradients))
    (outs, gradients), (want, wanted) = found
    rounding = 2 * ROUNDING[dtype] if biased else ROUNDING[dtype]
    for one, other in zip(outs, want, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=rounding, atol=4 * rounding if biased else 1e-5)
    check(gradients[0], wanted[0], atol=1e-5)
    if biased:
        torch.testing.assert_close(gradients[1].double(), wanted[1], rtol=4 * ROUNDING[dtype], atol=8 * ROUNDING[dtype])


@needs_kernels
def test_rotation_keeps_only_the_tables(through_kernels):
    turn = rotation(torch.arange(5, device=DEVICE), RopeSpec(8, 10000.0, False), torch.bfloat16)
    out_BSND = rotate(values(1, 5, 2, 8, dtype=torch.bfloat16).requires_grad_(), turn)
    kept = [tensor.data_ptr() for tensor in out_BSND.grad_fn.saved_tensors]
    assert kept == [table.data_ptr() for table in turn[:2]]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 10), (1, 1, 1), (5, 130, 40), (1, 2, 4100), (1, 0, 8)], ids=str)
@pytest.mark.parametrize("view", ["whole", "gapped"])
def test_norm_beside(through_kernels, dtype, shape, view):
    """The gradient of x is that of its norm and that of x itself. There are more rows than programs in one case."""
    x, dy, beside = (values(*shape, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    norm, dy = Norm(ModelSpec(preset="tiny", hidden=shape[-1])).to(DEVICE, dtype), VIEWS[view](dy)
    with torch.no_grad():
        norm.weight.copy_(values(shape[-1], seed=4))
    found = []
    for source, layer in ((x, norm), (x.double(), copy.deepcopy(norm).double())):
        normed, same = layer.beside(source.requires_grad_())
        assert torch.equal(same, source)
        gradients = torch.autograd.grad([normed, same], [source, layer.weight], [dy.to(normed.dtype), beside.to(source.dtype)])
        found.append((normed, *gradients))
    (normed, dx, dweight), (want, dwant, dwant_weight) = found
    check(normed, want, atol=1e-5)
    check(dx, dwant, atol=1e-4)
    check(dweight, dwant_weight, atol=1e-3)  # sums over rows that may cancel
