"""Only the tables of op kinds and overlap kinds name the kinds; other code reads the tables."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from foldray.costs.rank import PRICES
from foldray.kinds import EXCHANGES, OP_KINDS, RECOMPUTABLE
from foldray.orders import OVERLAPS
from foldray.runtime.micro_batch import MicroBatch

ROOT = Path(__file__).parents[2]
TABLES = {"foldray/kinds.py", "foldray/orders/overlaps.py"}
NAMES = {*OP_KINDS, *OVERLAPS}
ELSEWHERE = {"handover", "reduce", "copy", "stage", "offload"}  # ops that compute nothing in a micro-batch of their own


def compared(source: str) -> list[int]:
    """Return the lines that compare a kind with a text, such as `op.kind == "expert"` or `kind in ("stream", …)`."""

    def texts(node: ast.expr) -> set[str]:
        return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}

    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any("kind" in ast.unparse(side) for side in sides) and NAMES & set().union(*map(texts, sides)):
                found.append(node.lineno)
    return found


def test_nobody_compares_kinds_with_texts():
    paths = [path for folder in ("foldray", "trainers", "tuners") for path in sorted((ROOT / folder).rglob("*.py"))]
    named = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    assert {path: lines for path, text in named.items() if path not in TABLES and (lines := compared(text))} == {}


@pytest.mark.parametrize(
    "source", ['op.kind == "expert"', 'x if schedule.kind in ("stream", "flow") else y', 'if "moe_only" != kind: pass']
)
def test_a_comparison_is_seen(source):
    assert compared(source) == [1]


def test_every_op_of_a_micro_batch_runs_and_has_a_price():
    forward, backward = (
        {name.removesuffix(way) for name in vars(MicroBatch) if name.endswith(way)} for way in ("_forward", "_backward")
    )
    assert forward == set(OP_KINDS) - ELSEWHERE
    assert backward == set(PRICES) == forward - {"counts"}


def test_the_table_tells_what_travels_and_what_is_computed_again():
    assert EXCHANGES == ("dispatch", "combine", "intra_dispatch", "intra_combine")
    assert set(RECOMPUTABLE) == {"attention", "ffn", "expert", "shared"}
    assert not any(OP_KINDS[kind].travels for kind in RECOMPUTABLE)
    for letters in ({row.letter for row in OP_KINDS.values()}, {row.label for row in OP_KINDS.values()}):
        assert len(letters) == len(OP_KINDS), "drawings tell kinds apart"
