"""Hostile input that could exhaust the machine or end in a traceback: values for every key, and files of every kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foldray import Recipe
from foldray.blueprint import PRESETS, ModelSpec
from foldray.files import read_yaml
from tests.foldray.hostile import VALUES, overrides

ROOT = Path(__file__).parents[2]
PARTS = 17  # does not divide the number of values, so every part tries every value on some keys


def run(*arguments: str, seconds: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in a separate process, which is killed after `seconds`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], timeout=seconds, capture_output=True, text=True, env=environment, **options
    )


@pytest.mark.gate(1 / 5)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_key_refuses_what_it_does_not_take_in_one_line(part: int) -> None:
    done = run("-m", "tests.foldray.hostile", str(part), str(PARTS), seconds=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    print(f"{found['count']} values, slowest {found['slowest']}, peak {found['peak'] / 2**20:.0f} MiB")
    assert not found["failures"], "\n".join(found["failures"])
    assert found["count"] > 1000
    assert found["peak"] < 2**30


def test_there_are_many_values_and_they_are_the_same_every_time() -> None:
    assert len(overrides()) > 5000
    assert overrides() == overrides()
    assert len(set(VALUES)) == len(VALUES)
    assert len(VALUES) % PARTS


def without_bounds(schema: Any, path: str = "") -> list[str]:
    """Return the whole numbers and lists of a JSON schema that have no upper bound."""
    if isinstance(schema, list):
        return [found for each in schema for found in without_bounds(each, path)]
    if not isinstance(schema, dict):
        return []
    open_number = schema.get("type") == "integer" and not {"maximum", "exclusiveMaximum", "enum", "const"} & set(schema)
    open_list = schema.get("type") == "array" and "maxItems" not in schema
    inside = [found for key, each in schema.items() for found in without_bounds(each, f"{path}.{key}")]
    return [path, *inside] if open_number or open_list else inside


def test_every_whole_number_and_every_list_of_a_recipe_has_a_bound() -> None:
    assert not without_bounds(Recipe.model_json_schema())


KIMI = {
    "layers": 61, "hidden": 7168, "heads": 64, "kv_heads": 64, "head_dim": 128, "ffn_hidden": 18432, "experts": 384, "topk": 8,
    "expert_hidden": 2048, "shared_hidden": 2048, "vocab": 163840, "dense_first": 1,
}  # fmt: skip


@pytest.mark.parametrize("model", [*({"preset": name} for name in PRESETS), KIMI], ids=[*PRESETS, "a-million-million"])
def test_models_that_are_trained_somewhere_are_legal_on_thousands_of_gpus(model: dict[str, Any]) -> None:
    length = 2**15 if ModelSpec(**model).positions == "learned" else 2**17
    if model.get("preset") == "tiny-gpt":
        length = 2048
    given = {
        "model": model, "data": {"seq_len": length}, "training": {"global_batch": 2**15}, "schedule": {"reduction": "chunks"},
        "cluster": {"workers": 2**13, "gpu": True}, "optimizer": {"warmup_steps": 2000}, "precision": "bfloat16",
    }  # fmt: skip
    given["training"]["steps"] = 10**6
    assert Recipe.parse(given).accumulation == 4


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["model.layers=1000000000000000000"], "model.layers=1000000000000000000: must be less than or equal to 4096"),
        (["model.hidden=123456789012345678901"], "model.hidden=123456789012345678901: must be less than or equal to 1048576"),
        (["model.vocab=123456789012345678901"], "model.vocab=123456789012345678901: must be less than or equal to 16777216"),
        (
            ["model.layers=4096", "model.experts=65"],
            "model.experts=65: makes 266240 experts in all blocks; at most 262144 are allowed",
        ),
        (
            ["model.layers=4096", "model.hidden=1000000", "model.expert_hidden=1000000"],
            "model=9.8e+16 parameters: must have at most 1e+14",
        ),
        (["schedule={reduction: chunks, sp_bytes: 1}"], "schedule.sp_bytes=1: cuts a worker's gradients into 10408448 chunks"),
        ([f"schedule.degrees={list(range(1, 500))}"], "schedule.degrees=[1, 2, 3"),
        (["schedule.recompute=[x]"], "schedule.recompute.0=x: is not a legal value; legal: attention, expert, ffn, shared"),
        (["tune.space.kind=[stream, x]"], "tune.space.kind.1=x: is not a legal value; legal: sequential, moe_only"),
        (
            [f"tune.space.{key}={list(range(1, 17))}" for key in ("micro_batch", "degree", "virtual_stages", "batch_degree")],
            "tune.space=65536 settings of every fold: must make at most 16384 settings of every fold; list fewer values",
        ),
        (["tune.study=../../x"], "tune.study=../../x: "),
        (["tune.study="], "tune.study="),
        (["schedule.degrees=[true]"], "schedule.degrees=[true]: is not a valid number"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_anything_counts_them(given: list[str], line: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("model: {preset: tiny}\n")
    done = run("-m", "foldray", "submit", str(tmp_path / "recipe.yaml"), *given, "--address", "nowhere", seconds=30)
    assert done.returncode == 2
    assert done.stderr.startswith(f"foldray: {line}")
    assert done.stderr.count("\n") == 1


def test_what_a_merge_brings_does_not_count_as_written_twice() -> None:
    text = "outer: {inner: &inner {<<: {k: 0}, k: 1}}\nbeside: {<<: *inner}\n"
    assert read_yaml(text) == {"outer": {"inner": {"k": 1}}, "beside": {"k": 1}}
