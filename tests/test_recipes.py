"""The recipes of `recipes/`: each is legal, and its fold, schedule and engine train like one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foldray.cli import main
from foldray.recipe import Recipe
from tests.trainers.measure.test_cases import run_cases
from trainers.measure.verify import judged, small

RECIPES = sorted(Path(__file__).parents[1].glob("recipes/*.yaml"))
QUICKSTART = "quickstart.yaml"
_MANY = 8  # workers


def _case(path: Path) -> Any:
    """Return a parameter. A recipe with many workers is left out of a normal run, which still reads it."""
    marks = [pytest.mark.nightly] if Recipe.load(path).cluster.workers > _MANY else []
    return pytest.param(path, marks=marks, id=path.stem)


@pytest.mark.parametrize("path", [_case(path) for path in RECIPES if path.name != QUICKSTART])
def test_a_recipe_trains_like_one_process(ranks, path: Path) -> None:
    recipe = small(Recipe.load(path))
    found = ranks(recipe.cluster.workers).run(run_cases, recipe, ["as it is"])[0]
    (verdict,) = (each for each in judged(recipe, found) if "refused" not in each)
    assert verdict["passed"], verdict


def test_readme_names_every_recipe() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    assert [path.name for path in RECIPES if f"recipes/{path.name}" not in text] == []


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", ["foldmoe", "dropless_deepspeed", "own_text"])
def test_a_recipe_trains_from_the_command_line(
    ray_session, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"Text {number} says that {number} is {number}. " * 800)
    path = next(path for path in RECIPES if path.stem == name)
    short = ["training.steps=4", "training.global_batch=8", "training.micro_batch=2", "training.eval_sequences=4"]
    text = ["data.source=text", f"data.path={tmp_path}/texts/*.txt", "data.seq_len=64", "data.validation.fraction=0.3"]
    storage = f"cluster.storage={tmp_path / 'runs'}"
    assert main(["train", str(path), *short, *text, "optimizer.warmup_steps=1", storage, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4
