"""Which tests a run takes: every case has its turn, and shares divide all tests."""

from __future__ import annotations

from collections import Counter
from datetime import date, timedelta

import pytest

from tests.gate import Units, turn

CASES = [f"tests/test_x.py::test_y[{number}]" for number in range(10)]
DAY = date(2026, 11, 27)


def days(count: float, number: int, function: str = "test_y") -> list[set[str]]:
    return [turn(function, CASES, count, DAY + timedelta(day)) for day in range(number)]


@pytest.mark.parametrize(("count", "number"), [(3, 4), (4, 3), (1, 10), (10, 1), (40, 1), (1 / 3, 30), (1 / 7, 70)])
def test_every_case_has_its_turn(count: float, number: int) -> None:
    found = days(count, number)
    assert set.union(*found) == set(CASES)
    assert {len(each) for each in found} <= {min(count, 10)} if count >= 1 else {len(each) for each in found} == {0, 1}


def test_a_third_of_a_case_is_one_every_third_day() -> None:
    assert sum(map(len, days(1 / 3, 30))) == 10
    assert len({tuple(map(bool, days(1 / 3, 3, f"test_{name}"))) for name in "abcdefgh"}) == 3, "not all on the same day"


def test_functions_with_the_same_parameters_have_the_same_cases() -> None:
    others = [case.replace("test_y", "test_z") for case in CASES]
    ours, theirs = (turn(name, cases, 2, DAY) for name, cases in (("y", CASES), ("z", others)))
    assert {case.partition("[")[2] for case in ours} == {case.partition("[")[2] for case in theirs}


def test_shares_divide_all_tests_and_take_equally_long() -> None:
    units = Units(("tests/ray",))
    files = [*(f"tests/ray/test_{number}.py" for number in range(6)), *(f"tests/test_{number}.py" for number in range(30))]
    tests = [f"{file}::test_{number}" for file in files for number in range(4)]
    shares = [units.share(tests, number, 6) for number in range(6)]
    assert Counter(test for share in shares for test in share) == Counter(tests)
    assert [sum(map(units.has_ray, share)) for share in shares] == [4] * 6
    assert {len(share) for share in shares} == {24}


def test_a_file_that_takes_long_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    units = Units(("tests/ray",))
    monkeypatch.setattr(units, "_seconds", {"tests/test_long.py": 500.0, "tests/ray/test_long.py": 500.0})
    long, whole = ({units.unit(f"tests/{room}test_long.py::test[{i}]") for i in range(50)} for room in ("", "ray/"))
    assert (len(long), len(whole)) == (3, 1)
    assert units.seconds("tests/test_long.py") == pytest.approx(500 / 3)
