"""Reads many boxes of a checkpoint's files: every file is opened once, its boxes come in order, and several readers work at once.

A storage takes as long to answer for a small box as for a large one. So boxes that lie one behind the other are read together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

from pyarrow import NativeFile

Place = tuple[str, int, int]
"""A box in a file of tensors: the name of the file, the box's first byte, and its length."""

READERS = 8
_TOGETHER = 32 << 20  # bytes that are read at once, unless a box has more
_AHEAD, _RUNS_AHEAD = 256 << 20, 4 * READERS  # bytes and runs that are read before somebody takes them
_LEAST = timedelta(minutes=30)
_BYTES_PER_S = 10e6


def time_for(size: float) -> timedelta:
    """Return how long the ranks may take to read or to write, if the one that has most has `size` bytes.

    A slow storage gives each of many ranks a few MB/s.
    """
    return _LEAST + timedelta(seconds=size / _BYTES_PER_S)


def read(
    places: Iterable[Place], opens: Callable[[str], NativeFile], checks: Callable[[Place, memoryview], None]
) -> Iterator[tuple[Place, memoryview]]:
    """Yield every place once with its bytes, in the order of places. There are fewer bytes if the file ends before.

    Args:
        opens: opens a file by its name. A thread calls it.
        checks: looks at the bytes of a box. Threads call it, several at once.
    """
    runs = [*runs_of(places)]
    last = {run[0][0]: number for number, run in enumerate(runs)}  # of each file
    files: dict[str, Future[NativeFile]] = {}
    ahead: deque[tuple[int, Future[list[memoryview]]]] = deque()
    pool = ThreadPoolExecutor(READERS, "foldray-reader")

    def taken() -> Iterator[tuple[Place, memoryview]]:
        number, coming = ahead.popleft()
        yield from zip(runs[number], coming.result(), strict=True)
        if last[name := runs[number][0][0]] == number:
            files.pop(name).result().close()

    try:
        for number, run in enumerate(runs):
            name = run[0][0]
            if name not in files:
                files[name] = pool.submit(opens, name)  # a thread begins with it before any that waits for it
            ahead.append((number, pool.submit(_read, files[name], run, checks)))
            while len(ahead) > _RUNS_AHEAD or sum(_length(runs[waiting]) for waiting, _ in ahead) > _AHEAD:
                yield from taken()
        while ahead:
            yield from taken()
    finally:
        pool.shutdown(cancel_futures=True)
        for file in files.values():
            if not file.cancelled() and file.exception() is None:
                file.result().close()


def runs_of(places: Iterable[Place]) -> Iterator[list[Place]]:
    """Yield runs of boxes that lie one behind the other in a file, in the order of places."""
    run: list[Place] = []
    for place in sorted(set(places)):
        if run and (place[:2] != (run[0][0], run[0][1] + _length(run)) or _length(run) + place[2] > _TOGETHER):
            yield run
            run = []
        run.append(place)
    if run:
        yield run


def _length(run: list[Place]) -> int:
    return run[-1][1] + run[-1][2] - run[0][1]


def _read(opened: Future[NativeFile], run: list[Place], checks: Callable[[Place, memoryview], None]) -> list[memoryview]:
    first = run[0][1]
    content = memoryview(opened.result().read_at(_length(run), first))
    boxes = [content[offset - first : offset - first + length] for _, offset, length in run]
    for place, box in zip(run, boxes, strict=True):
        checks(place, box)
    return boxes
