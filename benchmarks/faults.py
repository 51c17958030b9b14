"""Hurts trainings in every way of `tests/lab/faults.py` or `tests/lab/host_faults.py`, and prints what came of it.

    python benchmarks/faults.py --json faults.jsonl

A training of 120 steps with a checkpoint every 10 steps is hurt before its workers exist, while they start, in mid-run, or
while a checkpoint is written. The table has what foldray told, the seconds from the fault to the first new step (or to the end),
the steps that ran again, and what is not as it has to be. It needs root for full disks and for hosts.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path

import common  # noqa: F401
from rich.console import Console
from rich.table import Table

from tests.lab.faults import FAULTS
from tests.lab.host_faults import HOST_FAULTS, on_hosts
from tests.lab.hurt import MOMENTS, Outcome, here, hurt, undisturbed

_ALL = ("begin", *MOMENTS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PATTERN", help="hurt only in ways whose name matches")
    parser.add_argument("--moment", choices=_ALL, action="append", help="only at this moment; may be given again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append every outcome to this file, a line each")
    parser.add_argument("--hosts", action="store_true", help="train on three hosts (network namespaces), and hurt these")
    given = parser.parse_args()
    moments, console = given.moment or _ALL, Console(markup=False)
    faults, trainings = (HOST_FAULTS, on_hosts) if given.hosts else (FAULTS, here)
    loss = undisturbed(trainings)
    console.print(f"undisturbed: final loss {loss!r}")
    outcomes: dict[tuple[str, str], Outcome] = {}
    for fault in faults.values():
        for moment in (moment for moment in fault.moments if moment in moments and re.search(given.only, fault.name)):
            outcome = outcomes[fault.name, moment] = hurt(fault, moment, loss, trainings)
            console.print(f"{fault.name}, {moment}: {'; '.join(outcome.wrong) or 'as it has to be'} ({outcome.seconds:.0f} s)")
            if given.json:
                with given.json.open("a") as file:
                    file.write(json.dumps({"fault": fault.name, "moment": moment, **asdict(outcome)}) + "\n")
    console.print(table(outcomes))
    return int(any(outcome.wrong for outcome in outcomes.values()))


def table(outcomes: dict[tuple[str, str], Outcome]) -> Table:
    rows = Table(box=None, pad_edge=False)
    for name in ("fault", "moment", "told", "seconds", "steps lost", "code", "wrong"):
        rows.add_column(name, justify="right" if name in ("seconds", "steps lost", "code") else "left")
    for (fault, moment), outcome in outcomes.items():
        figures = f"{outcome.seconds:.1f}", str(outcome.lost), str(outcome.code)
        rows.add_row(fault, moment, outcome.told or "–", *figures, "; ".join(outcome.wrong) or "nothing")
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
