"""The recipe: the one description that every command reads."""

from foldray.recipe.capturing import CAPTURED, needs_grouped_products, told_of_capture, uncaptured
from foldray.recipe.data import DataSpec, SourceSpec
from foldray.recipe.reading import describe
from foldray.recipe.recipe import Recipe, check_trains
from foldray.recipe.sections import EngineSpec, OptimizerSpec
