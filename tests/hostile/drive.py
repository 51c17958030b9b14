"""Drives the command line with hostile inputs: `python -m tests.hostile.drive FOLDER [ROW …]`.

Each row gets a working folder with good files, in which it makes its input. Then the command runs in this process, and one line
of JSON says what came of it. Run it as a separate process, because a fault may use all memory, or end it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import resource
import shlex
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.foldray.hostile import peak_bytes
from tests.hostile.row import CANARY, SECRET, Row
from tests.hostile.table import ROWS

SECONDS, MEMORY = 120, 10 * 2**30  # until a row is ended
SECRETS = ("AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "PGPASSWORD", "HF_TOKEN", "WANDB_API_KEY")
HERE = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "", None)


class TooLong(BaseException):
    """A command did not end in time. No handler of the product catches this."""


def listing(folder: Path) -> dict[str, str]:
    """Return all names below a folder, each with its kind, its size, and the hash of its first bytes."""
    found = dict[str, str]()
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        told = f"{stat.filemode(state.st_mode)} {state.st_size if not stat.S_ISDIR(state.st_mode) else ''}"
        if stat.S_ISREG(state.st_mode):
            with path.open("rb") as file:
                told += hashlib.sha256(file.read(2**22)).hexdigest()
        elif stat.S_ISLNK(state.st_mode):
            told += os.readlink(path)
        found[str(path.relative_to(folder))] = told
    return found


@contextlib.contextmanager
def captured(into: Path) -> Any:
    """Redirect this process's standard output and error into files `out` and `err` of a folder."""
    sys.stdout.flush(), sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    for number, name in ((1, "out"), (2, "err")):
        with (into / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        for number, old in enumerate(before, 1):
            os.dup2(old, number)
            os.close(old)


def run(command: list[str]) -> int | str:
    """Return the exit code of a command, or the traceback of what it raised."""
    from foldray.cli import main

    signal.alarm(SECONDS)
    try:
        return main(command)
    except BaseException:
        return traceback.format_exc(limit=-6)
    finally:
        signal.alarm(0)


def outcome(row: Row, root: Path, good: Path, calls: Calls) -> dict[str, Any]:
    """Make the input of a row, run its command, and return what came of it."""
    work, logs = root / "work" / "place", root / "logs"
    shutil.rmtree(work.parent, ignore_errors=True)
    shutil.copytree(good, work, symlinks=True)
    row.make(work)
    os.chdir(work)
    sys.path[0] = str(work)  # as with `python -m foldray`
    sys.modules.pop("own", None)
    importlib.invalidate_caches()
    watched = [root / "work", root / "home", root / "tmp"]
    before, secrets = [listing(each) for each in watched], [secret_files(each) for each in watched]
    began = time.process_time()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    resting = peak_bytes()
    calls.clear()
    with captured(logs):
        code = run(shlex.split(row.command))
    seconds, grown = time.process_time() - began, peak_bytes() - resting
    after = [listing(each) for each in watched]
    out, err = ((logs / name).read_bytes().decode(errors="backslashreplace") for name in ("out", "err"))
    changes = [f"{path}: {was.get(path)} → {now.get(path)}" for was, now in zip(before, after, strict=True)
               for path in was.keys() | now.keys() if was.get(path) != now.get(path)]  # fmt: skip
    told = SECRET in out + err or any(secret_files(folder) - given for folder, given in zip(watched, secrets, strict=True))
    return {
        "code": code, "out": out, "err": err, "changes": changes, "seconds": seconds, "grown": grown,
        "ran": (work / CANARY).exists(), "secret": told, "calls": [*calls],
    }  # fmt: skip


def secret_files(folder: Path) -> set[str]:
    """Return the files below a folder that hold the secret."""
    small = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 2**26)
    return {str(path.relative_to(folder)) for path in small if SECRET.encode() in path.read_bytes()}


class Calls(list[str]):
    """The addresses beyond this machine that Python code has connected to, or looked up."""

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.getaddrinfo"):
            address = arguments[1] if event == "socket.connect" else arguments[0]
            host = address[0] if isinstance(address, tuple) else address
            if host not in HERE and not str(host).startswith("/"):
                self.append(str(host))


def _stop(*_: Any) -> None:
    raise TooLong


def hurried() -> None:
    """Take Ray away, because rows must be refused before a cluster does anything, and shorten a wait.

    matplotlib writes a list of fonts when it is imported for the first time, which is no fault of a row.
    """
    import matplotlib.font_manager  # noqa: F401

    from trainers.cluster import joining
    from trainers.data import chat
    from trainers.driver import trainer

    chat._LONGEST_S = 1.0

    joining.connect = joining.check_room = lambda *_, **__: None  # type: ignore[assignment]
    trainer.ray_configs.check_places = lambda *_: None  # type: ignore[assignment]


def main(root: Path, *names: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, _stop)
    for name in ("home", "tmp", "logs"):
        (root / name).mkdir()
    os.environ |= {"HOME": str(root / "home"), "TMPDIR": str(root / "tmp")} | dict.fromkeys(SECRETS, SECRET)
    tempfile.tempdir = None
    from tests.hostile.good import make_good

    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed says there which device it has found
        make_good(root / "good")
    hurried()
    calls = Calls()
    sys.addaudithook(calls.hear)
    for row in ROWS:
        if not names or f"{row.kind}: {row.name}" in names:
            print(json.dumps({"row": f"{row.kind}: {row.name}", **outcome(row, root, root / "good", calls)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
