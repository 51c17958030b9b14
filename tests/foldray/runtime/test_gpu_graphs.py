"""The script that checks captured ops on a GPU (`tests/gpu/graphs.py`), rehearsed on a CPU with the stand-in for graphs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from foldray.moe import Router
from tests.foldray.standin import Standin, survey
from tests.gpu import graphs

TINY = {**graphs.SMALL, "hidden": 32, "head_dim": 8, "ffn_hidden": 32, "expert_hidden": 32, "shared_hidden": 16, "vocab": 64}


def rehearsal() -> graphs.Machine:
    constants: dict[int, Any] = {}

    def timed(step: Any) -> tuple[float, float]:
        begin = time.perf_counter()
        step()
        return (took := (time.perf_counter() - begin) * 1e3), took

    return graphs.Machine(
        torch.device("cpu"),
        lambda: Standin(constants),
        timed,
        lambda step: {"by_name": {}},
        lambda step: 0.0,
        lambda: survey(constants),
    )


@pytest.mark.parametrize("name", graphs.LISTS)
@pytest.mark.gate(2)
def test_bits(name: str) -> None:
    assert graphs.bits(rehearsal(), TINY, 32, graphs.LISTS[name]) == {"eager_gib": 0.0, "graphs_gib": 0.0}


@pytest.mark.gate(1 / 2)
def test_other_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, routings = Router.forward, []

    def counting(self: Router, *given: Any) -> Any:
        routings.append(torch.zeros(()))
        found = forward(self, *given)
        return replace(found, weight_TK=found.weight_TK * (1 + len(routings) / 100))

    monkeypatch.setattr(Router, "forward", counting)
    with pytest.raises(AssertionError, match="list 0, step 0: other bits"):
        graphs.bits(rehearsal(), TINY, 32, {})


@pytest.mark.gate(1)
def test_times() -> None:
    by_op = graphs.host(rehearsal(), {**TINY, "layers": 1}, 32)
    assert by_op["eager"].keys() == by_op["graphs"].keys() > {"route F", "attention B", "expert F"}
    rows = graphs.block(rehearsal(), {**TINY, "layers": 1}, 32, degrees=(1, 2))
    assert list(rows) == ["1 pieces", "1 pieces, graphs", "2 pieces", "2 pieces, graphs"]
    assert all(row["min"] <= row["ms"] <= row["max"] for row in rows.values())
