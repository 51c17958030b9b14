"""Which driver has a run: a lease, which is a file in the run's folder that one driver at a time writes.

A storage may have no locks, and the clocks of two hosts differ. So the holder writes a new number every few seconds, and another
driver watches, by its own clock alone, whether the file changes. Two drivers that start together may both write it. The holder
reads it again before it writes, so whoever wrote last keeps it, and the other one ends. A driver that stands still cannot end,
so its workers look at the lease before they write a checkpoint.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pydantic import ValidationError

from foldray.errors import UserError
from trainers.folders import UNREACHED, Checked, DamagedFile, Folder, printable

_FILE, _MOST = "driver.json", 4096
_PERIOD_S = 10.0  # between two signs of life
_GONE_S = 60.0  # without one, the holder is gone
_SURE_S = 1.0  # until the lease of a driver that starts at the same time would be there


class _Held(Checked):
    holder: str
    host: str
    pid: int
    beat: int


class Lease:
    """The lease of a run. Use it as a context manager; `take` takes it, and the end of the context gives it back.

    Args:
        field: what the user calls the run.
        holder: the driver. One that starts with the name of a lost one has its lease at once.
        lose: called in a thread if another driver has taken the lease over, as it may if this one stood still for a minute. Then
            `lost` is set.
    """

    def __init__(self, run: Folder, field: str, holder: str, say: Callable[[str], None], lose: Callable[[], None]):
        self._run, self._field, self.holder, self._say, self._lose = run, field, holder, say, lose
        self._beat, self.lost, self._is_new = 0, False, False
        self._leaves = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        self._leaves.set()
        self._thread.join(_PERIOD_S)
        with suppress(*UNREACHED):
            if not self.lost and self._others() is None:
                self._run.remove(_FILE)
                if self._is_new and not self._run.names():  # nothing came of it
                    self._run.delete()

    def take(self) -> None:
        """Take the lease, unless this driver has it. If another one has it, wait until it is gone, for a minute."""
        if self._thread is not None:
            return
        try:
            self._is_new = self._run.names() is None
            if (other := self._others()) is not None:
                self._wait(other)
            self._write()
            if not self._is_new:
                time.sleep(_SURE_S)
            if (other := self._others()) is not None:
                raise self._refused(other)
        except UNREACHED as error:
            raise UserError("cluster.storage", self._run.name, f"does not take the driver's lease ({error})") from None
        self._thread = threading.Thread(target=self._keep, name="foldray-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise a UserError if another driver has taken the lease over."""
        if self.lost:
            rule = "was taken over by another driver, because this one showed no sign of life; that one trains it now"
            raise UserError(self._field, self._run.last, rule)

    def _wait(self, lease: bytes) -> None:
        """Wait until a lease has not changed for so long that its holder is gone, or until it is given back."""
        self._say(f"{self._run.last}: {_told(lease)} has this run; foldray waits for up to {_GONE_S:.0f} s to see if it lives")
        since = time.monotonic()
        while time.monotonic() - since < _GONE_S:
            time.sleep(_PERIOD_S / 10)
            if (now := self._others()) is None:
                return
            if now != lease:
                raise self._refused(now)

    def _refused(self, lease: bytes) -> UserError:
        rule = f"is in the hands of another driver, {_told(lease)}, which shows signs of life; stop that one first"
        return UserError(self._field, self._run.last, rule)

    def _keep(self) -> None:
        """Show signs of life, until the lease is given back or lost. A storage that does not answer is tried again."""
        while not self._leaves.wait(_PERIOD_S):
            with suppress(*UNREACHED):
                if self._others() is not None:
                    self.lost = True
                    self._lose()
                    return
                self._write()

    def _write(self) -> None:
        self._beat += 1
        held = _Held(holder=self.holder, host=platform.node(), pid=os.getpid(), beat=self._beat)
        self._run.write(_FILE, held.model_dump_json().encode())

    def _others(self) -> bytes | None:
        return _others(self._run, self.holder)


class LeaseLost(RuntimeError):
    """Another driver has the run, so the workers of this one may write nothing to it."""


def check_holder(run: Folder, holder: str) -> None:
    """Raise LeaseLost, on a worker, if another driver has taken the run over while this training's own stood still."""
    if (lease := _others(run, holder)) is not None:
        raise LeaseLost(f"{run.last} was taken over by another driver, {_told(lease)}; this training writes no more checkpoints")


def _others(run: Folder, holder: str) -> bytes | None:
    """Return the lease as another driver than `holder` has written it; None without such a lease."""
    with suppress(DamagedFile):
        content = run.read(_FILE, _MOST)
        held = _read(content)
        return None if held and held.holder == holder else content
    return None


def _read(content: bytes) -> _Held | None:
    with suppress(ValidationError):
        return _Held.model_validate_json(content, strict=True)
    return None


def _told(content: bytes) -> str:
    held = _read(content)
    return f"process {held.pid} on {printable(held.host)}" if held else "one that cannot be read"
