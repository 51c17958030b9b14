"""Try the cases of `foldray verify --all` on DeepSpeed's AutoEP and on the `DistributedConfig` of transformers.

    pip install accelerate
    python recipes/benchmarks/peers.py [--projects deepspeed transformers] [--cases NAME ...] [--json FILE]

transformers needs accelerate to load a model onto several ranks. foldray does not need it.

Every case is a tiny random model of transformers, over several ranks on this machine (CPU, gloo). The script compares the loss,
every gradient, the gradient norm and the loss of an evaluation with one process of the same model. A case that fails, or that
takes longer than --limit, is a row of the table.

A project may define its loss as a mean over ranks, not over tokens. So the script also compares with the mean over ranks and
micro-batches of the loss of each. The table has the differences to the loss over all tokens, and says whether the others agree.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from peers_cases import CASES, Case, make_model
from peers_worker import LAYOUTS, compare

AGREES = {"float64": 1e-6, "float32": 2e-5, "float16": 2e-2}  # rounding stays below; routers compute in float32 at most
FIGURES = ("loss", "gradient", "norm", "evaluation")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--projects", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS), metavar="PROJECT")
    parser.add_argument("--layouts", nargs="*", metavar="LAYOUT", help="layouts by name; all by default")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="time of a case (default %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=list(AGREES), help="DeepSpeed takes float32 (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that ranks end with this process
    prepare(args.projects)
    rows = []
    for project in args.projects:
        for layout in args.layouts or LAYOUTS[project]:
            rows += [tried(project, layout, name, args) for name in args.cases if offered(project, layout, name)]
    versions = {name: version(name) for name in ("torch", *LAYOUTS)}
    report(rows, versions)
    if args.json:
        args.json.write_text(json.dumps({"command": " ".join(sys.argv), "versions": versions, "rows": rows}, indent=1) + "\n")


def prepare(projects: list[str]) -> None:
    """Import what all ranks need. They are forked, so they need not import it again."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    for module in (*projects, "torch.distributed.tensor", "torch.distributed.fsdp", "transformers.trainer", "torch._dynamo"):
        importlib.import_module(module)
    for case in CASES.values():
        make_model(case, torch.float32)


def offered(project: str, layout: str, name: str) -> bool:
    """Say whether to try a case. The flag of transformers fails for one reason, so a single case shows it."""
    return layout in LAYOUTS[project] and (not LAYOUTS[project][layout].flag or name == "as it is")


def tried(project: str, layout: str, name: str, args: argparse.Namespace) -> Row:
    """Run a case on a project. Run it again with a repair if the project does not fit the installed transformers."""
    case, row = CASES[name], {"project": project, "layout": layout, "case": name}
    dtype, limit = getattr(torch, args.dtype), args.limit
    if case.missing:
        return row | {"runs": "no feature", "remark": case.missing}
    row |= run(project, layout, case, dtype, False, limit)
    if "_CanRecordRegistry" in row.get("error", ""):
        row |= {"repaired": row["error"], "error": ""} | run(project, layout, case, dtype, True, limit)
    row |= judged(row, AGREES[args.dtype])
    print(f"{project}, {layout}, {name}: {row['runs']}", file=sys.stderr)
    return row


def run(project: str, layout: str, case: Case, dtype: torch.dtype, repair: bool, limit: float) -> Row:
    """Run a case on forked ranks. Return its differences, or the error of the first rank that failed."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder, size = Path(name), LAYOUTS[project][layout].tp * LAYOUTS[project][layout].dp
        processes = [
            fork.Process(target=rank, args=(number, size, project, layout, case, dtype, repair, folder)) for number in range(size)
        ]
        try:
            for process in processes:
                process.start()
            deadline = time.monotonic() + limit
            while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
                time.sleep(0.1)
                if any(folder.glob("*.error")):
                    deadline = min(deadline, time.monotonic() + 5)  # the others wait for the rank that failed
            late = [process for process in processes if process.is_alive()]
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
        if errors:
            text = errors[0].read_text()
            print(text, file=sys.stderr)
            return {"error": text}
        if late or not (folder / "result.json").exists():
            print(*(path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("*.log"))), sep="\n", file=sys.stderr)
            words = f"{len(late)} of {size} ranks did not end in {limit:.0f} s" if late else "a rank ended without a word"
            return {"error": words}
        return json.loads((folder / "result.json").read_text())


def rank(number: int, size: int, project: str, layout: str, case: Case, dtype: torch.dtype, repair: bool, folder: Path) -> None:
    """Be one rank of a case."""
    log = os.open(folder / f"{number}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    code = 0
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=size)
        result = compare(project, LAYOUTS[project][layout], case, dtype, repair, folder)
        dist.barrier()
        if number == 0:
            (folder / "result.part").write_text(json.dumps(result))
            (folder / "result.part").rename(folder / "result.json")
    except BaseException:
        (folder / f"{number}.part").write_text(traceback.format_exc())
        (folder / f"{number}.part").rename(folder / f"{number}.error")
        code = 1
    os._exit(code)  # without the end of process groups, for which others may wait


def judged(row: Row, tolerance: float) -> Row:
    """Say in a word whether a case runs, and in a sentence what came out."""
    if row.get("error"):
        return {"runs": "no", "remark": told(row["error"])}
    apart = {
        name: [f"{figure} {short(row[name][figure])}" for figure in FIGURES if not row[name][figure] <= tolerance]
        + [f"no {each}" for each in row[name]["missing"]]
        for name in ("tokens", "means")
    }
    if len(apart["means"]) < len(apart["tokens"]):
        remark = "It is the mean of the losses of the ranks" + (f", but {', '.join(apart['means'])}." if apart["means"] else ".")
    else:
        remark = f"It differs: {', '.join(apart['tokens'])}." if apart["tokens"] else "It agrees."
    return {"runs": "repaired" if "repaired" in row else "yes", "remark": remark}


def told(error: str) -> str:
    """Return the first line of an error's message, and the last line of the project's code before it."""
    places = re.findall(r'site-packages/((?:deepspeed|transformers)/\S+)", line (\d+)', error)
    message = next((line for line in error.splitlines() if re.match(r"[\w.]+(Error|Exception)", line)), error.splitlines()[-1])
    return f"{message} ({places[-1][0]}:{places[-1][1]})" if places else message


def short(value: float) -> str:
    """Write a difference with one digit."""
    return f"{value:.0e}".replace("e-0", "e-").replace("0e+00", "0")


def report(rows: list[Row], versions: dict[str, str]) -> None:
    """Print the table, as Markdown."""
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    print(f"| project | layout | case | runs | {' | '.join(FIGURES)} | remark |\n|---|---|---|---|---:|---:|---:|---:|---|")
    for row in rows:
        figures = [short(row["tokens"][figure]) if "tokens" in row else "" for figure in FIGURES]
        print(f"| {' | '.join([row['project'], row['layout'], row['case'], row['runs'], *figures, row['remark']])} |")


if __name__ == "__main__":
    main()
