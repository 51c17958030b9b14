"""A row of the tables of hostile inputs, and what rows are made of."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SECRET = "hush-5ecr3t"
"""A password that rows put into addresses, and that the process has in its environment. Nobody may see it again."""
CANARY = "canary"
"""A file in the working folder. Code in an input that runs would make it."""
TOUCH = f"touch {CANARY}"
STEP = "run/step_00000003"
"""The checkpoint of the good run."""
LARGE = 6 * 2**30  # bytes of a file with a hole; a command that reads it whole shows by its memory


class Row(NamedTuple):
    """A hostile input as a user hands it over.

    Args:
        kind: the kind of the input, in the table of `docs/notebook/hostile.md`.
        name: what is hostile about it.
        command: the command line, without `foldray`; `shlex` splits it.
        says: a part of the line that refuses it.
        make: makes the input in the working folder, which has a good recipe, run, model and tokenizer (`drive.py`).
    """

    kind: str
    name: str
    command: str
    says: str
    make: Callable[[Path], Any] = lambda place: None


Make = Callable[[Path], Any]


def text(name: str, content: str | bytes) -> Make:
    """Write a file, whose folder exists."""

    def make(place: Path) -> None:
        (place / name).unlink(missing_ok=True)
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def changed(name: str, **keys: Any) -> Make:
    """Change keys of a JSON file."""

    def make(place: Path) -> None:
        found = json.loads((place / name).read_text())
        (place / name).write_text(json.dumps(found | keys))

    return make


def hole(name: str, size: int = LARGE, head: bytes = b"") -> Make:
    """Make a file that is one hole behind its first bytes."""

    def make(place: Path) -> None:
        with (place / name).open("wb") as file:
            file.write(head)
            file.truncate(size)

    return make


def cut(name: str, size: int) -> Make:
    return lambda place: os.truncate(place / name, size)


def fifo(name: str) -> Make:
    """Make a pipe. Whoever opens it to read waits for a writer."""

    def make(place: Path) -> None:
        (place / name).unlink(missing_ok=True)
        os.mkfifo(place / name)

    return make


def listening(name: str) -> Make:
    """Make a socket."""

    def make(place: Path) -> None:
        (place / name).unlink(missing_ok=True)
        os.chdir(place)  # an address of a socket is short
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(name)

    return make


def linked(name: str, to: str) -> Make:
    def make(place: Path) -> None:
        (place / name).unlink(missing_ok=True)
        (place / name).symlink_to(to)

    return make


def folder(name: str) -> Make:
    def make(place: Path) -> None:
        (place / name).unlink(missing_ok=True)
        (place / name).mkdir()

    return make


def both(*makes: Make) -> Make:
    return lambda place: [make(place) for make in makes]


def deep(levels: int = 200_000) -> str:
    """Return JSON that is nested so deeply that a recursive reader exhausts the stack."""
    return "[" * levels
