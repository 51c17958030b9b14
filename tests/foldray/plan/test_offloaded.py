"""`foldray plan` with the optimizer on the host: as an option, as a recipe's own setting, and on hosts of unknown speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from foldray.cli import main

ASKED = ["plan", "--cluster", "h100", "--pp", "1", "--tp", "1", "--cp", "1", "--etp", "1", "--top", "1", "--json"]
MODEL = ["--model", "tiny", "--gpus", "8", "--seq-len", "512", "--global-batch", "32"]
RECIPE: dict[str, Any] = {
    "model": {"preset": "tiny"},
    "data": {"seq_len": 512},
    "training": {"global_batch": 32},
    "cluster": {"workers": 8},
    "precision": "bfloat16",
}


def planned(capsys: Any, *given: str) -> dict[str, Any]:
    assert main([*ASKED, *given]) == 0
    return json.loads(capsys.readouterr().out)["candidates"][0]


def test_the_option_moves_the_optimizer(capsys: Any) -> None:
    usual, moved = planned(capsys, *MODEL), planned(capsys, *MODEL, "--offload")
    assert "host" not in usual
    assert usual["memory"]["optimizer"] > moved["memory"]["optimizer"] == 0
    host = moved["host"]
    assert sum(host["memory"].values()) == pytest.approx(host["memory_gib"])
    assert host["memory"]["optimizer"] == pytest.approx(2 * host["memory"]["gradients"])
    assert host["travels_gib"] == pytest.approx(1.5 * host["memory"]["gradients"])
    assert moved["breakdown"]["optimizer"] == pytest.approx(host["seconds"])
    assert moved["breakdown"]["optimizer"] > usual["breakdown"]["optimizer"]


def test_a_recipe_has_its_own_setting(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "engine": {"kind": "torch", "zero": 1}}))
    assert "host" not in planned(capsys, str(path))
    asked, own = planned(capsys, str(path), "--offload"), planned(capsys, str(path), "engine.offload=optimizer")
    assert asked == own
    small = planned(capsys, str(path), "engine.offload=optimizer", "optimizer.moments=bfloat16")
    assert small["host"]["memory"]["optimizer"] == pytest.approx(own["host"]["memory"]["optimizer"] / 2)


def test_the_text_says_what_is_on_the_host_and_what_is_left_out(capsys: Any) -> None:
    asked = [each for each in ASKED if each != "--json"]
    assert main([*asked, *MODEL, "--offload"]) == 0
    assert " of the host for a GPU; " in (printed := capsys.readouterr().out)
    assert "which with the update takes " in printed
    assert main([*asked, *MODEL, "--offload", "--cluster", "rtx3090"]) == 0
    assert "steps are without the seconds of the optimizer, because rtx3090 does not say" in capsys.readouterr().out


def test_what_recipes_refuse_is_refused(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "engine": {"kind": "torch"}, "optimizer": {"kind": "muon"}}))
    assert main([*ASKED, str(path), "--offload"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "engine.offload=optimizer: moves the update to the host" in line
