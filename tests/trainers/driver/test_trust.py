"""Modules that a stored recipe names run only for those who trust it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foldray import UserError
from foldray.cli import main
from tests.foldray.kernels.test_own_activation import NAME
from tests.trainers.hugging_face.test_export import make_run
from tests.trainers.telemetry import records
from trainers import FoldTrainer, Model
from trainers.telemetry.records import as_json

REFUSED = f"foldray: RUN=run: its recipe.yaml is refused (model.ffn={NAME}: names code, which a stored recipe runs only if"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", ffn=NAME)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"status": "finished"}))
    lines = [as_json(record) + "\n" for record in records.run(3, layers=2, experts=4)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    (tmp_path / "text").write_text("def f(x):")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [("generate", "run", "--prompt", "x", "--tokens", "1"), ("eval", "run", "text"), ("status", "run"), ("health", "run")],
)
def test_a_command_runs_them_only_with_trust(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    command = tuple(word.replace("run", "run/step_00000003") if command[0] in ("generate", "eval") else word for word in command)
    imported: list[Any] = []
    monkeypatch.setattr("foldray.tables.imported", lambda *_: imported.append(1))
    assert main([*command]) == 2
    assert REFUSED.replace("RUN=run", f"RUN={command[1]}") in capfd.readouterr().err
    assert not imported
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert main([*command, "--trust"]) == 0


def test_python_code_runs_them_only_with_trust(place: Path) -> None:
    checkpoint = place / "run" / "step_00000003"
    with pytest.raises(UserError, match="trust=True in Python"):
        Model.load(checkpoint)
    assert Model.load(checkpoint, trust=True).step == 3
    with pytest.raises(UserError, match="trust=True in Python"):
        FoldTrainer.restore(place / "run")
    assert not FoldTrainer.can_restore(place / "run")
    assert FoldTrainer.can_restore(place / "run", trust=True)
    assert FoldTrainer.restore(place / "run", trust=True).recipe.model.ffn == NAME
