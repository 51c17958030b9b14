"""The probe runs every collective that a fold needs, and names those that fail."""

from __future__ import annotations

import pytest
import torch

from foldray.comm import Communicator, Groups, UnsupportedBackend, probe
from foldray.fold import Fold

_FOLDS = [Fold(8, tp=2, cp=2, pp=2, ep=2, etp=2), Fold(8, tp=4, ep=8), Fold(8, pp=4, etp=2), Fold(1)]


def _probe(rank: int, fold: Fold, dtype: torch.dtype, broken: str = "") -> str:
    groups = Groups.create(fold, rank)
    whole = getattr(Communicator, broken) if broken else None
    if broken:
        setattr(Communicator, broken, _refuse)
    try:
        probe(groups, torch.device("cpu"), dtype)
        assert not groups.traffic.counts
        return ""
    except UnsupportedBackend as error:
        return str(error)
    finally:
        if broken:
            setattr(Communicator, broken, whole)
        groups.close()


def _refuse(self: Communicator, *_: object) -> None:
    raise RuntimeError("Invalid scalar\ntype")


@pytest.mark.gate(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fold", _FOLDS, ids=str)
def test_gloo_can_do_all_that_a_fold_needs(ranks, fold: Fold, dtype: torch.dtype) -> None:
    assert set(ranks(fold.world_size).run(_probe, fold, dtype)) == {""}


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("all_to_all", "the gloo backend cannot do the uneven all-to-all of torch.bfloat16 that tokens needs under TP2 CP2"),
        ("reduce_scatter", "the reduce-scatter of torch.bfloat16 that tensor needs"),
        ("shift", "the send and receive of torch.bfloat16 that context needs"),
        ("all_reduce", "the all-reduce of torch.float32 that tensor needs"),
    ],
)
def test_what_the_backend_cannot_do_is_named_in_one_line(ranks, broken: str, named: str) -> None:
    for line in ranks(8).run(_probe, _FOLDS[0], torch.bfloat16, broken):
        assert named in line
        assert line.endswith(": Invalid scalar type")
        assert "\n" not in line
