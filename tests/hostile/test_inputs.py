"""Hostile inputs to the commands: each is refused in one line, runs nothing, writes nothing, and shows no secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.row import Row
from tests.hostile.table import ROWS, page

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
CHARACTERS, BYTES, SECONDS = 2500, 2**30, 20  # seconds of a processor


def name_of(row: Row) -> str:
    return f"{row.kind}: {row.name}"


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came of every row that is tested, by its name. A row is missing if it ended the process."""
    rows = [name_of(item.callspec.params["row"]) for item in request.session.items if "outcomes" in item.fixturenames]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.hostile.drive", str(tmp_path_factory.mktemp("hostile")), *rows]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found, done.stderr[-2000:]
    return {each["row"]: each for each in found}


def faults(row: Row, found: dict[str, Any]) -> list[str]:
    """Return what is wrong with the outcome of a row."""
    line, checks = found["err"], list[tuple[bool, str]]()
    checks.append((found["code"] != 2, f"code {found['code']}"))
    is_line = line.startswith("foldray: ") and line.endswith("\n") and line[:-1].isprintable() and len(line) <= CHARACTERS
    checks.append((not is_line, f"no line of at most {CHARACTERS} printable characters: {line[-2000:]!r}"))
    checks.append((row.says not in line, f"{row.says!r} is not in {line!r}"))
    checks.append((bool(found["out"]), f"on standard output: {found['out'][:1000]!r}"))
    checks.append((bool(found["changes"]), f"files changed: {found['changes']}"))
    checks.append((found["ran"], "code in the input ran"))
    checks.append((bool(found["calls"]), f"it called {found['calls']}"))
    checks.append((found["secret"], "the secret was told"))
    checks.append((found["grown"] > BYTES, f"it took {found['grown'] >> 20} MiB more memory"))
    checks.append((found["seconds"] > SECONDS, f"it took {found['seconds']:.0f} s"))
    return [text for is_wrong, text in checks if is_wrong]


@pytest.mark.gate(72)
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_hostile_input_is_refused_in_one_line(row: Row, outcomes: dict[str, dict[str, Any]]) -> None:
    assert name_of(row) in outcomes, "the process ended"
    wrong = faults(row, outcomes[name_of(row)])
    assert not wrong, "\n".join(wrong)


def test_the_page_counts_the_rows() -> None:
    again = "python -m tests.hostile.table > docs/notebook/hostile.md"
    assert (ROOT / "docs" / "notebook" / "hostile.md").read_text() == page(), f"run {again}"


def test_rows_have_names_of_their_own() -> None:
    assert len({name_of(row) for row in ROWS}) == len(ROWS) >= 60


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"code": 0}, "code 0"),
        ({"code": "Traceback"}, "code Traceback"),
        ({"err": ""}, "no line of at most"),
        ({"err": "foldray: x: y\nmore\n"}, "no line of at most"),
        ({"err": "foldray: x: y \x1b[2J\n"}, "no line of at most"),
        ({"err": f"foldray: x: y {'z' * CHARACTERS}\n"}, "no line of at most"),
        ({"err": "foldray: x: z\n"}, "'x: y' is not in"),
        ({"out": "table"}, "on standard output"),
        ({"changes": ["a: None → b"]}, "files changed"),
        ({"ran": True}, "code in the input ran"),
        ({"calls": ["example.org"]}, "it called ['example.org']"),
        ({"secret": True}, "the secret was told"),
        ({"grown": 2 * BYTES}, "more memory"),
        ({"seconds": 30.0}, "it took 30 s"),
    ],
)
def test_every_fault_is_seen(change: dict[str, Any], told: str) -> None:
    good = {
        "code": 2,
        "err": "foldray: x: y\n",
        "out": "",
        "changes": [],
        "ran": False,
        "secret": False,
        "calls": [],
        "grown": 0,
        "seconds": 0.1,
    }
    row = Row("kind", "name", "command", "x: y")
    assert not faults(row, good)
    (fault,) = faults(row, good | change)[:1]
    assert told in fault
