"""Checks the engine on a GPU, and measures what the CPU cannot show.

    python tests/gpu/check.py [PART …] [--out FOLDER]

The parts are `correct`, `waits`, `ranks`, `fused`, `graphs`, `kernels`, `block`, `activations`, `host`, `network` and `planner`;
all by default.
Findings go to the terminal and, as JSON, to FOLDER/findings.json. A GPU machine may have torch but neither Ray nor test packages,
so the parts are plain modules.
Without a GPU the script says so and exits with 0.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

PARTS = ("correct", "waits", "ranks", "fused", "graphs", "kernels", "block", "activations", "host", "network", "planner")


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the engine on a GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--out", type=Path, help="folder for findings.json")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}; legal are {', '.join(PARTS)}")
    try:
        import torch
    except ModuleNotFoundError:
        print(f"{sys.executable} has no torch: pip install torch numpy scipy pydantic PyYAML, or name another PYTHON=…")
        return 2
    if not torch.cuda.is_available():
        print("no GPU here: nothing checked")
        return 0
    from tests.gpu.report import Report

    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report(given.out)
    for part in given.parts or PARTS:
        report.say(f"== {part}")
        importlib.import_module(f"tests.gpu.{part}").run(report)
        torch.cuda.empty_cache()
    checks = sum(len(each) for each in report.found.values() if isinstance(each, dict))
    print(f"{checks - report.failed} passed, {report.failed} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
