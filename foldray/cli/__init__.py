"""The command line. Each command imports the upper floor that it needs inside its function."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from foldray import __version__
from foldray.cli import completion, folds, planning, running
from foldray.cli.arguments import make_parser
from foldray.errors import UserError

_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "train": running.train, "submit": running.submit, "verify": running.verify, "bench": running.bench,
    "timeline": running.timeline, "tune": running.tune, "dashboard": running.dashboard, "calibrate": running.calibrate,
    "generate": running.generate, "eval": running.eval_, "status": running.status, "health": running.health,
    "export-hf": running.export_hf, "import-hf": running.import_hf, "completion": running.complete, "recipes": running.recipes,
    "plan": planning.plan, "slice": folds.slice_, "explain": folds.explain,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    The code is 0 on success, 1 on a failure, 2 on a user's mistake (reported in one line on stderr) and 128 + its number for a
    signal that ends it: 130 on Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters, over which no command may fail
    try:
        parser = make_parser(__version__)
        if completion.ASKED in os.environ:
            completion.answer(parser)
        given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
        return _COMMANDS[given.command](given)
    except UserError as error:
        print(f"foldray: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print("foldray: interrupted", file=sys.stderr)
        return 128 + int(interrupt.args[0] if interrupt.args else signal.SIGINT)  # `Stopping` names the signal


def run() -> int:
    """Run the command of this process, and return its exit code. A training runs in a process that a parent guards."""
    if sys.argv[1:2] != ["train"]:
        return main()
    from trainers.faults import guardian

    if not guardian.is_guarded():
        return guardian.guard(sys.argv[1:])
    guardian.watch_parent()
    code = 1
    try:
        code = main()
    except SystemExit as end:  # of --help
        code = int(end.code or 0)
    finally:
        guardian.tell(ended=code)
    return code
