"""Rows that are rounded for the wire: how far off a number may be, the bytes that travel, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foldray.blueprint import Ownership
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model.initial import parameters_as
from foldray.moe import MoeBackend, MoELayer, TokenPiece, combine, compute_rows, dispatch, run_layer
from foldray.moe.exchange import GROUP, WIRES, write
from tests.foldray.moe.test_layer import spec
from tests.foldray.moe.test_once import draw_weights

OUT, BACK = WIRES["float8"].out, WIRES["float8"].back


@given(
    st.integers(0, 2**32 - 1), st.integers(0, 5), st.sampled_from([1, 64, 127, 128, 129, 300]), st.floats(-22, 30),
    st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([OUT, BACK]),
)  # fmt: skip
def test_a_number_is_no_further_off_than_said(seed: int, rows: int, hidden: int, size: float, dtype: Any, form: Any) -> None:
    random = torch.Generator().manual_seed(seed)
    x_NH = torch.randn(rows, hidden, generator=random) * torch.logspace(0, -12, hidden).flip(0) * 10.0**size
    x_NH = (x_NH * (torch.rand(x_NH.shape, generator=random) < 0.9)).to(dtype)
    found_NH = form.read(form.write(x_NH), torch.float64)
    exact_NH = x_NH.double()
    for start in range(0, hidden, GROUP):
        part = slice(start, start + GROUP)
        largest_N1 = exact_NH[:, part].abs().amax(1, keepdim=True)
        allowed = torch.maximum(exact_NH[:, part].abs() * form.error, largest_N1 * form.floor) * (1 + 1e-6) + 1e-44
        assert bool(((found_NH[:, part] - exact_NH[:, part]).abs() <= allowed).all())


def test_the_bounds_are_reached() -> None:
    """So the page says no more than there is."""
    x_1H = torch.full((1, GROUP), 448.0)
    x_1H[0, 1:3] = torch.tensor([17.0, 2.0**-10])  # 17 lies between 16 and 18
    (off, tiny) = (OUT.read(OUT.write(x_1H), torch.float32) - x_1H)[0, 1:3].abs().tolist()
    assert off / 17 == pytest.approx(OUT.error, rel=0.06)
    assert tiny / 448 == pytest.approx(OUT.floor)
    y_11 = torch.tensor([[1 + 2.0**-8]])
    assert float((BACK.read(BACK.write(y_11), torch.float32) - y_11).abs()) == pytest.approx(BACK.error, rel=0.01)


def test_what_is_no_number_stays_none() -> None:
    for bad in (float("nan"), float("inf")):
        x_1H = torch.ones(1, 2 * GROUP)
        x_1H[0, 3] = bad
        found = OUT.read(OUT.write(x_1H), torch.float32)
        assert bool(found[0, :GROUP].isnan().all())
        assert torch.equal(found[0, GROUP:], x_1H[0, GROUP:])


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
@pytest.mark.parametrize("wire", [None, *WIRES])
def test_what_is_written_side_by_side_is_read_again(rows: int, wire: str | None) -> None:
    x_NH = torch.randn(rows, 130)
    beside = [torch.randn(rows, 3, dtype=torch.float64), torch.arange(5 * rows, dtype=torch.int32).view(rows, 5)]
    travels, read = write([x_NH, *beside], WIRES[wire].out if wire else None)
    assert [len(each) for each in travels] == [rows, rows]
    found, *others = read(travels)
    assert [each.dtype for each in others] == [each.dtype for each in beside]
    assert all(map(torch.equal, others, beside))
    torch.testing.assert_close(found, x_NH, rtol=0 if wire is None else 0.07, atol=0 if wire is None else 1e-4)


def layer_of(fold: Fold, rank: int, wire: Any, way: Any, dtype: torch.dtype) -> tuple[MoELayer, Groups]:
    groups, model = Groups.create(fold, rank), spec(topk=4, shared_hidden=0)
    with parameters_as("cpu", dtype):
        made = MoELayer(Ownership(model, fold), model.moe_layers[0], groups, MoeBackend(dispatch=way, wire=wire))
    draw_weights(made, groups)
    return made, groups


def run(rank: int, fold: Fold, wire: Any, way: Any) -> list[torch.Tensor]:
    """Return the output of a layer and its gradients."""
    made, groups = layer_of(fold, rank, wire, way, torch.float32)
    x_BSH = torch.randn(2, 40, 16, requires_grad=True)
    out_BSH, _ = run_layer(made, x_BSH)
    found = torch.autograd.grad(out_BSH, [x_BSH, *made.parameters()], torch.randn_like(out_BSH))
    groups.close()
    return [out_BSH.detach(), *found]


@pytest.mark.gate(2)
@pytest.mark.parametrize(("sizes", "way"), [
    ({"ep": 4}, "assignment"), ({"ep": 4}, "rank"), ({"ep": 4, "ep_inside": 2}, "rank"), ({"ep": 2, "etp": 2}, "assignment"),
], ids=str)  # fmt: skip
def test_a_layer_is_off_by_rounding_alone(ranks: Any, sizes: dict[str, int], way: str) -> None:
    fold = Fold(4, **sizes)
    exact = ranks(4).run(run, fold, None, way)
    off = {wire: _apart(ranks(4).run(run, fold, wire, way), exact) for wire in WIRES}
    assert 1e-4 < off["bfloat16"] < 1e-2
    assert 5e-3 < off["float8"] < 1e-1
    assert off["bfloat16"] < off["float8"]


def _apart(found: list[list[torch.Tensor]], exact: list[list[torch.Tensor]]) -> float:
    """Return the largest distance of a tensor from its exact one, over the length of this one."""
    pairs = [pair for ours, theirs in zip(found, exact, strict=True) for pair in zip(ours, theirs, strict=True)]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs if other.norm() > 0)


def test_one_rank_rounds_nothing() -> None:
    assert all(map(torch.equal, run(0, Fold(1), None, "rank"), run(0, Fold(1), "float8", "rank")))


def sent(rank: int, wire: Any, way: Any, dtype: torch.dtype) -> tuple[dict[str, int], int, int]:
    """Return the bytes that a rank sends by stage, and the rows that leave for the other rank and come from it."""
    made, groups = layer_of(Fold(2, ep=2), rank, wire, way, dtype)
    x_TH, found = torch.randn(40, 16, dtype=dtype, requires_grad=True), dict[str, int]()

    def measure(stage: str) -> None:
        found[stage] = groups.traffic.by_name()["tokens"].inside_bytes
        groups.traffic.clear()

    routing = made.route(x_TH, TokenPiece(1))
    rows, sides = made.dispatch_preprocess(x_TH, routing)
    received = made.exchange.start_counts(sides)
    leaving, coming = received.leaving_by_rank[1 - rank], received.rows_by_rank[1 - rank]
    groups.traffic.clear()
    rows = dispatch(made.exchange, rows, sides, received)
    measure("dispatch")
    y_NH = combine(made.exchange, compute_rows(made, rows, sides, received), sides, received)
    measure("combine")
    made.combine_postprocess(y_NH, sides, routing.weight_TK).sum().backward()
    measure("backward")
    groups.close()
    return found, leaving, coming


@pytest.mark.parametrize(("wire", "dtype", "out", "back"), [
    (None, torch.float32, 4 * 16, 4 * 16), ("bfloat16", torch.float32, 2 * 16, 2 * 16),
    ("float8", torch.float32, 16 + 4, 2 * 16), ("float8", torch.bfloat16, 16 + 4, 2 * 16),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("way", ["assignment", "rank"])
def test_the_bytes_of_a_row(ranks: Any, wire: Any, dtype: Any, out: int, back: int, way: str) -> None:
    weights = 4 * 4 if way == "rank" else 0  # of four experts, as many bytes as their numbers
    for found, leaving, coming in ranks(2).run(sent, wire, way, dtype):
        assert found["dispatch"] == leaving * (out + 2 * weights)
        assert found["combine"] == coming * back
        assert found["backward"] == leaving * out + coming * (back + weights)
