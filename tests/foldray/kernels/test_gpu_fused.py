"""The script that compares our own kernels on a GPU (`tests/gpu/fused.py`), rehearsed on Triton's interpreter."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from foldray.blueprint import RouterSpec
from foldray.kernels import routing
from foldray.kernels.fused import Heads
from tests.foldray.kernels.test_fused import INTERPRETED
from tests.foldray.launches import with_kernels
from tests.gpu import fused

needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")


def timed(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


MACHINE = fused.Machine(torch.device("cpu"), timed)


@needs_interpreter
@pytest.mark.parametrize("rule", fused.RULES)
def test_gate(rule: str) -> None:
    with with_kernels():
        found = fused.gate(MACHINE, RouterSpec(**fused.RULES[rule]), 50, 6, 2)
    assert found.keys() == {"weights", "gradient", "scores", "z", "ours", "torch"}


@needs_interpreter
def test_another_gate_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = routing.gate
    monkeypatch.setattr(routing, "gate", lambda *given: (found := gate(*given))._replace(weight_TK=found.weight_TK * 1.001))
    with with_kernels(), pytest.raises(AssertionError, match="weights"):
        fused.gate(MACHINE, RouterSpec(), 50, 6, 2)


@needs_interpreter
def test_others() -> None:
    with with_kernels():
        assert fused.sort(MACHINE, 50, 8, 2).keys() == {"ours", "torch"}
        assert fused.halves(MACHINE, 50, 8).keys() == {"sum", "ours", "torch"}
        assert fused.split_rotate(MACHINE, 9, Heads(3, 1, 8)).keys() == {"q", "k", "v", "dx", "dbias", "ours", "torch"}
        assert fused.norm(MACHINE, 9, 40).keys() == {"y", "x", "dx", "dweight", "ours", "torch"}
        assert fused.add_groups(MACHINE, 7, 3, 5).keys() == {"ours", "torch, all"}
