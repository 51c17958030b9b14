"""Expert computation: the fast implementations against the plain one, and the plain one against the definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from foldray.kernels import experts
from foldray.kernels.activations import kernel_of
from foldray.kernels.experts import Kind, expert_ffn, reference_ffn
from tests.foldray.live import Live

FFNS = ("gated_silu", "gelu", "gated_clamped")
# Rows per expert: even, ragged, one busy expert between idle ones, all rows at the last expert, no rows.
COUNTS = [[8, 8, 8, 8], [1, 30, 0, 17], [0, 5, 0, 0], [0, 0, 0, 33], [0, 0, 0, 0]]
Inputs = tuple[torch.Tensor, ...]


def make(
    counts: list[int], ffn: str, hidden: int = 16, inner: int = 32, dtype: torch.dtype = torch.float32, biased: bool = False
) -> Inputs:
    """Make x_NH, up_EHW and down_EFH, and perhaps two biases, which require gradients. All values are of order one."""
    generator = torch.Generator().manual_seed(sum(counts) + len(counts))
    width = inner if ffn == "gelu" else 2 * inner
    shapes = [(sum(counts), hidden), (len(counts), hidden, width), (len(counts), inner, hidden)]
    shapes += [(len(counts), width), (len(counts), hidden)] if biased else []
    scales = (1.0, hidden**-0.5, inner**-0.5, 1.0, 1.0)
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) * s for shape, s in zip(shapes, scales, strict=False))
    return tuple(values.to(dtype).requires_grad_() for values in drawn)


def computed(inputs: Inputs, counts: list[int], ffn: str, kind: Kind) -> torch.Tensor:
    x, up, down, *biases = inputs
    return expert_ffn(x, counts, up, down, ffn, kind, biases=(biases[0], biases[1]) if biases else (None, None))


def run(inputs: Inputs, counts: list[int], ffn: str, kind: Kind) -> list[torch.Tensor]:
    """Return the output and the gradients of all inputs, for an output gradient that differs from row to row."""
    leaves = [value.detach().requires_grad_() for value in inputs]
    y_NH = computed(tuple(leaves), counts, ffn, kind)
    dy_NH = torch.linspace(-1, 2, max(y_NH.numel(), 1), dtype=torch.float64)[: y_NH.numel()].view_as(y_NH)
    return [y_NH.detach(), *torch.autograd.grad(y_NH, leaves, dy_NH.to(y_NH.dtype))]


def dense(inputs: Inputs, counts: list[int], ffn: str) -> torch.Tensor:
    """Compute the output row by row from the definition."""
    x_NH, up_EHW, down_EFH, *biases = inputs
    rows = []
    for n, e in enumerate(e for e, count in enumerate(counts) for _ in range(count)):
        up_W = torch.einsum("h,hw->w", x_NH[n], up_EHW[e]) + (biases[0][e] if biases else 0)
        gate_F, value_F = up_W[: down_EFH.shape[1]], up_W[down_EFH.shape[1] :]
        if ffn == "gelu":
            h_F = F.gelu(up_W)
        elif ffn == "gated_silu":
            h_F = gate_F * torch.sigmoid(gate_F) * value_F
        else:
            gate_F, value_F = gate_F.clamp(max=7), value_F.clamp(-7, 7)
            h_F = (value_F + 1) * gate_F * torch.sigmoid(1.702 * gate_F)
        rows.append(torch.einsum("f,fh->h", h_F, down_EFH[e]) + (biases[1][e] if biases else 0))
    return torch.stack(rows) if rows else x_NH


def assert_near(got: list[torch.Tensor], want: list[torch.Tensor], tolerance: float) -> None:
    for name, a, b in zip(("y", "dx", "dup", "ddown", "dup_bias", "ddown_bias"), got, want, strict=False):
        assert a.shape == b.shape, name
        assert a.dtype == b.dtype, name
        error = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)
        assert error < tolerance, f"{name} is off by {error:.1e}"


@pytest.fixture(params=["per_expert", "per_expert_mm", "grouped_mm"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force each implementation in turn. Otherwise the sizes and the processor would choose one."""
    if request.param == "per_expert" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    chosen = experts._Grouped if request.param == "grouped_mm" else experts._PerExpert
    monkeypatch.setattr(experts, "_implementation", lambda *_: chosen)
    monkeypatch.setattr(experts, "_onednn_beats_mkl", lambda: request.param == "per_expert")
    return request.param


@pytest.mark.parametrize("ffn", FFNS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_loop_is_the_definition(counts: list[int], ffn: str, biased: bool) -> None:
    inputs = make(counts, ffn, dtype=torch.float64, biased=biased)
    torch.testing.assert_close(computed(inputs, counts, ffn, "loop"), dense(inputs, counts, ffn))


@pytest.mark.parametrize("ffn", FFNS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("biased", [False, True])
def test_fast_equals_loop(
    implementation: str, counts: list[int], ffn: str, dtype: torch.dtype, tolerance: float, biased: bool
) -> None:
    inputs = make(counts, ffn, dtype=dtype, biased=biased)
    want = [value.to(dtype) for value in run(tuple(value.detach().double() for value in inputs), counts, ffn, "loop")]
    assert_near(run(inputs, counts, ffn, "grouped"), want, tolerance)


@pytest.mark.parametrize("ffn", FFNS)
@pytest.mark.parametrize("rows", [100, 600, 1100])
def test_fast_equals_loop_at_padded_sizes(ffn: str, rows: int) -> None:
    """Nothing is forced: the products are so large that this machine computes one expert after another."""
    counts = [rows, 0, rows + 29, 1]
    inputs = make(counts, ffn, hidden=128, inner=512)
    assert experts._implementation(inputs[0], 4, 512) is experts._PerExpert
    assert_near(run(inputs, counts, ffn, "grouped"), run(inputs, counts, ffn, "loop"), 1e-5)


@pytest.mark.parametrize("ffn", FFNS)
@pytest.mark.parametrize("kind", ["loop", "grouped"])
def test_gradients_by_differences(ffn: str, kind: Kind) -> None:
    counts = [2, 0, 3]
    inputs = make(counts, ffn, hidden=3, inner=4, dtype=torch.float64, biased=True)
    assert torch.autograd.gradcheck(lambda *given: computed(given, counts, ffn, kind), inputs)


def test_activation_backward_by_differences() -> None:
    """Test the formulas that all fast implementations share, without the matrix products."""
    for ffn in FFNS:
        scale = 9.0 if ffn == "gated_clamped" else 1.0  # so that its bounds are reached
        drawn = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * scale
        up_NW = drawn.requires_grad_()
        h_NF = kernel_of(ffn).forward(up_NW)
        dh_NF = torch.linspace(-1, 1, h_NF.numel(), dtype=torch.float64).view_as(h_NF)
        gate_NF, value_NF = up_NW[:, :4], up_NW[:, 4:]
        plain = F.gelu(up_NW) if ffn == "gelu" else F.silu(gate_NF) * value_NF
        if ffn == "gated_clamped":
            gate_NF = gate_NF.clamp(max=7)
            plain = (value_NF.clamp(-7, 7) + 1) * gate_NF * torch.sigmoid(1.702 * gate_NF)
        (want,) = torch.autograd.grad(plain, up_NW, dh_NF)
        again_NF, got = kernel_of(ffn).backward(dh_NF.clone(), up_NW.detach())
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(again_NF, plain.detach())


@pytest.mark.parametrize("kind", ["loop", "grouped"])
def test_idle_experts_have_zero_gradients(implementation: str, kind: Kind) -> None:
    counts = [0, 9, 0]
    _, _, dup, ddown = run(make(counts, "gated_silu"), counts, "gated_silu", kind)
    for grad in (dup, ddown):
        assert grad[1].abs().sum() > 0
        assert torch.equal(grad[0], torch.zeros_like(grad[0]))
        assert torch.equal(grad[2], torch.zeros_like(grad[2]))


@pytest.mark.parametrize("kind", ["loop", "grouped"])
def test_one_experts_overflow_stays_its_own(implementation: str, kind: Kind) -> None:
    """NaN must not spread from one expert to another, for example through padding."""
    counts = [3, 5, 4]
    inputs = make(counts, "gated_silu")
    with torch.no_grad():
        inputs[0][3] = torch.inf
    y, dx, dup, ddown = run(inputs, counts, "gated_silu", kind)
    for values in (y[:3], y[4:], dx[:3], dx[4:], dup[0], dup[2], ddown[0], ddown[2]):
        assert values.isfinite().all()
    assert not dup[1].isfinite().all()


def test_backward_twice_gives_the_same(implementation: str) -> None:
    """A backward overwrites nothing that a second backward needs."""
    counts = [7, 0, 4]
    inputs = make(counts, "gated_silu")
    y_NH = expert_ffn(inputs[0], counts, inputs[1], inputs[2], "gated_silu", "grouped")
    first = torch.autograd.grad(y_NH.sum(), inputs, retain_graph=True)  # the gradient of a sum is expanded
    second = torch.autograd.grad(y_NH.sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_in_any_layout(implementation: str) -> None:
    counts = [4, 6]
    x, up, down = make(counts, "gelu")
    transposed = x.detach().t().contiguous().t()
    assert not transposed.is_contiguous()
    assert_near(run((transposed, up, down), counts, "gelu", "grouped"), run((x, up, down), counts, "gelu", "loop"), 1e-5)


def test_backward_one_by_one_holds_the_gradients_of_one_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the results: of the activation its gradient, itself again and the gradient of its input, for 64 of 256 rows."""
    monkeypatch.setattr(experts, "_implementation", lambda *given: experts._PerExpert)
    inputs, dy_NH = make([64] * 4, "gated_silu"), torch.ones(256, 16)
    with Live() as live:
        y_NH = computed(inputs, [64] * 4, "gated_silu", "grouped")
        known = [tensor.view_as(tensor) for tensor in (*inputs, dy_NH)]  # so that they count already
        before = live.peak = live.now
        gradients = torch.autograd.grad(y_NH, inputs, dy_NH)
    assert live.peak - before == sum(each.nbytes for each in gradients) + 64 * (32 + 32 + 64) * 4
    del known


def test_reference_is_one_expert() -> None:
    x, up, down = make([6], "gated_silu")
    torch.testing.assert_close(reference_ffn(x, up[0], down[0], "gated_silu"), dense((x, up, down), [6], "gated_silu"))


@pytest.mark.parametrize("counts", [[3, 3], [3, 4, 0, 0, 0], [3, 4, 1, 1]])
def test_counts_must_fit(counts: list[int]) -> None:
    x, up, down = make([3, 4, 1, 0], "gelu")
    with pytest.raises(ValueError, match=r"4 numbers, one per expert, and sum to 8 rows"):
        expert_ffn(x, counts, up, down, "gelu", "grouped")


def test_which_implementation() -> None:
    choose: Callable[..., type] = experts._implementation
    few, many = torch.empty(8 * 4, 64), torch.empty(8 * 1024, 512)
    assert choose(few, 8, 128) is experts._Grouped
    assert choose(many, 8, 1024) is experts._PerExpert
    assert choose(few.bfloat16(), 8, 128) is experts._Grouped
    assert choose(few.double(), 8, 128) is experts._PerExpert  # grouped_mm refuses float64
    assert choose(torch.empty(8, 6), 2, 4) is experts._PerExpert  # grouped_mm needs rows of a multiple of 16 bytes
    assert choose(torch.empty(0, 64), 8, 128) is experts._PerExpert


def test_buckets_are_few_and_close() -> None:
    sizes = {experts._bucket(n) for n in range(1, 4097)}
    assert len(sizes) <= 32 * 4 + 16
    assert all(n <= experts._bucket(n) <= max(n + 15, n * 1.0625) for n in range(1, 4097))
    assert all(experts._bucket(size) == size for size in sizes)


def test_only_onednn_wants_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    for faster, dtype, want in ((True, torch.float32, 112), (False, torch.float32, 100), (False, torch.bfloat16, 112)):
        monkeypatch.setattr(experts, "_onednn_beats_mkl", lambda faster=faster: faster)
        assert list(experts._spans(torch.empty(100, 2, dtype=dtype), [0, 100])) == [(1, slice(0, 100), want)]


def test_float32_means_float32() -> None:
    """oneDNN must not round the operands, so its product is about as close to float64 as torch's."""
    a, b = torch.randn(256, 512, dtype=torch.float64), torch.randn(512, 128, dtype=torch.float64)
    exact = a.float().double() @ b.float().double()
    for product in (experts._mm(a.float(), b.float()), a.float() @ b.float()):
        assert (product.double() - exact).norm() / exact.norm() < 1e-6
