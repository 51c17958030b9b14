"""Copies of experts on other ranks: steps are as without copies, whichever experts have some, under every fold and schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foldray.blueprint import Ownership
from foldray.blueprint.copying import Copies, copy_experts
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.runtime import Trace
from foldray.runtime.copying import CopyChoice
from tests.foldray.parity import check_equal, engine_on, go_by_times, go_on, make_recipe, one_process
from tests.foldray.runtime.test_expert_order import ADAMW
from tests.foldray.strict import StrictPools

STEPS = 4
CASES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "two ranks": (2, {"ep": 2}, {}),
    "grouped products": (4, {"ep": 4}, {"moe": {"experts": "grouped"}}),
    "tensor parallel, slices of experts": (4, {"tp": 2, "ep": 2, "etp": 2}, {}),
    "context parallel": (4, {"cp": 2, "ep": 4}, {"schedule": {"kind": "stream", "degree": 2, "weight_gradients": "apart"}}),
    "pipeline": (4, {"pp": 2, "ep": 2}, {"schedule": {"kind": "one_a_one_m", "degree": 2}}),
    "virtual stages": (4, {"pp": 2, "ep": 2}, {"schedule": {"virtual_stages": 2}}),
    "two replicas": (8, {"ep": 2, "tp": 2}, {"engine": {"kind": "torch", "zero": 1}}),
    "chunks": (4, {"ep": 2}, {"schedule": {"reduction": "chunks", "sp_bytes": 2048}, "engine": {"kind": "torch", "zero": 2}}),
    "buckets": (4, {"ep": 2}, {"schedule": {"reduction": "buckets", "sp_bytes": 2048}}),
    "a found list": (4, {"ep": 4}, {"schedule": {"kind": "list", "degree": 2}}),
    "a found list with chunks": (
        4, {"ep": 2}, {"schedule": {"kind": "list", "degree": 2, "reduction": "chunks", "sp_bytes": 2048}},
    ),
    "woven": (2, {"ep": 2}, {"schedule": {"kind": "weave"}}),
    "recomputation": (2, {"ep": 2}, {"schedule": {"recompute": ["expert", "attention"]}}),
    "activations on the host": (2, {"ep": 2}, {"schedule": {"offload": ["expert", "attention"]}, "model": {"layers": 3}}),
    "gradients whole": (2, {"ep": 2}, {"schedule": {"kind": "stream", "degree": 2, "weight_gradients": "whole"}}),
    "parts along the batch": (2, {"ep": 2}, {"schedule": {"kind": "flow"}}),
    "biases": (2, {"ep": 2}, {"model": {"router": {"logit_bias": True}, "expert_bias": True}}),
    "once to each rank": (4, {"ep": 4}, {"moe": {"dispatch": "rank"}}),
    "once to each node": (4, {"ep": 4, "ep_inside": 2}, {"moe": {"dispatch": "rank"}}),
    "muon": (2, {"ep": 2}, {"optimizer": {"kind": "muon", "lr": 0.05, "decay": "constant"}}),
    "further tokens": (2, {"ep": 2}, {"model": {"mtp_depth": 1}}),
    "a pattern": (4, {"ep": 4}, {"model": {"router": {"skew": 1.0}}}),
    "dense blocks": (2, {"ep": 2}, {"model": {"layers": 4, "moe_every": 2}}),
}  # fmt: skip


def tables_of(recipe: Any, step: int, room: int = 2) -> dict[int, Copies]:
    """Return copies for random loads, other ones in each step."""
    generator, experts, ep = torch.Generator().manual_seed(step), recipe.model.experts, recipe.fold.ep
    loads = {layer: torch.rand(experts, generator=generator).pow(3).tolist() for layer in recipe.model.moe_layers}
    return {layer: copy_experts(load, ep, room) or Copies.none(experts, ep, room) for layer, load in loads.items()}


def train(rank: int, recipe: Any) -> dict[str, Any]:
    with engine_on(recipe, rank) as (engine, groups):
        engine.execution.copies.make_room(2, groups)
        found: dict[str, Any] = {"losses": [], "norms": []}
        for step in range(STEPS):
            engine.execution.trace = Trace() if engine.execution.lacks_costs and step else None
            then = go_on(engine, groups, recipe, range(step, step + 1))
            if engine.execution.trace is not None:
                engine.execution.learn_costs()
            found = {**then, **{key: found[key] + then[key] for key in ("losses", "norms")}}
            tables = tables_of(recipe, step + 1)
            assert any(any(table.of_rank) for table in tables.values()), "no step has copies"
            engine.execution.copy_experts(tables)
        copied = sum(count.calls for (name, _), count in groups.traffic.counts.items() if name == "copies")
        copies = {parameter.untyped_storage().data_ptr() for parameter in engine.execution.copies.parameters}
    assert copied, "no weights have travelled"
    if recipe.schedule.offload:
        assert copies <= engine.execution.host._weights, "weights of copies go to the host"
    return found


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize("case", CASES)
def test_steps_are_as_without_copies(ranks, case: str) -> None:
    workers, fold, sections = CASES[case]
    recipe = make_recipe(workers, fold, **{"optimizer": ADAMW, **sections})
    check_equal(ranks(workers).run(train, recipe, timeout=240), one_process(recipe, steps=STEPS))


@pytest.mark.gate(1 / 4)
@pytest.mark.parametrize("case", CASES)
def test_nobody_computes_before_weights_or_gradients_have_come(ranks, case: str) -> None:
    workers, fold, sections = CASES[case]
    recipe = make_recipe(workers, fold, **{"optimizer": ADAMW, **sections})
    check_equal(StrictPools(ranks)(workers).run(train, recipe), one_process(recipe, steps=STEPS))


FOLDS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "ep2": (2, {"ep": 2}, {}),
    "ep4": (4, {"ep": 4}, {}),
    "ep8": (8, {"ep": 8}, {}),
    "ep2 edp2": (4, {"ep": 2}, {}),
    "ep2 edp2 zero1": (4, {"ep": 2}, {"engine": {"kind": "torch", "zero": 1}}),
    "ep2 etp2": (4, {"ep": 2, "etp": 2}, {}),
    "ep2 tp2": (2, {"ep": 2, "tp": 2}, {}),
    "ep4 cp2": (4, {"ep": 4, "cp": 2}, {}),
    "ep4 tp2 cp2": (4, {"ep": 4, "tp": 2, "cp": 2}, {}),
    "ep2 pp2": (4, {"ep": 2, "pp": 2}, {}),
    "ep2 pp2 edp2 zero2": (8, {"ep": 2, "pp": 2}, {"engine": {"kind": "torch", "zero": 2}, "schedule": {"reduction": "buckets"}}),
    "ep4 once to each rank": (4, {"ep": 4}, {"moe": {"dispatch": "rank"}}),
}
KINDS: list[dict[str, Any]] = [{"kind": "sequential"}, {"kind": "stream", "degree": 2}, {"kind": "list", "degree": 2}]


def train_by_loads(rank: int, recipe: Any, steps: int) -> tuple[dict[str, Any], Any]:
    with engine_on(recipe, rank) as (engine, groups):
        found = go_by_times(engine, groups, recipe, steps)
        return found, engine.execution.copying and engine.execution.copying.last


@pytest.mark.nightly("minutes of processor time")
@pytest.mark.parametrize("skew", [0, 0.5, 1, 2])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["kind"])
@pytest.mark.parametrize("fold", FOLDS)
def test_copies_by_loads(ranks, fold: str, kind: dict[str, Any], skew: float) -> None:
    workers, sizes, given = FOLDS[fold]
    sections = {"moe": {}, "schedule": {}, **given}
    sections["moe"] = {"copies": 2, "copies_every": 3, **sections["moe"]}
    sections["schedule"] = {**kind, **sections["schedule"]}
    sgd = {"kind": "sgd", "lr": 0.5, "decay": "constant"}  # AdamW would make tiny differences large within 20 steps
    model = {"expert_hidden": 4, "router": {"skew": skew}}  # small, so that few rows are worth a copy
    recipe = make_recipe(workers, sizes, model=model, training={"steps": 20}, optimizer=sgd, **sections)
    found, decisions = zip(*ranks(workers).run(train_by_loads, recipe, 20, timeout=240), strict=True)
    check_equal(found, one_process(recipe, steps=20))
    assert len(set(decisions)) == 1
    last = decisions[0]
    assert last.expected <= last.overload
    if skew >= 1:
        assert last.copies > 0
        assert last.expected < 0.8 * last.overload


def test_copies_even_loads_out() -> None:
    zipf = [100 / (expert + 1) for expert in range(8)]
    for ranks, room, left in ((2, 1, 1.0), (4, 1, 1.0), (4, 2, 1.0), (8, 1, 1.042), (8, 2, 1.0)):
        table = copy_experts(zipf, ranks, room)
        assert table is not None
        assert max(table.rank_shares(zipf)) == pytest.approx(left, abs=1e-3), (ranks, room)
        assert all(len(of) <= room for of in table.of_rank)
        assert all(expert * ranks // 8 != rank for rank, of in enumerate(table.of_rank) for expert in of), "a copy at home"
        assert [sum(share_R) for share_R in table.share_ER] == pytest.approx([1.0] * 8)
    assert copy_experts([1.0] * 8, 4, 2) is copy_experts([0.0] * 8, 4, 2) is None
    assert copy_experts(zipf, 2, 1, worth=100) is None, "a copy that takes fewer rows than its bytes are worth"


def test_tokens_stay_where_there_is_a_copy() -> None:
    """Expert 0 has four times the load of each other one. Rank 1 gets a copy, and keeps its own tokens for it."""
    load_E = [4.0, 1.0, 1.0, 1.0]
    table = copy_experts(load_E, 2, 1)
    assert table is not None
    assert table.of_rank == ((), (0,))
    assert table.share_ER[0] == pytest.approx((0.625, 0.375))  # 3.5 rows for each rank
    home, copy = table.place(0, 0), table.place(0, 1)
    assert (home, copy) == (0, 5)
    for rank, at_home in ((0, 1.0), (1, 0.25)):
        bounds, places = table.ways(rank)
        assert len(bounds) == len(places) == table.places == 6
        assert bounds == sorted(bounds)
        at = {place: bound for bound, place in zip(bounds, places, strict=True) if bound <= 4}
        assert at[home] == pytest.approx(at_home)
        assert at[copy] == 1.0


@pytest.mark.parametrize("step", range(4))
def test_every_rank_sends_the_shares_that_the_loads_ask_for(step: int) -> None:
    recipe = make_recipe(4, {"ep": 4})
    for table in tables_of(recipe, step + 1).values():
        sent_PR = torch.zeros(table.places, 4, dtype=torch.float64)
        for rank in range(4):
            bounds, places = table.ways(rank)
            below = torch.tensor([0.0, *bounds])
            for place, size in zip(places, below.diff(), strict=True):
                if size.isfinite():
                    sent_PR[place, rank] += size
        for expert, share_R in enumerate(table.share_ER):
            for rank, share in enumerate(share_R):
                if share:
                    assert float(sent_PR[table.place(expert, rank)].mean()) == pytest.approx(share, abs=1e-6)
        assert float(sent_PR.sum()) == pytest.approx(4 * len(table.share_ER))


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"fold": 1},
            r"moe\.copies=1: is for copies on other workers of an expert-parallel group; it needs fold\.ep of at least 2",
        ),
        ({"model": {"adapter": {"rank": 2}}}, "is for experts that training changes, and frozen ones stay"),
        ({"model": {"router": {"capacity_factor": 1.0, "pad": True}}}, "padding gives every expert equally many rows"),
        ({"placement": {"attention": 2, "experts": 2}}, "placement parts them"),
        (
            {"moe": {"copies": 5}},
            r"moe\.copies=5: must be at most 4, the experts of other workers in a block; legal: 0, 1, 2, 3, 4",
        ),
    ],
    ids=str,
)
def test_what_can_have_no_copies_is_refused(sections: dict[str, Any], line: str) -> None:
    given = {"fold": 2, "moe": {}, **sections}
    fold, moe = given.pop("fold"), {"copies": 1, **given.pop("moe")}
    with pytest.raises(UserError, match=line):
        make_recipe(4, fold, **given, moe=moe)


def test_copies_that_would_not_have_helped_are_not_made() -> None:
    """The load of two experts changes its place in every step: copies by one half of the steps would not help the other half."""
    put: list[Any] = []
    ownership = Ownership(make_recipe(4, 4).model, Fold(4, ep=4))
    model: Any = SimpleNamespace(spec=ownership.model, ownership=ownership, parameters=lambda: iter([torch.zeros(0)]))
    groups: Any = SimpleNamespace(fold=ownership.fold, control=SimpleNamespace(all_reduce=lambda x: x))
    choice = CopyChoice(model, groups, 1, 4, put.append)
    first, fifth = [400, *[100] * 7], [*[100] * 4, 400, *[100] * 3]

    def loads(half: int) -> Any:
        """The full expert of the first block is another one in the second half; that of the second block is always the first."""
        return SimpleNamespace(count_ME=torch.tensor([(first, fifth)[half], first]))

    for half in (0, 1, 0, 0, 1, 1):
        choice.decide()
        choice.count([loads(half)])
    choice.decide()
    assert len(put) == 2, "after two steps, and after four more"
    for tables in put:
        assert tables[0] is None
        assert tables[1].of_rank == ((), (0,), (0,), (0,))
    assert choice.last is not None
    assert choice.last.copies == 3
    choice.renumber({1: [7, *range(1, 7), 0]})
    choice.count([loads(0)])
    choice.count([loads(0)])
    choice.decide()
    assert len(put) == 3, "anew once experts have moved"
