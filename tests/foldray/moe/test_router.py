"""The router: capacity, balance terms and bias. They do not depend on how sequences are cut or batched."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from foldray.blueprint import Layout, ModelSpec
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.kernels.capacity import capacity, keep_within
from foldray.moe import Router
from foldray.recipe import Recipe
from tests.foldray.parity import MODEL, check_equal, make_recipe, one_process, train, worst

GROUPS = Groups.create(Fold(1))
BATCH, LENGTH = 8, 32


def router_of(groups: Groups = GROUPS, **changes: Any) -> Router:
    made = Router(ModelSpec(**{**MODEL, **changes}), groups).double()
    torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(0))
    return made


def hidden(*shape: int) -> Tensor:
    return torch.randn(*shape, MODEL["hidden"], generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "factor", "expected"), [(10, 2, 4, 1.0, 5), (10, 2, 4, 1.25, 7), (4, 2, 4, 9.0, 4)]
)
def test_capacity_is_the_papers(tokens: int, topk: int, experts: int, factor: float, expected: int) -> None:
    assert capacity(tokens, topk, experts, factor) == expected == min(tokens, math.ceil(tokens * topk / experts * factor))


def test_dropping_keeps_the_most_probable_or_the_earliest_of_each_sequence() -> None:
    expert_TK = torch.tensor([[0], [0], [0], [1], [0], [0], [1], [1]])  # two sequences of four tokens
    score_TK = torch.tensor([[0.1], [0.9], [0.5], [0.2], [0.3], [0.3], [0.1], [0.2]])
    by_score = keep_within(2, expert_TK, score_TK, 2, 2, "probability").flatten().tolist()
    by_place = keep_within(1, expert_TK, score_TK, 2, 2, "position").flatten().tolist()
    assert by_score == [False, True, True, True, True, True, True, True]
    assert by_place == [True, False, False, True, True, False, True, False]


@pytest.mark.parametrize("scope", ["sub_sequence", "sequence"])
def test_dropping_and_balance_do_not_depend_on_the_micro_batch(scope: str) -> None:
    router = router_of(router={"capacity_factor": 0.7, "drop_scope": scope})
    x_BSH = hidden(6, 8)
    whole, balance = router.whole(x_BSH.flatten(0, 1), 6)
    parts, balances = zip(*(router.whole(x_SH, 1) for x_SH in x_BSH), strict=True)
    assert whole.keep_TK.tolist() == torch.cat([part.keep_TK for part in parts]).tolist()
    torch.testing.assert_close(balance.losses()[0], torch.stack([each.losses()[0] for each in balances]).sum())
    assert int(whole.tally.dropped) == sum(int(part.tally.dropped) for part in parts) > 0


def test_the_balance_loss_is_one_when_even_and_E_when_one_expert_takes_all() -> None:
    router = router_of(topk=1)
    with torch.no_grad():
        router.weight[:] = torch.eye(16, 8)
    x_TH = torch.zeros(16, 16, dtype=torch.float64)
    x_TH[:, :8] = torch.eye(8).repeat(2, 1) * 50
    assert router.whole(x_TH, 1)[1].losses()[0].item() == pytest.approx(1.0)
    x_TH[:, :8] = torch.tensor([50.0, 0, 0, 0, 0, 0, 0, 0])
    assert router.whole(x_TH, 1)[1].losses()[0].item() == pytest.approx(8.0)


def test_the_bias_moves_towards_even_use_by_its_rate_alone() -> None:
    router = router_of(experts=4, router={"score": "sigmoid", "bias_rate": 0.01})
    router.update(torch.tensor([10, 0, 5, 5]))
    torch.testing.assert_close(router.bias, torch.tensor([-0.01, 0.01, 0.0, 0.0], dtype=torch.float64))


# Tests of the router alone: a step of 8 sequences, on folds that cut them in every way.
CUT = [
    {"tp": 2, "ep": 4}, {"cp": 2, "ep": 8}, {"tp": 2, "cp": 2, "ep": 2, "etp": 2}, {"cp": 4, "etp": 4}, {"tp": 4, "ep": 4},
    {"tp": 2, "cp": 4, "ep": 8}, {"tp": 4, "cp": 2, "order": "cp-tp-dp-pp"}, {"tp": 2, "cp": 2, "order": "dp-cp-tp-pp"},
    {"pp": 2, "cp": 2, "tp": 2},
]  # fmt: skip
DROPS = [{"drop": drop, "pad": pad} for drop in ("probability", "position") for pad in (False, True)]


class Routed(NamedTuple):
    """The router's results on a rank: which assignments of its pieces stay, and sums over all ranks."""

    keep_BsK: Tensor
    count_E: Tensor
    balance: float
    z: float
    gradient: Tensor
    capacity: int | None


def route(groups: Groups, micro_batch: int, **router: Any) -> Routed:
    """Route a step of 8 sequences, as one pipeline stage of a fold does."""
    fold, place = groups.fold, groups.coordinate["attention"]
    piece = Layout(fold.cp, fold.tp, place["cp"], place["tp"]).piece(LENGTH)
    made = router_of(groups, topk=3, router={"capacity_factor": 1.0, **router})
    own_BsH = hidden(BATCH, LENGTH)[place["dp"] :: fold.dp, piece]
    micro = min(micro_batch, BATCH // fold.dp)
    passes, balances = zip(*(made.whole(x_BsH.flatten(0, 1), micro) for x_BsH in own_BsH.split(micro)), strict=True)
    balance, z = (torch.stack(terms).sum() for terms in zip(*(balance.losses() for balance in balances), strict=True))
    (balance + 0.1 * z).backward()
    assert made.weight.grad is not None
    summed = torch.cat([balance.detach()[None], z.detach()[None], made.weight.grad.flatten()])
    summed = groups.replicated_gradients.all_reduce(summed) / BATCH
    count_E = groups.replicated_gradients.all_reduce(torch.stack([p.tally.count_BE.sum(0) for p in passes]).sum(0))
    keep_BsK = torch.cat([p.keep_TK.view(micro, len(piece), 3) for p in passes if p.keep_TK is not None])
    return Routed(keep_BsK, count_E, float(summed[0]), float(summed[1]), summed[2:], passes[0].capacity)


# (scope, micro-batch, index into DROPS). Every fold runs all of these with one set of groups.
ASKED = [("sequence", micro, d) for micro in (1, 2) for d in range(len(DROPS))]
ASKED += [("sub_sequence", 2, d) for d in range(len(DROPS))] + [("sub_sequence", micro, 0) for micro in (1, 8)]


def routes(rank: int) -> list[dict[tuple[str, int, int], Routed]]:
    found = []
    for sizes in CUT:
        groups = Groups.create(Fold(8, **sizes), rank)
        found.append({(scope, micro, d): route(groups, micro, drop_scope=scope, **DROPS[d]) for scope, micro, d in ASKED})
        groups.close()
    return found


_FOLDS_OF_8 = pytest.mark.nightly("routes under all folds of eight ranks; the trainings below are in the gate")


@pytest.fixture(scope="module")
def routed(ranks: Any) -> Any:
    """The results by fold, then by rank."""
    return list(zip(*ranks(8).run(routes, timeout=300), strict=True))


def kept(sizes: dict, found: Any, asked: tuple[str, int, int]) -> Tensor:
    """Return which assignments of all sequences stay, assembled from the pieces of the ranks."""
    fold = Fold(8, **sizes)
    keep_BLK = torch.zeros(BATCH, LENGTH, 3, dtype=torch.int64)
    for rank in range(8):
        place = fold.attention.coordinate(rank)
        piece = Layout(fold.cp, fold.tp, place["cp"], place["tp"]).piece(LENGTH)
        keep_BLK[place["dp"] :: fold.dp, piece] += found[rank][asked].keep_BsK
    assert set(keep_BLK.unique().tolist()) <= {0, fold.pp}
    return keep_BLK > 0


@_FOLDS_OF_8
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_who_is_dropped_of_a_whole_sequence_depends_on_no_fold(routed, micro_batch: int) -> None:
    for d, drop in enumerate(DROPS):
        one = route(GROUPS, 4, drop_scope="sequence", **drop)
        assert not one.keep_BsK.all()
        for sizes, found in zip(CUT, routed, strict=True):
            asked, fold = ("sequence", micro_batch, d), Fold(8, **sizes)
            assert torch.equal(kept(sizes, found, asked), one.keep_BsK), f"{sizes}, {drop}"
            own = LENGTH // (fold.cp * fold.tp)  # a piece gives an expert at most its number of tokens
            rows = min(own, 12) * min(micro_batch, BATCH // fold.dp)
            assert found[0][asked].capacity == (rows if drop["pad"] else None)


@_FOLDS_OF_8
def test_who_is_dropped_of_a_sub_sequence_depends_on_the_fold(routed) -> None:
    for d, drop in enumerate(DROPS):
        one = route(GROUPS, 2, drop_scope="sub_sequence", **drop)
        for sizes, found in zip(CUT, routed, strict=True):
            assert not torch.equal(kept(sizes, found, ("sub_sequence", 2, d)), one.keep_BsK), f"{sizes}, {drop}"


@_FOLDS_OF_8
@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_balance_terms_and_their_gradients_depend_neither_on_the_fold_nor_on_the_micro_batch(routed, micro_batch: int) -> None:
    one = route(GROUPS, 8)
    for sizes, found in zip(CUT, routed, strict=True):
        for rank in found:
            part = rank["sub_sequence", micro_batch, 0]
            assert part.count_E.tolist() == one.count_E.tolist(), sizes
            assert (part.balance, part.z) == pytest.approx((one.balance, one.z), rel=1e-12), sizes
            torch.testing.assert_close(part.gradient, one.gradient, rtol=0, atol=1e-12)


# Tests of whole trainings.
TRAINED = [
    {"tp": 2, "ep": 4}, {"cp": 2, "ep": 2, "etp": 2}, {"tp": 2, "cp": 2, "ep": 4}, {"cp": 4, "ep": 4},
    {"pp": 2, "cp": 2, "ep": 2},
]  # fmt: skip


def trainings(rank: int, recipes: list[Recipe]) -> list[dict[str, Any]]:
    return [train(rank, recipe, 2) for recipe in recipes]


def _train(ranks: Any, world: int, recipes: list[Recipe]) -> list[list[dict[str, Any]]]:
    """Train all recipes, and return the results by recipe, then by rank."""
    return [list(results) for results in zip(*ranks(world).run(trainings, recipes), strict=True)]


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize("drop", [{"drop": "probability", "pad": True}, {"drop": "position"}], ids=lambda drop: drop["drop"])
def test_training_that_drops_of_whole_sequences_does_not_depend_on_the_fold(ranks, drop: dict) -> None:
    model = {"router": {"capacity_factor": 1.0, "drop_scope": "sequence", "balance_loss": 0.1, **drop}}
    recipes = [make_recipe(4, fold, model=model) for fold in TRAINED]
    reference = one_process(recipes[0], steps=2)
    for recipe, found in zip(recipes, _train(ranks, 4, recipes), strict=True):
        check_equal(found, reference, about=recipe.fold)


@pytest.mark.gate(1 / 4)
def test_training_that_drops_of_sub_sequences_depends_on_the_fold(ranks) -> None:
    model = {"router": {"capacity_factor": 1.0, "drop_scope": "sub_sequence"}}
    recipes = [make_recipe(4, fold, model=model) for fold in TRAINED]
    reference = one_process(recipes[0], steps=2)
    for recipe, found in zip(recipes, _train(ranks, 4, recipes), strict=True):
        assert worst(found, reference, relative=False)[0] > 1e-6, recipe.fold


@pytest.mark.gate(1 / 5)
@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
def test_balanced_training_depends_neither_on_the_fold_nor_on_the_micro_batch(ranks, micro_batch: int) -> None:
    model = {"router": {"balance_loss": 1.0, "z_loss": 0.1}}
    folds = [{"tp": 2, "cp": 2, "ep": 4}, {"cp": 4, "etp": 4}, {"pp": 2, "tp": 2, "ep": 2}]
    folds += [{"pp": 2, "ep": 2}, {"tp": 2, "etp": 2}] if micro_batch <= 4 else []
    folds += [{"ep": 4}] if micro_batch <= 2 else []
    recipes = [make_recipe(4, fold, model=model, training={"micro_batch": micro_batch}) for fold in folds]
    reference = one_process(recipes[0], steps=2)
    for recipe, found in zip(recipes, _train(ranks, 4, recipes), strict=True):
        check_equal(found, reference, about=recipe.fold)


@pytest.mark.gate(1 / 6)
def test_the_bias_moves_once_per_step_by_the_counts_of_all_ranks(ranks) -> None:
    model = {"router": {"score": "sigmoid", "normalize": True, "bias_rate": 0.25}}
    folds = [{"ep": 4}, {"tp": 2, "cp": 2, "ep": 2}, {"pp": 2, "cp": 2, "etp": 2}, {"pp": 2, "ep": 2}]
    recipes = [make_recipe(4, fold, model=model, training={"micro_batch": size}) for fold in folds for size in (1, 2)]
    first, reference = (one_process(recipes[0], steps=steps) for steps in (1, 2))
    biases = {name: held.tensor for name, held in reference["weights"].items() if name.endswith("bias")}
    assert len(biases) == 2
    for layer, (name, bias) in enumerate(biases.items()):
        assert int(first["counts"][layer].sum()) == 8 * 16 * 2
        steps = [0.25 * torch.sign(8 * 16 * 2 / 8 - part["counts"][layer].double()) for part in (first, reference)]
        torch.testing.assert_close(first["weights"][name].tensor, steps[0])
        torch.testing.assert_close(bias, steps[0] + steps[1])
    for recipe, found in zip(recipes, _train(ranks, 4, recipes), strict=True):
        for part in found:
            assert part["counts"].tolist() == reference["counts"].tolist(), recipe.fold
            for name, bias in biases.items():
                if name in part["weights"]:
                    assert part["weights"][name].tensor.tolist() == bias.tolist(), recipe.fold
        assert {name for part in found for name in part["weights"]} >= biases.keys()
