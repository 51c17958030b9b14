"""What a job carries to its cluster: the packages and the recipe, and nothing else that lies there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foldray.errors import UserError
from foldray.recipe import Recipe
from tests.foldray.parity import make_recipe
from tests.pool import repository
from trainers.cluster import jobs

PACKAGES = ("foldray", "trainers", "tuners")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout in which people have worked."""
    root = tmp_path / "checkout"
    for name in ("foldray/fold", "foldray/costs/hardware", "trainers/data", "tuners"):
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").write_text("x = 1\n")
    (root / "foldray/costs/hardware/h200.yaml").write_text("name: h200\n")
    for name in ("runs/a/step_1/x.distcp", ".venv/lib/y.py", ".git/objects/z", "data/text.txt", "mlflow.db", "tests/t.py"):
        _large(root / name)
        _large(root / "foldray" / name.replace("tests/t.py", "fold/__pycache__/t.pyc"))
    _large(root / "trainers/env/lib/q.py")
    (root / "trainers/env/pyvenv.cfg").touch()
    (root / "tuners/linked").symlink_to(root / "runs")
    (root / "tuners/own.py").symlink_to(root / "tests/t.py")
    os.mkfifo(root / "tuners/pipe.py")
    return root


def _large(path: Path) -> None:
    """Make a file of 20 MiB without taking the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(20 * 2**20)


def carried(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_a_job_carries_the_packages_alone(root: Path, tmp_path: Path) -> None:
    recipe, folder = make_recipe(1), tmp_path / "job"
    folder.mkdir()
    jobs._pack(folder, recipe, root)
    assert carried(folder) == {
        "recipe.yaml", "foldray/fold/__init__.py", "foldray/costs/hardware/__init__.py", "foldray/costs/hardware/h200.yaml",
        "trainers/data/__init__.py", "tuners/__init__.py",
    }  # fmt: skip
    assert Recipe.load(folder / "recipe.yaml") == recipe


def test_packages_that_are_too_large_are_refused_in_one_line(root: Path, tmp_path: Path) -> None:
    _large(root / "foldray/fold/weights.py")
    (tmp_path / "job").mkdir()
    line = r"^packages=20\.0 MiB: a job carries at most 16 MiB of the packages in .*: foldray/fold/weights\.py \(20\.0 MiB\), "
    with pytest.raises(UserError, match=line):
        jobs._pack(tmp_path / "job", make_recipe(1), root)


def test_a_job_carries_all_files_of_foldray(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=repository(), capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout")
    jobs._pack(tmp_path, make_recipe(1))
    assert carried(tmp_path) >= {"recipe.yaml", *(name for name in listed.stdout.split() if (repository() / name).exists())}
    command = [sys.executable, "-m", "foldray", "explain", "--world-size", "8", "--cluster", "h200"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True, check=False)
    assert "ranks in order are as good as any" in done.stdout, done.stderr
