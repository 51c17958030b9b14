"""What a run leaves in the checkout: a share's row of docs/notebook/nightly.md, and with --seconds those of each file."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime

import pytest

from tests.gate import SECONDS
from tests.pool import repository

PAGE = repository() / "docs" / "notebook" / "nightly.md"
_LEAST_S = 0.1  # of a file whose seconds are worth a line


class Record:
    """A plugin of pytest's that hears of every test.

    Args:
        share: the name of the share that runs, such as 3/16; None if it is another run.
        keeps_seconds: whether the seconds of the files are kept.
    """

    def __init__(self, share: str | None, keeps_seconds: bool):
        self._share, self._keeps_seconds, self._began = share, keeps_seconds, time.monotonic()
        self._seconds, self._outcomes = defaultdict[str, float](float), Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.outcome] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        if self._keeps_seconds:
            known = json.loads(SECONDS.read_text())
            known |= {file: round(seconds, 1) for file, seconds in self._seconds.items() if seconds >= _LEAST_S}
            there = {file: seconds for file, seconds in sorted(known.items()) if (repository() / file).exists()}
            SECONDS.write_text(json.dumps(there, indent=0) + "\n")
        if self._share and self._outcomes:  # not if tests are only listed
            lines = PAGE.read_text().splitlines()
            rows = [self._row() if line.startswith(f"| {self._share} |") else line for line in lines]
            PAGE.write_text("\n".join(rows) + "\n")

    def _row(self) -> str:
        told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=repository(), capture_output=True, text=True)
        counts = " | ".join(str(self._outcomes[outcome]) for outcome in ("passed", "skipped", "failed"))
        minutes = (time.monotonic() - self._began) / 60
        when = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
        return f"| {self._share} | {when} | {told.stdout.strip()} | {os.cpu_count()} | {minutes:.1f} | {counts} |"
