"""The order in which training takes sequences: a pure function of the seed and a position. Every epoch is a new permutation.

Version 2 computes a permutation of n sequences instead of storing it. A Feistel network permutes the cells of a table with a rows
and b columns, a = ⌈√n⌉ and b = ⌈n / a⌉: a round adds to a cell's row a hash of its column, modulo a, and the next round adds to
its column a hash of its row, modulo b. Whatever lands on a cell behind the first n goes through the network again, until it lands
before (Black and Rogaway, *Ciphers with arbitrary finite domains*, CT-RSA 2002, sections 3 and 4). Fewer than a cells are behind
the first n, so few do.

Version 1 sorts raw random numbers, 8 bytes for every sequence. Trainings that have begun with it go on with it.
"""

from __future__ import annotations

import math

import numpy as np

NEWEST = 2
"""Version of the order that new trainings take. A checkpoint names the version of its training."""
_ROUNDS = 12


class SampleOrder:
    """The sequence at each global sample position. Every epoch is a new permutation of all sequences.

    The sequence at a position depends only on (seed, position, source, version). Random numbers are raw Philox numbers, because
    NumPy promises the same raw numbers in every version, but not the same shuffles.

    Args:
        count: sequences in an epoch.
        source: number of the source in a mixture. Sources have orders of their own, also if they have equally many sequences.
        version: 1 or `NEWEST`.
    """

    def __init__(self, seed: int, count: int, source: int = 0, version: int = NEWEST):
        if count < 1:
            raise ValueError(f"count={count} sequences cannot be ordered")
        self._seed, self._count, self._source, self._version = seed, count, source, version
        self._epoch, self._permutation = -1, np.empty(0, np.int64)

    def __call__(self, start: int, stop: int) -> np.ndarray:
        """Return the sequence indices at global sample positions [start, stop): int64 [stop - start]."""
        pieces = [np.empty(0, np.int64)]
        while start < stop:
            epoch, within = divmod(start, self._count)
            pieces.append(self._of_epoch(epoch, within, min(within + stop - start, self._count)))
            start += len(pieces[-1])
        return np.concatenate(pieces)

    def _of_epoch(self, epoch: int, start: int, stop: int) -> np.ndarray:
        random = np.random.Philox([self._seed, epoch, self._source])
        if self._version > 1:
            return permuted(np.arange(start, stop), self._count, random.random_raw(_ROUNDS))
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, np.argsort(random.random_raw(self._count), kind="stable")
        return self._permutation[start:stop]


def permuted(places: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """Return what a permutation of [0, count), with count ≤ 2⁶², has at some places, int64 [n].

    Each round of the Feistel network has a key, uint64.
    """
    rows = math.isqrt(count - 1) + 1
    columns = -(-count // rows)
    cells = places.astype(np.uint64)
    outside = np.arange(len(cells))
    while len(outside):
        cells[outside] = _through(cells[outside], rows, columns, keys)
        outside = outside[cells[outside] >= count]
    return cells.astype(np.int64)


def _through(cells: np.ndarray, rows: int, columns: int, keys: np.ndarray) -> np.ndarray:
    """Take cells through all rounds. A cell is row · columns + column."""
    row, column = np.divmod(cells, np.uint64(columns))
    for index, key in enumerate(keys):
        if index % 2:
            column = (column + _hashed(row, key) % columns) % columns
        else:
            row = (row + _hashed(column, key) % rows) % rows
    return row * columns + column


def _hashed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return a hash of each value, uint64 [n]: the finalizer of MurmurHash3, in which every bit moves all others."""
    values = values ^ key
    for factor in (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)):
        values = (values ^ (values >> 33)) * factor
    return values ^ (values >> 33)
