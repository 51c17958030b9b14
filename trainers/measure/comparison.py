"""Compares a recipe's engine on its workers with one process, on the same data. Every worker of `foldray verify` runs this.

The one process runs the plainest code: torch engine, experts in a loop, no fold, no schedule. The fold's first rank runs it,
and sends its tensors to all ranks. Each rank compares the boxes that it holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from foldray.blueprint import Ownership, ParameterSpec, parameter_table
from foldray.comm import Communicator, Groups
from foldray.fold import Fold
from foldray.model import IGNORED, Batch, Transformer, all_losses
from foldray.model.initial import initial_values
from foldray.moe import MoeBackend
from foldray.recipe import Recipe
from foldray.runtime import Engine, TorchEngine, Trace
from trainers.worker.engines import DTYPES, make_backend, make_engine

Tensors = Mapping[str, torch.Tensor]
_SHOWN = 5
_STIRRED = 0.02  # standard deviation of what adapters begin with here
_TINY = 1e-300  # keeps gradients that are all zero from 0 / 0


def compare_gradients(recipe: Recipe, groups: Groups, device: torch.device, masked: bool = False) -> dict[str, Any] | None:
    """Compare the losses, all gradients and their norm of one step with one process, and the loss of an evaluation.

    The recipe's optimizer must be SGD with momentum, whose state after the first step is the gradient. `masked`: see
    `random_batch`. Return the differences on the fold's first rank, and None on other ranks.
    """
    batches = random_batches(recipe, groups, device, masked)
    engine = _by_times(recipe, groups, device, batches)
    local, figures = _gradients(engine, batches, groups.control)
    engine.close()
    first, reference, gradients = groups.rank == groups.fold.offset, figures, dict[str, torch.Tensor]()
    if first:
        alone, whole = _one_process(recipe, recipe.precision, device), _all_batches(recipe, groups.fold.dp, device, masked)
        gradients, reference = _gradients(alone, whole, Groups.create(Fold(1)).control)
    largest, squares = [], torch.zeros(2, dtype=torch.float64, device=device)
    for spec, expected in _shared(recipe, gradients, groups, device):
        difference = torch.zeros((), dtype=torch.float64, device=device)
        if spec.name in local:
            piece = expected[engine.model.pieces[spec.name].box]
            apart = local[spec.name].double() - piece
            squares += torch.stack([apart.square().sum(), piece.square().sum()])
            difference = torch.where(apart.any(), apart.abs().max() / expected.abs().max(), 0.0)
        largest.append(difference.nan_to_num(nan=math.inf, posinf=math.inf))  # a maximum over ranks may lose NaN
    differences = groups.control.all_reduce(torch.stack(largest), "max").tolist()
    distance, length = groups.control.all_reduce(squares).sqrt().tolist()
    if not first:
        return None
    ranked = _ranked(zip((spec.name for spec in _trained(recipe)), differences, strict=True))
    worst = next(iter(ranked))
    apart = (figures - reference).abs()
    return {
        "loss_abs_diff": float(apart[:-2].max()), "grad_max_rel_diff": ranked[worst], "worst_parameter": worst,
        "worst": dict(list(ranked.items())[:_SHOWN]), "norm_rel_diff": float(apart[-2] / reference[-2]),
        "evaluation_abs_diff": float(apart[-1]), "grad_rel_distance": distance / max(length, _TINY),
    }  # fmt: skip


def _by_times(recipe: Recipe, groups: Groups, device: torch.device, batches: Sequence[Batch]) -> Engine:
    """Make an engine. If its order goes by the times of ops, another engine first times a step, as training does."""
    ordering = None
    if recipe.ordering.goes_by_costs:
        timing = make_engine(recipe, groups, device)
        timing.execution.trace = Trace(device)
        timing.train(batches)
        if timing.execution.lacks_costs:
            timing.execution.learn_costs()
        ordering = timing.execution.ordering
        timing.close()
    engine = _stirred(make_engine(recipe, groups, device))
    if ordering is not None:
        engine.execution.reorder(ordering)
    if (copying := engine.execution.copying) is not None:  # as many copies as there may be, however little they bring
        count_ME = all_losses(engine.execution.evaluate(batches), groups.control).count_ME
        copying.choose(count_ME.tolist(), worth=0.0)
    return engine


def _gradients(engine: Engine, batches: Sequence[Batch], control: Communicator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Evaluate, then train a step. Return this rank's boxes of the gradients, and some figures over all ranks.

    The figures are the mean cross-entropy, balance loss and z-loss of the step, with multi-token prediction the mean
    cross-entropy of further tokens, the gradient norm of the step, and the mean cross-entropy of the evaluation.
    """
    evaluated = all_losses(engine.execution.evaluate(batches), control)
    if engine.model.spec.router.balance_scope == "global_batch":  # as after a step: even frequencies would have no gradient
        engine.model.update_biases(evaluated.count_ME)
    total = all_losses(engine.train(batches), control)
    means = torch.cat([total.means(), total.further().view(1)]) if engine.model.spec.mtp_depth else total.means()
    norm = engine.update(0.0).total
    gradients = _tensors(engine, "optimizer/{}/momentum_buffer")
    return dict(gradients), torch.cat([means, means.new_tensor([norm]), evaluated.means()[:1]])


def compare_updates(recipe: Recipe, groups: Groups, device: torch.device) -> dict[str, Any] | None:
    """Compare the change of the weights in one update with one process in at least float32.

    The difference between a parameter's change Δ and the reference's change Δ′ is |⟨Δ, Δ′⟩ / ⟨Δ′, Δ′⟩ − 1|. It is 1 if the
    parameter is not trained, 1 if its gradient is twice too large, and near 0 even with the noise of a low precision. The
    experts of a block count together, because rounding sometimes sends a token to another expert.

    The recipe's optimizer must be plain SGD. Return the differences on the fold's first rank, and None on other ranks.
    """
    local_batches = random_batches(recipe, groups, device)
    engine = _by_times(recipe, groups, device, local_batches)
    local = _changes(engine, local_batches, recipe.optimizer.lr)
    engine.close()
    first = groups.rank == groups.fold.offset
    changes: Tensors = {}
    if first:
        wide = "float32" if recipe.precision == "bfloat16" else recipe.precision
        batches = _all_batches(recipe, groups.fold.dp, device)
        changes = _changes(_one_process(recipe, wide, device), batches, recipe.optimizer.lr)
    counted = set(recipe.ownership.counted(groups.rank))
    products: dict[str, torch.Tensor] = {}
    for spec, expected in _shared(recipe, changes, groups, device):
        local_product = torch.zeros((), dtype=torch.float64, device=device)
        if spec.name in counted:
            local_product = (local[spec.name].double() * expected[engine.model.pieces[spec.name].box]).sum()
        name = re.sub(r"\.experts\.\d+\.", ".experts.*.", spec.name)
        both = torch.stack([local_product, expected.square().sum() * first])
        products[name] = products[name] + both if name in products else both
    sums = groups.control.all_reduce(torch.stack(list(products.values()))).tolist()
    if not first:
        return None
    ratios = zip(products, sums, strict=True)
    ranked = _ranked((name, abs(product / square - 1) if square else abs(product)) for name, (product, square) in ratios)
    worst = next(iter(ranked))
    return {"update_rel_diff": ranked[worst], "update_worst_parameter": worst}


def random_batch(recipe: Recipe, dp_rank: int, dp: int, m: int, device: torch.device, masked: bool = False) -> Batch:
    """Make a micro-batch of random text, which differs between data-parallel places.

    With `masked`, the first targets of every sequence do not count; their number is random. So it is with conversations.
    """
    shape = (recipe.training.micro_batch, recipe.data.seq_len + 1)
    generator = torch.Generator().manual_seed(recipe.training.seed + m * dp + dp_rank)
    token_BL = torch.randint(0, recipe.model.vocab, shape, generator=generator).to(device)
    documents = (token_BL[:, :-1] % 17 == 0).cumsum(1) if recipe.data.mask_documents else None
    target_BL = token_BL[:, 1:]
    if masked or recipe.data.masked:
        first_B1 = torch.randint(0, recipe.data.seq_len, (len(token_BL), 1), generator=generator).to(device)
        target_BL = target_BL.masked_fill(torch.arange(recipe.data.seq_len, device=device) < first_B1, IGNORED)
    return Batch(token_BL[:, :-1], target_BL, documents)


def random_batches(recipe: Recipe, groups: Groups, device: torch.device, masked: bool = False) -> list[Batch]:
    """Make a step's micro-batches of random text for this rank. A rank that owns only experts gets no sequences."""
    dp = groups.fold.dp
    if not groups.owns_tokens:
        return [Batch.empty(recipe.data.seq_len, device)] * recipe.accumulation
    return [random_batch(recipe, groups.dp_rank, dp, m, device, masked) for m in range(recipe.accumulation)]


def _all_batches(recipe: Recipe, dp: int, device: torch.device, masked: bool = False) -> list[Batch]:
    """Make the micro-batches of all places. If the balance loss counts those with the same number together, they are one."""
    by_number = [[random_batch(recipe, rank, dp, m, device, masked) for rank in range(dp)] for m in range(recipe.accumulation)]
    if recipe.model.router.balance_scope == "batch":
        return [_joined(each) for each in by_number]
    return [batch for each in by_number for batch in each]


def _joined(parts: Sequence[Batch]) -> Batch:
    tokens, targets = torch.cat([part.token_BL for part in parts]), torch.cat([part.target_BL for part in parts])
    documents = [part.segment_BL for part in parts if part.segment_BL is not None]
    return Batch(tokens, targets, torch.cat(documents) if documents else None)


def _one_process(recipe: Recipe, precision: str, device: torch.device) -> Engine:
    """Make an engine without a fold."""
    alone, backend = Groups.create(Fold(1)), MoeBackend(gate=make_backend(recipe).gate, experts="loop")
    ownership, seed = Ownership(recipe.model, Fold(1)), recipe.training.seed
    model = Transformer(ownership, alone, backend, seed=seed, device=device, dtype=DTYPES[precision])
    return _stirred(TorchEngine(model, alone, recipe.optimizer))


def _changes(engine: Engine, batches: Sequence[Batch], lr: float) -> Tensors:
    """Return the change of every weight in one update, by global name."""
    before = _tensors(engine, "model/{}")
    engine.train(batches)
    engine.update(lr)
    return {name: after - before[name] for name, after in _tensors(engine, "model/{}").items()}


def _tensors(engine: Engine, key: str) -> Tensors:
    """Return this rank's boxes of an engine's state under keys of one form, by global name. All ranks must call this."""
    state = engine.state()
    pieces = engine.model.pieces.items()
    return {name: state[key.format(name)].detach().clone() for name, piece in pieces if piece.spec.trained}


def _trained(recipe: Recipe) -> list[ParameterSpec]:
    """Return the parameters that training changes. Frozen ones have no gradient to compare."""
    return [spec for spec in parameter_table(recipe.model) if spec.trained]


def _stirred(engine: Engine) -> Engine:
    """Give the second matrices of adapters random values in place of zeros, with which the first ones would have no gradients."""
    for shard in engine.shards():
        if shard.key.startswith("model/") and shard.key.endswith("_lora.b"):
            shard.tensor.copy_(initial_values(shard.shape, _STIRRED, 0, shard.key)[shard.box])
    engine.load_shards()
    return engine


def _shared(
    recipe: Recipe, reference: Tensors, groups: Groups, device: torch.device
) -> Iterator[tuple[ParameterSpec, torch.Tensor]]:
    """Send the reference's tensors in float64 from the fold's first rank to all ranks. All ranks must call this."""
    for spec in _trained(recipe):
        if reference:
            tensor = reference[spec.name].double().contiguous()
        else:
            tensor = torch.empty(spec.shape, dtype=torch.float64, device=device)
        if groups.control.group is not None:
            dist.broadcast(tensor, groups.fold.offset, group=groups.control.group)
        yield spec, tensor


def _ranked(differences: Any) -> dict[str, float]:
    """Sort differences, the largest first. NaN comes before all numbers."""
    return dict(sorted(differences, reverse=True, key=lambda item: (math.isnan(item[1]), item[1])))
