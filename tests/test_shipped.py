"""The recipes that come with foldray: by name from a checkout, and from an installed wheel."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from foldray import Recipe, UserError
from foldray.cli import main
from foldray.recipe import shipped

ROOT = Path(__file__).parents[1]


def test_recipes_are_found_by_name_and_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "--json", "--copy", "."]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in found["recipes"]} == {path.stem for path in ROOT.glob("recipes/*.yaml")}
    assert all(each["about"].endswith((".", ":")) for each in found["recipes"])
    assert Recipe.load("quickstart") == Recipe.load(ROOT / "recipes" / "quickstart.yaml")
    assert Recipe.load("recipes/fine_tuning.yaml").data.path == "recipes/fine_tuning/conversations.jsonl"
    assert Path("recipes/fine_tuning/conversations.jsonl").exists()
    assert sorted(found["copied"]) == sorted(str(path) for path in Path("recipes").glob("*.yaml"))
    with pytest.raises(UserError, match="has recipes already, and foldray overwrites nothing"):
        shipped.copy(Path())
    Path("quickstart").write_text("name: mine\nmodel: {preset: tiny}\n")  # a file of this name comes first
    assert Recipe.load("quickstart").name == "mine"


@pytest.mark.gate(1 / 3)
def test_a_wheel_brings_the_recipes(tmp_path: Path) -> None:
    source, place = tmp_path / "source", tmp_path / "environment"
    for name in ("foldray", "trainers", "tuners", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source / name)
    venv.create(place)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")  # all that foldray needs, behind what the wheel brings
    python, pip = place / "bin" / "python", [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    for command, wanted in (("recipes --json", str(place / "share")), ("explain quickstart", "attention")):
        words = [python, "-m", "foldray", *command.split()]
        assert wanted in subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
