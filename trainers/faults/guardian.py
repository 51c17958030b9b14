"""Starts `foldray train` in a process of its own, and again if that process is lost.

If the head or the node of a Ray cluster is lost, Ray ends the processes that have joined it, with traces of its own and
without an exception. The kernel ends processes if memory runs out. So a parent waits for the training, tells what has
happened, and lets the run go on from its last checkpoint.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainers.faults.attempts import Attempt, Failure, GoOn, decide

_FILE, _RESUME, _LIFE, _HOLDER = (f"FOLDRAY_GUARD_{name}" for name in ("FILE", "RESUME", "LIFE", "HOLDER"))
_STEP = re.compile(r".*step_(\d+)")
_MOST = 3  # lost processes without a new checkpoint between them
_LEFT_S = 5.0  # for processes that a lost one has left, to end by themselves
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER of Linux


def is_guarded() -> bool:
    """Whether this process has a parent that guards it."""
    return _FILE in os.environ


def run_to_resume() -> str | None:
    """Return the id of the run that the parent wants to go on; None for the one of the command."""
    return os.environ.get(_RESUME)


def holder() -> str:
    """Return the name with which this driver takes a run's lease. Drivers that a parent starts one after another share it."""
    return os.environ.get(_HOLDER) or secrets.token_hex(8)


def tell(**facts: Any) -> None:
    """Tell the parent something, if there is one: `run` and `folder` of the run, and `ended`, the exit code, at the end."""
    if path := os.environ.get(_FILE):
        with Path(path).open("a") as file:
            file.write(json.dumps(facts) + "\n")


def watch_parent() -> None:
    """Send this process SIGTERM when its parent is gone."""
    if life := os.environ.get(_LIFE):
        threading.Thread(target=_wait_for_end, args=(int(life),), daemon=True).start()


def _wait_for_end(life: int) -> None:
    with suppress(OSError):
        os.read(life, 1)  # returns when the other end is closed
        os.kill(os.getpid(), signal.SIGTERM)


def guard(arguments: Sequence[str]) -> int:
    """Run `foldray ARGUMENTS` in another process until it ends by itself, and return its exit code."""
    attempts: list[Attempt] = []
    resume: str | None = None
    holds = secrets.token_hex(8)
    while True:
        with tempfile.TemporaryDirectory(prefix="foldray-guard-") as place:
            code, facts, asked = _run(arguments, Path(place, "facts"), resume, holds)
        if "ended" in facts:
            return int(facts["ended"])
        if asked is not None:
            again = f"; to go on: foldray train RECIPE --resume {facts['run']}" if _began(facts) else ""
            print(f"foldray: the process of the training ended before it had stopped in order{again}", file=sys.stderr)
            return 128 + asked
        what = f"the process of the training was lost ({_ended(code)}): Ray's head or node ended it, or memory ran out"
        if "run" not in facts:
            print(f"foldray: {what}, before the run began", file=sys.stderr)
            return 1
        reached, saved = _progress(Path(facts["folder"]))
        attempts.append(Attempt(reached, saved, Failure("lost", what)))
        if not isinstance(decide(attempts, _MOST), GoOn):
            again = f"foldray train RECIPE --resume {facts['run']}"
            print(f"foldray: {what}, {len(attempts)} times; after the cause is gone: {again}", file=sys.stderr)
            return 1
        if not _began(facts):  # its data were not prepared yet
            print(f"foldray: {what}; the command begins again", file=sys.stderr)
            continue
        resume = str(facts["run"])
        print(f"foldray: after step {reached}, {what}; run {resume} goes on from its last checkpoint", file=sys.stderr)


def _began(facts: Mapping[str, Any]) -> bool:
    """Whether there is a run to go on with."""
    return "folder" in facts and Path(facts["folder"], "recipe.yaml").exists()


def _run(arguments: Sequence[str], file: Path, resume: str | None, holds: str) -> tuple[int, dict[str, Any], int | None]:
    """Run the command once. Return how its process ended, what it has told, and the first signal that was passed on to it."""
    ours, theirs = os.pipe()
    env = {**os.environ, _FILE: str(file), _LIFE: str(ours), _HOLDER: holds, **({_RESUME: resume} if resume else {})}
    command, before = [sys.executable, "-m", "foldray", *arguments], _children()
    _adopt(True)
    # In a process group of its own, it gets a Ctrl-C from its parent alone.
    with subprocess.Popen(command, env=env, pass_fds=[ours], process_group=0) as process:
        os.close(ours)
        with _forwarding(process) as passed:
            code = process.wait()
    os.close(theirs)
    facts = _facts(file)
    if "ended" not in facts:
        _end_left(before)
    _adopt(False)
    return code, facts, passed[0] if passed else None


def _adopt(wanted: bool) -> None:
    """Become the parent of processes whose parent ends, or stop being so. Only Linux has this."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_ADOPT, int(wanted), 0, 0, 0)


def _end_left(before: set[int]) -> None:
    """End what a lost process has left behind, apart from the children that this process had before.

    Ray's agents end with their node, but if its head is lost as well, they may try to tell it for ever.
    """
    began, asked = time.monotonic(), set[int]()
    while (left := _children() - before) and time.monotonic() - began < 2 * _LEFT_S:
        late = time.monotonic() - began > _LEFT_S
        for child in left:
            with suppress(OSError):
                if late or child not in asked:
                    os.kill(child, signal.SIGKILL if late else signal.SIGTERM)
                os.waitpid(child, os.WNOHANG)
        asked |= left
        time.sleep(0.1)


def _children() -> set[int]:
    """Return the processes whose parent is this one, on a system with /proc."""
    children = set[int]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((process / "stat").read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                children.add(int(process.name))
    return children


def _facts(file: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        facts |= json.loads(line)
    return facts


@contextmanager
def _forwarding(process: subprocess.Popen) -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on to a process, and note them."""
    passed: list[int] = []

    def forward(number: int, _: Any) -> None:
        passed.append(number)
        process.send_signal(number)

    before: Mapping[int, Any] = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield passed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _progress(run: Path) -> tuple[int, int]:
    """Return the last step of a run and that of its last checkpoint, by its `run.json`; 0 if they are not known."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        document = json.loads((run / "run.json").read_text())
        checkpoint = _STEP.search(document.get("checkpoint") or "")  # a path or a URI, perhaps with a query
        return int(document.get("steps") or 0), int(checkpoint[1]) if checkpoint else 0
    return 0, 0
