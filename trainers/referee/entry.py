"""`foldray verify --peer`: the table of a project's cases."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from foldray.errors import UserError, nearest
from trainers.referee.cases import CASES
from trainers.referee.projects import PROJECTS, Project
from trainers.referee.rank import Peer
from trainers.referee.ranks import run
from trainers.referee.verdicts import FIGURES, judged, short
from trainers.telemetry.records import as_json as to_json

LIMIT_S = 180.0  # of a case


def referee(
    name: str, layouts: Sequence[str] = (), cases: Sequence[str] = (), dtype: str | None = None, as_json: bool = False
) -> int:
    """Run a project's cases on forked ranks of this machine, and print a table. Return 0 once every case has a verdict.

    Args:
        name: a project of `PROJECTS`.
        layouts: some of its layouts; none is all.
        cases: some of its cases; none is all.
        dtype: type of all numbers; None is the project's default.

    Raises:
        UserError: the project has no such layout, case or type. MissingPackage: the project is not installed.
    """
    project = PROJECTS[name]
    (dtype,) = _known("dtype", [dtype] if dtype else project.dtypes[:1], project.dtypes)
    chosen = {each: project.layouts[each] for each in _known("layout", layouts, list(project.layouts))}
    names = _known("case", cases, project.cases)
    pairs = [(layout, case) for layout, how in chosen.items() for case in names if case in (how.cases or names)]
    if not pairs:
        raise UserError(
            "case", cases[0], "is not tried in these layouts", sorted({each for how in chosen.values() for each in how.cases})
        )
    with contextlib.redirect_stdout(sys.stderr):  # projects greet there, and a document is all that programs may read
        kind, version = project.load()
        rows = _rows(name, kind, pairs, dtype)
    told = {"peer": name, "version": version, "tried": project.tried, "torch": torch.__version__, "dtype": dtype}
    print(to_json({**told, "rows": rows}) if as_json else f"{_versions(told, project)}\n{table(rows)}")
    return 0


def _rows(name: str, kind: type[Peer], pairs: Sequence[tuple[str, str]], dtype: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)  # a process with more threads must not fork ranks
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks end with this process
    rows = []
    for layout, case in pairs:
        row = judged(run(kind, PROJECTS[name].layouts[layout], CASES[case], dtype, LIMIT_S), dtype)
        rows.append({"layout": layout, "case": case, **row})
        print(f"{name}, {layout}, {case}: {row['verdict']}", file=sys.stderr)
    return rows


def _known(what: str, given: Sequence[str], legal: Sequence[str]) -> list[str]:
    for each in given:
        if each not in legal:
            raise UserError(what, each, f"is not known for this peer{nearest(each, legal)}", legal)
    return list(dict.fromkeys(given)) or list(legal)


def _versions(told: Mapping[str, Any], project: Project) -> str:
    line = f"{project.package} {told['version']}, torch {told['torch']}, {told['dtype']}, gloo"
    other = f"\nThis is not the version that the page of the referee tells of: {project.tried}."
    return line + (other if told["version"] != project.tried else "")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as a table of Markdown."""
    lines = [f"| layout | case | {' | '.join(FIGURES)} | verdict |", f"|---|---|{'---:|' * len(FIGURES)}---|"]
    for row in rows:
        figures = [short(row.get(figure)) for figure in FIGURES]
        verdict = f"{row['verdict']}: {row['remark']}" if row["remark"] else row["verdict"]
        lines.append(f"| {' | '.join([row['layout'], row['case'], *figures, verdict])} |")
    return "\n".join(lines)
