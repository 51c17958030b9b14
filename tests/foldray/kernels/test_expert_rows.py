"""How many rows each expert has: the same on the host and on the device, which products can do without the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foldray.kernels.autograd import Later
from foldray.kernels.expert_rows import ExpertRows
from foldray.kernels.experts import expert_ffn
from tests.foldray.grouped import as_on_gpus
from tests.foldray.kernels.test_experts import COUNTS, FFNS, make

CPU = torch.device("cpu")
NOBODYS = 3  # rows


def on_the_device(counts: list[int]) -> ExpertRows:
    def read() -> list[int]:
        raise AssertionError("the host asks")

    return ExpertRows(read, lambda: torch.tensor(counts).cumsum(0, dtype=torch.int32))


@pytest.mark.parametrize("counts", [*COUNTS, [4, 4], [7], []], ids=str)
def test_ends(counts: list[int]) -> None:
    ends = torch.tensor(counts, dtype=torch.int64).cumsum(0).tolist()
    count_E = torch.tensor(counts, dtype=torch.int64)
    for rows in (ExpertRows.of(counts), ExpertRows.counted(count_E), ExpertRows.counted(count_E, counts)):
        found = rows.ends(CPU)
        assert found.dtype == torch.int32
        assert found.tolist() == ends
        assert rows.counts == counts
    assert not ExpertRows.counted(count_E).are_known
    assert ExpertRows.counted(count_E, counts).are_known


@pytest.mark.parametrize("ffn", FFNS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_the_host_does_not_ask(counts: list[int], ffn: str, biased: bool, later: bool) -> None:
    """Rows of nobody change nothing, whatever they hold, and experts without rows have gradients of zero."""
    inputs = make(counts, ffn, dtype=torch.float64, biased=biased)
    dy_NH = torch.linspace(-1, 2, max(1, inputs[0].numel()), dtype=torch.float64)[: inputs[0].numel()].view_as(inputs[0])
    nan = inputs[0].new_full((NOBODYS, inputs[0].shape[1]), torch.nan)

    def run(rows: ExpertRows, *given: Tensor) -> tuple[Tensor, list[Tensor]]:
        x_NH, up, down, *biases = given
        total = len(x_NH) - sum(counts)
        leaver = Later()
        up, down = torch.nn.Parameter(up.detach()), torch.nn.Parameter(down.detach())
        x_NH, *biases = (each.detach().requires_grad_() for each in (x_NH, *biases))
        with leaver.collect(later) as tasks:
            y_NH = expert_ffn(x_NH, rows, up, down, ffn, "grouped", leaver.leaver(up, down), tuple(biases) or (None, None))
            gradient = torch.cat([dy_NH, nan]) if total else dy_NH
            wanted = [x_NH, *biases] if later else [x_NH, up, down, *biases]
            found = list(torch.autograd.grad(y_NH, wanted, gradient))
        if later:
            sums = {each.weight: torch.zeros_like(each.weight) for each in tasks}
            for each in tasks:
                each.add(sums[each.weight])
            found[1:1] = [sums[up], sums[down]]
        return y_NH.detach(), found

    y_NH, wanted = run(ExpertRows.of(counts), *inputs)
    with as_on_gpus():
        x_NH = torch.cat([inputs[0].detach(), nan])
        found_NH, found = run(on_the_device(counts), x_NH, *inputs[1:])
    torch.testing.assert_close(found_NH[: sum(counts)], y_NH)
    torch.testing.assert_close(found[0][: sum(counts)], wanted[0])
    for one, other in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(one, other)
