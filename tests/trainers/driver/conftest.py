"""A training that the tests of this folder share, because each takes as long as a hundred other tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainers.driver.runs import fit, recipe, write_texts
from trainers import FoldTrainer


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for runs, with texts."""
    folder = tmp_path_factory.mktemp("storage")
    write_texts(folder / "texts")
    return folder


@pytest.fixture(scope="session", params=["torch", pytest.param("deepspeed", marks=pytest.mark.nightly("trains again"))])
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"engine": {"kind": request.param}}


@pytest.fixture(scope="session")
def whole(engine: dict[str, Any], storage: Path, ray_session: None) -> FoldTrainer:
    """An uninterrupted run."""
    return fit(recipe(storage, **engine))
