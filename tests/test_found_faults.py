"""The tests that `docs/notebook/found_faults.md` names are there."""

from __future__ import annotations

import re

from tests.pool import repository


def test_every_fault_has_its_test() -> None:
    page = (repository() / "docs" / "notebook" / "found_faults.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(named) > 90
    missing = [name for name in named if f"def {name[1]}(" not in (repository() / "tests" / name[0]).read_text()]
    assert not missing
