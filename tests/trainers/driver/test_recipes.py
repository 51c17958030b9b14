"""Recipes of `recipes/` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foldray.cli import main
from tests.test_recipes import RECIPES


@pytest.mark.nightly("a training each")
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
