"""Every order of pieces gives the loss and the gradients of one graph in one process, in float64, to 1e-10."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from foldray.blueprint import ModelSpec, Ownership
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.graph import SLICINGS
from foldray.kernels.capacity import capacity, keep_within
from foldray.model import Batch, Transformer, all_losses
from foldray.moe import MoeBackend, router
from foldray.orders import OVERLAPS
from foldray.recipe import Recipe
from tests.foldray.folds import name
from tests.foldray.parity import MODEL, batches, engine_of, gradients, make_recipe, sample

LENGTH, BATCH = 64, 4
KINDS = [kind for kind in list(OVERLAPS)[1:] if kind != "flow"]  # test_reduction_parity.py tests flow
DEGREES = (1, 2, 3, 4, 8)
FEWER = ((4, 2), (3, 2), (8, 3), (4, 1))  # pieces, and slices of attention
FOLDS: list[tuple[int, dict[str, int]]] = [
    (1, {}), (2, {"ep": 2}), (4, {"ep": 4}), (4, {"tp": 2, "ep": 4}), (4, {"cp": 2, "ep": 4}), (4, {"pp": 2, "ep": 2}),
]  # fmt: skip
STACKS: dict[str, dict[str, Any]] = {"all-moe": {"layers": 2, "moe_every": 1}, "every-other": {"layers": 4, "moe_every": 2}}


class Wanted(NamedTuple):
    """The loss, and every gradient by global name."""

    language: torch.Tensor
    gradients: dict[str, torch.Tensor]


def recipe_of(world: int, fold: dict[str, int], model: dict[str, Any], schedule: dict[str, Any]) -> Recipe:
    passes = 2 if fold.get("pp") else 1
    training = {"global_batch": BATCH, "micro_batch": BATCH // (Fold(world, **fold).dp * passes)}
    return make_recipe(world, fold, model=model, schedule=schedule, data={"seq_len": LENGTH}, training=training)


@cache
def _wanted(model: str, documents: bool) -> Wanted:
    """Compute the loss and the gradients in one graph, on all sequences at once."""
    spec = ModelSpec.model_validate_json(model)
    whole = Transformer(Ownership(spec, Fold(1)), Groups.create(Fold(1)), MoeBackend(experts="loop"), dtype=torch.float64)
    text = sample(0, BATCH, LENGTH + 1, spec.vocab)
    segments = (text[:, :-1] % 5 == 0).cumsum(1) if documents else None
    objective, losses = whole(Batch(text[:, :-1], text[:, 1:], segments))
    found = torch.autograd.grad(objective, list(whole.parameters()))
    parts = ((whole.global_parts[local], grad) for (local, _), grad in zip(whole.named_parameters(), found, strict=True))
    return Wanted(losses.means()[0], {name: grad[index] for each, grad in parts for name, index in each})


def differences(rank: int, recipes: list[Recipe], wanted: Wanted, documents: bool) -> list[tuple[float, str]]:
    """Return the largest difference of this rank's loss or gradients for each recipe, and its name.

    All recipes have the same fold and model.
    """
    groups = Groups.create(recipes[0].placed_fold, rank)
    engine: Any = engine_of(recipes[0], groups)
    found = []
    for recipe in recipes:
        engine.execution.reorder(recipe.ordering)
        losses = engine.train(batches(recipe, groups.dp_rank, 0, documents))
        language = all_losses(losses, groups.control).means()[0]
        off = [(float((language - wanted.language).abs()), "loss")]
        off += [(float((held - wanted.gradients[key][box]).abs().max()), key) for key, (held, box) in gradients(engine).items()]
        found.append(max(off))
        engine.gradients.zero()
    groups.close()
    return found


def check(ranks: Any, world: int, fold: dict[str, int], model: dict[str, Any], schedules: list[dict], documents: bool = False):
    recipes = [recipe_of(world, fold, model, schedule) for schedule in schedules]
    wanted = _wanted(recipes[0].model.model_dump_json(), documents)
    for rank, found in enumerate(ranks(world).run(differences, recipes, wanted, documents)):
        for schedule, (difference, where) in zip(schedules, found, strict=True):
            assert difference <= 1e-10, f"{where} on rank {rank} with {schedule}"


def every_schedule() -> list[dict[str, Any]]:
    """Return all different combinations of kind, degree and slicing. Streams have different lags in forward and backward."""
    found: list[dict[str, Any]] = [{}]
    for number, (kind, degree, slicing) in enumerate(product(KINDS, DEGREES, SLICINGS)):
        lags = {"lag": 1 + number % 3, "backward_lag": 1 + number // 3 % 4} if kind == "stream" else {}
        if slicing == SLICINGS[0] or (degree > 1 and kind != "moe_only"):
            found.append({"kind": kind, "degree": degree, "slicing": slicing, **lags})
    cutting = [kind for kind in KINDS if kind != "moe_only"]
    fewer = [{"kind": kind, "degree": degree, "attention_degree": count} for kind in cutting for degree, count in FEWER]
    return found + fewer


_PARTS = 16  # of all schedules


@pytest.mark.gate(1)
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(("world", "fold"), FOLDS, ids=[name(fold) for _, fold in FOLDS])
def test_every_schedule_equals_one_graph(ranks, world: int, fold: dict[str, int], stack: str, part: int) -> None:
    check(ranks, world, fold, STACKS[stack], every_schedule()[part::_PARTS])


@pytest.mark.gate(1 / 5)
@pytest.mark.parametrize(
    ("world", "fold"),
    [
        (1, {}),
        (4, {"tp": 2, "cp": 2, "ep": 4}),
        (4, {"tp": 2, "ep": 2, "etp": 2}),
        (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}),
    ],
    ids=["one", "tp2-cp2-ep4", "tp2-ep2-etp2", "tp2-cp2-pp2-ep4"],
)
def test_what_goes_with_schedules_equals_one_graph(ranks, world: int, fold: dict[str, int]) -> None:
    """Test documents, recomputation, two kinds, given slices, tied embeddings, a shared expert and other norms together."""
    again = ["attention", "ffn", "expert"]
    schedules: list[dict[str, Any]] = [
        {"kind": "one_a_one_m", "degree": 4, "recompute": again},
        {"kind": "stream", "degree": 4, "recompute": ["attention"], "backward": "one_a_one_m"},
        {"kind": "moe_only", "degree": 3, "backward": "stream", "recompute": ["expert"]},
        {"kind": "stream", "degree": 3, "slices": [40, 16, 8], "lag": 1},
        {"kind": "one_a_one_m", "degree": 4, "attention_degree": 2, "slices": [40, 24], "recompute": again, "backward": "stream"},
        {"kind": "stream", "degree": 2, "batch_degree": 2, "recompute": ["expert"], "backward": "flow"},
        {"kind": "sequential", "recompute": again},
    ]
    model = {"layers": 4, "moe_every": 2, "tied_embeddings": True, "norm": "layernorm", "positions": "learned", "ffn": "gelu"}
    check(ranks, world, fold, model, schedules, documents=True)


DROPPING = [{"kind": kind, "degree": degree} for kind in KINDS for degree in (2, 3, 8)]
DROPPING_FEWER = [{"kind": kind, "degree": 4, "attention_degree": 2} for kind in KINDS if kind != "moe_only"]


@pytest.mark.gate(1)
@pytest.mark.parametrize("more", [{}, {"pad": True}, {"drop_scope": "sequence"}], ids=str)
@pytest.mark.parametrize(("world", "fold"), [(1, {}), (2, {"ep": 2}), (4, {"pp": 2, "ep": 2})], ids=str)
def test_dropping_by_position_does_not_depend_on_the_schedule(ranks, world: int, fold: dict[str, int], more: dict) -> None:
    model = {"router": {"capacity_factor": 0.8, "drop": "position", "balance_loss": 0.1, **more}}
    check(ranks, world, fold, model, [{}, *DROPPING, *DROPPING_FEWER])


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "moe_only"])
@pytest.mark.parametrize("fold", [{"tp": 2, "ep": 4}, {"cp": 2, "ep": 2, "etp": 2}], ids=["tp2-ep4", "cp2-ep2-etp2"])
def test_dropping_the_latest_of_whole_sequences_depends_neither_on_schedule_nor_on_fold(
    ranks, fold: dict[str, int], kind: str
) -> None:
    model = {"router": {"capacity_factor": 0.8, "drop": "position", "drop_scope": "sequence", "balance_loss": 0.1}}
    even = [{**schedule, "slicing": "token_uniform"} for schedule in DROPPING if schedule["kind"] == kind]
    check(ranks, 4, fold, model, [{}, *even])


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("degree", [2, 3, 8])
@pytest.mark.parametrize("pad", [False, True])
def test_dropping_by_probability_is_per_piece(ranks, degree: int, pad: bool) -> None:
    """Compare with one graph in which every MoE micro-batch of the sequence has its own capacity."""
    model = {"router": {"capacity_factor": 0.8, "drop": "probability", "pad": pad, "balance_loss": 0.1}}
    schedules = [schedule for schedule in DROPPING if schedule["degree"] == degree]
    pieces = recipe_of(1, {}, model, schedules[0]).ordering.slicing
    assert pieces is not None

    def per_piece(
        limit: int, expert_TK: Any, score_TK: Any, sequences: int, experts: int, drop: Any, before: Any
    ) -> torch.Tensor:
        split = [x.view(sequences, -1, x.shape[1]).split(pieces.moe, dim=1) for x in (expert_TK, score_TK)]
        kept = []
        for expert_BSK, score_BSK in zip(*split, strict=True):
            limit = capacity(expert_BSK.shape[1], expert_BSK.shape[2], experts, 0.8)
            keep_TK = keep_within(limit, expert_BSK.flatten(0, 1), score_BSK.flatten(0, 1), sequences, experts, drop)
            kept.append(keep_TK.view_as(expert_BSK))
        return torch.cat(kept, dim=1).flatten(0, 1)

    _wanted.cache_clear()
    with mock.patch.object(router, "keep_within", per_piece):
        # Padding changes no result. The capacities of the pieces are each rounded up, so their sum may exceed the capacity
        # to which the reference would pad.
        wanted = _wanted(ModelSpec(**{**MODEL, "router": {**model["router"], "pad": False}}).model_dump_json(), False)
    _wanted.cache_clear()
    recipes = [recipe_of(2, {"ep": 2}, model, schedule) for schedule in schedules]
    for found in ranks(2).run(differences, recipes, wanted, False):
        assert max(found)[0] <= 1e-10
