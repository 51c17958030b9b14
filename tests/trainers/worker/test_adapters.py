"""A worker takes the network adapters of its half before it makes its first communicator."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foldray import Recipe
from foldray.comm import Groups
from trainers.cluster import actors
from trainers.measure import trial
from trainers.worker import loop

GIVEN: dict[str, Any] = {
    "model": {"preset": "tiny"},
    "placement": {"attention": 1, "experts": 2, "expert_adapters": ["mlx5_1", "mlx5_10"]},
    "cluster": {"workers": 3, "gpu": True},
}


class Made(Exception):
    """A worker makes its communicators."""


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*_: Any) -> None:
        raise Made(os.environ["NCCL_IB_HCA"])

    monkeypatch.setenv("NCCL_IB_HCA", "those of the job")
    monkeypatch.setattr(Groups, "create", create)


def begin(way: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin what a worker does in this way, up to its communicators."""
    state = {"rank": rank, "device": torch.device("cpu")}
    if way == "once":
        actors._once(state, GIVEN, lambda *_: None, {})
    elif way == "trial":
        trial.measure_turn(state, GIVEN, steps=1, keep=1, record=False)
    else:
        train = SimpleNamespace(
            get_context=lambda: SimpleNamespace(get_world_rank=lambda: rank),
            torch=SimpleNamespace(get_device=lambda: torch.device("cpu")),
        )
        monkeypatch.setattr(loop, "ray", SimpleNamespace(train=train))
        monkeypatch.setattr(loop, "Batches", lambda *_: None)
        monkeypatch.setattr(loop, "nodes", list)
        nothing: Any = SimpleNamespace(train=None)
        loop.Worker(Recipe.parse(GIVEN), nothing, nothing, nothing, holder="")


@pytest.mark.parametrize(("rank", "adapters"), [(0, "those of the job"), (1, "=mlx5_1,mlx5_10"), (2, "=mlx5_1,mlx5_10")])
@pytest.mark.parametrize("way", ["once", "trial", "training"])
def test_before_the_first_communicator(way: str, rank: int, adapters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Made, match=f"^{adapters}$"):
        begin(way, rank, monkeypatch)
