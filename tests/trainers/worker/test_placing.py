"""When a worker moves experts, with both engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foldray.errors import UserError
from tests.foldray.parity import drifted, make_recipe, worst
from tests.foldray.runtime.test_expert_order import reference, train
from trainers.worker import placing
from trainers.worker.placing import ExpertPlacing

_ADAMW = {"kind": "adamw", "lr": 1e-2, "eps": 1e-3, "decay": "constant"}


@pytest.mark.gate(1 / 4)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(("workers", "fold"), [(2, {"ep": 2}), (4, {"ep": 2})], ids=str)
def test_deepspeed_moves_its_states_with_experts(ranks, workers: int, fold: dict[str, int], zero: int) -> None:
    recipe = make_recipe(
        workers, fold, engine={"kind": "deepspeed", "zero": zero}, precision="float32", optimizer=_ADAMW,
        schedule={"reduction": "chunks" if zero == 2 else "end"},
    )  # fmt: skip
    found = ranks(workers).run(train, recipe, True, timeout=240)
    difference, where = worst(found, reference(recipe), False)
    assert difference < 2e-5, where
    assert drifted(found) == []


def test_experts_move_by_the_loads_of_the_steps_between(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[dict[int, list[int]]] = []
    monkeypatch.setattr(placing, "reorder_experts", lambda engine, groups, orders: moved.append(dict(orders)))
    told: list[Any] = []
    groups: Any = SimpleNamespace(control=SimpleNamespace(index=0))
    mover = ExpertPlacing(make_recipe(2, 2, moe={"place_every": 2}), groups, SimpleNamespace(), told.append)  # type: ignore[arg-type]
    even, uneven = [1] * 8, [4, 4, 1, 1, 1, 1, 1, 1]
    for step, loads in enumerate(([even, uneven], [even, uneven], [uneven, even], [even, even], [even, even], [even, even]), 1):
        mover.after(step, torch.tensor(loads))
    assert [sorted(orders) for orders in moved] == [[1], [0]]
    assert all(sorted(order) == [*range(8)] for orders in moved for order in orders.values())
    # In steps 1 and 2, the second block has 10 of 14 tokens on its first rank; 7 would be even.
    assert told[0] == {"kind": "placed", "step": 2, "experts": 2, "overload": pytest.approx((1 + 10 / 7) / 2), "expected": 1.0}
    assert told[1]["step"] == 4


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"fold": 1}, r"moe\.place_every=2: moves experts between the workers of an expert-parallel group; it needs fold\.ep"),
        ({"model": {"router": {"score": "sigmoid", "groups": 2}}}, r"would take experts out of their groups"),
        ({"routes": {"replay": "run"}}, "numbers experts anew, and recorded routes name them by number"),
        ({"routes": {"record_tokens": 4}}, "numbers experts anew"),
        ({"model": {"adapter": {"rank": 2}}}, "moves what training changes, and frozen experts stay"),
    ],
    ids=str,
)
def test_what_cannot_move_is_refused(sections: dict[str, Any], line: str) -> None:
    fold = sections.pop("fold", 2)
    with pytest.raises(UserError, match=line):
        make_recipe(2, fold, **sections, moe={"place_every": 2})
