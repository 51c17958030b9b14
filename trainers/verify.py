"""`foldray verify`: this recipe's fold, engine and backend against one process, on the same data.

The field's most common fault is a gradient whose scale changes with the parallel sizes. Here a user can see that it does not: one
optimizer step is taken on the workers and, by the plainest path there is, in one process (torch engine, experts in a loop, no
fold), and every parameter's gradient, as the optimizer got it, is compared.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model import Batch, Transformer
from foldray.moe import MoeBackend
from foldray.recipe import Recipe
from foldray.runtime import Engine, TorchEngine
from foldray.spec import Ownership, parameter_table, smallest_slice
from trainers import cluster
from trainers.engines import DTYPES, make_backend, make_engine
from trainers.telemetry import as_json as to_json

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
"""Largest difference, relative to each gradient's largest value and absolute for the loss, that counts as rounding."""
_SHOWN = 5


@dataclass(frozen=True)
class Verification:
    """What a comparison found.

    Args:
        loss_abs_diff: of the mean cross-entropy and of the balance and z-losses, the largest absolute difference.
        grad_max_rel_diff: the largest of all parameters' max|Δ| / max|reference|.
        worst_parameter: global name of the parameter where it is.
        worst: the parameters that differ most, with their differences.
    """

    dtype: str
    engine: str
    backend: str
    loss_abs_diff: float
    grad_max_rel_diff: float
    worst_parameter: str
    worst: dict[str, float]

    @property
    def passed(self) -> bool:
        return max(self.loss_abs_diff, self.grad_max_rel_diff) <= TOLERANCE[self.dtype]  # and no NaN, which is never ≤

    def as_dict(self) -> dict[str, Any]:
        """The document of `foldray verify --json`."""
        found = {key: value for key, value in asdict(self).items() if key != "worst"}
        return {**found, "passed": self.passed}


def verify(recipe: Recipe, shrink: bool = False, as_json: bool = False) -> int:
    """Compare and report; 0 if all differences are rounding, 1 if not.

    Args:
        shrink: keep the fold and the kind of model, but make it as small as the fold allows.

    Raises:
        UserError: the recipe cannot run here.
    """
    checked = as_checked(small(recipe) if shrink else recipe)
    print(f"{checked.placed_fold} on {checked.cluster.workers} workers against one process …", file=sys.stderr)
    found = Verification(**cluster.on_workers(checked, _loop, "verify"))
    print(to_json(found.as_dict()) if as_json else _report(recipe, found))
    return 0 if found.passed else 1


def as_checked(recipe: Recipe) -> Recipe:
    """The recipe in its widest precision, with an optimizer that keeps its gradient, and drops that do not follow the fold."""
    wide = recipe.engine.kind == "torch" and recipe.moe.backend != "tutel"
    given = recipe.model_dump()
    given["precision"] = "float64" if wide else "float32"
    given["optimizer"] = {"kind": "sgd", "momentum": 0.9, "lr": 1e-3, "weight_decay": 0.0, "clip": None}
    given["cluster"]["max_failures"] = 0
    if recipe.model.router.capacity_factor is not None:
        given["model"]["router"]["drop_scope"] = "sequence"
        if recipe.slicing is not None:  # by probability, pieces drop each for itself
            given["model"]["router"]["drop"] = "position"
            given["schedule"].update(slicing="token_uniform", slices=None)
    return Recipe.parse(given)


def small(recipe: Recipe) -> Recipe:
    """The same fold, schedule and kinds of layers, in sizes that take seconds."""
    fold, schedule, model, training = recipe.placed_fold, recipe.schedule, recipe.model, recipe.training
    stages = fold.pp * schedule.virtual_stages
    dense, every = min(model.dense_first, 1), min(model.moe_every, 2)
    layers = max(stages, dense + every)
    sizes = schedule.stage_layers and [1 if size == min(schedule.stage_layers) else 2 for size in schedule.stage_layers]
    topk = min(model.topk, 4)
    unit = smallest_slice(fold.cp, fold.tp)
    length, micro_batch = unit * max(math.ceil(32 / unit), schedule.degree), schedule.batch_degree
    micro_batch *= min(training.micro_batch // micro_batch, 2)
    given = recipe.model_dump()
    given["schedule"].update(stage_layers=sizes, slices=None)
    given["data"]["seq_len"] = length
    given["training"].update(micro_batch=micro_batch, global_batch=fold.dp * micro_batch * 2 * fold.pp)
    given["model"].update(
        preset=None, layers=sum(sizes) if sizes else layers, dense_first=dense, moe_every=every, hidden=64,
        heads=fold.tp * min(model.heads // model.kv_heads, 2), kv_heads=fold.tp, head_dim=8, topk=topk,
        experts=fold.ep * max(math.ceil(topk / fold.ep), min(model.experts // fold.ep, 4)),
        expert_hidden=fold.etp * 16, ffn_hidden=fold.tp * 32, shared_hidden=fold.tp * 16 if model.shared_hidden else 0,
        vocab=fold.tp * 64, max_positions=length, init_std=0.1,
    )  # fmt: skip
    return Recipe.parse(given)


def compare(recipe: Recipe, groups: Groups, device: torch.device) -> dict[str, Any] | None:
    """One step on this rank's part and, on the fold's first rank, of the whole; the fields of a `Verification` there."""
    engine = make_engine(recipe, groups, device)
    losses = engine.train([random_batch(recipe, groups.dp_rank, groups.fold.dp, m, device) for m in range(recipe.accumulation)])
    means = torch.stack([torch.stack([part.language, part.balance, part.z]) for part in losses]).mean(0)
    means = groups.control.all_reduce(means) / groups.dense_gradients.size
    own = _gradients(engine)
    first = groups.rank == groups.fold.offset
    loss_diff = torch.zeros(())
    whole: dict[str, torch.Tensor] = {}
    if first:
        reference, whole = _one_process(recipe, device)
        loss_diff = (means - reference).abs().max()
    names = [spec.name for spec in parameter_table(recipe.model)]
    differences = groups.control.all_reduce(_differences(recipe, engine, own, whole, groups, device), "max").tolist()
    if not first:
        return None
    ranked = sorted(zip(differences, names, strict=True), reverse=True, key=lambda item: (math.isnan(item[0]), item[0]))
    return {
        "dtype": recipe.precision, "engine": recipe.engine.kind, "backend": recipe.moe.backend,
        "loss_abs_diff": float(loss_diff), "grad_max_rel_diff": ranked[0][0], "worst_parameter": ranked[0][1],
        "worst": {name: value for value, name in ranked[:_SHOWN]},
    }  # fmt: skip


def _differences(
    recipe: Recipe,
    engine: Engine,
    own: Mapping[str, torch.Tensor],
    whole: Mapping[str, torch.Tensor],
    groups: Groups,
    device: torch.device,
) -> torch.Tensor:
    """For each parameter max|Δ| / max|reference| over what this rank holds; NaN becomes infinity, which a maximum keeps."""
    found = []
    for spec in parameter_table(recipe.model):
        reference = whole[spec.name] if spec.name in whole else torch.empty(spec.shape, dtype=torch.float64, device=device)
        if groups.control.group is not None:
            dist.broadcast(reference, groups.fold.offset, group=groups.control.group)
        difference = torch.zeros((), dtype=torch.float64, device=device)
        if spec.name in own:
            apart = (own[spec.name].double() - reference[engine.model.pieces[spec.name].box]).abs().max()
            difference = torch.where(apart == 0, apart, apart / reference.abs().max())
        found.append(difference.nan_to_num(nan=math.inf, posinf=math.inf))
    return torch.stack(found)


def _one_process(recipe: Recipe, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses [language, balance, z] and all gradients of the same step, without a fold."""
    alone = Groups.create(Fold(1))
    backend = MoeBackend(gate=make_backend(recipe).gate, experts="loop")
    seed, dtype = recipe.training.seed, DTYPES[recipe.precision]
    model = Transformer(Ownership(recipe.model, Fold(1)), alone, backend, seed=seed, device=device, dtype=dtype)
    engine = TorchEngine(model, alone, recipe.optimizer)
    dp = recipe.placed_fold.dp
    losses = engine.train([random_batch(recipe, r, dp, m, device) for m in range(recipe.accumulation) for r in range(dp)])
    means = torch.stack([torch.stack([part.language, part.balance, part.z]) for part in losses]).mean(0)
    return means, {name: gradient.double().contiguous() for name, gradient in _gradients(engine).items()}


def _gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """What the optimizer got, by global name: SGD's momentum after its first step is the gradient itself."""
    engine.update(0.0)
    pattern = ("optimizer/", "/momentum_buffer")
    return {
        key.removeprefix(pattern[0]).removesuffix(pattern[1]): tensor.detach().clone()
        for key, tensor in engine.state().items()
        if key.startswith(pattern[0]) and key.endswith(pattern[1])
    }


def random_batch(recipe: Recipe, dp_rank: int, dp: int, m: int, device: torch.device) -> Batch:
    """A micro-batch of random text, different for every data-parallel rank."""
    shape = (recipe.training.micro_batch, recipe.data.seq_len + 1)
    generator = torch.Generator().manual_seed(recipe.training.seed + m * dp + dp_rank)
    token_BL = torch.randint(0, recipe.model.vocab, shape, generator=generator).to(device)
    documents = (token_BL[:, :-1] % 17 == 0).cumsum(1) if recipe.data.mask_documents else None
    return Batch(token_BL[:, :-1], token_BL[:, 1:], documents)


def _loop(config: dict[str, Any]) -> dict[str, Any] | None:
    return compare(*cluster.worker(config))


def _report(recipe: Recipe, found: Verification) -> str:
    limit = TOLERANCE[found.dtype]
    lines = [
        f"{found.engine} engine, {found.backend} backend, {found.dtype}; differences up to {limit:.0e} are rounding",
        f"  loss            {found.loss_abs_diff:.1e} (absolute)",
        f"  worst gradient  {found.grad_max_rel_diff:.1e} (of the tensor's largest value)  {found.worst_parameter}",
    ]
    if recipe.model.router.capacity_factor is not None and recipe.model.router.drop_scope == "sub_sequence":
        by = " and by position" if recipe.slicing is not None and recipe.model.router.drop == "probability" else ""
        lines.append(f"  dropping was per whole sequence{by} here: otherwise who is dropped depends on how they are cut")
    if not found.passed:
        lines += ["  parameters that differ most:"] + [f"    {value:.1e}  {name}" for name, value in found.worst.items()]
    return "\n".join([*lines, "passed" if found.passed else "FAILED: this fold does not give what one process gives"])
