"""foldray: Mixture-of-Experts training whose communication is hidden. This floor is the engine; it needs torch alone."""

from foldray.errors import MissingPackage, UserError
from foldray.fold import Fold
from foldray.recipe import Recipe

__version__ = "0.1.0"

__all__ = ["Fold", "MissingPackage", "Recipe", "UserError", "__version__"]
