"""Routing patterns: experts get their shares, every fold and schedule routes alike, and the planner counts the fullest rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foldray.blueprint import ModelSpec, expert_shares, overload, rank_shares, ranks_of_a_token, visits_of_a_token
from foldray.costs.candidate import Job
from foldray.costs.hardware import load_hardware
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.moe import Pattern
from foldray.plan.search import search
from foldray.plan.space import Space
from foldray.recipe import check_trains
from tests.foldray.costs.test_memory import rank_of
from tests.foldray.parity import MODEL, make_recipe, one_process, train, worst


@given(experts=st.integers(1, 64), topk=st.integers(1, 64), skew=st.floats(0, 16))
def test_shares_sum_to_the_experts_of_a_token_and_fall(experts: int, topk: int, skew: float) -> None:
    shares = expert_shares(experts, min(topk, experts), skew)
    assert sum(shares) == pytest.approx(min(topk, experts))
    assert all(1 >= first >= second >= 0 for first, second in pairwise(shares))
    if skew == 0:
        assert shares == pytest.approx([min(topk, experts) / experts] * experts)


def test_shares_by_hand() -> None:
    """Of popularities 1, 1/2, 1/3, 1/4, the first expert would get more than all tokens."""
    assert expert_shares(4, 2, 1.0) == pytest.approx((24 / 25, 12 / 25, 8 / 25, 6 / 25))
    assert expert_shares(4, 2, 2.0) == pytest.approx((1, 36 / 61, 16 / 61, 9 / 61))
    assert expert_shares(4, 2, 16.0)[:2] == pytest.approx((1, 1), abs=1e-2)


@pytest.mark.parametrize(("experts", "topk", "skew"), [(8, 2, 0.0), (8, 2, 1.0), (64, 8, 0.5), (6, 3, 16.0), (4, 4, 1.0)])
def test_a_pattern_gives_each_expert_its_share_and_each_token_different_experts(experts: int, topk: int, skew: float) -> None:
    chosen_TK = Pattern(expert_shares(experts, topk, skew)).choose(torch.arange(1000), 1)
    assert all(len(set(row)) == topk for row in chosen_TK.tolist())
    counts = torch.bincount(chosen_TK.flatten(), minlength=experts).tolist()
    assert counts == pytest.approx([1000 * share for share in expert_shares(experts, topk, skew)], abs=4)


def test_the_overload_is_that_of_the_fullest_rank() -> None:
    def model(**router: Any) -> ModelSpec:
        return ModelSpec(**{**MODEL, "experts": 4, "router": router})

    assert rank_shares(model(skew=1.0), 2) == pytest.approx([36 / 25, 14 / 25])
    assert overload(model(skew=1.0), 4) == pytest.approx(48 / 25)
    assert overload(model(skew=1.0), 1) == pytest.approx(1)
    assert rank_shares(model(skew=1.0, capacity_factor=1.2), 2) == pytest.approx([0.6 + 0.48, 14 / 25])  # of 24/25, 0.6 stays
    assert overload(model(skew=1.0, capacity_factor=1.2, pad=True), 4) == 1, "padded experts have equally many rows"
    assert overload(model(), 4) == 1


FOLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep4": (4, {"fold": {"ep": 4}}),
    "tp2-cp2-ep4-slices": (4, {"fold": {"tp": 2, "cp": 2, "ep": 4}, "schedule": {"kind": "stream", "degree": 2}}),
    "pp2-ep2-etp2": (4, {"fold": {"pp": 2, "etp": 2}, "schedule": {"kind": "one_a_one_m", "degree": 4}}),
    "recomputed": (2, {"fold": {"ep": 2}, "schedule": {"kind": "list", "degree": 2, "recompute": ["expert"]}}),
    "capacity": (
        4,
        {"fold": {"tp": 2, "ep": 4}, "model": {"router": {"capacity_factor": 0.5, "drop": "position", "drop_scope": "sequence"}}},
    ),
    "apart": (
        4,
        {
            "fold": {"ep": 2}, "placement": {"attention": 2, "experts": 2}, "schedule": {"kind": "af_pipe"},
            "model": {"layers": 2, "shared_hidden": 0, "moe_every": 1},
        },
    ),
}  # fmt: skip


@pytest.mark.gate(1)
@pytest.mark.parametrize("skew", [1.0, 16.0])
@pytest.mark.parametrize("name", FOLDS)
def test_a_fold_routes_as_one_process_does(ranks, name: str, skew: float) -> None:
    """With the larger skew, some ranks get no row at all."""
    workers, sections = FOLDS[name]
    given = {**sections}
    model = {**given.pop("model", {})}
    model["router"] = {"balance_loss": 0.1, "z_loss": 0.01, **model.get("router", {}), "skew": skew}
    recipe = make_recipe(workers, given.pop("fold"), model={**MODEL, **model}, **given)
    found, reference = ranks(workers).run(train, recipe, timeout=240), one_process(recipe)
    assert worst(found, reference, relative=True)[0] < 1e-10
    for part in found:
        assert part["losses"][0] == pytest.approx(reference["losses"][0], abs=1e-12)
    assert found[0]["counts"].sum(0).tolist() == reference["counts"].sum(0).tolist()
    load_E = reference["counts"][0].tolist()
    assert load_E == pytest.approx([128 * share for share in expert_shares(8, 2, skew)], abs=16)  # 8 sequences of 16 tokens


def test_a_pattern_is_not_for_training_and_not_for_other_gates() -> None:
    skewed = {**MODEL, "router": {"skew": 1.0}}
    with pytest.raises(UserError, match=r"^model.router.skew=1.0: is for measurements: .*; legal: null$"):
        check_trains(make_recipe(2, 2, model=skewed))
    with pytest.raises(UserError, match=r"^moe.backend=deepspeed: has gates of its own"):
        make_recipe(2, 2, model=skewed, moe={"backend": "deepspeed"}, precision="float32")
    check_trains(make_recipe(2, 2))


EOS = load_hardware("eos-h100")


def planned(skew: float | None, **pins: int) -> Any:
    router = {} if skew is None else {"router": {"skew": skew}}
    model = ModelSpec.model_validate({"preset": "mixtral-8x22b", "layers": 8, **router})
    job = Job(model, 4096, 64)
    return search(Space(job, EOS, 16, pins, kinds=("sequential",)), 1).best[0]


def test_the_planner_counts_the_time_and_memory_of_the_fullest_rank() -> None:
    folds = {"tp": 1, "cp": 1, "pp": 1, "etp": 1}
    even, same, skewed = (planned(skew, ep=8, **folds) for skew in (None, 0.0, 1.0))
    assert same.prediction.seconds == pytest.approx(even.prediction.seconds)
    assert same.memory.total == pytest.approx(even.memory.total)
    assert skewed.prediction.seconds > 1.2 * even.prediction.seconds
    assert skewed.memory.total > even.memory.total
    alone = [planned(skew, ep=1, **folds) for skew in (None, 1.0)]
    assert alone[0].prediction.seconds == pytest.approx(alone[1].prediction.seconds), (
        "with all experts on a rank, nobody is fuller"
    )


def test_the_costs_of_experts_and_traffic_grow_with_the_overload() -> None:
    model = ModelSpec.model_validate({"preset": "mixtral-8x22b", "router": {"skew": 1.0}})
    even = ModelSpec.model_validate({"preset": "mixtral-8x22b"})
    fold = Fold(8, ep=8)
    factor = overload(model, 8)
    assert factor == pytest.approx(expert_shares(8, 2, 1.0)[0] * 4)
    costs = [rank_of(each, fold, 4096).price("dispatch", False, range(4096), each.block(0)) for each in (even, model)]
    assert 1 < costs[1].seconds / costs[0].seconds <= factor
    costs = [rank_of(each, fold, 4096).price("expert", False, range(4096), each.block(0)) for each in (even, model)]
    assert 1.5 < costs[1].seconds / costs[0].seconds <= factor * 1.01


def test_visits_by_hand() -> None:
    model = ModelSpec(**{**MODEL, "experts": 4, "router": {"skew": 2.0}})
    shares = expert_shares(4, 2, 2.0)
    assert visits_of_a_token(model, 4) == pytest.approx(shares)
    assert visits_of_a_token(model, 2) == pytest.approx([1, 1 - (1 - shares[2]) * (1 - shares[3])])
    assert ranks_of_a_token(model, 4) == pytest.approx(2)
