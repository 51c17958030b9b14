"""Experts with adapters: the fast implementations against the plain one, which adds each adapter to its weight first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from foldray.kernels import experts
from foldray.kernels.autograd import Later
from foldray.kernels.expert_rows import ExpertRows
from foldray.kernels.experts import Biases, Kind
from foldray.kernels.lora import ExpertAdapters, adapted_ffn, adapted_ffn_by_hand
from tests.foldray.kernels.test_experts import COUNTS, FFNS, make

_WAYS = ["per_expert", "grouped_mm"]


@pytest.fixture(params=_WAYS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    chosen = experts._Grouped if request.param == "grouped_mm" else experts._PerExpert
    monkeypatch.setattr(experts, "_implementation", lambda *_: chosen)
    return request.param


class Case:
    """Experts with frozen weights and biases, and their adapters."""

    def __init__(self, counts: list[int], ffn: str, rank: int, dtype: torch.dtype, given: str = "both"):
        self.counts, self.ffn = counts, ffn
        x, *frozen = (value.detach() for value in make(counts, ffn, dtype=dtype, biased=True))
        self.x, (self.up, self.down, *biases) = x, (nn.Parameter(value, requires_grad=False) for value in frozen)
        self.biases: Biases = (biases[0], biases[1])
        chance = torch.Generator().manual_seed(rank)
        pairs: list[nn.Parameter | None] = []
        for name, weight in (("in", self.up), ("out", self.down)):
            for shape in ((4, weight.shape[1], rank), (4, rank, weight.shape[2])):
                drawn = torch.randn(shape, generator=chance, dtype=torch.float64) / shape[1] ** 0.5
                pairs.append(nn.Parameter(drawn.to(dtype)) if given in (name, "both") else None)
        self.adapters = ExpertAdapters(0.7, *pairs)
        self.factors = [pair for pair in pairs if pair is not None]

    def run(self, kind: Kind, later: Later | None = None) -> list[Tensor]:
        """Return the output, and the gradients of the rows and of the adapters."""
        x, leave = self.x.clone().requires_grad_(), later and later.leaver(*self.factors)
        rows = ExpertRows.of(self.counts)
        y = adapted_ffn(x, rows, self.up, self.down, self.adapters, self.ffn, kind, leave, self.biases)
        dy = torch.ones_like(y).cumsum(0) / max(1, len(y))
        found = torch.autograd.grad(y, [x, *self.factors], dy, allow_unused=later is not None)
        return [y.detach(), *(part for part in found if part is not None)]


@pytest.mark.parametrize(("rank", "given"), [(3, "both"), (8, "both"), (4, "in"), (16, "out")])
@pytest.mark.parametrize("ffn", FFNS)
@pytest.mark.parametrize("counts", COUNTS[1:], ids=str)
def test_fast_equals_loop(implementation: str, counts: list[int], ffn: str, rank: int, given: str) -> None:
    dtype, tolerance = (torch.float32, 1e-5) if implementation == "grouped_mm" else (torch.float64, 1e-12)
    case = Case(counts, ffn, rank, dtype, given)
    for got, want in zip(case.run("grouped"), case.run("loop"), strict=True):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("given", ["both", "in", "out"])
def test_gradients_that_are_left_and_those_by_hand_have_the_same_bits(implementation: str, given: str) -> None:
    case, later = Case([7, 0, 20, 5], "gated_silu", 8, torch.float32, given), Later()
    y, dx, *slopes = case.run("grouped")
    with later.collect() as tasks:
        assert [torch.equal(a, b) for a, b in zip(case.run("grouped", later), (y, dx), strict=True)] == [True, True]
    found = {factor: torch.zeros_like(factor) for factor in case.factors}
    for task in tasks:
        task.add(found[task.weight])
    assert all(torch.equal(found[factor], slope) for factor, slope in zip(case.factors, slopes, strict=True))
    flat = case.biases[0].flatten(), case.biases[1].flatten()  # type: ignore[union-attr]
    weights = case.up, case.down, case.adapters, case.ffn, None, flat
    with torch.no_grad():
        result, backward = adapted_ffn_by_hand(case.x, ExpertRows.of(case.counts), *weights)
        (by_hand,), parts = backward(torch.ones_like(result).cumsum(0) / len(result))
    assert torch.equal(result, y)
    assert torch.equal(by_hand, dx)
    assert all(torch.equal(parts[factor], slope) for factor, slope in zip(case.factors, slopes, strict=True))


def test_frozen_experts_have_no_gradients(implementation: str) -> None:
    """Without adapters of their own, as where attention alone has some."""
    case = Case([7, 0, 20, 5], "gated_silu", 8, torch.float32)
    x = case.x.clone().requires_grad_()
    y = experts.expert_ffn(x, case.counts, case.up, case.down, case.ffn, "grouped", biases=case.biases)
    with_them = [value.clone().requires_grad_() for value in (case.x, case.up, case.down)]
    z = experts.expert_ffn(with_them[0], case.counts, *with_them[1:], case.ffn, "grouped", biases=case.biases)
    assert torch.equal(y, z)
    assert not any(kept is not None and torch.equal(kept, case.x) for kept in y.grad_fn.saved_tensors)  # type: ignore[union-attr]
    y.sum().backward()
    z.sum().backward()
    assert torch.equal(x.grad, with_them[0].grad)  # type: ignore[arg-type]
    assert case.up.grad is None
