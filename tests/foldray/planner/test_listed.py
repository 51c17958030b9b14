"""Candidates with found lists: quick predictions are near those of a longer search."""

from __future__ import annotations

import pytest

from foldray.blueprint import ModelSpec
from foldray.fold import Fold
from foldray.planner.candidate import Candidate, Job
from foldray.planner.device import Device
from foldray.planner.hardware import load_hardware
from foldray.planner.listed import list_seconds, with_kind

MACHINES = load_hardware("eos-h100")
MODEL = ModelSpec(
    layers=8, hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn_hidden=2048, experts=8, topk=2, expert_hidden=1024, vocab=4096
)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("axes", [{"ep": 8}, {"pp": 2, "ep": 4}, {"pp": 4, "ep": 2}, {"tp": 2, "ep": 4, "etp": 2}], ids=str)
def test_a_quick_prediction_is_near_that_of_a_longer_search(axes: dict[str, int], degree: int) -> None:
    fold = Fold(8, **axes)
    candidate = Candidate(Job(MODEL, 4096, 16 * fold.dp), fold)
    listed = with_kind(candidate, "list", degree, MACHINES)
    assert list_seconds(listed.candidate, Device.of(candidate.job, MACHINES)) == pytest.approx(listed.seconds, rel=0.02)
    assert listed.over_bound >= 1
