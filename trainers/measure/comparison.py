"""A recipe's engine on its workers beside one process, on the same data: what every worker of `foldray verify` does.

The one process takes the plainest path there is: torch engine, experts in a loop, no fold, no schedule. The fold's first rank
runs it, and sends its tensors to all ranks, each of which compares the boxes that it holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from foldray.blueprint import Ownership, ParameterSpec, parameter_table
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model import Batch, Transformer, all_losses
from foldray.moe import MoeBackend
from foldray.recipe import Recipe
from foldray.runtime import Engine, TorchEngine
from trainers.worker.engines import DTYPES, make_backend, make_engine

Tensors = Mapping[str, torch.Tensor]
_SHOWN = 5


def compare_gradients(recipe: Recipe, groups: Groups, device: torch.device) -> dict[str, Any] | None:
    """The losses and all gradients of one step; on the fold's first rank, how far they are from one process's.

    Args:
        recipe: one whose optimizer is SGD with momentum: its memory after the first step is the gradient that it got.
    """
    engine = make_engine(recipe, groups, device)
    means = all_losses(engine.train(random_batches(recipe, groups, device)), groups.control).means()
    engine.update(0.0)
    own, reference = _tensors(engine, "optimizer/{}/momentum_buffer"), means
    whole: Tensors = {}
    engine.close()
    first = groups.rank == groups.fold.offset
    if first:
        alone, dp = _one_process(recipe, recipe.precision, device), groups.fold.dp
        reference = all_losses(alone.train(_all_batches(recipe, dp, device)), Groups.create(Fold(1)).control).means()
        alone.update(0.0)
        whole = _tensors(alone, "optimizer/{}/momentum_buffer")
    found = []
    for spec, expected in _shared(recipe, whole, groups, device):
        difference = torch.zeros((), dtype=torch.float64, device=device)
        if spec.name in own:
            apart = (own[spec.name].double() - expected[engine.model.pieces[spec.name].box]).abs().max()
            difference = torch.where(apart == 0, apart, apart / expected.abs().max())
        found.append(difference.nan_to_num(nan=math.inf, posinf=math.inf))  # a maximum keeps infinity
    differences = groups.control.all_reduce(torch.stack(found), "max").tolist()
    if not first:
        return None
    ranked = _ranked(zip((spec.name for spec in parameter_table(recipe.model)), differences, strict=True))
    worst = next(iter(ranked))
    return {
        "loss_abs_diff": float((means - reference).abs().max()), "grad_max_rel_diff": ranked[worst], "worst_parameter": worst,
        "worst": dict(list(ranked.items())[:_SHOWN]),
    }  # fmt: skip


def compare_updates(recipe: Recipe, groups: Groups, device: torch.device) -> dict[str, Any] | None:
    """What one update changes in the weights; on the fold's first rank, how far that is from one process in at least float32.

    Of a parameter's change Δ and the reference's Δ′ it is |⟨Δ, Δ′⟩ / ⟨Δ′, Δ′⟩ − 1|: 1 where nothing is trained, 1 where the
    gradient is twice too large, near 0 in spite of a low precision's noise. The experts of a block count together, for rounding
    sends a token to another expert now and then.

    Args:
        recipe: one whose optimizer is plain SGD.
    """
    engine = make_engine(recipe, groups, device)
    own = _changes(engine, random_batches(recipe, groups, device), recipe.optimizer.lr)
    engine.close()
    first = groups.rank == groups.fold.offset
    whole: Tensors = {}
    if first:
        wide = "float32" if recipe.precision == "bfloat16" else recipe.precision
        whole = _changes(_one_process(recipe, wide, device), _all_batches(recipe, groups.fold.dp, device), recipe.optimizer.lr)
    counted = set(recipe.ownership.counted(groups.rank))
    products: dict[str, torch.Tensor] = {}
    for spec, expected in _shared(recipe, whole, groups, device):
        own_product = torch.zeros((), dtype=torch.float64, device=device)
        if spec.name in counted:
            own_product = (own[spec.name].double() * expected[engine.model.pieces[spec.name].box]).sum()
        name = re.sub(r"\.experts\.\d+\.", ".experts.*.", spec.name)
        both = torch.stack([own_product, expected.square().sum() * first])
        products[name] = products[name] + both if name in products else both
    sums = groups.control.all_reduce(torch.stack(list(products.values()))).tolist()
    if not first:
        return None
    ranked = _ranked(
        (name, abs(got / wanted - 1) if wanted else abs(got)) for name, (got, wanted) in zip(products, sums, strict=True)
    )
    worst = next(iter(ranked))
    return {"update_rel_diff": ranked[worst], "update_worst_parameter": worst}


def random_batch(recipe: Recipe, dp_rank: int, dp: int, m: int, device: torch.device) -> Batch:
    """A micro-batch of random text, different for every data-parallel rank."""
    shape = (recipe.training.micro_batch, recipe.data.seq_len + 1)
    generator = torch.Generator().manual_seed(recipe.training.seed + m * dp + dp_rank)
    token_BL = torch.randint(0, recipe.model.vocab, shape, generator=generator).to(device)
    documents = (token_BL[:, :-1] % 17 == 0).cumsum(1) if recipe.data.mask_documents else None
    return Batch(token_BL[:, :-1], token_BL[:, 1:], documents)


def random_batches(recipe: Recipe, groups: Groups, device: torch.device) -> list[Batch]:
    """A step's micro-batches of random text for this rank."""
    return [random_batch(recipe, groups.dp_rank, groups.fold.dp, m, device) for m in range(recipe.accumulation)]


def _all_batches(recipe: Recipe, dp: int, device: torch.device) -> list[Batch]:
    return [random_batch(recipe, rank, dp, m, device) for m in range(recipe.accumulation) for rank in range(dp)]


def _one_process(recipe: Recipe, precision: str, device: torch.device) -> Engine:
    """An engine without a fold."""
    alone, backend = Groups.create(Fold(1)), MoeBackend(gate=make_backend(recipe).gate, experts="loop")
    ownership, seed = Ownership(recipe.model, Fold(1)), recipe.training.seed
    model = Transformer(ownership, alone, backend, seed=seed, device=device, dtype=DTYPES[precision])
    return TorchEngine(model, alone, recipe.optimizer)


def _changes(engine: Engine, batches: Sequence[Batch], lr: float) -> Tensors:
    """What one update adds to every weight, by global name."""
    before = _tensors(engine, "model/{}")
    engine.train(batches)
    engine.update(lr)
    return {name: after - before[name] for name, after in _tensors(engine, "model/{}").items()}


def _tensors(engine: Engine, key: str) -> Tensors:
    """This rank's part of an engine's state under keys of one kind, by global name; a collective call."""
    state = engine.state()
    return {name: state[key.format(name)].detach().clone() for name in engine.model.pieces}


def _shared(recipe: Recipe, whole: Tensors, groups: Groups, device: torch.device) -> Iterator[tuple[ParameterSpec, torch.Tensor]]:
    """Each parameter's whole tensor in float64, which the fold's first rank has and all others get; a collective call."""
    for spec in parameter_table(recipe.model):
        tensor = whole[spec.name].double().contiguous() if whole else torch.empty(spec.shape, dtype=torch.float64, device=device)
        if groups.control.group is not None:
            dist.broadcast(tensor, groups.fold.offset, group=groups.control.group)
        yield spec, tensor


def _ranked(differences: Any) -> dict[str, float]:
    """The worst first; what is no number goes before all others."""
    return dict(sorted(differences, reverse=True, key=lambda item: (math.isnan(item[1]), item[1])))
