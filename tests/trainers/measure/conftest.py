from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def recipe(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the module's `RECIPE`, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(request.module.RECIPE)
    return tmp_path / "recipe.yaml"
