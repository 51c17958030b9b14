"""Results that the ranks of one job on one device share.

The key of a table has everything that its results depend on, beside the arguments of the functions whose results it keeps: a
kind of op with the sizes of its groups, all ops of a rank, or a fold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar


class Table(defaultdict[Hashable, Any]):
    """Results by function, then by arguments."""

    def __init__(self) -> None:
        super().__init__(dict)


Rank = TypeVar("Rank")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Memo(defaultdict[Hashable, Table]):
    """All tables of one job on one device, by their keys."""

    def __init__(self) -> None:
        super().__init__(Table)


def shared(
    table_of: Callable[[Rank], Table],
) -> Callable[[Callable[Concatenate[Rank, Arguments], Result]], Callable[Concatenate[Rank, Arguments], Result]]:
    """Return a decorator for functions of a rank, which computes a result once for all ranks with the same table (`table_of`).

    The other arguments must be hashable.
    """

    def decorate(function: Callable[Concatenate[Rank, Arguments], Result]) -> Callable[Concatenate[Rank, Arguments], Result]:
        @wraps(function)
        def known(rank: Rank, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            # A search asks millions of times, so a question makes no new key.
            results, key = table_of(rank)[function], (*args, *kwargs.items()) if kwargs else args
            result: Result | None = results.get(key)
            if result is None:
                result = results[key] = function(rank, *args, **kwargs)
            return result

        return known

    return decorate
