"""Training steps on the ranks of a fold and in one process, with results by global parameter name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from foldray.blueprint import ModelSpec, Ownership
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model import IGNORED, Batch, Transformer, all_losses
from foldray.recipe import Recipe
from foldray.runtime import Engine, Trace

MODEL: dict[str, Any] = {
    "layers": 2, "hidden": 16, "heads": 8, "kv_heads": 4, "head_dim": 6, "ffn_hidden": 24, "experts": 8, "topk": 2,
    "expert_hidden": 16, "shared_hidden": 8, "vocab": 32, "moe_every": 1, "init_std": 0.3,
    "router": {"balance_loss": 0.1, "z_loss": 0.01},
}  # fmt: skip
BATCH, LENGTH = 8, 16


class Held(NamedTuple):
    """A rank's box of a tensor of the whole model."""

    tensor: torch.Tensor
    box: tuple[slice, ...]


def make_recipe(workers: int, fold: dict[str, Any] | int = 1, **sections: Any) -> Recipe:
    """Make a small recipe with a global batch of 8 sequences of 16 tokens.

    Args:
        fold: parallel sizes, or the size of ep alone.
        sections: further sections of the recipe; their keys replace those of the small recipe.
    """
    fold = {"ep": fold} if isinstance(fold, int) else fold
    # Two passes, or as many as fill the pipeline. Few passes save time, because they make few collectives.
    apart = sections.get("placement", {})
    ranks = {"expert_ranks": apart["experts"], "expert_pp": apart.get("expert_pp")} if apart else {}
    passes = Fold(workers, **fold, **ranks).dp * max(2, fold.get("pp", 1))
    layers = max(MODEL["layers"], fold.get("pp", 1) * sections.get("schedule", {}).get("virtual_stages", 1))
    base: dict[str, Any] = {
        "model": {**MODEL, "layers": layers},
        "data": {"seq_len": LENGTH},
        "fold": fold,
        "cluster": {"workers": workers},
        "training": {"steps": 4, "global_batch": BATCH, "micro_batch": max(1, BATCH // passes)},
        "optimizer": {"kind": "sgd", "lr": 1.0, "decay": "constant", "weight_decay": 0.0, "clip": None},
        "engine": {"kind": "torch"},
        "precision": "float64",
        "moe": {"experts": "loop"},
    }
    return Recipe.parse(
        {key: {**base.get(key, {}), **value} if isinstance(value, dict) else value for key, value in {**base, **sections}.items()}
    )


def train(
    rank: int,
    recipe: Recipe,
    steps: int = 1,
    documents: bool = False,
    masked: bool = False,
    replayed: bool = False,
    weighted: bool = False,
) -> dict[str, Any]:
    """Train and return the weights after the last step, and the losses and norms. The text is random (`batches`)."""
    options = {"documents": documents, "masked": masked, "replayed": replayed, "weighted": weighted}
    with engine_on(recipe, rank) as (engine, groups):
        return go_by_times(engine, groups, recipe, steps, **options)


def engine_of(recipe: Recipe, groups: Groups) -> Engine:
    from trainers.worker.engines import make_engine

    return make_engine(recipe, groups, torch.device("cpu"))


@contextmanager
def engine_on(
    recipe: Recipe, rank: int = 0, make: Callable[[Recipe, Groups], Engine] = engine_of
) -> Iterator[tuple[Any, Groups]]:
    """Make the engine of a rank and its groups. Close both, unless an error ends the rank."""
    groups = Groups.create(recipe.placed_fold, rank)
    engine = make(recipe, groups)
    yield engine, groups
    engine.close()
    groups.close()


def go_on(engine: Engine, groups: Groups, recipe: Recipe, steps: range, **options: bool) -> dict[str, Any]:
    """Train some steps. Return the weights after the last one, all losses and norms, and the counts of the last one."""
    losses, norms, counts, replaced = [], [], torch.empty(0), 0
    for step in steps:
        passes = engine.train(own_batches(recipe, groups, step, **options))
        norms.append(engine.update(recipe.optimizer.lr).total)
        total = all_losses(passes, groups.control)
        losses.append([*total.means().tolist(), *([float(total.further())] if recipe.model.mtp_depth else [])])
        counts, replaced = total.count_ME, replaced + int(total.replaced)
        engine.model.update_biases(counts)
    return {"weights": weights(engine), "losses": losses, "norms": norms, "counts": counts, "replaced": replaced}


def go_by_times(engine: Engine, groups: Groups, recipe: Recipe, steps: int, **options: bool) -> dict[str, Any]:
    """Do the same from the first step on. An order that goes by the times of ops uses those of the first step in later ones."""
    engine.execution.trace = Trace()
    first = go_on(engine, groups, recipe, range(1), **options)
    if engine.execution.lacks_costs:
        engine.execution.learn_costs()
    engine.execution.trace = None
    then = go_on(engine, groups, recipe, range(1, steps), **options) if steps > 1 else {"losses": [], "norms": []}
    return {**first, **then, **{key: first[key] + then[key] for key in ("losses", "norms")}}


def own_batches(recipe: Recipe, groups: Groups, step: int, **options: bool) -> list[Batch]:
    """Return a rank's micro-batches of a step. A rank that owns only experts has no sequences."""
    if not groups.owns_tokens:
        return [Batch.empty(recipe.data.seq_len)] * recipe.accumulation
    return batches(recipe, groups.dp_rank, step, **options)


def batches(
    recipe: Recipe,
    dp_rank: int,
    step: int,
    documents: bool = False,
    masked: bool = False,
    replayed: bool = False,
    weighted: bool = False,
) -> list[Batch]:
    """Return a step's micro-batches of random text for a data-parallel place. Every global sample has its own text.

    Args:
        documents: attention stops at document boundaries.
        masked: some targets do not count: different ones in each sequence, and in one sequence all of them.
        replayed: the batches bring random experts (`some_experts`).
        weighted: the losses of tokens have random factors, also negative ones.
    """
    dp, size, length = recipe.placed_fold.dp, recipe.training.micro_batch, recipe.data.seq_len
    tokens = sample(step, recipe.training.global_batch, length + 1, recipe.model.vocab)
    segments = (tokens[:, :-1] % 5 == 0).cumsum(1) if documents else None
    targets = tokens[:, 1:].clone()
    for number, target_L in enumerate(targets if masked else ()):
        target_L[torch.randperm(length, generator=torch.Generator().manual_seed(number))[: 2 * number + 2]] = IGNORED
    experts = some_experts(recipe, step) if replayed else None
    factors = torch.randn(targets.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64) if weighted else None
    found = []
    for m in range(recipe.accumulation):
        mine = slice((m * dp + dp_rank) * size, (m * dp + dp_rank + 1) * size)
        given = None if experts is None else experts[:, mine]
        weights = None if factors is None else factors[mine]
        found.append(Batch(tokens[mine, :-1], targets[mine], None if segments is None else segments[mine], given, weights))
    return found


def some_experts(recipe: Recipe, step: int, free: float = 1 / 3) -> torch.Tensor:
    """Return random experts of all tokens of a step, int16 [M, B, L, K]. Routers choose for a share of the tokens (`free`)."""
    model, generator = recipe.model, torch.Generator().manual_seed(step)
    shape = len(model.moe_layers), recipe.training.global_batch, recipe.data.seq_len
    expert_MBLK = torch.rand((*shape, model.experts), generator=generator).argsort(-1)[..., : model.topk]
    free_MBL = torch.rand(shape, generator=generator) < free
    return expert_MBLK.masked_fill(free_MBL.unsqueeze(-1), -1).to(torch.int16)


def sample(step: int, sequences: int, length: int, vocab: int) -> torch.Tensor:
    """Return random tokens. No sequence begins with two equal ones: they would have the same hidden state, up to rounding."""
    tokens = torch.randint(0, vocab, (sequences, length), generator=torch.Generator().manual_seed(1000 + step))
    equal = tokens[:, 0] == tokens[:, 1]
    tokens[equal, 1] = (tokens[equal, 1] + 1) % vocab
    return tokens


def weights(engine: Engine) -> dict[str, Held]:
    """Return this rank's box of every weight that it holds."""
    pieces = engine.model.pieces
    return {
        key: Held(tensor.detach().clone(), pieces[name].box if (name := key.removeprefix("model/")) in pieces else ())
        for key, tensor in engine.state().items()
        if key.startswith("model/")
    }


def gradients(engine: Any) -> dict[str, Held]:
    """Return this rank's box of every reduced gradient that it holds. The engine is a torch engine."""
    model, found = engine.model, {}
    for local, parameter in model.named_parameters():
        for name, index in model.global_parts[local]:
            found[name] = Held(engine.gradients.views[parameter][index].clone(), model.pieces[name].box)
    return found


def one_process(recipe: Recipe, **options: Any) -> dict[str, Any]:
    """Train the same recipe on one rank, with the torch engine and experts in a loop. Equal trainings run once."""
    sections = recipe.model_dump_json(include={"model", "optimizer", "precision"})
    together = recipe.placed_fold.dp * recipe.training.micro_batch  # sequences that a balance loss over batches counts together
    size = together if recipe.model.router.balance_scope == "batch" else BATCH
    return _one_process(sections, recipe.training.steps, size, **options)


@cache
def _one_process(sections: str, total: int, size: int, **options: Any) -> dict[str, Any]:
    training, cluster = {"micro_batch": size, "steps": total}, {"min_workers": 1}  # the last micro-batch may be smaller
    recipe = make_recipe(1, **json.loads(sections), training=training, cluster=cluster, moe={"experts": "loop"})
    return train(0, recipe, **options)


def check_equal(
    found: Sequence[dict[str, Any]], reference: dict[str, Any], tolerance: float = 1e-10, relative: bool = False, about: Any = ""
) -> None:
    """Check that all ranks have the weights of another training, its losses, norms and counts, and equal copies of weights.

    Args:
        relative: divide a difference of weights by the largest value of its tensor.
        about: what the message of a failure says beside the difference.
    """
    difference, where = worst(found, reference, relative)
    assert difference <= tolerance, f"{where} {about}"
    assert drifted(found) == [], f"copies of the same weights part {about}"
    for rank, part in enumerate(found):
        for key in (part.keys() & reference.keys()) - {"weights"}:
            ours, theirs = np.asarray(part[key]), np.asarray(reference[key])
            assert ours.shape == theirs.shape, f"{key} on rank {rank} {about}"
            off = np.abs(ours - theirs) / np.clip(np.abs(theirs), 0.01, 1)
            assert off.max(initial=0) <= tolerance, f"{key} on rank {rank}: {ours}, not {theirs} {about}"


def worst(found: Sequence[dict[str, Any]], reference: dict[str, Any], relative: bool) -> tuple[float, str]:
    """Return the largest difference of any weight on any rank, with its name.

    Args:
        relative: divide a difference by the largest value of its tensor.
    """
    assert set().union(*(part["weights"] for part in found)) == set(reference["weights"]), "a parameter is missing, or unknown"
    differences = []
    for rank, part in enumerate(found):
        for name, (tensor, box) in part["weights"].items():
            whole = reference["weights"][name].tensor.to(tensor.dtype)
            scale = whole.abs().max().clamp_min(1e-30) if relative else 1.0
            assert whole[box].shape == tensor.shape, f"{name} on rank {rank}"
            differences.append((float((tensor - whole[box]).abs().max() / scale), f"{name} on rank {rank}"))
    return max(differences)


def drifted(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the weights of which two ranks hold the same box with different bits."""
    first: dict[tuple, torch.Tensor] = {}
    apart = set()
    for part in found:
        for name, (tensor, box) in part["weights"].items():
            if not torch.equal(first.setdefault((name, *((cut.start, cut.stop) for cut in box)), tensor), tensor):
                apart.add(name)
    return sorted(apart)


def model_of(
    fold: Fold | None = None, groups: Groups | None = None, dtype: torch.dtype = torch.float32, **model: Any
) -> Transformer:
    """Make a small model on a fold, or the whole model in one process."""
    fold = fold or Fold(1)
    spec = ModelSpec(**{**MODEL, "layers": max(MODEL["layers"], fold.pp), **model})
    return Transformer(Ownership(spec, fold), groups or Groups.create(fold), dtype=dtype)
