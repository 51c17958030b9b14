"""A window of the user's own, made of one row and a function: it trains and is planned, and mistakes in it are refused."""

from __future__ import annotations

from typing import Any

import pytest

from foldray.blueprint import ModelSpec, forward_flops_per_token
from foldray.clock import draw_text
from foldray.costs.candidate import Candidate, Job
from foldray.costs.device import Device
from foldray.costs.hardware import load_hardware
from foldray.costs.ops import OpWork
from foldray.costs.prediction import predict
from foldray.costs.whole import simulate_step
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.graph import SliceCost
from foldray.orders import named_ordering
from foldray.windows import FULL, find_window
from tests.foldray.parity import MODEL, check_equal, make_recipe, one_process, train, worst

NAME = "tests.foldray.model.striding:STRIDES"
WINDOWS = [FULL.name, "sliding:6", "chunked:8", NAME]


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_never_goes_back_and_counts_its_pairs(name: str) -> None:
    window = find_window(name)
    begins = [window.begin(query) for query in range(64)]
    assert begins == sorted(begins)
    assert all(0 <= first <= query for query, first in enumerate(begins))
    assert window.pairs(range(7, 50)) == sum(query - begins[query] + 1 for query in range(7, 50))


_TRAINED = [
    ({"tp": 2, "ep": 4}, {"kind": "one_a_one_m", "degree": 2}),
    ({"cp": 2, "ep": 2}, {}),
    ({"cp": 2, "ep": 2}, {"kind": "stream", "degree": 2}),
    ({"pp": 2, "ep": 2}, {"kind": "one_a_one_m", "degree": 4}),
]


@pytest.mark.gate(1)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("fold", "schedule"), _TRAINED, ids=str)
def test_it_trains(ranks, fold: dict[str, int], schedule: dict[str, Any], documents: bool) -> None:
    model = {"windows": [NAME, "sliding:6", "full"], "value_dim": 4, "layers": 3}
    recipe = make_recipe(4, fold, model=model, schedule=schedule)
    found, reference = ranks(4).run(train, recipe, 2, documents), one_process(recipe, steps=2, documents=documents)
    check_equal(found, reference)
    whole = one_process(make_recipe(4, fold, model={**model, "windows": ["full"]}), steps=2, documents=documents)
    assert worst(found, whole, relative=False)[0] > 1e-4, "the windows change what is computed"


def test_long_sequences_are_attended_to_in_runs() -> None:
    """Runs of queries, each with only the keys that it may see, give the result of whole sequences."""
    model = {"windows": ["sliding:130"], "positions": "rope"}
    whole = make_recipe(1, model=model, data={"seq_len": 640}, training={"global_batch": 1, "micro_batch": 1})
    cut = make_recipe(1, model=model, data={"seq_len": 640}, training={"global_batch": 1, "micro_batch": 1},
                      schedule={"kind": "one_a_one_m", "degree": 4})  # fmt: skip
    difference, where = worst([train(0, cut)], train(0, whole), relative=False)
    assert difference <= 1e-11, where


def test_flops_count_what_is_seen() -> None:
    def flops(**changes: Any) -> float:
        return forward_flops_per_token(ModelSpec(**{**MODEL, **changes}), 64)

    model = ModelSpec(**MODEL)
    seen = find_window("sliding:6").pairs(range(64)) / 64
    per_key = model.layers * 4 * model.heads * model.head_dim
    assert flops() - flops(windows=["sliding:6"]) == pytest.approx(per_key * (65 / 2 - seen))
    assert flops(windows=["sliding:6", "full"]) == pytest.approx((flops() + flops(windows=["sliding:6"])) / 2)
    assert flops(windows=[NAME]) < flops()


def test_it_is_planned_and_drawn() -> None:
    """A narrower window reduces the predicted time of attention in its blocks, and the step can be drawn."""
    hardware = load_hardware("eos-h100")

    def candidate(*windows: str) -> Candidate:
        model = ModelSpec.model_validate({"preset": "mixtral-8x22b", "layers": 4, "windows": windows})
        cost = SliceCost.of_model(model.hidden, model.heads)
        return Candidate(Job(model, 32768, 8), Fold(8, ep=8), named_ordering("one_a_one_m:4", 32768, cost))

    def attention(*windows: str) -> float:
        return predict(candidate(*windows), hardware).breakdown["attention"]

    own = "tests.foldray.model.striding:STRIDES"
    assert attention(own) < attention("sliding:4096") < attention("chunked:16384") < attention("full")
    halves = attention("sliding:4096", "full"), (attention("sliding:4096") + attention("full")) / 2
    assert halves[0] == pytest.approx(halves[1], rel=1e-6)
    planned = candidate(own)
    work = OpWork(planned, Device.of(planned.job, hardware))
    assert "A attention" in draw_text(planned.reducing, simulate_step(planned, work).spans)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("half", "is not a legal value"),
        ("sliding", "is not a legal value"),
        ("sliding:0", "must have a size from 1"),
        ("tests.foldray.model.striding:STRIDE", "is a int, not a"),
        ("tests.foldray.model.nowhere:X", "cannot be imported"),
    ],
)
def test_what_is_no_window_is_refused(name: str, rule: str) -> None:
    with pytest.raises(UserError, match=rule) as caught:
        make_recipe(2, 2, model={"windows": [name]})
    assert caught.value.field.startswith("model.windows")
    assert caught.value.legal == ["full", "linear", "sliding:TOKENS", "chunked:TOKENS", "module:NAME"]
