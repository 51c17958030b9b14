"""Tables whose rows a search picks. For the search, sizes have a logarithmic scale, and names are categories."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

Row = TypeVar("Row", bound=NamedTuple)
"""A named tuple of whole numbers and names."""


class Table(Generic[Row]):
    """A list of distinct rows.

    A column with more than one value is a parameter of Optuna's trials; the other columns are not. A size of 0 means "none".
    In a trial's parameters the largest size of the column stands for it.
    """

    def __init__(self, rows: Iterable[Row]):
        self.rows = list(dict.fromkeys(rows))

    def within_reach(self, rows: Iterable[int], seconds: Mapping[int, float | None]) -> list[int]:
        """Return the rows that may be tried next: all of them.

        Args:
            seconds: by row that was tried, the seconds of a step; None if it failed.
        """
        return list(rows)

    @cached_property
    def number(self) -> dict[Row, int]:
        """The index of every row in `rows`."""
        return {row: number for number, row in enumerate(self.rows)}

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        return {name: _distribution(values) for name, values in self._values.items()}

    @cached_property
    def _values(self) -> dict[str, list[Any]]:
        columns = ((name, sorted({getattr(row, name) for row in self.rows})) for name in self.rows[0]._fields)
        return {name: values for name, values in columns if len(values) > 1}

    def params(self, row: Row) -> dict[str, Any]:
        """Return a row as the parameters of a trial."""
        return {name: getattr(row, name) if getattr(row, name) != 0 else values[-1] for name, values in self._values.items()}

    def find(self, params: Mapping[str, Any]) -> int | None:
        """Return the index of the row with a trial's parameters; None if no row has them."""
        return self._number_by_params.get(tuple(params.get(name) for name in self._values))

    def row(self, params: Mapping[str, Any]) -> Row:
        return self.rows[self._number_by_params[tuple(params[name] for name in self._values)]]

    @cached_property
    def _number_by_params(self) -> dict[tuple[Any, ...], int]:
        return {tuple(self.params(row).values()): number for number, row in enumerate(self.rows)}

    @cached_property
    def features(self) -> np.ndarray:
        """The rows as an array [rows, features]: logarithms of sizes, and one column of 0 and 1 for every name."""
        return np.array([self.encode(self.params(row)) for row in self.rows])

    def encode(self, params: Mapping[str, Any]) -> np.ndarray:
        """Return the parameters of a trial as an array [features]."""
        features: list[float] = []
        for name, values in self._values.items():
            value = params[name]
            features += [float(value == name) for name in values] if isinstance(value, str) else [math.log2(value)]
        return np.array(features)


def _distribution(values: list[Any]) -> BaseDistribution:
    if isinstance(values[0], str):
        return CategoricalDistribution(values)
    return IntDistribution(min(value for value in values if value), values[-1], log=True)
