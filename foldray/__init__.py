"""foldray: Mixture-of-Experts training that hides its communication behind computation.

This package is the engine. It needs torch, numpy, scipy, pydantic and PyYAML.
"""

from foldray.errors import MissingPackage, UserError
from foldray.fold import Fold
from foldray.recipe import Recipe

__version__ = "0.1.0"

__all__ = ["Fold", "MissingPackage", "Recipe", "UserError", "__version__"]
