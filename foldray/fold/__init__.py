"""Folds: axes, rank tables, validity and advice. This package needs no torch."""

from foldray.fold.advice import nearest_folds
from foldray.fold.fold import FAMILIES, Fold, divisors
from foldray.fold.grid import Grid
