"""Packages that tests use where they are installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

NO_TUTEL = "Tutel is not installed"


def has_tutel() -> bool:
    return find_spec("tutel") is not None


def tutel_or_skip() -> None:
    if not has_tutel():
        pytest.skip(NO_TUTEL)
