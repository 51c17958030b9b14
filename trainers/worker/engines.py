"""Makes the engine that trains a recipe and the backend of its MoE layers, and checks that their packages are there."""

from __future__ import annotations

import importlib.util

import torch

from foldray.blueprint import ModelSpec
from foldray.comm import Groups
from foldray.errors import MissingPackage
from foldray.kernels.experts import has_grouped_products
from foldray.kinds import EXPERT
from foldray.model import Transformer
from foldray.moe import Gate, MoeBackend
from foldray.recipe import CAPTURED, Recipe, needs_grouped_products, uncaptured
from foldray.runtime import Engine, TorchEngine, frozen_shards
from foldray.runtime.graphs import Captures, CudaRecorder
from trainers.hugging_face.adapters import Adapter
from trainers.hugging_face.weights import Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def make_engine(recipe: Recipe, groups: Groups, device: torch.device) -> Engine:
    engine = _engine(recipe, groups, device)
    if recipe.schedule.graphs != "off" and device.type == "cuda":
        captures = Captures(CudaRecorder(device), captured_kinds(recipe, device), recipe.schedule.graphs == "check")
        engine.execution.captures = captures
    if recipe.moe.copies:
        engine.execution.copy_hot_experts(recipe.moe.copies, recipe.moe.copies_every)
    return engine


def captured_kinds(recipe: Recipe, device: torch.device) -> set[str]:
    """Return the kinds of ops that a device can capture."""
    kinds = set(CAPTURED) - set(uncaptured(recipe))
    lacks = device.type == "cuda" and needs_grouped_products(recipe) and not has_grouped_products(device)
    return kinds - {EXPERT} if lacks else kinds


def _engine(recipe: Recipe, groups: Groups, device: torch.device) -> Engine:
    seed, dtype, context = recipe.training.seed, DTYPES[recipe.precision], recipe.schedule.context
    model = Transformer(recipe.ownership, groups, make_backend(recipe), context, seed, device, dtype)
    if recipe.engine.kind == "torch":
        wire = torch.bfloat16 if recipe.engine.wire else None
        return TorchEngine(
            model, groups, recipe.optimizer, recipe.ordering, recipe.engine.zero, wire, bool(recipe.engine.offload)
        )
    try:
        from trainers.worker.deepspeed_engine import DeepSpeedEngine
    except ModuleNotFoundError as error:
        raise MissingPackage("engine.kind", "deepspeed", error.name or "deepspeed", "pip install deepspeed") from None
    return DeepSpeedEngine(model, groups, recipe)


def read_weights(engine: Engine, recipe: Recipe) -> None:
    """Read the weights of the folder that a recipe starts from (`training.weights`) into the engine's shards.

    With adapters, they go into the model itself.
    """
    shards = [*engine.shards(), *frozen_shards(engine.model)]
    Weights.of(recipe).fill(recipe.model, shards, dict(engine.model.named_parameters()))


def read_adapter(engine: Engine, recipe: Recipe) -> None:
    """Read the adapter that a recipe starts from (`training.adapter`) into the engine's shards."""
    Adapter.of(recipe).fill(recipe, engine.shards())


def make_backend(recipe: Recipe) -> MoeBackend:
    kind, kernels = recipe.moe.backend, recipe.moe.model_dump(include={"experts", "dispatch", "wire"})
    if kind == "tutel":
        from foldray.moe.tutel import TutelPermutation, tutel_gate

        return MoeBackend(gate=tutel_gate(recipe.model), permutation=TutelPermutation(), **kernels)
    if kind == "deepspeed":
        try:
            return MoeBackend(gate=deepspeed_gate(recipe.model), **kernels)
        except ModuleNotFoundError as error:
            raise MissingPackage("moe.backend", kind, error.name or kind, "pip install deepspeed") from None
    return MoeBackend(**kernels)


def deepspeed_gate(model: ModelSpec) -> Gate:
    """Return a gate that calls DeepSpeed: `top1gating` for one expert per token, `topkgating` for more.

    Both get a capacity for all tokens, of which there may be none, so they drop none. foldray's model decides which tokens are
    dropped, and dispatches them.
    """
    from deepspeed.moe.sharded_moe import top1gating, topkgating

    def gate(logits_TE: torch.Tensor, bias_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        capacity = float(model.experts)  # with E as the factor, one expert can take all tokens
        if model.topk == 1:
            routes = top1gating(logits_TE, capacity, min_capacity=0, use_rts=False, sparse_routes=True)
        else:
            routes = topkgating(logits_TE, model.topk, capacity, min_capacity=0, drop_policy="position", sparse_routes=True)
        _, _, _, expert_KT, _, weight_KT, _ = routes
        return expert_KT.T.long().contiguous(), weight_KT.T.contiguous()

    return gate


def check_packages(recipe: Recipe) -> None:
    """Refuse a recipe whose packages are missing, because every worker would fail in every attempt.

    The function does not import DeepSpeed, which is slow.
    """
    for field, kind in (("engine.kind", recipe.engine.kind), ("moe.backend", recipe.moe.backend)):
        if kind == "deepspeed" and importlib.util.find_spec(kind) is None:
            raise MissingPackage(field, kind, kind, "pip install deepspeed")
    if recipe.moe.backend == "tutel":
        make_backend(recipe)
