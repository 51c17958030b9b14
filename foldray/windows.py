"""The table of attention windows. A window says how far back a query sees.

`model.windows` takes names of rows. The windows `sliding` and `chunked` have a size in tokens, as in `sliding:128`.
`module:NAME` names a row in a user's module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from foldray.errors import UserError
from foldray.tables import OWN, find_row

_LARGEST = 2**24  # tokens


class Window(NamedTuple):
    """The keys that queries see: all keys from a first one up to the query itself.

    Args:
        name: the name in recipes.
        first: position of a query → position of the first key that the query sees. This position must not decrease from one
            query to the next. With None, every query sees keys from the beginning of the sequence.
        seen: number of queries → number of pairs of one of the first so many queries and a key that it sees. With None, they are
            counted one by one.
    """

    name: str
    first: Callable[[int], int] | None = None
    seen: Callable[[int], int] | None = None

    def begin(self, query: int) -> int:
        """Return the position of the first key that a query sees."""
        return 0 if self.first is None else self.first(query)

    @lru_cache(maxsize=64)  # noqa: B019 - a window is a row of a table
    def begins(self, length: int) -> tuple[int, ...]:
        """Return `begin` of all queries of a sequence."""
        return tuple(map(self.begin, range(length)))

    def pairs(self, queries: range) -> int:
        """Return the number of pairs of a query and a key that the query sees, over a range of queries."""
        if self.first is None:
            return _triangle(queries.stop) - _triangle(queries.start)
        if self.seen is not None:
            return self.seen(queries.stop) - self.seen(queries.start)
        counted = _counted(self.first, 1 << queries.stop.bit_length())  # as few tables as there are powers of two
        return counted[queries.stop] - counted[queries.start]


def _triangle(queries: int) -> int:
    """Return the number of pairs of so many queries with themselves and all keys before."""
    return queries * (queries + 1) // 2


@lru_cache(maxsize=4)
def _counted(first: Callable[[int], int], queries: int) -> Sequence[int]:
    """Return, for every number up to `queries`, the number of pairs of the first so many queries."""
    return list(accumulate((query - first(query) + 1 for query in range(queries)), initial=0))


def _sliding(size: int) -> Window:
    def seen(queries: int) -> int:
        return _triangle(min(queries, size)) + max(0, queries - size) * size

    return Window(f"sliding:{size}", lambda query: max(0, query - size + 1), seen)


def _chunked(size: int) -> Window:
    def seen(queries: int) -> int:
        return queries // size * _triangle(size) + _triangle(queries % size)

    return Window(f"chunked:{size}", lambda query: query // size * size, seen)


FULL = Window("full")
LINEAR = Window("linear", lambda query: query, lambda queries: 0)
"""Blocks of linear attention. Queries see no keys: a state of fixed size stands for all tokens before (`kernels/delta.py`)."""
SIZED: Mapping[str, Callable[[int], Window]] = {"sliding": _sliding, "chunked": _chunked}
"""Windows with a size. With `sliding`, a query sees the newest keys (Mistral 7B, arXiv:2310.06825, section 2). With
`chunked`, it sees the keys of its own chunk."""
LEGAL = (FULL.name, LINEAR.name, *(f"{name}:TOKENS" for name in SIZED), OWN)


@lru_cache(maxsize=256)
def find_window(name: str) -> Window:
    """Return a row by its name, or by `module:NAME`."""
    sized = re.fullmatch(r"([a-z]+):(\d{1,9})", name)
    if sized and sized[1] in SIZED:
        if not 1 <= int(sized[2]) <= _LARGEST:
            raise UserError("model.windows", name, f"must have a size from 1 to {_LARGEST} tokens", LEGAL)
        return SIZED[sized[1]](int(sized[2]))
    try:
        return find_row("model.windows", {row.name: row for row in (FULL, LINEAR)}, Window, name)
    except UserError as error:
        raise UserError("model.windows", name, error.rule, LEGAL) from None
