"""Pictures of runs: every kind of run gets its pictures."""

import math
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.trainers.telemetry.records import history, resumed, run, step, validation
from trainers.pictures.canvas import smoothed
from trainers.pictures.training import draw_expert_load, draw_loss
from trainers.telemetry.history import History

BASELINES = {"unigram": 4.87, "bigram": 3.62}


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize(
    "past",
    [
        history(*run(60)),
        history(*run(60), resumed(20), step(21), step(22)),
        history(step(1)),
        history(step(1, loss=math.nan)),
        history(step(1), step(2, loss=math.inf), step(3)),
        history(*(step(count) for count in range(1, 20))),
        history(*run(20, layers=0)),
        history(validation(5)),
        History(),
    ],
    ids=["usual", "resumed", "one step", "nan", "inf", "no validation", "no experts", "only validation", "nothing"],
)
def test_both_pictures_are_drawn(past, tmp_path):
    draw_loss(past, BASELINES, tmp_path / "loss.png", "a-run")
    draw_expert_load(past, tmp_path / "load.png", "a-run")
    for name in ("loss.png", "load.png"):
        width, height = size(tmp_path / name)
        assert 1000 < width < 2000
        assert 300 < height < 2000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["load.png", "loss.png"]


@pytest.mark.gate(2)
@pytest.mark.parametrize(("layers", "experts"), [(1, 1), (1, 2), (4, 16), (27, 64), (61, 256)])
def test_expert_loads_of_any_size(layers, experts, tmp_path):
    draw_expert_load(history(*run(3, layers, experts)), tmp_path / "load.png", "a-run", range(1, layers + 1))
    width, height = size(tmp_path / "load.png")
    assert 1000 < width < 2000
    assert 300 < height < 2000


def test_experts_without_a_token(tmp_path):
    draw_expert_load(history(step(1, load=[[4, 0, 4, 0], [0, 0, 0, 0]])), tmp_path / "load.png", "a-run")
    assert size(tmp_path / "load.png")


def test_no_baselines_and_longer_tokens(tmp_path):
    draw_loss(history(*run(30)), {}, tmp_path / "loss.png", "a-run", bytes_per_token=4.2)
    assert size(tmp_path / "loss.png")


def test_conversations_are_drawn_per_token(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("trainers.pictures.training.save", lambda figure, path: drawn.append(figure))
    records = [{**each, "bits_per_byte": None} if each["kind"] == "validation" else each for each in run(30)]
    draw_loss(history(*records), {}, tmp_path / "loss.png", "a-run", bytes_per_token=None)
    (axes,) = drawn[0].axes
    assert axes.get_ylabel() == "loss (nats per token)"
    last, lines = records[-2], [line.get_ydata() for line in axes.lines]
    assert any(len(line) == 3 and line[-1] == pytest.approx(last["loss"]) for line in lines)


def test_smoothing_keeps_a_constant_and_passes_over_gaps():
    values = np.full(200, 3.0)
    values[50:55] = math.nan
    smooth = smoothed(values)
    assert np.isnan(smooth[50:55]).all()
    np.testing.assert_allclose(smooth[~np.isnan(values)], 3.0)
