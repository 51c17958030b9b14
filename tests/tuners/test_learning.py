"""The hardware file that a study corrects with its measurements."""

from __future__ import annotations

import math
from pathlib import Path

import optuna
import pytest
import yaml

from foldray.costs.hardware import Hardware, load_hardware
from foldray.costs.prediction import predict
from foldray.errors import UserError
from foldray.recipe import Recipe
from foldray.refold import as_candidate
from tuners.learning import write_corrected_hardware
from tuners.outcome import Outcome
from tuners.record import TrialRecord, read_trial
from tuners.space import Settings, apply_setting

RECIPE = Recipe.parse({
    "model": {"preset": "tiny", "layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 8, "head_dim": 128, "expert_hidden": 4096},
    "engine": {"kind": "torch"},
    "data": {"seq_len": 2048},
    "training": {"global_batch": 16},
    "cluster": {"workers": 16, "storage": "runs"},
    "fold": {"ep": 4},
    "tune": {"space": {"tp": [1, 2], "cp": [1], "pp": [1], "kind": ["sequential", "one_a_one_m"], "degree": [1, 2, 4]}},
})  # fmt: skip
TABLE = Settings(RECIPE)


def seconds(machines: Hardware) -> list[float]:
    return [predict(as_candidate(apply_setting(RECIPE, row)), machines).seconds for row in TABLE.rows]


def outcome(measured: list[float]) -> Outcome:
    """Return the outcome of a study that has measured every row."""
    trials = [
        read_trial(
            optuna.trial.create_trial(
                value=each,
                params=TABLE.params(row),
                distributions=TABLE.distributions,
                user_attrs=TrialRecord(seconds=each).as_attributes(),
            ),
            TABLE,
        )
        for row, each in zip(TABLE.rows, measured, strict=True)
    ]
    return Outcome(RECIPE, TABLE.rows[0], min(measured, default=0.0), 1.0, trials, None, TABLE)


def off(machines: Hardware, measured: list[float]) -> float:
    """Return the mean absolute error of the logarithms of predictions."""
    pairs = zip(seconds(machines), measured, strict=True)
    return sum(abs(math.log(mine / theirs)) for mine, theirs in pairs) / len(measured)


@pytest.mark.nightly("learns from many made-up measurements")
def test_predictions_come_near_to_what_was_measured(tmp_path: Path) -> None:
    told = load_hardware("eos-h100")
    slower = {"exchange": 0.4, "inter": 0.5, "memory": 0.5}
    measured = seconds(told.model_copy(update={"constants": {**told.constants, **slower}}))
    path = write_corrected_hardware(told, outcome(measured), tmp_path / "learnt.yaml")
    better = load_hardware(str(path))
    assert off(told, measured) > 0.07
    assert off(better, measured) < 0.25 * off(told, measured)
    assert "corrected by" in better.about
    assert yaml.safe_load(path.read_text())["memory_gib"] == told.memory_gib, "data sheets stay"


@pytest.mark.gate(1 / 2)
def test_what_was_measured_as_told_changes_nothing(tmp_path: Path) -> None:
    told = load_hardware("eos-h100")
    better = load_hardware(str(write_corrected_hardware(told, outcome(seconds(told)), tmp_path / "learnt.yaml")))
    assert off(better, seconds(told)) < 1e-3


def test_nothing_is_learnt_from_nothing(tmp_path: Path) -> None:
    path = tmp_path / "learnt.yaml"
    nothing = Outcome(RECIPE, TABLE.rows[0], 0.0, 1.0, [], None, TABLE)
    with pytest.raises(UserError, match="needs a trial that was measured"):
        write_corrected_hardware(load_hardware("eos-h100"), nothing, path)
    assert not path.exists()
    with pytest.raises(UserError, match="cannot be written"):
        write_corrected_hardware(
            load_hardware("eos-h100"), outcome(seconds(load_hardware("eos-h100"))), tmp_path / "nowhere" / "learnt.yaml"
        )
