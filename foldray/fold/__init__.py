"""Folds: axes, rank tables, validity, advice. Pure integers."""

from foldray.fold.advice import nearest_folds
from foldray.fold.fold import ATTENTION_AXES, MOE_AXES, Fold, divisors
from foldray.fold.grid import Grid

__all__ = ["ATTENTION_AXES", "MOE_AXES", "Fold", "Grid", "divisors", "nearest_folds"]
