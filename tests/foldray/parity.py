"""One training step (or several) on the ranks of a fold, and the same in one process, by global parameter name."""

from __future__ import annotations

from typing import Any

import torch

from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model import Transformer
from foldray.recipe import Recipe
from foldray.runtime import Engine

MODEL: dict[str, Any] = {
    "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn_hidden": 24, "experts": 4, "topk": 2,
    "expert_hidden": 12, "shared_hidden": 8, "vocab": 29, "moe_every": 1, "init_std": 0.3,
    "router": {"balance_loss": 0.1, "z_loss": 0.01},
}  # fmt: skip


def make_recipe(workers: int, ep: int, **sections: Any) -> Recipe:
    """A small recipe whose global batch is 8 sequences, whatever the fold."""
    base: dict[str, Any] = {
        "model": MODEL,
        "fold": {"ep": ep},
        "cluster": {"workers": workers},
        "training": {"steps": 4, "global_batch": 8, "micro_batch": 8 // workers},
        "optimizer": {"kind": "sgd", "lr": 1.0, "decay": "constant", "weight_decay": 0.0, "clip": None},
        "engine": {"kind": "torch"},
        "precision": "float64",
        "moe": {"experts": "loop"},
    }
    return Recipe.parse(
        {key: {**base.get(key, {}), **value} if isinstance(value, dict) else value for key, value in {**base, **sections}.items()}
    )


def train(rank: int, recipe: Recipe, steps: int = 1, sequences: int = 8, length: int = 9) -> dict[str, Any]:
    """Post-step weights, losses and norms of this rank; every global sample is its own random text."""
    from trainers.engines import make_engine

    groups = Groups.create(Fold(recipe.cluster.workers, ep=recipe.fold.ep), rank)
    engine = make_engine(recipe, groups, torch.device("cpu"))
    losses, norms = [], []
    for step in range(steps):
        passes = []
        for m in range(recipe.accumulation):
            first = (m * groups.fold.dp + groups.dp_rank) * recipe.training.micro_batch
            tokens = sample(step, sequences, length, recipe.model.vocab)[first : first + recipe.training.micro_batch]
            passes.append(engine.train_pass(tokens[:, :-1], tokens[:, 1:], None))
        norms.append(engine.update(recipe.optimizer.lr))
        totals = torch.stack([torch.stack([p.total.detach(), p.language]).double() for p in passes]).mean(0)
        counts = torch.stack([p.count_LE for p in passes]).sum(0).double()
        losses.append((groups.control.all_reduce(totals) / groups.control.size).tolist())
        for (_, router), count_E in zip(engine.model.routers(), groups.control.all_reduce(counts), strict=True):
            router.update_bias(count_E)
    found = {"weights": weights(engine), "losses": losses, "norms": norms}
    groups.close()
    return found


def sample(step: int, sequences: int, length: int, vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (sequences, length), generator=torch.Generator().manual_seed(1000 + step))


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {key: tensor.detach().clone() for key, tensor in engine.state().items() if key.startswith("model/")}


def one_process(recipe: Recipe, **options: Any) -> dict[str, Any]:
    """The same recipe on one rank, with the torch engine."""
    single = make_recipe(
        1, 1,
        **{section: recipe.model_dump()[section] for section in ("model", "optimizer", "precision")},
        training={"micro_batch": 8, **({"steps": recipe.training.steps})},
        moe={"experts": "loop"},
    )  # fmt: skip
    return train(0, single, **options)


def worst(found: list[dict[str, Any]], reference: dict[str, Any], relative: bool) -> tuple[float, str]:
    """Largest difference of any weight on any rank, absolute or relative to the tensor's largest value, and its name."""
    assert set().union(*(part["weights"] for part in found)) == set(reference["weights"]), "a parameter is missing, or unknown"
    differences = []
    for rank, part in enumerate(found):
        for name, tensor in part["weights"].items():
            expected = reference["weights"][name].to(tensor.dtype)
            scale = expected.abs().max().clamp_min(1e-30) if relative else 1.0
            differences.append((float((tensor - expected).abs().max() / scale), f"{name} on rank {rank}"))
    return max(differences)


def fresh_model(**model: Any) -> Transformer:
    return Transformer(make_recipe(1, 1, model=model).model, Groups.create(Fold(1)), dtype=torch.float64)
