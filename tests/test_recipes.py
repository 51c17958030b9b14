"""The recipes of `recipes/`: each is legal, and its fold, schedule and engine train like one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foldray.choosing import expected
from foldray.costs.hardware import load_hardware
from foldray.plan.search import search
from foldray.plan.space import Space
from foldray.recipe import Recipe
from foldray.refold import as_candidate
from tests.trainers.measure.test_cases import run_cases
from trainers.measure.verify import judged, small

RECIPES = sorted(Path(__file__).parents[1].glob("recipes/*.yaml"))
QUICKSTART = "quickstart.yaml"
_MANY = 8  # workers


def _case(path: Path) -> Any:
    """Return a parameter. A recipe with many workers is left out of a normal run, which still reads it."""
    marks = [pytest.mark.nightly("many ranks")] if Recipe.load(path).cluster.workers > _MANY else []
    return pytest.param(path, marks=marks, id=path.stem)


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("path", [_case(path) for path in RECIPES if path.name != QUICKSTART])
def test_a_recipe_trains_like_one_process(ranks, path: Path) -> None:
    recipe = small(Recipe.load(path))
    found = ranks(recipe.cluster.workers).run(run_cases, recipe, ["as it is"])[0]
    (verdict,) = (each for each in judged(recipe, found) if "refused" not in each)
    assert verdict["passed"], verdict


def test_a_page_names_every_recipe() -> None:
    text = (Path(__file__).parents[1] / "docs" / "first_model.md").read_text()
    assert [path.name for path in RECIPES if f"recipes/{path.name}" not in text] == []


@pytest.mark.nightly("searches of plans")
@pytest.mark.parametrize("cluster", ["h200", "eos-h100"])
@pytest.mark.parametrize("name", ["gpus", "one_node", "two_nodes"])
def test_a_recipe_for_gpus_has_a_fold_that_no_other_one_beats_by_much(name: str, cluster: str) -> None:
    recipe, hardware = Recipe.load(next(path for path in RECIPES if path.stem == name)), load_hardware(cluster)
    space = Space(as_candidate(recipe).job, hardware, recipe.cluster.workers)
    best = search(space, 1).best[0].prediction.seconds
    assert min(expected(recipe, hardware).values()) < 1.03 * best
