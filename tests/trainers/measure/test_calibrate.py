"""`foldray calibrate` measures workers through Ray, and writes a hardware file that `foldray plan` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foldray.cli import main
from foldray.costs.hardware import load_hardware
from trainers.measure.speeds import _line

RECIPE = """
model: {preset: tiny, layers: 2}
fold: {ep: 2}
cluster: {workers: 2}
"""


@pytest.mark.nightly("measures half a minute")
def test_workers_are_measured_and_planned_with(ray_session, recipe: Path, capsys) -> None:
    assert main(["calibrate", str(recipe), "--out", "here.yaml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = load_hardware("here.yaml")
    assert found.name == document["name"] == "here"
    assert found.gpus_per_node == 2, "both workers are on this machine"
    assert [size for size, _, _ in found.intra.by_size] == [2]
    assert found.inter.by_size == ()
    assert found.constants["exchange"] > 0
    assert max(share for _, share in found.gemm) == 1.0
    assert [flops for flops, _ in found.gemm] == sorted(flops for flops, _ in found.gemm)
    assert [tokens for tokens, _ in found.attention] == [128, 256, 512, 1024, 2048]
    assert all(share > 0.1 for _, share in found.attention), "0.1 is where nothing sensible was measured"
    assert "crowding" in found.constants

    asked = ["--model", "tiny", "--gpus", "2", "--seq-len", "256", "--global-batch", "4", "--dtype", "fp32", "--json"]
    assert main(["plan", "--cluster", "here.yaml", *asked]) == 0
    (first, *_) = json.loads(capsys.readouterr().out)["candidates"]
    assert 0 < first["step_time_s"] < 60


@pytest.mark.parametrize("path", ["here.txt", "nowhere/here.yaml"])
def test_a_file_that_cannot_be_is_refused_before_anything_is_measured(recipe: Path, path: str, capsys) -> None:
    assert main(["calibrate", str(recipe), "--out", path]) == 2
    assert capsys.readouterr().err == f"foldray: out={path}: must be a .yaml file in a folder that exists\n"


def test_a_line_through_measurements_is_its_slope_and_its_start() -> None:
    assert _line([(10.0, 3.0), (20.0, 4.0), (30.0, 5.0)]) == pytest.approx((0.1, 2.0))
    assert _line([(10.0, 1.0), (30.0, 5.0)]) == pytest.approx((0.2, 0.0)), "no message starts before it is sent"
    assert _line([(10.0, 3.0), (30.0, 3.0)]) == pytest.approx((0.1, 0.0)), "no link is infinitely fast"
