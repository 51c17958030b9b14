"""The fold for fewer workers than a recipe asks for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from foldray import refold
from foldray.blueprint import parameters
from foldray.costs import prediction
from foldray.costs.hardware import load_hardware
from foldray.costs.prediction import predict
from foldray.errors import UserError
from foldray.plan.space import legal_folds
from foldray.recipe import Recipe
from foldray.refold import MOST_WORLDS, _Folded, _folded, _Prices, as_candidate, worlds
from tests.patches import patched


def recipe(**sections: Any) -> Recipe:
    base: dict[str, Any] = {
        "model": {"preset": "tiny", "experts": 12},
        "data": {"seq_len": 128},
        "fold": {"ep": 4},
        "training": {"steps": 9, "global_batch": 16, "micro_batch": 2},
        "cluster": {"workers": 4, "min_workers": 2},
    }
    return Recipe.parse({key: {**base.get(key, {}), **sections.get(key, {})} for key in base | sections})


def test_many_numbers_of_workers_are_little_work() -> None:
    """No pipeline is simulated, the model's parameters are counted once, and once more with copies of key heads, and only the
    fastest folds are checked as recipes."""
    given = recipe(cluster={"workers": 48, "min_workers": 32}, training={"steps": 9, "global_batch": 64})
    done = Counter[str]()

    def counted(name: str, original: Any) -> Any:
        def call(*each: Any, **more: Any) -> Any:
            done[name] += 1
            return original(*each, **more)

        return call

    with (
        patched(parameters, "parameter_table", counted("tables", parameters.parameter_table)),
        patched(prediction, "backward_ends", counted("pipelines", prediction.backward_ends)),
        patched(_Folded, "checked", counted("checks", _Folded.checked)),
    ):
        found = worlds(given)
    assert list(found) == list(range(32, 49))
    assert done["tables"] <= 2
    assert done["checks"] <= 2 * len(found)
    assert done["pipelines"] == 0


def test_long_ranges_have_every_nth_number() -> None:
    found = list(worlds(recipe(model={"preset": "tiny", "layers": 2, "experts": 1, "topk": 1}, fold={"ep": 1},
                               cluster={"workers": 200, "min_workers": 7})))  # fmt: skip
    assert (found[0], found[-1]) == (7, 200)
    assert len(found) <= MOST_WORLDS + 2
    assert {after - before for before, after in pairwise(found[1:])} == {4}


def test_the_nearest_folds_alone_are_priced() -> None:
    """960 workers have 6,390 folds of this model."""
    given = recipe(
        model={"preset": "qwen3-30b-a3b", "experts": 128},
        data={"seq_len": 4096},
        cluster={"workers": 1024, "min_workers": 960},
        training={"steps": 9, "global_batch": 1024, "micro_batch": 1},
        fold={"ep": 8, "pp": 8},
    )
    priced, needs = [], _Prices.needs
    with (
        patched(_Prices, "needs", lambda self, candidate: priced.append(candidate.fold) or needs(self, candidate)),
        patched(refold, "MOST_WORLDS", 1),
    ):
        found = worlds(given)
    assert (list(found), len(priced)) == ([960, 1024], 65)
    fold = found[960].fold
    assert (fold.tp, fold.cp, fold.etp) == (1, 1, 1)
    assert fold.ep * fold.pp >= 32


def test_folds_have_the_order_of_their_predictions() -> None:
    """The estimate of a step is near its prediction, which simulates the pipeline."""
    machines, given = load_hardware("h200"), recipe(cluster={"workers": 13, "min_workers": 12}, fold={"ep": 1})
    folds = legal_folds(given.model, given.data.seq_len, 12)
    every = [replace(each.candidate, job=replace(each.candidate.job, dtype="bf16")) for each in _folded(given, folds)]
    ratios = [_Prices(machines).seconds(each) / predict(each, machines).seconds for each in every]
    assert len(ratios) > 50
    assert max(ratios) < 1.1 * min(ratios)


def test_everything_but_the_fold_stays() -> None:
    given = recipe(schedule={"kind": "stream", "degree": 2})
    found = worlds(given)
    assert list(found) == [2, 3, 4]
    assert found[4] == given
    for workers, each in found.items():
        assert each.cluster.workers == each.placed_fold.world_size == workers
        for section in ("model", "data", "training", "optimizer", "schedule", "engine"):
            assert getattr(each, section) == getattr(given, section)


def test_shares_may_be_uneven() -> None:
    three = worlds(recipe())[3]
    assert (three.placed_fold.dp, three.accumulation) == (3, 3)
    assert as_candidate(three).job.global_batch == 18, "the largest share decides how long a step takes"


def test_a_rank_needs_not_much_more_memory() -> None:
    """With large experts, every rank holding all of them would be the fastest, and would not fit."""
    given = recipe(model={"preset": "tiny", "experts": 12, "expert_hidden": 8192})
    three = worlds(given)[3]
    assert three.fold.ep * three.fold.etp == 3
    prices = _Prices(load_hardware("h200"))
    assert prices.needs(as_candidate(three)) < 1.5 * prices.needs(as_candidate(given)) * 4 / 3


def test_a_pipeline_of_another_length_has_equal_stages() -> None:
    given = recipe(
        model={"preset": "tiny", "layers": 6, "experts": 8},
        fold={"pp": 2, "ep": 2},
        schedule={"stage_layers": [2, 1, 2, 1], "virtual_stages": 2},
        cluster={"workers": 4, "min_workers": 3},
    )
    three = worlds(given)[3]
    assert (three.schedule.stage_layers, three.schedule.virtual_stages) == (None, 1)


def test_padding_needs_equal_shares() -> None:
    padded = {"preset": "tiny", "experts": 12, "router": {"capacity_factor": 1.0, "pad": True}}
    for each in worlds(recipe(model=padded)).values():
        assert each.training.global_batch % (each.placed_fold.dp * each.training.micro_batch) == 0


def test_numbers_of_workers_without_a_legal_fold_are_left_out() -> None:
    """Seven workers divide nothing of this model but the batch, and with padding they may not."""
    padded = {"preset": "tiny", "experts": 12, "router": {"capacity_factor": 1.0, "pad": True}}
    found = worlds(recipe(model=padded, fold={"ep": 4}, cluster={"workers": 8, "min_workers": 6}))
    assert 7 not in found
    assert 8 in found


def test_without_fewest_workers_there_is_one_world() -> None:
    given = recipe(cluster={"workers": 4, "min_workers": None})
    assert worlds(given) == {4: given}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cluster": {"workers": 4, "min_workers": 5}}, r"^cluster\.min_workers=5: must be at most .*workers=4; legal: 1 to 4$"),
        ({"cluster": {"workers": 4, "min_workers": 0}}, r"^cluster\.min_workers=0: must be greater than or equal to 1$"),
        (
            {"placement": {"attention": 2, "experts": 2}, "fold": {"ep": 2}, "schedule": {"kind": "af_pipe"}},
            r"^cluster\.min_workers=2: works for workers that have both attention and experts.*legal: null$",
        ),
        (
            {"cluster": {"workers": 4, "min_workers": 2, "placement": "STRICT_SPREAD"}},
            r"^cluster\.placement=STRICT_SPREAD: cannot hold for every number of workers.*legal: PACK, SPREAD$",
        ),
    ],
)  # fmt: skip
def test_bad_numbers_are_one_line(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        recipe(**changes)
