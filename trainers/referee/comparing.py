"""One rank of a case: the project's losses, gradients and norm against one process of the same model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.referee.cases import Batches, Case, make_batches, whole
from trainers.referee.rank import Gradients, Layout, Peer

_SHOWN = 5
REFERENCES = {"tokens": True, "means": False}
"""`tokens` trains on all batches at once; `means` is the mean over ranks and micro-batches of the loss of each."""


def compare(kind: type[Peer], layout: Layout, case: Case, dtype: torch.dtype, folder: Path) -> dict[str, Any]:
    """Run a case on this rank. Return the largest differences over all ranks, by reference (`REFERENCES`)."""
    batches, dp_rank = make_batches(case, layout.dp), dist.get_rank() // layout.tp
    peer = kind(case, layout, dtype, folder)  # type: ignore[call-arg]
    targets = batches.targets / layout.dp / case.micro_batches if case.counted else None
    evaluated = peer.evaluate(batches, dp_rank, targets)
    loss, gradients, norm = peer.train(batches, dp_rank, targets)
    means = torch.stack([loss.double(), evaluated.double()])
    dist.all_reduce(means)
    means /= dist.get_world_size()
    found = {}
    for name, together in REFERENCES.items():
        figures, expected = _alone(kind, case, batches, dtype, together)
        apart = (means - figures[:2]).abs().tolist()
        norms = None if norm is None else _largest([abs(norm / float(figures[2]) - 1)])[0]
        found[name] = {"loss": apart[0], "norm": norms, "evaluation": apart[1], **gradients_apart(peer, gradients, expected)}
    return found


def gradients_apart(peer: Peer, gradients: Gradients, expected: Gradients) -> dict[str, Any]:
    """Return max|Δ| / max|expected| of the worst gradient over all ranks, the worst ones by name, and those that are missing."""
    names, apart, seen = [], [], set[str]()
    for name, gradient, piece in peer.pieces(gradients, expected):
        size = float(expected.get(name, piece).double().abs().max())
        difference = float((gradient.double() - piece.double()).abs().max())
        names.append(name)
        apart.append(difference / size if size else math.inf if difference else 0.0)
        seen.add(name.rpartition(".experts.")[0] + ".experts" if ".experts." in name else name)
    ranked = sorted(zip(names, _largest(apart), strict=True), key=lambda item: item[1], reverse=True)
    missing = {name for name in expected if name not in seen and not any(name.startswith(f"{each}.") for each in seen)}
    return {"gradient": ranked[0][1], "worst": dict(ranked[:_SHOWN]), "missing": sorted(missing)}


def _largest(values: list[float]) -> list[float]:
    """Return the largest of all ranks' values, one by one. NaN is the largest."""
    largest = torch.tensor(values, dtype=torch.float64).nan_to_num(nan=math.inf, posinf=math.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def _alone(kind: type[Peer], case: Case, batches: Batches, dtype: torch.dtype, together: bool) -> tuple[Tensor, Gradients]:
    """Train and evaluate one process of the same model. Return its loss, its evaluation and the norm, and its gradients."""
    model = kind.alone(case, dtype)
    figures = []
    for inputs in (batches.inputs, batches.inputs[:1]):
        parts = [part for parts in inputs for part in parts]
        parts = [whole(parts)] if together else parts
        share = batches.targets / len(parts) * (len(inputs) / len(batches.inputs)) if case.counted else None
        figures.append(torch.stack([kind.loss(case, model, part, share) for part in parts]).mean())
    figures[0].backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    norm = torch.stack([each.double().norm() for each in gradients.values()]).norm()
    return torch.stack([figures[0].detach().double(), figures[1].detach().double(), norm]), gradients
