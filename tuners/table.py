"""A table of rows that a search picks from, and how searches see it: sizes on a logarithmic scale, names as categories."""

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
    """Rows, each once."""

    def __init__(self, rows: Iterable[Row]):
        self.rows = list(dict.fromkeys(rows))

    @cached_property
    def number(self) -> dict[Row, int]:
        """Of every row."""
        return {row: number for number, row in enumerate(self.rows)}

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Of every parameter that has a choice."""
        found: dict[str, BaseDistribution] = {}
        for name, values in self._values.items():
            if isinstance(values[0], str):
                found[name] = CategoricalDistribution(values)
            else:
                found[name] = IntDistribution(min(value for value in values if value), values[-1], log=True)
        return found

    @cached_property
    def _values(self) -> dict[str, list[Any]]:
        columns = ((name, sorted({getattr(row, name) for row in self.rows})) for name in self.rows[0]._fields)
        return {name: values for name, values in columns if len(values) > 1}

    def params(self, row: Row) -> dict[str, Any]:
        """A row as a trial's parameters; a size of 0, which means none, counts as the largest there is."""
        return {name: getattr(row, name) if getattr(row, name) != 0 else values[-1] for name, values in self._values.items()}

    @cached_property
    def _by_params(self) -> dict[tuple[tuple[str, Any], ...], Row]:
        return {tuple(self.params(row).items()): row for row in self.rows}

    def row(self, params: Mapping[str, Any]) -> Row:
        """The row that a trial's parameters stand for."""
        return self._by_params[tuple((name, params[name]) for name in self._values)]

    @cached_property
    def features(self) -> np.ndarray:
        """[rows, features]: logarithms of sizes, one column for each name of a category."""
        return np.array([self.encoded(self.params(row)) for row in self.rows])

    def encoded(self, params: Mapping[str, Any]) -> np.ndarray:
        """A row of `features`."""
        found: list[float] = []
        for name, values in self._values.items():
            own = params[name]
            found += [float(own == value) for value in values] if isinstance(own, str) else [math.log2(own)]
        return np.array(found)
